"""Trim: keep some layers, in a given order, under new numbers, and make the config say so."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from surgery.draft import Draft, changed, noted, with_tensors
from surgery.errors import CannotApply, UsageError
from surgery.families.carrying import LayerMap, readers_of
from surgery.families.cover import cover, cover_table
from surgery.families.schema import Config, Family
from surgery.layer_ranges import compact_ranges, parse_ranges
from surgery.operations.memory_tables import without_memory
from surgery.operations.odd_layers import odd_layers
from surgery.operations.quantization_carry import carry_files
from surgery.operations.rank_lint import judged_for_ranks
from surgery.operations.second_descriptions import carry_second_descriptions
from surgery.operations.trim_config import trimmed_config
from surgery.operations.trim_tensors import Parts, layer_move, parts_of, trimmed_tensors
from surgery.operations.witness import family_for, judge_skeleton, judge_tensors
from surgery.quantization import is_numbered


class Trim(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="operation", tag="trim", omit_defaults=True
):
    """`layers`: source layer ids in their new order, `0,6,7`; ranges `0-3` include both ends; a repeat copies the
    layer again. Other stacks are named, apart by spaces: `0,6,7 vision=0-1`; a stack that is not named stays whole.
    With `cover`, the fewest layers of the text decoder that keep every kind.

    `mtp`: what becomes of the multi-token-prediction stages; nothing where there are none. `retarget` `last` points
    ids of dropped layers (draft heads' targets) at the last kept ones. `reader` narrows whose facts must hold.
    `witness` `skeleton` also compares the class's own layers; `family` takes the word of the record of that model type.
    `tables` `drop` leaves out tables inside layers that are looked up (Engram, n-gram embeddings). `for_tp`, `for_ep`
    refuse what so many ranks could not run.
    """

    layers: str = ""
    cover: bool = False
    mtp: Literal["keep", "drop"] = "keep"
    retarget: Literal["", "last"] = ""
    reader: Literal["", "transformers", "vllm"] = ""
    witness: Literal["", "skeleton"] = ""
    family: str = ""
    tables: Literal["keep", "drop"] = "keep"
    for_tp: int = 0
    for_ep: int = 0

    def resolved(self, draft: Draft) -> Trim:
        """This trim with the layers that `cover` chooses, as the recipe records it."""
        chosen_by_hand = "" in _chosen(self.layers)
        if (chosen_by_hand and self.cover) or not (self.layers or self.cover):
            raise UsageError(
                "either layers or cover chooses what stays", "trim", "write --layers 0,6,7, or --cover, not both"
            )
        if not self.cover:
            return self
        family, _ = family_for(draft.config, self.family, self.witness, "trim")
        assert draft.config is not None
        chosen = cover(family, draft.config, depth_of(family, draft.config), readers_of(family, self.reader))
        layers = " ".join([compact_ranges(chosen), self.layers]).strip()
        return msgspec.structs.replace(self, layers=layers, cover=False)

    def apply(self, draft: Draft) -> Draft:
        family, word = family_for(draft.config, self.family, self.witness, "trim")
        if word:
            draft = noted(draft, "witness", word)
        if self.tables == "drop":
            draft = without_memory(draft, family)
        chosen = _by_stack(self.layers, family)
        for each in (family, *family.also):
            kept = chosen.get(each.stack.name)
            # A stack whose depth another one's count stands in for is given a count of its own.
            if kept is not None or each.stack.default:
                draft = self._trimmed(draft, each, kept)
        return judged_for_ranks(draft, self.for_tp, self.for_ep)

    def _trimmed(self, draft: Draft, family: Family, chosen: str | None) -> Draft:
        """One stack."""
        config = draft.config
        assert config is not None
        depth = depth_of(family, config)
        kept = _kept(chosen, depth) if chosen is not None else list(range(depth))
        parts = parts_of(draft, family, depth)
        stages = list(parts.stages) if self.mtp == "keep" else []
        layers = LayerMap(kept, depth, stages)
        for odd in odd_layers(draft.tensors, family, config, parts, kept):
            draft = noted(draft, "source", odd)
        if family.name.startswith("unknown") and self.witness != "skeleton":
            judge_tensors(draft.tensors, parts, layers)
        trimmed = self._configured(draft, family, layers, parts)
        if self.witness == "skeleton":
            assert trimmed.config is not None
            trimmed = noted(trimmed, "witness", judge_skeleton(config, trimmed.config, family, layers))
        move = layer_move(parts, layers)
        trimmed = carry_files(trimmed, draft.tensors, move, is_numbered, "quantisation list")
        trimmed = carry_second_descriptions(trimmed, move, layers, family.stack.name)
        table = cover_table(
            family, config, depth, readers_of(family, self.reader), kept, len(parts.stages), len(stages)
        )
        trimmed = changed(trimmed, cover=(*trimmed.cover, *table))
        tensors, gone = trimmed_tensors(draft, family, parts, layers)
        trimmed = with_tensors(_without_absent(trimmed, parts, kept), tensors, gone)
        before = draft.layers.get(parts.prefix, list(range(depth)))
        return changed(trimmed, layers={**draft.layers, parts.prefix: [before[layer] for layer in kept]})

    def _configured(self, draft: Draft, family: Family, layers: LayerMap, parts: Parts) -> Draft:
        assert draft.config is not None
        config, changes, notes = trimmed_config(
            draft.config,
            family,
            layers,
            parts,
            readers_of(family, self.reader),
            self.retarget,
            draft.tensors,
            mtp_dropped=self.mtp == "drop",
        )
        trimmed = changed(draft, config=config, config_changes=(*draft.config_changes, *changes))
        for note in notes:
            trimmed = noted(trimmed, "source" if "MTP stage" in note else "trim", note)
        return trimmed


def _chosen(layers: str) -> dict[str, str]:
    """The ranges by the name of their stack; "" is the main one."""
    found: dict[str, str] = {}
    for token in re.sub(r",\s+", ",", layers).split():
        name, equals, ranges = token.rpartition("=")
        if name in found:
            raise UsageError(
                f"two selections for {name or 'the text decoder'}: {found[name]} and {ranges}", "--layers", "write one"
            )
        if equals and not name:
            raise UsageError(f"{token!r} names no stack", "--layers", "write vision=0-3, or 0-3 for the text decoder")
        found[name] = ranges
    return found


def _by_stack(layers: str, family: Family) -> dict[str, str]:
    """The ranges by the stack's own name. Raises `CannotApply` for a stack that the model does not have."""
    names = [family.stack.name, *(each.stack.name for each in family.also)]
    chosen = _chosen(layers)
    if "" in chosen:
        if names[0] in chosen:
            raise UsageError(f"two selections for {names[0]}", "--layers", "write one")
        chosen = {names[0] if name == "" else name: ranges for name, ranges in chosen.items()}
    unknown = [name for name in chosen if name not in names]
    if unknown:
        raise CannotApply(
            f"{family.name} has no stack {unknown[0]!r} that can be trimmed; it has {', '.join(names)}",
            "--layers",
            f"name one of {', '.join(names)}",
        )
    return chosen


def _kept(chosen: str, depth: int) -> list[int]:
    kept = parse_ranges(chosen)
    outside = sorted({layer for layer in kept if layer >= depth})
    if outside:
        raise UsageError(
            f"no layer {compact_ranges(outside)}; the model has 0 to {depth - 1}",
            "--layers",
            f"choose from 0-{depth - 1}",
        )
    return kept


def depth_of(family: Family, config: Config) -> int:
    depth = family.depth(config)
    if depth is None:
        value = family.section(config)[1].get(family.stack.depth)
        raise CannotApply(
            f"{family.stack.depth} is {value!r}; expected a count of layers", "config.json", "correct the config"
        )
    return depth


def _without_absent(draft: Draft, parts: Parts, kept: Sequence[int]) -> Draft:
    """Tensors that only the index names are no loss where their layer goes anyway."""
    wanted = set(kept)
    still = tuple(name for name in draft.absent if (layer := parts.layer_of(name)) is None or layer in wanted)
    return changed(draft, absent=still)
