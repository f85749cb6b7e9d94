"""The config of a trim: counts, facts, ids of layers and MTP counts; nothing else is touched."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from typing import Any

from surgery.draft import Config, ConfigChange
from surgery.errors import CannotApply
from surgery.families.carrying import LayerMap, carry, depth_fields
from surgery.families.schema import DEPTH_SPELLINGS, Family
from surgery.operations.quantization_carry import carry_places
from surgery.operations.trim_tensors import Parts, layer_move
from surgery.quantization import is_numbered, named_in, unlisted_texts
from surgery.quantization_schemes import Modules, modules_of

_PER_LAYER_NAME = re.compile(r"layer|_types|pattern|freq|ratios|block")
_LONG_LIST = 8
"""A list of the model's depth says something of each layer for certain only where the depth is no usual length."""


class _Edit:
    """A copy of the config under edit, and the record of what changed."""

    def __init__(self, config: Config, family: Family) -> None:
        self.config = copy.deepcopy(config)
        self.path = family.section(self.config)[0]
        self.section: dict[str, Any] = self.config
        for key in self.path:
            self.section = self.section[key]
        self.changes: list[ConfigChange] = []
        self.notes: list[str] = []

    def put(self, field: str, new: Any, rule: str, reader: str = "all", *, top: bool = False) -> None:
        place = self.config if top else self.section
        path = field if top else ".".join((*self.path, field))
        old = copy.deepcopy(place.get(field))
        if field not in place or old != new:
            self.changes.append(ConfigChange(path, old, new, rule, reader))
            place[field] = new


def trimmed_config(
    config: Config,
    family: Family,
    layers: LayerMap,
    parts: Parts,
    readers: Sequence[str],
    retarget: str,
    names: Iterable[str],
) -> tuple[Config, list[ConfigChange], list[str]]:
    """The config of the trimmed model, its changes as old -> new, and notes for a person. `names` are the source's
    tensors."""
    edit = _Edit(config, family)
    _judge_depth(edit, family, layers.depth)
    _judge_lengths(edit, family, layers.depth)
    _refuse_unknown_numbers(config, family)
    changes = carry(family, config, layers, readers)
    for field in depth_fields(family, family.section(config)[1], layers.depth):
        edit.put(field, len(layers.kept), "depth count")
    for change in changes:
        edit.put(change.field, change.new, change.rule, change.reader)
    _judge_lists(edit, family, config, layers)
    _carry_ids(edit, family, layers, retarget)
    _count_stages(edit, family, layers, parts)
    _carry_lists(edit, layers, parts, names)
    return edit.config, edit.changes, edit.notes


def _judge_depth(edit: _Edit, family: Family, depth: int) -> None:
    """Every spelling of the count that the file has says the same."""
    for place, path in ((edit.section, edit.path), (edit.config, ())):
        for field in dict.fromkeys((family.stack.depth, *DEPTH_SPELLINGS)):
            if field not in place or (place is edit.config and edit.path):
                continue
            ignored = family.stack.depth_from and any(name in place for name in family.stack.depth_from)
            if place[field] != depth and not ignored:
                raise CannotApply(
                    f"{'.'.join((*path, field))} is {place[field]!r}, the depth is {depth}: the config disagrees "
                    "with itself",
                    "config.json",
                    "correct the wrong one",
                )


def _judge_lengths(edit: _Edit, family: Family, depth: int) -> None:
    """A list with one entry a layer has one for each, and more only where entries of MTP stages may follow."""
    for field, has_tail in {"layer_types": False, **family.per_layer_fields()}.items():
        listed = edit.section.get(field)
        if not isinstance(listed, (list, str)) or not listed:
            continue
        if len(listed) < depth or (len(listed) > depth and not has_tail):
            raise CannotApply(
                f"{field} has {len(listed)} entries for {depth} layers",
                "config.json",
                "correct the list: engines refuse such a config",
            )


def _judge_lists(edit: _Edit, family: Family, config: Config, layers: LayerMap) -> None:
    """A list of the model's depth that no rule knows: of one value it is cut along, of several nobody can say."""
    section = family.section(config)[1]
    known = family.known_fields()
    for field, value in section.items():
        if not isinstance(value, list) or len(value) != layers.depth or field in known:
            continue
        if layers.depth <= _LONG_LIST and not _PER_LAYER_NAME.search(field):
            continue
        if any(entry != value[0] for entry in value):
            raise CannotApply(
                f"{field} has an entry for each of the {len(value)} layers, and no rule says what it means",
                f"config.json {field}",
                "remove the field if no engine reads it; otherwise this family needs a rule for it",
            )
        edit.put(field, [value[layer] for layer in layers.kept], "per-layer list of one value")


def _carry_ids(edit: _Edit, family: Family, layers: LayerMap, retarget: str) -> None:
    """Ids of layers that are no fact of a layer, such as the targets of a draft head."""
    for ids in family.ids:
        listed = edit.section.get(ids.field)
        if not isinstance(listed, list) or not listed:
            continue
        gone = [entry for entry in listed if not isinstance(entry, int) or entry - ids.base not in layers.kept]
        if gone and retarget != "last":
            raise CannotApply(
                f"{ids.field} names layers {gone}, which are not kept",
                f"config.json {ids.field}",
                f"keep them, or --retarget last points the {len(listed)} ids at the last kept layers",
            )
        if gone:
            first = max(0, len(layers.kept) - len(listed))
            new = [ids.base + first + min(j, len(layers.kept) - 1 - first) for j in range(len(listed))]
            edit.notes.append(f"{ids.field} {listed} points at the last kept layers now: its own are gone")
        else:
            new = [ids.base + list(layers.kept).index(entry - ids.base) for entry in listed]
        edit.put(ids.field, new, "ids of layers")


def _count_stages(edit: _Edit, family: Family, layers: LayerMap, parts: Parts) -> None:
    """MTP stages are counted from tensors as well as from the config; a count that is right stays."""
    mtp = family.mtp
    if mtp is None:
        return
    for field in mtp.counts:
        for place in ((edit.section, False), (edit.config, True)) if edit.path else ((edit.section, False),):
            if field not in place[0]:
                continue
            count = place[0][field]
            if parts.stages and not layers.stages:
                edit.put(field, 0, "MTP dropped", top=place[1])
            elif count and not parts.stages:
                edit.notes.append(f"{field} is {count}, and no tensor of an MTP stage is there")
            elif count != len(parts.stages):
                edit.notes.append(f"{field} is {count!r}, and {len(parts.stages)} MTP stages are there")


def _refuse_unknown_numbers(config: Config, family: Family) -> None:
    """A text of a quantisation section that names layers, outside the places that are understood, would be stale."""
    named = [text for text in unlisted_texts(config) if is_numbered(text)]
    if named:
        raise CannotApply(
            f"the quantisation section names layers by number in a form that is not understood, for one {named[0]!r}",
            "config.json",
            f"`surgery repack` works on it; trimming {family.name} needs this scheme's rule",
        )


def _carry_lists(edit: _Edit, layers: LayerMap, parts: Parts, names: Iterable[str]) -> None:
    """What the quantisation sections say of modules follows the layers; entries that match nothing are reported."""
    places = list(named_in(edit.config))
    modules = modules_of(names) if places else Modules([], [])
    changes, notes = carry_places(edit.config, places, modules, layer_move(parts, layers), "quantisation list")
    edit.changes += changes
    edit.notes += notes
