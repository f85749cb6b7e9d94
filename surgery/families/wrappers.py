"""Multimodal wrappers: a text decoder of some family inside, and towers beside it that are stacks of their own.

The text decoder is whatever family its section names; a wrapper says where its section and its tensors lie and what
the towers hand to it. Towers keep all their layers unless they are named (`--layers vision=0-3`). Read in transformers
5.24 `models/<type>/configuration_<type>.py` and `modeling_<type>.py`; tensor prefixes there and in facts/families.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from surgery.families.dense import FULL
from surgery.families.rules import Always, Listed
from surgery.families.schema import Config, Family, LayerIds, Stack, fact
from surgery.families.special_rules import Positions

TEXT_SECTIONS: tuple[tuple[str, ...], ...] = (("text_config",), ("llm_config",), ("language_config",), ())

TEXT_PREFIXES = (
    "model.language_model.layers.",
    "language_model.model.layers.",
    "model.text_model.layers.",
    "model.llm.layers.",
    "language.model.layers.",
    "model.layers.",
    "language_model.layers.",
)

_VISION_DEPTHS = ("num_hidden_layers", "depth", "layers", "n_layers", "num_layers")

_VISION = Family(
    "vision tower",
    (),
    "transformers models/*: the towers of the wrappers",
    Stack(
        "vision",
        (
            "model.visual.blocks.",
            "visual.blocks.",
            "model.vision_tower.vision_model.encoder.layers.",
            "vision_tower.vision_model.encoder.layers.",
            "model.vision_tower.encoder.layers.",
            "vision_tower.encoder.layers.",
            "model.vision_tower.encoder.layer.",
            "vision_tower.encoder.layer.",
            "model.vision_tower.transformer.layers.",
            "vision_tower.transformer.layers.",
            "model.vision_tower.encoder.blocks.",
            "vision_tower.encoder.blocks.",
            "vision_model.encoder.layers.",
            "model.vision_model.encoder.layers.",
            "vision_model.model.layers.",
            "model.visual.vision_model.encoder.layers.",
            "visual.vision_model.encoder.layers.",
            "model.vision_tower.layers.",
            "model.vision_tower.blocks.",
        ),
        sections=(("vision_config",),),
        spellings=_VISION_DEPTHS,
    ),
    (fact("attention", Listed("fullatt_block_indexes", FULL, "window", Always(FULL))),),
    ids=(
        LayerIds("deepstack_visual_indexes"),
        LayerIds("vision_feature_layer", hidden_states=True, top=True),
    ),
)


@dataclass(frozen=True)
class Wrapper:
    """`text` is the model type of the decoder where its section names none. `deepstack` is the field (of the whole
    config) whose entries are inputs of the first text layers, one each."""

    kinds: tuple[str, ...]
    text: str
    prefixes: tuple[str, ...] = TEXT_PREFIXES
    sections: tuple[tuple[str, ...], ...] = TEXT_SECTIONS
    deepstack: tuple[str, ...] = ()
    towers: tuple[Family, ...] = (_VISION,)

    def family(self, config: Config, inner: Family) -> Family:
        """The record of the whole: the decoder's, with this wrapper's places and towers."""
        stack = replace(inner.stack, prefixes=self.prefixes, sections=self.sections)
        facts = inner.fact_list
        count = self._deepstack(config)
        if count:
            facts = (*facts, fact("vision input", Positions(count)))
        present = tuple(tower for tower in self.towers if _holds(config, tower.stack.sections[0]))
        return replace(inner, name=self.kinds[0], stack=stack, fact_list=facts, also=present, native="")

    def _deepstack(self, config: Config) -> int:
        place: Any = config
        for key in self.deepstack:
            place = place.get(key) if isinstance(place, Mapping) else None
        return len(place) if isinstance(place, list) else 0


def _holds(config: Config, path: tuple[str, ...]) -> bool:
    place: Any = config
    for key in path:
        place = place.get(key) if isinstance(place, Mapping) else None
    return isinstance(place, Mapping)


_DEEPSTACK = ("vision_config", "deepstack_visual_indexes")

WRAPPERS = (
    Wrapper(("llava", "llava_next", "llava_next_video", "video_llava", "vipllava"), "llama"),
    Wrapper(("llava_onevision",), "qwen2"),
    Wrapper(("paligemma",), "gemma"),
    Wrapper(("gemma3",), "gemma3_text"),
    Wrapper(("gemma3n",), "gemma3n_text", towers=()),
    Wrapper(("gemma4",), "gemma4_text"),
    Wrapper(("mistral3",), "mistral"),
    Wrapper(("internvl",), "qwen2"),
    Wrapper(("idefics2", "idefics3", "smolvlm"), "llama"),
    Wrapper(("aya_vision", "cohere2_vision"), "cohere2"),
    Wrapper(("aria",), "aria_text"),
    Wrapper(("ovis2",), "qwen2"),
    Wrapper(
        ("qwen2_vl", "qwen2_5_vl"), "qwen2", ("model.language_model.layers.", "model.layers.", "language_model.layers.")
    ),
    Wrapper(("qwen3_vl",), "qwen3_vl_text", ("model.language_model.layers.", "model.layers."), deepstack=_DEEPSTACK),
    Wrapper(("qwen3_vl_moe",), "qwen3_vl_moe_text", ("model.language_model.layers.",), deepstack=_DEEPSTACK),
    Wrapper(("qwen3_5",), "qwen3_5_text", ("model.language_model.layers.", "model.layers.")),
    Wrapper(("qwen3_5_moe",), "qwen3_5_moe_text", ("model.language_model.layers.", "model.layers.")),
    Wrapper(("qwen4_exp",), "qwen4_exp_text", ("model.language_model.layers.", "model.layers.")),
    Wrapper(("glm4v",), "glm4v_text", ("model.language_model.layers.",)),
    Wrapper(("glm4v_moe",), "glm4v_moe_text", ("model.language_model.layers.",)),
    Wrapper(("glm5_next",), "glm5_next_text", ("model.language_model.layers.",)),
    Wrapper(
        ("llama4",), "llama4_text", ("language_model.model.layers.", "model.layers.", "model.language_model.layers.")
    ),
    Wrapper(
        ("mllama",), "mllama_text_model", ("language_model.model.layers.", "model.language_model.layers."), towers=()
    ),
    Wrapper(("kimi_k25", "kimi_vl"), "deepseek_v3"),
    Wrapper(("minimax_m3_vl",), "minimax_m3_vl_text"),
    Wrapper(("step3p7",), "step3p5"),
    Wrapper(("exaone4_5",), "exaone4"),
    Wrapper(("lfm2_vl",), "lfm2"),
)
