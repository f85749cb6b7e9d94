"""Carry a config through a layer map: solve every rule of every reader, then prove that nothing changed its kind."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from surgery.errors import CannotApply
from surgery.families.config_fields import with_fields
from surgery.families.rules import Carry
from surgery.families.schema import READERS, Config, Facts, Family
from surgery.layer_ranges import compact_ranges

MAX_SEARCH_SECONDS = 1.0
"""How long a selection that works is looked for, for the mend line of a refusal."""


@dataclass(frozen=True)
class Change:
    """A field of the section, its new value, and the fact and reader that it serves."""

    field: str
    new: Any
    rule: str
    reader: str


@dataclass(frozen=True)
class LayerMap:
    """`kept` source layers in their new order, of a stack that had `depth`, and the MTP stages that stay."""

    kept: Sequence[int]
    depth: int
    stages: Sequence[int] = ()

    def place(self, source: int, before: int) -> int | None:
        """The nearest copy of `source` before the new place `before`."""
        return next((j for j in range(before - 1, -1, -1) if self.kept[j] == source), None)


def readers_of(family: Family, only: str) -> tuple[str, ...]:
    """The readers whose facts must hold: all, or the one that `--for` names."""
    return (only,) if only else READERS


def carry(family: Family, config: Config, layers: LayerMap, readers: Sequence[str]) -> list[Change]:
    """The changes of the stack's section that keep every fact of every kept layer for every reader.

    Raises `CannotApply` with the layers that would change kind and a selection that works.
    """
    problems = _problems_of(family, config, layers, readers)
    if isinstance(problems, list):
        return problems
    raise CannotApply(problems, "trim", _mend(family, config, layers, readers))


def _problems_of(family: Family, config: Config, layers: LayerMap, readers: Sequence[str]) -> list[Change] | str:
    """The changes, or why there are none."""
    old = family.section(config)[1]
    facts = {reader: family.all_facts(config, layers.depth, reader) for reader in readers}
    missing = _missing_producer(family, facts, layers)
    if missing:
        return missing
    new: dict[str, Any] = {**copy.deepcopy(dict(old)), **depth_fields(family, old, layers)}
    changes: list[Change] = []
    demanded = family.at_least_one
    if demanded and all(facts[r][source][demanded[0]] != demanded[1] for r in readers for source in layers.kept):
        return f"a config without a layer that is {demanded[0]} {demanded[1]} is refused by its readers"
    for one in family.fact_list:
        for reader in readers:
            rule = one.rule(reader)
            if rule is None or (reader != readers[0] and "any" in one.rules):
                continue
            wanted = _wanted(family, facts[reader], one.name, layers)
            fields = rule.express(Carry(old, new, wanted, layers.kept, layers.depth, layers.stages))
            if fields is None:
                return _inexpressible(one.name, reader, facts[reader], layers)
            new = with_fields(new, fields)
            for field, value in fields.items():
                changes.append(Change(field, value, one.name, reader if "any" not in one.rules else "all"))
    fault = changed_kind(family, config, replaced_section(family, config, new), layers, readers)
    return fault if fault else changes


def depth_fields(family: Family, section: Config, layers: LayerMap) -> dict[str, int]:
    """The fields that count the layers, or parts of them, or equal the count and follow it, with their new values.

    A count that another stack's stands in for is made explicit: the other may change.
    """
    stack, count = family.stack, len(layers.kept)
    fields = {name: count for name in dict.fromkeys((stack.depth, *stack.spellings)) if section.get(name) is not None}
    if not fields and stack.default:
        fields = {stack.depth: count}
    for name, factor in stack.multiples.items():
        if section.get(name) == factor * layers.depth:
            fields[name] = factor * count
    return fields | {name: count for name in family.follows if section.get(name) == layers.depth}


def _wanted(family: Family, facts: Sequence[Facts], name: str, layers: LayerMap) -> list[Any]:
    wanted = [facts[source][name] for source in layers.kept]
    if family.last_layer is not None and family.last_layer[0] == name and layers.kept[-1] == layers.depth - 1:
        wanted[-1] = family.last_layer[1]
    return wanted


def changed_kind(family: Family, config: Config, whole: Config, layers: LayerMap, readers: Sequence[str]) -> str:
    """The recheck: every kept layer is, under the new config `whole`, what it was under the old one, references and MTP
    stages included. Returns what is not; nothing where all is."""
    for reader in readers:
        old_facts = family.all_facts(config, layers.depth, reader)
        if stage := _changed_stage(family, config, whole, layers, reader):
            return stage
        new_facts = family.all_facts(whole, len(layers.kept), reader)
        wrong = [j for j, source in enumerate(layers.kept) if new_facts[j] != old_facts[source]]
        if wrong:
            j = wrong[0]
            source = layers.kept[j]
            named = [name for name in new_facts[j] if new_facts[j][name] != old_facts[source][name]]
            was, would_be = old_facts[source][named[0]], new_facts[j][named[0]]
            return (
                f"layers {compact_ranges([layers.kept[w] for w in wrong])} would change their kind for {reader}: "
                f"layer {source} is {named[0]} {was} and would be {would_be} as layer {j}"
            )
        for reference in family.references:
            for j, source in enumerate(layers.kept):
                target = reference.target(old_facts, source)
                meant = None if target is None else layers.place(target, j)
                if reference.target(new_facts, j) != meant:
                    return f"layer {source} would take its {reference.name.removesuffix('_from')} from another layer"
    return ""


def stage_kinds(family: Family, config: Config, depth: int, stage: int) -> dict[str, Any]:
    """What vLLM takes an MTP stage for, by the rules that it evaluates at the stage's own number."""
    mtp = family.mtp
    section = family.section(config)[1]
    kinds: dict[str, Any] = {}
    for name in mtp.same_kind if mtp is not None else ():
        rule = next((one.rule("vllm") for one in family.fact_list if one.name == name), None)
        number = depth + stage if mtp is not None and mtp.behind else stage
        kinds[name] = rule.value(section, number, max(depth, number + 1)) if rule is not None else None
    return kinds


def _changed_stage(family: Family, config: Config, whole: Config, layers: LayerMap, reader: str) -> str:
    """vLLM evaluates some rules at the number of an MTP stage, which changes where stages lie behind the layers."""
    for place, stage in enumerate(layers.stages) if reader == "vllm" else ():
        was, now = (
            stage_kinds(family, config, layers.depth, stage),
            stage_kinds(family, whole, len(layers.kept), place),
        )
        for name in was:
            if was[name] != now[name]:
                return (
                    f"MTP stage {stage} would change its kind for {reader}: its {name} is {was[name]} by its number "
                    f"now, and would be {now[name]}"
                )
    return ""


def _missing_producer(family: Family, facts: dict[str, list[Facts]], layers: LayerMap) -> str:
    for old_facts in facts.values():
        for reference in family.references:
            for j, source in enumerate(layers.kept):
                target = reference.target(old_facts, source)
                if target is not None and (target < 0 or layers.place(target, j) is None):
                    return (
                        f"layer {source} takes its {reference.name.removesuffix('_from')} from layer {target}, "
                        f"which is not kept before it"
                    )
    return ""


def _inexpressible(name: str, reader: str, facts: Sequence[Facts], layers: LayerMap) -> str:
    told = ", ".join(f"{source} {facts[source][name]}" for source in layers.kept[:12])
    return (
        f"no config says this order of {name} for {reader}: {told}"
        + (", ..." if len(layers.kept) > 12 else "")
        + "; layers would change their kind"
    )


def replaced_section(family: Family, config: Config, section: Config) -> dict[str, Any]:
    """`config` with the stack's section replaced."""
    path = family.section(config)[0]
    if not path:
        return {**config, **section}
    whole: dict[str, Any] = dict(config)
    inner: Any = whole
    for key in path[:-1]:
        inner[key] = dict(inner[key])
        inner = inner[key]
    inner[path[-1]] = dict(section)
    return whole


def works(family: Family, config: Config, layers: LayerMap, readers: Sequence[str]) -> bool:
    return isinstance(_problems_of(family, config, layers, readers), list)


def _mend(family: Family, config: Config, layers: LayerMap, readers: Sequence[str]) -> str:
    found = nearest_selection(family, config, layers, readers)
    if found is not None:
        return f"--layers {compact_ranges(found)} works"
    return "`surgery cover SRC` shows selections that work" + (
        "" if len(readers) == 1 else "; --for transformers or --for vllm asks less"
    )


def closure(family: Family, config: Config, layers: Sequence[int], depth: int, readers: Sequence[str]) -> list[int]:
    """`layers`, sorted, with every layer that one of them refers to."""
    wanted = set(layers)
    for reader in readers:
        facts = family.all_facts(config, depth, reader)
        pending = list(wanted)
        while pending:
            layer = pending.pop()
            for reference in family.references:
                target = reference.target(facts, layer)
                if target is not None and target >= 0 and target not in wanted:
                    wanted.add(target)
                    pending.append(target)
    return sorted(wanted)


def nearest_selection(family: Family, config: Config, layers: LayerMap, readers: Sequence[str]) -> list[int] | None:
    """A selection that works, close to the one asked for: sorted, with its producers, a layer more or less."""
    base = closure(family, config, layers.kept, layers.depth, readers)
    until = time.monotonic() + MAX_SEARCH_SECONDS
    others = [layer for layer in range(layers.depth) if layer not in base]
    for extra in range(min(4, len(others)) + 1):
        for added in combinations(others, extra):
            candidate = closure(family, config, [*base, *added], layers.depth, readers)
            if works(family, config, LayerMap(candidate, layers.depth, layers.stages), readers):
                return candidate
            if time.monotonic() > until:
                return None
    return None
