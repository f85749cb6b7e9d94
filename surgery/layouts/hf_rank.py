"""`hf-rank`: Hugging Face names, rank-local shapes, one file a rank. The neutral form of a partition.

Files `model-tp{rank:05d}-of-{size:05d}.safetensors`. Heads whole, KV heads copied where there are more ranks than
heads, vocabulary rows cut without padding, row biases on every rank.
"""

from __future__ import annotations

import re

from surgery.errors import CannotApply
from surgery.families.records import find_family, model_type
from surgery.layouts.dealing import Dealer, Shape, logical_shapes
from surgery.layouts.group_index import constants_of, dealt_group_index, group_indices, merged_group_index
from surgery.layouts.partition import Dealt, Job, Merged, RankFile, RankTensors, names_of
from surgery.layouts.rules import Model, table_of
from surgery.layouts.splits import Split, joined, part, whole, zero_element
from surgery.tiling import Content

EXPERT = re.compile(r"\.experts\.([0-9]+)\.")


def model_of(job: Job, **options: object) -> Model:
    """The rules of the config's text decoder."""
    family = find_family(job.config)
    section = family.section(job.config)[1] if family is not None else job.config
    kind = model_type(section) or model_type(job.config)
    return Model(section, table_of(kind), job.ranks, **options)  # type: ignore[arg-type]


def expert_owner(name: str, count: int, ranks: int) -> int | None:
    """The rank that has an expert whole, by the number in its name; None for any other tensor."""
    match = EXPERT.search(name)
    if match is None:
        return None
    if count % ranks:
        raise CannotApply(
            f"{count} experts cannot be shared by {ranks} ranks", "--ep", "choose a divisor of the experts"
        )
    return int(match[1]) // (count // ranks)


def deal(tensors: dict[str, Content], job: Job, vocabulary_quantum: int = 0) -> Dealt:
    """Every tensor by its rule. Raises `CannotApply` for a name without one, or a cut that cannot be."""
    dealer = Dealer(model_of(job, vocabulary_quantum=vocabulary_quantum), job.config)
    logical = logical_shapes(tensors, job.config)
    indices = group_indices(tensors, job.values)
    count = _expert_count(tensors) if job.expert_parallel else 0
    dealt = Dealt([{} for _ in range(job.ranks)])
    for name, content in tensors.items():
        owner = expert_owner(name, count, job.ranks) if job.expert_parallel else None
        if owner is not None:
            dealt.ranks[owner][name] = content
            continue
        split = _split(dealer, name, content, logical, indices.ordered)
        parts = dealt_group_index(name, content, split, indices)
        if parts is not None:
            dealt.constants += constants_of(content, indices.groups[name.rpartition(".")[0]])
        for rank in range(job.ranks):
            mine = parts[rank] if parts is not None else part(content, split, rank)
            if 0 not in mine.shape or 0 in content.shape:
                dealt.ranks[rank][name] = mine
    return dealt


def _split(dealer: Dealer, name: str, content: Content, logical: dict[str, Shape], act_order: frozenset[str]) -> Split:
    place = dealer.place(name)
    if place.module in act_order and place.role.side == "in" and place.leaf in ("scales", "qzeros"):
        # Rows of any group may lie on any rank: each needs all of the groups (case P08).
        return whole(len(dealer.split(f"{place.module}.qweight", content, logical.get(place.module)).ranks))
    return dealer.split(name, content, logical.get(place.module))


def merge(ranks: RankTensors, job: Job, vocabulary_quantum: int = 0) -> Merged:
    """The whole tensors behind the ranks' parts."""
    dealer = Dealer(model_of(job, vocabulary_quantum=vocabulary_quantum), job.config)
    logical = [logical_shapes(rank, job.config) for rank in ranks]
    merged = Merged({})
    indices = [group_indices(rank, job.values) for rank in ranks]
    names = names_of(ranks)
    experts = [name for name in names if EXPERT.search(name)]
    # Experts whole on ranks are each on one; where any is on several they are cut, and one that is missing is missed.
    are_whole = job.ranks > 1 and all(sum(name in rank for rank in ranks) == 1 for name in experts)
    for name in names:
        parts = [rank.get(name) for rank in ranks]
        if are_whole and EXPERT.search(name):
            merged.tensors[name] = next(each for each in parts if each is not None)
            continue
        place = dealer.place(name)
        shapes = [each.get(place.module) for each in logical]
        act_order = any(place.module in each.ordered for each in indices)
        if act_order and place.role.side == "in" and place.leaf in ("scales", "qzeros"):
            split = whole(job.ranks)
        else:
            split = dealer.whole_split(name, parts, shapes)
        whole_index = merged_group_index(name, parts, split, indices)
        result = joined(parts, split, name)
        merged.tensors[name] = whole_index.content if whole_index is not None else result.content
        merged.replicas += result.replicas
        merged.constants += whole_index.constants if whole_index is not None else []
        for tile in result.padding:
            merged.constants.append((tile, zero_element(tile.source.dtype)))
    return merged


def _expert_count(tensors: dict[str, Content]) -> int:
    ids = {int(match[1]) for name in tensors if (match := EXPERT.search(name))}
    return max(ids) + 1 if ids else 0


def files(dealt: Dealt, job: Job, metadata: dict[str, str]) -> list[RankFile]:
    """One file a rank."""
    return [
        RankFile(rank, f"model-tp{rank:05d}-of-{job.ranks:05d}.safetensors", tensors, metadata)
        for rank, tensors in enumerate(dealt.ranks)
    ]
