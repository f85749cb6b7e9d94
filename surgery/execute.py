"""Carry out a plan: stream, hash, journal, resume, read back, publish. Knows bytes only, no families, no operations.

Workers take units of work in the order of the source's bytes. A unit is some tens of MiB of plain copies, or one
group of strided moves. A unit that was not finished is done again; its bytes are the same.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

import msgspec

from surgery.engine.groups import Unit, units
from surgery.engine.identity import same_source, source_state
from surgery.engine.job import Job, Options
from surgery.engine.journal import Done, bind, is_bound, read_journals
from surgery.engine.output_files import finish_files, make_files, require_planned
from surgery.engine.staging import Staging, finished, refuse_sources_inside, remove_leftovers
from surgery.engine.transfer import Interrupted
from surgery.engine.worker import Worker
from surgery.errors import OutputError, SourceError, SurgeryError
from surgery.manifest import read_head
from surgery.plan_file import plan_digest
from surgery.plan_types import Plan
from surgery.safetensors_file import StoredTensor, read_header
from surgery.tiling import sources

__all__ = ["Options", "Outcome", "Progress", "execute"]


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
    read = [roots[file.root] / file.name for file in plan.sources]
    refuse_sources_inside(out, [*read, *(roots[s.root] / s.source_name for s in plan.side_files if s.root >= 0)])
    if not options.overwrite and finished(out, digest) is not None and same_source(plan, out):
        remove_leftovers(out)
        return Outcome(out, digest, already=True, resumed=0, nbytes_written=0)
    with Staging(out, overwrite=options.overwrite, sources=roots) as staging:
        try:
            run = _Run(Job(plan, digest, staging, options), progress or Progress())
            run.check_sources()
            note = run.write_all()
        except SurgeryError:
            staging.remove_if_idle()
            raise
    return Outcome(
        staging.out, digest, already=False, resumed=run.resumed, nbytes_written=run.nbytes_written, note=note
    )


class _Run:
    """One run of one job: its threads, and what came of it."""

    def __init__(self, job: Job, progress: Progress) -> None:
        self.job = job
        self.progress = progress
        self.resumed = 0
        self.nbytes_written = 0
        self._stop = threading.Event()
        self._units_lock = threading.Lock()
        self._progress_lock = threading.Lock()

    def check_sources(self) -> None:
        """Every source file is the one that was planned, and has the tensors that the plan reads."""
        for given in self.job.plan.inputs:
            require_planned(self.job, given)
        wanted: dict[int, dict[tuple[int, str], StoredTensor]] = {}
        for tensor in self.job.plan.tensors():
            for stored in sources(tensor.content):
                wanted.setdefault(stored.file, {})[stored.offset, stored.name] = stored
        for check in self.job.plan.checks:
            stored = check.tile.source
            wanted.setdefault(stored.file, {})[stored.offset, stored.name] = stored
        for number, (source, path) in enumerate(zip(self.job.plan.sources, self.job.source_paths, strict=True)):
            header = read_header(path, number)
            found = (header.file_nbytes, header.data_offset, header.digest)
            if found != (source.nbytes, source.data_offset, source.header_digest):
                raise SourceError(
                    f"{source.name} is not the file that was planned: {header.file_nbytes} bytes, header "
                    f"{header.digest}; planned {source.nbytes}, {source.header_digest}",
                    str(path),
                    "make the plan again from the source as it is now",
                )
            missing = wanted.pop(number, {})
            for held in header.tensors:
                if missing.get((held.offset, held.name)) == held:
                    del missing[held.offset, held.name]
            if missing:
                stored = next(iter(missing.values()))
                raise SourceError(
                    f"{source.name} has no tensor {stored.name} of {stored.dtype} {list(stored.shape)} at byte "
                    f"{stored.offset}, which the plan reads",
                    str(path),
                    "make the plan again",
                )

    def write_all(self) -> str:
        """All files of the output, then the publishing step. Returns its note."""
        staging = self.job.staging
        head = read_head(staging.out)
        self.job.done = read_journals(
            staging.path, self.job.digest, self.job.layout.count, head.plan if head is not None else ""
        )
        identity = f"{self.job.digest} {source_state(self.job.source_paths)}"
        if is_bound(staging.path, identity):
            staging.undo_publishing()
        else:
            # Another plan that finished nothing, or a source with another state: a model saved again has the same
            # headers. Emptied first, bound after, so that a kill between leaves nothing that looks like ours.
            staging.start_afresh()
            bind(staging.path, identity)
            self.job.done = Done(self.job.layout.count)
        try:
            make_files(self.job)
            self.resumed = len(self.job.done)
            self._stream()
        except OSError as error:
            raise self._write_failure(error) from error
        except OutputError:
            if not len(self.job.done):
                self.job.staging.remove()
            raise
        try:
            finish_files(self.job)
            return self.job.staging.publish()
        except OSError as error:
            raise self._write_failure(error) from error

    def _write_failure(self, error: OSError) -> OutputError:
        """Say what the disk said. Where nothing is worth resuming the staging directory goes and frees its space."""
        if not len(self.job.done):
            self.job.staging.remove()
            after = "free some space or name another disk, and run again"
        else:
            after = f"run again to resume from {self.job.staging.path}, or remove it to free its space"
        if error.errno == errno.EMFILE:
            after = "raise the limit of open files (ulimit -n), or use fewer --workers"
        what = error.strerror or str(error)
        return OutputError(f"cannot write the output: {what}", error.filename or str(self.job.staging.out), after)

    def _stream(self) -> None:
        """All bytes of all tensors, by the workers."""
        remaining = self.job.layout.nbytes - self.job.layout.nbytes_of(self.job.done)
        self.progress.start(remaining)
        self.nbytes_written = remaining
        work = units(self.job.plan, self.job.layout, self.job.done)
        workers = max(1, self.job.options.workers)
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

    def _work(self, number: int, work: Iterator[Unit]) -> None:
        worker = Worker(self.job, number, self.advance, self._stop.is_set)
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
            worker.close()

    def advance(self, nbytes: int) -> None:
        with self._progress_lock:
            self.progress.add(nbytes)
