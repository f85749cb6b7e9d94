"""What a plan is made of. `plan` makes plans, `plan_file` writes and reads them, `plan_check` judges them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from surgery.draft import ConfigChange, Decision, Dropped, Json, Partition, SourceFile
from surgery.errors import CannotApply
from surgery.safetensors_file import StoredTensor, build_header, tensor_nbytes
from surgery.tiling import Content, Tile, Tiling

PLAN_FORMAT = 1


class PlannedTensor(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One output tensor: a `whole` copy of a stored tensor, or a `tiling`."""

    name: str
    whole: StoredTensor | None = None
    tiling: Tiling | None = None

    @property
    def content(self) -> Content:
        content = self.whole if self.whole is not None else self.tiling
        if content is None:
            raise CannotApply("a planned tensor without content", self.name, "make the plan again")
        return content

    @property
    def dtype(self) -> str:
        return self.content.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.content.shape

    @property
    def nbytes(self) -> int:
        return tensor_nbytes(self.dtype, self.shape)


class PlannedFile(msgspec.Struct, frozen=True):
    """One safetensors file; `tensors` in the order of their bytes, `nbytes` with the header.

    A file of a `rank` (-1: storage) has `metadata` of its own; names are unique within a rank.
    """

    name: str
    nbytes: int
    tensors: tuple[PlannedTensor, ...]
    rank: int = -1
    metadata: dict[str, str] | None = None

    def header(self, metadata: dict[str, str]) -> tuple[bytes, list[tuple[str, int]]]:
        """The file's header, and its tensors with the position of their data after it."""
        strings = metadata if self.metadata is None else self.metadata
        return build_header([(t.name, t.dtype, t.shape) for t in self.tensors], strings)


class PlannedSideFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file that is not weights: `text`, or the bytes of `source_name` under a root."""

    name: str
    nbytes: int
    xxh3_128: str
    root: int = -1
    source_name: str = ""
    text: str | None = None


class Check(msgspec.Struct, frozen=True, omit_defaults=True):
    """What only the bytes can tell, judged while they stream; a failure is exit 3 and nothing is published.

    `equal`: the tile holds the bytes that `tensor` of the output gets in the tile's box. `constant`: every element
    of the tile is `element` (hexadecimal). `same`: the tile holds the bytes of `twin`, another part of a source.
    """

    kind: Literal["equal", "constant", "same"]
    tile: Tile
    tensor: str = ""
    element: str = ""
    twin: Tile | None = None


class Totals(msgspec.Struct, frozen=True):
    """The accounting `in = kept + dropped`, in tensors and bytes of the source; `out` counts repeats again."""

    tensors_in: int
    nbytes_in: int
    tensors_kept: int
    nbytes_kept: int
    tensors_dropped: int
    nbytes_dropped: int
    tensors_out: int
    nbytes_out: int


class Plan(msgspec.Struct, frozen=True):
    """See the module. `roots` are where the sources lie; they, alone, are not part of the digest.

    `partition` is how the output is dealt to ranks; `ranks` says that the source was.
    """

    format: int
    tool: str
    roots: tuple[str, ...]
    recipe: tuple[dict[str, Json], ...]
    sources: tuple[SourceFile, ...]
    metadata: dict[str, str]
    index: str | None
    files: tuple[PlannedFile, ...]
    side_files: tuple[PlannedSideFile, ...]
    checks: tuple[Check, ...]
    dropped: tuple[Dropped, ...]
    layers: dict[str, list[int]]
    config_changes: tuple[ConfigChange, ...]
    decisions: tuple[Decision, ...]
    totals: Totals
    cover: tuple[Json, ...] = ()
    inputs: tuple[PlannedSideFile, ...] = ()
    experts: dict[str, list[int]] = {}
    partition: Partition | None = None
    ranks: bool = False

    def tensors(self) -> Iterator[PlannedTensor]:
        """Every output tensor, file by file, in the order that the executor numbers them."""
        for file in self.files:
            yield from file.tensors
