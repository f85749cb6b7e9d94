"""Decoder-only families whose layers are all `model.layers.{i}.` in one stack.

Read in transformers 5.24 `models/<type>/configuration_<type>.py` and `modeling_<type>.py`, and vLLM 0.33
`model_executor/models/{llama,qwen2,qwen3,qwen3_moe}.py`.
"""

from __future__ import annotations

from surgery.families.schema import Config, Facts, Family, Stack

_STACK = Stack(name="text", prefix="model.layers.", depth="num_hidden_layers", per_layer=("layer_types",))


def _listed_attention(config: Config, layer: int, otherwise: str) -> str:
    """`layer_types` where the file has it: an explicit list wins over the fields it would be derived from."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and layer < len(kinds):
        return str(kinds[layer])
    return otherwise


def _full_attention(config: Config, layer: int) -> Facts:
    return {"mlp": "dense", "attention": _listed_attention(config, layer, "full_attention")}


def _one_window(config: Config, layer: int) -> Facts:
    """Mistral: one window for all layers, or none."""
    window = config.get("sliding_window", 4096) is not None
    return {
        "mlp": "dense",
        "attention": _listed_attention(config, layer, "sliding_attention" if window else "full_attention"),
    }


def _window_from(config: Config, layer: int) -> Facts:
    """Qwen2, Qwen3: with `use_sliding_window`, layers from `max_window_layers` on have the window."""
    window = bool(config.get("use_sliding_window")) and config.get("sliding_window", 4096) is not None
    threshold = config.get("max_window_layers", 28)
    sliding = window and isinstance(threshold, int) and layer >= threshold
    return {
        "mlp": "dense",
        "attention": _listed_attention(config, layer, "sliding_attention" if sliding else "full_attention"),
    }


def _qwen3_moe(config: Config, layer: int) -> Facts:
    """MoE unless the layer is listed in `mlp_only_layers` or its number + 1 is no multiple of `decoder_sparse_step`."""
    step = config.get("decoder_sparse_step", 1)
    listed = config.get("mlp_only_layers")
    dense_layers = listed if isinstance(listed, list) else []
    moe = (
        layer not in dense_layers
        and bool(config.get("num_experts", 128))
        and isinstance(step, int)
        and step > 0
        and (layer + 1) % step == 0
    )
    window = bool(config.get("use_sliding_window")) and config.get("sliding_window", 4096) is not None
    return {
        "mlp": "moe" if moe else "dense",
        "attention": _listed_attention(config, layer, "sliding_attention" if window else "full_attention"),
    }


DECODERS = (
    Family("llama", ("llama",), "transformers models/llama", _STACK, _full_attention),
    Family("mistral", ("mistral",), "transformers models/mistral", _STACK, _one_window),
    Family("qwen2", ("qwen2",), "transformers models/qwen2", _STACK, _window_from),
    Family("qwen3", ("qwen3",), "transformers models/qwen3", _STACK, _window_from),
    Family("qwen3_moe", ("qwen3_moe",), "transformers models/qwen3_moe", _STACK, _qwen3_moe),
)
