"""The dtypes of the format, and what a tensor of one takes."""

from __future__ import annotations

import math
from functools import lru_cache

DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits an element, in the order of the reference's enum: that order decides the layout of a file it writes."""


@lru_cache(maxsize=4096)  # a large checkpoint asks this a million times, of a few hundred shapes
def tensor_nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor. Raises `ValueError` for an unknown dtype or a size that is no whole number of bytes."""
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        raise ValueError(f"unknown dtype {dtype!r}")
    nbits = math.prod(shape) * bits
    if nbits % 8:
        raise ValueError(f"{dtype} of shape {list(shape)} is no whole number of bytes")
    return nbits // 8
