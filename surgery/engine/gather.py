"""Strided moves: the bytes of one work group that are not plain copies, each source byte read once.

A group is a set of moves whose sources or targets meet. It is cut into phases (moves whose byte spans overlap on
either side), and a phase that does not fit the buffer is cut into slabs along the axis with the largest step, the
same slab of every move at a time: rows of a column split are read once for all ranks, and ranks merged by column
are written in whole rows. Where that lockstep does not exist the moves run one by one, and a tensor whose bytes
then come out of order is hashed by reading it back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from surgery.engine.transfer import Channel
from surgery.engine.writing import Target
from surgery.errors import SourceError
from surgery.moves import Axis, Move

if TYPE_CHECKING:
    import numpy

Span = tuple[int, int]
_DENSE_RUN_NBYTES = 64 << 10
"""Runs this long are read alone where more than half of the bytes between them is not wanted."""


class Part(msgspec.Struct, frozen=True):
    """A move and what to do with its bytes: `copy` to the tensor, or compare with it (`equal`) or with the move's
    element (`constant`). `label` names it in a failure."""

    move: Move
    target: Target | None
    role: Literal["copy", "equal", "constant"] = "copy"
    label: str = ""


def run_group(channel: Channel, parts: Sequence[Part]) -> None:
    """Carry out all moves of a group, checks included. Raises `SourceError` where a check fails."""
    late: list[Part] = []
    _run(channel, list(parts), late)
    for part in late:
        # The bytes to compare with are only in the output by now.
        for piece in _slabs_of_one(part, len(channel.buffer)):
            _shot(channel, [piece], late=None)


def _run(channel: Channel, parts: list[Part], late: list[Part]) -> None:
    for phase in _phases(parts):
        _run_phase(channel, phase, late)


def _run_phase(channel: Channel, phase: list[Part], late: list[Part]) -> None:
    if len(phase) == 1 and _is_plain_copy(phase[0]):
        _stream(channel, phase[0])
        return
    need = _span_nbytes(phase)
    if need <= len(channel.buffer) and not _wasteful(phase):
        _shot(channel, phase, late)
        return
    leads = [_lead(part.move) for part in phase]
    counts = {part.move.axes[lead][0] for part, lead in zip(phase, leads, strict=True)}
    if len(counts) == 1:
        count = counts.pop()
        step = max(1, count * len(channel.buffer) // max(need, 1)) if not _wasteful(phase) else 1
        step = min(step, max(1, count // 2))
        for start in range(0, count, step):
            slab = [_slab(part, lead, start, min(step, count - start)) for part, lead in zip(phase, leads, strict=True)]
            _run(channel, slab, late)
        return
    for part in phase:
        if part.role == "equal":
            late.append(part)
        else:
            for piece in _slabs_of_one(part, len(channel.buffer)):
                _shot(channel, [piece], late)


def _is_plain_copy(part: Part) -> bool:
    return part.role == "copy" and part.move.source_file >= 0 and len(part.move.axes) == 1


def _stream(channel: Channel, part: Part) -> None:
    """One contiguous run, of any length, holes kept."""
    move, target = part.move, part.target
    assert target is not None
    with channel.sources.open(move.source_file) as source:
        for position, block in source.blocks(move.source_start, move.source_end, channel.buffer):
            at = move.target_start + position - move.source_start
            if isinstance(block, int):
                target.skip_zeros(channel.outputs, at, block)
                channel.moved(block)
            else:
                target.write(channel.outputs, at, block)
                channel.moved(len(block))


def _phases(parts: list[Part]) -> Iterator[list[Part]]:
    """`parts` in sets whose spans meet, in the order of their bytes in the outputs."""
    if len(parts) == 1:
        yield parts
        return
    parent = list(range(len(parts)))

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    spans: list[tuple[tuple[int, int], int, int, int]] = []
    for i, part in enumerate(parts):
        if part.move.source_file >= 0:
            spans.append(((0, part.move.source_file), part.move.source_start, part.move.source_end, i))
        if part.target is not None:
            spans.append(((1, id(part.target)), part.move.target_start, part.move.target_end, i))
    spans.sort()
    reach: tuple[tuple[int, int], int, int] | None = None
    for place, start, end, i in spans:
        if reach is not None and reach[0] == place and start < reach[1]:
            parent[find(i)] = find(reach[2])
            reach = (place, max(reach[1], end), i)
        else:
            reach = (place, end, i)
    phases: dict[int, list[Part]] = {}
    for i, part in enumerate(parts):
        phases.setdefault(find(i), []).append(part)
    yield from sorted(phases.values(), key=lambda phase: min(part.move.target_start for part in phase))


def _lead(move: Move) -> int:
    """The axis with the largest step on the side that is read (for a fill: written)."""
    side = 1 if move.source_file >= 0 else 2
    return max(range(len(move.axes)), key=lambda a: (move.axes[a][0] > 1, move.axes[a][side], -a))


def _slab(part: Part, axis: int, start: int, count: int) -> Part:
    """Elements `[start, start + count)` of `part` along `axis`."""
    move = part.move
    _, source_step, target_step = move.axes[axis]
    axes = list(move.axes)
    if count == 1 and axis != len(axes) - 1:
        del axes[axis]
    else:
        axes[axis] = (count, source_step, target_step)
    element = move.element
    if element and axis == len(move.axes) - 1:
        turn = start * source_step % len(element)
        element = element[turn:] + element[:turn]
    return msgspec.structs.replace(
        part,
        move=Move(
            move.source_file,
            move.source_start + start * source_step,
            move.target_start + start * target_step,
            tuple(axes),
            element,
        ),
    )


def _slabs_of_one(part: Part, limit: int) -> Iterator[Part]:
    """`part` in slabs that fit `limit` bytes, in source order."""
    need = _span_nbytes([part])
    if need <= limit and not _wasteful([part]):
        yield part
        return
    lead = _lead(part.move)
    count = part.move.axes[lead][0]
    if count == 1:
        yield part
        return
    step = 1 if _wasteful([part]) else min(max(1, count * limit // need), max(1, count // 2))
    for start in range(0, count, step):
        yield from _slabs_of_one(_slab(part, lead, start, min(step, count - start)), limit)


def _merged(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _source_spans(phase: Sequence[Part]) -> dict[int, list[Span]]:
    spans: dict[int, list[Span]] = {}
    for part in phase:
        if part.move.source_file >= 0:
            spans.setdefault(part.move.source_file, []).append((part.move.source_start, part.move.source_end))
    return {file: _merged(each) for file, each in spans.items()}


def _target_spans(phase: Sequence[Part]) -> dict[int, tuple[Target, list[Span]]]:
    spans: dict[int, tuple[Target, list[Span]]] = {}
    for part in phase:
        if part.target is not None:
            each = spans.setdefault(id(part.target), (part.target, []))[1]
            each.append((part.move.target_start, part.move.target_end))
    return {key: (target, _merged(each)) for key, (target, each) in spans.items()}


def _span_nbytes(phase: Sequence[Part]) -> int:
    sources = sum(end - start for spans in _source_spans(phase).values() for start, end in spans)
    targets = sum(end - start for _, spans in _target_spans(phase).values() for start, end in spans)
    return sources + targets


def _wasteful(phase: Sequence[Part]) -> bool:
    """Whether one read of the span would fetch mostly bytes that nobody wants, between runs long enough to seek."""
    runs = [part.move.axes[-1][0] for part in phase if part.move.source_file >= 0]
    if not runs or min(runs) < _DENSE_RUN_NBYTES or all(len(part.move.axes) == 1 for part in phase):
        return False
    wanted = sum(part.move.nbytes for part in phase if part.move.source_file >= 0)
    spans = sum(end - start for each in _source_spans(phase).values() for start, end in each)
    return spans > 2 * wanted


class _Arena:
    """Pieces of the one buffer, handed out in turn."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self._used = 0

    def take(self, nbytes: int) -> memoryview:
        piece = self._buffer[self._used : self._used + nbytes]
        if len(piece) < nbytes:
            # One element larger than the buffer cannot be (see `_slabs_of_one`), spans of a group can.
            return memoryview(bytearray(nbytes))
        self._used += nbytes
        return piece


def _shot(channel: Channel, phase: Sequence[Part], late: list[Part] | None) -> None:
    """Read every source span of `phase`, arrange the bytes, write every target span: one pass over the buffer.

    `late` None: comparisons whose counterpart is already in the output; otherwise those that cannot be made in
    this shot are put there.
    """
    arena = _Arena(channel.buffer)
    read: list[tuple[int, int, int, memoryview]] = []
    for file, spans in _source_spans(phase).items():
        with channel.sources.open(file) as source:
            for start, end in spans:
                piece = arena.take(end - start)
                source.fill(piece, start)
                read.append((file, start, end, piece))

    def source_view(move: Move) -> numpy.ndarray[Any, Any]:
        start, piece = next((s, p) for f, s, e, p in read if f == move.source_file and s <= move.source_start < e)
        return _strided(piece, move.source_start - start, move.axes, side=1)

    for part in phase:
        if part.role == "constant" and not _is_constant(source_view(part.move), part.move.element):
            raise SourceError(f"{part.label}: not every element is {part.move.element.hex()}", part.label)
    for target, spans in _target_spans(phase).values():
        mine = [part for part in phase if part.target is target]
        for start, end in spans:
            inside = [part for part in mine if start <= part.move.target_start < end]
            _shot_target(channel, target, start, end, inside, arena, source_view, late)
    channel.moved(sum(part.move.nbytes for part in phase if part.role == "copy"))


def _shot_target(
    channel: Channel,
    target: Target,
    start: int,
    end: int,
    parts: Sequence[Part],
    arena: _Arena,
    source_view: Callable[[Move], numpy.ndarray[Any, Any]],
    late: list[Part] | None,
) -> None:
    copies = [part for part in parts if part.role == "copy"]
    compares = [part for part in parts if part.role == "equal"]
    covered = sum(part.move.nbytes for part in copies) == end - start
    piece = arena.take(end - start)
    if not covered and late is None:
        channel.outputs.read(target.file, target.offset + start, piece)
    for part in copies:
        view = _strided(piece, part.move.target_start - start, part.move.axes, side=2)
        if part.move.source_file < 0:
            _fill(view, part.move.element)
        else:
            view[...] = source_view(part.move)
        if not covered:
            for at, nbytes in _runs(part.move):
                target.write(channel.outputs, at, piece[at - start : at - start + nbytes])
    if covered:
        target.write(channel.outputs, start, piece)
    for part in compares:
        if not covered and late is not None:
            late.append(part)
            continue
        view = _strided(piece, part.move.target_start - start, part.move.axes, side=2)
        if not (view == source_view(part.move)).all():
            raise SourceError(
                f"{part.label}: its bytes differ from its replica's",
                part.label,
                "the replicas of one tensor must be equal; check the source with `surgery inspect`",
            )


def _strided(buffer: memoryview, offset: int, axes: Sequence[Axis], side: int) -> numpy.ndarray[Any, Any]:
    """The bytes of a move inside `buffer` as an array of the widest unit that fits its runs and steps."""
    import numpy as np

    steps = [axis[side] for axis in axes[:-1]]
    run = axes[-1][0]
    both = [step for axis in axes[:-1] for step in axis[1:]]
    unit = next(width for width in (8, 4, 2, 1) if all(n % width == 0 for n in (run, *both)))
    return np.ndarray(
        shape=(*(axis[0] for axis in axes[:-1]), run // unit),
        dtype=f"u{unit}",
        buffer=buffer,
        offset=offset,
        strides=(*steps, unit),
    )


def _pattern(view: numpy.ndarray[Any, Any], element: bytes) -> numpy.ndarray[Any, Any]:
    import numpy as np

    nbytes = view.shape[-1] * view.itemsize
    whole = element * -(-nbytes // len(element))
    return np.frombuffer(whole[:nbytes], view.dtype)


def _fill(view: numpy.ndarray[Any, Any], element: bytes) -> None:
    view[...] = _pattern(view, element)


def _is_constant(view: numpy.ndarray[Any, Any], element: bytes) -> bool:
    return bool((view == _pattern(view, element)).all())


def _runs(move: Move) -> Iterator[tuple[int, int]]:
    """The contiguous runs of a move in its target, in target order: position and length."""
    axes = sorted(move.axes, key=lambda axis: axis[2])
    run = 1
    while axes and axes[0][2] == run:
        run *= axes.pop(0)[0]
    outer = sorted(axes, key=lambda axis: -axis[2])
    for index in range(math.prod(axis[0] for axis in outer)):
        at, rest = move.target_start, index
        for count, _, step in reversed(outer):
            rest, place = divmod(rest, count)
            at += place * step
        yield at, run
