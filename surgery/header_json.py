"""The JSON of a header: entries of tensors, metadata, and what the specification forbids but readers take.

Everything that the reference refuses is refused (serde_json is stricter than Python's json), and more: names that are
there twice.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

from surgery.dtypes import DTYPE_BITS
from surgery.errors import SourceError, printable
from surgery.regular_file import shown

DAMAGED = "the file is damaged, or its writer is at fault: get it again from its publisher"
_MAX_JSON_DEPTH = 127
"""serde_json, and so the reference, refuses deeper nesting."""
_U64_END = 1 << 64
_DTYPE_OBJECTS = {dtype: dtype for dtype in DTYPE_BITS}  # one string object a dtype, however many tensors have it
_ENTRY_KEYS = frozenset({"dtype", "shape", "data_offsets"})
Layout = tuple[str, tuple[int, ...], int]  # dtype, shape, nbytes


class _Duplicate(ValueError):
    pass


def _object_hook() -> Callable[[list[tuple[str, Any]]], Any]:
    """What makes JSON objects of their pairs: tuples `(layout, begin, end)` of well-formed entries, dicts of others.

    Entries become small while the text is parsed: 140,000 dicts and lists at once would be 100 MB. A name that is
    there twice is refused, also where one spelling is escaped (case F05).
    """
    layouts: dict[tuple[str, tuple[int, ...]], Layout | None] = {}

    def make(pairs: list[tuple[str, Any]]) -> Any:
        if len(pairs) == 3:
            (key_a, dtype), (key_b, shape), (key_c, offsets) = pairs
            if (
                (key_a == "dtype" and key_b == "shape" and key_c == "data_offsets")
                and (type(dtype) is str and type(shape) is list and type(offsets) is list and len(offsets) == 2)
                and (type(offsets[0]) is int and type(offsets[1]) is int and offsets[0] >= 0)
                and _are_sizes(shape)
            ):
                # The end needs no bound of its own: it is compared with the size of the file.
                sizes = tuple(shape)
                layout = layouts.get((dtype, sizes))
                if layout is None:
                    layout = layouts[dtype, sizes] = _layout(dtype, sizes)
                if layout is not None:
                    return layout, offsets[0], offsets[1]
        found = dict(pairs)
        if len(found) != len(pairs):
            raise _Duplicate(Counter(key for key, _ in pairs).most_common(1)[0][0])
        return found

    return make


def _are_sizes(values: list[Any]) -> bool:
    """Plain integers of 64 bits: to Python, but not to the format, True and 1.0 are integers too."""
    for value in values:  # noqa: SIM110 (half the time of all())
        if type(value) is not int or not 0 <= value < _U64_END:
            return False
    return True


def _layout(dtype: str, shape: tuple[int, ...]) -> Layout | None:
    """dtype, shape and bytes; None for an unknown dtype, an overflow or a size of no whole bytes."""
    elements = 1
    for size in shape:
        # In the order of the axes, as the reference multiplies: a zero behind an overflow does not excuse it (F14).
        elements *= size
        if elements >= _U64_END:
            return None
    nbits = elements * DTYPE_BITS.get(dtype, 1)
    if dtype not in DTYPE_BITS or nbits >= _U64_END or nbits % 8:
        return None
    return _DTYPE_OBJECTS[dtype], shape, nbits // 8


def parsed_header(raw: bytes, where: str) -> tuple[dict[str, Any], list[str]]:
    """The header's JSON object, and what the specification forbids about its padding."""
    try:
        text = raw[8:].decode("utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"the header is not UTF-8 at byte {8 + error.start} of the file", where, DAMAGED) from error
    decoder = json.JSONDecoder(
        object_pairs_hook=_object_hook(),
        parse_constant=_refused_number,
        parse_float=_finite,
        # serde reads -0 as a float, so the reference refuses it where a size belongs.
        parse_int=_integer if "-0" in text else None,
    )
    try:
        parsed = decoder.decode(text)
    except _Duplicate as error:
        what = f"the header has the name {str(error)!r} twice in one object"
        raise SourceError(what, where, "names must be unique: its writer is at fault") from None
    except (ValueError, RecursionError) as error:
        raise SourceError(_not_json(text, error), where, DAMAGED) from None
    if not isinstance(parsed, dict):
        raise SourceError(f"the header is {_json_type(parsed)}, not an object of tensors", where, DAMAGED)
    if "\\ud" in text or "\\uD" in text:
        _refuse_half_characters(parsed, where)
    deviations = []
    if text[:1] != "{":
        deviations.append("the header begins with white space, not with {")
    if text.rstrip(" ")[-1:] != "}":
        deviations.append("the header is padded with other white space than spaces")
    return parsed, deviations


def _refused_number(text: str) -> NoReturn:
    raise ValueError(f"{text:.40} is no number that JSON allows here")


def _finite(text: str) -> float:
    return float(text) if math.isfinite(float(text)) else _refused_number(text)


def _integer(text: str) -> int:
    return int(text) if text != "-0" else _refused_number(text)


def _not_json(text: str, error: Exception) -> str:
    if not text:
        return "the header is empty: a length of 0 is declared"
    if text.startswith("\ufeff"):
        return "the header begins with a byte order mark, not with {"
    if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
        return f"the header goes on after its JSON object: {shown(text[error.pos :].encode())}"
    return f"the header is not JSON: {error}; it begins {shown(text[:48].encode())}"


def _refuse_half_characters(value: Any, where: str) -> None:
    """Half of a surrogate pair is no text: no reader takes it and it could not be written again."""
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_half_characters(key, where)
            _refuse_half_characters(item, where)
    elif isinstance(value, list):
        for item in value:
            _refuse_half_characters(item, where)
    elif isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        raise SourceError(f"'{printable(value)}' in the header is no valid text: half a character", where, DAMAGED)


def _json_type(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", int: "an integer"}
    return names.get(type(value), "null" if value is None else "a number" if type(value) is float else "an object")


def checked_metadata(metadata: Any, where: str) -> dict[str, str] | None:
    if metadata is None:
        return None
    if not isinstance(metadata, dict):
        raise SourceError(f"__metadata__ is {_json_type(metadata)}, not an object of strings", where, DAMAGED)
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise SourceError(
                f"__metadata__ {key!r} is {_json_type(value)}; the format allows strings only",
                where,
                "its writer is at fault: the value must be written as a string",
            )
    return metadata


def checked_entry(name: str, entry: Any, where: str) -> tuple[Layout, int, int]:
    """An entry that is not of the common form: its values where they are right, else the reason why not."""

    def refuse(what: str) -> NoReturn:
        raise SourceError(f"tensor {name}: {what}", where, DAMAGED)

    if not isinstance(entry, dict):
        refuse(f"its entry is {_json_type(entry)}, not an object")
    for key in ("dtype", "shape", "data_offsets"):
        if key not in entry:
            refuse(f"its entry has no {key}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        refuse(f"its dtype is {_json_type(dtype)}, not a string")
    if dtype not in DTYPE_BITS:
        refuse(f"unknown dtype {dtype!r:.60}; known are {', '.join(DTYPE_BITS)}")
    for key, values in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(values, list):
            refuse(f"its {key} is {_json_type(values)}, not an array of sizes")
        for value in values:
            if not _are_sizes([value]):
                refuse(f"its {key} has {json.dumps(value):.40} ({_json_type(value)}), no size below 2^64")
    if len(offsets) != 2:
        refuse(f"its data_offsets are {len(offsets)} numbers, not 2")
    layout = _layout(dtype, tuple(shape))
    if layout is None:
        whole = math.prod(shape) * DTYPE_BITS[dtype] % 8 == 0
        refuse(f"shape {shape!s:.200} of {dtype} " + ("overflows 64 bits" if whole else "is no whole number of bytes"))
    return layout, offsets[0], offsets[1]


def unknown_keys(name: str, entry: Any, where: str) -> list[str]:
    """What an entry holds beyond the specification. serde skips it, but within its limits of depth and size."""
    if not isinstance(entry, dict):
        return []
    unknown = [key for key in entry if key not in _ENTRY_KEYS]
    for key in unknown:
        if not _serde_reads(entry[key], depth=2):
            raise SourceError(f"tensor {name}: the value of {key!r} is too deep or too large", where, DAMAGED)
    return [f"the entry of {name} has the unknown key {key!r}" for key in unknown]


def _serde_reads(value: Any, depth: int) -> bool:
    if isinstance(value, (dict, list)):
        items = value.values() if isinstance(value, dict) else value
        return depth < _MAX_JSON_DEPTH and all(_serde_reads(item, depth + 1) for item in items)
    return not isinstance(value, int) or abs(value) < 10**308
