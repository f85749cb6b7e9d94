"""Facts, carried: every record against transformers' own class, other readers' fields, and random configs."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import support
import tiny_models
from surgery.errors import CannotApply
from surgery.families.carrying import LayerMap, carry, replaced_section
from surgery.families.records import find_family
from surgery.families.schema import READERS

# Non-prefix selections of six layers that every reader can express, by family.
SELECTIONS = {
    "deepseek_v3": ["0,3,5", "1,4", "3,2", "0,0,4"],
    "qwen3_moe_dense": ["1,3,4", "5,0,3", "2,2,1"],
    "qwen2_window": ["2,4", "5,0,3", "1,5"],
    "mixtral": ["5,2", "1,3,4"],
    "deepseek_v2": ["0,3,5", "1,4", "4,2"],
    "glm4_moe": ["0,3,5", "1,4", "4,2"],
    "gpt_oss": ["1,2,3", "0,4,1", "5,5"],
    "gemma2": ["1,2,3", "0,4,1", "5,5"],
    "gemma3_text": ["2,3", "0,5,1", "5,4,2"],
    "jamba": ["1,2", "0,3", "3,4,5"],
    "qwen3_next": ["2,3", "0,5,1", "5,4,2"],
    "qwen3_5_moe_text": ["3,4", "0,3,1", "5,3,2"],
    "llama4_text": ["1,2", "0,3", "4,5"],
    "glm_moe_dsa": ["0,4,5", "1,2,3", "0,1,4,5"],
    "nemotron_h": ["0,3,5", "1,2,3", "5,4"],
    "deepseek_v4": ["0,2,5", "1,3,4", "4,2"],
}
READER = dict.fromkeys(("jamba", "llama4_text", "gpt_oss"), "transformers")


@pytest.mark.parametrize("family", SELECTIONS)
def test_a_trim_of_layers_of_several_kinds_computes_what_the_cut_model_does(tiny_model, tmp_path, family):
    import torch

    source = tiny_model(family)
    for number, layers in enumerate(SELECTIONS[family]):
        out = tmp_path / f"out{number}"
        extra = ["--for", READER[family]] if family in READER else []
        result = support.run_surgery("trim", source, out, "--layers", layers, *extra)
        assert result.returncode == 0, (layers, result.stderr)
        kept = [int(layer) for layer in layers.split(",")]
        expected = tiny_models.logits(tiny_models.cut_in_memory(source, kept))
        assert torch.equal(tiny_models.logits(tiny_models.load_strict(out)), expected), layers
        assert support.run_surgery("verify", out, "--against", source).returncode == 0


def test_what_vllm_never_reads_is_refused_where_its_own_rule_says_otherwise(tiny_model, tmp_path):
    """gpt_oss: transformers takes the list, vLLM counts every second layer."""
    source = tiny_model("gpt_oss")
    refused = support.run_surgery("trim", source, tmp_path / "out", "--layers", "1,2,3", "--for", "vllm")
    assert refused.returncode == 2
    assert not (tmp_path / "out").exists()
    assert support.run_surgery("trim", source, tmp_path / "out", "--layers", "2,5,0,1").returncode == 0


# Config sections as publishers write them (no derived lists), the kinds each reader sees, by rule.
L = 12
RAW = {
    "deepseek_v3": {"first_k_dense_replace": 3, "moe_layer_freq": 1},
    "deepseek_v2": {"first_k_dense_replace": 1},
    "qwen3_moe": {"decoder_sparse_step": 2, "mlp_only_layers": [0, 5], "num_experts": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 7},
    "gemma2": {},
    "gemma3_text": {"sliding_window_pattern": 3},
    "gpt_oss": {},
    "llama4_text": {"interleave_moe_layer_step": 2, "no_rope_layer_interval": 4},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2, "expert_layer_period": 2, "expert_layer_offset": 1},
    "qwen3_next": {"full_attention_interval": 4, "num_experts": 8, "mlp_only_layers": []},
    "qwen3_5_moe_text": {"full_attention_interval": 4},
    "glm_moe_dsa": {"first_k_dense_replace": 3, "index_topk_freq": 4, "index_skip_topk_offset": 3},
    "nemotron_h": {"hybrid_override_pattern": "M-M*MEM-M*ME"},
    "deepseek_v4": {"num_hash_layers": 3, "compress_ratios": [0, 0, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 0]},
    "gemma3n_text": {"num_kv_shared_layers": 4, "intermediate_size": [8] * 6 + [16] * 6},
    "gemma4_text": {"num_kv_shared_layers": 0},
}


@pytest.mark.parametrize("reader", ["", *READERS])
@pytest.mark.parametrize("kind", RAW)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_facts_are_carried_or_refused_never_silently_wrong(kind, reader, data):
    """For random layer lists: the facts of every reader hold under the new config, or it is refused."""
    config = {"model_type": kind, "num_hidden_layers": L, **RAW[kind]}
    family = find_family(config)
    kept = data.draw(st.lists(st.integers(0, L - 1), min_size=1, max_size=8))
    readers = (reader,) if reader else READERS
    layers = LayerMap(kept, L, [0] if kind == "deepseek_v4" else [])
    try:
        changes = carry(family, config, layers, readers)
    except CannotApply:
        return
    new = {**config, "num_hidden_layers": len(kept), **{change.field: change.new for change in changes}}
    new = replaced_section(family, config, new)
    assert family.depth(new) == len(kept)
    for each in readers:
        old_facts = family.all_facts(config, L, each)
        new_facts = family.all_facts(new, len(kept), each)
        assert [old_facts[source] for source in kept] == new_facts
    assert list(config)[: len(config)] == [key for key in new if key in config]


@pytest.mark.parametrize("kind", [kind for kind in RAW if kind not in ("gemma4_text",)])
def test_transformers_reads_the_new_config_as_the_records_say(kind):
    """The class's own derived lists, old and new, agree through the layer map: an independent witness."""
    from transformers import AutoConfig

    raw = {"num_hidden_layers": L, **RAW[kind]}
    family = find_family({"model_type": kind})
    generator = random.Random(kind)
    tried = 0
    for _ in range(40):
        kept = sorted(generator.sample(range(L), generator.randint(2, 6)))
        config = {"model_type": kind, **raw}
        try:
            changes = carry(family, config, LayerMap(kept, L, [0]), ("transformers",))
        except CannotApply:
            continue
        new = {**raw, "num_hidden_layers": len(kept), **{change.field: change.new for change in changes}}
        old_class, new_class = (AutoConfig.for_model(kind, **fields) for fields in (raw, new))
        for name in ("layer_types", "mlp_layer_types", "indexer_types", "layers_block_type", "no_rope_layers",
                     "layers_num_experts", "intermediate_size", "activation_sparsity_pattern"):  # fmt: skip
            old_list = getattr(old_class, name, None)
            if isinstance(old_list, list) and len(old_list) == L:
                assert getattr(new_class, name) == [old_list[layer] for layer in kept], (kept, name)
        tried += 1
    assert tried > 3


def test_glm_5_2_is_trimmed_field_by_field_as_the_worked_example():
    """facts/trimming.md 1.2: layers 0, 6, 7 and the MTP stage."""
    full = [i < 3 or (i - 2) % 4 == 0 for i in range(78)]
    config = {
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 78,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "layer_types": ["deepseek_sparse_attention"] * 78,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
        "indexer_types": ["full" if f else "shared" for f in full],
        "index_topk_pattern": None,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "num_nextn_predict_layers": 1,
    }
    family = find_family(config)
    changes = carry(family, config, LayerMap([0, 6, 7], 78, [0]), READERS)
    new = {**config, "num_hidden_layers": 3, **{change.field: change.new for change in changes}}
    assert new["first_k_dense_replace"] == 1
    assert new["moe_layer_freq"] == 1
    assert new["layer_types"] == ["deepseek_sparse_attention"] * 3
    assert new["mlp_layer_types"] == ["dense", "sparse", "sparse"]
    assert new["indexer_types"] == ["full", "full", "shared"]
    assert new["index_topk_pattern"] == "FFS"
    assert (new["index_topk_freq"], new["index_skip_topk_offset"]) == (4, 3)
    assert new["num_nextn_predict_layers"] == 1


def test_deepseek_v4_flash_is_trimmed_field_by_field_as_the_worked_example():
    """facts/trimming.md 1.3: the first five layers; exactly two edits."""
    ratios = [0, 0] + [4, 128] * 20 + [4] + [0]
    config = {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 43,
        "compress_ratios": ratios,
        "num_hash_layers": 3,
        "num_nextn_predict_layers": 1,
        "expert_dtype": "fp8",
    }
    family = find_family(config)
    changes = carry(family, config, LayerMap([0, 1, 2, 3, 4], 43, [0]), READERS)
    assert {change.field: change.new for change in changes} == {"compress_ratios": [0, 0, 4, 128, 4, 0]}
    changes = carry(family, config, LayerMap([0, 5, 6], 43, [0]), READERS)
    assert {change.field: change.new for change in changes} == {
        "compress_ratios": [0, 128, 4, 0],
        "num_hash_layers": 1,
    }


@pytest.mark.parametrize(
    ("kind", "kept", "says"),
    [
        ("deepseek_v3", [0, 3, 1], "no config says"),
        ("jamba", [0, 1, 2, 3, 4, 6], "no config says"),
        ("gemma4_text", [0, 5, 6], "change their kind"),
        ("gemma3n_text", [0, 1, 9], "is not kept before it"),
        ("glm_moe_dsa", [0, 5], "is not kept before it"),
        ("llama4_text", [1, 3, 4], "no config says"),
    ],
)
def test_what_no_config_can_say_is_refused_with_a_selection_that_works(kind, kept, says):
    config = {"model_type": kind, "num_hidden_layers": L, **RAW[kind]}
    family = find_family(config)
    with pytest.raises(CannotApply, match=says) as refused:
        carry(family, config, LayerMap(kept, L), READERS)
    if "--layers" in refused.value.mend:
        from surgery.layer_ranges import parse_ranges

        selection = parse_ranges(refused.value.mend.split()[1])
        carry(family, config, LayerMap(selection, L), READERS)
    else:
        assert kind in ("jamba",)


def test_for_one_reader_less_is_asked(tiny_model, tmp_path):
    source = tiny_model("llama4_text")
    arguments = ["trim", source, tmp_path / "out", "--layers", "1,3,4"]
    refused = support.run_surgery(*arguments)
    assert refused.returncode == 2
    assert "vllm" in refused.stderr
    assert not (tmp_path / "out").exists()
    assert support.run_surgery(*arguments, "--for", "transformers").returncode == 0


def with_tensors(source: Path, out: Path, names: dict[str, tuple[int, ...]], **config) -> Path:
    """A copy of a tiny model with further tensors in a file of its own, indexed, and config fields changed."""
    import torch
    from safetensors.torch import save_file

    shutil.copytree(source, out)
    save_file(
        {name: torch.rand(shape) for name, shape in names.items()}, out / "model-mtp.safetensors", {"format": "pt"}
    )
    index = json.loads((out / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(names, "model-mtp.safetensors")
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    whole = json.loads((out / "config.json").read_text())
    whole.update(config)
    (out / "config.json").write_text(json.dumps(whole))
    return out


def index_of(out: Path) -> set[str]:
    from safetensors import safe_open

    names = set()
    for path in out.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            names |= set(file.keys())
    return names


def test_mtp_stages_behind_the_layers_are_renumbered_or_dropped(tiny_model, tmp_path):
    stage = {"model.layers.6.eh_proj.weight": (4, 8), "model.layers.6.mlp.gate.weight": (4, 4)}
    source = with_tensors(tiny_model("deepseek_v3"), tmp_path / "source", stage, num_nextn_predict_layers=1)
    assert support.run_surgery("trim", source, tmp_path / "kept", "--layers", "0,3,5", "--mtp", "keep").returncode == 0
    names = index_of(tmp_path / "kept")
    assert {"model.layers.3.eh_proj.weight", "model.layers.3.mlp.gate.weight"} <= names
    assert not [name for name in names if name.startswith("model.layers.6.")]
    config = json.loads((tmp_path / "kept" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
    assert support.run_surgery("verify", tmp_path / "kept", "--against", source).returncode == 0

    assert support.run_surgery("trim", source, tmp_path / "gone", "--layers", "0,3", "--mtp", "drop").returncode == 0
    assert not [name for name in index_of(tmp_path / "gone") if "eh_proj" in name]
    assert json.loads((tmp_path / "gone" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert support.run_surgery("verify", tmp_path / "gone", "--against", source).returncode == 0


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v4"])
def test_mtp_stages_under_their_own_prefix_stay_or_go(tiny_model, tmp_path, family):
    name = "mtp.layers.0.self_attn.q_proj.weight" if family == "qwen3_next" else "mtp.0.ffn.gate.weight"
    stage = {name: (4, 8), "mtp.fc.weight": (4, 4)} if family == "qwen3_next" else {name: (4, 4)}
    source = with_tensors(tiny_model(family), tmp_path / "source", stage, num_nextn_predict_layers=1)
    assert support.run_surgery("trim", source, tmp_path / "kept", "--layers", "0,2").returncode == 0
    assert set(stage) <= index_of(tmp_path / "kept")
    assert support.run_surgery("trim", source, tmp_path / "gone", "--layers", "0,2", "--mtp", "drop").returncode == 0
    assert not [kept for kept in index_of(tmp_path / "gone") if kept.startswith("mtp.")]
    assert json.loads((tmp_path / "gone" / "config.json").read_text())["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_a_file_outside_the_index_that_is_the_mtp_stage_belongs_to_the_model(tiny_model, tmp_path, family):
    import torch
    from safetensors.torch import save_file

    source = Path(shutil.copytree(tiny_model(family), tmp_path / "source"))
    name = "model.layers.6.eh_proj.weight" if family == "deepseek_v3" else "mtp.layers.0.mlp.gate.weight"
    save_file({name: torch.rand(4, 8)}, source / "mtp.safetensors", {"format": "pt"})
    save_file({"stray.weight": torch.rand(4)}, source / "other.safetensors", {"format": "pt"})
    result = support.run_surgery("trim", source, tmp_path / "out", "--layers", "0,2")
    assert result.returncode == 0, result.stderr
    assert "outside the index" in result.stderr
    names = index_of(tmp_path / "out")
    assert name.replace("layers.6.", "layers.2.") in names
    assert "stray.weight" not in names
    gone = support.run_surgery("trim", source, tmp_path / "gone", "--layers", "0,2", "--mtp", "drop")
    assert gone.returncode == 0
    assert not [kept for kept in index_of(tmp_path / "gone") if "eh_proj" in kept or kept.startswith("mtp")]


def test_an_mtp_option_without_a_head_changes_nothing(tiny_model, tmp_path):
    source = tiny_model("deepseek_v3")
    for option in ("keep", "drop"):
        result = support.run_surgery("trim", source, tmp_path / option, "--layers", "0,3", "--mtp", option)
        assert result.returncode == 0
    for path in (tmp_path / "keep").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "drop" / path.name).read_bytes()
    assert (tmp_path / "keep" / "config.json").read_bytes() == (tmp_path / "drop" / "config.json").read_bytes()


def test_ids_of_dropped_layers_are_refused_or_retargeted(tiny_model, tmp_path):
    source = with_tensors(
        tiny_model("deepseek_v4"), tmp_path / "source", {"mtp.0.x": (2,)}, dspark_target_layer_ids=[3, 4, 5]
    )
    refused = support.run_surgery("trim", source, tmp_path / "out", "--layers", "0,2,4,5")
    assert refused.returncode == 2
    assert "[3]" in refused.stderr
    assert "--retarget last" in refused.stderr
    result = support.run_surgery("trim", source, tmp_path / "out", "--layers", "0,2,4,5", "--retarget", "last")
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dspark_target_layer_ids"] == [1, 2, 3]
    whole = support.run_surgery("trim", source, tmp_path / "all", "--layers", "0,3,4,5")
    assert whole.returncode == 0, whole.stderr
    assert json.loads((tmp_path / "all" / "config.json").read_text())["dspark_target_layer_ids"] == [1, 2, 3]


def test_tensors_that_hold_a_block_for_each_layer_are_cut_along(tiny_model, tmp_path):
    import torch
    from safetensors.torch import load_file

    source = tiny_model("gemma3n_text")
    result = support.run_surgery("trim", source, tmp_path / "out", "--layers", "1,2,3,4,5", "--max-shard-size", "1GB")
    assert result.returncode == 0, result.stderr
    before = {}
    for path in source.glob("*.safetensors"):
        before |= load_file(path)
    after = load_file(tmp_path / "out" / "model.safetensors")
    for suffix, axis in (("embed_tokens_per_layer.weight", 1), ("per_layer_model_projection.weight", 0)):
        name = next(name for name in before if name.endswith(suffix))
        blocks = before[name].chunk(6, axis)
        assert torch.equal(after[name], torch.cat([blocks[layer] for layer in (1, 2, 3, 4, 5)], axis))
    tiny_models.load_strict(tmp_path / "out")
    refused = support.run_surgery("trim", source, tmp_path / "no", "--layers", "0,1,5")
    assert refused.returncode == 2
    assert "layer 3" in refused.stderr


def test_a_wrapper_is_edited_where_its_text_config_is(tiny_model, tmp_path):
    """The count of the section that owns the tensors; no key is made at the top (case T07)."""
    source = Path(shutil.copytree(tiny_model("gemma3_text"), tmp_path / "source"))
    text = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {}}))
    assert support.run_surgery("trim", source, tmp_path / "out", "--layers", "2,3").returncode == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert list(config) == ["model_type", "text_config", "vision_config"]
    assert config["text_config"]["num_hidden_layers"] == 2
    assert config["text_config"]["layer_types"] == ["full_attention", "sliding_attention"]


def test_the_multimodal_wrapper_computes_what_the_cut_model_does_with_its_tower_untouched(tmp_path):
    """Qwen3.5-MoE: text_config nested, tensors under model.language_model, vision beside them."""
    import torch
    from transformers import AutoConfig, Qwen3_5MoeForConditionalGeneration

    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
              "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "deepstack_visual_indexes": [0],
              "num_position_embeddings": 16}  # fmt: skip
    text = {**tiny_models.fields_of("qwen3_5_moe_text"), "num_hidden_layers": 6}
    config = AutoConfig.for_model("qwen3_5_moe", text_config=text, vision_config=vision)
    model = Qwen3_5MoeForConditionalGeneration._from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "source", max_shard_size="20KB")
    assert support.run_surgery("trim", tmp_path / "source", tmp_path / "out", "--layers", "1,3,5").returncode == 0
    trimmed, report = Qwen3_5MoeForConditionalGeneration.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values())
    decoder = model.model.language_model
    decoder.layers = torch.nn.ModuleList(decoder.layers[layer] for layer in (1, 3, 5))
    kinds = decoder.config.layer_types
    decoder.config.layer_types = [kinds[layer] for layer in (1, 3, 5)]
    decoder.config.num_hidden_layers = 3
    for place, layer in enumerate(decoder.layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = place
    assert torch.equal(tiny_models.logits(trimmed), tiny_models.logits(model))
    towers = [name for name in index_of(tmp_path / "out") if "visual" in name]
    assert len(towers) == sum("visual" in name for name in index_of(tmp_path / "source")) > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", SELECTIONS)
def test_random_selections_compute_what_the_cut_model_does_or_are_refused(tiny_model, tmp_path, family):
    import torch

    source = tiny_model(family)
    generator = random.Random(family)
    proven = 0
    for number in range(12):
        kept = [generator.randrange(6) for _ in range(generator.randint(1, 5))]
        out = tmp_path / f"out{number}"
        extra = ["--for", READER[family]] if family in READER else []
        result = support.run_surgery("trim", source, out, "--layers", ",".join(map(str, kept)), *extra)
        assert result.returncode in (0, 2), result.stderr
        assert out.exists() == (result.returncode == 0)
        if result.returncode == 0:
            expected = tiny_models.logits(tiny_models.cut_in_memory(source, kept))
            assert torch.equal(tiny_models.logits(tiny_models.load_strict(out)), expected), kept
            proven += 1
    assert proven


def test_deepseek_v3_at_its_real_size_is_trimmed_with_its_mtp_head(sparse_deepseek_v3, tmp_path):
    """689 GB apparent: a marker in every tensor, MTP at layer 61, block scales beside their weights."""
    from test_trim import markers, rss_of

    import make_sparse

    out = tmp_path / "out"
    result, memory = rss_of("trim", sparse_deepseek_v3, out, "--layers", "0,3,60", "--mtp", "keep")
    assert result.returncode == 0, result.stderr
    assert memory < 150
    old = {0: 0, 1: 3, 2: 60, 3: 61}
    found = markers(out)
    assert sum(name.startswith("model.layers.3.") for name in found) > 700
    for name, data in found.items():
        origin = name
        if name.startswith("model.layers."):
            number, rest = name.removeprefix("model.layers.").split(".", 1)
            origin = f"model.layers.{old[int(number)]}.{rest}"
        assert data == make_sparse.marker(origin)[: len(data)], name
    config = json.loads((out / "config.json").read_text())
    fields = ("num_hidden_layers", "first_k_dense_replace", "num_nextn_predict_layers")
    assert [config[field] for field in fields] == [3, 1, 1]
    assert support.run_surgery("verify", out).returncode == 0
    refused = support.run_surgery("trim", sparse_deepseek_v3, tmp_path / "no", "--layers", "0,3,1")
    assert refused.returncode == 2
    assert "--layers 0-1,3 works" in refused.stderr
    assert not (tmp_path / "no").exists()
