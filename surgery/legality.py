"""What tensor and expert parallelism an engine can run a checkpoint at: the numbers that must divide, and bytes a rank.

The rules are those of vLLM 0.33 and of Megatron-like engines (facts/tensor-parallel.md): heads are dealt out whole,
key and value heads are dealt out or repeated, feed-forward widths and quantisation blocks are cut, experts go whole to
ranks under expert parallelism.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from surgery.config_reading import count_of, is_count, setting, text_section
from surgery.families.expert_names import COUNTS
from surgery.packed_weights import COMPANIONS

_CUT = re.compile(
    r"\.(?:q_proj|k_proj|v_proj|o_proj|qkv_proj|gate_proj|up_proj|down_proj|gate_up_proj|w1|w2|w3|q_b_proj|kv_b_proj"
    r"|query_key_value|dense_h_to_4h|dense_4h_to_h|wq_b|wo_b|in_proj|out_proj|fc1|fc2|c_fc|c_attn|c_proj)\b"
    r"|(?:SelfAttention|EncDecAttention)\.[qkvo]\.|\.(?:wi|wi_0|wi_1|wo)\.|(?:embed_tokens|lm_head|^embed|^head|wte"
    r"|^shared)\.|\.experts\."
)
_KEY_VALUE = re.compile(r"\.(?:k_proj|v_proj)\.")
_EXPERT = re.compile(r"\.experts\.")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_STACK_HEADS = ("encoder_attention_heads", "decoder_attention_heads")
_WIDTHS = ("intermediate_size", "ffn_hidden_size", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim")
_TOWERS = ("vision_config", "vit_config", "audio_config")


Sized = tuple[str, tuple[int, ...], int]
"""A tensor's name, shape and bytes."""


class Legality(msgspec.Struct):
    """`reasons`: why an engine would refuse; `notes`: what it does besides cutting. `rank_nbytes` is an estimate from
    headers: cut what engines cut, repeat the rest."""

    tensor_parallel: int
    expert_parallel: int
    reasons: list[str]
    notes: list[str]
    rank_nbytes: int


def legality(
    config: Mapping[str, Any], tensors: Iterable[Sized], tensor_parallel: int = 1, expert_parallel: int = 1
) -> Legality:
    """Judge a config for so many ranks. `expert_parallel` 1: experts are cut like any matrix."""
    found = Legality(tensor_parallel, expert_parallel, [], [], 0)
    _judge_heads(config, tensor_parallel, found)
    _judge_linear_heads(config, tensor_parallel, found)
    _judge_groups(config, tensor_parallel, found)
    _judge_widths(config, tensor_parallel, expert_parallel, found)
    _judge_experts(config, tensor_parallel, expert_parallel, found)
    _judge_vocabulary(config, tensor_parallel, found)
    _judge_towers(config, tensor_parallel, found)
    found.rank_nbytes = _rank_nbytes(config, tensors, tensor_parallel, expert_parallel)
    return found


def _works(size: int, limit: int) -> str:
    return ", ".join(str(n) for n in range(1, limit + 1) if size % n == 0)


def _judge_heads(config: Mapping[str, Any], ranks: int, found: Legality) -> None:
    for heads in (count_of(config, *_HEADS), *(count_of(config, field) for field in _STACK_HEADS)):
        if heads is not None and heads.value % ranks:
            found.reasons.append(
                f"{heads.field} is {heads.value}, not divisible by {ranks}; {_works(heads.value, max(ranks, 16))} "
                "would do"
            )
    shared = count_of(config, "num_key_value_heads", "n_head_kv", "num_kv_heads")
    if shared is None or setting(config, "kv_lora_rank") is not None:
        return  # Latent attention has no heads of its own in the cache.
    if shared.value >= ranks and shared.value % ranks:
        found.reasons.append(f"{shared.field} is {shared.value}, not divisible by {ranks}")
    elif shared.value < ranks and ranks % max(1, shared.value):
        found.reasons.append(f"{shared.field} is {shared.value}: {ranks} ranks cannot repeat them evenly")
    elif shared.value < ranks:
        found.notes.append(f"each key and value head is held by {ranks // shared.value} ranks")


_LINEAR_HEADS = ("linear_num_key_heads", "linear_num_value_heads")


def _judge_linear_heads(config: Mapping[str, Any], ranks: int, found: Legality) -> None:
    """Heads of linear attention are dealt whole (vLLM's gated delta net), groups of a mixer too, or one for all."""
    for field in _LINEAR_HEADS:
        heads = count_of(config, field)
        if heads is not None and heads.value and heads.value % ranks:
            found.reasons.append(
                f"{field} is {heads.value}, not divisible by {ranks}; {_works(heads.value, 16)} would do"
            )
    groups = count_of(config, "mamba_n_groups", "n_groups")
    mamba = count_of(config, "mamba_n_heads", "mamba_num_heads")
    if mamba is not None and groups is not None and groups.value > 1 and groups.value % ranks:
        found.reasons.append(f"{groups.field} is {groups.value}: neither 1 nor divisible by {ranks}")


def _judge_groups(config: Mapping[str, Any], ranks: int, found: Legality) -> None:
    """Rows of a quantised matrix are cut at group borders: what goes into an output projection, or comes back down."""
    group, method = _group(config)
    if not group or ranks == 1:
        return
    heads, width = count_of(config, "num_attention_heads", "n_head"), count_of(config, "head_dim")
    hidden = count_of(config, "hidden_size")
    sizes = {
        field: value.value
        for field in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
        if (value := count_of(config, field)) is not None and value.value
    }
    if heads is not None and heads.value and (width is not None or hidden is not None):
        of_heads = heads.value * width.value if width is not None and width.value else hidden.value if hidden else 0
        if setting(config, "kv_lora_rank") is None:
            sizes["num_attention_heads x head_dim"] = of_heads
    for field, size in sizes.items():
        if size % ranks == 0 and (size // ranks) % group:
            told = f"{field} is {size}: {size // ranks} a rank (of {ranks}) is no whole number of groups of {group}"
            # vLLM pads the last block of MXFP4 experts.
            (found.notes if method == "mxfp4" else found.reasons).append(told)


def _group(config: Mapping[str, Any]) -> tuple[int, str]:
    """Inputs that share a scale, and the method; 0 where none do."""
    for key in ("quantization_config", "compression_config"):
        section = setting(config, key)
        given = section[1] if section is not None and isinstance(section[1], dict) else None
        if given is None:
            continue
        method = str(given.get("quant_method", "")).lower()
        if method == "mxfp4":
            return 32, method
        groups = given.get("config_groups")
        first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
        weights = first.get("weights") if isinstance(first, dict) else None
        size = weights.get("group_size") if isinstance(weights, dict) else given.get("group_size")
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            return size, method
        if "FP4" in str(given.get("quant_algo", "")).upper():
            return 16, method
    return 0, ""


def _judge_widths(config: Mapping[str, Any], ranks: int, experts: int, found: Legality) -> None:
    block = _block(config)
    fields = list(_WIDTHS)
    if experts == 1:
        fields += ["moe_intermediate_size", "expert_ffn_hidden_size"]
    shared = setting(config, "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
    widths = {field: text_section(config).get(field) for field in fields}
    if shared is not None:
        widths[shared[0]] = shared[1]
    for field, value in widths.items():
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            continue
        if value % ranks:
            found.reasons.append(
                f"{field} is {value}, not divisible by {ranks}; {_works(value, max(ranks, 16))} would do"
            )
        elif block and ranks > 1 and (value // ranks) % block:
            found.reasons.append(
                f"{field} is {value}: {value // ranks} a rank (of {ranks}) is no whole number of blocks of {block}"
            )


def _block(config: Mapping[str, Any]) -> int:
    for key in ("quantization_config", "compression_config"):
        section = setting(config, key)
        size = section[1].get("weight_block_size") if section is not None and isinstance(section[1], dict) else None
        if isinstance(size, list) and size and isinstance(size[0], int):
            return size[0]
    return 0


def _judge_experts(config: Mapping[str, Any], ranks: int, experts: int, found: Legality) -> None:
    counted = count_of(config, *COUNTS)
    if experts == 1:
        return
    if counted is None or not counted.value:
        found.notes.append("the config counts no experts: expert parallelism has nothing to deal")
    elif counted.value % experts:
        found.reasons.append(
            f"{counted.field} is {counted.value}, not divisible by {experts}; "
            f"{_works(counted.value, max(experts, 16))} would do"
        )


def _judge_vocabulary(config: Mapping[str, Any], ranks: int, found: Legality) -> None:
    rows = count_of(config, "vocab_size")
    if rows is not None and rows.value % (64 * ranks):
        padded = -(-rows.value // (64 * ranks)) * 64 * ranks
        found.notes.append(f"vocab_size {rows.value} is padded to {padded} rows (vLLM: a multiple of 64 a rank)")


def _judge_towers(config: Mapping[str, Any], ranks: int, found: Legality) -> None:
    """Towers may be cut or run whole on every rank (vLLM: `--mm-encoder-tp-mode data`): told, and never a refusal."""
    for name in _TOWERS if ranks > 1 else ():
        section = config.get(name)
        if not isinstance(section, dict):
            continue
        heads = next(
            ((field, section[field]) for field in (*_HEADS, *_STACK_HEADS) if is_count(section.get(field))), None
        )
        if heads is None:
            found.notes.append(f"{name}: its tower was not looked at, nothing counts its heads")
        elif heads[1] % ranks:
            found.notes.append(
                f"{name}.{heads[0]} is {heads[1]}, not divisible by {ranks}: this tower runs whole on every rank "
                "(vLLM: --mm-encoder-tp-mode data)"
            )


def _rank_nbytes(config: Mapping[str, Any], tensors: Iterable[Sized], ranks: int, experts: int) -> int:
    shared = count_of(config, "num_key_value_heads", "n_head_kv", "num_kv_heads")
    heads = min(ranks, shared.value) if shared is not None and shared.value else ranks
    total = 0
    for name, shape, nbytes in tensors:
        parts = 1
        if _EXPERT.search(name):
            parts = experts if experts > 1 else ranks
        elif _KEY_VALUE.search(name):
            parts = heads
        elif _CUT.search(name) and (len(shape) >= 2 or name.rpartition(".")[2] not in COMPANIONS):
            parts = ranks
        total += -(-nbytes // parts)
    return total
