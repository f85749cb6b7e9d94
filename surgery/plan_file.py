"""A plan as JSON: one line a tensor, so that it can be compared and kept in git; and the digest that names it.

Written and hashed in pieces: a plan of a million tensors never exists as one string.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import xxhash

from surgery.errors import SourceError, UsageError
from surgery.plan_check import check_plan
from surgery.plan_types import PLAN_FORMAT, Plan

_ITEMS_AT_A_TIME = 4096
_LISTS = ("sources", "side_files", "checks", "dropped", "config_changes", "decisions", "cover", "inputs")


def plan_digest(plan: Plan) -> str:
    """xxh3-128 of the plan's JSON without `roots`: the same job from another place has the same digest."""
    hasher = xxhash.xxh3_128()
    for piece in _pieces(plan, with_roots=False):
        hasher.update(piece)
    return hasher.hexdigest()


def write_plan(plan: Plan, file: BinaryIO) -> None:
    for piece in _pieces(plan, with_roots=True):
        file.write(piece)


def _pieces(plan: Plan, *, with_roots: bool) -> Iterator[bytes]:
    encode = msgspec.json.Encoder(decimal_format="number").encode
    yield b'{"format":%d,"tool":%s' % (plan.format, encode(plan.tool))
    if with_roots:
        yield b',\n"roots":' + encode(plan.roots)
    for field in ("recipe", "metadata", "index", "layers", "experts", "partition", "ranks", "totals"):
        yield b',\n"%s":' % field.encode() + encode(getattr(plan, field))
    for field in _LISTS:
        yield b',\n"%s":' % field.encode()
        yield from _lines(getattr(plan, field))
    yield b',\n"files":['
    for number, planned in enumerate(plan.files):
        separator = b"," if number else b""
        yield b'%s\n{"name":%s,"nbytes":%d' % (separator, encode(planned.name), planned.nbytes)
        if planned.rank >= 0:
            yield b',"rank":%d,"metadata":%s' % (planned.rank, encode(planned.metadata))
        yield b',"tensors":'
        yield from _lines(planned.tensors)
        yield b"}"
    yield b"]}\n"


def _lines(items: Sequence[object]) -> Iterator[bytes]:
    """A JSON list, an item a line: a newline never stands inside an item, JSON escapes it."""
    encoder = msgspec.json.Encoder(decimal_format="number")
    yield b"["
    for start in range(0, len(items), _ITEMS_AT_A_TIME):
        lines = encoder.encode_lines(items[start : start + _ITEMS_AT_A_TIME])
        yield (b",\n" if start else b"\n") + lines[:-1].replace(b"\n", b",\n")
    yield b"]"


def read_plan(path: Path) -> Plan:
    """The plan in `path`, judged as any plan is. Raises `SourceError` for a file that is none."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SourceError(f"cannot read the plan: {error.strerror}", str(path), "name a plan file") from error
    return decode_plan(data, str(path))


def decode_plan(data: bytes, where: str) -> Plan:
    try:
        version: Any = msgspec.json.decode(data, type=_Version).format
        if version != PLAN_FORMAT:
            raise UsageError(
                f"plan format {version}; this surgery reads format {PLAN_FORMAT}",
                where,
                "make the plan again with this version",
            )
        plan = msgspec.json.decode(data, type=Plan)
    except (msgspec.DecodeError, RecursionError) as error:
        raise SourceError(
            f"not a plan: {error}", where, "make the plan again with `surgery plan ... -o plan.json`"
        ) from error
    check_plan(plan)
    return plan


class _Version(msgspec.Struct):
    format: int
