"""Tensors of another checkpoint grafted: an MTP head that a quantiser lost, with counts, lists, numbers and proof."""

from __future__ import annotations

import json
from pathlib import Path

import model_zoo
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from test_prune import build, expert_layers, tensors_of, with_head, write_keep

import support


def config_of(directory: Path) -> dict:
    return json.loads((directory / "config.json").read_text())


def edit_config(directory: Path, **fields) -> Path:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key, value in fields.items():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    path.write_text(json.dumps(config))
    return directory


def both(kind: str, tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint without its head, as a quantiser leaves it, and the whole one."""
    whole = with_head(build(kind, tmp_path / "whole"), kind)
    bare = edit_config(build(kind, tmp_path / "bare"), num_nextn_predict_layers=None)
    return bare, whole


@pytest.mark.parametrize(("kind", "pattern"), [("deepseek_v3", "model.layers.6.*"), ("qwen3_next", "mtp.*")])
def test_a_lost_head_comes_back_with_its_count(kind, pattern, tmp_path):
    bare, whole = both(kind, tmp_path)
    out = tmp_path / "out"
    result = support.run_surgery("graft", bare, out, "--from", whole, "--tensors", pattern)
    assert result.returncode == 0, result.stderr
    assert tensors_of(out) == tensors_of(whole)
    assert config_of(out)["num_nextn_predict_layers"] == 1
    assert support.run_surgery("verify", out, "--against", bare, "--against", whole).returncode == 0
    alone = support.run_surgery("verify", out, "--against", bare)
    assert "unverified" in alone.stdout
    manifest = (out / "surgery.json").read_text()
    assert str(whole) not in manifest
    assert str(bare) not in manifest
    again = support.run_surgery("run", bare, tmp_path / "again", out / "surgery.json", "--from", whole)
    assert again.returncode == 0, again.stderr
    assert tensors_of(tmp_path / "again") == tensors_of(out)


def test_a_stage_behind_the_layers_gets_the_number_behind_these_layers(tmp_path):
    bare, whole = both("deepseek_v3", tmp_path)
    assert support.run_surgery("trim", bare, tmp_path / "short", "--layers", "0,3,5").returncode == 0
    arguments = ["--from", whole, "--tensors", "model.layers.6.*"]
    result = support.run_surgery("graft", tmp_path / "short", tmp_path / "out", *arguments)
    assert result.returncode == 0, result.stderr
    old, new = tensors_of(whole), tensors_of(tmp_path / "out")
    assert new["model.layers.3.eh_proj.weight"] == old["model.layers.6.eh_proj.weight"]
    assert not [name for name in new if name.startswith("model.layers.6.")]
    assert support.run_surgery("verify", tmp_path / "out").returncode == 0


def test_graft_prune_and_trim_compose_in_one_pass(tmp_path):
    bare, whole = both("deepseek_v3", tmp_path)
    keep = {key: [6, 1, 3, 0] for key in [*expert_layers(bare), "model.layers.6"]}
    recipe = {
        "recipe": [
            {"operation": "graft", "from": str(whole), "tensors": ["model.layers.6.*"]},
            {"operation": "prune", "keep": keep},
            {"operation": "trim", "layers": "0,3"},
        ]
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    result = support.run_surgery("run", bare, tmp_path / "out", tmp_path / "recipe.yaml")
    assert result.returncode == 0, result.stderr
    old, new = tensors_of(whole), tensors_of(tmp_path / "out")
    name = "model.layers.{}.mlp.experts.{}.up_proj.weight"
    assert new[name.format(2, 0)] == old[name.format(6, 6)]
    assert not [each for each in new if ".experts.4." in each]
    proof = support.run_surgery("verify", tmp_path / "out", "--against", bare, "--against", whole)
    assert proof.returncode == 0, proof.stdout


def test_what_cannot_be_grafted_is_refused_before_anything_is_written(tmp_path):
    bare, whole = both("deepseek_v3", tmp_path)

    def refused(source: Path, *arguments: str | Path) -> str:
        result = support.run_surgery("graft", source, tmp_path / "no", *arguments)
        assert result.returncode == 2, result.stderr
        assert not (tmp_path / "no").exists()
        return result.stderr

    assert "has no tensor 'mtp.*'" in refused(bare, "--from", whole, "--tensors", "mtp.*")
    assert "are there already" in refused(bare, "--from", whole, "--tensors", "model.layers.*")
    head = ("--from", whole, "--tensors", "model.layers.6.*")
    other = edit_config(build("deepseek_v3", tmp_path / "wide"), moe_intermediate_size=32)
    assert "moe_intermediate_size is 32 here and 16 there" in refused(other, *head)
    keep = write_keep(tmp_path / "keep.json", {key: [0, 1, 2, 3] for key in expert_layers(bare)})
    assert support.run_surgery("prune", bare, tmp_path / "pruned", "--keep", keep).returncode == 0
    assert "8 experts, and the config counts 4" in refused(tmp_path / "pruned", *head)
    tied = edit_config(model_zoo.build("llama", tmp_path / "tied", tie_word_embeddings=True))
    untied = model_zoo.build("llama", tmp_path / "untied", tie_word_embeddings=False)
    assert "tie_word_embeddings is true" in refused(tied, "--from", untied, "--tensors", "lm_head.weight")


@pytest.mark.parametrize(
    ("section", "field", "entry"),
    [
        ({"quant_method": "compressed-tensors", "config_groups": {}, "ignore": ["lm_head"]}, "ignore", "mtp.fc"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "modules_to_not_convert", "mtp.fc"),
        ({"quant_method": "fp8", "modules_to_not_convert": None}, "modules_to_not_convert", "mtp.fc"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": []}, "ignore", "mtp.fc"),
        ({"quant_method": "gptq", "bits": 4}, "dynamic", "-:^mtp\\.fc$"),
        ({"quant_method": "awq", "modules_to_not_convert": ["lm_head"]}, "modules_to_not_convert", "mtp.fc"),
    ],
)
def test_a_plain_head_on_a_quantised_model_is_named_in_its_list(section, field, entry, tmp_path):
    bare, whole = both("qwen3_next", tmp_path)
    edit_config(bare, quantization_config=section)
    result = support.run_surgery("graft", bare, tmp_path / "out", "--from", whole, "--tensors", "mtp.*")
    assert result.returncode == 0, result.stderr
    written = config_of(tmp_path / "out")["quantization_config"]
    assert entry in written[field]
    assert {key: value for key, value in written.items() if key != field} == {
        key: value for key, value in section.items() if key != field
    }
    kept = section.get(field) or []
    assert list(written[field])[: len(kept)] == kept
    assert "mtp.layers.0.mlp.experts.7.up_proj" in " ".join(written[field]).replace("\\", "")


def test_a_pattern_that_speaks_for_the_head_already_is_left_as_it_is(tmp_path):
    bare, whole = both("qwen3_next", tmp_path)
    section = {"quant_method": "compressed-tensors", "config_groups": {}, "ignore": ["lm_head", "re:^mtp.*"]}
    edit_config(bare, quantization_config=section)
    result = support.run_surgery("graft", bare, tmp_path / "out", "--from", whole, "--tensors", "mtp.*")
    assert result.returncode == 0, result.stderr
    assert config_of(tmp_path / "out")["quantization_config"] == section


def test_a_head_that_is_quantised_in_another_way_is_refused(tmp_path):
    bare, whole = both("qwen3_next", tmp_path)
    scales = {"mtp.layers.0.mlp.experts.0.up_proj.weight_scale_inv": torch.ones(1, 1)}
    path = whole / "model-mtp.safetensors"
    with safe_open(path, "pt") as file:
        held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    name = "mtp.layers.0.mlp.experts.0.up_proj.weight"
    held[name] = held[name].to(torch.float8_e4m3fn)
    save_file({**held, **scales}, path)
    index = json.loads((whole / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(scales, path.name)
    (whole / "model.safetensors.index.json").write_text(json.dumps(index))
    edit_config(whole, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    arguments = ["--from", whole, "--tensors", "mtp.*"]
    result = support.run_surgery("graft", bare, tmp_path / "no", *arguments)
    assert result.returncode == 2
    assert "is quantised (fp8), and this model is not" in result.stderr
    edit_config(bare, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    result = support.run_surgery("graft", bare, tmp_path / "out", *arguments)
    assert result.returncode == 0, result.stderr


def test_tensors_that_only_the_index_names_are_healed(tmp_path):
    whole = build("qwen3_moe", tmp_path / "whole")
    hurt = build("qwen3_moe", tmp_path / "hurt")
    gone = "model.layers.3.input_layernorm.weight"
    index = json.loads((hurt / "model.safetensors.index.json").read_text())
    path = hurt / index["weight_map"][gone]
    with safe_open(path, "pt") as file:
        held = {name: file.get_tensor(name) for name in file.keys() if name != gone}  # noqa: SIM118
    held["spare"] = torch.zeros(1)
    index["weight_map"]["spare"] = path.name
    save_file(held, path, {"format": "pt"})
    (hurt / "model.safetensors.index.json").write_text(json.dumps(index))
    assert support.run_surgery("repack", hurt, tmp_path / "no").returncode != 0
    result = support.run_surgery("graft", hurt, tmp_path / "out", "--from", whole, "--tensors", gone)
    assert result.returncode == 0, result.stderr
    assert tensors_of(tmp_path / "out")[gone] == tensors_of(whole)[gone]
