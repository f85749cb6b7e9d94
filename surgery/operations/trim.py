"""Trim: keep some layers, in a given order, under new numbers, and make the config say so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from surgery.draft import Draft, changed, noted, with_tensors
from surgery.errors import CannotApply, UsageError
from surgery.families.carrying import LayerMap, readers_of
from surgery.families.cover import cover, cover_table
from surgery.families.records import require_family
from surgery.families.schema import Config, Family
from surgery.layer_ranges import compact_ranges, parse_ranges
from surgery.operations.quantization_carry import carry_files
from surgery.operations.trim_config import trimmed_config
from surgery.operations.trim_tensors import Parts, layer_move, parts_of, trimmed_tensors
from surgery.quantization import is_numbered


class Trim(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="operation", tag="trim", omit_defaults=True
):
    """`layers`: source layer ids in their new order, `0,6,7`; ranges `0-3` include both ends; a repeat copies the
    layer again. With `cover` instead, the fewest layers that keep every kind.

    `mtp`: what becomes of the multi-token-prediction stages; nothing where there are none. `retarget` `last` points
    ids of dropped layers (draft heads' targets) at the last kept ones. `reader` narrows whose facts must hold.
    """

    layers: str = ""
    cover: bool = False
    mtp: Literal["keep", "drop"] = "keep"
    retarget: Literal["", "last"] = ""
    reader: Literal["", "transformers", "vllm"] = ""

    def resolved(self, draft: Draft) -> Trim:
        """This trim with the layers that `cover` chooses, as the recipe records it."""
        if bool(self.layers) == self.cover:
            raise UsageError(
                "either layers or cover chooses what stays", "trim", "write --layers 0,6,7, or --cover, not both"
            )
        if not self.cover:
            return self
        family = require_family(draft.config, "trim")
        assert draft.config is not None
        chosen = cover(family, draft.config, depth_of(family, draft.config), readers_of(family, self.reader))
        return msgspec.structs.replace(self, layers=compact_ranges(chosen), cover=False)

    def apply(self, draft: Draft) -> Draft:
        family = require_family(draft.config, "trim")
        assert draft.config is not None
        depth = depth_of(family, draft.config)
        kept = self._kept(depth)
        parts = parts_of(draft, family, depth)
        stages = list(parts.stages) if self.mtp == "keep" else []
        layers = LayerMap(kept, depth, stages)
        trimmed = self._configured(draft, family, layers, parts)
        trimmed = carry_files(trimmed, draft.tensors, layer_move(parts, layers), is_numbered, "quantisation list")
        table = cover_table(
            family, draft.config, depth, readers_of(family, self.reader), kept, len(parts.stages), len(stages)
        )
        trimmed = changed(trimmed, cover=tuple(table))
        tensors, gone = trimmed_tensors(draft, family, parts, layers)
        trimmed = with_tensors(_without_absent(trimmed, parts, kept), tensors, gone)
        before = draft.layers.get(parts.prefix, list(range(depth)))
        return changed(trimmed, layers={**draft.layers, parts.prefix: [before[layer] for layer in kept]})

    def _configured(self, draft: Draft, family: Family, layers: LayerMap, parts: Parts) -> Draft:
        assert draft.config is not None
        config, changes, notes = trimmed_config(
            draft.config, family, layers, parts, readers_of(family, self.reader), self.retarget, draft.tensors
        )
        trimmed = changed(draft, config=config, config_changes=(*draft.config_changes, *changes))
        for note in notes:
            trimmed = noted(trimmed, "trim", note)
        return trimmed

    def _kept(self, depth: int) -> list[int]:
        if "=" in self.layers:
            stack = self.layers.partition("=")[0]
            raise CannotApply(
                f"no stack {stack!r} can be trimmed beside the text decoder", "--layers", "list text layers only"
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
