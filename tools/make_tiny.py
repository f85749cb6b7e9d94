"""Save a tiny random model of a family: `python tools/make_tiny.py qwen3_moe OUT --layers 6`.

The builder lives with the tests (`tests/tiny_models.py`); this is its command line. Needs torch and
transformers.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from tiny_models import add_tokenizer, build, families, mixed_families


def main() -> None:
    parser = argparse.ArgumentParser(description="Save a tiny random model in several shards.")
    parser.add_argument("family", choices=families() + mixed_families())
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--max-shard-size", default="20KB", help="what save_pretrained takes (default: 20KB)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=JSON", help="a config field, repeatable")
    options = parser.parse_args()
    fields = (assignment.partition("=") for assignment in options.set)
    build(
        options.family,
        options.directory,
        options.layers,
        seed=options.seed,
        max_shard_size=options.max_shard_size,
        **{field: json.loads(value) for field, _, value in fields},
    )
    add_tokenizer(options.directory)
    shards = len(list(options.directory.glob("*.safetensors")))
    print(f"{options.directory}: {options.family}, {options.layers} layers, {shards} shards")


if __name__ == "__main__":
    main()
