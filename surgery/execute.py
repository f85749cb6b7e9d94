"""Carry out a plan: stream, hash, journal, resume, read back, publish. Knows bytes only, no families, no operations.

Workers take units of work in the order of the source's bytes. A unit is some tens of MiB of plain copies, or one
group of strided moves. A unit that was not finished is done again; its bytes are the same.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

import msgspec
import xxhash

from surgery import kernel
from surgery.errors import OutputError, SourceError
from surgery.gather import run_group
from surgery.groups import Group, Layout, units
from surgery.journal import Done, Journal, read_journals
from surgery.manifest import MANIFEST_NAME, ManifestFile, write_manifest
from surgery.plan import Plan, PlannedFile, PlannedSideFile
from surgery.plan_file import plan_digest
from surgery.reading import Sources
from surgery.safetensors_file import read_header
from surgery.staging import Staging, finished, remove_leftovers
from surgery.transfer import Channel, Interrupted, Segment, chains, copy_chain
from surgery.writing import Outputs, Target

DEFAULT_MEMORY_NBYTES = 16 << 20
MIN_MEMORY_NBYTES = 1 << 20
MAX_BUFFER_NBYTES = 8 << 20
JOURNAL_EVERY_NBYTES = 1 << 30
"""At most this much is done again after a kill, per worker (design section 6)."""

SMALL_JOB_SHARE = 0.1
"""Jobs below this share of the free memory go without the page-cache window: on warm pages it doubles the time
(facts, io.md section 2, hot)."""


class Options(msgspec.Struct, frozen=True):
    """How to run a plan; none of it changes the bytes that come out."""

    workers: int = 2
    memory_nbytes: int = DEFAULT_MEMORY_NBYTES
    overwrite: bool = False
    readback: bool = False
    window: bool | None = None


class Outcome(msgspec.Struct, frozen=True):
    """What a run did. `resumed` tensors were on the disk already; `already` says that the whole output was."""

    out: Path
    digest: str
    already: bool
    resumed: int
    nbytes_written: int
    note: str = ""


class Progress:
    """Told of bytes as they are done; the command line shows them. This one is silent."""

    def start(self, nbytes: int) -> None: ...

    def add(self, nbytes: int) -> None: ...

    def close(self) -> None: ...


def execute(plan: Plan, out: Path, options: Options | None = None, progress: Progress | None = None) -> Outcome:
    """Write the output of `plan` at `out`.

    Raises `SourceError` where the source is not what the plan expects or a check of its bytes fails, `OutputError`
    where the output cannot be written. Whatever happens there is no directory at `out` unless it is whole; run
    again to resume.
    """
    options = options or Options()
    digest = plan_digest(plan)
    roots = [Path(root) for root in plan.roots]
    if out.exists() and finished(out, digest) is not None:
        remove_leftovers(out)
        return Outcome(out, digest, already=True, resumed=0, nbytes_written=0)
    with Staging(out, overwrite=options.overwrite, sources=roots) as staging:
        run = _Run(plan, digest, staging, options, progress or Progress())
        run.check_sources()
        note = run.write_all()
    return Outcome(
        staging.out, digest, already=False, resumed=run.resumed, nbytes_written=run.nbytes_written, note=note
    )


class _Run:
    """One run of one plan in a locked staging directory."""

    def __init__(self, plan: Plan, digest: str, staging: Staging, options: Options, progress: Progress) -> None:
        self.plan = plan
        self.digest = digest
        self.staging = staging
        self.options = options
        self.progress = progress
        self.source_paths = [Path(plan.roots[source.root]) / source.name for source in plan.sources]
        self.out_paths = [staging.content / file.name for file in plan.files]
        self.layout = Layout(plan)
        self.done = Done(self.layout.count)
        self.resumed = 0
        self.nbytes_written = 0
        self.sparse = self._any_sparse_source()
        self._stop = threading.Event()
        self._units_lock = threading.Lock()
        self._progress_lock = threading.Lock()

    def check_sources(self) -> None:
        """Every source file is the one that was planned: same size, same header."""
        for source, path in zip(self.plan.sources, self.source_paths, strict=True):
            header = read_header(path)
            if (header.file_nbytes, header.digest) != (source.nbytes, source.header_digest):
                raise SourceError(
                    f"{source.name} is not the file that was planned: {header.file_nbytes} bytes, header "
                    f"{header.digest}; planned {source.nbytes}, {source.header_digest}",
                    str(path),
                    "make the plan again from the source as it is now",
                )

    def _any_sparse_source(self) -> bool:
        try:
            return any(
                getattr(status, "st_blocks", 1 << 62) * 512 < status.st_size
                for status in map(os.stat, self.source_paths)
            )
        except OSError:
            return False

    def write_all(self) -> str:
        """All files of the output, then the publishing step. Returns its note."""
        self.done = read_journals(self.staging.path, self.digest, self.layout.count)
        self.resumed = len(self.done)
        try:
            self._make_files()
            self._stream()
        except OSError as error:
            raise self._write_failure(error) from error
        except OutputError:
            if not len(self.done):
                self.staging.remove()
            raise
        try:
            self._finish_files()
            return self.staging.publish()
        except OSError as error:
            raise self._write_failure(error) from error

    def _write_failure(self, error: OSError) -> OutputError:
        """Say what the disk said. Where nothing is worth resuming the staging directory goes and frees its space."""
        if not len(self.done):
            self.staging.remove()
            after = "free some space or name another disk, and run again"
        else:
            after = f"run again to resume from {self.staging.path}, or remove it to free its space"
        if error.errno == errno.EMFILE:
            after = "raise the limit of open files (ulimit -n), or use fewer --workers"
        what = error.strerror or str(error)
        return OutputError(f"cannot write the output: {what}", error.filename or str(self.staging.out), after)

    def _make_files(self) -> None:
        """Create every output file at full length with its header in place; judge the free space first."""
        self._require_space()
        content = self.staging.content
        names = {file.name for file in self.plan.files} | {side.name for side in self.plan.side_files}
        self.staging.clear_surplus(names)
        for file, path in zip(self.plan.files, self.out_paths, strict=True):
            header, _ = file.header(self.plan.metadata)
            if not self._is_file_of(path, file, header):
                self._make_file(path, header, file.nbytes)
                self._forget_file(file)
        self.resumed = len(self.done)
        kernel.sync_directory(content)

    @staticmethod
    def _is_file_of(path: Path, file: PlannedFile, header: bytes) -> bool:
        """Whether an earlier run made the file: full length and the planned header."""
        if not path.is_file() or path.stat().st_size != file.nbytes:
            return False
        with path.open("rb") as existing:
            return existing.read(len(header)) == header

    def _make_file(self, path: Path, header: bytes, nbytes: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o666)
        try:
            if self.sparse:
                os.ftruncate(descriptor, nbytes)
            else:
                kernel.allocate(descriptor, nbytes)
            written = 0
            while written < len(header):
                written += os.pwrite(descriptor, header[written:], written)
        finally:
            os.close(descriptor)

    def _forget_file(self, file: PlannedFile) -> None:
        first = 0
        for planned in self.plan.files:
            if planned is file:
                break
            first += len(planned.tensors)
        for ordinal in range(first, first + len(file.tensors)):
            self.done.forget(ordinal)

    def _require_space(self) -> None:
        """Refuse now what the disk cannot hold, counting blocks for sparse sources and what a resume has already."""
        needed = allocated_nbytes(self.plan, self.source_paths)
        have = sum(path.stat().st_blocks * 512 for path in self.out_paths if path.exists() and hasattr(os, "statvfs"))
        free = free_nbytes(self.staging.path)
        if free is not None and needed - have > free:
            raise OutputError(
                f"the output needs {needed - have} more bytes; {free} are free",
                str(self.staging.out.parent),
                "free some space or name an OUT on another disk",
            )

    def _stream(self) -> None:
        """All bytes of all tensors, by the workers."""
        remaining = self.layout.nbytes - self.layout.nbytes_of(self.done)
        self.progress.start(remaining)
        self.nbytes_written = remaining
        work = units(self.plan, self.layout, self.done)
        workers = max(1, self.options.workers)
        with ThreadPoolExecutor(workers, thread_name_prefix="surgery") as pool:
            futures = [pool.submit(self._work, number, work) for number in range(workers)]
            try:
                finished_futures, _ = wait(futures, return_when=FIRST_EXCEPTION)
                if any(future.exception() for future in finished_futures):
                    self._stop.set()
            except BaseException:
                # A signal: the workers stop at the next block and note what they have.
                self._stop.set()
                raise
        self.progress.close()
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None and not isinstance(error, Interrupted):
                raise error

    def _work(self, number: int, work: Iterator[Group | list[Segment]]) -> None:
        outputs = Outputs(
            self.out_paths,
            window=self._windowed(),
            sparse=self.sparse,
            max_open=max(1, 16 // max(1, self.options.workers)),
        )
        worker = _Worker(self, number, outputs)
        try:
            while not self._stop.is_set():
                with self._units_lock:
                    unit = next(work, None)
                if unit is None:
                    break
                worker.run(unit)
            worker.flush()
        except Interrupted:
            worker.flush()
            raise
        finally:
            outputs.close()

    def _windowed(self) -> bool:
        if self.options.window is not None:
            return self.options.window
        available = available_memory_nbytes()
        return available is None or self.layout.nbytes > SMALL_JOB_SHARE * available

    def stopping(self) -> bool:
        return self._stop.is_set()

    def advance(self, nbytes: int) -> None:
        with self._progress_lock:
            self.progress.add(nbytes)

    def _finish_files(self) -> None:
        """Headers read back and compared, everything durable, side files, index and manifest written."""
        files: dict[str, ManifestFile] = {}
        for file, path in zip(self.plan.files, self.out_paths, strict=True):
            files[file.name] = self._prove_file(file, path)
        for side in self.plan.side_files:
            self._write_side_file(side)
            files[side.name] = ManifestFile(side.nbytes, xxh3_128=side.xxh3_128)
        if self.plan.index is not None:
            files[self.plan.index] = self._write_index(self.plan.index)
        with (self.staging.content / MANIFEST_NAME).open("wb") as manifest:
            write_manifest(manifest, self.plan, self.digest, files, self.done.hex)
            manifest.flush()
            os.fsync(manifest.fileno())

    def _prove_file(self, file: PlannedFile, path: Path) -> ManifestFile:
        """Read the header back from the disk and compare it with the plan; make the file durable."""
        with path.open("rb") as written:
            os.fsync(written.fileno())
        header = read_header(path)
        found = {(t.name, t.dtype, t.shape) for t in header.tensors}
        planned = {(t.name, t.dtype, t.shape) for t in file.tensors}
        if found != planned or header.file_nbytes != file.nbytes:
            raise OutputError(
                f"the header of {file.name} reads back other than it was planned",
                str(path),
                "check the disk; remove the staging directory and run again",
            )
        if self.options.readback:
            self._hash_again(file, path)
        return ManifestFile(file.nbytes, header_xxh3_128=header.digest)

    def _hash_again(self, file: PlannedFile, path: Path) -> None:
        first = next(n for n, planned in zip(self.layout.firsts, self.plan.files, strict=True) if planned is file)
        buffer = memoryview(bytearray(1 << 20))
        outputs = Outputs([path], window=False, sparse=False)
        try:
            for ordinal in range(first, first + len(file.tensors)):
                target = self.layout.target(ordinal)
                again = Target(0, target.offset, target.nbytes, xxhash.xxh3_128(), in_order=False)
                if again.digest(outputs, buffer).hex() != self.done.hex(ordinal):
                    raise OutputError(
                        f"{file.tensors[ordinal - first].name} reads back other than it was written",
                        str(path),
                        "check the disk; remove the staging directory and run again",
                    )
        finally:
            outputs.close()

    def _write_side_file(self, side: PlannedSideFile) -> None:
        path = self.staging.content / side.name
        path.parent.mkdir(parents=True, exist_ok=True)
        hasher, nbytes = xxhash.xxh3_128(), 0
        with path.open("wb") as written:
            for block in self._side_blocks(side):
                hasher.update(block)
                written.write(block)
                nbytes += len(block)
            written.flush()
            os.fsync(written.fileno())
        if (nbytes, hasher.hexdigest()) != (side.nbytes, side.xxh3_128):
            raise SourceError(
                f"{side.source_name or side.name} is not the file that was planned",
                self.plan.roots[side.root] if side.root >= 0 else "plan",
                "make the plan again from the source as it is now",
            )

    def _side_blocks(self, side: PlannedSideFile) -> Iterator[bytes]:
        if side.text is not None:
            yield side.text.encode()
            return
        path = Path(self.plan.roots[side.root]) / side.source_name
        try:
            with path.open("rb") as source:
                while block := source.read(1 << 20):
                    yield block
        except OSError as error:
            raise SourceError(f"cannot read: {error.strerror}", str(path), "bring the file back") from error

    def _write_index(self, name: str) -> ManifestFile:
        """The index that the written files deserve, names sorted as Hugging Face sorts them."""
        encode = msgspec.json.encode
        entries = sorted((tensor.name, file.name) for file in self.plan.files for tensor in file.tensors)
        hasher, nbytes = xxhash.xxh3_128(), 0
        with (self.staging.content / name).open("wb") as written:
            head = b'{\n  "metadata": {\n    "total_size": %d\n  },\n  "weight_map": {' % self.layout.nbytes
            lines = (
                b"%s\n    %s: %s" % (b"," if number else b"", encode(tensor), encode(file))
                for number, (tensor, file) in enumerate(entries)
            )
            for piece in itertools.chain([head], lines, [b"\n  }\n}\n"]):
                hasher.update(piece)
                written.write(piece)
                nbytes += len(piece)
            written.flush()
            os.fsync(written.fileno())
        return ManifestFile(nbytes, xxh3_128=hasher.hexdigest())


class _Worker:
    """One thread: takes units, moves their bytes, flushes and journals."""

    def __init__(self, run: _Run, number: int, outputs: Outputs) -> None:
        self._run = run
        self._outputs = outputs
        self._journal: Journal | None = None
        self._number = number
        self._finished: list[tuple[int, bytes]] = []
        self._unflushed_nbytes = 0
        memory = max(MIN_MEMORY_NBYTES, run.options.memory_nbytes)
        buffer = memoryview(bytearray(min(MAX_BUFFER_NBYTES, memory // max(1, run.options.workers))))
        # Small enough to be hashed from the processor's cache; strided groups get the whole of it.
        self._copy = Channel(
            Sources(run.source_paths, [source.nbytes for source in run.plan.sources], drop=run._windowed()),
            outputs,
            buffer[: 2 << 20],
            run.advance,
            run.stopping,
        )
        self._gather = Channel(self._copy.sources, outputs, buffer, run.advance, run.stopping)

    def run(self, unit: Group | list[Segment]) -> None:
        layout = self._run.layout
        if isinstance(unit, Group):
            targets = {ordinal: layout.target(ordinal) for ordinal in unit.ordinals}
            run_group(self._gather, unit.parts(targets))
            for ordinal in unit.ordinals:
                self._close(ordinal, targets[ordinal])
        else:
            for chain in chains(unit):
                targets = {ordinal: layout.target(ordinal) for s in chain for ordinal in s.ordinals}
                copy_chain(self._copy, chain, targets, lambda n, t=targets: self._close(n, t[n]))  # type: ignore[misc]
        if self._unflushed_nbytes >= JOURNAL_EVERY_NBYTES:
            self.flush()

    def _close(self, ordinal: int, target: Target) -> None:
        self._finished.append((ordinal, target.digest(self._outputs, self._copy.buffer)))
        self._unflushed_nbytes += target.nbytes

    def flush(self) -> None:
        """Bytes first, journal after: a line in the journal is a promise."""
        if not self._finished:
            return
        self._outputs.flush()
        if self._journal is None:
            self._journal = Journal(self._run.staging.path, self._number, self._run.digest)
        self._journal.record(self._finished)
        for ordinal, digest in self._finished:
            self._run.done.set(ordinal, digest)
        self._finished = []
        self._unflushed_nbytes = 0


def allocated_nbytes(plan: Plan, source_paths: Sequence[Path]) -> int:
    """The disk that the output will take: whole files, or for sparse sources their share of allocated blocks."""
    shares = []
    for path in source_paths:
        status = path.stat()
        allocated = getattr(status, "st_blocks", 1 << 62) * 512
        shares.append(min(1.0, allocated / max(1, status.st_size)))
    side = sum(file.nbytes for file in plan.side_files)
    if all(share == 1.0 for share in shares):
        return sum(file.nbytes for file in plan.files) + side
    total = 0.0
    for tensor in plan.tensors():
        share = shares[tensor.whole.file] if tensor.whole is not None else 1.0
        total += min(tensor.nbytes, tensor.nbytes * share + 4096)
    return int(total) + side


def free_nbytes(path: Path) -> int | None:
    if not hasattr(os, "statvfs"):
        return None
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def available_memory_nbytes() -> int | None:
    """Memory that could hold pages without pushing others out, the container's limit included; None if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            available = min(available, int(Path(limit).read_text()))
        except (OSError, ValueError):
            continue
    return available
