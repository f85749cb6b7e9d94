"""What a reviewer found silently wrong in trims, each with the right answer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import model_zoo
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import support
from surgery.errors import CannotApply
from surgery.families.carrying import LayerMap, carry
from surgery.families.cover import cover
from surgery.families.records import find_family
from surgery.families.schema import READERS


def copied(source: Path, directory: Path, **fields) -> Path:
    shutil.copytree(source, directory)
    config = {**json.loads((directory / "config.json").read_text()), **fields}
    config = {name: value for name, value in config.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def with_tensors(directory: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors, directory / "model-more.safetensors")
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= dict.fromkeys(tensors, "model-more.safetensors")
    path.write_text(json.dumps(index))
    return directory


def trimmed_config(out: Path) -> dict:
    return json.loads((out / "config.json").read_text())


def test_v4_without_lists_gets_the_list_that_its_default_was(tiny_model, tmp_path):
    source = copied(tiny_model("deepseek_v4"), tmp_path / "source", layer_types=..., compress_ratios=...)
    config = json.loads((source / "config.json").read_text())
    family = find_family(config)
    changes = {change.field: change.new for change in carry(family, config, LayerMap([0, 3, 5], 6), READERS)}
    csa, hca = "compressed_sparse_attention", "heavily_compressed_attention"
    assert changes["layer_types"] == [hca, csa, csa]


def test_an_mtp_stage_stays_what_it_was_at_its_new_number():
    """vLLM reads first_k_dense_replace and moe_layer_freq at the stage's own number."""
    config = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 6,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 2,
    }
    family = find_family(config)
    with pytest.raises(CannotApply, match="MTP stage 0 would change its kind for vllm"):
        carry(family, config, LayerMap([0, 1, 2], 6, [0]), ("vllm",))
    carry(family, config, LayerMap([0, 1, 2, 3], 6, [0]), ("vllm",))


def test_a_list_by_ordinal_follows_the_layers_of_its_kind():
    config = {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M-*E", "intermediate_size": [48, 32]}
    family = find_family(config)
    changes = {change.field: change.new for change in carry(family, config, LayerMap([0, 2, 3, 5], 6), READERS)}
    assert changes["hybrid_override_pattern"] == "MM-E"
    assert changes["intermediate_size"] == [32]


def test_module_lists_in_another_spelling_of_the_prefix_follow_too(tmp_path):
    source = model_zoo.build("gemma3", tmp_path / "source")
    ignore = ["language_model.model.layers.2.mlp.down_proj", "model.language_model.layers.3.mlp.up_proj", "lm_head"]
    section = {"quant_method": "compressed-tensors", "config_groups": {}, "ignore": ignore}
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": section}))
    result = support.run_surgery("trim", source, tmp_path / "out", "--layers", "2,3", "--for", "transformers")
    assert result.returncode == 0, result.stderr
    assert trimmed_config(tmp_path / "out")["quantization_config"]["ignore"] == [
        "language_model.model.layers.0.mlp.down_proj",
        "model.language_model.layers.1.mlp.up_proj",
        "lm_head",
    ]


def test_scales_of_a_depth_sliced_global_are_cut_along(tiny_model, tmp_path):
    name = "model.per_layer_model_projection.weight"
    source = copied(tiny_model("gemma3n_text"), tmp_path / "source")
    rows = next(load_file(path)[name] for path in source.glob("*.safetensors") if name in load_file(path)).shape[0]
    scale = torch.arange(float(rows)).reshape(rows, 1)
    with_tensors(source, **{f"{name}_scale": scale})
    arguments = ["trim", source, tmp_path / "out", "--layers", "1,2,3,4,5"]
    assert support.run_surgery(*arguments).returncode == 0
    for path in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            if f"{name}_scale" in file.keys():  # noqa: SIM118
                assert torch.equal(file.get_tensor(f"{name}_scale"), scale[rows // 6 :])
                return
    raise AssertionError("no scale")


def test_a_layer_that_nothing_counts_is_no_mtp_stage(tiny_model, tmp_path):
    source = copied(tiny_model("deepseek_v3"), tmp_path / "source", num_hidden_layers=5)
    result = support.run_surgery("trim", source, tmp_path / "out", "--layers", "0,3")
    assert result.returncode == 2
    assert "holds what any layer holds and nothing of an MTP stage" in result.stderr


def test_cover_adds_a_layer_where_one_of_each_kind_cannot_be_said():
    """Llama 4's step of two: dense, MoE, dense, MoE; the fourth layer has no rotary positions."""
    config = {
        "model_type": "llama4_text",
        "num_hidden_layers": 8,
        "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 4,
        "moe_layers": [1, 3, 5, 7],
    }
    family = find_family(config)
    assert cover(family, config, 8, READERS) == [0, 1, 2, 3]


def test_entries_of_a_dropped_mtp_stage_leave_the_module_lists(tiny_model, tmp_path):
    section = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "mtp.fc", "mtp.layers.0.mlp.gate"]}
    source = copied(
        tiny_model("qwen3_next"), tmp_path / "source", quantization_config=section, num_nextn_predict_layers=1
    )
    with_tensors(source, **{"mtp.layers.0.mlp.gate.weight": torch.rand(4, 8), "mtp.fc.weight": torch.rand(4, 4)})
    result = support.run_surgery("trim", source, tmp_path / "out", "--layers", "0,2", "--mtp", "drop")
    assert result.returncode == 0, result.stderr
    assert trimmed_config(tmp_path / "out")["quantization_config"]["modules_to_not_convert"] == ["lm_head"]


def test_a_count_at_the_top_of_a_wrapper_follows(tmp_path):
    source = model_zoo.build("gemma3", tmp_path / "source")
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 6}))
    arguments = ["trim", source, tmp_path / "out", "--layers", "2,3", "--for", "transformers"]
    assert support.run_surgery(*arguments).returncode == 0
    config = trimmed_config(tmp_path / "out")
    assert (config["num_hidden_layers"], config["text_config"]["num_hidden_layers"]) == (2, 2)


def test_mtp_drop_sets_the_count_to_zero_where_no_tensor_is_there(tiny_model, tmp_path):
    source = copied(tiny_model("deepseek_v3"), tmp_path / "source", num_nextn_predict_layers=1)
    result = support.run_surgery("trim", source, tmp_path / "out", "--layers", "0,3", "--mtp", "drop")
    assert result.returncode == 0, result.stderr
    assert trimmed_config(tmp_path / "out")["num_nextn_predict_layers"] == 0
    assert support.run_surgery("verify", tmp_path / "out").returncode == 0


@pytest.mark.parametrize(
    ("targets", "layers", "new"),
    [([3, 4, 5], "0,2", None), ([0, 2, 5], "0,1,2,3", [0, 2, 3]), ([3, 4, 5], "0,1,2,4", [2, 3, 3])],
)
def test_retarget_keeps_targets_that_are_kept_and_names_no_layer_twice(tiny_model, tmp_path, targets, layers, new):
    source = copied(tiny_model("deepseek_v4"), tmp_path / "source", dspark_target_layer_ids=targets)
    result = support.run_surgery("trim", source, tmp_path / "out", "--layers", layers, "--retarget", "last")
    if new is None:
        assert result.returncode == 2
        assert "two ids would be one layer" in result.stderr
        return
    assert result.returncode == 0, result.stderr
    found = trimmed_config(tmp_path / "out")["dspark_target_layer_ids"]
    assert len(set(found)) == len(found)
    assert all(0 <= layer < 4 for layer in found)


def test_one_expert_is_no_mixture_for_jamba():
    config = {"model_type": "jamba", "num_hidden_layers": 4, "num_experts": 1, "attn_layer_period": 2}
    facts = find_family(config).all_facts(config, 4, "transformers")
    assert {fact["mlp"] for fact in facts} == {"dense"}


def test_a_renaming_that_renumbers_layers_is_trims_work(tiny_model, tmp_path):
    swap = ["--map", "model.layers.0=model.layers.1", "--map", "model.layers.1=model.layers.0"]
    result = support.run_surgery("rename", tiny_model("gemma2"), tmp_path / "out", *swap)
    assert result.returncode == 2
    assert "surgery trim" in result.stderr


def test_files_that_describe_the_layers_a_second_time_are_carried_or_left_behind(tiny_model, tmp_path):
    source = copied(tiny_model("llama"), tmp_path / "source")
    (source / "params.json").write_text('{"dim": 32, "n_layers": 6}')
    (source / "adapter_config.json").write_text('{"layers_to_transform": [5]}')
    (source / "recipe.yaml").write_text("ignore: [model.layers.5.mlp.up_proj]\n")
    schemes = {"model_quant_type": "W8A8", "model.layers.0.a.weight": "FLOAT", "model.layers.5.a.weight": "W8A8"}
    (source / "quant_model_description.json").write_text(json.dumps(schemes))
    result = support.run_surgery("trim", source, tmp_path / "out", "--layers", "5,1")
    assert result.returncode == 0, result.stderr
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert not names & {"params.json", "adapter_config.json", "recipe.yaml"}
    carried = json.loads((tmp_path / "out" / "quant_model_description.json").read_text())
    assert carried == {"model_quant_type": "W8A8", "model.layers.0.a.weight": "W8A8"}
    assert support.run_surgery("verify", tmp_path / "out", "--against", source).returncode == 0


def test_whispers_alignment_heads_follow_the_decoder(tmp_path):
    source = model_zoo.build("whisper", tmp_path / "source")
    (source / "generation_config.json").write_text(json.dumps({"alignment_heads": [[1, 0], [3, 2], [5, 1]]}))
    result = support.run_surgery("trim", source, tmp_path / "out", "--layers", "3,0,5")
    assert result.returncode == 0, result.stderr
    heads = json.loads((tmp_path / "out" / "generation_config.json").read_text())["alignment_heads"]
    assert heads == [[0, 2], [2, 1]]
    assert support.run_surgery("verify", tmp_path / "out", "--against", source).returncode == 0


def test_an_empty_layer_list_says_so(tiny_model, tmp_path):
    result = support.run_surgery("trim", tiny_model("llama"), tmp_path / "out", "--layers", "")
    assert result.returncode == 2
    assert "--layers is empty" in result.stderr


V41 = {
    "model_type": "deepseek_v41",
    "text_config": {
        "num_hidden_layers": 40,
        "compress_ratios": [0, 0] + [4, 128] * 19 + [0, 0, 0],
        "num_hash_layers": 3,
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "candidate_source_layer_id": 20,
        "engram_layer_ids": [1, 14],
        "engram_num_embeddings": [1000, 2000],
        "dspark_target_layer_ids": [37, 38, 39],
    },
}


def test_v41_owners_tables_and_ids_follow_the_layers():
    """facts/trimming.md 1.4: owners of caches and indices, tables paired with the list of layers that have them."""
    family = find_family(V41)
    kept = [0, 1, 2, 3, 4, 14, 20, 22]
    changes = {change.field: change.new for change in carry(family, V41, LayerMap(kept, 40, [0, 1, 2]), READERS)}
    assert changes["kv_source_layer_ids"] == [2, 5, 6]
    assert changes["index_source_layer_ids"] == [2, 5, 6]
    assert changes["engram_layer_ids"] == [1, 5]
    assert "engram_num_embeddings" not in changes
    assert changes["compress_ratios"] == [0, 0, 4, 128, 4, 4, 4, 4, 0, 0, 0]


@pytest.mark.parametrize(
    ("kept", "says"),
    [
        ([0, 14], "no config says this order of engram"),
        ([0, 1, 9], "takes its kv from layer 8"),
    ],
)
def test_v41_without_an_earlier_table_or_an_owner_is_refused(kept, says):
    with pytest.raises(CannotApply, match=says):
        carry(find_family(V41), V41, LayerMap(kept, 40), READERS)


PLE = {
    "ple_layer_ids": [2, 5],
    "ple_embed_dim": 32,
    "ngram_vocab_size_base": 64,
    "heads_per_ngram": 2,
    "ngram_size": 3,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 2,
    "ple_conv_kernel_size": 2,
}


def test_memory_tables_are_kept_in_their_order_shown_and_dropped_only_when_asked(tmp_path):
    source = model_zoo.build("qwen4_exp_text", tmp_path / "source", **PLE)
    assert "memory tables" in support.run_surgery("inspect", source).stdout
    second = support.run_surgery("trim", source, tmp_path / "no", "--layers", "3,4")
    assert second.returncode == 2
    assert "ngram table" in second.stderr
    assert support.run_surgery("trim", source, tmp_path / "kept", "--layers", "1,3,4").returncode == 0
    wanted = model_zoo.logits(model_zoo.cut_in_memory(source, "qwen4_exp_text", [1, 3, 4]))
    assert torch.equal(model_zoo.logits(model_zoo.load_strict(tmp_path / "kept", "qwen4_exp_text")), wanted)
    dropped = support.run_surgery("trim", source, tmp_path / "dropped", "--layers", "3,4", "--tables", "drop")
    assert dropped.returncode == 0, dropped.stderr
    assert trimmed_config(tmp_path / "dropped")["ple_layer_ids"] == []
    model_zoo.load_strict(tmp_path / "dropped", "qwen4_exp_text")
    assert "is lost" in (tmp_path / "dropped" / "surgery.json").read_text()
    assert support.run_surgery("verify", tmp_path / "dropped", "--against", source).returncode == 0


def test_a_trim_for_so_many_ranks_says_what_one_holds_or_is_refused(tiny_model, tmp_path):
    source = tiny_model("deepseek_v3")
    arguments = ["trim", source, tmp_path / "out", "--layers", "0,3"]
    refused = support.run_surgery(*arguments, "--for-tp", "3")
    assert refused.returncode == 2
    assert "num_attention_heads is 4, not divisible by 3" in refused.stderr
    assert support.run_surgery(*arguments, "--for-tp", "2", "--for-ep", "2").returncode == 0
    assert "expert parallel 2: about" in (tmp_path / "out" / "surgery.json").read_text()
