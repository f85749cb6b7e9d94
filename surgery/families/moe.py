"""Mixture-of-experts decoders. Read in transformers 5.24 `models/<type>/` and vLLM 0.33 `model_executor/models/`."""

from __future__ import annotations

from surgery.families.dense import FULL, MODEL_LAYERS, SLIDING
from surgery.families.rules import Always, Every, Leading, Listed, PerLayer, Switch
from surgery.families.schema import Family, Mtp, fact
from surgery.families.special_rules import DenseThenSparse, SparseStep

QWEN_EXPERTS = SparseStep("decoder_sparse_step", "mlp_only_layers", ("num_experts", "num_local_experts"))
BEHIND = Mtp(behind=True, same_kind=("mlp",))

# Llama 4 has two readers of two fields: a list of MoE layers, and a step.
_NO_ROPE = PerLayer("no_rope_layers", Every("no_rope_layer_interval", 0, 1, period=4))
_CHUNKED = PerLayer(
    "no_rope_layers",
    Every("no_rope_layer_interval", FULL, "chunked_attention", period=4),
    codes={1: "chunked_attention", 0: FULL},
    add=False,
)
_LLAMA4_STEP = Every("interleave_moe_layer_step", "moe", "dense", period=1)

MOE = (
    Family(
        "mixtral",
        ("mixtral",),
        "transformers models/mixtral",
        MODEL_LAYERS,
        (
            fact("mlp", Always("moe")),
            fact("attention", Switch(("sliding_window",), Always(SLIDING), Always(FULL))),
        ),
    ),
    Family(
        "qwen3_moe",
        ("qwen3_moe", "qwen3_vl_moe_text"),
        "transformers models/qwen3_moe, qwen3_vl_moe; vLLM qwen3_moe.py reads the same two fields",
        MODEL_LAYERS,
        (
            fact("mlp", QWEN_EXPERTS),
            fact(
                "attention",
                Switch(
                    ("use_sliding_window", "sliding_window"),
                    Always(SLIDING),
                    Always(FULL),
                    defaults={"sliding_window": 4096},
                ),
            ),
        ),
        follows=("max_window_layers",),
    ),
    Family(
        "deepseek_v2",
        ("deepseek_v2",),
        "transformers models/deepseek_v2; vLLM deepseek_v2.py also reads moe_layer_freq",
        MODEL_LAYERS,
        (
            fact(
                "mlp",
                transformers=Leading("first_k_dense_replace", "dense", "moe", default=0),
                vllm=DenseThenSparse("first_k_dense_replace", "moe_layer_freq", sparse="moe"),
            ),
        ),
    ),
    Family(
        "deepseek_v3",
        ("deepseek_v3", "kimi_k2"),
        "transformers models/deepseek_v3; vLLM deepseek_v2.py also reads moe_layer_freq, at an MTP layer's index too",
        MODEL_LAYERS,
        (
            fact(
                "mlp",
                transformers=Leading("first_k_dense_replace", "dense", "moe", default=3),
                vllm=DenseThenSparse("first_k_dense_replace", "moe_layer_freq", sparse="moe", default=3),
            ),
        ),
        mtp=BEHIND,
        native="deepseek_v3",
    ),
    Family(
        "glm4_moe",
        ("glm4_moe", "glm4v_moe_text"),
        "transformers models/glm4_moe, glm4v_moe; vLLM glm4_moe.py",
        MODEL_LAYERS,
        (fact("mlp", Leading("first_k_dense_replace", "dense", "moe", default=1)),),
        mtp=BEHIND,
    ),
    Family(
        "gpt_oss",
        ("gpt_oss",),
        "transformers models/gpt_oss: without `layer_types`, every second layer is full; vLLM gpt_oss.py never reads "
        "it (layer_idx % 2 == 0 has the window)",
        MODEL_LAYERS,
        (
            fact("mlp", Always("moe")),
            fact(
                "attention",
                transformers=PerLayer("layer_types", Every(None, FULL, SLIDING, period=2)),
                vllm=Every(None, FULL, SLIDING, period=2),
            ),
        ),
    ),
    Family(
        "llama4",
        ("llama4_text",),
        "transformers models/llama4 reads moe_layers; vLLM llama4.py reads interleave_moe_layer_step",
        MODEL_LAYERS,
        (
            fact("mlp", transformers=Listed("moe_layers", "moe", "dense", _LLAMA4_STEP), vllm=_LLAMA4_STEP),
            fact("rope", _NO_ROPE),
            fact(
                "attention",
                PerLayer(
                    "layer_types",
                    Switch(("attention_chunk_size",), _CHUNKED, Always(FULL), defaults={"attention_chunk_size": 8192}),
                ),
            ),
        ),
    ),
)
