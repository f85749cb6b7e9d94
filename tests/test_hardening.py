"""Faults that a hostile reader found, each with the right answer: same headers with other weights, names that lead out
of the output, files that arrive meanwhile, plans in the source, odd scalars, names, patterns and paths."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from test_publishing import crash_at, tree

import support
from surgery.checkpoint import Checkpoint
from surgery.draft import draft_of
from surgery.errors import OutputError
from surgery.execute import Options, execute
from surgery.operations.recipe import run_recipe
from surgery.operations.repack import Repack
from surgery.operations.trim import Trim
from surgery.plan import make_plan


@pytest.fixture
def source(tiny_model, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "source"))


@pytest.fixture
def other(source, tmp_path) -> Path:
    """The same headers, other weights: a model that was trained on and saved again."""
    changed = Path(shutil.copytree(source, tmp_path / "other"))
    for path in changed.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        data[start:] = bytes(byte ^ 1 for byte in data[start:])
        path.write_bytes(data)
    return changed


def plan_for(source: Path, *operations):
    return make_plan(run_recipe(draft_of(Checkpoint.open(source)), operations or (Trim("0,4,2"), Repack("20kB"))))


def test_other_weights_under_the_same_headers_are_not_the_finished_result(source, other, tmp_path):
    assert support.run_surgery("trim", source, tmp_path / "out", "--layers", "0,2").returncode == 0
    again = support.run_surgery("trim", other, tmp_path / "out", "--layers", "0,2")
    assert again.returncode == 4
    over = support.run_surgery("trim", other, tmp_path / "out", "--layers", "0,2", "--overwrite")
    assert over.returncode == 0
    assert support.run_surgery("verify", tmp_path / "out", "--against", other).returncode == 0


def test_other_weights_under_the_same_headers_are_not_resumed_into(source, other, tmp_path, monkeypatch):
    monkeypatch.setattr("surgery.engine.worker.JOURNAL_EVERY_NBYTES", 1)
    monkeypatch.setattr("surgery.engine.groups.UNIT_NBYTES", 1)
    assert crash_at(90, plan_for(source), tmp_path / "out", workers=1)
    execute(plan_for(other), tmp_path / "out")
    execute(plan_for(other), tmp_path / "clean")
    assert tree(tmp_path / "out") == tree(tmp_path / "clean")


def test_a_manifest_that_names_files_elsewhere_deletes_nothing(source, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    out = tmp_path / "out"
    out.mkdir()
    for name in (str(victim), "../victim"):
        files = {"config.json": {"nbytes": 1}, name: {"nbytes": 1}}
        (out / "surgery.json").write_text(json.dumps({"format": 1, "tool": "x", "plan": "x", "files": files}))
        (out / "config.json").write_text("x")
        with pytest.raises(OutputError):
            execute(plan_for(source), out, Options(overwrite=True))
        assert victim.read_text() == "mine"
    shutil.rmtree(out)
    (out / ".surgery-partial").mkdir(parents=True)
    moving = {"old": ["../victim"], "new": []}
    (out / ".surgery-partial" / "publishing.json").write_text(json.dumps(moving))
    execute(plan_for(source), out)
    assert victim.read_text() == "mine"


def test_a_file_that_arrives_while_an_output_is_replaced_is_not_deleted(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    execute(plan_for(source), out)
    from surgery.engine import output_files

    finish = output_files.finish_files
    monkeypatch.setattr(
        "surgery.execute.finish_files", lambda job: (finish(job), (out / "notes.txt").write_text("mine"))
    )
    with pytest.raises(OutputError, match=r"notes\.txt"):
        execute(plan_for(source, Trim("1")), out, Options(overwrite=True))
    assert (out / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("option", ["-o", "--plan-out"])
def test_a_plan_is_never_written_into_the_source(source, tmp_path, option):
    before = tree(source)
    for name in ("config.json", "model-00001-of-00015.safetensors", "new.json"):
        if option == "-o":
            arguments = ["plan", "repack", source, "-o", source / name]
        else:
            arguments = ["repack", source, tmp_path / "x", "--dry-run", "--plan-out", source / name]
        assert support.run_surgery(*arguments).returncode == 2
    assert tree(source) == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"name":"generation_config.json"', '"name":".surgery-partial/x"'),
        ('"name":"generation_config.json"', '"name":"lost+found/x"'),
        ('"name":"generation_config.json"', '"name":"SURGERY.JSON"'),
        ('"name":"generation_config.json"', '"name":"Config.json"'),
        ('"name":"generation_config.json"', '"name":"config.json/x"'),
        ('"source_name":"generation_config.json"', '"source_name":"../x"'),
        ('"index":null', '"index":""'),
        ('"index":null', '"index":"sub/i.json"'),
        ('"roots":["', '"roots":["\\u0000'),
    ],
)
def test_a_plan_with_names_that_cannot_be_is_refused(source, tmp_path, old, new):
    plan = tmp_path / "plan.json"
    assert support.run_surgery("plan", "trim", source, "--layers", "1", "-o", plan).returncode == 0
    assert old in plan.read_text()
    plan.write_text(plan.read_text().replace(old, new, 1))
    result = support.run_surgery("apply", plan, tmp_path / "out")
    assert result.returncode == 2, result.stderr
    assert not (tmp_path / "out").exists()


def test_a_pipe_as_a_side_file_of_a_plan_is_refused_without_waiting(source, tmp_path):
    plan = tmp_path / "plan.json"
    assert support.run_surgery("plan", "trim", source, "--layers", "1", "-o", plan).returncode == 0
    (source / "generation_config.json").unlink()
    os.mkfifo(source / "generation_config.json")
    assert support.run_surgery("apply", plan, tmp_path / "out", timeout=30).returncode == 3


@pytest.mark.parametrize(
    "text",
    [
        "layers: 2024-13-45",
        "layers: !!int abc",
        "layers: !!timestamp x",
        "layers: 1:30",
        "layers: .nan",
    ],
)
def test_yaml_scalars_are_text_and_what_is_no_layer_list_is_a_usage_error(source, tmp_path, text):
    (tmp_path / "recipe.yaml").write_text(f"recipe:\n- operation: trim\n  {text}\n")
    result = support.run_surgery("run", source, tmp_path / "out", tmp_path / "recipe.yaml")
    assert result.returncode == 2, result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--map", b"model.norm=\xff"],
        ["--regex", "--map", "a{99999999999}=b"],
        ["--regex", "--map", "(" * 3000 + "=b"],
    ],
)
def test_names_and_patterns_that_cannot_be_are_usage_errors(source, tmp_path, arguments):
    command = [*support.surgery_command("rename", source, tmp_path / "out"), *arguments]
    result = subprocess.run(command, env=support.surgery_environment(), capture_output=True)
    assert result.returncode == 2, result.stderr[-600:]


def test_a_closed_standard_output_is_no_failure_and_a_full_one_is(source, tmp_path):
    command = support.surgery_command("repack", source, tmp_path / "out")
    shell = " ".join(f"'{part}'" for part in command)
    closed = subprocess.run(["bash", "-c", f"{shell} >&-"], env=support.surgery_environment(), capture_output=True)
    assert closed.returncode == 0, closed.stderr
    command = support.surgery_command("plan", "repack", source)
    shell = " ".join(f"'{part}'" for part in command)
    full = subprocess.run(["bash", "-c", f"{shell} >/dev/full"], env=support.surgery_environment(), capture_output=True)
    assert full.returncode == 4, full.stderr


def test_odd_paths_for_the_output_are_output_errors_and_long_ones_work(source, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    for name in ("loop/x", "a" * 300):
        result = support.run_surgery("repack", source, tmp_path / name)
        assert result.returncode == 4, result.stderr
    assert support.run_surgery("repack", source, tmp_path / ("a" * 250)).returncode == 0


@pytest.mark.parametrize("depth", [100_000_000, 10**30])
def test_an_absurd_count_of_layers_is_refused_at_once(source, tmp_path, depth):
    config = json.loads((source / "config.json").read_text())
    config["num_hidden_layers"] = depth
    (source / "config.json").write_text(json.dumps(config))
    result = support.run_surgery("trim", source, tmp_path / "out", "--layers", "0", timeout=30)
    assert result.returncode == 2
    assert str(depth) in result.stderr


def test_a_config_nested_absurdly_deep_is_refused(source, tmp_path):
    text = (source / "config.json").read_text().rstrip().removesuffix("}")
    (source / "config.json").write_text(f'{text}, "x": {"[" * 800}{"]" * 800}}}')
    assert support.run_surgery("trim", source, tmp_path / "out", "--layers", "0").returncode == 3


def test_side_files_whose_names_cannot_be_are_left_behind(source, tmp_path):
    (source / "a\\b.txt").write_text("x")
    (source / "README.md").mkdir()
    (source / "README.md" / "x.txt").write_text("x")
    result = support.run_surgery("repack", source, tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out" / "README.md").is_file()
    decisions = json.loads((tmp_path / "out" / "surgery.json").read_text())["decisions"]
    assert sum(decision["rule"] == "side file" for decision in decisions) == 2


def kill_when(function: str, plan, out: Path, *, after: bool = False, **options) -> None:
    """Run the plan in a child that kills itself at its first call of `module.function`, before or after it."""
    import importlib
    import signal

    pid = os.fork()
    if pid == 0:
        module_name, _, name = function.rpartition(".")
        module = importlib.import_module(module_name)
        original = getattr(module, name)

        def deadly(*arguments, **keywords):
            if after:
                original(*arguments, **keywords)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(module, name, deadly)
        try:
            execute(plan, out, Options(**options))
        finally:
            os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def test_killed_after_the_exchange_no_old_byte_comes_out_under_the_new_plan(source, tmp_path):
    out = tmp_path / "out"
    execute(plan_for(source, Trim("0,1")), out)
    kill_when("surgery.kernel.exchange", plan_for(source, Trim("2,3")), out, after=True, overwrite=True)
    shutil.rmtree(out)
    execute(plan_for(source, Trim("2,3")), out)
    execute(plan_for(source, Trim("2,3")), tmp_path / "clean")
    assert tree(out) == tree(tmp_path / "clean")


def test_killed_after_the_exchange_the_next_plan_can_go_on(source, tmp_path):
    out = tmp_path / "out"
    execute(plan_for(source, Trim("0,1")), out)
    kill_when("surgery.kernel.exchange", plan_for(source, Trim("2,3")), out, after=True, overwrite=True)
    execute(plan_for(source, Trim("4")), out, Options(overwrite=True))
    execute(plan_for(source, Trim("4")), tmp_path / "clean")
    assert tree(out) == tree(tmp_path / "clean")


@pytest.mark.parametrize("after", [False, True])
def test_killed_while_the_staging_directory_is_bound_nothing_stale_is_built_on(tmp_path, after):
    from test_publishing import big_sparse

    first, second = big_sparse(tmp_path / "first", 1 << 20), big_sparse(tmp_path / "second", 1 << 20)
    data = bytearray((first / "model.safetensors").read_bytes())
    data[5000:5010] = b"0123456789"
    (first / "model.safetensors").write_bytes(data)
    out = tmp_path / "out"
    kill_when("surgery.execute.finish_files", plan_for(first, Repack()), out)
    for journal in (tmp_path / ".out.surgery-partial").glob("journal.*"):
        journal.unlink()
    kill_when("surgery.execute.bind", plan_for(second, Repack()), out, after=after)
    execute(plan_for(second, Repack()), out)
    execute(plan_for(second, Repack()), tmp_path / "clean")
    assert tree(out) == tree(tmp_path / "clean")


def test_a_refused_run_takes_nothing_away_from_an_output_that_was_being_replaced_in_place(
    source, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    execute(plan_for(source, Trim("0,1")), out)
    monkeypatch.chdir(out)
    kill_when("json.dump", plan_for(source, Trim("2,3")), out, after=True, overwrite=True)
    before = {name: digest for name, digest in tree(out).items() if not name.startswith(".surgery-partial")}
    with pytest.raises(OutputError):
        execute(plan_for(source, Trim("1")), out)
    assert before.items() <= tree(out).items()


def test_a_source_that_links_into_the_output_is_refused(source, tmp_path):
    out = tmp_path / "out"
    execute(plan_for(source, Trim("0,1")), out)
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in out.iterdir():
        if path.name not in ("surgery.json", "README.md"):
            (linked / path.name).symlink_to(path)
    before = tree(out)
    result = support.run_surgery("trim", linked, out, "--layers", "0", "--overwrite", "--allow-outside-links")
    assert result.returncode == 2, result.stderr
    assert tree(out) == before


def test_an_output_that_is_the_current_directory_stays_usable(source, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    shell = "surgery() { " + " ".join(f"'{part}'" for part in support.surgery_command()) + ' "$@"; }; '
    script = shell + f"surgery trim '{source}' . --layers 0 && ls surgery.json && surgery verify ."
    result = subprocess.run(
        ["bash", "-c", script], cwd=out, env=support.surgery_environment(), capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr + result.stdout


def test_a_chain_of_outputs_is_proven_and_a_changed_config_is_not_the_planned_source(source, tmp_path):
    (source / "README.md").write_text("the publisher's card")
    assert support.run_surgery("trim", source, tmp_path / "a", "--layers", "0-3").returncode == 0
    assert support.run_surgery("trim", tmp_path / "a", tmp_path / "b", "--layers", "0,2").returncode == 0
    assert support.run_surgery("verify", tmp_path / "b", "--against", tmp_path / "a").returncode == 0
    plan = tmp_path / "plan.json"
    assert support.run_surgery("plan", "trim", source, "--layers", "0", "-o", plan).returncode == 0
    config = json.loads((source / "config.json").read_text())
    config["rms_norm_eps"] = 0.5
    (source / "config.json").write_text(json.dumps(config))
    result = support.run_surgery("apply", plan, tmp_path / "c")
    assert result.returncode == 3
    assert "config.json" in result.stderr


def test_a_variant_is_found_by_transformers_again(source, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.save_pretrained(tmp_path / "fp16", variant="fp16", max_shard_size="30KB")
    for limit in ("20kB", "1GB"):
        out = tmp_path / f"out{limit}"
        assert support.run_surgery("repack", tmp_path / "fp16", out, "--max-shard-size", limit).returncode == 0
        again = AutoModelForCausalLM.from_pretrained(out, variant="fp16", dtype=torch.float32)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_the_space_that_a_sparse_source_needs_is_what_its_data_needs(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    entries = {
        "a": {"dtype": "U8", "shape": [4 << 20], "data_offsets": [0, 4 << 20]},
        "b": {"dtype": "U8", "shape": [400 << 20], "data_offsets": [4 << 20, 404 << 20]},
    }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with (source / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header + os.urandom(4 << 20))
        file.truncate(8 + len(header) + (404 << 20))
    from surgery.engine.space import allocated_nbytes

    plan = plan_for(source, Repack())
    needed = allocated_nbytes(plan, [source / "model.safetensors"])
    assert 4 << 20 <= needed < 6 << 20


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"offset":', '"offset":4'),
        ('"whole":{"name":"', '"whole":{"name":"x'),
        ('"tensors_out":', '"tensors_out":9'),
        ('"name":"model.safetensors"', '"name":"weights.txt"'),
    ],
)
def test_a_plan_that_says_what_is_not_so_is_refused(source, tmp_path, old, new):
    plan = tmp_path / "plan.json"
    assert support.run_surgery("plan", "trim", source, "--layers", "1", "-o", plan).returncode == 0
    assert old in plan.read_text()
    plan.write_text(plan.read_text().replace(old, new, 1))
    result = support.run_surgery("apply", plan, tmp_path / "out")
    assert result.returncode in (2, 3), result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"source", "plan.json"}


def test_a_quantisation_section_that_names_renamed_modules_unlisted_is_refused(source, tmp_path):
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"layers": {"model.layers.0.mlp.up_proj": 4}}
    (source / "config.json").write_text(json.dumps(config))
    result = support.run_surgery("rename", source, tmp_path / "out", "--map", "model=lm")
    assert result.returncode == 2
    assert "model.layers.0.mlp.up_proj" in result.stderr


def test_a_key_that_is_twice_in_a_recipe_is_refused(source, tmp_path):
    (tmp_path / "recipe.yaml").write_text("recipe:\n- operation: trim\n  layers: 0\n  layers: 1\n")
    result = support.run_surgery("run", source, tmp_path / "out", tmp_path / "recipe.yaml")
    assert result.returncode == 2
    assert "twice" in result.stderr


def test_a_sample_is_never_empty_and_takes_its_share(source, tmp_path):
    assert support.run_surgery("trim", source, tmp_path / "out", "--layers", "0-3").returncode == 0
    count = len(json.loads((tmp_path / "out" / "surgery.json").read_text())["tensors"])
    for share in (0.001, 0.1, 0.5):
        report = support.run_surgery("verify", tmp_path / "out", "--against", source, "--sample", str(share), "--json")
        assert report.returncode == 0
        assert json.loads(report.stdout)["source_proof"]["tensors"] == max(1, round(share * count))
    assert support.run_surgery("verify", tmp_path / "out", "--sample", "0.5").returncode == 2


def test_nothing_to_judge_is_no_verdict(tmp_path):
    (tmp_path / "empty").mkdir()
    assert support.run_surgery("verify", tmp_path / "empty").returncode == 3
    assert support.run_surgery("verify", tmp_path / "empty", "--sums").returncode == 3
