"""Rules of lists that are not one entry a layer: by the place among the layers of a kind, ids as text, repeats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from surgery.families.config_fields import Config, Fields, read
from surgery.families.rules import Carry, Rule


@dataclass(frozen=True)
class ByOrdinal:
    """A list with an entry for each layer that `rule` says is `kind`, in their order; one number counts for all."""

    field: str
    rule: Rule
    kind: Any

    def value(self, config: Config, layer: int, depth: int) -> Any:
        listed = read(config, self.field)
        if not isinstance(listed, list) or self.rule.value(config, layer, depth) != self.kind:
            return None
        place = sum(self.rule.value(config, each, depth) == self.kind for each in range(layer))
        return listed[place] if place < len(listed) else None

    def express(self, carry: Carry) -> Fields | None:
        if not isinstance(read(carry.old, self.field), list):
            return {}
        return carry.changes({self.field: [value for value in carry.wanted if value is not None]})


@dataclass(frozen=True)
class Tiled:
    """A list that is read again and again until every layer has an entry (`block_types * 100`)."""

    field: str
    default: tuple[Any, ...]

    def value(self, config: Config, layer: int, depth: int) -> Any:
        listed = read(config, self.field)
        listed = listed if isinstance(listed, list) and listed else self.default
        return listed[layer % len(listed)]

    def express(self, carry: Carry) -> Fields | None:
        return {} if carry.says(self) else {self.field: list(carry.wanted)}


@dataclass(frozen=True)
class Counted:
    """GPT-Neo's list of `[[kinds], repeats]` pairs, expanded to one kind a layer."""

    field: str
    default: tuple[Any, ...]

    def value(self, config: Config, layer: int, depth: int) -> Any:
        listed = [
            kind
            for pair in read(config, self.field) or ()
            if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], list) and isinstance(pair[1], int)
            for kind in pair[0] * min(pair[1], depth)
        ] or list(self.default)
        return listed[layer % len(listed)] if layer < depth else None

    def express(self, carry: Carry) -> Fields | None:
        # The reader checks that the expanded length is the depth, so the list is written whenever the depth changes.
        return carry.changes({self.field: [[list(carry.wanted), 1]]})


@dataclass(frozen=True)
class IdText:
    """Ids of layers as a text with commas (`3,4,5`), or as a list; without the field, `otherwise`."""

    field: str
    inside: Any
    outside: Any
    otherwise: Rule

    def _ids(self, config: Config) -> list[int] | None:
        value = read(config, self.field)
        entries = value.split(",") if isinstance(value, str) else value
        if not isinstance(entries, list):
            return None
        return [int(entry) for entry in map(str, entries) if entry.strip().isdecimal()]

    def value(self, config: Config, layer: int, depth: int) -> Any:
        ids = self._ids(config)
        if ids is None:
            return self.otherwise.value(config, layer, depth)
        return self.inside if layer in ids else self.outside

    def express(self, carry: Carry) -> Fields | None:
        old = read(carry.old, self.field)
        if self._ids(carry.old) is None and carry.says(self):
            return {}
        ids = [place for place, value in enumerate(carry.wanted) if value == self.inside]
        ids += [
            len(carry.wanted) + stage for stage in carry.tail if carry.depth + stage in (self._ids(carry.old) or ())
        ]
        return carry.changes({self.field: ids if isinstance(old, list) else ",".join(map(str, ids))})


@dataclass(frozen=True)
class Ordinal:
    """The place of a layer in a list of ids (from `base` on): tables and hashes depend on it, so it must stay."""

    field: str
    base: int = 0

    def value(self, config: Config, layer: int, depth: int) -> Any:
        ids = read(config, self.field)
        listed = sorted(set(ids)) if isinstance(ids, list) else []
        return listed.index(layer + self.base) if layer + self.base in listed else None

    def express(self, carry: Carry) -> Fields | None:
        if not isinstance(read(carry.old, self.field), list):
            return {}
        ids = [place + self.base for place, value in enumerate(carry.wanted) if value is not None]
        fields = {self.field: ids}
        return carry.changes(fields) if carry.says(self, fields) else None


@dataclass(frozen=True)
class Owner:
    """Layers that `field` lists own what the layers behind them share, up to the next owner; before the first, and
    without the field, there is nothing to share."""

    field: str

    def value(self, config: Config, layer: int, depth: int) -> Any:
        ids = read(config, self.field)
        if not isinstance(ids, list):
            return None
        if layer in ids:
            return "own"
        return "shared" if any(isinstance(each, int) and each < layer for each in ids) else None

    def express(self, carry: Carry) -> Fields | None:
        if not isinstance(read(carry.old, self.field), list):
            return {}
        fields = {self.field: [place for place, value in enumerate(carry.wanted) if value == "own"]}
        return carry.changes(fields) if carry.says(self, fields) else None


@dataclass(frozen=True)
class Paired:
    """A list beside a list of ids (`by`): one entry for each layer that is listed there, in that order."""

    field: str
    by: str

    def value(self, config: Config, layer: int, depth: int) -> Any:
        ids, listed = read(config, self.by), read(config, self.field)
        if not isinstance(ids, list) or not isinstance(listed, list) or layer not in ids:
            return None
        place = ids.index(layer)
        return listed[place] if place < len(listed) else None

    def express(self, carry: Carry) -> Fields | None:
        if not isinstance(read(carry.old, self.field), list):
            return {}
        return carry.changes({self.field: [value for value in carry.wanted if value is not None]})
