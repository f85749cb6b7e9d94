"""Tilings: a tensor as boxes of its shape, each copied from a stored tensor or filled with one element.

A `Tile` reads elements `start + sum(index[a] * strides[a])` of one stored tensor, so evenly spaced choices (every
second expert, interleaved gate and up rows, a repeated KV head) are one record, not thousands. Strides are in
elements of the stored tensor taken in C order, as numpy and torch count them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from surgery.safetensors_file import StoredTensor, tensor_nbytes


class Tile(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="copy"):
    """The box `[offset, offset + shape)` of a tensor, copied from `source`."""

    source: StoredTensor
    start: int
    strides: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class Fill(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="fill"):
    """The box `[offset, offset + shape)` of a tensor, every element of it `element`.

    `element` is hexadecimal: one element, or for dtypes below a byte the smallest whole number of bytes.
    """

    element: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


Box = Tile | Fill


class Remap(msgspec.Struct, frozen=True, gc=False, tag_field="name", tag="remap"):
    """The integer `v` becomes `table[v]`; -1 there says that `v` must not occur (ids of experts in a routing table)."""

    table: tuple[int, ...]


class Widen(msgspec.Struct, frozen=True, gc=False, tag_field="name", tag="widen"):
    """A float of dtype `stored` becomes the same number in a wider dtype: what a layout demands, never a rounding."""

    stored: str


class Narrow(msgspec.Struct, frozen=True, gc=False, tag_field="name", tag="narrow"):
    """A float of dtype `stored` that a layout had made wider becomes what it was: exact, or the job stops."""

    stored: str


Kernel = Remap | Widen | Narrow
"""The few true computations, elementwise and named, with parameters that are data."""


class Tiling(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A tensor of `dtype` and `shape` whose boxes cover every element exactly once.

    With a `kernel` the boxes hold elements of `stored_dtype`, and the kernel makes each into what the tensor has.
    """

    dtype: str
    shape: tuple[int, ...]
    tiles: tuple[Box, ...]
    kernel: Kernel | None = None

    @property
    def stored_dtype(self) -> str:
        return self.kernel.stored if isinstance(self.kernel, (Widen, Narrow)) else self.dtype

    def as_stored(self) -> Tiling:
        """The tensor before its kernel."""
        return self if self.kernel is None else Tiling(self.stored_dtype, self.shape, self.tiles)

    @property
    def nbytes(self) -> int:
        return tensor_nbytes(self.dtype, self.shape)


Content = StoredTensor | Tiling
"""What a tensor of a draft holds: a stored tensor whole, which is nearly all of them, or a tiling."""


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements between neighbours along each axis of a C-ordered tensor."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def tiling(content: Content) -> Tiling:
    """`content` as a tiling; a stored tensor becomes one tile."""
    if isinstance(content, Tiling):
        return content
    shape = content.shape
    if 0 in shape:
        return Tiling(content.dtype, shape, ())
    return Tiling(content.dtype, shape, (Tile(content, 0, contiguous_strides(shape), (0,) * len(shape), shape),))


def whole_source(content: Content) -> StoredTensor | None:
    """The stored tensor that `content` is a byte-for-byte copy of, in its own shape; None where it is not one."""
    if isinstance(content, StoredTensor):
        return content
    if content.kernel is not None or len(content.tiles) != 1 or not isinstance(tile := content.tiles[0], Tile):
        return None
    source = tile.source
    plain = Tile(source, 0, contiguous_strides(source.shape), (0,) * len(source.shape), source.shape)
    return source if content.shape == source.shape and tile == plain else None


def sources(content: Content) -> list[StoredTensor]:
    """The stored tensors that `content` takes bytes from, each once, in tile order."""
    if isinstance(content, StoredTensor):
        return [content]
    return list(
        {
            (t.source.file, t.source.offset, t.source.name): t.source for t in content.tiles if isinstance(t, Tile)
        }.values()
    )
