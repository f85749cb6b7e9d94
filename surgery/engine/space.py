"""What a job needs and what the machine has: disk and memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from surgery.plan_types import Plan


def is_sparse(status: os.stat_result) -> bool:
    """Whether a file has holes: fewer blocks than its size needs."""
    return getattr(status, "st_blocks", 1 << 62) * 512 < status.st_size


def allocated_nbytes(plan: Plan, source_paths: Sequence[Path]) -> int:
    """The disk that the output will take: whole files, or for sparse sources their share of allocated blocks."""
    shares = []
    for path in source_paths:
        status = path.stat()
        allocated = getattr(status, "st_blocks", 1 << 62) * 512
        shares.append(min(1.0, allocated / max(1, status.st_size)))
    side = sum(file.nbytes for file in plan.side_files)
    if all(share == 1.0 for share in shares):
        return sum(file.nbytes for file in plan.files) + side
    total = 0.0
    for tensor in plan.tensors():
        share = shares[tensor.whole.file] if tensor.whole is not None else 1.0
        total += min(tensor.nbytes, tensor.nbytes * share + 4096)
    return int(total) + side


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
