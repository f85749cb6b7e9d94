"""Parts of a model that are the same matter in most families: ties, embeddings, experts, MTP stages, code files.

Judged from config and headers; where a part is not there, or the config does not speak of it, nothing is said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from surgery.checkpoint import Checkpoint
from surgery.config_reading import Config, setting, text_section
from surgery.errors import SourceError
from surgery.families.config_fields import read
from surgery.families.expert_names import COUNTS, EXPERT, EXTRA_ROWS, FUSED, MTP_COUNT
from surgery.families.mtp_names import LAYER_NAME, MTP_NAME, is_mtp_name
from surgery.families.schema import Family
from surgery.layer_ranges import compact_ranges
from surgery.safetensors_file import StoredTensor
from surgery.storage import read_bytes
from surgery.verifying.rehash import Reader
from surgery.verifying.verdicts import Findings

_MTP_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_ROUTERS = (
    "gate.weight",
    "gate.bias",
    "gate.e_score_correction_bias",
    "router.weight",
    "router.bias",
    "router.layer.weight",
    "gate.wg.weight",
)
_FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
_HEAD_NAME = re.compile(r"(?:^|\.)(?:lm_head|embed_out|proj_out|output_projection)\.|^head\.")
_RELATIVE_IMPORT = re.compile(r"^\s*from\s+\.(\w+)\s+import\b", re.MULTILINE)
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
            if name.endswith("embed_tokens.weight") and not LAYER_NAME.search(name) and not MTP_NAME.search(name)
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
    head = next((tensor for tensor in heads if tensor.name.endswith("head.weight")), None)
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


def check_experts(checkpoint: Checkpoint, config: Config, findings: Findings) -> None:
    """Expert ids without gaps, as many as the config counts; fused experts and routers have that axis too (E01)."""
    field, layers_count = _experts_counted(config, COUNTS)
    _, head_count = _experts_counted(config, (MTP_COUNT,))
    ids: dict[str, dict[int, int]] = {}
    fused: list[tuple[str, StoredTensor]] = []
    for name, tensor in checkpoint.tensors.items():
        match = EXPERT.match(name) or FUSED.match(name)
        if match is None:
            continue
        prefix = f"{match['layer']}.{match['module']}".rstrip(".")
        held = ids.setdefault(prefix, {})
        number = match.groupdict().get("id")
        if number is not None and len(number) < 10:
            held[int(number)] = held.get(int(number), 0) + hash((match["part"], tensor.shape))
        elif len(tensor.shape) >= 3:
            fused.append((prefix, tensor))

    def expected(prefix: str) -> int | None:
        return head_count if head_count is not None and MTP_NAME.search(f"{prefix}.") else layers_count

    for prefix, held in ids.items():
        if held:
            _check_ids(prefix, held, expected(prefix), field, config, findings)
    spare = _count(config, *EXTRA_ROWS) or 0
    routers = [
        (prefix, router)
        for prefix in ids
        for rest in _ROUTERS
        if (router := checkpoint.tensors.get(f"{prefix}.{rest}")) is not None and router.dtype in _FLOATS
    ]
    for extra, (prefix, tensor) in [*((0, each) for each in fused), *((spare, each) for each in routers)]:
        count = expected(prefix)
        if count is not None and tensor.shape and tensor.shape[0] != count + extra:
            findings.fault(
                "expert-axis",
                f"{tensor.name} has shape {list(tensor.shape)}; {field} is {count}",
                checkpoint.files[tensor.file].name,
                f"every tensor with an expert axis must have {count + extra} along it",
                tensor.name,
            )


def _experts_counted(config: Config, names: Sequence[str]) -> tuple[str, int | None]:
    """The field that counts experts, and the count: one number, or a list of one number again and again."""
    for section in (text_section(config), config):
        for name in names:
            value = read(section, name)
            if isinstance(value, list) and value and all(each == value[0] for each in value):
                value = value[0]
            if isinstance(value, int) and not isinstance(value, bool):
                return name, value
    return "the config", None


def _check_ids(
    prefix: str, held: dict[int, int], expected: int | None, field: str, config: Config, findings: Findings
) -> None:
    wanted = expected if expected is not None else max(held) + 1
    missing = [number for number in range(min(wanted, 1 << 16)) if number not in held]
    surplus = sorted(number for number in held if number >= wanted)
    for numbers, word in ((missing, "there is no tensor of"), (surplus, "there are tensors of")):
        if numbers:
            count = f"{field} is {expected}; " if expected is not None else ""
            findings.fault(
                "expert-ids",
                f"{prefix}.experts: {count}{word} expert {compact_ranges(numbers)}",
                f"{prefix}.experts.{numbers[0]}",
                f"get the missing tensors, or correct {field}",
            )
    quantized = config.get("quantization_config") is not None
    signatures = list(held.values())
    usual = max(set(signatures), key=lambda signature: (signatures.count(signature), -signatures.index(signature)))
    odd = sorted(number for number, signature in held.items() if signature != usual)
    if odd:
        tell = findings.note if quantized else findings.fault
        tell(
            "odd-expert",
            f"{prefix}.experts: expert {compact_ranges(odd)} holds other tensors than the others",
            f"{prefix}.experts.{odd[0]}",
            "get the missing tensors",
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
