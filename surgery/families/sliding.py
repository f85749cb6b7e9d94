"""Dense decoders with several kinds of attention.

Read in transformers 5.24 `models/<type>/configuration_<type>.py`, whose rule counts where `layer_types` is not given;
vLLM takes transformers' config, so its lists, for all of them.
"""

from __future__ import annotations

from surgery.families.dense import FULL, MODEL_LAYERS, SLIDING
from surgery.families.list_rules import Counted
from surgery.families.rules import Always, Every, Listed, PerLayer, Rule, Switch
from surgery.families.schema import Fact, Family, Mtp, Stack, fact
from surgery.families.special_rules import Cycle, Edge

NO_ROPE = PerLayer("no_rope_layers", Every("no_rope_layer_interval", 0, 1, period=4))


def types(otherwise: Rule) -> Fact:
    """The attention of a layer: `layer_types`, else the rule."""
    return fact("attention", PerLayer("layer_types", otherwise))


def every(field: str | None, period: int) -> Fact:
    """Full attention in the last layer of each period, a window in the others."""
    return types(Every(field, FULL, SLIDING, period=period))


_ROPE_BASE = fact("rope_theta", PerLayer("layer_rope_theta", Always(None), add=False))
_EXAONE = types(
    Switch(
        ("sliding_window",),
        Every("sliding_window_pattern", FULL, SLIDING, period=4),
        Always(FULL),
        defaults={"sliding_window": 4096},
    )
)

_MLLAMA = Cycle((FULL,) * 3 + ("cross_attention",) + (FULL,))


def _family(kind: str, *facts: Fact, note: str = "", mtp: Mtp | None = None) -> Family:
    return Family(kind, (kind,), f"transformers models/{kind}{note}", MODEL_LAYERS, facts, mtp=mtp)


SLIDING_DECODERS = (
    _family("cohere2", every("sliding_window_pattern", 4)),
    _family("olmo3", every(None, 4)),
    _family("vaultgemma", types(Every(None, FULL, SLIDING, period=2))),
    _family("cwm", types(Every(None, FULL, SLIDING, period=4, phase=0)), note=": layers 0, 4, 8 and so on are full"),
    _family("granite_swa", types(Every(None, FULL, SLIDING, period=4, phase=0)), _ROPE_BASE),
    _family("exaone4", _EXAONE, note=": a hub config's pattern may be text, with layer_types beside it"),
    _family(
        "ministral",
        types(Switch(("sliding_window",), Always(SLIDING), Always(FULL), defaults={"sliding_window": 4096})),
    ),
    _family(
        "smollm3",
        fact("rope", NO_ROPE),
        types(
            Switch(
                ("use_sliding_window", "sliding_window"),
                PerLayer(
                    "no_rope_layers",
                    Every("no_rope_layer_interval", SLIDING, FULL, period=4),
                    codes={0: SLIDING, 1: FULL},
                    add=False,
                ),
                Always(FULL),
            )
        ),
        note=": no rotary positions in every fourth layer",
    ),
    Family(
        "modernbert-decoder",
        ("modernbert-decoder",),
        "transformers models/modernbert_decoder: the first layer normalises nothing",
        MODEL_LAYERS,
        (
            types(Every("global_attn_every_n_layers", FULL, SLIDING, period=3, phase=0)),
            fact("place", Edge()),
        ),
        outside=(),
    ),
    Family(
        "mllama_text_model",
        ("mllama_text_model",),
        "transformers models/mllama: cross-attention to the image in the listed layers",
        MODEL_LAYERS,
        (fact("attention", Listed("cross_attention_layers", "cross_attention", FULL, _MLLAMA)),),
    ),
    Family(
        "gpt_neo",
        ("gpt_neo",),
        "transformers models/gpt_neo: attention_types, pairs of kinds and repeats, must add up to the depth; "
        "saved beside their expansion",
        Stack("text", ("transformer.h.", "h."), depth="num_layers"),
        (
            fact("attention", Counted("attention_types", ("global", "local"))),
            fact("attention_layers", PerLayer("attention_layers", Always(None), add=False)),
        ),
    ),
)
