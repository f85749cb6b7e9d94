"""Rename: other names for tensors, and for the modules that the config's quantisation lists name."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import msgspec

from surgery.draft import Config, ConfigChange, Draft, changed
from surgery.errors import CannotApply, Problems, UsageError
from surgery.quantization import QUANTIZATION_KEYS
from surgery.tiling import Content

_PATTERN_MARKS = re.compile(r"^re:|[*\\^$?\[\]()|+]")


class Rename(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="operation", tag="rename"):
    """`map`: old -> new. Old is a whole name or a dotted prefix; with `regex` a pattern (`re.sub` on each name).

    The first entry that matches a name is the one that counts.
    """

    map: dict[str, str]
    regex: bool = False

    def apply(self, draft: Draft) -> Draft:
        rename = self._renamer()
        tensors: dict[str, Content] = {}
        problems = Problems()
        matched = 0
        for name, content in draft.tensors.items():
            new = rename(name)
            matched += new != name
            if new in tensors:
                problems.add(f"{name} would become {new}, which is there already", "rename", "choose other names")
            if not new or new == "__metadata__":
                problems.add(f"{name} would become {new!r}, which is no tensor name", "rename", "choose other names")
            tensors[new] = content
        problems.raise_if_any(CannotApply)
        if not matched:
            raise CannotApply(
                f"no tensor matches {', '.join(map(repr, self.map))}",
                "rename",
                "`surgery inspect SRC --tensors` lists the names; OLD is a whole name or a dotted prefix",
            )
        config, changes = self._config(draft.config, rename)
        return changed(draft, tensors=tensors, config=config, config_changes=(*draft.config_changes, *changes))

    def _renamer(self) -> Callable[[str], str]:
        if not self.map:
            raise UsageError("an empty rename map", "rename", "give --map OLD=NEW")
        if not self.regex:
            return lambda name: _by_prefix(self.map, name)
        try:
            patterns = [(re.compile(old), new) for old, new in self.map.items()]
        except re.error as error:
            raise UsageError(f"not a pattern: {error}", "rename", "write a Python regular expression") from error

        def by_pattern(name: str) -> str:
            for pattern, new in patterns:
                try:
                    replaced, count = pattern.subn(new, name)
                except (re.error, IndexError) as error:
                    raise UsageError(f"{new!r} cannot be filled in: {error}", "rename", "use \\1 for groups") from error
                if count:
                    return replaced
            return name

        return by_pattern

    def _config(self, config: Config | None, rename: Callable[[str], str]) -> tuple[Config | None, list[ConfigChange]]:
        """Module names in the quantisation lists follow their tensors; a pattern that may mean them is refused."""
        if config is None or not any(key in config for key in QUANTIZATION_KEYS):
            return config, []
        edited = copy.deepcopy(config)
        changes: list[ConfigChange] = []
        for key in QUANTIZATION_KEYS:
            if key in edited:
                edited[key] = self._renamed_modules(edited[key], key, rename, changes)
        return edited, changes

    def _renamed_modules(self, value: Any, path: str, rename: Callable[[str], str], changes: list[ConfigChange]) -> Any:
        if isinstance(value, dict):
            return {k: self._renamed_modules(v, f"{path}.{k}", rename, changes) for k, v in value.items()}
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            return value
        renamed = [self._renamed_module(entry, path, rename) for entry in value]
        if renamed != value:
            changes.append(ConfigChange(path, value, renamed, "rename"))
        return renamed

    def _renamed_module(self, entry: str, path: str, rename: Callable[[str], str]) -> str:
        if not _PATTERN_MARKS.search(entry):
            return rename(entry)
        plain = entry.replace("\\", "")
        if not self.regex and any(old.rstrip(".") in plain for old in self.map):
            raise CannotApply(
                f"the pattern {entry!r} may mean renamed modules, and a pattern cannot be renamed safely",
                f"config {path}",
                "write the entry as plain module names first",
            )
        return entry


def _by_prefix(renames: dict[str, str], name: str) -> str:
    for old, new in renames.items():
        prefix = old if old.endswith(".") else f"{old}."
        if name == old:
            return new
        if name.startswith(prefix):
            rest = name[len(prefix) :]
            if not new:
                return rest
            return new + rest if new.endswith(".") else f"{new}.{rest}"
    return name
