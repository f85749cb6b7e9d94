"""`deepseek`: what DeepSeek-V3's own inference code loads, `model{rank}-mp{size}.safetensors`.

Names of its `model.py`, whole experts to ranks with their global ids, the vocabulary cut without padding, no KV copies,
no header strings, no index. The MTP head goes, as the reference converter drops it. Source: deepseek-ai/DeepSeek-V3
`inference/convert.py` (9b4e978), DeepSeek-V3.2-Exp (3b99a53): facts/tensor-parallel.md section 1.
"""

from __future__ import annotations

import re

from surgery.errors import CannotApply
from surgery.families.records import find_family
from surgery.layouts.dealing import Dealer, logical_shapes
from surgery.layouts.hf_rank import model_of
from surgery.layouts.partition import Dealt, Job, Merged, RankFile, RankTensors, names_of
from surgery.layouts.splits import Split, cut, joined, part, whole, zero_element
from surgery.tiling import Content

_OUT, _IN, _WHOLE = 0, 1, None
_NAMES: dict[str, tuple[str, int | None]] = {
    "embed_tokens": ("embed", _OUT),
    "input_layernorm": ("attn_norm", _WHOLE),
    "post_attention_layernorm": ("ffn_norm", _WHOLE),
    "q_proj": ("wq", _OUT),
    "q_a_proj": ("wq_a", _WHOLE),
    "q_a_layernorm": ("q_norm", _WHOLE),
    "q_b_proj": ("wq_b", _OUT),
    "kv_a_proj_with_mqa": ("wkv_a", _WHOLE),
    "kv_a_layernorm": ("kv_norm", _WHOLE),
    "kv_b_proj": ("wkv_b", _OUT),
    "o_proj": ("wo", _IN),
    "gate": ("gate", _WHOLE),
    "gate_proj": ("w1", _OUT),
    "down_proj": ("w2", _IN),
    "up_proj": ("w3", _OUT),
    "norm": ("norm", _WHOLE),
    "lm_head": ("head", _OUT),
}
"""The module's last name -> its name there, and the side that is cut."""

_INDEXER = {"wq_b": "wq_b", "wk": "wk", "k_norm": "k_norm", "weights_proj": "weights_proj"}
"""V3.2: modules of the indexer, whole on every rank."""

_LEAVES = {"weight_scale_inv": "scale", "e_score_correction_bias": "bias"}
_BACK = {new: old for old, (new, _) in _NAMES.items()}
_EXPERT = re.compile(r"^(layers\.[0-9]+\.ffn\.experts\.)([0-9]+)\.")
MTP_GONE = "reshard: the deepseek layout has no MTP head"


def deal(tensors: dict[str, Content], job: Job) -> Dealt:
    """The ranks' tensors under DeepSeek's names. Raises `CannotApply` for a name that its table does not have."""
    family = find_family(job.config)
    if family is None or not {"deepseek_v3", "deepseek_v32"} & set(family.model_types):
        what = "the deepseek layout is for DeepSeek-V3 and V3.2"
        raise CannotApply(what, "--layout", "choose hf-rank, dcp-hf or vllm")
    depth = family.depth(job.config) or 0
    dealer = Dealer(model_of(job), job.config)
    kept, gone = {}, {}
    for name, content in tensors.items():
        layer = re.match(r"model\.layers\.([0-9]+)\.", name)
        if (layer is not None and int(layer[1]) >= depth) or name.startswith("mtp."):
            gone[name] = MTP_GONE
        else:
            kept[name] = content
    logical = logical_shapes(kept, job.config)
    experts = {int(match[1]) for name in kept if (match := re.search(r"\.experts\.([0-9]+)\.", name))}
    count = max(experts, default=-1) + 1
    dealt = Dealt([{} for _ in range(job.ranks)], gone)
    for name, content in kept.items():
        new = _theirs(name)
        match = _EXPERT.match(new)
        if match is not None:
            if count % job.ranks:
                raise CannotApply(f"{count} experts on {job.ranks} ranks", name, "choose a divisor of the experts")
            dealt.ranks[int(match[2]) // (count // job.ranks)][new] = content
            continue
        side = _side(name)
        split = whole(job.ranks) if side is _WHOLE else _split(dealer, name, content, logical, side, job.ranks)
        for rank in range(job.ranks):
            dealt.ranks[rank][new] = part(content, split, rank)
    if gone:
        dealt.notes.append(f"{len(gone)} tensors of the MTP head are left out: this layout has none, config counts 0")
        dealt.inverse.append("the MTP head")
    return dealt


def _split(
    dealer: Dealer, name: str, content: Content, logical: dict[str, tuple[int, ...]], side: int, ranks: int
) -> Split:
    """Equal parts of the axis, as convert.py cuts them; scales must be cut at whole blocks."""
    axis = side - 2
    if len(content.shape) < 2:
        raise CannotApply(f"{name} has shape {list(content.shape)}: no axis to cut", name, "this is another layout")
    if name.endswith(("weight_scale_inv", ".weight")) and "embed" not in name and "lm_head" not in name:
        dealer.split(name, content, logical.get(dealer.place(name).module))
    return cut(axis, content.shape[axis], ranks, 1, name)


def _theirs(name: str) -> str:
    """The name that the reference converter gives."""
    new = name.removeprefix("model.")
    module, _, leaf = new.rpartition(".")
    leaf = _LEAVES.get(leaf, leaf)
    above, _, last = module.rpartition(".")
    known = _INDEXER.get(last) if ".indexer." in f".{module}" else _NAMES.get(last, ("", None))[0]
    if not known or leaf not in ("weight", "bias", "scale"):
        raise CannotApply(f"the deepseek layout has no name for {name}", name, "the reference converter refuses it too")
    above = above.replace("self_attn", "attn").replace("mlp", "ffn")
    return ".".join(filter(None, (above, known, leaf)))


def _side(name: str) -> int | None:
    module = name.rpartition(".")[0]
    if ".indexer." in name:
        return _WHOLE
    return _NAMES[module.rpartition(".")[2]][1]


def merge(ranks: RankTensors, job: Job) -> Merged:
    """Hugging Face names and whole tensors; an expert is on one rank."""
    merged = Merged({})
    for name in names_of(ranks):
        old = _ours(name)
        parts = [rank.get(name) for rank in ranks]
        if _EXPERT.match(name):
            holders = [each for each in parts if each is not None]
            if len(holders) != 1:
                raise CannotApply(f"{len(holders)} ranks have {name}", name, "an expert is on one rank")
            merged.tensors[old] = holders[0]
            continue
        held = [each for each in parts if each is not None]
        side = _side(old)
        if side is _WHOLE:
            split = whole(job.ranks)
        else:
            size = sum(each.shape[side - 2] for each in held)
            split = cut(side - 2, size, job.ranks, 1, name)
        result = joined(parts, split, name)
        merged.tensors[old] = result.content
        merged.replicas += result.replicas
        merged.constants += [(tile, zero_element(tile.source.dtype)) for tile in result.padding]
    return merged


def _ours(name: str) -> str:
    module, _, leaf = name.rpartition(".")
    above, _, last = module.rpartition(".")
    if ".indexer" in f".{above}":
        known = last
    elif last in _BACK:
        known = _BACK[last]
    else:
        raise CannotApply(f"{name} is no name of the deepseek layout", name, "--from names another layout")
    if leaf == "scale":
        leaf = "weight_scale_inv"
    elif leaf == "bias" and last == "gate":
        leaf = "e_score_correction_bias"
    above = re.sub(r"\battn\b", "self_attn", re.sub(r"\bffn\b", "mlp", above))
    whole_name = ".".join(filter(None, (above, known, leaf)))
    return whole_name if known == "lm_head" else f"model.{whole_name}"


def files(dealt: Dealt, job: Job, metadata: dict[str, str]) -> list[RankFile]:
    """One file a rank, without header strings."""
    return [RankFile(rank, f"model{rank}-mp{job.ranks}.safetensors", held, {}) for rank, held in enumerate(dealt.ranks)]
