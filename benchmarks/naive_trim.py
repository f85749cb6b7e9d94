"""The trim that a person writes in ten minutes: safetensors `safe_open`, rename, `save_file` per output shard.

What `benchmarks/trim.py` compares with; run by it in a process of its own. Every output shard is held in memory.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file


def main() -> None:
    parser = argparse.ArgumentParser(description="Trim a checkpoint by loading and saving tensors.")
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", required=True)
    parser.add_argument("--max-shard-bytes", type=int, required=True)
    options = parser.parse_args()
    new_of = {int(old): new for new, old in enumerate(options.layers.split(","))}
    index = json.loads((options.source / "model.safetensors.index.json").read_text())["weight_map"]

    kept: dict[str, list[tuple[str, str]]] = {}  # source file -> (old name, new name)
    for old, file in index.items():
        parts = old.split(".")
        if parts[1] == "layers":
            if int(parts[2]) not in new_of:
                continue
            parts[2] = str(new_of[int(parts[2])])
        kept.setdefault(file, []).append((old, ".".join(parts)))

    options.out.mkdir()
    shard: dict[str, object] = {}
    shard_bytes = 0
    shards: list[list[str]] = []

    def save() -> None:
        save_file(shard, options.out / f"part-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for file, names in sorted(kept.items()):
        with safe_open(options.source / file, "pt") as reader:
            for old, new in names:
                tensor = reader.get_tensor(old)
                if shard and shard_bytes + tensor.nbytes > options.max_shard_bytes:
                    save()
                    shard_bytes = 0
                shard[new] = tensor
                shard_bytes += tensor.nbytes
    save()

    weight_map = {}
    for number, saved in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (options.out / f"part-{number}.safetensors").rename(options.out / file)
        weight_map.update(dict.fromkeys(saved, file))
    (options.out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = json.loads((options.source / "config.json").read_text())
    config["num_hidden_layers"] = len(new_of)
    (options.out / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main()
