"""The config of a trim: counts, facts, ids of layers and MTP counts; nothing else is touched."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from typing import Any

from surgery.draft import Config, ConfigChange
from surgery.errors import CannotApply
from surgery.families.carrying import LayerMap, carry, changed_kind, depth_fields
from surgery.families.config_fields import holds, read, with_fields
from surgery.families.schema import Family, LayerIds
from surgery.operations.quantization_carry import carry_places
from surgery.operations.trim_tensors import Parts, layer_move
from surgery.quantization import is_numbered, named_in, unlisted_texts
from surgery.quantization_schemes import Modules, modules_of

_PER_LAYER_NAME = re.compile(r"layer|_types|pattern|freq|ratios|block|limits")
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
        old = copy.deepcopy(read(place, field))
        if not holds(place, field) or old != new:
            self.changes.append(ConfigChange(path, old, new, rule, reader))
            place.update(with_fields(place, {field: new}))


def trimmed_config(
    config: Config,
    family: Family,
    layers: LayerMap,
    parts: Parts,
    readers: Sequence[str],
    retarget: str,
    names: Iterable[str],
    *,
    mtp_dropped: bool = False,
) -> tuple[Config, list[ConfigChange], list[str]]:
    """The config of the trimmed model, its changes as old -> new, and notes for a person. `names` are the source's
    tensors."""
    edit = _Edit(config, family)
    _judge_depth(edit, family, layers.depth)
    _judge_lengths(edit, family, layers.depth)
    _refuse_unknown_numbers(config, family)
    changes = carry(family, config, layers, readers)
    for field, count in depth_fields(family, family.section(config)[1], layers).items():
        edit.put(field, count, "depth count")
        if edit.path and edit.config.get(field) == layers.depth:
            edit.put(field, count, "depth count", top=True)
    for change in changes:
        edit.put(change.field, change.new, change.rule, change.reader)
    _judge_lists(edit, family, config, layers)
    _carry_ids(edit, family, layers, retarget)
    _count_stages(edit, family, parts, mtp_dropped=mtp_dropped)
    _carry_lists(edit, layers, parts, names)
    if fault := changed_kind(family, config, edit.config, layers, readers):
        raise CannotApply(fault, "trim", "this is a fault of ours: report it with the config")
    return edit.config, edit.changes, edit.notes


def _judge_depth(edit: _Edit, family: Family, depth: int) -> None:
    """Every spelling of the count that the file has says the same."""
    for place, path in ((edit.section, edit.path), (edit.config, ())):
        for field in dict.fromkeys((family.stack.depth, *family.stack.spellings)):
            if place.get(field) is None or (place is edit.config and edit.path):
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
        listed = read(edit.section, field)
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
        place = edit.config if ids.top else edit.section
        listed = read(place, ids.field)
        entries = listed if isinstance(listed, list) else [listed]
        if listed is None or not entries:
            continue
        meant = [_layer_meant(entry, ids, layers.depth) for entry in entries]
        gone = [entry for entry, layer in zip(entries, meant, strict=True) if layer != -1 and layer not in layers.kept]
        if gone and retarget != "last":
            raise CannotApply(
                f"{ids.field} names layers {gone}, which are not kept",
                f"config.json {ids.field}",
                f"keep them, or --retarget last points the {len(gone)} of them at the last kept layers",
            )
        places = _places(ids, entries, meant, layers)
        if gone:
            edit.notes.append(f"{ids.field}: {gone} point at the last kept layers now: their own are gone")
        new = [_id_of(at, entry, ids, len(layers.kept)) for at, entry in zip(places, entries, strict=True)]
        edit.put(ids.field, new if isinstance(listed, list) else new[0], "ids of layers", top=ids.top)


def _places(ids: LayerIds, entries: Sequence[Any], meant: Sequence[int | None], layers: LayerMap) -> list[int]:
    """The new places of layers that ids name; those that are gone get the last kept layers that no id names."""
    kept = list(layers.kept)
    named = {kept.index(layer) for layer in meant if layer is not None and layer in kept}
    free = [place for place in range(len(kept)) if place not in named]
    missing = sum(layer != -1 and layer not in kept for layer in meant)
    if missing > len(free):
        raise CannotApply(
            f"{ids.field} names {len(entries)} layers, and {len(kept)} are kept: two ids would be one layer",
            f"config.json {ids.field}",
            f"keep {len(entries)} layers or more",
        )
    spare = iter(free[len(free) - missing :])
    return [-1 if layer == -1 else kept.index(layer) if layer in kept else next(spare) for layer in meant]


def _layer_meant(entry: object, ids: LayerIds, depth: int) -> int | None:
    """The layer that an id names; -1 for what goes into the first layer, None for no layer of the model."""
    if not isinstance(entry, int) or isinstance(entry, bool):
        return None
    if not ids.hidden_states:
        layer = entry - ids.base
        if entry == -1:
            return -1  # No layer at all.
    else:
        layer = (entry if entry >= 0 else depth + 1 + entry) - 1
        if layer == -1:
            return -1
    return layer if 0 <= layer < depth else None


def _id_of(place: int, entry: int, ids: LayerIds, depth: int) -> int:
    """The id of a layer at its new place, counted from the end where it was."""
    if not ids.hidden_states:
        return place + ids.base
    return place + 1 if entry >= 0 else place + 1 - (depth + 1)


def _count_stages(edit: _Edit, family: Family, parts: Parts, *, mtp_dropped: bool) -> None:
    """MTP stages are counted from tensors as well as from the config; a count that is right stays."""
    mtp = family.mtp
    if mtp is None:
        return
    there = mtp.stages(len(parts.stages), edit.section)
    for field in mtp.counts:
        for place in ((edit.section, False), (edit.config, True)) if edit.path else ((edit.section, False),):
            if not holds(place[0], field):
                continue
            count = read(place[0], field)
            if mtp_dropped:
                if count:
                    edit.put(field, 0, "MTP dropped", top=place[1])
            elif count and not there:
                edit.notes.append(
                    f"{field} is {count}, and no tensor of an MTP stage is there; --mtp drop sets it to 0"
                )
            elif count != there:
                edit.notes.append(f"{field} is {count!r}, and {there} MTP stages are there")


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
