"""What the benchmarks share: the machine, child processes measured from outside, the page cache, statistics.

Every figure is of a child process, started through a small fresh Python: a child's peak memory as the kernel
counts it begins with what its parent held at exec, and the benchmark itself may hold much.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent

# Runs ARGV[3:] with its output in the file ARGV[2], and writes what wait4 says to the file ARGV[1].
_LAUNCHER = """
import json, os, sys, time
report, log, *command = sys.argv[1:]
output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
streams = [(os.POSIX_SPAWN_DUP2, output, 1), (os.POSIX_SPAWN_DUP2, output, 2)]
begin = time.perf_counter()
child = os.posix_spawnp(command[0], command, os.environ, file_actions=streams)
_, status, usage = os.wait4(child, 0)
wall = time.perf_counter() - begin
with open(report, "w") as file:
    json.dump({
        "exit_code": os.waitstatus_to_exitcode(status),
        "wall_seconds": wall,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_rss_bytes": usage.ru_maxrss * 1024,
        "read_bytes": usage.ru_inblock * 512,
        "written_bytes": usage.ru_oublock * 512,
    }, file)
"""


@dataclass(slots=True)
class Run:
    """One child process, from outside. Bytes are those that went to and from the disk, as the kernel counts."""

    wall_seconds: float
    cpu_seconds: float
    peak_rss_bytes: int
    read_bytes: int
    written_bytes: int
    output_bytes: int = 0


class ChildFailed(Exception):
    """A measured command did not exit with 0; the message ends with its last output."""


def run_child(command: Sequence[str | Path], scratch: Path) -> Run:
    """Run `command` to its end. Its output is kept in `scratch`; raises `ChildFailed` unless it exits with 0."""
    report, log = scratch / "child.json", scratch / "child.log"
    launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, report, log]
    subprocess.run(
        [*map(str, launcher), *map(str, command)], env=_child_environment(scratch), check=True, stdin=subprocess.DEVNULL
    )
    measured = json.loads(report.read_text())
    exit_code = measured.pop("exit_code")
    if exit_code:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise ChildFailed(f"exit {exit_code}: {' '.join(map(str, command))}\n{last}")
    return Run(**measured)


def _child_environment(scratch: Path) -> dict[str, str]:
    """This checkout first on the path; bytecode cached as on a normal machine, but outside the checkout."""
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "PYTHONPYCACHEPREFIX": str(scratch / "bytecode")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment | {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}


def surgery(*arguments: str | Path, python: str = sys.executable) -> list[str | Path]:
    """The command line of `surgery ARGUMENTS` from this checkout."""
    return [python, "-m", "surgery", *arguments]


# ------------------------------------------------------------------------------------------------ disk


def files_under(*paths: Path) -> list[Path]:
    """Every file of the directories (and files) given."""
    found: list[Path] = []
    for path in paths:
        found += sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return found


def drop_from_page_cache(*paths: Path) -> None:
    """Make the next read of these files come from the disk; needs no privilege (POSIX_FADV_DONTNEED)."""
    for file in files_under(*paths):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)  # dirty pages cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def read_into_page_cache(*paths: Path) -> None:
    """Read these files once, so that the next read comes from memory."""
    buffer = bytearray(1 << 20)
    for file in files_under(*paths):
        with open(file, "rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def sync_tree(directory: Path) -> float:
    """fsync every file under `directory`, the directories and its parent; returns the seconds it took."""
    begin = time.perf_counter()
    directories = [directory.parent, directory, *(p for p in directory.rglob("*") if p.is_dir())]
    for path in [*files_under(directory), *directories]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return time.perf_counter() - begin


def total_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in files_under(directory))


# ------------------------------------------------------------------------------------------------ reporting


def machine(directory: Path) -> dict[str, Any]:
    """What a reader needs to judge the figures: processor, memory, kernel, file system, load, versions."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        answer = subprocess.run(["df", "--output=fstype", directory], capture_output=True, text=True, check=True)
        file_system = answer.stdout.split()[-1]
    except (OSError, subprocess.CalledProcessError):
        file_system = "unknown"
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "file_system": file_system,
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def print_machine(described: dict[str, Any]) -> None:
    print("machine: " + ", ".join(f"{key} {value}" for key, value in described.items()), flush=True)


def spread(values: Iterable[float], digits: int = 3) -> dict[str, float]:
    """Median, smallest and largest."""
    numbers = list(values)
    return {
        "median": round(statistics.median(numbers), digits),
        "min": round(min(numbers), digits),
        "max": round(max(numbers), digits),
    }


def say(text: str) -> None:
    """A line for the person watching, at once."""
    print(text, flush=True)


def interleave(
    rounds: int, methods: dict[str, Callable[[], Run]], reference: str | None = None
) -> dict[str, list[Run]]:
    """Run every method once per round, the order rotating from round to round.

    `reference` runs at the start of each round and once more at the end, so that each round lies between two of
    its runs (`ratios_to_reference`). Its list has one run more than the others.
    """
    results: dict[str, list[Run]] = {name: [] for name in methods}
    others = [name for name in methods if name != reference]
    for number in range(rounds):
        turn = number % max(1, len(others))
        order = others[turn:] + others[:turn]
        for name in [reference, *order] if reference else order:
            results[name].append(_told(name, number, methods[name]()))
    if reference:
        results[reference].append(_told(reference, rounds, methods[reference]()))
    return results


def _told(name: str, number: int, run: Run) -> Run:
    say(f"  round {number + 1}: {name:<12} {run.wall_seconds:8.3f} s  {run.peak_rss_bytes / 1e6:7.0f} MB")
    return run


def ratios_to_reference(runs: list[Run], reference: list[Run]) -> list[float]:
    """Each run's wall time over the mean of the reference's runs just before and just after its round."""
    return [
        run.wall_seconds * 2 / (before.wall_seconds + after.wall_seconds)
        for run, before, after in zip(runs, reference, reference[1:], strict=False)
    ]


def print_result(result: dict[str, Any]) -> None:
    """The one JSON line that ends a benchmark."""
    print(json.dumps(result, separators=(", ", ": ")), flush=True)
