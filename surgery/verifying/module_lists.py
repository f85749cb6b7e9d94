"""A config's quantisation lists against the tensors: what they name is there, and is quantised as they say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from surgery.packed_weights import Unpacked, quantized_modules
from surgery.quantization import Named, is_numbered, named_in, quantization_sections
from surgery.quantization_schemes import Modules, modules_of
from surgery.safetensors_file import StoredTensor
from surgery.verifying.verdicts import Findings

_EXCLUDES = frozenset(
    ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules", "exclude", "llm_int8_skip_modules")
)
_LAYER = re.compile(r"(?:layers|h|blocks?)\.([0-9]{1,6})(?:\.|$)")
_TOWER = re.compile(r"vis|audio|encoder|mtp|nextn|tower")
_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.|$)")


def check_module_lists(
    tensors: Mapping[str, StoredTensor],
    config: Mapping[str, Any],
    weights: Unpacked,
    depth: int | None,
    findings: Findings,
) -> bool:
    """Tell entries that name layers which are not there, modules that a list leaves alone and that are quantised all
    the same, and modules that are not quantised where their likes in other layers are.

    Returns whether there is a list.
    """
    places = list(named_in(config))
    if not places:
        if next(iter(quantization_sections(config)), None) is not None:
            _tell_lonely(weights, set(quantized_modules(weights)), set(), findings)
        return False
    modules = modules_of(tensors)
    quantized = set(quantized_modules(weights))
    excluded: set[str] = set()
    for named in places:
        field = str(named.path[-1])
        hit = _hits(named, modules)
        _tell_dead(named, hit, depth, findings)
        if field in _EXCLUDES:
            excluded |= {path for paths in hit.values() for path in paths}
    wrong = sorted(quantized & excluded)
    if wrong:
        findings.fault(
            "quantized-though-excluded",
            f"{len(wrong)} modules are quantised that the config leaves alone, first {wrong[0]}",
            "config.json",
            "the list must name what is not quantised: correct it, or get the right tensors",
            f"{wrong[0]}.weight",
        )
    _tell_lonely(weights, quantized, excluded, findings)
    return True


def _hits(named: Named, modules: Modules) -> dict[str, set[str]]:
    names = named.scheme.names(modules)
    return {
        entry: {path for reading in named.scheme.readings for path in reading(entry, names)} for entry in named.value
    }


def _tell_dead(named: Named, hit: Mapping[str, set[str]], depth: int | None, findings: Findings) -> None:
    """Entries of layers that are not there are a fault; entries that mean nothing in a layer that is are a note: lists
    also name modules as other programs call them."""
    place = ".".join(map(str, named.path))
    dead = [entry for entry, paths in hit.items() if not paths and is_numbered(entry)]
    gone = [entry for entry in dead if _beyond(entry, depth)]
    if gone:
        findings.fault(
            "dead-entry",
            f"{place} names {len(gone)} modules of layers that are not there, first {gone[0]}",
            f"config.json {place}",
            "take the entries out: they are another model's",
        )
    if len(dead) > len(gone):
        other = next(entry for entry in dead if not _beyond(entry, depth))
        findings.note("dead-entry", f"{place}: {len(dead) - len(gone)} entries match no module, first {other}", place)


def _beyond(entry: str, depth: int | None) -> bool:
    """Whether an entry names a layer of the decoder behind the last; towers and heads have numbers of their own."""
    if depth is None:
        return True
    match = _LAYER.search(entry.replace("\\", ""))
    return match is not None and int(match[1]) >= depth and not _TOWER.search(entry)


def _tell_lonely(weights: Unpacked, quantized: set[str], excluded: set[str], findings: Findings) -> None:
    """A module that is not quantised and not excluded, where modules of the same name in other layers are quantised."""
    kinds: dict[str, tuple[list[str], list[str]]] = {}
    for name, weight in weights.weights.items():
        if name.endswith(".weight") and len(weight.shape) >= 2:
            module = name.removesuffix(".weight")
            if module in quantized or module not in excluded:
                kinds.setdefault(_NUMBER.sub("#", module), ([], []))[module not in quantized].append(module)
    lonely = [module for yes, no in kinds.values() if yes for module in no]
    if lonely:
        findings.fault(
            "not-quantized",
            f"{len(lonely)} modules are not quantised, are not excluded, and their likes in other layers are, "
            f"first {lonely[0]}",
            "config.json",
            "name them in the list of what is left alone, or get the quantised tensors",
            f"{lonely[0]}.weight",
        )
