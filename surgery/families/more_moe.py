"""More mixture-of-experts decoders.

Read in transformers 5.24 `models/<type>/configuration_<type>.py`, and for vLLM in facts/families.md section 4 (0.33).
"""

from __future__ import annotations

from dataclasses import replace

from surgery.families.dense import FULL, MODEL_LAYERS, SLIDING
from surgery.families.list_rules import IdText
from surgery.families.moe import BEHIND, QWEN_EXPERTS
from surgery.families.rules import Always, Every, FromLayer, Leading, PerLayer, Rule, Switch
from surgery.families.schema import Fact, Family, Mtp, Stack, fact
from surgery.families.sliding import every, types
from surgery.families.special_rules import All, Cycle, DenseThenSparse, Edge, PrefixPattern, Ranged, Spaced, SparseStep

_MOE = fact("mlp", Always("moe"))
_WINDOW = fact("attention", Switch(("sliding_window",), Always(SLIDING), Always(FULL)))
_ONE_DENSE = Cycle(("sparse",), first=("dense",))
_SPARSE = Always("sparse")
_FULL = fact("attention", Always(FULL))


def mlp_types(otherwise: Rule) -> Fact:
    """`mlp_layer_types`, else the rule."""
    return fact("mlp", PerLayer("mlp_layer_types", otherwise))


def leading(field: str, default: int) -> Rule:
    return Leading(field, "dense", "sparse", default=default)


# transformers takes a list, vLLM the count of leading dense layers (and a period).
def _two_readers(default: Rule, count: str = "first_k_dense_replace", first: int = 1) -> Fact:
    return fact(
        "mlp",
        transformers=PerLayer("mlp_layer_types", default),
        vllm=DenseThenSparse(count, "moe_layer_freq", default=first),
    )


def _family(kind: str, *facts: Fact, note: str = "", mtp: Mtp | None = None, stack: Stack = MODEL_LAYERS) -> Family:
    return Family(kind, (kind,), f"transformers models/{kind}{note}", stack, facts, mtp=mtp)


def _per_layer(field: str) -> Fact:
    """A number that may be a list with an entry a layer."""
    return fact(field, PerLayer(field, Always(None), add=False))


_FREQ = DenseThenSparse("first_k_dense_replace", "moe_layer_freq", default=1)
_ERNIE = Ranged("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval", hit="moe", miss="dense")
_EXAONE_PATTERN = Switch(
    ("sliding_window",),
    Every("sliding_window_pattern", FULL, SLIDING, period=4),
    Always(FULL),
    defaults={"sliding_window": 4096},
)
_QWEN2_MOE_WINDOW = Switch(
    ("use_sliding_window",),
    All((Every(None, False, True, period=2), FromLayer("max_window_layers", False, True, default=28)), SLIDING, FULL),
    Always(FULL),
)
_DSA_SCHEDULE = PerLayer(
    "index_topk_pattern",
    Spaced("index_topk_freq", "index_skip_topk_offset"),
    codes={"F": "full", "S": "shared"},
    string=True,
)
_STEP_MOE = PerLayer(
    "mlp_layer_types", IdText("moe_layers_enum", "sparse", "dense", Cycle(("sparse",), first=("dense",) * 3)), tail=True
)

MORE_MOE = (
    *(
        _family(kind, _MOE, _FULL)
        for kind in ("olmoe", "flex_olmo", "granitemoe", "granitemoeshared", "jetmoe", "solar_open", "aria_text")
    ),
    _family("phimoe", _MOE, _WINDOW),
    _family(
        "granitemoe_swa",
        _MOE,
        types(Every(None, FULL, SLIDING, period=4, phase=0)),
        fact("rope_theta", PerLayer("layer_rope_theta", Always(None), add=False)),
    ),
    Family(
        "dbrx",
        ("dbrx",),
        "transformers models/dbrx: experts are flattened into one matrix",
        Stack("text", ("transformer.blocks.", "blocks."), depth="n_layers"),
        (_MOE, _FULL),
    ),
    _family(
        "qwen2_moe",
        fact("mlp", QWEN_EXPERTS),
        types(_QWEN2_MOE_WINDOW),
        note=": the window in every second layer before max_window_layers, unlike qwen2",
    ),
    _family("afmoe", fact("mlp", leading("num_dense_layers", 1)), every("global_attn_every_n_layers", 4)),
    Family(
        "lfm2_moe",
        ("lfm2_moe",),
        "transformers models/lfm2_moe",
        MODEL_LAYERS,
        (
            fact("mlp", leading("num_dense_layers", 2)),
            fact("attention", PerLayer("layer_types", Always(None), add=False)),
        ),
        outside=("model.embed_tokens", "model.embedding_norm"),
    ),
    *(_family(kind, mlp_types(_FREQ), _FULL) for kind in ("axk1",)),
    _family("axk2", mlp_types(_FREQ), types(Always("indexed_attention"))),
    _family("mistral4", fact("mlp", leading("first_k_dense_replace", 0)), _FULL),
    *(
        replace(
            _family(
                kind,
                fact("mlp", leading("first_k_dense_replace", 1)),
                _FULL,
                mtp=Mtp(True, counts=("num_mtp_layers", "num_nextn_predict_layers")),
            ),
            outside=(embedding, "model.norm"),
        )
        for kind, embedding in (("sarvam_mla", "model.embed_tokens"), ("sarvam_moe", "model.word_embeddings"))
    ),
    _family(
        "dots1",
        fact("mlp", leading("first_k_dense_replace", 0)),
        types(Switch(("sliding_window",), FromLayer("max_window_layers", SLIDING, FULL, default=62), Always(FULL))),
    ),
    _family(
        "ernie4_5_moe",
        fact("mlp", _ERNIE),
        _FULL,
        mtp=Mtp(
            prefixes=("model.mtp_block.", "model.mtp_emb_norm.", "model.mtp_hidden_norm.", "model.mtp_linear_proj.")
        ),
    ),
    _family(
        "exaone_moe",
        mlp_types(leading("first_k_dense_replace", 1)),
        types(_EXAONE_PATTERN),
        mtp=Mtp(prefixes=("mtp.",)),
    ),
    _family(
        "cohere2_moe",
        mlp_types(leading("first_k_dense_replace", 0)),
        types(
            PrefixPattern(
                "first_k_dense_replace", "prefix_dense_sliding_window_pattern", "sliding_window_pattern", FULL, SLIDING
            )
        ),
    ),
    _family("glm4_moe_lite", _two_readers(_ONE_DENSE), _FULL, mtp=BEHIND),
    _family("hy_v3", _two_readers(_ONE_DENSE), _FULL, mtp=BEHIND),
    _family(
        "deepseek_v32",
        _two_readers(leading("first_k_dense_replace", 3), first=3),
        types(Always("indexed_attention")),
        fact("indexer", transformers=Always("full"), vllm=_DSA_SCHEDULE),
        mtp=BEHIND,
        note=" has an indexer in every layer; vLLM takes a schedule of shared ones",
    ),
    _family(
        "flint",
        fact("mlp", SparseStep("decoder_sparse_step", "mlp_only_layers", ("num_experts",), default=(0, 1))),
        types(Cycle((SLIDING, FULL, SLIDING, SLIDING), first=(FULL, FULL), last=FULL)),
    ),
    _family("laguna", mlp_types(_ONE_DENSE), types(Always(FULL)), _per_layer("num_attention_heads_per_layer")),
    _family(
        "mellum",
        mlp_types(_SPARSE),
        types(Always(FULL)),
        mtp=Mtp(prefixes=("mtp.",), counts=("num_mtp_layers", "num_nextn_predict_layers")),
    ),
    _family(
        "mimo_v2_flash",
        fact(
            "mlp",
            transformers=PerLayer("mlp_layer_types", _ONE_DENSE),
            vllm=PerLayer("moe_layer_freq", _ONE_DENSE, codes={0: "dense", 1: "sparse"}),
        ),
        fact(
            "attention",
            transformers=PerLayer("layer_types", Cycle((SLIDING,) * 5 + (FULL,), first=(FULL,))),
            vllm=PerLayer(
                "hybrid_layer_pattern", Cycle((SLIDING,) * 5 + (FULL,), first=(FULL,)), codes={0: FULL, 1: SLIDING}
            ),
        ),
        mtp=Mtp(prefixes=("model.mtp.",)),
        note=" ignores hybrid_layer_pattern and moe_layer_freq, which vLLM reads",
    ),
    _family(
        "minimax_m2",
        _MOE,
        fact("attention", PerLayer("attn_type_list", Always(FULL), add=False)),
        mtp=Mtp(prefixes=("model.mtp.",), counts=("num_mtp_modules",)),
    ),
    _family(
        "hunyuan_v1_moe",
        _MOE,
        _FULL,
        *(_per_layer(name) for name in ("moe_topk", "num_shared_expert", "moe_intermediate_size", "num_experts")),
        note=": each of these counts may be one number or one a layer",
    ),
    Family(
        "longcat_flash",
        ("longcat_flash",),
        "transformers models/longcat_flash: num_layers counts layers, num_hidden_layers their attention halves",
        Stack(
            "text",
            ("model.layers.",),
            depth="num_layers",
            spellings=("num_layers",),
            multiples={"num_hidden_layers": 2},
        ),
        (_MOE, _FULL),
        mtp=Mtp(prefixes=("model.mtp.",)),
        misbuilt=(".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"),
    ),
    _family("kolibri1", _MOE, types(Every(None, FULL, SLIDING, period=5))),
    Family(
        "zaya",
        ("zaya",),
        "transformers models/zaya: every router but the first takes the state of the router before it",
        MODEL_LAYERS,
        (_MOE, types(Always(None)), fact("place", Edge())),
    ),
    Family(
        "step3p5",
        ("step3p5",),
        "transformers models/step3p7: lists may go on behind the layers with entries of MTP stages",
        MODEL_LAYERS,
        (
            fact("mlp", _STEP_MOE),
            fact("attention", PerLayer("layer_types", Always(FULL), tail=True)),
            *(
                fact(field, PerLayer(field, Always(None), add=False, tail=True))
                for field in ("swiglu_limits", "swiglu_limits_shared", "rope_theta", "partial_rotary_factors")
            ),
        ),
        mtp=BEHIND,
    ),
)
