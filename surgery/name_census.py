"""What tensor names tell: numbered stacks, and which part of a model each tensor is.

A name with its numbers replaced by `#` is a template; a model has a few hundred, however many tensors it has. Parts are
judged once a template, by the words that architectures use (facts, families.json), and tensors are counted in cells of
one template, layer and dtype: everything that `inspect` says comes from those few thousand cells.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from surgery.safetensors_file import StoredTensor

COMPONENTS = (
    "embeddings",
    "attention",
    "dense MLP",
    "experts",
    "shared experts",
    "router",
    "norms",
    "lm_head",
    "memory tables",
    "MTP",
    "vision",
    "audio",
    "other",
)

_NUMBER = re.compile(r"\.([0-9]{1,9})(?=\.|$)")
_STACK_WORD = re.compile(r"layers?|blocks?|h|resblocks|mtp\w*|nextn\w*")
_FEWEST_LAYERS_OF_UNKNOWN_WORD = 4
"""A numbered list whose word says nothing, such as `downsample.0`, is a stack from this many entries on."""

_PARTS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (component, re.compile(pattern))
    for component, pattern in (
        (
            "vision",
            r"\.(visual|vision\w*|vit|image\w*|img_\w+|vpm|resampler|sam_model|patch_embed\w*"
            r"|mm_projector|multi_modal_projector|merger|mlp1)\.",
        ),
        ("memory tables", r"#.*\.(engram\w*|ple|ngram_embedding\w*)\."),
        ("audio", r"\.(audio\w*|speech\w*|sound\w*|apm|talker|code2wav|token2wav)\."),
        ("MTP", r"\.(mtp\w*|nextn\w*|eagle\w*)\."),
        ("shared experts", r"\.(shared_experts?|share_expert|shared_mlp|shared_expert_gate)\."),
        (
            "router",
            r"\.(router|router_bias|e_score_correction_bias|expert_bias|moe_statics|tid2eid|balancing_biases)\."
            r"|\.(mlp|moe|block_sparse_moe|ffn|feed_forward|mixer)\.gate\.",
        ),
        (
            "experts",
            r"\.experts\.|\.moe\.(gate|up|down)_proj\.|\.block_sparse_moe\.(input|output)_linear\.",
        ),
        ("norms", r"(?i)\.(\w*norm\w*|ln|ln_\w+|\w+_ln)\.[^.]+\.$"),
        ("dense MLP", r"\.mixer\.(gate|up|down)_proj\."),
        (
            "attention",
            r"\.(self_attn|self_attention|attention|attn\w*|linear_attn|cross_attn|encoder_attn|SelfAttention"
            r"|EncDecAttention|mamba\w*|mixer|temporal_block|short_conv|conv|ssm|indexer)\.",
        ),
        (
            "dense MLP",
            r"#.*\.(mlps?|feed_forward|feedforward|ffn|fc[12]|w[123]|DenseReluDense|intermediate|output)\.",
        ),
        ("lm_head", r"\.(lm_head|embed_out)\.|^\.(output|head|proj_out)\."),
        ("embeddings", r"^(?!.*#).*\.(\w*embed\w*|wte|wpe|shared)\."),
    )
)


class Template(msgspec.Struct, frozen=True):
    """A name with `#` for its numbers.

    `component` is one of `COMPONENTS`; `prefix` is what stands before the first number where that may number a stack's
    layers; `expert` is the place among the name's numbers of the one that counts experts.
    """

    text: str
    component: str
    prefix: str | None
    expert: int | None


class Cell(msgspec.Struct):
    """The tensors of one template, layer and dtype. `rows` are first axes of tensors with three or more."""

    tensors: int = 0
    nbytes: int = 0
    experts: set[int] = set()
    rows: set[int] = set()


class Entry(msgspec.Struct, frozen=True):
    """A cell with what it is of; `layer` is -1 where the template numbers none."""

    template: Template
    layer: int
    dtype: str
    cell: Cell


def take_census(tensors: Iterable[StoredTensor]) -> list[Entry]:
    """Every tensor counted in its cell. One pass; about 4 us a tensor."""
    templates: dict[str, Template] = {}
    cells: dict[tuple[str, int, str], Cell] = {}
    for tensor in tensors:
        numbers = _NUMBER.findall(tensor.name)
        text = _NUMBER.sub(".#", tensor.name) if numbers else tensor.name
        template = templates.get(text)
        if template is None:
            template = templates[text] = template_of(text)
        layer = int(numbers[0]) if template.prefix is not None else -1
        key = (text, layer, tensor.dtype)
        cell = cells.get(key)
        if cell is None:
            cell = cells[key] = Cell()
        cell.tensors += 1
        cell.nbytes += tensor.nbytes
        if template.expert is not None:
            cell.experts.add(int(numbers[template.expert]))
        elif len(tensor.shape) >= 3:
            cell.rows.add(tensor.shape[0])
    return [Entry(templates[text], layer, dtype, cell) for (text, layer, dtype), cell in cells.items()]


def template_of(text: str) -> Template:
    dotted = f".{text}."
    component = next((part for part, pattern in _PARTS if pattern.search(dotted)), "other")
    head, number, rest = text.partition(".#.")
    # `mlp.0.weight` is a step of a small network: a layer has modules with parameters below its number.
    layered = bool(number) and "." in rest
    before_expert, found, _ = text.partition(".experts.#")
    return Template(text, component, f"{head}." if layered else None, before_expert.count("#") if found else None)


def is_mtp(name: str, depth: int | None) -> bool:
    """Whether `name` is of a multi-token-prediction stage: by its words, or a layer of the decoder behind the last."""
    numbers = _NUMBER.findall(name)
    template = template_of(_NUMBER.sub(".#", name))
    if template.component in ("MTP", "vision", "audio"):
        return template.component == "MTP"
    return (
        depth is not None
        and template.prefix is not None
        and template.prefix.endswith("layers.")
        and int(numbers[0]) >= depth
    )


def stack_prefixes(entries: Iterable[Entry]) -> dict[str, int]:
    """The prefixes that number layers, each with its bytes, in the order of the names."""
    layers: dict[str, set[int]] = {}
    nbytes: dict[str, int] = {}
    for entry in entries:
        prefix = entry.template.prefix
        if prefix is not None:
            layers.setdefault(prefix, set()).add(entry.layer)
            nbytes[prefix] = nbytes.get(prefix, 0) + entry.cell.nbytes
    return {
        prefix: nbytes[prefix]
        for prefix, numbers in layers.items()
        if _STACK_WORD.fullmatch(word := prefix[:-1].rpartition(".")[2])
        or (word != "experts" and len(numbers) >= _FEWEST_LAYERS_OF_UNKNOWN_WORD)
    }
