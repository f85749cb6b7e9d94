"""Tensors whose values a kernel computes: gathered as they are stored, a block of rows at a time, then made anew."""

from __future__ import annotations

import msgspec
import xxhash

from surgery.engine.gather import Part, run_group
from surgery.engine.transfer import Channel
from surgery.engine.writing import Outputs, Target
from surgery.errors import SourceError
from surgery.moves import moves
from surgery.plan_types import Check
from surgery.tensor import narrow
from surgery.tiling import Tiling
from surgery.value_kernels import computed_bytes


class Computed(msgspec.Struct, frozen=True):
    """One output tensor with a kernel: a unit of work of its own."""

    ordinal: int
    name: str
    content: Tiling


class _Memory(Outputs):
    """Stands where output files do, and keeps the bytes."""

    def __init__(self, nbytes: int) -> None:
        super().__init__([], window=False, sparse=False)
        self.data = memoryview(bytearray(nbytes))

    def write(self, file: int, offset: int, data: memoryview) -> None:
        self.data[offset : offset + len(data)] = data

    def read(self, file: int, offset: int, into: memoryview) -> None:
        into[:] = self.data[offset : offset + len(into)]


def gathered(channel: Channel, content: Tiling, name: str) -> memoryview:
    """The bytes of a tiling without a kernel, in memory."""
    memory = _Memory(content.nbytes)
    inner = Channel(channel.sources, memory, channel.buffer, lambda _: None, channel.stopping)
    target = Target(0, 0, content.nbytes, xxhash.xxh3_128())
    run_group(inner, [Part(move, target, "copy", name) for move in moves(content, name)])
    return memory.data


def run_same(channel: Channel, check: Check) -> None:
    """Compare a tile with its twin, a block of rows at a time. Raises `SourceError` where they differ."""
    assert check.twin is not None
    one, other = (
        Tiling(tile.source.dtype, tile.shape, (msgspec.structs.replace(tile, offset=(0,) * len(tile.shape)),))
        for tile in (check.tile, check.twin)
    )
    name = check.tile.source.name
    rows = one.shape[0] if one.shape else 1
    step = max(1, rows * len(channel.buffer) // max(1, one.nbytes))
    for start in range(0, rows, step):
        blocks = [narrow(each, 0, start, min(step, rows - start)) if each.shape else each for each in (one, other)]
        if gathered(channel, blocks[0], name) != gathered(channel, blocks[1], name):
            raise SourceError(
                f"{name}: its bytes differ from its replica's on another rank",
                name,
                "the replicas of one tensor must be equal: the rank files are not of one save",
            )


def run_computed(channel: Channel, unit: Computed, target: Target) -> None:
    """Write the tensor of `unit`, in order."""
    content = unit.content
    stored = content.as_stored()
    rows = content.shape[0] if content.shape else 1
    at = 0
    step = max(1, rows * len(channel.buffer) // max(1, stored.nbytes))
    for start in range(0, rows, step):
        block = narrow(stored, 0, start, min(step, rows - start)) if content.shape else stored
        assert content.kernel is not None
        made = computed_bytes(content.kernel, content.dtype, gathered(channel, block, unit.name), unit.name)
        target.write(channel.outputs, at, memoryview(made))
        at += len(made)
        channel.moved(len(made))
