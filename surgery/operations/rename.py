"""Rename: other names for tensors, and for the modules that the config's quantisation lists name."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable

import msgspec

from surgery.draft import Config, ConfigChange, Draft, changed
from surgery.errors import CannotApply, Problems, UsageError
from surgery.families.records import find_family
from surgery.operations.quantization_carry import carry_files, carry_places
from surgery.operations.trim_tensors import split_layer
from surgery.quantization import Move, named_in, unlisted_texts
from surgery.quantization_schemes import modules_of
from surgery.tiling import Content


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
                problems.add(f"two tensors would be named {new}", "rename", "choose other names: it is there already")
            if not new or new == "__metadata__" or not _is_text(new):
                problems.add(f"{name} would become {new!r}, which is no tensor name", "rename", "choose other names")
            tensors[new] = content
        _refuse_renumbering(draft, rename)
        problems.raise_if_any(CannotApply)
        if not matched:
            raise CannotApply(
                f"no tensor matches {', '.join(map(repr, self.map))}",
                "rename",
                "`surgery inspect SRC --tensors` lists the names; OLD is a whole name or a dotted prefix",
            )
        move = _module_move(draft.tensors, rename)
        config, changes = self._config(draft.config, move, draft.tensors)
        renamed = changed(draft, tensors=tensors, config=config, config_changes=(*draft.config_changes, *changes))
        return carry_files(renamed, draft.tensors, move, lambda text: move(text) is not None, "rename")

    def _renamer(self) -> Callable[[str], str]:
        if not self.map:
            raise UsageError("an empty rename map", "rename", "give --map OLD=NEW")
        if not self.regex:
            return lambda name: _by_prefix(self.map, name)
        try:
            patterns = [(re.compile(old), new) for old, new in self.map.items()]
        except (re.error, OverflowError, RecursionError) as error:
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

    def _config(
        self, config: Config | None, move: Move, names: Iterable[str]
    ) -> tuple[Config | None, list[ConfigChange]]:
        """Module names in the quantisation sections follow their tensors; what cannot follow is refused."""
        if config is None:
            return config, []
        unlisted = [text for text in unlisted_texts(config) if move(text) is not None]
        if unlisted:
            raise CannotApply(
                f"the quantisation section names {unlisted[0]!r} in a form that is not understood",
                "config.json",
                "this scheme has no rule yet: change the section by hand after the rename",
            )
        edited = copy.deepcopy(config)
        return edited, carry_places(edited, list(named_in(config)), modules_of(names), move, "rename")[0]


def _module_move(names: Iterable[str], rename: Callable[[str], str]) -> Move:
    """The new name of a module path: what becomes of its tensors, else of the path itself; None where it stays."""
    by_tensor = {name.rpartition(".")[0]: rename(name).rpartition(".")[0] for name in names}

    def move(path: str) -> list[str] | None:
        new = by_tensor.get(path) or rename(path)
        return None if new == path else [new]

    return move


def _refuse_renumbering(draft: Draft, rename: Callable[[str], str]) -> None:
    """A layer under another number is another kind of layer to the config: that is trim's work, which carries it."""
    family = find_family(draft.config) if draft.config is not None else None
    for stack in (family, *family.also) if family is not None else ():
        for prefix in stack.stack.prefixes:
            for name in draft.tensors:
                before, after = split_layer(name, prefix), split_layer(rename(name), prefix)
                if before is not None and after is not None and before[0] != after[0]:
                    raise CannotApply(
                        f"{name} would be of layer {after[0]}: the config says what each layer is by its number",
                        "rename",
                        "`surgery trim SRC OUT --layers ...` reorders layers, config and all",
                    )


def _is_text(name: str) -> bool:
    """Half a surrogate pair (a byte of the command line that is no UTF-8) cannot be written."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


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
