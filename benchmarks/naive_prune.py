"""What tools that prune in memory do: load the model with transformers, slice its experts and routers, save it.

python benchmarks/naive_prune.py SRC OUT --experts N
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("source")
    parser.add_argument("out")
    parser.add_argument("--experts", type=int, required=True)
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.source, dtype="auto", local_files_only=True)
    keep = torch.arange(options.experts)
    for layer in model.get_decoder().layers:
        experts, router = layer.mlp.experts, layer.mlp.gate
        for name in ("gate_up_proj", "down_proj"):
            setattr(experts, name, torch.nn.Parameter(getattr(experts, name).data[keep].clone(), requires_grad=False))
        router.weight = torch.nn.Parameter(router.weight.data[keep].clone(), requires_grad=False)
    for name in ("num_experts", "num_local_experts"):
        if name in vars(model.config):
            setattr(model.config, name, options.experts)
    model.save_pretrained(options.out, max_shard_size="1GB")


if __name__ == "__main__":
    main()
