"""A directory of rank files as a draft: whole tensors under Hugging Face names, and what must hold of the ranks."""

from __future__ import annotations

from pathlib import Path

from surgery.checkpoint import Checkpoint, beside
from surgery.draft import Draft, Dropped, Partition, RankChecks, SourceFile, changed, common_metadata, draft_of
from surgery.errors import SourceError
from surgery.layouts import dcp_hf, deepseek, hf_rank, vllm
from surgery.layouts.dcp_hf import SHARDING_INFO
from surgery.layouts.detection import RankSet, detect, manifest_partition
from surgery.layouts.partition import Job, Merged, RankTensors
from surgery.small_values import integers
from surgery.tensor import computed, reshape
from surgery.tiling import Content, Narrow

_OF_DCP = (SHARDING_INFO, "DCP_VERSION")


def open_draft(
    location: str | Path, *, source_layout: str | None = None, **options: object
) -> tuple[Draft, Checkpoint | None]:
    """The draft of a checkpoint in storage shards or rank files; with the checkpoint where it is one.

    `source_layout` is what the user names; `options` those of `Checkpoint.open`. Raises `SourceError`.
    """
    path = Path(location)
    found = detect(path.resolve(), source_layout or "") if path.is_dir() else None
    if found is None:
        checkpoint = Checkpoint.open(location, **options)  # type: ignore[arg-type]
        return draft_of(checkpoint), checkpoint
    return rank_draft(path.resolve(), found), None


def rank_draft(root: Path, found: RankSet) -> Draft:
    """The whole checkpoint behind the ranks' files."""
    base = draft_of(beside(root, {file.name for file in found.files}))
    files = tuple(
        SourceFile(0, f.name, f.header.file_nbytes, f.header.data_offset, f.header.digest) for f in found.files
    )
    ranks: RankTensors = [{} for _ in range(found.ranks)]
    for file in found.files:
        for tensor in file.header.tensors:
            if tensor.name in ranks[file.rank]:
                raise SourceError(
                    f"{tensor.name} is twice on rank {file.rank}", file.name, "a part of an older save is left over"
                )
            ranks[file.rank][tensor.name] = tensor
    given = manifest_partition(root) or {}
    partition = Partition(
        found.layout,
        found.ranks,
        bool(given.get("expert_parallel")),
        str(given.get("profile") or ""),
        group_index=bool(given.get("group_index")),
    )
    draft = changed(
        base,
        files=files,
        metadata=common_metadata(_strings(f.header.metadata) for f in found.files),
        source_tensors=sum(len(rank) for rank in ranks),
        source_nbytes=sum(tensor.nbytes for rank in ranks for tensor in rank.values()),
        partition=partition,
        from_ranks=True,
    )
    merged = _merged(draft, found, ranks, partition)
    widened = given.get("widened")
    tensors = _narrowed(merged.tensors, widened if isinstance(widened, dict) else {})
    vectors = given.get("vectors")
    for name in vectors if isinstance(vectors, list) else ():
        if name in tensors and tensors[name].shape == ():
            tensors[name] = reshape(tensors[name], (1,))
    index = {(f.rank, t.name): t for f in found.files for t in f.header.tensors}
    dropped = tuple(
        Dropped(name, index[rank, name].nbytes, rule, index[rank, name].file)
        for (rank, name), rule in merged.own.items()
    )
    checks = RankChecks(tuple((replica.tile, replica.twin) for replica in merged.replicas), tuple(merged.constants))
    return changed(draft, tensors=tensors, dropped=dropped, rank_checks=checks)


def _strings(metadata: dict[str, str] | None) -> dict[str, str]:
    return {key: value for key, value in (metadata or {}).items() if key not in _OF_DCP}


def _merged(draft: Draft, found: RankSet, ranks: RankTensors, partition: Partition) -> Merged:
    if found.layout == "dcp-hf":
        job = Job(draft.config or {}, found.ranks)
        held = [({t.name: t for t in f.header.tensors}, f.header.metadata or {}) for f in found.files]
        return dcp_hf.merge(held, job)
    if draft.config is None:
        raise SourceError(
            f"there is no config.json, and {found.layout} files cannot be read without the model's sizes",
            str(draft.roots[0]),
            "put the model's config.json beside the rank files",
        )

    def values(content: Content) -> list[int]:
        return integers(draft, content)

    job = Job(draft.config, found.ranks, partition.expert_parallel, partition.profile, values, partition.group_index)
    merge = {"hf-rank": hf_rank.merge, "vllm": vllm.merge, "deepseek": deepseek.merge}[found.layout]
    return merge(ranks, job)


def _narrowed(tensors: dict[str, Content], widened: dict[str, str]) -> dict[str, Content]:
    """Tensors that a layout had made wider, in their own dtype again: exact, or the job stops."""
    return {
        name: computed(content, Narrow(content.dtype), widened[name]) if name in widened else content
        for name, content in tensors.items()
    }
