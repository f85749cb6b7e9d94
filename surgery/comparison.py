"""Two checkpoints compared: names, shapes, dtypes, bytes, config, metadata, side files. Sharding is aside."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from surgery.checkpoint import Checkpoint
from surgery.safetensors_file import StoredTensor
from surgery.storage import same_bytes

MAX_RUN_NBYTES = 64 << 20
"""Tensors that follow one another in both files are compared together up to this size: fewer files to open, and at
most so much to read again when one of them differs."""

_DOCUMENT = re.compile(r"(?:.*/)?(?:readme|licen[cs]e|notice)[^/]*|.*\.md|(?:.*/)?surgery\.json", re.IGNORECASE)
"""Side files that no program reads to run the model."""

Pair = tuple[StoredTensor, StoredTensor]


class Described(msgspec.Struct, frozen=True):
    """A tensor that only one side has."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Differing(msgspec.Struct, frozen=True):
    """A dtype or shape, in A and in B, as text."""

    name: str
    a: str
    b: str


class BytesDiffer(msgspec.Struct, frozen=True):
    name: str
    nbytes: int


class ConfigDifference(msgspec.Struct, frozen=True):
    """One value at a JSON path of the config; `a` is None where it was added, `b` where it was removed."""

    path: str
    change: str
    a: Any = None
    b: Any = None


class MetadataDifference(msgspec.Struct, frozen=True):
    """The values that the headers of each side have for one key; None among them: a file that has it not."""

    key: str
    a: list[str | None]
    b: list[str | None]


class SideFileDifference(msgspec.Struct, frozen=True):
    """`change`: removed (only in A), added (only in B) or changed. Documents do not count as a difference."""

    name: str
    change: str
    document: bool


class Side(msgspec.Struct, frozen=True):
    source: str
    tensors: int
    nbytes: int
    files: int


class Comparison(msgspec.Struct):
    """`same` is the verdict; `nbytes_compared` is None where bytes were not looked at. `other_layout`: tensors lie in
    other files or at other places, which is no difference of the model."""

    same: bool
    a: Side
    b: Side
    equal_tensors: int
    nbytes_compared: int | None
    only_in_a: list[Described]
    only_in_b: list[Described]
    dtypes: list[Differing]
    shapes: list[Differing]
    bytes: list[BytesDiffer]
    config: list[ConfigDifference]
    metadata: list[MetadataDifference]
    side_files: list[SideFileDifference]
    other_layout: bool


def compare(
    a: Checkpoint, b: Checkpoint, *, with_bytes: bool = True, advance: Callable[[int], None] = lambda nbytes: None
) -> Comparison:
    """Every difference of two checkpoints; `advance` is told of bytes as they are compared.

    Raises `SourceError` where a file changes or fails while it is read.
    """
    pairs = common_pairs(a, b)
    differing = [pair for run in _runs(pairs) for pair in _differing(a, b, run, advance)] if with_bytes else []
    shared = [(a.tensors[name], b.tensors[name]) for name in sorted(a.tensors.keys() & b.tensors.keys())]
    result = Comparison(
        same=False,
        a=_side(a),
        b=_side(b),
        equal_tensors=len(pairs) - len(differing),
        nbytes_compared=sum(first.nbytes for first, _ in pairs) if with_bytes else None,
        only_in_a=_only(a, b),
        only_in_b=_only(b, a),
        dtypes=[Differing(s.name, s.dtype, t.dtype) for s, t in shared if s.dtype != t.dtype],
        shapes=[Differing(s.name, _shape(s), _shape(t)) for s, t in shared if s.shape != t.shape],
        bytes=sorted((BytesDiffer(s.name, s.nbytes) for s, _ in differing), key=lambda found: found.name),
        config=_config(a.config, b.config),
        metadata=_metadata(a, b),
        side_files=_side_files(a, b),
        other_layout=_layout(a) != _layout(b),
    )
    counted = [side for side in result.side_files if not side.document]
    result.same = not any(
        (
            result.only_in_a,
            result.only_in_b,
            result.dtypes,
            result.shapes,
            result.bytes,
            result.config,
            result.metadata,
            counted,
        )
    )
    return result


def common_pairs(a: Checkpoint, b: Checkpoint) -> list[Pair]:
    """Tensors of one name, dtype and shape, in the order of A's bytes."""
    pairs = []
    for tensor in a.tensors.values():
        twin = b.tensors.get(tensor.name)
        if twin is not None and (twin.dtype, twin.shape) == (tensor.dtype, tensor.shape):
            pairs.append((tensor, twin))
    return sorted(pairs, key=lambda pair: (pair[0].file, pair[0].offset))


def _runs(pairs: list[Pair]) -> Iterator[list[Pair]]:
    """Pairs that follow one another without a gap in both files."""
    run: list[Pair] = []
    nbytes = 0
    for pair in pairs:
        follows = bool(run) and all(
            this.file == last.file and this.offset == last.offset + last.nbytes
            for this, last in zip(pair, run[-1], strict=True)
        )
        if run and (not follows or nbytes + pair[0].nbytes > MAX_RUN_NBYTES):
            yield run
            run, nbytes = [], 0
        run.append(pair)
        nbytes += pair[0].nbytes
    if run:
        yield run


def _differing(a: Checkpoint, b: Checkpoint, run: list[Pair], advance: Callable[[int], None]) -> list[Pair]:
    def same(first: StoredTensor, second: StoredTensor, nbytes: int) -> bool:
        return same_bytes(a.path(first.file), first.offset, b.path(second.file), second.offset, nbytes)

    nbytes = sum(first.nbytes for first, _ in run)
    differing: list[Pair] = []
    if not same(*run[0], nbytes):
        differing = run if len(run) == 1 else [pair for pair in run if not same(*pair, pair[0].nbytes)]
    advance(nbytes)
    return differing


def _side(checkpoint: Checkpoint) -> Side:
    return Side(
        str(checkpoint.root),
        len(checkpoint.tensors),
        sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
        len(checkpoint.files),
    )


def _only(one: Checkpoint, other: Checkpoint) -> list[Described]:
    names = sorted(one.tensors.keys() - other.tensors.keys())
    return [Described(n, one.tensors[n].dtype, one.tensors[n].shape, one.tensors[n].nbytes) for n in names]


def _shape(tensor: StoredTensor) -> str:
    return str(list(tensor.shape))


def _layout(checkpoint: Checkpoint) -> list[tuple[str, str, int]]:
    return sorted((t.name, checkpoint.files[t.file].name, t.offset) for t in checkpoint.tensors.values())


def _config(a: dict[str, Any] | None, b: dict[str, Any] | None) -> list[ConfigDifference]:
    if a is None or b is None:
        if a is b:
            return []
        return [ConfigDifference("config.json", "added" if a is None else "removed")]
    return list(_values("", a, b))


def _values(path: str, a: Any, b: Any) -> Iterator[ConfigDifference]:
    """Differences below `path`. The order of keys is none; 1, 1.0 and true are three values, as JSON readers see them.

    Lists of one length are compared entry by entry, others whole.
    """
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(key for key in b if key not in a)]:
            place = _below(path, key)
            if key not in b:
                yield ConfigDifference(place, "removed", a=a[key])
            elif key not in a:
                yield ConfigDifference(place, "added", b=b[key])
            else:
                yield from _values(place, a[key], b[key])
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for number, (first, second) in enumerate(zip(a, b, strict=True)):
            yield from _values(f"{path}[{number}]", first, second)
    elif type(a) is not type(b) or (a != b and not _both_nan(a, b)):
        yield ConfigDifference(path, "changed", a, b)


def _both_nan(a: Any, b: Any) -> bool:
    return bool(a != a and b != b)


def _below(path: str, key: str) -> str:
    if not re.fullmatch(r"[\w-]+", key):
        return f'{path}["{key}"]'
    return f"{path}.{key}" if path else key


def _metadata(a: Checkpoint, b: Checkpoint) -> list[MetadataDifference]:
    """Header strings, whichever file has them: only the set of values of a key can survive another sharding."""
    keys = sorted({key for side in (a, b) for file in side.files for key in file.metadata})
    found = []
    for key in keys:
        values = [sorted({file.metadata.get(key) for file in side.files}, key=lambda v: v or "") for side in (a, b)]
        if values[0] != values[1]:
            found.append(MetadataDifference(key, values[0], values[1]))
    return found


def _side_files(a: Checkpoint, b: Checkpoint) -> list[SideFileDifference]:
    held = [{side.name: side.nbytes for side in checkpoint.side_files} for checkpoint in (a, b)]
    found = []
    for name in sorted({*held[0], *held[1]}):
        if name not in held[0] or name not in held[1]:
            change = "added" if name not in held[0] else "removed"
        elif held[0][name] != held[1][name] or not same_bytes(a.root / name, 0, b.root / name, 0, held[0][name]):
            change = "changed"
        else:
            continue
        found.append(SideFileDifference(name, change, _DOCUMENT.fullmatch(name) is not None))
    return found
