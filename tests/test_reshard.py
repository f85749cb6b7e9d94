"""Rank partitions against what real engines wrote, and against themselves: split, merge, deal anew, bytes exact."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open

import support

GOLDEN = Path(__file__).parent / "golden" / "tp"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/case.json"))

Held = dict[str, tuple[str, tuple[int, ...], bytes]]


def tensors_of(path: Path) -> Held:
    """Name -> dtype, shape and bytes of one file or of a directory in storage shards."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    held: Held = {}
    for file in files:
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            held[name] = (entry["dtype"], tuple(entry["shape"]), data[start + begin : start + end])
    return held


def by_rank(directory: Path) -> list[Held]:
    """The tensors of every rank, by the numbers in the names of the files."""
    import re

    ranks: dict[int, Held] = {}
    for file in sorted(directory.glob("*.safetensors")):
        number = re.search(r"rank-(\d+)|model(\d+)-mp|tp(\d+)-of|shard-(\d+)", file.name)
        assert number is not None
        rank = int(next(group for group in number.groups() if group))
        ranks.setdefault(rank, {}).update(tensors_of(file))
    return [ranks[rank] for rank in sorted(ranks)]


def reshard(source: Path, out: Path, tp: int, *more: str):
    return support.run_surgery("reshard", source, out, "--tp", str(tp), *more)


def case_of(name: str) -> tuple[dict, Path]:
    case = json.loads((GOLDEN / name / "case.json").read_text())
    return case, (GOLDEN / name / case["source"]).resolve()


def with_config(ranks: Path, source: Path, directory: Path) -> Path:
    """Rank files with the config of the source beside them."""
    shutil.copytree(ranks, directory)
    shutil.copy(source / "config.json", directory)
    return directory


@pytest.mark.parametrize("name", [case for case in CASES if not case.startswith("dcp")])
def test_a_split_is_what_the_reference_wrote(name, tmp_path):
    case, source = case_of(name)
    result = reshard(source, tmp_path / "out", case["tp"], "--layout", case["layout"])
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == sorted(case["files"])
    assert by_rank(tmp_path / "out") == by_rank(GOLDEN / name / "ranks")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )
    assert not list((tmp_path / "out").glob("*.index.json"))
    proof = support.run_surgery("verify", tmp_path / "out", "--against", source)
    assert proof.returncode == 0, proof.stdout


@pytest.mark.parametrize("name", CASES)
def test_the_references_ranks_merge_into_the_source(name, tmp_path):
    source = case_of(name)[1]
    ranks = with_config(GOLDEN / name / "ranks", source, tmp_path / "ranks")
    result = reshard(ranks, tmp_path / "out", 1, "--layout", "hf")
    assert result.returncode == 0, result.stderr
    assert tensors_of(tmp_path / "out") == tensors_of(source)
    proof = support.run_surgery("verify", tmp_path / "out", "--against", ranks)
    assert proof.returncode == 0, proof.stdout


def test_uneven_boxes_of_dcp_cover_every_tensor_once_and_torch_reads_them(tmp_path):
    case, source = case_of("dcp_hf_llama_tp3")
    assert reshard(source, tmp_path / "out", 3, "--layout", "dcp-hf").returncode == 0
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == sorted(case["files"])
    for path in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            info = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            assert set(info) == set(file.keys())
            assert file.metadata()["DCP_VERSION"] == "1.0"
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    whole = {}
    for path in source.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            whole |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    state = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path / "out")))
    assert all(torch.equal(state[name], whole[name]) for name in whole)


ROUND_TRIPS = [
    ("llama", "hf-rank", [1, 2, 4]),
    ("llama", "vllm", [1, 2, 4]),
    ("llama", "dcp-hf", [1, 2, 3, 4, 6, 8, 16]),
    ("qwen3_moe", "hf-rank", [1, 2, 4]),
    ("qwen3_moe", "vllm", [1, 2, 4]),
    ("qwen3_fp8_block", "hf-rank", [1, 2]),
    ("qwen3_fp8_block", "vllm", [1, 2]),
    ("qwen3_fp8_block", "dcp-hf", [2, 3]),
    ("deepseek_bf16", "deepseek", [1, 2, 4]),
    ("deepseek_bf16", "hf-rank", [1, 2, 4]),
    ("deepseek_bf16", "vllm", [1, 2, 4]),
    ("deepseek_bf16", "dcp-hf", [3, 8]),
]


@pytest.mark.parametrize(("model", "layout", "sizes"), ROUND_TRIPS)
def test_from_size_to_size_and_back_every_byte_is_the_sources(model, layout, sizes, tmp_path):
    source = GOLDEN / "sources" / model
    whole = tensors_of(source)
    for first, second in zip(sizes, [*sizes[1:], sizes[0]], strict=True):
        a, b, back = (tmp_path / f"{layout}-{first}-{each}" for each in ("a", "b", "back"))
        assert reshard(source, a, first, "--layout", layout).returncode == 0
        result = reshard(a, b, second)
        assert result.returncode == 0, result.stderr
        direct = tmp_path / f"direct-{first}-{second}"
        assert reshard(source, direct, second, "--layout", layout).returncode == 0
        if layout != "dcp-hf":
            assert by_rank(b) == by_rank(direct)
        result = reshard(b, back, 1, "--layout", "hf")
        assert result.returncode == 0, result.stderr
        assert tensors_of(back) == whole


def test_across_layouts_in_one_pass(tmp_path):
    source = GOLDEN / "sources" / "qwen3_moe"
    assert reshard(source, tmp_path / "vllm", 2, "--layout", "vllm").returncode == 0
    assert reshard(tmp_path / "vllm", tmp_path / "ranks", 4, "--layout", "hf-rank").returncode == 0
    assert reshard(tmp_path / "ranks", tmp_path / "dcp", 3, "--layout", "dcp-hf").returncode == 0
    result = reshard(tmp_path / "dcp", tmp_path / "back", 1, "--layout", "hf")
    assert result.returncode == 0, result.stderr
    assert tensors_of(tmp_path / "back") == tensors_of(source)
