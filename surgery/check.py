"""Check: is a checkpoint what its config says? Headers and config alone, no weights, no GPU: the shape check of a CI.

Three answers to every question, never blurred: passed, failed, unverified with the reason. What headers and the family
tell is `verifying.loading`; the names, shapes and dtypes that the class demands come from its skeleton; blind spots of
the class's own load path (expert ids, MTP stages, packed weights, module lists) are judged here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from surgery.checkpoint import Checkpoint
from surgery.errors import Finding, SourceError, printable
from surgery.families.generic import generic_family
from surgery.families.mtp_names import is_mtp_name
from surgery.families.records import family_named, find_family
from surgery.layouts.detection import with_ranks
from surgery.legality import Legality, legality
from surgery.manifest import MANIFEST_NAME
from surgery.packed_weights import Unpacked, Weight, unpacked
from surgery.quantization import QUANTIZATION_FILES
from surgery.sizes import human_size
from surgery.verifying.loading import check_loading
from surgery.verifying.module_lists import check_module_lists
from surgery.verifying.packing import check_packing, unread_packing
from surgery.verifying.verdicts import Answer, Findings

MAX_SHOWN = 20


class Question(msgspec.Struct):
    """One question, its answer, what was seen in words, and why it could not be looked at where it was not."""

    question: str
    verdict: Answer
    told: str = ""


class CheckReport(msgspec.Struct):
    """`witness`: the class and library that the skeleton was built with, empty where none was. `verdict` is the worst
    of the questions'."""

    directory: str
    witness: str
    questions: list[Question]
    legality: Legality | None
    findings: list[Finding]

    verdict: Answer = "passed"

    def __post_init__(self) -> None:
        answers = {question.verdict for question in self.questions}
        self.verdict = "failed" if "failed" in answers else "unverified" if "unverified" in answers else "passed"


def check(
    directory: Path,
    *,
    against: Path | None = None,
    for_tp: int = 0,
    for_ep: int = 0,
    named: str = "",
    allow_outside_links: bool = False,
) -> CheckReport:
    """Judge `directory`; with `against`, also that each layer is what the layer it came from was (its manifest's map).
    `named` is a model type whose record and class are taken for a config of another.

    Raises `SourceError` where there is no directory, or nothing in it to judge.
    """
    if not directory.is_dir():
        what = "not a directory" if directory.exists() else "no such directory"
        raise SourceError(what, str(directory), "name a checkpoint directory as DIR")
    checkpoint, ranks = with_ranks(Checkpoint.survey(directory.resolve(), allow_outside_links=allow_outside_links))
    if not checkpoint.files and checkpoint.config is None:
        raise SourceError("there is nothing to judge: no weights, no config", str(directory), "name a checkpoint")
    checking = _Checking(checkpoint, named)
    checking.run()
    if ranks is not None:
        told = f"{ranks.ranks} ranks of layout {ranks.layout} are an engine's own: merge them to have them judged"
        checking.questions.append(Question("names and shapes of ranks", "unverified", told))
    if against is not None:
        checking.compare(against)
    judged = None
    if (for_tp or for_ep) and checkpoint.config is not None:
        judged = checking.judge_ranks(max(1, for_tp), max(1, for_ep))
    return CheckReport(str(directory), checking.witness, checking.questions, judged, checking.findings)


class _Checking:
    """The state of one check."""

    def __init__(self, checkpoint: Checkpoint, named: str) -> None:
        self._checkpoint = checkpoint
        self._config: Mapping[str, Any] = checkpoint.config or {}
        self._family = family_named(self._config, named) if named else find_family(self._config)
        self._native = (self._family.native if self._family is not None else "") or named
        self.questions: list[Question] = []
        self.findings: list[Finding] = []
        self.witness = ""

    def run(self) -> None:
        files = Findings()
        for finding in self._checkpoint.findings:
            if finding.kind != "no-model" or not is_dummy(self._checkpoint.root):
                files.add(finding)
        self._ask("files", files, f"{len(self._checkpoint.files)} files, {len(self._checkpoint.tensors):,} tensors")
        if self._checkpoint.config is None:
            self._ask_config()
            return
        loading = Findings()
        verdict = check_loading(self._checkpoint, loading, self._family, mtp_both_ways=True)
        told = "layers, counts, lists, experts, ties, MTP: " + (self._family.name if self._family else "no record")
        self._ask(
            "config and headers",
            loading,
            told,
            "; ".join(verdict.not_looked_at) if verdict.verdict == "unverified" else "",
        )
        if not self._checkpoint.tensors:
            self.questions.append(Question("names and shapes", "unverified", "there are no weights to judge"))
            return
        weights = unpacked(self._checkpoint.tensors, self._config)
        self._check_packing(weights)
        self._check_skeleton(weights)

    def _ask(self, question: str, findings: Findings, told: str, unverified: str = "") -> None:
        answer: Answer = "failed" if findings.faults else "unverified" if unverified else "passed"
        self.questions.append(Question(question, answer, unverified if answer == "unverified" else told))
        self.findings += findings.kept

    def _ask_config(self) -> None:
        """Without a config there is nothing that the checkpoint could be: no question that might stay open."""
        absent = Findings()
        if not any(finding.kind == "config" for finding in self._checkpoint.findings):
            absent.fault(
                "config", "there is no config.json", "config.json", "put the model's config beside its weights"
            )
        self.findings += absent.kept
        self.questions.append(Question("config", "failed", "there is no config.json that can be read"))

    def _check_packing(self, weights: Unpacked) -> None:
        findings = Findings()
        for name, what in weights.odd:
            findings.fault("scale-shape", f"{name} {what}", name, "get the right tensor", name)
        known = check_module_lists(self._checkpoint.tensors, self._config, weights, self._depth(), findings)
        beside = any(side.name in QUANTIZATION_FILES for side in self._checkpoint.side_files)
        check_packing(self._checkpoint.tensors, self._config, weights, findings, described_beside=beside)
        packed = sum(weight.quantized for weight in weights.weights.values())
        told = f"{packed:,} quantised weights" if packed or known else "nothing is quantised"
        unread = unread_packing(self._config)
        if unread:
            self._ask("quantisation", findings, told, f"how {unread} packs weights is not described here")
            return
        untold = (
            f"{len(weights.untold)} packed tensors tell no shape, first {weights.untold[0]}" if weights.untold else ""
        )
        self._ask("quantisation", findings, told, untold)

    def _depth(self) -> int | None:
        return self._family.depth(self._config) if self._family is not None else None

    def _check_skeleton(self, weights: Unpacked) -> None:
        """Names, shapes and dtypes, by the class's own load path on meta tensors."""
        from surgery.skeleton import NoSkeleton, build, load

        unread = unread_packing(self._config)
        if unread:
            for question in ("names", "shapes", "dtypes"):
                self.questions.append(Question(question, "unverified", f"the weights are packed as {unread}"))
            return
        stages = [name for name in weights.weights if self._is_stage(name)]
        given = {name: weight for name, weight in weights.weights.items() if name not in set(stages)}
        try:
            skeleton = build(self._config, self._native)
            demanded = skeleton.dtypes()
            told = load(skeleton, {name: (weight.dtype, weight.shape) for name, weight in given.items()})
        except NoSkeleton as error:
            for question in ("names", "shapes", "dtypes"):
                self.questions.append(Question(question, "unverified", str(error)))
            return
        self.witness = f"{skeleton.library} {skeleton.class_name}"
        names, shapes = Findings(), Findings()
        packed = {name.rpartition(".")[0] for name in weights.untold}
        for name in told.missing:
            if name.rpartition(".")[0] not in packed:
                names.fault(
                    "missing-tensor", f"there is no {name}", "names of the tensors", "get the missing tensor", name
                )
        for name in told.surplus:
            if name.endswith(".bias") and f"{name.removesuffix('bias')}qweight" in self._checkpoint.tensors:
                # AutoGPTQ wrote a bias of zeros for every layer; engines that have none skip it.
                names.note("surplus-tensor", f"{name} belongs to no part of the class: a quantiser's zeros", name)
                continue
            names.fault("surplus-tensor", f"{name} belongs to no part of the class", name, "correct the config", name)
        misbuilt = self._family.misbuilt if self._family is not None else ()
        for name, held, wanted in told.misshapen:
            if misbuilt and name.endswith(misbuilt):
                continue  # The class's fault, not the checkpoint's.
            what = f"{name} has shape {list(held)}; the config demands {list(wanted)}"
            shapes.fault("wrong-shape", what, name, "correct the config, or get the right tensor", name)
        for what in told.errors:
            shapes.fault("conversion", f"the class cannot take {what}", "names of the tensors")
        looked = f"{len(given):,} names" + (
            f"; {len(stages)} of MTP stages, which the class does not build" if stages else ""
        )
        self._ask("names", names, looked)
        self._ask("shapes", shapes, f"{len(given) - len(told.surplus):,} shapes")
        self._check_dtypes(given, demanded)

    def _check_dtypes(self, given: Mapping[str, Weight], demanded: Mapping[str, str]) -> None:
        findings = Findings()
        seen = 0
        for name, weight in given.items():
            wanted = demanded.get(name)
            if wanted is None or weight.quantized:
                continue
            seen += 1
            if _is_float(wanted) != _is_float(weight.dtype):
                what = f"{name} is {weight.dtype}; the class holds {wanted} there"
                findings.fault("wrong-dtype", what, name, "get the right tensor", name)
        self._ask("dtypes", findings, f"{seen:,} of the class's names: floats are floats, integers integers")

    def _is_stage(self, name: str) -> bool:
        return is_mtp_name(name, self._family, self._depth())

    def compare(self, source: Path) -> None:
        """Each layer of the new skeleton against the layer that it came from, by the manifest's layer map."""
        from surgery.skeleton import Cut, NoSkeleton, build, difference

        path = self._checkpoint.root / MANIFEST_NAME
        family = self._family or generic_family(self._config)
        old = Checkpoint.survey(source.resolve()).config
        try:
            layers = json.loads(path.read_text())["layers"]
        except (OSError, ValueError, KeyError):
            self.questions.append(
                Question("layers of the source", "unverified", "there is no manifest with a layer map")
            )
            return
        if family is None or old is None:
            self._cannot_compare("the source has no config.json")
            return
        findings = Findings()
        try:
            before, after = build(old, self._native), build(self._config, self._native)
        except NoSkeleton as error:
            self._cannot_compare(str(error))
            return
        cuts = []
        for stack in (family, *family.also):
            kept = next((layers[prefix] for prefix in stack.stack.prefixes if prefix in layers), None)
            depth = stack.depth(old)
            if kept is not None and depth is not None:
                cuts.append(Cut(stack.stack.name, stack.section(old)[0], tuple(kept), depth, stack.first_only))
        for what in difference(before, after, cuts):
            findings.fault(
                "other-layer", what, "config.json", "trim again: the config does not say what the source did"
            )
        compared = sum(len(cut.kept) for cut in cuts)
        self._ask(
            "layers of the source",
            findings,
            f"{compared} layers are what they were",
            "" if compared else "no layer map",
        )

    def _cannot_compare(self, why: str) -> None:
        self.questions.append(Question("layers of the source", "unverified", why))

    def judge_ranks(self, tensor_parallel: int, expert_parallel: int) -> Legality:
        tensors = ((each.name, each.shape, each.nbytes) for each in self._checkpoint.tensors.values())
        judged = legality(self._config, tensors, tensor_parallel, expert_parallel)
        findings = Findings()
        for reason in judged.reasons:
            findings.fault("not-divisible", reason, "config.json", "choose another number of ranks")
        size = f"about {human_size(judged.rank_nbytes)} a rank"
        self._ask(f"tensor parallel {tensor_parallel}, expert parallel {expert_parallel}", findings, size)
        return judged


def is_dummy(root: Path) -> bool:
    """Whether the directory was made without weights, on purpose, as its manifest says."""
    try:
        manifest = json.loads((root / MANIFEST_NAME).read_text())
        return any(step.get("operation") == "dummy" for step in manifest["recipe"])
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


def _is_float(dtype: str) -> bool:
    return "float" in dtype


def check_text(report: CheckReport) -> str:
    """The report as a page: a line a question, then the findings."""
    lines = [f"check {report.directory}" + (f" ({report.witness})" if report.witness else "")]
    for question in report.questions:
        lines.append(f"{question.question}: {question.verdict}" + (f" ({question.told})" if question.told else ""))
    if report.legality is not None:
        lines += [f"  note: {note}" for note in report.legality.notes]
    shown: dict[str, int] = {}
    for finding in sorted(report.findings, key=lambda finding: finding.severity != "fault"):
        count = shown[finding.kind] = shown.get(finding.kind, 0) + 1
        if count <= MAX_SHOWN:
            lines.append(f"{finding.severity} {finding.kind}: {finding.what}")
            if finding.mend:
                lines.append(f"  mend: {finding.mend}")
    lines += [f"and {count - MAX_SHOWN} more of {kind}" for kind, count in shown.items() if count > MAX_SHOWN]
    return "\n".join(printable(line) for line in lines) + "\n"
