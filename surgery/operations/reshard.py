"""Reshard: the same checkpoint dealt to another number of ranks, in another layout, or merged."""

from __future__ import annotations

import msgspec

from surgery.draft import ConfigChange, Draft, Partition, changed
from surgery.errors import UsageError
from surgery.families.carrying import replaced_section
from surgery.families.config_fields import holds, read
from surgery.families.records import find_family
from surgery.layouts.writing import LAYOUTS


class Reshard(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="operation", tag="reshard", omit_defaults=True
):
    """`tp` ranks in `layout` (the source's own when left out); 1 and `hf` merges.

    `ep`: experts go whole to ranks, where the layout leaves the choice. `profile`: the engine's version whose names are
    written, the newest known when left out.
    """

    tp: int
    layout: str = ""
    ep: int = 0
    profile: str = ""

    def apply(self, draft: Draft) -> Draft:
        layout = self.layout or (draft.partition.layout if draft.partition is not None else "")
        if not layout:
            raise UsageError(
                "which layout?", "--layout", f"the source is in storage shards: one of {', '.join(LAYOUTS)}"
            )
        if layout not in LAYOUTS:
            raise UsageError(f"no layout {layout!r}", "--layout", f"one of {', '.join(LAYOUTS)}")
        if self.tp < 1:
            raise UsageError(f"{self.tp} ranks", "--tp", "1 or more")
        if layout == "hf" and self.tp > 1:
            raise UsageError(
                f"hf is the layout of a whole checkpoint, and --tp is {self.tp}",
                "--layout",
                "--tp 1 merges; hf-rank has Hugging Face names on ranks",
            )
        if self.ep and (self.ep != self.tp or layout not in ("hf-rank", "vllm")):
            raise UsageError(
                f"--ep {self.ep} with --tp {self.tp} in layout {layout}",
                "--ep",
                "experts go to the same ranks, so --ep equals --tp; hf-rank and vllm leave the choice",
            )
        if self.profile and layout != "vllm":
            raise UsageError(f"layout {layout} has no profiles", "--profile", "leave it out")
        if layout == "hf":
            return changed(draft, partition=None)
        partition = Partition(layout, self.tp, bool(self.ep), self.profile)
        draft = changed(draft, partition=partition)
        return _without_head(draft) if layout == "deepseek" else draft


def _without_head(draft: Draft) -> Draft:
    """DeepSeek's own layout has no MTP head: the config that lies beside it counts none."""
    family = find_family(draft.config or {})
    if family is None or family.mtp is None or draft.config is None:
        return draft
    path, section = family.section(draft.config)
    counted = [field for field in family.mtp.counts if holds(section, field) and read(section, field)]
    changes = [ConfigChange(".".join((*path, f)), read(section, f), 0, "reshard: no MTP head") for f in counted]
    config = replaced_section(family, draft.config, {**section, **dict.fromkeys(counted, 0)})
    return changed(draft, config=config, config_changes=(*draft.config_changes, *changes)) if changes else draft
