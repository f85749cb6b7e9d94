"""One checkpoint directory: which files are the model, its index, config and side files; and what disagrees.

Reads headers, the index and the config: no tensor bytes, but for tensors that are there twice. What a loader would
take in silence (an index that names what no file holds, two formats side by side, a stale index) is told apart
here, because loaders disagree about it (facts, cases X01 to X17).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from surgery.errors import Finding, Problems, SourceError, UsageError
from surgery.model_files import ModelFiles, choose_model_files, read_json
from surgery.safetensors_file import StoredTensor, read_header
from surgery.side_files import Links, SideFile, Stray, survey_side_files
from surgery.storage import local_path, same_bytes

MAX_CONFIG_NBYTES = 64 << 20
OnDuplicate = Literal["refuse", "index", "last"]

TOLERATED = frozenset({"ghost-index-entry", "unindexed-tensor", "wrong-file-in-index"})
"""Faults of the index that leave every real tensor where its header says it is: an operation can go on."""


class SourceFile(msgspec.Struct, frozen=True):
    """One safetensors file of the model. `allocated_nbytes` is less than `nbytes` where it has holes."""

    name: str
    nbytes: int
    header_digest: str
    data_offset: int
    allocated_nbytes: int
    metadata: dict[str, str]


class Checkpoint(msgspec.Struct):
    """What a directory holds. `tensors` in the order of files and bytes; `files[t.file]` has tensor t."""

    root: Path
    files: list[SourceFile]
    tensors: dict[str, StoredTensor]
    config: dict[str, Any] | None
    side_files: list[SideFile]
    strays: list[Stray]
    findings: list[Finding]
    base_name: str = "model"
    variant: str | None = None
    index_name: str | None = None

    def path(self, file: int) -> Path:
        return self.root / self.files[file].name

    @classmethod
    def open(
        cls,
        location: str | Path,
        *,
        allow_outside_links: bool = False,
        on_duplicate: OnDuplicate = "refuse",
    ) -> Checkpoint:
        """The checkpoint at `location`: a directory, one safetensors file, or an index file that is to count.

        Raises `SourceError` with every fault that would make the result untrue. What only the index gets wrong
        about real tensors stays in `findings`.
        """
        checkpoint = cls.survey(location, allow_outside_links=allow_outside_links, on_duplicate=on_duplicate)
        problems = Problems()
        for finding in checkpoint.findings:
            if finding.severity == "fault" and finding.kind not in TOLERATED:
                problems.add(finding.what, finding.where, finding.mend)
        problems.raise_if_any(SourceError, "the source is not a valid checkpoint")
        return checkpoint

    @classmethod
    def survey(
        cls,
        location: str | Path,
        *,
        allow_outside_links: bool = False,
        on_duplicate: OnDuplicate = "refuse",
    ) -> Checkpoint:
        """As `open`, with every fault of the content in `findings`. Raises only where there is nothing to look at."""
        path = local_path(location)
        root, chosen = _located(path)
        survey = _Survey(root, Links(root, allow_outside=allow_outside_links), on_duplicate)
        return survey.checkpoint(choose_model_files(root, chosen, survey.findings))


def _located(path: Path) -> tuple[Path, str | None]:
    """The resolved directory of `path`, and the file in it that was named."""
    if path.is_dir():
        return path.resolve(), None
    if not path.exists() and not path.is_symlink():
        raise SourceError("no such file or directory", str(path), "name a checkpoint directory")
    if path.name.endswith((".safetensors", ".index.json")) or path.is_symlink():
        return path.parent.resolve(), path.name
    if not path.is_file():
        raise SourceError("neither a directory nor a regular file", str(path), "name a checkpoint directory")
    raise UsageError(
        "a source is a directory, a .safetensors file or a .safetensors.index.json",
        str(path),
        "name one of these",
    )


class _Survey:
    """The state of one look at a directory."""

    def __init__(self, root: Path, links: Links, on_duplicate: OnDuplicate) -> None:
        self.root = root
        self.links = links
        self.on_duplicate = on_duplicate
        self.findings: list[Finding] = []
        self.files: list[SourceFile] = []
        self.tensors: dict[str, StoredTensor] = {}

    def fault(self, kind: str, what: str, where: str = "", mend: str = "", tensor: str | None = None) -> None:
        self.findings.append(Finding(kind, "fault", what, where, mend, tensor))

    def note(self, kind: str, what: str, where: str = "", mend: str = "") -> None:
        self.findings.append(Finding(kind, "note", what, where, mend))

    def checkpoint(self, model: ModelFiles) -> Checkpoint:
        for name in model.names:
            self._read_file(name, model)
        if model.index is not None:
            self._compare_index(model)
        if model.alternative is not None:
            self._judge_alternative(model, model.alternative)
        config = self._config()
        owned = {*model.names, *([model.index_name] if model.index_name else [])}
        if model.alternative is not None:
            owned.add(model.alternative)
        side_files, strays, findings = survey_side_files(self.root, owned, self.links)
        self.findings.extend(findings)
        return Checkpoint(
            self.root,
            self.files,
            self.tensors,
            config,
            side_files,
            strays,
            self.findings,
            model.base_name,
            model.variant,
            model.index_name,
        )

    def _read_file(self, name: str, model: ModelFiles) -> None:
        path = self.root / name
        fault = self.links.fault(path)
        if fault is not None:
            lost = sum(file == name for file in (model.index or {}).values())
            self.fault(
                "missing-file",
                f"{name}: {fault}" + (f"; the index places {lost} tensors there" if lost else ""),
                name,
                "get the missing file; where a link is meant, pass --allow-outside-links",
            )
            return
        try:
            header = read_header(path, len(self.files), name)
        except SourceError as error:
            self.fault("unreadable-file", f"{name}: {error.what}", name, error.mend)
            return
        for deviation in header.deviations:
            self.note("header-deviation", f"{name}: {deviation}", name, "`surgery repack` writes it by the book")
        status = path.stat()
        blocks = getattr(status, "st_blocks", None)
        allocated = status.st_size if blocks is None else min(status.st_size, blocks * 512)
        self.files.append(
            SourceFile(name, header.file_nbytes, header.digest, header.data_offset, allocated, header.metadata or {})
        )
        for tensor in header.tensors:
            there = self.tensors.get(tensor.name)
            if there is None:
                self.tensors[tensor.name] = tensor
            else:
                self.tensors[tensor.name] = self._judge_duplicate(there, tensor, model)

    def _judge_duplicate(self, first: StoredTensor, second: StoredTensor, model: ModelFiles) -> StoredTensor:
        """A tensor in two files: with equal bytes one is kept; otherwise the user says which (case X08)."""
        names = [self.files[first.file].name, self.files[second.file].name]
        equal = (first.dtype, first.shape) == (second.dtype, second.shape) and same_bytes(
            self.root / names[0], first.offset, self.root / names[1], second.offset, first.nbytes
        )
        indexed = (model.index or {}).get(first.name)
        by_index = second if indexed == names[1] else first
        if equal:
            self.note(
                "duplicate-tensor",
                f"{first.name} is in {names[0]} and {names[1]} with equal bytes: one is kept",
                names[0],
            )
            return by_index
        if self.on_duplicate == "index" and indexed in names:
            self.note("duplicate-tensor", f"{first.name} is taken from {indexed}, as the index says", indexed or "")
            return by_index
        if self.on_duplicate == "last":
            self.note("duplicate-tensor", f"{first.name} is taken from {names[1]}, the last that holds it", names[1])
            return second
        self.fault(
            "duplicate-tensor",
            f"{first.name} is in {names[0]} and in {names[1]} with different bytes",
            names[1],
            "loaders disagree on which counts: choose with --on-duplicate index or --on-duplicate last",
            first.name,
        )
        return by_index

    def _compare_index(self, model: ModelFiles) -> None:
        """Index against headers, both ways."""
        assert model.index is not None
        assert model.index_name is not None
        read = {file.name for file in self.files}
        where = model.index_name
        mend = f"`surgery index DIR` prints the index that the files deserve; {where} is stale"
        for name, file in model.index.items():
            tensor = self.tensors.get(name)
            if tensor is None and file in read:
                self.fault(
                    "ghost-index-entry",
                    f"the index places {name} in {file}, which has it not",
                    file,
                    mend,
                    name,
                )
            elif tensor is not None and file in read and self.files[tensor.file].name != file:
                held = self.files[tensor.file].name
                self.fault(
                    "wrong-file-in-index",
                    f"the index places {name} in {file}; it is in {held}",
                    file,
                    mend,
                    name,
                )
        for name, tensor in self.tensors.items():
            if name not in model.index:
                file = self.files[tensor.file].name
                self.fault("unindexed-tensor", f"{name} in {file} is not in the index", file, mend, name)
        total = sum(tensor.nbytes for tensor in self.tensors.values())
        if model.total_size is not None and model.total_size != total and not self._has_faults():
            self.note(
                "total-size",
                f"the index says total_size {model.total_size!r}; the tensors have {total}",
                where,
            )

    def _has_faults(self) -> bool:
        return any(finding.severity == "fault" for finding in self.findings)

    def _judge_alternative(self, model: ModelFiles, single: str) -> None:
        """`model.safetensors` beside an index and its shards: loaders take one or the other (case X09)."""
        try:
            header = read_header(self.root / single, 0, single)
        except SourceError as error:
            self.fault("unreadable-file", f"{single}: {error.what}", single, error.mend)
            return
        same = {t.name: (t.dtype, t.shape) for t in header.tensors} == {
            name: (t.dtype, t.shape) for name, t in self.tensors.items()
        }
        if same and all(
            same_bytes(
                self.root / single,
                twin.offset,
                self.path(self.tensors[twin.name].file),
                self.tensors[twin.name].offset,
                twin.nbytes,
            )
            for twin in header.tensors
        ):
            self.note(
                "two-layouts",
                f"{single} and {model.index_name} hold the same tensors: the index counts",
                single,
            )
            return
        self.fault(
            "two-layouts",
            f"{single} and {model.index_name} are both there and differ; loaders disagree on which counts",
            single,
            f"name the one you mean: SRC/{single} or SRC/{model.index_name}",
        )

    def path(self, file: int) -> Path:
        return self.root / self.files[file].name

    def _config(self) -> dict[str, Any] | None:
        path = self.root / "config.json"
        if not path.is_symlink() and not path.exists():
            self.note(
                "no-config",
                "there is no config.json",
                "config.json",
                "put the model's config beside its weights",
            )
            return None
        fault = self.links.fault(path)
        if fault is not None:
            self.fault("config", f"config.json {fault}", "config.json", "download it again")
            return None
        try:
            config = read_json(path, MAX_CONFIG_NBYTES, "config.json")
        except SourceError as error:
            self.fault("config", f"config.json: {error.what}", "config.json", error.mend)
            return None
        if not isinstance(config, dict):
            self.fault("config", "config.json is not a JSON object", "config.json", "get the model's config again")
            return None
        self._judge_dtype(config)
        return config

    def _judge_dtype(self, config: dict[str, Any]) -> None:
        for path, section in [
            ("", config),
            *((f"{k}.", v) for k, v in config.items() if isinstance(v, dict)),
        ]:
            if "dtype" in section and "torch_dtype" in section and section["dtype"] != section["torch_dtype"]:
                self.note(
                    "two-dtypes",
                    f"{path}dtype is {json.dumps(section['dtype'])} and {path}torch_dtype "
                    f"{json.dumps(section['torch_dtype'])}: newer loaders take the first, older ones the second",
                    "config.json",
                )
