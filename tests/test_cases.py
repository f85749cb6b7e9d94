"""Every real fault of format, index, I/O, trimming and experts (cases.json), and the test of its right answer."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# Ids of `facts/cases.json` that need no network: the file, and a word in the names of the tests that hold them.
CASES = {
    "F01": ("test_safetensors_file", "lfs"),
    "F02": ("test_safetensors_file", "short"),
    "F03": ("test_safetensors_file", "surplus"),
    "F04": ("test_safetensors_file", "cap"),
    "F05": ("test_safetensors_file", "twice"),
    "F07": ("test_safetensors_file", "metadata"),
    "F08": ("test_safetensors_file", "metadata"),
    "F10": ("test_safetensors_file", "empty"),
    "F11": ("test_safetensors_file", "scalar"),
    "F12": ("test_safetensors_file", "do_not_cover"),
    "F14": ("test_safetensors_file", "over_64_bits"),
    "F16": ("test_safetensors_file", "white_space"),
    "F17": ("test_safetensors_file", "below_a_byte"),
    "F19": ("test_safetensors_file", "dtype"),
    "F20": ("test_publishing", "bit_for_bit"),
    "F21": ("test_safetensors_file", "misaligned"),
    "F23": ("test_publishing", "two_gibibytes"),
    "F25": ("test_execute_tilings", "any_tiling"),
    "X01": ("test_checkpoint", "outside_the_folder"),
    "X02": ("test_checkpoint", "hub_caches_own_links"),
    "X05": ("test_checkpoint", "missing_files"),
    "X06": ("test_checkpoint", "no_file_holds"),
    "X08": ("test_checkpoint", "two_files"),
    "X09": ("test_checkpoint", "ambiguous"),
    "X10": ("test_checkpoint", "consolidated"),
    "X11": ("test_checkpoint", "subfolder"),
    "X13": ("test_trim", "side_files"),
    "X15": ("test_checkpoint", "plain_names"),
    "X16": ("test_publishing", "overwrite"),
    "X17": ("test_trim", "metadata"),
    "T01": ("test_trim", "refused_before_anything"),
    "T02": ("test_families", "deepseek_v4_flash"),
    "T03": ("test_families", "no_config_can_say"),
    "T04": ("test_families", "carried_or_refused"),
    "T07": ("test_families", "wrapper_is_edited"),
    "T09": ("test_families", "behind_the_layers"),
    "T10": ("test_verify", "t10"),
    "T13": ("test_families", "block_for_each_layer"),
    "T14": ("test_quantization", "unquantised_modules"),
    "T20": ("test_trim", "accounted_for"),
    "T11": ("test_trim", "never_vanish"),
    "T12": ("test_verify", "t12_ties"),
    "T16": ("test_verify", "code"),
    "T17": ("test_trim", "side_files"),
    "T18": ("test_checkpoint", "dtype"),
    "I01": ("test_publishing", "disk"),
    "I02": ("test_publishing", "killed_overwrite"),
    "I03": ("test_publishing", "torn_journal"),
    "I05": ("test_publishing", "around_the_source"),
    "I06": ("test_publishing", "umask"),
    "I07": ("test_publishing", "same_bytes"),
    "I09": ("test_publishing", "shrinks"),
    "I10": ("test_publishing", "source_order"),
    "I12": ("test_publishing", "descriptors"),
    "I13": ("test_publishing", "nothing_is_created"),
    "I14": ("test_trim", "hub_cache"),
    "I16": ("test_command_line", "one_document"),
    "I17": ("test_publishing", "standard_output"),
    "I19": ("test_command_line", "worker"),
    "I24": ("test_trim", "shards_hold"),
    "E01": ("test_prune", "router_row"),
    "E02": ("test_prune_layouts", "e02"),
    "E04": ("test_prune", "routing_groups"),
    "E05": ("test_prune", "top_k"),
    "E07": ("test_prune_layouts", "e07"),
    "E08": ("test_prune", "does_not_fit"),
    "E10": ("test_prune_layouts", "e10"),
    "E13": ("test_prune_layouts", "companion"),
    "E14": ("test_prune_layouts", "companion"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_case_has_its_test(case):
    module, word = CASES[case]
    tree = ast.parse((HERE / f"{module}.py").read_text())
    functions = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    names = [name for name in functions if name.startswith("test_")]
    assert any(word in name for name in names), f"{case}: no test of {module} has {word!r} in its name"
