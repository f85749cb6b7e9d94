"""Whether an engine could run the result on so many ranks: refused where it could not, with the bytes of a rank."""

from __future__ import annotations

from surgery.draft import Draft, noted
from surgery.errors import CannotApply
from surgery.legality import legality
from surgery.sizes import human_size


def judged_for_ranks(draft: Draft, tensor_parallel: int, expert_parallel: int) -> Draft:
    """`draft` with a note of what a rank would hold; as it is where nobody asked. Raises `CannotApply`."""
    if not (tensor_parallel or expert_parallel) or draft.config is None:
        return draft
    ranks, experts = max(1, tensor_parallel), max(1, expert_parallel)
    tensors = ((name, content.shape, content.nbytes) for name, content in draft.tensors.items())
    judged = legality(draft.config, tensors, ranks, experts)
    if judged.reasons:
        what = "; ".join(judged.reasons)
        raise CannotApply(what, "--for-tp, --for-ep", "choose other numbers of ranks, or leave them out")
    told = f"tensor parallel {ranks}, expert parallel {experts}: about {human_size(judged.rank_nbytes)} a rank"
    return noted(draft, "ranks", "; ".join([told, *judged.notes]))
