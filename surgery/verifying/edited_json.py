"""A file beside the weights that was edited: the source's JSON with the recorded changes, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from surgery.draft import ALL_KEYS, ConfigChange
from surgery.errors import SourceError
from surgery.storage import read_bytes

_MAX_NBYTES = 64 << 20


def edit_fault(before: Path, after: Path, changes: Iterable[ConfigChange]) -> str | None:
    """What is wrong with `after`, said to be `before` with `changes`; None where nothing is. Order counts: the first
    pattern that fits a module may be the one that counts.
    """
    try:
        document, found = _read(before), _read(after)
    except (SourceError, ValueError, RecursionError) as error:
        return f"cannot be compared: {error}"
    for change in changes:
        if change.keys == [ALL_KEYS]:
            return _renamed_fault(document, found)
        place, last = _inside(document, change.keys)
        if place is None or _text(place[last]) != _text(change.old):
            return f"is said to have had another {'.'.join(change.keys)} than the source has"
        place[last] = change.new
    return None if _text(document) == _text(found) else "is not the source's with the changes that are recorded"


def _renamed_fault(before: Any, after: Any) -> str | None:
    """Other names for the entries of an object, some of them left out: what an entry says is what one of the source
    says, and one that kept its name says what it said."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return "is no object"
    said = {_text(value) for value in before.values()}
    odd = [name for name, value in after.items() if _text(value) not in said]
    return f"says of {odd[0]} what the source says of nothing" if odd else None


def _read(path: Path) -> Any:
    return json.loads(read_bytes(path, _MAX_NBYTES).decode("utf-8-sig"))


def _text(value: Any) -> str:
    return json.dumps(value)


def _inside(document: Any, keys: list[str]) -> tuple[Any, Any]:
    """The object or list that has the value at `keys`, and its last key; None where there is no such value."""
    place: Any = None
    last: Any = None
    for key in keys:
        inner = document if place is None else place[last]
        if isinstance(inner, dict) and key in inner:
            place, last = inner, key
        elif isinstance(inner, list) and key.isdecimal() and int(key) < len(inner):
            place, last = inner, int(key)
        else:
            return None, None
    return place, last
