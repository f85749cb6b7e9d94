"""surgery: edit language-model checkpoints that do not fit in memory, streaming from disk to disk.

    from surgery import Checkpoint, Trim, draft_of, make_plan, run_recipe
    from surgery.execute import execute
    from surgery.verify import verify

    draft = run_recipe(draft_of(Checkpoint.open("SRC")), [Trim("0,6,7")])
    plan = make_plan(draft)
    execute(plan, Path("OUT"))
    assert not verify(Path("OUT"), against=Path("SRC")).failed

The names in `__all__`, and `execute` and `verify` in the modules of their names, are the public API; each is
imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surgery.checkpoint import Checkpoint
    from surgery.draft import Draft, draft_of
    from surgery.errors import CannotApply, OutputError, SourceError, SurgeryError, UsageError
    from surgery.execute import Options, Outcome, Progress
    from surgery.operations.graft import Graft
    from surgery.operations.prune import Prune
    from surgery.operations.recipe import read_recipe, run_recipe
    from surgery.operations.rename import Rename
    from surgery.operations.repack import Repack
    from surgery.operations.trim import Trim
    from surgery.plan import make_plan
    from surgery.plan_file import plan_digest, read_plan, write_plan
    from surgery.plan_types import Plan
    from surgery.verify import Report

__version__ = "0.1.0"

_HOME = {
    "Checkpoint": "checkpoint",
    "Draft": "draft",
    "draft_of": "draft",
    "CannotApply": "errors",
    "OutputError": "errors",
    "SourceError": "errors",
    "SurgeryError": "errors",
    "UsageError": "errors",
    "Options": "execute",
    "Outcome": "execute",
    "Progress": "execute",
    "Graft": "operations.graft",
    "Prune": "operations.prune",
    "read_recipe": "operations.recipe",
    "run_recipe": "operations.recipe",
    "Rename": "operations.rename",
    "Repack": "operations.repack",
    "Trim": "operations.trim",
    "Plan": "plan_types",
    "make_plan": "plan",
    "plan_digest": "plan_file",
    "read_plan": "plan_file",
    "write_plan": "plan_file",
    "Report": "verify",
}

__all__ = [
    "CannotApply",
    "Checkpoint",
    "Draft",
    "Graft",
    "Options",
    "Outcome",
    "OutputError",
    "Plan",
    "Progress",
    "Prune",
    "Rename",
    "Repack",
    "Report",
    "SourceError",
    "SurgeryError",
    "Trim",
    "UsageError",
    "draft_of",
    "make_plan",
    "plan_digest",
    "read_plan",
    "read_recipe",
    "run_recipe",
    "write_plan",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'surgery' has no attribute {name!r}")
    return getattr(importlib.import_module(f"surgery.{_HOME[name]}"), name)
