"""What quantisation lists must say of grafted modules: that they are left alone, where the model is quantised."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from surgery.draft import Config, ConfigChange, Draft, Json, SideFile, changed, json_text
from surgery.errors import CannotApply
from surgery.operations.quantization_carry import MAX_LISTING_NBYTES
from surgery.packed_weights import Unpacked, quantized_modules, unpacked
from surgery.quantization import QUANTIZATION_FILES, Named, named_in, named_in_section, quantization_sections
from surgery.quantization_schemes import EXCLUDING, Modules, modules_of, scheme_of
from surgery.safetensors_file import StoredTensor
from surgery.storage import read_bytes

_MEND = "take the tensors from a checkpoint that is quantised in the same way, or not at all"


def listed(draft: Draft, other: Config | None, added: Mapping[str, StoredTensor]) -> Draft:
    """`draft` with lists that leave the `added` modules alone which are not quantised.

    Raises `CannotApply` where they are quantised in another way than the model.
    """
    assert draft.config is not None
    weights = unpacked(added, other or {})
    here, there = _method(draft.config), _method(other or {})
    files = [side for side in draft.side_files if side.name in QUANTIZATION_FILES]
    quantized = sorted(quantized_modules(weights)) or sorted(weights.untold)
    if quantized and here != there:
        raise CannotApply(
            f"{quantized[0]} is quantised ({there or 'in a way that no config says'}), and this model is "
            + (f"quantised as {here}" if here else "not"),
            "graft",
            _MEND,
        )
    alone = _plain(weights, added)
    if here == there and here:
        alone = [module for module in alone if module in _excluded(other or {}, modules_of(added))]
    if not alone or not (here or files):
        return draft
    modules = modules_of(draft.tensors)
    config = copy.deepcopy(draft.config)
    changes = []
    for path, section in quantization_sections(config):
        changes += _extend(section, path, _method({"quantization_config": section}), alone, modules)
    draft = changed(draft, config=config, config_changes=(*draft.config_changes, *changes))
    for side in files:
        draft = _extend_file(draft, side, alone, modules)
    return draft


def _plain(weights: Unpacked, added: Mapping[str, StoredTensor]) -> list[str]:
    """Modules whose weights are matrices as they are: what an engine would quantise, or expect quantised."""
    return list(
        dict.fromkeys(
            name.rpartition(".")[0]
            for name, weight in weights.weights.items()
            if not weight.quantized and len(weight.shape) >= 2 and name in added
        )
    )


def _method(config: Config) -> str:
    for _, section in quantization_sections(config):
        return str(section.get("quant_method") or section.get("quant_algo") or "?")
    return ""


def _excluded(config: Config, modules: Modules) -> set[str]:
    return {
        path
        for named in named_in(config)
        if str(named.path[-1]) in EXCLUDING.values()
        for path in _hits(named, list(named.value), modules)
    }


def _hits(named: Named, entries: Sequence[str], modules: Modules) -> set[str]:
    names = named.scheme.names(modules)
    return {path for entry in entries for reading in named.scheme.readings for path in reading(entry, names)}


def _extend(
    section: dict[str, Any], path: tuple[str | int, ...], method: str, alone: Sequence[str], modules: Modules
) -> list[ConfigChange]:
    """Edit one section in place, so that it leaves the modules alone."""
    field = next((name for start, name in EXCLUDING.items() if method.startswith(start)), "")
    places = [named for named in named_in_section(section, method=method) if named.path[-1] in EXCLUDING.values()]
    named = next((each for each in places if each.path[-1] == field), places[0] if places else None)
    if named is None and field:
        empty: Json = {} if field in ("dynamic", "extra_config") else []
        scheme = scheme_of(field, method, empty)
        named = Named((field,), scheme, empty) if scheme is not None else None
    if named is None:
        raise CannotApply(
            f"no field of a {method} section is known that leaves modules alone, and {alone[0]} is not quantised",
            ".".join(map(str, path)),
            _MEND,
        )
    missing = [module for module in alone if module not in _hits(named, list(named.value), modules)]
    if not missing:
        return []
    old = copy.deepcopy(named.value)
    if named.scheme.mapping:
        new: Json = {**old, **dict(_pair(named, module) for module in missing)}
    else:
        new = [*old, *missing]
    more = _hits(named, list(new), modules) - _hits(named, list(old), modules)
    others = sorted(path for path in more if not any(f"{module}.".startswith(f"{path}.") for module in alone))
    if others:
        raise CannotApply(
            f"{alone[0]} cannot be left alone without {others[0]} being left alone too",
            ".".join(map(str, (*path, *named.path))),
            _MEND,
        )
    place: Any = section
    for key in named.path[:-1]:
        place = place[key]
    was = place.get(named.path[-1]) if isinstance(place, dict) else place[named.path[-1]]
    place[named.path[-1]] = new
    return [ConfigChange(".".join(map(str, (*path, *named.path))), was, new, "graft: not quantised")]


def _pair(named: Named, module: str) -> tuple[str, Json]:
    """GPTQ's `-:` pattern leaves a module alone; auto-round says it with sixteen bits."""
    if named.path[-1] == "dynamic":
        return named.scheme.written("-:", module), {}
    return module, {"bits": 16, "data_type": "float"}


def _extend_file(draft: Draft, side: SideFile, alone: Sequence[str], modules: Modules) -> Draft:
    """A file beside the config that is such a section, or holds one."""
    text = side.text
    if text is None:
        text = read_bytes(draft.roots[side.root] / side.source_name, MAX_LISTING_NBYTES).decode("utf-8", "replace")
    document = json.loads(text.removeprefix("\ufeff"))
    inner = document.get("quantization") if isinstance(document, dict) else None
    section, path = (inner, ("quantization",)) if isinstance(inner, dict) else (document, ())
    method = QUANTIZATION_FILES[side.name]
    changes = _extend(section, path, "modelopt-file" if method == "modelopt" else method, alone, modules)
    if not changes:
        return draft
    new = msgspec.structs.replace(side, text=json_text(document, text, side.name))
    told = [msgspec.structs.replace(change, path=f"{side.name}:{change.path}") for change in changes]
    return changed(
        draft,
        side_files=tuple(new if each is side else each for each in draft.side_files),
        config_changes=(*draft.config_changes, *told),
    )
