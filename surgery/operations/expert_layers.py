"""The layers of a draft that hold routed experts, and what each of their tensors is to them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

import msgspec

from surgery.draft import Config, Draft
from surgery.errors import CannotApply, Problems
from surgery.families.config_fields import read
from surgery.families.expert_names import (
    COUNTS,
    DECIDES,
    EXPERT,
    EXTRA_ROWS,
    FLATTENED,
    FUSED,
    ID_TABLES,
    OF_MIXTURE,
    OUTSIDE,
    PACKED,
    ROUTER,
    SHARED,
)
from surgery.families.mtp_names import MTP_NAME
from surgery.families.schema import Family
from surgery.tiling import sources

_TOWER = re.compile(r"(?:^|[._])(?:vision|visual|audio|image|encoder)")
Role = Literal["expert", "fused", "flattened", "router", "ids", "whole"]


class Part(msgspec.Struct, frozen=True):
    """One tensor of the layer's mixture: `id` of an `expert`, the `axis` of experts of the others."""

    name: str
    role: Role
    rest: str
    id: int = -1
    axis: int = 0


class ExpertLayer(msgspec.Struct):
    """`key` is the layer's prefix in the draft, `source` in the source: keep lists name that. `experts` is how many
    there are, `module` where they lie behind the key, `extra` the router's rows behind them."""

    key: str
    source: str
    module: str
    experts: int
    extra: int
    parts: list[Part]
    is_mtp: bool


def expert_layers(draft: Draft, family: Family, depth: int) -> list[ExpertLayer]:
    """Every layer with routed experts, of the text decoder and of MTP heads; towers have their own business.

    Raises `CannotApply` for ids with gaps, counts that disagree, or a tensor with an axis of experts that nobody knows.
    """
    found: dict[tuple[str, str], list[Part]] = {}
    strange: dict[str, str] = {}
    towers = tuple(prefix for stack in family.also for prefix in stack.stack.prefixes) or ("\0",)
    for name in draft.tensors:
        match = EXPERT.match(name) or FUSED.match(name)
        if match is None:
            continue
        if _in_scope(match["layer"], family):
            found.setdefault((match["layer"], match["module"]), []).append(_part(name, match))
        elif not name.startswith(towers) and not _TOWER.search(name):
            strange.setdefault(match["layer"], name)
    problems = Problems()
    for layer_name, name in list(strange.items())[:3]:
        problems.add(
            f"{name}: experts outside every stack that the record of {family.name} names",
            layer_name,
            "this placement needs a rule: left alone, these experts would be as many as before",
        )
    layers = []
    for (key, module), parts in found.items():
        if all(part.id < 0 and len(draft.tensors[part.name].shape) < 3 for part in parts) and FUSED.match(
            parts[0].name
        ):
            continue  # A dense layer whose module is called as the mixture of others.
        layer = _layer(draft, family, depth, key, module, parts, problems)
        if layer is not None:
            layers.append(layer)
    _take_routers(draft, layers, problems)
    problems.raise_if_any(CannotApply, "the experts are not what they should be")
    return layers


def _in_scope(layer: str, family: Family) -> bool:
    prefixes = (*family.stack.prefixes, *(family.mtp.prefixes if family.mtp is not None else ()), "mtp.")
    return f"{layer}.".startswith(prefixes) or MTP_NAME.search(f"{layer}.") is not None


def _part(name: str, match: re.Match[str]) -> Part:
    number = match.groupdict().get("id")
    if number is not None:
        return Part(name, "expert", match["part"], int(number))
    return Part(name, "flattened" if FLATTENED.match(match["part"]) else "fused", match["part"])


def _layer(
    draft: Draft, family: Family, depth: int, key: str, module: str, parts: list[Part], problems: Problems
) -> ExpertLayer | None:
    config = draft.config or {}
    ids = sorted({part.id for part in parts if part.role == "expert"})
    counted = expert_count(config, family)
    if ids and ids != list(range(len(ids))):
        problems.add(f"{key}: expert ids are not 0 to {len(ids) - 1}", key, "get the missing tensors")
        return None
    fused = {
        draft.tensors[part.name].shape[0]
        for part in parts
        if part.role == "fused" and len(draft.tensors[part.name].shape) > 1
    }
    sizes = fused | ({len(ids)} if ids else set()) | ({counted} if counted and not ids and not fused else set())
    if len(sizes) != 1:
        problems.add(f"{key}: {sorted(sizes)} experts in one layer", key, "check that its tensors are of one model")
        return None
    experts = sizes.pop()
    is_mtp = _is_mtp(key, family, depth)
    if counted is not None and counted != experts and not is_mtp:
        problems.add(f"{key} has {experts} experts; the config counts {counted}", key, "correct the config")
    extra = next((value for name in EXTRA_ROWS if isinstance(value := read(_section(config, family), name), int)), 0)
    return ExpertLayer(key, _source_key(draft, parts[0].name, key), module, experts, extra, parts, is_mtp)


def _section(config: Config, family: Family) -> Config:
    return dict(family.section(config)[1])


def expert_count(config: Config, family: Family) -> int | None:
    """The count of routed experts that the config states; None where it is a list, or not there."""
    section = family.section(config)[1]
    return next((value for name in COUNTS if isinstance(value := read(section, name), int) and value), None)


def _is_mtp(key: str, family: Family, depth: int) -> bool:
    for prefix in family.stack.prefixes:
        rest = f"{key}."[len(prefix) :]
        if f"{key}.".startswith(prefix) and rest.partition(".")[0].isdecimal():
            return int(rest.partition(".")[0]) >= depth
    return True


def _source_key(draft: Draft, name: str, key: str) -> str:
    """The layer's prefix in the source: what the tensors' own source is called."""
    source = sources(draft.tensors[name])[0].name
    match = EXPERT.match(source) or FUSED.match(source)
    return match["layer"] if match is not None else key


def _take_routers(draft: Draft, layers: list[ExpertLayer], problems: Problems) -> None:
    by_key: dict[str, list[ExpertLayer]] = {}
    for layer in layers:
        by_key.setdefault(layer.key, []).append(layer)
    taken = {part.name for layer in layers for part in layer.parts}
    for name, content in draft.tensors.items():
        if name in taken:
            continue
        for layer in by_key.get(_layer_key(name), ()):
            rest = name[len(layer.key) + 1 + len(layer.module) :]
            if not name.startswith(f"{layer.key}.{layer.module}"):
                layer.parts += _outside_part(name, content.shape, layer, problems)
            elif not SHARED.match(rest):
                layer.parts += _router_part(name, rest, content.shape, layer, problems)


_LAYER = re.compile(r"^.*?(?:^|\.)[0-9]+(?=\.)")


def _layer_key(name: str) -> str:
    match = _LAYER.match(name)
    return match[0] if match is not None else ""


def _outside_part(name: str, shape: tuple[int, ...], layer: ExpertLayer, problems: Problems) -> Iterator[Part]:
    """Some architectures keep a part of the router beside the module that has the experts."""
    rest = name[len(layer.key) + 1 :]
    axis = next((axis for axis in (0, len(shape) - 1) if shape and shape[axis] == layer.experts), None)
    if OUTSIDE.search(rest) and axis is not None:
        yield Part(name, "router", rest, axis=axis)
    elif axis is not None and OF_MIXTURE.search(rest) and not SHARED.search(rest):
        problems.add(
            f"{name} has shape {list(shape)}: an axis of {layer.experts} is perhaps one of experts, and nobody knows",
            name,
            "this architecture's router needs a rule",
        )


def _router_part(
    name: str, rest: str, shape: tuple[int, ...], layer: ExpertLayer, problems: Problems
) -> Iterator[Part]:
    rows = {layer.experts, layer.experts + layer.extra}
    if rest.rpartition(".")[2] in ID_TABLES:
        yield Part(name, "ids", rest)
    elif ROUTER.match(rest) and PACKED.search(rest):
        problems.add(
            f"{name} is of a router that is packed: its rows cannot go singly",
            name,
            "get a checkpoint with plain routers",
        )
    elif ROUTER.match(rest):
        axis = next((axis for axis in (0, len(shape) - 1) if shape and shape[axis] in (*rows, layer.experts + 1)), None)
        if axis is not None:
            yield Part(name, "router", rest, axis=axis)
        elif DECIDES.fullmatch(rest) and shape and shape[0] > 1:
            problems.add(
                f"{name} has shape {list(shape)}: a router's, and no axis is the {layer.experts} experts"
                + (f" and {layer.extra} more" if layer.extra else ""),
                name,
                "rows that are packed or scaled in blocks cannot go singly; extra rows need a rule",
            )
    elif (layer.module or OF_MIXTURE.search(rest)) and layer.experts in shape:
        problems.add(
            f"{name} has shape {list(shape)}: an axis of {layer.experts} is perhaps one of experts, and nobody knows",
            name,
            "this architecture's router needs a rule",
        )
