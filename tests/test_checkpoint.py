"""One directory: which files are the model, and everything about them that does not agree."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from surgery.checkpoint import Checkpoint
from surgery.errors import Finding, SourceError, UsageError
from surgery.storage import BLOCK_NBYTES, local_path, read_bytes, same_bytes

INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
Tensors = dict[str, np.ndarray[Any, Any]]


def array(start: float, size: int = 4) -> np.ndarray[Any, Any]:
    return np.arange(start, start + size, dtype=np.float32)


def write_index(directory: Path, weight_map: dict[str, Any], name: str = INDEX, **metadata: Any) -> None:
    (directory / name).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))


def write_sharded(directory: Path, shards: dict[str, Tensors] | None = None) -> Path:
    """Three shards of two tensors, an index and a config, all as they should be."""
    directory.mkdir(parents=True, exist_ok=True)
    shards = shards or {
        name: {f"layers.{2 * n}.w": array(8 * n), f"layers.{2 * n + 1}.w": array(8 * n + 4)}
        for n, name in enumerate(SHARDS)
    }
    for name, tensors in shards.items():
        save_file(tensors, directory / name, {"format": "pt"})
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    write_index(directory, weight_map, total_size=sum(a.nbytes for s in shards.values() for a in s.values()))
    (directory / "config.json").write_text('{"model_type": "x", "num_hidden_layers": 6}')
    return directory


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_sharded(tmp_path / "model")


def edit_index(directory: Path, name: str = INDEX, **changes: Any) -> None:
    index = json.loads((directory / name).read_text())
    for tensor, file in changes.items():
        if file is None:
            del index["weight_map"][tensor]
        else:
            index["weight_map"][tensor] = file
    (directory / name).write_text(json.dumps(index))


def refusal(location: Path, **options: Any) -> str:
    """The text of a refusal, which `survey` has among its faults as well."""
    with pytest.raises(SourceError) as caught:
        Checkpoint.open(location, **options)
    assert [f for f in Checkpoint.survey(location, **options).findings if f.severity == "fault"]
    assert caught.value.mend
    return "\n".join(caught.value.lines())


def found(checkpoint: Checkpoint, kind: str) -> list[Finding]:
    return [finding for finding in checkpoint.findings if finding.kind == kind]


def only(checkpoint: Checkpoint, kind: str) -> Finding:
    (finding,) = found(checkpoint, kind)
    return finding


def why(checkpoint: Checkpoint) -> dict[str, str]:
    return {stray.name: stray.why for stray in checkpoint.strays}


def values(checkpoint: Checkpoint, name: str) -> list[float]:
    tensor = checkpoint.tensors[name]
    data = checkpoint.path(tensor.file).read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
    return list(np.frombuffer(data, np.float32))


# Which files are the model


def test_a_good_sharded_checkpoint_is_read_without_a_finding(sharded):
    checkpoint = Checkpoint.open(sharded)
    assert checkpoint.root == sharded
    assert [file.name for file in checkpoint.files] == SHARDS
    assert checkpoint.findings == []
    assert checkpoint.strays == []
    assert checkpoint.side_files == []
    assert (checkpoint.base_name, checkpoint.variant) == ("model", None)
    assert checkpoint.config == {"model_type": "x", "num_hidden_layers": 6}
    assert [values(checkpoint, f"layers.{n}.w")[0] for n in range(6)] == [0, 4, 8, 12, 16, 20]
    places = [(tensor.file, tensor.offset) for tensor in checkpoint.tensors.values()]
    assert places == sorted(places)
    for file in checkpoint.files:
        assert file.metadata == {"format": "pt"}
        assert file.nbytes == (sharded / file.name).stat().st_size
        assert file.data_offset % 8 == 0
        assert len(file.header_digest) == 32


def test_a_sparse_file_is_known_by_its_allocated_bytes(tmp_path):
    header = b'{"w":{"dtype":"U8","shape":[67108864],"data_offsets":[0,67108864]}}'
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + 67108864)
    (file,) = Checkpoint.open(tmp_path).files
    assert file.nbytes > 67108864
    assert file.allocated_nbytes < 1 << 20


def test_a_single_file_is_the_model(tmp_path):
    save_file({"w": array(0)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(str(tmp_path))
    assert [file.name for file in checkpoint.files] == ["model.safetensors"]
    assert only(checkpoint, "no-config").severity == "note"
    assert checkpoint.config is None


@pytest.mark.parametrize(
    ("name", "base_name", "variant"),
    [
        ("weights.safetensors", "weights", None),
        ("model.fp16.safetensors", "model", "fp16"),
        ("model-00001-of-00001.safetensors", "model", None),
    ],
)
def test_the_only_file_that_can_be_the_model_is_taken_whatever_its_name(tmp_path, name, base_name, variant):
    save_file({"w": array(0)}, tmp_path / name)
    save_file({"lora": array(0)}, tmp_path / "adapter_model.safetensors")
    save_file({"wq": array(0)}, tmp_path / "consolidated.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert [file.name for file in checkpoint.files] == [name]
    assert (checkpoint.base_name, checkpoint.variant) == (base_name, variant)


def test_consolidated_and_adapter_files_are_not_part_of_the_model(sharded, tmp_path):
    single = tmp_path / "single"
    single.mkdir()
    save_file({"w": array(0)}, single / "model.safetensors")
    for directory, count in ((sharded, 6), (single, 1)):
        save_file({"layers.0.attention.wq.weight": array(0)}, directory / "consolidated.safetensors")
        save_file({"base_model.model.x": array(0)}, directory / "adapter_model.safetensors")
        checkpoint = Checkpoint.open(directory)
        assert len(checkpoint.tensors) == count
        assert "own format" in why(checkpoint)["consolidated.safetensors"]
        assert "adapter" in why(checkpoint)["adapter_model.safetensors"]


@pytest.mark.parametrize("name", ["consolidated.safetensors", "adapter_model.safetensors"])
def test_consolidated_or_adapter_files_alone_are_no_model_but_can_be_named(tmp_path, name):
    save_file({"w": array(0)}, tmp_path / name)
    assert name in refusal(tmp_path)
    assert list(Checkpoint.open(tmp_path / name).tensors) == ["w"]


def test_an_index_of_consolidated_files_is_not_taken_for_the_models(sharded):
    save_file({"wq": array(0)}, sharded / "consolidated-00001-of-00001.safetensors")
    name = "consolidated.safetensors.index.json"
    write_index(sharded, {"wq": "consolidated-00001-of-00001.safetensors"}, name)
    checkpoint = Checkpoint.open(sharded)
    assert len(checkpoint.tensors) == 6
    assert set(why(checkpoint)) == {name, "consolidated-00001-of-00001.safetensors"}


def test_several_unindexed_shards_are_refused_with_the_command_that_makes_the_index(sharded):
    (sharded / INDEX).unlink()
    text = refusal(sharded)
    assert "3 safetensors files" in text
    assert "surgery index DIR > new.json && mv new.json DIR/model.safetensors.index.json" in text


def test_one_shard_of_several_without_an_index_is_not_taken_for_the_model(sharded):
    for name in (INDEX, *SHARDS[1:]):
        (sharded / name).unlink()
    assert SHARDS[0] in refusal(sharded)


@pytest.mark.parametrize(
    "names",
    [
        ["model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors"],
        ["model0-mp2.safetensors", "model1-mp2.safetensors"],
        ["model-tp00000-of-00002.safetensors", "model-tp00001-of-00002.safetensors"],
        ["shard-00001-model-00001-of-00002.safetensors", "shard-00002-model-00001-of-00002.safetensors"],
    ],
)
def test_rank_partitions_are_not_taken_for_storage_shards(tmp_path, names):
    for name in names:
        save_file({"w": array(0)}, tmp_path / name)
    text = refusal(tmp_path)
    assert "rank partitions" in text
    assert names[0] in text


def test_a_directory_without_safetensors_says_what_weights_it_has(tmp_path):
    assert "no safetensors file" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    assert "pytorch_model.bin" in refusal(tmp_path)


def test_of_several_indexes_the_one_named_model_counts(sharded):
    save_file({"v": array(0)}, sharded / "v.safetensors")
    write_index(sharded, {"v": "v.safetensors"}, "other.safetensors.index.json", total_size=16)
    checkpoint = Checkpoint.open(sharded)
    assert checkpoint.index_name == INDEX
    assert "other.safetensors.index.json" in only(checkpoint, "several-indexes").what


def test_several_indexes_are_refused_by_name_and_one_can_be_chosen(sharded):
    (sharded / INDEX).rename(sharded / "model.fp16.safetensors.index.json")
    save_file({"v": array(0)}, sharded / "v.safetensors")
    write_index(sharded, {"v": "v.safetensors"}, "model.fp32.safetensors.index.json", total_size=16)
    text = refusal(sharded)
    assert "model.fp16.safetensors.index.json" in text
    assert "model.fp32.safetensors.index.json" in text
    assert "SRC" in text
    checkpoint = Checkpoint.open(sharded / "model.fp32.safetensors.index.json")
    assert list(checkpoint.tensors) == ["v"]
    assert (checkpoint.base_name, checkpoint.variant) == ("model", "fp32")
    assert checkpoint.config is not None


def test_a_named_file_alone_is_the_model_with_its_folders_config(sharded):
    checkpoint = Checkpoint.open(sharded / SHARDS[1])
    assert list(checkpoint.tensors) == ["layers.2.w", "layers.3.w"]
    assert checkpoint.config is not None
    assert checkpoint.index_name is None
    assert set(why(checkpoint)) == {INDEX, SHARDS[0], SHARDS[2]}
    assert checkpoint.findings == []


def test_a_subfolder_with_its_own_model_is_reported_and_can_be_named(sharded):
    (sharded / "original").mkdir()
    save_file({"wq": array(0)}, sharded / "original" / "model--00001-of-00001.safetensors")
    write_sharded(sharded / "talker")
    checkpoint = Checkpoint.open(sharded)
    assert len(checkpoint.tensors) == 6
    assert set(why(checkpoint)) == {"original/", "talker/"}
    assert len(Checkpoint.open(sharded / "talker").tensors) == 6


@pytest.mark.parametrize("location", ["https://host/x", "s3://bucket/x", "hf://owner/model@main"])
def test_a_url_is_refused_with_what_is_taken(location):
    with pytest.raises(UsageError, match="local directory"):
        local_path(location)


@pytest.mark.parametrize("location", ["", "a\0b"])
def test_a_path_that_cannot_be_one_is_a_usage_error(location):
    with pytest.raises(UsageError):
        Checkpoint.open(location)


def test_a_file_of_another_kind_as_source_is_a_usage_error(sharded):
    with pytest.raises(UsageError, match=r"config\.json"):
        Checkpoint.open(sharded / "config.json")


@pytest.mark.parametrize("kind", ["missing", "pipe", "device"])
def test_a_source_that_cannot_be_read_is_refused_without_waiting(tmp_path, kind):
    path = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/zero")
    for look in (Checkpoint.open, Checkpoint.survey):
        with pytest.raises(SourceError) as caught:
            look(path)
        assert caught.value.where == str(path)


# Faults of one file


def test_every_broken_file_is_named_at_once_before_any_byte_is_copied(sharded):
    (sharded / SHARDS[0]).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 5\n")
    os.truncate(sharded / SHARDS[2], (sharded / SHARDS[2]).stat().st_size - 1)
    text = refusal(sharded)
    assert "Git LFS pointer" in text
    assert SHARDS[0] in text
    assert "1 byte short" in text
    assert SHARDS[2] in text
    checkpoint = Checkpoint.survey(sharded)
    assert [file.name for file in checkpoint.files] == [SHARDS[1]]
    assert list(checkpoint.tensors) == ["layers.2.w", "layers.3.w"]
    assert found(checkpoint, "ghost-index-entry") == []


def test_a_pipe_among_the_shards_is_refused_without_waiting(sharded):
    (sharded / SHARDS[1]).unlink()
    os.mkfifo(sharded / SHARDS[1])
    assert SHARDS[1] in refusal(sharded)


def test_what_a_header_has_against_the_specification_is_noted(tmp_path):
    header = b'\n{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"x")
    assert "white space" in only(Checkpoint.open(tmp_path), "header-deviation").what


def test_header_strings_that_differ_from_file_to_file_are_noted(sharded):
    save_file({"layers.0.w": array(0), "layers.1.w": array(4)}, sharded / SHARDS[0], {"format": "mlx", "foo": "bar"})
    checkpoint = Checkpoint.open(sharded)
    assert len(found(checkpoint, "header-metadata")) == 2
    assert checkpoint.files[0].metadata == {"format": "mlx", "foo": "bar"}


# Index against files


@pytest.mark.parametrize(
    "file",
    [
        "../outside/x.safetensors",
        "/elsewhere/x.safetensors",
        "sub/../../x",
        "a/..///b",
        "..",
        "",
        ".",
        "a\\b",
        "x\0",
        "C:x",
    ],
)
def test_an_index_that_names_a_file_outside_the_folder_is_refused_before_anything_is_opened(sharded, file):
    outside = sharded.parent / "outside"
    outside.mkdir()
    save_file({"w": array(0)}, outside / "x.safetensors")
    edit_index(sharded, w=file)
    assert repr(file)[1:-1].replace("\\\\", "\\") in refusal(sharded).replace("\\\\", "\\")
    assert "w" not in Checkpoint.survey(sharded).tensors


def test_a_valid_file_at_an_absolute_path_is_not_read_through_the_index(sharded, tmp_path):
    save_file({"w": array(0)}, tmp_path / "x.safetensors")
    edit_index(sharded, w=str(tmp_path / "x.safetensors"))
    assert "no plain path" in refusal(sharded)
    assert "w" not in Checkpoint.survey(sharded).tensors


def test_index_names_with_dots_and_subfolders_are_read_as_plain_names(sharded):
    (sharded / "sub").mkdir()
    (sharded / SHARDS[1]).rename(sharded / "sub" / SHARDS[1])
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"] = {n: f"./{'sub//' if f == SHARDS[1] else ''}{f}" for n, f in index["weight_map"].items()}
    (sharded / INDEX).write_text(json.dumps(index))
    checkpoint = Checkpoint.open(sharded)
    assert [file.name for file in checkpoint.files] == sorted([SHARDS[0], f"sub/{SHARDS[1]}", SHARDS[2]])
    assert found(checkpoint, "wrong-file-in-index") == []


def test_all_missing_files_are_listed_with_the_number_of_tensors_lost(sharded):
    (sharded / SHARDS[1]).unlink()
    (sharded / SHARDS[2]).unlink()
    text = refusal(sharded)
    assert "2 of the 3 files" in text
    assert "4 tensors" in text
    assert SHARDS[1] in text
    assert SHARDS[2] in text
    assert "stale" not in text


def test_an_index_of_another_save_is_called_stale_and_can_be_built_anew(sharded):
    write_index(sharded, {f"layers.{n}.w": f"model-0000{n + 1}-of-00009.safetensors" for n in range(6)})
    text = refusal(sharded)
    assert "6 of the 6 files" in text
    assert "stale" in text
    assert f"surgery index DIR > new.json && mv new.json DIR/{INDEX}" in text


def test_an_index_entry_that_no_file_holds_is_a_finding_with_tensor_and_file(sharded):
    edit_index(sharded, **{"mtp.fc.weight": SHARDS[2]})
    ghost = only(Checkpoint.open(sharded), "ghost-index-entry")
    assert (ghost.severity, ghost.tensor, ghost.where) == ("fault", "mtp.fc.weight", SHARDS[2])
    assert "mtp.fc.weight" in ghost.what
    assert SHARDS[2] in ghost.what


def test_a_tensor_that_the_index_does_not_name_is_kept_and_found(sharded):
    edit_index(sharded, **{"layers.3.w": None})
    checkpoint = Checkpoint.open(sharded)
    assert values(checkpoint, "layers.3.w") == list(array(12))
    assert only(checkpoint, "unindexed-tensor").tensor == "layers.3.w"


def test_a_tensor_that_the_index_places_in_another_file_is_taken_from_where_it_is(sharded):
    edit_index(sharded, **{"layers.3.w": SHARDS[0]})
    checkpoint = Checkpoint.open(sharded)
    assert values(checkpoint, "layers.3.w") == list(array(12))
    finding = only(checkpoint, "wrong-file-in-index")
    assert finding.tensor == "layers.3.w"
    assert SHARDS[0] in finding.what
    assert SHARDS[1] in finding.what


@pytest.mark.parametrize("total_size", [None, [96], "96", 97, float("nan"), {}])
def test_a_total_size_that_is_wrong_or_no_number_is_only_noted(sharded, total_size):
    index = json.loads((sharded / INDEX).read_text())
    index["metadata"] = {} if total_size is None else {"total_size": total_size}
    (sharded / INDEX).write_text(json.dumps(index))
    assert "96 bytes" in only(Checkpoint.open(sharded), "total-size").what


@pytest.mark.parametrize("metadata", [None, [], "x"])
def test_an_index_without_metadata_is_read(sharded, metadata):
    index = json.loads((sharded / INDEX).read_text())
    (sharded / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": index["weight_map"]}))
    assert len(Checkpoint.open(sharded).tensors) == 6


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"{", "not JSON"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b'{"weight_map":{}} trailing', "not JSON"),
        (b"[]", "no weight_map"),
        (b'{"weight_map":{}}', "no weight_map"),
        (b'{"weight_map":[]}', "no weight_map"),
        (b'{"weight_map":{"w":3}}', "of w is 3"),
        (b'{"weight_map":{"w":null}}', "of w is null"),
        (b'{"weight_map":{"w":"a","w":"b"}}', "'w' is there twice"),
        (b'{"weight_map":{"w":"a","\\u0077":"b"}}', "'w' is there twice"),
        (b'{"weight_map":{"w\\ud800":"a"}}', "half a character"),
        (b'{"weight_map":{"w":"\xff"}}', "not UTF-8"),
        (b"[" * 100_000, "not JSON"),
        (b"1" * 5000, "not JSON"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 5\n", "Git LFS pointer"),
    ],
)
def test_a_broken_index_is_refused_with_the_reason(sharded, content, says):
    (sharded / INDEX).write_bytes(content)
    text = refusal(sharded)
    assert says in text
    assert INDEX in text


def test_an_absurdly_large_index_or_config_is_refused_unread(sharded):
    for name in (INDEX, "config.json"):
        saved = (sharded / name).read_bytes()
        os.truncate(sharded / name, 1 << 40)
        assert str(1 << 40) in refusal(sharded)
        (sharded / name).write_bytes(saved)


# The same thing twice


@pytest.fixture
def doubled(tmp_path: Path) -> Path:
    """`q` in two shards with other bytes; the index names the first."""
    directory = write_sharded(
        tmp_path / "doubled", {SHARDS[0]: {"a": array(0), "q": array(50)}, SHARDS[1]: {"lm_head": array(8)}}
    )
    save_file({"lm_head": array(8), "q": array(70)}, directory / SHARDS[1])
    return directory


def test_a_tensor_in_two_files_with_other_bytes_is_refused_until_one_is_chosen(doubled):
    text = refusal(doubled)
    assert "q is in" in text
    assert SHARDS[0] in text
    assert SHARDS[1] in text
    assert "different bytes" in text
    assert values(Checkpoint.open(doubled, on_duplicate="index"), "q") == list(array(50))
    last = Checkpoint.open(doubled, on_duplicate="last")
    assert values(last, "q") == list(array(70))
    assert only(last, "duplicate-tensor").severity == "note"
    places = [(tensor.file, tensor.offset) for tensor in last.tensors.values()]
    assert places == sorted(places)


@pytest.mark.parametrize("indexed", SHARDS[:2])
def test_a_tensor_in_two_files_with_equal_bytes_is_kept_once_as_indexed(doubled, indexed):
    save_file({"lm_head": array(8), "q": array(50)}, doubled / SHARDS[1])
    edit_index(doubled, q=indexed)
    checkpoint = Checkpoint.open(doubled)
    assert checkpoint.files[checkpoint.tensors["q"].file].name == indexed
    assert "equal bytes" in only(checkpoint, "duplicate-tensor").what
    assert len(checkpoint.tensors) == 3


def test_a_tensor_in_two_files_with_other_shapes_is_refused(doubled):
    save_file({"lm_head": array(8), "q": array(50).reshape(2, 2)}, doubled / SHARDS[1])
    assert "q is in" in refusal(doubled)


def whole(directory: Path, **changed: np.ndarray[Any, Any]) -> None:
    tensors = {f"layers.{n}.w": array(4 * n) for n in range(6)}
    save_file({**tensors, **changed}, directory / "model.safetensors")


@pytest.mark.parametrize("other", [array(3), array(3, 8), array(20).astype(np.int32)])
def test_a_single_file_beside_an_index_with_another_content_is_ambiguous(sharded, other):
    whole(sharded, **{"layers.5.w": other})
    text = refusal(sharded)
    assert "model.safetensors and model.safetensors.index.json" in text
    assert len(Checkpoint.open(sharded / INDEX).tensors) == 6
    checkpoint = Checkpoint.open(sharded / "model.safetensors")
    assert [file.name for file in checkpoint.files] == ["model.safetensors"]


def test_a_single_file_with_one_tensor_more_than_the_index_is_ambiguous(sharded):
    whole(sharded, extra=array(3))
    assert "differ" in refusal(sharded)


def test_a_single_file_beside_an_index_with_equal_content_is_noted_and_left_behind(sharded):
    whole(sharded)
    checkpoint = Checkpoint.open(sharded)
    assert [file.name for file in checkpoint.files] == SHARDS
    assert "same tensors" in only(checkpoint, "two-layouts").what
    assert "same tensors" in why(checkpoint)["model.safetensors"]


def test_a_broken_single_file_beside_an_index_is_refused(sharded):
    (sharded / "model.safetensors").write_bytes(b"short")
    assert "model.safetensors: 5 bytes" in refusal(sharded)


def test_ranges_are_compared_to_their_last_byte_and_across_holes(tmp_path):
    size = 3 * BLOCK_NBYTES + 17
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(b"x" + bytes(size))
    b.write_bytes(b"xyz" + bytes(size))
    assert same_bytes(a, 1, b, 3, size)
    with b.open("r+b") as file:
        file.seek(3 + size - 1)
        file.write(b"!")
    assert not same_bytes(a, 1, b, 3, size)
    assert same_bytes(a, 1, b, 3, size - 1)
    os.truncate(tmp_path / "a", 1)
    os.truncate(tmp_path / "a", 1 + size)  # now a hole, and zeros are what it reads as
    assert same_bytes(a, 1, b, 3, size - 1)
    assert not same_bytes(a, 1, b, 3, size)
    with pytest.raises(SourceError):
        same_bytes(a, 1, b, 3, size + 1)


def test_terabytes_of_holes_are_compared_at_once(tmp_path):
    for name in "ab":
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 1 << 42)
    assert same_bytes(tmp_path / "a", 5, tmp_path / "b", 9, 1 << 41)


# Links


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A hub cache: every file of the snapshot is a link to a blob."""
    repository = tmp_path / "hub" / "models--a--b"
    plain = write_sharded(tmp_path / "plain")
    (plain / "tokenizer.json").write_text("{}")
    revision = repository / "snapshots" / "r1"
    revision.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted(plain.iterdir())):
        shutil.move(path, repository / "blobs" / f"deadbeef{number}")
        (revision / path.name).symlink_to(f"../../blobs/deadbeef{number}")
    return revision


LINKED = [SHARDS[1], INDEX, "config.json", "tokenizer.json"]


def relink(path: Path, target: str | Path) -> None:
    path.unlink()
    path.symlink_to(target)


def test_the_hub_caches_own_links_are_followed(snapshot):
    checkpoint = Checkpoint.open(snapshot)
    assert len(checkpoint.tensors) == 6
    assert [(side.name, side.nbytes) for side in checkpoint.side_files] == [("tokenizer.json", 2)]
    assert checkpoint.findings == []
    assert [file.name for file in Checkpoint.open(snapshot / SHARDS[0]).files] == [SHARDS[0]]


@pytest.mark.parametrize("name", LINKED)
def test_a_link_to_another_repositorys_blobs_is_refused_unless_allowed(snapshot, tmp_path, name):
    foreign = tmp_path / "hub" / "models--c--d" / "blobs"
    foreign.mkdir(parents=True)
    shutil.copy((snapshot / name).resolve(), foreign / "cafe")
    relink(snapshot / name, foreign / "cafe")
    text = refusal(snapshot)
    assert name in text
    assert str(foreign / "cafe") in text
    assert "--allow-outside-links" in text
    assert len(Checkpoint.open(snapshot, allow_outside_links=True).tensors) == 6


@pytest.mark.parametrize("name", LINKED)
def test_a_link_to_a_file_of_the_system_is_refused(snapshot, name):
    relink(snapshot / name, "/etc/passwd")
    assert "/etc/passwd" in refusal(snapshot)


@pytest.mark.parametrize("name", LINKED)
def test_a_dangling_link_is_called_an_incomplete_download(snapshot, name):
    (snapshot / name).resolve().unlink()
    text = refusal(snapshot)
    assert name in text
    assert "is missing (incomplete download?)" in text


@pytest.mark.parametrize("name", LINKED)
def test_a_link_to_itself_is_refused(snapshot, name):
    relink(snapshot / name, name)
    assert "circle" in refusal(snapshot)


def test_a_link_to_a_whole_checkpoint_directory_is_followed(sharded, tmp_path):
    (tmp_path / "link").symlink_to(sharded)
    assert Checkpoint.open(tmp_path / "link").root == sharded


def test_a_folder_of_shards_that_is_a_link_out_of_the_checkpoint_is_refused(sharded, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    shutil.move(sharded / SHARDS[0], tmp_path / "elsewhere")
    (sharded / "sub").symlink_to(tmp_path / "elsewhere")
    edit_index(sharded, **{f"layers.{n}.w": f"sub/{SHARDS[0]}" for n in (0, 1)})
    assert str(tmp_path / "elsewhere" / SHARDS[0]) in refusal(sharded)


# Config


def test_a_config_keeps_its_order_its_unknown_keys_and_its_odd_numbers(sharded):
    (sharded / "config.json").write_text(
        '{"z": 1, "a": Infinity, "m": {"y": 1e400, "b": [null]}, "c": "\\ud83d\\ude00"}'
    )
    config = Checkpoint.open(sharded).config
    assert config is not None
    assert list(config) == ["z", "a", "m", "c"]
    assert config["a"] == float("inf")
    assert config["c"] == "\U0001f600"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"a": 1, "a": 2}', "'a' is there twice"),
        (b'{"t": {"a": 1, "a": 2}}', "'a' is there twice"),
        (b"[1]", "not a JSON object"),
        (b'{"a": 1', "not JSON"),
        (b"", "empty"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b'{"a": "\\ud800"}', "half a character"),
    ],
)
def test_a_broken_config_is_refused_with_the_reason(sharded, content, says):
    (sharded / "config.json").write_bytes(content)
    assert says in refusal(sharded)
    assert len(Checkpoint.survey(sharded).tensors) == 6


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({"dtype": "bfloat16"}, 0),
        ({"torch_dtype": "bfloat16"}, 0),
        ({"dtype": "float32", "torch_dtype": "float32"}, 0),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, 1),
        ({"text_config": {"dtype": "float32", "torch_dtype": "bfloat16"}}, 1),
        ({}, 0),
    ],
)
def test_two_names_for_the_dtype_that_disagree_are_noted(sharded, config, count):
    (sharded / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint.open(sharded)
    assert len(found(checkpoint, "two-dtypes")) == count
    assert checkpoint.config == config


# Side files

SIDE_FILES = """
    tokenizer.json tokenizer.model vocab.json merges.txt tiktoken.model x.tiktoken chat_template.jinja
    additional_chat_templates/x.jinja assets/deep/logo.png generation_config.json preprocessor_config.json
    video_preprocessor_config.json processor_config.json hf_quant_config.json tokenizer_config.json
    configuration_x.py util_x.py README.md LICENSE notes.pt.md
"""
LEFT_BEHIND = """
    pytorch_model.bin pytorch_model.bin.index.json tf_model.h5 flax_model.msgpack model.Q4.gguf model.onnx
    model.onnx.data old.safetensors.bak mel.npz rng.pth .gitattributes .gitignore .hfignore
"""


def test_everything_that_is_no_weights_and_no_version_control_goes_with_the_model(sharded):
    for name in [
        *SIDE_FILES.split(),
        *LEFT_BEHIND.split(),
        ".git/config",
        ".cache/x",
        "__pycache__/x.pyc",
        "surgery.json",
    ]:
        (sharded / name).parent.mkdir(parents=True, exist_ok=True)
        (sharded / name).write_text("raise SystemExit('never run')")
    os.truncate(sharded / "model.Q4.gguf", 3 << 30)
    (sharded / "configuration_x.py").write_text("from .util_x import y\nopen('ran', 'w')\n")
    checkpoint = Checkpoint.open(sharded)
    assert [side.name for side in checkpoint.side_files] == sorted(SIDE_FILES.split())
    assert {*why(checkpoint)} == {*LEFT_BEHIND.split(), ".git/", ".cache/", "__pycache__/"}
    assert all(why(checkpoint).values())
    assert checkpoint.findings == []
    for side in checkpoint.side_files:
        assert side.nbytes == (sharded / side.name).stat().st_size


def test_a_folder_goes_whole_unless_weights_lie_anywhere_below_it(sharded):
    for name in ("docs/a/b/c.txt", "docs/.git/x", "onnx/sub/deep/model.onnx", "onnx/config.json"):
        (sharded / name).parent.mkdir(parents=True, exist_ok=True)
        (sharded / name).touch()
    checkpoint = Checkpoint.open(sharded)
    assert [side.name for side in checkpoint.side_files] == ["docs/a/b/c.txt"]
    assert {*why(checkpoint)} == {"docs/.git/", "onnx/"}
    assert "onnx/sub/deep/model.onnx" in why(checkpoint)["onnx/"]


def test_links_to_folders_pipes_and_unfinished_output_are_left_behind_with_the_reason(sharded, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (sharded / "linked").symlink_to(tmp_path / "elsewhere")
    (sharded / "docs").mkdir()
    (sharded / "docs" / "up").symlink_to("..")
    os.mkfifo(sharded / "pipe")
    (sharded / ".out.surgery-partial").mkdir()
    checkpoint = Checkpoint.open(sharded)
    assert checkpoint.side_files == []
    assert {*why(checkpoint)} == {"linked/", "docs/up/", "pipe", ".out.surgery-partial/"}


def test_a_file_whose_name_is_no_text_is_left_behind_with_the_reason(sharded):
    Path(os.fsdecode(os.fsencode(sharded) + b"/n\xff.txt")).touch()
    checkpoint = Checkpoint.open(sharded)
    assert checkpoint.side_files == []
    assert "UTF-8" in next(iter(why(checkpoint).values()))
    assert next(iter(why(checkpoint))).isascii()


# Reading leaves no trace


def test_reading_changes_nothing_and_holds_nothing_open(sharded):
    whole(sharded)
    (sharded / "tokenizer.json").write_text("{}")

    def look() -> dict[Path, tuple[int, int, int]]:
        return {p: (p.stat().st_mode, p.stat().st_mtime_ns, p.stat().st_size) for p in [sharded, *sharded.rglob("*")]}

    for path in sharded.iterdir():
        path.chmod(0o444)
    sharded.chmod(0o555)
    before, open_before = look(), sorted(Path("/proc/self/fd").iterdir())
    Checkpoint.open(sharded)
    assert look() == before
    assert sorted(Path("/proc/self/fd").iterdir()) == open_before
    sharded.chmod(0o755)


def test_the_same_directory_is_always_read_alike(sharded):
    whole(sharded)
    edit_index(sharded, ghost=SHARDS[0])
    assert Checkpoint.survey(sharded) == Checkpoint.survey(sharded)


def test_a_small_file_is_read_whole_and_a_large_one_not_at_all(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    assert read_bytes(tmp_path / "x", 5) == b"12345"
    with pytest.raises(SourceError, match="at most 4"):
        read_bytes(tmp_path / "x", 4)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "missing", Path("/dev/zero")):
        with pytest.raises(SourceError):
            read_bytes(path, 5)


def test_a_model_of_real_size_is_surveyed_from_its_headers_alone(sparse_deepseek_v3):
    checkpoint = Checkpoint.open(sparse_deepseek_v3)
    assert len(checkpoint.tensors) == 91_991
    assert sum(file.nbytes for file in checkpoint.files) > 680e9
    assert checkpoint.findings == []
