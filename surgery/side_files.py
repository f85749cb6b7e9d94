"""The files beside the weights: which travel with the model, and which are left behind and why."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import msgspec

from surgery.errors import Finding, printable

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

_WEIGHTS_IN_PARTS = frozenset({".safetensors", ".gguf", ".onnx"})
_TEXT_SUFFIXES = frozenset({".json", ".jinja", ".md", ".py", ".txt", ".yaml", ".yml"})
_CACHES = frozenset({".cache", "__pycache__", ".hfignore"})
_OURS = frozenset({"surgery.json", "config.json"})
_PARTIAL_SUFFIX = ".surgery-partial"


class SideFile(msgspec.Struct, frozen=True):
    """A file that travels with the weights, by its path below the root."""

    name: str
    nbytes: int


class Stray(msgspec.Struct, frozen=True):
    """A file or folder that is no part of the model, and why."""

    name: str
    why: str


class Links:
    """Where links of one checkpoint may lead: below its root, and in the hub cache to its own repository's blobs.

    The cache keeps `models--OWNER--NAME/snapshots/REVISION/file -> ../../blobs/HASH` (case X02).
    """

    def __init__(self, root: Path, *, allow_outside: bool) -> None:
        self._allow_outside = allow_outside
        self._within = [root]
        if root.parent.name == "snapshots":
            self._within.append(Path(os.path.realpath(root.parent.parent / "blobs")))

    def fault(self, path: Path) -> str | None:
        """Why `path` cannot be used: a link to nowhere, in a circle, or out of the checkpoint; None where it can."""
        try:
            target = path.resolve(strict=True)
        except FileNotFoundError:
            if path.is_symlink():
                return f"the link target {path.readlink()} is missing (incomplete download?)"
            return "the file is missing"
        except RuntimeError:  # before Python 3.13
            return "the link leads in a circle"
        except OSError as error:
            return "the link leads in a circle" if error.errno == errno.ELOOP else f"unreachable: {error.strerror}"
        if self._allow_outside or any(target.is_relative_to(place) for place in self._within):
            return None
        return f"the link leads to {target}, outside the checkpoint"


class _Beside:
    """The state of one look at what is beside the weights."""

    def __init__(self, root: Path, links: Links) -> None:
        self.root = root
        self.links = links
        self.side_files: list[SideFile] = []
        self.strays: list[Stray] = []
        self.findings: list[Finding] = []

    def stray(self, name: str, why: str) -> None:
        self.strays.append(Stray(printable(name), why))

    def file(self, path: Path) -> None:
        """Take one file, unless it is of a kind that never travels."""
        name = path.relative_to(self.root).as_posix()
        reason = _reason_against(path.name)
        if reason is not None:
            self.stray(name, reason)
        elif not _is_text(name):
            self.stray(name, "its name is not UTF-8")
        elif (fault := self.links.fault(path)) is not None:
            mend = "download it again, or pass --allow-outside-links where the target is meant"
            self.findings.append(Finding("side-file-link", "fault", f"{name}: {fault}", name, mend))
        elif not path.is_file():
            self.stray(name, "a pipe, socket or device" if not path.is_dir() else "a link to a folder: not followed")
        else:
            self.side_files.append(SideFile(name, path.stat().st_size))

    def folder(self, folder: Path) -> None:
        """Take a folder whole, where no weights lie anywhere below it; else it is a model, or a copy, of its own."""
        name = folder.relative_to(self.root).as_posix()
        if folder.is_symlink():
            self.stray(f"{name}/", "a link to a folder: not followed")
            return
        files: list[Path] = []
        strays: list[tuple[Path, str]] = []
        for base, folders, names in os.walk(folder, onerror=self.unreadable):
            here = Path(base)
            never = {n: _reason_against_folder(here / n) for n in folders}
            strays += [(here / n, reason) for n, reason in never.items() if reason]
            folders[:] = sorted(n for n, reason in never.items() if not reason)
            files += [here / n for n in sorted(names)]
        weights = [path for path in files if is_weight_file(path.name)]
        if weights:
            first = printable(weights[0].relative_to(self.root).as_posix())
            self.stray(f"{name}/", f"a folder with weights of its own ({first}): not part of this model")
            return
        for path, reason in strays:
            self.stray(f"{path.relative_to(self.root).as_posix()}/", reason)
        for path in files:
            self.file(path)

    def unreadable(self, error: OSError) -> None:
        name = Path(error.filename).relative_to(self.root).as_posix()
        what = f"{name}: the folder cannot be read: {error.strerror}"
        self.findings.append(Finding("side-file-folder", "fault", what, name, "check its permissions"))


def survey_side_files(
    root: Path, model_files: set[str], links: Links
) -> tuple[list[SideFile], list[Stray], list[Finding]]:
    """Everything in `root` that is not the model's own weights, told apart. Reads names and sizes only."""
    beside = _Beside(root, links)
    for path in sorted(root.iterdir()):
        if path.name in model_files or path.name in _OURS:
            continue
        if not path.is_dir():
            beside.file(path)
        elif (reason := _reason_against_folder(path)) is not None:
            beside.stray(f"{path.name}/", reason)
        else:
            beside.folder(path)
    return sorted(beside.side_files, key=lambda side: side.name), beside.strays, beside.findings


def is_index_file(name: str) -> bool:
    """Indexes of weights: `model.safetensors.index.json`, with a variant `model.safetensors.index.fp16.json`."""
    return re.search(r"\.index(\.[^./]+)?\.json$", name) is not None


def is_weight_file(name: str) -> bool:
    """Whether a name says weights, of whatever format; also `x.safetensors.bak` and `x.gguf.part1of2`."""
    suffixes = [suffix.lower() for suffix in Path(name).suffixes]
    if not suffixes or suffixes[-1] in _TEXT_SUFFIXES:
        return False
    return suffixes[-1] in WEIGHT_SUFFIXES or not _WEIGHTS_IN_PARTS.isdisjoint(suffixes)


def _reason_against(name: str) -> str | None:
    """Why a file of this name never travels with the model; None where it does."""
    if name.startswith(".git"):
        return "version control"
    if name in _CACHES:
        return "a cache"
    if is_index_file(name):
        return "an index of weights: an output has its own"
    if not is_weight_file(name):
        return None
    if not name.endswith(".safetensors"):
        return "weights of another format"
    if name.startswith("consolidated"):
        return "the publisher's own format beside the Hugging Face one: not part of the model"
    if name.startswith("adapter_model"):
        return "an adapter: not part of the model"
    return "safetensors that are not part of the model"


def _reason_against_folder(folder: Path) -> str | None:
    if folder.is_symlink():
        return "a link to a folder: not followed"
    if folder.name.startswith(".git"):
        return "version control"
    if folder.name.endswith(_PARTIAL_SUFFIX):
        return "unfinished output of surgery"
    return "a cache" if folder.name in _CACHES else None


def _is_text(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
