"""The named computations that a plan may ask for, elementwise on stored bytes: ids remapped, floats widened.

Everything else that surgery does to a tensor is a move of bytes. These are the exceptions of the design (section 3):
values of a routing table that are expert ids, and a wider dtype that a layout demands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surgery.errors import SourceError
from surgery.safetensors_file import DTYPE_BITS
from surgery.tiling import Fill, Kernel, Narrow, Remap, Tiling

if TYPE_CHECKING:
    import numpy

_INTEGERS = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1"}
_WIDER = {
    ("F16", "F32"),
    ("BF16", "F32"),
    ("F8_E8M0", "F32"),
    ("F8_E8M0", "BF16"),
    ("F32", "F64"),
    ("F16", "F64"),
    ("BF16", "F64"),
}
_MAX_TABLE = 1 << 20


def kernel_fault(content: Tiling) -> str | None:
    """Why the kernel of `content` cannot be carried out; None where it can, or where there is none."""
    kernel = content.kernel
    if kernel is None:
        return None
    if any(isinstance(tile, Fill) for tile in content.tiles):
        return "a fill in a tensor whose values are computed"
    if isinstance(kernel, Remap):
        if content.dtype not in _INTEGERS:
            return f"ids in a tensor of {content.dtype}"
        highest = (1 << (DTYPE_BITS[content.dtype] - 1)) - 1
        if len(kernel.table) > _MAX_TABLE or any(not -1 <= value <= highest for value in kernel.table):
            return "a table of ids that are none"
    elif isinstance(kernel, Narrow):
        if (content.dtype, kernel.stored) not in _WIDER or kernel.stored == "F64":
            return f"{kernel.stored} was no {content.dtype} before"
    elif (kernel.stored, content.dtype) not in _WIDER:
        return f"{kernel.stored} cannot become {content.dtype} without loss"
    return None


def computed_bytes(kernel: Kernel, dtype: str, stored: memoryview, where: str) -> bytes:
    """What `stored` becomes, as bytes of `dtype`. Raises `SourceError` for a value that must not occur."""
    import numpy as np

    if isinstance(kernel, Remap):
        values = np.frombuffer(stored, _INTEGERS[dtype])
        table = np.asarray(kernel.table, "i8")
        known = (values >= 0) & (values < len(table))
        if not known.all() or (len(values) and int(table[values].min()) < 0):
            raise SourceError(
                f"{where} holds an id that has no new one", where, "the file changed since it was planned: plan again"
            )
        ids: bytes = table[values].astype(_INTEGERS[dtype]).tobytes()
        return ids
    if isinstance(kernel, Narrow):
        return _narrowed(dtype, stored, where)
    data: bytes = _widened(kernel.stored, dtype, stored).tobytes()
    return data


def _narrowed(dtype: str, data: memoryview, where: str) -> bytes:
    """The numbers in the narrower dtype that they came from. Raises `SourceError` where one did not."""
    import numpy as np

    single = np.frombuffer(data, "<f4")
    if dtype == "BF16":
        made: Any = (single.view("<u4") >> 16).astype("<u2")
    elif dtype == "F16":
        with np.errstate(over="ignore", invalid="ignore"):
            made = single.astype("<f2").view("<u2")
    else:
        made = (single.view("<u4") >> 23).astype("u1")
    result: bytes = made.tobytes()
    if _widened(dtype, "F32", memoryview(result)).tobytes() != bytes(data):
        raise SourceError(f"{where} holds numbers that no {dtype} has", where, "the rank files were changed since")
    return result


def _widened(stored: str, dtype: str, data: memoryview) -> numpy.ndarray[Any, Any]:
    import numpy as np

    if stored == "BF16":
        single = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    elif stored == "F8_E8M0":
        # An exponent alone (OCP MX): 2^(e - 127); 255 is NaN, 0 is below the smallest normal number of F32.
        exponents = np.frombuffer(data, "u1").astype("<u4")
        bits = np.where(exponents == 0, 0x00400000, np.where(exponents == 255, 0x7FC00000, exponents << 23))
        single = bits.astype("<u4").view("<f4")
    else:
        with np.errstate(invalid="ignore"):
            single = np.frombuffer(data, "<f2" if stored == "F16" else "<f4").astype("<f4")
    if dtype == "BF16":
        return (single.view("<u4") >> 16).astype("<u2")
    with np.errstate(invalid="ignore"):  # NaNs stay NaNs.
        return single if dtype == "F32" else single.astype("<f8")
