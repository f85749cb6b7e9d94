"""Whether the source is still the one whose bytes were copied: a header tells shapes, not weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import xxhash

from surgery.errors import SourceError
from surgery.manifest import ManifestTensor, read_manifest
from surgery.plan_types import Plan
from surgery.regular_file import open_regular, read_exactly

SAMPLED_TENSORS = 24
SAMPLED_NBYTES = 4 << 20
"""A finished output is compared with its source by so many tensors of at most this size."""


def source_state(paths: Sequence[Path]) -> str:
    """What changes when a file is written again: size, time of change and inode of every source file."""
    hasher = xxhash.xxh3_128()
    for path in paths:
        status = path.stat()
        hasher.update(f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ino}\n".encode())
    return hasher.hexdigest()


def same_source(plan: Plan, out: Path) -> bool:
    """Whether tensors of the finished output at `out` still have the checksums of their sources, by a sample.

    The manifest names no times, so that it has the same bytes wherever it is made; the bytes themselves tell.
    """
    try:
        manifest = read_manifest(out)
    except SourceError:
        return False
    if manifest is None:
        return False
    known = {tensor.name: tensor for tensor in manifest.tensors}
    small = [
        tensor
        for tensor in plan.tensors()
        if tensor.whole is not None and 0 < tensor.nbytes <= SAMPLED_NBYTES and tensor.name in known
    ]
    step = max(1, len(small) // SAMPLED_TENSORS)
    return all(
        _same(plan, known[tensor.name], tensor.whole.file, tensor.whole.offset, tensor.nbytes)
        for tensor in small[::step]
        if tensor.whole is not None
    )


def _same(plan: Plan, tensor: ManifestTensor, file: int, offset: int, nbytes: int) -> bool:
    source = plan.sources[file]
    path = Path(plan.roots[source.root]) / source.name
    try:
        with open_regular(path, str(path)) as (descriptor, _):
            os.lseek(descriptor, offset, os.SEEK_SET)
            return xxhash.xxh3_128_hexdigest(read_exactly(descriptor, nbytes, str(path))) == tensor.xxh3_128
    except SourceError:
        return False
