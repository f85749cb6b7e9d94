"""The terms a family is written in: stacks, the fields that count their layers, and the facts of each layer.

A trim is true when every kept layer has the same facts under the new config as it had under the old one. A family is
a literal record that a reader can check against the architecture's source, which it names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]
Facts = dict[str, Any]

DEPTH_SPELLINGS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Every name a file may give the depth; those that the file has are changed, none is added."""


@dataclass(frozen=True)
class Stack:
    """A numbered run of layers that the config counts.

    `prefix` ends before the layer number in a tensor name. `per_layer` are config fields with one entry a layer.
    """

    name: str
    prefix: str
    depth: str
    per_layer: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """One group of architectures. `facts(config, layer)` says what that layer is; `source` where that was read."""

    name: str
    model_types: tuple[str, ...]
    source: str
    stack: Stack
    facts: Callable[[Config, int], Facts]

    def depth(self, config: Config) -> int | None:
        """The number of layers that `config` declares; None where it is missing or no count."""
        value = config.get(self.stack.depth)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
