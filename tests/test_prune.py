"""Experts pruned on disk: the result computes what the source does with the dropped experts masked out."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import model_zoo
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import support

# Architectures by what is special about them; experts of the tiny models: eight.
KINDS = {
    "qwen3_moe": {"num_experts": 8, "decoder_sparse_step": 1, "mlp_only_layers": [2]},
    "qwen2_moe": {"num_experts": 8},
    "qwen3_next": {"num_experts": 8},
    "mixtral": {"num_local_experts": 8},
    "deepseek_v2": {"n_routed_experts": 8},
    "deepseek_v3": {"n_routed_experts": 8},
    "glm4_moe": {"n_routed_experts": 8},
    "gpt_oss": {"num_local_experts": 8},
    "llama4_text": {"num_local_experts": 8, "interleave_moe_layer_step": 2},
    "granitemoe": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8},
    "ernie4_5_moe": {"moe_num_experts": 8},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2},
    "phimoe": {"num_local_experts": 8},
    "minimax_m2": {"num_local_experts": 8},
    "exaone_moe": {"num_experts": 8},
    "dots1": {"n_routed_experts": 8},
    "lfm2_moe": {"num_experts": 8},
    "afmoe": {"num_experts": 8},
    "jamba": {"num_experts": 8},
    "qwen3_5_moe_text": {"num_experts": 8},
    "kolibri1": {"num_local_experts": 8},
    "kimi_linear": {"num_experts": 8},
}
MORE_KINDS = {
    **dict.fromkeys(("aria_text", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"), "moe"),
    **dict.fromkeys(("axk1", "bailing_hybrid", "cohere2_moe", "flex_olmo", "glm4_moe_lite", "hy_v3", "laguna"), "moe"),
    **dict.fromkeys(("mellum", "mimo_v2_flash", "minimax", "mistral4", "sarvam_mla", "solar_open"), "moe"),
}
"""Proven among the slow ones; the field that counts their experts is looked up in the class."""


def build(kind: str, directory: Path) -> Path:
    return model_zoo.build(kind, directory, **KINDS[kind])


def expert_layers(directory: Path) -> list[str]:
    names = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    found = {
        m[1]
        for name in names
        if (m := re.match(r"(.*?\.[0-9]+)\.(?:\w+\.)?(?:experts\.|moe\.|block_sparse_moe\.(?!\w+_proj\.))", name))
    }
    return sorted(found, key=lambda key: int(key.rpartition(".")[2]))


def keep_lists(directory: Path, count: int = 5, groups: int = 1, seed: int = 0) -> dict[str, list[int]]:
    generator = random.Random(seed)
    keep = {}
    for key in expert_layers(directory):
        ids = []
        for group in range(groups):
            width = 8 // groups
            ids += generator.sample(range(group * width, (group + 1) * width), count // groups)
        keep[key] = ids
    return keep


def write_keep(path: Path, keep: dict[str, list[int]]) -> Path:
    path.write_text(json.dumps({"format": 1, "experts": keep}))
    return path


def masked_logits(directory: Path, kind: str, keep: dict[str, list[int]]):
    """The whole model, with the routers' rows of dropped experts made unable to win: the plain meaning of pruning."""
    model = model_zoo.load_strict(directory, kind)
    for key, ids in keep.items():
        number = int(key.rpartition(".")[2])
        layer = getattr(*model_zoo._layers_of(model))[number]
        gone = [each for each in range(8) if each not in ids]
        _mask(layer, gone)
    return model_zoo.logits(model)


def _mask(layer: torch.nn.Module, gone: list[int]) -> None:
    for name, module in layer.named_modules():
        weight = getattr(module, "weight", None)
        if "expert" in name or "shared" in name or not isinstance(weight, torch.Tensor) or weight.dim() != 2:
            continue
        if weight.shape[0] == 8 and re.search(r"(gate|router|wg|layer)$", name):
            _mask_router(layer, name, module, gone)


def _mask_router(layer, name: str, module, gone: list[int]) -> None:
    """Where a correction bias is added for the choice alone, it is lowered; else the logits are. Ernie's bias is added
    behind a softmax over all experts, whose sum is another once some are gone: there too it is the logits."""
    bias = next(
        (
            tensor
            for path, tensor in [*layer.named_buffers(), *layer.named_parameters()]
            if path.endswith(("e_score_correction_bias", "expert_bias")) and "moe_statics" not in path
        ),
        None,
    )
    if bias is not None:
        flat = bias.data.reshape(-1)
        flat[gone] = -1e4
        return
    rows = torch.zeros(8)
    rows[gone] = -1e30

    def lowered(_module, _inputs, output):
        if isinstance(output, tuple):
            return output
        return output + rows.to(output.dtype)

    if type(module) is torch.nn.Linear:
        module.register_forward_hook(lowered)
    else:
        original = torch.nn.functional.linear

        def forward(*args, _forward=module.forward, **kwargs):
            def linear(hidden, weight, bias=None):
                out = original(hidden, weight, bias)
                return out + rows.to(out.dtype) if weight is module.weight else out

            torch.nn.functional.linear = linear
            try:
                return _forward(*args, **kwargs)
            finally:
                torch.nn.functional.linear = original

        module.forward = forward


@pytest.mark.slow
@pytest.mark.parametrize("kind", MORE_KINDS)
def test_so_does_any_other_mixture(kind, tmp_path):
    from transformers import CONFIG_MAPPING

    known = CONFIG_MAPPING[kind]().to_dict()
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
    source = model_zoo.build(kind, tmp_path / "source", **{name: 8 for name in counts if known.get(name) is not None})
    computes_what_the_masked_one_does(source, kind, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_the_pruned_model_computes_what_the_masked_one_does(kind, tmp_path):
    computes_what_the_masked_one_does(build(kind, tmp_path / "source"), kind, tmp_path)


def computes_what_the_masked_one_does(source: Path, kind: str, tmp_path: Path) -> None:
    keep = keep_lists(source)
    result = support.run_surgery("prune", source, tmp_path / "out", "--keep", write_keep(tmp_path / "keep.json", keep))
    assert result.returncode == 0, result.stderr
    got = model_zoo.logits(model_zoo.load_strict(tmp_path / "out", kind))
    wanted = masked_logits(source, kind, keep)
    assert torch.allclose(got, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max())), (got - wanted).abs().max()
    unpruned = model_zoo.logits(model_zoo.load_strict(source, kind))
    assert not torch.allclose(got, unpruned, rtol=0, atol=1e-5 * float(wanted.abs().max()))
    assert support.run_surgery("verify", tmp_path / "out", "--against", source).returncode == 0


def prune(source: Path, out: Path, keep: dict[str, list[int]], *more: str):
    return support.run_surgery("prune", source, out, "--keep", write_keep(out.with_suffix(".json"), keep), *more)


def tensors_of(directory: Path) -> dict[str, bytes]:
    found = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                found[name] = file.get_tensor(name).contiguous().view(torch.uint8).numpy().tobytes()
    return found


def test_every_kept_expert_and_router_row_is_the_sources_bytes(tmp_path):
    source = build("deepseek_v3", tmp_path / "source")
    keep = keep_lists(source)
    assert (
        support.run_surgery("prune", source, tmp_path / "out", "--keep", write_keep(tmp_path / "k", keep)).returncode
        == 0
    )
    old, new = tensors_of(source), tensors_of(tmp_path / "out")
    seen = 0
    for name, data in new.items():
        match = re.match(r"(model\.layers\.[0-9]+)\.mlp\.experts\.([0-9]+)\.(.*)", name)
        if match is not None:
            assert data == old[f"{match[1]}.mlp.experts.{keep[match[1]][int(match[2])]}.{match[3]}"]
            seen += 1
        elif name.rpartition(".mlp.gate.")[1]:
            rows = [
                old[name][len(old[name]) // 8 * each :][: len(old[name]) // 8] for each in keep[name.split(".mlp")[0]]
            ]
            assert data == b"".join(rows)
        else:
            assert data == old[name]
    assert seen == 5 * 3 * len(keep)


def test_scores_choose_and_the_choice_is_in_the_manifest(tmp_path):
    source = build("qwen3_moe", tmp_path / "source")
    layers = expert_layers(source)
    scores = {key: {"count": [1, 0, 4, 2, 2, 8, 1, 1], "gate_norm_sum": [5.0, 0, 4, 4, 4, 8, 0.5, 1]} for key in layers}
    path = tmp_path / "scores.json"
    path.write_text(json.dumps({"format": 1, "layers": scores, "tokens": 100}))
    arguments = ["prune", source, tmp_path / "out", "--scores", path, "--ratio", "0.5", "--protect", f"{layers[0]}=6"]
    assert support.run_surgery(*arguments).returncode == 0
    recipe = json.loads((tmp_path / "out" / "surgery.json").read_text())["recipe"][0]
    # Means: 5, 0, 1, 2, 2, 1, 0.5, 1; ties go to the lower id; 6 is protected in the first layer.
    assert recipe["keep"][layers[0]] == [0, 3, 4, 6]
    assert recipe["keep"][layers[1]] == [0, 2, 3, 4]
    assert recipe["chosen_by"][layers[1]] == [5.0, 0.0, 1.0, 2.0, 2.0, 1.0, 0.5, 1.0]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_local_experts"] == 4
    again = support.run_surgery("run", source, tmp_path / "again", tmp_path / "out" / "surgery.json")
    assert again.returncode == 0, again.stderr
    assert tensors_of(tmp_path / "again") == tensors_of(tmp_path / "out")


@pytest.mark.parametrize("how", ["router-norm", "first"])
def test_a_choice_without_data(tmp_path, how):
    source = build("deepseek_v3", tmp_path / "source")
    result = support.run_surgery("prune", source, tmp_path / "out", "--scores", how, "--experts", "4")
    assert result.returncode == 0, result.stderr
    keep = json.loads((tmp_path / "out" / "surgery.json").read_text())["recipe"][0]["keep"]
    if how == "first":
        assert set(map(tuple, keep.values())) == {(0, 1, 2, 3)}
    model_zoo.load_strict(tmp_path / "out", "deepseek_v3")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda keep: keep.pop(next(iter(keep))), "leaves out"),
        (lambda keep: keep.update({"model.layers.99": [0]}), "no layer with experts"),
        (lambda keep: keep.update({next(iter(keep)): [0, 1, 2, 3, 8]}), "no expert"),
        (lambda keep: keep.update({next(iter(keep)): [0, 1, 2, 3, 3]}), "twice"),
        (lambda keep: keep.update({next(iter(keep)): [0, 1, 2, 3]}), "unequal counts"),
    ],
)
def test_a_keep_list_that_does_not_fit_is_refused(tmp_path, change, says):
    source = build("qwen3_moe", tmp_path / "source")
    keep = keep_lists(source)
    change(keep)
    result = support.run_surgery("prune", source, tmp_path / "out", "--keep", write_keep(tmp_path / "k", keep))
    assert result.returncode == 2
    assert says in result.stderr
    assert not (tmp_path / "out").exists()


def test_routing_groups_keep_equally_many_and_nobody_leaves_its_group(tmp_path):
    source = model_zoo.build("deepseek_v3", tmp_path / "source", n_routed_experts=8, n_group=2, topk_group=1)
    good = keep_lists(source, count=4, groups=2)
    assert (
        support.run_surgery("prune", source, tmp_path / "out", "--keep", write_keep(tmp_path / "k", good)).returncode
        == 0
    )
    model_zoo.load_strict(tmp_path / "out", "deepseek_v3")
    for ids, says in (([0, 4, 1, 5], "leave its routing group"), ([0, 1, 2, 4, 5], "routing groups")):
        bad = write_keep(tmp_path / "k", dict.fromkeys(good, ids))
        result = support.run_surgery("prune", source, tmp_path / "no", "--keep", bad)
        assert result.returncode == 2
        assert says in result.stderr
    single = model_zoo.build(
        "deepseek_v3", tmp_path / "single", n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=1
    )
    assert "best two" in prune(single, tmp_path / "no", {key: [0, 4] for key in good}).stderr


def test_too_few_for_the_top_k_is_refused(tmp_path):
    source = build("qwen3_moe", tmp_path / "source")
    keep = write_keep(tmp_path / "k", {key: [3] for key in expert_layers(source)})
    result = support.run_surgery("prune", source, tmp_path / "out", "--keep", keep)
    assert result.returncode == 2
    assert "num_experts_per_tok is 2, and 1 experts" in result.stderr


def with_head(source: Path, kind: str) -> Path:
    """An MTP head with eight experts of its own: behind the layers, or under `mtp.`."""
    index_path = source / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    layer = "model.layers.6" if kind == "deepseek_v3" else "mtp.layers.0"
    generator = torch.Generator().manual_seed(1)
    more = {f"{layer}.mlp.gate.weight": torch.rand(8, 32, generator=generator)}
    for expert in range(8):
        for part in ("gate_proj", "up_proj"):
            more[f"{layer}.mlp.experts.{expert}.{part}.weight"] = torch.rand(16, 32, generator=generator)
        more[f"{layer}.mlp.experts.{expert}.down_proj.weight"] = torch.rand(32, 16, generator=generator)
    more[f"{layer}.eh_proj.weight" if kind == "deepseek_v3" else "mtp.fc.weight"] = torch.rand(32, 64)
    save_file(more, source / "model-mtp.safetensors")
    index["weight_map"] |= dict.fromkeys(more, "model-mtp.safetensors")
    index_path.write_text(json.dumps(index))
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_nextn_predict_layers": 1}))
    return source


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next"])
def test_the_mtp_heads_experts_follow_their_own_list_or_a_stated_policy(tmp_path, kind):
    source = with_head(build(kind, tmp_path / "source"), kind)
    head = "model.layers.6" if kind == "deepseek_v3" else "mtp.layers.0"
    trunk = {key: ids for key, ids in keep_lists(source).items() if key != head}
    without = write_keep(tmp_path / "trunk.json", trunk)
    refused = support.run_surgery("prune", source, tmp_path / "no", "--keep", without)
    assert refused.returncode == 2
    assert all(word in refused.stderr for word in ("prune", "full", "drop"))
    both = write_keep(tmp_path / "both.json", {**trunk, head: [7, 1, 2, 4, 5]})
    assert (
        support.run_surgery("prune", source, tmp_path / "out", "--keep", both, "--mtp-experts", "prune").returncode == 0
    )
    old, new = tensors_of(source), tensors_of(tmp_path / "out")
    pattern = re.compile(rf"{re.escape(head)}\.mlp\.experts\.([0-9]+)\.")
    ids = sorted({int(match[1]) for name in new if (match := pattern.match(name))})
    assert ids == [0, 1, 2, 3, 4]
    assert new[f"{head}.mlp.experts.0.up_proj.weight"] == old[f"{head}.mlp.experts.7.up_proj.weight"]
    row = len(old[f"{head}.mlp.gate.weight"]) // 8
    assert new[f"{head}.mlp.gate.weight"][:row] == old[f"{head}.mlp.gate.weight"][7 * row :]
    full = support.run_surgery("prune", source, tmp_path / "full", "--keep", without, "--mtp-experts", "full")
    assert full.returncode == 2, full.stderr
    assert "no engine reads a count of its own" in full.stderr
    dropped = support.run_surgery("prune", source, tmp_path / "drop", "--keep", without, "--mtp-experts", "drop")
    assert dropped.returncode == 0, dropped.stderr
    assert not [name for name in tensors_of(tmp_path / "drop") if name.startswith((f"{head}.", "mtp."))]
    assert json.loads((tmp_path / "drop" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_without_a_head_the_mtp_policy_changes_no_byte(tmp_path):
    source = build("deepseek_v3", tmp_path / "source")
    keep = write_keep(tmp_path / "k", keep_lists(source))
    for number, extra in enumerate(
        ([], ["--mtp-experts", "prune"], ["--mtp-experts", "drop"], ["--mtp-experts", "full"])
    ):
        out = tmp_path / f"out{number}"
        assert support.run_surgery("prune", source, out, "--keep", keep, *extra).returncode == 0
        assert tensors_of(out) == tensors_of(tmp_path / "out0")
        assert (out / "config.json").read_bytes() == (tmp_path / "out0" / "config.json").read_bytes()


def test_a_table_of_expert_ids_is_refused_with_a_count(tiny_model, tmp_path):
    source = tiny_model("deepseek_v4")
    result = prune(source, tmp_path / "out", {key: [1, 2] for key in expert_layers(source)})
    assert result.returncode == 2, result.stderr
    assert re.search(r"tid2eid.*[0-9]+ of its rows name an expert that would go", result.stderr)


def test_trim_and_prune_compose_in_one_pass_with_lists_keyed_by_the_source(tmp_path):
    source = build("qwen3_moe", tmp_path / "source")
    keep = {key: ids for key, ids in keep_lists(source).items() if key in ("model.layers.3", "model.layers.5")}
    recipe = {
        "recipe": [
            {"operation": "trim", "layers": "5,3"},
            {"operation": "prune", "keep": keep},
        ]
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    result = support.run_surgery("run", source, tmp_path / "out", tmp_path / "recipe.yaml")
    assert result.returncode == 0, result.stderr
    old, new = tensors_of(source), tensors_of(tmp_path / "out")
    first = keep["model.layers.5"][0]
    assert (
        new["model.layers.0.mlp.experts.0.up_proj.weight"] == old[f"model.layers.5.mlp.experts.{first}.up_proj.weight"]
    )
    model_zoo.load_strict(tmp_path / "out", "qwen3_moe")


def test_companions_of_quantised_experts_and_module_lists_go_along(tmp_path):
    source = build("qwen3_moe", tmp_path / "source")
    index_path = source / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    scales = {
        name.replace(".weight", ".weight_scale_inv"): torch.tensor([[float(i)]])
        for i, name in enumerate(index["weight_map"])
        if ".experts." in name
    }
    save_file(scales, source / "model-scales.safetensors")
    index["weight_map"] |= dict.fromkeys(scales, "model-scales.safetensors")
    index_path.write_text(json.dumps(index))
    path = source / "config.json"
    ignore = ["lm_head", "model.layers.3.mlp.experts.6.up_proj", "model.layers.3.mlp.experts.1.up_proj"]
    section = {"quant_method": "compressed-tensors", "config_groups": {}, "ignore": ignore}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": section}))
    keep = write_keep(tmp_path / "k", {key: [6, 0, 2] for key in expert_layers(source)})
    result = support.run_surgery("prune", source, tmp_path / "out", "--keep", keep)
    assert result.returncode == 0, result.stderr
    old, new = tensors_of(source), tensors_of(tmp_path / "out")
    name = "model.layers.3.mlp.experts.{}.up_proj.weight_scale_inv"
    assert new[name.format(0)] == old[name.format(6)]
    assert not [each for each in new if ".experts.3." in each]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head", "model.layers.3.mlp.experts.0.up_proj"]


def test_a_dense_model_is_told_so(tiny_model, tmp_path):
    result = support.run_surgery("prune", tiny_model("llama"), tmp_path / "out", "--scores", "first", "--experts", "2")
    assert result.returncode == 2
    assert "no layer with routed experts" in result.stderr


def test_other_tools_lists_are_read(tmp_path):
    source = build("qwen3_moe", tmp_path / "source")
    keep = keep_lists(source)
    ours = write_keep(tmp_path / "ours.json", keep)
    (tmp_path / "compressor.json").write_text(json.dumps({f"{key}.mlp": ids for key, ids in keep.items()}))
    lines = [json.dumps({key.rpartition(".")[2]: ids}) for key, ids in keep.items()]
    (tmp_path / "ascend.jsonl").write_text("\n".join(lines))
    for number, path in enumerate((ours, tmp_path / "compressor.json", tmp_path / "ascend.jsonl")):
        result = support.run_surgery("prune", source, tmp_path / f"out{number}", "--keep", path)
        assert result.returncode == 0, result.stderr
        assert tensors_of(tmp_path / f"out{number}") == tensors_of(tmp_path / "out0")


def test_deepseek_v3_is_halved_on_paper_in_little_memory(sparse_deepseek_v3, tmp_path):
    arguments = ["prune", sparse_deepseek_v3, tmp_path / "out", "--scores", "first", "--ratio", "0.5", "--dry-run"]
    result = support.run_surgery(*arguments)
    assert result.returncode == 0, result.stderr
    assert "n_routed_experts: 256 -> 128" in result.stdout
