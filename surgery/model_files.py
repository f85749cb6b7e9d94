"""Which files of a directory are the model: the index and its shards, or one file. Never a guess by glob."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from surgery.errors import Finding, SourceError, UsageError
from surgery.regular_file import refuse_git_lfs_pointer
from surgery.side_files import Links, is_index_file, is_weight_file
from surgery.storage import read_bytes

MAX_INDEX_NBYTES = 512 << 20
MAX_JSON_DEPTH = 100
"""Several times the index of a million tensors."""
INDEX_SUFFIX = ".safetensors.index.json"
_INDEX_FILE = re.compile(r"(.+?)\.safetensors\.index(?:\.([^./]+))?\.json")
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
    chosen_alone: bool = False


def is_foreign_weights(name: str) -> bool:
    """Safetensors files that are never the model's: another format's, an adapter's, a rank partition's."""
    return name.startswith(_NOT_THE_MODEL) or _RANK_FILE.fullmatch(name) is not None


def located(path: Path) -> tuple[Path, str | None]:
    """The resolved directory of `path`, and the file in it that was named."""
    try:
        if path.is_dir():
            return path.resolve(strict=True), None
        if not os.path.lexists(path):
            raise SourceError("no such file or directory", str(path), "name a checkpoint directory")
        if path.name.endswith(".safetensors") or is_index_file(path.name):
            return path.parent.resolve(strict=True), path.name
    except OSError as error:
        raise SourceError(f"cannot read: {error.strerror}", str(path), "check its permissions") from error
    if path.exists() and not path.is_file():
        raise SourceError("a pipe, socket or device, not a directory or file", str(path), "name a checkpoint directory")
    raise UsageError(
        f"{path.name} is neither a directory nor a .safetensors or {INDEX_SUFFIX} file",
        str(path),
        "name a directory, or one of these files in it",
    )


def choose_model_files(root: Path, chosen: str | None, links: Links, findings: list[Finding]) -> ModelFiles:
    """The model's files in `root`; `chosen` is the file that the user named, which then counts alone."""
    if chosen is not None and not _INDEX_FILE.fullmatch(chosen):
        return msgspec.structs.replace(_single(chosen), chosen_alone=True)
    entries = sorted(path.name for path in root.iterdir())
    if chosen is not None:
        return _indexed(root, chosen, entries, links, findings)
    indexes = [name for name in entries if _INDEX_FILE.fullmatch(name) and not name.startswith(_NOT_THE_MODEL)]
    singles = [name for name in entries if name.endswith(".safetensors")]
    if not indexes:
        return _unindexed(singles, entries, findings)
    index_name = indexes[0] if len(indexes) == 1 else f"model{INDEX_SUFFIX}"
    if index_name not in indexes:
        what = f"{len(indexes)} indexes are there: {', '.join(indexes)}"
        _fault(findings, "several-indexes", what, "name the index file itself as SRC", indexes[0])
        return ModelFiles([])
    if len(indexes) > 1:
        what = f"{len(indexes)} indexes are there ({', '.join(indexes)}): {index_name} counts"
        findings.append(Finding("several-indexes", "note", what, index_name, "name another index file itself as SRC"))
    model = _indexed(root, index_name, entries, links, findings)
    whole = ".".join(filter(None, _index_parts(index_name)))
    for single in (f"{whole}.safetensors", "model.safetensors"):
        if single in singles and single not in model.names:
            model.alternative = single
            break
    return model


def _fault(findings: list[Finding], kind: str, what: str, mend: str, where: str = "") -> None:
    findings.append(Finding(kind, "fault", what, where, mend))


def _single(name: str) -> ModelFiles:
    """One file as the model. `model.fp16` has the variant fp16; of `x-00001-of-00002` the base name is x."""
    shard = _SHARD_FILE.fullmatch(name)
    base_name, _, variant = (shard[1] if shard else name.removesuffix(".safetensors")).partition(".")
    return ModelFiles([name], base_name, variant or None)


def _unindexed(singles: list[str], entries: list[str], findings: list[Finding]) -> ModelFiles:
    """Without an index: `model.safetensors`, or the one file that can be the model."""
    if "model.safetensors" in singles:
        return ModelFiles(["model.safetensors"])
    ranks = [name for name in singles if _RANK_FILE.fullmatch(name)]
    if ranks:
        _fault(
            findings,
            "rank-partition",
            f"{len(ranks)} files are rank partitions of a tensor-parallel layout (first {ranks[0]}), "
            "not storage shards: each holds a part of every tensor",
            "`surgery reshard DIR OUT --tp 1 --layout hf` merges them; trim, prune and reshard take them as they are",
            ranks[0],
        )
        return ModelFiles([])
    candidates = [name for name in singles if not name.startswith(_NOT_THE_MODEL)]
    if len(candidates) == 1:
        shard = _SHARD_FILE.fullmatch(candidates[0])
        if shard is None or int(shard[3]) == 1:
            return _single(candidates[0])
    if candidates:
        _fault(
            findings,
            "no-index",
            f"{len(candidates)} safetensors files ({_listed(candidates)}) and no index that says which are the model",
            "`surgery index DIR > new.json && mv new.json DIR/model.safetensors.index.json` writes it; "
            "where one file is the whole model, name it as SRC",
            candidates[0],
        )
    elif singles:
        _fault(
            findings,
            "no-model",
            f"only {_listed(singles)}: no weights of a Hugging Face layout, and what belongs together is not guessed",
            "get the Hugging Face files, or name the file itself as SRC",
            singles[0],
        )
    else:
        others = [name for name in entries if is_weight_file(name)]
        what = "no safetensors file is there" + (f", only {_listed(others)}" if others else "")
        mend = "convert the weights to safetensors first" if others else "name a checkpoint directory"
        _fault(findings, "no-model", what, mend, others[0] if others else "")
    return ModelFiles([])


def _index_parts(index_name: str) -> tuple[str, str | None]:
    """Base name and variant. transformers names the index of a variant `model.safetensors.index.fp16.json`; others
    have written `model.fp16.safetensors.index.json`."""
    match = _INDEX_FILE.fullmatch(index_name)
    base_name, _, inner = (match[1] if match else index_name).partition(".")
    return base_name, inner or (match[2] if match else None)


def _listed(names: list[str], most: int = 20) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _indexed(root: Path, index_name: str, entries: list[str], links: Links, findings: list[Finding]) -> ModelFiles:
    base_name, variant = _index_parts(index_name)
    model = ModelFiles([], base_name, variant, index_name)
    mend = "`surgery index DIR` prints the index that the files deserve"
    reason = links.fault(root / index_name)
    if reason is not None:
        again = "get the index again; where the link is meant, pass --allow-outside-links"
        _fault(findings, "index", f"{index_name}: {reason}", again, index_name)
        return model
    try:
        parsed = read_json(root / index_name, MAX_INDEX_NBYTES, index_name)
    except SourceError as error:
        _fault(findings, "index", f"{index_name}: {error.what}", error.mend, index_name)
        return model
    weight_map = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        _fault(findings, "index", f"{index_name} has no weight_map of tensor names to files", mend, index_name)
        return model
    odd = next((name for name, file in weight_map.items() if not isinstance(file, str)), None)
    if odd is not None:
        what = f"{index_name}: the file of {odd} is {json.dumps(weight_map[odd]):.60}, not a file name"
        _fault(findings, "index", what, mend, index_name)
        return model
    metadata = parsed.get("metadata")
    model.total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    model.index = _contained(weight_map, index_name, findings)
    model.names = sorted(set(model.index.values()))
    _judge_missing(model, entries, root, findings)
    return model


def _contained(weight_map: dict[str, str], index_name: str, findings: list[Finding]) -> dict[str, str]:
    """File names as plain paths below the root; a name that leaves it is refused before anything is opened (X01)."""
    normal: dict[str, str | None] = {}
    for tensor, file in weight_map.items():
        if file not in normal:
            normal[file] = _normalised(file)
            if normal[file] is None:
                what = f"{index_name} names the file {file!r}, which is no plain path inside the checkpoint"
                _fault(findings, "file-name", what, "correct the index: it may have file names only", index_name)
        weight_map[tensor] = normal[file] or ""  # one string object a file
    return {tensor: file for tensor, file in weight_map.items() if file} if None in normal.values() else weight_map


def _normalised(file: str) -> str | None:
    if not file or file.startswith("/") or "\\" in file or "\0" in file or re.match(r"[A-Za-z]:", file):
        return None
    parts = [part for part in file.split("/") if part not in ("", ".")]
    return "/".join(parts) if parts and ".." not in parts else None


def _judge_missing(model: ModelFiles, entries: list[str], root: Path, findings: list[Finding]) -> None:
    """All missing files at once, how many tensors they hold, and whether the index is of another save (case X05).

    A link to nowhere counts as present here: it is told apart when it is opened.
    """
    assert model.index is not None
    present = set(entries)
    missing = {name for name in model.names if name not in present and not os.path.lexists(root / name)}
    if not missing:
        return
    counts = Counter(model.index.values())
    others = [name for name in entries if _SHARD_FILE.fullmatch(name) and name not in model.names]
    stale = f"; {len(others)} shards that it does not name are there (first {others[0]}): it is stale" if others else ""
    rebuild = (
        f"`surgery index DIR > new.json && mv new.json DIR/{model.index_name}` builds the index anew from the headers"
    )
    _fault(
        findings,
        "missing-file",
        f"{len(missing)} of the {len(model.names)} files in {model.index_name} are missing, "
        f"with {sum(counts[name] for name in missing)} tensors: {_listed(sorted(missing))}{stale}",
        rebuild if others else "get the missing files: the download was not complete",
        min(missing),
    )
    model.names = [name for name in model.names if name not in missing]
    if not others:
        model.index = {name: file for name, file in model.index.items() if file not in missing}


class _DuplicateKey(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise _DuplicateKey(f"the key {repeated!r} is there twice")
    return found


def _refuse_depth(value: Any) -> None:
    """Nesting that no config has, and that functions which walk it would fail on."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return
    raise ValueError(f"nested deeper than {MAX_JSON_DEPTH} levels")


def read_json(path: Path, max_nbytes: int, where: str) -> Any:
    """A small JSON file, keys in order and unique; NaN and Infinity pass. Raises `SourceError` with the reason."""
    data = read_bytes(path, max_nbytes, where)
    again = "get the file again, or correct it"
    refuse_git_lfs_pointer(data[:1024], len(data), where)
    if data.startswith(b"\xef\xbb\xbf"):
        raise SourceError("it begins with a byte order mark, which JSON forbids", where, "save it as UTF-8 without it")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
        _refuse_depth(value)
    except UnicodeDecodeError as error:
        raise SourceError(f"not UTF-8 at byte {error.start}", where, again) from error
    except _DuplicateKey as error:
        raise SourceError(str(error), where, "loaders disagree on which counts: leave one of them") from error
    except (ValueError, RecursionError) as error:
        what = "the file is empty" if not data.strip() else f"not JSON: {error}"
        raise SourceError(what, where, again) from error
    if b"\\ud" in data or b"\\uD" in data:
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except (UnicodeEncodeError, RecursionError) as error:
            raise SourceError("a text in it has half a character (a lone surrogate)", where, again) from error
    return value
