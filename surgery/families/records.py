"""Every family there is a record for, and the choice among them."""

from __future__ import annotations

from difflib import get_close_matches

from surgery.errors import CannotApply, UsageError
from surgery.families.dense import DENSE
from surgery.families.encoder_decoder import ENCODER_DECODER
from surgery.families.hybrid import HYBRID
from surgery.families.moe import MOE
from surgery.families.more_hybrid import MORE_HYBRID
from surgery.families.more_moe import MORE_MOE
from surgery.families.plain import PLAIN
from surgery.families.schema import Config, Family, find_section
from surgery.families.sliding import SLIDING_DECODERS
from surgery.families.wrappers import WRAPPERS

FAMILIES: tuple[Family, ...] = (
    *DENSE,
    *PLAIN,
    *SLIDING_DECODERS,
    *MOE,
    *MORE_MOE,
    *HYBRID,
    *MORE_HYBRID,
    *ENCODER_DECODER,
)
"""One record each; wrappers put one of them inside another model."""

_BY_TYPE = {kind: family for family in FAMILIES for kind in family.model_types}
_WRAPPER_OF = {kind: wrapper for wrapper in WRAPPERS for kind in wrapper.kinds}


def known_types() -> list[str]:
    """Every model type that there is a record for, wrappers too."""
    return sorted({*_BY_TYPE, *_WRAPPER_OF})


def model_type(config: Config) -> str:
    value = config.get("model_type")
    return value if isinstance(value, str) else ""


def find_family(config: Config) -> Family | None:
    """The record of the config's model type; None where there is none. A wrapper's is its text decoder's, with the
    wrapper's places and towers."""
    wrapper = _WRAPPER_OF.get(model_type(config))
    if wrapper is None:
        return _BY_TYPE.get(model_type(config))
    path, section = find_section(config, wrapper.sections)
    kind = model_type(section) if path else ""
    inner = _BY_TYPE.get(kind or wrapper.text)
    return wrapper.family(config, inner) if inner is not None else None


def family_named(config: Config, name: str) -> Family:
    """The record of the model type `name`, for a config of another. Raises `UsageError` where there is none."""
    found = find_family({**config, "model_type": name})
    if found is None:
        known = known_types()
        near = get_close_matches(name, known, 5, 0.5)
        mend = f"did you mean {', '.join(near)}?" if near else "name the model_type of a family that is known"
        raise UsageError(f"there is no record of the model type {name!r}, of {len(known)} known", "--as", mend)
    return found


def require_family(config: Config | None, operation: str, named: str = "") -> Family:
    """As `find_family`, or the record of the model type `named`; raises `CannotApply` where there is none."""
    if config is None:
        raise CannotApply(
            "the source has no config.json, so nobody can say what its layers are",
            operation,
            "put the model's config.json beside its weights",
        )
    family = family_named(config, named) if named else find_family(config)
    if family is None:
        raise CannotApply(
            f"model_type {model_type(config)!r} has no family record"
            if model_type(config)
            else "config.json has no model_type, so nobody can say what its layers are",
            operation,
            "--as TYPE takes another model type's record for it; repack and rename work on any checkpoint",
        )
    return family
