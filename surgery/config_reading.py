"""What a config says, whatever its spelling: counts, flags, quantisation. Unknown shapes of values are no answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from surgery.families.schema import DEPTH_SPELLINGS
from surgery.name_census import Entry

Config = Mapping[str, Any]

_TEXT_SECTIONS = ("text_config", "llm_config", "language_config")
_SECTIONS = {"vision": ("vision_config", "vit_config"), "audio": ("audio_config",)}
_TOWER_DEPTHS = (*DEPTH_SPELLINGS, "depth", "layers", "encoder_layers")
_QUANTIZATION = ("quantization_config", "compression_config")
_COMPANIONS = (
    "weight_scale_inv",
    "weight_scale",
    "weight_scale_2",
    "input_scale",
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "weight_packed",
    "weight_shape",
    "weight_zero_point",
)


class Count(msgspec.Struct, frozen=True):
    """A count and the config field that states it."""

    field: str
    value: int


class Quantization(msgspec.Struct):
    """`field` of the config says `method`; None where tensors look quantised and the config is silent.

    `details` are its plain settings, `excluded` counts the modules it leaves alone, `companions` the tensors that
    belong to packed or scaled weights.
    """

    field: str | None
    method: str | None
    details: dict[str, Any]
    excluded: int
    companions: dict[str, int]


def text_section(config: Config) -> Config:
    """The part that speaks of the text decoder: a nested one where there is one."""
    thinker = config.get("thinker_config")
    for section in (config, thinker if isinstance(thinker, dict) else {}):
        for key in _TEXT_SECTIONS:
            if isinstance(section.get(key), dict):
                return section[key]  # type: ignore[no-any-return]
    return config


def setting(config: Config, *names: str) -> tuple[str, Any] | None:
    """The first of `names` that the text section has, else the top level, with its value."""
    text = text_section(config)
    for section in (text,) if text is config else (text, config):
        for name in names:
            if section.get(name) is not None:
                return name, section[name]
    return None


def count_of(config: Config, *names: str) -> Count | None:
    found = setting(config, *names)
    return Count(*found) if found is not None and is_count(found[1]) else None


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def section_depth(config: Config, role: str) -> Count | None:
    """The depth that a tower's own section of the config states."""
    thinker = config.get("thinker_config")
    for outer in (config, thinker if isinstance(thinker, dict) else {}):
        for name in _SECTIONS.get(role, ()):
            section = outer.get(name)
            for field in _TOWER_DEPTHS:
                if isinstance(section, dict) and is_count(section.get(field)):
                    return Count(f"{name}.{field}", section[field])
    return None


def config_dtype(config: Config) -> str | None:
    found = setting(config, "dtype", "torch_dtype")
    return found[1] if found is not None and isinstance(found[1], str) else None


def tied_embeddings(config: Config) -> bool | None:
    for section in (config, text_section(config)):
        value = section.get("tie_word_embeddings")
        if isinstance(value, bool):
            return value
    return None


def quantization_of(config: Config, entries: Iterable[Entry]) -> Quantization | None:
    companions: dict[str, int] = {}
    for entry in entries:
        leaf = entry.template.text.rpartition(".")[2]
        if leaf in _COMPANIONS or leaf.endswith(("_proj_blocks", "_proj_scales")):
            companions[leaf] = companions.get(leaf, 0) + entry.cell.tensors
    found = setting(config, *_QUANTIZATION)
    if found is None or not isinstance(found[1], dict):
        return Quantization(None, None, {}, 0, companions) if companions else None
    field, settings = found
    method = settings.get("quant_method") or settings.get("quant_algo")
    excluded = sum(
        len(settings[key])
        for key in ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules", "exclude")
        if isinstance(settings.get(key), list)
    )
    details = {
        key: value
        for key, value in settings.items()
        if key != "quant_method"
        and (isinstance(value, str | int | float) or (isinstance(value, list) and all(is_count(v) for v in value)))
        and value != []
    }
    return Quantization(field, method if isinstance(method, str) else None, details, excluded, companions)
