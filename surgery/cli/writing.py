"""What every command that writes a checkpoint does with its plan; and the commands run, plan and apply."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from surgery.cli.options import OPEN_OPTIONS, WRITING_OPTIONS, add_options
from surgery.cli.output import emit, emit_json, message
from surgery.cli.progress import ConsoleProgress
from surgery.draft import Operation
from surgery.engine.space import allocated_nbytes
from surgery.errors import MAX_LISTED_PROBLEMS, OutputError, UsageError, printable
from surgery.execute import Options, Outcome, execute
from surgery.layouts.reading import open_draft
from surgery.operations.recipe import read_recipe, run_recipe, with_sources
from surgery.plan import make_plan
from surgery.plan_file import decode_plan, plan_digest, read_plan, write_plan
from surgery.plan_page import plan_page, plan_summary
from surgery.plan_types import Plan
from surgery.sizes import human_size, parse_size
from surgery.storage import local_path

Operations = list[Operation]


def make_plan_of(source: str, operations: Sequence[Operation], **source_options: Any) -> Plan:
    """Open SRC, apply the operations, and plan."""
    draft, checkpoint = open_draft(source, **source_options)
    if checkpoint is None:
        assert draft.partition is not None
        message(f"note: {source} holds {draft.partition.ranks} ranks of layout {draft.partition.layout}")
        return told(make_plan(run_recipe(draft, operations)))
    for finding in checkpoint.findings[:MAX_LISTED_PROBLEMS]:
        message(f"{finding.severity}: {finding.what}" + (f" ({finding.where})" if finding.where else ""))
    rest = len(checkpoint.findings) - MAX_LISTED_PROBLEMS
    if rest > 0:
        message(f"and {rest} more findings: `surgery inspect {source}` lists them")
    for stray in checkpoint.strays[:MAX_LISTED_PROBLEMS]:
        message(f"note: left behind: {stray.name} ({stray.why})")
    return told(make_plan(run_recipe(draft, operations)))


def told(plan: Plan) -> Plan:
    """Say what a person should know of a plan before it runs; the whole of it is in the plan's page."""
    for decision in plan.decisions:
        if decision.rule in ("source", "witness", "prune", "graft", "reshard", "ranks"):
            message(f"note: {decision.what}")
    return plan


def carry_out(plan: Plan, out: Path | None, options: dict[str, Any]) -> None:
    """What every writing command does with its plan: print it, or execute it and say what was written."""
    digest = plan_digest(plan)
    memory = parse_size(options["memory"], "--memory")
    if options["as_json"] and str(options["plan_out"]) == "-":
        raise UsageError("--json and --plan-out - both want stdout", "--plan-out", "write the plan to a file")
    if options["plan_out"] is not None:
        save_plan(plan, options["plan_out"])
    if options["dry_run"]:
        if options["as_json"]:
            emit_json({**plan_summary(plan, digest), "dry_run": True})
        else:
            emit(plan_page(plan, digest, memory, _disk_nbytes(plan)))
        return
    if out is None:
        raise UsageError("no OUT given", "OUT", "name the output directory")
    outcome = execute(
        plan,
        out,
        Options(
            workers=options["workers"],
            memory_nbytes=memory,
            overwrite=options["overwrite"],
            readback=options["verify_mode"] == "readback",
        ),
        ConsoleProgress("writing"),
    )
    if options["as_json"]:
        emit_json({**plan_summary(plan, digest), "out": str(outcome.out), **_outcome(outcome)})
    else:
        emit(_told(plan, outcome))


def _disk_nbytes(plan: Plan) -> int:
    return allocated_nbytes(plan, [Path(plan.roots[s.root]) / s.name for s in plan.sources])


def _outcome(outcome: Outcome) -> dict[str, Any]:
    return {
        "already_finished": outcome.already,
        "resumed_tensors": outcome.resumed,
        "nbytes_written": outcome.nbytes_written,
        "note": outcome.note,
    }


def _told(plan: Plan, outcome: Outcome) -> str:
    totals = plan.totals
    out = printable(str(outcome.out))
    if outcome.already:
        return f"{out} is the finished result of this plan already ({outcome.digest}); nothing was written"
    lines = [
        f"wrote {out}: {totals.tensors_out:,} tensors, {human_size(totals.nbytes_out)}, "
        f"{len(plan.files)} file{'s' if len(plan.files) != 1 else ''}",
        f"in {totals.tensors_in:,} = kept {totals.tensors_kept:,} + dropped {totals.tensors_dropped:,} tensors; "
        f"{human_size(totals.nbytes_in)} = {human_size(totals.nbytes_kept)} + {human_size(totals.nbytes_dropped)}",
    ]
    if outcome.resumed:
        lines.append(f"resumed: {outcome.resumed:,} tensors were there from an earlier run")
    lines += [f"config: {c.path} {_short(c.old)} -> {_short(c.new)}" for c in plan.config_changes]
    if outcome.note:
        lines.append(f"note: {outcome.note}")
    return "\n".join(lines)


def _short(value: Any) -> str:
    text = printable(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= 60 else text[:57] + "..."


def save_plan(plan: Plan, path: Path) -> None:
    """Write the plan's JSON to `path`; `-` is stdout. Nothing under a source is ever written, no plan either."""
    if str(path) == "-":
        try:
            write_plan(plan, sys.stdout.buffer)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(
                f"cannot write the plan: {error.strerror}", "stdout", "check where stdout goes"
            ) from error
        return
    target = path.resolve()
    inside = [root for root in plan.roots if target.is_relative_to(Path(root).resolve())]
    if inside:
        raise UsageError(
            "the plan would lie inside the source, which is never written", str(path), "name a file elsewhere"
        )
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with aside.open("wb") as file:
            write_plan(plan, file)
        aside.replace(target)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise OutputError(f"cannot write the plan: {error.strerror}", str(path), "name another file") from error


Build = Callable[..., Operations]


def register(
    name: str, build: Build, options: tuple[Any, ...], text: str, source_options: tuple[Any, ...] = OPEN_OPTIONS
) -> click.Command:
    """The writing command `name`, and its twin `plan name`; `build` makes the operations from the options."""

    @click.command(name, help=text)
    @click.argument("src")
    @click.argument("out", type=click.Path(path_type=Path))
    @add_options(options)
    @add_options(source_options)
    @add_options(WRITING_OPTIONS)
    def write(src: str, out: Path, **given: Any) -> None:
        operations = build(**{key: given.pop(key) for key in _names(options)})
        plan = make_plan_of(src, operations, **{key: given.pop(key) for key in _names(source_options)})
        carry_out(plan, out, given)

    @plan_group.command(name, help=f"The plan of `surgery {name}`. OUT may be left out: a plan does not name it.")
    @click.argument("src")
    @click.argument("out", required=False)
    @add_options(options)
    @add_options(source_options)
    @PLAN_FILE_OPTION
    def plan(src: str, out: str | None, plan_path: Path, **given: Any) -> None:
        operations = build(**{key: given.pop(key) for key in _names(options)})
        save_plan(make_plan_of(src, operations, **given), plan_path)

    return write


def _names(options: tuple[Any, ...]) -> list[str]:
    """The parameter names that click gives to `options`."""

    @add_options(options)
    def holder() -> None: ...

    return [parameter.name for parameter in holder.__click_params__]


PLAN_FILE_OPTION = click.option(
    "-o",
    "--output",
    "plan_path",
    type=click.Path(path_type=Path),
    default=Path("-"),
    help="The plan file; stdout when left out.",
)


@click.group("plan")
def plan_group() -> None:
    """The plan of an operation as JSON: print it, compare it, keep it in git, run it elsewhere.

    \b
    Example:
      surgery plan trim SRC --layers 0,6,7 -o plan.json
      surgery apply plan.json OUT
    """


FROM_OPTION = click.option(
    "--from",
    "others",
    multiple=True,
    metavar="OTHER",
    help="Where a graft of the recipe takes its tensors from, if it does not say. Repeatable, in order.",
)


@click.command("run")
@click.argument("src")
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("recipe", type=click.Path(path_type=Path))
@FROM_OPTION
@add_options(OPEN_OPTIONS)
@add_options(WRITING_OPTIONS)
def run_command(src: str, out: Path, recipe: Path, others: tuple[str, ...], **given: Any) -> None:
    """Several operations in one pass: RECIPE is YAML, or the surgery.json of another output.

    \b
    Example recipe:
      recipe:
      - operation: trim
        layers: 0,6,7
      - operation: rename
        map: {model.layers: decoder.layers}
      - operation: repack
        max_shard_size: 2GB
    \b
    Example:
      surgery run SRC OUT recipe.yaml
    """
    operations = with_sources(read_recipe(recipe), others)
    plan = make_plan_of(src, operations, **{key: given.pop(key) for key in _names(OPEN_OPTIONS)})
    carry_out(plan, out, given)


@plan_group.command("run", help="The plan of `surgery run`: SRC [OUT] RECIPE.")
@click.argument("src")
@click.argument("out_and_recipe", nargs=-1, required=True, metavar="[OUT] RECIPE")
@FROM_OPTION
@add_options(OPEN_OPTIONS)
@PLAN_FILE_OPTION
def plan_run(src: str, out_and_recipe: tuple[str, ...], others: tuple[str, ...], plan_path: Path, **given: Any) -> None:
    if len(out_and_recipe) > 2:
        raise UsageError(f"{len(out_and_recipe)} arguments after SRC", "plan run", "write SRC [OUT] RECIPE")
    save_plan(make_plan_of(src, with_sources(read_recipe(Path(out_and_recipe[-1])), others), **given), plan_path)


@click.command("apply")
@click.argument("plan_path", metavar="PLAN", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--source", "sources", multiple=True, help="Where SRC lies on this machine, if not where the plan says.")
@add_options(WRITING_OPTIONS)
def apply_command(plan_path: Path, out: Path, sources: tuple[str, ...], **given: Any) -> None:
    """Carry out PLAN (a file that `surgery plan` wrote; - is stdin) and write OUT.

    \b
    Example:
      surgery apply plan.json OUT
    """
    import msgspec

    if str(plan_path) == "-" and sys.stdin is None:
        raise UsageError("stdin is closed", "PLAN", "give the plan on stdin, or name a file")
    plan = decode_plan(sys.stdin.buffer.read(), "stdin") if str(plan_path) == "-" else read_plan(plan_path)
    if sources:
        if len(sources) != len(plan.roots):
            raise UsageError(
                f"{len(sources)} sources given, the plan reads {len(plan.roots)}",
                "--source",
                "give each in order",
            )
        plan = msgspec.structs.replace(plan, roots=tuple(str(local_path(source).resolve()) for source in sources))
    carry_out(plan, out, given)
