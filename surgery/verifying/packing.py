"""Quantised weights against what their scheme needs: companions that must be there, their shapes, the config's word.

Sources: transformers 5.24 `quantizers/`, compressed-tensors `compressors/`, AutoAWQ, GPTQModel and ModelOpt exports;
the shapes are those of facts/tensor-parallel.md section 3.3. A packing that nobody described is unverified, no fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from surgery.packed_weights import COMPANIONS, Unpacked, quantized_modules
from surgery.quantization import quantization_sections
from surgery.safetensors_file import StoredTensor
from surgery.verifying.verdicts import Findings

_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)")
_SCALES = ("weight_scale_inv", "weight_scale", "scale", "scale_inv", "SCB")
_ON_LOAD = ("bitsandbytes", "torchao", "hqq", "higgs", "quanto", "eetq")
"""Methods that quantise a whole model while it is loaded: plain weights are no fault."""

UNREAD_FORMATS = ("sparse-24-bitmask", "marlin-24", "sparse-bitmask")
UNREAD_METHODS = ("aqlm", "hqq", "torchao", "spqr", "vptq", "higgs", "bitnet", "fp_quant", "sinq")
"""Packings whose tensors are not described here."""


def unread_packing(config: Mapping[str, Any]) -> str:
    """The packing of a config that is not described; "" where there is none such."""
    for _, section in quantization_sections(config):
        sparse = section.get("sparsity_config")
        method, form = str(section.get("quant_method", "")).lower(), str(section.get("format", ""))
        if isinstance(sparse, Mapping) and str(sparse.get("format", "dense")) in UNREAD_FORMATS:
            form = str(sparse["format"])
        if form in UNREAD_FORMATS or method in UNREAD_METHODS:
            return form if form in UNREAD_FORMATS else method
    return ""


def check_packing(
    tensors: Mapping[str, StoredTensor],
    config: Mapping[str, Any],
    weights: Unpacked,
    findings: Findings,
    *,
    described_beside: bool,
) -> None:
    """Tell quantised weights without their scales, companions of a wrong shape, modules that lack what their likes
    have, and a config that says otherwise. `described_beside`: a file beside the config describes the quantisation."""
    if unread_packing(config):
        return
    quantized = sorted(quantized_modules(weights))
    sections = [section for _, section in quantization_sections(config)]
    if quantized and not sections and not described_beside:
        findings.fault(
            "undeclared-quantization",
            f"{len(quantized)} weights are quantised, first {quantized[0]}, and the config has no quantization_config",
            "config.json",
            "an engine would read them as they are: get the model's own config",
            f"{quantized[0]}.weight",
        )
    if sections and not quantized and not weights.untold and _quantizes_weights(sections[0]):
        findings.fault(
            "quantization-without-weights",
            f"the config says {sections[0].get('quant_method')}, and no weight is quantised",
            "config.json",
            "take the section out, or get the quantised tensors",
        )
    held = _companions(tensors, quantized)
    _tell_unscaled(tensors, quantized, held, findings)
    _tell_unlike(held, findings)
    for module in quantized:
        logical = weights.weights.get(f"{module}.weight") or weights.weights.get(module)
        if logical is not None:
            _tell_shapes(module, logical.shape, tensors, held[module], sections[0] if sections else {}, findings)


def _quantizes_weights(section: Mapping[str, Any]) -> bool:
    method = str(section.get("quant_method", "")).lower()
    if method in _ON_LOAD or section.get("quant_algo") in ("NO_QUANT", "") or not method:
        return False
    groups = section.get("config_groups")
    if method in ("compressed-tensors", "compressed_tensors") and isinstance(groups, Mapping):
        return any(isinstance(group, Mapping) and group.get("weights") for group in groups.values())
    return True


def _companions(tensors: Mapping[str, StoredTensor], quantized: list[str]) -> dict[str, frozenset[str]]:
    """Quantised module -> the last parts of the names of all its tensors."""
    found: dict[str, set[str]] = {module: set() for module in quantized}
    for name in tensors:
        module, _, leaf = name.rpartition(".")
        if module in found and (leaf in COMPANIONS or leaf == "weight"):
            found[module].add(leaf)
        for end in ("_blocks", "_scales"):
            if name.endswith(end) and name.removesuffix(end) in found:
                found[name.removesuffix(end)].add(end)
    return {module: frozenset(leaves) for module, leaves in found.items()}


def _needed(leaves: frozenset[str], weight: StoredTensor | None) -> Iterator[tuple[str, ...]]:
    """What must be there beside a weight of this form: one of each tuple."""
    if "qweight" in leaves:
        yield ("scales",)
        yield ("qzeros",)
    elif "weight_packed" in leaves:
        yield ("weight_scale",)
        yield ("weight_shape", "weight_global_scale")
    elif "_blocks" in leaves or "_scales" in leaves:
        yield ("_scales",)
        yield ("_blocks",)
    elif weight is not None:
        yield _SCALES
        if weight.dtype == "U8" and "weight_scale" in leaves:
            return


def _tell_unscaled(
    tensors: Mapping[str, StoredTensor], quantized: list[str], held: Mapping[str, frozenset[str]], findings: Findings
) -> None:
    for name in tensors:
        module, _, leaf = name.rpartition(".")
        if leaf == "qweight" and f"{module}.scales" not in tensors:
            findings.fault(
                "missing-companion",
                f"{module} is quantised and has no scales",
                f"{module}.scales",
                "get the missing tensor: without it the weight means something else",
                f"{module}.scales",
            )
    for module in quantized:
        for names in _needed(held[module], tensors.get(f"{module}.weight")):
            if not held[module] & set(names):
                first = names[0]
                name = f"{module}{first}" if first.startswith("_") else f"{module}.{first}"
                findings.fault(
                    "missing-companion",
                    f"{module} is quantised and has no {first}",
                    name,
                    "get the missing tensor: without it the weight means something else",
                    name,
                )


def _tell_unlike(held: Mapping[str, frozenset[str]], findings: Findings) -> None:
    """Modules that differ in numbers alone have the same companions."""
    kinds: dict[str, dict[frozenset[str], list[str]]] = {}
    for module, leaves in held.items():
        kinds.setdefault(_NUMBER.sub("#", module), {}).setdefault(leaves, []).append(module)
    for forms in kinds.values():
        if len(forms) < 2:
            continue
        usual = max(forms, key=lambda leaves: len(forms[leaves]))
        for leaves, modules in forms.items():
            missing = sorted(usual - leaves)
            if leaves == usual or not missing or not usual > leaves:
                continue  # Another packing, not one that lacks something: layers may be quantised in several ways.
            name = f"{modules[0]}.{missing[0]}"
            findings.fault(
                "missing-companion",
                f"there is no {name}, which its likes have ({len(modules)} modules)",
                name,
                "get the missing tensor",
                name,
            )


def _tell_shapes(
    module: str,
    logical: tuple[int, ...],
    tensors: Mapping[str, StoredTensor],
    leaves: frozenset[str],
    section: Mapping[str, Any],
    findings: Findings,
) -> None:
    blocks, scales = tensors.get(f"{module}_blocks"), tensors.get(f"{module}_scales")
    if blocks is not None and scales is not None and scales.shape != blocks.shape[:-1]:
        findings.fault(
            "scale-shape",
            f"{module}_scales has shape {list(scales.shape)}; blocks of {list(blocks.shape)} take one each",
            f"{module}_scales",
            "get the right tensor",
            f"{module}_scales",
        )
    if len(logical) < 2:
        return
    outputs, inputs = logical[-2], logical[-1]
    for leaf in sorted(leaves):
        tensor = tensors.get(f"{module}.{leaf}")
        if tensor is None:
            continue
        allowed = _allowed(leaf, outputs, inputs, tensor, leaves, section)
        if allowed and tuple(tensor.shape[-2:]) not in allowed and tensor.shape not in allowed:
            told = " or ".join(str(list(shape)) for shape in allowed[:3])
            findings.fault(
                "scale-shape",
                f"{module}.{leaf} has shape {list(tensor.shape)}; a weight of {outputs} x {inputs} takes {told}",
                f"{module}.{leaf}",
                "get the right tensor",
                f"{module}.{leaf}",
            )


def _allowed(
    leaf: str,
    outputs: int,
    inputs: int,
    tensor: StoredTensor,
    leaves: frozenset[str],
    section: Mapping[str, Any],
) -> list[tuple[int, ...]]:
    """The shapes that a companion may have; none where nobody can say."""
    group = _group_size(section)
    groups = [-(-inputs // group)] if group else []
    if "qweight" in leaves:
        if leaf == "g_idx":
            return [(inputs,)]
        if leaf == "scales" and groups:
            return [(groups[0], outputs)]
        if leaf == "qzeros" and groups and tensor.dtype == "I32":
            bits = section.get("bits") or section.get("w_bit") or 4
            return [(groups[0], outputs * bits // 32)] if isinstance(bits, int) else []
        return []
    method = str(section.get("quant_method", ""))
    if leaf != "weight_scale":
        return []
    if "weight_packed" in leaves or "weight_scale_2" in leaves or "weight_global_scale" in leaves:
        fine = 16 if {"weight_scale_2", "weight_global_scale"} & leaves else group
        if not fine:
            return [(outputs, 1), (outputs,), (1,), ()] if group == 0 else []
        return [(outputs, -(-inputs // fine))]
    if group:
        return [(outputs, -(-inputs // group)), (outputs, 1)]
    block = section.get("weight_block_size")
    shapes: list[tuple[int, ...]] = [(outputs, 1), (outputs,), (1,), (1, 1), ()]
    if isinstance(block, list) and len(block) == 2:
        shapes.append((-(-outputs // block[0]), -(-inputs // block[1])))
    if method in ("quark", "modelopt") or section.get("global_quant_config"):
        return []  # Groups of sizes that their own sections say.
    strategy = _weights(section).get("strategy")
    return [] if strategy not in (None, "channel", "tensor") else shapes


def _weights(section: Mapping[str, Any]) -> Mapping[str, Any]:
    groups = section.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        return {"strategy": "several"} if isinstance(groups, Mapping) and groups else {}
    first = next(iter(groups.values()))
    weights = first.get("weights") if isinstance(first, Mapping) else None
    return weights if isinstance(weights, Mapping) else {}


def _group_size(section: Mapping[str, Any]) -> int:
    """Inputs a group; 0 where there are none, or several kinds."""
    groups = section.get("config_groups")
    size = _weights(section).get("group_size") if isinstance(groups, Mapping) else section.get("group_size")
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else 0
