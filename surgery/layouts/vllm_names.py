"""What vLLM calls its parameters where it does not call them as Hugging Face does: a profile a version, literal.

Read from vLLM 0.32.0 itself: each architecture was loaded on the CPU by two ranks and its state saved before kernels
repack it (tools/vllm_oracle.py); names that share storage are saved under the first in the alphabet.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from surgery.errors import CannotApply

NEWEST = "0.32"
FUSED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa")),
)
"""Modules that vLLM joins along their outputs, in this order."""

EXPERTS = "routed_experts"
SCALES = ("_k_scale", "_prob_scale", "_q_scale", "_v_scale")
"""One number each in every attention layer, 1.0 (F32): the engine's own, no part of the model."""


@dataclass(frozen=True)
class Names:
    """`renames`: parts of a name here -> there, in order; `attention`: where a layer's own scales are.

    `wide`: patterns of parameters that are held in F32; `tied`: the name that keeps a tied embedding; `turned`: fused
    experts lie [experts, in, out] in the checkpoint and [experts, out, in] there; `gated`: a query head has a gate of
    its size behind it.
    """

    renames: tuple[tuple[str, str], ...] = ()
    attention: str = "self_attn.attn"
    wide: tuple[str, ...] = ()
    tied: str = "lm_head.weight"
    turned: bool = False
    gated: bool = False


_SHARED = (".mlp.shared_experts.", ".mlp.experts._shared_experts._layer.")
_SHARED_ONE = (".mlp.shared_expert.", ".mlp.experts._shared_experts._layer.")
_SHARED_GATE = (".mlp.shared_expert_gate.", ".mlp.experts._shared_experts._layer.expert_gate.")
_ROUTER = (".mlp.gate.", ".mlp.experts.gate.")
_BIAS = r"e_score_correction_bias$"
_GATED_ROUTER = (
    (".mlp.gate.e_score_correction_bias", ".mlp.experts.routed_experts.e_score_correction_bias"),
    _SHARED,
)
_LATENT = (
    _SHARED,
    _ROUTER,
    (".self_attn.q_b_proj.", ".self_attn.mla_attn.q_b_proj."),
    (".self_attn.q_proj.", ".self_attn.mla_attn.q_proj."),
    (".self_attn.o_proj.", ".self_attn.mla_attn.o_proj."),
    (".self_attn.q_a_layernorm.", ".self_attn.mla_attn.q_a_layernorm."),
)

PROFILES: dict[str, dict[tuple[str, ...], Names]] = {
    "0.32": {
        ("llama", "mistral", "qwen2", "qwen3", "phi3"): Names(),
        ("gemma2",): Names(tied="model.embed_tokens.weight"),
        ("mixtral",): Names(),
        ("qwen3_moe",): Names((_ROUTER,)),
        ("qwen2_moe",): Names((_SHARED_GATE, _SHARED_ONE)),
        ("glm4_moe",): Names(_GATED_ROUTER, wide=(r"\.mlp\.gate\.weight", _BIAS)),
        ("deepseek_v2", "deepseek_v3"): Names(_LATENT, attention="self_attn.mla_attn.mla_attn", wide=(_BIAS,)),
        ("qwen3_next",): Names((_ROUTER, _SHARED_GATE, _SHARED_ONE), wide=(r"\.linear_attn\.A_log",), gated=True),
        ("gpt_oss",): Names(
            ((".self_attn.", ".attn."), (".embed_tokens.", ".embedding.")), attention="attn.attn", turned=True
        ),
    }
}


def names_of(kind: str, profile: str) -> Names:
    """The names of a model type in a version. Raises `CannotApply` for one that was not read."""
    version = profile or NEWEST
    known = PROFILES.get(version)
    if known is None:
        raise CannotApply(f"no name profile {version!r}", "--profile", f"there are {', '.join(PROFILES)}")
    for kinds, names in known.items():
        if kind in kinds:
            return names
    listed = sorted(kind for kinds in known for kind in kinds)
    raise CannotApply(
        f"the names that vLLM {version} gives to {kind!r} are not known",
        "--layout vllm",
        f"they are for {', '.join(listed)}; hf-rank and dcp-hf need none",
    )


def theirs(name: str, names: Names) -> str:
    """vLLM's name of a parameter of ours."""
    for here, there in names.renames:
        if here in name:
            return name.replace(here, there)
    return name


def ours(name: str, names: Names) -> str:
    """The inverse of `theirs`."""
    for here, there in names.renames:
        if there in name:
            return name.replace(there, here)
    return name


def is_wide(name: str, names: Names) -> bool:
    return any(re.search(pattern, name) for pattern in names.wide)
