"""Quantisation: the module lists of a config, by the rule of the scheme that reads them.

A list is expanded with the scheme's own matcher over the modules of the source, carried through the layer map, and
written back in the scheme's style: entries without a layer number stay as they are, those that name layers follow
them, those of layers that go are gone. Then both sets of modules are compared: what was left unquantised must be what
is left unquantised. Sources: transformers `quantizers/quantizers_utils.py` should_convert_module, compressed-tensors
`utils/match.py`, vLLM `quantization/awq.py` is_layer_skipped_awq.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import msgspec

from surgery.errors import CannotApply

QUANTIZATION_KEYS = ("quantization_config", "compression_config")
QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")

NUMBERED = re.compile(r"(?:layers|h|blocks?)\\?\.[\\\[(?:=!]*\d")
"""Text that names layers by number, plain or in a pattern."""

PATTERN_MARKS = re.compile(r"^re:|[*\\^$?\[\]()|+]")
_LIST_FIELDS = ("ignore", "targets", "modules_to_not_convert", "ignored_layers")
Matcher = Callable[[str, str], bool]
Move = Callable[[str], list[str] | None]
"""The new names of a path below a renumbered stack, none where its layer goes; None for any other path."""


class CarriedList(msgspec.Struct, frozen=True):
    """A list of a config: where it is, what it was and what it becomes, and the entries that match nothing."""

    path: tuple[str, ...]
    old: list[str]
    new: list[str]
    dead: list[str]


def modules_of(tensor_names: Iterable[str]) -> list[str]:
    """The module paths behind tensor names: what stands before the last dot, and every path above it."""
    found: dict[str, None] = {}
    for name in tensor_names:
        path = name.rpartition(".")[0]
        while path and path not in found:
            found[path] = None
            path = path.rpartition(".")[0]
    return list(found)


def _is_compressed_tensors_match(entry: str, module: str) -> bool:
    """Exact, or a pattern after `re:` from the name's beginning. `model.layers.5` is no prefix."""
    if entry.startswith("re:"):
        return _pattern(entry[3:]).match(module) is not None
    return entry == module


def _is_transformers_match(entry: str, module: str) -> bool:
    """A pattern from the name's beginning to a module boundary, or the name's end."""
    return _bounded(entry).match(module) is not None or module.endswith(entry)


def _is_substring(entry: str, module: str) -> bool:
    return entry in module


@cache
def _bounded(entry: str) -> re.Pattern[str]:
    return _pattern(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))")


@cache
def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error:
        return re.compile(re.escape(text))


def matcher_of(method: str, field: str) -> Matcher:
    """How the scheme reads the entries of `field`."""
    if field in ("ignore", "targets"):
        return _is_compressed_tensors_match
    if method == "awq":
        return _is_substring
    return _is_transformers_match


def lists_of(config: Any) -> Iterator[tuple[tuple[str, ...], str, list[str]]]:
    """Every module list of a config: path, scheme and entries."""
    for path, section in _sections(config):
        yield from _lists_in(section, path, str(section.get("quant_method", "")))


def _sections(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """The quantisation sections of a config and of the configs nested in it (`text_config`)."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if not isinstance(value, dict):
            continue
        if key in QUANTIZATION_KEYS:
            yield (*path, key), value
        elif key.endswith("_config"):
            yield from _sections(value, (*path, key))


def _lists_in(
    value: dict[str, Any], path: tuple[str, ...], method: str
) -> Iterator[tuple[tuple[str, ...], str, list[str]]]:
    for key, entry in value.items():
        if key in _LIST_FIELDS and isinstance(entry, list) and all(isinstance(each, str) for each in entry):
            yield (*path, key), method, entry
        elif isinstance(entry, dict):
            yield from _lists_in(entry, (*path, key), method)


def carry_list(
    path: tuple[str, ...], method: str, entries: Sequence[str], modules: Sequence[str], move: Move
) -> CarriedList:
    """One list through a renumbering.

    Raises `CannotApply` where no list says the same of the modules that are left.
    """
    matches = matcher_of(method, path[-1])
    moved = {module: [module] if (names := move(module)) is None else names for module in modules}
    left = [new for names in moved.values() for new in names]
    out: dict[str, None] = {}
    dead = []
    for entry in entries:
        hit = [module for module in modules if matches(entry, module)]
        if not hit:
            dead.append(entry)
        wanted = {new for module in hit for new in moved[module]}
        for new in _carried_entry(entry, hit, wanted, left, matches, move):
            out[new] = None
    carried = CarriedList(path, list(entries), list(out), dead)
    _prove(carried, modules, moved, left, matches)
    return carried


def _carried_entry(
    entry: str, hit: Sequence[str], wanted: set[str], left: Sequence[str], matches: Matcher, move: Move
) -> list[str]:
    # A plain path moves as a module would, whether or not a module of that name is there: engines fuse some.
    if not PATTERN_MARKS.search(entry) and (names := move(entry)) is not None:
        return names
    if hit and not wanted and NUMBERED.search(entry):
        return []
    if {module for module in left if matches(entry, module)} == wanted:
        return [entry]
    return sorted(wanted)


def _prove(
    carried: CarriedList, modules: Sequence[str], moved: dict[str, list[str]], left: Sequence[str], matches: Matcher
) -> None:
    """The modules that the new list names are those that the old one named."""
    was = {new for module in modules if any(matches(e, module) for e in carried.old) for new in moved[module]}
    now = {module for module in left if any(matches(entry, module) for entry in carried.new)}
    odd = sorted(was ^ now)
    if odd:
        raise CannotApply(
            f"{'.'.join(carried.path)} would say something else of {len(odd)} modules, first {odd[0]}",
            f"config.json {'.'.join(carried.path)}",
            "write the entries as plain module names first",
        )


def unknown_numbers(config: Any) -> list[str]:
    """Texts of the quantisation sections that name layers by number outside the lists that are understood."""
    return [text for text in unlisted_texts(config) if NUMBERED.search(text)]


def unlisted_texts(config: Any) -> Iterator[str]:
    """Keys and texts of the quantisation sections outside the lists that are understood."""
    for _, section in _sections(config):
        yield from _strings(section)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield key
            if key not in _LIST_FIELDS:
                yield from _strings(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from _strings(entry)
