"""Plain sequential reads of a file that is to be judged: a fixed buffer, pages forgotten behind, holes not read.

`verify` reads with this and with nothing that `execute` writes with: a fault in the one must not hide in the other.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import xxhash

BUFFER_NBYTES = 1 << 20
"""Hashed from the processor's cache: 43 GB/s at 1 MiB, 9 GB/s at 64 MiB (facts, io.md section 3)."""

FORGET_NBYTES = 8 << 20
_ZEROS = memoryview(bytes(1 << 18))
_NO_SUCH_CALL = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class ShortFile(OSError):
    """The file ends inside the range that was asked for."""


def open_regular(path: Path) -> io.FileIO:
    """A file for reading, unbuffered. Raises OSError, also for a FIFO or device, without waiting for one."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return io.FileIO(descriptor, "rb")


def is_sparse(descriptor: int) -> bool:
    status = os.fstat(descriptor)
    return hasattr(os, "SEEK_DATA") and getattr(status, "st_blocks", 1 << 62) * 512 < status.st_size


def read_without_ahead(descriptor: int) -> None:
    """For a file of small islands in large holes: the kernel would read megabytes of zeros ahead of each."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)


def next_data(descriptor: int, position: int, end: int) -> int:
    """The first position in [position, end) that is in no hole; `end` where all of it is one."""
    try:
        return min(end, os.lseek(descriptor, position, os.SEEK_DATA))
    except OSError as error:
        if error.errno == errno.ENXIO:
            return end
        if error.errno in _NO_SUCH_CALL:
            return position
        raise


def next_hole(descriptor: int, position: int, end: int) -> int:
    """The first position in [position, end) that is in a hole; `end` where there is none."""
    try:
        return min(end, os.lseek(descriptor, position, os.SEEK_HOLE))
    except OSError as error:
        if error.errno in (*_NO_SUCH_CALL, errno.ENXIO):
            return end
        raise


def forget_pages(descriptor: int, start: int, nbytes: int) -> None:
    """Give pages that were read back to the machine, whose other work may need them."""
    if hasattr(os, "posix_fadvise") and nbytes > 0:
        os.posix_fadvise(descriptor, start, nbytes, os.POSIX_FADV_DONTNEED)


class Reader:
    """One file, read forward. `advance(nbytes)` hears of every block; holes arrive as zeros that nobody read."""

    def __init__(
        self, path: Path, buffer: memoryview | None = None, advance: Callable[[int], None] | None = None
    ) -> None:
        self._file = open_regular(path)
        self._descriptor = self._file.fileno()
        self._path = path
        self._sparse = is_sparse(self._descriptor)
        if self._sparse:
            read_without_ahead(self._descriptor)
        self._buffer = buffer if buffer is not None else memoryview(bytearray(BUFFER_NBYTES))
        self._advance = advance
        self._kept_from = 0
        self._read_to = 0

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._forget()
        self._file.close()

    @property
    def nbytes(self) -> int:
        return os.fstat(self._descriptor).st_size

    def digest(self, start: int, nbytes: int) -> str:
        """The xxh3-128 of a range. Raises `ShortFile` where the file ends before it does."""
        hasher = xxhash.xxh3_128()
        for block in self.blocks(start, nbytes):
            hasher.update(block)
        return str(hasher.hexdigest())

    def blocks(self, start: int, nbytes: int) -> Iterator[memoryview]:
        """The bytes of a range, in order; each block is overwritten by the next."""
        end = start + nbytes
        if end > self.nbytes:
            raise ShortFile(errno.EIO, f"the file ends at byte {self.nbytes}, before byte {end}", str(self._path))
        position = start
        while position < end:
            data_start, data_end = position, end
            if self._sparse:
                data_start = next_data(self._descriptor, position, end)
                data_end = next_hole(self._descriptor, data_start, end)
            for block in _zero_blocks(data_start - position):
                self._tell(len(block))
                yield block
            yield from self._data_blocks(data_start, data_end)
            position = data_end

    def _data_blocks(self, position: int, end: int) -> Iterator[memoryview]:
        while position < end:
            wanted = self._buffer[: min(len(self._buffer), end - position)]
            # Looking for holes moves the file's position, so it is set for every read.
            self._file.seek(position)
            got = self._file.readinto(wanted)
            if not got:
                raise ShortFile(errno.EIO, "the file became shorter while it was read", str(self._path))
            self._note_read(position, position + got)
            position += got
            self._tell(got)
            yield wanted[:got]

    def _note_read(self, start: int, end: int) -> None:
        if start != self._read_to:
            self._forget()
            self._kept_from = start
        self._read_to = end
        if end - self._kept_from >= FORGET_NBYTES:
            self._forget()

    def _forget(self) -> None:
        # A sparse file has few pages, and a proof against the source reads them again soon.
        if not self._sparse:
            forget_pages(self._descriptor, self._kept_from, self._read_to - self._kept_from)
        self._kept_from = self._read_to

    def _tell(self, nbytes: int) -> None:
        if self._advance is not None:
            self._advance(nbytes)


def _zero_blocks(nbytes: int) -> Iterator[memoryview]:
    while nbytes > 0:
        block = _ZEROS[: min(nbytes, len(_ZEROS))]
        nbytes -= len(block)
        yield block
