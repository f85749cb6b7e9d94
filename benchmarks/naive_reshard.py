"""What a script does: load the checkpoint into memory with torch, chunk every matrix, save a file for each rank.

python benchmarks/naive_reshard.py SRC OUT --tp N
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

COLUMN = (
    *("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight"),
    *("embed_tokens.weight", "lm_head.weight"),
)
ROW = ("o_proj.weight", "down_proj.weight")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tp", type=int, required=True)
    options = parser.parse_args()
    whole: dict[str, torch.Tensor] = {}
    for path in sorted(options.source.glob("*.safetensors")):
        whole |= load_file(path)
    options.out.mkdir()
    for rank in range(options.tp):
        mine = {}
        for name, tensor in whole.items():
            axis = (
                1
                if name.endswith(ROW)
                else 0
                if name.endswith((*COLUMN, "embed_tokens.weight", "lm_head.weight"))
                else -1
            )
            mine[name] = tensor if axis < 0 else tensor.chunk(options.tp, axis)[rank].contiguous()
        save_file(mine, options.out / f"model-tp{rank:05d}-of-{options.tp:05d}.safetensors", {"format": "pt"})


if __name__ == "__main__":
    main()
