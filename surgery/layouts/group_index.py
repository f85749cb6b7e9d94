"""GPTQ's `g_idx`: which group of scales every input row belongs to. Data that decides how a row cut can be made.

In order (`row // group`) a cut at group borders takes scales with it, and a rank counts its groups from 0. With
act-order rows of any group lie anywhere: `g_idx` is cut with its rows, and every rank needs all scales (case P08).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from surgery.layouts.splits import Split
from surgery.safetensors_file import DTYPE_BITS
from surgery.tensor import narrow
from surgery.tiling import Content, Fill, Tile, Tiling

LEAVES = ("g_idx", "weight_g_idx")
Values = Callable[[Content], Sequence[int]]
"""Reads a small tensor of integers."""


class GroupIndices(msgspec.Struct):
    """`ordered`: modules whose rows are in act-order; `groups`: rows a group of those in plain order."""

    ordered: frozenset[str]
    groups: dict[str, int]


class WholeIndex(msgspec.Struct):
    """An index in plain order, and the runs of one value that the source must have for that to be true."""

    content: Content
    constants: list[tuple[Tile, str]]


def group_indices(tensors: Mapping[str, Content], values: Values | None) -> GroupIndices:
    """Sort the model's indices; `values` None: nothing can be read, so every index counts as act-order."""
    ordered: set[str] = set()
    groups: dict[str, int] = {}
    for name, content in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf not in LEAVES:
            continue
        size = _group_size(tensors, module, content.shape[0])
        held = values(content) if values is not None and size else None
        if held is not None and all(value == row // size for row, value in enumerate(held)):
            groups[module] = size
        else:
            ordered.add(module)
    return GroupIndices(frozenset(ordered), groups)


def _group_size(tensors: Mapping[str, Content], module: str, rows: int) -> int:
    for leaf, axis in (("scales", -2), ("weight_scale", -1)):
        scales = tensors.get(f"{module}.{leaf}")
        if scales is not None and len(scales.shape) >= 2 and scales.shape[axis]:
            return -(-rows // scales.shape[axis])
    return 0


def dealt_group_index(name: str, content: Content, split: Split, indices: GroupIndices) -> list[Content] | None:
    """The ranks' own indices, counted from 0; None for any tensor that is not an index in plain order."""
    size = _plain(name, split, indices)
    if not size:
        return None
    return [plain_index(content.dtype, split.length(rank), size) for rank in range(len(split.ranks))]


def merged_group_index(
    name: str, parts: Sequence[Content | None], split: Split, indices: Sequence[GroupIndices]
) -> WholeIndex | None:
    """The whole index behind the ranks' own."""
    size = _plain(name, split, indices[0])
    held = [each for each in parts if each is not None]
    if not size or not held:
        return None
    constants = [constant for each in held for constant in constants_of(each, size)]
    return WholeIndex(plain_index(held[0].dtype, split.size, size), constants)


def constants_of(content: Content, size: int) -> list[tuple[Tile, str]]:
    """What an index in plain order has: a run of each value."""
    found = []
    for number, start in enumerate(range(0, content.shape[0], size)):
        for tile in narrow(content, 0, start, min(size, content.shape[0] - start)).tiles:
            if isinstance(tile, Tile):
                found.append((tile, _element(content.dtype, number)))
    return found


def _plain(name: str, split: Split, indices: GroupIndices) -> int:
    module, _, leaf = name.rpartition(".")
    return indices.groups.get(module, 0) if leaf in LEAVES and not split.is_whole else 0


def plain_index(dtype: str, length: int, size: int) -> Tiling:
    """`row // size` for every row."""
    fills = tuple(
        Fill(_element(dtype, number), (start,), (min(size, length - start),))
        for number, start in enumerate(range(0, length, size))
    )
    return Tiling(dtype, (length,), fills)


def _element(dtype: str, value: int) -> str:
    return value.to_bytes(DTYPE_BITS[dtype] // 8, "little").hex()
