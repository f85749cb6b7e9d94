"""Decoders that mix attention with state-space or linear layers, share indices or caches, or are written as a string.

Read in transformers 5.24 `models/<type>/` and vLLM 0.33 `model_executor/models/`.
"""

from __future__ import annotations

from surgery.families.dense import FULL, MODEL_LAYERS, SLIDING
from surgery.families.list_rules import ByOrdinal, Ordinal, Owner, Paired
from surgery.families.moe import BEHIND, QWEN_EXPERTS
from surgery.families.rules import Always, Every, Leading, PerLayer
from surgery.families.schema import Family, LayerIds, Memory, Mtp, Reference, Stack, fact
from surgery.families.special_rules import CountedHead, Cycle, DenseThenSparse, Several, Spaced

LINEAR = "linear_attention"
_INTERVAL = PerLayer("layer_types", Every("full_attention_interval", FULL, LINEAR, period=4))

# GLM-5: a string overrides the schedule for both readers; transformers takes a list before it.
_SCHEDULE = Spaced("index_topk_freq", "index_skip_topk_offset")
_INDEX_STRING = PerLayer("index_topk_pattern", _SCHEDULE, codes={"F": "full", "S": "shared"}, string=True)
_INDEX_FIXED = PerLayer("index_topk_pattern", _SCHEDULE, codes={"F": "full", "S": "shared"}, add=False)

_LETTERS = {"M": LINEAR, "E": "moe", "*": FULL, "-": "mlp", "mamba": LINEAR, "attention": FULL}
_PATTERN = PerLayer("hybrid_override_pattern", Always(None), codes=_LETTERS, add=False)

_BLOCKS = PerLayer("layers_block_type", _PATTERN, codes=_LETTERS, add=False)

_COMPRESSED = {
    0: SLIDING,
    4: "compressed_sparse_attention",
    128: "heavily_compressed_attention",
}
_INTERLEAVED = Cycle((_COMPRESSED[128], _COMPRESSED[4]), first=(_COMPRESSED[128],) * 2)
_HASH_HEAD = PerLayer("mlp_layer_types", Leading("num_hash_layers", "hash_moe", "moe", default=3), add=False)

HYBRID = (
    Family(
        "jamba",
        ("jamba",),
        "transformers models/jamba: two periods with offsets; no list",
        MODEL_LAYERS,
        (
            fact(
                "attention",
                Every("attn_layer_period", "attention", "mamba", 8, offset_field="attn_layer_offset", offset=4),
            ),
            fact(
                "mlp",
                Several(
                    "num_experts",
                    Every("expert_layer_period", "moe", "dense", 2, offset_field="expert_layer_offset", offset=1),
                    Always("dense"),
                    default=16,
                ),
            ),
        ),
    ),
    Family(
        "nemotron_h",
        ("nemotron_h",),
        "transformers models/nemotron_h: the depth is the length of layers_block_type, or of the pattern string",
        Stack(
            "text",
            ("backbone.layers.", "model.layers."),
            depth_from=("layers_block_type", "hybrid_override_pattern"),
        ),
        (
            fact(
                "block",
                transformers=_BLOCKS,
                vllm=PerLayer(
                    "hybrid_override_pattern",
                    PerLayer("layers_block_type", Always(None), codes=_LETTERS, add=False),
                    codes=_LETTERS,
                    add=False,
                ),
            ),
            fact("width", ByOrdinal("intermediate_size", _BLOCKS, "mlp")),
        ),
        mtp=Mtp(prefixes=("mtp.",), sublayers="mtp_hybrid_override_pattern"),
    ),
    Family(
        "qwen3_next",
        ("qwen3_next",),
        "transformers models/qwen3_next; vLLM qwen3_next.py, qwen3_next_mtp.py",
        MODEL_LAYERS,
        (fact("attention", _INTERVAL), fact("mlp", QWEN_EXPERTS)),
        mtp=Mtp(prefixes=("mtp.",), same_kind=("mlp",)),
    ),
    Family(
        "qwen3_5",
        ("qwen3_5_text", "qwen3_5_moe_text"),
        "transformers models/qwen3_5, qwen3_5_moe: mtp.* lies at the root, in the wrapper too",
        MODEL_LAYERS,
        (fact("attention", _INTERVAL),),
        mtp=Mtp(prefixes=("mtp.",), counts=("mtp_num_hidden_layers", "num_nextn_predict_layers")),
    ),
    Family(
        "glm_moe_dsa",
        ("glm_moe_dsa",),
        "transformers models/glm_moe_dsa reads indexer_types and mlp_layer_types; vLLM reads index_topk_pattern or the "
        "schedule, and first_k_dense_replace",
        MODEL_LAYERS,
        (
            fact(
                "mlp",
                transformers=PerLayer(
                    "mlp_layer_types", Leading("first_k_dense_replace", "dense", "sparse", default=3), add=False
                ),
                vllm=DenseThenSparse("first_k_dense_replace", "moe_layer_freq", default=3),
            ),
            fact("indexer", transformers=PerLayer("indexer_types", _INDEX_FIXED), vllm=_INDEX_STRING),
            fact("attention", PerLayer("layer_types", Always("indexed_attention"), add=False)),
        ),
        references=(Reference("indices_from", ("indexer", "shared"), ("indexer", "full")),),
        mtp=BEHIND,
    ),
    Family(
        "deepseek_v4",
        ("deepseek_v4", "deepseek_v41", "deepseek_v4_1"),
        "transformers models/deepseek_v4: layer_types, or compress_ratios with a tail for MTP; hash layers lead; 4.1 "
        "(no class, facts/trimming.md 1.4): owners of caches and indices, tables by their place in a list",
        Stack("text", ("layers.", "model.layers."), sections=(("text_config",), ())),
        (
            fact(
                "attention",
                PerLayer(
                    "layer_types",
                    PerLayer("compress_ratios", _INTERLEAVED, codes=_COMPRESSED, add=False, tail=True),
                ),
            ),
            fact("mlp", transformers=_HASH_HEAD, vllm=CountedHead(_HASH_HEAD, "hash_moe", "moe")),
            fact("kv", Owner("kv_source_layer_ids")),
            fact("indices", Owner("index_source_layer_ids")),
            fact("engram", Ordinal("engram_layer_ids")),
            fact("engram rows", Paired("engram_num_embeddings", "engram_layer_ids")),
        ),
        references=(
            Reference("kv_from", ("kv", "shared"), ("kv", "own")),
            Reference("indices_from", ("indices", "shared"), ("indices", "own")),
        ),
        memory=Memory("engram", ("engram_layer_ids", "engram_num_embeddings")),
        mtp=Mtp(prefixes=("mtp.",)),
        ids=(LayerIds("dspark_target_layer_ids"), LayerIds("candidate_source_layer_id")),
        native="deepseek_v4",
    ),
)
