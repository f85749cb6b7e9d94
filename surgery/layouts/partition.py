"""What layouts share: rank files to write, and what reading rank files back gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from surgery.layouts.group_index import Values
from surgery.layouts.splits import Replica
from surgery.tiling import Content, Tile

RankTensors = list[dict[str, Content]]
"""By rank: names and contents."""


class RankFile(msgspec.Struct, frozen=True):
    """One file of a rank, with header strings of its own."""

    rank: int
    name: str
    tensors: dict[str, Content]
    metadata: dict[str, str]


class Dealt(msgspec.Struct):
    """What a layout makes of a whole checkpoint: the ranks' tensors, what it leaves out by name and why, and notes.

    `offsets` has where boxes lie that do not begin at 0; `inverse` what the ranks alone do not give back.
    """

    ranks: RankTensors
    dropped: dict[str, str] = {}
    constants: list[tuple[Tile, str]] = []
    notes: list[str] = []
    inverse: list[str] = []
    offsets: list[dict[str, list[int]]] = []


class Merged(msgspec.Struct):
    """A whole checkpoint read from rank files, and what must hold for it to be true.

    `own` are rank tensors (rank, name) that are the engine's and no part of the model, with the rule that says so;
    `constants` are tiles that must hold one element again and again, as hexadecimal.
    """

    tensors: dict[str, Content]
    replicas: list[Replica] = []
    constants: list[tuple[Tile, str]] = []
    own: dict[tuple[int, str], str] = {}
    notes: list[str] = []


class Job(msgspec.Struct):
    """What a layout has to know: the model's config, the number of ranks, options, and how to read small tensors.
    `group_index`: GPTQ indices in plain order were left out of the ranks.
    """

    config: Mapping[str, Any]
    ranks: int
    expert_parallel: bool = False
    profile: str = ""
    values: Values | None = None
    group_index: bool = False


def names_of(ranks: Sequence[Mapping[str, Content]]) -> list[str]:
    """Every name of any rank, in the order of the first rank that has it."""
    return list(dict.fromkeys(name for rank in ranks for name in rank))
