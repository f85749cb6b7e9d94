"""Verify: is a directory what its manifest says, what its config demands, and what its source had.

Shares nothing with `execute` above the file format, so it cannot inherit its faults. Three verdicts that are never
blurred (design section 7), and on demand the proof against the source. Reads only.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from surgery.checkpoint import Checkpoint
from surgery.draft import Partition
from surgery.errors import Finding, SourceError, UsageError
from surgery.families.records import find_family
from surgery.manifest import MANIFEST_NAME
from surgery.verifying.integrity import PARTIAL_NAME, Integrity
from surgery.verifying.loading import check_loading
from surgery.verifying.manifest_check import check_manifest
from surgery.verifying.manifest_reader import ManifestDamaged, ManifestReader
from surgery.verifying.rehash import Reader
from surgery.verifying.source_proof import Proof
from surgery.verifying.verdicts import Answer, Counts, Findings, Report, SourceProof, Verdict, counted, report_text

__all__ = ["Report", "report_text", "sums", "verify"]

_NO_ENGINE = "no engine was run"
SUMS_NAME = "SHA256SUMS"


class Progress(Protocol):
    """Told of bytes as they are judged."""

    def start(self, nbytes: int) -> None: ...

    def add(self, nbytes: int) -> None: ...

    def close(self) -> None: ...


def verify(
    directory: Path,
    *,
    against: Path | Sequence[Path] | None = None,
    sample: float = 1.0,
    seed: int = 0,
    progress: Progress | None = None,
    workers: int = 2,
    allow_outside_links: bool = False,
) -> Report:
    """Judge `directory`; with `against` derive its bytes again from that source, or those of a `sample` of tensors.
    An output of several sources (`graft`) takes as many, in their order.

    Every fault of the content is a finding. Raises `SourceError` only where there is no directory to look at,
    `UsageError` for a sample that is no share.
    """
    if not 0 < sample <= 1:
        raise UsageError(f"the sample is {sample}; a share above 0 and up to 1 belongs there", "--sample")
    _require_directory(directory, "DIR")
    sources = [against] if isinstance(against, Path) else list(against or ())
    for source in sources:
        if not source.exists():
            raise SourceError("no such file or directory", str(source), "name the source of the output")
    verification = _Verification(directory.resolve(), sources, workers, progress, allow_outside_links)
    return verification.run(sample, seed)


def _is_dummy(reader: ManifestReader | None) -> bool:
    """Whether the output was made without weights, on purpose."""
    return reader is not None and any(step.get("operation") == "dummy" for step in reader.head.recipe)


def _partition(reader: ManifestReader | None) -> Partition | None:
    """How the output was dealt to ranks, where it was."""
    return reader.head.partition if reader is not None else None


def _require_directory(directory: Path, where: str) -> None:
    if directory.is_dir():
        return
    partial = directory.parent / f".{directory.name}{PARTIAL_NAME}"
    if partial.is_dir():
        mend = "run the command that makes it again: it resumes"
        raise SourceError("the output is not finished: only its staging directory is there", str(partial), mend)
    what = "not a directory" if directory.exists() else "no such directory"
    raise SourceError(what, str(directory), f"name a checkpoint directory as {where}")


class _Verification:
    """The state of one verification."""

    def __init__(
        self,
        directory: Path,
        against: Sequence[Path],
        workers: int,
        progress: Progress | None,
        allow_outside_links: bool,
    ) -> None:
        self._allow_outside_links = allow_outside_links
        self._directory = directory
        self._against = against
        self._workers = workers
        self._progress = progress
        self._lock = threading.Lock()
        self._counts = Counts()
        self._integrity, self._loading, self._proof = Findings(), Findings(), Findings()

    def run(self, sample: float, seed: int) -> Report:
        reader = self._manifest()
        checkpoint = Checkpoint.survey(self._directory, allow_outside_links=self._allow_outside_links)
        if not (checkpoint.files or checkpoint.strays or reader or self._has_manifest()):
            raise SourceError(
                "there is nothing to judge: no weights and no manifest",
                str(self._directory),
                "name a checkpoint directory as DIR",
            )
        partition = _partition(reader)
        if partition is None:
            family = find_family(checkpoint.config) if checkpoint.config is not None else None
            loading = check_loading(checkpoint, self._loading, family)
        else:
            told = f"names and shapes: {partition.ranks} ranks of layout {partition.layout} are an engine's own"
            loading = Verdict("unverified", [told])
        self._take_survey(checkpoint, reader)
        config = checkpoint.config
        if reader is None:
            self._count_only(checkpoint)
        del checkpoint  # Up to half of the memory that verify needs, and not needed from here on.
        not_looked_at: list[str] = []
        proof: SourceProof | None = None
        if self._against:
            proof = SourceProof("unverified", not_looked_at=["everything: no manifest says what came from where"])
            if reader is None and not self._has_manifest():
                self._proof.fault(
                    "no-manifest",
                    f"{self._directory.name} has no manifest, so nothing says what came from where",
                    str(self._directory / MANIFEST_NAME),
                    "are DIR and SRC swapped? `surgery diff` compares any two checkpoints",
                )
        if reader is None:
            not_looked_at.append(
                "tensor bytes: the manifest is damaged"
                if self._integrity.faults and self._has_manifest()
                else "tensor bytes: no manifest to compare with"
            )
        else:
            try:
                proof = self._judge(reader, config, sample, seed)
            except ManifestDamaged as error:
                self._integrity.fault("manifest", error.what, error.where, error.mend)
                not_looked_at.append("tensor bytes behind the place where the manifest is damaged")
        answer: Answer = "failed" if self._integrity.faults else "passed"
        groups = (self._integrity, self._loading, self._proof)
        return Report(
            str(self._directory),
            reader.head.plan if reader is not None else None,
            Verdict(answer, not_looked_at),
            loading,
            Verdict("unverified", [_NO_ENGINE]),
            proof,
            self._counts,
            [finding for group in groups for finding in group.kept],
            counted(groups),
        )

    def _has_manifest(self) -> bool:
        return os.path.lexists(self._directory / MANIFEST_NAME)

    def _manifest(self) -> ManifestReader | None:
        try:
            return ManifestReader(self._directory)
        except FileNotFoundError:
            if (self._directory / PARTIAL_NAME).is_dir():
                self._integrity.fault(
                    "not-finished",
                    "the output is not finished: its staging directory is there and no manifest",
                    str(self._directory / PARTIAL_NAME),
                    "run the command that makes it again: it resumes",
                )
        except ManifestDamaged as error:
            self._integrity.fault("manifest", error.what, error.where, error.mend)
        return None

    def _take_survey(self, checkpoint: Checkpoint, reader: ManifestReader | None) -> None:
        listed = reader.head.files if reader is not None else {}
        for finding in checkpoint.findings:
            if finding.kind == "no-model" and _is_dummy(reader):
                continue
            if finding.kind == "rank-partition" and _partition(reader) is not None:
                continue  # As it was meant: the manifest has every file.
            absent = not os.path.lexists(self._directory / finding.where)
            if finding.kind == "missing-file" and absent and finding.where in listed:
                continue  # Said file by file, with their tensors, when they are compared with the manifest.
            if finding.kind == "duplicate-tensor":
                # Equal bytes or not, some loaders refuse a tensor that is there twice (case X08).
                finding = msgspec.structs.replace(finding, severity="fault")
            self._integrity.add(finding)
        if reader is None:
            for stray in checkpoint.strays:
                self._integrity.add(Finding("stray", "note", f"{stray.name}: {stray.why}", stray.name))

    def _count_only(self, checkpoint: Checkpoint) -> None:
        self._counts.tensors = len(checkpoint.tensors)
        self._counts.files = len(checkpoint.files)
        self._counts.nbytes_written = sum(file.nbytes - file.data_offset for file in checkpoint.files)

    def _judge(
        self, reader: ManifestReader, config: dict[str, object] | None, sample: float, seed: int
    ) -> SourceProof | None:
        """Everything that the manifest makes possible. Raises `ManifestDamaged`."""
        accounts = check_manifest(reader, config, self._integrity)
        share = sample if self._against else 0.0
        if self._progress is not None:
            self._progress.start(accounts.nbytes + int(accounts.nbytes * share))
        try:
            Integrity(self._directory, reader, accounts, self._integrity, self._counts).check(
                self._workers, self._advance()
            )
            if not self._against:
                return None
            return Proof(reader, self._directory, self._against, self._proof, self._advance()).prove(sample, seed)
        finally:
            if self._progress is not None:
                self._progress.close()

    def _advance(self) -> Callable[[int], None]:
        progress = self._progress
        if progress is None:
            return lambda nbytes: None

        def advance(nbytes: int) -> None:
            with self._lock:
                progress.add(nbytes)

        return advance


def sums(directory: Path) -> Iterator[str]:
    """For every file in `directory` a line that `sha256sum -c` accepts when it is run there."""
    _require_directory(directory, "DIR")
    names: list[str] = []
    for base, folders, files in os.walk(directory):
        folders.sort()
        names += [(Path(base) / file).relative_to(directory).as_posix() for file in files]
    # The list itself, when the shell writes it into DIR, cannot hold its own sum.
    names = [name for name in names if name != SUMS_NAME]
    if not names:
        raise SourceError("the directory is empty", str(directory), "name a checkpoint directory as DIR")
    for name in sorted(names):
        hasher = hashlib.sha256()
        try:
            with Reader(directory / name) as reader:
                for block in reader.blocks(0, reader.nbytes):
                    hasher.update(block)
        except OSError as error:
            raise SourceError(f"cannot read: {error.strerror}", str(directory / name), "check the file") from error
        yield _sum_line(hasher.hexdigest(), name)


def _sum_line(digest: str, name: str) -> str:
    """As sha256sum writes it: a name with a backslash or line break is escaped, and a leading backslash says so."""
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return ("" if escaped == name else "\\") + f"{digest}  {escaped}"
