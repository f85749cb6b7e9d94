"""Contiguous copies, which is nearly all of every job: long reads of neighbouring source ranges, hash, write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from surgery.engine.reading import Sources
from surgery.engine.writing import Outputs, Target


class Interrupted(Exception):
    """Another worker failed or a signal came: stop at a safe point."""


class Segment(msgspec.Struct, frozen=True, gc=False):
    """`nbytes` of source `file` at `offset` that go whole to the output tensors `ordinals` (more than one where a
    layer is repeated)."""

    file: int
    offset: int
    nbytes: int
    ordinals: tuple[int, ...]


class Channel:
    """What a worker needs to move bytes: where from, where to, one fixed buffer, and whom to tell."""

    def __init__(
        self,
        sources: Sources,
        outputs: Outputs,
        buffer: memoryview,
        progress: Callable[[int], None],
        stopping: Callable[[], bool],
    ) -> None:
        self.sources = sources
        self.outputs = outputs
        self.buffer = buffer
        self._progress = progress
        self.stopping = stopping

    def moved(self, nbytes: int) -> None:
        """Count `nbytes` done; the place where a worker stops when it is asked to."""
        if self.stopping():
            raise Interrupted
        self._progress(nbytes)


def chains(segments: Iterable[Segment]) -> Iterator[list[Segment]]:
    """Segments that follow one another in one source file, to be read as one range."""
    chain: list[Segment] = []
    for segment in segments:
        if chain and (segment.file, segment.offset) != (chain[-1].file, chain[-1].offset + chain[-1].nbytes):
            yield chain
            chain = []
        chain.append(segment)
    if chain:
        yield chain


def copy_chain(
    channel: Channel, chain: Sequence[Segment], targets: dict[int, Target], done: Callable[[int], None]
) -> None:
    """Read the chain once and give every tensor its bytes; `done(ordinal)` when one is whole."""
    end = chain[-1].offset + chain[-1].nbytes
    writer = _JoinedWrites(channel.outputs)
    current = 0
    with channel.sources.open(chain[0].file) as source:
        for position, block in source.blocks(chain[0].offset, end, channel.buffer):
            nbytes = block if isinstance(block, int) else len(block)
            at = position
            while at < position + nbytes:
                segment = chain[current]
                piece_end = min(segment.offset + segment.nbytes, position + nbytes)
                for ordinal in segment.ordinals:
                    target = targets[ordinal]
                    if isinstance(block, int):
                        target.skip_zeros(channel.outputs, at - segment.offset, piece_end - at)
                    else:
                        piece = block[at - position : piece_end - position]
                        target.hash_in_order(at - segment.offset, piece)
                        writer.put(target.file, target.offset + at - segment.offset, block, at - position, len(piece))
                at = piece_end
                if at == segment.offset + segment.nbytes:
                    current += 1
            writer.flush()
            channel.moved(nbytes)
    for segment in chain:
        for ordinal in segment.ordinals:
            done(ordinal)


class _JoinedWrites:
    """Pieces of one block that are neighbours in the output too go out in one write: it matters for small tensors."""

    def __init__(self, outputs: Outputs) -> None:
        self._outputs = outputs
        self._block: memoryview | None = None
        self._file = self._offset = self._start = self._nbytes = 0

    def put(self, file: int, offset: int, block: memoryview, start: int, nbytes: int) -> None:
        if (
            self._block is not None
            and file == self._file
            and offset == self._offset + self._nbytes
            and start == self._start + self._nbytes
        ):
            self._nbytes += nbytes
            return
        self.flush()
        self._block, self._file, self._offset, self._start, self._nbytes = block, file, offset, start, nbytes

    def flush(self) -> None:
        if self._block is None:
            return
        data = self._block[self._start : self._start + self._nbytes]
        self._outputs.write_sparsely(self._file, self._offset, data)
        self._block = None
