"""Checkpoints made from a list of names: the bytes of a tensor follow from its name, the same on every machine."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import xxhash

from surgery.safetensors_file import DTYPE_BITS, build_header


def pattern(name: str, dtype: str, shape: list[int], given: str = "") -> bytes:
    """Bytes that look random; no float among them is infinite or NaN. `given`: `g_idx` in groups of so many rows, or
    the numbers of a shape."""
    nbytes = math.prod(shape) * DTYPE_BITS[dtype] // 8
    if given.startswith("group "):
        size = int(given.split()[1])
        return b"".join((row // size).to_bytes(4, "little") for row in range(shape[0]))
    if given.startswith("shape "):
        return b"".join(int(each).to_bytes(8, "little") for each in given.split()[1:])
    blocks = (xxhash.xxh3_128_digest(f"{name} {number}".encode()) for number in range(-(-nbytes // 16)))
    data = bytearray(b"".join(blocks)[:nbytes])
    top = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1}.get(dtype)
    if top is not None:
        for place in range(top - 1, nbytes, top):
            data[place] &= 0xB7
    return bytes(data)


def write_source(case: dict[str, Any], directory: Path) -> Path:
    """The checkpoint that a golden case is about, in one file."""
    directory.mkdir(parents=True)
    tensors = case["tensors"]
    header, placed = build_header(
        [(name, entry[0], tuple(entry[1])) for name, entry in tensors.items()], {"format": "pt"}
    )
    with (directory / "model.safetensors").open("wb") as file:
        file.write(header)
        for name, _ in placed:
            file.write(pattern(name, *tensors[name]))
    (directory / "config.json").write_text(json.dumps(case["config"], indent=2))
    return directory


def digests(file: Path) -> dict[str, list[Any]]:
    """Name -> dtype, shape and xxh3-128 of every tensor of a file."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in sorted(header.items()):
        begin, end = entry["data_offsets"]
        digest = xxhash.xxh3_128_hexdigest(data[start + begin : start + end])
        found[name] = [entry["dtype"], entry["shape"], digest]
    return found
