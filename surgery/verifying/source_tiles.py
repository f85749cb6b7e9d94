"""What the definition of a tiling says, evaluated with numpy on the bytes of two files: nothing is shared with the
code that wrote them.

A `Tile` has at `index` the element `start + sum(index * strides)` of its stored tensor. Everything is compared in
units: bytes, or for dtypes below a byte single bits, so one rule serves every dtype.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.tiling import Fill, Narrow, Remap, Tile, Tiling
from surgery.verifying.rehash import forget_pages, is_sparse, next_data, next_hole, open_regular, read_without_ahead

if TYPE_CHECKING:
    import numpy

    Array = numpy.ndarray[Any, Any]

BLOCK_NBYTES = 4 << 20
"""Bytes compared at a time; a block that lies scattered is read in a span of at most four times that."""

_SPREAD = 4
_SMALL_SPAN_NBYTES = 64 << 10
_FORGET_NBYTES = 64 << 20
_MAX_GRID_CELLS = 4 << 20

Box = tuple[tuple[int, int], ...]
"""Per axis begin and end, within a tile."""


class ByteFile:
    """One file, read in blocks that numpy looks at. Raises OSError where it ends too early."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_regular(path)
        self._descriptor = self._file.fileno()
        self._sparse = is_sparse(self._descriptor)
        if self._sparse:
            read_without_ahead(self._descriptor)
        self._unforgotten_nbytes = 0

    def close(self) -> None:
        self._forget()
        self._file.close()

    def _forget(self) -> None:
        if not self._sparse:
            forget_pages(self._descriptor, 0, os.fstat(self._descriptor).st_size)
        self._unforgotten_nbytes = 0

    def read(self, start: int, nbytes: int) -> Array:
        import numpy as np

        # Looking for holes moves the file's position, so it is set for every read.
        self._file.seek(start)
        self._unforgotten_nbytes += nbytes
        if self._unforgotten_nbytes > _FORGET_NBYTES:
            self._forget()
        array: Array = np.empty(nbytes, np.uint8)
        done = 0
        while done < nbytes:
            got = self._file.readinto(array[done:].data)
            if not got:
                raise OSError(errno.EIO, f"the file ends before byte {start + nbytes}", str(self.path))
            done += got
        return array

    def data(self, position: int, end: int) -> tuple[int, int]:
        """Begin and end of the next run in [position, end) that is in no hole."""
        if not self._sparse:
            return position, end
        start = next_data(self._descriptor, position, end)
        return start, next_hole(self._descriptor, start, end) if start < end else end


def first_difference(
    first: ByteFile, at_first: int, second: ByteFile, at_second: int, nbytes: int, advance: Callable[[int], None]
) -> int | None:
    """The first byte at which two ranges differ; None where they are equal. What is a hole in both is not read."""
    import numpy as np

    position = 0
    while position < nbytes:
        runs = [
            (begin - at, end - at)
            for file, at in ((first, at_first), (second, at_second))
            for begin, end in [file.data(at + position, at + nbytes)]
        ]
        start = min(begin for begin, _ in runs)
        end = min(max(end for _, end in runs), start + BLOCK_NBYTES) if start < nbytes else nbytes
        if start < end:
            one, other = first.read(at_first + start, end - start), second.read(at_second + start, end - start)
            if not np.array_equal(one, other):
                return start + int(np.flatnonzero(one != other)[0])
        advance(end - position)
        position = end
    return None


def coverage_fault(tiling: Tiling) -> str | None:
    """Whether the boxes cover every element exactly once; what is wrong where they do not.

    Counted on the grid that the boxes' own edges make, which is far smaller than the tensor.
    """
    import numpy as np

    shape = tiling.shape
    if 0 in shape:
        return None if not tiling.tiles else "boxes in a tensor without elements"
    for box in tiling.tiles:
        if len(box.offset) != len(shape) or len(box.shape) != len(shape):
            return "a box has another number of axes than the tensor"
        if any(o < 0 or n < 1 or o + n > size for o, n, size in zip(box.offset, box.shape, shape, strict=True)):
            return "a box reaches out of the tensor"
    edges = [
        sorted({0, size, *(o for box in tiling.tiles for o in (box.offset[a], box.offset[a] + box.shape[a]))})
        for a, size in enumerate(shape)
    ]
    if math.prod(len(edge) - 1 for edge in edges) > _MAX_GRID_CELLS:
        covered = sum(math.prod(box.shape) for box in tiling.tiles)
        return None if covered == math.prod(shape) else "the boxes do not cover the tensor once"
    grid = np.zeros([len(edge) - 1 for edge in edges], np.int32)
    places = [{value: number for number, value in enumerate(edge)} for edge in edges]
    for box in tiling.tiles:
        cells = tuple(slice(place[o], place[o + n]) for place, o, n in zip(places, box.offset, box.shape, strict=True))
        grid[cells] += 1
    return None if bool((grid == 1).all()) else "the boxes do not cover every element exactly once"


def tile_difference(
    tile: Tile | Fill,
    tiling: Tiling,
    out: ByteFile,
    out_offset: int,
    source: ByteFile | None,
    advance: Callable[[int], None],
) -> tuple[int, ...] | None:
    """The index in the tensor of a block of the tile that is not as it should be; None where all are right."""
    import numpy as np

    out_strides = _c_strides(tiling.shape)
    bits, source_bits = element_bits(tiling.dtype), element_bits(tiling.stored_dtype)
    source_strides = tile.strides if isinstance(tile, Tile) else (0,) * len(tile.shape)
    for box in _blocks(tile.shape, out_strides, source_strides, bits):
        shape = [end - begin for begin, end in box]
        at = [o + begin for o, (begin, _) in zip(tile.offset, box, strict=True)]
        first = sum(a * s for a, s in zip(at, out_strides, strict=True))
        held = _load(out, out_offset, first, shape, out_strides, bits)
        if isinstance(tile, Tile):
            assert source is not None
            begin = tile.start + sum(b * s for (b, _), s in zip(box, tile.strides, strict=True))
            wanted = _load(source, tile.source.offset, begin, shape, tile.strides, source_bits)
            if tiling.kernel is not None:
                wanted = _computed(wanted, tiling)
        else:
            wanted = _pattern(tile.element, bits, first, shape, out_strides)
        if not np.array_equal(held, np.broadcast_to(wanted, held.shape)):
            return tuple(at)
        advance(math.prod(shape) * bits // 8)
    return None


def element_bits(dtype: str) -> int:
    """Bits an element, read from the name: BF16 has 16, F8_E4M3 8, F4 4; BOOL takes a byte."""
    digits = re.search(r"[0-9]+", dtype)
    return int(digits[0]) if digits else 8


def _computed(units: Array, tiling: Tiling) -> Array:
    """What the kernel's definition makes of stored elements, byte units on the last axis. Raises ValueError for one
    that it does not define."""
    import numpy as np

    kernel, stored = tiling.kernel, tiling.stored_dtype
    whole = np.ascontiguousarray(units)
    if isinstance(kernel, Remap):
        signed = "u" if stored.startswith("U") else "i"
        values = whole.view(f"<{signed}{whole.shape[-1]}")
        new = dict(enumerate(kernel.table))
        made = np.vectorize(lambda value: new.get(int(value), -1), otypes=[np.int64])(values)
        if (made < 0).any():
            raise ValueError("an id that has no new one")
        result: Array = made.astype(values.dtype).view(np.uint8)
        return result
    if isinstance(kernel, Narrow):
        # Widened again it must be what is stored.
        kept: Array = np.ascontiguousarray(whole[..., 2:]) if tiling.dtype == "BF16" else whole[..., :0]
        if tiling.dtype == "F16":
            kept = whole.view("<f4").astype("<f2").view(np.uint8)
        elif tiling.dtype == "F8_E8M0":
            kept = (np.log2(whole.view("<f4")) + 127).astype(np.uint8)
        return kept
    single: Array
    if stored == "BF16":
        single = np.concatenate([np.zeros_like(whole), whole], axis=-1).view("<f4")
    elif stored == "F8_E8M0":
        single = np.where(whole == 255, np.nan, np.ldexp(1.0, whole.astype(int) - 127)).astype("<f4")
    else:
        single = whole.view("<f2" if stored == "F16" else "<f4").astype("<f4")
    if tiling.dtype == "BF16":
        upper: Array = single.view(np.uint8)[..., 2:]
        return upper
    wide: Array = single.astype("<f4" if tiling.dtype == "F32" else "<f8").view(np.uint8)
    return wide


def _c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _blocks(
    shape: Sequence[int], out_strides: Sequence[int], source_strides: Sequence[int], bits: int
) -> Iterator[Box]:
    """The tile in boxes of at most BLOCK_NBYTES. The axis that reaches farthest in both files is halved first, so
    that a transposed block is about square and neither side is read in crumbs."""
    # A bit takes a byte once it is unpacked.
    limit = max(1, BLOCK_NBYTES // (bits // 8 if bits % 8 == 0 else bits))
    waiting: list[Box] = [tuple((0, size) for size in shape)]
    while waiting:
        box = waiting.pop()
        if math.prod(end - begin for begin, end in box) <= limit:
            yield box
            continue
        reach = [
            (end - begin - 1) * (abs(out) + abs(source))
            for (begin, end), out, source in zip(box, out_strides, source_strides, strict=True)
        ]
        axis = reach.index(max(reach))
        begin, end = box[axis]
        middle = (begin + end) // 2
        waiting.append((*box[:axis], (middle, end), *box[axis + 1 :]))
        waiting.append((*box[:axis], (begin, middle), *box[axis + 1 :]))


def _load(file: ByteFile, base: int, first: int, shape: Sequence[int], strides: Sequence[int], bits: int) -> Array:
    """Elements `first + sum(index * strides)` of the tensor at byte `base`, as units on one more axis."""
    import numpy as np

    last = first + sum((size - 1) * step for size, step in zip(shape, strides, strict=True) if step > 0)
    lowest = first + sum((size - 1) * step for size, step in zip(shape, strides, strict=True) if step < 0)
    count = math.prod(shape)
    farthest = max(range(len(shape)), key=lambda axis: abs(strides[axis]) * (shape[axis] > 1), default=None)
    span = last - lowest + 1
    if span > _SPREAD * count and span * bits > 8 * _SMALL_SPAN_NBYTES and farthest is not None:
        # Scattered: most of what lies between is not worth reading. Halves along the axis that reaches farthest.
        middle = shape[farthest] // 2
        parts = [
            _load(
                file,
                base,
                first + begin * strides[farthest],
                [*shape[:farthest], size, *shape[farthest + 1 :]],
                strides,
                bits,
            )
            for begin, size in ((0, middle), (middle, shape[farthest] - middle))
        ]
        return np.concatenate(parts, axis=farthest)
    start_bit, end_bit = lowest * bits, (last + 1) * bits
    start, end = start_bit // 8, -(-end_bit // 8)
    units = file.read(base + start, end - start)
    width, skipped = bits // 8, (first - lowest) * bits // 8
    if bits % 8:
        units = np.unpackbits(units, bitorder="little")
        width, skipped = bits, first * bits - start * 8
    return np.lib.stride_tricks.as_strided(units[skipped:], (*shape, width), (*(step * width for step in strides), 1))


def _pattern(element: str, bits: int, first: int, shape: Sequence[int], out_strides: Sequence[int]) -> Array:
    """The units that a fill has in a block: one element, or below a byte the elements of whole bytes by turns."""
    import numpy as np

    data: Array = np.frombuffer(bytes.fromhex(element), np.uint8)
    if bits % 8 == 0:
        return data
    elements: Array = np.unpackbits(data, bitorder="little").reshape(-1, bits)
    if (elements == elements[0]).all():
        return elements[:1]
    turns = np.array(
        [
            (first + sum(i * s for i, s in zip(index, out_strides, strict=True))) % len(elements)
            for index in itertools.product(*(range(size) for size in shape))
        ]
    )
    patterned: Array = elements[turns].reshape(*shape, bits)
    return patterned
