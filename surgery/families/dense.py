"""Decoders without experts. Read in transformers 5.24 `models/<type>/configuration_<type>.py` and `modeling_<type>.py`,
and in vLLM 0.33 `model_executor/models/`."""

from __future__ import annotations

from surgery.families.rules import Always, Every, FromLayer, PerLayer, Switch, Trailing
from surgery.families.schema import DepthSliced, Family, Reference, Stack, fact
from surgery.families.special_rules import FirstTen, Keyed

FULL, SLIDING = "full_attention", "sliding_attention"
MODEL_LAYERS = Stack("text", ("model.layers.",))

# `use_sliding_window` with `max_window_layers`: the window from that layer on.
_QWEN_WINDOW = PerLayer(
    "layer_types",
    Switch(
        ("use_sliding_window", "sliding_window"),
        FromLayer("max_window_layers", SLIDING, FULL, default=28),
        Always(FULL),
        defaults={"sliding_window": 4096},
    ),
)
_GEMMA_KV = Reference("kv_from", ("kv", "shared"), ("kv", "own"), alike="attention")

DENSE = (
    Family("llama", ("llama",), "transformers models/llama", MODEL_LAYERS, (fact("attention", Always(FULL)),)),
    Family(
        "mistral",
        ("mistral",),
        "transformers models/mistral: one window for all layers, `layer_types` is not read",
        MODEL_LAYERS,
        (
            fact(
                "attention",
                Switch(("sliding_window",), Always(SLIDING), Always(FULL), defaults={"sliding_window": 4096}),
            ),
        ),
    ),
    Family(
        "qwen2",
        ("qwen2", "qwen2_vl_text", "qwen2_5_vl_text"),
        "transformers models/qwen2, qwen2_vl; vLLM wants max_window_layers equal to the depth",
        MODEL_LAYERS,
        (fact("attention", _QWEN_WINDOW),),
        follows=("max_window_layers",),
    ),
    Family(
        "qwen3",
        ("qwen3",),
        "transformers models/qwen3",
        MODEL_LAYERS,
        (fact("attention", _QWEN_WINDOW),),
        follows=("max_window_layers",),
    ),
    Family(
        "gemma2",
        ("gemma2",),
        "transformers models/gemma2: without `layer_types`, every second layer is full",
        MODEL_LAYERS,
        (fact("attention", PerLayer("layer_types", Every(None, FULL, SLIDING, period=2))),),
    ),
    Family(
        "gemma3",
        ("gemma3_text",),
        "transformers models/gemma3: without `layer_types`, `sliding_window_pattern` (6)",
        MODEL_LAYERS,
        (fact("attention", PerLayer("layer_types", Every("sliding_window_pattern", FULL, SLIDING, period=6))),),
    ),
    Family(
        "gemma3n",
        ("gemma3n_text",),
        "transformers models/gemma3n: the last `num_kv_shared_layers` take keys and values from the last layer of "
        "their kind before them; embeddings per layer lie in one tensor",
        MODEL_LAYERS,
        (
            fact("attention", PerLayer("layer_types", Every(None, FULL, SLIDING, period=5))),
            fact("kv", Trailing("num_kv_shared_layers", "shared", "own", default=15)),
            fact("intermediate", PerLayer("intermediate_size", Always(None), add=False)),
            fact("sparsity", PerLayer("activation_sparsity_pattern", FirstTen())),
        ),
        references=(_GEMMA_KV,),
        depth_sliced=(
            DepthSliced("embed_tokens_per_layer", axis=1),
            DepthSliced("per_layer_model_projection", axis=0),
        ),
    ),
    Family(
        "gemma4",
        ("gemma4_text",),
        "transformers models/gemma4: as gemma3n, and the last layer is full attention whatever the config says",
        MODEL_LAYERS,
        (
            fact("attention", PerLayer("layer_types", Every(None, FULL, SLIDING, period=6))),
            fact("kv", Trailing("num_kv_shared_layers", "shared", "own", default=0)),
            fact("own_config", Keyed("per_layer_config")),
        ),
        references=(_GEMMA_KV,),
        depth_sliced=(
            DepthSliced("embed_tokens_per_layer", axis=1),
            DepthSliced("per_layer_model_projection", axis=0),
        ),
        last_layer=("attention", FULL),
    ),
)
