"""Trim against transformers: the result loads clean and computes, bit for bit, what the cut model does."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

import make_sparse
import support
import tiny_models
from surgery.checkpoint import Checkpoint
from surgery.draft import draft_of
from surgery.errors import SurgeryError, UsageError
from surgery.execute import execute
from surgery.layer_ranges import parse_ranges
from surgery.operations.recipe import run_recipe
from surgery.operations.rename import Rename
from surgery.operations.repack import Repack
from surgery.operations.trim import Trim
from surgery.plan import make_plan

SELECTIONS = ["0,2,5", "4,1,3", "0-5", "2,2,0,0", "5"]


def trim(source: Path, out: Path, *operations) -> Path:
    plan = make_plan(run_recipe(draft_of(Checkpoint.open(source)), operations))
    execute(plan, out)
    return out


def tensors(directory: Path) -> dict[str, bytes]:
    found = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118
                found[name] = file.get_tensor(name).tobytes()
    return found


@pytest.mark.parametrize("layers", SELECTIONS)
@pytest.mark.parametrize("family", tiny_models.families())
def test_the_trimmed_model_computes_what_the_cut_model_does(tiny_model, tmp_path, family, layers):
    import torch

    source = tiny_model(family)
    out = trim(source, tmp_path / "out", Trim(layers), Repack("30kB"))
    kept = parse_ranges(layers)
    expected = tiny_models.logits(tiny_models.cut_in_memory(source, kept))
    assert torch.equal(tiny_models.logits(tiny_models.load_strict(out)), expected)
    assert support.run_surgery("verify", out, "--against", source).returncode == 0


@pytest.mark.parametrize("family", tiny_models.families())
def test_every_copied_tensor_is_its_source_and_the_rest_is_accounted_for(tiny_model, tmp_path, family):
    source = tiny_model(family)
    result = support.run_surgery("trim", source, tmp_path / "out", "--layers", "3,0", "--json")
    summary = json.loads(result.stdout)
    totals = summary["totals"]
    assert totals["tensors_in"] == totals["tensors_kept"] + totals["tensors_dropped"]
    assert totals["nbytes_in"] == totals["nbytes_kept"] + totals["nbytes_dropped"]
    before, after = tensors(source), tensors(tmp_path / "out")
    for name, data in after.items():
        origin = (
            name.replace("layers.0.", "layers.T.").replace("layers.1.", "layers.0.").replace("layers.T.", "layers.3.")
        )
        assert data == before[origin], name
    dropped = {name for name in before if any(f"layers.{n}." in name for n in (1, 2, 4, 5))}
    assert len(after) == len(before) - len(dropped) == totals["tensors_out"]


def test_tensors_that_no_rule_names_never_vanish(tiny_model, tmp_path):
    """mtp.*, towers, anything: kept as it is (case T11)."""
    import torch
    from safetensors.torch import load_file, save_file

    source = Path(shutil.copytree(tiny_model("llama"), tmp_path / "source"))
    names = ["mtp.fc.weight", "mtp.layers.0.mlp.experts.3.w1", "visual.blocks.0.attn", "foo.bar", "model.layersX.0.w"]
    path = sorted(source.glob("*.safetensors"))[0]
    save_file(load_file(path) | {name: torch.ones(3) for name in names}, path, {"format": "pt", "note": "kept"})
    assert (
        subprocess.run(
            f"{shlex.quote(sys.executable)} -m surgery index source > n && mv n source/model.safetensors.index.json",
            shell=True,
            cwd=tmp_path,
            env=support.surgery_environment(),
        ).returncode
        == 0
    )
    out = trim(source, tmp_path / "out", Trim("1,2"))
    assert set(names) <= tensors(out).keys()


def edit_config(source: Path, **fields) -> None:
    config = json.loads((source / "config.json").read_text())
    for key, value in fields.items():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    (source / "config.json").write_text(json.dumps(config, indent=2))


@pytest.fixture
def editable(tiny_model, tmp_path):
    def get(family: str) -> Path:
        return Path(shutil.copytree(tiny_model(family), tmp_path / f"source-{family}"))

    return get


def test_config_keeps_its_unknown_keys_and_order_and_nothing_is_added(editable, tmp_path):
    source = editable("qwen3")
    edit_config(source, zzz={"b": 1, "a": [None, 1e-5]}, n_layers=6, odd="x")
    before = json.loads((source / "config.json").read_text())
    out = trim(source, tmp_path / "out", Trim("1,4"))
    after = json.loads((out / "config.json").read_text())
    assert list(after) == list(before)
    changed = {key for key in before if before[key] != after[key]}
    assert changed <= {"num_hidden_layers", "n_layers", "layer_types"}
    assert (after["num_hidden_layers"], after["n_layers"]) == (2, 2)
    if "layer_types" in before:
        assert after["layer_types"] == before["layer_types"][:2]


def test_a_config_that_does_not_change_keeps_its_bytes(editable, tmp_path):
    source = editable("llama")
    (source / "config.json").write_text((source / "config.json").read_text().replace("\n", "\r\n") + "\n\n")
    out = trim(source, tmp_path / "out", Repack("30kB"))
    assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("family", "fields", "says"),
    [
        ("llama", {"model_type": None}, "has no model_type"),
        ("llama", {"num_hidden_layers": 5}, "does not count"),
        ("llama", {"num_hidden_layers": 7}, "no tensors"),
        ("llama", {"num_hidden_layers": "6"}, "expected a count"),
        ("llama", {"n_layer": 8}, "disagrees with itself"),
        ("qwen3", {"layer_types": ["full_attention"] * 5}, "5 entries for 6 layers"),
        ("llama", {"my_layer_scales": [1, 1, 1, 2, 1, 1]}, "no rule says what it means"),
        ("llama", {"quantization_config": {"by_layer": {"model.layers.5.mlp": {}}}}, "names layers by number"),
    ],
)
def test_what_cannot_be_trimmed_truthfully_is_refused_before_anything_is_written(
    editable, tmp_path, family, fields, says
):
    source = editable(family)
    edit_config(source, **fields)
    result = support.run_surgery("trim", source, tmp_path / "out", "--layers", "0,2")
    assert result.returncode == 2, result.stderr
    assert says in result.stderr
    assert [line.split(":")[0] for line in result.stderr.splitlines() if line[0] != " "] == ["error", "where", "mend"]
    assert {path.name for path in tmp_path.iterdir()} == {source.name}


@pytest.mark.parametrize("layers", ["", "a", "3-1", "6", "0,,1", "-1", "0-99999999999", "0,1;2", "1.5", "vision=0-1"])
def test_a_layer_list_that_is_none_is_a_usage_error(tiny_model, tmp_path, layers):
    result = support.run_surgery("trim", tiny_model("llama"), tmp_path / "out", f"--layers={layers}")
    assert result.returncode == 2, result.stderr
    assert not (tmp_path / "out").exists()


def test_a_list_of_one_value_is_cut_along(editable, tmp_path):
    source = editable("llama")
    edit_config(source, layer_scale_freq=[2] * 6)
    out = trim(source, tmp_path / "out", Trim("1,4"))
    assert json.loads((out / "config.json").read_text())["layer_scale_freq"] == [2, 2]


def test_operations_compose_in_one_pass_and_layers_keep_their_origin(tiny_model, tmp_path):
    source = tiny_model("llama")
    out = trim(
        source, tmp_path / "out", Trim("5,3,1"), Trim("2,0"), Rename({"model.layers": "model.h", "lm_head": "head"})
    )
    manifest = json.loads((out / "surgery.json").read_text())
    assert manifest["layers"] == {"model.layers.": [1, 5]}
    before, after = tensors(source), tensors(out)
    assert after["model.h.0.mlp.up_proj.weight"] == before["model.layers.1.mlp.up_proj.weight"]
    assert after["model.h.1.mlp.up_proj.weight"] == before["model.layers.5.mlp.up_proj.weight"]
    assert after["head.weight"] == before["lm_head.weight"]
    assert (
        manifest["totals"]["tensors_in"] == manifest["totals"]["tensors_kept"] + manifest["totals"]["tensors_dropped"]
    )


def test_a_recipe_a_manifest_and_flags_mean_the_same(tiny_model, tmp_path):
    source = tiny_model("qwen3")
    (tmp_path / "recipe.yaml").write_text(
        "recipe:\n- operation: trim\n  layers: 0,4\n- operation: repack\n  max_shard_size: 30kB\n"
    )
    for out, arguments in {
        "flags": ("trim", source, tmp_path / "flags", "--layers", "0,4", "--max-shard-size", "30kB"),
        "recipe": ("run", source, tmp_path / "recipe", tmp_path / "recipe.yaml"),
        "manifest": ("run", source, tmp_path / "manifest", tmp_path / "flags" / "surgery.json"),
    }.items():
        assert support.run_surgery(*arguments).returncode == 0, out
    plan = tmp_path / "plan.json"
    assert (
        support.run_surgery(
            "plan", "trim", source, "--layers", "0,4", "--max-shard-size", "30kB", "-o", plan
        ).returncode
        == 0
    )
    assert support.run_surgery("apply", plan, tmp_path / "plan").returncode == 0
    whole = {path.name: path.read_bytes() for path in (tmp_path / "flags").iterdir()}
    for out in ("recipe", "manifest", "plan"):
        assert {path.name: path.read_bytes() for path in (tmp_path / out).iterdir()} == whole


@pytest.mark.parametrize(
    "text",
    [
        "", "recipe: []", "recipe: 3", "[1]", "recipe:\n- operation: fly", "recipe:\n- operation: trim",
        "recipe:\n- operation: trim\n  layers: 0\n  extra: 1", "recipe:\n- layers: 0", "{", "a: [", "recipe:\n- trim",
    ],
)  # fmt: skip
def test_a_recipe_that_is_none_is_a_usage_error(tiny_model, tmp_path, text):
    (tmp_path / "recipe.yaml").write_text(text)
    result = support.run_surgery("run", tiny_model("llama"), tmp_path / "out", tmp_path / "recipe.yaml")
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr


def test_a_plan_runs_from_another_place_and_a_foreign_plan_is_judged(tiny_model, tmp_path):
    source = Path(shutil.copytree(tiny_model("llama"), tmp_path / "here"))
    plan = tmp_path / "plan.json"
    assert support.run_surgery("plan", "trim", source, tmp_path / "unused", "--layers", "1", "-o", plan).returncode == 0
    source.rename(tmp_path / "there")
    assert support.run_surgery("apply", plan, tmp_path / "out").returncode == 3
    moved = support.run_surgery("apply", plan, tmp_path / "out", "--source", tmp_path / "there")
    assert moved.returncode == 0, moved.stderr
    text = plan.read_text()
    for old, new, code in [
        ('"name":"model.safetensors"', '"name":"../evil.safetensors"', 2),
        ('"format":1', '"format":99', 2),
        ('"offset":', '"offset":99999', 2),
        ('"shape":[', '"shape":["x",', 3),
    ]:
        assert old in text
        plan.write_text(text.replace(old, new, 1) if old != '"offset":' else text.replace(old, new))
        result = support.run_surgery("apply", plan, tmp_path / "bad", "--source", tmp_path / "there")
        assert result.returncode == code, (old, result.stderr)
        assert not (tmp_path / "bad").exists()
        assert not (tmp_path / "evil.safetensors").exists()


def test_rename_refuses_collisions_and_what_matches_nothing(tiny_model, tmp_path):
    source = tiny_model("llama")
    for pairs, says in [
        (["--map", "lm_head.weight=model.norm.weight"], "there already"),
        (["--map", "nothing=x"], "no tensor matches"),
        (["--map", "lm_head"], "OLD=NEW"),
        (["--map", "(=x", "--regex"], "not a pattern"),
        ([], "empty"),
    ]:
        result = support.run_surgery("rename", source, tmp_path / "out", *pairs)
        assert result.returncode == 2, result.stderr
        assert says in result.stderr


def test_rename_carries_the_quantisation_lists(editable, tmp_path):
    source = editable("llama")
    lists = {"ignore": ["lm_head", "model.norm", "other"], "groups": {"targets": ["model.layers.0.mlp"]}}
    edit_config(source, quantization_config=lists)
    out = trim(source, tmp_path / "out", Rename({"model": "language_model.model", "lm_head": "language_model.lm_head"}))
    assert json.loads((out / "config.json").read_text())["quantization_config"] == {
        "ignore": ["language_model.lm_head", "language_model.model.norm", "other"],
        "groups": {"targets": ["language_model.model.layers.0.mlp"]},
    }
    edit_config(
        source, quantization_config={"quant_method": "compressed-tensors", "ignore": ["re:model\\.layers.*up_proj"]}
    )
    out = trim(source, tmp_path / "out2", Rename({"model.layers": "h"}))
    ignore = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignore == [f"h.{layer}.mlp.up_proj" for layer in range(6)]
    edit_config(source, quantization_config={"ignore": ["lm_head"]})
    out = trim(source, tmp_path / "out3", Rename({"lm_head.weight": "output.weight"}))
    assert json.loads((out / "config.json").read_text())["quantization_config"]["ignore"] == ["output"]


def test_side_files_travel_and_weights_of_other_formats_do_not(editable, tmp_path):
    source = editable("llama")
    carried = {
        "tokenizer.json": "{}", "tokenizer.model": "sp", "merges.txt": "a b", "chat_template.jinja": "{{x}}",
        "additional_chat_templates/x.jinja": "y", "preprocessor_config.json": "{}", "hf_quant_config.json": "{}",
        "configuration_x.py": "from .util_x import y\nraise SystemExit('never run')", "util_x.py": "y = 1",
        "LICENSE": "l",
    }  # fmt: skip
    left = {
        "pytorch_model.bin": "w", "model.gguf": "w", "original/consolidated.00.pth": "w", ".gitattributes": "x",
        "pytorch_model.bin.index.json": "{}", "consolidated.safetensors": "w", "adapter_model.safetensors": "w",
    }  # fmt: skip
    for name, text in (carried | left).items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    (source / "README.md").write_text("the publisher's card")
    out = trim(source, tmp_path / "out", Trim("0,1"))
    for name, text in carried.items():
        assert (out / name).read_text() == text, name
    for name in left:
        assert not (out / name).exists(), name
    assert (out / "README.source.md").read_text() == "the publisher's card"
    again = trim(out, tmp_path / "again", Trim("1"))
    assert (again / "README.source.md").read_text() == "the publisher's card"
    assert len(list(out.glob("*.index.json"))) == (len(list(out.glob("*.safetensors"))) > 1)


def test_metadata_is_carried_and_pt_is_added_where_no_format_is(tmp_path):
    import numpy as np
    from safetensors.numpy import save_file

    for number, (given, expected) in enumerate(
        [
            ({"format": "pt", "foo": "bar"}, {"format": "pt", "foo": "bar"}),
            (None, {"format": "pt"}),
            ({"format": "mlx"}, {"format": "mlx"}),
        ]
    ):
        source = tmp_path / f"source{number}"
        source.mkdir()
        save_file({"w": np.ones(3, "f4")}, source / "model.safetensors", given)
        out = trim(source, tmp_path / f"out{number}", Repack())
        with safe_open(out / "model.safetensors", "np") as file:
            assert file.metadata() == expected


def test_through_the_hub_cache_links_are_followed_and_files_come_out_as_files(tiny_model, tmp_path):
    hub = tmp_path / "hub" / "models--a--b"
    snapshot = hub / "snapshots" / "r1"
    snapshot.mkdir(parents=True)
    (hub / "blobs").mkdir()
    for path in tiny_model("qwen2").iterdir():
        blob = hub / "blobs" / f"sha-{path.name}"
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    out = trim(snapshot, tmp_path / "out", Trim("0,3"))
    assert not [path for path in out.rglob("*") if path.is_symlink()]
    tiny_models.load_strict(out)


def test_shards_hold_whole_tensors_in_order_up_to_the_size(tiny_model, tmp_path):
    source = tiny_model("llama")
    sizes = {name: len(data) for name, data in tensors(source).items()}
    for limit in ("1B", "5kB", "20kB", "1GB"):
        out = trim(source, tmp_path / f"out{limit}", Repack(limit))
        assert tensors(out) == tensors(source)
        for path in out.glob("*.safetensors"):
            with safe_open(path, "np") as file:
                names = list(file.keys())
            total = sum(sizes[name] for name in names)
            assert total <= {"1B": 1, "5kB": 5000, "20kB": 20000, "1GB": 10**9}[limit] or len(names) == 1
        tiny_models.load_strict(out)


def rss_of(*arguments: str | os.PathLike[str]) -> tuple[subprocess.CompletedProcess[str], float]:
    """The finished command and its peak memory in MB, from a small parent: a child starts with its parent's peak."""
    launcher = (
        "import os,resource,sys;"
        "pid=os.posix_spawn(sys.argv[1],sys.argv[1:],os.environ);"
        "_,status,usage=os.wait4(pid,0);"
        "sys.stderr.write(f'\\nPEAK {usage.ru_maxrss}');"
        "sys.exit(os.waitstatus_to_exitcode(status))"
    )
    result = subprocess.run(
        [sys.executable, "-S", "-c", launcher, *support.surgery_command(*arguments)],
        env=support.surgery_environment(),
        capture_output=True,
        text=True,
    )
    return result, int(result.stderr.rpartition("PEAK ")[2]) / 1024


def markers(directory: Path) -> dict[str, bytes]:
    """The first bytes of every tensor, by own reading of the headers."""
    found = {}
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                file.seek(8 + size + begin)
                found[name] = file.read(min(16, end - begin))
    return found


def test_a_470_gb_checkpoint_is_trimmed_and_repacked_in_little_memory_with_holes_kept(sparse_qwen3_235b, tmp_path):
    source = sparse_qwen3_235b
    looked, memory = rss_of("inspect", source)
    assert looked.returncode == 0, looked.stderr
    assert memory < 150
    result, memory = rss_of("trim", source, tmp_path / "out", "--layers", "0,47,93")
    assert result.returncode == 0, result.stderr
    assert memory < 150
    old = {0: 0, 1: 47, 2: 93}
    found = markers(tmp_path / "out")
    assert len(found) == 3 * (len(make_sparse_layer(source))) + 3
    for name, data in found.items():
        origin = name
        if name.startswith("model.layers."):
            number, rest = name[len("model.layers.") :].split(".", 1)
            origin = f"model.layers.{old[int(number)]}.{rest}"
        assert data == make_sparse.marker(origin)[: len(data)], name
    disk = sum(path.stat().st_blocks * 512 for path in (tmp_path / "out").iterdir())
    assert disk < 60 << 20
    verified, memory = rss_of("verify", tmp_path / "out")
    assert verified.returncode == 0, verified.stdout
    assert memory < 150


def make_sparse_layer(source: Path) -> list[str]:
    index = json.loads((source / "model.safetensors.index.json").read_text())
    return [name for name in index["weight_map"] if name.startswith("model.layers.47.")]


@pytest.mark.slow
def test_a_470_gb_checkpoint_is_repacked_whole(sparse_qwen3_235b, tmp_path):
    result, memory = rss_of("repack", sparse_qwen3_235b, tmp_path / "out", "--max-shard-size", "2GB")
    assert result.returncode == 0, result.stderr
    assert memory < 150
    assert markers(tmp_path / "out") == markers(sparse_qwen3_235b)
    verified, memory = rss_of("verify", tmp_path / "out")
    assert verified.returncode == 0, verified.stdout
    assert memory < 150


def test_errors_of_the_library_say_what_where_and_how_to_mend(tiny_model):
    draft = draft_of(Checkpoint.open(tiny_model("llama")))
    for operation in (Trim("9"), Rename({"x": "y"})):
        with pytest.raises(SurgeryError) as refused:
            run_recipe(draft, [operation])
        assert refused.value.what
        assert refused.value.mend
    with pytest.raises(UsageError):
        run_recipe(draft, [Repack("0")])
