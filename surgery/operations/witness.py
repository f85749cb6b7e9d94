"""Whose word it is that a trim is true: a record's, a named record's, the tensors', or the class's skeleton's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from surgery.errors import CannotApply
from surgery.families.carrying import LayerMap
from surgery.families.generic import generic_family, what_drives
from surgery.families.records import family_named, find_family, model_type, require_family
from surgery.families.schema import Config, Family
from surgery.operations.trim_tensors import Parts, split_layer
from surgery.tiling import Content

_WITNESSES = (
    "--witness skeleton compares the layers of transformers' class, if it has one; "
    "--as TYPE takes the word of another model type's record"
)


def family_for(config: Config | None, named: str, witness: str, operation: str) -> tuple[Family, str]:
    """The family that a trim goes by, and in words whose word it is where it is no record's of its own.

    Raises `CannotApply` where no record speaks of the model type, and nobody else may.
    """
    if config is not None and named:
        return family_named(config, named), f"{model_type(config)!r} is taken for {named}: the word of --as"
    found = find_family(config) if config is not None else None
    if found is not None:
        return found, ""
    if config is None or not model_type(config):
        return require_family(config, operation), ""
    family = generic_family(config, _derived(config) if witness == "skeleton" else None)
    if family is None:
        return require_family(config, operation), ""
    fields = what_drives(config)
    if fields and witness != "skeleton":
        raise CannotApply(
            f"model_type {model_type(config)!r} has no family record, and {', '.join(fields[:5])} may say what its "
            "layers are",
            operation,
            _WITNESSES,
        )
    if witness == "skeleton":
        return family, f"{model_type(config)!r} has no record: the class's skeleton bears witness"
    return family, f"{model_type(config)!r} has no record: the tensors of its layers bear witness"


def _derived(config: Config) -> dict[str, Sequence[Any]]:
    from surgery.skeleton import NoSkeleton, derived_lists

    try:
        return derived_lists(config)
    except NoSkeleton as error:
        raise CannotApply(
            f"there is no skeleton to bear witness: {error}", "--witness skeleton", "use --as TYPE"
        ) from None


def _no_witness(error: Exception, mend: str) -> CannotApply:
    return CannotApply(f"there is no skeleton to bear witness: {error}", "--witness skeleton", mend)


def judge_tensors(tensors: dict[str, Content], parts: Parts, layers: LayerMap) -> None:
    """Without a record, a layer's new place must be one whose layer had the same tensors: code may count from there."""
    held: dict[int, set[tuple[Any, ...]]] = {}
    for layer, names in parts.layers.items():
        held[layer] = {
            (split[1], tensors[name].dtype, tensors[name].shape)
            for name in names
            if (split := split_layer(name, parts.prefix)) is not None
        }
    for place, source in enumerate(layers.kept):
        if held[source] != held[place]:
            raise CannotApply(
                f"layer {source} holds other tensors than layer {place}, whose place it would take, and no record says "
                "whether that is told by the number",
                "trim",
                _WITNESSES,
            )


def judge_skeleton(old: Config, new: Config, family: Family, layers: LayerMap) -> str:
    """Every kept layer of the new config's skeleton is what it was in the old one's. Returns what was compared."""
    from surgery.skeleton import Cut, NoSkeleton, build, difference

    try:
        before, after = build(old, family.native), build(new, family.native)
    except NoSkeleton as error:
        raise CannotApply(
            f"there is no skeleton to bear witness: {error}", "--witness skeleton", "leave it out"
        ) from None
    cut = Cut(family.stack.name, family.section(old)[0], tuple(layers.kept), layers.depth, family.first_only)
    differences = difference(before, after, [cut])
    if differences:
        raise CannotApply(
            f"the class's layers would change: {differences[0]}"
            + (f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""),
            "--witness skeleton",
            "choose layers whose order the config can say: a prefix can, if nothing else",
        )
    return f"{before.library} {before.class_name}: every kept layer is what it was"
