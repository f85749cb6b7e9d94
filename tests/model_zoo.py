"""A tiny model of any type that transformers has a class for: its default config, shrunk field by field.

`tiny_models` has the models that single tests are written around; here is the breadth: one table of what shrinking by
field names alone does not give (which layers are of which kind, sizes that must fit each other).
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tiny_models

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

DEPTH = 6

_SIZES: dict[str, Any] = {
    "vocab_size": tiny_models.VOCABULARY_SIZE,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "d_ff": 48,
    "d_kv": 8,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "state_size": 8,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "sliding_window": 8,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
    "decoder_start_token_id": 258,
    "tie_word_embeddings": False,
    "use_mamba_kernels": False,
    "num_mtp_layers": 0,
    "num_nextn_predict_layers": 0,
}
_DEPTHS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
)

_LATENT: dict[str, Any] = {"num_key_value_heads": 4}
_WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"] * 2
_LINEAR = ["linear_attention", "full_attention", "linear_attention"] * 2
_DENSE = ["dense", "dense", "sparse", "sparse", "sparse", "sparse"]

_PART = {name: _SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
         "num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window")}  # fmt: skip
_PART |= {"num_hidden_layers": DEPTH, "query_pre_attn_scalar": 8}

_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}

# What a type needs besides: fields that make its layers differ, and sizes that the names above do not cover.
NEEDS: dict[str, dict[str, Any]] = {
    "afmoe": {"num_dense_layers": 2, "global_attn_every_n_layers": 3},
    "axk1": {**_LATENT, "mlp_layer_types": _DENSE},
    "axk2": {**_LATENT, "mlp_layer_types": _DENSE},
    "bailing_hybrid": {**_LATENT, "layer_group_size": 3},
    "bamba": {"attn_layer_indices": [1, 4]},
    "codegen": {"rotary_dim": 8},
    "cohere2": {"sliding_window_pattern": 3},
    "cohere2_moe": {"first_k_dense_replace": 2, "sliding_window_pattern": 3},
    "deepseek_v2": {**_LATENT, "first_k_dense_replace": 2},
    "deepseek_v3": {**_LATENT, "first_k_dense_replace": 2},
    "deepseek_v32": {**_LATENT, "first_k_dense_replace": 2},
    "dots1": {"first_k_dense_replace": 2, "max_window_layers": 3, "sliding_window": 8},
    "ernie4_5_moe": {"moe_layer_start_index": 2, "moe_layer_end_index": 4},
    "exaone4": {"sliding_window_pattern": 3},
    "exaone_moe": {"sliding_window_pattern": 3, "first_k_dense_replace": 2},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": tiny_models.VOCABULARY_SIZE,
        "laurel_rank": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "gemma4_text": {
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": tiny_models.VOCABULARY_SIZE,
        "global_head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "glm4_moe": {"first_k_dense_replace": 2},
    "glm4_moe_lite": {**_LATENT, "mlp_layer_types": _DENSE},
    "glm_moe_dsa": {**_LATENT, "first_k_dense_replace": 2, "index_topk_freq": 3},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 6,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "youtu": {**_LATENT},
    "xglm": {"pad_token_id": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 3]], "window_size": 8},
    "gptj": {"rotary_dim": 8},
    "granite_swa": {"layer_types": _WINDOWS, "layer_rope_theta": [1e4, 0, 1e4, 1e5, 0, 1e5]},
    "granitemoe_swa": {"layer_types": _WINDOWS, "layer_rope_theta": [1e4, 0, 1e4, 1e5, 0, 1e5]},
    "granitemoehybrid": {"layer_types": _LINEAR},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": [1, 2, 1, 2, 2, 1]},
    "hy_v4": {**_LATENT},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_conv": 2},
    "kimi_linear": {**_LATENT, "first_k_dense_replace": 2, "layer_types": _LINEAR},
    "laguna": {
        "layer_types": _WINDOWS,
        "mlp_layer_types": _DENSE,
        "num_attention_heads_per_layer": [4, 2, 4, 4, 2, 4],
    },
    "lfm2": {"full_attn_idxs": [1, 4]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"] * 2},
    "longcat_flash": {**_LATENT, "num_layers": 6, "expert_ffn_hidden_size": 16, "ffn_hidden_size": 48},
    "m2m_100": {"pad_token_id": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "mellum": {"layer_types": _WINDOWS, "mlp_layer_types": _DENSE},
    "minicpm3": {**_LATENT},
    "mistral4": {**_LATENT, "first_k_dense_replace": 2, "head_dim": 16},
    "modernbert-decoder": {"local_attention": 16},
    "plbart": {"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    "glm4v_text": {"head_dim": 16, "rope_parameters": _MROPE | {"partial_rotary_factor": 0.5}},
    "glm4v_moe_text": {
        "head_dim": 16,
        "first_k_dense_replace": 2,
        "rope_parameters": _MROPE | {"partial_rotary_factor": 0.5},
    },
    "glm5_next_text": {
        **_LATENT,
        "qk_rope_head_dim": 0,
        "index_kpool": 2,
        "layer_types": ["linear_attention", "linear_attention", "indexed_attention"] * 2,
        "indexer_types": ["full"] * 6,
        "linear_attn_config": {"head_dim": 8, "num_heads": 4},
    },
    "qwen2_vl_text": {"rope_parameters": _MROPE},
    "qwen2_5_vl_text": {"rope_parameters": _MROPE},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 3},
    "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 4, "mlp_only_layers": [1]},
    "qwen3_moe": {"decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "sarvam_mla": {**_LATENT, "first_k_dense_replace": 2},
    "sarvam_moe": {"first_k_dense_replace": 2},
    "smollm3": {"no_rope_layer_interval": 3, "use_sliding_window": True, "sliding_window": 8},
    "switch_transformers": {"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2},
    "t5gemma": {"encoder": _PART, "decoder": {**_PART, "cross_attention_hidden_size": 32}},
    "t5gemma2": {
        "encoder": {
            "text_config": _PART,
            "vision_config": {
                "hidden_size": 16,
                "num_hidden_layers": 2,
                "intermediate_size": 16,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
        },
        "decoder": _PART,
    },
    "mllama_text_model": {"cross_attention_layers": [3]},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "hc_count": 2,
        "hc_lowrank": 8,
    },
    "xlstm": {"num_blocks": 6, "embedding_dim": 32, "num_heads": 2, "chunk_size": 8},
    "zaya": {"router_hidden_size": 16, "num_experts_per_tok": 1},
    "whisper": {
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "num_mel_bins": 8,
        "max_source_positions": 16,
        "max_target_positions": 64,
    },
}


def config_of(kind: str, **fields: Any) -> PretrainedConfig:
    """The class's default config of `kind`, shrunk, with six layers."""
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind]
    known = made().to_dict()
    known.update(dict.fromkeys(getattr(made, "attribute_map", {})))
    shrunk = {name: value for name, value in _SIZES.items() if name in known}
    shrunk.update({name: DEPTH for name in _DEPTHS if name in known})
    given = {**NEEDS.get(kind, {}), **fields}
    for alias, target in getattr(made, "attribute_map", {}).items():
        # Two names of one field: the one that is asked for counts.
        if (alias in given) != (target in given):
            shrunk.pop(target if alias in given else alias, None)
    return made(**{**shrunk, **given})


_TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "embed_dim": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "depth": 4,
    "num_attention_heads": 2,
    "num_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "projection_dim": 16,
    "out_hidden_size": 32,
    "fullatt_block_indexes": [1, 3],
    "deepstack_visual_indexes": [1],
    "num_position_embeddings": 16,
}
# Wrappers: the text decoder inside, and fields of the wrapper's own.
WRAPPED: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("llama", {"vision_feature_layer": -2}),
    "llava_next": ("mistral", {}),
    "paligemma": ("gemma", {}),
    "gemma3": ("gemma3_text", {}),
    "mistral3": ("mistral", {}),
    "internvl": ("qwen2", {}),
    "idefics3": ("llama", {}),
    "aya_vision": ("cohere2", {}),
    "aria": ("aria_text", {}),
    "qwen2_vl": ("qwen2_vl_text", {}),
    "qwen2_5_vl": ("qwen2_5_vl_text", {}),
    "qwen3_vl": ("qwen3_vl_text", {}),
    "qwen3_vl_moe": ("qwen3_vl_moe_text", {}),
    "qwen3_5": ("qwen3_5_text", {}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}),
    "glm4v": ("glm4v_text", {}),
    "glm4v_moe": ("glm4v_moe_text", {}),
    "glm5_next": ("glm5_next_text", {}),
    "llama4": ("llama4_text", {}),
    "mllama": ("mllama_text_model", {}),
    "kimi_k25": ("deepseek_v3", {}),
    "minimax_m3_vl": ("minimax_m3_vl_text", {}),
    "step3p7": ("step3p5", {}),
    "exaone4_5": ("exaone4", {}),
    "lfm2_vl": ("lfm2", {}),
}


def wrapped_config(kind: str) -> PretrainedConfig:
    """A wrapper around a tiny text decoder, with a tower of four layers."""
    from transformers import CONFIG_MAPPING

    text, fields = WRAPPED[kind]
    made = CONFIG_MAPPING[kind]
    tower = made().to_dict().get("vision_config") or {}
    small = {name: value for name, value in _TOWER.items() if name in tower and tower[name] is not None}
    if "model_type" in tower:
        small["model_type"] = tower["model_type"]
    inner = {key: value for key, value in config_of(text).to_dict().items() if key != "transformers_version"}
    return made(**{"text_config": inner, "vision_config": {**small, **_VISION_NEEDS.get(kind, {})}, **fields})


_VISION_NEEDS: dict[str, dict[str, Any]] = {}


def build(kind: str, directory: Path, *, seed: int = 0, **fields: Any) -> Path:
    """Save a random float32 model of `kind` in several shards."""
    import torch

    tiny_models._quiet()
    torch.manual_seed(seed)
    config = wrapped_config(kind) if kind in WRAPPED else config_of(kind, **fields)
    model = class_of(kind)(config).to(torch.float32)
    tiny_models._randomise(model, seed)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, max_shard_size="20KB")
    return directory


def class_of(kind: str) -> type[PreTrainedModel]:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    for task in ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "CAUSAL_LM"):
        mapping = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING")
        if CONFIG_MAPPING[kind] in mapping:
            found = mapping[CONFIG_MAPPING[kind]]
            return found[0] if isinstance(found, (list, tuple)) else found
    raise KeyError(kind)


def load_strict(directory: Path, kind: str) -> PreTrainedModel:
    """Load with nothing missing, left over or reshaped."""
    import torch

    tiny_models._quiet()
    model, report = class_of(kind).from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    faults = {key: sorted(map(str, value)) for key, value in report.items() if value}
    assert not faults, f"{directory}: transformers loads it with {faults}"
    for tensor in model.state_dict(keep_vars=True).values():
        # Tensors lie in the mapped file where it had room: another alignment, another order of sums.
        tensor.data = tensor.data.clone()
    return model.eval()


def _layers_of(model: PreTrainedModel) -> tuple[Any, str]:
    """The module that holds the decoder's layers, and the attribute's name."""
    import torch

    found = [
        (path, module, name)
        for path, module in model.named_modules()
        for name in ("layers", "h", "blocks", "block")
        if isinstance(held := getattr(module, name, None), torch.nn.ModuleList) and len(held) == DEPTH
    ]
    found = [entry for entry in found if "decoder" in entry[0]] or found
    return found[0][1], found[0][2]


def cut_in_memory(directory: Path, kind: str, layers: list[int]) -> PreTrainedModel:
    """The model with `layers` as its decoder layers: loaded modules, cut with plain Python; see tiny_models."""
    import torch

    model = load_strict(directory, kind)
    holder, name = _layers_of(model)
    config = holder.config if hasattr(holder, "config") else model.config
    held = getattr(holder, name)
    shared = {id(config): config, id(model.config): model.config}
    setattr(holder, name, torch.nn.ModuleList(copy.deepcopy(held[old], shared.copy()) for old in layers))
    first = getattr(holder, name)[0]
    if hasattr(getattr(held[0], "layer", [None])[0], "SelfAttention") and not (
        held[1].layer[0].SelfAttention.has_relative_attention_bias
    ):
        # T5 holds its relative bias in the first block, for all of them.
        for block in getattr(holder, name):
            attention = block.layer[0].SelfAttention
            if attention.has_relative_attention_bias and block is not first:
                attention.has_relative_attention_bias = False
        bias = held[0].layer[0].SelfAttention.relative_attention_bias
        if not first.layer[0].SelfAttention.has_relative_attention_bias:
            first.layer[0].SelfAttention.has_relative_attention_bias = True
            first.layer[0].SelfAttention.relative_attention_bias = bias
    for new, layer in enumerate(getattr(holder, name)):
        for module in layer.modules():
            for attribute in ("layer_idx", "layer_id", "layer_number"):
                if hasattr(module, attribute):
                    setattr(module, attribute, new)
    if hasattr(holder, "cross_attention_layers"):
        holder.cross_attention_layers = [new for new, old in enumerate(layers) if old in holder.cross_attention_layers]
    for field, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == DEPTH and field != "architectures":
            setattr(config, field, [value[old] for old in layers])
    for field in ("num_hidden_layers", "n_layer", "n_layers"):
        if field in vars(config):
            setattr(config, field, len(layers))
    return model


def logits(model: PreTrainedModel) -> Any:
    """float32 logits; on one thread, so equal models give equal bits."""
    import torch

    ids = torch.tensor(tiny_models.INPUT_IDS)
    given: dict[str, Any] = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        given = {"input_ids": ids, "decoder_input_ids": ids}
    if model.main_input_name == "input_features":
        frames = 2 * model.config.max_source_positions
        sound = torch.linspace(-1, 1, model.config.num_mel_bins * frames).reshape(1, -1, frames)
        given = {"input_features": sound, "decoder_input_ids": ids}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            return model.eval()(**given, use_cache=False).logits
    finally:
        torch.set_num_threads(threads)
