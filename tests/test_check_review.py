"""What `check` must see in quantised weights, MTP stages, lists and counts; and what is fine in public files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_check import copied, edit_config, edit_tensors, faults, with_stage

import support
from surgery.check import check
from surgery.legality import legality


def quantised(tiny_model, directory: Path, section: dict, make) -> Path:
    """The tiny llama with every projection packed by `make(weight)`."""
    copied(tiny_model("llama"), directory)

    def change(tensors):
        found = {}
        for name, tensor in tensors.items():
            if name.endswith("_proj.weight"):
                module = name.removesuffix("weight")
                found |= {f"{module}{leaf}": made.contiguous() for leaf, made in make(tensor).items()}
            else:
                found[name] = tensor
        return found

    edit_tensors(directory, change)
    edit_config(directory, quantization_config=section)
    return directory


def words(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int32)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True}
CT = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
CT["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": W4}}
SCHEMES = {
    "gptq": (
        GPTQ,
        lambda w: {
            "qweight": words(w.shape[1] // 8, w.shape[0]),
            "qzeros": words(w.shape[1] // 16, w.shape[0] // 8),
            "scales": torch.ones(w.shape[1] // 16, w.shape[0]).half(),
            "g_idx": (torch.arange(w.shape[1]) // 16).int(),
        },
    ),
    "awq": (
        AWQ,
        lambda w: {
            "qweight": words(w.shape[1], w.shape[0] // 8),
            "qzeros": words(w.shape[1] // 16, w.shape[0] // 8),
            "scales": torch.ones(w.shape[1] // 16, w.shape[0]).half(),
        },
    ),
    "fp8": (
        FP8,
        lambda w: {
            "weight": w.to(torch.float8_e4m3fn),
            "weight_scale_inv": torch.ones(-(-w.shape[0] // 16), -(-w.shape[1] // 16)),
        },
    ),
    "compressed-tensors": (
        CT,
        lambda w: {
            "weight_packed": words(w.shape[0], w.shape[1] // 8),
            "weight_scale": torch.ones(w.shape[0], w.shape[1] // 16).bfloat16(),
            "weight_shape": torch.tensor(w.shape),
        },
    ),
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_sound_quantised_checkpoint_is_no_fault(scheme, tiny_model, tmp_path):
    directory = quantised(tiny_model, tmp_path / "m", *SCHEMES[scheme])
    assert not faults(check(directory))


COMPANIONS = {
    "gptq": ("qzeros", "scales", "g_idx"),
    "awq": ("qzeros", "scales"),
    "fp8": ("weight_scale_inv",),
    "compressed-tensors": ("weight_scale", "weight_shape"),
}


@pytest.mark.parametrize(
    ("scheme", "leaf", "every"),
    [
        (scheme, leaf, every)
        for scheme, leaves in COMPANIONS.items()
        for leaf in leaves
        for every in (False, True)
        if (leaf, every) != ("g_idx", True)  # An index that no layer has is as good as one in plain order.
    ],
)
def test_a_missing_companion_is_a_fault_one_or_all(scheme, leaf, every, tiny_model, tmp_path):
    directory = quantised(tiny_model, tmp_path / "m", *SCHEMES[scheme])
    first = f"model.layers.2.mlp.up_proj.{leaf}"
    edit_tensors(
        directory, lambda held: {n: t for n, t in held.items() if not (n.endswith(f".{leaf}") if every else n == first)}
    )
    assert leaf in faults(check(directory))["missing-companion"]


@pytest.mark.parametrize(
    ("scheme", "leaf"),
    [
        ("gptq", "scales"),
        ("gptq", "qzeros"),
        ("gptq", "g_idx"),
        ("awq", "scales"),
        ("compressed-tensors", "weight_scale"),
        ("fp8", "weight_scale_inv"),
    ],
)
def test_a_companion_of_another_shape_is_a_fault(scheme, leaf, tiny_model, tmp_path):
    directory = quantised(tiny_model, tmp_path / "m", *SCHEMES[scheme])
    name = f"model.layers.2.mlp.up_proj.{leaf}"
    edit_tensors(directory, lambda held: {**held, name: held[name].repeat(*([3] + [1] * (held[name].dim() - 1)))})
    assert leaf in faults(check(directory))["scale-shape"]


def test_quantised_weights_and_the_config_must_agree(tiny_model, tmp_path):
    directory = quantised(tiny_model, tmp_path / "m", *SCHEMES["fp8"])
    edit_config(directory, quantization_config=None)
    assert "no quantization_config" in faults(check(directory))["undeclared-quantization"]
    plain = copied(tiny_model("llama"), tmp_path / "plain")
    edit_config(plain, quantization_config=FP8)
    assert "no weight is quantised" in faults(check(plain))["quantization-without-weights"]
    on_load = copied(tiny_model("llama"), tmp_path / "load")
    edit_config(on_load, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    assert "quantization-without-weights" not in faults(check(on_load))


def test_one_plain_weight_among_quantised_likes_needs_a_list_that_says_so(tiny_model, tmp_path):
    directory = quantised(tiny_model, tmp_path / "m", *SCHEMES["fp8"])
    name = "model.layers.2.mlp.up_proj.weight"
    edit_tensors(
        directory,
        lambda held: {n: t.to(torch.bfloat16) if n == name else t for n, t in held.items() if n != f"{name}_scale_inv"},
    )
    assert name.removesuffix(".weight") in faults(check(directory))["not-quantized"]


def test_zeros_that_autogptq_wrote_as_biases_are_no_fault(tiny_model, tmp_path):
    directory = quantised(tiny_model, tmp_path / "m", *SCHEMES["gptq"])
    edit_tensors(
        directory,
        lambda held: {
            **held,
            **{n.replace("qweight", "bias"): torch.zeros(t.shape[1]) for n, t in held.items() if n.endswith("qweight")},
        },
    )
    assert not faults(check(directory))


def test_a_packing_that_nobody_described_is_unverified(tiny_model, tmp_path):
    directory = copied(tiny_model("llama"), tmp_path / "m")
    edit_config(directory, quantization_config={**CT, "format": "sparse-24-bitmask"})
    report = check(directory)
    assert report.verdict == "unverified"


def test_entries_of_layers_that_are_there_are_a_note_whatever_they_mean(tiny_model, tmp_path):
    section, make = SCHEMES["fp8"]
    lists = {
        **section,
        "modules_to_not_convert": ["lm_head", "model.layers.1.mlp.gate", "model.visual.blocks.3.attn.qkv"],
    }
    directory = quantised(tiny_model, tmp_path / "m", lists, make)
    assert not faults(check(directory))
    assert any(finding.kind == "dead-entry" for finding in check(directory).findings)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda held: {n: t for n, t in held.items() if n != "model.layers.6.eh_proj.weight"}, "no eh_proj"),
        (lambda held: {n: t for n, t in held.items() if n != "model.layers.6.self_attn.o_proj.weight"}, "o_proj"),
        (lambda held: {n: t for n, t in held.items() if not n.startswith("model.layers.6.mlp.")}, "no mlp"),
        (lambda held: {**held, "model.layers.6.enorm.weight": held["model.layers.6.enorm.weight"][:7]}, ""),
    ],
)
def test_a_stage_that_lacks_what_layers_like_it_have_is_a_fault(change, says, tiny_model, tmp_path):
    directory = copied(tiny_model("deepseek_v3"), tmp_path / "m")
    edit_tensors(directory, with_stage)
    edit_config(directory, num_nextn_predict_layers=1)
    assert not faults(check(directory))
    edit_tensors(directory, change)
    if says:
        assert says in " ".join(f.what for f in check(directory).findings if f.severity == "fault")


def test_a_count_that_is_not_the_stages_is_a_fault(tiny_model, tmp_path):
    directory = copied(tiny_model("deepseek_v3"), tmp_path / "m")
    edit_tensors(directory, with_stage)
    edit_config(directory, num_nextn_predict_layers=3)
    assert "is 3, and 1 MTP stages" in faults(check(directory))["mtp-count"]


def test_lists_of_layers_that_are_not_there_and_choices_that_cannot_be_are_faults(tiny_model, tmp_path):
    stale = copied(tiny_model("qwen3_moe"), tmp_path / "stale")
    edit_config(stale, mlp_only_layers=[40])
    assert "mlp_only_layers names layer 40" in faults(check(stale))["stale-list"]
    routing = copied(tiny_model("qwen3_moe"), tmp_path / "routing")
    edit_config(routing, num_experts_per_tok=9)
    assert "9 experts are chosen" in faults(check(routing))["routing"]
    groups = copied(tiny_model("deepseek_v3"), tmp_path / "groups")
    edit_config(groups, n_group=3, topk_group=1)
    assert "routing" in faults(check(groups))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attn_kinds", ["a", "b", "a", "b", "a", "b"]),
        ("hybrid_override", "M*M*M*"),
        ("linear_attn_config", {"kda_layers": [1, 2], "full_attn_layers": [3, 4]}),
        ("nope_layer_step", 4),
        ("interleave_moe_layer_step", 2),
        ("layer_group_size", 3),
        ("global_attn_every", 3),
        ("cla_share_factor", 2),
        ("moe", {"every": 2}),
        ("scale_attn_by_inverse_layer_idx", True),
    ],
)
def test_an_unknown_model_type_whose_config_says_something_of_layers_needs_a_witness(
    field, value, tiny_model, tmp_path
):
    directory = copied(tiny_model("llama"), tmp_path / "m")
    edit_config(directory, model_type="mystery")
    assert support.run_surgery("trim", directory, tmp_path / "fine", "--layers", "0,1").returncode == 0
    edit_config(directory, **{field: value})
    result = support.run_surgery("trim", directory, tmp_path / "no", "--layers", "0,1")
    assert result.returncode == 2, result.stdout
    assert field in result.stderr


def test_weights_of_other_formats_are_left_behind_and_reported(tiny_model, tmp_path):
    directory = copied(tiny_model("llama"), tmp_path / "m")
    (directory / "pytorch_model.bin").write_bytes(b"x" * 64)
    (directory / "model.gguf").write_bytes(b"x" * 64)
    result = support.run_surgery("trim", directory, tmp_path / "out", "--layers", "0,1")
    assert result.returncode == 0, result.stderr
    assert "left behind: pytorch_model.bin" in result.stderr
    told = json.loads((tmp_path / "out" / "surgery.json").read_text())["decisions"]
    assert any(each["what"].startswith("model.gguf") for each in told)


@pytest.mark.parametrize(
    ("fields", "ranks", "says"),
    [
        ({"quantization_config": GPTQ}, 4, "groups of 16"),
        ({"quantization_config": CT}, 4, "groups of 16"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, 4, "groups of 16"),
        ({"linear_num_key_heads": 2, "linear_num_value_heads": 4}, 4, "linear_num_key_heads is 2"),
        ({"mamba_n_heads": 8, "mamba_n_groups": 3}, 2, "mamba_n_groups is 3"),
    ],
)
def test_ranks_that_groups_or_linear_heads_forbid_are_refused_with_the_reason(fields, ranks, says):
    shape = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "hidden_size": 32}
    config = {**shape, "intermediate_size": 64, "vocab_size": 64}
    assert not legality(config, [], ranks).reasons
    assert says in " ".join(legality({**config, **fields}, [], ranks).reasons)
