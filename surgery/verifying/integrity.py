"""Integrity: every file of the output is, byte for byte, what its manifest says was written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from surgery.errors import SourceError
from surgery.manifest import MANIFEST_NAME, ManifestTensor
from surgery.safetensors_file import MAX_HEADER_NBYTES, StoredTensor, parse_header, tensor_nbytes
from surgery.side_files import is_index_file, is_weight_file
from surgery.verifying.hashing_pool import HashingPool, Range
from surgery.verifying.manifest_check import Accounts, is_plain
from surgery.verifying.manifest_reader import ManifestReader
from surgery.verifying.rehash import Reader
from surgery.verifying.verdicts import Counts, Findings

PARTIAL_NAME = ".surgery-partial"
_READ_BY_LOADERS = (".json", ".jinja", ".py", ".model")
_NOT_THE_MODEL = frozenset({".git", ".cache", "__pycache__"})
_AGAIN = "make the output again from its source, or get the file again"


class Integrity:
    """The files of one directory against its manifest; what is found goes to `findings` and `counts`."""

    def __init__(
        self, directory: Path, reader: ManifestReader, accounts: Accounts, findings: Findings, counts: Counts
    ) -> None:
        self._directory = directory
        self._reader = reader
        self._head = reader.head
        self._accounts = accounts
        self._findings = findings
        self._counts = counts

    def check(self, workers: int, advance: Callable[[int], None]) -> None:
        """Sizes, headers, whole-file hashes, the bytes of every tensor; and what else is there."""
        self._counts.nbytes_expected = self._head.totals.nbytes_out
        for name, entry in self._head.files.items():
            if not entry.header_xxh3_128 and is_plain(name):
                self._check_whole_file(name)
        with HashingPool(workers, self._judge_bytes, advance) as pool:
            seen: set[str] = set()
            for name, tensors in self._by_file():
                if name in seen:
                    self._fault("manifest", f"the tensors of {name} are listed in two places", MANIFEST_NAME)
                elif is_plain(name):
                    self._check_weight_file(name, tensors, pool)
                seen.add(name)
            for name in sorted(self._accounts.data_nbytes.keys() - seen):
                if is_plain(name):
                    self._check_weight_file(name, iter(()), pool)
        self._check_surplus_files()
        if self._counts.nbytes_written != self._counts.nbytes_expected:
            self._fault(
                "bytes-written",
                f"{self._counts.nbytes_expected} bytes of tensors were expected, "
                f"{self._counts.nbytes_written} are there",
                str(self._directory),
            )

    def _fault(self, kind: str, what: str, where: str, tensor: str | None = None, mend: str = _AGAIN) -> None:
        self._findings.fault(kind, what, where, mend, tensor)

    def _by_file(self) -> Iterator[tuple[str, Iterator[ManifestTensor]]]:
        """The manifest's tensors in runs of one file; a run is over when the next is asked for."""
        known = self._accounts.data_nbytes
        tensors = (tensor for tensor in self._reader.tensors() if tensor.file in known)
        ahead = next(tensors, None)

        def run(name: str) -> Iterator[ManifestTensor]:
            nonlocal ahead
            while ahead is not None and ahead.file == name:
                tensor = ahead
                ahead = next(tensors, None)
                yield tensor

        while ahead is not None:
            rest = run(ahead.file)
            yield ahead.file, rest
            for _ in rest:
                pass

    def _check_whole_file(self, name: str) -> None:
        """A file that is not weights: present, of the right size, with the right bytes."""
        entry = self._head.files[name]
        self._counts.files += 1
        try:
            with Reader(self._directory / name) as reader:
                nbytes, digest = reader.nbytes, reader.digest(0, reader.nbytes)
        except OSError as error:
            self._cannot_read(name, error)
            return
        self._counts.nbytes_hashed += nbytes
        if nbytes != entry.nbytes:
            self._fault("file-size", f"{name} has {nbytes} bytes; the manifest says {entry.nbytes}", name)
        elif digest != entry.xxh3_128:
            self._fault("file-bytes", f"{name} hashes to {digest}; the manifest says {entry.xxh3_128}", name)
        if is_index_file(name):
            self._check_total_size(name)

    def _check_total_size(self, name: str) -> None:
        try:
            index = msgspec.json.decode((self._directory / name).read_bytes(), type=_IndexHead)
        except (OSError, msgspec.DecodeError, RecursionError):
            return  # The survey says why it cannot be read.
        total, expected = index.metadata.get("total_size"), self._head.totals.nbytes_out
        if total != expected:
            self._fault("total-size", f"{name} says total_size {total!r}; the tensors have {expected} bytes", name)

    def _cannot_read(self, name: str, error: OSError, tensors: int = 0) -> None:
        lost = f" ({tensors} tensors)" if tensors else ""
        if isinstance(error, FileNotFoundError):
            self._fault("missing-file", f"{name} is missing{lost}", name)
        else:
            what = f"{name} cannot be read{lost}: {error.strerror or error}"
            self._fault("unreadable-file", what, name, mend="check the disk and the file's permissions")

    def _check_weight_file(self, name: str, tensors: Iterator[ManifestTensor], pool: HashingPool) -> None:
        """Header bytes against their hash, header entries against the manifest's, data against each tensor's hash.

        Where the header cannot be read, the manifest alone says where each tensor's bytes are, so a damaged header
        hides no damage of the data.
        """
        entry = self._head.files[name]
        self._counts.files += 1
        try:
            nbytes, raw = _raw_header(self._directory / name)
        except OSError as error:
            self._cannot_read(name, error, sum(1 for _ in tensors))
            return
        if nbytes != entry.nbytes:
            self._fault("file-size", f"{name} has {nbytes} bytes; the manifest says {entry.nbytes}", name)
        self._check_header_bytes(name, raw, entry.header_xxh3_128)
        data_nbytes = self._accounts.data_nbytes[name]
        position = entry.nbytes - data_nbytes
        stored = _stored(raw, nbytes, name)
        if stored is None:
            self._counts.nbytes_written += max(0, min(data_nbytes, nbytes - position))
        else:
            self._counts.nbytes_written += sum(tensor.nbytes for tensor in stored.values())
        for tensor in tensors:
            self._counts.tensors += 1
            try:
                size = tensor_nbytes(tensor.dtype, tensor.shape)
            except ValueError:
                continue  # Said when the manifest was judged by itself.
            start = position if stored is None else self._place(tensor, stored.pop(tensor.name, None), position)
            position += size
            pool.add(self._directory / name, Range(tensor.name, start, size, tensor.xxh3_128))
        for surplus in stored or ():
            self._fault("surplus-tensor", f"{surplus} is in {name}, but not in the manifest", name, surplus)

    def _check_header_bytes(self, name: str, raw: bytes, expected: str) -> None:
        digest = xxhash.xxh3_128_hexdigest(raw)
        self._counts.nbytes_hashed += len(raw)
        if digest != expected:
            self._fault("header-bytes", f"the header of {name} hashes to {digest}; the manifest says {expected}", name)

    def _place(self, tensor: ManifestTensor, there: StoredTensor | None, position: int) -> int:
        """Where a tensor's bytes begin: as its header says, or where the header is of no use as the manifest does."""
        if there is None:
            what = f"{tensor.name} is not in {tensor.file}, where the manifest places it"
            self._fault("missing-tensor", what, tensor.file, tensor.name)
            return position
        if (there.dtype, there.shape) != (tensor.dtype, tensor.shape):
            self._fault(
                "tensor-shape",
                f"{tensor.name} is {there.dtype} {list(there.shape)} in {tensor.file}; "
                f"the manifest says {tensor.dtype} {list(tensor.shape)}",
                tensor.file,
                tensor.name,
            )
            return position
        return there.offset

    def _judge_bytes(self, path: Path, item: Range, fault: str | None) -> None:
        if fault is None:
            self._counts.nbytes_hashed += item.nbytes
            return
        name = path.relative_to(self._directory).as_posix()
        self._fault("tensor-bytes", f"{item.name} in {name}: {fault}", name, item.name)

    def _check_surplus_files(self) -> None:
        """Files that the manifest does not list: weights and indexes mislead loaders, anything else is only told."""
        for base, folders, names in os.walk(self._directory):
            if PARTIAL_NAME in folders:
                folders.remove(PARTIAL_NAME)
                what = f"{PARTIAL_NAME} is left of a run that did not end"
                self._findings.note("left-over", what, PARTIAL_NAME, "remove it, or let that run finish")
            folders[:] = [name for name in folders if name not in _NOT_THE_MODEL]
            for name in sorted(names):
                relative = (Path(base) / name).relative_to(self._directory).as_posix()
                if relative in self._head.files or relative == MANIFEST_NAME:
                    continue
                if is_weight_file(name) or is_index_file(name):
                    what = f"{relative} is not in the manifest: loaders may take it for a part of the model"
                    self._fault("surplus-file", what, relative, mend="move it out of the directory")
                elif name.endswith(_READ_BY_LOADERS):
                    what = f"{relative} is not in the manifest, and loaders read such files"
                    self._fault("surplus-file", what, relative, mend="move it out of the directory")
                else:
                    self._findings.note("foreign-file", f"{relative} is not in the manifest", relative)


class _IndexHead(msgspec.Struct):
    metadata: dict[str, Any] = {}


def _raw_header(path: Path) -> tuple[int, bytes]:
    """The file's size, and its header with the length before it; the 8 bytes alone where that is no sane length."""
    with Reader(path) as reader:
        nbytes = reader.nbytes
        start = b"".join(map(bytes, reader.blocks(0, min(8, nbytes))))
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(MAX_HEADER_NBYTES, nbytes - 8):
            return nbytes, start
        return nbytes, start + b"".join(map(bytes, reader.blocks(8, length)))


def _stored(raw: bytes, nbytes: int, name: str) -> dict[str, StoredTensor] | None:
    """The header's tensors by name; None where the survey says why it cannot be read."""
    try:
        return {tensor.name: tensor for tensor in parse_header(raw, nbytes, name).tensors}
    except SourceError:
        return None
