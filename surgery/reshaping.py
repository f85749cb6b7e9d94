"""Boxes of one shape as boxes of another: the part of the tiling algebra that merges and splits axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise

from surgery.errors import CannotApply
from surgery.tiling import Box, Fill, Tile

MAX_TILES = 1 << 20
"""More boxes than this for one tensor means that no regular description of the move exists."""


def reshape_boxes(boxes: Sequence[Box], old_shape: Sequence[int], new_shape: Sequence[int]) -> tuple[Box, ...]:
    """`boxes` of a tensor of `old_shape` as boxes of the same elements in C order as `new_shape`.

    Axes are merged and split in the smallest groups whose sizes agree. A box that is no box of the new shape is
    cut into those that are; more than `MAX_TILES` of them is refused.
    """
    changed = [_without_unit_axes(box, old_shape) for box in boxes]
    old = [size for size in old_shape if size != 1]
    new = [size for size in new_shape if size != 1]
    axis = 0
    for merged, split in _axis_groups(old, new):
        if merged != split:
            while len(merged) > 1:
                inner = merged.pop()
                merged[-1] *= inner
                changed = _each(changed, partial(_merge_axes, axis=axis + len(merged) - 1, inner=inner))
            for place in range(len(split) - 1):
                inner = math.prod(split[place + 1 :])
                changed = _each(changed, partial(_split_axis, axis=axis + place, inner=inner))
        axis += len(split)
    return tuple(_with_unit_axes(box, new_shape) for box in changed)


def _axis_groups(old: list[int], new: list[int]) -> Iterable[tuple[list[int], list[int]]]:
    """The smallest groups of neighbouring axes, old and new, that hold the same number of elements."""
    i = j = 0
    while i < len(old) or j < len(new):
        merged, split = [old[i]], [new[j]]
        i, j = i + 1, j + 1
        while math.prod(merged) != math.prod(split):
            if math.prod(merged) < math.prod(split):
                merged.append(old[i])
                i += 1
            else:
                split.append(new[j])
                j += 1
        yield merged, split


def _each(tiles: list[Box], change: Callable[[Box], list[Box]]) -> list[Box]:
    changed: list[Box] = []
    for tile in tiles:
        changed.extend(change(tile))
        if len(changed) > MAX_TILES:
            raise CannotApply(f"a reshape needs more than {MAX_TILES} boxes: it has no regular description")
    return changed


def _rebuilt(tile: Box, start: int, axes: slice, replacement: Sequence[tuple[int, int, int]]) -> Box:
    """`tile` with the axes in `axes` replaced by `(offset, length, stride)` each, beginning at `start`."""

    def put(values: tuple[int, ...], which: int) -> tuple[int, ...]:
        listed = list(values)
        listed[axes] = [entry[which] for entry in replacement]
        return tuple(listed)

    if isinstance(tile, Fill):
        return Fill(tile.element, put(tile.offset, 0), put(tile.shape, 1))
    return Tile(tile.source, start, put(tile.strides, 2), put(tile.offset, 0), put(tile.shape, 1))


def _merge_axes(tile: Box, axis: int, inner: int) -> list[Box]:
    """Axes `axis` and `axis + 1` (the latter `inner` long in the tensor) as one."""
    offset, length = tile.offset[axis], tile.shape[axis]
    inner_offset, inner_length = tile.offset[axis + 1], tile.shape[axis + 1]
    start, stride, inner_stride = 0, inner, 1
    if isinstance(tile, Tile):
        start, stride, inner_stride = tile.start, tile.strides[axis], tile.strides[axis + 1]
    pair = slice(axis, axis + 2)
    if isinstance(tile, Fill):
        regular = inner_length == inner
    else:
        regular = inner_length == inner and stride == inner * inner_stride
    if regular:
        return [_rebuilt(tile, start, pair, [(offset * inner, length * inner, inner_stride)])]
    return [
        _rebuilt(
            tile,
            start + row * stride,
            pair,
            [((offset + row) * inner + inner_offset, inner_length, inner_stride)],
        )
        for row in range(length)
    ]


def _split_axis(tile: Box, axis: int, inner: int) -> list[Box]:
    """Axis `axis` as two, the second `inner` long: at most a part of a row, whole rows, a part of a row."""
    begin, end = tile.offset[axis], tile.offset[axis] + tile.shape[axis]
    start, stride = (tile.start, tile.strides[axis]) if isinstance(tile, Tile) else (0, 0)
    whole_rows = (-(-begin // inner) * inner, end // inner * inner)
    cuts = [begin, *(cut for cut in whole_rows if begin < cut < end), end]
    boxes = []
    for low, high in pairwise(sorted(set(cuts))):
        row, column = divmod(low, inner)
        rows = max(1, (high - low) // inner)
        boxes.append(
            _rebuilt(
                tile,
                start + (low - begin) * stride,
                slice(axis, axis + 1),
                [(row, rows, stride * inner), (column, min(inner, high - low), stride)],
            )
        )
    return boxes


def _without_unit_axes(tile: Box, shape: Sequence[int]) -> Box:
    kept = [axis for axis, size in enumerate(shape) if size != 1]

    def pick(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(values[axis] for axis in kept)

    if isinstance(tile, Fill):
        return Fill(tile.element, pick(tile.offset), pick(tile.shape))
    return Tile(tile.source, tile.start, pick(tile.strides), pick(tile.offset), pick(tile.shape))


def _with_unit_axes(tile: Box, shape: Sequence[int]) -> Box:
    def put(values: tuple[int, ...], unit: int) -> tuple[int, ...]:
        rest = iter(values)
        return tuple(unit if size == 1 else next(rest) for size in shape)

    if isinstance(tile, Fill):
        return Fill(tile.element, put(tile.offset, 0), put(tile.shape, 1))
    return Tile(tile.source, tile.start, put(tile.strides, 0), put(tile.offset, 0), put(tile.shape, 1))
