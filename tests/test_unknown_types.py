"""Model types without a record: tensors or the class's skeleton bear witness, a record is named, or it is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import model_zoo
import pytest

import support
import tiny_models
from surgery.errors import CannotApply


def unknown(source: Path, directory: Path, model_type: str = "no_such_type", **fields) -> Path:
    """A copy whose model type nobody knows; a field of None is taken out."""
    shutil.copytree(source, directory)
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), "model_type": model_type, **fields}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}, indent=2))
    return directory


def decisions(out: Path) -> str:
    return json.dumps(json.loads((out / "surgery.json").read_text())["decisions"])


def test_layers_that_hold_the_same_tensors_bear_witness_where_no_field_says_otherwise(tiny_model, tmp_path):
    import torch

    source = unknown(tiny_model("llama"), tmp_path / "source")
    result = support.run_surgery("trim", source, tmp_path / "out", "--layers", "4,1")
    assert result.returncode == 0, result.stderr
    assert "the tensors of its layers bear witness" in decisions(tmp_path / "out")
    config = tmp_path / "out" / "config.json"
    config.write_text(config.read_text().replace("no_such_type", "llama"))
    wanted = tiny_models.logits(tiny_models.cut_in_memory(tiny_model("llama"), [4, 1]))
    assert torch.equal(tiny_models.logits(tiny_models.load_strict(tmp_path / "out")), wanted)


@pytest.mark.parametrize(
    ("family", "field"),
    [("gemma2", "layer_types"), ("deepseek_v3", "first_k_dense_replace"), ("jamba", "attn_layer_period")],
)
def test_a_field_that_may_say_what_layers_are_needs_a_witness(tiny_model, tmp_path, family, field):
    source = unknown(tiny_model(family), tmp_path / "source")
    result = support.run_surgery("trim", source, tmp_path / "out", "--layers", "1,3")
    assert result.returncode == 2
    assert field in result.stderr
    assert "--witness skeleton" in result.stderr
    assert "--as TYPE" in result.stderr
    none = support.run_surgery("trim", source, tmp_path / "out", "--layers", "1,3", "--witness", "skeleton")
    assert none.returncode == 2
    assert "has no class for model_type 'no_such_type'" in none.stderr
    assert not (tmp_path / "out").exists()


def test_layers_of_several_kinds_that_no_field_tells_apart_keep_their_places(tiny_model, tmp_path):
    """Code that counts from the layer's number would build another kind there."""
    fields = dict.fromkeys(("first_k_dense_replace", "moe_layer_freq", "mlp_layer_types", "layer_types"))
    source = unknown(tiny_model("deepseek_v3"), tmp_path / "source", **fields)
    refused = support.run_surgery("trim", source, tmp_path / "out", "--layers", "0,3")
    assert refused.returncode == 2
    assert "layer 3 holds other tensors than layer 1" in refused.stderr
    assert support.run_surgery("trim", source, tmp_path / "out", "--layers", "1,0,4").returncode == 0


def test_a_named_record_takes_the_responsibility(tiny_model, tmp_path):
    import torch

    source = unknown(tiny_model("deepseek_v3"), tmp_path / "source")
    result = support.run_surgery("trim", source, tmp_path / "out", "--layers", "1,4", "--as", "deepseek_v3")
    assert result.returncode == 0, result.stderr
    assert "the word of --as" in decisions(tmp_path / "out")
    config = tmp_path / "out" / "config.json"
    assert json.loads(config.read_text())["first_k_dense_replace"] == 1
    config.write_text(config.read_text().replace("no_such_type", "deepseek_v3"))
    wanted = tiny_models.logits(tiny_models.cut_in_memory(tiny_model("deepseek_v3"), [1, 4]))
    assert torch.equal(tiny_models.logits(tiny_models.load_strict(tmp_path / "out")), wanted)
    typo = support.run_surgery("trim", source, tmp_path / "no", "--layers", "1,4", "--as", "deepseek_3")
    assert typo.returncode == 2
    assert "there is no record of the model type 'deepseek_3'" in typo.stderr
    assert "did you mean deepseek_v3" in typo.stderr


@pytest.mark.parametrize("family", ["gemma2", "qwen3_next", "deepseek_v3"])
def test_the_skeleton_bears_witness_for_a_type_without_a_record(tmp_path, family, monkeypatch):
    """As if its record were not there: the class's derived lists are written, and every layer is compared."""
    import torch

    from surgery.execute import execute
    from surgery.families import records
    from surgery.operations.trim import Trim
    from surgery.plan import make_plan

    monkeypatch.delitem(records._BY_TYPE, family)
    source = model_zoo.build(family, tmp_path / "source")
    path = source / "config.json"
    config = json.loads(path.read_text())
    path.write_text(
        json.dumps({name: config[name] for name in config if name not in ("layer_types", "mlp_layer_types")})
    )
    with pytest.raises(CannotApply, match="has no family record"):
        planned(source, Trim("1,4"))
    if family == "deepseek_v3":
        with pytest.raises(CannotApply, match="the class's layers would change"):
            planned(source, Trim("1,4", witness="skeleton"))
        return
    execute(make_plan(planned(source, Trim("1,4", witness="skeleton"))), tmp_path / "out")
    wanted = model_zoo.logits(model_zoo.cut_in_memory(source, family, [1, 4]))
    assert torch.equal(model_zoo.logits(model_zoo.load_strict(tmp_path / "out", family)), wanted)


def planned(source: Path, trim):
    from surgery.checkpoint import Checkpoint
    from surgery.draft import draft_of
    from surgery.operations.recipe import run_recipe

    return run_recipe(draft_of(Checkpoint.open(str(source))), [trim])


def test_a_witness_may_be_called_for_a_known_type_too(tiny_model, tmp_path):
    source = tiny_model("qwen3_next")
    result = support.run_surgery("trim", source, tmp_path / "out", "--layers", "0,5", "--witness", "skeleton")
    assert result.returncode == 0, result.stderr
    assert "every kept layer is what it was" in decisions(tmp_path / "out")
