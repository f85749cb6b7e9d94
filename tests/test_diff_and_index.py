"""`surgery diff` says what differs in the model, not in its storage; `surgery index` what headers deserve."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from support import run_surgery
from surgery.checkpoint import Checkpoint
from surgery.comparison import ConfigDifference as Change
from surgery.comparison import _values as config_differences
from surgery.comparison import common_pairs, compare

Arrays = dict[str, np.ndarray]

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "rope_scaling": {"type": "yarn", "factor": 4.0},
    "architectures": ["LlamaForCausalLM"],
}


def arrays() -> Arrays:
    generator = np.random.default_rng(0)
    names = ["model.embed_tokens.weight", "model.layers.0.q.weight", "model.layers.1.q.weight", "lm_head.weight"]
    return {name: generator.standard_normal((4, 6)).astype(np.float32) for name in names}


def write(
    directory: Path,
    tensors: Arrays,
    shards: int = 1,
    config: dict[str, Any] | None = CONFIG,
    metadata: dict[str, str] | None = None,
) -> Path:
    """Tensors dealt out to `shards` files, an index where there are several, a config and a tokenizer."""
    directory.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        name = "model.safetensors" if shards == 1 else f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        held = dict(list(tensors.items())[shard::shards])
        save_file(held, directory / name, metadata=metadata or {"format": "pt"})
        weight_map.update(dict.fromkeys(held, name))
    if shards > 1:
        index = {"metadata": {"total_size": sum(a.nbytes for a in tensors.values())}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (directory / "model.safetensors.index.json").write_text(text)
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    return directory


def difference(a: Path, b: Path, *options: str, code: int) -> str:
    result = run_surgery("diff", a, b, *options)
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "a", arrays())


# ------------------------------------------------------------------------------------------------ diff


def test_a_copy_in_other_shards_with_other_key_order_is_the_same_model(model: Path, tmp_path: Path) -> None:
    reordered = write(tmp_path / "b", arrays(), shards=3, config=dict(reversed(CONFIG.items())))
    (reordered / "README.md").write_text("another card")
    text = difference(model, reordered, code=0)
    assert text == (
        f"A: {model}: 4 tensors, 384 B in 1 file\n"
        f"B: {reordered}: 4 tensors, 384 B in 3 files\n"
        "documents differ, which does not count: 1 file\n"
        "  + README.md\n"
        "layout: the tensors lie in other files or places; that is storage, no difference of the model\n"
        "same: 4 tensors equal in both, 384 B compared\n"
    )


def test_every_kind_of_difference_is_named(model: Path, tmp_path: Path) -> None:
    changed = arrays()
    del changed["lm_head.weight"]
    changed["extra"] = np.zeros(2, np.int8)
    changed["model.embed_tokens.weight"] = changed["model.embed_tokens.weight"].astype(np.float16)
    changed["model.layers.0.q.weight"] = changed["model.layers.0.q.weight"].reshape(6, 4)
    changed["model.layers.1.q.weight"][3, 5] += 1
    config = {**CONFIG, "num_hidden_layers": 3, "added": [1, 2], "rope_scaling": {"factor": 4.0, "type": "linear"}}
    del config["architectures"]
    other = write(tmp_path / "b", changed, config=config, metadata={"format": "pt", "by": "me"})
    (other / "tokenizer.json").write_text('{"version": "2.0"}')
    assert difference(model, other, code=1) == (
        f"A: {model}: 4 tensors, 384 B in 1 file\n"
        f"B: {other}: 4 tensors, 242 B in 1 file\n"
        "only in A: 1 tensor, 96 B\n"
        "  lm_head.weight  F32 [4, 6], 96 B\n"
        "only in B: 1 tensor, 2 B\n"
        "  extra  I8 [2], 2 B\n"
        "dtype differs: 1 tensor\n"
        "  model.embed_tokens.weight  F32 -> F16\n"
        "shape differs: 1 tensor\n"
        "  model.layers.0.q.weight  [4, 6] -> [6, 4]\n"
        "bytes differ: 1 tensor\n"
        "  model.layers.1.q.weight  96 B\n"
        "config differs: 4 values\n"
        "  ~ num_hidden_layers: 2 -> 3\n"
        '  ~ rope_scaling.type: "yarn" -> "linear"\n'
        '  - architectures: ["LlamaForCausalLM"]\n'
        "  + added: [1, 2]\n"
        "metadata of the headers differs: 1 key\n"
        '  by: [null] -> ["me"]\n'
        "side files differ: 1 file\n"
        "  ~ tokenizer.json\n"
        "layout: the tensors lie in other files or places; that is storage, no difference of the model\n"
        "different: 0 tensors equal in both, 96 B compared\n"
    )


def test_json_is_one_document_with_every_difference(model: Path, tmp_path: Path) -> None:
    changed = arrays() | {f"extra.{n}": np.zeros(1, np.int8) for n in range(30)}
    other = write(tmp_path / "b", changed)
    result = run_surgery("diff", model, other, "--json")
    assert result.returncode == 1
    document = json.loads(result.stdout)
    assert document["same"] is False
    assert len(document["only_in_b"]) == 30
    assert document["only_in_b"][0] == {"name": "extra.0", "dtype": "I8", "shape": [1], "nbytes": 1}
    text = difference(model, other, code=1)
    assert text.count("  extra.") == 20
    assert "  and 10 more\n" in text


def test_equal_not_a_number_payloads_are_equal_bytes(tmp_path: Path) -> None:
    words = np.array([0x7F81, 0xFF81, 0x7FC1, 0x8000], np.uint16).view(np.float16)
    a, b = (write(tmp_path / side, {"w": words}) for side in "ab")
    assert "same: 1 tensor" in difference(a, b, code=0)
    other = np.array([0x7F81, 0xFF81, 0x7FC2, 0x8000], np.uint16).view(np.float16)
    assert "bytes differ" in difference(a, write(tmp_path / "c", {"w": other}), code=1)


def test_bytes_are_not_looked_at_when_not_asked_for(model: Path, tmp_path: Path) -> None:
    changed = {name: array + 1 for name, array in arrays().items()}
    other = write(tmp_path / "b", changed)
    assert "bytes not compared" in difference(model, other, "--no-bytes", code=0)
    assert "bytes differ: 4 tensors" in difference(model, other, code=1)


@pytest.mark.parametrize("position", [0, 47, 48, 95])
def test_one_flipped_bit_names_its_tensor_alone(position: int, tmp_path: Path) -> None:
    """Neighbours are compared in one go; the one that differs is found among them."""
    tensors = {f"t{n}": np.full(24, n, np.uint8) for n in range(4)}
    a, b = (write(tmp_path / side, tensors) for side in "ab")
    checkpoint = Checkpoint.open(b)
    start = min(tensor.offset for tensor in checkpoint.tensors.values())
    with (b / "model.safetensors").open("r+b") as file:
        file.seek(start + position)
        byte = file.read(1)[0]
        file.seek(start + position)
        file.write(bytes([byte ^ 0x10]))
    comparison = compare(Checkpoint.open(a), checkpoint)
    assert [found.name for found in comparison.bytes] == [f"t{position // 24}"]
    assert comparison.equal_tensors == 3


def test_progress_counts_every_compared_byte_once(tmp_path: Path) -> None:
    tensors = {f"t{n}": np.full((n + 1, 5), n, np.uint8) for n in range(9)}
    a, b = write(tmp_path / "a", tensors), write(tmp_path / "b", tensors, shards=4)
    told: list[int] = []
    sides = Checkpoint.open(a), Checkpoint.open(b)
    comparison = compare(*sides, advance=told.append)
    assert sum(told) == comparison.nbytes_compared == sum(first.nbytes for first, _ in common_pairs(*sides))


def test_a_model_without_config_differs_from_one_with_it(model: Path, tmp_path: Path) -> None:
    bare = write(tmp_path / "b", arrays(), config=None)
    assert "  - config.json\n" in difference(model, bare, code=1)


def test_a_side_that_is_no_checkpoint_is_exit_3(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert run_surgery("diff", model, tmp_path / "empty").returncode == 3


@pytest.mark.parametrize(
    ("a", "b", "changes"),
    [
        ({"x": 1}, {"x": True}, [Change("x", "changed", 1, True)]),
        ({"x": 1}, {"x": 1.0}, [Change("x", "changed", 1, 1.0)]),
        ({"x": None}, {}, [Change("x", "removed", None)]),
        ({"x": float("nan")}, {"x": float("nan")}, []),
        ({"x": [1, {"y": 2}]}, {"x": [1, {"y": 3}]}, [Change("x[1].y", "changed", 2, 3)]),
        ({"x": [1]}, {"x": [1, 2]}, [Change("x", "changed", [1], [1, 2])]),
        ({"a.b": {"c": 1}}, {"a.b": {"c": 2}}, [Change('["a.b"].c', "changed", 1, 2)]),
    ],
)
def test_config_values_are_compared_as_json(a: Any, b: Any, changes: list[Change]) -> None:
    assert list(config_differences("", a, b)) == changes


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_a_config_never_differs_from_its_own_reordering(value: Any) -> None:
    def reordered(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: reordered(entry) for key, entry in reversed(value.items())}
        return [reordered(entry) for entry in value] if isinstance(value, list) else value

    assert list(config_differences("", value, reordered(value))) == []


# ------------------------------------------------------------------------------------------------ index


def index_of(directory: Path) -> tuple[str, str]:
    result = run_surgery("index", directory)
    assert result.returncode == 0, result.stderr
    return result.stdout, result.stderr


def refused(directory: Path) -> str:
    result = run_surgery("index", directory)
    assert (result.returncode, result.stdout) == (3, ""), result.stdout
    return result.stderr


def test_the_index_is_what_transformers_wrote(tiny_model: Callable[..., Path]) -> None:
    directory = tiny_model("qwen3_moe")
    published = json.loads((directory / "model.safetensors.index.json").read_text())
    text, remarks = index_of(directory)
    assert remarks == ""
    assert json.loads(text)["weight_map"] == published["weight_map"]
    assert json.loads(text)["metadata"] == {"total_size": published["metadata"]["total_size"]}


def test_the_index_is_byte_for_byte_the_usual_text(tmp_path: Path) -> None:
    directory = write(tmp_path / "m", arrays() | {"é\n": np.zeros(1, np.int8)}, shards=2)
    assert index_of(directory)[0] == (directory / "model.safetensors.index.json").read_text()


@pytest.mark.parametrize("present", ["", "{", '{"weight_map": {"gone": "model-00009-of-00009.safetensors"}}', None])
def test_the_index_that_is_there_does_not_matter(present: str | None, tmp_path: Path) -> None:
    directory = write(tmp_path / "m", arrays(), shards=2)
    path = directory / "model.safetensors.index.json"
    expected = path.read_text()
    path.unlink()
    if present is not None:
        path.write_text(present)
    assert index_of(directory)[0] == expected


def test_a_rebuilt_index_makes_a_directory_a_checkpoint_again(model: Path, tmp_path: Path) -> None:
    directory = write(tmp_path / "b", arrays(), shards=3)
    path = directory / "model.safetensors.index.json"
    path.write_text('{"weight_map": {"w": "model-00001-of-00004.safetensors"}}')
    assert run_surgery("diff", model, directory).returncode == 3
    path.write_text(index_of(directory)[0])
    difference(model, directory, code=0)


def test_one_file_named_or_alone_in_its_directory_has_an_index(model: Path) -> None:
    text, _ = index_of(model)
    assert set(json.loads(text)["weight_map"].values()) == {"model.safetensors"}
    assert index_of(model / "model.safetensors")[0] == text


def test_other_formats_beside_the_model_are_left_out_and_told(tmp_path: Path) -> None:
    directory = write(tmp_path / "m", arrays(), shards=2)
    expected = (directory / "model.safetensors.index.json").read_text()
    for name in ("consolidated.safetensors", "adapter_model.safetensors", "other.safetensors"):
        save_file({f"in.{name}": np.zeros(1, np.int8)}, directory / name)
    shutil.copy(directory / "model-00001-of-00002.safetensors", directory / "model.fp16.safetensors")
    text, remarks = index_of(directory)
    assert text == expected
    assert remarks.splitlines() == [
        "left out adapter_model.safetensors: an adapter",
        "left out consolidated.safetensors: the publisher's own format beside the Hugging Face one",
        "left out model.fp16.safetensors: it holds model.embed_tokens.weight again, "
        "which model-00001-of-00002.safetensors has",
        "left out other.safetensors: not of the set 'model', and not its MTP stage",
    ]


@pytest.mark.parametrize("name", ["mtp.layers.0.fc.weight", "model.layers.2.eh_proj.weight"])
def test_an_mtp_stage_in_a_file_of_its_own_is_taken(name: str, tmp_path: Path) -> None:
    directory = write(tmp_path / "m", arrays(), shards=2)
    save_file({name: np.zeros(3, np.int8)}, directory / "mtp.safetensors")
    text, remarks = index_of(directory)
    assert json.loads(text)["weight_map"][name] == "mtp.safetensors"
    assert json.loads(text)["metadata"]["total_size"] == 384 + 3
    assert remarks == "took mtp.safetensors too: it holds the model's MTP stage\n"


def test_files_without_a_model_set_are_all_taken(tmp_path: Path) -> None:
    directory = tmp_path / "m"
    directory.mkdir()
    for layer in range(3):
        save_file({f"model.layers.{layer}.w": np.zeros(1, np.int8)}, directory / f"layer-{layer}.safetensors")
    assert len(json.loads(index_of(directory)[0])["weight_map"]) == 3


def test_a_tensor_in_two_files_is_refused_naming_both(tmp_path: Path) -> None:
    directory = write(tmp_path / "m", arrays(), shards=2)
    save_file({"lm_head.weight": np.zeros(1, np.int8)}, directory / "model-00002-of-00010.safetensors")
    text = refused(directory)
    assert "error: lm_head.weight is in model-00002-of-00002.safetensors and in model-00002-of-00010" in text


def test_missing_shards_are_refused_by_name(tmp_path: Path) -> None:
    directory = write(tmp_path / "m", arrays(), shards=3)
    (directory / "model-00002-of-00003.safetensors").unlink()
    assert "error: 1 of 3 shards are missing: model-00002-of-00003.safetensors" in refused(directory)


def test_shards_that_count_from_zero_are_whole(tmp_path: Path) -> None:
    directory = tmp_path / "m"
    directory.mkdir()
    for shard in range(2):
        save_file({f"w{shard}": np.zeros(1, np.int8)}, directory / f"model-{shard:05d}-of-00002.safetensors")
    assert len(json.loads(index_of(directory)[0])["weight_map"]) == 2


def test_rank_partitions_and_empty_directories_have_no_index(tmp_path: Path) -> None:
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    for rank in range(2):
        save_file({"w": np.zeros(1, np.int8)}, ranks / f"model{rank}-mp2.safetensors")
    assert "2 files are tensor-parallel rank partitions" in refused(ranks)
    (tmp_path / "empty").mkdir()
    assert "no safetensors file is there" in refused(tmp_path / "empty")
    only = tmp_path / "only"
    only.mkdir()
    save_file({"w": np.zeros(1, np.int8)}, only / "consolidated.safetensors")
    assert "only consolidated.safetensors" in refused(only)


def test_a_damaged_header_is_refused_with_its_file(tmp_path: Path) -> None:
    directory = write(tmp_path / "m", arrays(), shards=2)
    os.truncate(directory / "model-00002-of-00002.safetensors", 300)
    text = refused(directory)
    assert "cut short" in text
    assert "where: model-00002-of-00002.safetensors" in text


def test_a_link_out_of_the_directory_is_followed_only_when_asked(model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "linked"
    directory.mkdir()
    (directory / "model.safetensors").symlink_to(model / "model.safetensors")
    assert "outside the checkpoint" in refused(directory)
    result = run_surgery("index", directory, "--allow-outside-links")
    assert result.stdout == index_of(model)[0]
