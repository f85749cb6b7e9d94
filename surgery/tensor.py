"""The algebra of tilings: cut, choose, join, fill, reshape and transpose tensors as byte moves.

Fusing, unfusing, expert selection, transposes and tensor-parallel cuts are all compositions of these, exact for
every dtype, with no torch. Every function maps tilings to tilings and touches no bytes, so a tensor that was
narrowed, stacked and cut again is still read from disk once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from surgery.errors import CannotApply
from surgery.reshaping import reshape_boxes
from surgery.safetensors_file import DTYPE_BITS
from surgery.tiling import Box, Content, Fill, Kernel, Tile, Tiling, tiling


def narrow(content: Content, axis: int, start: int, length: int) -> Tiling:
    """Elements `[start, start + length)` along `axis`."""
    return take(content, axis, range(start, start + length))


def take(content: Content, axis: int, indices: Sequence[int]) -> Tiling:
    """The elements `indices` along `axis`, in that order; repeats copy again. As `numpy.take`, indices >= 0."""
    whole = tiling(content)
    axis = _axis(whole, axis)
    size = whole.shape[axis]
    for index in indices:
        if not 0 <= index < size:
            raise CannotApply(
                f"index {index} on axis {axis} of a tensor of shape {list(whole.shape)}; it has 0 to {size - 1}"
            )
    tiles: list[Box] = []
    for position, first, step, count in _progressions(indices):
        for tile in whole.tiles:
            taken = _take_progression(tile, axis, position, first, step, count)
            if taken is not None:
                tiles.append(taken)
    return _tiling(whole, _replaced(whole.shape, axis, len(indices)), tiles, axis)


def concat(contents: Sequence[Content], axis: int = 0) -> Tiling:
    """The tensors one after another along `axis`; dtypes and the other axes must agree."""
    wholes = [tiling(content) for content in contents]
    if not wholes:
        raise CannotApply("nothing to concatenate")
    first = wholes[0]
    axis = _axis(first, axis)
    tiles: list[Box] = []
    position = 0
    for whole in wholes:
        if whole.dtype != first.dtype:
            raise CannotApply(f"cannot concatenate {whole.dtype} to {first.dtype}: dtypes are never changed")
        if whole.kernel != first.kernel:
            raise CannotApply("cannot concatenate tensors whose values are computed in different ways")
        if len(whole.shape) != len(first.shape) or _replaced(whole.shape, axis, 0) != _replaced(first.shape, axis, 0):
            raise CannotApply(f"cannot concatenate shape {list(whole.shape)} to {list(first.shape)} on axis {axis}")
        for tile in whole.tiles:
            moved = _replaced(tile.offset, axis, tile.offset[axis] + position)
            tiles.append(msgspec.structs.replace(tile, offset=moved))
        position += whole.shape[axis]
    return _tiling(first, _replaced(first.shape, axis, position), tiles, axis)


def stack(contents: Sequence[Content], axis: int = 0) -> Tiling:
    """The tensors, all of one shape, side by side along a new axis `axis`."""
    expanded = []
    for content in contents:
        whole = tiling(content)
        at = axis if axis >= 0 else axis + len(whole.shape) + 1
        expanded.append(reshape(whole, (*whole.shape[:at], 1, *whole.shape[at:])))
    return concat(expanded, axis)


def unstack(content: Content, axis: int = 0) -> list[Tiling]:
    """The slices along `axis`, each without it."""
    whole = tiling(content)
    axis = _axis(whole, axis)
    shape = (*whole.shape[:axis], *whole.shape[axis + 1 :])
    return [reshape(narrow(whole, axis, index, 1), shape) for index in range(whole.shape[axis])]


def pad(content: Content, axis: int, before: int, after: int, element: bytes) -> Tiling:
    """`before` and `after` more elements along `axis`, each `element` (`Fill` says how many bytes that is)."""
    whole = tiling(content)
    axis = _axis(whole, axis)
    bits = DTYPE_BITS[whole.dtype]
    if whole.kernel is not None:
        raise CannotApply("cannot pad a tensor whose values are computed")
    if len(element) * 8 != math.lcm(bits, 8):
        raise CannotApply(f"a fill of {whole.dtype} takes {math.lcm(bits, 8) // 8} bytes, not {len(element)}")

    def filled(count: int) -> Tiling:
        shape = _replaced(whole.shape, axis, count)
        boxes = () if 0 in shape else (Fill(element.hex(), (0,) * len(shape), shape),)
        return Tiling(whole.dtype, shape, boxes)

    return concat([filled(before), whole, filled(after)], axis)


def computed(content: Content, kernel: Kernel, dtype: str = "") -> Tiling:
    """Every element made into another by `kernel`; `dtype` is that of the result, the tensor's own when left out."""
    whole = tiling(content)
    if whole.kernel is not None:
        raise CannotApply("the tensor's values are computed already")
    return Tiling(dtype or whole.dtype, whole.shape, whole.tiles, kernel)


def transpose(content: Content, axes: Sequence[int]) -> Tiling:
    """Axes in the order `axes`, as `numpy.transpose`."""
    whole = tiling(content)
    if sorted(axes) != list(range(len(whole.shape))):
        raise CannotApply(f"axes {list(axes)} are not an order of the {len(whole.shape)} axes of the tensor")

    def pick(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(values[axis] for axis in axes)

    tiles: list[Box] = []
    for tile in whole.tiles:
        if isinstance(tile, Tile):
            tiles.append(Tile(tile.source, tile.start, pick(tile.strides), pick(tile.offset), pick(tile.shape)))
        else:
            tiles.append(Fill(tile.element, pick(tile.offset), pick(tile.shape)))
    return Tiling(whole.dtype, pick(whole.shape), tuple(tiles), whole.kernel)


def reshape(content: Content, shape: Sequence[int]) -> Tiling:
    """The same elements in C order as `shape`."""
    whole = tiling(content)
    shape = tuple(shape)
    if math.prod(shape) != math.prod(whole.shape):
        raise CannotApply(f"shape {list(whole.shape)} has not the elements of {list(shape)}")
    if 0 in shape:
        return Tiling(whole.dtype, shape, (), whole.kernel)
    return Tiling(whole.dtype, shape, reshape_boxes(whole.tiles, whole.shape, shape), whole.kernel)


def _axis(whole: Tiling, axis: int) -> int:
    rank = len(whole.shape)
    if not -rank <= axis < rank:
        raise CannotApply(f"axis {axis} of a tensor of shape {list(whole.shape)}")
    return axis % rank


def _replaced(values: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return (*values[:axis], value, *values[axis + 1 :])


def _progressions(indices: Sequence[int]) -> Iterable[tuple[int, int, int, int]]:
    """`indices` as runs `(position, first, step, count)` with a constant step >= 0, longest first come."""
    if isinstance(indices, range) and indices.step > 0:
        if len(indices):
            yield 0, indices[0], indices.step, len(indices)
        return
    position = 0
    while position < len(indices):
        first, count, step = indices[position], 1, 1
        if position + 1 < len(indices) and indices[position + 1] >= first:
            step = indices[position + 1] - first
            while position + count < len(indices) and indices[position + count] == first + count * step:
                count += 1
        yield position, first, step, count
        position += count


def _take_progression(tile: Box, axis: int, position: int, first: int, step: int, count: int) -> Box | None:
    """The part of `tile` that the progression meets, placed from `position` on."""
    low, high = tile.offset[axis], tile.offset[axis] + tile.shape[axis]
    if step == 0:
        begin, end = (0, count) if low <= first < high else (0, 0)
    else:
        begin = max(0, -(-(low - first) // step))
        end = min(count, -(-(high - first) // step))
    if begin >= end:
        return None
    offset = _replaced(tile.offset, axis, position + begin)
    shape = _replaced(tile.shape, axis, end - begin)
    if isinstance(tile, Fill):
        return Fill(tile.element, offset, shape)
    start = tile.start + (first + begin * step - low) * tile.strides[axis]
    return Tile(tile.source, start, _replaced(tile.strides, axis, tile.strides[axis] * step), offset, shape)


def _tiling(like: Tiling, shape: tuple[int, ...], tiles: list[Box], axis: int) -> Tiling:
    """A tiling of `tiles`, dtype and kernel those of `like`, with those joined that follow one another along `axis`."""
    if 0 in shape:
        return Tiling(like.dtype, shape, (), like.kernel)
    joined: list[Box] = []
    for tile in tiles:
        both = _joined(joined[-1], tile, axis) if joined else None
        if both is None:
            joined.append(tile)
        else:
            joined[-1] = both
    return Tiling(like.dtype, shape, tuple(joined), like.kernel)


def _joined(left: Box, right: Box, axis: int) -> Box | None:
    """One box for two neighbours along `axis`; None where they are not a regular continuation."""
    shape = _replaced(left.shape, axis, left.shape[axis] + right.shape[axis])
    follows = right.offset == _replaced(left.offset, axis, left.offset[axis] + left.shape[axis]) and _replaced(
        right.shape, axis, 0
    ) == _replaced(left.shape, axis, 0)
    if not follows:
        return None
    if isinstance(left, Fill) or isinstance(right, Fill):
        same = isinstance(left, Fill) and isinstance(right, Fill) and left.element == right.element
        return msgspec.structs.replace(left, shape=shape) if same else None
    if left.source is not right.source and left.source != right.source:
        return None
    if any(left.strides[a] != right.strides[a] for a in range(len(shape)) if a != axis and shape[a] != 1):
        return None
    # An axis of length 1 has no stride of its own: it takes the one that the join would need.
    step, over = divmod(right.start - left.start, left.shape[axis])
    fits = (
        over == 0
        and step >= 0
        and (left.shape[axis] == 1 or left.strides[axis] == step)
        and (right.shape[axis] == 1 or right.strides[axis] == step)
    )
    if not fits:
        return None
    return Tile(left.source, left.start, _replaced(left.strides, axis, step), left.offset, shape)
