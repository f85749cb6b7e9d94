"""Units of work: which output tensors must be made together, in the order of their source bytes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import accumulate

import msgspec
import xxhash

from surgery.engine.computed import Computed
from surgery.engine.gather import Part
from surgery.engine.journal import Done
from surgery.engine.transfer import Segment
from surgery.engine.writing import Target
from surgery.errors import CannotApply
from surgery.moves import box_move, moves
from surgery.plan_types import Check, Plan, PlannedFile, PlannedTensor
from surgery.safetensors_file import StoredTensor
from surgery.tiling import Tiling, sources

UNIT_NBYTES = 64 << 20
UNIT_SEGMENTS = 4096
"""Plain copies are handed to workers in pieces of about this much, so that two workers end at about the same time."""


class Layout:
    """Where every output tensor lies, by its number in the plan."""

    def __init__(self, plan: Plan) -> None:
        self._file = array("L")
        self._offset = array("Q")
        self._nbytes = array("Q")
        self.firsts = [0, *accumulate(len(file.tensors) for file in plan.files)][:-1]
        for number, file in enumerate(plan.files):
            header, placed = _header(file, plan.metadata)
            positions = dict(placed)
            for tensor in file.tensors:
                self._file.append(number)
                self._offset.append(len(header) + positions[tensor.name])
                self._nbytes.append(tensor.nbytes)
        self.count = len(self._file)
        self.nbytes = sum(self._nbytes)

    def target(self, ordinal: int) -> Target:
        return Target(self._file[ordinal], self._offset[ordinal], self._nbytes[ordinal], xxhash.xxh3_128())

    def nbytes_of(self, done: Done) -> int:
        return sum(self._nbytes[ordinal] for ordinal in range(self.count) if ordinal in done)


def _header(file: PlannedFile, metadata: dict[str, str]) -> tuple[bytes, list[tuple[str, int]]]:
    """The header of a planned file, which must give the length that was planned."""
    try:
        header, placed = file.header(metadata)
    except ValueError as error:
        raise CannotApply(str(error), file.name, "plan smaller shards") from error
    nbytes = len(header) + sum(tensor.nbytes for tensor in file.tensors)
    if nbytes != file.nbytes:
        raise CannotApply(
            f"the plan gives the file {file.nbytes} bytes, its tensors need {nbytes}", file.name, "make the plan again"
        )
    return header, placed


class Group(msgspec.Struct, frozen=True):
    """Output tensors that share sources and are not plain copies, with the checks of those sources."""

    ordinals: tuple[int, ...]
    names: tuple[str, ...]
    contents: tuple[StoredTensor | Tiling, ...]
    checks: tuple[Check, ...]

    def parts(self, targets: dict[int, Target]) -> list[Part]:
        """Every move of the group, in the terms of the transfer."""
        parts = [
            Part(move, targets[ordinal], "copy", name)
            for ordinal, name, content in zip(self.ordinals, self.names, self.contents, strict=True)
            for move in moves(content, name)
        ]
        place = dict(zip(self.names, zip(self.ordinals, self.contents, strict=True), strict=True))
        for check in self.checks:
            if check.kind == "same":
                continue  # Compared apart: neither side is an output.
            label = check.tile.source.name
            if check.kind == "equal":
                ordinal, content = place[check.tensor]
                shape = Tiling(content.dtype, content.shape, ())
                parts.append(Part(box_move(check.tile, shape, label), targets[ordinal], "equal", label))
            else:
                shape = Tiling(check.tile.source.dtype, check.tile.shape, ())
                box = msgspec.structs.replace(check.tile, offset=(0,) * len(check.tile.shape))
                move = msgspec.structs.replace(box_move(box, shape, label), element=bytes.fromhex(check.element))
                parts.append(Part(move, None, "constant", label))
        return parts


Unit = Group | Computed | list[Segment]


def units(plan: Plan, layout: Layout, done: Done) -> Iterator[Unit]:
    """Everything that is not done: plain copies in source order, what is computed, then the groups in source order."""
    complex_sources = {
        _key(source)
        for tensor in plan.tensors()
        if tensor.tiling is not None and tensor.tiling.kernel is None
        for source in sources(tensor.tiling)
    }
    complex_sources |= {_key(check.tile.source) for check in plan.checks}
    complex_sources |= {_key(check.twin.source) for check in plan.checks if check.twin is not None}
    checked = {check.tensor for check in plan.checks}
    plain: list[tuple[int, int, int, int]] = []
    grouped: list[int] = []
    computed: list[Computed] = []
    by_ordinal = list(plan.tensors()) if any(t.whole is None for t in plan.tensors()) or plan.checks else []
    for ordinal, tensor in enumerate(plan.tensors()):
        whole = tensor.whole
        if tensor.tiling is not None and tensor.tiling.kernel is not None:
            if ordinal not in done:
                computed.append(Computed(ordinal, tensor.name, tensor.tiling))
        elif whole is None or tensor.name in checked or (complex_sources and _key(whole) in complex_sources):
            grouped.append(ordinal)
        elif ordinal not in done:
            plain.append((whole.file, whole.offset, whole.nbytes, ordinal))
    plain.sort()
    yield from _batches(_segments(plain))
    del plain
    yield from computed
    yield from _groups(plan, by_ordinal, grouped, done)


def _key(source: StoredTensor) -> tuple[int, int, str]:
    return source.file, source.offset, source.name


def _segments(plain: list[tuple[int, int, int, int]]) -> Iterator[Segment]:
    """Copies of one stored tensor together, so that it is read once."""
    position = 0
    while position < len(plain):
        file, offset, nbytes, _ = plain[position]
        end = position + 1
        while end < len(plain) and plain[end][:3] == (file, offset, nbytes):
            end += 1
        if nbytes:
            yield Segment(file, offset, nbytes, tuple(entry[3] for entry in plain[position:end]))
        else:
            # Tensors without elements have a place and no bytes: each is its own.
            for entry in plain[position:end]:
                yield Segment(file, offset, 0, (entry[3],))
        position = end


def _batches(segments: Iterator[Segment]) -> Iterator[list[Segment]]:
    batch: list[Segment] = []
    nbytes = 0
    for segment in segments:
        batch.append(segment)
        nbytes += segment.nbytes
        if nbytes >= UNIT_NBYTES or len(batch) >= UNIT_SEGMENTS:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _groups(
    plan: Plan,
    by_ordinal: list[PlannedTensor],
    grouped: list[int],
    done: Done,
) -> Iterator[Group]:
    """Connected sets of outputs and checks over shared sources, each not yet wholly done."""
    parent: dict[object, object] = {}

    def find(node: object) -> object:
        parent.setdefault(node, node)
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    name_to_ordinal = {by_ordinal[ordinal].name: ordinal for ordinal in grouped}
    for ordinal in grouped:
        find(ordinal)
        for source in sources(by_ordinal[ordinal].content):
            parent[find(_key(source))] = find(ordinal)
    for number, check in enumerate(plan.checks):
        node = ("check", number)
        parent[find(_key(check.tile.source))] = find(node)
        if check.twin is not None:
            parent[find(_key(check.twin.source))] = find(node)
        if check.kind == "equal":
            parent[find(node)] = find(name_to_ordinal[check.tensor])
    members: dict[object, tuple[list[int], list[Check]]] = {}
    for ordinal in grouped:
        members.setdefault(find(ordinal), ([], []))[0].append(ordinal)
    for number, check in enumerate(plan.checks):
        members.setdefault(find(("check", number)), ([], []))[1].append(check)
    for ordinals, checks in sorted(members.values(), key=lambda m: _first_source(by_ordinal, m)):
        if ordinals and all(ordinal in done for ordinal in ordinals):
            continue
        tensors = [by_ordinal[ordinal] for ordinal in ordinals]
        yield Group(
            tuple(ordinals),
            tuple(tensor.name for tensor in tensors),
            tuple(tensor.content for tensor in tensors),
            tuple(checks),
        )


def _first_source(by_ordinal: list[PlannedTensor], member: tuple[list[int], list[Check]]) -> tuple[int, int, str]:
    ordinals, checks = member
    keys = [_key(source) for ordinal in ordinals for source in sources(by_ordinal[ordinal].content)]
    keys += [_key(check.tile.source) for check in checks]
    return min(keys, default=(-1, 0, ""))
