"""`surgery inspect`: what it says of whole, odd and broken checkpoints, on one screen, from headers alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from support import run_surgery

Shapes = dict[str, tuple[int, ...]]
F16 = np.float16


def layer_shapes(prefix: str, *, experts: int = 0, fused: int = 0) -> Shapes:
    shapes: Shapes = {f"{prefix}self_attn.q_proj.weight": (4, 4), f"{prefix}input_layernorm.weight": (4,)}
    if experts:
        shapes[f"{prefix}mlp.gate.weight"] = (experts, 4)
        for expert in range(experts):
            shapes[f"{prefix}mlp.experts.{expert}.up_proj.weight"] = (2, 4)
        shapes[f"{prefix}mlp.shared_experts.up_proj.weight"] = (2, 4)
    elif fused:
        shapes[f"{prefix}mlp.router.weight"] = (fused, 4)
        shapes[f"{prefix}mlp.experts.gate_up_proj"] = (fused, 4, 4)
    else:
        shapes[f"{prefix}mlp.up_proj.weight"] = (8, 4)
    return shapes


def write(directory: Path, files: dict[str, Shapes], config: dict[str, Any] | None) -> Path:
    """A float16 checkpoint with an index where there are several files."""
    directory.mkdir(parents=True)
    for name, shapes in files.items():
        tensors = {tensor: np.zeros(shape, F16) for tensor, shape in shapes.items()}
        save_file(tensors, directory / name, metadata={"format": "pt"})
    if len(files) > 1:
        weight_map = {tensor: file for file, shapes in files.items() for tensor in shapes}
        index = {"metadata": {}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    return directory


def inspected(*arguments: str | Path, code: int = 0) -> dict[str, Any]:
    result = run_surgery("inspect", *arguments, "--json")
    assert result.returncode == code, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def page(*arguments: str | Path, code: int = 0) -> str:
    result = run_surgery("inspect", *arguments)
    assert result.returncode == code, result.stderr
    return result.stdout


OUTSIDE: Shapes = {"model.embed_tokens.weight": (16, 4), "model.norm.weight": (4,), "lm_head.weight": (16, 4)}
MIXED: dict[str, Any] = {
    "model_type": "mixture_of_tests",
    "architectures": ["MixtureForCausalLM"],
    "num_hidden_layers": 3,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}


def mixed_shapes() -> Shapes:
    return {
        **OUTSIDE,
        **layer_shapes("model.layers.0."),
        **layer_shapes("model.layers.1.", experts=4),
        **layer_shapes("model.layers.2.", experts=4),
        **layer_shapes("model.layers.3.", experts=4),
        "model.layers.3.eh_proj.weight": (4, 8),
    }


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    return write(tmp_path / "mixed", {"model.safetensors": mixed_shapes()}, MIXED)


def test_the_page_of_a_model_without_a_family_record_reads_kinds_from_its_tensors(mixed: Path) -> None:
    assert page(mixed) == (
        f"{mixed}\n"
        "model       mixture_of_tests (MixtureForCausalLM); no family record: layer kinds are read from its tensors, "
        "`trim` cannot take it\n"
        "tensors     31, 888 B in 1 file\n"
        "files       model.safetensors, 3.89 kB; no index\n"
        "dtypes      F16 888 B in 31 tensors; config says float16\n"
        "quantised   no\n"
        "stacks      text: model.layers.N, 4 layers 0-3 (num_hidden_layers 3), 624 B\n"
        "              0    dense, attention; 104 B\n"
        "              1-2  moe 4 experts top-2 + 1 shared, attention; 152 B a layer\n"
        "              3    behind the counted layers (MTP): moe 4 experts top-2 + 1 shared, attention; 216 B\n"
        "experts     per-expert, 4 in each of 3 layers, n_routed_experts 4, top-2, 1 shared\n"
        "heads       lm_head.weight, not tied; MTP 1 stage (model.layers.3); num_nextn_predict_layers 1\n"
        "parts                        tensors     bytes   share  a layer, dtypes\n"
        "            embeddings             1     128 B  14.4 %  F16\n"
        "            attention              3      96 B  10.8 %  32 B in 3, F16\n"
        "            dense MLP              1      64 B   7.2 %  64 B in 1, F16\n"
        "            experts                8     128 B  14.4 %  64 B in 2, F16\n"
        "            shared experts         2      32 B   3.6 %  16 B in 2, F16\n"
        "            router                 2      64 B   7.2 %  32 B in 2, F16\n"
        "            norms                  4      32 B   3.6 %  8 B in 3, F16\n"
        "            lm_head                1     128 B  14.4 %  F16\n"
        "            MTP                    9     216 B  24.3 %  216 B in 1, F16\n"
        "side files  none\n"
        "strays      none\n"
        "findings    none\n"
    )


def test_json_has_the_same_facts_in_one_document(mixed: Path) -> None:
    document = inspected(mixed)
    assert document["valid"] is True
    assert document["family"] is None
    assert [(kind["name"].split(",")[0], kind["layers"]) for kind in document["stacks"][0]["kinds"]][:2] == [
        ("dense", [0]),
        ("moe 4 experts top-2 + 1 shared", [1, 2]),
    ]
    assert document["heads"]["mtp_counted"] == {"field": "num_nextn_predict_layers", "value": 1}
    assert sum(part["tensors"] for part in document["components"]) == document["tensors"] == 31
    assert sum(part["nbytes"] for part in document["components"]) == document["nbytes"]
    assert "tensor_list" not in document


@pytest.mark.parametrize("family", ["llama_tied", "mistral", "qwen2", "qwen3_moe"])
def test_a_real_model_of_a_known_family_is_told_by_its_record(family: str, tiny_model: Callable[..., Path]) -> None:
    document = inspected(tiny_model(family))
    assert document["family"] == family.removesuffix("_tied")
    assert document["findings"] == []
    [stack] = document["stacks"]
    assert (stack["role"], stack["layers"], len(stack["kinds"])) == ("text", [0, 1, 2, 3, 4, 5], 1)
    assert (
        stack["kinds"][0]["name"]
        == {
            "llama_tied": "dense, full attention",
            "mistral": "dense, sliding attention",
            "qwen2": "dense, full attention",
            "qwen3_moe": "moe 4 experts top-2, full attention",
        }[family]
    )
    assert document["heads"]["tied"] is (family == "llama_tied")
    assert bool(document["heads"]["lm_head"]) is not document["heads"]["tied"]
    assert not any(part["component"] == "other" for part in document["components"])


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("qwen2_window", {"dense, full attention": [0, 1, 2], "dense, sliding attention": [3, 4, 5]}),
        (
            "deepseek_v3",
            {
                "dense, latent attention (MLA)": [0, 1],
                "moe 4 experts top-2 + 1 shared, latent attention (MLA)": [2, 3, 4, 5],
            },
        ),
    ],
)
def test_layers_of_several_kinds_are_told_apart(
    family: str, kinds: dict[str, list[int]], tiny_model: Callable[..., Path]
) -> None:
    [stack] = inspected(tiny_model(family))["stacks"]
    assert {kind["name"]: kind["layers"] for kind in stack["kinds"]} == kinds


def test_towers_heads_and_fused_experts_of_a_multimodal_model_are_found(tmp_path: Path) -> None:
    shapes: Shapes = {
        "model.language_model.embed_tokens.weight": (16, 4),
        "model.language_model.norm.weight": (4,),
        "lm_head.weight": (16, 4),
        "model.visual.patch_embed.proj.weight": (4, 4),
        "model.visual.merger.mlp.0.weight": (4, 4),
        "mtp.fc.weight": (4, 8),
    }
    for layer in range(4):
        shapes |= layer_shapes(f"model.language_model.layers.{layer}.", fused=8)
    for layer in range(3):
        shapes |= {f"model.visual.blocks.{layer}.attn.qkv.weight": (12, 4)}
        shapes |= {f"model.audio_tower.layers.{layer}.fc1.weight": (4, 4)}
    shapes |= layer_shapes("mtp.layers.0.", fused=8)
    config = {
        "model_type": "sees_and_hears",
        "text_config": {
            "num_hidden_layers": 4,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "mtp_num_hidden_layers": 1,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "dtype": "bfloat16",
        },
        "vision_config": {"depth": 3},
        "audio_config": {"num_hidden_layers": 3},
        "tie_word_embeddings": False,
    }
    document = inspected(write(tmp_path / "m", {"model.safetensors": shapes}, config))
    assert document["findings"] == []
    stacks = {stack["prefix"]: stack for stack in document["stacks"]}
    assert {prefix: (stack["role"], len(stack["layers"])) for prefix, stack in stacks.items()} == {
        "model.language_model.layers.": ("text", 4),
        "model.visual.blocks.": ("vision", 3),
        "model.audio_tower.layers.": ("audio", 3),
        "mtp.layers.": ("MTP", 1),
    }
    assert stacks["model.visual.blocks."]["counted"] == {"field": "vision_config.depth", "value": 3}
    assert [(kind["name"], kind["layers"]) for kind in document["stacks"][0]["kinds"]] == [
        ("moe 8 experts top-2, linear attention", [0, 1, 2]),
        ("moe 8 experts top-2, full attention", [3]),
    ]
    assert document["experts"]["storage"] == "fused"
    assert document["heads"]["mtp_stages"] == 1
    parts = {part["component"]: part["tensors"] for part in document["components"]}
    assert (parts["vision"], parts["audio"], parts["MTP"], parts["router"]) == (5, 3, 5, 4)


def test_packed_weights_and_their_companions_are_counted(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "quantization_config": {"quant_method": "gptq", "bits": 4, "modules_to_not_convert": ["lm_head"]},
    }
    shapes = {**OUTSIDE, "model.layers.0.self_attn.q_proj.qweight": (4, 1)}
    shapes |= {f"model.layers.0.self_attn.q_proj.{leaf}": (4, 1) for leaf in ("qzeros", "scales", "g_idx")}
    directory = write(tmp_path / "m", {"model.safetensors": shapes}, config)
    line = "gptq (quantization_config, bits 4); 1 module left alone; with 1 g_idx, 1 qweight, 1 qzeros, 1 scales"
    assert f"quantised   {line}\n" in page(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 1}))
    assert "quantised   the config does not say so, but packed or scaled weights are there" in page(directory)


def test_config_and_tensors_that_disagree_are_faults_that_name_both(tmp_path: Path) -> None:
    shapes = {**OUTSIDE, **layer_shapes("model.layers.0.", experts=4), **layer_shapes("model.layers.2.", experts=4)}
    config = {**MIXED, "num_hidden_layers": 2, "n_routed_experts": 5, "num_nextn_predict_layers": 0}
    found = {
        finding["kind"]: finding
        for finding in inspected(write(tmp_path / "m", {"model.safetensors": shapes}, config))["findings"]
    }
    assert found["missing-layer"]["what"] == "num_hidden_layers is 2; of layer 1 there is no tensor"
    assert found["surplus-layer"]["what"] == "num_hidden_layers is 2; there are tensors of layer 2"
    assert found["expert-count"]["what"] == "n_routed_experts is 5; layer 0,2 has 4"


def test_a_counted_mtp_stage_without_tensors_is_a_fault(tmp_path: Path) -> None:
    shapes = {name: shape for name, shape in mixed_shapes().items() if not name.startswith("model.layers.3.")}
    text = page(write(tmp_path / "m", {"model.safetensors": shapes}, MIXED))
    assert "fault: num_nextn_predict_layers is 1; tensors of 0 MTP stages are there" in text


def test_one_file_is_a_model_of_its_own_and_needs_no_config(tmp_path: Path) -> None:
    directory = write(tmp_path / "m", {"some-weights.safetensors": {"a": (2, 3), "b": (0,), "c": ()}}, None)
    document = inspected(directory / "some-weights.safetensors")
    assert (document["tensors"], document["nbytes"], document["model_type"]) == (3, 14, None)
    text = page(directory / "some-weights.safetensors")
    assert "model       unknown: the config names no model type\n" in text
    assert "there is no config.json" in text


def test_an_index_file_can_be_the_source(mixed: Path, tmp_path: Path) -> None:
    files = {"model-00001-of-00002.safetensors": {"a": (2,)}, "model-00002-of-00002.safetensors": {"b": (2,)}}
    directory = write(tmp_path / "sharded", files, MIXED)
    document = inspected(directory / "model.safetensors.index.json")
    assert document["files"]["count"] == 2
    assert document["files"]["index"] == "model.safetensors.index.json"


def test_a_source_with_a_missing_shard_is_printed_and_then_exit_3(tmp_path: Path) -> None:
    files = {"model-00001-of-00002.safetensors": OUTSIDE, "model-00002-of-00002.safetensors": {"b": (2,)}}
    directory = write(tmp_path / "sharded", files, MIXED)
    (directory / "model-00002-of-00002.safetensors").unlink()
    text = page(directory, code=3)
    assert "tensors     3, 264 B in 1 file\n" in text
    assert "files in model.safetensors.index.json are missing, with 1 tensors: model-00002-of-00002" in text
    document = inspected(directory, code=3)
    assert document["valid"] is False


def test_a_git_lfs_pointer_is_called_one(tmp_path: Path) -> None:
    directory = write(tmp_path / "m", {"model.safetensors": {"a": (2,)}}, MIXED)
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4976698672\n"
    (directory / "model.safetensors").write_text(pointer)
    text = page(directory, code=3)
    assert "Git LFS pointer" in text
    assert "4976698672" in text


def test_faults_that_an_operation_can_live_with_are_no_exit_3(tmp_path: Path) -> None:
    files = {"model-00001-of-00002.safetensors": OUTSIDE, "model-00002-of-00002.safetensors": {"b": (2,)}}
    directory = write(tmp_path / "sharded", files, None)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    index["weight_map"].update({f"ghost.{n}": "model-00001-of-00002.safetensors" for n in range(50)})
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    text = page(directory)
    assert text.count("the index places ghost.") == 3
    assert "and 47 more ghost-index-entry (all with --json)" in text


@pytest.mark.parametrize(
    ("pattern", "layout"),
    [
        ("model-rank-{}-part-0.safetensors", "vLLM sharded state, rank 0-1, 2 files"),
        ("model{}-mp2.safetensors", "DeepSeek model parallel, rank 0-1 of 2, 2 files"),
        ("model-tp{:05d}-of-00002.safetensors", "Hugging Face ranks (hf-rank), rank 0-1 of 2, 2 files"),
    ],
)
def test_a_rank_partition_directory_is_called_what_it_is(pattern: str, layout: str, tmp_path: Path) -> None:
    directory = write(tmp_path / "m", {pattern.format(rank): {"w": (2,)} for rank in range(2)}, MIXED)
    (directory / "model.safetensors.index.json").unlink()
    assert f"layout      rank partitions, not storage shards: {layout}" in page(directory)


def test_strays_are_listed_with_the_reason(mixed: Path) -> None:
    save_file({"base_model.model.x": np.zeros(2, F16)}, mixed / "adapter_model.safetensors")
    (mixed / "original").mkdir()
    (mixed / "original" / "consolidated.00.pth").write_bytes(b"x")
    text = page(mixed)
    assert "strays      adapter_model.safetensors: an adapter: not part of the model\n" in text
    assert "            original/: a folder with weights of its own (original/consolidated.00.pth)" in text
    assert "tensors     31," in text


def test_names_reach_the_terminal_escaped(tmp_path: Path) -> None:
    name = "model.layers.0.\x1b[31mevil\u202e.weight"
    directory = write(tmp_path / "m", {"model.safetensors": {name: (2,)}}, {"model_type": "a\x1b[2Jb"})
    listed = run_surgery("inspect", directory, "--tensors")
    assert "\\x1b[31mevil\\u202e" in listed.stdout
    for text in (listed.stdout, page(directory)):
        assert "\x1b" not in text
        assert "\u202e" not in text


def test_tensors_are_listed_one_a_line_and_filtered_by_glob(mixed: Path) -> None:
    result = run_surgery("inspect", mixed, "--tensors", "model.layers.1.mlp.experts.*")
    assert result.returncode == 0
    lines = [line.split("\t") for line in result.stdout.splitlines()]
    assert lines == [
        [f"model.layers.1.mlp.experts.{expert}.up_proj.weight", "F16", "[2,4]", "16", "model.safetensors"]
        for expert in range(4)
    ]
    assert len(run_surgery("inspect", mixed, "--tensors").stdout.splitlines()) == 31
    document = inspected(mixed, "--tensors", "lm_head.*")
    assert document["tensor_list"] == [
        {"name": "lm_head.weight", "dtype": "F16", "shape": [16, 4], "nbytes": 128, "file": "model.safetensors"}
    ]
    nothing = run_surgery("inspect", mixed, "--tensors", "nothing.*")
    assert (nothing.returncode, nothing.stdout) == (0, "")
    assert "no tensor of 31 matches nothing.*" in nothing.stderr


def test_tensors_before_src_is_told_how_to_write_it(mixed: Path) -> None:
    result = run_surgery("inspect", "--tensors", mixed)
    assert result.returncode == 2
    assert f"mend: surgery inspect {mixed} --tensors" in result.stderr


def test_nothing_there_is_exit_3_with_three_lines(tmp_path: Path) -> None:
    result = run_surgery("inspect", tmp_path / "absent")
    assert (result.returncode, result.stdout) == (3, "")
    assert [line.split(":")[0] for line in result.stderr.splitlines()] == ["error", "where", "mend"]


@pytest.mark.parametrize(
    "content", ["[1, 2]", '{"architectures": 7, "num_hidden_layers": "x", "text_config": []}', "{"]
)
def test_a_config_of_any_content_is_survived(content: str, mixed: Path) -> None:
    (mixed / "config.json").write_text(content)
    result = run_surgery("inspect", mixed)
    assert result.returncode in (0, 3)
    assert "Traceback" not in result.stderr
    assert "tensors     31," in result.stdout


def test_inspect_leaves_the_checkpoint_as_it_was(mixed: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(mixed, tmp_path / "copy")
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in copy.iterdir()}
    page(copy)
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in copy.iterdir()} == before
