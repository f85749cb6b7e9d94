"""Loading, as far as headers and the family tell: what the config demands is what the tensors are. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgery.checkpoint import Checkpoint
from surgery.families.config_fields import read
from surgery.families.records import model_type
from surgery.families.schema import Family
from surgery.layer_ranges import compact_ranges
from surgery.safetensors_file import StoredTensor
from surgery.verifying.expert_checks import check_experts, check_routing
from surgery.verifying.loading_parts import check_code, check_embeddings, check_mtp, check_ties
from surgery.verifying.mtp_stages import check_stages
from surgery.verifying.verdicts import MAX_KEPT_FINDINGS, Findings, Verdict

_MASK = (1 << 64) - 1
_SHOWN_LAYERS = 20
_NO_TYPE = "layers: the config has no model_type; `surgery check --as TYPE` names one"
_QUANTIZED = ("quantization_config", "compression_config")


def check_loading(
    checkpoint: Checkpoint, findings: Findings, family: Family | None, *, mtp_both_ways: bool = False
) -> Verdict:
    """Judge config against tensor names and shapes. Without a family record only what needs none is judged.

    `mtp_both_ways`: stages that the config does not count are a fault too, not only counted ones without tensors.
    """
    config = checkpoint.config
    if config is None:
        return Verdict("unverified", ["everything: there is no config.json that can be read"])
    if not checkpoint.tensors:
        return Verdict("unverified", ["everything: there are no weights to judge"])
    not_looked_at = check_ties(checkpoint, config, findings)
    check_mtp(checkpoint, config, family, findings, both_ways=mtp_both_ways)
    check_stages(checkpoint.tensors, config, family, findings, strict=mtp_both_ways)
    check_experts(checkpoint, config, findings)
    check_routing(config, findings)
    check_embeddings(checkpoint, config, findings, known_family=family is not None)
    check_code(checkpoint, config, findings, known_family=family is not None)
    if family is None:
        kind = model_type(config)
        reason = f"layers: no record of {kind!r}; `surgery check --as TYPE` takes another's word" if kind else _NO_TYPE
        return Verdict("failed" if findings.faults else "unverified", [reason, *not_looked_at])
    unjudged = _Layers(checkpoint, config, family, findings).check()
    if unjudged is not None:
        return Verdict("failed" if findings.faults else "unverified", [unjudged, *not_looked_at])
    not_looked_at.append(
        "what every layer lacks alike, and shapes inside layers: no skeleton of the model's class was built"
    )
    return Verdict("failed" if findings.faults else "passed", not_looked_at)


class _Layers:
    """The numbered layers of one stack against the config that counts them."""

    def __init__(self, checkpoint: Checkpoint, config: Mapping[str, Any], family: Family, findings: Findings) -> None:
        self._tensors = checkpoint.tensors
        self._config = config
        self._family = family
        self._findings = findings
        self._section = family.section(config)[1]
        self._prefix = next(
            (prefix for prefix in family.stack.prefixes if any(name.startswith(prefix) for name in checkpoint.tensors)),
            family.stack.prefix,
        )

    def check(self) -> str | None:
        """Returns why layers cannot be judged; None where they were."""
        depth = self._family.depth(self._config)
        if depth is None:
            field = self._family.stack.depth
            what = f"{field} is {self._config.get(field)!r}; a count of layers belongs there"
            self._findings.fault("depth", what, "config.json", "correct the config")
            return f"layers: the config has no usable {field}"
        self._check_spellings(depth)
        self._check_layer_ids(depth)
        signatures = self._signatures()
        if not signatures:
            return f"layers: no tensor is named {self._prefix}N.*"
        self._check_ids(signatures, depth)
        self._check_kinds(signatures, depth)
        self._check_outside()
        return None

    def _check_spellings(self, depth: int) -> None:
        ignored = any(field in self._section for field in self._family.stack.depth_from)
        for field in self._family.stack.spellings:
            if self._section.get(field) is not None and self._section[field] != depth and not ignored:
                self._findings.fault(
                    "depth",
                    f"{field} is {self._section[field]!r}, {self._family.stack.depth} is {depth}",
                    "config.json",
                    "correct the wrong one",
                )
        for field, has_tail in {"layer_types": False, **self._family.per_layer_fields()}.items():
            value = read(self._section, field)
            if (
                isinstance(value, (list, str))
                and value
                and (len(value) < depth or (len(value) > depth and not has_tail))
            ):
                self._findings.fault(
                    "per-layer-list",
                    f"{field} has {len(value)} entries for {depth} layers",
                    "config.json",
                    "one entry a layer: engines refuse any other length",
                )

    def _check_layer_ids(self, depth: int) -> None:
        """Lists of layers by number name layers that are there."""
        for field, base in self._family.id_fields().items():
            value = read(self._section, field)
            outside = [
                each
                for each in (value if isinstance(value, list) else ())
                if isinstance(each, int) and not isinstance(each, bool) and each - base >= depth
            ]
            if outside:
                self._findings.fault(
                    "stale-list",
                    f"{field} names layer {outside[0]}; the config counts {depth} layers",
                    "config.json",
                    "take out the entries of layers that are not there",
                )

    def _split(self, name: str) -> tuple[int, str] | None:
        """Layer and rest of a name in the stack."""
        if not name.startswith(self._prefix):
            return None
        number, _, rest = name[len(self._prefix) :].partition(".")
        return (int(number), rest) if number.isascii() and number.isdecimal() and len(number) < 10 else None

    def _signatures(self) -> dict[int, int]:
        """Per layer one number that two layers share when they hold the same names in the same shapes.

        A sum of hashes, so that 150,000 names need no copy; where two differ, `_differences` looks at the names.
        """
        found: dict[int, int] = {}
        for name, tensor in self._tensors.items():
            split = self._split(name)
            if split is not None and not name.endswith(self._family.first_only or ("\0",)):
                layer, rest = split
                found[layer] = (found.get(layer, 0) + hash((rest, tensor.shape))) & _MASK
        return found

    def _check_ids(self, signatures: Mapping[int, int], depth: int) -> None:
        missing = [layer for layer in range(min(depth, MAX_KEPT_FINDINGS * 100)) if layer not in signatures]
        behind = self._family.mtp is not None and self._family.mtp.behind
        surplus = [] if behind else sorted(layer for layer in signatures if layer >= depth)
        if missing:
            self._findings.fault(
                "missing-layer",
                f"the config counts {depth} layers; of layer {compact_ranges(missing)} there is no tensor",
                f"{self._prefix}{missing[0]}",
                f"get the missing tensors, or correct {self._family.stack.depth}",
            )
        if surplus:
            self._findings.fault(
                "surplus-layer",
                f"the config counts {depth} layers, 0 to {depth - 1}; there are tensors of layer "
                f"{compact_ranges(surplus)} too",
                f"{self._prefix}{surplus[0]}",
                f"correct {self._family.stack.depth}",
            )

    def _check_kinds(self, signatures: Mapping[int, int], depth: int) -> None:
        """Layers of one kind hold the same tensors; the odd ones out of each kind are told."""
        kinds: dict[str, list[int]] = {}
        for layer in sorted(signatures):
            if layer < depth:
                try:
                    facts = self._family.facts(self._config, layer)
                except (TypeError, ValueError, ArithmeticError) as error:
                    what = f"the config does not say what layer {layer} is: {error}"
                    self._findings.fault("config", what, "config.json", "correct the field of the wrong type")
                    return
                kinds.setdefault(repr(sorted(facts.items())), []).append(layer)
        for layers in kinds.values():
            held = [signatures[layer] for layer in layers]
            usual = max(set(held), key=lambda signature: (held.count(signature), -held.index(signature)))
            like = layers[held.index(usual)]
            odd = [layer for layer in layers if signatures[layer] != usual]
            if odd:
                self._tell_odd(odd, like)

    def _tell_odd(self, odd: list[int], like: int) -> None:
        wanted = {like, *odd[:_SHOWN_LAYERS]}
        held: dict[int, dict[str, StoredTensor]] = {layer: {} for layer in wanted}
        for name, tensor in self._tensors.items():
            split = self._split(name)
            if split is not None and split[0] in wanted:
                held[split[0]][split[1]] = tensor
        # A quantised model may leave single layers unquantised, as its module lists say.
        quantized = any(key in self._config for key in _QUANTIZED)
        tell = self._findings.note if quantized else self._findings.fault
        for layer in odd[:_SHOWN_LAYERS]:
            rest, what = _difference(held[layer], held[like])
            name = f"{self._prefix}{layer}.{rest}"
            tell("odd-layer", f"{name} {what} layer {like}, which is of the same kind", name, "", name)
        if len(odd) > _SHOWN_LAYERS:
            tell("odd-layer", f"layers {compact_ranges(odd)} differ from layer {like}", self._prefix)

    def _check_outside(self) -> None:
        """What every decoder of these families has beside its layers."""
        if self._prefix != "model.layers.":
            return
        for name in self._family.outside:
            names = (name, "model.final_layernorm") if name == "model.norm" else (name,)
            held = (f"{each}.{kind}" for each in names for kind in ("weight", "qweight", "weight_packed"))
            if not any(tensor in self._tensors for tensor in held):
                self._findings.fault(
                    "missing-tensor",
                    f"there is no {name}.weight",
                    "names of the tensors",
                    "get the missing tensor",
                    f"{name}.weight",
                )


def _difference(layer: Mapping[str, StoredTensor], like: Mapping[str, StoredTensor]) -> tuple[str, str]:
    """One tensor in which two layers differ, and how."""
    for rest in sorted(like.keys() - layer.keys()):
        return rest, "is missing; it is there in"
    for rest in sorted(layer.keys() - like.keys()):
        return rest, "is there; it is missing in"
    for rest, tensor in layer.items():
        if tensor.shape != like[rest].shape:
            return rest, f"has shape {list(tensor.shape)}, not the {list(like[rest].shape)} of"
    return "*", "differs from"
