"""Imports point one way, and what has no need of torch does not import it (design section 4)."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import support

PACKAGE = support.CHECKOUT / "surgery"

# A module imports only what stands on an earlier line. One line a layer of the design.
LAYERS = [
    ["surgery"],
    ["errors", "kernel"],
    ["dtypes", "sizes", "layer_ranges"],
    ["regular_file"],
    ["header_json", "skeleton"],
    ["safetensors_file"],
    ["storage"],
    ["side_files"],
    ["model_files", "name_census"],
    ["checkpoint"],
    ["tiling"],
    ["reshaping", "moves", "value_kernels"],
    ["tensor"],
    ["draft"],
    ["quantization_schemes"],
    ["quantization"],
    ["packed_weights"],
    ["families"],
    ["rank_layout"],
    ["config_reading"],
    ["legality"],
    ["plan_types"],
    ["plan_check"],
    ["small_values"],
    ["layouts"],
    ["operations", "model_card"],
    ["plan"],
    ["plan_file", "plan_page", "manifest"],
    ["engine"],
    ["execute"],
    ["verifying"],
    ["verify"],
    ["check"],
    ["layer_kinds"],
    ["inspection", "comparison", "reindex"],
    ["inspection_page", "comparison_page"],
    ["cli"],
    ["__main__"],
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}

NEVER = {
    "execute": {"families", "operations", "verify", "verifying"},
    "engine": {"families", "operations", "verify", "verifying"},
    "verify": {"execute", "engine", "moves", "operations"},
    "verifying": {"execute", "engine", "moves", "operations"},
    "plan": {"families", "operations"},
}
INSIDE_FUNCTIONS_ONLY = {"torch", "accelerate", "transformers", "fsspec", "rich", "numpy", "tqdm", "yaml", "dask"}


def part_of(path: Path) -> str:
    """The module or subpackage of surgery that a file belongs to."""
    relative = path.relative_to(PACKAGE)
    first = relative.parts[0].removesuffix(".py")
    return "surgery" if first == "__init__" else first


def imports(path: Path) -> list[tuple[str, bool]]:
    """Imported module names, and whether each is at the top level and really runs there."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            child.parent = node
    found = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module]
        top = isinstance(node, (ast.Import, ast.ImportFrom)) and isinstance(node.parent, ast.Module)
        found += [(name, top) for name in names]
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    here = part_of(path)
    assert here in RANK, f"{here} has no place in the order: add it to LAYERS"
    for name, top in imports(path):
        if top:
            assert name.partition(".")[0] not in INSIDE_FUNCTIONS_ONLY, f"{name} belongs inside what needs it"
        if name == "surgery" or not name.startswith("surgery."):
            continue
        there = name.split(".")[1]
        if there == here or (here == "surgery" and not top):
            continue
        assert RANK[there] < RANK[here] or not top, f"{here} imports {there}"
        assert there not in NEVER.get(here, set()), f"{here} must not know {there}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_holds_one_thing(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 400
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno < 60, f"{node.name} is {node.end_lineno - node.lineno + 1} lines"


def modules_after(*arguments: str) -> set[str]:
    code = (
        "import sys, json\nfrom surgery.cli.main import run\ncode = run(sys.argv[2:])\n"
        "open(sys.argv[1], 'w').write(json.dumps([code, sorted(sys.modules)]))"
    )
    report = Path(arguments[0])
    subprocess.run(
        [sys.executable, "-c", code, *arguments], env=support.surgery_environment(), check=True, capture_output=True
    )
    code, modules = json.loads(report.read_text())
    assert code == 0
    return set(modules)


def test_no_structural_command_imports_torch_and_trim_not_even_numpy(tiny_model, tmp_path):
    source, out = str(tiny_model("qwen3_moe")), str(tmp_path / "out")
    heavy = {"torch", "accelerate", "transformers", "fsspec", "rich"}
    for arguments, light in [
        (["--help"], {"numpy", "yaml", "tqdm", "msgspec", "surgery.execute"}),
        (["inspect", source], {"numpy", "yaml", "tqdm"}),
        (["trim", source, out, "--layers", "0,2"], {"numpy", "yaml", "tqdm"}),
        (["verify", out, "--against", source], set()),
        (["diff", source, source], set()),
        (["index", source], {"numpy"}),
        (["repack", source, f"{out}2"], {"numpy"}),
    ]:
        found = modules_after(str(tmp_path / "report.json"), *arguments)
        assert not found & (heavy | light), arguments
