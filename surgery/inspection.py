"""What is in a checkpoint, as data: from its headers and config alone, no tensor bytes, whatever state it is in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from surgery.checkpoint import TOLERATED, Checkpoint
from surgery.config_reading import (
    Count,
    Quantization,
    config_dtype,
    count_of,
    quantization_of,
    section_depth,
    tied_embeddings,
)
from surgery.errors import CannotApply, Finding
from surgery.families.cover import cover
from surgery.families.records import find_family, model_type
from surgery.families.schema import DEPTH_SPELLINGS, READERS, Family
from surgery.layer_kinds import Experts, Kind, experts_of, kinds_of
from surgery.layer_ranges import compact_ranges
from surgery.layouts.detection import with_ranks
from surgery.name_census import COMPONENTS, Entry, stack_prefixes, take_census
from surgery.rank_layout import RankLayout, rank_layout
from surgery.side_files import SideFile, Stray

MTP_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")


class Files(msgspec.Struct):
    """`allocated_nbytes` is what the files take on disk: less than `nbytes` where they have holes."""

    count: int
    nbytes: int
    allocated_nbytes: int
    smallest_nbytes: int
    largest_nbytes: int
    first: str
    last: str
    index: str | None


class Amount(msgspec.Struct):
    tensors: int = 0
    nbytes: int = 0


class Stack(msgspec.Struct):
    """A numbered run of layers. `counted` is what the config says of its depth; `role` a guess from its names.

    `kinds` is empty but for the text decoder.
    """

    role: str
    prefix: str
    layers: list[int]
    counted: Count | None
    tensors: int
    nbytes: int
    kinds: list[Kind]


class Heads(msgspec.Struct):
    """`tied` as the config says, None where it does not. `mtp_stages` are found in the tensors' names."""

    lm_head: list[str]
    tied: bool | None
    mtp_stages: int
    mtp_counted: Count | None
    mtp_prefixes: list[str]


class Part(msgspec.Struct):
    """The tensors of one component. `layers` of the text decoder have it, each with `layer_nbytes` (least, most)."""

    component: str
    tensors: int
    nbytes: int
    dtypes: dict[str, Amount]
    layers: int
    layer_nbytes: tuple[int, int] | None


class Inspection(msgspec.Struct):
    """`valid`: an operation may take it as its source. `family` is None where there is no record of the model type."""

    source: str
    valid: bool
    model_type: str | None
    architectures: list[str]
    family: str | None
    tensors: int
    nbytes: int
    files: Files | None
    rank_layout: RankLayout | None
    dtypes: dict[str, Amount]
    config_dtype: str | None
    quantization: Quantization | None
    stacks: list[Stack]
    experts: Experts | None
    heads: Heads
    components: list[Part]
    side_files: list[SideFile]
    strays: list[Stray]
    findings: list[Finding]
    cover: list[int] | None = None


def inspect(checkpoint: Checkpoint) -> Inspection:
    """Everything that headers, names and config say about `checkpoint`, which may be a faulty one (`survey`)."""
    ranks = rank_layout(checkpoint)
    checkpoint, _ = with_ranks(checkpoint)
    config: Mapping[str, Any] = checkpoint.config or {}
    family = find_family(config)
    entries = take_census(checkpoint.tensors.values())
    prefixes = stack_prefixes(entries)
    main = _main_prefix(entries, prefixes, family.stack.prefix if family else None)
    counted = next((name for name in (family.stack.depth_from if family else ()) if config.get(name)), None)
    if family is not None and counted is not None and (layers := family.depth(config)) is not None:
        depth: Count | None = Count(f"length of {counted}", layers)
    else:
        depth = count_of(config, *([family.stack.depth] if family else []), *DEPTH_SPELLINGS)
    stacks = _stacks(entries, prefixes, main, config, depth)
    experts = experts_of(entries, main, config)
    heads = _heads(entries, stacks, main, config, depth)
    findings = [*checkpoint.findings, *_disagreements(stacks, experts, heads, entries)]
    return Inspection(
        source=str(checkpoint.root),
        valid=not any(f.severity == "fault" and f.kind not in TOLERATED for f in checkpoint.findings),
        model_type=model_type(config) or None,
        architectures=[str(name) for name in config.get("architectures") or []]
        if isinstance(config.get("architectures"), list)
        else [],
        family=family.name if family else None,
        tensors=sum(entry.cell.tensors for entry in entries),
        nbytes=sum(entry.cell.nbytes for entry in entries),
        files=_files(checkpoint),
        rank_layout=ranks,
        dtypes=_amounts(entries),
        config_dtype=config_dtype(config),
        quantization=quantization_of(config, entries),
        stacks=stacks,
        experts=experts,
        heads=heads,
        components=_components(entries, main, depth),
        side_files=checkpoint.side_files,
        strays=checkpoint.strays,
        findings=findings,
        cover=_cover(family, config),
    )


def _cover(family: Family | None, config: Mapping[str, Any]) -> list[int] | None:
    """The fewest layers that hold every kind; None where nobody can say."""
    depth = family.depth(config) if family is not None else None
    if family is None or depth is None:
        return None
    try:
        return cover(family, config, depth, READERS)
    except (CannotApply, TypeError, ValueError, AttributeError):
        return None


def _files(checkpoint: Checkpoint) -> Files | None:
    files = checkpoint.files
    if not files:
        return None
    return Files(
        count=len(files),
        nbytes=sum(file.nbytes for file in files),
        allocated_nbytes=sum(file.allocated_nbytes for file in files),
        smallest_nbytes=min(file.nbytes for file in files),
        largest_nbytes=max(file.nbytes for file in files),
        first=files[0].name,
        last=files[-1].name,
        index=checkpoint.index_name,
    )


def _amounts(entries: Iterable[Entry]) -> dict[str, Amount]:
    """Per dtype, the most bytes first."""
    found: dict[str, Amount] = {}
    for entry in entries:
        amount = found.setdefault(entry.dtype, Amount())
        amount.tensors += entry.cell.tensors
        amount.nbytes += entry.cell.nbytes
    return dict(sorted(found.items(), key=lambda item: -item[1].nbytes))


def _main_prefix(entries: list[Entry], prefixes: Mapping[str, int], known: str | None) -> str:
    """The text decoder's: the family's word, else the stack with the most bytes that is no tower and no MTP head."""
    if known is not None and known in prefixes:
        return known
    aside = {e.template.prefix for e in entries if e.template.component in ("vision", "audio", "MTP")}
    inside = {prefix: nbytes for prefix, nbytes in prefixes.items() if prefix not in aside}
    return max(inside, key=lambda prefix: inside[prefix], default="")


def _stacks(
    entries: list[Entry],
    prefixes: Mapping[str, int],
    main: str,
    config: Mapping[str, Any],
    depth: Count | None,
) -> list[Stack]:
    """The text decoder first, then by size."""
    by_prefix: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.template.prefix in prefixes:
            by_prefix.setdefault(entry.template.prefix or "", []).append(entry)
    stacks = []
    for prefix in sorted(by_prefix, key=lambda prefix: (prefix != main, -prefixes[prefix])):
        held = by_prefix[prefix]
        role = "text" if prefix == main else _role(held, prefix)
        stacks.append(
            Stack(
                role=role,
                prefix=prefix,
                layers=sorted({entry.layer for entry in held}),
                counted=depth if prefix == main else section_depth(config, role),
                tensors=sum(entry.cell.tensors for entry in held),
                nbytes=prefixes[prefix],
                kinds=kinds_of(held, config, depth) if prefix == main else [],
            )
        )
    return stacks


def _role(held: list[Entry], prefix: str) -> str:
    component = held[0].template.component
    if component in ("vision", "audio", "MTP"):
        return component
    return next((word for word in ("encoder", "decoder") if word in prefix), "other")


def _is_stage(entry: Entry, main: str, depth: Count | None) -> bool:
    """MTP by its words, or as a layer of the decoder behind the last that the config counts."""
    if entry.template.component == "MTP":
        return True
    return depth is not None and entry.template.prefix == main and entry.layer >= depth.value


def _heads(
    entries: list[Entry], stacks: list[Stack], main: str, config: Mapping[str, Any], depth: Count | None
) -> Heads:
    stages = [entry for entry in entries if _is_stage(entry, main, depth)]
    counts: dict[str, set[int]] = {}
    for entry in stages:
        prefix = entry.template.prefix
        if prefix is not None and prefix in {stack.prefix for stack in stacks}:
            counts.setdefault(prefix, set()).add(entry.layer)
    numbered = max((len(layers) for layers in counts.values()), default=0)
    named = sorted({entry.template.text.partition(".#")[0] for entry in stages if entry.template.prefix is None})
    prefixes = [f"{prefix}{compact_ranges(sorted(layers))}" for prefix, layers in counts.items()]
    return Heads(
        lm_head=sorted(
            entry.template.text
            for entry in entries
            if entry.template.component == "lm_head" and not _is_stage(entry, main, depth)
        ),
        tied=tied_embeddings(config),
        mtp_stages=numbered or (1 if stages else 0),
        mtp_counted=count_of(config, *MTP_FIELDS),
        mtp_prefixes=prefixes or named,
    )


def _components(entries: list[Entry], main: str, depth: Count | None) -> list[Part]:
    held: dict[str, list[Entry]] = {}
    for entry in entries:
        component = "MTP" if _is_stage(entry, main, depth) else entry.template.component
        held.setdefault(component, []).append(entry)
    parts = []
    for component in COMPONENTS:
        if component not in held:
            continue
        layers: dict[int, int] = {}
        for entry in held[component]:
            if entry.template.prefix == main and main:
                layers[entry.layer] = layers.get(entry.layer, 0) + entry.cell.nbytes
        parts.append(
            Part(
                component=component,
                tensors=sum(entry.cell.tensors for entry in held[component]),
                nbytes=sum(entry.cell.nbytes for entry in held[component]),
                dtypes=_amounts(held[component]),
                layers=len(layers),
                layer_nbytes=(min(layers.values()), max(layers.values())) if layers else None,
            )
        )
    return parts


def _holds_a_stage(entries: list[Entry], prefix: str, depth: int) -> bool:
    """Whether what lies behind the counted layers holds tensors that no layer has: an MTP stage that is not counted."""
    behind: dict[bool, set[str]] = {False: set(), True: set()}
    for entry in entries:
        if entry.template.prefix == prefix:
            behind[entry.layer >= depth].add(entry.template.text)
    return bool(behind[True] - behind[False])


def _disagreements(stacks: list[Stack], experts: Experts | None, heads: Heads, entries: list[Entry]) -> list[Finding]:
    """Where the config's counts and the tensors' numbers do not agree; `verify` judges the rest."""
    findings: list[Finding] = []

    def fault(kind: str, what: str, field: str) -> None:
        findings.append(Finding(kind, "fault", what, f"config.json {field}", f"correct {field}, or get the tensors"))

    for stack in stacks:
        if stack.role != "text" or stack.counted is None:
            continue
        field, depth = stack.counted.field, stack.counted.value
        missing = sorted(set(range(min(depth, 1 << 16))) - set(stack.layers))
        surplus = [layer for layer in stack.layers if layer >= depth]
        if missing:
            fault("missing-layer", f"{field} is {depth}; of layer {compact_ranges(missing)} there is no tensor", field)
        is_counted = heads.mtp_counted is not None and heads.mtp_counted.value > 0
        if surplus and not is_counted and not _holds_a_stage(entries, stack.prefix, depth):
            fault("surplus-layer", f"{field} is {depth}; there are tensors of layer {compact_ranges(surplus)}", field)
    if experts is not None and experts.counted is not None:
        odd = [layer for layer, count in experts.layers.items() if count not in (None, experts.counted.value)]
        if odd:
            field = experts.counted.field
            counts = sorted({count for count in experts.layers.values() if count is not None})
            fault(
                "expert-count",
                f"{field} is {experts.counted.value}; layer {compact_ranges(odd)} has {', '.join(map(str, counts))}",
                field,
            )
    counted = heads.mtp_counted
    if counted is not None and counted.value != heads.mtp_stages and entries:
        what = f"{counted.field} is {counted.value}; tensors of {heads.mtp_stages} MTP stages are there"
        if heads.mtp_stages < counted.value:
            fault("mtp-count", what, counted.field)
        else:
            findings.append(Finding("mtp-count", "note", what, f"config.json {counted.field}"))
    return findings
