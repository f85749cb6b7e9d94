"""What quantisation sections say of modules, through a layer map: every scheme by its own matcher."""

from __future__ import annotations

import json
import re
import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import support
from surgery.errors import CannotApply
from surgery.quantization import carry_named, named_in, named_in_section
from surgery.quantization_schemes import modules_of

DEPTH = 12
PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate", "mlp.experts.0.up_proj")
NAMES = [f"model.layers.{layer}.{part}.weight" for layer in range(DEPTH) for part in PARTS] + ["lm_head.weight"]
MODULES = modules_of(NAMES)


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
    (named,) = named_in_section({field: entries}, method=method)
    return carry_named(named, MODULES, mover(kept))


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


def test_a_class_is_no_dead_entry():
    assert carried(["Linear", "model.layers.3.mlp.gone"], [3], "targets").dead == ["model.layers.3.mlp.gone"]


def test_modelopt_lists_are_substrings_and_wildcards():
    entries = ["lm_head", "model.layers.5.self_attn*", "model.layers.1.mlp.gate", "*.mlp.gate", "model.layers.7*"]
    result = carried(entries, [0, 10, 5], "exclude_modules", "modelopt")
    assert result.new == ["lm_head", "model.layers.2.self_attn*", "*.mlp.gate"]
    assert result.dead == []
    # `model.layers.1` means layer 10 too: both by their new numbers, without the one that is new at 1.
    result = carried(["model.layers.1"], [10, 3, 1], "ignore", "modelopt")
    assert {entry.split(".")[2] for entry in result.new} == {"0", "2"}
    assert "model.layers.0.mlp.experts" in result.new


def test_modelopt_says_of_each_layer_what_it_is_and_fused_experts_follow():
    value = {f"model.layers.{layer}.self_attn.qkv_proj": {"quant_algo": "FP8"} for layer in (1, 5, 10)}
    value |= {f"model.layers.{layer}.mlp.experts.0.up_proj": {"quant_algo": f"A{layer}"} for layer in (0, 5)}
    result = carried(value, [5, 10], "quantized_layers", "modelopt")
    assert result.new == {
        "model.layers.0.self_attn.qkv_proj": {"quant_algo": "FP8"},
        "model.layers.1.self_attn.qkv_proj": {"quant_algo": "FP8"},
        "model.layers.0.mlp.experts.0.up_proj": {"quant_algo": "A5"},
    }
    with pytest.raises(CannotApply, match="an empty one means something else"):
        carried(value, [11], "quantized_layers", "modelopt")


def test_another_spelling_of_the_stack_moves_too():
    names = ["model.language_model.layers.3.mlp.gate.weight", "model.language_model.layers.0.mlp.gate.weight"]
    (named,) = named_in_section({"quantized_layers": {"language_model.model.layers.3.mlp.gate": {"quant_algo": "FP8"}}})

    def move(path):
        start = "model.language_model.layers.3"
        return [path.replace(start, "model.language_model.layers.0")] if path.startswith(start) else None

    new = carry_named(named, modules_of(names[:1]), move).new
    assert new == {"language_model.model.layers.0.mlp.gate": {"quant_algo": "FP8"}}


def test_gptq_rules_keep_their_order_and_become_anchored():
    value = {
        r"-:.*mlp\.gate$": {},
        r"-:model\.layers\.10\..*q_proj": {},
        r"+:.*\.1[0-1]\.self_attn.*": {"bits": 8},
        r"+:model\.layers\.1\.": {"bits": 3},
        r"+:model\.layers\.7\..*": {"bits": 2},
        r"+:model\.layers\.(?:0|3)\.mlp.*": {"bits": 5},
    }
    result = carried(value, [10, 1, 3], "dynamic", "gptq")
    assert list(result.new.items()) == [
        (r"-:.*mlp\.gate$", {}),
        (r"-:model\.layers\.0\..*q_proj", {}),
        # q_proj of it is the rule's above; vLLM asks for the fused name, which no tensor has.
        (r"+:^model\.layers\.0\.self_attn\.k_proj$", {"bits": 8}),
        (r"+:^model\.layers\.0\.self_attn\.qkv_proj$", {"bits": 8}),
        (r"+:^model\.layers\.0\.self_attn\.v_proj$", {"bits": 8}),
        (r"+:model\.layers\.1\.", {"bits": 3}),
        (r"+:^model\.layers\.2\.mlp\.experts$", {"bits": 5}),
        (r"+:^model\.layers\.2\.mlp\.experts\.0\.up_proj$", {"bits": 5}),
    ]


def test_gptq_lists_of_a_block_are_relative_and_full_names_move():
    block = [["self_attn.k_proj", "self_attn.q_proj"], ["mlp.gate"]]
    places = list(named_in({"quantization_config": {"quant_method": "gptq", "modules_in_block_to_quantize": block}}))
    assert [place.path[1:] for place in places] == [
        ("modules_in_block_to_quantize", 0),
        ("modules_in_block_to_quantize", 1),
    ]
    assert all(carry_named(place, MODULES, mover([5])).new == place.value for place in places)
    field = "modules_in_block_to_quantize"
    entries = ["model.layers.5.self_attn.q_proj", "model.layers.6.self_attn.q_proj"]
    assert carried(entries, [2, 5], field, "gptq").new == ["model.layers.1.self_attn.q_proj"]
    with pytest.raises(CannotApply, match="an empty one means something else"):
        carried(entries, [2], field, "gptq")


def test_mxfp4_and_bitsandbytes_are_read_as_transformers_reads_them():
    entries = ["model.layers.*.self_attn", "model.layers.5.mlp", "lm_head", "layers.7.mlp.gate"]
    new = carried(entries, [7, 5], "modules_to_not_convert", "mxfp4").new
    assert new == ["model.layers.*.self_attn", "model.layers.1.mlp", "lm_head", "model.layers.0.mlp.gate"]
    new = carried(["lm_head", "model.layers.1"], [10, 1], "llm_int8_skip_modules", "bitsandbytes").new
    assert new == ["lm_head", "model.layers.1"]  # A boundary stands behind it: 10 is not meant.


def test_auto_round_takes_the_exact_name_before_a_pattern():
    value = {
        r".*layers\.(?:1|5)\.self_attn.*": {"bits": 8},
        "model.layers.5.self_attn.q_proj": {"bits": 16},
        r"mlp\.gate$": {"bits": 16},
        "model.layers.9.mlp.experts.0.up_proj": {"bits": 2},
    }
    assert carried(value, [5, 2], "extra_config", "auto-round").new == {
        r"^model\.layers\.0\.self_attn\.k_proj$": {"bits": 8},
        r"^model\.layers\.0\.self_attn\.v_proj$": {"bits": 8},
        "model.layers.0.self_attn.q_proj": {"bits": 16},
        r"mlp\.gate$": {"bits": 16},
    }


def test_quark_reads_wildcards_and_the_first_that_fits_counts():
    value = {"*.5.self_attn.q_proj": 1, "model.layers.1.mlp.gate": 2, "*self_attn*": 3, "model.layers.8.*": 4}
    new = carried(value, [1, 5, 8], "layer_quant_config", "quark").new
    assert list(new.items()) == [
        ("model.layers.1.self_attn.q_proj", 1),
        ("model.layers.0.mlp.gate", 2),
        ("*self_attn*", 3),
        ("model.layers.2.*", 4),
    ]
    entries = ["lm_head", "*.mlp.gate", r"re:model\.layers\.5\..*k_proj", "model.layers.1.self_attn.v_proj"]
    assert carried(entries, [5, 6], "exclude", "quark").new == [
        "lm_head",
        "*.mlp.gate",
        r"re:model\.layers\.0\..*k_proj",
    ]


def test_what_no_entries_can_say_is_refused():
    """Quark asks whether the module's name is in the entry, so the gate of a layer cannot be told from gate_proj."""
    names = [f"model.layers.{layer}.mlp.{part}.weight" for layer in (0, 1) for part in ("gate", "gate_proj")]
    (named,) = named_in_section({"layer_quant_config": {"*.1.mlp.gate_proj": {"a": 1}}})
    with pytest.raises(CannotApply, match=r"something else of 1 modules, first model\.layers\.0\.mlp\.gate"):
        carry_named(named, modules_of(names), mover([1]))


def first(value, fits):
    """The value of the first entry that fits, in a tuple."""
    return next(((found,) for entry, found in value.items() if fits(entry)), ())


def gptq(value, module):
    rule = first(
        {entry: (entry, found) for entry, found in value.items()},
        lambda entry: re.match(re.sub(r"^[+-]:", "", entry), module),
    )
    return rule and ("skipped" if rule[0][0].startswith("-:") else rule[0][1])


def modelopt(value, module):
    if module in value:
        return value[module]
    return first(value, lambda entry: entry.startswith(f"{module}."))


def auto_round(value, module):
    if module in value:
        return (value[module],)
    above = first(value, lambda entry: entry.startswith(f"{module}."))
    return above or first(value, lambda entry: set(entry) & set("*+?^$()[]{}|\\") and re.search(entry, module))


def in_list(fits):
    return lambda value, module: any(fits(entry, module) for entry in value)


def compressed(entry, module):
    return bool(re.match(entry[3:], module)) if entry.startswith("re:") else entry == module


# What the programs do, written down once more: field, method, outcome of a module, and patterns of the scheme.
READERS = [
    ("ignore", "compressed-tensors", in_list(compressed), r"re:.*layers\.{}\..*"),
    (
        "modules_to_not_convert",
        "fp8",
        in_list(lambda e, m: re.match(rf"(?:{e})(?:(?<=\.)|(?=\.|$))", m) or m.endswith(e)),
        r"model\.layers\.{}\..*gate",
    ),
    ("modules_to_not_convert", "awq", in_list(lambda e, m: e in m), "layers.{}"),
    ("exclude_modules", "modelopt", in_list(lambda e, m: e in m or fnmatch(m, e)), "model.layers.{}*"),
    ("exclude", "quark", in_list(lambda e, m: compressed(e, m) or fnmatch(m, e)), "*.{}.self_attn*"),
    ("quantized_layers", "modelopt", modelopt, "model.layers.{}.mlp.experts.0.up_proj"),
    ("dynamic", "gptq", gptq, r"+:.*\.{}\..*"),
    ("dynamic", "gptq", gptq, r"-:model\.layers\.{}"),
    ("extra_config", "auto-round", auto_round, r"layers\.{}\..*proj"),
    (
        "layer_quant_config",
        "quark",
        lambda v, m: first(v, lambda e: fnmatch(m, e) if "*" in e else m in e),
        "*layers.{}.*",
    ),
]


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.integers(0, DEPTH - 1), min_size=1, max_size=6),
    st.sampled_from(READERS),
    st.lists(
        st.one_of(
            st.sampled_from(["lm_head", "mlp.gate", "re:.*gate", "self_attn", "*gate", r".*\.self_attn\..*"]),
            st.builds("model.layers.{}.{}".format, st.integers(0, DEPTH), st.sampled_from([*PARTS, "mlp"])),
            st.integers(0, DEPTH),
        ),
        max_size=6,
    ),
)
def test_the_unquantised_modules_are_the_same_ones_or_it_is_refused(kept, reader, entries):
    """And what a mapping says of a module is the same."""
    field, method, outcome, pattern = reader
    entries = [pattern.format(entry) if isinstance(entry, int) else entry for entry in entries]
    entries = [entry for entry in entries if entry[0] != "*" or "quark" in method or "opt" in method]
    value = entries if field in ("ignore", "exclude", "exclude_modules", "modules_to_not_convert") else {}
    if value is not entries:
        value = {entry: {"bits": number} for number, entry in enumerate(entries)}
    try:
        result = carried(value, kept, field, method)
    except CannotApply:
        return
    move = mover(kept)
    for module in MODULES.asked:
        names = move(module)
        for new in [module] if names is None else names:
            assert outcome(value, module) == outcome(result.new, new), (module, new)


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


def quantised(tiny_model, tmp_path, name, content):
    source = Path(shutil.copytree(tiny_model("llama"), tmp_path / "source"))
    (source / name).write_text(json.dumps(content))
    return source


MIXED = {
    "producer": {"name": "modelopt", "version": "0.43"},
    "quantization": {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {f"model.layers.{layer}.mlp.down_proj": {"quant_algo": f"A{layer}"} for layer in range(6)},
        "exclude_modules": ["lm_head", "model.layers.3.self_attn*", "model.layers.5.mlp.gate_proj"],
    },
}


def test_a_file_beside_the_config_is_carried_and_proven(tiny_model, tmp_path):
    source = quantised(tiny_model, tmp_path, "hf_quant_config.json", MIXED)
    out, dummy = tmp_path / "out", tmp_path / "dummy"
    result = support.run_surgery("trim", source, out, "--layers", "1,3")
    assert result.returncode == 0, result.stderr
    after = json.loads((out / "hf_quant_config.json").read_text())
    assert list(after) == ["producer", "quantization"]
    assert after["producer"] == MIXED["producer"]
    assert after["quantization"] == {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "model.layers.0.mlp.down_proj": {"quant_algo": "A1"},
            "model.layers.1.mlp.down_proj": {"quant_algo": "A3"},
        },
        "exclude_modules": ["lm_head", "model.layers.1.self_attn*"],
    }
    changes = json.loads((out / "surgery.json").read_text())["config_changes"]
    told = [change["path"] for change in changes if ":" in change["path"]]
    assert told == [
        "hf_quant_config.json:quantization.quantized_layers",
        "hf_quant_config.json:quantization.exclude_modules",
    ]
    assert support.run_surgery("trim", source, dummy, "--layers", "1,3", "--dummy").returncode == 0
    assert (dummy / "hf_quant_config.json").read_bytes() == (out / "hf_quant_config.json").read_bytes()
    proof = support.run_surgery("verify", out, "--against", source, "--json")
    assert proof.returncode == 0, proof.stdout + proof.stderr
    assert "whether they fit the layers is not proven" in proof.stdout

    # Another value in the source is another source.
    other = json.loads(json.dumps(MIXED))
    other["producer"]["version"] = "0.44"
    (source / "hf_quant_config.json").write_text(json.dumps(other))
    proof = support.run_surgery("verify", out, "--against", source)
    assert proof.returncode != 0
    assert "is not the source's with the changes that are recorded" in proof.stdout + proof.stderr


def test_a_file_is_carried_by_each_operation_of_a_recipe(tiny_model, tmp_path):
    dynamic = {r"-:model\.layers\.4\.mlp": {}, r"+:.*\.(?:2|5)\..*down_proj": {"bits": 8}}
    source = quantised(tiny_model, tmp_path, "quantize_config.json", {"bits": 4, "dynamic": dynamic})
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "recipe:\n- operation: trim\n  layers: 2,4\n- operation: trim\n  layers: 1,0\n"
        "- operation: rename\n  map: {model: language.model}\n"
    )
    result = support.run_surgery("run", source, tmp_path / "out", recipe)
    assert result.returncode == 0, result.stderr
    after = json.loads((tmp_path / "out" / "quantize_config.json").read_text())
    assert list(after["dynamic"]) == [
        r"-:language\.model\.layers\.0\.mlp",
        r"+:^language\.model\.layers\.1\.mlp\.down_proj$",
    ]
    proof = support.run_surgery("verify", tmp_path / "out", "--against", source)
    assert proof.returncode == 0, proof.stdout + proof.stderr


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quantize_config.json"])
@pytest.mark.parametrize("text", ['{"kv": {"model.layers.3.self_attn": 1}}', '["model.layers.3"]', "layers.3 {"])
def test_a_file_beside_the_config_that_is_not_understood_is_refused(tiny_model, tmp_path, name, text):
    source = quantised(tiny_model, tmp_path, name, {})
    (source / name).write_text(text)
    result = support.run_surgery("trim", source, tmp_path / "out", "--layers", "0,1")
    assert result.returncode == 2
    assert name in result.stderr
    (source / name).write_text(text.replace("layers.3", "lm_head"))
    assert support.run_surgery("trim", source, tmp_path / "out", "--layers", "0,1").returncode == 0
    assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


def test_a_config_of_gptq_is_carried_end_to_end(tiny_model, tmp_path):
    source = Path(shutil.copytree(tiny_model("llama"), tmp_path / "source"))
    config = json.loads((source / "config.json").read_text())
    dynamic = {r"+:model\.layers\.3\.mlp\.(up|gate)_proj": {"bits": 8}, r"-:model\.layers\.0\..*": {}}
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "dynamic": dynamic}
    (source / "config.json").write_text(json.dumps(config))
    result = support.run_surgery("trim", source, tmp_path / "out", "--layers", "1,3")
    assert result.returncode == 0, result.stderr
    after = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert after["dynamic"] == {r"+:model\.layers\.1\.mlp\.(up|gate)_proj": {"bits": 8}}
    config["quantization_config"]["by_layer"] = {"model.layers.3.mlp": 8}
    (source / "config.json").write_text(json.dumps(config))
    result = support.run_surgery("trim", source, tmp_path / "other", "--layers", "1,3")
    assert result.returncode == 2
    assert "in a form that is not understood" in result.stderr
