"""A draft as rank files: what every rank holds, what a layout leaves out, and what must hold of the bytes."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import msgspec

from surgery.draft import Draft, changed, noted, with_tensors
from surgery.errors import CannotApply, UsageError
from surgery.layouts import dcp_hf, deepseek, hf_rank, vllm
from surgery.layouts.partition import Dealt, Job, RankFile
from surgery.layouts.vllm_names import names_of, theirs
from surgery.small_values import integers
from surgery.tiling import Content

_MODULES: dict[str, ModuleType] = {"hf-rank": hf_rank, "dcp-hf": dcp_hf, "vllm": vllm, "deepseek": deepseek}
LAYOUTS = ("hf", *_MODULES)


def rank_files(draft: Draft) -> tuple[Draft, list[RankFile]]:
    """The rank files that a draft's partition asks for, and the draft without what the layout leaves out."""
    partition = draft.partition
    assert partition is not None
    dealt, job = _dealt(draft)
    draft = without(draft, dealt.dropped)
    for note in dealt.notes:
        draft = noted(draft, "reshard", note)
    constants = (*draft.rank_checks.constants, *dealt.constants)
    of_vllm = partition.layout == "vllm"
    kept = msgspec.structs.replace(
        partition,
        lost=tuple(dealt.inverse),
        widened=_widened(draft, job) if of_vllm else {},
        vectors=tuple(vllm.vectors(draft.tensors)) if of_vllm else (),
        group_index=of_vllm and any(name.endswith(".g_idx") for name in dealt.dropped),
    )
    draft = changed(
        draft,
        rank_checks=msgspec.structs.replace(draft.rank_checks, constants=constants),
        partition=kept,
    )
    files: Callable[[Dealt, Job, dict[str, str]], list[RankFile]] = _MODULES[partition.layout].files
    return draft, files(dealt, job, draft.metadata)


def _dealt(draft: Draft) -> tuple[Dealt, Job]:
    partition = draft.partition
    assert partition is not None
    module = _MODULES.get(partition.layout)
    if module is None:
        raise UsageError(f"no layout {partition.layout!r}", "--layout", f"one of {', '.join(LAYOUTS)}")
    if draft.config is None and partition.layout != "dcp-hf":
        raise CannotApply("the source has no config.json", "reshard", "put the model's config.json beside its weights")

    def values(content: Content) -> list[int]:
        return integers(draft, content)

    job = Job(draft.config or {}, partition.ranks, partition.expert_parallel, partition.profile, values)
    deal: Callable[[dict[str, Content], Job], Dealt] = module.deal
    return deal(draft.tensors, job), job


def _widened(draft: Draft, job: Job) -> dict[str, str]:
    """Source names of tensors that vLLM holds in a wider dtype, and their own."""
    names = names_of(vllm.kind_of(job), job.profile)
    return {
        name: content.dtype
        for name, content in draft.tensors.items()
        if content.dtype in ("BF16", "F16") and vllm.widens(theirs(name, names), content, names)
    }


def without(draft: Draft, gone: dict[str, str]) -> Draft:
    """`draft` without the tensors that a layout has no place for."""
    if not gone:
        return draft
    kept = {name: content for name, content in draft.tensors.items() if name not in gone}
    return with_tensors(draft, kept, gone)
