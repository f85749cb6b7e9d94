"""Boxes in bytes: what the executor copies, and the proof that a tensor is covered exactly once.

A `Move` is a box with its strides on both sides in bytes, neighbouring axes joined where both sides run on. A cut
that would fall inside a byte (F4, F6) cannot be a move and is refused here, before anything is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from surgery.errors import CannotApply
from surgery.safetensors_file import DTYPE_BITS
from surgery.tiling import Box, Content, Fill, Tile, Tiling, contiguous_strides

Axis = tuple[int, int, int]
"""Count, bytes between neighbours in the source, bytes between neighbours in the target."""


class Move(msgspec.Struct, frozen=True, gc=False):
    """Bytes from `source_file` at `source_start` to one output tensor at `target_start` (from its first byte).

    `axes` run from the outermost in; the last is the run, `(nbytes, 1, 1)`. `source_file` is -1 for a fill, whose
    bytes repeat `element`.
    """

    source_file: int
    source_start: int
    target_start: int
    axes: tuple[Axis, ...]
    element: bytes = b""

    @property
    def nbytes(self) -> int:
        return math.prod(axis[0] for axis in self.axes)

    @property
    def source_end(self) -> int:
        return self.source_start + 1 + sum((count - 1) * step for count, step, _ in self.axes)

    @property
    def target_end(self) -> int:
        return self.target_start + 1 + sum((count - 1) * step for count, _, step in self.axes)


def moves(content: Content, where: str = "") -> Iterator[Move]:
    """The moves that make `content`, in tile order; nothing for a tensor without elements."""
    if not isinstance(content, Tiling):
        if content.nbytes:
            yield Move(content.file, content.offset, 0, ((content.nbytes, 1, 1),))
        return
    for box in content.tiles:
        yield box_move(box, content, where)


def box_move(box: Box, target: Tiling, where: str = "") -> Move:
    """`box` of `target` in bytes; `where` names the tensor in the error that a split byte raises."""
    bits = DTYPE_BITS[target.dtype]
    target_strides = contiguous_strides(target.shape)
    target_start = sum(o * s for o, s in zip(box.offset, target_strides, strict=True))
    source_strides: Sequence[int] = target_strides if isinstance(box, Fill) else box.strides
    source_start = 0 if isinstance(box, Fill) else box.start
    axes = _joined_axes(box.shape, source_strides, target_strides)
    run = axes.pop() if axes and axes[-1][1:] == (1, 1) else (1, 1, 1)
    numbers = [source_start, target_start, run[0], *(n for _, *steps in axes for n in steps)]
    if any(number * bits % 8 for number in numbers):
        raise CannotApply(
            f"a cut of {target.dtype} [{', '.join(map(str, target.shape))}] would split a byte: "
            f"box at {list(box.offset)} of shape {list(box.shape)}",
            where,
            f"cut at multiples of {math.lcm(bits, 8) // bits} elements of the last axis",
        )
    if isinstance(box, Fill):
        return Move(
            -1,
            0,
            target_start * bits // 8,
            (*((n, 0, t * bits // 8) for n, _, t in axes), (run[0] * bits // 8, 1, 1)),
            bytes.fromhex(box.element),
        )
    return Move(
        box.source.file,
        box.source.offset + source_start * bits // 8,
        target_start * bits // 8,
        (*((n, s * bits // 8, t * bits // 8) for n, s, t in axes), (run[0] * bits // 8, 1, 1)),
    )


def _joined_axes(shape: Sequence[int], source: Sequence[int], target: Sequence[int]) -> list[Axis]:
    """Axes of more than one element, neighbours joined where the outer step is a whole inner axis on both sides."""
    axes: list[Axis] = []
    for count, source_step, target_step in zip(shape, source, target, strict=True):
        if count == 1:
            continue
        if axes and axes[-1][1:] == (count * source_step, count * target_step):
            axes[-1] = (axes[-1][0] * count, source_step, target_step)
        else:
            axes.append((count, source_step, target_step))
    return axes


def coverage_fault(content: Content) -> str | None:
    """Why the tiles of `content` do not cover it exactly once from within their sources; None where they do."""
    if not isinstance(content, Tiling):
        return None
    total = 0
    for box in content.tiles:
        fault = box_fault(box, content.dtype, content.shape)
        if fault is not None:
            return fault
        total += math.prod(box.shape)
    if total != math.prod(content.shape):
        return f"tiles cover {total} of {math.prod(content.shape)} elements"
    return _overlap(content.tiles)


def box_fault(box: Box, dtype: str, shape: Sequence[int]) -> str | None:
    """Why `box` is none of a tensor of `dtype` and `shape`, or leaves its source; None where it is sound."""
    if not len(box.offset) == len(box.shape) == len(shape):
        return f"a box of {len(box.shape)} axes in a tensor of {len(shape)}"
    for low, size, whole in zip(box.offset, box.shape, shape, strict=True):
        if low < 0 or size < 1 or low + size > whole:
            return f"the box at {list(box.offset)} of shape {list(box.shape)} leaves {list(shape)}"
    return _source_fault(box, dtype) if isinstance(box, Tile) else element_fault(box.element, dtype)


def element_fault(element: str, dtype: str) -> str | None:
    """Why `element` is no element of `dtype` in hexadecimal; None where it is."""
    nbytes = math.lcm(DTYPE_BITS[dtype], 8) // 8
    try:
        found = len(bytes.fromhex(element))
    except ValueError:
        return f"the element {element!r} is not hexadecimal"
    return None if found == nbytes else f"an element of {found} bytes for {dtype}, which has {nbytes}"


def _source_fault(tile: Tile, dtype: str) -> str | None:
    source = tile.source
    if source.dtype != dtype:
        return f"{source.name} is {source.dtype}, the output {dtype}: a dtype is never changed"
    if len(tile.strides) != len(tile.shape) or min((tile.start, *tile.strides)) < 0:
        return f"the strides {list(tile.strides)} do not fit a box of shape {list(tile.shape)}"
    last = tile.start + sum((n - 1) * s for n, s in zip(tile.shape, tile.strides, strict=True))
    if last >= math.prod(source.shape):
        return f"a tile reads element {last} of {source.name}, which has {math.prod(source.shape)}"
    return None


def _overlap(boxes: Sequence[Box]) -> str | None:
    """Two boxes that share an element, found by a sweep along the first axis that tells most boxes apart."""
    if len(boxes) < 2:
        return None
    rank = len(boxes[0].shape)
    axis = max(range(rank), key=lambda a: len({box.offset[a] for box in boxes}))
    active: list[Box] = []
    for box in sorted(boxes, key=lambda b: b.offset[axis]):
        active = [other for other in active if other.offset[axis] + other.shape[axis] > box.offset[axis]]
        for other in active:
            if all(
                a < b + m and b < a + n
                for a, n, b, m in zip(box.offset, box.shape, other.offset, other.shape, strict=True)
            ):
                return f"the boxes at {list(other.offset)} and {list(box.offset)} overlap"
        active.append(box)
    return None
