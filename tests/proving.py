"""What is proven of a model type, by doing it: trim a tiny model of transformers' own class and look at what comes out.

Used by tests/test_zoo.py (one selection each, random ones behind the slow marker) and by tools/prove_families.py, which
writes tests/proven_families.md from its run.
"""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import model_zoo

from surgery import skeleton
from surgery.check import check
from surgery.checkpoint import Checkpoint
from surgery.draft import draft_of
from surgery.errors import CannotApply
from surgery.execute import execute
from surgery.families.records import FAMILIES, find_family
from surgery.operations.recipe import run_recipe
from surgery.operations.trim import Trim
from surgery.plan import make_plan

# Types whose layers compute with their own number or the depth: what may be kept is told, the rest is refused.
BOUND = {
    "diffllama": [0, 1, 2],
    "minicpm3": [3, 1, 0, 2, 5, 4],
    "minimax": [0, 1, 2, 3, 4, 5],
}
# No logits to compare: the model cut in memory cannot run (shared caches, per-layer embeddings), or not without images.
NO_LOGITS = {
    "gemma3n_text": "the class cannot be cut in memory: embeddings per layer, shared caches",
    "gemma4_text": "the class cannot be cut in memory: embeddings per layer, shared caches",
    "llama4": "transformers 5.24 cannot run the wrapper without images",
}
# `surgery check` of the tiny model: the class itself saves zero experts as experts, which no real checkpoint has.
NOT_CHECKED = frozenset(("longcat_flash",))
# Records whose class transformers lacks, or cannot save and load by itself.
UNPROVEN = {
    "kimi_k2": "no class of its own: DeepSeek-V3's serves it (deepseek_v3 is proven)",
    "kimi_k25": "transformers 5.24 saves its text layers under names it does not load",
    "deepseek_v41": "no class: rules alone, tests/test_trim_review.py",
    "deepseek_v4_1": "no class: rules alone, tests/test_trim_review.py",
    "nemotron_h": "tests/test_families.py",
    "jamba": "tests/test_families.py",
    "deepseek_v4": "tests/test_families.py",
}


def zoo_kinds() -> list[str]:
    """Every type that a tiny model is made of here: all records, and the wrappers."""
    kinds = {kind for family in FAMILIES for kind in family.model_types} | set(model_zoo.WRAPPED)
    return sorted(kind for kind in kinds - set(UNPROVEN) if _has_class(kind))


def _has_class(kind: str) -> bool:
    try:
        model_zoo.class_of(kind)
    except KeyError:
        return False
    return True


@dataclass
class Proof:
    """What one selection showed. `kinds` are the kinds of layers that the model has."""

    kept: list[int]
    logits: bool
    kinds: int


def prove(kind: str, directory: Path, *, seed: int = 0, selections: int = 1) -> list[Proof]:
    """Trim a tiny model of `kind` to layers that are no prefix; everything must hold, or this raises."""
    source = directory / "source"
    if not source.exists():
        model_zoo.build(kind, source)
        if kind not in NOT_CHECKED:
            report = check(source)
            assert {question.verdict for question in report.questions} == {"passed"}, report
    config = json.loads((source / "config.json").read_text())
    family = find_family(config)
    assert family is not None, kind
    kinds = len({repr(facts) for facts in family.all_facts(config, model_zoo.DEPTH, "transformers")})
    proofs = []
    for number, kept in enumerate(_selections(kind, seed)):
        out = directory / f"out-{number}"
        shutil.rmtree(out, ignore_errors=True)
        try:
            draft = run_recipe(
                draft_of(Checkpoint.open(str(source))), [Trim(",".join(map(str, kept)), reader="transformers")]
            )
        except CannotApply:
            assert kind not in BOUND
            continue
        execute(make_plan(draft), out)
        model = model_zoo.load_strict(out, kind)
        if kind not in NO_LOGITS:
            import torch

            wanted = model_zoo.logits(model_zoo.cut_in_memory(source, kind, kept))
            assert torch.equal(model_zoo.logits(model), wanted), f"{kind} {kept}: logits differ"
        new = json.loads((out / "config.json").read_text())
        old_skeleton, new_skeleton = skeleton.build(config, family.native), skeleton.build(new, family.native)
        cut = skeleton.Cut(
            family.stack.name, family.section(config)[0], tuple(kept), model_zoo.DEPTH, family.first_only
        )
        differences = skeleton.difference(old_skeleton, new_skeleton, [cut])
        assert not differences, f"{kind} {kept}: {differences[:3]}"
        proofs.append(Proof(kept, kind not in NO_LOGITS, kinds))
        shutil.rmtree(out)
        if len(proofs) == selections:
            break
    return proofs


def _selections(kind: str, seed: int) -> list[list[int]]:
    if kind in BOUND:
        return [BOUND[kind]]
    generator = random.Random(f"{kind} {seed}")
    found = []
    while len(found) < 40:
        kept = [generator.randrange(model_zoo.DEPTH) for _ in range(generator.randint(2, 4))]
        kept = sorted(set(kept)) if len(found) % 2 else kept
        if kept != list(range(len(kept))):
            found.append(kept)
    return found
