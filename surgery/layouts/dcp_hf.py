"""`dcp-hf`: sharded safetensors of torch.distributed.checkpoint, which transformers loads at any number of ranks.

Files `shard-{rank}-model-{part}-of-{parts}.safetensors`, from 1. Every file's header says where its boxes lie in the
whole tensors (`DCP_SHARDING_INFO`); no index. torch.chunk's rule for sizes that do not divide; what is not cut is
written once.
Source: torch 2.13 `distributed/checkpoint/_hf_utils.py` and `hf_storage.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from surgery.errors import CannotApply
from surgery.layouts.hf_rank import model_of
from surgery.layouts.partition import Dealt, Job, Merged, RankFile
from surgery.layouts.rules import Model
from surgery.layouts.splits import chunked, part
from surgery.moves import coverage_fault
from surgery.tiling import Content, Tile, Tiling, contiguous_strides, whole_source

SHARDING_INFO = "DCP_SHARDING_INFO"
_VERSION = {"DCP_VERSION": "1.0"}
_MIN_CUT = 2
Offsets = dict[str, list[int]]
EXPERT = re.compile(r"\.experts\.[0-9]+\.")


def deal(tensors: dict[str, Content], job: Job) -> Dealt:
    """Boxes of every tensor, by torch.chunk along one axis; vectors that no rule cuts and scalars go to one rank."""
    try:
        model: Model | None = model_of(job)
    except CannotApply:
        model = None  # Any architecture can be dealt so: the boxes say where they belong.
    dealt = Dealt([{} for _ in range(job.ranks)], offsets=[{} for _ in range(job.ranks)])
    nbytes = [0] * job.ranks
    axes = {name: _axis(name, content, model, job.ranks) for name, content in tensors.items()}
    for name, content in tensors.items():
        axis = axes[name]
        if axis is None:
            rank = nbytes.index(min(nbytes))
            dealt.ranks[rank][name] = content
            nbytes[rank] += content.nbytes
            continue
        split = chunked(axis, content.shape[axis], job.ranks)
        for rank in range(job.ranks):
            if split.ranks[rank]:
                mine = part(content, split, rank)
                dealt.ranks[rank][name] = mine
                start = [0] * len(content.shape)
                start[axis] = split.ranks[rank][0][0]
                dealt.offsets[rank][name] = start
                nbytes[rank] += mine.nbytes
    return dealt


def _axis(name: str, content: Content, model: Model | None, ranks: int) -> int | None:
    """The axis that the architecture's rules cut, else the first; None for what is not cut."""
    shape = content.shape
    if EXPERT.search(name):
        return None  # One of very many: whole, and balanced over the ranks.
    if not shape or 0 in shape or ranks == 1:
        return None
    module, _, leaf = name.rpartition(".")
    role = model.role(module) or model.role(name) if model is not None else None
    if role is None:
        return 0 - len(shape) if len(shape) > 1 and shape[0] >= _MIN_CUT else None
    if role.side == "whole" or (leaf == "bias" and role.side == "in"):
        return None
    on_last = leaf == "bias" or role.side == "in"
    axis = role.axis if role.side == "bare" else -1 if on_last else -2
    return axis if len(shape) >= -axis and shape[axis] >= _MIN_CUT else None


def merge(files: Sequence[tuple[Mapping[str, Content], Mapping[str, str]]], job: Job) -> Merged:
    """Whole tensors from the boxes of all files; `files` are their tensors and header strings.

    Raises `CannotApply` for a box without a place, boxes that overlap, or a tensor that they do not cover.
    """
    boxes: dict[str, list[tuple[Content, list[int]]]] = {}
    for tensors, metadata in files:
        offsets = _offsets(metadata)
        for name, content in tensors.items():
            boxes.setdefault(name, []).append((content, offsets.get(name, [0] * len(content.shape))))
    merged = Merged({})
    for name, held in boxes.items():
        merged.tensors[name] = _whole(name, held)
    return merged


def _offsets(metadata: Mapping[str, str]) -> Offsets:
    """Where the boxes of a file lie. Raises `CannotApply` for a header that does not say it as torch does."""
    text = metadata.get(SHARDING_INFO)
    if text is None:
        raise CannotApply(f"a file has no {SHARDING_INFO} in its header", "dcp-hf", "--from names the layout it has")
    try:
        parsed = json.loads(text)
        found = {name: entry["saved_offsets"] for name, entry in parsed.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CannotApply(
            f"{SHARDING_INFO} is not what torch writes: {error}", "dcp-hf", "get the file again"
        ) from error
    for name, offsets in found.items():
        if not isinstance(offsets, list) or not all(isinstance(each, int) and each >= 0 for each in offsets):
            raise CannotApply(f"{SHARDING_INFO} places {name} at {offsets!r}", name, "get the file again")
    return found


def _whole(name: str, held: list[tuple[Content, list[int]]]) -> Content:
    first = held[0][0]
    if any(content.dtype != first.dtype or len(offsets) != len(content.shape) for content, offsets in held):
        raise CannotApply(f"the boxes of {name} are of other dtypes or ranks", name, "get the files again")
    rank = len(first.shape)
    shape = tuple(
        max(offsets[axis] + content.shape[axis] for content, offsets in held) if rank else 1 for axis in range(rank)
    )
    if len(held) == 1 and shape == first.shape:
        return first
    tiles = []
    for content, offsets in held:
        stored = whole_source(content)
        if stored is None:
            raise CannotApply(f"{name} is no box of a file", name, "merge before other operations")
        if 0 not in stored.shape:
            tiles.append(Tile(stored, 0, contiguous_strides(stored.shape), tuple(offsets), stored.shape))
    whole = Tiling(first.dtype, shape, tuple(tiles))
    fault = coverage_fault(whole)
    if fault is not None:
        raise CannotApply(f"{name}: {fault}", name, "a rank file is missing, or two saves are mixed")
    return whole


def files(dealt: Dealt, job: Job, metadata: dict[str, str]) -> list[RankFile]:
    """One file a rank, with the places of its boxes."""
    return [
        RankFile(
            rank,
            f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors",
            tensors,
            {**metadata, **_VERSION, SHARDING_INFO: _places(tensors, dealt.offsets[rank])},
        )
        for rank, tensors in enumerate(dealt.ranks)
    ]


def _places(tensors: Mapping[str, Content], offsets: Offsets) -> str:
    zero = {name: [0] * len(content.shape) for name, content in tensors.items()}
    return json.dumps({name: {"saved_offsets": offsets.get(name, zero[name])} for name in tensors}, sort_keys=True)
