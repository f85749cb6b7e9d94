"""Quantisation: what a config says of modules by their names, by the rule of the scheme that reads it.

A list or mapping is expanded with the scheme's own matcher over the modules of the source, carried through the layer
map, and written back in the scheme's style: entries without a layer number stay as they are, those that name layers
follow them, those of layers that go are gone. Then what each module gets is compared: it must be what its source got.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from surgery.errors import CannotApply
from surgery.quantization_schemes import Json, Modules, Names, Scheme, scheme_of

QUANTIZATION_KEYS = ("quantization_config", "compression_config")
QUANTIZATION_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "quantization_config.json": "auto-round",
}
"""Files beside the config that are such a section (vLLM's get_config_filenames), and the method each belongs to."""

NUMBERED = re.compile(r"(?:layers|h|blocks?)\\?\.[\\\[(?:=!]*\d")
"""Text that names layers by number, plain or in a pattern."""

_NUMBERED_PATTERN = re.compile(r"\.[\\\[(?:=!]*\d")
_PARTS = re.compile(r"((?:re:|[+-]:)?\^?)((?:[\w-]+\\?\.)*[\w-]*)(.*)", re.DOTALL)
"""What stands before a name, the plain beginning of the name, and the rest of a pattern."""

_SPELLINGS = ("model.language_model.", "language_model.model.")
"""One place under two names (vLLM modelopt.py _quantized_layer_prefix_candidates)."""

Path = tuple[str | int, ...]
Move = Callable[[str], list[str] | None]
"""The new names of a path below a renumbered stack, none where its layer goes; None for any other path."""


class Named(msgspec.Struct, frozen=True):
    """A place of a config that names modules: a list of names, or a mapping from names to values."""

    path: Path
    scheme: Scheme
    value: Json


class Carried(msgspec.Struct, frozen=True):
    """What a place was and what it becomes, and the entries that mean no module."""

    path: Path
    old: Json
    new: Json
    dead: list[str]


def named_in(config: Json) -> Iterator[Named]:
    """Every place of a config that names modules."""
    for path, section in quantization_sections(config):
        yield from named_in_section(section, path)


def named_in_section(section: Json, path: Path = (), method: str = "") -> Iterator[Named]:
    """Every place of one quantisation section, or of a file that is one. `method` where the section says none."""
    if isinstance(section, dict):
        yield from _named(section, path, str(section.get("quant_method") or method))


def _named(value: dict[str, Any], path: Path, method: str) -> Iterator[Named]:
    for key, entry in value.items():
        if (scheme := scheme_of(key, method, entry)) is not None:
            yield Named((*path, key), scheme, entry)
        elif isinstance(entry, dict):
            yield from _named(entry, (*path, key), method)
        elif isinstance(entry, list):  # GPTQ: lists of names, one for each step inside a block.
            for number, inner in enumerate(entry):
                if (scheme := scheme_of(key, method, inner)) is not None and not scheme.mapping:
                    yield Named((*path, key, number), scheme, inner)


def quantization_sections(config: Json, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """The quantisation sections of a config and of the configs nested in it (`text_config`)."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if not isinstance(value, dict):
            continue
        if key in QUANTIZATION_KEYS:
            yield (*path, key), value
        elif key.endswith("_config"):
            yield from quantization_sections(value, (*path, key))


def carry_named(named: Named, modules: Modules, move: Move) -> Carried:
    """One place through a renumbering.

    Raises `CannotApply` where no entries say the same of the modules that are left.
    """
    scheme = named.scheme
    names = scheme.names(modules)
    entries = list(named.value.items()) if scheme.mapping else [(entry, True) for entry in named.value]
    moved = {path: [path] if (new := _moved_name(path, move)) is None else new for path in names.paths}
    left = Names([new for new_names in moved.values() for new in new_names])
    hits, winners = _decided(scheme, [entry for entry, _ in entries], names)
    decides: list[list[str]] = [[] for _ in entries]
    for path, number in winners.items():
        decides[number] += moved[path]
    out: dict[str, Json] = {}
    dead = []
    for number, (entry, value) in enumerate(entries):
        if not hits[number] and not (scheme.classes and _is_class(entry)):
            dead.append(entry)
        wanted = {new for path in hits[number] for new in moved[path]}
        for text in _carried_entry(scheme, entry, bool(hits[number]), wanted, sorted(decides[number]), left, move):
            out.setdefault(text, value)
    carried = Carried(named.path, named.value, out if scheme.mapping else list(out), dead)
    _prove(carried, scheme, entries, out, winners, moved, left)
    return carried


def _decided(scheme: Scheme, entries: Sequence[str], names: Names) -> tuple[list[set[str]], dict[str, int]]:
    """What each entry means, and for each module the number of the entry that counts."""
    hits: list[set[str]] = [set() for _ in entries]
    winners: dict[str, int] = {}
    for reading in scheme.readings:
        for number, entry in enumerate(entries):
            for path in reading(entry, names):
                hits[number].add(path)
                winners.setdefault(path, number)
    return hits, winners


def _carried_entry(
    scheme: Scheme, entry: str, alive: bool, wanted: set[str], decides: Sequence[str], left: Names, move: Move
) -> list[str]:
    """What stands in place of one entry that means the `wanted` modules now and alone `decides` some of them."""

    def means(texts: Sequence[str]) -> bool:
        return {path for text in texts for reading in scheme.readings for path in reading(text, left)} == wanted

    lead, stem, tail = _split(entry)
    moved = _moved_text(stem, move)
    texts = [f"{lead}{new}{tail}" for new in moved or ()]
    if moved is not None and tail in ("", "$"):
        # A plain path moves as a module would, whether or not a module of that name is there: engines fuse some.
        candidates = [texts, [entry]]
    elif alive and not wanted and _NUMBERED_PATTERN.search(entry):
        candidates = [[]]
    else:
        candidates = [[entry], *([texts] if wanted else [])]
    for candidate in candidates:
        if means(candidate):
            return candidate
    return [scheme.written(entry, module) for module in decides]


def _split(entry: str) -> tuple[str, str, str]:
    parts = _PARTS.fullmatch(entry)
    assert parts is not None
    return parts[1], parts[2], parts[3]


def _moved_text(stem: str, move: Move) -> list[str] | None:
    """A plain beginning under its new names, its dots escaped where they were."""
    path = stem.replace("\\.", ".")
    dot = "." if path.endswith(".") else ""
    moved = _moved_name(path.removesuffix("."), move)
    if moved is None or "\\." not in stem:
        return None if moved is None else [new + dot for new in moved]
    return [(new + dot).replace(".", "\\.") for new in moved]


def _moved_name(path: str, move: Move) -> list[str] | None:
    moved = move(path)
    for here, there in (_SPELLINGS, _SPELLINGS[::-1]):
        if moved is None and path.startswith(here):
            other = move(there + path.removeprefix(here))
            moved = None if other is None else [here + new.removeprefix(there) for new in other]
    return moved


def _is_class(entry: str) -> bool:
    return entry.isidentifier() and entry[0].isupper()


def _prove(
    carried: Carried,
    scheme: Scheme,
    old: Sequence[tuple[str, Json]],
    new: dict[str, Json],
    winners: dict[str, int],
    moved: dict[str, list[str]],
    left: Names,
) -> None:
    """Every module gets from the new entries what its source got from the old ones."""
    place = ".".join(map(str, carried.path))
    entries = list(new.items())
    now = _decided(scheme, list(new), left)[1]

    def outcome(entries: Sequence[tuple[str, Json]], number: int | None) -> tuple[Json, ...]:
        return () if number is None else (scheme.outcome(*entries[number]),)

    odd = [
        target
        for path, targets in moved.items()
        for target in targets
        if outcome(old, winners.get(path)) != outcome(entries, now.get(target))
    ]
    if odd:
        raise CannotApply(
            f"{place} would say something else of {len(odd)} modules, first {min(odd)}",
            place,
            "write the entries as plain module names first",
        )
    if scheme.required and old and not new:
        raise CannotApply(
            f"nothing of {place} would be left, and an empty one means something else",
            place,
            "keep a layer that it names, or remove the field if no engine reads it",
        )


def is_numbered(text: str) -> bool:
    """Whether a text names layers by number."""
    return NUMBERED.search(text) is not None


def unlisted_texts(config: Json) -> Iterator[str]:
    """Keys and texts of the quantisation sections outside the places that are understood."""
    for path, section in quantization_sections(config):
        yield from unlisted_in_section(section, path)


def unlisted_in_section(section: Json, path: Path = (), method: str = "") -> Iterator[str]:
    """Keys and texts of one section outside the places that are understood."""
    known = {named.path: named.scheme.mapping for named in named_in_section(section, path, method)}
    yield from _strings(section, path, known)


def _strings(value: Json, path: Path, known: dict[Path, bool]) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, entry in value.items():
            if path not in known:
                yield key
            yield from _strings(entry, (*path, key), known)
    elif isinstance(value, list) and path not in known:
        for number, entry in enumerate(value):
            yield from _strings(entry, (*path, number), known)
