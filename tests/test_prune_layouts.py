"""Experts in every layout and packing, nested models, MTP heads in every placement: bytes, counts, lists and checks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import model_zoo
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_graft import config_of, edit_config
from test_prune import KINDS, build, expert_layers, keep_lists, masked_logits, prune, tensors_of, with_head

import support

LAYER = "model.layers.1"
KEPT = [3, 0]


def single_file(directory: Path, tensors: dict[str, torch.Tensor], **config) -> Path:
    """A checkpoint of hand-made tensors: four experts, one dense layer before the mixed one."""
    directory.mkdir()
    rest = {
        "model.embed_tokens.weight": torch.rand(8, 64),
        "model.norm.weight": torch.rand(64),
        "lm_head.weight": torch.rand(8, 64),
        "model.layers.0.mlp.up_proj.weight": torch.rand(8, 64),
    }
    save_file({**rest, **tensors}, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    return directory


def random_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) * 7)
    if dtype.is_floating_point and dtype.itemsize > 1:
        return torch.rand(shape, generator=generator).to(dtype)
    raw = torch.randint(0, 120, shape, generator=generator, dtype=torch.int64)
    return raw.to(torch.uint8).view(dtype) if dtype.itemsize == 1 else raw.to(dtype)


def per_expert(
    parts: dict[str, tuple[torch.dtype, tuple[int, ...]]], names: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    made = {}
    for expert in range(4):
        for name in names:
            for number, (part, (dtype, shape)) in enumerate(parts.items()):
                tensor = random_of(dtype, *shape) if shape else torch.tensor(float(expert)).to(dtype)
                made[f"{LAYER}.mlp.experts.{expert}.{name}.{part}"] = (
                    tensor.roll(expert + number) if shape and dtype.itemsize > 1 else tensor
                ).clone()
    return made


PACKED = {
    "FP8 blocks": {"weight": (torch.float8_e4m3fn, (16, 64)), "weight_scale_inv": (torch.float32, (1, 1))},
    "FP8 per tensor": {
        "weight": (torch.float8_e4m3fn, (16, 64)),
        "weight_scale": (torch.float32, ()),
        "input_scale": (torch.float32, ()),
    },
    "NVFP4": {
        "weight": (torch.uint8, (16, 32)),
        "weight_scale": (torch.float8_e4m3fn, (16, 4)),
        "weight_scale_2": (torch.float32, ()),
        "input_scale": (torch.float32, ()),
    },
    "AWQ": {
        "qweight": (torch.int32, (64, 2)),
        "qzeros": (torch.int32, (1, 2)),
        "scales": (torch.float16, (1, 16)),
    },
    "GPTQ": {
        "qweight": (torch.int32, (8, 16)),
        "qzeros": (torch.int32, (1, 2)),
        "scales": (torch.float16, (1, 16)),
        "g_idx": (torch.int32, (64,)),
        "bias": (torch.float16, (16,)),
    },
    "compressed-tensors": {
        "weight_packed": (torch.int32, (16, 8)),
        "weight_scale": (torch.bfloat16, (16, 2)),
        "weight_zero_point": (torch.int32, (2, 2)),
        "weight_g_idx": (torch.int32, (64,)),
        "weight_shape": (torch.int64, (2,)),
    },
}


@pytest.mark.parametrize("packing", PACKED)
def test_every_companion_of_an_expert_goes_with_it(packing, tmp_path):
    held = per_expert(PACKED[packing], ("gate_proj", "up_proj", "down_proj"))
    shared = {
        f"{LAYER}.mlp.shared_expert.up_proj.weight": torch.rand(16, 64),
        f"{LAYER}.mlp.shared_expert_gate.weight": torch.rand(1, 64),
    }
    router = {f"{LAYER}.mlp.gate.weight": torch.rand(4, 64).to(torch.bfloat16)}
    source = single_file(
        tmp_path / "source",
        {**held, **shared, **router},
        model_type="qwen2_moe",
        num_hidden_layers=2,
        mlp_only_layers=[0],
        num_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
    )
    result = prune(source, tmp_path / "out", {LAYER: KEPT})
    assert result.returncode == 0, result.stderr
    old, new = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in new.items():
        match = re.match(rf"({re.escape(LAYER)}\.mlp\.experts\.)([0-9]+)(\..*)", name)
        was = old[f"{match[1]}{KEPT[int(match[2])]}{match[3]}"] if match else old[name]
        if name.endswith(".mlp.gate.weight"):
            was = was[KEPT]
        assert tensor.dtype == was.dtype
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), was.reshape(-1).view(torch.uint8))
    assert len([name for name in new if ".experts." in name]) == 2 * len(held) // 4
    config = config_of(tmp_path / "out")
    assert (config["num_experts"], config["n_shared_experts"]) == (2, 1)
    assert support.run_surgery("verify", tmp_path / "out", "--against", source).returncode == 0


def test_e10_mxfp4_blocks_scales_and_biases_are_cut_along_their_first_axis(tmp_path):
    experts = {
        "gate_up_proj_blocks": random_of(torch.uint8, 4, 8, 2, 16),
        "gate_up_proj_scales": random_of(torch.uint8, 4, 8, 2),
        "gate_up_proj_bias": random_of(torch.bfloat16, 4, 8),
        "down_proj_blocks": random_of(torch.uint8, 4, 64, 1, 16),
        "down_proj_scales": random_of(torch.uint8, 4, 64, 1),
        "down_proj_bias": random_of(torch.bfloat16, 4, 64),
    }
    tensors = {f"{LAYER}.mlp.experts.{name}": tensor for name, tensor in experts.items()}
    tensors[f"{LAYER}.mlp.router.weight"] = random_of(torch.bfloat16, 4, 64)
    tensors[f"{LAYER}.mlp.router.bias"] = random_of(torch.bfloat16, 4)
    tensors[f"{LAYER}.self_attn.sinks"] = random_of(torch.bfloat16, 4)
    for name in list(tensors):
        tensors[name.replace(LAYER, "model.layers.0")] = tensors[name].clone()
    source = single_file(
        tmp_path / "source",
        tensors,
        model_type="gpt_oss",
        num_hidden_layers=2,
        layer_types=["full_attention", "full_attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        quantization_config={"quant_method": "mxfp4"},
    )
    result = prune(source, tmp_path / "out", {LAYER: [1, 3], "model.layers.0": [0, 2]})
    assert result.returncode == 0, result.stderr
    old, new = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in tensors.items():
        ids = [1, 3] if name.startswith(LAYER) else [0, 2]
        assert new[name].dtype == tensor.dtype
        assert torch.equal(new[name], old[name] if "sinks" in name else old[name][ids])
    assert config_of(tmp_path / "out")["num_local_experts"] == 2


def test_e07_a_table_of_ids_has_the_new_ids_where_every_id_it_names_stays(tiny_model, tmp_path):
    source = tmp_path / "source"
    original = tiny_model("deepseek_v4")
    source.mkdir()
    held = {}
    for path in original.glob("*.safetensors"):
        held |= load_file(path)
    tables = [name for name in held if name.endswith("tid2eid")]
    assert tables
    for name in tables:
        held[name] = torch.tensor([1, 3]).repeat(held[name].shape[0], 1)[:, : held[name].shape[1]].contiguous()
    save_file(held, source / "model.safetensors", {"format": "pt"})
    (source / "config.json").write_text((original / "config.json").read_text())
    keep = {key: [3, 1] for key in expert_layers(original)}
    result = prune(source, tmp_path / "out", keep)
    assert result.returncode == 0, result.stderr
    new = load_file(tmp_path / "out" / "model.safetensors")
    for name in tables:
        assert new[name].dtype == held[name].dtype
        assert torch.equal(new[name], torch.tensor([0, 1])[held[name].eq(1).long()])
    assert support.run_surgery("verify", tmp_path / "out", "--against", source).returncode == 0
    held[tables[0]][5] = 2
    save_file(held, source / "model.safetensors", {"format": "pt"})
    refused = prune(source, tmp_path / "no", keep)
    assert refused.returncode == 2
    assert "1 of its rows name an expert that would go" in refused.stderr


@pytest.mark.parametrize("kind", ["qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe", "llama4"])
def test_a_nested_model_is_pruned_in_its_text_config_and_nothing_else_moves(kind, tmp_path):
    source = model_zoo.build(kind, tmp_path / "source")
    layers = expert_layers(source)
    assert layers
    keep = {key: [2, 0, 3] if number % 2 else [1, 2, 3] for number, key in enumerate(layers)}
    result = prune(source, tmp_path / "out", keep)
    assert result.returncode == 0, result.stderr
    model_zoo.load_strict(tmp_path / "out", kind)
    config, before = config_of(tmp_path / "out"), config_of(source)
    field = next(
        name for name in ("num_experts", "num_local_experts", "n_routed_experts") if name in config["text_config"]
    )
    assert (before["text_config"][field], config["text_config"][field]) == (4, 3)
    assert config["vision_config"] == before["vision_config"]
    old, new = tensors_of(source), tensors_of(tmp_path / "out")
    untouched = [n for n in new if not re.search(r"\.experts\.|gate\.|router", n) or "visual" in n or "vision" in n]
    assert untouched
    assert all(new[name] == old[name] for name in untouched)
    assert support.run_surgery("verify", tmp_path / "out", "--against", source).returncode == 0


def fused(source: Path) -> Path:
    """The experts of the trunk in one tensor a layer, as some publishers ship them."""
    held = {}
    for path in source.glob("*.safetensors"):
        held |= load_file(path)
        path.unlink()
    (source / "model.safetensors.index.json").unlink()
    for key in {name.split(".mlp.experts.")[0] for name in held if ".mlp.experts." in name and "mtp" not in name}:

        def stacked(part: str, key: str = key) -> torch.Tensor:
            return torch.stack([held.pop(f"{key}.mlp.experts.{expert}.{part}.weight") for expert in range(8)])

        held[f"{key}.mlp.experts.gate_up_proj"] = torch.cat([stacked("gate_proj"), stacked("up_proj")], 1)
        held[f"{key}.mlp.experts.down_proj"] = stacked("down_proj")
    save_file(held, source / "model.safetensors", {"format": "pt"})
    return source


def test_experts_fused_in_the_trunk_and_single_in_the_head_are_both_pruned(tmp_path):
    single = with_head(build("qwen3_5_moe_text", tmp_path / "single"), "qwen3_next")
    layers = [key for key in expert_layers(single) if key.startswith("model.")]
    source = fused(with_head(build("qwen3_5_moe_text", tmp_path / "source"), "qwen3_next"))
    keep = {**{key: [5, 2, 7] for key in layers}, "mtp.layers.0": [4, 0, 1]}
    result = prune(source, tmp_path / "out", keep, "--mtp-experts", "prune")
    assert result.returncode == 0, result.stderr
    old, new = tensors_of(source), tensors_of(tmp_path / "out")
    assert new["mtp.layers.0.mlp.experts.0.up_proj.weight"] == old["mtp.layers.0.mlp.experts.4.up_proj.weight"]
    whole = old[f"{layers[0]}.mlp.experts.gate_up_proj"]
    width = len(whole) // 8
    assert new[f"{layers[0]}.mlp.experts.gate_up_proj"] == b"".join(whole[i * width :][:width] for i in (5, 2, 7))
    assert support.run_surgery("verify", tmp_path / "out", "--against", source).returncode == 0
    assert prune(single, tmp_path / "other", keep, "--mtp-experts", "prune").returncode == 0
    got, wanted = (
        model_zoo.logits(model_zoo.class_of("qwen3_5_moe_text").from_pretrained(tmp_path / name, dtype=torch.float32))
        for name in ("out", "other")
    )
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next"])
def test_a_head_in_a_file_that_the_index_does_not_name_is_pruned_too(kind, tmp_path):
    source = with_head(build(kind, tmp_path / "source"), kind)
    index_path = source / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != "model-mtp.safetensors"}
    index_path.write_text(json.dumps(index))
    head = "model.layers.6" if kind == "deepseek_v3" else "mtp.layers.0"
    keep = {**{key: [0, 1, 2, 3] for key in expert_layers(source)}, head: [7, 6, 5, 4]}
    result = prune(source, tmp_path / "out", keep)
    assert result.returncode == 0, result.stderr
    old, new = tensors_of(source), tensors_of(tmp_path / "out")
    name = f"{head}.mlp.experts.{{}}.down_proj.weight"
    assert new[name.format(1)] == old[name.format(6)]
    assert name.format(3) in new
    assert name.format(4) not in new


def test_a_full_width_head_has_its_own_count_where_an_engine_reads_one(tmp_path):
    source = with_head(model_zoo.build("qwen4_exp_text", tmp_path / "source", num_experts=8), "qwen3_next")
    edit_config(source, num_nextn_predict_layers=None, mtp_num_hidden_layers=1)
    keep = {key: [0, 1, 2, 3, 4] for key in expert_layers(source) if key.startswith("model.")}
    result = prune(source, tmp_path / "out", keep, "--mtp-experts", "full")
    assert result.returncode == 0, result.stderr
    config = config_of(tmp_path / "out")
    assert config["mtp_num_experts"] == 8
    assert support.run_surgery("verify", tmp_path / "out").returncode == 0
    again = {**{key: [0, 2, 4] for key in keep}, "mtp.layers.0": [7, 5, 1]}
    result = prune(tmp_path / "out", tmp_path / "again", again, "--mtp-experts", "prune")
    assert result.returncode == 0, result.stderr
    assert config_of(tmp_path / "again")["mtp_num_experts"] == 3
    assert support.run_surgery("verify", tmp_path / "again").returncode == 0


def test_e02_every_spelling_that_the_file_has_is_changed_and_none_is_added(tmp_path):
    source = build("qwen3_moe", tmp_path / "source")
    config = config_of(source)
    assert "num_local_experts" in config
    edit_config(source, num_experts=8)
    prune(source, tmp_path / "out", keep_lists(source))
    written = config_of(tmp_path / "out")
    assert (written["num_local_experts"], written["num_experts"]) == (5, 5)
    assert set(written) == {*config, "num_experts"}
    edit_config(source, num_experts=None, num_local_experts=None)
    refused = prune(source, tmp_path / "no", keep_lists(source))
    assert refused.returncode == 2
    assert "count" in refused.stderr


def test_the_manifest_has_the_expert_map_and_the_proof_holds_it_against_the_names(tmp_path):
    source = build("deepseek_v3", tmp_path / "source")
    keep = keep_lists(source)
    assert prune(source, tmp_path / "out", keep).returncode == 0
    manifest = json.loads((tmp_path / "out" / "surgery.json").read_text())
    assert manifest["experts"] == keep
    twice = {key: [4, 2] for key in keep}
    assert prune(tmp_path / "out", tmp_path / "twice", twice).returncode == 0
    recipe = {
        "recipe": [{"operation": "prune", "keep": keep}, {"operation": "prune", "keep": {k: [4, 2] for k in keep}}]
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    result = support.run_surgery("run", source, tmp_path / "one", tmp_path / "recipe.yaml")
    assert result.returncode == 0, result.stderr
    assert tensors_of(tmp_path / "one") == tensors_of(tmp_path / "twice")
    written = json.loads((tmp_path / "one" / "surgery.json").read_text())["experts"]
    assert written == {key: [ids[4], ids[2]] for key, ids in keep.items()}


def test_verify_finds_experts_that_the_config_counts_otherwise(tmp_path):
    for kind, field in (
        ("granitemoe", "num_local_experts"),
        ("ernie4_5_moe", "moe_num_experts"),
        ("gpt_oss", "num_local_experts"),
    ):
        source = build(kind, tmp_path / kind)
        assert support.run_surgery("verify", source).returncode == 0
        edit_config(source, **{field: 7})
        result = support.run_surgery("verify", source)
        assert result.returncode == 1, (kind, result.stdout)
        assert f"{field} is 7" in result.stdout


def test_a_permuted_whole_keep_list_computes_what_the_source_does(tmp_path):
    source = build("qwen3_moe", tmp_path / "source")
    keep = {key: [7, 6, 5, 4, 3, 2, 1, 0] for key in expert_layers(source)}
    assert prune(source, tmp_path / "out", keep).returncode == 0
    got = model_zoo.logits(model_zoo.load_strict(tmp_path / "out", "qwen3_moe"))
    wanted = masked_logits(source, "qwen3_moe", keep)
    assert torch.allclose(got, wanted, rtol=0, atol=1e-6 * float(wanted.abs().max()))
    assert KINDS["qwen3_moe"]


@pytest.mark.parametrize(
    "extra",
    [
        {"gate.weight": (torch.bfloat16, (6, 64))},
        {"gate.qweight": (torch.int32, (64, 2)), "gate.scales": (torch.float16, (2, 16))},
        {"gate.weight": (torch.float8_e4m3fn, (4, 64)), "gate.weight_scale_inv": (torch.float32, (2, 1))},
        {"gate.weight": (torch.bfloat16, (4, 64)), "unheard_of": (torch.float32, (4, 3))},
    ],
)
def test_a_router_that_nobody_understands_is_an_error_and_no_copy(extra, tmp_path):
    held = per_expert({"weight": (torch.bfloat16, (16, 64))}, ("up_proj",))
    more = {f"{LAYER}.mlp.{name}": random_of(dtype, *shape) for name, (dtype, shape) in extra.items()}
    fields = {"num_hidden_layers": 2, "mlp_only_layers": [0], "num_experts": 4, "num_experts_per_tok": 2}
    source = single_file(tmp_path / "source", {**held, **more}, model_type="qwen2_moe", **fields)
    result = prune(source, tmp_path / "no", {LAYER: KEPT})
    assert result.returncode == 2, result.stdout
    assert f"{LAYER}.mlp." in result.stderr
    assert not (tmp_path / "no").exists()


def test_a_ranking_of_all_experts_is_cut_to_the_number_that_stays(tmp_path):
    source = build("qwen3_moe", tmp_path / "source")
    ranking = [6, 0, 2, 5, 1, 3, 4, 7]
    lines = [json.dumps({key.rpartition(".")[2]: ranking}) for key in expert_layers(source)]
    (tmp_path / "rank.jsonl").write_text("\n".join(lines))
    arguments = ["prune", source, tmp_path / "out", "--keep", tmp_path / "rank.jsonl"]
    refused = support.run_surgery(*arguments)
    assert refused.returncode == 2
    assert "ranks the experts" in refused.stderr
    assert support.run_surgery(*arguments, "--experts", "4").returncode == 0
    kept = json.loads((tmp_path / "out" / "surgery.json").read_text())["experts"]
    assert set(map(tuple, kept.values())) == {(0, 2, 5, 6)}


def test_a_protected_expert_that_a_list_drops_or_that_is_not_there_is_refused(tmp_path):
    source = build("qwen3_moe", tmp_path / "source")
    keep = {key: [0, 1, 2, 3] for key in expert_layers(source)}
    first = expert_layers(source)[0]
    told = prune(source, tmp_path / "no", keep, "--protect", f"{first}=7")
    assert told.returncode == 2
    assert "expert 7 is protected" in told.stderr
    told = support.run_surgery(
        "prune", source, tmp_path / "no", "--scores", "first", "--experts", "4", "--protect", f"{first}=99"
    )
    assert told.returncode == 2
    assert "no expert 99" in told.stderr


def test_experts_in_a_place_that_no_record_names_are_never_left_at_their_width(tmp_path):
    source = build("qwen3_moe", tmp_path / "source")
    more = {f"model.mtp.layers.0.mlp.experts.{each}.up_proj.weight": torch.rand(16, 32) for each in range(8)}
    more["model.mtp.layers.0.mlp.gate.weight"] = torch.rand(8, 32)
    save_file(more, source / "model-mtp.safetensors")
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(more, "model-mtp.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    keep = {key: [0, 1, 2, 3] for key in expert_layers(source) if key.startswith("model.layers.")}
    told = prune(source, tmp_path / "no", keep)
    assert told.returncode == 2
    assert "model.mtp.layers.0" in told.stderr


def test_router_rows_that_are_no_numbers_choose_nothing(tmp_path):
    source = build("qwen3_moe", tmp_path / "source")
    name = "model.layers.1.mlp.gate.weight"
    path = source / json.loads((source / "model.safetensors.index.json").read_text())["weight_map"][name]
    held = load_file(path)
    held[name][3, 0] = float("nan")
    save_file(held, path, {"format": "pt"})
    told = support.run_surgery("prune", source, tmp_path / "no", "--scores", "router-norm", "--experts", "4")
    assert told.returncode == 2
    assert "expert 3" in told.stderr


def test_counts_that_no_rule_knows_and_groups_of_the_class_are_not_overlooked(tmp_path):
    source = build("qwen3_moe", tmp_path / "source")
    edit_config(source, n_routed_experts_per_layer=[8] * 6)
    told = prune(source, tmp_path / "no", keep_lists(source))
    assert told.returncode == 2
    assert "n_routed_experts_per_layer" in told.stderr
    grouped = model_zoo.build("deepseek_v3", tmp_path / "grouped", n_routed_experts=16, n_group=8, topk_group=4)
    edit_config(grouped, n_group=None, topk_group=None)
    told = support.run_surgery("prune", grouped, tmp_path / "no", "--scores", "first", "--experts", "12")
    assert told.returncode == 2


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"layers": {"model.layers.1": {"count": [1e400]}}}', '{"a": 1, "a": 2}']
)
@pytest.mark.parametrize("option", ["--keep", "--scores"])
def test_a_file_that_is_no_list_is_refused_and_no_fault_of_ours(text, option, tmp_path):
    source = build("qwen3_moe", tmp_path / "source")
    (tmp_path / "odd.json").write_text(text)
    told = support.run_surgery("prune", source, tmp_path / "no", option, tmp_path / "odd.json", "--experts", "4")
    assert told.returncode == 2, told.stderr[-300:]
