"""Time and memory of planning: `surgery plan` on checkpoints of 100,000, 140,000 and 1,000,000 tensors.

The checkpoints are sparse files with full headers. In each round, beside the plans: the floor, a Python that only
reads and parses every header with the json of its standard library. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common
from benchmarks.common import Run, say
from tools import make_sparse

# 140,000: a trillion-parameter model (Kimi-K2 has 139,583 tensors).
COUNTS = (100_000, 140_000, 1_000_000)

_PARSE_HEADERS = """
import gc, json, pathlib, struct, sys
gc.disable()
for path in pathlib.Path(sys.argv[1]).glob("*.safetensors"):
    with open(path, "rb") as file:
        json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
"""


def measure(count: int, rounds: int, scratch: Path, python: str) -> dict[str, Any]:
    source, plan = scratch / "source", scratch / "plan.json"
    make_sparse.make("synthetic", source, markers=False, tensors=count)
    config = json.loads((source / "config.json").read_text())
    half = ",".join(map(str, range(0, config["num_hidden_layers"], 2)))
    tensors = sum(1 for _ in make_sparse.tensors_of(config))
    say(f"\n{tensors:,} tensors, {common.total_bytes(source) / 1e12:.2f} TB apparent")

    def planned(*arguments: str | Path) -> Run:
        run = common.run_child(common.surgery("plan", *arguments, "-o", plan, python=python), scratch)
        run.output_bytes = plan.stat().st_size
        plan.unlink()
        return run

    methods = {
        "json headers": lambda: common.run_child([python, "-c", _PARSE_HEADERS, source], scratch),
        "plan repack": lambda: planned("repack", source, "--max-shard-size", "10GB"),
        "plan trim": lambda: planned("trim", source, "--layers", half),
    }
    results = common.interleave(rounds, methods)
    table: dict[str, Any] = {"tensors": tensors}
    for name, runs in results.items():
        table[name.replace(" ", "_")] = {
            "wall_seconds": common.spread(run.wall_seconds for run in runs),
            "peak_rss_mb": round(max(run.peak_rss_bytes for run in runs) / 1e6, 1),
            "bytes_of_rss_per_tensor": round(max(run.peak_rss_bytes for run in runs) / tensors),
            "plan_file_bytes": max(run.output_bytes for run in runs),
        }
    shutil.rmtree(source)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Time `surgery plan` on very many tensors.")
    parser.add_argument("--tensors", type=int, action="append", help=f"repeatable (default: {COUNTS})")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--python", default=sys.executable, help="that runs surgery")
    parser.add_argument("--directory", type=Path, help="where the sparse files go (default: the temporary directory)")
    parser.add_argument("--quick", action="store_true", help="a small smoke run: its figures mean nothing")
    options = parser.parse_args()
    counts = [2_000] if options.quick else options.tensors or list(COUNTS)
    rounds = 1 if options.quick else options.rounds
    with tempfile.TemporaryDirectory(prefix="surgery-benchmark-", dir=options.directory) as name:
        scratch = Path(name)
        described = common.machine(scratch)
        common.print_machine(described)
        common.run_child(common.surgery("plan", "trim", "--help", python=options.python), scratch)  # compiles bytecode
        tables = [measure(count, rounds, scratch, options.python) for count in counts]
    say(f"\n{'tensors':>10} {'job':<14} {'wall s':>20} {'peak RSS':>10}")
    for table in tables:
        for job, row in table.items():
            if job != "tensors":
                wall = row["wall_seconds"]
                walls = f"{wall['median']:.2f} [{wall['min']:.2f}-{wall['max']:.2f}]"
                say(f"{table['tensors']:>10,} {job:<14} {walls:>20} {row['peak_rss_mb']:>7.0f} MB")
    say("")
    common.print_result(
        {"benchmark": "plan", "machine": described, "rounds": rounds, "quick": options.quick, "plans": tables}
    )


if __name__ == "__main__":
    main()
