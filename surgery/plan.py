"""Plan: the whole job as data, made and checked before a byte is written.

A plan says where every byte of every output file comes from; `execute` needs nothing else. It is JSON with a format
version and a digest (`plan_file`), so it can be printed, compared, kept in git and run on another machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import xxhash

from surgery import __version__
from surgery.draft import CONFIG_NAME, Decision, Draft, Dropped, SideFile, changed, json_text, require_present
from surgery.errors import CannotApply, Problems
from surgery.layouts.partition import RankFile
from surgery.layouts.writing import rank_files
from surgery.model_card import model_card
from surgery.plan_check import check_plan
from surgery.plan_types import PLAN_FORMAT, Check, Plan, PlannedFile, PlannedSideFile, PlannedTensor, Totals
from surgery.regular_file import open_regular
from surgery.safetensors_file import MAX_HEADER_NBYTES, StoredTensor, build_header
from surgery.tiling import Content, Tiling, sources, whole_source

__all__ = ["Plan", "make_plan"]

DEFAULT_MAX_SHARD_BYTES = 5 * 10**9
"""What Hugging Face writes by default, and what `--max-shard-size 5GB` means."""

# A planner's estimate of one header entry without the name's bytes: two offsets of up to 20 digits, a dtype, a
# shape of up to 8 axes and the punctuation. It only has to be no less than the truth, so that no header that
# is planned passes the format's cap (case F04).
_HEADER_ENTRY_NBYTES = 260


def make_plan(draft: Draft, checks: Sequence[Check] = ()) -> Plan:
    """The plan of `draft`. Raises `CannotApply` with every problem found; reads side files, never weights."""
    require_present(draft)
    _require_whole_bytes(draft)
    if draft.dummy:
        files: tuple[PlannedFile, ...] = ()
    elif draft.partition is not None:
        draft, dealt = rank_files(draft)
        files = tuple(_rank_file(file) for file in dealt)
    else:
        files = tuple(pack(draft.tensors, draft.metadata, draft.base_name, draft.max_shard_bytes))
    draft, checks = _checked_ranks(draft, files, checks)
    totals = _account(draft, files)
    index = _index_name(draft.base_name) if len(files) > 1 and draft.partition is None else None
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
        experts=draft.experts,
        partition=draft.partition,
        ranks=draft.from_ranks,
        config_changes=draft.config_changes,
        decisions=(*draft.decisions, *_oversized(files, draft.max_shard_bytes or DEFAULT_MAX_SHARD_BYTES)),
        totals=totals,
        cover=tuple(msgspec.to_builtins(row) for row in draft.cover),
    )
    card = SideFile("README.md", text=model_card(plan.recipe, plan.layers, plan.config_changes, plan.totals))
    wanted = [*_config_file(draft), *draft.side_files, card]
    plan = msgspec.structs.replace(plan, side_files=tuple(_side_file(draft.roots, side) for side in wanted))
    # What the plan was made from and does not copy: a source with another config is another source.
    inputs = [SideFile(CONFIG_NAME, 0, CONFIG_NAME)] if draft.config is not None else []
    inputs += [SideFile(s.name, s.root, s.source_name) for s in draft.side_files if s.text is not None and s.root >= 0]
    plan = msgspec.structs.replace(plan, inputs=tuple(_side_file(draft.roots, given) for given in inputs))
    check_plan(plan, proven=True)
    return plan


def _index_name(base_name: str) -> str:
    """As transformers names it, so that `variant=` finds it: `model.safetensors.index.fp16.json`."""
    base, _, variant = base_name.partition(".")
    return f"{base}.safetensors.index.{variant}.json" if variant else f"{base}.safetensors.index.json"


def pack(
    tensors: dict[str, Content], metadata: dict[str, str], base_name: str, max_shard_bytes: int | None
) -> Iterator[PlannedFile]:
    """Fill shards in the order given, as Hugging Face does: a new one where the next tensor would pass the size.

    A tensor larger than the size stands alone. Header bytes count against the format's cap, not the size.
    """
    limit = max_shard_bytes or DEFAULT_MAX_SHARD_BYTES
    shards: list[list[str]] = [[]]
    data_nbytes: list[int] = [0]
    header_nbytes = 0
    for name, content in tensors.items():
        nbytes = content.nbytes
        entry_nbytes = (len(name) if name.isascii() else len(name.encode())) * 2 + _HEADER_ENTRY_NBYTES
        full = data_nbytes[-1] + nbytes > limit or header_nbytes + entry_nbytes > MAX_HEADER_NBYTES - 65536
        if shards[-1] and full:
            shards.append([])
            data_nbytes.append(0)
            header_nbytes = 0
        shards[-1].append(name)
        data_nbytes[-1] += nbytes
        header_nbytes += entry_nbytes
    for number, (names, end) in enumerate(zip(shards, data_nbytes, strict=True), 1):
        header, placed = build_header([(n, tensors[n].dtype, tensors[n].shape) for n in names], metadata)
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
        if isinstance(content, Tiling):
            try:
                _ = content.nbytes
            except ValueError as error:
                problems.add(str(error), name, "cut at whole bytes")
    problems.raise_if_any(CannotApply)


def _rank_file(file: RankFile) -> PlannedFile:
    header, placed = build_header([(n, c.dtype, c.shape) for n, c in file.tensors.items()], file.metadata)
    nbytes = len(header) + sum(content.nbytes for content in file.tensors.values())
    tensors = tuple(_planned(name, file.tensors[name]) for name, _ in placed)
    return PlannedFile(file.name, nbytes, tensors, file.rank, file.metadata)


def _checked_ranks(
    draft: Draft, files: Sequence[PlannedFile], checks: Sequence[Check]
) -> tuple[Draft, tuple[Check, ...]]:
    """What must hold of the bytes of rank files, as checks; copies that no output takes are dropped by that rule.

    A copy of what goes anyway is not looked at.
    """
    given = draft.rank_checks
    if not (given.replicas or given.constants):
        return draft, tuple(checks)
    used = {(s.file, s.name) for file in files for tensor in file.tensors for s in sources(tensor.content)}
    gone = {(each.file, each.tensor) for each in draft.dropped}
    found = list(checks)
    dropped: dict[tuple[int, str], Dropped] = {}

    def leave(stored: StoredTensor, rule: str) -> None:
        key = (stored.file, stored.name)
        if key not in used and key not in gone:
            dropped[key] = Dropped(stored.name, stored.nbytes, rule, stored.file)

    for tile, twin in given.replicas:
        kept = (twin.source.file, twin.source.name) in used
        if kept:
            found.append(Check("same", tile, twin=twin))
        leave(tile.source, COPY if kept else COPY_OF_GONE)
    for tile, element in given.constants:
        found.append(Check("constant", tile, element=element))
        leave(tile.source, SAID_OTHERWISE)
    return changed(draft, dropped=(*draft.dropped, *dropped.values())), tuple(found)


COPY = "reshard: a copy of another rank's, compared with it"
COPY_OF_GONE = "reshard: a copy of a tensor that goes"
SAID_OTHERWISE = "reshard: padding, or an index that is made anew"


def _account(draft: Draft, files: Sequence[PlannedFile]) -> Totals:
    """Prove that every source tensor is kept or dropped by a rule; a tensor that is neither has vanished."""
    used: set[tuple[int, str]] = set()
    nbytes_kept = nbytes_out = 0
    tensors_out = 0
    planned = (tensor.content for file in files for tensor in file.tensors)
    for content in draft.tensors.values() if draft.partition is None or draft.dummy else planned:
        nbytes = content.nbytes
        nbytes_out += nbytes
        tensors_out += 1
        for source in (content,) if isinstance(content, StoredTensor) else sources(content):
            key = (source.file, source.name)
            if key not in used:
                used.add(key)
                nbytes_kept += nbytes if source is content else source.nbytes
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
    return Totals(tensors_in, nbytes_in, kept, nbytes_kept, gone, nbytes_dropped, tensors_out, nbytes_out)


def _config_file(draft: Draft) -> list[SideFile]:
    """config.json: the source's own bytes where nothing changed, else its JSON with key order kept."""
    if draft.config is None:
        return []
    if all(change.file != CONFIG_NAME for change in draft.config_changes):
        return [SideFile(CONFIG_NAME, 0, CONFIG_NAME)]
    return [SideFile(CONFIG_NAME, text=json_text(draft.config, draft.config_text or "", CONFIG_NAME))]


def _side_file(roots: Sequence[Path], side: SideFile) -> PlannedSideFile:
    if side.text is not None:
        data = side.text.encode()
        return PlannedSideFile(side.name, len(data), xxhash.xxh3_128_hexdigest(data), text=side.text)
    hasher, nbytes = xxhash.xxh3_128(), 0
    path = roots[side.root] / side.source_name
    with open_regular(path, str(path)) as (descriptor, _):
        while block := os.read(descriptor, 1 << 20):
            hasher.update(block)
            nbytes += len(block)
    return PlannedSideFile(side.name, nbytes, hasher.hexdigest(), side.root, side.source_name)
