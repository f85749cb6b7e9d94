"""A worker: one thread that moves the bytes of units of work, flushes and journals."""

from __future__ import annotations

from collections.abc import Callable

from surgery.engine.computed import Computed, run_computed, run_same
from surgery.engine.gather import run_group
from surgery.engine.groups import Group, Unit
from surgery.engine.job import Job
from surgery.engine.journal import Journal
from surgery.engine.reading import Sources
from surgery.engine.transfer import Channel, chains, copy_chain
from surgery.engine.writing import Outputs, Target

MIN_MEMORY_NBYTES = 1 << 20
MAX_BUFFER_NBYTES = 8 << 20
COPY_BUFFER_NBYTES = 2 << 20
MAX_OPEN_OUTPUTS = 16
"""Over all workers, so that a limit of 32 open files is enough."""

JOURNAL_EVERY_NBYTES = 1 << 30
"""At most this much is done again after a kill, per worker (design section 6)."""


class Worker:
    """One thread: takes units, moves their bytes, flushes and journals."""

    def __init__(self, job: Job, number: int, progress: Callable[[int], None], stopping: Callable[[], bool]) -> None:
        self._job = job
        self._number = number
        self._journal: Journal | None = None
        self._finished: list[tuple[int, bytes]] = []
        self._unflushed_nbytes = 0
        workers = max(1, job.options.workers)
        self._outputs = Outputs(
            job.out_paths, window=job.windowed, sparse=job.sparse, max_open=max(1, MAX_OPEN_OUTPUTS // workers)
        )
        memory = max(MIN_MEMORY_NBYTES, job.options.memory_nbytes)
        buffer = memoryview(bytearray(min(MAX_BUFFER_NBYTES, memory // workers)))
        sources = Sources(job.source_paths, [source.nbytes for source in job.plan.sources], drop=job.windowed)
        # Small enough to be hashed from the processor's cache; strided groups get the whole of it.
        self._copy = Channel(sources, self._outputs, buffer[:COPY_BUFFER_NBYTES], progress, stopping)
        self._gather = Channel(sources, self._outputs, buffer, progress, stopping)

    def run(self, unit: Unit) -> None:
        layout = self._job.layout
        if isinstance(unit, Computed):
            target = layout.target(unit.ordinal)
            run_computed(self._gather, unit, target)
            self._close(unit.ordinal, target)
            return
        if isinstance(unit, Group):
            targets = {ordinal: layout.target(ordinal) for ordinal in unit.ordinals}
            run_group(self._gather, unit.parts(targets))
            for check in unit.checks:
                if check.kind == "same":
                    run_same(self._gather, check)
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
            self._journal = Journal(self._job.staging.path, self._number, self._job.digest)
        self._journal.record(self._finished)
        for ordinal, digest in self._finished:
            self._job.done.set(ordinal, digest)
        self._finished = []
        self._unflushed_nbytes = 0

    def close(self) -> None:
        self._outputs.close()
