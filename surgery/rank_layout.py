"""Rank partitions of engines, told by their file names: what a directory is that holds no Hugging Face layout."""

from __future__ import annotations

import re

import msgspec

from surgery.checkpoint import Checkpoint

_LAYOUTS = (
    ("vLLM sharded state", re.compile(r"model-rank-(?P<rank>\d+)-part-\d+\.safetensors")),
    ("DeepSeek model parallel", re.compile(r"model(?P<rank>\d+)-mp(?P<size>\d+)\.safetensors")),
    ("Hugging Face ranks (hf-rank)", re.compile(r"model-tp(?P<rank>\d+)-of-(?P<size>\d+)\.safetensors")),
    (
        "PyTorch distributed checkpoint (dcp-hf)",
        re.compile(r"shard-(?P<rank>\d+)-model-\d+-of-\d+\.safetensors"),
    ),
)


class RankLayout(msgspec.Struct):
    """`ranks` found in the names; `size` is the rank count that the names state, None where they state none."""

    layout: str
    files: int
    ranks: list[int]
    size: int | None
    nbytes: int


def is_rank_file(name: str) -> bool:
    return any(pattern.fullmatch(name) for _, pattern in _LAYOUTS)


def rank_layout(checkpoint: Checkpoint) -> RankLayout | None:
    """The layout of most of the directory's rank files; None where there are none, or one was named as the source."""
    names = [stray.name for stray in checkpoint.strays] + [file.name for file in checkpoint.files]
    found: dict[str, list[tuple[str, int, int | None]]] = {}
    for name in names:
        for layout, pattern in _LAYOUTS:
            match = pattern.fullmatch(name)
            if match is not None:
                size = match.groupdict().get("size")
                found.setdefault(layout, []).append((name, int(match["rank"]), int(size) if size else None))
    if not found:
        return None
    layout = max(found, key=lambda layout: len(found[layout]))
    files = found[layout]
    sizes = [size for _, _, size in files if size is not None]
    return RankLayout(
        layout=layout,
        files=len(files),
        ranks=sorted({rank for _, rank, _ in files}),
        size=max(sizes, default=None),
        nbytes=sum(_file_nbytes(checkpoint, name) for name, _, _ in files),
    )


def _file_nbytes(checkpoint: Checkpoint, name: str) -> int:
    try:
        return (checkpoint.root / name).stat().st_size
    except OSError:
        return 0
