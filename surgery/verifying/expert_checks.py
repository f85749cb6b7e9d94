"""Experts: ids without gaps, axes as long as the config counts, and a choice that the router can make."""

from __future__ import annotations

from collections.abc import Sequence

from surgery.checkpoint import Checkpoint
from surgery.config_reading import Config, text_section
from surgery.families.config_fields import read
from surgery.families.expert_names import (
    COUNTS,
    EXPERT,
    EXTRA_ROWS,
    FUSED,
    GROUPS,
    MTP_COUNT,
    TOP_GROUPS,
    TOP_K,
)
from surgery.families.mtp_names import MTP_NAME
from surgery.layer_ranges import compact_ranges
from surgery.safetensors_file import StoredTensor
from surgery.verifying.verdicts import Findings

_FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
_ROUTERS = (
    "gate.weight",
    "gate.bias",
    "gate.e_score_correction_bias",
    "router.weight",
    "router.bias",
    "router.layer.weight",
    "gate.wg.weight",
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
    spare = _spare(config)
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


def _spare(config: Config) -> int:
    """Rows of a router behind those of experts."""
    section = text_section(config)
    return next((value for name in EXTRA_ROWS if isinstance(value := read(section, name), int)), 0)


def check_routing(config: Config, findings: Findings) -> None:
    """As many experts are chosen as can be: of all of them, or of the groups that are chosen first (case E04, E05)."""
    section = text_section(config)
    _, count = _experts_counted(config, COUNTS)
    _, top_k = _experts_counted(config, TOP_K)
    if count is None or top_k is None or count <= 0:
        return
    groups = next((value for name in GROUPS if isinstance(value := read(section, name), int) and value > 1), 1)
    chosen = next((value for name in TOP_GROUPS if isinstance(value := read(section, name), int)), groups)
    reachable = count if groups == 1 else min(chosen, groups) * (count // groups)
    if groups > 1 and count % groups:
        what = f"{count} experts are no {groups} equal routing groups"
    elif top_k > reachable:
        where = f" in {chosen} of {groups} groups" if groups > 1 else ""
        what = f"{top_k} experts are chosen for a token, and {reachable}{where} can be"
    else:
        return
    findings.fault("routing", what, "config.json", "correct the counts: engines fail when they choose")
