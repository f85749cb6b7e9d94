"""Prune: keep some experts of every layer, in a given order, with their routers, companions and counts. Bytes only."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from surgery.draft import ConfigChange, Draft, changed, noted, with_tensors
from surgery.errors import CannotApply, Problems, UsageError
from surgery.families.carrying import replaced_section
from surgery.families.config_fields import holds, read
from surgery.families.expert_names import MTP_COUNT
from surgery.families.records import require_family
from surgery.families.schema import Family
from surgery.layer_ranges import compact_ranges
from surgery.operations.expert_layers import ExpertLayer, Part, expert_layers
from surgery.operations.expert_values import router_norms, rows_without_expert
from surgery.operations.keep_lists import METRICS, Keep, best, by_layer, metric_values
from surgery.operations.prune_config import group_count, pruned_config
from surgery.operations.quantization_carry import carry_files, carry_places
from surgery.operations.rank_lint import judged_for_ranks
from surgery.operations.trim import Trim, depth_of
from surgery.quantization import Move, named_in
from surgery.quantization_schemes import modules_of
from surgery.tensor import computed, reshape, take
from surgery.tiling import Content, Remap

EXPERT_GONE = "prune: the expert is not kept"
Policy = Literal["", "prune", "full", "drop"]


class Prune(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="operation", tag="prune", omit_defaults=True
):
    """`keep`: ids by the source's layer prefix; the order given is the new order. Or `choose` by `scores` (sums by
    layer prefix, as `observe` stores them), `router-norm` or `first`: so many `experts`, or all but the `ratio`.

    With `keep` and a number of experts the lists are rankings, the best first; a `ranking` needs such a number.

    `metric` says which number of the scores counts; `protect` ids that stay whatever their score. `mtp_experts`: what
    becomes of the experts of an MTP head: `prune` them by a list of their own, keep the `full` width, `drop` the head.
    `family` takes the word of the record of that model type.
    """

    keep: Keep = {}
    choose: Literal["", "scores", "router-norm", "first"] = ""
    scores: dict[str, dict[str, Any]] = {}
    metric: str = "reap"
    experts: int = 0
    ratio: float = 0.0
    protect: Keep = {}
    ranking: bool = False
    mtp_experts: Policy = ""
    for_tp: int = 0
    for_ep: int = 0
    chosen_by: dict[str, list[float]] = {}
    family: str = ""

    def resolved(self, draft: Draft) -> Prune:
        """This operation with the keep list that its scores choose, and the scores that chose it."""
        if bool(self.keep) == bool(self.choose):
            raise UsageError("either a keep list or scores choose what stays", "prune", "give --keep or --scores")
        if self.experts < 0 or self.for_tp < 0 or self.for_ep < 0:
            raise UsageError("a count below zero", "prune", "counts are 1 or more")
        family, layers = _layers_of(draft, self.family)
        assert draft.config is not None
        if not self.choose:
            return self._first_of(layers)
        groups = group_count(family.section(draft.config)[1])
        values = self._values(draft, layers)
        if not values:
            raise CannotApply("the scores name none of the model's layers", "--scores", "observe this model")
        protect = by_layer(self.protect, layers) if self.protect else {}
        keep = {}
        for layer in layers:
            if layer.is_mtp and self.mtp_experts in ("full", "drop"):
                continue
            if layer.source in values:
                scores = values[layer.source]
                if len(scores) != layer.experts:
                    what = f"{layer.source}: {len(scores)} scores for {layer.experts} experts"
                    raise CannotApply(what, "--scores", "observe this model")
                count = self._count(layer.experts)
                keep[layer.source] = best(scores, count, groups, protect.get(layer.source, []), layer.source)
        chosen_by = {} if self.choose == "first" else values
        return msgspec.structs.replace(
            self, keep=keep, choose="", scores={}, experts=0, ratio=0.0, protect={}, chosen_by=chosen_by
        )

    def _first_of(self, layers: Sequence[ExpertLayer]) -> Prune:
        """The keep list as it is, or so many of each ranking; protected experts are among them, or it is refused."""
        counted = bool(self.experts) or bool(self.ratio)
        keep = by_layer(self.keep, layers)
        sizes = {layer.source: layer.experts for layer in layers}
        if self.ranking and not counted and all(len(ids) == sizes[source] for source, ids in keep.items()):
            raise UsageError(
                "the file ranks the experts, and nobody says how many stay", "--keep", "add --experts 64 or --ratio 0.5"
            )
        if counted:
            keep = {source: sorted(ids[: self._count(sizes[source])]) for source, ids in keep.items()}
        for source, ids in (by_layer(self.protect, layers) if self.protect else {}).items():
            missing = [each for each in ids if each not in keep.get(source, [])]
            if missing:
                raise CannotApply(
                    f"{source}: expert {missing[0]} is protected, and the list does not keep it",
                    "--protect",
                    "correct one",
                )
        return msgspec.structs.replace(self, keep=keep, experts=0, ratio=0.0, protect={}, ranking=False)

    def _count(self, before: int) -> int:
        if bool(self.experts) == bool(self.ratio):
            raise UsageError("how many stay?", "prune", "give --experts 64, or --ratio 0.5 (the share that goes)")
        if self.experts:
            return self.experts
        if not 0 < self.ratio < 1:
            raise UsageError(f"the ratio is {self.ratio}; a share between 0 and 1 goes", "--ratio", "0.5 takes half")
        return before - math.floor(before * self.ratio + 1e-9)

    def _values(self, draft: Draft, layers: Sequence[ExpertLayer]) -> dict[str, list[float]]:
        if self.choose == "first":
            return {layer.source: [0.0] * layer.experts for layer in layers}
        if self.choose == "router-norm":
            return {layer.source: router_norms(draft, layer) for layer in layers}
        if self.metric not in METRICS:
            raise UsageError(f"no metric {self.metric!r}", "--metric", f"one of {', '.join(METRICS)}")
        listed = by_layer({key: [] for key in self.scores}, layers)
        return {
            source: metric_values(self.scores[key], self.metric, key)
            for source, key in zip(listed, self.scores, strict=True)
        }

    def apply(self, draft: Draft) -> Draft:
        family, layers = _layers_of(draft, self.family)
        keep = by_layer(self.keep, layers)
        heads = [layer for layer in layers if layer.is_mtp]
        policy = self._policy(family, draft, heads, keep)
        if policy == "drop":
            draft = _without_head(draft, family)
            layers = [layer for layer in layers if not layer.is_mtp]
        assert draft.config is not None
        pruned = [layer for layer in layers if not (layer.is_mtp and policy == "full")]
        after = _judge(keep, pruned, group_count(family.section(draft.config)[1]))
        before = next(layer.experts for layer in pruned if not layer.is_mtp)
        config, changes, notes = pruned_config(draft.config, family, before, after)
        tensors, gone = _pruned_tensors(draft, pruned, keep)
        move = _module_move(pruned, keep)
        more, told = carry_places(config, list(named_in(config)), modules_of(draft.tensors), move, "quantisation list")
        done = changed(
            with_tensors(draft, tensors, gone), experts={**draft.experts, **_expert_map(draft, pruned, keep)}
        )
        done = changed(done, config=config, config_changes=(*done.config_changes, *changes, *more))
        done = carry_files(done, draft.tensors, move, lambda text: bool(move(text)), "quantisation list")
        notes += told
        if heads and policy == "prune":
            done = _own_count(done, family, after)
        if heads and policy == "full":
            done = _full_width(done, family, heads[0].experts)
        for note in notes:
            done = noted(done, "prune", note)
        return judged_for_ranks(done, self.for_tp, self.for_ep)

    def _policy(self, family: Family, draft: Draft, heads: Sequence[ExpertLayer], keep: Keep) -> Policy:
        if not heads:
            return ""
        if self.mtp_experts == "full" and any(layer.source in self.keep for layer in heads) and not self.chosen_by:
            raise CannotApply(
                f"the list names experts of the head {heads[0].source}, which would keep all of them",
                "--mtp-experts full",
                "leave the head out of the list, or choose prune",
            )
        covered = all(layer.source in keep for layer in heads)
        if self.mtp_experts in ("", "prune") and not covered:
            raise CannotApply(
                f"the MTP head has experts of its own ({heads[0].source}), and the keep list does not name them",
                "--mtp-experts",
                "name them in the list (prune), or choose full (the head keeps its width) or drop (no head)",
            )
        if self.mtp_experts == "full" and not _width_field(family, draft):
            raise CannotApply(
                f"no engine reads a count of its own for the MTP experts of {family.name}",
                "--mtp-experts full",
                "prune them by a list of their own, or drop the head",
            )
        return self.mtp_experts or "prune"


def _layers_of(draft: Draft, named: str) -> tuple[Family, list[ExpertLayer]]:
    family = require_family(draft.config, "prune", named)
    assert draft.config is not None
    layers = expert_layers(draft, family, depth_of(family, draft.config))
    if not [layer for layer in layers if not layer.is_mtp]:
        raise CannotApply(
            f"{family.name} has no layer with routed experts here", "prune", "prune is for mixture-of-experts models"
        )
    return family, layers


def _judge(keep: Keep, layers: Sequence[ExpertLayer], groups: int) -> int:
    """How many stay, the same in every layer. Raises `CannotApply` for what a keep list must not say."""
    problems = Problems()
    counts: dict[int, list[str]] = {}
    for layer in layers:
        ids = keep.get(layer.source)
        if ids is None:
            problems.add(f"the keep list leaves out {layer.source}", layer.source, "name every layer with experts")
            continue
        counts.setdefault(len(ids), []).append(layer.source)
        outside = [each for each in ids if not 0 <= each < layer.experts]
        twice = sorted({each for each in ids if ids.count(each) > 1})
        if outside or twice or not ids:
            what = f"no expert {outside}" if outside else f"expert {twice} twice" if twice else "no expert stays"
            problems.add(f"{layer.source}: {what}; it has 0 to {layer.experts - 1}", layer.source, "correct the list")
        elif groups > 1:
            _judge_groups(layer, ids, groups, problems)
    if len(counts) > 1:
        told = ", ".join(f"{count} in {sources[0]}" for count, sources in sorted(counts.items()))
        problems.add(
            f"unequal counts: {told}; no field of this family has one a layer", "keep list", "keep as many each"
        )
    problems.raise_if_any(CannotApply, "the keep list does not fit the model")
    return next(iter(counts))


def _judge_groups(layer: ExpertLayer, ids: Sequence[int], groups: int, problems: Problems) -> None:
    width = layer.experts // groups
    if len(ids) % groups:
        problems.add(
            f"{layer.source}: {len(ids)} experts in {groups} routing groups", layer.source, "as many of each group"
        )
        return
    share = len(ids) // groups
    moved = [each for place, each in enumerate(ids) if each // width != place // share]
    if moved:
        problems.add(
            f"{layer.source}: expert {moved[0]} would leave its routing group ({groups} groups of {width})",
            layer.source,
            "keep equally many of each group, group after group",
        )


def _pruned_tensors(
    draft: Draft, layers: Iterable[ExpertLayer], keep: Keep
) -> tuple[dict[str, Content], dict[str, str]]:
    """Kept experts under their new ids, whatever holds them cut along; everything else as it is."""
    moved: dict[str, tuple[str, Content]] = {}
    gone: dict[str, str] = {}
    for layer in layers:
        ids = keep[layer.source]
        places = {each: place for place, each in enumerate(ids)}
        for part in layer.parts:
            if part.role == "expert":
                if part.id in places:
                    moved[part.name] = (_renumbered(part, places[part.id]), draft.tensors[part.name])
                else:
                    gone[part.name] = EXPERT_GONE
            else:
                moved[part.name] = (part.name, _cut(draft, layer, part, ids))
    tensors = {}
    for name, content in draft.tensors.items():
        if name not in gone:
            new, cut = moved.get(name, (name, content))
            tensors[new] = cut
    return _in_order(tensors, layers), gone


def _expert_map(draft: Draft, layers: Sequence[ExpertLayer], keep: Keep) -> dict[str, list[int]]:
    """By the source's layers, the source's ids: also where an operation before this one pruned already."""
    found = {}
    for layer in layers:
        before = draft.experts.get(layer.source)
        ids = keep[layer.source]
        found[layer.source] = [before[each] for each in ids] if before is not None else list(ids)
    return found


def _module_move(layers: Sequence[ExpertLayer], keep: Keep) -> Move:
    """The new names of a module path inside an expert, none where it goes; None for any other path."""
    places = {
        f"{layer.key}.{layer.module}experts.": {each: place for place, each in enumerate(keep[layer.source])}
        for layer in layers
    }

    def move(path: str) -> list[str] | None:
        match = _MODULE.match(path)
        if match is None or match[1] not in places:
            return None
        place = places[match[1]].get(int(match[2]))
        return [] if place is None else [f"{match[1]}{place}{match[3]}"]

    return move


_MODULE = re.compile(r"^(.*\.experts\.)([0-9]{1,9})((?:\..*)?)$")


def _renumbered(part: Part, place: int) -> str:
    head = part.name[: len(part.name) - len(part.rest) - 1]
    return f"{head[: len(head) - len(str(part.id))]}{place}.{part.rest}"


_ID = re.compile(r"\.experts\.([0-9]+)\.")


def _in_order(tensors: dict[str, Content], layers: Iterable[ExpertLayer]) -> dict[str, Content]:
    """Experts in the order of their new ids where their old ones stood: a permuted keep list gives tidy files."""
    names = list(tensors)
    result: dict[str, Content] = {}
    run: list[str] = []

    def flush() -> None:
        run.sort(key=lambda name: int(_ID.search(name)[1]))  # type: ignore[index]
        result.update((name, tensors[name]) for name in run)
        run.clear()

    before = None
    for name in names:
        match = _ID.search(name)
        here = name[: match.start()] if match is not None else None
        if here != before:
            flush()
        before = here
        if match is None:
            result[name] = tensors[name]
        else:
            run.append(name)
    flush()
    return result


def _cut(draft: Draft, layer: ExpertLayer, part: Part, ids: Sequence[int]) -> Content:
    content = draft.tensors[part.name]
    if part.role == "ids":
        return _remapped(draft, layer, part, ids)
    shape = content.shape
    if part.role == "flattened":
        width = shape[0] // layer.experts
        blocks = take(reshape(content, (layer.experts, width, *shape[1:])), 0, ids)
        return reshape(blocks, (len(ids) * width, *shape[1:]))
    if part.role == "fused" and (not shape or shape[0] == 1):
        return content  # One scale for all of them.
    if part.role == "fused" and shape[0] != layer.experts:
        raise CannotApply(
            f"{part.name} has shape {list(shape)}; its first axis should be the {layer.experts} experts",
            part.name,
            "this layout of experts needs a rule",
        )
    return take(content, part.axis, [*ids, *range(layer.experts, shape[part.axis])])


def _remapped(draft: Draft, layer: ExpertLayer, part: Part, ids: Sequence[int]) -> Content:
    """A table whose values are expert ids, with the new ids. A row that names an expert that goes has no new value."""
    rows = rows_without_expert(draft, part.name, ids)
    if rows:
        raise CannotApply(
            f"{part.name} routes by a table of expert ids: {rows} of its rows name an expert that would go",
            part.name,
            f"keep every expert that it names in {layer.source}: a hash layer has no router that could choose again",
        )
    places = {each: place for place, each in enumerate(ids)}
    table = tuple(places.get(each, -1) for each in range(layer.experts))
    content = draft.tensors[part.name]
    return content if table == tuple(range(layer.experts)) else computed(content, Remap(table))


def _without_head(draft: Draft, family: Family) -> Draft:
    assert draft.config is not None
    return Trim(compact_ranges(range(depth_of(family, draft.config))), mtp="drop").apply(draft)


def _width_field(family: Family, draft: Draft) -> str:
    """The field in which an engine looks for the count of an MTP head's own experts; "" where none does."""
    section = family.section(draft.config or {})[1]
    named = family.mtp.experts_field if family.mtp is not None else ""
    return named or (MTP_COUNT if holds(section, MTP_COUNT) else "")


def _full_width(draft: Draft, family: Family, experts: int) -> Draft:
    assert draft.config is not None
    field = _width_field(family, draft)
    if not holds(family.section(draft.config)[1], field):
        draft = _own_count(draft, family, experts, field)
    return noted(draft, "prune", f"the MTP head keeps {experts} experts, which {field} says: oMLX reads it, vLLM not")


def _own_count(draft: Draft, family: Family, experts: int, field: str = "") -> Draft:
    """The count of an MTP head's own experts: changed where the config has one, added as `field` where asked."""
    assert draft.config is not None
    path, section = family.section(draft.config)
    old = read(section, MTP_COUNT)
    if (old is None and not field) or old == experts:
        return draft
    field = field or MTP_COUNT
    config = replaced_section(family, draft.config, {**section, field: experts})
    change = ConfigChange(".".join((*path, field)), old, experts, "count of the MTP head's experts", "oMLX")
    return changed(draft, config=config, config_changes=(*draft.config_changes, change))
