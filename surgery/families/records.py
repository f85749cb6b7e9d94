"""Every family there is a record for, and the choice among them."""

from __future__ import annotations

from surgery.errors import CannotApply
from surgery.families.dense import DENSE
from surgery.families.hybrid import HYBRID
from surgery.families.moe import MOE
from surgery.families.schema import Config, Family

FAMILIES: tuple[Family, ...] = (*DENSE, *MOE, *HYBRID)


def model_type(config: Config) -> str:
    value = config.get("model_type")
    return value if isinstance(value, str) else ""


def find_family(config: Config) -> Family | None:
    """The record of the config's model type; None where there is none."""
    kind = model_type(config)
    return next((family for family in FAMILIES if kind in family.model_types), None)


def require_family(config: Config | None, operation: str) -> Family:
    """As `find_family`; raises `CannotApply` where there is none."""
    if config is None:
        raise CannotApply(
            "the source has no config.json, so nobody can say what its layers are",
            operation,
            "put the model's config.json beside its weights",
        )
    family = find_family(config)
    if family is None:
        known = ", ".join(sorted(kind for family in FAMILIES for kind in family.model_types))
        raise CannotApply(
            f"model_type {model_type(config)!r} has no family record yet; there are: {known}"
            if model_type(config)
            else f"config.json has no model_type; known are: {known}",
            operation,
            "repack and rename work on any checkpoint; for this type wait for its record",
        )
    return family
