"""One safetensors file: read and prove its header, build a header.

The format (safetensors 0.8, `tensor.rs`): 8 bytes little-endian length N, N bytes of JSON that begin with `{` and may
be padded with spaces, then the data, which the tensors cover exactly: every tensor begins where the one before it
ended and the last ends with the file. One walk over the offsets proves all of that.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import xxhash

from surgery.errors import SourceError, printable

DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits an element, in the order of the reference's enum: that order decides the layout of a file it writes."""

MAX_HEADER_NBYTES = 100_000_000
"""The reference refuses longer headers when it reads and when it writes."""

_U64_END = 1 << 64
_DTYPE_RANK = {dtype: rank for rank, dtype in enumerate(DTYPE_BITS)}
_JSON_TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
_quoted = json.JSONEncoder(ensure_ascii=False).encode
_ENTRY_KEYS = frozenset({"dtype", "shape", "data_offsets"})


class StoredTensor(msgspec.Struct, frozen=True, gc=False):
    """A tensor as it lies in a file: `offset` is the absolute position of its first byte in the owner's `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int

    @property
    def nbytes(self) -> int:
        return tensor_nbytes(self.dtype, self.shape)


class Header(msgspec.Struct, frozen=True):
    """A proven header. `tensors` in the order of their bytes, `digest` the xxh3-128 of length and header bytes.

    `deviations` are things that the reference reads and the specification forbids.
    """

    tensors: list[StoredTensor]
    metadata: dict[str, str] | None
    data_offset: int
    file_nbytes: int
    digest: str
    deviations: tuple[str, ...] = ()


@lru_cache(maxsize=4096)
def tensor_nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor. Raises `ValueError` for an unknown dtype or a size that is no whole number of bytes."""
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        raise ValueError(f"unknown dtype {dtype!r}")
    nbits = math.prod(shape) * bits
    if nbits % 8:
        raise ValueError(f"{dtype} of shape {list(shape)} is no whole number of bytes")
    return nbits // 8


def file_order(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Tensors as the reference lays them out: widest dtype first, so that all stay aligned, then by name."""
    return sorted(tensors, key=lambda tensor: (-_DTYPE_RANK[tensor[1]], tensor[0].encode()))


def build_header(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]
) -> tuple[bytes, list[tuple[str, int]]]:
    """Header bytes, length included, for `(name, dtype, shape)` tensors, and each name with its data position.

    Byte-identical to what the reference writes for the same tensors; metadata, whose order it leaves to chance, is
    sorted. Raises `ValueError` for a header over the format's cap.
    """
    entries: list[str] = []
    placed: list[tuple[str, int]] = []
    position = 0
    if metadata:
        pairs = ",".join(f"{_quoted(key)}:{_quoted(value)}" for key, value in sorted(metadata.items()))
        entries.append(f'"__metadata__":{{{pairs}}}')
    for name, dtype, shape in file_order(tensors):
        end = position + tensor_nbytes(dtype, shape)
        dimensions = ",".join(map(str, shape))
        entries.append(
            f'{_quoted(name)}:{{"dtype":"{dtype}","shape":[{dimensions}],"data_offsets":[{position},{end}]}}'
        )
        placed.append((name, position))
        position = end
    text = ("{" + ",".join(entries) + "}").encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_NBYTES:
        raise ValueError(f"a header of {len(text)} bytes; the format allows {MAX_HEADER_NBYTES}")
    return len(text).to_bytes(8, "little") + text, placed


def read_header(path: Path, file: int = 0, where: str | None = None) -> Header:
    """The proven header of the file at `path`. Raises `SourceError` with the real reason where it has none.

    Opens for reading only, closes at once. FIFOs and devices are refused without waiting for them.
    """
    place = where or str(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise SourceError(f"cannot open: {error.strerror}", place, "check the path and its permissions") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise SourceError("not a regular file", place, "name a .safetensors file")
        start = _read_exactly(descriptor, min(8, status.st_size), place)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(MAX_HEADER_NBYTES, status.st_size - 8):
            rest = _read_exactly(descriptor, min(1024, status.st_size - len(start)), place)
            _refuse_length(start + rest, length, status.st_size, place)
        raw = start + _read_exactly(descriptor, length, place)
    finally:
        os.close(descriptor)
    return parse_header(raw, status.st_size, place, file)


def _read_exactly(descriptor: int, nbytes: int, where: str) -> bytes:
    pieces: list[bytes] = []
    while nbytes:
        try:
            piece = os.read(descriptor, nbytes)
        except OSError as error:
            raise SourceError(f"cannot read: {error.strerror}", where, "check the disk") from error
        if not piece:
            raise SourceError("the file became shorter while it was read", where, "run again when it is complete")
        pieces.append(piece)
        nbytes -= len(piece)
    return b"".join(pieces)


def _refuse_length(start: bytes, length: int, file_nbytes: int, where: str) -> NoReturn:
    """Say what a file is that cannot be a safetensors file by its first bytes."""
    again = "get the file again"
    if start.startswith(b"version https://git-lfs"):
        oid = re.search(rb"oid (\S+)", start)
        size = re.search(rb"size (\d+)", start)
        promise = f"{oid[1].decode('ascii', 'replace') if oid else '?'}, {int(size[1]) if size else '?'} bytes"
        raise SourceError(
            f"a Git LFS pointer of {file_nbytes} bytes, not the file it stands for ({promise})",
            where,
            "run `git lfs pull` in the repository, or `hf download` the model",
        )
    if start.lstrip()[:1] == b"<":
        raise SourceError(
            f"not safetensors but an HTML or XML page: {_shown(start)}",
            where,
            "the download saved an error page",
        )
    if start.startswith(b"PK\x03\x04"):
        raise SourceError("not safetensors but a zip, as torch.save writes", where, "convert it to safetensors")
    if start.startswith(b"GGUF"):
        raise SourceError("not safetensors but a GGUF file", where, "use the model's safetensors files")
    if file_nbytes < 8:
        raise SourceError(f"{file_nbytes} bytes: too short for a safetensors file", where, again)
    if length > MAX_HEADER_NBYTES:
        raise SourceError(
            f"a header of {length} bytes is declared, the format allows {MAX_HEADER_NBYTES}; "
            f"the file begins {_shown(start)}",
            where,
            "this is no safetensors file, or a damaged one",
        )
    raise SourceError(
        f"cut short inside its header: {8 + length} bytes declared, the file has {file_nbytes}, "
        f"{8 + length - file_nbytes} bytes short",
        where,
        again,
    )


def _shown(data: bytes) -> str:
    return printable(repr(data[:48].decode("utf-8", "replace")))


def parse_header(raw: bytes, file_nbytes: int, where: str, file: int = 0) -> Header:
    """Prove `raw` (length and header bytes) of a file of `file_nbytes` bytes. Raises `SourceError`."""
    text = _decoded(raw[8:], where)
    parsed, deviations = _parsed(text, where)
    metadata = _metadata(parsed, where)
    proven: _Proven = {}
    located: list[tuple[int, int, StoredTensor]] = []
    data_offset = len(raw)
    for name, entry in parsed.items():
        if name == "__metadata__":
            continue
        known = _known_entry(entry, proven)
        dtype, shape, begin, end = known if known is not None else _entry(name, entry, where, proven)
        if len(entry) > 3:
            surplus = sorted(set(entry) - _ENTRY_KEYS)
            deviations.append(f"the entry of {name} has the unknown key {surplus[0]!r}")
        located.append((begin, end, StoredTensor(name, dtype, shape, file, data_offset + begin)))
    located.sort(key=lambda item: item[:2])
    _prove_offsets(located, file_nbytes - data_offset, where)
    return Header(
        [tensor for _, _, tensor in located],
        metadata,
        data_offset,
        file_nbytes,
        xxhash.xxh3_128_hexdigest(raw),
        tuple(deviations),
    )


def _decoded(header: bytes, where: str) -> str:
    try:
        return header.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(
            f"the header is not UTF-8 at byte {8 + error.start}", where, "the file is damaged: get it again"
        ) from error


class _Duplicate(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Objects with a name twice are refused, also where one spelling is escaped (case F05)."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Duplicate(key)
            seen.add(key)
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _plain_integer(text: str) -> int:
    if text.startswith("-0"):
        raise ValueError("-0 is no unsigned integer")
    return int(text)


def _parsed(text: str, where: str) -> tuple[dict[str, Any], list[str]]:
    """The header's JSON object, and what the specification forbids about its padding."""
    deviations = []
    if text[:1].isspace():
        deviations.append("the header begins with white space, not with {")
    body = text.rstrip(" ")
    if body[-1:] in ("\n", "\t", "\r"):
        deviations.append("the header is padded with other white space than spaces")
    try:
        decoder = json.JSONDecoder(
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            # serde reads -0 as a float, so the reference refuses it where a size belongs.
            parse_int=_plain_integer if "-0" in text else None,
        )
        parsed = decoder.decode(text)
    except _Duplicate as error:
        raise SourceError(
            f"the header has the name {str(error)!r} twice",
            where,
            "names must be unique; make the file again",
        ) from None
    except (ValueError, RecursionError) as error:
        shown = "a BOM" if text.startswith("\ufeff") else _shown(text.encode("utf-8", "replace"))
        raise SourceError(
            f"the header is not JSON: {error}; it begins {shown}", where, "the file is damaged: get it again"
        ) from None
    if not isinstance(parsed, dict):
        raise SourceError(f"the header is {_json_type(parsed)}, not an object", where, "make the file again")
    if "\\ud" in text or "\\uD" in text:
        _refuse_surrogates(parsed, where)
    return parsed, deviations


def _refuse_surrogates(parsed: dict[str, Any], where: str) -> None:
    """Half of a surrogate pair is no text: it could not be written again."""
    metadata = parsed.get("__metadata__")
    texts = [*parsed, *(metadata or {}), *(metadata or {}).values()] if isinstance(metadata, dict) else [*parsed]
    for text in texts:
        try:
            str(text).encode("utf-8")
        except UnicodeEncodeError:
            raise SourceError(
                f"the name {printable(str(text))!r} is no valid text", where, "make the file again"
            ) from None


def _json_type(value: Any) -> str:
    return _JSON_TYPES.get(type(value), "null")


def _metadata(parsed: dict[str, Any], where: str) -> dict[str, str] | None:
    metadata = parsed.get("__metadata__")
    if metadata is None:
        return None
    if not isinstance(metadata, dict):
        raise SourceError(f"__metadata__ is {_json_type(metadata)}, not an object", where, "make the file again")
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise SourceError(
                f"__metadata__ {key!r} is of type {_json_type(value)}; the format allows strings only",
                where,
                "write the value as a string",
            )
    return metadata


_Proven = dict[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...], int]]
"""dtype and shape -> the same as shared objects, and their bytes: a model has few shapes and many tensors."""


def _known_entry(entry: Any, proven: _Proven) -> tuple[str, tuple[int, ...], int, int] | None:
    """An entry like one that was proven before, the offsets new. None for all others: `_entry` judges them."""
    try:
        shape = entry["shape"]
        begin, end = entry["data_offsets"]
        dtype, shape_tuple, nbytes = proven[entry["dtype"], tuple(shape)]
    except (KeyError, TypeError, ValueError):
        return None
    # True and 1.0 equal 1 as keys and are no sizes.
    plain = type(begin) is int and type(end) is int and set(map(type, shape)) <= {int}
    if plain and 0 <= begin and end - begin == nbytes and end < _U64_END:
        return dtype, shape_tuple, begin, end
    return None


def _entry(name: str, entry: Any, where: str, proven: _Proven) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape and offsets of one tensor, of the right types and agreeing with one another."""

    def refuse(what: str) -> NoReturn:
        raise SourceError(f"tensor {name}: {what}", where, "the file is damaged or its writer is: get it again")

    if not isinstance(entry, dict):
        refuse(f"its entry is {_json_type(entry)}, not an object")
    missing = _ENTRY_KEYS - entry.keys()
    if missing:
        refuse(f"its entry has no {sorted(missing)[0]}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        refuse(f"its dtype is {_json_type(dtype)}, not a string")
    if dtype not in DTYPE_BITS:
        refuse(f"unknown dtype {dtype!r}; known are {', '.join(DTYPE_BITS)}")
    for values in (shape, offsets):
        if not isinstance(values, list):
            refuse(f"{_json_type(values)} where a list of sizes belongs")
        for value in values:
            if type(value) is not int or not 0 <= value < _U64_END:
                refuse(f"{_json_type(value)} {value!s:.40} where a size below 2^64 belongs")
    if len(offsets) != 2:
        refuse(f"{len(offsets)} data_offsets; there are two")
    elements = 1
    for size in shape:
        # In the order of the axes, as the reference multiplies: a zero behind an overflow does not excuse it.
        elements *= size
        if elements >= _U64_END:
            refuse(f"shape {shape} overflows 64 bits")
    nbits = elements * DTYPE_BITS[dtype]
    begin, end = offsets
    if nbits >= _U64_END or nbits % 8:
        refuse(f"shape {shape} of {dtype} is no whole number of bytes" if nbits % 8 else f"shape {shape} overflows")
    if end - begin != nbits // 8:
        refuse(f"data_offsets {offsets} hold {end - begin} bytes, shape {shape} of {dtype} needs {nbits // 8}")
    known = (_DTYPE_NAMES[dtype], tuple(shape), end - begin)
    proven[known[:2]] = known
    return known[0], known[1], begin, end


_DTYPE_NAMES = {dtype: dtype for dtype in DTYPE_BITS}
"""One string object a dtype, however many tensors have it."""


def _prove_offsets(located: list[tuple[int, int, StoredTensor]], data_nbytes: int, where: str) -> None:
    """Each tensor begins where the one before ended, the last ends with the file."""
    damaged = "the file is damaged or its writer is: get it again"
    position, before = 0, None
    for begin, end, tensor in located:
        if begin < position and before is not None:
            raise SourceError(
                f"tensors overlap: {before[2].name} at [{before[0]}, {before[1]}] and "
                f"{tensor.name} at [{begin}, {end}]",
                where,
                damaged,
            )
        if begin != position:
            raise SourceError(
                f"a gap of {begin - position} bytes before tensor {tensor.name} at [{begin}, {end}]",
                where,
                damaged,
            )
        position, before = end, (begin, end, tensor)
    if position > data_nbytes:
        raise SourceError(
            f"cut short: the header needs {position} bytes of data, the file has {data_nbytes}, "
            f"{_counted(position - data_nbytes)} short",
            where,
            "the download or copy was interrupted: get the file again",
        )
    if position < data_nbytes:
        raise SourceError(
            f"{_counted(data_nbytes - position)} of surplus data after the last tensor "
            f"({data_nbytes} there, {position} described)",
            where,
            "the format allows none; get the file again from its publisher",
        )


def _counted(nbytes: int) -> str:
    return f"{nbytes} byte" if nbytes == 1 else f"{nbytes} bytes"
