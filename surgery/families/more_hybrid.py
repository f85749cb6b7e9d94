"""More decoders that mix attention with state-space, linear or convolution layers, or share indices.

Read in transformers 5.24 `models/<type>/configuration_<type>.py`.
"""

from __future__ import annotations

from surgery.families.dense import FULL, MODEL_LAYERS, SLIDING
from surgery.families.list_rules import Ordinal, Tiled
from surgery.families.moe import BEHIND
from surgery.families.more_moe import leading, mlp_types
from surgery.families.rules import Always, Every, Leading, Listed, PerLayer
from surgery.families.schema import Family, Memory, Mtp, Reference, Stack, fact
from surgery.families.sliding import types
from surgery.families.special_rules import Cycle, DenseThenSparse, OwnIndex, Spaced

LINEAR, CONV, INDEXED = "linear_attention", "conv", "indexed_attention"
_INDICES = Reference("indices_from", ("indexer", "shared"), ("indexer", "full"))
_ALL_FULL = Always(FULL)

# Kimi Linear counts its layers from 1 in two lists that transformers and vLLM read where layer_types is not given.
_KDA = Listed(
    "linear_attn_config.full_attn_layers",
    FULL,
    LINEAR,
    Cycle((FULL, LINEAR, LINEAR, LINEAR), first=(LINEAR,)),
    base=1,
    add=False,
)
_KDA_LIST = Listed("linear_attn_config.kda_layers", LINEAR, FULL, Always(None), base=1, add=False)

_SWIGLU_LIMITS = (
    "swiglu_limits",
    "swiglu_limits_shared",
    "expert_swiglu_limit_list",
    "share_expert_swiglu_limit_list",
)

MORE_HYBRID = (
    Family(
        "bamba",
        ("bamba",),
        "transformers models/bamba: attention in the listed layers, out of range ids are not noticed",
        MODEL_LAYERS,
        (fact("attention", Listed("attn_layer_indices", "attention", "mamba")),),
    ),
    Family(
        "granitemoehybrid",
        ("granitemoehybrid",),
        "transformers models/granitemoehybrid: layers_block_type is another name of layer_types",
        MODEL_LAYERS,
        (types(PerLayer("layers_block_type", Always(LINEAR), add=False)),),
    ),
    Family(
        "lfm2",
        ("lfm2",),
        "transformers models/lfm2: without layer_types, attention in the layers of full_attn_idxs, or in all",
        MODEL_LAYERS,
        (types(Listed("full_attn_idxs", FULL, CONV, _ALL_FULL)),),
        outside=("model.embed_tokens", "model.embedding_norm"),
    ),
    Family(
        "lfm3",
        ("lfm3",),
        "transformers models/lfm3",
        MODEL_LAYERS,
        (types(Cycle((SLIDING, CONV, FULL, CONV), first=(CONV,))),),
        outside=("model.embed_tokens", "model.embedding_norm"),
    ),
    Family(
        "olmo_hybrid",
        ("olmo_hybrid",),
        "transformers models/olmo_hybrid refuses a config without a full-attention layer",
        MODEL_LAYERS,
        (types(Every(None, FULL, LINEAR, period=4)),),
        at_least_one=("attention", FULL),
    ),
    Family(
        "recurrent_gemma",
        ("recurrent_gemma",),
        "transformers models/recurrent_gemma: block_types is read again and again",
        MODEL_LAYERS,
        (fact("attention", Tiled("block_types", ("recurrent", "recurrent", "attention"))),),
        outside=("model.embed_tokens", "model.final_norm"),
    ),
    Family(
        "lara_mini",
        ("lara_mini",),
        "transformers models/lara_mini",
        MODEL_LAYERS,
        (fact("mlp", Always("moe")), types(Cycle((LINEAR, SLIDING, LINEAR, FULL, SLIDING)))),
    ),
    Family(
        "kimi_linear",
        ("kimi_linear",),
        "transformers models/kimi_linear: two lists that count layers from 1",
        MODEL_LAYERS,
        (
            fact(
                "mlp",
                transformers=PerLayer(
                    "mlp_layer_types", Leading("first_k_dense_replace", "dense", "sparse", default=1)
                ),
                vllm=DenseThenSparse("first_k_dense_replace", "moe_layer_freq", default=1),
            ),
            types(_KDA),
            fact("kda", _KDA_LIST),
        ),
        mtp=BEHIND,
    ),
    Family(
        "bailing_hybrid",
        ("bailing_hybrid",),
        "transformers models/bailing_hybrid (5.25: a limit of the activation for each layer)",
        MODEL_LAYERS,
        (
            mlp_types(leading("first_k_dense_replace", 2)),
            types(Every("layer_group_size", FULL, LINEAR, period=6)),
            *(fact(field, PerLayer(field, Always(None), add=False)) for field in _SWIGLU_LIMITS),
        ),
        mtp=Mtp(behind=True, counts=("num_mtp_layers", "num_nextn_predict_layers")),
        outside=("model.word_embeddings", "model.norm"),
    ),
    Family(
        "hy_v4",
        ("hy_v4",),
        "transformers models/hy_v4",
        MODEL_LAYERS,
        (
            mlp_types(Cycle(("sparse",), first=("dense",))),
            types(Always(INDEXED)),
            fact(
                "indexer",
                PerLayer("indexer_types", Cycle(("shared", "full", "shared", "shared"), first=("full",))),
            ),
        ),
        references=(_INDICES,),
        mtp=Mtp(prefixes=("model.mtp_layers.",)),
    ),
    Family(
        "glm5_next_text",
        ("glm5_next_text",),
        "transformers models/glm5_next: linear layers but every fourth; indexers as GLM-5",
        MODEL_LAYERS,
        (
            mlp_types(Cycle(("sparse",), first=("dense",) * 3)),
            types(Every(None, INDEXED, LINEAR, period=4)),
            fact(
                "indexer",
                PerLayer(
                    "indexer_types",
                    PerLayer(
                        "index_topk_pattern",
                        Spaced("index_topk_freq", "index_skip_topk_offset"),
                        codes={"F": "full", "S": "shared"},
                        add=False,
                    ),
                ),
            ),
        ),
        references=(_INDICES,),
        mtp=BEHIND,
    ),
    Family(
        "qwen4_exp_text",
        ("qwen4_exp_text",),
        "transformers models/qwen4_exp: tables of the n-gram layers depend on their place in ple_layer_ids (from 1)",
        MODEL_LAYERS,
        (
            types(Every("full_attention_interval", INDEXED, LINEAR, period=4)),
            fact("ngram table", Ordinal("ple_layer_ids", base=1)),
        ),
        memory=Memory("ple", ("ple_layer_ids",)),
        mtp=Mtp(
            prefixes=("mtp.",),
            counts=("mtp_num_hidden_layers", "num_nextn_predict_layers"),
            experts_field="mtp_num_experts",
        ),
        outside=("model.embed_tokens",),
    ),
    Family(
        "minimax",
        ("minimax",),
        "transformers models/minimax: the decay of a linear layer is a function of its number and the depth",
        MODEL_LAYERS,
        (
            fact("mlp", Always("moe")),
            types(Every(None, LINEAR, FULL, period=2)),
            fact("slope", OwnIndex(depth=True)),
        ),
    ),
    Family(
        "minimax_m3_vl_text",
        ("minimax_m3_vl_text",),
        "transformers models/minimax_m3_vl: moe_layer_freq and sparse_attention_freq are lists",
        MODEL_LAYERS,
        (
            fact(
                "mlp",
                PerLayer(
                    "mlp_layer_types",
                    PerLayer("moe_layer_freq", Always("sparse"), codes={0: "dense", 1: "sparse"}, add=False),
                ),
            ),
            fact(
                "attention",
                PerLayer(
                    "layer_types",
                    PerLayer(
                        "sparse_attention_config.sparse_attention_freq",
                        Always(FULL),
                        codes={0: FULL, 1: "minimax_m3_sparse"},
                        add=False,
                    ),
                ),
            ),
        ),
        mtp=Mtp(
            prefixes=("language_model.model.mtp.", "model.language_model.mtp.", "model.mtp."),
            counts=("num_mtp_modules",),
        ),
    ),
    Family(
        "xlstm",
        ("xlstm",),
        "transformers models/xlstm",
        Stack("text", ("backbone.blocks.",), spellings=("num_hidden_layers", "num_blocks")),
        (fact("attention", Always("mlstm")),),
    ),
)
