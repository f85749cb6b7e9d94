"""`surgery check`: every way in which a checkpoint is not what its config says is found, with its name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import model_zoo
import pytest
import torch
from safetensors.torch import load_file, save_file

import support
from surgery.check import CheckReport, check


def copied(source: Path, directory: Path) -> Path:
    return Path(shutil.copytree(source, directory))


def edit_config(directory: Path, **fields) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def edit_tensors(directory: Path, change) -> None:
    """Rewrite the checkpoint as one file of `change(tensors)`."""
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
        path.unlink()
    for path in directory.glob("*.index.json"):
        path.unlink()
    save_file(change(tensors), directory / "model.safetensors", {"format": "pt"})


def faults(report: CheckReport) -> dict[str, str]:
    return {finding.kind: finding.what for finding in report.findings if finding.severity == "fault"}


def answers(report: CheckReport) -> dict[str, str]:
    return {question.question: question.verdict for question in report.questions}


@pytest.mark.parametrize("family", ["llama", "llama_tied", "deepseek_v3", "gpt_oss", "jamba", "qwen3_next"])
def test_a_checkpoint_that_is_what_its_config_says_passes(tiny_model, family):
    report = check(tiny_model(family))
    assert set(answers(report).values()) == {"passed"}, report
    assert not faults(report)
    assert report.witness.startswith("transformers ")


@pytest.mark.parametrize("kind", ["llava", "t5", "whisper", "qwen3_5_moe", "mamba2", "kimi_linear"])
def test_so_does_one_of_any_class(tmp_path, kind):
    report = check(model_zoo.build(kind, tmp_path / kind))
    assert set(answers(report).values()) == {"passed"}, report


def test_a_missing_tensor_a_surplus_one_and_a_wrong_shape_are_named(tiny_model, tmp_path):
    def change(tensors):
        tensors.pop("model.layers.1.mlp.up_proj.weight")
        tensors["model.layers.2.mlp.extra.weight"] = torch.zeros(4)
        tensors["model.layers.3.self_attn.q_proj.weight"] = torch.zeros(32, 24)
        return tensors

    directory = copied(tiny_model("llama"), tmp_path / "m")
    edit_tensors(directory, change)
    report = check(directory)
    found = faults(report)
    assert "model.layers.1.mlp.up_proj.weight" in found["missing-tensor"]
    assert "model.layers.2.mlp.extra.weight" in found["surplus-tensor"]
    assert found["wrong-shape"].startswith("model.layers.3.self_attn.q_proj.weight has shape [32, 24]")
    assert (answers(report)["names"], answers(report)["shapes"]) == ("failed", "failed")


def test_what_every_layer_lacks_alike_is_found_by_the_skeleton_alone(tiny_model, tmp_path):
    directory = copied(tiny_model("llama"), tmp_path / "m")
    edit_tensors(directory, lambda tensors: {n: t for n, t in tensors.items() if "down_proj" not in n})
    report = check(directory)
    assert answers(report)["config and headers"] == "passed"
    assert answers(report)["names"] == "failed"


def test_an_integer_where_a_float_belongs_is_a_wrong_dtype(tiny_model, tmp_path):
    def change(tensors):
        name = "model.layers.1.mlp.up_proj.weight"
        tensors[name] = tensors[name].to(torch.int32)
        return tensors

    directory = copied(tiny_model("llama"), tmp_path / "m")
    edit_tensors(directory, change)
    assert "is int32; the class holds float32" in faults(check(directory))["wrong-dtype"]


def test_a_stale_per_layer_list_is_a_fault(tiny_model, tmp_path):
    directory = copied(tiny_model("gemma2"), tmp_path / "m")
    config = json.loads((directory / "config.json").read_text())
    edit_config(directory, layer_types=[*config["layer_types"], "full_attention"])
    assert "layer_types has 7 entries for 6 layers" in faults(check(directory))["per-layer-list"]


def with_stage(tensors):
    """A stage behind six layers, made as the last of them."""
    layer = {
        name.replace("layers.5.", "layers.6."): tensor.clone()
        for name, tensor in tensors.items()
        if ".layers.5." in name
    }
    hidden = tensors["model.norm.weight"].shape[0]
    joins = {"eh_proj": (hidden, 2 * hidden), "enorm": (hidden,), "hnorm": (hidden,), "shared_head.norm": (hidden,)}
    own = {f"model.layers.6.{name}.weight": torch.zeros(shape) for name, shape in joins.items()}
    return {**tensors, **layer, **own}


def test_mtp_declared_without_tensors_and_the_reverse_are_faults(tiny_model, tmp_path):
    directory = copied(tiny_model("deepseek_v3"), tmp_path / "declared")
    edit_config(directory, num_nextn_predict_layers=1)
    assert "missing-mtp" in faults(check(directory))
    directory = copied(tiny_model("deepseek_v3"), tmp_path / "there")
    edit_tensors(directory, with_stage)
    found = faults(check(directory))
    assert "num_nextn_predict_layers is 0" in found["uncounted-mtp"]
    edit_config(directory, num_nextn_predict_layers=1)
    assert not faults(check(directory))


def test_a_module_list_of_layers_that_are_not_there_is_a_fault(tiny_model, tmp_path):
    directory = copied(tiny_model("llama"), tmp_path / "m")
    ignore = ["lm_head", "model.layers.3.mlp.up_proj", "model.layers.17.mlp.up_proj"]
    section = {"quant_method": "compressed-tensors", "config_groups": {}, "ignore": ignore}
    edit_config(directory, quantization_config=section)
    assert "model.layers.17.mlp.up_proj" in faults(check(directory))["dead-entry"]


def test_expert_ids_with_gaps_load_clean_and_are_found_here(tiny_model, tmp_path):
    def change(tensors):
        return {name.replace(".experts.3.", ".experts.7."): tensor for name, tensor in tensors.items()}

    directory = copied(tiny_model("deepseek_v3"), tmp_path / "m")
    edit_tensors(directory, change)
    assert "expert-ids" in faults(check(directory))


def test_tied_flags_that_disagree_with_the_tensors_are_faults(tiny_model, tmp_path):
    directory = copied(tiny_model("llama_tied"), tmp_path / "m")
    edit_config(directory, tie_word_embeddings=False)
    assert "untied-without-head" in faults(check(directory))


def fp8(directory: Path, source: Path, *, floor: bool = False, left_out: str = "") -> Path:
    """The layers' matrices in FP8 blocks of 16, but for modules with `left_out` in their names."""
    copied(source, directory)

    def change(tensors):
        out = {}
        for name, tensor in tensors.items():
            module = name.removesuffix(".weight")
            if ".layers." not in name or "_proj" not in name or (left_out and left_out in name):
                out[name] = tensor
                continue
            rows, columns = (size // 16 if floor else -(-size // 16) for size in tensor.shape)
            out[name] = tensor.to(torch.float8_e4m3fn)
            out[f"{module}.weight_scale_inv"] = torch.ones(rows, columns)
        return out

    edit_tensors(directory, change)
    section = {"quant_method": "fp8", "weight_block_size": [16, 16], "modules_to_not_convert": ["lm_head"]}
    edit_config(directory, quantization_config=section)
    return directory


def test_fp8_blocks_are_judged_by_the_weights_they_stand_for(tiny_model, tmp_path):
    source = tiny_model("llama", intermediate_size=40)
    assert set(answers(check(fp8(tmp_path / "good", source))).values()) == {"passed"}
    found = faults(check(fp8(tmp_path / "floor", source, floor=True)))
    assert "in blocks of [16, 16] needs" in found["scale-shape"]
    found = faults(check(fp8(tmp_path / "lonely", source, left_out="layers.3.mlp.up_proj")))
    assert "first model.layers.3.mlp.up_proj" in found["not-quantized"]
    directory = fp8(tmp_path / "excluded", source)
    section = json.loads((directory / "config.json").read_text())["quantization_config"]
    edit_config(directory, quantization_config={**section, "modules_to_not_convert": ["model.layers.2.mlp.up_proj"]})
    assert "model.layers.2.mlp.up_proj" in faults(check(directory))["quantized-though-excluded"]


def packed_as(form: str, tensor: torch.Tensor, module: str) -> dict[str, torch.Tensor]:
    """Tensors of the shapes that packing has; the numbers in them do not matter."""
    rows, columns = tensor.shape
    if form == "gptq":
        return {
            f"{module}.qweight": torch.zeros(columns // 8, rows, dtype=torch.int32),
            f"{module}.qzeros": torch.zeros(columns // 16, rows // 8, dtype=torch.int32),
            f"{module}.scales": torch.zeros(columns // 16, rows),
            f"{module}.g_idx": torch.zeros(columns, dtype=torch.int32),
        }
    if form == "awq":
        return {
            f"{module}.qweight": torch.zeros(columns, rows // 8, dtype=torch.int32),
            f"{module}.qzeros": torch.zeros(columns // 16, rows // 8, dtype=torch.int32),
            f"{module}.scales": torch.zeros(columns // 16, rows),
        }
    if form == "compressed-tensors":
        return {
            f"{module}.weight_packed": torch.zeros(rows, columns // 8, dtype=torch.int32),
            f"{module}.weight_scale": torch.zeros(rows, columns // 16),
            f"{module}.weight_shape": torch.tensor([rows, columns]),
        }
    return {
        f"{module}.weight": torch.zeros(rows, columns // 2, dtype=torch.uint8),
        f"{module}.weight_scale": torch.zeros(rows, columns // 16).to(torch.float8_e4m3fn),
        f"{module}.weight_scale_2": torch.tensor(1.0),
        f"{module}.input_scale": torch.tensor(1.0),
    }


SECTIONS = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 16},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 16},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16}}},
        "ignore": ["lm_head"],
    },
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
}


@pytest.mark.parametrize("form", SECTIONS)
def test_packed_weights_are_judged_by_the_shapes_they_stand_for(tiny_model, tmp_path, form):
    directory = copied(tiny_model("llama"), tmp_path / "m")

    def change(tensors):
        out = {}
        for name, tensor in tensors.items():
            layers = ".layers." in name and "_proj" in name
            out |= packed_as(form, tensor, name.removesuffix(".weight")) if layers else {name: tensor}
        return out

    edit_tensors(directory, change)
    edit_config(directory, quantization_config=SECTIONS[form])
    report = check(directory)
    assert set(answers(report).values()) == {"passed"}, report
    edit_config(directory, intermediate_size=64)
    assert "wrong-shape" in faults(check(directory))


def test_layers_that_are_not_what_the_source_had_are_found_against_it(tiny_model, tmp_path):
    source = tiny_model("gemma2")
    assert support.run_surgery("trim", source, tmp_path / "out", "--layers", "1,2,3").returncode == 0
    result = support.run_surgery("check", tmp_path / "out", "--against", source)
    assert result.returncode == 0, result.stdout
    assert "layers of the source: passed (3 layers are what they were)" in result.stdout
    edit_config(tmp_path / "out", layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    result = support.run_surgery("check", tmp_path / "out", "--against", source)
    assert result.returncode == 1
    assert "other-layer" in result.stdout


def test_numbers_of_ranks_are_judged_with_reasons_and_bytes(tiny_model):
    report = check(tiny_model("deepseek_v3"), for_tp=2, for_ep=2)
    assert report.legality is not None
    assert not report.legality.reasons
    whole = check(tiny_model("deepseek_v3"), for_tp=1).legality
    assert whole is not None
    assert whole.rank_nbytes / 2 < report.legality.rank_nbytes < whole.rank_nbytes
    found = check(tiny_model("deepseek_v3"), for_tp=3, for_ep=3)
    assert found.verdict == "failed"
    assert {"num_attention_heads is 4, not divisible by 3; 1, 2, 4 would do"} <= set(found.legality.reasons)
    assert any(reason.startswith("n_routed_experts is 4") for reason in found.legality.reasons)


def test_unverified_is_not_green_unless_it_is_allowed(tiny_model, tmp_path):
    directory = copied(tiny_model("llama"), tmp_path / "m")
    edit_config(directory, model_type="no_such_type")
    result = support.run_surgery("check", directory, "--json")
    assert result.returncode == 1
    report = json.loads(result.stdout)
    verdicts = {question["question"]: question["verdict"] for question in report["questions"]}
    assert verdicts["names"] == "unverified"
    assert "failed" not in verdicts.values()
    assert support.run_surgery("check", directory, "--allow-unverified").returncode == 0
    assert support.run_surgery("check", tmp_path).returncode == 3


def test_a_dummy_directory_says_that_there_are_no_weights_to_judge(tiny_model, tmp_path):
    out = tmp_path / "out"
    assert support.run_surgery("trim", tiny_model("llama"), out, "--layers", "0,2", "--dummy").returncode == 0
    result = support.run_surgery("check", out)
    assert result.returncode == 1
    assert "there are no weights to judge" in result.stdout
    assert support.run_surgery("check", out, "--allow-unverified").returncode == 0


def test_deepseek_v3_at_its_real_size_is_checked_in_seconds_and_little_memory(sparse_deepseek_v3):
    import resource

    result = support.run_surgery("check", sparse_deepseek_v3, "--for-tp", "8")
    assert result.returncode == 0, result.stdout
    assert "shapes: passed (45,395 shapes)" in result.stdout
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert peak < 1 << 20, f"{peak} KiB"
