"""Graft: tensors that another checkpoint has (a lost MTP head), with the counts and lists about them."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from surgery.checkpoint import Checkpoint
from surgery.draft import Config, ConfigChange, Draft, SourceFile, changed, noted
from surgery.errors import CannotApply, Problems, UsageError
from surgery.families.carrying import replaced_section, stage_kinds
from surgery.families.config_fields import holds, read, with_fields
from surgery.families.expert_names import MTP_COUNT
from surgery.families.mtp_names import is_mtp_name
from surgery.families.records import find_family, require_family
from surgery.families.schema import Family
from surgery.operations.expert_layers import expert_count, expert_layers
from surgery.operations.graft_lists import listed
from surgery.operations.trim import depth_of
from surgery.operations.trim_tensors import Parts, parts_of, split_layer
from surgery.safetensors_file import StoredTensor
from surgery.tiling import Content

_SIZES = re.compile(r"(?:_size|_dim|_rank|_heads|_head_dim)$")
"""Fields that shapes depend on; two checkpoints that differ in one are not of one model."""

_ABOUT_MTP = re.compile(r"^(?:mtp_|num_mtp|num_nextn|nextn_)")


class Graft(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    tag_field="operation",
    tag="graft",
    omit_defaults=True,
    rename={"other": "from"},
):
    """`other` (`from` in a recipe): the checkpoint that has them. `tensors`: their names there, with `*` and `?`.

    Stages of an MTP head behind the layers get the numbers behind the layers of this checkpoint.
    """

    tensors: tuple[str, ...] = ()
    other: str = ""

    def recorded(self) -> Graft:
        """Without the path: a manifest names none."""
        return msgspec.structs.replace(self, other="")

    def apply(self, draft: Draft) -> Draft:
        if not self.other:
            raise UsageError("nobody says which checkpoint has the tensors", "graft", "--from OTHER")
        if not self.tensors:
            raise UsageError("nobody says which tensors to take", "graft", "--tensors 'mtp.*'")
        family = require_family(draft.config, "graft")
        assert draft.config is not None
        other = Checkpoint.open(self.other)
        chosen = self._chosen(other)
        depth = depth_of(family, draft.config)
        names = _new_names(chosen, family, depth, other)
        _judge(draft, family, other, chosen, names)
        grafted = _with_sources(draft, other, chosen, names)
        parts = parts_of(grafted, family, depth)
        _judge_whole(parts, chosen, other)
        grafted = _counted(grafted, family, parts, other, set(names.values()))
        _judge_experts(grafted, family, depth)
        grafted = listed(grafted, other.config, {new: chosen[old] for old, new in names.items()})
        told = f"{len(names)} tensors of the other checkpoint, first {next(iter(names.values()))}"
        return noted(grafted, "graft", told)

    def _chosen(self, other: Checkpoint) -> dict[str, StoredTensor]:
        problems = Problems()
        chosen: dict[str, StoredTensor] = {}
        for pattern in self.tensors:
            matching = {name: tensor for name, tensor in other.tensors.items() if fnmatchcase(name, pattern)}
            chosen |= matching
            if not matching:
                problems.add(f"the other checkpoint has no tensor {pattern!r}", str(other.root), _mend(other))
        problems.raise_if_any(CannotApply)
        return chosen


def _mend(other: Checkpoint) -> str:
    family = find_family(other.config or {})
    prefixes = (family.mtp.prefixes if family is not None and family.mtp is not None else ()) or ("mtp.", "model.mtp.")
    found = next((name for name in other.tensors if name.startswith(prefixes)), None)
    if found is not None:
        return f"its MTP head has names like {found}"
    return f"`surgery inspect {other.root} --tensors` lists its names"


def _new_names(chosen: Mapping[str, StoredTensor], family: Family, depth: int, other: Checkpoint) -> dict[str, str]:
    """What every chosen tensor is called here: stages behind the layers follow the number of layers."""
    if family.mtp is None or not family.mtp.behind:
        return {name: name for name in chosen}
    theirs = find_family(other.config or {})
    before = theirs.depth(other.config or {}) if theirs is not None else None
    names = {}
    for name in chosen:
        names[name] = name
        for prefix in family.stack.prefixes:
            split = split_layer(name, prefix)
            if split is not None and before is not None and split[0] >= before:
                names[name] = f"{prefix}{split[0] - before + depth}{split[1]}"
                break
    return names


def _judge(
    draft: Draft,
    family: Family,
    other: Checkpoint,
    chosen: Mapping[str, StoredTensor],
    names: Mapping[str, str],
) -> None:
    """Nothing is replaced, and both are of one model as far as sizes tell."""
    problems = Problems()
    there = [new for new in names.values() if new in draft.tensors]
    if there:
        problems.add(
            f"{len(there)} of the tensors are there already, first {there[0]}",
            "--tensors",
            "narrow the pattern: graft adds, it replaces nothing",
        )
    here, config = family.section(draft.config or {})[1], draft.config or {}
    theirs = family.section(other.config or {})[1]
    for field, value in here.items():
        there_too = theirs.get(field)
        if _SIZES.search(field) and isinstance(value, int) and isinstance(there_too, int) and there_too != value:
            what = f"{field} is {value} here and {there_too} there: they are not of one model"
            problems.add(what, "config.json", "take the tensors from a checkpoint of the same sizes")
    tied = here.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    heads = [new for new in names.values() if new.endswith("lm_head.weight") and "mtp" not in new]
    if tied is True and heads:
        problems.add(
            f"tie_word_embeddings is true, so {heads[0]} would be a head that some engines use and others do not",
            "config.json",
            "correct the flag first, or leave the head out",
        )
    problems.raise_if_any(CannotApply, "the tensors cannot be grafted")


def _with_sources(
    draft: Draft, other: Checkpoint, chosen: Mapping[str, StoredTensor], names: Mapping[str, str]
) -> Draft:
    """The tensors behind those of the draft, with the files that hold them as further sources."""
    used = sorted({tensor.file for tensor in chosen.values()})
    place = {file: len(draft.files) + number for number, file in enumerate(used)}
    root = len(draft.roots)
    files = [other.files[file] for file in used]
    more: dict[str, Content] = {
        names[name]: msgspec.structs.replace(tensor, file=place[tensor.file]) for name, tensor in chosen.items()
    }
    return changed(
        draft,
        roots=(*draft.roots, other.root),
        files=(
            *draft.files,
            *(SourceFile(root, each.name, each.nbytes, each.data_offset, each.header_digest) for each in files),
        ),
        tensors={**draft.tensors, **more},
        source_tensors=draft.source_tensors + len(more),
        source_nbytes=draft.source_nbytes + sum(tensor.nbytes for tensor in chosen.values()),
        absent=tuple(name for name in draft.absent if name not in more),
    )


def _counted(draft: Draft, family: Family, parts: Parts, other: Checkpoint, added: set[str]) -> Draft:
    """The config says what it said in the other checkpoint of the stages that came."""
    mtp = family.mtp
    held = {name for names in parts.stages.values() for name in names} | set(parts.shared_mtp)
    if mtp is None or not held & added:
        return draft
    assert draft.config is not None
    path, here = family.section(draft.config)
    theirs = family.section(other.config or {})[1]
    values: dict[str, Any] = {
        field: copy.deepcopy(value)
        for field, value in theirs.items()
        if not holds(here, field) and (_ABOUT_MTP.match(field) or field == mtp.sublayers)
    }
    section = with_fields(here, values)
    counts = [field for field in mtp.counts if holds(section, field)]
    top = [field for field in mtp.counts if not counts and path and holds(draft.config, field)]
    stages = mtp.stages(len(parts.stages), section)
    values |= dict.fromkeys(counts or ([] if top else mtp.counts[:1]), stages)
    values |= _tails(family, here, theirs, parts, other)
    config: Config = replaced_section(family, draft.config, with_fields(here, values))
    values_top: dict[str, Any] = dict.fromkeys(top, stages)
    changes = [
        ConfigChange(".".join((*path, field)), copy.deepcopy(read(here, field)), value, "graft")
        for field, value in values.items()
        if not holds(here, field) or read(here, field) != value
    ]
    changes += [
        ConfigChange(field, draft.config[field], value, "graft")
        for field, value in values_top.items()
        if draft.config[field] != value
    ]
    _judge_stages(family, config, parts, other)
    return changed(draft, config={**config, **values_top}, config_changes=(*draft.config_changes, *changes))


def _tails(
    family: Family, here: Mapping[str, Any], theirs: Mapping[str, Any], parts: Parts, other: Checkpoint
) -> dict[str, Any]:
    """Lists with an entry a layer, and entries of the stages behind them: those come from the other checkpoint."""
    before = family.depth(other.config or {}) or 0
    found = {}
    for field, has_tail in family.per_layer_fields().items():
        mine, other_list = read(here, field), read(theirs, field)
        both = isinstance(mine, (list, str)) and type(mine) is type(other_list)
        if has_tail and both and len(mine) == parts.depth and len(other_list) > before:
            found[field] = mine + other_list[before:]
    return found


def _judge_stages(family: Family, config: Config, parts: Parts, other: Checkpoint) -> None:
    """A stage is here, at its number, what it was there: engines evaluate some rules at a stage's own number."""
    depth = family.depth(other.config or {})
    if depth is None:
        return
    for stage in sorted(parts.stages):
        was = stage_kinds(family, other.config or {}, depth, stage)
        now = stage_kinds(family, config, parts.depth, stage)
        for name in was:
            if was[name] != now[name]:
                raise CannotApply(
                    f"MTP stage {stage} is {name} {was[name]} in the other checkpoint, and vLLM would take it for "
                    f"{now[name]} here",
                    "config.json",
                    "graft before the trim, in one recipe, or keep layers whose number gives it its kind",
                )


def _judge_whole(parts: Parts, chosen: Mapping[str, StoredTensor], other: Checkpoint) -> None:
    """A stage comes whole: part of a head is none, and would be counted."""
    layers = {_above(name) for name in chosen if _is_stage(name, other)} - {""}
    left = [name for name in other.tensors if _above(name) in layers and name not in chosen]
    held = {name for names in parts.stages.values() for name in names}
    left = [name for name in left if name not in held]
    if left and parts.stages:
        raise CannotApply(
            f"{len(left)} tensors of the same MTP stage would be left behind, first {left[0]}",
            "--tensors",
            "name the whole stage: part of a head would be counted as one",
        )


def _is_stage(name: str, other: Checkpoint) -> bool:
    family = find_family(other.config or {})
    return is_mtp_name(name, family, family.depth(other.config or {}) if family is not None else None)


def _above(name: str) -> str:
    """The numbered layer that a name lies in; "" where it lies in none."""
    match = re.match(r"^(.*?(?:^|\.)[0-9]+)\.", name)
    return match[1] if match is not None else ""


def _judge_experts(draft: Draft, family: Family, depth: int) -> None:
    """The head has as many experts as the config counts for it."""
    assert draft.config is not None
    section = family.section(draft.config)[1]
    counted = read(section, MTP_COUNT) or expert_count(draft.config, family)
    for layer in expert_layers(draft, family, depth) if counted is not None else ():
        if layer.is_mtp and layer.experts != counted:
            raise CannotApply(
                f"{layer.key} has {layer.experts} experts, and the config counts {counted}",
                "graft",
                "in one recipe, graft first and then prune both; or prune the other checkpoint first",
            )
