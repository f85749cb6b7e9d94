"""Module names in the quantisation sections of a draft, and in the files beside the config, through a renaming."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from surgery.draft import ConfigChange, Draft, Json, SideFile, changed, json_text, noted
from surgery.errors import CannotApply
from surgery.quantization import (
    QUANTIZATION_FILES,
    Move,
    Named,
    carry_named,
    is_numbered,
    named_in_section,
    unlisted_in_section,
)
from surgery.quantization_schemes import Modules, modules_of
from surgery.storage import read_bytes

MAX_LISTING_NBYTES = 64 << 20
Stale = Callable[[str], bool]
"""Whether a text outside the places that are understood would have to change."""


def carry_places(
    document: Json, places: Iterable[Named], modules: Modules, move: Move, rule: str
) -> tuple[list[ConfigChange], list[str]]:
    """Edit `document` in place; the changes, and notes on entries that mean no module."""
    changes, notes = [], []
    for named in places:
        carried = carry_named(named, modules, move)
        path = ".".join(map(str, named.path))
        if carried.dead:
            notes.append(f"{path}: {len(carried.dead)} entries match no module, first {carried.dead[0]}")
        if json.dumps(carried.new) != json.dumps(carried.old):  # Also where only the order is another.
            changes.append(ConfigChange(path, carried.old, carried.new, rule))
            place: Any = document
            for key in named.path[:-1]:
                place = place[key]
            place[named.path[-1]] = carried.new
    return changes, notes


def carry_files(draft: Draft, names: Iterable[str], move: Move, stale: Stale, rule: str) -> Draft:
    """`draft` with the quantisation files beside the config under the new names. `names` are the old tensors'.

    A file that names what would be `stale` in a form that is not understood is refused.
    """
    listing = [side for side in draft.side_files if side.name in QUANTIZATION_FILES]
    modules = modules_of(names) if listing else Modules([], [])
    for side in listing:
        try:
            draft = _carry_file(draft, side, modules, move, stale, rule)
        except CannotApply as error:
            error.where = side.name
            raise
    return draft


def _carry_file(draft: Draft, side: SideFile, modules: Modules, move: Move, stale: Stale, rule: str) -> Draft:
    text = side.text
    if text is None:
        data = read_bytes(draft.roots[side.root] / side.source_name, MAX_LISTING_NBYTES)
        text = data.decode("utf-8", "replace")
    method = QUANTIZATION_FILES[side.name]
    try:
        document = json.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError):
        document = None
    unlisted = [found for found in unlisted_in_section(document, method=method) if stale(found)]
    if unlisted or (not isinstance(document, dict) and is_numbered(text)):
        what = f"{unlisted[0]!r} in a form that" if unlisted else "layers by number, and"
        raise CannotApply(
            f"{side.name} names {what} is not understood",
            side.name,
            "`surgery repack` works on it; remove the file if no engine reads it",
        )
    edited = copy.deepcopy(document)
    changes, notes = carry_places(edited, list(named_in_section(document, method=method)), modules, move, rule)
    for note in notes:
        draft = noted(draft, rule, f"{side.name}: {note}")
    if not changes:
        return draft
    new = msgspec.structs.replace(side, text=json_text(edited, text, side.name))
    told = [msgspec.structs.replace(change, path=f"{side.name}:{change.path}") for change in changes]
    return changed(
        draft,
        side_files=tuple(new if each is side else each for each in draft.side_files),
        config_changes=(*draft.config_changes, *told),
    )
