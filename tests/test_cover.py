"""Cover: the fewest layers that keep every kind, and the table that says so."""

from __future__ import annotations

import json

import pytest

import support
import tiny_models
from surgery.errors import CannotApply
from surgery.families.carrying import closure
from surgery.families.cover import cover, cover_table, kinds
from surgery.families.records import find_family
from surgery.families.schema import READERS

_GLM = {"first_k_dense_replace": 3, "index_topk_freq": 4, "index_skip_topk_offset": 3, "index_topk": 2048}

# Raw config fields by type, and how many layers the smallest selection has.
CONFIGS = {
    "deepseek_v3": ({"num_hidden_layers": 61, "first_k_dense_replace": 3}, 2),
    "glm_moe_dsa": ({"num_hidden_layers": 78, **_GLM}, 3),
    "gpt_oss": ({"num_hidden_layers": 36}, 2),
    "gemma3_text": ({"num_hidden_layers": 26}, 2),
    "qwen3_next": ({"num_hidden_layers": 48, "num_experts": 8}, 2),
    "llama": ({"num_hidden_layers": 32}, 1),
    "nemotron_h": ({"hybrid_override_pattern": "M-M*MEM-M*ME"}, 4),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_selection_has_every_kind_once_with_its_producers(kind):
    fields, count = CONFIGS[kind]
    config = {"model_type": kind, **fields}
    family = find_family(config)
    depth = family.depth(config)
    chosen = cover(family, config, depth, READERS)
    groups = kinds(family, config, depth, READERS)
    assert all(set(chosen) & set(layers) for layers in groups.values())
    assert chosen == closure(family, config, chosen, depth, READERS)
    assert len(chosen) == count, chosen


def test_needs_narrow_the_choice_and_unknown_ones_are_named():
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "first_k_dense_replace": 3}
    family = find_family(config)
    assert cover(family, config, 61, READERS, ["moe"]) == [3]
    with pytest.raises(CannotApply, match="no layer is of a kind named 'mamba'"):
        cover(family, config, 61, READERS, ["mamba"])


def test_the_table_says_what_depends_on_what_and_what_is_lost():
    config = {"model_type": "glm_moe_dsa", "num_hidden_layers": 12, **_GLM}
    family = find_family(config)
    rows = {row.kind: row for row in cover_table(family, config, 12, READERS, [0, 6, 7], stages=1, kept=0)}
    shared = next(row for kind, row in rows.items() if "sparse" in kind and "shared" in kind)
    assert (shared.layers, shared.depends_on) == ([7], [6])
    assert "2048" in shared.request
    assert "speculative" in rows["MTP head"].lost


@pytest.mark.parametrize("family", ["glm_moe_dsa", "gemma3n_text", "qwen3_next", "nemotron_h", "llama"])
def test_the_command_and_the_option_choose_alike_and_the_result_loads(tiny_model, tmp_path, family):
    source = tiny_model(family)
    told = support.run_surgery("cover", source)
    assert told.returncode == 0, told.stderr
    assert "request:" in told.stderr
    for out, choice in (("a", ["--layers", told.stdout.strip()]), ("b", ["--cover"])):
        result = support.run_surgery("trim", source, tmp_path / out, *choice)
        assert result.returncode == 0, result.stderr
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
    manifest = json.loads((tmp_path / "b" / "surgery.json").read_text())
    assert manifest["recipe"][0]["layers"] == told.stdout.strip()
    assert all(row["kind"] for row in manifest["cover"])
    tiny_models.load_strict(tmp_path / "b")


def test_layers_and_cover_together_or_neither_are_usage_errors(tiny_model, tmp_path):
    for arguments in (["--layers", "0", "--cover"], []):
        result = support.run_surgery("trim", tiny_model("llama"), tmp_path / "out", *arguments)
        assert result.returncode == 2
        assert "cover" in result.stderr


def test_one_json_document_holds_selection_and_table(tiny_model):
    document = json.loads(support.run_surgery("cover", tiny_model("gpt_oss"), "--json").stdout)
    assert document["layers"] == [0, 1]
    assert {"kind", "layers", "depends_on", "request", "lost"} <= set(document["targets"][0])
