"""The source proof: the output's bytes derived again from the source, on a path that shares nothing with the one
that wrote them: the safetensors library says what the files hold, numpy compares the bytes."""

from __future__ import annotations

import errno
import json
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from surgery.checkpoint import MAX_CONFIG_NBYTES
from surgery.errors import SourceError
from surgery.manifest import MANIFEST_NAME, ManifestTensor
from surgery.safetensors_file import MAX_HEADER_NBYTES
from surgery.side_files import is_index_file
from surgery.storage import read_bytes
from surgery.tiling import Fill, Tile
from surgery.verifying.accounting import check_accounts, check_maps
from surgery.verifying.edited_json import edit_fault
from surgery.verifying.manifest_check import is_plain
from surgery.verifying.manifest_reader import ManifestReader
from surgery.verifying.rehash import open_regular
from surgery.verifying.source_tiles import (
    ByteFile,
    coverage_fault,
    element_bits,
    first_difference,
    tile_difference,
)
from surgery.verifying.verdicts import Findings, SourceProof

_MAX_SURVEYED = 8
"""Files whose tensors are kept in mind; sources are used nearly in their own order."""

_AGAIN = "make the output again from this source"
_NOT_COPIES = frozenset({"config.json", "README.md", MANIFEST_NAME})


class Place(msgspec.Struct, frozen=True, gc=False):
    """Where a tensor lies in its file, by the safetensors library."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def surveyed(path: Path) -> dict[str, Place]:
    """Every tensor of a file. Positions follow from sizes: the format has no gaps. Raises OSError, also for a file
    that the library refuses."""
    from safetensors import SafetensorError, safe_open

    with open_regular(path) as file:
        position = 8 + int.from_bytes(file.read(8), "little")
    places: dict[str, Place] = {}
    try:
        with safe_open(path, framework="np") as opened:
            for name in opened.offset_keys():
                part = opened.get_slice(name)
                dtype, shape, nbits = str(part.get_dtype()), tuple(part.get_shape()), 1
                for size in shape:
                    nbits *= size
                nbytes = nbits * element_bits(dtype) // 8
                places[name] = Place(dtype, shape, position, nbytes)
                position += nbytes
    except SafetensorError as error:
        raise OSError(errno.EIO, f"the safetensors library refuses it: {error}", str(path)) from error
    return places


def _lot(tensor: ManifestTensor, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{seed}:{tensor.name}".encode())


class _Surveys:
    """`surveyed` files, the latest few of them."""

    def __init__(self) -> None:
        self._held: OrderedDict[Path, dict[str, Place]] = OrderedDict()

    def of(self, path: Path) -> dict[str, Place]:
        if path in self._held:
            self._held.move_to_end(path)
        else:
            if len(self._held) >= _MAX_SURVEYED:
                self._held.popitem(last=False)
            self._held[path] = surveyed(path)
        return self._held[path]


class Proof:
    """One comparison of `directory` with its source."""

    def __init__(
        self,
        reader: ManifestReader,
        directory: Path,
        against: Sequence[Path],
        findings: Findings,
        advance: Callable[[int], None],
    ) -> None:
        self._reader = reader
        self._head = reader.head
        self._directory = directory
        self._roots = [path if path.is_dir() else path.parent for path in against]
        self._findings = findings
        self._advance = advance
        self._surveys = _Surveys()
        self._result = SourceProof("passed")
        self._open: OrderedDict[Path, ByteFile] = OrderedDict()

    def prove(self, sample: float, seed: int) -> SourceProof:
        """Identity of the source, accounting, and the bytes of a `sample` of the tensors chosen by `seed`."""
        needed = 1 + max((source.root for source in self._head.sources), default=0)
        if needed != len(self._roots):
            told = f"everything: the output has {needed} sources; give --against {needed} times, in their order"
            return SourceProof("unverified", not_looked_at=[told])
        if self._is_the_source() and check_accounts(self._reader, self._roots, self._surveys.of, self._fault):
            check_maps(self._reader, self._fault)
            self._check_config()
            self._check_side_files()
            total = self._compare_tensors(sample, seed)
            self._result.share = self._result.tensors / total if total else 1.0
            if sample < 1 and total > self._result.tensors:
                left = total - self._result.tensors
                told = f"{left:,} of {total:,} tensors: --sample {sample:g} was asked for, with seed {seed}"
                self._result.not_looked_at.append(told)
            if total and not self._result.tensors:
                self._result.verdict = "unverified"
        else:
            self._result.not_looked_at.append("tensor bytes: this is not the source that the manifest describes")
        if self._findings.faults:
            self._result.verdict = "failed"
        return self._result

    def _fault(self, kind: str, what: str, where: str, tensor: str | None = None, mend: str = _AGAIN) -> None:
        self._findings.fault(kind, what, where, mend, tensor)

    def _is_the_source(self) -> bool:
        """Whether every file that the output was made from lies there, with the header that it had."""
        mend = "name the SRC that the output was made from"
        right = True
        for source in self._head.sources:
            path = self._roots[source.root] / source.name
            try:
                if not is_plain(source.name):
                    raise OSError(errno.EINVAL, "no plain path inside the source", source.name)
                with open_regular(path) as file:
                    start = file.read(8)
                    header = start + file.read(min(MAX_HEADER_NBYTES, int.from_bytes(start, "little")))
                    nbytes = file.seek(0, 2)
            except OSError as error:
                what = f"this is not the source: {source.name} cannot be read there: {error.strerror}"
                self._fault("not-the-source", what, str(path), mend=mend)
                right = False
                continue
            digest = xxhash.xxh3_128_hexdigest(header)
            if (nbytes, digest) != (source.nbytes, source.header_digest):
                what = (
                    f"this is not the source: {source.name} has {nbytes} bytes and header {digest}; the output "
                    f"was made from {source.nbytes} bytes and header {source.header_digest}"
                )
                self._fault("not-the-source", what, str(path), mend=mend)
                right = False
        return right

    def _check_config(self) -> None:
        """The output's config is the source's, but for the changes that the manifest tells."""
        old, new = _config(self._roots[0]), _config(self._directory)
        if old is None or new is None:
            return
        told = {change.keys[0] for change in self._head.config_changes if change.file == "config.json"}
        for key in [*new, *(key for key in old if key not in new)]:
            if key not in told and old.get(key) != new.get(key):
                what = (
                    f"{key} of config.json is {new.get(key)!r}, in the source {old.get(key)!r}; no change is recorded"
                )
                self._fault("config-change", what, "config.json")

    def _check_side_files(self) -> None:
        """Files beside the weights are the source's own bytes, or its JSON with the changes that the manifest tells."""
        for name, entry in self._head.files.items():
            if entry.header_xxh3_128 or name in _NOT_COPIES or is_index_file(name):
                continue
            if entry.source and not is_plain(entry.source):
                continue
            twin = self._roots[0] / (entry.source or name)
            if not twin.is_file():
                self._result.not_looked_at.append(f"{name}: the source has no such file")
                continue
            changes = [change for change in self._head.config_changes if change.file == name]
            if changes:
                fault = edit_fault(twin, self._directory / name, changes)
                if fault is not None:
                    self._fault("side-file", f"{name} {fault}", name)
                told = f"{name}: only the recorded changes were made; whether they fit the layers is not proven"
                self._result.not_looked_at.append(told)
                continue
            try:
                nbytes = (self._directory / name).stat().st_size
                equal = nbytes == twin.stat().st_size and (
                    first_difference(self._file(self._directory / name), 0, self._file(twin), 0, nbytes, lambda _: None)
                    is None
                )
            except OSError as error:
                self._fault("unreadable-file", f"{name} cannot be compared: {error.strerror}", name)
                continue
            if not equal:
                self._fault("side-file", f"{name} is not the source's file of that name", name)

    def _compare_tensors(self, sample: float, seed: int) -> int:
        """Compare the chosen tensors; returns how many there are in all."""
        total = 0
        limit = self._sample_limit(sample, seed)
        try:
            for tensor in self._reader.tensors():
                total += 1
                if _lot(tensor, seed) > limit:
                    continue
                try:
                    fault = self._fault_of(tensor)
                except OSError as error:
                    fault = f"cannot be compared: {error.strerror or error}"
                except ValueError as error:  # A fill that is no element of its dtype.
                    fault = f"is not described by its tiling: {error}"
                self._result.tensors += 1
                if fault is not None:
                    self._fault("source-bytes", f"{tensor.name} {fault}", tensor.file, tensor.name)
        finally:
            for file in self._open.values():
                file.close()
            self._open.clear()
        return total

    def _sample_limit(self, sample: float, seed: int) -> int:
        """The highest lot that is drawn: exactly the share asked for, and never none."""
        if sample >= 1:
            return 1 << 64
        lots = array("Q", (_lot(tensor, seed) for tensor in self._reader.tensors()))
        drawn = sorted(lots)[: max(1, round(sample * len(lots)))]
        return drawn[-1] if drawn else 0

    def _fault_of(self, tensor: ManifestTensor) -> str | None:
        """What is wrong with one tensor of the output, compared with its source; None where nothing is."""
        if not is_plain(tensor.file):
            return "is placed outside the output"
        path = self._directory / tensor.file
        place = self._surveys.of(path).get(tensor.name)
        if place is None:
            return f"is not in {tensor.file}"
        if (place.dtype, place.shape) != (tensor.dtype, tensor.shape):
            return f"is {place.dtype} {list(place.shape)}, in the manifest {tensor.dtype} {list(tensor.shape)}"
        self._result.nbytes += place.nbytes
        if tensor.tiling is not None:
            return self._tiling_fault(tensor, path, place)
        if tensor.source is None or tensor.source_file is None:
            return "has no source in the manifest"
        source_path = self._source_path(tensor.source_file)
        source = self._surveys.of(source_path).get(tensor.source)
        if source is None or (source.dtype, source.shape) != (place.dtype, place.shape):
            return f"is said to be {tensor.source}, which the source has not, or in another shape"
        differs = first_difference(
            self._file(path), place.offset, self._file(source_path), source.offset, place.nbytes, self._advance
        )
        return None if differs is None else f"differs from {tensor.source} of the source from its byte {differs} on"

    def _tiling_fault(self, tensor: ManifestTensor, path: Path, place: Place) -> str | None:
        tiling = tensor.tiling
        assert tiling is not None
        if (tiling.dtype, tiling.shape) != (place.dtype, place.shape):
            return "has a tiling of another dtype or shape"
        fault = coverage_fault(tiling)
        if fault is not None:
            return f"is not described by its tiling: {fault}"
        for tile in tiling.tiles:
            source: ByteFile | None = None
            if isinstance(tile, Tile):
                source_path = self._source_path(tile.source.file)
                fault = self._tile_source_fault(tile, source_path, tiling.stored_dtype)
                if fault is not None:
                    return fault
                source = self._file(source_path)
            differs = tile_difference(tile, tiling, self._file(path), place.offset, source, self._advance)
            if differs is not None:
                told = f"the fill {tile.element}" if isinstance(tile, Fill) else f"{tile.source.name} of the source"
                return f"differs from {told} in the block at index {list(differs)}"
        return None

    def _tile_source_fault(self, tile: Tile, path: Path, dtype: str) -> str | None:
        """The tile names a tensor that is really there, and takes elements from inside it only."""
        stored = tile.source
        there = self._surveys.of(path).get(stored.name)
        if there is None or (there.dtype, there.shape, there.offset) != (stored.dtype, stored.shape, stored.offset):
            return f"takes from {stored.name}, which the source has not, or in another place or shape"
        if there.dtype != dtype or len(tile.strides) != len(tile.shape):
            return f"takes from {stored.name}, which is of another dtype"
        reach = [(size - 1) * step for size, step in zip(tile.shape, tile.strides, strict=True)]
        lowest = tile.start + sum(step for step in reach if step < 0)
        highest = tile.start + sum(step for step in reach if step > 0)
        if lowest < 0 or highest * element_bits(dtype) // 8 >= there.nbytes:
            return f"takes elements {lowest} to {highest} of {stored.name}, which has fewer"
        return None

    def _source_path(self, number: int) -> Path:
        if not 0 <= number < len(self._head.sources):
            raise OSError(errno.ENOENT, f"source file {number} is not listed in the manifest")
        source = self._head.sources[number]
        return self._roots[source.root] / source.name

    def _file(self, path: Path) -> ByteFile:
        """`path` opened; the latest few stay open."""
        if path in self._open:
            self._open.move_to_end(path)
        else:
            if len(self._open) >= _MAX_SURVEYED:
                self._open.popitem(last=False)[1].close()
            self._open[path] = ByteFile(path)
        return self._open[path]


def _config(directory: Path) -> dict[str, Any] | None:
    try:
        config = json.loads(read_bytes(directory / "config.json", MAX_CONFIG_NBYTES))
    except (SourceError, ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None
