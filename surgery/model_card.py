"""The README.md of an output directory: in words, what was done and how to serve it.

It names no paths, host or time: the same plan gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from surgery.layer_ranges import layer_map_text

if TYPE_CHECKING:
    from surgery.draft import ConfigChange
    from surgery.plan_types import Totals


def model_card(
    recipe: Sequence[Mapping[str, Any]],
    layers: Mapping[str, Sequence[int]],
    config_changes: Iterable[ConfigChange],
    totals: Totals,
) -> str:
    """Markdown for people; the manifest beside it has the same for programs."""
    lines = [
        "# Edited checkpoint",
        "",
        "Made from another checkpoint by [surgery](https://pypi.org/project/checkpoint-surgery/); "
        "tensors are byte-identical copies, but for those that `surgery.json` records with a kernel. It "
        "has every tensor's checksum and source.",
        "",
    ]
    dummy = any(step.get("operation") == "dummy" for step in recipe)
    if dummy:
        lines += ["There are no weights here: an engine makes them up (`vllm serve . --load-format dummy`).", ""]
    if recipe:
        lines += ["## What was done", ""]
        lines += [f"{number}. `{_step(step)}`" for number, step in enumerate(recipe, 1)]
        lines.append("")
    for prefix, kept in layers.items():
        lines += [f"Layers of `{prefix}*`, new <- source: {layer_map_text(kept)}.", ""]
    changes = list(config_changes)
    if changes:
        lines += ["## Config changes", "", "| field | old | new | rule |", "|---|---|---|---|"]
        lines += [
            f"| `{change.path}` | `{_short(change.old)}` | `{_short(change.new)}` | {change.rule} |"
            for change in changes
        ]
        lines.append("")
    lines += [
        "## Accounting",
        "",
        f"{totals.tensors_in} tensors ({totals.nbytes_in} bytes) came in = {totals.tensors_kept} kept "
        f"({totals.nbytes_kept}) + {totals.tensors_dropped} dropped ({totals.nbytes_dropped}); "
        f"{totals.tensors_out} tensors ({totals.nbytes_out} bytes) went out.",
        "",
        "## Check and serve",
        "",
        "```sh",
        "surgery verify .",
        "vllm serve . --load-format dummy" if dummy else "vllm serve .",
        "```",
        "",
    ]
    return "\n".join(lines)


def _step(step: Mapping[str, Any]) -> str:
    options = " ".join(f"{key}={_short(value)}" for key, value in step.items() if key != "operation")
    return f"{step.get('operation', '?')} {options}".strip()


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = text.replace("|", "\\|").replace("`", "'").replace("\n", " ")
    return text if len(text) <= 120 else text[:117] + "..."
