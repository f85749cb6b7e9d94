"""Parts of a model that are the same matter in most families: ties, embeddings, experts, MTP stages, code files.

Judged from config and headers; where a part is not there, or the config does not speak of it, nothing is said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from surgery.checkpoint import Checkpoint
from surgery.config_reading import Config, setting, text_section
from surgery.errors import SourceError
from surgery.families.config_fields import read
from surgery.families.mtp_names import LAYER_NAME, MTP_NAME, is_mtp_name
from surgery.families.schema import Family
from surgery.safetensors_file import StoredTensor
from surgery.storage import read_bytes
from surgery.verifying.rehash import Reader
from surgery.verifying.verdicts import Findings

_MTP_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
_HEAD_NAME = re.compile(r"(?:^|\.)(?:lm_head|embed_out|proj_out|output_projection)\.|^head\.")
_RELATIVE_IMPORT = re.compile(r"^\s*from\s+\.(\w+)\s+import\b", re.MULTILINE)
_EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
    "backbone.embeddings.weight",
    "backbone.embedding.weight",
)
_MAX_SPARE_ROWS = 256
_MAX_SMALL_NBYTES = 16 << 20


def _setting(config: Config, *names: str) -> Any:
    found = setting(config, *names)
    return found[1] if found is not None else None


def _count(config: Config, *names: str) -> int | None:
    value = _setting(config, *names)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _embedding(checkpoint: Checkpoint) -> StoredTensor | None:
    """The token embedding of the decoder itself; MTP stages, inside the layers, may have a copy."""
    return next(
        (
            tensor
            for name, tensor in checkpoint.tensors.items()
            if name.endswith(_EMBEDDINGS) and not LAYER_NAME.search(name) and not MTP_NAME.search(name)
        ),
        None,
    )


def _heads(checkpoint: Checkpoint) -> list[StoredTensor]:
    return [
        tensor for name, tensor in checkpoint.tensors.items() if _HEAD_NAME.search(name) and not MTP_NAME.search(name)
    ]


def check_ties(checkpoint: Checkpoint, config: Config, findings: Findings) -> list[str]:
    """Case T12: the flag, the head and the embedding agree. Returns what could not be judged."""
    tied = config.get("tie_word_embeddings")
    if tied is None:
        tied = text_section(config).get("tie_word_embeddings")
    embedding, heads = _embedding(checkpoint), _heads(checkpoint)
    if embedding is None or not _generates(config):
        return []
    if not isinstance(tied, bool):
        return ["ties: the config has no tie_word_embeddings"]
    if not tied and not heads:
        findings.fault(
            "untied-without-head",
            "tie_word_embeddings is false and there is no lm_head: engines would make one up",
            "config.json",
            "get the missing lm_head.weight, or correct the flag",
            "lm_head.weight",
        )
    head = next((tensor for tensor in heads if tensor.name.endswith(".weight") or tensor.name == "head"), None)
    if tied and head is not None:
        try:
            equal = _same(checkpoint, embedding, head)
        except OSError as error:
            return [f"ties: {head.name} or {embedding.name} cannot be read: {error.strerror}"]
        if not equal:
            findings.fault(
                "tied-with-other-head",
                f"tie_word_embeddings is true, but {head.name} differs from {embedding.name}: "
                "some engines would use the one, some the other",
                checkpoint.files[head.file].name,
                "correct the flag, or leave the head out",
                head.name,
            )
    return []


def _generates(config: Config) -> bool:
    """Whether the model has a language head at all: encoders and classifiers have none."""
    classes = config.get("architectures")
    if not isinstance(classes, list) or not classes:
        return True
    return any(str(name).endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")) for name in classes)


def _same(checkpoint: Checkpoint, first: StoredTensor, second: StoredTensor) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    digests = []
    for tensor in (first, second):
        with Reader(checkpoint.path(tensor.file)) as reader:
            digests.append(reader.digest(tensor.offset, tensor.nbytes))
    return digests[0] == digests[1]


def check_mtp(
    checkpoint: Checkpoint, config: Config, family: Family | None, findings: Findings, *, both_ways: bool
) -> None:
    """Case T10: a config that counts MTP stages has tensors of them, and the reverse."""
    fields = family.mtp.counts if family is not None and family.mtp is not None else _MTP_COUNTS
    section = family.section(config)[1] if family is not None else config
    counts = {field: value for field in (*fields, *_MTP_COUNTS) if isinstance(value := read(section, field), int)}
    stages = next((count for count in counts.values() if count), 0)
    depth = family.depth(config) if family is not None else _count(config, "num_hidden_layers")
    named = next((name for name in checkpoint.tensors if is_mtp_name(name, family, depth)), None)
    if stages > 0 and named is None:
        field = next(name for name, count in counts.items() if count == stages)
        findings.fault(
            "missing-mtp",
            f"{field} is {stages}, but there is no tensor of an MTP stage: a speculative load would make one up",
            "config.json",
            f"get the missing tensors, or set {field} to 0",
        )
    elif named is not None and counts and not stages:
        tell = findings.fault if both_ways else findings.note
        tell(
            "uncounted-mtp",
            f"{next(iter(counts))} is 0, and {named} is of an MTP stage: no engine would load it",
            "config.json",
            f"set {next(iter(counts))} to the number of stages, or leave their tensors out",
            named,
        )


def check_embeddings(checkpoint: Checkpoint, config: Config, findings: Findings, *, known_family: bool) -> None:
    """Rows are the vocabulary, columns the hidden size. A family that nobody described may mean it otherwise."""
    tell = findings.fault if known_family else findings.note
    vocabulary, hidden = _count(config, "vocab_size"), _count(config, "hidden_size")
    embedding = _embedding(checkpoint)
    matrices = [embedding] if embedding is not None else []
    matrices += [tensor for tensor in _heads(checkpoint) if tensor.name.endswith("head.weight")]
    for tensor in matrices:
        if len(tensor.shape) != 2 or tensor.dtype not in _FLOATS:
            continue  # Packed: its axes count other things.
        for axis, field, size in ((0, "vocab_size", vocabulary), (1, "hidden_size", hidden)):
            if size is not None and tensor.shape[axis] != size:
                # Rows beyond the vocabulary are room that some classes give it (mllama: eight image tokens).
                padded = axis == 0 and size < tensor.shape[0] <= size + _MAX_SPARE_ROWS
                (findings.note if padded else tell)(
                    "embedding-shape",
                    f"{tensor.name} has shape {list(tensor.shape)}; {field} is {size}",
                    checkpoint.files[tensor.file].name,
                    f"correct {field}, or get the right tensor",
                    tensor.name,
                )


def check_code(checkpoint: Checkpoint, config: Config, findings: Findings, *, known_family: bool) -> None:
    """Case T16: the code files that `auto_map` names, and what they import from beside them, are there.

    A model type with its own class loads without them (a note); any other cannot be loaded (a fault).
    """
    tell = findings.note if known_family else findings.fault
    present = {side.name for side in checkpoint.side_files}
    named: list[tuple[str, str]] = [(module, "config.json") for module in _auto_map(config)]
    for side in sorted(present):
        if side.endswith(".json") and "config" in side and "/" not in side:
            named += [(module, side) for module in _auto_map(_small_json(checkpoint, side))]
    seen: set[str] = set()
    while named:
        module, where = named.pop(0)
        if module in seen:
            continue
        seen.add(module)
        file = module.replace(".", "/") + ".py"
        if file not in present:
            tell(
                "missing-code",
                f"{where} needs {file}, which is not there: trust_remote_code cannot work",
                where,
                f"copy {file} from the model's publisher",
            )
            continue
        named += [(imported, file) for imported in _RELATIVE_IMPORT.findall(_small_text(checkpoint, file))]


def _auto_map(config: Any) -> Iterator[str]:
    """The modules that an `auto_map` names; `owner/repo--module.Class` lies in another repository."""
    auto_map = config.get("auto_map") if isinstance(config, dict) else None
    for value in auto_map.values() if isinstance(auto_map, dict) else ():
        for reference in value if isinstance(value, list) else [value]:
            if isinstance(reference, str) and "--" not in reference and "." in reference:
                yield reference.rpartition(".")[0]


def _small_text(checkpoint: Checkpoint, name: str) -> str:
    try:
        return read_bytes(checkpoint.root / name, _MAX_SMALL_NBYTES).decode("utf-8", "replace")
    except SourceError:
        return ""


def _small_json(checkpoint: Checkpoint, name: str) -> Any:
    try:
        return json.loads(_small_text(checkpoint, name))
    except (ValueError, RecursionError):
        return None
