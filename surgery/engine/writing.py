"""Output files under way: few handles, checksums in output order, and a window of the page cache.

On the machines measured (facts, io.md section 0) the growth of the page cache, not the disk, is the limit: a copy
that writes back and drops what it has written, 32 MiB behind, runs at the disk's speed; without that it takes
twice as long, pushes everybody else's pages out, and dies in a container with a small memory limit.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

import msgspec
import xxhash

from surgery import kernel

WINDOW_NBYTES = 32 << 20
ZEROS = memoryview(bytes(1 << 20))
"""One block of zeros for holes: small enough to stay in the processor's cache while it is hashed."""

HOLE_NBYTES = 64 << 10
"""Zeros are left out of sparse outputs in pieces of this size, from gathered blocks too."""


class Outputs:
    """The output files of one worker: positional writes, at most `max_open` handles, closed by `close`."""

    def __init__(self, paths: list[Path], *, window: bool, sparse: bool, max_open: int = 8) -> None:
        self._paths = paths
        self._window = window
        self.sparse = sparse
        self._max_open = max_open
        self._open: OrderedDict[int, int] = OrderedDict()
        self._dirty: list[tuple[int, int, int]] = []
        self._dirty_nbytes = 0
        self._started: list[tuple[int, int, int]] = []
        self._unsynced: set[int] = set()

    def descriptor(self, file: int) -> int:
        """An open handle of output `file`; valid until the next call for another file."""
        found = self._open.get(file)
        if found is not None:
            self._open.move_to_end(file)
            return found
        while len(self._open) >= self._max_open:
            os.close(self._open.popitem(last=False)[1])
        descriptor = os.open(self._paths[file], os.O_RDWR | getattr(os, "O_BINARY", 0))
        self._open[file] = descriptor
        return descriptor

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """All of `data` at `offset`."""
        descriptor = self.descriptor(file)
        kernel.write_at(descriptor, data, offset)
        self._unsynced.add(file)
        if self._window:
            self._note_dirty(file, offset, len(data))

    def write_sparsely(self, file: int, offset: int, data: memoryview) -> None:
        """As `write`; in sparse outputs, pieces of zeros stay holes."""
        if not self.sparse:
            self.write(file, offset, data)
            return
        for start in range(0, len(data), HOLE_NBYTES):
            piece = data[start : start + HOLE_NBYTES]
            if piece != ZEROS[: len(piece)]:
                self.write(file, offset + start, piece)

    def read(self, file: int, offset: int, into: memoryview) -> None:
        """Fill `into` with what was written."""
        descriptor = self.descriptor(file)
        done = 0
        while done < len(into):
            got = kernel.read_at(descriptor, into[done:], offset + done)
            if got == 0:
                raise OSError(f"{self._paths[file].name} became shorter while it was written")
            done += got

    def _note_dirty(self, file: int, offset: int, nbytes: int) -> None:
        last = self._dirty[-1] if self._dirty else None
        if last is not None and last[0] == file and last[1] + last[2] == offset:
            self._dirty[-1] = (file, last[1], last[2] + nbytes)
        else:
            self._dirty.append((file, offset, nbytes))
        self._dirty_nbytes += nbytes
        if self._dirty_nbytes >= WINDOW_NBYTES:
            self._turn_window()

    def _turn_window(self) -> None:
        """Start writing the newest ranges; wait for the ones before and drop them."""
        for file, offset, nbytes in self._dirty:
            kernel.start_writeback(self.descriptor(file), offset, nbytes)
        for file, offset, nbytes in self._started:
            kernel.finish_writeback(self.descriptor(file), offset, nbytes)
        self._started, self._dirty, self._dirty_nbytes = self._dirty, [], 0

    def flush(self) -> None:
        """Everything written so far is on the disk when this returns."""
        for file in sorted(self._unsynced):
            descriptor = self.descriptor(file)
            getattr(os, "fdatasync", os.fsync)(descriptor)
        for file, offset, nbytes in (*self._started, *self._dirty):
            kernel.forget_pages(self.descriptor(file), offset, nbytes)
        self._started, self._dirty, self._dirty_nbytes = [], [], 0
        self._unsynced.clear()

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


class Target(msgspec.Struct):
    """One output tensor under way: `nbytes` at `offset` of output `file`, hashed as its bytes come in order."""

    file: int
    offset: int
    nbytes: int
    hasher: xxhash.xxh3_128
    position: int = 0
    in_order: bool = True

    def hash_in_order(self, at: int, data: memoryview) -> None:
        """Hash `data`, which lies `at` bytes into the tensor; out of order, the tensor is read back at the end."""
        if at == self.position and self.in_order:
            self.hasher.update(data)
            self.position += len(data)
        else:
            self.in_order = False

    def write(self, outputs: Outputs, at: int, data: memoryview) -> None:
        """Write and hash `data`, `at` bytes into the tensor."""
        self.hash_in_order(at, data)
        outputs.write_sparsely(self.file, self.offset + at, data)

    def skip_zeros(self, outputs: Outputs, at: int, nbytes: int) -> None:
        """`nbytes` zeros: hashed, and written only where the output is not sparse."""
        for start in range(0, nbytes, len(ZEROS)):
            piece = ZEROS[: min(len(ZEROS), nbytes - start)]
            self.hash_in_order(at + start, piece)
            if not outputs.sparse:
                outputs.write(self.file, self.offset + at + start, piece)

    def digest(self, outputs: Outputs, buffer: memoryview) -> bytes:
        """xxh3-128 of the tensor, from reading it back where its bytes did not come in order."""
        if not self.in_order or self.position != self.nbytes:
            self.hasher = xxhash.xxh3_128()
            for at in range(0, self.nbytes, len(buffer)):
                piece = buffer[: min(len(buffer), self.nbytes - at)]
                outputs.read(self.file, self.offset + at, piece)
                self.hasher.update(piece)
        return self.hasher.digest()
