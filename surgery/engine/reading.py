"""Source files: opened for one range, read with pread into a fixed buffer, closed; holes seen as holes.

No file is mapped: a mapped page counts as memory, and one that cannot be read kills the process (case I09).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from surgery import kernel
from surgery.errors import SourceError


class Sources:
    """The source files of a plan. `drop` forgets pages behind the reader."""

    def __init__(self, paths: list[Path], nbytes: list[int], *, drop: bool) -> None:
        self._paths = paths
        self._nbytes = nbytes
        self._drop = drop

    @contextmanager
    def open(self, file: int) -> Iterator[SourceRange]:
        """Source `file` for reading one range. A file whose size is not the planned one is refused."""
        path = self._paths[file]
        try:
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except OSError as error:
            mend = "bring the file back and run again"
            if error.errno == errno.EMFILE:
                mend = "raise the limit of open files (ulimit -n), or use fewer --workers"
            raise SourceError(f"cannot open: {error.strerror}", str(path), mend) from error
        try:
            status = os.fstat(descriptor)
            if status.st_size != self._nbytes[file]:
                raise SourceError(
                    f"the file has {status.st_size} bytes, the plan expects {self._nbytes[file]}: it changed",
                    str(path),
                    "make the plan again from the source as it is now",
                )
            sparse = getattr(status, "st_blocks", 1 << 62) * 512 < status.st_size
            yield SourceRange(descriptor, path, sparse=sparse, drop=self._drop)
        finally:
            os.close(descriptor)


class SourceRange:
    """One open source file."""

    def __init__(self, descriptor: int, path: Path, *, sparse: bool, drop: bool) -> None:
        self._descriptor = descriptor
        self._path = path
        self._sparse = sparse
        self._drop = drop

    def fill(self, into: memoryview, offset: int) -> None:
        """Fill `into` from `offset`, whatever the kernel hands out at a time."""
        done = 0
        while done < len(into):
            try:
                got = kernel.read_at(self._descriptor, into[done:], offset + done)
            except OSError as error:
                raise SourceError(
                    f"reading failed at byte {offset + done}: {error.strerror}",
                    str(self._path),
                    "check the disk or the network filesystem, then run again to resume",
                ) from error
            if got == 0:
                raise SourceError(
                    f"the file ends at byte {offset + done}, {len(into) - done} bytes short: it shrank",
                    str(self._path),
                    "make the plan again from the source as it is now",
                )
            done += got
        if self._drop:
            kernel.forget_pages(self._descriptor, offset, len(into))

    def blocks(self, start: int, end: int, buffer: memoryview) -> Iterator[tuple[int, memoryview | int]]:
        """`[start, end)` in order: `(position, bytes)` of data, good until the next, `(position, count)` of a hole."""
        position = start
        while position < end:
            data_end = end
            if self._sparse:
                data_start = kernel.next_data(self._descriptor, position)
                if data_start is None or data_start > position:
                    hole_end = end if data_start is None else min(data_start, end)
                    yield position, hole_end - position
                    position = hole_end
                    continue
                data_end = kernel.next_hole(self._descriptor, position, end)
            block = buffer[: min(len(buffer), data_end - position)]
            self.fill(block, position)
            yield position, block
            position += len(block)
