"""The manifest, `surgery.json`: what was written, where it came from, and every checksum.

It names no paths of this machine, no host and no time: the same plan gives the same bytes. Written a tensor a
line and never held as one string.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash

from surgery.draft import ConfigChange, Decision, Dropped, Json, Partition, SourceFile
from surgery.errors import SourceError
from surgery.plan_check import is_plain
from surgery.plan_types import Plan, PlannedTensor, Totals
from surgery.storage import read_bytes
from surgery.tiling import Tiling

MANIFEST_NAME = "surgery.json"
MANIFEST_FORMAT = 1
MAX_MANIFEST_NBYTES = 4 << 30
SELF_CHECKSUM = b',\n"xxh3_128":"%s"}\n'
"""The end of a manifest: the checksum of everything before it."""


class ManifestFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file of the output: its size, and the hash of its whole or, for weights, of its header (length included).

    `source` is the name in the source of a copied file that has another name here.
    """

    nbytes: int
    xxh3_128: str = ""
    header_xxh3_128: str = ""
    source: str = ""


class ManifestTensor(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A tensor of the output: a whole copy of `source` (a name in source file `source_file`), or a `tiling`."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    xxh3_128: str
    source: str | None = None
    source_file: int | None = None
    tiling: Tiling | None = None


class ManifestHead(msgspec.Struct, frozen=True):
    """What it takes to know whose output a directory is."""

    format: int
    tool: str
    plan: str
    files: dict[str, ManifestFile]

    def file_names(self) -> list[str]:
        return sorted(self.files)


class Manifest(ManifestHead, frozen=True):
    """The whole manifest, as `verify` reads it."""

    recipe: tuple[dict[str, Json], ...]
    layers: dict[str, list[int]]
    config_changes: tuple[ConfigChange, ...]
    decisions: tuple[Decision, ...]
    totals: Totals
    sources: tuple[SourceFile, ...]
    dropped: tuple[Dropped, ...]
    tensors: tuple[ManifestTensor, ...]
    cover: tuple[Json, ...] = ()
    experts: dict[str, list[int]] = {}
    partition: Partition | None = None
    ranks: bool = False


_HEAD_FIELDS = (
    "recipe",
    "layers",
    "experts",
    "partition",
    "ranks",
    "config_changes",
    "decisions",
    "totals",
    "cover",
)


def write_manifest(
    file: BinaryIO, plan: Plan, digest: str, files: dict[str, ManifestFile], checksum: Callable[[int], str]
) -> None:
    """Stream the manifest of a finished plan; `checksum(n)` is the xxh3-128 of the plan's n-th tensor.

    Its last entry is the xxh3-128 of every byte before that entry, so that damage to the manifest itself shows.
    """
    hasher = xxhash.xxh3_128()
    for piece in _pieces(plan, digest, files, checksum):
        hasher.update(piece)
        file.write(piece)
    file.write(SELF_CHECKSUM % hasher.hexdigest().encode())


def _pieces(plan: Plan, digest: str, files: dict[str, ManifestFile], checksum: Callable[[int], str]) -> Iterator[bytes]:
    encode = msgspec.json.Encoder(decimal_format="number").encode
    yield b'{"format":%d,"tool":%s,"plan":"%s"' % (MANIFEST_FORMAT, encode(plan.tool), digest.encode())
    for field in _HEAD_FIELDS:
        yield b',\n"%s":' % field.encode() + encode(getattr(plan, field))
    # Which root a source file belongs to and what identifies it; never where it lay.
    yield b',\n"sources":' + encode(plan.sources)
    yield b',\n"files":{'
    for number, (name, entry) in enumerate(sorted(files.items())):
        yield b"%s\n%s:%s" % (b"," if number else b"", encode(name), encode(entry))
    yield b'},\n"dropped":['
    for number, dropped in enumerate(plan.dropped):
        yield b"%s\n%s" % (b"," if number else b"", encode(dropped))
    yield b'],\n"tensors":['
    for number, tensor in enumerate(_tensors(plan, checksum)):
        yield b"%s\n%s" % (b"," if number else b"", encode(tensor))
    yield b"]"


def _tensors(plan: Plan, checksum: Callable[[int], str]) -> Iterator[ManifestTensor]:
    ordinal = 0
    for planned in plan.files:
        for tensor in planned.tensors:
            yield _tensor(tensor, planned.name, checksum(ordinal))
            ordinal += 1


def _tensor(tensor: PlannedTensor, file: str, digest: str) -> ManifestTensor:
    whole = tensor.whole
    if whole is None:
        return ManifestTensor(tensor.name, file, tensor.dtype, tensor.shape, digest, tiling=tensor.tiling)
    return ManifestTensor(tensor.name, file, whole.dtype, whole.shape, digest, whole.name, whole.file)


def read_head(directory: Path) -> ManifestHead | None:
    """The head of the manifest in `directory`; None where there is none that can be read."""
    try:
        data = read_bytes(directory / MANIFEST_NAME, MAX_MANIFEST_NBYTES)
        head = msgspec.json.decode(data, type=ManifestHead)
        # Names decide what --overwrite may delete: a manifest that names anything outside is nobody's.
        return head if all(is_plain(name) for name in head.files) else None
    except (SourceError, msgspec.DecodeError, RecursionError):
        return None


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest in `directory`; None where there is none. Raises `SourceError` for one that cannot be read."""
    path = directory / MANIFEST_NAME
    if not path.exists():
        return None
    data = read_bytes(path, MAX_MANIFEST_NBYTES)
    try:
        return msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise SourceError(
            f"the manifest is damaged: {error}", str(path), "make the output again, or remove the manifest"
        ) from error
