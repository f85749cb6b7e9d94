"""What `verify` found: three verdicts that are never blurred, the findings behind them, and the page for a person."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from surgery.errors import MAX_LISTED_PROBLEMS, Finding, printable
from surgery.sizes import human_size

Answer = Literal["passed", "failed", "unverified"]

MAX_KEPT_FINDINGS = 1000
"""Findings of one kind that a report carries; the rest is counted, so that a ruined disk makes no endless report."""


class Verdict(msgspec.Struct):
    """`unverified` is not green: nothing was found because nothing, or too little, was looked at."""

    verdict: Answer
    not_looked_at: list[str] = []


class Counts(msgspec.Struct):
    """`nbytes_expected` is what the manifest says the tensors have, `nbytes_written` what the files hold of them."""

    tensors: int = 0
    files: int = 0
    nbytes_hashed: int = 0
    nbytes_expected: int | None = None
    nbytes_written: int = 0


class SourceProof(msgspec.Struct):
    """The bytes derived again from the source. `share` is the part of the output's tensors that was compared."""

    verdict: Answer
    tensors: int = 0
    nbytes: int = 0
    share: float = 0.0
    not_looked_at: list[str] = []


class Report(msgspec.Struct):
    """One look at one directory. `found` counts every finding by its kind, listed in `findings` or not.
    `verdict` is the worst of integrity, loading and source proof: only "failed" makes exit 1."""

    directory: str
    plan: str | None
    integrity: Verdict
    loading: Verdict
    runtime: Verdict
    source_proof: SourceProof | None
    counts: Counts
    findings: list[Finding]
    found: dict[str, int]
    verdict: Answer = "passed"

    def __post_init__(self) -> None:
        open_still = "unverified" in (self.integrity.verdict, self.loading.verdict)
        self.verdict = "failed" if self.failed else "unverified" if open_still else "passed"

    @property
    def failed(self) -> bool:
        """Whether the answer is no (exit 1): something failed, or a proof that was asked for could not be made."""
        if self.source_proof is not None and self.source_proof.verdict == "unverified":
            return True
        answers = [self.integrity, self.loading, self.runtime, self.source_proof]
        return any(answer is not None and answer.verdict == "failed" for answer in answers)


class Findings:
    """Collects the findings behind one verdict."""

    def __init__(self) -> None:
        self.kept: list[Finding] = []
        self.found: dict[str, int] = {}
        self.faults = 0

    def add(self, finding: Finding) -> None:
        count = self.found[finding.kind] = self.found.get(finding.kind, 0) + 1
        self.faults += finding.severity == "fault"
        if count <= MAX_KEPT_FINDINGS:
            self.kept.append(finding)

    def fault(self, kind: str, what: str, where: str = "", mend: str = "", tensor: str | None = None) -> None:
        self.add(Finding(kind, "fault", what, where, mend, tensor))

    def note(self, kind: str, what: str, where: str = "", mend: str = "", tensor: str | None = None) -> None:
        self.add(Finding(kind, "note", what, where, mend, tensor))


def counted(groups: Iterable[Findings]) -> dict[str, int]:
    total: dict[str, int] = {}
    for group in groups:
        for kind, count in group.found.items():
            total[kind] = total.get(kind, 0) + count
    return total


def report_text(report: Report) -> str:
    """The report as a page: verdicts first, then the findings by kind. Every name in it is made printable."""
    lines = [f"verify {report.directory}"]
    lines += _verdict_lines("integrity", report.integrity, _counts_text(report.counts))
    lines += _verdict_lines("loading", report.loading, "")
    lines += _verdict_lines("runtime", report.runtime, "")
    proof = report.source_proof
    if proof is not None:
        told = f"{proof.tensors:,} tensors compared ({proof.share:.1%}), {human_size(proof.nbytes)}"
        told = told if proof.tensors else "no tensor was compared"
        lines += _verdict_lines("source proof", Verdict(proof.verdict, proof.not_looked_at), told)
    for severity in ("fault", "note"):
        lines += _finding_lines([finding for finding in report.findings if finding.severity == severity], report)
    return "\n".join(printable(line) for line in lines) + "\n"


def _counts_text(counts: Counts) -> str:
    text = f"{counts.tensors:,} tensors in {counts.files:,} files"
    if counts.nbytes_expected is None:
        return f"{text}, {human_size(counts.nbytes_written)}"
    return (
        f"{text}; {human_size(counts.nbytes_hashed)} hashed; tensor bytes expected {counts.nbytes_expected:,}, "
        f"written {counts.nbytes_written:,}"
    )


def _verdict_lines(name: str, verdict: Verdict, told: str) -> list[str]:
    lines = [f"{name}: {verdict.verdict}" + (f" ({told})" if told else "")]
    return lines + [f"  not looked at: {reason}" for reason in verdict.not_looked_at]


def _finding_lines(findings: list[Finding], report: Report) -> list[str]:
    """The first 20 findings of each kind, then the count of the rest."""
    kinds: dict[str, list[Finding]] = {}
    for finding in findings:
        kinds.setdefault(finding.kind, []).append(finding)
    lines: list[str] = []
    for kind, group in kinds.items():
        for finding in group[:MAX_LISTED_PROBLEMS]:
            lines.append(f"{finding.severity} {kind}: {finding.what}")
            if finding.where:
                lines.append(f"  where: {finding.where}")
            if finding.mend:
                lines.append(f"  mend: {finding.mend}")
        listed = min(len(group), MAX_LISTED_PROBLEMS)
        # A kind is nearly always of one severity; where it has both, only what is kept can be told apart.
        alone = all(other.severity == group[0].severity for other in report.findings if other.kind == kind)
        rest = (report.found.get(kind, 0) if alone else len(group)) - listed
        if rest > 0:
            lines.append(f"  and {rest:,} more of {kind}")
    return lines
