"""Module lists through a layer map: expanded by the scheme's matcher, written back, both sets compared."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import support
from surgery.errors import CannotApply
from surgery.quantization import carry_list, matcher_of, modules_of

DEPTH = 12
PARTS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate", "mlp.experts.0.up_proj")
SCHEMES = [("ignore", "compressed-tensors"), ("modules_to_not_convert", "fp8"), ("modules_to_not_convert", "awq")]
NAMES = [f"model.layers.{layer}.{part}.weight" for layer in range(DEPTH) for part in PARTS] + ["lm_head.weight"]


def mover(kept):
    def move(path):
        prefix = "model.layers."
        number, _, rest = path.removeprefix(prefix).partition(".")
        if not path.startswith(prefix) or not number.isdecimal():
            return None
        rest = f".{rest}" if rest else ""
        return [f"{prefix}{place}{rest}" for place, source in enumerate(kept) if source == int(number)]

    return move


def carried(entries, kept, field="ignore", method="compressed-tensors"):
    return carry_list(("quantization_config", field), method, entries, modules_of(NAMES), mover(kept))


def test_plain_names_follow_their_layers_and_go_with_them():
    entries = ["lm_head", "model.layers.5.mlp.gate", "model.layers.7.mlp.gate", "model.layers.5.self_attn.qkv_proj"]
    result = carried(entries, [0, 5])
    assert result.new == ["lm_head", "model.layers.1.mlp.gate", "model.layers.1.self_attn.qkv_proj"]
    assert result.dead == ["model.layers.5.self_attn.qkv_proj"]


def test_a_pattern_without_a_number_stays_and_one_with_is_written_out():
    result = carried(["re:.*mlp.gate$", "re:.*layers\\.1\\..*q_proj"], [0, 1, 11])
    assert result.new[0] == "re:.*mlp.gate$"
    assert result.new[1:] == ["re:.*layers\\.1\\..*q_proj"]
    result = carried(["re:.*layers\\.1\\..*q_proj"], [3, 1])
    assert result.new == ["re:.*layers\\.1\\..*q_proj"]
    result = carried(["re:.*layers\\.1\\..*q_proj"], [1, 3])
    assert result.new == ["model.layers.0.self_attn.q_proj"]


def test_a_prefix_of_a_longer_number_is_no_match_that_moves():
    """`model.layers.1` is a substring of `model.layers.10` (AWQ), and no prefix for compressed-tensors."""
    result = carried(["model.layers.1.mlp"], [10, 1], "modules_to_not_convert", "awq")
    assert result.new == ["model.layers.1.mlp"]
    assert carried(["model.layers.5"], [5]).new == ["model.layers.0"]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, DEPTH - 1), min_size=1, max_size=6),
    st.sampled_from(
        [("ignore", "compressed-tensors"), ("modules_to_not_convert", "fp8"), ("modules_to_not_convert", "awq")]
    ),
    st.lists(
        st.one_of(
            st.sampled_from(["lm_head", "mlp.gate", "re:.*gate", "self_attn"]),
            st.builds("model.layers.{}.{}".format, st.integers(0, DEPTH), st.sampled_from([*PARTS, "mlp"])),
            st.builds(r"re:.*layers\.{}\..*".format, st.integers(0, DEPTH)),
        ),
        max_size=6,
    ),
)
def test_the_unquantised_modules_are_the_same_ones_or_it_is_refused(kept, scheme, entries):
    field, method = scheme
    try:
        result = carried(entries, kept, field, method)
    except CannotApply:
        return
    matches = matcher_of(method, field)
    move = mover(kept)
    for module in modules_of(NAMES):
        names = move(module)
        for new in [module] if names is None else names:
            was = any(matches(entry, module) for entry in entries)
            assert was == any(matches(entry, new) for entry in result.new), (module, new)


def test_glm_5_2s_ignore_list_is_carried_entry_by_entry(tiny_model, tmp_path):
    """facts/trimming.md 1.2: under compression_config, layers 0, 4, 5 and the MTP stage behind them."""
    import torch
    from safetensors.torch import save_file

    source = Path(shutil.copytree(tiny_model("glm_moe_dsa"), tmp_path / "source"))
    stage = {"model.layers.6.eh_proj.weight": torch.ones(2), "model.layers.6.mlp.gate.weight": torch.ones(2)}
    save_file(stage, source / "mtp.safetensors", {"format": "pt"})
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(stage, "mtp.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((source / "config.json").read_text())
    ignore = ["lm_head"]
    ignore += [f"model.layers.{layer}.self_attn.indexer.weights_proj" for layer in (0, 1, 4, 6)]
    ignore += [f"model.layers.{layer}.mlp.gate" for layer in range(2, 7)]
    ignore += ["model.layers.6.eh_proj"]
    config["compression_config"] = {"quant_method": "compressed-tensors", "ignore": ignore, "config_groups": {}}
    config["num_nextn_predict_layers"] = 1
    (source / "config.json").write_text(json.dumps(config))
    result = support.run_surgery("trim", source, tmp_path / "out", "--layers", "0,4,5")
    assert result.returncode == 0, result.stderr
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    assert after["compression_config"]["ignore"] == [
        "lm_head",
        "model.layers.0.self_attn.indexer.weights_proj",
        "model.layers.1.self_attn.indexer.weights_proj",
        "model.layers.3.self_attn.indexer.weights_proj",
        "model.layers.1.mlp.gate",
        "model.layers.2.mlp.gate",
        "model.layers.3.mlp.gate",
        "model.layers.3.eh_proj",
    ]
    assert list(after) == list(config)


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quantize_config.json"])
def test_a_file_beside_the_config_that_names_layers_is_refused(tiny_model, tmp_path, name):
    source = Path(shutil.copytree(tiny_model("llama"), tmp_path / "source"))
    (source / name).write_text(json.dumps({"quantization": {"exclude_modules": ["model.layers.3.mlp"]}}))
    result = support.run_surgery("trim", source, tmp_path / "out", "--layers", "0,1")
    assert result.returncode == 2
    assert name in result.stderr
    (source / name).write_text(json.dumps({"quantization": {"exclude_modules": ["lm_head"]}}))
    assert support.run_surgery("trim", source, tmp_path / "out", "--layers", "0,1").returncode == 0
