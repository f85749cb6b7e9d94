"""Which files of a directory are the model: the index and its shards, or one file. Never a guess by glob."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from surgery.errors import Finding, SourceError
from surgery.storage import read_bytes

MAX_INDEX_NBYTES = 512 << 20
INDEX_SUFFIX = ".safetensors.index.json"
_NOT_THE_MODEL = ("consolidated", "adapter_model")
_RANK_FILE = re.compile(
    r"model-rank-\d+-part-\d+\.safetensors|model\d+-mp\d+\.safetensors"
    r"|model-tp\d+-of-\d+\.safetensors|shard-\d+-model-\d+-of-\d+\.safetensors"
)
_SHARD_FILE = re.compile(r"(.+)-(\d{5,})-of-(\d{5,})\.safetensors")


class ModelFiles(msgspec.Struct):
    """The files that are the model, sorted by name. `index` maps tensor names to them where there is one.

    `alternative` is a single file beside the index that claims to be the model too.
    """

    names: list[str]
    base_name: str = "model"
    variant: str | None = None
    index_name: str | None = None
    index: dict[str, str] | None = None
    total_size: Any = None
    alternative: str | None = None


def choose_model_files(root: Path, chosen: str | None, findings: list[Finding]) -> ModelFiles:
    """The model's files in `root`; `chosen` is the file the user named, which then counts alone."""
    if chosen is not None and not chosen.endswith(INDEX_SUFFIX):
        return ModelFiles([chosen], base_name=_base_name(chosen))
    entries = sorted(path.name for path in root.iterdir())
    indexes = [chosen] if chosen else [name for name in entries if name.endswith(INDEX_SUFFIX)]
    singles = [name for name in entries if name.endswith(".safetensors")]
    if len(indexes) > 1 and f"model{INDEX_SUFFIX}" in indexes:
        findings.append(
            Finding(
                "several-indexes",
                "note",
                f"of {len(indexes)} indexes, model{INDEX_SUFFIX} counts",
                indexes[0],
            )
        )
        indexes = [f"model{INDEX_SUFFIX}"]
    if len(indexes) > 1:
        _fault(
            findings,
            "several-indexes",
            f"{len(indexes)} indexes are there: {', '.join(indexes)}",
            "name the index file itself as SRC",
        )
        return ModelFiles([])
    if indexes:
        model = _indexed(root, indexes[0], entries, findings)
        single = f"{indexes[0].removesuffix(INDEX_SUFFIX)}.safetensors"
        if chosen is None and single in singles and single not in model.names:
            model.alternative = single
        return model
    return _unindexed(singles, findings)


def _fault(findings: list[Finding], kind: str, what: str, mend: str, where: str = "") -> None:
    findings.append(Finding(kind, "fault", what, where, mend))


def _base_name(file: str) -> str:
    return file.removesuffix(".safetensors")


def _unindexed(singles: list[str], findings: list[Finding]) -> ModelFiles:
    """Without an index: `model.safetensors`, or the one file that can be the model."""
    ranks = [name for name in singles if _RANK_FILE.fullmatch(name)]
    if ranks:
        _fault(
            findings,
            "rank-partition",
            f"{len(ranks)} files are tensor-parallel rank partitions (first {ranks[0]}), not storage shards",
            "this version reads Hugging Face layouts only",
            ranks[0],
        )
        return ModelFiles([])
    if "model.safetensors" in singles:
        return ModelFiles(["model.safetensors"])
    candidates = [name for name in singles if not name.startswith(_NOT_THE_MODEL)]
    if len(candidates) == 1 and not _SHARD_FILE.fullmatch(candidates[0]):
        return ModelFiles(candidates, base_name=_base_name(candidates[0]))
    if candidates:
        _fault(
            findings,
            "no-index",
            f"{len(candidates)} safetensors files and no index that says which are the model",
            "`surgery index DIR > DIR/model.safetensors.index.json` writes the index that they deserve",
            candidates[0],
        )
    elif singles:
        _fault(
            findings,
            "no-model",
            f"only {', '.join(singles[:3])}: no weights in Hugging Face layout, and other names are not guessed",
            "convert the publisher's format first, or name the file itself as SRC",
            singles[0],
        )
    else:
        _fault(findings, "no-model", "no safetensors file is there", "name a checkpoint directory")
    return ModelFiles([])


def _indexed(root: Path, index_name: str, entries: list[str], findings: list[Finding]) -> ModelFiles:
    stem = index_name.removesuffix(INDEX_SUFFIX)
    base_name, _, variant = stem.partition(".")
    model = ModelFiles([], base_name, variant or None, index_name)
    try:
        parsed = read_json(root / index_name, MAX_INDEX_NBYTES, index_name)
    except SourceError as error:
        _fault(findings, "index", f"{index_name}: {error.what}", error.mend, index_name)
        return model
    weight_map = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        _fault(
            findings,
            "index",
            f"{index_name} has no weight_map of names to files",
            "make it anew: `surgery index`",
            index_name,
        )
        return model
    metadata = parsed.get("metadata")
    model.total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    model.index = _contained(weight_map, index_name, findings)
    model.names = sorted(set(model.index.values()))
    _judge_missing(model, entries, root, findings)
    return model


def _contained(weight_map: dict[str, str], index_name: str, findings: list[Finding]) -> dict[str, str]:
    """File names as plain paths below the root; a name that leaves it is refused before anything is opened."""
    plain: dict[str, str] = {}
    normal: dict[str, str | None] = {}
    for tensor, file in weight_map.items():
        if file not in normal:
            normal[file] = _normalised(file)
            if normal[file] is None:
                _fault(
                    findings,
                    "file-name",
                    f"the index names {file!r}, which is no plain path inside the checkpoint",
                    "correct the index: file names only",
                    index_name,
                )
        name = normal[file]
        if name is not None:
            plain[tensor] = name
    return plain


def _normalised(file: str) -> str | None:
    if not file or file.startswith("/") or "\\" in file or "\0" in file or re.match(r"[A-Za-z]:", file):
        return None
    parts = [part for part in file.split("/") if part not in ("", ".")]
    if not parts or ".." in parts:
        return None
    return "/".join(parts)


def _judge_missing(model: ModelFiles, entries: list[str], root: Path, findings: list[Finding]) -> None:
    """All missing files at once, how many tensors they hold, and whether the index is of another save (case X05)."""
    assert model.index is not None
    present = set(entries)
    missing = [
        name
        for name in model.names
        if name not in present and not (root / name).exists() and not (root / name).is_symlink()
    ]
    if not missing:
        return
    counts = Counter(model.index.values())
    lost = sum(counts[name] for name in missing)
    others = [name for name in entries if _SHARD_FILE.fullmatch(name) and name not in model.names]
    stale = (
        f"; {len(others)} other shards are there (first {others[0]}): the index is of another save" if others else ""
    )
    _fault(
        findings,
        "missing-file",
        f"{len(missing)} of {len(model.names)} files are missing, with {lost} tensors: "
        + ", ".join(missing[:20])
        + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
        + stale,
        f"`surgery index DIR > DIR/{model.index_name}` rebuilds the index from the headers"
        if others
        else "get the missing files: the download was not complete",
        missing[0],
    )
    model.names = [name for name in model.names if name not in missing]
    model.index = (
        {name: file for name, file in model.index.items() if file not in missing} if not others else model.index
    )


class _DuplicateKey(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise _DuplicateKey(f"the key {repeated!r} is there twice")
    return found


def read_json(path: Path, max_nbytes: int, where: str) -> Any:
    """A small JSON file, keys in order and unique. Raises `SourceError` with the place of the fault."""
    data = read_bytes(path, max_nbytes, where)
    if data.startswith(b"\xef\xbb\xbf"):
        raise SourceError("it begins with a byte order mark, which JSON forbids", where, "save it as UTF-8 without BOM")
    if data.startswith(b"version https://git-lfs"):
        raise SourceError("a Git LFS pointer, not the file", where, "run `git lfs pull`")
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise SourceError(f"not UTF-8 at byte {error.start}", where, "get the file again") from error
    except (ValueError, RecursionError) as error:
        raise SourceError(f"not JSON: {error}", where, "get the file again, or correct it") from error
