"""What a short command costs: `surgery --help` against a Python that only imports click. The last line is JSON."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common
from benchmarks.common import say


def main() -> None:
    parser = argparse.ArgumentParser(description="Time `surgery --help`.")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--python", default=sys.executable, help="that runs surgery")
    parser.add_argument("--quick", action="store_true", help="a small smoke run: its figures mean nothing")
    options = parser.parse_args()
    rounds = 3 if options.quick else options.rounds
    commands: dict[str, list[str | Path]] = {
        "python": [options.python, "-c", "pass"],
        "import click": [options.python, "-c", "import click"],
        "surgery": common.surgery("--help", python=options.python),
    }
    with tempfile.TemporaryDirectory(prefix="surgery-benchmark-") as name:
        scratch = Path(name)
        described = common.machine(scratch)
        common.print_machine(described)
        for command in commands.values():
            common.run_child(command, scratch)  # compiles bytecode, fills the page cache
        results = common.interleave(
            rounds, {key: (lambda key=key: common.run_child(commands[key], scratch)) for key in commands}
        )
    walls = {name: common.spread((run.wall_seconds for run in runs), digits=4) for name, runs in results.items()}
    ratio = round(walls["surgery"]["median"] / walls["import click"]["median"], 2)
    for name, wall in walls.items():
        say(f"{name:<13} {wall['median'] * 1000:6.1f} ms [{wall['min'] * 1000:.1f}-{wall['max'] * 1000:.1f}]")
    say(f"surgery --help takes {ratio} times as long as `import click`\n")
    common.print_result(
        {
            "benchmark": "startup",
            "machine": described,
            "rounds": rounds,
            "quick": options.quick,
            "ratio_to_import_click": ratio,
            "peak_rss_mb": round(max(run.peak_rss_bytes for run in results["surgery"]) / 1e6, 1),
            **{name.replace(" ", "_"): {"wall_seconds": wall} for name, wall in walls.items()},
        }
    )


if __name__ == "__main__":
    main()
