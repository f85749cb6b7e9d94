"""Layers of the source that hold other tensors than their kind: told when they are kept: it cannot be seen later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from surgery.families.schema import Config, Family
from surgery.operations.trim_tensors import Parts
from surgery.quantization import QUANTIZATION_KEYS
from surgery.tiling import Content

Held = frozenset[tuple[str, tuple[int, ...]]]


def odd_layers(
    tensors: Mapping[str, Content], family: Family, config: Config, parts: Parts, kept: Sequence[int]
) -> Iterator[str]:
    """A sentence for every kept layer whose names and shapes are not those of most layers of its kind.

    Quantised sources may leave single layers unquantised, so nothing is said of them.
    """
    if any(config.get(key) for key in QUANTIZATION_KEYS) or family.name.startswith("unknown"):
        return
    kinds: dict[str, list[int]] = {}
    for layer in parts.layers:
        kinds.setdefault(repr(sorted(family.facts(config, layer).items())), []).append(layer)
    for layers in kinds.values():
        wanted = sorted(set(kept) & set(layers))
        if not wanted or len(layers) < 3:
            continue
        held = {layer: _held(tensors, parts, layer, family.first_only) for layer in layers}
        usual, count = Counter(held.values()).most_common(1)[0]
        if count * 2 <= len(layers):
            continue  # No kind: they differ in what no fact says.
        for layer in wanted:
            if held[layer] != usual:
                yield _told(f"{parts.prefix}{layer}", held[layer], usual, count)


def _held(tensors: Mapping[str, Content], parts: Parts, layer: int, first_only: tuple[str, ...]) -> Held:
    width = len(f"{parts.prefix}{layer}.")
    names = (name for name in parts.layers[layer] if not (first_only and name.endswith(first_only)))
    return frozenset((name[width:], tensors[name].shape) for name in names)


def _told(layer: str, held: Held, usual: Held, count: int) -> str:
    lost, more = {name for name, _ in usual}, {name for name, _ in held}
    if missing := sorted(lost - more):
        what = f"has no {missing[0]}" + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else "")
    elif surplus := sorted(more - lost):
        what = f"has {surplus[0]} besides"
    else:
        name = min(name for name, _ in held - usual)
        what = f"has another shape of {name}"
    return f"the source is odd: {layer} {what}, unlike {count} layers of its kind; `surgery check` tells more"
