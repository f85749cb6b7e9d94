"""The weights behind quantised tensors: what shape a packed or scaled tensor stands for, told from headers alone.

Sources: compressed-tensors `compressors/quantized_compressors/pack_quantized.py` and `nvfp4_quantized.py`; AutoAWQ and
GPTQModel packing (32-bit words); ModelOpt NVFP4 (`weight`, `weight_scale`, `weight_scale_2`); gpt-oss MXFP4 (blocks
[experts, out, in / 32, 16] and scales); DeepSeek FP8 blocks (`weight_scale_inv` [ceil(out / block), ceil(in / block)]).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import msgspec

from surgery.quantization import QUANTIZATION_KEYS
from surgery.safetensors_file import StoredTensor

COMPANIONS = frozenset(
    (
        "weight_scale_inv",
        "weight_scale",
        "weight_scale_2",
        "weight_global_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
        "weight_packed",
        "input_scale",
        "input_global_scale",
        "input_zero_point",
        "activation_scale",
        "output_scale",
        "qweight",
        "qzeros",
        "scales",
        "g_idx",
        "scale",
        "scale_inv",
        "k_scale",
        "v_scale",
        "q_scale",
        "kv_scale",
        "SCB",
        "weight_format",
    )
)
"""Last parts of the names of tensors that serve a quantised weight beside them."""

_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_INTEGERS = {"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}
_SMALL_FLOATS = ("F8_", "F4", "F6_")
Shape = tuple[int, ...]


class Weight(msgspec.Struct, frozen=True):
    """A weight as a model class has it: a torch dtype name and its shape; `quantized` where it is stored otherwise."""

    dtype: str
    shape: Shape
    quantized: bool = False


class Unpacked(msgspec.Struct):
    """`weights` by the name a class gives them; `untold`: packed tensors whose shape headers do not tell; `odd`: scales
    that do not fit their weight, as (name, what is wrong)."""

    weights: dict[str, Weight]
    untold: list[str]
    odd: list[tuple[str, str]]


def unpacked(tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> Unpacked:
    """The weights behind `tensors`."""
    found = Unpacked({}, [], [])
    settings = _settings(config)
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf.endswith(("_blocks", "_scales")) and f"{name.rpartition('_')[0]}_blocks" in tensors:
            if leaf.endswith("_blocks"):
                _take_blocks(name, tensor, found)
        elif leaf in ("qweight", "weight_packed"):
            shape = _packed_shape(leaf, tensor, tensors.get(f"{module}.scales"), settings)
            _take(f"{module}.weight", shape, found, name)
        elif leaf in COMPANIONS and _serves(module, leaf, tensors):
            _judge_scale(module, leaf, tensor, tensors.get(f"{module}.weight"), settings, found)
        elif _is_bits_and_bytes(name, tensors):
            if leaf == "weight":
                found.untold.append(name)
        else:
            _take_plain(name, module, leaf, tensor, tensors, found)
    return found


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The quantisation section, flat enough to look up the bits and block sizes of its first weights."""
    for place in (config, *(value for value in config.values() if isinstance(value, Mapping))):
        for key in QUANTIZATION_KEYS:
            section = place.get(key)
            if isinstance(section, Mapping):
                groups = section.get("config_groups")
                first: Any = next(iter(groups.values()), {}) if isinstance(groups, Mapping) else {}
                weights = first.get("weights") if isinstance(first, Mapping) else None
                return {**(weights if isinstance(weights, Mapping) else {}), **section}
    return {}


def _serves(module: str, leaf: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether there is a weight that the companion belongs to; `scale` alone is also a parameter of its own."""
    if leaf in ("scale", "scales", "scale_inv"):
        weight = tensors.get(f"{module}.weight")
        return f"{module}.qweight" in tensors or (weight is not None and _is_small(weight.dtype))
    return True


def _is_small(dtype: str) -> bool:
    return dtype.startswith(_SMALL_FLOATS) or dtype in ("I8", "U8")


def _is_bits_and_bytes(name: str, tensors: Mapping[str, StoredTensor]) -> bool:
    base = name.partition(".weight.")[0] + ".weight" if ".weight." in name else name
    return any(f"{base}.{part}" in tensors for part in ("absmax", "quant_map"))


def _take_blocks(name: str, tensor: StoredTensor, found: Unpacked) -> None:
    """MXFP4: [experts, out, in / 32, 16] bytes of two numbers each; classes have [experts, in, out]."""
    shape = tensor.shape
    if len(shape) == 4:
        found.weights[name.removesuffix("_blocks")] = Weight(
            "bfloat16", (shape[0], shape[2] * shape[3] * 2, shape[1]), True
        )
    else:
        found.untold.append(name)


def _packed_shape(
    leaf: str, tensor: StoredTensor, scales: StoredTensor | None, settings: Mapping[str, Any]
) -> Shape | None:
    if len(tensor.shape) < 2:
        return None
    *lead, rows, columns = tensor.shape
    if leaf == "weight_packed":
        if tensor.dtype == "U8":
            return (*lead, rows, columns * 2)  # NVFP4: two numbers a byte.
        bits = settings.get("num_bits")
        return (*lead, rows, columns * 32 // bits) if isinstance(bits, int) and bits > 0 else None
    bits = settings.get("bits") or settings.get("w_bit") or 4
    if scales is None or len(scales.shape) != len(tensor.shape) or not isinstance(bits, int):
        return None
    outputs = scales.shape[-1]
    if settings.get("quant_method") == "awq" or (columns != outputs and columns * 32 == outputs * bits):
        return (*lead, outputs, rows)  # AWQ packs outputs: [in, out * bits / 32].
    return (*lead, outputs, rows * 32 // bits)  # GPTQ packs inputs: [in * bits / 32, out].


def _take(name: str, shape: Shape | None, found: Unpacked, packed: str) -> None:
    if shape is None:
        found.untold.append(packed)
    else:
        found.weights[name] = Weight("bfloat16", shape, True)


def _take_plain(
    name: str, module: str, leaf: str, tensor: StoredTensor, tensors: Mapping[str, StoredTensor], found: Unpacked
) -> None:
    shape, dtype = tensor.shape, tensor.dtype
    if _is_small(dtype) and leaf == "weight":
        scale = tensors.get(f"{module}.weight_scale")
        halved = dtype == "U8" or (dtype == "I8" and scale is not None and scale.dtype.startswith("F8_"))
        shape = (*shape[:-1], shape[-1] * 2) if halved and shape else shape
        found.weights[name] = Weight("bfloat16", shape, True)
    elif _is_small(dtype) and dtype.startswith(_SMALL_FLOATS):
        found.weights[name] = Weight("bfloat16", shape, True)
    else:
        known = _FLOATS.get(dtype) or _INTEGERS.get(dtype)
        if known is None:
            found.untold.append(name)
        else:
            found.weights[name] = Weight(known, shape)


def _judge_scale(
    module: str,
    leaf: str,
    tensor: StoredTensor,
    weight: StoredTensor | None,
    settings: Mapping[str, Any],
    found: Unpacked,
) -> None:
    """A block scale has one number a block, the last ones of cut blocks included (case: floor instead of ceil)."""
    block = settings.get("weight_block_size")
    if leaf not in ("weight_scale_inv", "scale_inv") or weight is None or not _is_blocks(block):
        return
    wanted = tuple(-(-size // step) for size, step in zip(weight.shape[-2:], block, strict=True))
    if tensor.shape[-2:] != wanted:
        found.odd.append(
            (
                f"{module}.{leaf}",
                f"has shape {list(tensor.shape)}; its weight {list(weight.shape)} in blocks of {list(block)} needs "
                f"{[*weight.shape[:-2], *wanted]}",
            )
        )


def _is_blocks(block: object) -> TypeGuard[Sequence[int]]:
    return isinstance(block, Sequence) and len(block) == 2 and all(isinstance(step, int) and step > 0 for step in block)


def quantized_modules(found: Unpacked) -> Iterator[str]:
    """The modules whose weight is stored quantised."""
    for name, weight in found.weights.items():
        if weight.quantized:
            yield name.removesuffix(".weight")
