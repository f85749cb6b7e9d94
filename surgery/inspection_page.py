"""The page that `inspect` prints: an inspection on one screen. Every name on it is made printable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from surgery.errors import Finding, printable
from surgery.inspection import Amount, Heads, Inspection, Part, Stack
from surgery.layer_kinds import Experts
from surgery.layer_ranges import compact_ranges
from surgery.sizes import human_size

_LABEL_WIDTH = 12
_MAX_LISTED_NAMES = 8
_MAX_RANGES = 8
_MAX_STRAYS = 6
_MAX_KINDS = 8
_MAX_OF_A_KIND = 3
_MAX_TEXT = 100


def inspection_page(inspection: Inspection) -> str:
    lines = [printable(inspection.source), *_model(inspection), *_files(inspection)]
    lines += _labelled("dtypes", _dtypes(inspection))
    lines += _labelled("quantised", _quantization(inspection))
    lines += _stacks(inspection.stacks)
    if inspection.cover is not None:
        lines += _labelled("cover", f"--layers {compact_ranges(inspection.cover)} holds every kind of layer")
    lines += _labelled("experts", _experts(inspection.experts))
    if inspection.tensors:
        lines += _labelled("heads", _heads(inspection.heads))
    lines += _components(inspection.components, inspection.nbytes)
    names = [f"{side.name} ({human_size(side.nbytes)})" for side in inspection.side_files]
    lines += _labelled("side files", f"{len(names)}: {_listed(names)}" if names else "none")
    lines += _strays(inspection)
    lines += _findings(inspection.findings)
    return "\n".join(lines)


def _labelled(label: str, text: str) -> list[str]:
    return [f"{label:<{_LABEL_WIDTH}}{text}"] if text else []


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _listed(names: Sequence[str], limit: int = _MAX_LISTED_NAMES) -> str:
    shown = ", ".join(_short(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit:,} more"


def _short(text: str, width: int = _MAX_TEXT) -> str:
    text = printable(text)
    return text if len(text) <= width else text[: width - 3] + "..."


def _span(nbytes: tuple[int, int]) -> str:
    least, most = (human_size(size) for size in nbytes)
    return least if least == most else f"{least} to {most}"


def _model(inspection: Inspection) -> list[str]:
    if inspection.model_type is None:
        return _labelled("model", "unknown: the config names no model type")
    classes = f" ({_listed(inspection.architectures, 2)})" if inspection.architectures else ""
    record = (
        f"family {inspection.family}"
        if inspection.family
        else "no family record: layer kinds are read from its tensors, `trim` cannot take it"
    )
    return _labelled("model", f"{_short(inspection.model_type)}{classes}; {record}")


def _files(inspection: Inspection) -> list[str]:
    lines = []
    ranks = inspection.rank_layout
    if ranks is not None:
        size = f" of {ranks.size}" if ranks.size is not None else ""
        text = (
            f"rank partitions, not storage shards: {ranks.layout}, rank {compact_ranges(ranks.ranks)}{size}, "
            f"{_counted(ranks.files, 'file')}, {human_size(ranks.nbytes)}"
        )
        lines += _labelled("layout", text)
    files = inspection.files
    if files is None:
        return lines + _labelled("files", "none of a model that can be read")
    on_disk = (
        f", {human_size(files.allocated_nbytes)} on disk (holes)" if files.allocated_nbytes < files.nbytes // 2 else ""
    )
    lines += _labelled(
        "tensors",
        f"{inspection.tensors:,}, {human_size(inspection.nbytes)} in {_counted(files.count, 'file')}{on_disk}",
    )
    each = f"{_span((files.smallest_nbytes, files.largest_nbytes))}{' each' if files.count > 1 else ''}"
    names = _short(files.first) if files.count == 1 else f"{_short(files.first)} to {_short(files.last)}"
    index = f"; {_short(files.index)}" if files.index else "; no index"
    return lines + _labelled("files", f"{names}, {each}{index}")


def _amount_text(dtypes: dict[str, Amount]) -> str:
    return ", ".join(
        f"{dtype} {human_size(amount.nbytes)} in {_counted(amount.tensors, 'tensor')}"
        for dtype, amount in dtypes.items()
    )


def _dtypes(inspection: Inspection) -> str:
    said = f"; config says {_short(inspection.config_dtype)}" if inspection.config_dtype else ""
    return _amount_text(inspection.dtypes) + said if inspection.dtypes else ""


def _quantization(inspection: Inspection) -> str:
    found = inspection.quantization
    if found is None:
        return "no" if inspection.tensors else ""
    parts = []
    if found.field is None:
        parts.append("the config does not say so, but packed or scaled weights are there")
    else:
        details = [f"{key} {_value(value)}" for key, value in found.details.items()]
        parts.append(f"{_short(found.method or 'unnamed method')} ({_listed([found.field, *details], 6)})")
    if found.excluded:
        parts.append(f"{_counted(found.excluded, 'module')} left alone")
    if found.companions:
        parts.append("with " + ", ".join(f"{count:,} {_short(leaf)}" for leaf, count in found.companions.items()))
    return "; ".join(parts)


def _value(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, list) else str(value)


def _stacks(stacks: list[Stack]) -> list[str]:
    lines = []
    for number, stack in enumerate(stacks[:_MAX_KINDS]):
        counted = f" ({stack.counted.field} {stack.counted.value})" if stack.counted else ""
        text = (
            f"{stack.role}: {_short(stack.prefix)}N, {_counted(len(stack.layers), 'layer')} "
            f"{layers_text(stack.layers)}{counted}, {human_size(stack.nbytes)}"
        )
        lines.append(f"{'stacks' if number == 0 else '':<{_LABEL_WIDTH}}{text}")
        ranges = [layers_text(kind.layers) for kind in stack.kinds[:_MAX_KINDS]]
        width = max(map(len, ranges), default=0)
        for layers, kind in zip(ranges, stack.kinds, strict=False):
            size = f"{_span(kind.layer_nbytes)}{' a layer' if len(kind.layers) > 1 else ''}"
            words = "; ".join(part for part in (_short(kind.name), size) if part)
            lines.append(f"{'':<{_LABEL_WIDTH}}  {layers:<{width}}  {words}")
        if len(stack.kinds) > _MAX_KINDS:
            lines.append(f"{'':<{_LABEL_WIDTH}}  and {len(stack.kinds) - _MAX_KINDS} more kinds")
    if len(stacks) > _MAX_KINDS:
        lines.append(f"{'':<{_LABEL_WIDTH}}and {len(stacks) - _MAX_KINDS} more stacks")
    return lines


def layers_text(layers: Sequence[int]) -> str:
    """Layer ids in ranges; evenly spaced ones by their step, long lists cut short."""
    steps = {after - before for before, after in pairwise(layers)}
    if len(layers) > 3 and len(steps) == 1 and steps != {1}:
        return f"{layers[0]},{layers[1]}..{layers[-1]}"
    ranges = compact_ranges(layers).split(",")
    if len(ranges) <= _MAX_RANGES:
        return ",".join(ranges)
    return f"{','.join(ranges[: _MAX_RANGES - 1])}..{ranges[-1]} ({len(layers)} layers)"


def _experts(experts: Experts | None) -> str:
    if experts is None:
        return ""
    counts = sorted({count for count in experts.layers.values() if count is not None})
    number = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}" if counts else "?"
    parts = [f"{experts.storage}, {number} in each of {_counted(len(experts.layers), 'layer')}"]
    if experts.counted is not None:
        parts.append(f"{experts.counted.field} {experts.counted.value}")
    if experts.top_k is not None:
        parts.append(f"top-{experts.top_k}")
    if experts.has_shared:
        parts.append(f"{experts.shared or ''} shared".strip())
    return ", ".join(parts)


def _heads(heads: Heads) -> str:
    tied = {True: "tied to the embeddings", False: "not tied", None: "the config does not say whether it is tied"}
    parts = [f"{_listed(heads.lm_head, 3) or 'no lm_head'}, {tied[heads.tied]}"]
    if heads.mtp_stages:
        where = _listed(heads.mtp_prefixes, 3)
        parts.append(f"MTP {_counted(heads.mtp_stages, 'stage')} ({where})")
    elif heads.mtp_counted is None or not heads.mtp_counted.value:
        parts.append("no MTP")
    if heads.mtp_counted is not None:
        parts.append(f"{heads.mtp_counted.field} {heads.mtp_counted.value}")
    return "; ".join(parts)


def _components(parts: list[Part], nbytes: int) -> list[str]:
    if not parts:
        return []
    lines = [f"{'parts':<{_LABEL_WIDTH}}{'':<14}  {'tensors':>8} {'bytes':>9} {'share':>7}  a layer, dtypes"]
    for part in parts:
        share = f"{100 * part.nbytes / nbytes:.1f} %" if nbytes else "-"
        layer = f"{_span(part.layer_nbytes)} in {part.layers}, " if part.layer_nbytes else ""
        lines.append(
            f"{'':<{_LABEL_WIDTH}}{part.component:<14}  {part.tensors:>8,} {human_size(part.nbytes):>9} {share:>7}  "
            f"{layer}{' '.join(part.dtypes)}"
        )
    return lines


def _strays(inspection: Inspection) -> list[str]:
    strays = inspection.strays
    if not strays:
        return _labelled("strays", "none")
    shown = [f"{_short(stray.name)}: {_short(stray.why)}" for stray in strays[:_MAX_STRAYS]]
    if len(strays) > _MAX_STRAYS:
        shown.append(f"and {len(strays) - _MAX_STRAYS:,} more")
    return _indented("strays", shown)


def _indented(label: str, lines: Iterable[str]) -> list[str]:
    return [f"{label if number == 0 else '':<{_LABEL_WIDTH}}{line}" for number, line in enumerate(lines)]


def _findings(findings: list[Finding]) -> list[str]:
    """Faults first; of one kind the first few, then a count."""
    if not findings:
        return _labelled("findings", "none")
    kinds: dict[tuple[str, str], list[Finding]] = {}
    for finding in sorted(findings, key=lambda finding: finding.severity):
        kinds.setdefault((finding.severity, finding.kind), []).append(finding)
    lines = []
    for (severity, kind), found in kinds.items():
        for finding in found[:_MAX_OF_A_KIND]:
            where = f" [{printable(finding.where)}]" if finding.where and finding.where not in finding.what else ""
            lines.append(f"{severity}: {printable(finding.what)}{where}")
        if found[0].mend:
            lines.append(f"  mend: {printable(found[0].mend)}")
        if len(found) > _MAX_OF_A_KIND:
            lines.append(f"  and {len(found) - _MAX_OF_A_KIND:,} more {kind} (all with --json)")
    return _indented("findings", lines)
