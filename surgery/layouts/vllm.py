"""`vllm`: sharded_state, the state of each rank as vLLM holds it before a kernel repacks it, which is what loads.

Files `model-rank-{rank}-part-{part}.safetensors`, parts from 0, no header strings, no index. Modules joined as vLLM
joins them, experts stacked, the vocabulary padded to a multiple of 64, a tied embedding once. Source: vLLM 0.32
`model_loader/sharded_state_loader.py`; names in `vllm_names`; facts/tensor-parallel.md section 3.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping

from surgery.config_reading import config_dtype, tied_embeddings
from surgery.errors import CannotApply
from surgery.families.mtp_names import is_mtp_name
from surgery.families.records import find_family, model_type
from surgery.layouts import hf_rank
from surgery.layouts.dealing import Shape, logical_shapes
from surgery.layouts.group_index import group_indices, plain_index
from surgery.layouts.partition import Dealt, Job, Merged, RankFile, RankTensors
from surgery.layouts.rules import Model
from surgery.layouts.splits import zero_element
from surgery.layouts.vllm_names import EXPERTS, FUSED, SCALES, Names, is_wide, names_of, ours, theirs
from surgery.tensor import computed, concat, narrow, reshape, stack, transpose, unstack
from surgery.tiling import Content, Fill, Tile, Tiling, Widen, tiling

VOCABULARY_QUANTUM = 64
"""vLLM pads the vocabulary to a multiple of this at any number of ranks (VocabParallelEmbedding)."""

PART_NBYTES = 5 * 1024**3
MTP_GONE = "reshard: the state of vLLM's model has no MTP head"
OWN = "reshard: a number of the engine's own, no part of the model"
_EXPERT = re.compile(
    r"^(?P<module>.*\.experts)\.(?P<id>[0-9]+)\.(?P<part>gate_proj|w1|up_proj|w3|down_proj|w2)\.(?P<leaf>\w+)$"
)
_STACKED = re.compile(rf"^(?P<module>.*\.experts)\.{EXPERTS}\.(?P<side>w13|w2)_(?P<leaf>\w+)$")
_OWN_SCALE = re.compile(r"\.(?:_?[kqv]_scale|_?prob_scale|[kqv]_zero_point)$")
_GATES, _UPS = ("gate_proj", "w1"), ("up_proj", "w3")
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_EXPERT_LEAVES = ("weight", "bias", "weight_scale_inv", "weight_scale", "input_scale")
INTO_EVERY_SLOT = ("weight_scale", "input_scale", "weight_scale_2", "weight_global_scale", "input_global_scale")


def kind_of(job: Job) -> str:
    family = find_family(job.config)
    section = family.section(job.config)[1] if family is not None else job.config
    return model_type(section) or model_type(job.config)


def deal(tensors: dict[str, Content], job: Job) -> Dealt:
    """The ranks' state under vLLM's names."""
    names = names_of(kind_of(job), job.profile)
    kept, gone = _without_twins(tensors, job, names)
    stages = _stages(kept, job)
    kept = {name: content for name, content in kept.items() if name not in stages}
    _refuse_act_order(kept, job)
    dealt = hf_rank.deal(kept, job, VOCABULARY_QUANTUM)
    dealt.dropped |= gone | stages
    if stages:
        dealt.notes.append(f"{len(stages)} tensors of the MTP head are left out: vLLM loads it as a model of its own")
        dealt.inverse.append("the MTP head")
    for name in [name for name in kept if name.endswith(("g_idx", "rotary_emb.inv_freq"))]:
        dealt.dropped[name] = "reshard: vLLM holds none"
    dealt.ranks = [dict(sorted(_state(rank, number, job, names).items())) for number, rank in enumerate(dealt.ranks)]
    for name in kept:
        if name.endswith(".weight_shape") and _is_joined_before_last(name):
            dealt.dropped[name] = "reshard: vLLM keeps one shape for joined modules"
    wide = sorted(name for name in kept if widens(theirs(name, names), kept[name], names))
    if wide:
        dealt.notes.append(f"{len(wide)} tensors are widened to F32 as vLLM holds them, first {wide[0]}")
    return dealt


def _is_joined_before_last(name: str) -> bool:
    last = name.rpartition(".")[0].rpartition(".")[2]
    return any(last in parts[:-1] for _, parts in FUSED)


def vectors(tensors: Mapping[str, Content]) -> Iterator[str]:
    """Scales of one number that are vectors: vLLM's shapes do not tell them from scalars."""
    for name, content in tensors.items():
        if name.rpartition(".")[2] in INTO_EVERY_SLOT and content.shape == (1,):
            yield name


def _stages(tensors: Mapping[str, Content], job: Job) -> dict[str, str]:
    """Tensors of MTP stages, which are no part of the model whose state this is."""
    family = find_family(job.config)
    depth = family.depth(job.config) if family is not None else None
    return {name: MTP_GONE for name in tensors if is_mtp_name(name, family, depth)}


def _without_twins(tensors: dict[str, Content], job: Job, names: Names) -> tuple[dict[str, Content], dict[str, str]]:
    """A tied embedding is there once, under the name that vLLM keeps."""
    if not tied_embeddings(job.config):
        return tensors, {}
    pair = ("lm_head.weight", "model.embed_tokens.weight")
    held = [name for name in pair if name in tensors]
    gone = dict.fromkeys(held[:-1], "reshard: tied, vLLM keeps one")
    if not held:
        return tensors, {}
    kept = {name: content for name, content in tensors.items() if name not in pair}
    return {names.tied: tensors[held[-1]], **kept}, gone


def _refuse_act_order(tensors: Mapping[str, Content], job: Job) -> None:
    indices = group_indices(tensors, job.values)
    if indices.ordered:
        raise CannotApply(
            f"{min(indices.ordered)} is quantised with act-order (desc_act), which vLLM takes in no rank files",
            "--layout vllm",
            "hf-rank and dcp-hf keep it; or quantise without desc_act",
        )


def _state(rank: dict[str, Content], number: int, job: Job, names: Names) -> dict[str, Content]:
    """A rank's tensors joined, stacked and renamed, and the engine's own numbers with them."""
    rest, experts = _split_experts(rank)
    state: dict[str, Content] = {}
    for name, content in _joined(rest):
        if name.endswith(("g_idx", "rotary_emb.inv_freq")):
            continue
        new = theirs(name, names)
        if name.rpartition(".")[2] in INTO_EVERY_SLOT and content.shape == ():
            content = reshape(content, (1,))
        state[new] = computed(content, Widen(content.dtype), "F32") if widens(new, content, names) else content
    for module, parts in experts.items():
        for leaf, content in _stacked(parts, module, names):
            state[theirs(f"{module}.{EXPERTS}.{leaf}", names)] = content
    for name, content in list(state.items()):
        if number and name.endswith(".w2_bias"):
            # The sum over ranks adds it once: rank 0 has it, the others zeros.
            state[name] = Tiling(content.dtype, content.shape, (_zeros(content),))
    return state | dict(_own_numbers(state, job, names))


def widens(name: str, content: Content, names: Names) -> bool:
    """Whether vLLM holds a parameter in F32 that the checkpoint has narrower."""
    return content.dtype in ("BF16", "F16") and (
        is_wide(name, names) or (name.endswith(".weight_scale") and content.shape[-1:] == (1,))
    )


def _zeros(content: Content) -> Fill:
    return Fill(zero_element(content.dtype), (0,) * len(content.shape), content.shape)


def _joined(rank: dict[str, Content]) -> Iterator[tuple[str, Content]]:
    """Modules that vLLM joins, in the place of their first part."""
    taken: set[str] = set()
    for name in rank:
        if name in taken:
            continue
        module, _, leaf = name.rpartition(".")
        above, _, last = module.rpartition(".")
        fused = next(((whole, parts) for whole, parts in FUSED if last in parts), None)
        if fused is None:
            yield name, rank[name]
            continue
        whole, parts = fused
        members = [f"{above}.{part}.{leaf}" for part in parts]
        if not all(member in rank for member in members):
            if last == "q_proj" or leaf == "bias":
                yield name, rank[name]
                continue
            missing = next(member for member in members if member not in rank)
            raise CannotApply(f"there is no {missing}, which vLLM joins with {name}", name, "get the missing tensor")
        taken.update(members)
        yield f"{above}.{whole}.{leaf}", _side_by_side([rank[member] for member in members], leaf)


def _side_by_side(parts: list[Content], leaf: str) -> Content:
    """Parts joined along their outputs. One number for a whole part goes into a slot of its own."""
    if leaf in INTO_EVERY_SLOT and parts[0].shape in ((), (1,)):
        return concat([reshape(part, (1,)) for part in parts], 0)
    if leaf in ("weight_shape", "g_idx"):
        return parts[-1]
    axis = -1 if leaf in ("qweight", "qzeros", "scales") or len(parts[0].shape) == 1 else -2
    return concat(parts, axis)


Parts = dict[str, dict[str, dict[int, Content]]]
"""leaf -> gate, up or down -> id -> content; fused experts under the id -1."""


def _split_experts(rank: dict[str, Content]) -> tuple[dict[str, Content], dict[str, Parts]]:
    rest: dict[str, Content] = {}
    experts: dict[str, Parts] = {}
    for name, content in rank.items():
        match = _EXPERT.match(name)
        if match is not None:
            side = "gate" if match["part"] in _GATES else "up" if match["part"] in _UPS else "down"
            experts.setdefault(match["module"], {}).setdefault(match["leaf"], {}).setdefault(side, {})[
                int(match["id"])
            ] = content
        elif (fused := re.match(r"^(.*\.experts)\.(gate_up_proj|down_proj)(?:_(bias))?$", name)) is not None:
            side = "both" if fused[2] == "gate_up_proj" else "down"
            parts = experts.setdefault(fused[1], {}).setdefault(fused[3] or "weight", {})
            parts.setdefault(side, {})[-1] = content
        else:
            rest[name] = content
    return rest, experts


def _stacked(parts: Parts, module: str, names: Names) -> Iterator[tuple[str, Content]]:
    """`w13_<leaf>` and `w2_<leaf>` of a layer's experts, gate above up."""
    for leaf, sides in parts.items():
        if leaf not in _EXPERT_LEAVES:
            raise CannotApply(
                f"{module}: how vLLM holds {leaf} of experts before it repacks them is not known",
                f"{module}.*.{leaf}",
                "hf-rank and dcp-hf need no engine's form",
            )
        if "both" in sides or -1 in sides.get("down", {}):
            yield from _from_fused(leaf, sides, names)
            continue
        ids = sorted(sides.get("down", {}))
        if any(sorted(held) != ids for held in sides.values()) or not ids:
            raise CannotApply(f"{module}: experts have other parts than each other", module, "get the missing tensors")
        if "gate" in sides and "up" in sides:
            both = [_side_by_side([sides["gate"][each], sides["up"][each]], leaf) for each in ids]
            yield f"w13_{leaf}", stack(both)
        downs = [sides["down"][each] for each in ids]
        yield f"w2_{leaf}", stack([reshape(each, ()) if each.shape == (1,) else each for each in downs])


def _from_fused(leaf: str, sides: dict[str, dict[int, Content]], names: Names) -> Iterator[tuple[str, Content]]:
    """Experts that are one tensor already: [E, out, in] as vLLM has them, [E, in, out] (gpt-oss) turned."""
    for side, name in (("both", "w13"), ("down", "w2")):
        content = sides.get(side, {}).get(-1)
        if content is not None:
            turned = names.turned and len(content.shape) == 3
            yield f"{name}_{leaf}", transpose(content, (0, 2, 1)) if turned else content


def _own_numbers(state: Mapping[str, Content], job: Job, names: Names) -> Iterator[tuple[str, Content]]:
    """Scales that every attention layer expects beside the checkpoint's tensors."""
    section = job.config.get("quantization_config")
    method = section.get("quant_method") if isinstance(section, Mapping) else None
    dtype = _DTYPES.get(str(config_dtype(job.config)), "BF16")
    attention = names.attention.partition(".")[0]
    marks = tuple(f".{attention}.{module}." for module in ("qkv_proj", "kv_b_proj"))
    layers = dict.fromkeys(name[: name.index(mark)] for name in state for mark in marks if mark in name)
    for layer in layers:
        prefix = f"{layer}.{names.attention}"
        for scale in SCALES:
            yield f"{prefix}.{scale}", _number("F32", (), 1.0)
        if method == "fp8":
            for scale in SCALES:
                yield f"{prefix}.{scale[1:]}", _number(dtype, (), -1.0)
        if method == "compressed-tensors":
            for letter in "kqv":
                yield f"{prefix}.{letter}_scale", _number("F32", (1,), 1.0)
                yield f"{prefix}.{letter}_zero_point", _number(dtype, (1,), 0.0)


def _number(dtype: str, shape: Shape, value: float) -> Tiling:
    single = struct.pack("<f", value)
    data = {"F32": single, "BF16": single[2:], "F16": struct.pack("<e", value)}[dtype]
    return Tiling(dtype, shape, (Fill(data.hex(), (0,) * len(shape), shape),))


def merge(ranks: RankTensors, job: Job) -> Merged:
    """Hugging Face names and whole tensors from the ranks' state."""
    names = names_of(kind_of(job), job.profile)
    model = hf_rank.model_of(job, vocabulary_quantum=VOCABULARY_QUANTUM)
    local: RankTensors = []
    own: dict[tuple[int, str], str] = {}
    zeros: list[tuple[Tile, str]] = []
    for number, rank in enumerate(ranks):
        held: dict[str, Content] = {}
        for name, content in rank.items():
            if _OWN_SCALE.search(name) and f".{names.attention}." in name:
                own[number, name] = OWN
                continue
            if number and name.endswith(".w2_bias"):
                # Rank 0 adds it to the sum over ranks, so the others hold zeros.
                tiles = (tile for tile in tiling(content).tiles if isinstance(tile, Tile))
                zeros += [(tile, zero_element(content.dtype)) for tile in tiles]
                continue
            for old, part in _unjoined(ours(name, names), content, model, names, number):
                held[old] = part
        local.append(held)
    merged = hf_rank.merge(local, job, VOCABULARY_QUANTUM)
    _remake(merged, job)
    merged.own = own
    merged.constants += zeros
    if tied_embeddings(job.config) and names.tied in merged.tensors:
        merged.tensors["model.embed_tokens.weight"] = merged.tensors.pop(names.tied)
    return merged


def _remake(merged: Merged, job: Job) -> None:
    """What the layout had left out and shapes tell: the shape of each joined module, GPTQ indices in plain order."""
    logical = logical_shapes(merged.tensors, job.config)
    for name in list(merged.tensors):
        module, _, leaf = name.rpartition(".")
        shape = logical.get(module)
        if leaf == "weight_packed" and f"{module}.weight_shape" not in merged.tensors and shape is not None:
            sizes = tuple(
                Fill(size.to_bytes(8, "little").hex(), (place,), (1,)) for place, size in enumerate(shape[-2:])
            )
            merged.tensors[f"{module}.weight_shape"] = Tiling("I64", (2,), sizes)
        if leaf == "qweight" and job.group_index and shape is not None:
            groups = merged.tensors[f"{module}.scales"].shape[-2]
            merged.tensors[f"{module}.g_idx"] = plain_index("I32", shape[-1], -(-shape[-1] // groups))


def _unjoined(name: str, content: Content, model: Model, names: Names, rank: int) -> Iterator[tuple[str, Content]]:
    """The parts of what vLLM joined or stacked, under our names."""
    match = _STACKED.match(name)
    if match is not None:
        yield from _unstacked(match, content, names, model, rank)
        return
    module, _, leaf = name.rpartition(".")
    above, _, last = module.rpartition(".")
    parts = next((parts for whole, parts in FUSED if whole == last), None)
    if parts is None or model.role(module) is not None:
        yield name, reshape(content, ()) if leaf in INTO_EVERY_SLOT and content.shape == (1,) else content
        return
    if leaf == "weight_shape":
        yield f"{above}.{parts[-1]}.{leaf}", content
        return
    if leaf in INTO_EVERY_SLOT and content.shape == (len(parts),):
        for number, part in enumerate(parts):
            yield f"{above}.{part}.{leaf}", reshape(narrow(content, 0, number, 1), ())
        return
    axis = len(content.shape) - 1 if leaf in ("qweight", "qzeros", "scales") or len(content.shape) == 1 else 0
    sizes = _part_sizes(last, content.shape[axis], model, names)
    start = 0
    for part, size in zip(parts, sizes, strict=True):
        yield f"{above}.{part}.{leaf}", narrow(content, axis, start, size)
        start += size


def _part_sizes(fused: str, total: int, model: Model, names: Names) -> list[int]:
    """How many of a rank's rows each part has, in the tensor's own units."""
    if fused == "gate_up_proj":
        return [total // 2, total // 2]
    if fused == "fused_qkv_a_proj":
        first = model.number("q_lora_rank")
        second = model.number("kv_lora_rank") + model.number("qk_rope_head_dim")
    else:
        heads, kv_heads = model.count("heads"), model.count("kv_heads")
        gated = names.gated and model.config.get("attn_output_gate") is not False
        first = (2 if gated else 1) * heads // model.ranks
        second = 2 * max(1, kv_heads // model.ranks)
    if total * first % (first + second):
        raise CannotApply(f"{fused} has {total} rows on a rank, which are no such parts", fused, "another config's?")
    queries = total * first // (first + second)
    rest = total - queries
    return [queries, rest] if fused == "fused_qkv_a_proj" else [queries, rest // 2, rest // 2]


def _unstacked(
    match: re.Match[str], content: Content, names: Names, model: Model, rank: int
) -> Iterator[tuple[str, Content]]:
    """A rank's experts; with fewer than the config counts they are whole, the rank's share in their order."""
    module, leaf = match["module"], match["leaf"]
    if names.turned:
        part = "gate_up_proj" if match["side"] == "w13" else "down_proj"
        whole = transpose(content, (0, 2, 1)) if len(content.shape) == 3 else content
        yield f"{module}.{part}" + ("" if leaf == "weight" else f"_{leaf}"), whole
        return
    mixtral = module.endswith("block_sparse_moe.experts")
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    count = model.experts()
    first = rank * content.shape[0] if count is not None and content.shape[0] * model.ranks == count else 0
    for number, each in enumerate(unstack(content, 0), first):
        if match["side"] == "w2":
            yield f"{module}.{number}.{down}.{leaf}", each
            continue
        if len(each.shape) == 1 and each.shape[0] == 2 and leaf in INTO_EVERY_SLOT:
            yield f"{module}.{number}.{gate}.{leaf}", reshape(narrow(each, 0, 0, 1), ())
            yield f"{module}.{number}.{up}.{leaf}", reshape(narrow(each, 0, 1, 1), ())
            continue
        axis = len(each.shape) - 1 if leaf in ("qweight", "qzeros", "scales") else 0
        half = each.shape[axis] // 2
        yield f"{module}.{number}.{gate}.{leaf}", narrow(each, axis, 0, half)
        yield f"{module}.{number}.{up}.{leaf}", narrow(each, axis, half, half)


def files(dealt: Dealt, job: Job, metadata: dict[str, str]) -> list[RankFile]:
    """Parts of at most 5 GiB, as vLLM writes them."""
    found = []
    for rank, tensors in enumerate(dealt.ranks):
        parts: list[dict[str, Content]] = [{}]
        nbytes = 0
        for name, content in tensors.items():
            if parts[-1] and nbytes + content.nbytes > PART_NBYTES:
                parts.append({})
                nbytes = 0
            parts[-1][name] = content
            nbytes += content.nbytes
        found += [
            RankFile(rank, f"model-rank-{rank}-part-{number}.safetensors", held, {})
            for number, held in enumerate(parts)
        ]
    return found
