"""How long pruning half of the experts takes, and how much memory: `python benchmarks/prune.py`.

A Qwen3-MoE checkpoint of real bytes, three ways in interleaved rounds, cold cache, the clock stops when the result is
on the disk: `cp` of files with exactly the retained bytes, `surgery prune`, and loading, slicing and saving with
transformers (what REAP's own prune does to a model that is in memory). The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common
from benchmarks.common import Run, say
from benchmarks.trim import BLOCK_BYTES, config_for, fill_with_numbers, print_table, summary
from tools import make_sparse


class Contest:
    """The job, and each way of doing it."""

    def __init__(self, scratch: Path, nbytes: int, shard_bytes: int, python: str) -> None:
        self.scratch, self.out = scratch, scratch / "out"
        self.source, self.retained = scratch / "source", scratch / "retained"
        config = {**config_for("qwen3_moe", nbytes), "norm_topk_prob": True}
        self.experts = config["num_experts"] // 2
        make_sparse.make_from_config(config, self.source, markers=False, shard_bytes=shard_bytes)
        fill_with_numbers(self.source)
        self.retained_bytes = self._save_retained()
        keep = {f"model.layers.{layer}": list(range(self.experts)) for layer in range(config["num_hidden_layers"])}
        (scratch / "keep.json").write_text(json.dumps({"format": 1, "experts": keep}))
        naive = Path(__file__).with_name("naive_prune.py")
        self.commands: dict[str, list[str | Path]] = {
            "cp": ["cp", "--reflink=never", "-r", self.retained, self.out],
            "surgery": common.surgery(
                "prune",
                self.source,
                self.out,
                "--keep",
                scratch / "keep.json",
                "--max-shard-size",
                "1GB",
                python=python,
            ),
            "naive": [python, naive, self.source, self.out, "--experts", str(self.experts)],
        }

    def _save_retained(self) -> int:
        """Files that hold just the bytes that stay; returns their sum."""
        self.retained.mkdir()
        total = 0
        for file in sorted(self.source.glob("*.safetensors")):
            with open(file, "rb") as reader, open(self.retained / f"{file.stem}.bin", "wb") as writer:
                data_start = 8 + struct.unpack("<Q", reader.read(8))[0]
                header = json.loads(reader.read(data_start - 8))
                header.pop("__metadata__", None)
                for name, tensor in header.items():
                    begin, end = tensor["data_offsets"]
                    expert = name.partition(".experts.")[2].partition(".")[0]
                    if expert and int(expert) >= self.experts:
                        continue
                    if name.endswith(".mlp.gate.weight"):
                        end = begin + (end - begin) // 2
                    reader.seek(data_start + begin)
                    for at in range(begin, end, BLOCK_BYTES):
                        writer.write(reader.read(min(BLOCK_BYTES, end - at)))
                    total += end - begin
        common.sync_tree(self.retained)
        return total

    def once(self, name: str) -> Run:
        if self.out.exists():
            shutil.rmtree(self.out)
        os.sync()
        common.drop_from_page_cache(self.source, self.retained)
        run = common.run_child(self.commands[name], self.scratch)
        run.wall_seconds += common.sync_tree(self.out)
        run.output_bytes = common.total_bytes(self.out)
        if not self.retained_bytes <= run.output_bytes <= self.retained_bytes * 1.01 + 10_000_000:
            raise common.ChildFailed(
                f"{name} wrote {run.output_bytes:,} bytes, {self.retained_bytes:,} were to be kept"
            )
        shutil.rmtree(self.out)
        return run

    def methods(self) -> dict[str, Callable[[], Run]]:
        return {name: (lambda name=name: self.once(name)) for name in self.commands}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time `surgery prune` against cp and against transformers.")
    parser.add_argument("--size", type=float, default=4.0, help="of the source checkpoint, in GB (default: 4)")
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
        contest = Contest(scratch, nbytes, 100_000_000 if options.quick else 1_000_000_000, options.python)
        say(f"keeping {contest.experts} experts a layer: {contest.retained_bytes:,} bytes")
        results = common.interleave(1 if options.quick else options.rounds, contest.methods())
    table = summary(results)
    print_table("cold", table)
    common.print_result({"benchmark": "prune", "machine": described, "cold": table})


if __name__ == "__main__":
    main()
