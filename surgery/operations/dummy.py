"""Dummy: config and assets without weights, for an engine's dummy loading, from the same plan as the real output."""

from __future__ import annotations

import copy
import json
from typing import Any

import msgspec

from surgery.draft import Config, ConfigChange, Draft, changed, with_tensors
from surgery.errors import CannotApply, UsageError

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
        changes = []
        for path, text in self.set.items():
            place: Any = edited
            *parents, last = path.split(".")
            for key in parents:
                place = place.get(key) if isinstance(place, dict) else None
            if not isinstance(place, dict):
                raise UsageError(
                    f"the config has no {'.'.join(parents)}", f"--set {path}", "name an object of the config"
                )
            new = _value(text)
            if last not in place or place[last] != new:
                changes.append(ConfigChange(path, place.get(last), new, "set for a dummy output: lost fidelity"))
                place[last] = new
        return edited, changes


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
