"""MTP stages: as many as the config counts, each with what a layer of its kind has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from surgery.families.config_fields import read
from surgery.families.schema import Family
from surgery.packed_weights import COMPANIONS
from surgery.safetensors_file import StoredTensor
from surgery.verifying.verdicts import Findings

_STAGE = re.compile(r"(?:layers\.)?([0-9]{1,6})\.")
_ALIKE = 0.7
"""A stage that shares less than this of its names with every layer is of another make: nobody can say what it lacks."""

_PLAIN = ("BF16", "F16", "F32")
Held = dict[str, tuple[int, ...] | None]
"""Names behind the number, packed weights under the plain name; shapes of plain floats."""


def check_stages(
    tensors: Mapping[str, StoredTensor],
    config: Mapping[str, Any],
    family: Family | None,
    findings: Findings,
    *,
    strict: bool,
) -> None:
    """Tell a count that is not the stages', and what a stage lacks that layers like it have: faults where `strict`,
    else notes."""
    found = Findings()
    _check_stages(tensors, config, family, found)
    for finding in found.kept:
        findings.add(finding if strict else msgspec.structs.replace(finding, severity="note"))


def _check_stages(
    tensors: Mapping[str, StoredTensor], config: Mapping[str, Any], family: Family | None, findings: Findings
) -> None:
    mtp = family.mtp if family is not None else None
    depth = family.depth(config) if family is not None else None
    if family is None or mtp is None or depth is None:
        return
    layers, stages = _sorted(tensors, family, depth)
    if not stages:
        return
    section = family.section(config)[1]
    counted = {field: value for field in mtp.counts if isinstance(value := read(section, field), int)}
    there = mtp.stages(len(stages), section)
    wrong = next(((field, value) for field, value in counted.items() if value and value != there), None)
    if wrong is not None:
        findings.fault(
            "mtp-count",
            f"{wrong[0]} is {wrong[1]}, and {there} MTP stages are there",
            "config.json",
            f"set {wrong[0]} to {there}, or get the missing tensors",
        )
    for number, held in sorted(stages.items()):
        _judge_stage(number, held, layers, findings)
    if mtp.behind:
        for number, held in sorted(stages.items()):
            if not any(name.startswith(("eh_proj", "enorm", "hnorm")) for name in held):
                continue
            for part in ("eh_proj", "enorm", "hnorm"):
                if not any(name.startswith(f"{part}.") for name in held):
                    _missing(f"MTP stage {number}", part, findings)
    hidden = read(section, "hidden_size")
    for name, tensor in tensors.items():
        joins = name.endswith(("eh_proj.weight", "mtp.fc.weight")) and tensor.dtype in _PLAIN
        if joins and isinstance(hidden, int) and len(tensor.shape) == 2 and tensor.shape != (hidden, 2 * hidden):
            findings.fault(
                "wrong-shape",
                f"{name} has shape {list(tensor.shape)}; it joins two vectors of {hidden}",
                name,
                "get the right tensor",
                name,
            )


def _sorted(tensors: Mapping[str, StoredTensor], family: Family, depth: int) -> tuple[dict[int, Held], dict[int, Held]]:
    """Layers and stages: the rest of each name and its shape."""
    layers: dict[int, Held] = {}
    stages: dict[int, Held] = {}
    mtp = family.mtp
    assert mtp is not None

    def take(held: Held, rest: str, tensor: StoredTensor) -> None:
        module, _, leaf = rest.rpartition(".")
        if leaf in ("qweight", "weight_packed"):
            held[f"{module}.weight"] = None
        elif leaf not in COMPANIONS:
            held[rest] = tensor.shape if tensor.dtype in _PLAIN else None

    for name, tensor in tensors.items():
        for prefix in mtp.prefixes:
            if name.startswith(prefix) and (match := _STAGE.match(name[len(prefix) :])) is not None:
                take(stages.setdefault(int(match[1]), {}), name[len(prefix) + match.end() :], tensor)
                break
        else:
            for prefix in family.stack.prefixes:
                number, _, rest = name[len(prefix) :].partition(".")
                if name.startswith(prefix) and number.isdecimal() and len(number) < 7:
                    place = int(number)
                    if place < depth:
                        take(layers.setdefault(place, {}), rest, tensor)
                    elif mtp.behind:
                        take(stages.setdefault(place - depth, {}), rest, tensor)
                    break
    return layers, stages


def _judge_stage(number: int, held: Held, layers: Mapping[int, Held], findings: Findings) -> None:
    """What the layer that is most like the stage has, the stage has too, experts apart (they are counted elsewhere)."""

    def plain(names: Held) -> set[str]:
        return {name for name in names if ".experts." not in f".{name}"}

    mine = plain(held)
    best = max(layers.values(), key=lambda layer: len(plain(layer) & mine), default=None)
    if best is None:
        return
    wanted = plain(best)
    if len(wanted & mine) < _ALIKE * len(wanted):
        # Whole parts may be gone: attention and mixture are judged apart.
        for part in ("self_attn.", "mlp."):
            theirs = {name for name in wanted if name.startswith(part)}
            if theirs and not any(name.startswith(part) for name in held) and wanted & mine:
                _missing(f"MTP stage {number}", part.rstrip("."), findings)
        return
    for name in sorted(wanted - mine):
        _missing(f"MTP stage {number}", name, findings)
    for name in sorted(wanted & mine):
        have, like = held[name], best[name]
        if have is not None and like is not None and have != like:
            findings.fault(
                "wrong-shape",
                f"MTP stage {number}: {name} has shape {list(have)}; layers like it have {list(like)}",
                name,
                "get the right tensor",
                name,
            )


def _missing(stage: str, what: str, findings: Findings) -> None:
    findings.fault("missing-tensor", f"{stage} has no {what}", what, "get the missing tensor", what)
