"""The command line's promises: one document on stdout, three lines on stderr, codes that can be trusted."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import support
from surgery.cli.main import COMMANDS
from surgery.errors import UsageError
from surgery.layer_ranges import compact_ranges, parse_ranges
from surgery.sizes import human_size, parse_size


@pytest.fixture
def workplace(tiny_model, tmp_path):
    """A directory with the names that the help's examples use."""
    shutil.copytree(tiny_model("llama", layers=61, hidden_size=8, intermediate_size=8), tmp_path / "SRC")
    assert support.run_surgery("trim", "SRC", "OUT", "--layers", "0,1", cwd=tmp_path).returncode == 0
    (tmp_path / "recipe.yaml").write_text("recipe:\n- operation: trim\n  layers: 0,6,7\n")
    shutil.copytree(tiny_model("qwen3_moe"), tmp_path / "MOE")
    keep = {f"model.layers.{layer}": [0, 3] for layer in range(6)}
    (tmp_path / "keep.json").write_text(json.dumps({"format": 1, "experts": keep}))
    for name in ("BARE", "OTHER"):
        shutil.copytree(tiny_model("qwen3_next"), tmp_path / name)
    save_file({"mtp.fc.weight": torch.zeros(4, 8)}, tmp_path / "OTHER" / "model-mtp.safetensors")
    (tmp_path / "A").symlink_to("SRC")
    (tmp_path / "B").symlink_to("SRC")
    (tmp_path / "DIR").symlink_to("SRC")
    return tmp_path


def test_the_help_of_every_command_has_an_example_and_it_runs(workplace):
    ran = 0
    for name in COMMANDS:
        text = support.run_surgery(name, "--help").stdout
        examples = re.findall(r"^ +(surgery [^\n]+)$", text, re.M)
        assert examples, f"surgery {name} --help has no example"
        for number, example in enumerate(examples):
            arguments = shlex.split(example.partition(" > ")[0])[1:]
            if arguments[0] in ("trim", "prune", "graft", "reshard", "repack", "rename", "run", "apply"):
                arguments = [f"out-{name}-{number}" if argument == "OUT" else argument for argument in arguments]
            if arguments[0] == "prune":
                arguments[1] = "MOE"
            if arguments[0] == "graft":
                arguments[1] = "BARE"
            if "--map" in arguments:
                arguments[arguments.index("--map") + 1] = "model.layers=model.h"
            result = support.run_surgery(*arguments, cwd=workplace)
            expected = 1 if name == "diff" else 0
            assert result.returncode == expected, (example, result.stdout, result.stderr)
            ran += 1
    assert ran >= len(COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["trim", "SRC", "new", "--layers", "0", "--json"], 0),
        (["trim", "SRC", "new", "--layers", "0", "--dry-run", "--json"], 0),
        (["trim", "SRC", "new", "--layers", "99", "--json"], 2),
        (["trim", "SRC", "--json"], 2),
        (["trim", "SRC", "new", "--unknown", "--json"], 2),
        (["trim", "nowhere", "new", "--layers", "0", "--json"], 3),
        (["repack", "SRC", "OUT", "--json"], 4),
        (["inspect", "SRC", "--json"], 0),
        (["inspect", "nowhere", "--json"], 3),
        (["verify", "OUT", "--json"], 0),
        (["diff", "SRC", "SRC", "--json"], 0),
        (["diff", "SRC", "OUT", "--json"], 1),
    ],
)
def test_with_json_stdout_is_one_document_also_on_failure(workplace, arguments, code):
    result = support.run_surgery(*arguments, cwd=workplace, env={"PYTHONWARNINGS": "default"})
    assert result.returncode == code, result.stderr
    document = json.loads(result.stdout)
    if code > 1:
        assert set(document["error"]) >= {"kind", "what", "where", "mend"}


def test_an_error_is_three_lines_on_stderr_and_nothing_on_stdout(workplace):
    for arguments, code in [
        (["trim", "SRC", "new", "--layers", "99"], 2),
        (["trim"], 2),
        (["fly"], 2),
        (["trim", "nowhere", "new", "--layers", "0"], 3),
        (["trim", "SRC", "SRC/new", "--layers", "0"], 2),
        (["trim", "s3://bucket/model", "new", "--layers", "0"], 2),
        (["repack", "SRC", "OUT"], 4),
        (["repack", "SRC", "new", "--max-shard-size", "0"], 2),
        (["apply", "nothing.json", "new"], 3),
        (["run", "SRC", "new", "nothing.yaml"], 2),
        (["verify", "nowhere"], 3),
    ]:
        result = support.run_surgery(*arguments, cwd=workplace)
        assert result.returncode == code, (arguments, result.stderr)
        assert result.stdout == "", arguments
        assert [line.partition(":")[0] for line in result.stderr.splitlines()] == ["error", "where", "mend"], arguments
        assert not (workplace / "new").exists()


def test_control_characters_of_a_name_never_reach_the_terminal(tmp_path):
    import numpy as np
    from safetensors.numpy import save_file

    source = tmp_path / "source"
    source.mkdir()
    evil = "a\x1b[31mred\u202e\x07"
    save_file({evil: np.ones(2, "f4"), "b": np.ones(2, "f4")}, source / "model.safetensors")
    (source / "side\x1b[2J.txt").write_text("x")
    for arguments in (
        ["inspect", source, "--tensors"],
        ["repack", source, tmp_path / "out", "--dry-run"],
        ["rename", source, tmp_path / "out", "--map", f"b={evil}"],
        ["repack", source, tmp_path / "out"],
        ["verify", tmp_path / "out"],
        ["diff", source, tmp_path / "out"],
        ["inspect", source],
    ):
        result = support.run_surgery(*arguments)
        assert "\x1b" not in result.stdout + result.stderr, arguments
        assert "\u202e" not in result.stdout + result.stderr, arguments


def test_a_worker_that_fails_fails_the_command(tiny_model, tmp_path):
    """An exception in a thread is never swallowed (case I19)."""
    code = (
        "import sys\nfrom surgery.engine import worker\n"
        "def boom(*a): raise ValueError('boom')\nworker.copy_chain = boom\n"
        "from surgery.cli.main import run\nsys.exit(run(sys.argv[1:]))"
    )
    import subprocess
    import sys

    arguments = ["trim", str(tiny_model("llama")), str(tmp_path / "out"), "--layers", "0"]
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=support.surgery_environment(), capture_output=True, text=True
    )
    assert result.returncode == 70
    assert "boom" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("5GB", 5 * 10**9),
        ("5GiB", 5 * 2**30),
        ("5G", 5 * 10**9),
        ("1.5kB", 1500),
        ("7", 7),
        ("512 MiB", 512 << 20),
        ("0.1GB", 10**8),
        ("2tib", 2 << 40),
    ],
)
def test_sizes_mean_exactly_what_they_say(text, nbytes):
    assert parse_size(text, "") == nbytes


@pytest.mark.parametrize("text", ["", "0", "-1", "5XB", "GB", "1e9", "0.1B", "5 G B", "nan", "٣GB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UsageError):
        parse_size(text, "")


def test_sizes_are_told_in_decimal_units():
    assert [human_size(n) for n in (0, 999, 1000, 999_999, 17_415_857_664)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "1.00 MB",
        "17.4 GB",
    ]


@pytest.mark.parametrize("text", ["0", "0,6,7", "0-3", "3,2,1", "0-3,60", "5,5,5"])
def test_layer_lists_survive_being_written_and_read(text):
    assert parse_ranges(compact_ranges(parse_ranges(text))) == parse_ranges(text)


def test_every_file_of_a_real_run_is_named_in_the_readme_as_it_is():
    """The README's commands are commands: each `$ surgery X` names one that exists."""
    text = (Path(support.CHECKOUT) / "README.md").read_text()
    named = set(re.findall(r"\$ surgery (\w+)", text))
    assert named <= set(COMMANDS)
    assert {"trim", "verify", "inspect", "repack", "rename", "run", "plan", "apply", "diff"} <= named
