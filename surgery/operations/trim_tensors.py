"""The tensors of a trim: which belong to a layer, to an MTP stage or to neither, and what becomes of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import msgspec

from surgery.draft import Draft
from surgery.errors import CannotApply, Problems
from surgery.families.carrying import LayerMap
from surgery.families.schema import DepthSliced, Family, Mtp
from surgery.layer_ranges import compact_ranges
from surgery.tensor import reshape, take
from surgery.tiling import Content

LAYER_GONE = "trim: its layer is not kept"
MTP_GONE = "trim: MTP dropped"


class Parts(msgspec.Struct):
    """Tensor names by what they belong to. `layers` by layer; `stages` by MTP stage, from 0; `prefix` of the stack, and
    `aliases` other programs' names for it; `mtp_prefixes` of stages that are not behind the layers.

    `shared_mtp` are tensors under an MTP prefix that belong to no one stage.
    """

    prefix: str
    depth: int
    layers: dict[int, list[str]]
    stages: dict[int, list[str]]
    shared_mtp: list[str]
    behind: bool
    aliases: tuple[str, ...] = ()
    mtp_prefixes: tuple[str, ...] = ()

    def layer_of(self, name: str) -> int | None:
        """The layer below the depth that `name` would belong to."""
        split = split_layer(name, self.prefix)
        return split[0] if split is not None and split[0] < self.depth else None


def split_layer(name: str, prefix: str) -> tuple[int, str] | None:
    """`(layer, rest)` of a name in the stack; None for any other name. `rest` begins after the number."""
    if not name.startswith(prefix):
        return None
    number, dot, rest = name[len(prefix) :].partition(".")
    if not number.isdecimal() or not number.isascii() or len(number) > 9 or (number[0] == "0" and number != "0"):
        return None
    return int(number), dot + rest


def layer_move(parts: Parts, layers: LayerMap) -> Callable[[str], list[str] | None]:
    """The new names of a module path in the stack, none where its layer goes; None for any other path."""

    def move(path: str) -> list[str] | None:
        if parts.stages and not layers.stages and f"{path}.".startswith(parts.mtp_prefixes or ("\0",)):
            return []
        for prefix in (parts.prefix, *parts.aliases):
            split = split_layer(path + ".", prefix)
            if split is not None:
                return moved(prefix, split)
        return None

    def moved(prefix: str, split: tuple[int, str]) -> list[str]:
        rest = split[1].removesuffix(".")
        places = [place for place, source in enumerate(layers.kept) if source == split[0]]
        if split[0] >= layers.depth:
            stage = split[0] - layers.depth
            places = [len(layers.kept) + stage] if stage in layers.stages else []
        return [f"{prefix}{place}{rest}" for place in places]

    return move


def parts_of(draft: Draft, family: Family, depth: int) -> Parts:
    """Sort the draft's names. A layer that neither the config nor an MTP head counts is an error, never left behind."""
    prefix = _prefix_of(draft, family)
    mtp = family.mtp
    aliases = tuple(dict.fromkeys((*family.stack.prefixes, "layers."))) if prefix.endswith("layers.") else ()
    parts = Parts(
        prefix,
        depth,
        {layer: [] for layer in range(depth)},
        {},
        [],
        bool(mtp and mtp.behind),
        tuple(alias for alias in aliases if alias != prefix),
        mtp.prefixes if mtp is not None else (),
    )
    problems = Problems()
    for name in draft.tensors:
        split = split_layer(name, prefix)
        if split is None:
            _sort_mtp(name, family.mtp, parts)
        elif split[0] < depth:
            parts.layers[split[0]].append(name)
        elif parts.behind:
            parts.stages.setdefault(split[0] - depth, []).append(name)
        else:
            problems.add(
                f"{name} belongs to a layer that the config does not count: it says 0 to {depth - 1}",
                "config.json",
                f"correct {family.stack.depth}, or drop the tensors first",
            )
    _judge(parts, family, problems)
    problems.raise_if_any(CannotApply, "config and tensors disagree about the layers")
    return parts


def _prefix_of(draft: Draft, family: Family) -> str:
    for prefix in family.stack.prefixes:
        if any(split_layer(name, prefix) is not None for name in draft.tensors):
            return prefix
    return family.stack.prefixes[0]


def _sort_mtp(name: str, mtp: Mtp | None, parts: Parts) -> None:
    """A stage is numbered directly behind its prefix (`mtp.0.`) or behind `layers.` (`mtp.layers.0.`)."""
    for prefix in mtp.prefixes if mtp is not None else ():
        if name.startswith(prefix):
            stage = re.match(r"(?:layers\.)?([0-9]{1,6})\.", name[len(prefix) :])
            if stage is None:
                parts.shared_mtp.append(name)
            else:
                parts.stages.setdefault(int(stage[1]), []).append(name)
            return


def _judge(parts: Parts, family: Family, problems: Problems) -> None:
    empty = [layer for layer, names in parts.layers.items() if not names]
    if len(empty) == parts.depth:
        problems.add(
            f"no tensor is named {parts.prefix}N.*",
            "names of the source",
            f"`surgery rename` them to {parts.prefix}N.*",
        )
    elif empty:
        problems.add(
            f"the config counts {parts.depth} layers, but layer {compact_ranges(empty)} has no tensors",
            "config.json",
            "get the missing files, or correct the count",
        )
    ordinary = {
        split[1] for names in parts.layers.values() for name in names if (split := split_layer(name, parts.prefix))
    }
    for stage, held in sorted(parts.stages.items()) if parts.behind else ():
        if all((split := split_layer(name, parts.prefix)) and split[1] in ordinary for name in held):
            problems.add(
                f"layer {parts.depth + stage} holds what any layer holds and nothing of an MTP stage, and the config "
                f"counts {parts.depth} layers",
                "config.json",
                f"correct {family.stack.depth}, or drop the tensors first",
            )
    stages = sorted(parts.stages)
    if stages != list(range(len(stages))):
        problems.add(
            f"MTP stages {compact_ranges(stages)} are there: they must be numbered from 0 without gaps",
            "names of the source",
            f"correct {family.stack.depth}, or get the missing tensors",
        )


def trimmed_tensors(
    draft: Draft, family: Family, parts: Parts, layers: LayerMap
) -> tuple[dict[str, Content], dict[str, str]]:
    """Kept layers under their new numbers, MTP stages behind them; everything else as it is. And what is left out."""
    moved = dict(_moved(draft, family, parts, layers))
    gone = _gone(family, parts, layers)
    in_stack = {name for names in parts.layers.values() for name in names}
    if parts.behind:
        in_stack |= {name for names in parts.stages.values() for name in names}
    tensors: dict[str, Content] = {}
    placed = False
    for name, content in draft.tensors.items():
        if name in in_stack:
            if not placed:
                tensors.update(moved)
                placed = True
        elif name not in gone:
            tensors[name] = _sliced(name, content, family.depth_sliced, layers)
    return tensors, gone


def _moved(draft: Draft, family: Family, parts: Parts, layers: LayerMap) -> Iterator[tuple[str, Content]]:
    for place, source in enumerate(layers.kept):
        width = len(f"{parts.prefix}{source}")
        for name in parts.layers[source]:
            if not (family.first_only and name.endswith(family.first_only)):
                yield f"{parts.prefix}{place}{name[width:]}", draft.tensors[name]
        if place == 0:
            # What the first layer holds for all of them stays in the first layer, whichever that is now.
            for name in _held_for_all(family, parts):
                yield name, draft.tensors[name]
    if parts.behind:
        for stage in layers.stages:
            width = len(f"{parts.prefix}{parts.depth + stage}")
            for name in parts.stages[stage]:
                yield f"{parts.prefix}{len(layers.kept) + stage}{name[width:]}", draft.tensors[name]


def _held_for_all(family: Family, parts: Parts) -> list[str]:
    return [name for name in parts.layers[0] if name.endswith(family.first_only)] if family.first_only else []


def _gone(family: Family, parts: Parts, layers: LayerMap) -> dict[str, str]:
    wanted = set(layers.kept)
    gone = {name: LAYER_GONE for layer, names in parts.layers.items() if layer not in wanted for name in names}
    for name in _held_for_all(family, parts):
        gone.pop(name, None)
    if parts.stages and not layers.stages:
        gone |= {name: MTP_GONE for names in parts.stages.values() for name in names}
        gone |= dict.fromkeys(parts.shared_mtp, MTP_GONE)
    return gone


def _sliced(name: str, content: Content, rules: tuple[DepthSliced, ...], layers: LayerMap) -> Content:
    """A tensor outside the layers that holds a block for each of them keeps the blocks of the kept ones."""
    rule = next((rule for rule in rules if f".{name}".rpartition(".")[0].endswith(f".{rule.module}")), None)
    if rule is None:
        return content
    shape = content.shape
    if not name.endswith(".weight") and (rule.axis >= len(shape) or shape[rule.axis] == 1):
        return content  # A scale of the whole, or one along the other axis.
    if rule.axis >= len(shape) or shape[rule.axis] % layers.depth:
        raise CannotApply(
            f"{name} has shape {list(shape)}; axis {rule.axis} should be {layers.depth} equal blocks, one a layer",
            name,
            "check that config and tensors are of one model",
        )
    block = shape[rule.axis] // layers.depth
    head, tail = shape[: rule.axis], shape[rule.axis + 1 :]
    blocks = take(reshape(content, (*head, layers.depth, block, *tail)), rule.axis, layers.kept)
    return reshape(blocks, (*head, len(layers.kept) * block, *tail))
