"""Calls that not every system has, each with what it falls back to.

`sync_file_range`, `fallocate` and `renameat2` through ctypes. macOS and Windows take the portable way: no
preallocation, no page-cache window, the same bytes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

_SYNC_WAIT_BEFORE, _SYNC_WRITE, _SYNC_WAIT_AFTER = 1, 2, 4
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


@cache
def _libc() -> Any:
    """The C library, or None where these calls do not exist."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
        libc.renameat2.argtypes = (
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.c_uint,
        )
    except AttributeError:
        return None
    return libc


def read_at(descriptor: int, into: memoryview, offset: int) -> int:
    """Read at most `into` from `offset`; how many bytes came. 0 is the end of the file."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [into], offset)
    os.lseek(descriptor, offset, os.SEEK_SET)
    data = os.read(descriptor, len(into))
    into[: len(data)] = data
    return len(data)


def write_at(descriptor: int, data: memoryview | bytes, offset: int) -> None:
    """Write all of `data` at `offset`. One call moves at most 2 GiB and may move less (case F23)."""
    view = memoryview(data)
    done = 0
    while done < len(view):
        if hasattr(os, "pwrite"):
            done += os.pwrite(descriptor, view[done:], offset + done)
        else:
            os.lseek(descriptor, offset + done, os.SEEK_SET)
            done += os.write(descriptor, view[done:])


def next_data(descriptor: int, offset: int) -> int | None:
    """The first position from `offset` on that lies in no hole; None where only a hole is left.

    A filesystem that does not tell holes has none: only ENXIO means that no data follows.
    """
    if not hasattr(os, "SEEK_DATA"):
        return offset
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError as error:
        return None if error.errno == errno.ENXIO else offset


def next_hole(descriptor: int, offset: int, end: int) -> int:
    """The end of the data that begins at `offset`, at most `end`."""
    if not hasattr(os, "SEEK_HOLE"):
        return end
    try:
        return min(os.lseek(descriptor, offset, os.SEEK_HOLE), end)
    except OSError:
        return end


def allocate(descriptor: int, nbytes: int) -> None:
    """Make the file `nbytes` long with its blocks reserved, where the filesystem can, so that a full disk shows
    now. Raises OSError (ENOSPC, EDQUOT, EFBIG)."""
    libc = _libc()
    if libc is not None and nbytes:
        while libc.fallocate(descriptor, 0, 0, nbytes):
            number = ctypes.get_errno()
            if number == errno.EINTR:
                continue
            if number not in _UNSUPPORTED:
                raise OSError(number, os.strerror(number))
            break
    os.ftruncate(descriptor, nbytes)


def start_writeback(descriptor: int, offset: int, nbytes: int) -> None:
    """Ask the kernel to write dirty pages of the range; returns at once."""
    libc = _libc()
    if libc is not None:
        libc.sync_file_range(descriptor, offset, nbytes, _SYNC_WRITE)


def finish_writeback(descriptor: int, offset: int, nbytes: int) -> None:
    """Wait for the range to be written and drop it from the page cache. No promise of durability: fsync gives that."""
    libc = _libc()
    if libc is not None:
        libc.sync_file_range(descriptor, offset, nbytes, _SYNC_WAIT_BEFORE | _SYNC_WRITE | _SYNC_WAIT_AFTER)
        forget_pages(descriptor, offset, nbytes)


def forget_pages(descriptor: int, offset: int, nbytes: int) -> None:
    """Drop clean pages of the range from the page cache."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)


def exchange(first: Path, second: Path) -> bool:
    """Swap two directory entries in one call. False where the kernel or filesystem cannot."""
    libc = _libc()
    if libc is None:
        return False
    if libc.renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(second))


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable (not offered by Windows)."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
