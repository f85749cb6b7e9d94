"""The few values that a plan may depend on: router rows, tables of ids, group indices. Small tensors, read whole."""

from __future__ import annotations

import os
from typing import Any

from surgery.draft import Draft
from surgery.errors import CannotApply
from surgery.regular_file import open_regular, read_exactly
from surgery.tiling import Content, Tile, tiling

MAX_NBYTES = 256 << 20
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "U8": "u1", "I8": "i1"}


def values(draft: Draft, content: Content, name: str) -> Any:
    """The numbers of a tensor as an array; BF16 as float32. Raises `CannotApply` for one that is no such numbers."""
    import numpy

    whole = tiling(content)
    held = [tile for tile in whole.tiles if isinstance(tile, Tile)]
    known = whole.dtype in _NUMPY or whole.dtype == "BF16"
    if not known or whole.nbytes > MAX_NBYTES or whole.kernel is not None or len(held) != len(whole.tiles):
        raise CannotApply(f"{name} cannot be read as numbers", name, "give a keep list instead")
    width = 2 if whole.dtype == "BF16" else numpy.dtype(_NUMPY[whole.dtype]).itemsize
    dtype = "<u2" if whole.dtype == "BF16" else _NUMPY[whole.dtype]
    result = numpy.empty(whole.shape, dtype)
    for tile in held:
        source = tile.source
        file = draft.files[source.file]
        path = draft.roots[file.root] / file.name
        with open_regular(path, str(path)) as (descriptor, _):
            os.lseek(descriptor, source.offset, os.SEEK_SET)
            data = read_exactly(descriptor, source.nbytes, str(path))
        stored = numpy.frombuffer(data, dtype)
        box = tuple(slice(o, o + n) for o, n in zip(tile.offset, tile.shape, strict=True))
        view = numpy.lib.stride_tricks.as_strided(
            stored[tile.start :], tile.shape, tuple(step * width for step in tile.strides)
        )
        result[box] = view
    if whole.dtype == "BF16":
        wide: Any = (result.astype("<u4") << 16).view("<f4")
        return wide
    return result


def integers(draft: Draft, content: Content) -> list[int]:
    """The values of a vector of integers."""
    return [int(value) for value in values(draft, content, "an index")]
