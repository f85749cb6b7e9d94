"""What a directory holds: storage shards, or rank partitions of which layout and size. Contents first, then names.

A stale index beside rank files is normal (vLLM copies it), so rank files are looked for before an index is believed; an
index whose files are all there means storage shards (facts/tensor-parallel.md section 6).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from surgery.checkpoint import Checkpoint
from surgery.errors import Finding, Problems, SourceError
from surgery.layouts.dcp_hf import SHARDING_INFO
from surgery.layouts.vllm_names import EXPERTS, SCALES
from surgery.model_files import read_json
from surgery.safetensors_file import Header, read_header

LAYOUTS = ("hf-rank", "dcp-hf", "vllm", "deepseek")
_NAMES: dict[str, re.Pattern[str]] = {
    "vllm": re.compile(r"model-rank-(?P<rank>\d+)-part-(?P<part>\d+)\.safetensors"),
    "deepseek": re.compile(r"model(?P<rank>\d+)-mp(?P<size>\d+)\.safetensors"),
    "hf-rank": re.compile(r"model-tp(?P<rank>\d+)-of-(?P<size>\d+)\.safetensors"),
    "dcp-hf": re.compile(r"shard-(?P<rank>\d+)-model-(?P<part>\d+)-of-(?P<parts>\d+)\.safetensors"),
}
_MAX_INDEX_NBYTES = 512 << 20


class RankFileFound(msgspec.Struct):
    """A rank file, its rank by its name, and what its header holds."""

    name: str
    rank: int
    header: Header


class RankSet(msgspec.Struct):
    """The rank files of a directory. `evidence` says why they are taken for this layout."""

    layout: str
    ranks: int
    files: list[RankFileFound]
    evidence: str


def detect(root: Path, given: str = "") -> RankSet | None:
    """The rank files in `root`; None where it holds storage shards. `given` is the layout that the user names.

    Raises `SourceError` for a missing rank, sizes that disagree, two layouts, or ranks beside storage shards.
    """
    names = sorted(path.name for path in root.glob("*.safetensors"))
    named = {name: (layout, match) for name in names for layout, match in [_named(name)] if match is not None}
    if not named and not given:
        return None
    storage = _storage_files(root)
    if storage and not given:
        ranked = ", ".join(sorted({layout for layout, _ in named.values()}))
        raise SourceError(
            f"there are storage shards that an index names, and rank files ({ranked}) besides",
            str(root),
            "--from hf or --from LAYOUT says which of them is the source",
        )
    if given == "hf":
        return None
    chosen = {name: match for name, (layout, match) in named.items() if not given or layout == given}
    if not chosen:
        raise SourceError(f"there is no file of the layout {given}", str(root), "leave --from out, or name another")
    layouts = sorted({named[name][0] for name in chosen})
    if len(layouts) > 1:
        told = "; ".join(f"{layout}: {next(n for n in chosen if named[n][0] == layout)}" for layout in layouts)
        raise SourceError(f"rank files of several layouts are there ({told})", str(root), "--from names one of them")
    files = [
        RankFileFound(name, int(match["rank"]), read_header(root / name, number, name))
        for number, (name, match) in enumerate(sorted(chosen.items(), key=lambda each: _order(each[1])))
    ]
    layout, evidence = _by_contents(layouts[0], [file.header for file in files])
    if given and layout != given:
        raise SourceError(f"the files hold {layout} ({evidence}), not {given}", str(root), f"--from {layout}")
    return RankSet(layout, _size(root, layout, files, chosen), files, evidence)


def _named(name: str) -> tuple[str, re.Match[str] | None]:
    for layout, pattern in _NAMES.items():
        match = pattern.fullmatch(name)
        if match is not None:
            return layout, match
    return "", None


def _order(match: re.Match[str]) -> tuple[int, int]:
    return int(match["rank"]), int(match.groupdict().get("part") or 0)


def _storage_files(root: Path) -> list[str]:
    """The files that an index names, where they are all there."""
    for path in sorted(root.glob("*.safetensors.index*.json")):
        try:
            parsed = read_json(path, _MAX_INDEX_NBYTES, path.name)
            files = sorted(set(parsed["weight_map"].values()))
        except (SourceError, KeyError, TypeError, AttributeError):
            continue
        if files and all(isinstance(file, str) and (root / file).is_file() and not _named(file)[1] for file in files):
            return files
    return ["model.safetensors"] if (root / "model.safetensors").is_file() else []


def _by_contents(named: str, headers: Sequence[Header]) -> tuple[str, str]:
    """The layout that the headers speak of, and what says so."""
    if all(SHARDING_INFO in (header.metadata or {}) for header in headers):
        return "dcp-hf", f"every header has {SHARDING_INFO}"
    names = [tensor.name for header in headers for tensor in header.tensors]
    if any(name.endswith(SCALES) or f".{EXPERTS}." in name for name in names):
        return "vllm", "names of vLLM's own state"
    if any(re.match(r"layers\.\d+\.(?:attn|ffn)\.", name) for name in names):
        return "deepseek", "names of DeepSeek's own code"
    if named in ("vllm", "deepseek", "dcp-hf"):
        return named, "names of the files"
    return "hf-rank", "Hugging Face names"


def _size(root: Path, layout: str, files: Sequence[RankFileFound], chosen: Mapping[str, re.Match[str]]) -> int:
    """How many ranks there are. Raises `SourceError` for gaps and sizes that disagree."""
    base = 1 if layout == "dcp-hf" else 0
    held = sorted({file.rank - base for file in files})
    sizes = {int(match["size"]) for match in chosen.values() if match.groupdict().get("size")}
    if len(sizes) > 1:
        listed = " and ".join(map(str, sorted(sizes)))
        raise SourceError(f"rank files of {listed} ranks are there", str(root), "keep the files of one save")
    size = sizes.pop() if sizes else held[-1] + 1
    problems = Problems()
    missing = [rank for rank in range(size) if rank not in held]
    if missing:
        problems.add(
            f"rank {', '.join(str(rank + base) for rank in missing)} of {size} has no file",
            str(root),
            "get the missing rank files",
        )
    surplus = [rank for rank in held if not 0 <= rank < size]
    if surplus:
        problems.add(f"rank {surplus[0] + base} of {size} ranks", str(root), "keep the files of one save")
    _judge_parts(root, chosen, problems)
    problems.raise_if_any(SourceError, "the rank files are not complete")
    for file in files:
        file.rank -= base
    return size


def _judge_parts(root: Path, chosen: Mapping[str, re.Match[str]], problems: Problems) -> None:
    """Parts of one rank follow each other without gaps."""
    parts: dict[int, list[int]] = {}
    for match in chosen.values():
        if match.groupdict().get("part") is not None:
            parts.setdefault(int(match["rank"]), []).append(int(match["part"]))
    for rank, held in parts.items():
        first = min(held)
        if sorted(held) != list(range(first, first + len(held))) or first not in (0, 1):
            problems.add(f"rank {rank} has parts {sorted(held)}", str(root), "get the missing parts")


def manifest_partition(root: Path) -> dict[str, object] | None:
    """What a manifest of ours says of the partition beside it; None where there is none."""
    try:
        found = json.loads((root / "surgery.json").read_text("utf-8")).get("partition")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, dict) else None


def with_ranks(checkpoint: Checkpoint) -> tuple[Checkpoint, RankSet | None]:
    """A survey in which rank files are what they are: a note where they are complete, and no strays; their own fault
    where they are not."""
    if checkpoint.files or not any(finding.kind == "rank-partition" for finding in checkpoint.findings):
        return checkpoint, None
    findings = [finding for finding in checkpoint.findings if finding.kind != "rank-partition"]
    try:
        found = detect(checkpoint.root)
    except SourceError as error:
        fault = Finding("rank-partition", "fault", error.what, error.where, error.mend)
        return msgspec.structs.replace(checkpoint, findings=[*findings, fault]), None
    if found is None:
        return checkpoint, None
    names = {file.name for file in found.files}
    told = f"{found.ranks} ranks of layout {found.layout} ({found.evidence}), each with a part of every tensor"
    mend = "`surgery reshard DIR OUT --tp 1 --layout hf` merges them"
    return (
        msgspec.structs.replace(
            checkpoint,
            findings=[*findings, Finding("rank-partition", "note", told, found.files[0].name, mend)],
            strays=[stray for stray in checkpoint.strays if stray.name not in names],
        ),
        found,
    )
