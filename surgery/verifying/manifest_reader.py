"""The manifest read a line at a time, so that 150,000 tensors of it never lie in memory together; its own checksum.

`surgery.json` has one tensor a line, and ends with `,` newline `"xxh3_128":"<32 hex digits>"}` newline: the hash of
every byte before that. So one flipped byte shows wherever it is, in a decision's text too.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from surgery.draft import Dropped
from surgery.errors import SourceError
from surgery.manifest import MANIFEST_NAME, Manifest, ManifestTensor
from surgery.verifying.rehash import open_regular

_TRAILER = re.compile(rb',\n"xxh3_128":"([0-9a-f]{32})"\}\n')
_TRAILER_NBYTES = len(',\n"xxh3_128":""}\n') + 32
_DROPPED, _TENSORS = b'"dropped":[', b'"tensors":['

Decoded = TypeVar("Decoded")


class ManifestDamaged(SourceError):
    """The manifest is not what surgery writes."""


class ManifestReader:
    """The manifest of a directory. `head` is all of it but `dropped` and `tensors`, which are read when asked for."""

    def __init__(self, directory: Path) -> None:
        """Raises `FileNotFoundError` where there is none, `ManifestDamaged` for one that cannot be read."""
        self._path = directory / MANIFEST_NAME
        self._dropped_at = self._tensors_at = 0
        try:
            self.head = self._read_head()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._damaged(f"cannot read it: {error.strerror}") from error

    def _read_head(self) -> Manifest:
        """Everything before the two lists, which are long, and where each of them begins."""
        head, line, position = bytearray(), b"", 0
        with self._open() as file:
            while not line.startswith(_DROPPED):
                head += line
                position += len(line)
                line = self._line(file.readline())
            self._dropped_at = position
            while not line.startswith(_TENSORS):
                position += len(line)
                line = self._line(file.readline())
            self._tensors_at = position
        whole = bytes(head).removesuffix(b",\n") + b',"dropped":[],"tensors":[]}'
        return self._decoded(whole, msgspec.json.Decoder(Manifest))

    def _open(self) -> io.BufferedReader:
        return io.BufferedReader(open_regular(self._path), 1 << 20)

    def _line(self, line: bytes) -> bytes:
        if not line:
            raise self._damaged("it ends before its list of tensors")
        return line

    def dropped(self) -> Iterator[Dropped]:
        yield from self._entries(self._dropped_at, _DROPPED, msgspec.json.Decoder(Dropped))

    def tensors(self) -> Iterator[ManifestTensor]:
        """In the order of files and bytes. Raises `ManifestDamaged` at an entry that cannot be read."""
        yield from self._entries(self._tensors_at, _TENSORS, msgspec.json.Decoder(ManifestTensor))

    def checksum_fault(self) -> str | None:
        """What is wrong with the manifest's own checksum; None where it is right."""
        hasher = xxhash.xxh3_128()
        with self._open() as file:
            left = self._path.stat().st_size - _TRAILER_NBYTES
            while left > 0 and (block := file.read(min(left, 1 << 20))):
                hasher.update(block)
                left -= len(block)
            trailer = _TRAILER.fullmatch(file.read())
        if trailer is None:
            return "it does not end with its own checksum"
        found, said = hasher.hexdigest(), trailer[1].decode()
        return None if found == said else f"its bytes hash to {found}; its last line says {said}"

    def _entries(self, start: int, key: bytes, decoder: msgspec.json.Decoder[Decoded]) -> Iterator[Decoded]:
        with self._open() as file:
            file.seek(start)
            line = file.readline()
            if not line.startswith(key + b"]"):
                while True:
                    line = file.readline()
                    if not line.endswith(b"},\n"):
                        break
                    yield self._decoded(line[:-2], decoder)
                if not line.endswith(b"}],\n"):
                    raise self._damaged(f"a list ends with {_shown(line)}")
                yield self._decoded(line[:-3], decoder)

    def _decoded(self, data: bytes, decoder: msgspec.json.Decoder[Decoded]) -> Decoded:
        try:
            return decoder.decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise self._damaged(f"{error}, at {_shown(data)}") from error

    def _damaged(self, why: str) -> ManifestDamaged:
        return ManifestDamaged(f"the manifest is damaged: {why}", MANIFEST_NAME, "make the output again")


def _shown(data: bytes) -> str:
    return repr(data[:60].decode("utf-8", "replace"))
