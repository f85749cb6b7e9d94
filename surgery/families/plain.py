"""Decoders whose layers are all of one kind: a table of tensor prefixes.

A window that the config gives counts for every layer. Read in transformers 5.24 `models/<type>/modeling_<type>.py`: no
layer's computation depends on its number, none holds what others do not; tested type by type against the class.
"""

from __future__ import annotations

from dataclasses import replace

from surgery.families.dense import FULL, MODEL_LAYERS, SLIDING
from surgery.families.rules import Always, Switch
from surgery.families.schema import Family, Stack, fact
from surgery.families.special_rules import Edge, OwnIndex

_WINDOW = Switch(("sliding_window",), Always(SLIDING), Always(FULL))
_MAMBA = Always("mamba")
_DECODER = Stack("text", ("model.decoder.layers.", "decoder.layers."))

# Prefixes of the numbered layers -> model types. The second prefix is the one of a model saved without its head.
_BY_PREFIX: dict[tuple[str, ...], tuple[str, ...]] = {
    ("model.layers.", "layers."): (
        "apertus",
        "arcee",
        "bitnet",
        "cohere",
        "doge",
        "ernie4_5",
        "gemma",
        "glm",
        "glm4",
        "glm4v_text",
        "granite",
        "helium",
        "hunyuan_v1_dense",
        "hyperclovax",
        "internlm3",
        "jais2",
        "ministral3",
        "nanochat",
        "nemotron",
        "olmo",
        "olmo2",
        "persimmon",
        "phi",
        "phi3",
        "qwen3_vl_text",
        "seed_oss",
        "stablelm",
        "starcoder2",
        "xglm",
        "youtu",
    ),
    ("transformer.h.", "h."): ("exaone", "bloom", "codegen", "falcon", "gptj", "gpt_bigcode"),
    ("gpt_neox.layers.", "layers."): ("gpt_neox",),
    ("biogpt.layers.", "layers."): ("biogpt",),
    ("transformer.blocks.", "blocks."): ("mpt",),
}
# Without a norm behind the layers, or with one of another name.
_OUTSIDE: dict[str, tuple[str, ...]] = {
    "nanochat": ("model.embed_tokens",),
    "olmo": ("model.embed_tokens",),
    "persimmon": ("model.embed_tokens", "model.final_layernorm"),
    "phi": ("model.embed_tokens", "model.final_layernorm"),
    "xglm": ("model.embed_tokens", "model.layer_norm"),
}
_SPELLINGS = {"mpt": "n_layers", "gptj": "n_layer", "codegen": "n_layer", "bloom": "n_layer", "gpt_bigcode": "n_layer"}


def _plain(kind: str, prefixes: tuple[str, ...]) -> Family:
    stack = Stack("text", prefixes, depth=_SPELLINGS.get(kind, "num_hidden_layers"))
    family = Family(kind, (kind,), f"transformers models/{kind}", stack, (fact("attention", _WINDOW),))
    return replace(family, outside=_OUTSIDE.get(kind, family.outside))


PLAIN = (
    *(_plain(kind, prefixes) for prefixes, kinds in _BY_PREFIX.items() for kind in kinds),
    Family("opt", ("opt",), "transformers models/opt", _DECODER, (fact("attention", Always(FULL)),)),
    Family(
        "gpt2",
        ("gpt2", "gpt-sw3"),
        "transformers models/gpt2: scale_attn_by_inverse_layer_idx divides by the layer's number",
        Stack("text", ("transformer.h.", "h."), depth="n_layer"),
        (
            fact("attention", Always(FULL)),
            fact("scale", Switch(("scale_attn_by_inverse_layer_idx",), OwnIndex(), Always(None))),
        ),
    ),
    Family(
        "diffllama",
        ("diffllama",),
        "transformers models/diffllama: lambda_init is a function of the layer's number",
        MODEL_LAYERS,
        (fact("attention", Always(FULL)), fact("lambda_init", OwnIndex())),
    ),
    Family(
        "gpt_neox_japanese",
        ("gpt_neox_japanese",),
        "transformers models/gpt_neox_japanese: only the last layer has an attention bias",
        Stack("text", ("gpt_neox_japanese.layers.", "layers.")),
        (fact("attention", Always(FULL)), fact("place", Edge(last=True))),
    ),
    Family(
        "falcon_h1",
        ("falcon_h1",),
        "transformers models/falcon_h1: attention and state space in every layer; its multipliers are not per layer",
        MODEL_LAYERS,
        (fact("attention", Always("attention and mamba")),),
    ),
    *(
        Family(
            kind,
            (kind,),
            f"transformers models/{kind}",
            Stack("text", ("backbone.layers.",)),
            (fact("attention", _MAMBA),),
        )
        for kind in ("mamba", "mamba2", "falcon_mamba")
    ),
    Family(
        "rwkv",
        ("rwkv",),
        "transformers models/rwkv: the first block alone normalises its input (pre_ln)",
        Stack("text", ("rwkv.blocks.", "blocks.")),
        (fact("attention", Always("rwkv")), fact("place", Edge())),
    ),
    Family(
        "minicpm3",
        ("minicpm3",),
        "transformers models/minicpm3: every residual is scaled by scale_depth / sqrt(depth)",
        MODEL_LAYERS,
        (fact("attention", Always(FULL)), fact("residual scale", OwnIndex(number=False, depth=True))),
    ),
)
