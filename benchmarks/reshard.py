"""How long a split takes, and how much memory: `python benchmarks/reshard.py`.

A Llama checkpoint of real bytes into rank files (hf-rank: a column or a row cut in every matrix), three ways in
interleaved rounds, cold cache, the clock stops when the result is on the disk: `cp` of the source's bytes,
`surgery reshard`, and loading, chunking and saving with torch. The last line is JSON.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common
from benchmarks.common import Run
from benchmarks.trim import config_for, fill_with_numbers, print_table, summary
from tools import make_sparse


class Contest:
    """The job, and each way of doing it."""

    def __init__(self, scratch: Path, nbytes: int, ranks: int, python: str) -> None:
        self.scratch, self.source, self.out = scratch, scratch / "source", scratch / "out"
        make_sparse.make_from_config(config_for("llama", nbytes), self.source, markers=False, shard_bytes=1_000_000_000)
        fill_with_numbers(self.source)
        naive = Path(__file__).with_name("naive_reshard.py")
        split = ("--tp", str(ranks), "--layout", "hf-rank")
        self.commands: dict[str, list[str | Path]] = {
            "cp": ["cp", "--reflink=never", "-r", self.source, self.out],
            "surgery": common.surgery("reshard", self.source, self.out, *split, python=python),
            "naive": [python, naive, self.source, self.out, "--tp", str(ranks)],
        }

    def once(self, name: str) -> Run:
        if self.out.exists():
            shutil.rmtree(self.out)
        os.sync()
        common.drop_from_page_cache(self.source)
        run = common.run_child(self.commands[name], self.scratch)
        run.wall_seconds += common.sync_tree(self.out)
        run.output_bytes = common.total_bytes(self.out)
        shutil.rmtree(self.out)
        return run

    def methods(self) -> dict[str, Callable[[], Run]]:
        return {name: (lambda name=name: self.once(name)) for name in self.commands}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time `surgery reshard` against cp and against torch.")
    parser.add_argument("--size", type=float, default=4.0, help="of the source checkpoint, in GB (default: 4)")
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--directory", type=Path, help="on the disk to measure; twice the size must be free there")
    parser.add_argument("--quick", action="store_true", help="a small smoke run: its figures mean nothing")
    options = parser.parse_args()
    nbytes = int((0.6 if options.quick else options.size) * 1e9)
    with tempfile.TemporaryDirectory(prefix="surgery-benchmark-", dir=options.directory) as name:
        scratch = Path(name)
        described = common.machine(scratch)
        common.print_machine(described)
        contest = Contest(scratch, nbytes, options.tp, options.python)
        results = common.interleave(1 if options.quick else options.rounds, contest.methods())
    table = summary(results)
    print_table("cold", table)
    common.print_result({"benchmark": "reshard", "machine": described, "cold": table})


if __name__ == "__main__":
    main()
