"""Rules: how a config says what a layer is, and how it is made to say the same of the layers that are left.

A rule answers `value(config, layer, depth)`. `express(carry)` returns the fields to change so that the rule gives
`carry.wanted[j]` for layer j of a model of that many layers, the closest to what is there: nothing where the config
says it already; an explicit list where the reader takes one; else counts and periods solved over the small space of
their values. None means that no config can say it.

Rules are data: a record is read beside the architecture's source, line by line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, Protocol

from surgery.families.config_fields import Config, Fields, holds, number, read, with_fields


@dataclass(frozen=True)
class Carry:
    """What is to be said: `wanted` of the layers `kept` (source ids) of a model of `depth` layers and config `old`.

    `new` is `old` with the fields that are settled already. `tail` are the MTP stages that stay.
    """

    old: Config
    new: Config
    wanted: Sequence[Any]
    kept: Sequence[int]
    depth: int
    tail: Sequence[int] = ()

    def says(self, rule: Rule, fields: Config | None = None) -> bool:
        """Whether `rule` gives what is wanted, with `fields` set too."""
        config = with_fields(self.new, fields) if fields else self.new
        depth = len(self.wanted)
        return all(rule.value(config, layer, depth) == value for layer, value in enumerate(self.wanted))

    def changes(self, fields: Fields) -> Fields:
        """Those of `fields` that are not so already."""
        return {n: value for n, value in fields.items() if not holds(self.new, n) or read(self.new, n) != value}


class Rule(Protocol):
    """See the module. `config` is the section that speaks of the stack."""

    def value(self, config: Config, layer: int, depth: int) -> Any: ...

    def express(self, carry: Carry) -> Fields | None: ...


@dataclass(frozen=True)
class Always:
    """The same for every layer, whatever the config says."""

    fact: Any

    def value(self, config: Config, layer: int, depth: int) -> Any:
        return self.fact

    def express(self, carry: Carry) -> Fields | None:
        return {} if carry.says(self) else None


@dataclass(frozen=True)
class Switch:
    """`then` where every field in `fields` is set (not missing, null, false or 0), else `otherwise`.

    `defaults` are the values of missing fields.
    """

    fields: tuple[str, ...]
    then: Rule
    otherwise: Rule
    defaults: Config = dataclass_field(default_factory=dict)

    def _rule(self, config: Config) -> Rule:
        on = all(read(config, name, self.defaults.get(name)) for name in self.fields)
        return self.then if on else self.otherwise

    def value(self, config: Config, layer: int, depth: int) -> Any:
        return self._rule(config).value(config, layer, depth)

    def express(self, carry: Carry) -> Fields | None:
        return self._rule(carry.new).express(carry)


@dataclass(frozen=True)
class PerLayer:
    """A list with one entry a layer, or a string with one letter a layer (`codes` then has what they mean).

    Where the field is missing or null, `otherwise` says what a layer is; the list is then written only if that rule
    would say something else of the layers that are left, and not at all with `add` False. `tail`: entries of MTP
    stages follow those of the layers.
    """

    field: str
    otherwise: Rule
    codes: Mapping[Any, Any] = dataclass_field(default_factory=dict)
    add: bool = True
    tail: bool = False
    string: bool = False

    def _listed(self, config: Config) -> Sequence[Any] | None:
        value = read(config, self.field)
        return value if isinstance(value, (list, str)) and len(value) else None

    def value(self, config: Config, layer: int, depth: int) -> Any:
        listed = self._listed(config)
        if listed is None or layer >= len(listed):
            return self.otherwise.value(config, layer, depth)
        entry = listed[layer]
        return self.codes.get(entry, entry) if isinstance(entry, (str, int)) else entry

    def cut(self, carry: Carry) -> Fields | None:
        """The list that is there, cut to the kept layers and stages; None where it has no entry for one of them."""
        listed = self._listed(carry.old)
        if listed is None or max(carry.kept, default=0) >= len(listed):
            return None
        places = [*carry.kept]
        if self.tail:
            places += [carry.depth + stage for stage in carry.tail if carry.depth + stage < len(listed)]
        entries = [listed[place] for place in places]
        return {self.field: "".join(entries) if isinstance(listed, str) else entries}

    def express(self, carry: Carry) -> Fields | None:
        fields = self.cut(carry)
        if self._listed(carry.old) is not None:
            if fields is None:
                return None
            if isinstance(self.otherwise, PerLayer):
                # A list that this one overrides is cut along, so that whoever reads it alone is told the same.
                fields = {**(self.otherwise.cut(carry) or {}), **fields}
            return carry.changes(fields) if carry.says(self, fields) else None
        if isinstance(self.otherwise, PerLayer) and (inner := self.otherwise.express(carry)) is not None:
            return inner
        if carry.says(self):
            return {}
        if not self.add:
            return self.otherwise.express(carry)
        back = {meaning: code for code, meaning in self.codes.items()}
        codes = [back.get(value, value) for value in carry.wanted]
        return {self.field: "".join(codes) if self.string else codes}


@dataclass(frozen=True)
class Leading:
    """`inside` for the first layers, as many as `field` counts; `outside` for the rest."""

    field: str
    inside: Any
    outside: Any
    default: int = 0

    def value(self, config: Config, layer: int, depth: int) -> Any:
        return self.inside if layer < number(config, self.field, self.default) else self.outside

    def express(self, carry: Carry) -> Fields | None:
        count = 0
        while count < len(carry.wanted) and carry.wanted[count] == self.inside:
            count += 1
        if any(value != self.outside for value in carry.wanted[count:]):
            return None
        # The count of kept leading layers, never more than there are layers: engines evaluate it at the index of an
        # MTP layer too, which must not become one of them.
        old = number(carry.new, self.field, self.default)
        return {} if old == count else {self.field: count}


@dataclass(frozen=True)
class Trailing:
    """`inside` for the last layers, as many as `field` counts."""

    field: str
    inside: Any
    outside: Any
    default: int = 0

    def value(self, config: Config, layer: int, depth: int) -> Any:
        return self.inside if layer >= depth - number(config, self.field, self.default) else self.outside

    def express(self, carry: Carry) -> Fields | None:
        count = 0
        while count < len(carry.wanted) and carry.wanted[-1 - count] == self.inside:
            count += 1
        if any(value != self.outside for value in carry.wanted[: len(carry.wanted) - count]):
            return None
        return {} if number(carry.new, self.field, self.default) == count else {self.field: count}


@dataclass(frozen=True)
class FromLayer:
    """`inside` from the layer that `field` numbers on."""

    field: str
    inside: Any
    outside: Any
    default: int

    def value(self, config: Config, layer: int, depth: int) -> Any:
        return self.inside if layer >= number(config, self.field, self.default) else self.outside

    def express(self, carry: Carry) -> Fields | None:
        if carry.says(self):
            return {}
        first = next((layer for layer, value in enumerate(carry.wanted) if value == self.inside), len(carry.wanted))
        fields = {self.field: first}
        return fields if carry.says(self, fields) else None


@dataclass(frozen=True)
class Every:
    """`hit` where `layer % period == offset`, else `miss`.

    `offset_field` None: the last of each period is hit, `(layer + 1) % period == 0`, or the one at `phase`.
    `period_field` None: the period is written in the reader's code and nothing can be solved.
    """

    period_field: str | None
    hit: Any
    miss: Any
    period: int
    offset_field: str | None = None
    offset: int = 0
    phase: int | None = None

    def _numbers(self, config: Config) -> tuple[int, int]:
        period = number(config, self.period_field, self.period) if self.period_field else self.period
        period = max(1, period)
        if self.offset_field:
            return period, number(config, self.offset_field, self.offset)
        return period, period - 1 if self.phase is None else self.phase

    def value(self, config: Config, layer: int, depth: int) -> Any:
        period, offset = self._numbers(config)
        return self.hit if layer % period == offset else self.miss

    def express(self, carry: Carry) -> Fields | None:
        if carry.says(self):
            return {}
        if self.period_field is None:
            return None
        old = self._numbers(carry.new)
        candidates: list[tuple[int, int]] = []
        for period in range(1, len(carry.wanted) + 2):
            offsets = range(period) if self.offset_field else (period - 1 if self.phase is None else self.phase,)
            candidates += [(period, offset) for offset in offsets]
        candidates.sort(key=lambda c: (abs(c[0] - old[0]) + abs(c[1] - old[1]), c))
        for period, offset in candidates:
            fields = {self.period_field: period}
            if self.offset_field:
                fields[self.offset_field] = offset
            if carry.says(self, fields):
                return carry.changes(fields)
        return None


@dataclass(frozen=True)
class Listed:
    """`inside` for the layers whose numbers (from `base` on) `field` lists; without the field, `otherwise`.

    The list is written where it is not given and something else would be read, but not with `add` False.
    """

    field: str
    inside: Any
    outside: Any
    otherwise: Rule | None = None
    base: int = 0
    add: bool = True

    def value(self, config: Config, layer: int, depth: int) -> Any:
        ids = read(config, self.field)
        if not isinstance(ids, list):
            return self.otherwise.value(config, layer, depth) if self.otherwise is not None else self.outside
        return self.inside if layer + self.base in ids else self.outside

    def express(self, carry: Carry) -> Fields | None:
        if not isinstance(read(carry.new, self.field), list):
            if carry.says(self):
                return {}
            if not self.add:
                return self.otherwise.express(carry) if self.otherwise is not None else None
        if any(value not in (self.inside, self.outside) for value in carry.wanted):
            return None
        ids = [layer + self.base for layer, value in enumerate(carry.wanted) if value == self.inside]
        return carry.changes({self.field: ids})
