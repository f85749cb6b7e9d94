"""Which side of every module is dealt to ranks: one literal table per architecture, shared rows where they share names.

Sources: vLLM 0.32 `model_executor/layers/linear.py`, `vocab_parallel_embedding.py` and `models/*.py`; transformers 5.24
`base_model_tp_plan`; facts/tensor-parallel.md section 3 and 8. A name that no row means is an error, never copied to
every rank in silence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from surgery.errors import CannotApply
from surgery.families.config_fields import read
from surgery.families.expert_names import COUNTS
from surgery.layouts.splits import Split, chunked, cut, heads, padded, sections, whole_section

Config = Mapping[str, Any]
Side = Literal["out", "in", "whole", "bare"]
Uneven = Literal["refuse", "chunk"]


@dataclass(frozen=True)
class Even:
    """Equal parts, cut at multiples of `unit`."""

    unit: int = 1


@dataclass(frozen=True)
class Heads:
    """Whole heads, as many as `count` says; `copies`: with more ranks than heads each goes to several neighbours."""

    count: str
    copies: bool = False


@dataclass(frozen=True)
class Sections:
    """Parts that lie one after another: a size by name, and how it is dealt (None: every rank has it whole)."""

    parts: tuple[tuple[str, Even | Heads | None], ...]


@dataclass(frozen=True)
class Halves:
    """Two equal parts one after another (gate and up), or interleaved a row of each (gpt-oss)."""

    interleaved: bool = False


@dataclass(frozen=True)
class Vocabulary:
    """Rows of the vocabulary."""


Deal = Even | Heads | Sections | Halves | Vocabulary


@dataclass(frozen=True)
class Role:
    """`side` of a module's weight [out, in] that is dealt; `bare`: the parameter's own `axis`, counted from the end.

    `expert`: one of several experts, which expert parallelism gives to one rank whole.
    """

    side: Side
    deal: Deal = Even()
    axis: int = -1
    expert: bool = False


WHOLE = Role("whole")
COLUMN, ROW = Role("out"), Role("in")
QUERIES, FROM_HEADS = Role("out", Heads("heads")), Role("in", Heads("heads"))
KEYS_VALUES = Role("out", Heads("kv_heads", copies=True))
VOCABULARY = Role("out", Vocabulary())
EXPERT_COLUMN, EXPERT_ROW = Role("out", expert=True), Role("in", expert=True)

Table = tuple[tuple[str, Role], ...]
"""Patterns of module or parameter names, matched to their end, in order; what stands before does not matter."""

_ENDS: Table = (
    (r"(?:embed_tokens|lm_head)", VOCABULARY),
    (r"(?:\w*norm\w*|rotary_emb\.inv_freq)", WHOLE),
    (r"(?:eh_proj|mtp\.fc)", WHOLE),
    (r"shared_head\.head", VOCABULARY),
)
_ATTENTION: Table = (
    (r"self_attn\.q_proj", QUERIES),
    (r"self_attn\.[kv]_proj", KEYS_VALUES),
    (r"self_attn\.o_proj", FROM_HEADS),
)
_MLP: Table = (
    (r"mlp\.(?:gate|up)_proj", COLUMN),
    (r"mlp\.down_proj", ROW),
)
_EXPERTS: Table = (
    (r"experts\.[0-9]+\.(?:gate_proj|up_proj|w1|w3)", EXPERT_COLUMN),
    (r"experts\.[0-9]+\.(?:down_proj|w2)", EXPERT_ROW),
    (r"experts\.gate_up_proj", Role("bare", Halves(), -2, expert=True)),
    (r"experts\.down_proj", Role("bare", Even(), -1, expert=True)),
    (r"(?:mlp|block_sparse_moe)\.gate", WHOLE),
    (r"e_score_correction_bias", WHOLE),
    (r"shared_experts?\.(?:gate|up)_proj", COLUMN),
    (r"shared_experts?\.down_proj", ROW),
    (r"shared_expert_gate", WHOLE),
)
_LATENT: Table = (
    (r"self_attn\.(?:q_a_proj|kv_a_proj_with_mqa)", WHOLE),
    (r"self_attn\.(?:q_b_proj|q_proj|kv_b_proj)", QUERIES),
    (r"self_attn\.o_proj", FROM_HEADS),
)
_INDEXER: Table = ((r"self_attn\.indexer\.(?:wq_b|wk|k_norm|weights_proj)", WHOLE),)
_FUSED: Table = (
    (
        r"self_attn\.qkv_proj",
        Role(
            "out",
            Sections((("q", Heads("heads")), ("kv", Heads("kv_heads", True)), ("kv", Heads("kv_heads", True)))),
        ),
    ),
    (r"self_attn\.o_proj", FROM_HEADS),
    (r"mlp\.gate_up_proj", Role("out", Halves())),
    (r"mlp\.down_proj", ROW),
)
_GPT_OSS: Table = (
    (r"self_attn\.sinks", Role("bare", Heads("heads"), -1)),
    (r"mlp\.router", WHOLE),
    (r"experts\.gate_up_proj", Role("bare", Halves(interleaved=True), -1, expert=True)),
    (r"experts\.gate_up_proj_bias", Role("bare", Halves(interleaved=True), -1, expert=True)),
    (r"experts\.down_proj", Role("bare", Even(), -2, expert=True)),
    (r"experts\.down_proj_bias", WHOLE),
)
_DELTA: Table = (
    (r"linear_attn\.(?:in_proj_qkvz|in_proj_ba)", Role("out", Heads("key_heads"))),
    (
        r"linear_attn\.in_proj_qkv",
        Role("out", Sections((("keys", Heads("key_heads")),) * 2 + (("values", Heads("value_heads")),))),
    ),
    (r"linear_attn\.(?:in_proj_z|in_proj_b|in_proj_a)", Role("out", Heads("value_heads"))),
    (
        r"linear_attn\.conv1d",
        Role("bare", Sections((("keys", Heads("key_heads")),) * 2 + (("values", Heads("value_heads")),)), -3),
    ),
    (r"linear_attn\.(?:A_log|dt_bias)", Role("bare", Heads("value_heads"), -1)),
    (r"linear_attn\.out_proj", Role("in", Heads("value_heads"))),
)
_GROUPS = Heads("groups", copies=True)
_MAMBA2: Table = (
    (
        r"(?:mixer|mamba)\.in_proj",
        Role(
            "out",
            Sections(
                (
                    ("inner", Heads("mamba_heads")),
                    ("inner", Heads("mamba_heads")),
                    ("group_states", _GROUPS),
                    ("group_states", _GROUPS),
                    ("mamba_heads", Heads("mamba_heads")),
                )
            ),
        ),
    ),
    (
        r"(?:mixer|mamba)\.conv1d",
        Role(
            "bare",
            Sections((("inner", Heads("mamba_heads")), ("group_states", _GROUPS), ("group_states", _GROUPS))),
            -3,
        ),
    ),
    (r"(?:mixer|mamba)\.(?:A_log|D|dt_bias)", Role("bare", Heads("mamba_heads"), -1)),
    (r"(?:mixer|mamba)\.norm", Role("bare", Heads("mamba_heads"), -1)),
    (r"(?:mixer|mamba)\.out_proj", Role("in", Heads("mamba_heads"))),
)

_DENSE = (*_ENDS, *_ATTENTION, *_MLP)
_MIXED = (*_ENDS, *_ATTENTION, *_EXPERTS, *_MLP)
_LATENT_MIXED = (*_ENDS, *_LATENT, *_INDEXER, *_EXPERTS, *_MLP)

TABLES: dict[tuple[str, ...], Table] = {
    (
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "ministral",
        "ministral3",
        "gemma",
        "gemma2",
        "gemma3_text",
        "granite",
        "exaone4",
        "smollm3",
        "seed_oss",
        "glm4_dense",
        "helium",
        "olmo",
    ): _DENSE,
    (
        "mixtral",
        "qwen2_moe",
        "qwen3_moe",
        "glm4_moe",
        "qwen3_vl_moe_text",
        "ernie4_5_moe",
        "dots1",
        "hunyuan_v1_moe",
        "exaone_moe",
    ): _MIXED,
    ("deepseek_v2", "deepseek_v3", "kimi_k2", "deepseek_v32", "glm4_moe_lite"): _LATENT_MIXED,
    ("phi3", "phi4"): (*_ENDS, *_FUSED),
    ("gpt_oss",): (*_ENDS, *_ATTENTION, *_GPT_OSS),
    ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"): (*_DELTA, *_ENDS, *_ATTENTION, *_EXPERTS, *_MLP),
    ("mamba2",): (*_MAMBA2, (r"embeddings?", VOCABULARY), *_ENDS),
    ("bamba", "granitemoehybrid", "falcon_h1"): (*_MAMBA2, *_ENDS, *_ATTENTION, *_MLP),
}
"""Model types of the text decoder -> its table. What two architectures call alike is dealt alike; the counts differ."""

_COUNTS: dict[str, tuple[str, ...]] = {
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "key_heads": ("linear_num_key_heads",),
    "value_heads": ("linear_num_value_heads",),
    "groups": ("n_groups", "mamba_n_groups"),
    "mamba_heads": ("num_heads", "mamba_n_heads", "mamba_num_heads"),
}


NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.|$)")
"""A part of a name that is a number: `layers.3`, not `w1`."""


@lru_cache(maxsize=1 << 14)
def _role(table: Table, name: str) -> Role | None:
    return next((role for pattern, role in table if re.search(rf"(?:^|\.){pattern}$", name)), None)


@dataclass(frozen=True)
class Model:
    """The numbers that rules need, from the text decoder's config; `uneven`: what becomes of odd sizes."""

    config: Config
    table: Table
    ranks: int
    uneven: Uneven = "refuse"
    vocabulary_quantum: int = 0

    def count(self, name: str) -> int:
        for field in _COUNTS[name]:
            value = read(self.config, field)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        if name == "kv_heads":
            return self.count("heads")
        raise CannotApply(
            f"the config has no {_COUNTS[name][0]}, which says how the tensors are cut",
            "config.json",
            "put the model's own config beside the files",
        )

    def experts(self) -> int | None:
        """The count of routed experts that the config states."""
        return next((value for name in COUNTS if isinstance(value := read(self.config, name), int) and value), None)

    def size(self, name: str, total: int = 0) -> int:
        """The size of a section by name."""
        if name in _COUNTS:
            return self.count(name)
        if name in ("q", "kv"):
            return self.count("heads" if name == "q" else "kv_heads") * self._head_width(total)
        if name == "keys":
            return self.count("key_heads") * self.number("linear_key_head_dim")
        if name == "values":
            return self.count("value_heads") * self.number("linear_value_head_dim")
        if name == "group_states":
            return self.count("groups") * self.number("state_size", "mamba_d_state", "ssm_state_size")
        return self.count("mamba_heads") * self.number("head_dim", "mamba_d_head", "mamba_head_dim")

    def _head_width(self, total: int) -> int:
        width = read(self.config, "head_dim")
        if isinstance(width, int):
            return width
        hidden = read(self.config, "hidden_size")
        return hidden // self.count("heads") if isinstance(hidden, int) else total

    def number(self, *fields: str) -> int:
        """The first of `fields` that the config has. Raises `CannotApply` where it has none."""
        value = next((value for field in fields if isinstance(value := read(self.config, field), int)), None)
        if value is None:
            raise CannotApply(f"the config has no {fields[0]}", "config.json", "put the model's own config there")
        return value

    def role(self, name: str) -> Role | None:
        """The row that speaks of a module or parameter; None where none does. Names that differ in numbers alone mean
        the same."""
        return _role(self.table, NUMBER.sub("0", name))

    def split(self, deal: Deal, axis: int, size: int, what: str) -> Split:
        """How an axis of `size` is dealt."""
        ranks = self.ranks
        if isinstance(deal, Sections):
            return self._sections(deal, axis, size, what)
        if self.uneven == "chunk":
            return chunked(axis, size, ranks)
        if isinstance(deal, Heads):
            count = self.count(deal.count)
            if size % count:
                raise CannotApply(
                    f"{what}: {size} is no multiple of the {count} heads", what, "the config beside it is another's"
                )
            if ranks > count and not deal.copies:
                return cut(axis, size, ranks, size // count, what)
            return heads(axis, count, size // count, ranks, what)
        if isinstance(deal, Halves):
            if deal.interleaved:
                return cut(axis, size, ranks, 2, what)
            return sections([cut(axis, size // 2, ranks, 1, what)] * 2)
        if isinstance(deal, Vocabulary):
            if self.vocabulary_quantum:
                return padded(axis, size, self.vocabulary_quantum, ranks, what)
            return cut(axis, size, ranks, 1, what)
        return cut(axis, size, ranks, deal.unit, what)

    def _sections(self, deal: Sections, axis: int, size: int, what: str) -> Split:
        sizes = [self.size(name, size) for name, _ in deal.parts]
        if sum(sizes) != size:
            raise CannotApply(
                f"{what}: sections of {', '.join(map(str, sizes))} are not the {size} that it has",
                what,
                "the config beside it is another's",
            )
        if self.uneven == "chunk":
            return chunked(axis, size, self.ranks)
        splits = [
            whole_section(each, self.ranks) if inner is None else self.split(inner, axis, each, what)
            for each, (_, inner) in zip(sizes, deal.parts, strict=True)
        ]
        return sections(splits)

    def whole_size(self, deal: Deal, local: Sequence[int]) -> int:
        """The size of a whole axis, from the ranks' own."""
        if isinstance(deal, Sections):
            return sum(self.size(name) for name, _ in deal.parts)
        if isinstance(deal, Heads) and deal.copies and self.uneven != "chunk" and self.ranks > self.count(deal.count):
            return local[0] * self.count(deal.count)
        if isinstance(deal, Vocabulary) and self.vocabulary_quantum:
            return self.number("vocab_size")
        return sum(local)


def table_of(kind: str) -> Table:
    """The table of a model type. Raises `CannotApply` where there is none."""
    for kinds, table in TABLES.items():
        if kind in kinds:
            return table
    known = sorted(kind for kinds in TABLES for kind in kinds)
    raise CannotApply(
        f"there are no split rules for model_type {kind!r}", "reshard", f"there are for {', '.join(known)}"
    )
