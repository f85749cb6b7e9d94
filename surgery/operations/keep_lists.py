"""Which experts stay: keep lists as files of three kinds, and the choice from scores, router rows, or the first."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from surgery.errors import CannotApply, SourceError, UsageError
from surgery.operations.expert_layers import ExpertLayer
from surgery.storage import read_bytes

Keep = dict[str, list[int]]
METRICS = {
    "reap": ("gate_norm_sum", "count"),
    "frequency": ("count", ""),
    "norm-mean": ("norm_sum", "count"),
    "norm-sum": ("norm_sum", ""),
    "gate-sum": ("gate_sum", ""),
    "gate-norm-sum": ("gate_norm_sum", ""),
    "max": ("max_abs", ""),
}
"""Metric -> the stored sum, and the sum that divides it. REAP is the mean of gate weight times output norm."""


_MAX_NBYTES = 256 << 20


def _text(path: Path, what: str, mend: str) -> str:
    """The text of a regular file of a sane size. Raises `UsageError`."""
    try:
        return read_bytes(path, _MAX_NBYTES).decode("utf-8-sig")
    except SourceError as error:
        raise UsageError(f"cannot read the {what}: {error.what}", str(path), mend) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot read the {what}: {error}", str(path), mend) from error


def is_ranking(path: Path) -> bool:
    """Whether a file has an object a line, as vLLM-Ascend's full rankings of the experts do."""
    lines = [line for line in _text(path, "keep list", "name a JSON file").splitlines() if line.strip()]
    return len(lines) > 1 and all(line.lstrip().startswith("{") and line.rstrip().endswith("}") for line in lines)


def read_keep(path: Path) -> Keep:
    """A keep list: ours, the report that llm-compressor writes (layer module -> kept ids), or vLLM-Ascend's JSONL of
    rankings (`{"0": [...]}` a line). Raises `UsageError`."""
    text = _text(path, "keep list", "name a JSON file")
    try:
        document = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        document = _lines(text, path)
    if isinstance(document, dict) and "experts" in document:
        unknown = sorted(set(document) - {"format", "experts"})
        if unknown or document.get("format") != 1:
            raise UsageError(
                f"unknown key {unknown[0]!r}" if unknown else f"format {document.get('format')!r}; this reads format 1",
                str(path),
                'a keep list is {"format": 1, "experts": {"model.layers.3": [0, 2, 5]}}',
            )
        document = document["experts"]
    return _checked(document, path)


def read_scores(given: str) -> tuple[Literal["scores", "router-norm", "first"], dict[str, dict[str, Any]]]:
    """`router-norm`, `first`, or the file that `observe` writes: how to choose, and the sums by layer."""
    if given == "router-norm":
        return "router-norm", {}
    if given == "first":
        return "first", {}
    text = _text(Path(given), "scores", "name a scores file, router-norm or first")
    try:
        document = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"cannot read the scores: {error}", given, "name a scores file, router-norm or first"
        ) from error
    layers = document.get("layers") if isinstance(document, dict) else None
    if not isinstance(layers, dict) or not layers or not all(isinstance(sums, dict) for sums in layers.values()):
        raise UsageError(
            "no layers are in the scores", given, 'a scores file has {"layers": {"model.layers.3": {...}}}'
        )
    return "scores", layers


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise UsageError(f"the key {key!r} is there twice", "the file given", "each layer once")
        found[key] = value
    return found


def _lines(text: str, path: Path) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for line in filter(str.strip, text.splitlines()):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"neither JSON nor lines of JSON: {error}", str(path), "check the file") from error
        if not isinstance(entry, dict) or set(entry) & set(merged):
            raise UsageError("a line is no object, or names a layer again", str(path), "one object a line")
        merged |= entry
    return merged


def _checked(document: Any, path: Path) -> Keep:
    if not isinstance(document, dict) or not document:
        raise UsageError("no layer is named", str(path), 'write {"format": 1, "experts": {"model.layers.3": [0, 2]}}')
    keep: Keep = {}
    for key, ids in document.items():
        if isinstance(ids, dict):  # llm-compressor: {"kept": [...], ...}
            ids = next((ids[name] for name in ("kept", "kept_experts", "retained", "keep") if name in ids), None)
        if not isinstance(ids, list) or not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
            raise UsageError(f"{key}: expected a list of expert ids", str(path), "write [0, 2, 5]")
        keep[key] = ids
    return keep


def by_layer(keep: Keep, layers: Sequence[ExpertLayer]) -> Keep:
    """The list by the source's layer prefixes. A key may also be the layer's number, or go on to its module
    (`model.layers.3.mlp`). Raises `CannotApply` for a key that names no layer with experts."""
    found: Keep = {}
    for key, ids in keep.items():
        named = [layer.source for layer in layers if key in _names(layer)]
        if key.isdecimal():
            named = [layer.source for layer in layers if not layer.is_mtp and layer.source.rpartition(".")[2] == key]
        if not named:
            raise CannotApply(
                f"the keep list names {key!r}, which is no layer with experts",
                "keep list",
                f"the first is {layers[0].source!r}; keys are the prefixes of the source's layers",
            )
        for source in dict.fromkeys(named):
            if source in found:
                raise CannotApply(f"the keep list names {source} twice", "keep list", "each layer once")
            found[source] = ids
    return found


def _names(layer: ExpertLayer) -> tuple[str, ...]:
    module = layer.module.rstrip(".")
    return (layer.source, f"{layer.source}.{module}", f"{layer.source}.{module}.experts")


def metric_values(sums: Mapping[str, Any], metric: str, where: str) -> list[float]:
    """One number an expert from a layer's stored sums. Experts that were never routed to have 0."""
    above, below = METRICS[metric]
    values = _numbers(sums.get(above), above, where)
    if not below:
        return values
    weights = _numbers(sums.get(below), below, where)
    if len(weights) != len(values):
        raise CannotApply(f"{where}: {above} and {below} are of different length", "--scores", "observe again")
    return [value / weight if weight else 0.0 for value, weight in zip(values, weights, strict=True)]


def _numbers(values: Any, field: str, where: str) -> list[float]:
    if isinstance(values, list) and all(_is_sum(value) for value in values):
        return [float(value) for value in values]
    raise CannotApply(f"{where} has no {field}, a list of numbers", "--scores", "observe again")


def _is_sum(value: object) -> bool:
    """A number that a sum of norms or counts can be."""
    try:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and math.isfinite(float(value)) and float(value) >= 0  # type: ignore[arg-type]
    except OverflowError:
        return False


def best(scores: Sequence[float], count: int, groups: int, protected: Sequence[int], where: str) -> list[int]:
    """The ids of the `count` best, in their own order, equally many of each routing group, protected ones always.

    Ties go to the lower id. Raises `CannotApply` where the protected ones do not fit.
    """
    size = len(scores)
    outside = [each for each in protected if not 0 <= each < size]
    if outside:
        raise CannotApply(
            f"{where}: no expert {outside[0]} to protect; it has 0 to {size - 1}", "--protect", "correct it"
        )
    if count > size or size % groups or count % groups:
        raise CannotApply(
            f"{where}: {count} of {size} experts in {groups} routing groups: each group must keep equally many",
            "--experts",
            f"choose a multiple of {groups} up to {size}",
        )
    chosen: list[int] = []
    width, share = size // groups, count // groups
    for group in range(groups):
        ids = range(group * width, (group + 1) * width)
        first = sorted(ids, key=lambda each: (each not in protected, -scores[each], each))[:share]
        left_out = [each for each in ids if each in protected and each not in first]
        if left_out:
            raise CannotApply(
                f"{where}: {share} experts stay in group {group}, and more than that are protected",
                "--protect",
                "keep more experts, or protect fewer",
            )
        chosen += first
    return sorted(chosen)
