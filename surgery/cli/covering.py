"""The command that chooses layers: cover."""

from __future__ import annotations

from typing import Any

import click

from surgery.checkpoint import Checkpoint
from surgery.cli.options import SOURCE_OPTIONS, add_options
from surgery.cli.output import emit, emit_json, message
from surgery.draft import draft_of
from surgery.families.carrying import readers_of
from surgery.families.cover import Target, cover, cover_table
from surgery.families.records import require_family
from surgery.layer_ranges import compact_ranges
from surgery.operations.trim import depth_of
from surgery.operations.trim_tensors import parts_of


@click.command("cover")
@click.argument("src")
@click.option("--need", help="Only kinds whose names hold one of these words, separated by commas.")
@click.option(
    "--for", "reader", type=click.Choice(["transformers", "vllm"]), help="What this program reads; both else."
)
@click.option("--as", "named", metavar="TYPE", help="Take the word of another model type's record.")
@click.option("--json", "as_json", is_flag=True, help="Selection and table as one JSON document on stdout.")
@add_options(SOURCE_OPTIONS)
def cover_command(
    src: str, need: str | None, reader: str | None, named: str | None, as_json: bool, **source_options: Any
) -> None:
    """The fewest layers of SRC that keep every kind: the selection on stdout, the table on stderr. Writes nothing.

    \b
    Example:
      surgery cover SRC
      surgery cover SRC --for vllm --json

    In a shell, --layers "$(surgery cover SRC)" hands the selection to trim.
    """
    draft = draft_of(Checkpoint.open(src, **source_options))
    family = require_family(draft.config, "cover", named or "")
    assert draft.config is not None
    depth = depth_of(family, draft.config)
    readers = readers_of(family, reader or "")
    parts = parts_of(draft, family, depth)
    words = [word.strip() for word in (need or "").split(",") if word.strip()]
    selection = cover(family, draft.config, depth, readers, words)
    table = cover_table(family, draft.config, depth, readers, selection, len(parts.stages), len(parts.stages))
    if as_json:
        emit_json({"layers": selection, "targets": table})
        return
    for line in table_lines(table):
        message(line)
    emit(compact_ranges(selection))


def table_lines(table: list[Target]) -> list[str]:
    """The table for people: target, layers, dependencies, request, loss."""
    lines = []
    for row in table:
        if not row.source_layers:
            lines.append(row.kind)
        else:
            plural = "s" if len(row.layers) != 1 else ""
            kept = f"layer{plural} {compact_ranges(row.layers)}" if row.layers else "no layer"
            lines.append(f"{row.kind}: {kept}, of {len(row.source_layers)}: {compact_ranges(row.source_layers)[:40]}")
        if row.depends_on:
            lines.append(f"  depends on {compact_ranges(row.depends_on)}")
        lines.append(f"  request: {row.request}")
        if row.lost:
            lines.append(f"  lost: {row.lost}")
    return lines
