"""Config and assets without weights: the same config bytes as the real output, and nothing pretended."""

from __future__ import annotations

import json

import pytest

import support


@pytest.mark.parametrize("family", ["deepseek_v3", "glm_moe_dsa", "gemma3_text", "qwen3_next", "nemotron_h", "llama"])
def test_the_config_is_the_real_outputs_byte_for_byte(tiny_model, tmp_path, family):
    source = tiny_model(family)
    for out, extra in (("real", []), ("dummy", ["--dummy"])):
        result = support.run_surgery("trim", source, tmp_path / out, "--cover", *extra)
        assert result.returncode == 0, result.stderr
    real, dummy = tmp_path / "real", tmp_path / "dummy"
    assert not list(dummy.glob("*.safetensors*"))
    weights = {path.name for path in real.glob("*.safetensors*")}
    assert {path.name for path in real.iterdir()} - weights == {path.name for path in dummy.iterdir()}
    for name in {path.name for path in dummy.iterdir()} - {"README.md", "surgery.json"}:
        assert (dummy / name).read_bytes() == (real / name).read_bytes(), name
    totals = json.loads((dummy / "surgery.json").read_text())["totals"]
    assert totals["tensors_in"] == totals["tensors_dropped"]


def test_verify_judges_config_and_assets_and_says_that_there_are_no_weights(tiny_model, tmp_path):
    out = tmp_path / "out"
    assert support.run_surgery("trim", tiny_model("llama"), out, "--layers", "0,2", "--dummy").returncode == 0
    result = support.run_surgery("verify", out)
    assert result.returncode == 0, result.stdout
    assert "integrity: passed" in result.stdout
    assert "loading: unverified" in result.stdout
    assert "no weights" in result.stdout
    (out / "config.json").write_text((out / "config.json").read_text() + " ")
    assert support.run_surgery("verify", out).returncode == 1


def test_other_fields_may_change_in_a_dummy_and_are_recorded_as_lost_fidelity(tiny_model, tmp_path):
    source = tiny_model("llama")
    arguments = ["trim", source, tmp_path / "out", "--layers", "0", "--set", "hidden_size=64", "--set", "x.y=1"]
    assert support.run_surgery(*arguments).returncode == 2
    assert support.run_surgery(*arguments, "--dummy").returncode == 2
    arguments = [*arguments[:-1], "hidden_act=gelu", "--set", "attention_bias=true", "--dummy"]
    result = support.run_surgery(*arguments)
    assert result.returncode == 0, result.stderr
    assert "attention_bias false -> true" in result.stdout
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["hidden_size"], config["hidden_act"], config["attention_bias"]) == (64, "gelu", True)
    changes = json.loads((tmp_path / "out" / "surgery.json").read_text())["config_changes"]
    assert [change["path"] for change in changes if "lost fidelity" in change["rule"]] == [
        "hidden_size",
        "hidden_act",
        "attention_bias",
    ]


@pytest.mark.parametrize(
    ("pair", "says"),
    [
        ("attention_bias=True", "attention_bias is false, and True is text"),
        ("hidden_size=wide", "hidden_size is 32, and wide is text"),
        ("hiden_size=64", "the config has no hiden_size"),
        ("num_hidden_layers=5", "says what the layers are"),
        ("rope_scaling.factor=2", "rope_scaling is"),
        ("hidden_size", "is not KEY=VALUE"),
    ],
)
def test_a_field_that_is_not_there_or_gets_a_value_of_another_kind_is_refused(tiny_model, tmp_path, pair, says):
    arguments = ["trim", tiny_model("llama"), tmp_path / "out", "--layers", "0", "--dummy", "--set", pair]
    result = support.run_surgery(*arguments)
    assert result.returncode == 2, result.stderr
    assert says in result.stderr
    assert not (tmp_path / "out").exists()


def test_every_operation_has_a_dummy(tiny_model, tmp_path):
    source = tiny_model("llama")
    for name, arguments in {"repack": [], "rename": ["--map", "model.layers=h"]}.items():
        result = support.run_surgery(name, source, tmp_path / name, *arguments, "--dummy")
        assert result.returncode == 0, result.stderr
        assert not list((tmp_path / name).glob("*.safetensors"))
