"""Does vLLM take a `vllm` directory? `python tools/vllm_tokens.py --python VLLM_PYTHON SRC [--tp 2]`.

Splits SRC with surgery, then lets vLLM (on a CPU, see vllm_oracle.py for the environment) greedily decode the same
token ids from SRC as it lies and from the rank files by `load_format="sharded_state"`, and compares the tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

DECODE = """
import json, sys

def main():
    from vllm import LLM, SamplingParams

    mode, directory, ranks = sys.argv[1], sys.argv[2], int(sys.argv[3])
    model = LLM(model=directory, load_format=mode, tensor_parallel_size=ranks, skip_tokenizer_init=True,
                enforce_eager=True, max_model_len=64, dtype="bfloat16")
    sampling = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
    prompts = [{"prompt_token_ids": [3, 17, 5, 99]}, {"prompt_token_ids": [7, 8, 9]}]
    print("TOKENS " + json.dumps([list(each.outputs[0].token_ids) for each in model.generate(prompts, sampling)]))

if __name__ == "__main__":
    main()
"""


def decode(python: Path, mode: str, directory: Path, ranks: int) -> list[list[int]]:
    """The tokens that vLLM chooses. Raises `CalledProcessError` where it does not load."""
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    environment.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as scratch:
        script = Path(scratch) / "decode.py"
        script.write_text(DECODE)
        run = subprocess.run(
            [python, script, mode, directory, str(ranks)], env=environment, capture_output=True, text=True, cwd=scratch
        )
    told = [line for line in run.stdout.splitlines() if line.startswith("TOKENS ")]
    if run.returncode or not told:
        reasons = [line for line in run.stderr.splitlines() + run.stdout.splitlines() if "Error" in line]
        raise SystemExit(f"vLLM did not load {directory} ({mode}): {reasons[0] if reasons else run.stderr[-500:]}")
    tokens: list[list[int]] = json.loads(told[0].removeprefix("TOKENS "))
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", type=Path, required=True, help="the Python that has vLLM")
    parser.add_argument("source", type=Path)
    parser.add_argument("--tp", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "ranks"
        command = [sys.executable, "-m", "surgery", "reshard", arguments.source, out]
        command += ["--tp", str(arguments.tp), "--layout", "vllm"]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        whole = decode(arguments.python, "auto", arguments.source.resolve(), arguments.tp)
        ranks = decode(arguments.python, "sharded_state", out, arguments.tp)
    print(f"as it lies:   {whole}")
    print(f"rank files:   {ranks}")
    print("same tokens" if whole == ranks else "OTHER TOKENS")
    raise SystemExit(whole != ranks)


if __name__ == "__main__":
    main()
