"""Byte ranges of local files, and small files whole. Reads only; nothing is held open."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from surgery.errors import SourceError, UsageError

BLOCK_NBYTES = 1 << 20


def local_path(location: str | Path) -> Path:
    """`location` as a path. Raises `UsageError` for a URL: those are not read yet."""
    text = str(location)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        raise UsageError(
            f"{text} is a URL; this version reads local directories and files",
            "SRC",
            "download it first, for instance with `hf download`",
        )
    return Path(text)


def read_bytes(path: Path, max_nbytes: int, where: str | None = None) -> bytes:
    """A small file whole. Raises `SourceError` for FIFOs, devices, files over `max_nbytes` and what cannot be read."""
    place = where or str(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise SourceError(f"cannot open: {error.strerror}", place, "check the path and its permissions") from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise SourceError("not a regular file", place, "put a file there")
        if status.st_size > max_nbytes:
            raise SourceError(
                f"{status.st_size} bytes; at most {max_nbytes} are read of such a file",
                place,
                "check the file",
            )
        try:
            return file.read(max_nbytes)
        except OSError as error:
            raise SourceError(f"cannot read: {error.strerror}", place, "check the disk") from error


def same_bytes(path_a: Path, offset_a: int, path_b: Path, offset_b: int, nbytes: int) -> bool:
    """Whether two ranges hold the same bytes; streaming, two fixed buffers."""
    first, second = bytearray(BLOCK_NBYTES), bytearray(BLOCK_NBYTES)
    try:
        with path_a.open("rb", buffering=0) as file_a, path_b.open("rb", buffering=0) as file_b:
            file_a.seek(offset_a)
            file_b.seek(offset_b)
            while nbytes:
                size = min(nbytes, BLOCK_NBYTES)
                got_a = _fill(file_a, memoryview(first)[:size])
                got_b = _fill(file_b, memoryview(second)[:size])
                if got_a != size or got_b != size:
                    raise SourceError("the file became shorter while it was read", str(path_a), "run again")
                if first[:size] != second[:size]:
                    return False
                nbytes -= size
    except OSError as error:
        raise SourceError(f"cannot read: {error.strerror}", str(error.filename or path_a), "check the disk") from error
    return True


def _fill(file: object, into: memoryview) -> int:
    done = 0
    while done < len(into):
        got = file.readinto(into[done:])  # type: ignore[attr-defined]
        if not got:
            break
        done += got
    return done
