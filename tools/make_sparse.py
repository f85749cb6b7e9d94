"""Real-size checkpoints made of sparse files: true names, dtypes, shapes and shards, almost no disk.

    python tools/make_sparse.py qwen3-235b OUT
    python tools/make_sparse.py deepseek-v3 OUT --no-markers
    python tools/make_sparse.py synthetic OUT --tensors 1000000
    python tools/make_sparse.py path/to/config.json OUT

Each tensor starts with a marker (`marker(name)`, cut to the tensor's size), so a test can tell every tensor
of an output apart without 470 GB of data; a marker costs one disk block. The rest of each file is a hole. The
headers are written here with json and struct alone: nothing is shared with the package under test.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

SHARD_BYTES = 4_000_000_000  # what both publishers used for these models, near enough
MAX_HEADER_BYTES = 100_000_000  # the format's cap
MARKER_BYTES = 16

# Bits of a safetensors dtype, and the rank by which safetensors orders tensors inside a file (its enum, from
# the widest alignment down); among equals by name.
DTYPE_BITS = {"F32": 32, "BF16": 16, "F16": 16, "F8_E4M3": 8}
DTYPE_ORDER = {"F32": 0, "BF16": 1, "F16": 2, "F8_E4M3": 3}

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


def marker(tensor_name: str) -> bytes:
    """The 16 bytes at the start of the tensor with this name (fewer when the tensor is smaller)."""
    return xxhash.xxh3_128_digest(tensor_name.encode())


# ------------------------------------------------------------------------------------------------ configs


def qwen3_235b() -> Config:
    """config.json of Qwen/Qwen3-235B-A22B."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "max_window_layers": 94,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 1536,
        "norm_topk_prob": True,
        "num_attention_heads": 64,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 94,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }


def deepseek_v3() -> Config:
    """config.json of deepseek-ai/DeepSeek-V3."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModel": "modeling_deepseek.DeepseekV3Model",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        },
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 129280,
    }


def synthetic(tensor_count: int, layers: int = 64) -> Config:
    """A valid qwen3_moe config with at least `tensor_count` tensors, at most `3 * layers` more.

    It is there for its count: very many experts per layer, 1 MiB a matrix, the rest as in a small model.
    """
    experts = max(8, math.ceil(((tensor_count - 3) / layers - 9) / 3))  # 9 other tensors per layer, 3 outside
    return qwen3_235b() | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_window_layers": layers,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": experts,
        "num_hidden_layers": layers,
    }


PRESETS = {"qwen3-235b": qwen3_235b, "deepseek-v3": deepseek_v3}


# ------------------------------------------------------------------------------------------------ tensors


def tensors_of(config: Config) -> Iterator[Tensor]:
    """Every tensor of the published checkpoint, in the order of the model's modules."""
    return FAMILIES[config["model_type"]](config)


def _decoder(config: Config) -> Iterator[Tensor]:
    """llama, mistral, qwen2, qwen3 and qwen3_moe: grouped-query attention, SwiGLU or its experts."""
    family = config["model_type"]
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    queries = heads * head_dim
    keys = (config.get("num_key_value_heads") or heads) * head_dim

    def bf16(name: str, *shape: int) -> Tensor:
        return Tensor(name, "BF16", shape)

    def mlp(prefix: str, width: int) -> Iterator[Tensor]:
        yield bf16(f"{prefix}.gate_proj.weight", width, hidden)
        yield bf16(f"{prefix}.up_proj.weight", width, hidden)
        yield bf16(f"{prefix}.down_proj.weight", hidden, width)

    yield bf16("model.embed_tokens.weight", vocabulary, hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for projection, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            yield bf16(f"{at}.self_attn.{projection}.weight", rows, hidden)
            if family == "qwen2":
                yield bf16(f"{at}.self_attn.{projection}.bias", rows)
        yield bf16(f"{at}.self_attn.o_proj.weight", hidden, queries)
        if family in ("qwen3", "qwen3_moe"):
            yield bf16(f"{at}.self_attn.q_norm.weight", head_dim)
            yield bf16(f"{at}.self_attn.k_norm.weight", head_dim)
        if (
            family == "qwen3_moe"
            and layer not in config["mlp_only_layers"]
            and (layer + 1) % config["decoder_sparse_step"] == 0
        ):
            yield bf16(f"{at}.mlp.gate.weight", config["num_experts"], hidden)
            for expert in range(config["num_experts"]):
                yield from mlp(f"{at}.mlp.experts.{expert}", config["moe_intermediate_size"])
        else:
            yield from mlp(f"{at}.mlp", config["intermediate_size"])
        yield bf16(f"{at}.input_layernorm.weight", hidden)
        yield bf16(f"{at}.post_attention_layernorm.weight", hidden)
    yield bf16("model.norm.weight", hidden)
    if not config.get("tie_word_embeddings"):
        yield bf16("lm_head.weight", vocabulary, hidden)


def _deepseek_v3(config: Config) -> Iterator[Tensor]:
    """DeepSeek-V3: FP8 linears with an F32 scale per 128 x 128 block; MTP stages after the last layer."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    heads, latent = config["num_attention_heads"], config["kv_lora_rank"]
    block_rows, block_columns = config["quantization_config"]["weight_block_size"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    layers = config["num_hidden_layers"]

    def bf16(name: str, *shape: int) -> Tensor:
        return Tensor(name, "BF16", shape)

    def fp8(module: str, rows: int, columns: int) -> Iterator[Tensor]:
        yield Tensor(f"{module}.weight", "F8_E4M3", (rows, columns))
        blocks = (math.ceil(rows / block_rows), math.ceil(columns / block_columns))
        yield Tensor(f"{module}.weight_scale_inv", "F32", blocks)

    def mlp(prefix: str, width: int) -> Iterator[Tensor]:
        yield from fp8(f"{prefix}.gate_proj", width, hidden)
        yield from fp8(f"{prefix}.up_proj", width, hidden)
        yield from fp8(f"{prefix}.down_proj", hidden, width)

    yield bf16("model.embed_tokens.weight", vocabulary, hidden)
    for layer in range(layers + config["num_nextn_predict_layers"]):
        at = f"model.layers.{layer}"
        if layer >= layers:
            yield bf16(f"{at}.embed_tokens.weight", vocabulary, hidden)
            yield bf16(f"{at}.enorm.weight", hidden)
            yield bf16(f"{at}.hnorm.weight", hidden)
            yield bf16(f"{at}.eh_proj.weight", hidden, 2 * hidden)
        yield from fp8(f"{at}.self_attn.q_a_proj", config["q_lora_rank"], hidden)
        yield bf16(f"{at}.self_attn.q_a_layernorm.weight", config["q_lora_rank"])
        yield from fp8(f"{at}.self_attn.q_b_proj", heads * (nope + rope), config["q_lora_rank"])
        yield from fp8(f"{at}.self_attn.kv_a_proj_with_mqa", latent + rope, hidden)
        yield bf16(f"{at}.self_attn.kv_a_layernorm.weight", latent)
        yield from fp8(f"{at}.self_attn.kv_b_proj", heads * (nope + value), latent)
        yield from fp8(f"{at}.self_attn.o_proj", hidden, heads * value)
        if layer < config["first_k_dense_replace"]:
            yield from mlp(f"{at}.mlp", config["intermediate_size"])
        else:
            width = config["moe_intermediate_size"]
            yield bf16(f"{at}.mlp.gate.weight", config["n_routed_experts"], hidden)
            yield Tensor(f"{at}.mlp.gate.e_score_correction_bias", "F32", (config["n_routed_experts"],))
            for expert in range(config["n_routed_experts"]):
                yield from mlp(f"{at}.mlp.experts.{expert}", width)
            yield from mlp(f"{at}.mlp.shared_experts", width * config["n_shared_experts"])
        yield bf16(f"{at}.input_layernorm.weight", hidden)
        yield bf16(f"{at}.post_attention_layernorm.weight", hidden)
        if layer >= layers:
            yield bf16(f"{at}.shared_head.norm.weight", hidden)
            yield bf16(f"{at}.shared_head.head.weight", vocabulary, hidden)
    yield bf16("model.norm.weight", hidden)
    yield bf16("lm_head.weight", vocabulary, hidden)


FAMILIES = {
    "llama": _decoder,
    "mistral": _decoder,
    "qwen2": _decoder,
    "qwen3": _decoder,
    "qwen3_moe": _decoder,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
}


# ------------------------------------------------------------------------------------------------ files


def make(name: str, directory: Path, markers: bool = True, *, tensors: int = 100_000) -> Path:
    """Write checkpoint `name` (a preset, `synthetic`, or the path of a config.json); returns `directory`."""
    if name in PRESETS:
        config = PRESETS[name]()
    elif name == "synthetic":
        config = synthetic(tensors)
    else:
        config = json.loads(Path(name).read_text())
    return make_from_config(config, directory, markers)


def make_from_config(config: Config, directory: Path, markers: bool = True, *, shard_bytes: int = SHARD_BYTES) -> Path:
    """Write the sparse checkpoint that `config` describes, in shards of at most `shard_bytes` of tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    shards = list(_packed(tensors_of(config), shard_bytes))
    # DeepSeek's own files count their shards with six digits: model-00001-of-000163.safetensors.
    total_width = 6 if config["model_type"] == "deepseek_v3" else 5
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):0{total_width}d}.safetensors"
        if len(shards) == 1:
            file_name = "model.safetensors"
        _write_shard(directory / file_name, shard, markers)
        weight_map.update((tensor.name, file_name) for tensor in shard)
        total_bytes += sum(tensor.nbytes for tensor in shard)
    if len(shards) > 1:
        # The layout of json.dumps(indent=2), which takes 5 s for a million names where this takes 1 s.
        lines = ",\n".join(f'    "{tensor}": "{weight_map[tensor]}"' for tensor in sorted(weight_map))
        metadata = f'{{\n    "total_size": {total_bytes}\n  }}'
        (directory / "model.safetensors.index.json").write_text(
            f'{{\n  "metadata": {metadata},\n  "weight_map": {{\n{lines}\n  }}\n}}\n'
        )
    _write_json(directory / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
    _write_json(directory / "generation_config.json", {"_from_model_config": True, **ids})
    for module in sorted({entry.split(".")[0] for entry in config.get("auto_map", {}).values()}):
        (directory / f"{module}.py").write_text('"""Stands for the publisher\'s code."""\n')
    return directory


def _packed(tensors: Iterator[Tensor], shard_bytes: int) -> Iterator[list[Tensor]]:
    """Split in order, as `save_pretrained` does: a tensor that does not fit opens the next shard."""
    shard: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.nbytes
    if shard:
        yield shard


def _write_shard(path: Path, shard: list[Tensor], markers: bool) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts: list[tuple[int, bytes]] = []
    end = 0
    for tensor in sorted(shard, key=lambda tensor: (DTYPE_ORDER[tensor.dtype], tensor.name)):
        begin, end = end, end + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (begin, end)}
        if markers:
            starts.append((begin, marker(tensor.name)[: tensor.nbytes]))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"{path.name}: a header of {len(text):,} bytes, over the format's {MAX_HEADER_BYTES:,}")
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.flush()
        data_start = 8 + len(text)
        os.truncate(file.fileno(), data_start + end)
        for begin, mark in starts:
            os.pwrite(file.fileno(), mark, data_start + begin)


def _write_json(path: Path, content: Config) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a real-size checkpoint of sparse files.")
    parser.add_argument("name", help=f"{', '.join(PRESETS)}, synthetic, or the path of a config.json")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--no-markers", action="store_true", help="leave every tensor a hole")
    parser.add_argument("--tensors", type=int, default=100_000, help="of `synthetic`: at least this many")
    options = parser.parse_args()
    if options.directory.exists() and any(options.directory.iterdir()):
        sys.exit(f"error: {options.directory} exists and is not empty")
    make(options.name, options.directory, not options.no_markers, tensors=options.tensors)
    files = sorted(options.directory.glob("*.safetensors"))
    apparent = sum(file.stat().st_size for file in files)
    allocated = sum(file.stat().st_blocks * 512 for file in files)
    sizes = f"{apparent / 1e9:,.1f} GB apparent, {allocated / 1e6:,.1f} MB on disk"
    print(f"{options.directory}: {len(files)} shards, {sizes}")


if __name__ == "__main__":
    main()
