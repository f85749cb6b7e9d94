"""Rules of single architectures: what only one family, or one of its readers, does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surgery.families.rules import Carry, Config, Fields, Rule, number


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

    def value(self, config: Config, layer: int, depth: int) -> Any:
        counts = [config[name] for name in self.experts if name in config]
        listed = config.get(self.dense)
        step = number(config, self.step, 1)
        sparse = (not counts or any(counts)) and step > 0 and (layer + 1) % step == 0
        return self.miss if not sparse or (isinstance(listed, list) and layer in listed) else self.hit

    def express(self, carry: Carry) -> Fields | None:
        listed = carry.old.get(self.dense)
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
