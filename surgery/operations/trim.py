"""Trim: keep some layers, in a given order, under new numbers, and make the config say so."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from surgery.draft import Config, ConfigChange, Draft, changed, with_tensors
from surgery.errors import CannotApply, Problems, UsageError
from surgery.families.records import require_family
from surgery.families.schema import DEPTH_SPELLINGS, Family
from surgery.layer_ranges import compact_ranges, parse_ranges
from surgery.operations.rename import QUANTIZATION_KEYS
from surgery.tiling import Content

_PER_LAYER_NAME = re.compile(r"layer|_types|pattern|freq|ratios|block")
_LONG_LIST = 8
"""A list of the model's depth says something of each layer for certain only where the depth is no usual length."""


class Trim(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="operation", tag="trim"):
    """`layers`: source layer ids in their new order, `0,6,7`; ranges `0-3` include both ends; a repeat copies the
    layer again."""

    layers: str

    def apply(self, draft: Draft) -> Draft:
        family = require_family(draft.config, "trim")
        assert draft.config is not None
        depth = family.depth(draft.config)
        if depth is None:
            raise CannotApply(
                f"{family.stack.depth} is {draft.config.get(family.stack.depth)!r}; expected a count of layers",
                "config.json",
                "correct the config",
            )
        kept = self._kept(depth)
        layers = _layers_of(draft, family, depth)
        _refuse_mixed_tensors(draft, family, layers, depth)
        _refuse_mixed_facts(draft.config, family, depth)
        _refuse_listed_modules(draft.config, family)
        config, changes = _trimmed_config(draft.config, family, depth, kept)
        _recheck(draft.config, config, family, kept)
        tensors, gone = _trimmed_tensors(draft, family, layers, kept)
        trimmed = with_tensors(_without_absent(draft, family, kept), tensors, gone)
        before = draft.layers.get(family.stack.prefix, list(range(depth)))
        return changed(
            trimmed,
            config=config,
            config_changes=(*draft.config_changes, *changes),
            layers={**draft.layers, family.stack.prefix: [before[layer] for layer in kept]},
        )

    def _kept(self, depth: int) -> list[int]:
        if "=" in self.layers:
            stack = self.layers.partition("=")[0]
            raise CannotApply(
                f"the checkpoint has no stack {stack!r} beside its text decoder",
                "--layers",
                "list text layers only",
            )
        kept = parse_ranges(self.layers)
        outside = sorted({layer for layer in kept if layer >= depth})
        if outside:
            raise UsageError(
                f"no layer {compact_ranges(outside)}; the model has 0 to {depth - 1}",
                "--layers",
                f"choose from 0-{depth - 1}",
            )
        return kept


def _layers_of(draft: Draft, family: Family, depth: int) -> dict[int, list[str]]:
    """Tensor names by layer. A layer that the config does not count is an error, never left behind."""
    prefix = family.stack.prefix
    layers: dict[int, list[str]] = {layer: [] for layer in range(depth)}
    problems = Problems()
    for name in draft.tensors:
        split = split_layer(name, prefix)
        if split is None:
            continue
        layer, _ = split
        if layer in layers:
            layers[layer].append(name)
        else:
            problems.add(
                f"{name} belongs to a layer that the config does not count: it says 0 to {depth - 1}",
                "config.json",
                f"correct {family.stack.depth}, or drop the tensors first",
            )
    empty = [layer for layer, names in layers.items() if not names]
    if len(empty) == depth:
        problems.add(f"no tensor is named {prefix}N.*", "names of the source", f"`surgery rename` them to {prefix}N.*")
    elif empty:
        problems.add(
            f"the config counts {depth} layers, but layer {compact_ranges(empty)} has no tensors",
            "config.json",
            "get the missing files, or correct the count",
        )
    problems.raise_if_any(CannotApply, "config and tensors disagree about the layers")
    return layers


def split_layer(name: str, prefix: str) -> tuple[int, str] | None:
    """`(layer, rest)` of a name in the stack; None for any other name. `rest` begins after the number."""
    if not name.startswith(prefix):
        return None
    number, dot, rest = name[len(prefix) :].partition(".")
    if not number.isdecimal() or not number.isascii() or len(number) > 9 or (number[0] == "0" and number != "0"):
        return None
    return int(number), dot + rest


def _refuse_mixed_tensors(draft: Draft, family: Family, layers: Mapping[int, Sequence[str]], depth: int) -> None:
    """These families have one kind of layer: each holds the same tensors in the same shapes."""
    absent = {name: split for name in draft.absent if (split := split_layer(name, family.stack.prefix))}

    def signature(layer: int) -> frozenset[str]:
        width = len(f"{family.stack.prefix}{layer}")
        held = {name[width:] for name in layers[layer]}
        return frozenset(held | {rest for number, rest in absent.values() if number == layer})

    first = signature(0)
    for layer in range(1, depth):
        odd = signature(layer) ^ first
        if odd:
            raise CannotApply(
                f"layer {layer} holds other tensors than layer 0 ({len(odd)} differ, for one {sorted(odd)[0]}): "
                f"{family.name} layers of several kinds cannot be trimmed yet",
                f"{family.stack.prefix}{layer}",
                "check that the checkpoint is whole with `surgery inspect`",
            )
        width = len(f"{family.stack.prefix}{layer}")
        for name in layers[layer]:
            twin = draft.tensors.get(f"{family.stack.prefix}0{name[width:]}")
            if twin is not None and twin.shape != draft.tensors[name].shape:
                raise CannotApply(
                    f"{name} has shape {list(draft.tensors[name].shape)}, layer 0 has {list(twin.shape)}: "
                    f"{family.name} layers of several kinds cannot be trimmed yet",
                    name,
                    "check the checkpoint with `surgery inspect`",
                )


def _refuse_mixed_facts(config: Config, family: Family, depth: int) -> None:
    kinds: dict[str, list[int]] = {}
    for layer in range(depth):
        kind = " ".join(f"{key}={value}" for key, value in sorted(family.facts(config, layer).items()))
        kinds.setdefault(kind, []).append(layer)
    if len(kinds) > 1:
        told = "; ".join(f"{kind}: layers {compact_ranges(layers)}" for kind, layers in kinds.items())
        raise CannotApply(
            f"this {family.name} has layers of several kinds, which trim cannot carry yet ({told})",
            "config.json",
            "trim takes models of this family whose layers are all of one kind",
        )


def _refuse_listed_modules(config: Config, family: Family) -> None:
    """A quantisation list that names layers would point at other layers after the trim."""
    numbered = re.compile(r"(layers|h|blocks?)\\?\.[\\\[(]*\d")
    for key in QUANTIZATION_KEYS:
        named = [text for text in _strings(config.get(key)) if numbered.search(text)]
        if named:
            raise CannotApply(
                f"{key} names layers by number, for one {named[0]!r}: trimming {family.name} with such a list "
                "is not possible yet",
                f"config.json {key}",
                "`surgery repack` works on it",
            )


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from _strings(key)
            yield from _strings(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from _strings(entry)


def _trimmed_config(
    config: Config, family: Family, depth: int, kept: Sequence[int]
) -> tuple[Config, list[ConfigChange]]:
    """The config of the trimmed model: every count that the file has, every per-layer list; nothing is added."""
    edited = copy.deepcopy(config)
    changes: list[ConfigChange] = []

    def put(field: str, new: Any, rule: str) -> None:
        if edited[field] != new:
            changes.append(ConfigChange(field, config[field], new, rule))
            edited[field] = new

    for field in dict.fromkeys((family.stack.depth, *DEPTH_SPELLINGS)):
        if field not in config:
            continue
        if config[field] != depth:
            raise CannotApply(
                f"{field} is {config[field]!r} and {family.stack.depth} is {depth}: the config disagrees with itself",
                "config.json",
                "correct the wrong one",
            )
        put(field, len(kept), "depth count")
    for field, value in config.items():
        if not isinstance(value, list):
            continue
        if field in family.stack.per_layer and len(value) != depth:
            raise CannotApply(
                f"{field} has {len(value)} entries for {depth} layers",
                "config.json",
                "correct the list: engines refuse such a config",
            )
        if field in family.stack.per_layer:
            put(field, [value[layer] for layer in kept], "per-layer list")
        elif len(value) == depth and (depth > _LONG_LIST or _PER_LAYER_NAME.search(field)):
            _refuse_unknown_list(field, value)
            put(field, [value[layer] for layer in kept], "per-layer list of one value")
    return edited, changes


def _refuse_unknown_list(field: str, value: list[Any]) -> None:
    if any(entry != value[0] for entry in value):
        raise CannotApply(
            f"{field} has an entry for each of the {len(value)} layers, and no rule says what it means",
            f"config.json {field}",
            "remove the field if no engine reads it; otherwise this family needs a rule for it",
        )


def _recheck(old: Config, new: Config, family: Family, kept: Sequence[int]) -> None:
    """Every kept layer is, under the new config, what it was under the old one."""
    changed_layers = [
        (source, place) for place, source in enumerate(kept) if family.facts(old, source) != family.facts(new, place)
    ]
    if changed_layers:
        source, place = changed_layers[0]
        raise CannotApply(
            f"{len(changed_layers)} layers would change their kind, first layer {source}: it is "
            f"{family.facts(old, source)} and would be {family.facts(new, place)} as layer {place}",
            "trim",
            "choose other layers",
        )


def _trimmed_tensors(
    draft: Draft, family: Family, layers: Mapping[int, Sequence[str]], kept: Sequence[int]
) -> tuple[dict[str, Content], dict[str, str]]:
    """Kept layers under their new numbers, where the first layer stood; everything outside the stack as it is."""
    prefix = family.stack.prefix
    moved = {
        f"{prefix}{place}{name[len(f'{prefix}{source}') :]}": draft.tensors[name]
        for place, source in enumerate(kept)
        for name in layers[source]
    }
    in_stack = {name for names in layers.values() for name in names}
    tensors: dict[str, Content] = {}
    for name, content in draft.tensors.items():
        if name not in in_stack:
            tensors[name] = content
        elif moved:
            tensors.update(moved)
            moved = {}
    wanted = set(kept)
    gone = {
        name: "trim: its layer is not kept" for layer, names in layers.items() if layer not in wanted for name in names
    }
    return tensors, gone


def _without_absent(draft: Draft, family: Family, kept: Sequence[int]) -> Draft:
    """Tensors that only the index names are no loss where their layer goes anyway."""
    wanted = set(kept)
    still = tuple(
        name for name in draft.absent if (split := split_layer(name, family.stack.prefix)) is None or split[0] in wanted
    )
    return changed(draft, absent=still)
