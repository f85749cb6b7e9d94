"""The few values that a pruning plan depends on: router rows, and tables of expert ids. Small tensors, read whole."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from surgery.draft import Draft
from surgery.errors import CannotApply
from surgery.operations.expert_layers import ExpertLayer
from surgery.regular_file import open_regular, read_exactly
from surgery.safetensors_file import StoredTensor
from surgery.tiling import whole_source

_MAX_NBYTES = 256 << 20
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "U8": "u1", "I8": "i1"}


def _values(draft: Draft, name: str) -> Any:
    import numpy

    stored = whole_source(draft.tensors[name])
    if stored is None or stored.nbytes > _MAX_NBYTES or (stored.dtype not in _NUMPY and stored.dtype != "BF16"):
        raise CannotApply(f"{name} cannot be read as numbers", name, "give a keep list instead")
    data = _bytes(_path(draft, stored), stored)
    if stored.dtype == "BF16":
        whole = numpy.frombuffer(data, "<u2").astype("<u4") << 16
        return whole.view("<f4").reshape(stored.shape)
    return numpy.frombuffer(data, _NUMPY[stored.dtype]).reshape(stored.shape)


def _bytes(path: Path, stored: StoredTensor) -> bytes:
    with open_regular(path, str(path)) as (descriptor, _):
        os.lseek(descriptor, stored.offset, os.SEEK_SET)
        return read_exactly(descriptor, stored.nbytes, str(path))


def _path(draft: Draft, stored: StoredTensor) -> Path:
    file = draft.files[stored.file]
    return draft.roots[file.root] / file.name


def router_norms(draft: Draft, layer: ExpertLayer) -> list[float]:
    """The length of each expert's row in the router: a choice that needs no data."""
    weight = next(
        (part for part in layer.parts if part.role == "router" and len(draft.tensors[part.name].shape) == 2), None
    )
    if weight is None:
        raise CannotApply(f"{layer.source} has no router matrix", "--scores router-norm", "give a keep list")
    import numpy

    rows = numpy.asarray(_values(draft, weight.name), dtype="f8")
    rows = rows if weight.axis == 0 else rows.T
    return [float(value) for value in numpy.linalg.norm(rows[: layer.experts], axis=1)]


def rows_without_expert(draft: Draft, name: str, ids: Sequence[int]) -> int:
    """How many rows of a table of expert ids name one that is not among `ids`."""
    import numpy

    table = _values(draft, name)
    kept = numpy.asarray(list(ids))
    gone = ~numpy.isin(table, kept)
    return int(gone.any(axis=tuple(range(1, gone.ndim))).sum()) if gone.ndim > 1 else int(gone.sum())
