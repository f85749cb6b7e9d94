"""A plan for people: what `--dry-run` prints and `surgery plan` summarises."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from surgery.errors import printable
from surgery.layer_ranges import layer_map_text
from surgery.plan_types import Plan
from surgery.sizes import human_size

MAX_LISTED = 20


def plan_page(plan: Plan, digest: str, memory_nbytes: int, disk_nbytes: int) -> str:
    """Counts, bytes in and out, shards, config changes, what is dropped and why, memory and disk needed."""
    totals = plan.totals
    lines = [f"plan {digest}", ""]
    lines += [f"  {number}. {_step(step)}" for number, step in enumerate(plan.recipe, 1)]
    lines += [
        "",
        f"in       {totals.tensors_in:>9,} tensors  {human_size(totals.nbytes_in):>9}",
        f"kept     {totals.tensors_kept:>9,} tensors  {human_size(totals.nbytes_kept):>9}",
        f"dropped  {totals.tensors_dropped:>9,} tensors  {human_size(totals.nbytes_dropped):>9}",
        f"out      {totals.tensors_out:>9,} tensors  {human_size(totals.nbytes_out):>9}",
        f"needs    {human_size(disk_nbytes)} of disk, {human_size(memory_nbytes)} of buffers",
    ]
    for prefix, kept in plan.layers.items():
        lines += ["", f"layers of {printable(prefix)}* (new <- source): {layer_map_text(kept)}"]
    lines += _section("files", [_file_line(plan, number) for number in range(len(plan.files))])
    if plan.index:
        lines.append(f"  {printable(plan.index)}")
    lines += _section(
        "side files",
        [f"{printable(side.name):<40} {human_size(side.nbytes):>9}" for side in plan.side_files],
    )
    lines += _section(
        "config changes",
        [
            f"{printable(change.path)}: {_value(change.old)} -> {_value(change.new)}   ({change.rule})"
            for change in plan.config_changes
        ],
    )
    lines += _section("dropped", _dropped(plan))
    lines += _section("decisions", [f"{d.rule}: {printable(d.what)}" for d in plan.decisions])
    return "\n".join(lines) + "\n"


def plan_summary(plan: Plan, digest: str) -> dict[str, Any]:
    """The same for programs: a summary, never the tensors."""
    return {
        "plan": digest,
        "recipe": list(plan.recipe),
        "totals": {field: getattr(plan.totals, field) for field in plan.totals.__struct_fields__},
        "layers": plan.layers,
        "files": [{"name": f.name, "nbytes": f.nbytes, "tensors": len(f.tensors)} for f in plan.files],
        "side_files": [{"name": s.name, "nbytes": s.nbytes} for s in plan.side_files],
        "config_changes": [
            {"path": c.path, "old": c.old, "new": c.new, "rule": c.rule, "reader": c.reader}
            for c in plan.config_changes
        ],
        "dropped": [
            {"rule": rule, "tensors": count, "nbytes": nbytes} for rule, count, nbytes in _dropped_by_rule(plan)
        ],
        "decisions": [{"rule": d.rule, "what": d.what} for d in plan.decisions],
    }


def _section(title: str, entries: list[str]) -> list[str]:
    if not entries:
        return []
    listed = [f"  {entry}" for entry in entries[:MAX_LISTED]]
    if len(entries) > MAX_LISTED:
        listed.append(f"  and {len(entries) - MAX_LISTED} more")
    return ["", f"{title} ({len(entries)})", *listed]


def _step(step: dict[str, Any]) -> str:
    options = " ".join(f"{key}={_value(value)}" for key, value in step.items() if key != "operation")
    return f"{step['operation']} {options}".strip()


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return printable(text if len(text) <= 100 else text[:97] + "...")


def _file_line(plan: Plan, number: int) -> str:
    file = plan.files[number]
    return f"{printable(file.name):<40} {len(file.tensors):>7,} tensors  {human_size(file.nbytes):>9}"


def _dropped_by_rule(plan: Plan) -> list[tuple[str, int, int]]:
    counts: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for dropped in plan.dropped:
        counts[dropped.rule] += 1
        nbytes[dropped.rule] += dropped.nbytes
    return [(rule, count, nbytes[rule]) for rule, count in counts.items()]


def _dropped(plan: Plan) -> list[str]:
    return [
        f"{printable(rule):<30} {count:>7,} tensors  {human_size(size):>9}"
        for rule, count, size in _dropped_by_rule(plan)
    ]
