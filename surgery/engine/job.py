"""One run of one plan: what every part of the engine has to know about it."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import msgspec

from surgery.engine.groups import Layout
from surgery.engine.journal import Done
from surgery.engine.space import available_memory_nbytes, is_sparse
from surgery.engine.staging import Staging
from surgery.plan_types import Plan

DEFAULT_MEMORY_NBYTES = 16 << 20
SMALL_JOB_SHARE = 0.1
"""Jobs below this share of the free memory go without the page-cache window: on warm pages it doubles the time
(facts, io.md section 2, hot)."""


class Options(msgspec.Struct, frozen=True):
    """How to run a plan; none of it changes the bytes that come out.

    `readback` hashes every tensor again from the disk before publishing. `window` None: by the size of the job.
    """

    workers: int = 2
    memory_nbytes: int = DEFAULT_MEMORY_NBYTES
    overwrite: bool = False
    readback: bool = False
    window: bool | None = None


class Job:
    """A plan in a locked staging directory. `done` grows as tensors are flushed and journalled."""

    def __init__(self, plan: Plan, digest: str, staging: Staging, options: Options) -> None:
        self.plan = plan
        self.digest = digest
        self.staging = staging
        self.options = options
        self.source_paths = [Path(plan.roots[source.root]) / source.name for source in plan.sources]
        self.out_paths = [staging.content / file.name for file in plan.files]
        self.layout = Layout(plan)
        self.done = Done(self.layout.count)

    @cached_property
    def sparse(self) -> bool:
        """Whether holes are to be kept: some source has them."""
        return any(is_sparse(path.stat()) for path in self.source_paths)

    @cached_property
    def windowed(self) -> bool:
        """Whether pages are dropped from the page cache behind the copy."""
        if self.options.window is not None:
            return self.options.window
        available = available_memory_nbytes()
        return available is None or self.layout.nbytes > SMALL_JOB_SHARE * available
