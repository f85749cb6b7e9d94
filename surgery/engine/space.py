"""What a job needs and what the machine has: disk and memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from surgery import kernel
from surgery.plan_types import Plan

BLOCK_NBYTES = 4096


def is_sparse(status: os.stat_result) -> bool:
    """Whether a file has holes: fewer blocks than its size needs."""
    return getattr(status, "st_blocks", 1 << 62) * 512 < status.st_size


def allocated_nbytes(plan: Plan, source_paths: Sequence[Path]) -> int:
    """The disk that the output will take: every byte, or where sources have holes, the data of the tensors kept."""
    side = sum(file.nbytes for file in plan.side_files)
    sparse = {number for number, path in enumerate(source_paths) if is_sparse(path.stat())}
    if not sparse:
        return sum(file.nbytes for file in plan.files) + side
    total = sum(file.nbytes - sum(tensor.nbytes for tensor in file.tensors) for file in plan.files) + side
    held: dict[int, list[tuple[int, int]]] = {}
    for tensor in plan.tensors():
        if tensor.whole is not None and tensor.whole.file in sparse:
            held.setdefault(tensor.whole.file, []).append((tensor.whole.offset, tensor.nbytes))
        else:
            total += tensor.nbytes
    return total + sum(_data_nbytes(source_paths[file], sorted(ranges)) for file, ranges in held.items())


def _data_nbytes(path: Path, ranges: list[tuple[int, int]]) -> int:
    """Bytes of `ranges` that lie in no hole, each stretch rounded up to the blocks that it may touch."""
    total = 0
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for offset, nbytes in ranges:
            end, position = offset + nbytes, offset
            while position < end:
                start = kernel.next_data(descriptor, position)
                if start is None or start >= end:
                    break
                position = kernel.next_hole(descriptor, start, end)
                total += position - start + BLOCK_NBYTES
    finally:
        os.close(descriptor)
    return total


def free_nbytes(path: Path) -> int | None:
    if not hasattr(os, "statvfs"):
        return None
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def available_memory_nbytes() -> int | None:
    """Memory that could hold pages without pushing others out, the container's limit included; None if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            available = min(available, int(Path(limit).read_text()))
        except (OSError, ValueError):
            continue
    return available
