"""Open a file that must be a regular one, and say what it is when it is not what was looked for.

Everything here is read from checkpoints that anybody may have made, or that a download left half done.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from surgery.errors import SourceError, printable


@contextmanager
def open_regular(path: Path, where: str) -> Iterator[tuple[int, os.stat_result]]:
    """A descriptor, for reading only, and the status of a regular file. Raises `SourceError`.

    FIFOs and devices are refused without waiting for them: O_NONBLOCK, then a look at what was opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SourceError(f"cannot open: {reason}", where, "check the path and its permissions") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a pipe, socket or device"
            raise SourceError(f"{kind}, not a regular file", where, "name a regular file")
        yield descriptor, status
    finally:
        os.close(descriptor)


def read_exactly(descriptor: int, nbytes: int, where: str) -> bytes:
    """`nbytes` from where `descriptor` stands, however the kernel hands them out. Raises `SourceError`."""
    pieces: list[bytes] = []
    while nbytes:
        try:
            piece = os.read(descriptor, nbytes)
        except OSError as error:
            raise SourceError(f"cannot read: {error.strerror}", where, "check the disk") from error
        if not piece:
            raise SourceError("the file became shorter while it was read", where, "run again when it is complete")
        pieces.append(piece)
        nbytes -= len(piece)
    return b"".join(pieces)


def refuse_foreign(start: bytes, file_nbytes: int, where: str) -> None:
    """Raise `SourceError` where a file's first bytes say that it is of another kind (case F01)."""
    refuse_git_lfs_pointer(start, file_nbytes, where)
    if start.lstrip()[:1] == b"<":
        raise SourceError(
            f"not safetensors but an HTML or XML page: {shown(start)}",
            where,
            "the download saved an error page: look at it, and download again (is a login or token missing?)",
        )
    if start.startswith(b"PK\x03\x04"):
        raise SourceError("not safetensors but a zip, as torch.save writes", where, "convert it to safetensors")
    if start.startswith(b"GGUF"):
        raise SourceError("not safetensors but a GGUF file", where, "use the model's safetensors files")


def refuse_git_lfs_pointer(start: bytes, file_nbytes: int, where: str) -> None:
    """Raise `SourceError` where a file begins as the text that stands for it in a clone without git-lfs (F01)."""
    if not start.startswith(b"version https://git-lfs"):
        return
    oid = re.search(rb"oid (\S{1,80})", start)
    size = re.search(rb"size (\d{1,20})", start)
    raise SourceError(
        f"a Git LFS pointer of {file_nbytes} bytes, not the file that it stands for "
        f"({oid[1].decode('ascii', 'replace') if oid else 'no oid'}, {int(size[1]) if size else 'unknown'} bytes)",
        where,
        "run `git lfs pull` in the repository, or `hf download` the model",
    )


def shown(data: bytes) -> str:
    """The first bytes of a file, safe to print."""
    return printable(repr(data[:48].decode("utf-8", "replace")))
