"""Load a checkpoint with transformers, strictly, and generate a few tokens: `python tools/generate.py DIR`.

Exits 1 when a tensor is missing, left over or of another shape. Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def main() -> None:
    parser = argparse.ArgumentParser(description="Load a checkpoint with transformers and generate.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--prompt", default="Cut twice, measure once:")
    parser.add_argument("--tokens", type=int, default=8)
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model, loading = AutoModelForCausalLM.from_pretrained(
        options.directory, output_loading_info=True, local_files_only=True
    )
    faults = {kind: sorted(map(str, names)) for kind, names in loading.items() if names}
    if faults:
        sys.exit(f"error: transformers loads {options.directory} with {faults}")
    tokenizer = AutoTokenizer.from_pretrained(options.directory, local_files_only=True)
    inputs = tokenizer(options.prompt, return_tensors="pt")
    with torch.no_grad():
        output = model.eval().generate(**inputs, max_new_tokens=options.tokens, do_sample=False)
    new_tokens = output[0, inputs["input_ids"].shape[1] :].tolist()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{type(model).__name__}: {model.config.num_hidden_layers} layers, {parameters:,} parameters")
    print("missing, unexpected or mismatched tensors: none")
    print(f"{options.prompt!r} -> token ids {new_tokens}")


if __name__ == "__main__":
    main()
