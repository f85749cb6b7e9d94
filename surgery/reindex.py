"""The index that the headers of a directory deserve, whatever index is there or is not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import msgspec

from surgery.config_reading import count_of
from surgery.errors import Problems, SourceError, UsageError
from surgery.families.schema import DEPTH_SPELLINGS
from surgery.model_files import read_json
from surgery.name_census import is_mtp
from surgery.rank_layout import is_rank_file
from surgery.safetensors_file import StoredTensor, read_header
from surgery.side_files import Links
from surgery.storage import local_path

_SHARD = re.compile(r"(?P<base>.+)-(?P<number>\d{5,})-of-(?P<total>\d{5,})")
_SUFFIX = ".safetensors"
_MODEL = "model"
_MAX_CONFIG_NBYTES = 64 << 20
_NOT_THE_MODEL = {
    "consolidated": "the publisher's own format beside the Hugging Face one",
    "adapter_model": "an adapter",
}


class Index(msgspec.Struct):
    """`weight_map` sorted by name. `remarks` say which files were left out, or taken though another set is there."""

    total_nbytes: int
    weight_map: dict[str, str]
    remarks: list[str]

    def lines(self) -> Iterator[str]:
        """The JSON as `save_pretrained` writes it: two spaces, sorted, ASCII, line by line."""
        yield f'{{\n  "metadata": {{\n    "total_size": {self.total_nbytes}\n  }},\n  "weight_map": {{'
        last = len(self.weight_map) - 1
        for number, (name, file) in enumerate(self.weight_map.items()):
            yield f"    {json.dumps(name)}: {json.dumps(file)}{',' if number < last else ''}"
        yield "  }\n}"


def headers_index(location: str | Path, *, allow_outside_links: bool = False) -> Index:
    """Read the header of every model file in the directory and map its tensors. No index is looked at.

    The files of the base name `model` are the model, and beside them only sets whose tensors are all of MTP stages,
    as some publishers ship them; without a `model` set, all files are. Raises `SourceError` where shards are missing,
    a header cannot be read or a tensor is in two files.
    """
    path = local_path(location)
    root, names = _candidates(path)
    named = not path.is_dir()
    remarks: list[str] = []
    sets = _sets(names if named else [name for name in names if _is_candidate(name, remarks)])
    if not sets:
        _refuse_empty(path, names)
    links = Links(root, allow_outside=allow_outside_links)
    main = {_MODEL: sets.pop(_MODEL)} if _MODEL in sets else sets
    index = _Collected()
    for files in main.values():
        index.add({file: _tensors(root, file, links) for file in files})
    if main is not sets:
        for base, files in sets.items():
            _add_stage(index, root, base, files, links, remarks)
    index.problems.raise_if_any(SourceError, "tensors are in two files each: no index can say which counts")
    for base, files in main.items():
        if not named:
            _require_whole(base, files)
    return Index(index.total_nbytes, dict(sorted(index.weight_map.items())), remarks)


def _candidates(path: Path) -> tuple[Path, list[str]]:
    if path.is_dir():
        return path.resolve(), sorted(entry.name for entry in path.iterdir() if entry.name.endswith(_SUFFIX))
    if not path.exists() and not path.is_symlink():
        raise SourceError("no such file or directory", str(path), "name a checkpoint directory")
    if not path.name.endswith(_SUFFIX):
        raise UsageError("a directory or a .safetensors file is expected", str(path), "name the checkpoint's directory")
    return path.parent.resolve(), [path.name]


def _is_candidate(name: str, remarks: list[str]) -> bool:
    """Whether `name` can be of the model; a remark where it is another format beside it."""
    if is_rank_file(name):
        return False
    reason = next((why for prefix, why in _NOT_THE_MODEL.items() if name.startswith(prefix)), None)
    if reason is not None:
        remarks.append(f"left out {name}: {reason}")
    return reason is None


def _sets(names: list[str]) -> dict[str, list[str]]:
    """Files by base name: `model` for `model.safetensors` and `model-00001-of-00003.safetensors`."""
    sets: dict[str, list[str]] = {}
    for name in names:
        stem = name.removesuffix(_SUFFIX)
        match = _SHARD.fullmatch(stem)
        sets.setdefault(match["base"] if match else stem, []).append(name)
    return sets


def _refuse_empty(path: Path, names: list[str]) -> NoReturn:
    ranks = [name for name in names if is_rank_file(name)]
    if ranks:
        raise SourceError(
            f"{len(ranks)} files are tensor-parallel rank partitions (first {ranks[0]}): a tensor is in several of "
            "them, and no index describes that",
            str(path),
            "`surgery inspect` says what the directory is",
        )
    found = f"only {', '.join(names[:3])}" if names else "no safetensors file is there"
    raise SourceError(f"no model file to index: {found}", str(path), "name a checkpoint directory")


def _require_whole(base: str, files: list[str]) -> None:
    """Shards that state their number are all there: an index of half a model would look like a whole one."""
    totals: dict[str, set[int]] = {}
    for file in files:
        match = _SHARD.fullmatch(file.removesuffix(_SUFFIX))
        if match is not None:
            totals.setdefault(match["total"], set()).add(int(match["number"]))
    for total, numbers in totals.items():
        count = min(int(total), 1_000_000)
        # A few publishers count from zero.
        first = 0 if 0 in numbers else 1
        missing = [number for number in range(first, first + count) if number not in numbers]
        if missing:
            width = len(_SHARD.fullmatch(_of(files, total))["number"])  # type: ignore[index]
            named = [f"{base}-{number:0{width}d}-of-{total}{_SUFFIX}" for number in missing[:20]]
            more = f" and {len(missing) - 20} more" if len(missing) > 20 else ""
            raise SourceError(
                f"{len(missing)} of {int(total)} shards are missing: {', '.join(named)}{more}",
                named[0],
                "get the missing files: an index without them would describe half a model",
            )


def _of(files: list[str], total: str) -> str:
    return next(file.removesuffix(_SUFFIX) for file in files if file.endswith(f"-of-{total}{_SUFFIX}"))


class _Collected:
    """The weight map as it grows; a name in two files is a problem, not a choice."""

    def __init__(self) -> None:
        self.weight_map: dict[str, str] = {}
        self.total_nbytes = 0
        self.problems = Problems()

    def add(self, files: dict[str, list[StoredTensor]]) -> None:
        for file, tensors in files.items():
            for tensor in tensors:
                there = self.weight_map.setdefault(tensor.name, file)
                self.total_nbytes += tensor.nbytes
                if there != file:
                    self.problems.add(
                        f"{tensor.name} is in {there} and in {file}", file, "move the file that does not count away"
                    )


def _tensors(root: Path, file: str, links: Links) -> list[StoredTensor]:
    fault = links.fault(root / file)
    if fault is not None:
        raise SourceError(f"{file}: {fault}", file, "where the link is meant, pass --allow-outside-links")
    return read_header(root / file, 0, file).tensors


def _add_stage(index: _Collected, root: Path, base: str, files: list[str], links: Links, remarks: list[str]) -> None:
    """Take a set beside the model where it is the model's MTP stage and nothing else; say so either way."""
    label = files[0] if len(files) == 1 else f"{files[0]} to {files[-1]}"
    try:
        held = {file: _tensors(root, file, links) for file in files}
    except SourceError as error:
        remarks.append(f"left out {label}: {error.what}")
        return
    tensors = [tensor for found in held.values() for tensor in found]
    depth = _depth(root)
    repeated = next((tensor.name for tensor in tensors if tensor.name in index.weight_map), None)
    if repeated is not None:
        remarks.append(f"left out {label}: it holds {repeated} again, which {index.weight_map[repeated]} has")
    elif not tensors or not all(is_mtp(tensor.name, depth) for tensor in tensors):
        remarks.append(f"left out {label}: not of the set {_MODEL!r}, and not its MTP stage")
    else:
        _require_whole(base, files)
        index.add(held)
        remarks.append(f"took {label} too: it holds the model's MTP stage")


def _depth(root: Path) -> int | None:
    try:
        config = read_json(root / "config.json", _MAX_CONFIG_NBYTES, "config.json")
    except SourceError:
        return None
    found = count_of(config, *DEPTH_SPELLINGS) if isinstance(config, dict) else None
    return found.value if found else None
