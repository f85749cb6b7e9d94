"""The terms a family is written in: stacks, facts by reader, references, MTP stages, ids, globals sliced by depth.

A trim is true when, and only when, every kept layer has the same facts under the new config as it had under the old
one, for every program (reader) that loads the checkpoint. A family is a literal record that a person can check
against the architecture's source, which it names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Literal

from surgery.families.rules import Always, Listed, PerLayer, Rule

Config = Mapping[str, Any]
Facts = dict[str, Any]
Reader = Literal["transformers", "vllm"]
READERS: tuple[Reader, ...] = ("transformers", "vllm")

MAX_DEPTH = 10_000
"""A larger count is no model's, and must not fill memory."""

DEPTH_SPELLINGS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Every name a file may give the depth; those that the file has are changed, none is added."""


@dataclass(frozen=True)
class Stack:
    """A numbered run of layers that the config counts.

    `prefixes` end before the layer number in a tensor name; the one that the tensors have counts. `sections` are the
    config objects that may speak of the stack, the first that exists; `()` is the config itself. `depth_from` is a
    field whose length is the depth, where the reader counts no other. `spellings` are the names that the count may
    have besides; `default` is another stack's count, taken where this one has none. `multiples` are fields that count
    parts of layers, so many a layer.
    """

    name: str
    prefixes: tuple[str, ...]
    sections: tuple[tuple[str, ...], ...] = ((),)
    depth: str = "num_hidden_layers"
    depth_from: tuple[str, ...] = ()
    spellings: tuple[str, ...] = DEPTH_SPELLINGS
    default: str = ""
    multiples: Mapping[str, int] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        return self.prefixes[0]

    def section(self, config: Config) -> tuple[tuple[str, ...], Config]:
        """The object of the config that speaks of the stack, and the path to it."""
        return find_section(config, self.sections)


def find_section(config: Config, sections: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], Config]:
    """The first of `sections` that the config has, with its path; the config itself where it has none."""
    for path in sections:
        found: Any = config
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        if isinstance(found, Mapping):
            return path, found
    return (), config


@dataclass(frozen=True)
class Fact:
    """One thing that a layer is. `rules` by reader, or one for all readers under `any`."""

    name: str
    rules: Mapping[str, Rule]

    def rule(self, reader: str) -> Rule | None:
        return self.rules.get(reader, self.rules.get("any"))


def fact(name: str, rule: Rule | None = None, **by_reader: Rule) -> Fact:
    """A fact that every reader reads alike, or one rule a reader."""
    return Fact(name, by_reader if rule is None else {"any": rule})


@dataclass(frozen=True)
class Reference:
    """Layers with `consumer` use something of the nearest earlier layer with `producer` (and the same fact `alike`)."""

    name: str
    consumer: tuple[str, Any]
    producer: tuple[str, Any]
    alike: str = ""

    def target(self, facts: Sequence[Facts], layer: int) -> int | None:
        """The layer that `layer` refers to; None where it refers to none, -1 where the one it needs is not there."""
        name, value = self.consumer
        if facts[layer].get(name) != value:
            return None
        name, value = self.producer
        for earlier in range(layer - 1, -1, -1):
            same = not self.alike or facts[earlier].get(self.alike) == facts[layer].get(self.alike)
            if facts[earlier].get(name) == value and same:
                return earlier
        return -1


@dataclass(frozen=True)
class Mtp:
    """Multi-token-prediction stages: behind the layers (`model.layers.{depth+i}.`), or under `prefixes` of their own.

    `counts` are the config fields that count them, in the text section or at the top. Stages under a prefix are
    numbered directly behind it (`mtp.0.`) or behind `layers.` (`mtp.layers.0.`); `sublayers` is a string field with a
    letter for each physical layer of one stage. `experts_field` is where an engine looks for the count of a stage's own
    experts, where one does. `same_kind` are facts that vLLM evaluates at a stage's own number
    (behind the layers, or from 0): a stage that moves must stay what it was.
    """

    behind: bool = False
    prefixes: tuple[str, ...] = ()
    counts: tuple[str, ...] = ("num_nextn_predict_layers", "num_mtp_layers")
    sublayers: str = ""
    experts_field: str = ""
    same_kind: tuple[str, ...] = ()

    def stages(self, physical: int, section: Config) -> int:
        """How many stages so many numbered parts are."""
        pattern = section.get(self.sublayers) if self.sublayers else None
        width = len(pattern) if isinstance(pattern, (str, list)) and pattern else 1
        return -(-physical // width)


@dataclass(frozen=True)
class Memory:
    """Tables inside layers that the model looks up and does not compute: often most of a small output.

    `module` is their place in a layer's names, `emptied` the lists of the config that say which layers have them.
    """

    module: str
    emptied: tuple[str, ...]


@dataclass(frozen=True)
class LayerIds:
    """A config field with ids of layers (`base` on) that is no fact: ids of layers that go are refused.

    With `hidden_states` an id counts what comes out: 0 before the first layer, -1 behind the last. `top`: the field
    lies at the top of the config, not in the stack's section. One id may stand without a list.
    """

    field: str
    base: int = 0
    hidden_states: bool = False
    top: bool = False


@dataclass(frozen=True)
class DepthSliced:
    """A module outside the layers whose weight's axis `axis` is the layers one after another, `depth` equal blocks.
    Scales that have that axis are cut along."""

    module: str
    axis: int


@dataclass(frozen=True)
class Family:
    """One group of architectures. `source` says where it was read.

    `follows` are fields that equal the depth and are kept equal to it where they do; `last_layer` says what the reader
    makes of the last layer whatever the config says; `at_least_one` a fact that the reader demands of some layer;
    `first_only` ends the names of tensors that the first layer holds for all of them; `also` are the other stacks,
    each a family of its own; `native` the model type whose class serves the family, where it is not its own;
    `outside` the modules that every checkpoint has beside layers named `model.layers.`; `misbuilt` ends the names of
    tensors whose shape the class gets wrong, so that good checkpoints differ from it; `memory` are tables in layers.
    """

    name: str
    model_types: tuple[str, ...]
    source: str
    stack: Stack
    fact_list: tuple[Fact, ...] = ()
    references: tuple[Reference, ...] = ()
    mtp: Mtp | None = None
    ids: tuple[LayerIds, ...] = ()
    depth_sliced: tuple[DepthSliced, ...] = ()
    follows: tuple[str, ...] = ()
    last_layer: tuple[str, Any] | None = None
    at_least_one: tuple[str, Any] | None = None
    first_only: tuple[str, ...] = ()
    also: tuple[Family, ...] = ()
    native: str = ""
    outside: tuple[str, ...] = ("model.embed_tokens", "model.norm")
    misbuilt: tuple[str, ...] = ()
    memory: Memory | None = None

    def known_fields(self) -> set[str]:
        """Every config field that some rule of the record names."""
        found = {self.stack.depth, *self.stack.depth_from, *self.follows, *(ids.field for ids in self.ids)}
        found |= set(self.stack.spellings) | set(self.stack.multiples)
        pending: list[Any] = [rule for one in self.fact_list for rule in one.rules.values()]
        while pending:
            rule = pending.pop()
            for value in vars(rule).values():
                if isinstance(value, str):
                    found.add(value)
                elif isinstance(value, tuple):
                    found.update(name for name in value if isinstance(name, str))
                    pending += [each for each in value if is_dataclass(each)]
                elif is_dataclass(value):
                    pending.append(value)
        return found

    def per_layer_fields(self) -> dict[str, bool]:
        """The fields with one entry a layer, and whether entries of MTP stages may follow."""
        found: dict[str, bool] = {}
        pending: list[Any] = [rule for one in self.fact_list for rule in one.rules.values()]
        while pending:
            rule = pending.pop()
            if isinstance(rule, PerLayer):
                found[rule.field] = rule.tail
            pending += [value for value in vars(rule).values() if is_dataclass(value)]
        return found

    def id_fields(self) -> dict[str, int]:
        """The fields that list layers of the stack by number, and what the first layer is called."""
        found: dict[str, int] = {}
        pending: list[Any] = [rule for one in self.fact_list for rule in one.rules.values()]
        while pending:
            rule = pending.pop()
            if isinstance(rule, Listed):
                found[rule.field] = rule.base
            elif isinstance(dense := getattr(rule, "dense", None), str):
                found[dense] = 0  # Qwen's list of dense layers.
            pending += [value for value in vars(rule).values() if is_dataclass(value)]
        return found

    def section(self, config: Config) -> tuple[tuple[str, ...], Config]:
        """The object of the config that speaks of the stack, and the path to it."""
        return self.stack.section(config)

    def depth(self, config: Config) -> int | None:
        """The number of layers that `config` declares; None where it is missing or no count."""
        section = self.section(config)[1]
        for name in self.stack.depth_from:
            value = section.get(name)
            if isinstance(value, (list, str)) and len(value):
                return len(value)
        fields = (self.stack.depth, *self.stack.spellings, self.stack.default)
        value = next((section[name] for name in fields if section.get(name) is not None), None)
        if not isinstance(value, int) or isinstance(value, bool):
            return None
        return value if 0 < value <= MAX_DEPTH else None

    def all_facts(self, config: Config, depth: int, reader: str) -> list[Facts]:
        """What every layer is to `reader`, references apart."""
        section = self.section(config)[1]
        rules = [(one.name, rule) for one in self.fact_list if (rule := one.rule(reader)) is not None]
        listed = [{name: rule.value(section, layer, depth) for name, rule in rules} for layer in range(depth)]
        if self.last_layer is not None and listed:
            name, value = self.last_layer
            listed[-1][name] = value
        return listed

    def facts(self, config: Config, layer: int) -> Facts:
        """What one layer is to the first reader that has a rule for it; `layer` may lie behind the last."""
        depth = max(self.depth(config) or 0, layer + 1)
        section = self.section(config)[1]
        found: Facts = {}
        for one in self.fact_list:
            rule = one.rule("transformers") or one.rule("vllm") or Always(None)
            found[one.name] = rule.value(section, layer, depth)
        return found
