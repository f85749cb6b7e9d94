"""The page that `diff` prints. Of each kind of difference the first 20, then a count."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from surgery.comparison import Comparison, ConfigDifference, Side, SideFileDifference
from surgery.errors import MAX_LISTED_PROBLEMS, printable
from surgery.sizes import human_size

_MAX_VALUE = 60
_SIGNS = {"added": "+", "removed": "-", "changed": "~"}


def comparison_page(comparison: Comparison) -> str:
    lines = [_side("A", comparison.a), _side("B", comparison.b)]
    for label, tensors in (("only in A", comparison.only_in_a), ("only in B", comparison.only_in_b)):
        total = human_size(sum(tensor.nbytes for tensor in tensors))
        shown = [f"{t.name}  {t.dtype} {list(t.shape)}, {human_size(t.nbytes)}" for t in tensors]
        lines += _section(f"{label}: {_counted(len(tensors), 'tensor')}, {total}", shown)
    for label, differing in (("dtype", comparison.dtypes), ("shape", comparison.shapes)):
        shown = [f"{tensor.name}  {tensor.a} -> {tensor.b}" for tensor in differing]
        lines += _section(f"{label} differs: {_counted(len(shown), 'tensor')}", shown)
    shown = [f"{tensor.name}  {human_size(tensor.nbytes)}" for tensor in comparison.bytes]
    lines += _section(f"bytes differ: {_counted(len(shown), 'tensor')}", shown)
    shown = [_config(change) for change in comparison.config]
    lines += _section(f"config differs: {_counted(len(shown), 'value')}", shown)
    shown = [f"{found.key}: {_value(found.a)} -> {_value(found.b)}" for found in comparison.metadata]
    lines += _section(f"metadata of the headers differs: {_counted(len(shown), 'key')}", shown)
    lines += _side_files(comparison.side_files)
    if comparison.other_layout:
        lines.append("layout: the tensors lie in other files or places; that is storage, no difference of the model")
    lines.append(_verdict(comparison))
    return "\n".join(lines)


def _side(label: str, side: Side) -> str:
    counts = f"{_counted(side.tensors, 'tensor')}, {human_size(side.nbytes)} in {_counted(side.files, 'file')}"
    return f"{label}: {printable(side.source)}: {counts}"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _section(headline: str, shown: Sequence[str]) -> list[str]:
    if not shown:
        return []
    lines = [headline, *(f"  {printable(line)}" for line in shown[:MAX_LISTED_PROBLEMS])]
    if len(shown) > MAX_LISTED_PROBLEMS:
        lines.append(f"  and {len(shown) - MAX_LISTED_PROBLEMS:,} more")
    return lines


def _value(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 3]}..."


def _config(change: ConfigDifference) -> str:
    sign = _SIGNS[change.change]
    if change.path == "config.json":
        return f"{sign} config.json"
    if change.change == "changed":
        return f"{sign} {change.path}: {_value(change.a)} -> {_value(change.b)}"
    return f"{sign} {change.path}: {_value(change.b if change.change == 'added' else change.a)}"


def _side_files(found: list[SideFileDifference]) -> list[str]:
    counted = [f"{_SIGNS[side.change]} {side.name}" for side in found if not side.document]
    documents = [f"{_SIGNS[side.change]} {side.name}" for side in found if side.document]
    return [
        *_section(f"side files differ: {_counted(len(counted), 'file')}", counted),
        *_section(f"documents differ, which does not count: {_counted(len(documents), 'file')}", documents),
    ]


def _verdict(comparison: Comparison) -> str:
    looked = (
        "bytes not compared"
        if comparison.nbytes_compared is None
        else f"{human_size(comparison.nbytes_compared)} compared"
    )
    equal = f"{_counted(comparison.equal_tensors, 'tensor')} equal in both, {looked}"
    return f"same: {equal}" if comparison.same else f"different: {equal}"
