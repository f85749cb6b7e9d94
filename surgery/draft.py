"""Draft: the checkpoint an operation sees and the one it returns. No bytes move here.

A fresh draft of a checkpoint is its identity. An operation is a frozen dataclass with `apply(draft) -> Draft`: it
changes names, tensors and config together and says what it dropped and why. A tensor's origin is the stored tensor
that it holds (`Tile.source.name`), a layer's is `Draft.layers`, so a later operation of the same recipe can still be
told things in the source's terms.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from surgery.checkpoint import Checkpoint
from surgery.errors import CannotApply, Finding
from surgery.tiling import Content, Tile, sources

Json = Any
Config = dict[str, Json]
CONFIG_NAME = "config.json"
ALL_KEYS = "*"
"""Where a change is of the keys of a whole file, and its values are the source's."""


class SourceFile(msgspec.Struct, frozen=True):
    """One safetensors file that a draft reads, and what identifies its state. `root` counts `Draft.roots`."""

    root: int
    name: str
    nbytes: int
    data_offset: int
    header_digest: str


class SideFile(msgspec.Struct, frozen=True):
    """A file that travels with the weights: copied from a root, or written from `text`. With both, the file of the
    root is what the text was made from."""

    name: str
    root: int = -1
    source_name: str = ""
    text: str | None = None


class Dropped(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A source tensor that no output holds, and the rule that says why. `file` counts the source files."""

    tensor: str
    nbytes: int
    rule: str
    file: int = 0


class ConfigChange(msgspec.Struct, frozen=True):
    """One config value, old -> new, the rule that changed it and the programs (readers) it serves.

    `path` is dotted; for a file beside the config it begins with the file's name and a colon.
    """

    path: str
    old: Json
    new: Json
    rule: str
    reader: str = "all"

    @property
    def file(self) -> str:
        """The file that the value is in."""
        name, colon, _ = self.path.partition(":")
        return name if colon and name.endswith(".json") else CONFIG_NAME

    @property
    def keys(self) -> list[str]:
        """The way to the value inside its file."""
        return self.path.removeprefix(f"{self.file}:").split(".")


class Decision(msgspec.Struct, frozen=True):
    """Something that was settled on the way and that a person may want to know."""

    rule: str
    what: str


class Partition(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a checkpoint is dealt to `ranks` of an engine. `expert_parallel`: experts go whole to ranks. `profile`: the
    version of the engine whose names are written. What it takes to have the same tensors back: `widened`, dtypes that
    the layout made wider, by name; `vectors`, scales that were vectors of one; `group_index`, whether indices in plain
    order were left out. `lost` is what cannot be had back.
    """

    layout: str
    ranks: int
    expert_parallel: bool = False
    profile: str = ""
    lost: tuple[str, ...] = ()
    widened: dict[str, str] = {}
    vectors: tuple[str, ...] = ()
    group_index: bool = False


class RankChecks(msgspec.Struct, frozen=True):
    """What only the bytes of rank files can tell: tiles that are copies of each other, and tiles of one element."""

    replicas: tuple[tuple[Tile, Tile], ...] = ()
    constants: tuple[tuple[Tile, str], ...] = ()


class Draft(msgspec.Struct, frozen=True):
    """An ordered map name -> content, the config, the side files, and a log of what was decided.

    `layers` has, per stack prefix of the source (`model.layers.`), the source layer ids in their present order.
    `experts` has, per layer prefix of the source, the source's expert ids in their present order where some went.
    `partition` is how the output is dealt to ranks, None where it is in storage shards; `from_ranks` says that it was
    read from rank files, `rank_checks` what must hold of them. `metadata` are the header strings of the output files.
    `dummy`: config and assets alone are written.
    """

    roots: tuple[Path, ...]
    files: tuple[SourceFile, ...]
    tensors: dict[str, Content]
    config: Config | None
    config_text: str | None
    side_files: tuple[SideFile, ...]
    metadata: dict[str, str]
    base_name: str
    source_tensors: int
    source_nbytes: int
    absent: tuple[str, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    config_changes: tuple[ConfigChange, ...] = ()
    decisions: tuple[Decision, ...] = ()
    layers: dict[str, list[int]] = {}
    experts: dict[str, list[int]] = {}
    recipe: tuple[dict[str, Json], ...] = ()
    cover: tuple[Json, ...] = ()
    max_shard_bytes: int | None = None
    dummy: bool = False
    partition: Partition | None = None
    from_ranks: bool = False
    rank_checks: RankChecks = RankChecks()


@runtime_checkable
class Operation(Protocol):
    """What can be done to a draft: frozen data whose fields are the recipe's keys and the command's flags."""

    def apply(self, draft: Draft) -> Draft: ...


def changed(draft: Draft, **fields: Any) -> Draft:
    """`draft` with `fields` replaced."""
    return msgspec.structs.replace(draft, **fields)


def noted(draft: Draft, rule: str, what: str) -> Draft:
    return changed(draft, decisions=(*draft.decisions, Decision(rule, what)))


def draft_of(checkpoint: Checkpoint) -> Draft:
    """The identity of `checkpoint`: every tensor whole, config and side files as they are."""
    config_path = checkpoint.root / "config.json"
    return Draft(
        roots=(checkpoint.root,),
        files=tuple(SourceFile(0, f.name, f.nbytes, f.data_offset, f.header_digest) for f in checkpoint.files),
        tensors=dict(checkpoint.tensors),
        config=checkpoint.config,
        config_text=config_path.read_text("utf-8") if checkpoint.config is not None else None,
        side_files=tuple(_side_files(checkpoint)),
        metadata=common_metadata(f.metadata for f in checkpoint.files),
        base_name=checkpoint.base_name if not checkpoint.variant else f"{checkpoint.base_name}.{checkpoint.variant}",
        source_tensors=len(checkpoint.tensors),
        source_nbytes=sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
        absent=tuple(f.tensor for f in checkpoint.findings if f.kind == "ghost-index-entry" and f.tensor),
        decisions=(
            *(_decision(finding) for finding in checkpoint.findings),
            *(Decision("left behind", f"{stray.name}: {stray.why}") for stray in checkpoint.strays),
            *(
                Decision("side file", f"{side.name} is left behind: its name cannot be one of an output")
                for side in checkpoint.side_files
                if not _can_travel(side.name)
            ),
        ),
    )


def _side_files(checkpoint: Checkpoint) -> Iterator[SideFile]:
    """The source's side files. Our own card takes the name README.md; the publisher's (licence, citation) stays
    beside it, unless the source is an output of ours, whose card it is that goes."""
    ours = (checkpoint.root / "surgery.json").is_file()
    taken = {side.name for side in checkpoint.side_files}
    for side in checkpoint.side_files:
        if not _can_travel(side.name):
            continue
        if side.name != "README.md":
            yield SideFile(side.name, 0, side.name)
        elif not ours:
            numbers = itertools.count(2)
            name = "README.source.md"
            while name in taken:
                name = f"README.source.{next(numbers)}.md"
            yield SideFile(name, 0, side.name)


def _can_travel(name: str) -> bool:
    """Names that mean something else in an output, or on another system, stay behind."""
    first = name.partition("/")[0]
    ours = first in ("README.md", "config.json", "surgery.json") and "/" in name
    return not ours and "\\" not in name and first != "lost+found"


def _decision(finding: Finding) -> Decision:
    return Decision(finding.kind, finding.what + (f" ({finding.where})" if finding.where else ""))


def common_metadata(per_file: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The header strings that every source file agrees on, `format: pt` where none says a format, keys sorted.

    Older loaders read `format` and crash without it (case X17); strings that differ from file to file say
    something of one file, which an output file is not.
    """
    common: dict[str, str] | None = None
    for metadata in per_file:
        if common is None:
            common = dict(metadata)
        else:
            common = {key: value for key, value in common.items() if metadata.get(key) == value}
    return dict(sorted({"format": "pt", **(common or {})}.items()))


def require_present(draft: Draft) -> None:
    """Refuse where a tensor that the output needs is only named by the source's index (case X06)."""
    if draft.absent:
        raise CannotApply(
            f"the index names {len(draft.absent)} tensors that no file holds, first {draft.absent[0]}",
            "index of the source",
            "get the missing tensor; `surgery index SRC` prints the index that the files deserve",
        )


def with_tensors(draft: Draft, tensors: dict[str, Content], gone: Mapping[str, str]) -> Draft:
    """`draft` with `tensors`; `gone` has the names of the present draft that are left out, each with its rule.

    A stored tensor counts as dropped where no other tensor of the new draft takes bytes from it.
    """
    kept = {(s.file, s.name) for content in tensors.values() for s in sources(content)} if gone else set()
    dropped: dict[tuple[int, str], Dropped] = {}
    for name, rule in gone.items():
        for source in sources(draft.tensors[name]):
            key = (source.file, source.name)
            if key not in kept:
                dropped[key] = Dropped(source.name, source.nbytes, rule, source.file)
    return changed(draft, tensors=tensors, dropped=(*draft.dropped, *dropped.values()))


def json_text(document: Json, before: str, name: str) -> str:
    """An edited file of JSON, key order kept. `before` is its text in the source."""
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    if "Infinity" in text and "Infinity" not in before:
        raise CannotApply(
            "a number in it is larger than a double can be, and would be written back as Infinity",
            name,
            "correct the number",
        )
    return text
