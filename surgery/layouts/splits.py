"""Splits: which intervals of an axis every rank has. One description serves splitting, merging and re-splitting.

A rank's tensor is its intervals one after another, and padding behind them. Everything is a composition of the tiling
algebra, so a merge and another split are still one read and one write of every byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec

from surgery.errors import CannotApply
from surgery.safetensors_file import DTYPE_BITS, StoredTensor
from surgery.tensor import concat, narrow, pad
from surgery.tiling import Content, Tile, Tiling, contiguous_strides, tiling

Interval = tuple[int, int]
"""Start and length, in elements of the whole tensor's axis."""

WHOLE_AXIS = -100
MAX_SHOWN_SIZES = 16


class Split(msgspec.Struct, frozen=True):
    """`ranks` has each rank's intervals of an axis of `size`, in its own order; `padding` elements behind them.

    `axis` counts from the end (-1 is the last). `WHOLE_AXIS`: every rank has the whole tensor.
    """

    axis: int
    size: int
    ranks: tuple[tuple[Interval, ...], ...]
    padding: tuple[int, ...] = ()

    @property
    def is_whole(self) -> bool:
        return self.axis == WHOLE_AXIS

    def length(self, rank: int) -> int:
        """How long the axis is on a rank."""
        return sum(length for _, length in self.ranks[rank]) + (self.padding[rank] if self.padding else 0)


def whole(ranks: int) -> Split:
    """Every rank has all of it."""
    return Split(WHOLE_AXIS, 0, ((),) * ranks)


def cut(axis: int, size: int, ranks: int, unit: int = 1, what: str = "") -> Split:
    """Equal contiguous parts, cut at multiples of `unit`. Raises `CannotApply` with the rank counts that work."""
    if size % unit or (size // unit) % ranks:
        parts = size // unit if size % unit == 0 else 0
        works = [str(count) for count in range(1, min(parts, 1024) + 1) if parts % count == 0][:MAX_SHOWN_SIZES]
        of = f" in units of {unit}" if unit > 1 else ""
        raise CannotApply(
            f"{what}: {size}{of} cannot be cut into {ranks} equal parts",
            what,
            f"--tp {', '.join(works)} work" if works else f"no number of ranks works: {size} is no multiple of {unit}",
        )
    length = size // ranks
    return Split(axis, size, tuple(((rank * length, length),) for rank in range(ranks)))


def chunked(axis: int, size: int, ranks: int) -> Split:
    """torch.chunk's rule: parts of the rounded-up length, the last ones shorter or empty."""
    length = -(-size // ranks)
    starts = [min(rank * length, size) for rank in range(ranks + 1)]
    return Split(axis, size, tuple(((a, b - a),) if b > a else () for a, b in pairwise(starts)))


def heads(axis: int, count: int, width: int, ranks: int, what: str = "") -> Split:
    """Whole heads. With more ranks than heads each head is on `ranks / count` neighbours (vLLM's rule for KV heads)."""
    if ranks <= count:
        return cut(axis, count * width, ranks, width, what)
    if ranks % count:
        works = sorted({n for n in range(1, 2 * ranks + 1) if count % n == 0 or n % count == 0})[:MAX_SHOWN_SIZES]
        raise CannotApply(
            f"{what}: {count} heads on {ranks} ranks: neither divides the other",
            what,
            f"--tp {', '.join(map(str, works))} work",
        )
    copies = ranks // count
    return Split(axis, count * width, tuple(((rank // copies * width, width),) for rank in range(ranks)))


def padded(axis: int, size: int, quantum: int, ranks: int, what: str = "") -> Split:
    """Rows padded behind the last to a multiple of `quantum`, then equal parts (a vocabulary)."""
    full = -(-size // quantum) * quantum
    if full % ranks:
        works = [str(count) for count in range(1, 1025) if full % count == 0][:MAX_SHOWN_SIZES]
        raise CannotApply(
            f"{what}: {size} padded to {full} cannot be cut into {ranks} equal parts",
            what,
            f"--tp {', '.join(works)} work",
        )
    length = full // ranks
    intervals, padding = [], []
    for rank in range(ranks):
        start, end = min(rank * length, size), min((rank + 1) * length, size)
        intervals.append(((start, end - start),) if end > start else ())
        padding.append(length - (end - start))
    return Split(axis, size, tuple(intervals), tuple(padding) if any(padding) else ())


def sections(splits: Sequence[Split]) -> Split:
    """Parts of one axis one after another, each dealt by its own rule; a whole one needs its size in `size`."""
    axis = next(split.axis for split in splits if not split.is_whole)
    ranks = len(splits[0].ranks)
    dealt: list[tuple[Interval, ...]] = []
    for rank in range(ranks):
        intervals: list[Interval] = []
        start = 0
        for split in splits:
            mine = ((0, split.size),) if split.is_whole else split.ranks[rank]
            intervals += [(start + begin, length) for begin, length in mine]
            start += split.size
        dealt.append(tuple(intervals))
    return Split(axis, sum(split.size for split in splits), tuple(dealt))


def whole_section(size: int, ranks: int) -> Split:
    """A section of `sections` that every rank has."""
    return Split(WHOLE_AXIS, size, ((),) * ranks)


def scaled(split: Split, axis: int, size: int, factor: int, what: str) -> Split:
    """The split of a companion whose axis has one entry for `factor` of the weight's (a block, a pack, a group).

    Raises `CannotApply` where a cut falls inside one.
    """
    if split.is_whole:
        return split
    dealt: list[tuple[Interval, ...]] = []
    for intervals in split.ranks:
        mine: list[Interval] = []
        for start, length in intervals:
            end = start + length
            if start % factor or (end % factor and end != split.size):
                raise CannotApply(
                    f"{what}: a cut at {start if start % factor else end} falls inside a block of {factor}",
                    what,
                    _aligned(split, factor),
                )
            mine.append((start // factor, -(-end // factor) - start // factor))
        dealt.append(tuple(mine))
    return Split(axis, size, tuple(dealt))


def _aligned(split: Split, factor: int) -> str:
    works = [str(count) for count in range(1, 1025) if split.size % count == 0 and (split.size // count) % factor == 0][
        :MAX_SHOWN_SIZES
    ]
    return f"--tp {', '.join(works)} work for this tensor" if works else "no number of ranks cuts it at block borders"


def part(content: Content, split: Split, rank: int) -> Content:
    """What a rank has of `content`."""
    if split.is_whole:
        return content
    axis = split.axis + len(content.shape)
    mine = split.ranks[rank]
    if isinstance(content, StoredTensor) and len(mine) == 1 and mine[0][1] and not split.padding:
        # Nearly all of a large model: one box, made without the algebra's general way.
        start, length = mine[0]
        strides = contiguous_strides(content.shape)
        shape = (*content.shape[:axis], length, *content.shape[axis + 1 :])
        tile = Tile(content, start * strides[axis], strides, (0,) * len(shape), shape)
        return Tiling(content.dtype, shape, (tile,))
    pieces = [narrow(content, axis, start, length) for start, length in split.ranks[rank] if length]
    fill = split.padding[rank] if split.padding else 0
    if not pieces:
        empty = narrow(content, axis, 0, 0)
        return pad(empty, axis, 0, fill, bytes.fromhex(zero_element(content.dtype))) if fill else empty
    held = pieces[0] if len(pieces) == 1 else concat(pieces, axis)
    return pad(held, axis, 0, fill, bytes.fromhex(zero_element(content.dtype))) if fill else held


def zero_element(dtype: str) -> str:
    """Zero of a dtype in hexadecimal, as a fill takes it."""
    return bytes(math.lcm(DTYPE_BITS[dtype], 8) // 8).hex()


class Replica(msgspec.Struct, frozen=True):
    """Bytes that lie in two places and must be equal."""

    tile: Tile
    twin: Tile


class Joined(msgspec.Struct):
    """A whole tensor put together from the ranks' parts, and what must hold for that to be true."""

    content: Content
    replicas: list[Replica]
    padding: list[Tile]


def joined(parts: Sequence[Content | None], split: Split, name: str) -> Joined:
    """The inverse of `part`. None for a rank that has nothing of it.

    Raises `CannotApply` where the parts do not cover the tensor, or are of other shapes than the split says.
    """
    held = [each for each in parts if each is not None]
    if not held:
        raise CannotApply(f"no rank has {name}", name, "get the missing rank files")
    if len({each.dtype for each in held}) > 1:
        raise CannotApply(f"{name} has other dtypes on other ranks", name, "the rank files are not of one model")
    if split.is_whole:
        return _whole_of(held, name)
    axis = split.axis + len(held[0].shape)
    taken: dict[int, tuple[int, Content]] = {}
    replicas: list[Replica] = []
    padding: list[Tile] = []
    for rank, content in enumerate(parts):
        if content is None:
            if split.length(rank):
                raise CannotApply(f"rank {rank} has no {name}", name, "get the missing tensor")
            continue
        if content.shape[axis] != split.length(rank):
            raise CannotApply(
                f"{name} has shape {list(content.shape)} on rank {rank}; axis {axis} should be {split.length(rank)}",
                name,
                "the config beside the rank files must be the model's own",
            )
        at = 0
        for start, length in split.ranks[rank]:
            mine = narrow(content, axis, at, length)
            at += length
            there = taken.get(start)
            if there is None:
                taken[start] = (length, mine)
            elif there[0] == length:
                replicas += _pairs(mine, there[1])
            else:
                raise CannotApply(f"parts of {name} overlap", name, "this is a fault of ours: report it")
        if split.padding and split.padding[rank]:
            padding += [tile for tile in narrow(content, axis, at, split.padding[rank]).tiles if isinstance(tile, Tile)]
    position = 0
    for start, (length, _) in sorted(taken.items()):
        if start != position:
            raise CannotApply(f"{name} is not covered from {position} to {start}", name, "get the missing rank files")
        position += length
    if position != split.size:
        raise CannotApply(f"{name} ends at {position} of {split.size}", name, "get the missing rank files")
    ordered = [content for _, (_, content) in sorted(taken.items())]
    return Joined(ordered[0] if len(ordered) == 1 else concat(ordered, axis), replicas, padding)


def _whole_of(held: Sequence[Content], name: str) -> Joined:
    if len({each.shape for each in held}) > 1:
        shapes = sorted({str(list(each.shape)) for each in held})
        raise CannotApply(f"{name} should be alike on every rank; it has shapes {', '.join(shapes)}", name)
    return Joined(held[0], [pair for other in held[1:] for pair in _pairs(other, held[0])], [])


def _pairs(one: Content, other: Content) -> Iterator[Replica]:
    first, second = tiling(one).tiles, tiling(other).tiles
    for tile, twin in zip(first, second, strict=True):
        if isinstance(tile, Tile) and isinstance(twin, Tile):
            yield Replica(tile, twin)
