"""A model type that no record speaks of: a family made of what its config shows, and whose word that needs.

Lists with an entry a layer are cut along. A field that may drive what a layer is in a way that only the architecture's
code knows (a period, a threshold, ids of layers) makes a witness necessary: the class's skeleton, or a person who says
which known family it is like.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from surgery.families.rules import Always, PerLayer
from surgery.families.schema import DEPTH_SPELLINGS, Config, Family, Mtp, Stack, fact, find_section
from surgery.families.wrappers import TEXT_PREFIXES, TEXT_SECTIONS

PREFIXES = (
    *TEXT_PREFIXES,
    "transformer.h.",
    "h.",
    "transformer.layers.",
    "transformer.blocks.",
    "backbone.layers.",
    "gpt_neox.layers.",
    "model.decoder.layers.",
    "decoder.layers.",
    "layers.",
)

PER_LAYER_NAME = re.compile(r"layer|_types|pattern|freq|ratios|block|indexer")
_DRIVING_NAME = re.compile(
    r"pattern|interval|freq|period|every|_step|first_|dense_layers|shared_layers|share|group_size|alternat|stride"
    r"|start_index|end_index|_offset$|skip_|window|chunk|local|global|ratio|nope_layer|no_rope|use_nope|hybrid|prefix|suffix|inverse_layer|_map"
)
"""Also of flags: an inverse layer index, rope on every other layer."""
_IDS_NAME = re.compile(r"layer|idx|indices|_ids$")
_HARMLESS = frozenset(("layer_norm_eps", "layer_norm_epsilon", "layerdrop", "initializer_range", "eos_token_id"))


def generic_family(config: Config, derived: Mapping[str, Sequence[Any]] | None = None) -> Family | None:
    """The family of a config without a record; None where nothing counts its layers. `derived` are lists with an entry
    a layer that the class makes of the config: they are written where the config has none."""
    path, section = find_section(config, TEXT_SECTIONS)
    counted = next((name for name in DEPTH_SPELLINGS if isinstance(section.get(name), int)), None)
    if counted is None:
        return None
    depth = section[counted]
    fields = [name for name in section if _is_per_layer(name, section[name], depth)]
    facts = [fact(name, PerLayer(name, Always(None), add=False)) for name in fields]
    facts += [
        fact(name, PerLayer(name, Given(tuple(values))))
        for name, values in (derived or {}).items()
        if name not in section
    ]
    return Family(
        f"unknown ({config.get('model_type')})",
        (),
        "no record: lists that the config shows",
        Stack("text", PREFIXES, sections=(path,), depth=counted),
        tuple(facts),
        mtp=Mtp(
            behind=True,
            prefixes=("mtp.", "model.mtp.", "model.mtp_layers."),
            counts=("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers"),
        ),
    )


class Given:
    """What the class made of the old config; of a new one nothing is known, so the list is written."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values

    def value(self, config: Config, layer: int, depth: int) -> Any:
        return self.values[layer] if depth == len(self.values) and layer < depth else None

    def express(self, carry: Any) -> None:
        return None


def _is_per_layer(name: str, value: Any, depth: int) -> bool:
    if not isinstance(value, (list, str)) or len(value) != depth or not PER_LAYER_NAME.search(name):
        return False
    return isinstance(value, str) or not is_ids(value, depth)


def is_ids(values: Sequence[Any], depth: int) -> bool:
    """Whether a list holds numbers of layers."""
    whole = all(isinstance(value, int) and not isinstance(value, bool) and -1 <= value <= depth for value in values)
    return bool(values) and whole and len(set(values)) == len(values) and set(values) != {0, 1}


def what_drives(config: Config) -> list[str]:
    """Fields of the text section that may say what a layer is, in a way that only the architecture's code knows."""
    section = find_section(config, TEXT_SECTIONS)[1]
    depth = next((section[name] for name in DEPTH_SPELLINGS if isinstance(section.get(name), int)), 0)
    return [
        name
        for name, value in section.items()
        if name not in _HARMLESS and "expert" not in name and _drives(name, value, depth)
    ]


def _drives(name: str, value: Any, depth: int, inside: bool = False) -> bool:
    """Whether a field may say what single layers are. `inside` another field: what is said of layers there is nobody's
    to carry, a list with an entry for each of them too."""
    if value in (None, False, 0, "", [], {}):
        return False
    if isinstance(value, list):
        each = len(value) == depth and depth > 1
        return bool(each or PER_LAYER_NAME.search(name) or (_IDS_NAME.search(name) and is_ids(value, depth)))
    if isinstance(value, Mapping):
        if name.endswith("quantization_config") or name == "compression_config" or "label" in name or "rope" in name:
            return False
        if all(str(key).isdecimal() for key in value):
            return True
        return any(_drives(str(key), inner, depth, inside=True) for key, inner in value.items())
    if isinstance(value, str):
        named = bool(_DRIVING_NAME.search(name))
        return named or (len(value) == depth > 1 and bool(re.fullmatch(r"[A-Z*|-]+", value)))
    if isinstance(value, bool):
        return bool(_DRIVING_NAME.search(name))
    return isinstance(value, int) and bool(_DRIVING_NAME.search(name))
