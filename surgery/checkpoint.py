"""One checkpoint directory: which files are the model, its index, config and side files; and what disagrees.

Reads headers, the index and the config: no tensor bytes, but for tensors that are there twice. What a loader would
take in silence (an index that names what no file holds, two formats side by side, a stale index) is told apart
here, because loaders disagree about it (facts, cases X01 to X17).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from surgery.errors import Finding, Problems, SourceError
from surgery.model_files import ModelFiles, choose_model_files, is_foreign_weights, located, read_json
from surgery.name_census import is_mtp
from surgery.safetensors_file import StoredTensor, read_header
from surgery.side_files import Links, SideFile, Stray, survey_side_files
from surgery.storage import local_path, same_bytes

MAX_CONFIG_NBYTES = 64 << 20
MAX_NOTED = 20
"""Notes of one kind about one file: what follows the first twenty says nothing new."""
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
        root, chosen = located(local_path(location))
        survey = _Survey(root, Links(root, allow_outside=allow_outside_links), on_duplicate)
        try:
            return survey.checkpoint(choose_model_files(root, chosen, survey.links, survey.findings))
        except OSError as error:
            # Files have errors of their own; this is a folder that cannot be listed, or files that vanish meanwhile.
            where = str(error.filename or root)
            raise SourceError(f"cannot read: {error.strerror}", where, "check its permissions") from error


def beside(root: Path, own: set[str]) -> Checkpoint:
    """Config and side files of a directory whose weights, the files `own`, are another's business (rank files).

    Raises `SourceError` for a config that cannot be read.
    """
    survey = _Survey(root, Links(root, allow_outside=False), "refuse")
    config = survey.config()
    side_files, strays, findings = survey_side_files(root, own, survey.links)
    checkpoint = Checkpoint(root, [], {}, config, side_files, strays, [*survey.findings, *findings])
    problems = Problems()
    for finding in checkpoint.findings:
        if finding.severity == "fault":
            problems.add(finding.what, finding.where, finding.mend)
    problems.raise_if_any(SourceError, "the source is not a valid checkpoint")
    return checkpoint


def declared_depth(config: dict[str, Any] | None) -> int | None:
    """The number of layers that the config, or its text section, states."""
    for section in ((config or {}).get("text_config"), config):
        depth = section.get("num_hidden_layers") if isinstance(section, dict) else None
        if isinstance(depth, int) and not isinstance(depth, bool):
            return depth
    return None


class _Survey:
    """The state of one look at a directory."""

    def __init__(self, root: Path, links: Links, on_duplicate: OnDuplicate) -> None:
        self.root = root
        self.links = links
        self.on_duplicate = on_duplicate
        self.findings: list[Finding] = []
        self.files: list[SourceFile] = []
        self.tensors: dict[str, StoredTensor] = {}
        self.twice: set[str] = set()

    def fault(self, kind: str, what: str, where: str = "", mend: str = "", tensor: str | None = None) -> None:
        self.findings.append(Finding(kind, "fault", what, where, mend, tensor))

    def note(self, kind: str, what: str, where: str = "", mend: str = "") -> None:
        self.findings.append(Finding(kind, "note", what, where, mend))

    def checkpoint(self, model: ModelFiles) -> Checkpoint:
        for name in model.names:
            self._read_file(name, model)
        # A tensor that is there twice kept the place of its first occurrence.
        if self.twice:
            ordered = sorted(self.tensors.values(), key=lambda tensor: (tensor.file, tensor.offset))
            self.tensors = {tensor.name: tensor for tensor in ordered}
        if model.index is not None:
            self._compare_index(model)
        config = self.config()
        model.names += self._mtp_files(model, config)
        self._compare_metadata()
        owned = {*model.names, *([model.index_name] if model.index_name else [])}
        strays = self._judge_alternative(model, model.alternative) if model.alternative is not None else []
        side_files, others, findings = survey_side_files(
            self.root, owned | {stray.name for stray in strays}, self.links
        )
        self.findings.extend(findings)
        return Checkpoint(
            self.root,
            self.files,
            self.tensors,
            config,
            side_files,
            strays + others,
            self.findings,
            model.base_name,
            model.variant,
            model.index_name,
        )

    def _mtp_files(self, model: ModelFiles, config: dict[str, Any] | None) -> list[str]:
        """Files outside the index that hold MTP stages and nothing else: some publishers ship the head so.

        Only names decide: disjoint from the model's, every one of an MTP stage. All other files are strays.
        """
        taken: list[str] = []
        if not self.tensors or model.chosen_alone:
            return taken
        depth = declared_depth(config)
        for path in sorted(self.root.glob("*.safetensors")):
            if path.name in model.names or path.name == model.alternative or is_foreign_weights(path.name):
                continue
            try:
                header = read_header(path, 0, path.name)
            except SourceError:
                continue
            names = [tensor.name for tensor in header.tensors]
            if names and all(is_mtp(name, depth) and name not in self.tensors for name in names):
                self._read_file(path.name, model)
                self.note("mtp-file", f"{path.name} holds the MTP stage outside the index: it is taken too", path.name)
                taken.append(path.name)
        return taken

    def _read_file(self, name: str, model: ModelFiles) -> None:
        path = self.root / name
        reason = self.links.fault(path)
        if reason is not None:
            lost = sum(file == name for file in (model.index or {}).values())
            self.fault(
                "missing-file" if "missing" in reason else "file-link",
                f"{name}: {reason}" + (f"; {lost} tensors are in it by the index" if lost else ""),
                name,
                "get the file again; where a link out of the checkpoint is meant, pass --allow-outside-links",
            )
            return
        try:
            header = read_header(path, len(self.files), name)
        except SourceError as error:
            self.fault("unreadable-file", f"{name}: {error.what}", name, error.mend)
            return
        for deviation in header.deviations[:MAX_NOTED]:
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
                self.twice.add(tensor.name)
                self.tensors[tensor.name] = self._judge_duplicate(there, tensor, model)

    def _judge_duplicate(self, first: StoredTensor, second: StoredTensor, model: ModelFiles) -> StoredTensor:
        """A tensor in two files: with equal bytes one is kept; otherwise the user says which (case X08)."""
        names = (self.files[first.file].name, self.files[second.file].name)
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
            what = f"{first.name} is in {names[0]} and {names[1]}: the one in {indexed} counts, as the index says"
            self.note("duplicate-tensor", what, indexed or "")
            return by_index
        if self.on_duplicate == "last":
            what = f"{first.name} is in {names[0]} and {names[1]}: the one in {names[1]} counts, the last"
            self.note("duplicate-tensor", what, names[1])
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
        file_names = [file.name for file in self.files]
        held_by = {name: file_names[tensor.file] for name, tensor in self.tensors.items()}
        if held_by == model.index:
            self._compare_total(model)
            return
        read = set(file_names)
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
            elif (
                tensor is not None and file in read and self.files[tensor.file].name != file and name not in self.twice
            ):
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
        self._compare_total(model)

    def _compare_total(self, model: ModelFiles) -> None:
        where = model.index_name or ""
        total = sum(tensor.nbytes for tensor in self.tensors.values())
        if model.total_size != total and not any(finding.severity == "fault" for finding in self.findings):
            said = (
                "no total_size" if model.total_size is None else f"a total_size of {json.dumps(model.total_size):.60}"
            )
            self.note("total-size", f"{where} has {said}; the tensors have {total} bytes", where)

    def _compare_metadata(self) -> None:
        """Header strings that differ from file to file say something of one file: no output can carry them (X17)."""
        every = [file.metadata for file in self.files]
        for key in sorted({key for metadata in every for key in metadata}):
            values = sorted({json.dumps(metadata[key]) if key in metadata else "none" for metadata in every})
            if len(values) > 1:
                what = f"the files' header metadata {key!r} differs: {', '.join(values[:3])}"
                self.note("header-metadata", f"{what:.300}", self.files[0].name)

    def _judge_alternative(self, model: ModelFiles, single: str) -> list[Stray]:
        """`model.safetensors` beside an index and its shards: loaders take one or the other (case X09)."""
        reason = self.links.fault(self.root / single)
        try:
            if reason is not None:
                raise SourceError(reason, single)
            if self._differs(single):
                self.fault(
                    "two-layouts",
                    f"{single} and {model.index_name} are both there and differ; loaders disagree on which counts",
                    single,
                    f"name the one that you mean as SRC: DIR/{single} or DIR/{model.index_name}",
                )
                return []
        except SourceError as error:
            self.fault("unreadable-file", f"{single}: {error.what}", single, error.mend or "remove it or get it again")
            return []
        self.note(
            "two-layouts", f"{single} holds the same tensors as the files of {model.index_name}, which counts", single
        )
        return [Stray(single, f"the same tensors as those of {model.index_name}")]

    def _differs(self, single: str) -> bool:
        """Names, dtypes and shapes first, then the bytes."""
        twins = read_header(self.root / single, 0, single).tensors
        if len(twins) != len(self.tensors):
            return True
        for twin in twins:
            ours = self.tensors.get(twin.name)
            if ours is None or (ours.dtype, ours.shape) != (twin.dtype, twin.shape):
                return True
        return not all(
            same_bytes(self.root / single, twin.offset, self.path(ours.file), ours.offset, twin.nbytes)
            for twin in twins
            for ours in (self.tensors[twin.name],)
        )

    def path(self, file: int) -> Path:
        return self.root / self.files[file].name

    def config(self) -> dict[str, Any] | None:
        name = "config.json"
        path = self.root / name
        if not os.path.lexists(path):
            self.note("no-config", f"there is no {name}", name, "put the model's config beside its weights")
            return None
        try:
            reason = self.links.fault(path)
            if reason is not None:
                raise SourceError(reason, name, "get it again; --allow-outside-links where the link is meant")
            config = read_json(path, MAX_CONFIG_NBYTES, name)
            if not isinstance(config, dict):
                raise SourceError("not a JSON object of fields", name, "get the model's config again")
        except SourceError as error:
            self.fault("config", f"{name}: {error.what}", name, error.mend)
            return None
        for prefix, section in _sections(config):
            old, new = section.get("torch_dtype"), section.get("dtype")
            if old is not None and new is not None and old != new:
                what = f"{prefix}dtype is {json.dumps(new):.60} and {prefix}torch_dtype {json.dumps(old):.60}"
                self.note("two-dtypes", f"{what}: newer loaders take the first, older ones the second", name)
        return config


def _sections(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The config and the configs in it (`text_config`, `vision_config`), each with its prefix."""
    yield "", config
    for key, value in config.items():
        if isinstance(value, dict):
            yield f"{key}.", value
