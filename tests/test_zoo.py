"""Every record against transformers' own class: trimmed, loaded clean, same logits, same layers in the skeleton."""

from __future__ import annotations

import re
from pathlib import Path

import model_zoo
import proving
import pytest

import tiny_models
from surgery.families.records import find_family, known_types

TABLE = Path(__file__).with_name("proven_families.md")


def proven() -> dict[str, int]:
    """The types that the table calls proven, each with its number of kinds of layers."""
    rows = re.findall(r"^\| `([^`]+)` \| ([0-9]+) \|.*\| proven", TABLE.read_text(), re.MULTILINE)
    return {kind: int(count) for kind, count in rows}


def telling() -> list[str]:
    """Types with layers of several kinds, towers, or two stacks: what a wrong rule would break. The rest is slow."""
    return [
        kind
        for kind, count in proven().items()
        if count > 1 or kind in model_zoo.WRAPPED or "decoder" in find_family({"model_type": kind}).stack.name
    ]


@pytest.mark.parametrize("kind", telling())
def test_a_trim_of_the_type_computes_what_the_cut_model_does(kind, tmp_path):
    assert len(proving.prove(kind, tmp_path)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("kind", proven())
def test_random_trims_of_the_type_compute_what_the_cut_model_does(kind, seed, tmp_path):
    assert proving.prove(kind, tmp_path, seed=seed, selections=3)


def test_the_table_names_every_record_and_wrapper():
    named = {line.split("`")[1] for line in TABLE.read_text().splitlines() if line.startswith("| `")}
    assert named == set(known_types())
    assert len(proven()) >= 60
    assert len(telling()) >= 60


@pytest.mark.parametrize("kind", proving.BOUND)
def test_layers_that_compute_with_their_number_are_refused_elsewhere(kind, tmp_path):
    import support

    source = model_zoo.build(kind, tmp_path / "source")
    result = support.run_surgery("trim", source, tmp_path / "out", "--layers", "4,5", "--for", "transformers")
    assert result.returncode == 2
    assert "layers would change their kind" in result.stderr
    assert not (tmp_path / "out").exists()


def test_an_encoder_is_cut_by_name_and_the_decoder_keeps_its_own_count(tmp_path):
    """T5: one count stands for both stacks until one of them changes; the relative bias moves to the first block."""
    import json

    import support

    source = model_zoo.build("t5", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    del config["num_decoder_layers"]
    (source / "config.json").write_text(json.dumps(config))
    result = support.run_surgery("trim", source, tmp_path / "out", "--layers", "encoder=2,4")
    assert result.returncode == 0, result.stderr
    new = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (new["num_layers"], new["num_decoder_layers"]) == (2, 6)
    model = model_zoo.load_strict(tmp_path / "out", "t5")
    assert (len(model.encoder.block), len(model.decoder.block)) == (2, 6)
    assert support.run_surgery("verify", tmp_path / "out", "--against", source).returncode == 0
    both = support.run_surgery("trim", source, tmp_path / "both", "--layers", "1,3", "--layers", "encoder=5,0")
    assert both.returncode == 0, both.stderr
    model = model_zoo.load_strict(tmp_path / "both", "t5")
    assert (len(model.encoder.block), len(model.decoder.block)) == (2, 2)


def test_a_tower_is_cut_only_when_it_is_named_and_its_references_follow(tmp_path):
    import json

    import support

    source = model_zoo.build("llava", tmp_path / "source")
    named = ["--layers", "1,3", "--layers", "vision=0,2,3"]
    result = support.run_surgery("trim", source, tmp_path / "out", *named)
    assert result.returncode == 0, result.stderr
    new = json.loads((tmp_path / "out" / "config.json").read_text())
    assert new["text_config"]["num_hidden_layers"] == 2
    assert new["vision_config"]["num_hidden_layers"] == 3
    assert new["vision_feature_layer"] == -2  # What comes out of source layer 2 of 0 to 3.
    model_zoo.load_strict(tmp_path / "out", "llava")
    gone = support.run_surgery("trim", source, tmp_path / "gone", "--layers", "vision=0,1")
    assert gone.returncode == 2
    assert "vision_feature_layer" in gone.stderr
    unknown = support.run_surgery("trim", source, tmp_path / "gone", "--layers", "audio=0,1")
    assert unknown.returncode == 2
    assert "it has text, vision" in unknown.stderr


def test_vision_inputs_stay_at_the_layers_they_enter(tmp_path):
    """Qwen3-VL: each deepstack feature enters the text layer of its number."""
    import support

    source = model_zoo.build("qwen3_vl", tmp_path / "source")
    assert support.run_surgery("trim", source, tmp_path / "no", "--layers", "1,3").returncode == 2
    assert support.run_surgery("trim", source, tmp_path / "yes", "--layers", "0,3").returncode == 0


def test_the_zoo_and_the_single_models_agree_on_the_vocabulary():
    assert model_zoo.config_of("llama").vocab_size == tiny_models.VOCABULARY_SIZE
