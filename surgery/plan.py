"""Plan: the whole job as data, made and checked before a byte is written.

A plan says where every byte of every output file comes from; `execute` needs nothing else. It is JSON with a format
version and a digest (`plan_file`), so it can be printed, compared, kept in git and run on another machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import xxhash

from surgery import __version__
from surgery.draft import (
    Config,
    ConfigChange,
    Decision,
    Draft,
    Dropped,
    Json,
    SideFile,
    SourceFile,
    require_present,
)
from surgery.errors import CannotApply, Problems
from surgery.model_card import model_card
from surgery.moves import coverage_fault, moves
from surgery.safetensors_file import MAX_HEADER_NBYTES, StoredTensor, build_header, tensor_nbytes
from surgery.tiling import Content, Tile, Tiling, sources, whole_source

PLAN_FORMAT = 1
DEFAULT_MAX_SHARD_BYTES = 5 * 10**9
"""What Hugging Face writes by default, and what `--max-shard-size 5GB` means."""

RESERVED_NAMES = frozenset({"surgery.json", "README.md", "config.json"})

# A planner's estimate of one header entry without the name's bytes: two offsets of up to 20 digits, a dtype, a
# shape of up to 8 axes and the punctuation. It only has to be no less than the truth, so that no header that
# is planned passes the format's cap (case F04).
_HEADER_ENTRY_NBYTES = 260


class PlannedTensor(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One output tensor: a `whole` copy of a stored tensor, or a `tiling`."""

    name: str
    whole: StoredTensor | None = None
    tiling: Tiling | None = None

    @property
    def content(self) -> Content:
        content = self.whole if self.whole is not None else self.tiling
        if content is None:
            raise CannotApply("a planned tensor without content", self.name, "make the plan again")
        return content

    @property
    def dtype(self) -> str:
        return self.content.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.content.shape

    @property
    def nbytes(self) -> int:
        return tensor_nbytes(self.dtype, self.shape)


class PlannedFile(msgspec.Struct, frozen=True):
    """One safetensors file; `tensors` in the order of their bytes, `nbytes` with the header."""

    name: str
    nbytes: int
    tensors: tuple[PlannedTensor, ...]

    def header(self, metadata: dict[str, str]) -> tuple[bytes, list[tuple[str, int]]]:
        """The file's header, and its tensors with the position of their data after it."""
        return build_header([(t.name, t.dtype, t.shape) for t in self.tensors], metadata)


class PlannedSideFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file that is not weights: `text`, or the bytes of `source_name` under a root."""

    name: str
    nbytes: int
    xxh3_128: str
    root: int = -1
    source_name: str = ""
    text: str | None = None


class Check(msgspec.Struct, frozen=True, omit_defaults=True):
    """What only the bytes can tell, judged while they stream; a failure is exit 3 and nothing is published.

    `equal`: the tile holds the bytes that `tensor` of the output gets in the tile's box. `constant`: every element
    of the tile is `element` (hexadecimal).
    """

    kind: Literal["equal", "constant"]
    tile: Tile
    tensor: str = ""
    element: str = ""


class Totals(msgspec.Struct, frozen=True):
    """The accounting `in = kept + dropped`, in tensors and bytes of the source; `out` counts repeats again."""

    tensors_in: int
    nbytes_in: int
    tensors_kept: int
    nbytes_kept: int
    tensors_dropped: int
    nbytes_dropped: int
    tensors_out: int
    nbytes_out: int


class Plan(msgspec.Struct, frozen=True):
    """See the module. `roots` are where the sources lie; they, alone, are not part of the digest."""

    format: int
    tool: str
    roots: tuple[str, ...]
    recipe: tuple[dict[str, Json], ...]
    sources: tuple[SourceFile, ...]
    metadata: dict[str, str]
    index: str | None
    files: tuple[PlannedFile, ...]
    side_files: tuple[PlannedSideFile, ...]
    checks: tuple[Check, ...]
    dropped: tuple[Dropped, ...]
    layers: dict[str, list[int]]
    config_changes: tuple[ConfigChange, ...]
    decisions: tuple[Decision, ...]
    totals: Totals

    def tensors(self) -> Iterator[PlannedTensor]:
        """Every output tensor, file by file, in the order that the executor numbers them."""
        for file in self.files:
            yield from file.tensors


def make_plan(draft: Draft, checks: Sequence[Check] = ()) -> Plan:
    """The plan of `draft`. Raises `CannotApply` with every problem found; reads side files, never weights."""
    require_present(draft)
    _require_whole_bytes(draft)
    totals = _account(draft)
    files = tuple(pack(draft.tensors, draft.metadata, draft.base_name, draft.max_shard_bytes))
    index = f"{draft.base_name}.safetensors.index.json" if len(files) > 1 else None
    plan = Plan(
        format=PLAN_FORMAT,
        tool=f"surgery {__version__}",
        roots=tuple(str(root) for root in draft.roots),
        recipe=draft.recipe,
        sources=draft.files,
        metadata=draft.metadata,
        index=index,
        files=files,
        side_files=(),
        checks=tuple(checks),
        dropped=draft.dropped,
        layers=draft.layers,
        config_changes=draft.config_changes,
        decisions=(*draft.decisions, *_oversized(files, draft.max_shard_bytes or DEFAULT_MAX_SHARD_BYTES)),
        totals=totals,
    )
    card = SideFile("README.md", text=model_card(plan.recipe, plan.layers, plan.config_changes, plan.totals))
    wanted = [*_config_file(draft), *draft.side_files, card]
    plan = msgspec.structs.replace(plan, side_files=tuple(_side_file(draft.roots, side) for side in wanted))
    check_plan(plan)
    return plan


def pack(
    tensors: dict[str, Content], metadata: dict[str, str], base_name: str, max_shard_bytes: int | None
) -> Iterator[PlannedFile]:
    """Fill shards in the order given, as Hugging Face does: a new one where the next tensor would pass the size.

    A tensor larger than the size stands alone. Header bytes count against the format's cap, not the size.
    """
    limit = max_shard_bytes or DEFAULT_MAX_SHARD_BYTES
    shards: list[list[str]] = [[]]
    data_nbytes = header_nbytes = 0
    for name, content in tensors.items():
        entry_nbytes = len(name.encode()) * 2 + _HEADER_ENTRY_NBYTES
        full = data_nbytes + content.nbytes > limit or header_nbytes + entry_nbytes > MAX_HEADER_NBYTES - 65536
        if shards[-1] and full:
            shards.append([])
            data_nbytes = header_nbytes = 0
        shards[-1].append(name)
        data_nbytes += content.nbytes
        header_nbytes += entry_nbytes
    for number, names in enumerate(shards, 1):
        header, placed = build_header([(n, tensors[n].dtype, tensors[n].shape) for n in names], metadata)
        end = sum(tensors[name].nbytes for name in names)
        file_name = (
            f"{base_name}.safetensors"
            if len(shards) == 1
            else f"{base_name}-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        yield PlannedFile(file_name, len(header) + end, tuple(_planned(name, tensors[name]) for name, _ in placed))


def _planned(name: str, content: Content) -> PlannedTensor:
    whole = whole_source(content)
    if whole is not None:
        return PlannedTensor(name, whole=whole)
    assert isinstance(content, Tiling)
    return PlannedTensor(name, tiling=content)


def _oversized(files: Iterable[PlannedFile], limit: int) -> list[Decision]:
    return [
        Decision(
            "shard-size",
            f"{file.tensors[0].name} is larger than the shard size and stands alone in {file.name}",
        )
        for file in files
        if len(file.tensors) == 1 and file.tensors[0].nbytes > limit
    ]


def _require_whole_bytes(draft: Draft) -> None:
    """A cut of a dtype below a byte can leave a tensor that no file could hold."""
    problems = Problems()
    for name, content in draft.tensors.items():
        try:
            _ = content.nbytes
        except ValueError as error:
            problems.add(str(error), name, "cut at whole bytes")
    problems.raise_if_any(CannotApply)


def _account(draft: Draft) -> Totals:
    """Prove that every source tensor is kept or dropped by a rule; a tensor that is neither has vanished."""
    used: set[tuple[int, str]] = set()
    nbytes_kept = 0
    for content in draft.tensors.values():
        for source in sources(content):
            key = (draft.files[source.file].root, source.name)
            if key not in used:
                used.add(key)
                nbytes_kept += source.nbytes
    nbytes_dropped = sum(dropped.nbytes for dropped in draft.dropped)
    tensors_in, nbytes_in = draft.source_tensors, draft.source_nbytes
    kept, gone = len(used), len(draft.dropped)
    if (kept + gone, nbytes_kept + nbytes_dropped) != (tensors_in, nbytes_in):
        raise CannotApply(
            f"{tensors_in} tensors ({nbytes_in} bytes) came in, but {kept} ({nbytes_kept}) are kept and "
            f"{gone} ({nbytes_dropped}) dropped by a rule",
            "accounting of the plan",
            "this is a fault of an operation: please report it with the recipe",
        )
    nbytes_out = sum(content.nbytes for content in draft.tensors.values())
    return Totals(tensors_in, nbytes_in, kept, nbytes_kept, gone, nbytes_dropped, len(draft.tensors), nbytes_out)


def _config_file(draft: Draft) -> list[SideFile]:
    """config.json: the source's own bytes where nothing changed, else its JSON with key order kept."""
    if draft.config is None:
        return []
    if not draft.config_changes:
        return [SideFile("config.json", 0, "config.json")]
    return [SideFile("config.json", text=config_text(draft.config))]


def config_text(config: Config) -> str:
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def _side_file(roots: Sequence[Path], side: SideFile) -> PlannedSideFile:
    if side.text is not None:
        data = side.text.encode()
        return PlannedSideFile(side.name, len(data), xxhash.xxh3_128_hexdigest(data), text=side.text)
    hasher, nbytes = xxhash.xxh3_128(), 0
    with (roots[side.root] / side.source_name).open("rb") as file:
        while block := file.read(1 << 20):
            hasher.update(block)
            nbytes += len(block)
    return PlannedSideFile(side.name, nbytes, hasher.hexdigest(), side.root, side.source_name)


def check_plan(plan: Plan) -> None:
    """Judge a plan that anyone may have written: unique plain names, proven coverage, headers under the cap."""
    problems = Problems()
    names: set[str] = set()
    file_names = [
        *(f.name for f in plan.files),
        *(s.name for s in plan.side_files),
        *filter(None, [plan.index]),
    ]
    for file_name in file_names:
        if not _is_plain(file_name) or file_name == "surgery.json":
            problems.add(f"the output file name {file_name!r} is not a plain path inside the output", "plan")
    if len(set(file_names)) != len(file_names):
        problems.add("two output files have one name", "plan")
    for file in plan.files:
        for tensor in file.tensors:
            if tensor.name in names or tensor.name == "__metadata__" or not tensor.name:
                problems.add(f"the tensor name {tensor.name!r} is there twice or is no tensor name", file.name)
            names.add(tensor.name)
            _check_tensor(plan, tensor, problems)
    for check in plan.checks:
        if check.kind == "equal" and check.tensor not in names:
            problems.add(f"a check of {check.tensor!r}, which is no output tensor", "plan")
    problems.raise_if_any(CannotApply, "the plan cannot be carried out")


def _check_tensor(plan: Plan, tensor: PlannedTensor, problems: Problems) -> None:
    content = tensor.content
    fault = coverage_fault(content)
    if fault is not None:
        problems.add(fault, tensor.name, "this is a fault of the operation that made the plan")
        return
    for source in sources(content):
        in_file = 0 <= source.file < len(plan.sources)
        if not in_file or not (
            plan.sources[source.file].data_offset
            <= source.offset
            <= source.offset + source.nbytes
            <= plan.sources[source.file].nbytes
        ):
            problems.add(f"{source.name} lies outside its file", tensor.name)
    if isinstance(content, Tiling):
        try:
            for _ in moves(content, tensor.name):
                pass
        except CannotApply as error:
            problems.add(error.what, error.where, error.mend)


def _is_plain(name: str) -> bool:
    """Whether `name` is a relative path of ordinary parts, so that it cannot leave the output directory."""
    parts = name.split("/")
    return all(part not in ("", ".", "..") and "\\" not in part and "\0" not in part for part in parts)
