"""The config of a pruned model: every spelling of the count that the file has, and what an engine would refuse."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

from surgery.draft import Config, ConfigChange
from surgery.errors import CannotApply
from surgery.families.config_fields import holds, read, with_fields
from surgery.families.expert_names import (
    CAPACITIES,
    COUNTS,
    GROUP_DEFAULTS,
    GROUPS,
    KERNEL_COUNTS,
    TOP_GROUPS,
    TOP_K,
)
from surgery.families.schema import Family


def pruned_config(
    config: Config, family: Family, before: int, after: int
) -> tuple[Config, list[ConfigChange], list[str]]:
    """`config` with `after` experts where it counted `before`; nothing is added. And notes for a person.

    Raises `CannotApply` where the router could not choose its top-k from what is left.
    """
    path = family.section(config)[0]
    edited = copy.deepcopy(config)
    changes: list[ConfigChange] = []
    counted = False
    section: Any = edited
    for key in path:
        section = section[key]
    _judge_top_k(section, after)
    for place, prefix in ((section, path), *(((edited, ()),) if path else ())):
        for field in (*COUNTS, *CAPACITIES):
            old = read(place, field) if holds(place, field) else None
            counted |= field in COUNTS and (old == before or _list(old, before, after) is not None)
            new = after if old == before and not isinstance(old, bool) else _list(old, before, after)
            if new is not None and new != old:
                changes.append(ConfigChange(".".join((*prefix, field)), copy.deepcopy(old), new, "expert count"))
                place.update(with_fields(place, {field: new}))
    stale = sorted(_stale(edited, before, after, ()))
    if stale:
        raise CannotApply(
            f"{stale[0]} of the config says {before} experts too, and no rule says of which",
            "config.json",
            "correct it by hand first, or remove the field if no engine reads it",
        )
    if not counted:
        raise CannotApply(
            f"the config has no count of {before} experts, so it cannot say how many stay",
            "config.json",
            f"an engine would take its class's own count: write the field that {family.name} reads first",
        )
    notes = []
    if after not in KERNEL_COUNTS:
        notes.append(f"{after} experts: vLLM's top-k kernels are made for {', '.join(map(str, KERNEL_COUNTS))}")
    return edited, changes, notes


def _stale(place: Any, before: int, after: int, path: tuple[str, ...]) -> Iterator[str]:
    """Counts that still say what was before, wherever they lie: MTP heads' own and towers' apart."""
    if before == after:
        return
    if isinstance(place, Mapping):
        for key, value in place.items():
            inside = (*path, str(key))
            named = key in COUNTS or key.endswith(("experts_per_layer", "num_experts_list"))
            if named and (value == before or _list(value, before, after) is not None) and not isinstance(value, bool):
                yield ".".join(inside)
            elif not re.search(r"vision|audio|quantization|mtp", str(key)):
                yield from _stale(value, before, after, inside)
    elif isinstance(place, list) and len(place) <= 1024:
        for number, value in enumerate(place):
            if isinstance(value, Mapping):
                yield from _stale(value, before, after, (*path, str(number)))


def _list(old: Any, before: int, after: int) -> list[int] | None:
    """A list of counts, all of them the old one."""
    if isinstance(old, list) and old and all(value == before for value in old):
        return [after] * len(old)
    return None


def group_count(section: Mapping[str, Any]) -> int:
    """Routing groups: experts are chosen from the best groups first. 1 where routing has none."""
    given = [value for name in GROUPS if isinstance(value := read(section, name), int)]
    return next((value for value in given if value > 1), 1) if given else _default(section)[0]


def _default(section: Mapping[str, Any]) -> tuple[int, int]:
    return GROUP_DEFAULTS.get(str(section.get("model_type")), (1, 1))


def _largest(value: Any) -> int | None:
    """A count, or the largest of one a layer."""
    counts = value if isinstance(value, list) else [value]
    return max(counts) if counts and all(isinstance(count, int) for count in counts) else None


def _judge_top_k(section: Mapping[str, Any], after: int) -> None:
    found = ((name, _largest(read(section, name))) for name in TOP_K)
    top_k = next(((name, value) for name, value in found if value is not None), None)
    if top_k is None:
        return
    groups = group_count(section)
    otherwise = _default(section)[1] if not any(read(section, name) is not None for name in GROUPS) else groups
    chosen = next((value for name in TOP_GROUPS if isinstance(value := read(section, name), int)), otherwise)
    reachable = after if groups == 1 else chosen * (after // groups)
    if top_k[1] > reachable:
        where = f" in {chosen} of {groups} groups" if groups > 1 else ""
        raise CannotApply(
            f"{top_k[0]} is {top_k[1]}, and {reachable} experts{where} are left to choose from",
            "prune",
            f"keep {top_k[1] * groups // max(1, chosen)} experts or more",
        )
    if groups > 1 and after // groups < 2:
        raise CannotApply(
            f"{after} experts in {groups} routing groups: a group is judged by its best two",
            "prune",
            f"keep {2 * groups} experts or more",
        )
