"""What a pruning plan has to read: router rows, and tables of expert ids."""

from __future__ import annotations

from collections.abc import Sequence

from surgery.draft import Draft
from surgery.errors import CannotApply
from surgery.operations.expert_layers import ExpertLayer
from surgery.small_values import values


def router_norms(draft: Draft, layer: ExpertLayer) -> list[float]:
    """The length of each expert's row in the router: a choice that needs no data."""
    weight = next(
        (part for part in layer.parts if part.role == "router" and len(draft.tensors[part.name].shape) == 2), None
    )
    if weight is None:
        raise CannotApply(f"{layer.source} has no router matrix", "--scores router-norm", "give a keep list")
    import numpy

    with numpy.errstate(invalid="ignore", over="ignore"):
        rows = numpy.asarray(values(draft, draft.tensors[weight.name], weight.name), dtype="f8")
    rows = rows if weight.axis == 0 else rows.T
    norms = numpy.linalg.norm(rows[: layer.experts], axis=1)
    if not numpy.isfinite(norms).all():
        bad = int(numpy.flatnonzero(~numpy.isfinite(norms))[0])
        raise CannotApply(
            f"{weight.name}: the row of expert {bad} holds a number that is none", weight.name, "give a keep list"
        )
    return [float(value) for value in norms]


def rows_without_expert(draft: Draft, name: str, ids: Sequence[int]) -> int:
    """How many rows of a table of expert ids name one that is not among `ids`."""
    import numpy

    table = values(draft, draft.tensors[name], name)
    kept = numpy.asarray(list(ids))
    gone = ~numpy.isin(table, kept)
    return int(gone.any(axis=tuple(range(1, gone.ndim))).sum()) if gone.ndim > 1 else int(gone.sum())
