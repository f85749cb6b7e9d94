"""How long a trim takes against `cp` of the same bytes: `python benchmarks/trim.py [--mergekit BIN/mergekit-yaml]`.

A checkpoint of real bytes loses every second layer, by four ways, in interleaved rounds:

- cp: `cp --reflink=never` of files that hold exactly the retained tensor bytes: the floor of an honest copy;
- surgery: `surgery trim`, checksums included;
- naive: safetensors `safe_open` and `save_file` per output shard (`benchmarks/naive_trim.py`);
- mergekit: a `passthrough` merge of single-layer slices, when it is installed (it fuses the experts of
  qwen3_moe on the way, which is more work; with `--family llama` it moves the same tensors as the others).

All are child processes, and the clock stops when their files and directories are on the disk (fsync). Cold: what
is read has been dropped from the page cache. Warm: it has just been read into it. The last line is JSON.
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
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common
from benchmarks.common import Run, say
from tools import make_sparse

SHARD_BYTES = 1_000_000_000
HIDDEN = {"qwen3_moe": 2048, "llama": 4096}
BLOCK_BYTES = 32 << 20


def config_for(family: str, nbytes: int) -> dict[str, Any]:
    """A config whose checkpoint has about `nbytes`: matrices of 4 MiB (qwen3_moe experts), or llama 7B's."""
    hidden = HIDDEN[family]
    common_fields = {
        "model_type": family,
        "hidden_size": hidden,
        "vocab_size": 32_000,
        "num_attention_heads": hidden // 128,
        "head_dim": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    matrices = nbytes - 2 * 32_000 * hidden * 2  # without embedding and head, two bytes an element
    if family == "qwen3_moe":
        layers, width = 8, 1024
        experts = max(2, round(matrices / layers / (3 * width * hidden * 2)))
        return {
            **make_sparse.qwen3_235b(),
            **common_fields,
            "num_key_value_heads": 4,
            "num_hidden_layers": layers,
            "max_window_layers": layers,
            "moe_intermediate_size": width,
            "num_experts": experts,
            "num_experts_per_tok": 2,
        }
    width = 11_008
    layers = max(2, round(matrices / (2 * (4 * hidden * hidden + 3 * width * hidden))))
    return {
        "architectures": ["LlamaForCausalLM"],
        **common_fields,
        "intermediate_size": width,
        "num_key_value_heads": hidden // 128,
        "num_hidden_layers": layers,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
    }


def fill_with_numbers(directory: Path) -> None:
    """Give every tensor random finite bfloat16 values (magnitude below 2): holes would be copied for free."""
    generator = np.random.default_rng(0)
    for file in sorted(directory.glob("*.safetensors")):
        with open(file, "r+b") as stream:
            data_start = 8 + struct.unpack("<Q", stream.read(8))[0]
            stream.seek(data_start)
            left = file.stat().st_size - data_start
            while left:
                nbytes = min(left, BLOCK_BYTES)
                # The highest exponent bit off: no infinity and no NaN.
                block = generator.integers(0, 1 << 16, nbytes // 2, dtype=np.uint16) & 0xBFFF
                stream.write(block.tobytes())
                left -= nbytes
            os.fsync(stream.fileno())


def save_retained_bytes(source: Path, layers: list[int], directory: Path) -> int:
    """Files that hold just the bytes of the tensors that stay, one per source shard; returns their sum."""
    directory.mkdir()
    prefixes = tuple(f"model.layers.{layer}." for layer in layers)
    total = 0
    for file in sorted(source.glob("*.safetensors")):
        with open(file, "rb") as reader, open(directory / f"{file.stem}.bin", "wb") as writer:
            data_start = 8 + struct.unpack("<Q", reader.read(8))[0]
            header = json.loads(reader.read(data_start - 8))
            header.pop("__metadata__", None)
            for name, tensor in header.items():
                if name.startswith("model.layers.") and not name.startswith(prefixes):
                    continue
                begin, end = tensor["data_offsets"]
                reader.seek(data_start + begin)
                for at in range(begin, end, BLOCK_BYTES):
                    writer.write(reader.read(min(BLOCK_BYTES, end - at)))
                total += end - begin
    common.sync_tree(directory)
    return total


class Contest:
    """The job, and each way of doing it as a function that does it once and says what it cost."""

    def __init__(
        self, scratch: Path, family: str, nbytes: int, *, shard_bytes: int, mergekit: Path | None, python: str
    ) -> None:
        self.scratch, self.out = scratch, scratch / "out"
        self.source, self.retained = scratch / "source", scratch / "retained"
        self.warm = False
        config = config_for(family, nbytes)
        self.layers = list(range(1, config["num_hidden_layers"], 2))
        make_sparse.make_from_config(config, self.source, markers=False, shard_bytes=shard_bytes)
        fill_with_numbers(self.source)
        self.retained_bytes = save_retained_bytes(self.source, self.layers, self.retained)
        chosen = ",".join(map(str, self.layers))
        naive = Path(__file__).with_name("naive_trim.py")
        shard = str(shard_bytes)
        self.commands: dict[str, list[str | Path]] = {
            "cp": ["cp", "--reflink=never", "-r", self.retained, self.out],
            "surgery": common.surgery(
                "trim", self.source, self.out, "--layers", chosen, "--max-shard-size", shard, python=python
            ),
            "naive": [python, naive, self.source, self.out, "--layers", chosen, "--max-shard-bytes", shard],
        }
        if mergekit is not None:
            recipe = self.scratch / "mergekit.yaml"
            slices = [{"sources": [{"model": str(self.source), "layer_range": [n, n + 1]}]} for n in self.layers]
            # JSON is YAML. Shard sizes are in parameters there: two bytes each.
            recipe.write_text(json.dumps({"merge_method": "passthrough", "slices": slices}))
            size = ["--out-shard-size", str(shard_bytes // 2)]
            self.commands["mergekit"] = [mergekit, recipe, self.out, "--quiet", *size]

    def once(self, name: str) -> Run:
        """One run of a method, from a settled disk to the result on the disk; the output is removed again."""
        if self.out.exists():
            shutil.rmtree(self.out)
        os.sync()  # what earlier runs left in the queue is not this one's to pay
        read_by_it = self.retained if name == "cp" else self.source
        common.drop_from_page_cache(self.source, self.retained)
        if self.warm:
            common.read_into_page_cache(read_by_it)
        run = common.run_child(self.commands[name], self.scratch)
        run.wall_seconds += common.sync_tree(self.out)
        run.output_bytes = common.total_bytes(self.out)
        # Nothing may win by leaving bytes out: all tensors, and little beside them.
        if not self.retained_bytes <= run.output_bytes <= self.retained_bytes * 1.01 + 10_000_000:
            raise common.ChildFailed(
                f"{name} wrote {run.output_bytes:,} bytes, {self.retained_bytes:,} were to be kept"
            )
        shutil.rmtree(self.out)
        return run

    def methods(self) -> dict[str, Callable[[], Run]]:
        return {name: (lambda name=name: self.once(name)) for name in self.commands}


def summary(results: dict[str, list[Run]]) -> dict[str, Any]:
    """Per method: wall time, ratio to the interleaved cp, peak memory, traffic per output byte."""
    table: dict[str, Any] = {}
    for name, runs in results.items():
        row: dict[str, Any] = {"wall_seconds": common.spread(run.wall_seconds for run in runs)}
        if name != "cp":
            row["ratio_to_cp"] = common.spread(common.ratios_to_reference(runs, results["cp"]))
        row["peak_rss_mb"] = round(max(run.peak_rss_bytes for run in runs) / 1e6, 1)
        row["cpu_seconds"] = common.spread(run.cpu_seconds for run in runs)["median"]
        row["read_per_output_byte"] = common.spread(run.read_bytes / run.output_bytes for run in runs)["median"]
        row["written_per_output_byte"] = common.spread(run.written_bytes / run.output_bytes for run in runs)["median"]
        table[name] = row
    for other in ("naive", "mergekit"):
        if other in results:
            pairs = zip(results["surgery"], results[other], strict=True)
            table["surgery"][f"ratio_to_{other}"] = common.spread(a.wall_seconds / b.wall_seconds for a, b in pairs)
    return table


def print_table(title: str, table: dict[str, Any]) -> None:
    say(f"\n{title:<10} {'wall s':>20} {'ratio to cp':>20} {'peak RSS':>10} {'read':>6} {'written':>8} per output byte")
    for name, row in table.items():
        wall, ratio = row["wall_seconds"], row.get("ratio_to_cp")
        walls = f"{wall['median']:.2f} [{wall['min']:.2f}-{wall['max']:.2f}]"
        ratios = f"{ratio['median']:.2f} [{ratio['min']:.2f}-{ratio['max']:.2f}]" if ratio else "1"
        traffic = f"{row['read_per_output_byte']:>6.2f} {row['written_per_output_byte']:>8.2f}"
        say(f"{name:<10} {walls:>20} {ratios:>20} {row['peak_rss_mb']:>7.0f} MB {traffic}")
    for key in ("ratio_to_naive", "ratio_to_mergekit"):
        if key in table["surgery"]:
            ratio = table["surgery"][key]
            say(f"surgery {key.replace('_', ' ')}: {ratio['median']:.2f} [{ratio['min']:.2f}-{ratio['max']:.2f}]")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time `surgery trim` against cp and against other tools.")
    parser.add_argument("--size", type=float, default=6.0, help="of the source checkpoint, in GB (default: 6)")
    parser.add_argument("--family", choices=sorted(HIDDEN), default="qwen3_moe")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mergekit", type=Path, help="a mergekit-yaml executable; not measured without")
    parser.add_argument("--python", default=sys.executable, help="that runs surgery and the naive script")
    parser.add_argument("--directory", type=Path, help="on the disk to measure; twice the size must be free there")
    parser.add_argument("--quick", action="store_true", help="a small smoke run: its figures mean nothing")
    options = parser.parse_args()
    nbytes = int((0.6 if options.quick else options.size) * 1e9)
    rounds = 1 if options.quick else options.rounds
    with tempfile.TemporaryDirectory(prefix="surgery-benchmark-", dir=options.directory) as name:
        scratch = Path(name)
        described = common.machine(scratch)
        common.print_machine(described)
        say(f"making a {options.family} checkpoint of {nbytes / 1e9:.1f} GB of random numbers in {scratch}")
        contest = Contest(
            scratch,
            options.family,
            nbytes,
            shard_bytes=100_000_000 if options.quick else SHARD_BYTES,
            mergekit=options.mergekit,
            python=options.python,
        )
        source_bytes = common.total_bytes(contest.source)
        say(f"keeping layers {contest.layers}: {contest.retained_bytes:,} of {source_bytes:,} bytes")
        say("one round that does not count: it compiles bytecode and wakes the disk")
        for once in contest.methods().values():
            once()
        tables = {}
        for title, contest.warm in (("cold", False), ("warm", True)):
            say(f"\n{title}, fsync at the end")
            tables[title] = summary(common.interleave(rounds, contest.methods(), "cp"))
        for title, table in tables.items():
            print_table(title, table)
    if options.mergekit is None:
        say("mergekit: not measured (give --mergekit BIN/mergekit-yaml)")
    say("")
    common.print_result(
        {
            "benchmark": "trim",
            "machine": described,
            "family": options.family,
            "source_bytes": source_bytes,
            "retained_bytes": contest.retained_bytes,
            "rounds": rounds,
            "quick": options.quick,
            "mergekit": "measured" if options.mergekit else "not measured",
            **tables,
        }
    )


if __name__ == "__main__":
    main()
