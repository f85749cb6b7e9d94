"""Cover: the fewest layers that keep every kind, the layers they depend on, and what is lost without the rest.

A kind is the whole set of a layer's facts, for every reader, taken together.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import msgspec

from surgery.errors import CannotApply
from surgery.families.carrying import LayerMap, closure, works
from surgery.families.schema import Config, Family

MAX_TRIED = 20_000
MAX_EXTRA = 4
MAX_SEARCH_SECONDS = 5.0
"""Layers beyond one of each kind that are tried, and for how long, where no config can say less."""
CANDIDATES_A_KIND = 6
"""Layers of each kind that are tried: its first ones, its last, and so both sides of every boundary."""


class Target(msgspec.Struct, frozen=True):
    """One kind: its name in words, the source layers that are of it, those of the selection, what they depend on, a
    request that exercises it, and what a trim to the selection loses of it."""

    kind: str
    source_layers: list[int]
    layers: list[int]
    depends_on: list[int]
    request: str
    lost: str


def kinds(family: Family, config: Config, depth: int, readers: Sequence[str]) -> dict[str, list[int]]:
    """Source layers by kind, in the order of their first layers."""
    listed = [family.all_facts(config, depth, reader) for reader in readers]
    found: dict[str, list[int]] = {}
    for layer in range(depth):
        found.setdefault(_name(family, [facts[layer] for facts in listed]), []).append(layer)
    return found


def _name(family: Family, facts: Sequence[Mapping[str, Any]]) -> str:
    """`moe, full_attention, kv shared`: the values that tell kinds apart, readers that disagree side by side."""
    parts: list[str] = []
    for one in family.fact_list:
        values = list(dict.fromkeys(str(each[one.name]) for each in facts if each.get(one.name) is not None))
        if values:
            said = "/".join(values)
            parts.append(said if one.name in ("mlp", "attention", "block") else f"{one.name} {said}")
    return ", ".join(parts) or "all alike"


def cover(family: Family, config: Config, depth: int, readers: Sequence[str], need: Sequence[str] = ()) -> list[int]:
    """The fewest layers, sorted, that hold every kind (or those that `need` names a part of) and that a config can say.

    Raises `CannotApply` where a needed kind does not exist or no selection was found.
    """
    groups = kinds(family, config, depth, readers)
    wanted = {name: layers for name, layers in groups.items() if not need or any(part in name for part in need)}
    unknown = [part for part in need if not any(part in name for name in groups)]
    if unknown:
        raise CannotApply(
            f"no layer is of a kind named {unknown[0]!r}", "--need", f"the kinds are: {'; '.join(groups)}"
        )
    best = _fewest(family, config, depth, readers, list(wanted.values()))
    if best is None:
        raise CannotApply(
            "no small selection was found that holds every kind in an order that a config can say",
            "cover",
            "choose layers by hand, or ask less with --need or --for",
        )
    return best


def _fewest(
    family: Family, config: Config, depth: int, readers: Sequence[str], groups: Sequence[Sequence[int]]
) -> list[int] | None:
    """One layer of each group, their producers, and where no config can say that order, further layers between."""
    best: list[int] | None = None
    until = time.monotonic() + MAX_SEARCH_SECONDS
    candidates = sorted({layer for layers in groups for layer in _candidates(layers)})
    for extra in range(MAX_EXTRA + 1):
        if best is not None and len(best) <= len(groups) + extra:
            break
        for tried, choice in enumerate(product(*(_candidates(layers) for layers in groups))):
            if tried > MAX_TRIED or time.monotonic() > until:
                break
            for added in combinations([layer for layer in candidates if layer not in choice], extra):
                selection = closure(family, config, [*choice, *added], depth, readers)
                if best is not None and len(selection) >= len(best):
                    continue
                if works(family, config, LayerMap(selection, depth), readers):
                    best = selection
    return best


def _candidates(layers: Sequence[int]) -> list[int]:
    if len(layers) <= CANDIDATES_A_KIND:
        return list(layers)
    return [*layers[: CANDIDATES_A_KIND - 1], layers[-1]]


def cover_table(
    family: Family, config: Config, depth: int, readers: Sequence[str], selection: Sequence[int], stages: int, kept: int
) -> list[Target]:
    """What `selection` keeps of every kind; the MTP head is a target of its own where there is one."""
    section = family.section(config)[1]
    rows = []
    for name, layers in kinds(family, config, depth, readers).items():
        mine = [layer for layer in dict.fromkeys(selection) if layer in layers]
        needs = sorted(set(closure(family, config, mine, depth, readers)) - set(mine))
        lost = "the kind itself: nothing exercises it" if not mine else _lost(layers, mine)
        rows.append(Target(name, layers, mine, needs, _request(name, section), lost))
    if stages:
        lost = "" if kept else "the MTP head: speculative decoding with it"
        rows.append(Target("MTP head", [], [], [], "speculative decoding with the model's own head (MTP)", lost))
    return rows


def _lost(layers: Sequence[int], mine: Sequence[int]) -> str:
    rest = len(layers) - len(mine)
    return f"{rest} more of the kind" if rest else ""


def _request(kind: str, section: Config) -> str:
    """A request that makes a layer of the kind do what tells it apart."""
    window = section.get("sliding_window")
    for mark, request in (
        ("sliding", f"a prompt longer than the window ({window} tokens)"),
        ("chunked", f"a prompt longer than a chunk ({section.get('attention_chunk_size', 8192)} tokens)"),
        ("compressed", "a prompt long enough to be compressed, then decoding"),
        ("indexer", f"a prompt longer than index_topk ({section.get('index_topk')} tokens)"),
        ("linear", "a prompt and several decode steps: the state is carried"),
        ("mamba", "a prompt and several decode steps: the state is carried"),
        ("kv shared", "a prompt and several decode steps: the cache of another layer is read"),
        ("moe", "a prompt of many different tokens, so that every expert is reached"),
        ("sparse", "a prompt of many different tokens, so that every expert is reached"),
    ):
        if mark in kind:
            return request
    return "any prompt"
