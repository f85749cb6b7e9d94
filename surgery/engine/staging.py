"""Where an output grows before it has its name: staging directory, lock, and the publishing rename.

A directory at OUT is whole or not there. Work goes to the sibling `.<name>.surgery-partial`; where OUT is a mount
point or its parent cannot be written, inside OUT, and then the manifest moves in last: a directory without
`surgery.json` is not finished.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import xxhash

from surgery import kernel
from surgery.engine.journal import JOURNAL_PREFIX, forget_journals
from surgery.errors import OutputError, UsageError
from surgery.manifest import MANIFEST_NAME, ManifestHead, read_head
from surgery.plan_check import is_plain

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK_NAME = "lock"
CONTENT_NAME = "content"
PUBLISHING_NAME = "publishing.json"
REPLACED_NAME = "replaced"
MAX_NAME_NBYTES = 255
PARTIAL_SUFFIX = ".surgery-partial"


class Staging:
    """The staging directory of one output, locked while it is entered.

    `content` holds the files under their final names; journals and the lock lie beside it.
    """

    def __init__(self, out: Path, *, overwrite: bool, sources: list[Path]) -> None:
        self.out = _resolved(out)
        for source in sources:
            _refuse_inside(self.out, source)
        self.replaces = False
        self._judge_out(overwrite)
        self.inside = self._must_stage_inside()
        self.path = _staging_paths(self.out)[self.inside]
        self.content = self.path / CONTENT_NAME
        self._lock: int | None = None

    def _judge_out(self, overwrite: bool) -> None:
        if not os.path.lexists(self.out):
            return
        if not self.out.is_dir():
            raise OutputError("a file is in the place of the output directory", str(self.out), "name another OUT")
        entries = sorted(entry.name for entry in self.out.iterdir() if entry.name != PARTIAL_SUFFIX)
        if not entries or entries == ["lost+found"]:
            return
        moving = _publishing(self.out)
        if moving is not None and not set(_files(self.out)) - {*moving["old"], *moving["new"]}:
            return
        if not overwrite:
            raise OutputError(
                f"the output directory exists and holds {len(entries)} entries, first {entries[0]}",
                str(self.out),
                "name a directory that does not exist, or --overwrite an earlier output of surgery",
            )
        if (self.out / MANIFEST_NAME).exists() and read_head(self.out) is None:
            raise OutputError(
                "its surgery.json is damaged, so nobody can say what surgery wrote there",
                str(self.out),
                "move the directory away, or name another OUT",
            )
        self._refuse_foreign()
        self.replaces = True

    def _refuse_foreign(self) -> None:
        foreign = foreign_files(self.out)
        if foreign:
            raise OutputError(
                f"--overwrite replaces only what surgery wrote; {len(foreign)} other files, first {foreign[0]}",
                str(self.out),
                "move them away, or name another OUT",
            )

    def _must_stage_inside(self) -> bool:
        if self.out.exists() and (os.path.ismount(self.out) or _stands_in(self.out)):
            return True
        parent = self.out.parent
        if not parent.is_dir():
            raise OutputError("the directory that OUT would lie in does not exist", str(parent), f"mkdir -p {parent}")
        if os.access(parent, os.W_OK | os.X_OK):
            return False
        if self.out.is_dir() and os.access(self.out, os.W_OK | os.X_OK):
            return True
        raise OutputError("no permission to write there", str(parent), "name an OUT in a directory of yours")

    def __enter__(self) -> Staging:
        try:
            for _ in range(3):
                self.path.mkdir(exist_ok=True)
                self.content.mkdir(exist_ok=True)
                self._lock = _locked(self.path)
                if self._lock is not None and _is_there(self._lock, self.path / LOCK_NAME):
                    break
                # A run that ended removed the directory between our opening and locking.
                self.__exit__(None, None, None)
        except OSError as error:
            raise OutputError(
                f"cannot make the staging directory: {error.strerror}",
                str(self.path),
                "check space and permissions",
            ) from error
        if self._lock is None:
            raise OutputError(
                "another run is writing this output", str(self.path), "wait for it to end, or name another OUT"
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def remove(self) -> None:
        """Delete the staging directory: nothing in it is worth resuming."""
        shutil.rmtree(self.path, ignore_errors=True)

    def remove_if_idle(self) -> None:
        """Delete it where no run has finished anything in it."""
        if not any(self.path.glob(f"{JOURNAL_PREFIX}*")):
            self.remove()

    def start_afresh(self) -> None:
        """Forget whatever lies here, durably, before the directory is bound to another plan."""
        forget_journals(self.path)
        self.clear_surplus(set())
        (self.path / PUBLISHING_NAME).unlink(missing_ok=True)
        for directory in (self.content, self.path):
            kernel.sync_directory(directory)

    def clear_surplus(self, names: set[str]) -> None:
        """Remove what an earlier run left in `content` that this plan does not have."""
        for path in sorted(self.content.rglob("*"), reverse=True):
            relative = path.relative_to(self.content).as_posix()
            if not path.is_dir() and relative not in names:
                path.unlink()

    def publish(self) -> str:
        """Give the output its name. Returns a note where that could not be one step."""
        for directory in {self.content, *(path for path in self.content.rglob("*") if path.is_dir())}:
            kernel.sync_directory(directory)
        if self.replaces:
            self._refuse_foreign()
            self._keep_modes()
        if self.replaces and not self.inside:
            # From the exchange on, the old output lies in `content`: no journal may speak of it.
            forget_journals(self.path)
            kernel.sync_directory(self.path)
        note = self._publish_inside() if self.inside else self._publish_sibling()
        displaced = self.path / REPLACED_NAME if (self.path / REPLACED_NAME).exists() else self.content
        if self.replaces and displaced.is_dir() and (foreign := foreign_files(displaced)):
            # Somebody wrote into the old output at the last moment: that is not ours to delete.
            return f"{foreign[0]} came into the old output meanwhile; it is kept in {displaced}"
        self.remove()
        return note

    def _keep_modes(self) -> None:
        """An overwritten output keeps the modes that its owner gave it (case I06)."""
        for path in (self.out, *self.out.rglob("*")):
            twin = self.content / path.relative_to(self.out)
            if twin.exists() and not path.is_symlink():
                twin.chmod(stat.S_IMODE(path.stat().st_mode))

    def _publish_sibling(self) -> str:
        note = ""
        if not self.replaces:
            if self.out.is_dir() and (self.out / PARTIAL_SUFFIX).is_dir():
                shutil.rmtree(self.out / PARTIAL_SUFFIX)
            self.content.rename(self.out)
        elif not kernel.exchange(self.content, self.out):
            old = self.path / REPLACED_NAME
            self.out.rename(old)
            self.content.rename(self.out)
            note = "this filesystem cannot exchange two directories: the old output was gone for a moment"
        kernel.sync_directory(self.out.parent)
        return note

    def _publish_inside(self) -> str:
        new = sorted(p.relative_to(self.content).as_posix() for p in self.content.rglob("*") if not p.is_dir())
        head = read_head(self.out) if self.replaces else None
        old = [MANIFEST_NAME, *head.file_names()] if head is not None else []
        with (self.path / PUBLISHING_NAME).open("w") as file:
            json.dump({"old": old, "new": new}, file)
            file.flush()
            os.fsync(file.fileno())
        kernel.sync_directory(self.path)
        for name in old:
            # The manifest first: without it the directory counts as unfinished while its files change.
            (self.out / name).unlink(missing_ok=True)
        for name in sorted(new, key=lambda name: name == MANIFEST_NAME):
            if name == MANIFEST_NAME:
                kernel.sync_directory(self.out)
            (self.out / name).parent.mkdir(parents=True, exist_ok=True)
            (self.content / name).rename(self.out / name)
        kernel.sync_directory(self.out)
        return "OUT could not be renamed into place (a mount point, or where you stand): its files were moved in"

    def undo_publishing(self) -> None:
        """A run of this plan was killed while it moved files into OUT: take them back, to publish anew."""
        moving = _publishing(self.out) if self.inside else None
        if moving is None:
            return
        for name in moving["new"]:
            if (self.out / name).is_file() and not (self.content / name).exists():
                (self.content / name).parent.mkdir(parents=True, exist_ok=True)
                (self.out / name).rename(self.content / name)
        for name in moving["old"]:
            (self.out / name).unlink(missing_ok=True)
        (self.path / PUBLISHING_NAME).unlink()


def _staging_paths(out: Path) -> tuple[Path, Path]:
    """Where the output grows: beside OUT, and inside it."""
    beside = f".{out.name}{PARTIAL_SUFFIX}"
    if len(os.fsencode(beside)) > MAX_NAME_NBYTES:
        beside = f".{xxhash.xxh3_64_hexdigest(os.fsencode(out.name))}{PARTIAL_SUFFIX}"
    return out.parent / beside, out / PARTIAL_SUFFIX


def _locked(staging: Path) -> int | None:
    """A handle that holds the staging directory's lock; None where another process holds it."""
    descriptor = os.open(staging / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)
    if fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
    return descriptor


def _stands_in(out: Path) -> bool:
    """Whether we, and so the shell that started us, stand in OUT: a rename would leave both in a deleted directory."""
    try:
        return Path.cwd().is_relative_to(out)
    except OSError:
        return False


def _is_there(descriptor: int, path: Path) -> bool:
    """Whether the open lock file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def refuse_sources_inside(out: Path, files: Iterable[Path]) -> None:
    """A source file that lies in OUT, also through a link, would be replaced by the job that reads it (case I05)."""
    resolved = _resolved(out)
    for path in files:
        if path.resolve().is_relative_to(resolved):
            raise UsageError(f"{path} of the source lies inside OUT", str(out), "name an OUT elsewhere")


def remove_leftovers(out: Path) -> None:
    """The staging of a run that was killed between publishing and cleaning up; another run's is left alone."""
    for staging in _staging_paths(_resolved(out)):
        if not staging.is_dir() or not os.access(staging, os.W_OK):
            continue
        descriptor = _locked(staging)
        if descriptor is not None:
            shutil.rmtree(staging, ignore_errors=True)
            os.close(descriptor)


def _publishing(out: Path) -> dict[str, list[str]] | None:
    """What a run that was killed while it published inside `out` was moving; None where there was none."""
    try:
        found = json.loads((out / PARTIAL_SUFFIX / PUBLISHING_NAME).read_text())
        moving = {"old": [str(name) for name in found["old"]], "new": [str(name) for name in found["new"]]}
        return moving if all(is_plain(name) for names in moving.values() for name in names) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _resolved(out: Path) -> Path:
    """OUT with links of its parents resolved; a link to nowhere is no place to write."""
    try:
        if out.is_symlink() and not out.exists():
            raise OutputError("OUT is a link to nothing", str(out), "name a directory")
        resolved = out.resolve()
        resolved.exists()
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise OutputError(f"OUT cannot be: {reason}", str(out), "name another OUT") from error
    if not resolved.name:
        raise UsageError("OUT is the root of the filesystem", str(out), "name a directory")
    return resolved


def _refuse_inside(out: Path, source: Path) -> None:
    source = source.resolve()
    if out == source:
        raise UsageError("OUT and SRC are one directory", str(out), "name an OUT elsewhere")
    if source in out.parents:
        raise UsageError(
            "OUT lies inside SRC; nothing under the source is ever written", str(out), "name an OUT elsewhere"
        )
    if out in source.parents:
        raise UsageError("SRC lies inside OUT", str(out), "name an OUT elsewhere")


def foreign_files(directory: Path) -> list[str]:
    """The files in `directory` that its manifest does not describe; all of them where it has no manifest."""
    head = read_head(directory)
    ours = {MANIFEST_NAME, *head.file_names()} if head is not None else set()
    return [name for name in _files(directory) if name not in ours]


def _files(directory: Path) -> list[str]:
    """Every file below `directory` but staged ones, links to directories included."""
    found = []
    for path in sorted(directory.rglob("*")):
        relative = path.relative_to(directory)
        staged = relative.parts[0] == PARTIAL_SUFFIX or relative.parts[0] == "lost+found"
        if not staged and (path.is_symlink() or not path.is_dir()):
            found.append(relative.as_posix())
    return found


def finished(out: Path, digest: str) -> ManifestHead | None:
    """The manifest head at `out` where that is the plan's finished result: every file there, of the right size."""
    head = read_head(out)
    if head is None or head.plan != digest:
        return None
    for name, entry in head.files.items():
        path = out / name
        if not path.is_file() or path.stat().st_size != entry.nbytes:
            return None
    return head
