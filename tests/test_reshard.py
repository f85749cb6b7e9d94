"""Rank partitions against what real engines wrote, and against themselves: split, merge, deal anew, bytes exact."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import golden_sources
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


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout", "sizes"), ROUND_TRIPS)
def test_from_every_size_to_the_next_and_back_every_byte_is_the_sources(model, layout, sizes, tmp_path):
    goes_around(GOLDEN / "sources" / model, layout, sizes, tmp_path)


@pytest.mark.parametrize(("model", "layout", "sizes"), ROUND_TRIPS)
def test_from_size_to_size_and_back_every_byte_is_the_sources(model, layout, sizes, tmp_path):
    goes_around(GOLDEN / "sources" / model, layout, sizes[-2:], tmp_path)


def goes_around(source: Path, layout: str, sizes: list[int], tmp_path: Path) -> None:
    """From each size to the next, the last to the first, and back to the whole; as the direct split would be."""
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


VLLM_CASES = sorted(path.stem for path in (GOLDEN.parent / "vllm").glob("*.json"))


@pytest.mark.parametrize("name", VLLM_CASES)
def test_every_rank_is_what_vllm_itself_saved(name, tmp_path):
    case = json.loads((GOLDEN.parent / "vllm" / f"{name}.json").read_text())
    source = golden_sources.write_source(case, tmp_path / "source")
    more = ["--ep", str(case["tp"])] if case["ep"] else []
    result = reshard(source, tmp_path / "out", case["tp"], "--layout", "vllm", *more)
    assert result.returncode == 0, result.stderr
    for rank, wanted in enumerate(case["ranks"]):
        assert golden_sources.digests(tmp_path / "out" / f"model-rank-{rank}-part-0.safetensors") == wanted
    back = reshard(tmp_path / "out", tmp_path / "back", 1, "--layout", "hf")
    assert back.returncode == 0, back.stderr
    assert tensors_of(tmp_path / "back") == tensors_of(source)


def edited(directory: Path, name: str, change) -> None:
    """A tensor of one file of `directory` changed in place by `change(array of bytes)`."""
    for path in sorted(directory.glob("*.safetensors")):
        data = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        if name in header:
            begin, end = header[name]["data_offsets"]
            piece = data[start + begin : start + end]
            change(piece)
            data[start + begin : start + end] = piece
            path.write_bytes(data)
            return
    raise AssertionError(name)


def flip(piece: bytearray) -> None:
    piece[0] ^= 1


@pytest.fixture
def ranks(tmp_path) -> Path:
    source = case_of("vllm_llama_tp4")[1]
    return with_config(GOLDEN / "vllm_llama_tp4" / "ranks", source, tmp_path / "ranks")


def refused(source: Path, out: Path, *arguments: str, code: int, tp: int = 1, layout: str = "hf") -> str:
    result = reshard(source, out, tp, "--layout", layout, *arguments)
    assert result.returncode == code, (result.returncode, result.stdout, result.stderr)
    assert len(result.stderr.strip().splitlines()) >= 3
    assert not out.exists()
    return result.stderr


def test_unequal_replicas_stop_the_merge(ranks, tmp_path):
    edited(ranks, "model.norm.weight", flip)
    assert "its bytes differ from its replica's" in refused(ranks, tmp_path / "no", code=3)


def test_a_kv_head_that_is_not_the_same_on_both_its_ranks_stops_the_merge(ranks, tmp_path):
    path = ranks / "model-rank-1-part-0.safetensors"
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    entry = json.loads(data[8:start])["model.layers.0.self_attn.qkv_proj.weight"]
    data[start + entry["data_offsets"][1] - 1] ^= 1  # The last row of V, which rank 0 has too.
    path.write_bytes(data)
    assert "differ" in refused(ranks, tmp_path / "no", code=3)


def test_padding_that_is_not_zero_stops_the_merge(ranks, tmp_path):
    path = ranks / "model-rank-3-part-0.safetensors"
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    entry = json.loads(data[8:start])["lm_head.weight"]
    data[start + entry["data_offsets"][1] - 1] = 7
    path.write_bytes(data)
    assert "not every element is" in refused(ranks, tmp_path / "no", code=3)


def test_a_missing_rank_is_named(ranks, tmp_path):
    (ranks / "model-rank-1-part-0.safetensors").unlink()
    assert "rank 1 of 4 has no file" in refused(ranks, tmp_path / "no", code=3)


def test_rank_files_without_the_config_are_refused(ranks, tmp_path):
    (ranks / "config.json").unlink()
    assert "there is no config.json" in refused(ranks, tmp_path / "no", code=3)


def test_rank_files_beside_storage_shards_are_told_apart_by_the_user(ranks, tmp_path):
    source = case_of("vllm_llama_tp4")[1]
    for path in source.iterdir():
        shutil.copy(path, ranks)
    assert "besides" in refused(ranks, tmp_path / "no", code=3)
    assert reshard(ranks, tmp_path / "a", 1, "--layout", "hf", "--from", "vllm").returncode == 0
    assert tensors_of(tmp_path / "a") == tensors_of(source)
    assert reshard(ranks, tmp_path / "b", 2, "--layout", "hf-rank", "--from", "hf").returncode == 0


def test_a_stale_index_beside_rank_files_is_normal(ranks, tmp_path):
    source = case_of("vllm_llama_tp4")[1]
    shutil.copy(source / "model.safetensors.index.json", ranks)
    assert reshard(ranks, tmp_path / "out", 1, "--layout", "hf").returncode == 0


def test_two_sizes_or_two_layouts_are_refused(tmp_path):
    source = case_of("hf_rank_llama_tp2")[1]
    mixed = with_config(GOLDEN / "hf_rank_llama_tp2" / "ranks", source, tmp_path / "mixed")
    shutil.copy(mixed / "model-tp00000-of-00002.safetensors", mixed / "model-tp00000-of-00004.safetensors")
    assert "2 and 4 ranks" in refused(mixed, tmp_path / "no", code=3)
    (mixed / "model-tp00000-of-00004.safetensors").unlink()
    shutil.copy(GOLDEN / "vllm_llama_tp2" / "ranks" / "model-rank-0-part-0.safetensors", mixed)
    assert "several layouts" in refused(mixed, tmp_path / "no", code=3)


def test_usage_and_sizes_that_do_not_divide_are_said_with_those_that_do(tmp_path):
    llama = GOLDEN / "sources" / "llama"
    assert "--tp is 2" in refused(llama, tmp_path / "no", code=2, tp=2, layout="hf")
    told = refused(llama, tmp_path / "no", code=2, tp=3, layout="hf-rank")
    assert "--tp 1, 2, 4" in told
    told = refused(GOLDEN / "sources" / "qwen3_fp8_block", tmp_path / "no", code=2, tp=4, layout="hf-rank")
    assert "--tp" in told
    told = refused(GOLDEN / "sources" / "deepseek_bf16", tmp_path / "no", code=2, tp=3, layout="deepseek")
    assert "3" in told
    assert "which layout?" in support.run_surgery("reshard", llama, tmp_path / "no", "--tp", "2").stderr


def test_a_name_without_a_rule_is_an_error_and_no_copy(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / "sources" / "llama", source)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    (source / "model-00003-of-00003.safetensors").write_bytes(
        (source / "model-00003-of-00003.safetensors").read_bytes().replace(b"up_proj.weight", b"xx_proj.weight")
    )
    text = json.dumps(index).replace("model.layers.0.mlp.up_proj", "model.layers.0.mlp.xx_proj")
    (source / "model.safetensors.index.json").write_text(text)
    for layout in ("hf-rank", "vllm"):
        assert "xx_proj" in refused(source, tmp_path / "no", code=2, tp=2, layout=layout)


def test_trim_and_prune_compose_with_ranks_in_one_pass(tmp_path):
    source = GOLDEN / "sources" / "qwen3_moe"
    keep = {f"model.layers.{layer}": [3, 0] for layer in range(2)}
    recipe = {
        "recipe": [
            {"operation": "prune", "keep": keep},
            {"operation": "trim", "layers": "1"},
            {"operation": "reshard", "tp": 2, "layout": "vllm"},
        ]
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    result = support.run_surgery("run", source, tmp_path / "ranks", tmp_path / "recipe.yaml")
    assert result.returncode == 0, result.stderr
    (tmp_path / "whole.yaml").write_text(json.dumps({"recipe": recipe["recipe"][:2]}))
    assert support.run_surgery("run", source, tmp_path / "whole", tmp_path / "whole.yaml").returncode == 0
    assert reshard(tmp_path / "ranks", tmp_path / "back", 1, "--layout", "hf").returncode == 0
    assert tensors_of(tmp_path / "back") == tensors_of(tmp_path / "whole")


def test_trimming_a_rank_directory_keeps_its_layout_and_size(ranks, tmp_path):
    result = support.run_surgery("trim", ranks, tmp_path / "out", "--layers", "1")
    assert result.returncode == 0, result.stderr
    assert len(by_rank(tmp_path / "out")) == 4
    source = case_of("vllm_llama_tp4")[1]
    assert support.run_surgery("trim", source, tmp_path / "whole", "--layers", "1").returncode == 0
    assert reshard(tmp_path / "whole", tmp_path / "dealt", 4, "--layout", "vllm").returncode == 0
    assert by_rank(tmp_path / "out") == by_rank(tmp_path / "dealt")
    assert support.run_surgery("verify", tmp_path / "out", "--against", ranks).returncode == 0


def test_transformers_loads_the_boxes_of_dcp_as_they_are(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    source = GOLDEN / "sources" / "llama"
    assert reshard(source, tmp_path / "out", 3, "--layout", "dcp-hf").returncode == 0
    whole = AutoModelForCausalLM.from_pretrained(source, local_files_only=True).state_dict()
    dealt = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True).state_dict()
    assert whole.keys() == dealt.keys()
    assert all(torch.equal(whole[name], dealt[name]) for name in whole)
