"""Dummy: config and assets without weights, for an engine's dummy loading, from the same plan as the real output."""

from __future__ import annotations

import copy
import difflib
import json
from typing import Any

import msgspec

from surgery.draft import Config, ConfigChange, Draft, changed, with_tensors
from surgery.errors import CannotApply, UsageError
from surgery.families.records import find_family

RULE = "dummy: no weights are written"


class Dummy(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="operation", tag="dummy", omit_defaults=True
):
    """Drop every tensor; the config stays what the operations before made of it.

    `set`: config fields to change besides (`a.b` reaches into a nested object), values as JSON or else text. What an
    engine then tests is less than the model: each is recorded as lost fidelity.
    """

    set: dict[str, str] = {}

    def apply(self, draft: Draft) -> Draft:
        config, changes = self._config(draft.config)
        gone = dict.fromkeys(draft.tensors, RULE)
        dummy = with_tensors(draft, {}, gone)
        return changed(dummy, config=config, config_changes=(*draft.config_changes, *changes), dummy=True)

    def _config(self, config: Config | None) -> tuple[Config | None, list[ConfigChange]]:
        if config is None:
            raise CannotApply("there is no config.json, and a dummy output is little else", "dummy", "add the config")
        edited = copy.deepcopy(config)
        family = find_family(config)
        governed = family.known_fields() if family is not None else set()
        changes = []
        for path, text in self.set.items():
            place: Any = edited
            *parents, last = path.split(".")
            for key in parents:
                place = place.get(key) if isinstance(place, dict) else None
            if not isinstance(place, dict):
                raise UsageError(
                    f"{'.'.join(parents)} is {_shown(config, parents)}, no object",
                    f"--set {path}",
                    "set the object itself",
                )
            if last not in place:
                near = difflib.get_close_matches(last, list(place), 1)
                raise UsageError(
                    f"the config has no {path}",
                    f"--set {path}",
                    f"--set {'.'.join([*parents, near[0]])}=..." if near else "--set changes fields that are there",
                )
            if last in governed:
                raise UsageError(
                    f"{path} says what the layers are, which the operations before settle",
                    f"--set {path}",
                    "choose other layers, or edit the source's config",
                )
            new, old = _value(text), place[last]
            if isinstance(new, str) and not text.startswith('"') and not isinstance(old, str | None):
                raise UsageError(
                    f"{path} is {json.dumps(old)}, and {text} is text",
                    f"--set {path}",
                    f"write JSON: true, false, null, a number; --set '{path}=\"{text}\"' for a text",
                )
            if type(old) is not type(new) or old != new:
                changes.append(ConfigChange(path, old, new, "set for a dummy output: lost fidelity"))
                place[last] = new
        return edited, changes


def _shown(config: Config, path: list[str]) -> str:
    place: Any = config
    for key in path:
        if not isinstance(place, dict) or key not in place:
            return "not there"
        place = place[key]
    return json.dumps(place)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
