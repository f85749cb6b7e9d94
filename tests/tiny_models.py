"""Tiny random models, built and saved by transformers' own classes, and the oracle for cutting them.

The files are what a publisher would upload (true tensor names, several shards, an index), so a test that
passes here says something about real checkpoints. `cut_in_memory` is the other half of the proof: the same
model, cut with plain Python on loaded modules, shares nothing with the code under test.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

VOCABULARY_SIZE = 272  # 256 bytes and the special tokens of `add_tokenizer`, rounded up to a multiple of 16
INPUT_IDS = [[1, 17, 42, 99, 3, 255, 128, 64, 7, 200, 31, 88, 5, 5, 260, 12]]

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}

_LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

# Families whose layers are all of one kind: name -> (model type, config fields).
_UNIFORM: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    # The window is shorter than INPUT_IDS, so a lost `sliding_window` changes the logits.
    "mistral": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 8, "num_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": [], **_EXPERTS},
    ),
}
# Families with layers of several kinds.
_MIXED: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "first_k_dense_replace": 2,
            "num_nextn_predict_layers": 0,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            **_EXPERTS,
        },
    ),
    "qwen3_moe_dense": (
        "qwen3_moe",
        {"head_dim": 8, "num_experts": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], **_EXPERTS},
    ),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v2": (
        "deepseek_v2",
        {
            "num_key_value_heads": 4,
            "first_k_dense_replace": 2,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            **_LATENT,
            **_EXPERTS,
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            "num_nextn_predict_layers": 0,
            "first_k_dense_replace": 2,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "head_dim": 8,
            **_EXPERTS,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 8},
    ),
    "gemma2": ("gemma2", {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gemma3_text": (
        "gemma3_text",
        {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8, "sliding_window_pattern": 3},
    ),
    "gemma3n_text": (
        "gemma3n_text",
        {
            "head_dim": 8,
            "sliding_window": 8,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 4,
            "vocab_size_per_layer_input": VOCABULARY_SIZE,
            "laurel_rank": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
        },
    ),
    "jamba": (
        "jamba",
        {
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 4,
            "mamba_d_conv": 2,
            "mamba_expand": 2,
            "use_mamba_kernels": False,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            "head_dim": 8,
            "num_experts": 4,
            "full_attention_interval": 3,
            "mlp_only_layers": [1],
            "shared_expert_intermediate_size": 16,
            **_LINEAR,
            **_EXPERTS,
        },
    ),
    "qwen3_5_moe_text": (
        "qwen3_5_moe_text",
        {"head_dim": 8, "num_experts": 4, "shared_expert_intermediate_size": 16, **_LINEAR, **_EXPERTS},
    ),
    "llama4_text": (
        "llama4_text",
        {
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 3,
            "attention_chunk_size": 8,
        },
    ),
    "glm_moe_dsa": (
        "glm_moe_dsa",
        {
            "num_key_value_heads": 4,
            "first_k_dense_replace": 2,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "index_topk": 8,
            "index_head_dim": 16,
            "index_n_heads": 2,
            "index_topk_freq": 3,
            "index_skip_topk_offset": 2,
            **_LATENT,
            **_EXPERTS,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "hybrid_override_pattern": "M-M*ME",
            "head_dim": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
            "conv_kernel": 2,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "moe_shared_expert_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
            "use_mamba_kernels": False,
            **_EXPERTS,
        },
    ),
    "deepseek_v4": (
        "deepseek_v4",
        {
            "head_dim": 16,
            "q_lora_rank": 16,
            "o_lora_rank": 8,
            "o_groups": 2,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_key_value_heads": 1,
            "qk_rope_head_dim": 8,
            "num_hash_layers": 2,
            "compress_ratios": [0, 0, 4, 128, 4, 128],
            "sliding_window": 8,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_topk": 4,
            "num_nextn_predict_layers": 0,
            **_EXPERTS,
        },
    ),
}


def families() -> list[str]:
    """The families whose layers are all of one kind."""
    return list(_UNIFORM)


def mixed_families() -> list[str]:
    """The families that have layers of several kinds."""
    return list(_MIXED)


def model_type_of(name: str) -> str:
    """The `model_type` of a model that `build` makes."""
    return {**_UNIFORM, **_MIXED}[name][0]


def fields_of(name: str) -> dict[str, Any]:
    """The config fields of a model that `build` makes, but its depth."""
    return {**_COMMON, **{**_UNIFORM, **_MIXED}[name][1]}


def build(
    family: str,
    directory: Path,
    layers: int = 6,
    *,
    seed: int = 0,
    max_shard_size: str = "20KB",
    **config_overrides: Any,
) -> Path:
    """Save a random float32 model of `family` in `directory`, in several shards, and return `directory`.

    The same arguments give the same bytes. `config_overrides` are config fields, such as `num_experts=8`.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    _quiet()
    model_type, fields = {**_UNIFORM, **_MIXED}[family]
    config = AutoConfig.for_model(model_type, **{**_COMMON, **fields, "num_hidden_layers": layers, **config_overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _randomise(model, seed)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def add_tokenizer(directory: Path) -> None:
    """Add a tokenizer that maps every byte to its own id: made without a network, loaded by AutoTokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # The special tokens take the ids 256, 257 and 258, in this order: `_COMMON` names them.
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>"])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(directory)


def cut_in_memory(directory: Path, layers: list[int]) -> PreTrainedModel:
    """The model of `directory` with `layers` as its decoder layers, in this order, cut with loaded modules.

    A layer named twice is a copy, with its own cache slot. A list of layer kinds in the config is cut along,
    because the forward pass reads it by index; fields that only say how layers are built (a count of dense
    layers, a period) stay, so the result of a mixed family runs but its config would not rebuild it.
    """
    import torch

    model = load_strict(directory)
    decoder = model.get_decoder()
    decoder = decoder if hasattr(decoder, "layers") else decoder.model
    config = model.config
    depth = len(decoder.layers)
    shared = {id(config): config}  # deepcopy leaves what its memo holds: copies go on reading the one config
    decoder.layers = torch.nn.ModuleList(copy.deepcopy(decoder.layers[old], shared.copy()) for old in layers)
    for new, layer in enumerate(decoder.layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = new
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == depth and name != "architectures":
            setattr(config, name, [value[old] for old in layers])
    config.num_hidden_layers = len(layers)
    return model


def load_strict(directory: Path) -> PreTrainedModel:
    """Load `directory` in float32 with the class its config names: nothing missing, left over or reshaped."""
    import torch
    from transformers import AutoModelForCausalLM

    _quiet()
    model, report = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    faults = {key: sorted(map(str, value)) for key, value in report.items() if value}
    assert not faults, f"{directory}: transformers loads it with {faults}"
    return model.eval()


def logits(model: PreTrainedModel) -> torch.Tensor:
    """float32 logits [1, 16, vocabulary] of `INPUT_IDS`; on one thread, so equal models give equal bits."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            return model.eval()(input_ids=torch.tensor(INPUT_IDS), use_cache=False).logits
    finally:
        torch.set_num_threads(threads)


def tensor_names(directory: Path) -> list[str]:
    """The stored tensor names, as the index lists them (all models built here have several shards)."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return sorted(index["weight_map"])


def _randomise(model: PreTrainedModel, seed: int) -> None:
    """Give every stored tensor its own values.

    As initialised, norms are ones and biases zeros in all layers: one in the wrong place would not show.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    stored = model.state_dict(keep_vars=True)
    seen: set[int] = set()
    for name in sorted(stored):
        tensor = stored[name]
        if tensor.data_ptr() in seen or not tensor.is_floating_point():
            continue
        seen.add(tensor.data_ptr())
        noise = torch.randn(tensor.shape, generator=generator)
        centre = 1.0 if tensor.dim() == 1 and name.endswith("norm.weight") else 0.0
        tensor.data.copy_(centre + 0.15 * noise)


def _quiet() -> None:
    """No progress bars and no network: test output is for failures."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
