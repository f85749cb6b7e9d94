"""The files beside the weights: which travel with the model, and which are left behind and why."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from surgery.errors import Finding

WEIGHT_SUFFIXES = frozenset(
    {
        ".safetensors",
        ".bin",
        ".pt",
        ".pth",
        ".ckpt",
        ".gguf",
        ".ggml",
        ".h5",
        ".msgpack",
        ".onnx",
        ".onnx_data",
        ".tflite",
        ".npz",
        ".pdparams",
        ".nemo",
        ".distcp",
        ".engine",
        ".mlmodel",
        ".ot",
        ".llamafile",
        ".keras",
        ".pdiparams",
    }
)
"""Weights of any format; `tokenizer.model` and `*.tiktoken` are none."""

_NEVER = frozenset({".cache", "__pycache__", ".git", ".gitattributes", ".gitignore", ".gitmodules", ".hfignore"})
_OURS = frozenset({"surgery.json", "config.json"})


class SideFile(msgspec.Struct, frozen=True):
    """A file that travels with the weights, by its path below the root."""

    name: str
    nbytes: int


class Stray(msgspec.Struct, frozen=True):
    """A file or folder that is no part of the model, and why."""

    name: str
    why: str


class Links:
    """Where links of one checkpoint may lead: below its root, and in the hub cache to its own repository's blobs."""

    def __init__(self, root: Path, *, allow_outside: bool) -> None:
        self._allow_outside = allow_outside
        self._within = [root]
        if root.parent.name == "snapshots":
            self._within.append(root.parent.parent / "blobs")

    def fault(self, path: Path) -> str | None:
        """Why `path` cannot be used: a link to nowhere, in a circle, or out of the checkpoint; None where it can."""
        try:
            target = path.resolve(strict=True)
        except FileNotFoundError:
            return (
                f"the link target {path.readlink()} is missing (incomplete download?)"
                if path.is_symlink()
                else "missing"
            )
        except (OSError, RuntimeError) as error:
            return f"cannot be followed: {getattr(error, 'strerror', None) or error}"
        if self._allow_outside or any(target.is_relative_to(place) for place in self._within):
            return None
        return f"links to {target}, outside the checkpoint"


def survey_side_files(
    root: Path, model_files: set[str], links: Links
) -> tuple[list[SideFile], list[Stray], list[Finding]]:
    """Everything in `root` that is not the model's own weights, told apart. Reads names and sizes only."""
    side_files: list[SideFile] = []
    strays: list[Stray] = []
    findings: list[Finding] = []
    for path in sorted(root.iterdir()):
        name = path.name
        if name in model_files or name in _OURS or name.endswith(".surgery-partial"):
            continue
        if name in _NEVER:
            strays.append(Stray(name, "version control or cache"))
        elif path.is_dir():
            _survey_folder(root, path, links, side_files, strays, findings)
        elif name.endswith(".index.json"):
            strays.append(Stray(name, "an index of weights: the output has its own"))
        elif is_weight_file(name):
            strays.append(Stray(name, _stray_weights(name)))
        else:
            _take(root, path, links, side_files, findings)
    return side_files, strays, findings


def is_weight_file(name: str) -> bool:
    return Path(name).suffix.lower() in WEIGHT_SUFFIXES


def _stray_weights(name: str) -> str:
    if not name.endswith(".safetensors"):
        return "weights of another format: not copied"
    if name.startswith("consolidated"):
        return "the publisher's own format beside the Hugging Face one: not part of the model"
    if name.startswith("adapter_model"):
        return "an adapter: not part of the model"
    return "not named by the index: not part of the model"


def _survey_folder(
    root: Path,
    folder: Path,
    links: Links,
    side_files: list[SideFile],
    strays: list[Stray],
    findings: list[Finding],
) -> None:
    if folder.is_symlink():
        strays.append(Stray(f"{folder.name}/", "a link to a folder: not followed"))
        return
    files = sorted(_walk(folder))
    weights = [path for path in files if is_weight_file(path.name)]
    if weights:
        strays.append(
            Stray(
                f"{folder.name}/",
                f"a folder with weights of its own ({weights[0].relative_to(root).as_posix()})",
            )
        )
        return
    for path in files:
        _take(root, path, links, side_files, findings)


def _walk(folder: Path) -> Iterator[Path]:
    for base, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _NEVER]
        yield from (Path(base) / name for name in names if name not in _NEVER)


def _take(root: Path, path: Path, links: Links, side_files: list[SideFile], findings: list[Finding]) -> None:
    name = path.relative_to(root).as_posix()
    fault = links.fault(path)
    if fault is not None:
        findings.append(
            Finding(
                "side-file-link",
                "fault",
                f"{name} {fault}",
                name,
                "download it again, or pass --allow-outside-links where the target is meant",
            )
        )
    elif not path.is_file():
        findings.append(Finding("side-file-kind", "note", f"{name} is no regular file: left behind", name))
    else:
        side_files.append(SideFile(name, path.stat().st_size))
