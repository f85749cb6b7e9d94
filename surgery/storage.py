"""Byte ranges of local files, and small files whole. Reads only; nothing is held open."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from surgery.errors import SourceError, UsageError
from surgery.kernel import next_data, read_at
from surgery.regular_file import open_regular, read_exactly

BLOCK_NBYTES = 1 << 20
"""Size of each of the two buffers of a comparison."""


def local_path(location: str | Path) -> Path:
    """`location` as a path. Raises `UsageError` for a URL: those are not read yet."""
    text = str(location)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        raise UsageError(
            f"{text} is a URL; a local directory, a .safetensors file or an .index.json file is expected",
            "SRC",
            "download it first, for instance with `hf download`",
        )
    if not text or "\0" in text:
        raise UsageError("an empty path" if not text else "a path with a NUL character", "SRC", "name a directory")
    return Path(location)


def read_bytes(path: Path, max_nbytes: int, where: str | None = None) -> bytes:
    """A small file whole. Raises `SourceError` for what is no regular file, is too large or cannot be read."""
    place = where or str(path)
    with open_regular(path, place) as (descriptor, status):
        if status.st_size > max_nbytes:
            what = f"{status.st_size} bytes; at most {max_nbytes} are read of such a file"
            raise SourceError(what, place, "look at the file: it is not what its name says")
        return read_exactly(descriptor, status.st_size, place)


def same_bytes(path_a: Path, offset_a: int, path_b: Path, offset_b: int, nbytes: int) -> bool:
    """Whether two ranges hold the same bytes: streaming, two fixed buffers, common holes skipped.

    Raises `SourceError` where a range goes past its file's end.
    """
    with (
        open_regular(path_a, str(path_a)) as (file_a, status_a),
        open_regular(path_b, str(path_b)) as (file_b, status_b),
    ):
        for path, status, end in ((path_a, status_a, offset_a + nbytes), (path_b, status_b, offset_b + nbytes)):
            if status.st_size < end:
                what = f"{status.st_size} bytes; {end} were there when its header was read"
                raise SourceError(what, str(path), "let nothing write to the source, and run again")
        if os.path.samestat(status_a, status_b) and offset_a == offset_b:
            return True
        buffers = memoryview(bytearray(BLOCK_NBYTES)), memoryview(bytearray(BLOCK_NBYTES))
        for start, end in _blocks(file_a, offset_a, file_b, offset_b, nbytes):
            size = end - start
            _fill(file_a, buffers[0][:size], offset_a + start, path_a)
            _fill(file_b, buffers[1][:size], offset_b + start, path_b)
            if buffers[0][:size] != buffers[1][:size]:
                return False
    return True


def _blocks(file_a: int, offset_a: int, file_b: int, offset_b: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """`(start, end)` pieces of the range, at most a block each, without those where both files have a hole."""
    position = 0
    while position < nbytes:
        data_a, data_b = next_data(file_a, offset_a + position), next_data(file_b, offset_b + position)
        if data_a is None and data_b is None:
            return
        position = min(nbytes if data_a is None else data_a - offset_a, nbytes if data_b is None else data_b - offset_b)
        if position >= nbytes:
            return
        end = min(position + BLOCK_NBYTES, nbytes)
        yield position, end
        position = end


def _fill(descriptor: int, into: memoryview, offset: int, path: Path) -> None:
    done = 0
    while done < len(into):
        try:
            got = read_at(descriptor, into[done:], offset + done)
        except OSError as error:
            raise SourceError(f"cannot read: {error.strerror}", str(path), "check the disk") from error
        if not got:
            raise SourceError("the file became shorter while it was read", str(path), "run again when it is complete")
        done += got
