"""Rules of single architectures: what only one family, or one of its readers, does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surgery.families.config_fields import Config, Fields, number
from surgery.families.rules import Carry, Rule


@dataclass(frozen=True)
class SparseStep:
    """Qwen's MoE rule: `hit` unless listed in `dense`, and where `(layer + 1) % step == 0`; no experts, no `hit`.

    Any choice can be said: step 1 and every dense layer listed, which transformers and vLLM both read so.
    """

    step: str
    dense: str
    experts: tuple[str, ...]
    hit: Any = "moe"
    miss: Any = "dense"
    default: tuple[int, ...] = ()

    def value(self, config: Config, layer: int, depth: int) -> Any:
        counts = [config[name] for name in self.experts if name in config]
        listed = config.get(self.dense)
        listed = list(self.default) if listed is None else listed
        step = number(config, self.step, 1)
        sparse = (not counts or any(counts)) and step > 0 and (layer + 1) % step == 0
        return self.miss if not sparse or (isinstance(listed, list) and layer in listed) else self.hit

    def express(self, carry: Carry) -> Fields | None:
        listed = carry.old.get(self.dense)
        listed = list(self.default) if listed is None and self.default else listed
        choices: list[Fields] = [
            {self.step: 1, self.dense: [place for place, value in enumerate(carry.wanted) if value == self.miss]}
        ]
        if isinstance(listed, list):
            choices.insert(0, {self.dense: [place for place, layer in enumerate(carry.kept) if layer in listed]})
        else:
            choices.insert(0, {})
        for fields in choices:
            if carry.says(self, fields):
                return carry.changes(fields)
        return None


@dataclass(frozen=True)
class Spaced:
    """DeepSeek's indexer schedule: `full` where `max(layer - offset + 1, 0) % every == 0`, else `shared`."""

    every: str
    offset: str
    full: Any = "full"
    shared: Any = "shared"
    default_offset: int = 2

    def value(self, config: Config, layer: int, depth: int) -> Any:
        every = max(1, number(config, self.every, 1))
        offset = number(config, self.offset, self.default_offset)
        return self.full if max(layer - offset + 1, 0) % every == 0 else self.shared

    def express(self, carry: Carry) -> Fields | None:
        return {} if carry.says(self) else None


@dataclass(frozen=True)
class DenseThenSparse:
    """DeepSeek's MoE rule as vLLM reads it: `dense` for the first layers that `first` counts, then `sparse` where
    `layer % every == 0`."""

    first: str
    every: str
    dense: Any = "dense"
    sparse: Any = "sparse"
    default: int = 0

    def value(self, config: Config, layer: int, depth: int) -> Any:
        step = max(1, number(config, self.every, 1))
        moe = layer >= number(config, self.first, self.default) and layer % step == 0
        return self.sparse if moe else self.dense

    def express(self, carry: Carry) -> Fields | None:
        if carry.says(self):
            # Said already, but a count beyond the layers would make an MTP stage dense.
            return self._bounded(carry)
        count = next((j for j, value in enumerate(carry.wanted) if value == self.sparse), len(carry.wanted))
        fields = {self.first: count}
        return carry.changes(fields) if carry.says(self, fields) else None

    def _bounded(self, carry: Carry) -> Fields:
        over = number(carry.new, self.first, self.default) > len(carry.wanted)
        return {self.first: len(carry.wanted)} if over else {}


@dataclass(frozen=True)
class CountedHead:
    """A reader that counts `inside` over all layers and takes as many leading ones for it."""

    rule: Rule
    inside: Any
    outside: Any

    def value(self, config: Config, layer: int, depth: int) -> Any:
        count = sum(self.rule.value(config, each, depth) == self.inside for each in range(depth))
        return self.inside if layer < count else self.outside

    def express(self, carry: Carry) -> Fields | None:
        fields = self.rule.express(carry)
        return fields if fields is not None and carry.says(self, fields) else None


@dataclass(frozen=True)
class Keyed:
    """An object with layer numbers as keys; layers without one are None."""

    field: str

    def value(self, config: Config, layer: int, depth: int) -> Any:
        entries = config.get(self.field)
        return entries.get(str(layer)) if isinstance(entries, Mapping) else None

    def express(self, carry: Carry) -> Fields | None:
        if not isinstance(carry.old.get(self.field), Mapping):
            return {}
        entries = {str(place): value for place, value in enumerate(carry.wanted) if value is not None}
        return carry.changes({self.field: entries})


@dataclass(frozen=True)
class FirstTen:
    """Gemma 3n without its sparsity list: the first ten layers are sparse where there are more than ten."""

    inside: Any = 0.95
    outside: Any = 0.0

    def value(self, config: Config, layer: int, depth: int) -> Any:
        return self.inside if depth > 10 and layer < 10 else self.outside

    def express(self, carry: Carry) -> Fields | None:
        return {} if carry.says(self) else None


@dataclass(frozen=True)
class Cycle:
    """A pattern written in the reader's code, one layer after another and again; `first` says what its first layers
    are instead, `last` what the last one is. Nothing can be solved: where it does not fit, a list must say it."""

    pattern: tuple[Any, ...]
    first: tuple[Any, ...] = ()
    last: Any = None

    def value(self, config: Config, layer: int, depth: int) -> Any:
        if self.last is not None and layer == depth - 1:
            return self.last
        return self.first[layer] if layer < len(self.first) else self.pattern[layer % len(self.pattern)]

    def express(self, carry: Carry) -> Fields | None:
        return {} if carry.says(self) else None


@dataclass(frozen=True)
class All:
    """`hit` where every rule gives its own hit (`True`), else `miss`."""

    rules: tuple[Rule, ...]
    hit: Any
    miss: Any

    def value(self, config: Config, layer: int, depth: int) -> Any:
        return self.hit if all(rule.value(config, layer, depth) is True for rule in self.rules) else self.miss

    def express(self, carry: Carry) -> Fields | None:
        return {} if carry.says(self) else None


@dataclass(frozen=True)
class Ranged:
    """Ernie's MoE rule: `hit` from layer `start` to layer `end` (-1: the last) where `(layer + 1) % interval == 0`."""

    start: str
    end: str
    interval: str
    hit: Any = "moe"
    miss: Any = "dense"
    default_start: int = 1

    def value(self, config: Config, layer: int, depth: int) -> Any:
        start, end = number(config, self.start, self.default_start), number(config, self.end, -1)
        end = depth - 1 if end == -1 else end
        inside = start <= layer <= end and (layer + 1) % max(1, number(config, self.interval, 1)) == 0
        return self.hit if inside else self.miss

    def express(self, carry: Carry) -> Fields | None:
        if carry.says(self):
            return {}
        places = [place for place, value in enumerate(carry.wanted) if value == self.hit]
        start, last = (places[0], places[-1]) if places else (len(carry.wanted), len(carry.wanted) - 1)
        for interval in dict.fromkeys((number(carry.new, self.interval, 1), *range(1, len(carry.wanted) + 1))):
            for end in (-1, last):
                fields = {self.start: start, self.end: end, self.interval: interval}
                if carry.says(self, fields):
                    return carry.changes(fields)
        return None


@dataclass(frozen=True)
class OwnIndex:
    """Arithmetic with the layer's own number, with the depth, or with both: where they change, it is another layer."""

    number: bool = True
    depth: bool = False

    def value(self, config: Config, layer: int, depth: int) -> Any:
        told = [str(layer)] if self.number else []
        return " ".join([*told, f"of {depth}"] if self.depth else told)

    def express(self, carry: Carry) -> Fields | None:
        return {} if carry.says(self) else None


@dataclass(frozen=True)
class Edge:
    """The first layer, or the last, holds or computes something that no other does."""

    last: bool = False

    def value(self, config: Config, layer: int, depth: int) -> Any:
        if self.last:
            return "last" if layer == depth - 1 else "before the last"
        return "first" if layer == 0 else "after the first"

    def express(self, carry: Carry) -> Fields | None:
        return {} if carry.says(self) else None


@dataclass(frozen=True)
class Positions:
    """Inputs that enter the first `count` layers by their number, whatever those layers are."""

    count: int

    def value(self, config: Config, layer: int, depth: int) -> Any:
        return layer if layer < self.count else None

    def express(self, carry: Carry) -> Fields | None:
        return {} if carry.says(self) else None


@dataclass(frozen=True)
class PrefixPattern:
    """Cohere's windows: a period of their own for the dense layers in front, another one behind, both counted anew."""

    count: str
    front: str
    behind: str
    hit: Any
    miss: Any

    def value(self, config: Config, layer: int, depth: int) -> Any:
        leading = number(config, self.count, 0)
        place, field, default = (layer, self.front, 1) if layer < leading else (layer - leading, self.behind, 4)
        return self.hit if (place + 1) % max(1, number(config, field, default)) == 0 else self.miss

    def express(self, carry: Carry) -> Fields | None:
        return {} if carry.says(self) else None


@dataclass(frozen=True)
class SparseShare:
    """Switch's rule: a sparse layer in each `step`, from layer 1 on.

    The config class makes the step of the depth and the `count` of sparse layers, or takes the one that is given.
    """

    count: str
    step: str
    default: int = 3
    hit: Any = "sparse"
    miss: Any = "dense"

    def value(self, config: Config, layer: int, depth: int) -> Any:
        count = number(config, self.count, self.default)
        step = number(config, self.step, depth // count if count > 0 else depth)
        return self.hit if step == 1 or (step > 0 and layer % step == 1) else self.miss

    def express(self, carry: Carry) -> Fields | None:
        given = self.step in carry.new
        old = number(carry.new, self.step if given else self.count, self.default)
        sparse = sum(value == self.hit for value in carry.wanted)
        for value in sorted(range(len(carry.wanted) + 1), key=lambda value: (abs(value - old), value)):
            fields = {self.step: value, self.count: sparse} if given else {self.count: value}
            if carry.says(self, fields):
                return carry.changes(fields)
        return None


@dataclass(frozen=True)
class Several:
    """`then` where `field` counts more than one, else `otherwise`."""

    field: str
    then: Rule
    otherwise: Rule
    default: int

    def _rule(self, config: Config) -> Rule:
        return self.then if number(config, self.field, self.default) > 1 else self.otherwise

    def value(self, config: Config, layer: int, depth: int) -> Any:
        return self._rule(config).value(config, layer, depth)

    def express(self, carry: Carry) -> Fields | None:
        return self._rule(carry.new).express(carry)
