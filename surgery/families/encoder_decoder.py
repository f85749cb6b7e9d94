"""Models with an encoder and a decoder: two stacks, each with a count, facts and numbers of its own.

The decoder is the main stack, the encoder is named: `--layers 0,3 --layers encoder=0,1`. Read in transformers 5.24
`models/<type>/modeling_<type>.py`.
"""

from __future__ import annotations

from dataclasses import replace

from surgery.families.dense import FULL, SLIDING
from surgery.families.rules import Always, Every, PerLayer, Rule
from surgery.families.schema import Family, Stack, fact
from surgery.families.special_rules import SparseShare

_BIAS = ("SelfAttention.relative_attention_bias.weight", "EncDecAttention.relative_attention_bias.weight")
"""T5 holds the relative bias in the first block of a stack, for all of them: it moves to the new first block."""


def _pair(
    kinds: tuple[str, ...], source: str, decoder: Stack, encoder: Stack, mlp: tuple[Rule, Rule], **more: object
) -> Family:
    def one(name: str, stack: Stack, rule: Rule) -> Family:
        made = Family(name, (), source, stack, (fact("attention", Always(FULL)), fact("mlp", rule)))
        return replace(made, **more)  # type: ignore[arg-type]

    return replace(
        one(kinds[0], decoder, mlp[0]), model_types=kinds, also=(one(f"{kinds[0]} encoder", encoder, mlp[1]),)
    )


_DENSE = (Always(None), Always(None))
_T5_ENCODER = Stack("encoder", ("encoder.block.",), depth="num_layers", spellings=("num_layers", "num_hidden_layers"))
_T5_DECODER = Stack(
    "decoder", ("decoder.block.",), depth="num_decoder_layers", spellings=("num_decoder_layers",), default="num_layers"
)
_BART_ENCODER = Stack(
    "encoder",
    ("model.encoder.layers.", "encoder.layers."),
    depth="encoder_layers",
    spellings=("encoder_layers", "num_hidden_layers"),
)
_BART_DECODER = Stack(
    "decoder", ("model.decoder.layers.", "decoder.layers."), depth="decoder_layers", spellings=("decoder_layers",)
)


def _gemma(kind: str, source: str, default: Rule, sections: tuple[tuple[str, ...], tuple[str, ...]]) -> Family:
    def one(name: str, part: str, section: tuple[str, ...]) -> Family:
        prefixes = (f"model.{part}.text_model.layers.", f"model.{part}.layers.", f"{part}.layers.")
        return Family(
            name,
            (),
            source,
            Stack(part, prefixes, sections=(section,)),
            (fact("attention", PerLayer("layer_types", default)),),
        )

    decoder, encoder = one(kind, "decoder", sections[0]), one(f"{kind} encoder", "encoder", sections[1])
    return replace(decoder, model_types=(kind,), also=(encoder,))


ENCODER_DECODER = (
    *(
        _pair((kind,), f"transformers models/{kind}", _T5_DECODER, _T5_ENCODER, _DENSE, first_only=_BIAS)
        for kind in ("t5", "mt5")
    ),
    _pair(("umt5",), "transformers models/umt5: every block has a bias of its own", _T5_DECODER, _T5_ENCODER, _DENSE),
    _pair(
        ("switch_transformers",),
        "transformers models/switch_transformers: sparse blocks are spread over the depth",
        _T5_DECODER,
        _T5_ENCODER,
        (
            SparseShare("num_sparse_decoder_layers", "decoder_sparse_step"),
            SparseShare("num_sparse_encoder_layers", "encoder_sparse_step"),
        ),
        first_only=_BIAS,
    ),
    *(
        _pair((kind,), f"transformers models/{kind}", _BART_DECODER, _BART_ENCODER, _DENSE)
        for kind in (
            "bart",
            "mbart",
            "m2m_100",
            "marian",
            "pegasus",
            "blenderbot",
            "blenderbot-small",
            "plbart",
            "whisper",
        )
    ),
    _gemma(
        "t5gemma", "transformers models/t5gemma", Every(None, FULL, SLIDING, period=2), (("decoder",), ("encoder",))
    ),
    _gemma(
        "t5gemma2",
        "transformers models/t5gemma2",
        Every("sliding_window_pattern", FULL, SLIDING, period=6),
        (("decoder",), ("encoder", "text_config")),
    ),
)
