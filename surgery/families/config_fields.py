"""Fields of a config by name, dotted where they lie in a nested object (`linear_attn_config.kda_layers`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]
Fields = dict[str, Any]


def read(config: Config, field: str, default: Any = None) -> Any:
    """The value of a field; `default` where it, or an object on the way to it, is missing."""
    if field in config:
        return config[field]
    place: Any = config
    for key in field.split("."):
        if not isinstance(place, Mapping) or key not in place:
            return default
        place = place[key]
    return place


def holds(config: Config, field: str) -> bool:
    """Whether the field is there, null or not."""
    missing = object()
    return read(config, field, missing) is not missing


def with_fields(config: Config, fields: Config) -> dict[str, Any]:
    """A copy of `config` with `fields` set; objects on the way are copied, what they hold besides is kept."""
    whole = dict(config)
    for field, value in fields.items():
        if "." not in field or field in whole:
            whole[field] = value
            continue
        place = whole
        *parents, last = field.split(".")
        for key in parents:
            inner = place.get(key)
            place[key] = dict(inner) if isinstance(inner, Mapping) else {}
            place = place[key]
        place[last] = value
    return whole


def number(config: Config, field: str, default: int) -> int:
    """An integer field; the default where it is missing, null or no integer."""
    value = read(config, field)
    return value if isinstance(value, int) and not isinstance(value, bool) else default
