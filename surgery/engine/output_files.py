"""The files of an output: made at full length before the bytes stream, proven and finished after."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from surgery import kernel
from surgery.engine.job import Job
from surgery.engine.space import allocated_nbytes, free_nbytes
from surgery.engine.writing import Outputs, Target
from surgery.errors import OutputError, SourceError
from surgery.manifest import MANIFEST_NAME, ManifestFile, write_manifest
from surgery.plan_types import PlannedFile, PlannedSideFile
from surgery.regular_file import open_regular
from surgery.safetensors_file import read_header


def make_files(job: Job) -> None:
    """Create every output file at full length with its header in place; judge the free space first."""
    _require_space(job)
    content = job.staging.content
    names = {file.name for file in job.plan.files} | {side.name for side in job.plan.side_files}
    job.staging.clear_surplus(names)
    for file, path, first in zip(job.plan.files, job.out_paths, job.layout.firsts, strict=True):
        header, _ = file.header(job.plan.metadata)
        if not _is_file_of(path, file, header):
            _make_file(job, path, header, file.nbytes)
            for ordinal in range(first, first + len(file.tensors)):
                job.done.forget(ordinal)
    kernel.sync_directory(content)


def _is_file_of(path: Path, file: PlannedFile, header: bytes) -> bool:
    """Whether an earlier run made the file: full length and the planned header."""
    if not path.is_file() or path.stat().st_size != file.nbytes:
        return False
    with path.open("rb") as existing:
        return existing.read(len(header)) == header


def _make_file(job: Job, path: Path, header: bytes, nbytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o666)
    try:
        if job.sparse:
            os.ftruncate(descriptor, nbytes)
        else:
            kernel.allocate(descriptor, nbytes)
        kernel.write_at(descriptor, header, 0)
    finally:
        os.close(descriptor)


def _require_space(job: Job) -> None:
    """Refuse now what the disk cannot hold, counting blocks for sparse sources and what a resume has already."""
    needed = allocated_nbytes(job.plan, job.source_paths)
    have = sum(getattr(path.stat(), "st_blocks", 0) * 512 for path in job.out_paths if path.exists())
    free = free_nbytes(job.staging.path)
    if free is not None and needed - have > free:
        raise OutputError(
            f"the output needs {needed - have} more bytes; {free} are free",
            str(job.staging.out.parent),
            "free some space or name an OUT on another disk",
        )


def finish_files(job: Job) -> None:
    """Headers read back and compared, everything durable, side files, index and manifest written."""
    files: dict[str, ManifestFile] = {}
    for file, path, first in zip(job.plan.files, job.out_paths, job.layout.firsts, strict=True):
        files[file.name] = _prove_file(file, path)
        if job.options.readback:
            _hash_again(job, file, path, first)
    for side in job.plan.side_files:
        _write_side_file(job, side)
        other = side.source_name if side.source_name != side.name else ""
        files[side.name] = ManifestFile(side.nbytes, xxh3_128=side.xxh3_128, source=other)
    if job.plan.index is not None:
        files[job.plan.index] = _write_index(job, job.plan.index)
    with (job.staging.content / MANIFEST_NAME).open("wb") as manifest:
        write_manifest(manifest, job.plan, job.digest, files, job.done.hex)
        manifest.flush()
        os.fsync(manifest.fileno())


def _prove_file(file: PlannedFile, path: Path) -> ManifestFile:
    """Read the header back from the disk and compare it with the plan; make the file durable."""
    # Opened for writing: Windows flushes no other handle.
    with path.open("r+b") as written:
        os.fsync(written.fileno())
    header = read_header(path)
    found = {(t.name, t.dtype, t.shape) for t in header.tensors}
    planned = {(t.name, t.dtype, t.shape) for t in file.tensors}
    if found != planned or header.file_nbytes != file.nbytes:
        raise OutputError(
            f"the header of {file.name} reads back other than it was planned",
            str(path),
            "check the disk; remove the staging directory and run again",
        )
    return ManifestFile(file.nbytes, header_xxh3_128=header.digest)


def _hash_again(job: Job, file: PlannedFile, path: Path, first: int) -> None:
    """Compare every tensor's checksum, taken while it was written, with what the disk gives back."""
    buffer = memoryview(bytearray(1 << 20))
    outputs = Outputs([path], window=False, sparse=False)
    try:
        for ordinal in range(first, first + len(file.tensors)):
            target = job.layout.target(ordinal)
            again = Target(0, target.offset, target.nbytes, xxhash.xxh3_128(), in_order=False)
            if again.digest(outputs, buffer).hex() != job.done.hex(ordinal):
                raise OutputError(
                    f"{file.tensors[ordinal - first].name} reads back other than it was written",
                    str(path),
                    "check the disk; remove the staging directory and run again",
                )
    finally:
        outputs.close()


def _write_side_file(job: Job, side: PlannedSideFile) -> None:
    path = job.staging.content / side.name
    path.parent.mkdir(parents=True, exist_ok=True)
    hasher, nbytes = xxhash.xxh3_128(), 0
    with path.open("wb") as written:
        for block in _side_blocks(job, side):
            hasher.update(block)
            written.write(block)
            nbytes += len(block)
        written.flush()
        os.fsync(written.fileno())
    _require(job, side, nbytes, hasher.hexdigest())


def require_planned(job: Job, given: PlannedSideFile) -> None:
    """A file that the plan was made from is still the one it was."""
    hasher, nbytes = xxhash.xxh3_128(), 0
    for block in _side_blocks(job, given):
        hasher.update(block)
        nbytes += len(block)
    _require(job, given, nbytes, hasher.hexdigest())


def _require(job: Job, side: PlannedSideFile, nbytes: int, digest: str) -> None:
    if (nbytes, digest) != (side.nbytes, side.xxh3_128):
        raise SourceError(
            f"{side.source_name or side.name} is not the file that was planned",
            job.plan.roots[side.root] if side.root >= 0 else "plan",
            "make the plan again from the source as it is now",
        )


def _side_blocks(job: Job, side: PlannedSideFile) -> Iterator[bytes]:
    if side.text is not None:
        yield side.text.encode()
        return
    path = Path(job.plan.roots[side.root]) / side.source_name
    with open_regular(path, str(path)) as (descriptor, _):
        try:
            while block := os.read(descriptor, 1 << 20):
                yield block
        except OSError as error:
            raise SourceError(f"cannot read: {error.strerror}", str(path), "bring the file back") from error


def _write_index(job: Job, name: str) -> ManifestFile:
    """The index that the written files deserve, names sorted as Hugging Face sorts them."""
    encode = msgspec.json.encode
    entries = sorted((tensor.name, file.name) for file in job.plan.files for tensor in file.tensors)
    hasher, nbytes = xxhash.xxh3_128(), 0
    with (job.staging.content / name).open("wb") as written:
        head = b'{\n  "metadata": {\n    "total_size": %d\n  },\n  "weight_map": {' % job.layout.nbytes
        lines = (
            b"%s\n    %s: %s" % (b"," if number else b"", encode(tensor), encode(file))
            for number, (tensor, file) in enumerate(entries)
        )
        for piece in itertools.chain([head], lines, [b"\n  }\n}\n"]):
            hasher.update(piece)
            written.write(piece)
            nbytes += len(piece)
        written.flush()
        os.fsync(written.fileno())
    return ManifestFile(nbytes, xxh3_128=hasher.hexdigest())
