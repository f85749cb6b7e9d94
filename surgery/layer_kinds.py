"""What kind each layer of the text decoder is: by the family's record, else by its tensors and the config's lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from surgery.config_reading import Count, count_of, setting
from surgery.families.records import find_family
from surgery.families.schema import Facts, Family
from surgery.name_census import Entry

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
_TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_top_k",
    "moe_topk",
    "moe_k",
    "top_k_experts",
)
_SHARED = ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts")
_ATTENTION_MARKS = (
    ("kv_a_proj", "latent attention (MLA)"),
    ("kv_b_proj", "latent attention (MLA)"),
    ("linear_attn", "linear attention"),
    ("A_log", "state space"),
    ("short_conv", "convolution"),
    (".conv.", "convolution"),
    ("attn", "attention"),
    ("attention", "attention"),
    ("Attention", "attention"),
    ("q_proj", "attention"),
)


class Kind(msgspec.Struct):
    """Layers that are alike. `name` in words, `layer_nbytes` the least and the most of one layer."""

    name: str
    layers: list[int]
    layer_nbytes: tuple[int, int]


class Experts(msgspec.Struct):
    """`storage`: tensors of each expert, or `fused`: all of a layer in one. `layers`: expert count by layer, None where
    the shapes do not tell. `shared` is the config's count of shared experts."""

    storage: str
    counted: Count | None
    top_k: int | None
    has_shared: bool
    shared: int | None
    layers: dict[int, int | None]


def experts_of(entries: list[Entry], main: str, config: Mapping[str, Any]) -> Experts | None:
    """The routed experts of the text decoder, MTP layers behind it included; None where there are none."""
    held: dict[int, list[Entry]] = {}
    shared = False
    for entry in entries:
        if entry.template.prefix == main and main:
            shared = shared or entry.template.component == "shared experts"
            if entry.template.component == "experts":
                held.setdefault(entry.layer, []).append(entry)
    if not held:
        return None
    fused = all(entry.template.expert is None for layer in held.values() for entry in layer)
    top_k, shared_count = count_of(config, *_TOP_K), count_of(config, *_SHARED)
    return Experts(
        storage="fused" if fused else "per-expert",
        counted=count_of(config, *EXPERT_COUNTS),
        top_k=top_k.value if top_k else None,
        has_shared=shared,
        shared=shared_count.value if shared and shared_count else None,
        layers={layer: _expert_count(held[layer]) for layer in sorted(held)},
    )


def _expert_count(held: list[Entry]) -> int | None:
    ids = set().union(*(entry.cell.experts for entry in held))
    if ids:
        return len(ids)
    rows = set().union(*(entry.cell.rows for entry in held))
    return rows.pop() if len(rows) == 1 else None


def kinds_of(held: list[Entry], config: Mapping[str, Any], depth: Count | None) -> list[Kind]:
    """The kinds of the stack's layers, in the order of the first layer of each. `held` is the whole stack."""
    layers: dict[int, list[Entry]] = {}
    for entry in held:
        layers.setdefault(entry.layer, []).append(entry)
    family = find_family(config)
    listed = setting(config, "layer_types", "layers_block_type")
    kinds: dict[str, list[int]] = {}
    for layer in sorted(layers):
        facts = _facts(family, config, layer)
        attention = facts.get("attention") or _listed(listed, layer) or _attention(layers[layer])
        more = [f"{key} {value}" for key, value in facts.items() if key not in ("mlp", "attention")]
        name = ", ".join(
            part for part in (_mlp(layers[layer], config), str(attention).replace("_", " "), *more) if part
        )
        if depth is not None and layer >= depth.value:
            name = f"behind the counted layers (MTP): {name}"
        kinds.setdefault(name, []).append(layer)
    sizes = {layer: sum(entry.cell.nbytes for entry in found) for layer, found in layers.items()}
    return [
        Kind(name, numbers, (min(sizes[n] for n in numbers), max(sizes[n] for n in numbers)))
        for name, numbers in kinds.items()
    ]


def _facts(family: Family | None, config: Mapping[str, Any], layer: int) -> Facts:
    """Nothing where there is no record, or where the config has values of other types than the family reads."""
    try:
        return family.facts(config, layer) if family is not None else {}
    except (TypeError, ValueError, AttributeError):
        return {}


def _listed(listed: tuple[str, Any] | None, layer: int) -> str:
    if listed is None or not isinstance(listed[1], list) or layer >= len(listed[1]):
        return ""
    return str(listed[1][layer])


def _mlp(held: list[Entry], config: Mapping[str, Any]) -> str:
    components = {entry.template.component for entry in held}
    if "experts" not in components:
        return "dense" if "dense MLP" in components else ""
    count = _expert_count([entry for entry in held if entry.template.component == "experts"])
    top_k, shared = count_of(config, *_TOP_K), count_of(config, *_SHARED)
    words = ["moe", f"{count} experts" if count is not None else "experts"]
    if top_k is not None:
        words.append(f"top-{top_k.value}")
    if "shared experts" in components:
        words.append(f"+ {shared.value} shared" if shared is not None and shared.value else "+ shared")
    if "dense MLP" in components:
        words.append("+ dense")
    return " ".join(words)


def _attention(held: list[Entry]) -> str:
    """By the words in the layer's names; the first mark that any has counts."""
    texts = [entry.template.text for entry in held]
    word = next((word for mark, word in _ATTENTION_MARKS if any(mark in text for text in texts)), "")
    return f"{word} with indexer" if any(".indexer." in text for text in texts) else word
