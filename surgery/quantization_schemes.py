"""Quantisation schemes: which fields of a config name modules, and how the programs that read them match a name.

A literal table. Sources: transformers 5.24 `quantizers/quantizers_utils.py`
should_convert_module (also bitsandbytes and MXFP4); compressed-tensors `utils/match.py`; vLLM
`quantization/modelopt.py` is_layer_excluded and _resolve_quant_algo, `utils/gptq_utils.py` get_dynamic_override and
is_layer_gptq_quantized (GPTQModel's dynamic_get is the same), `awq.py` is_layer_skipped_awq, `auto_round.py`
get_layer_config, `quark/quark.py` _find_matched_config and `quark/utils.py`; auto-round `inference/convert_model.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import msgspec

Json = Any


class Modules(msgspec.Struct, frozen=True):
    """Module paths. `every` has all of them; `asked` those a linear layer can be: the owners of tensors, and what
    holds numbered parts inside a layer, which engines fuse (`model.layers.1.mlp.experts`)."""

    every: list[str]
    asked: list[str]


def modules_of(tensor_names: Iterable[str]) -> Modules:
    """The module paths behind tensor names: what stands before the last dot, and every path above it."""
    every: dict[str, None] = {}
    asked: dict[str, None] = {}
    for name in tensor_names:
        path = name.rpartition(".")[0]
        asked[path] = None
        while path and path not in every:
            every[path] = None
            above, _, last = path.rpartition(".")
            if last.isdecimal() and any(part.isdecimal() for part in above.split(".")):
                asked[above] = None
            path = above
    asked.pop("", None)
    return Modules(list(every), list(asked))


class Names:
    """The modules that entries are held against."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths
        self.known = frozenset(paths)


Reading = Callable[[str, Names], list[str]]
"""The modules that an entry means."""


def _exact(entry: str, names: Names) -> list[str]:
    return [entry] if entry in names.known else []


def _above(entry: str, names: Names) -> list[str]:
    """Modules that hold the named one: fused experts take what is said of one of theirs."""
    parts = entry.split(".")
    return [path for end in range(1, len(parts)) if (path := ".".join(parts[:end])) in names.known]


def _compressed_tensors(entry: str, names: Names) -> list[str]:
    """Exact, or a pattern after `re:` from the name's beginning. `model.layers.5` is no prefix."""
    if not entry.startswith("re:"):
        return _exact(entry, names)
    pattern = _pattern(entry[3:])
    return [path for path in names.paths if pattern.match(path)]


def _transformers(entry: str, names: Names) -> list[str]:
    """A pattern from the name's beginning to a module boundary, or the name's end."""
    pattern = _pattern(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))")
    return [path for path in names.paths if pattern.match(path) or path.endswith(entry)]


def _substring(entry: str, names: Names) -> list[str]:
    return [path for path in names.paths if entry in path]


def _searched(entry: str, names: Names) -> list[str]:
    pattern = _pattern(entry)
    return [path for path in names.paths if pattern.search(path)]


def _searched_pattern(entry: str, names: Names) -> list[str]:
    """As a pattern anywhere in the name, where it has a mark that makes it one (vLLM's REGEX_SPECIAL_CHARS)."""
    return _searched(entry, names) if re.search(r"[*+?^$()\[\]{}|\\]", entry) else []


def _modelopt(entry: str, names: Names) -> list[str]:
    """Substring or wildcard; experts also where the entry names one of them or of their parts."""
    hit = _substring(entry, names)
    if "experts" in entry:
        hit += [path for path in _above(entry, names) if "experts" in path]
    if re.search(r"[*?\[]", entry):
        hit += [path for path in names.paths if fnmatchcase(path, entry)]
    return hit


def _gptq(entry: str, names: Names) -> list[str]:
    pattern = _pattern(entry[2:] if entry[:2] in ("-:", "+:") else entry)
    return [path for path in names.paths if pattern.match(path)]


def _quark_exclude(entry: str, names: Names) -> list[str]:
    """Exact or `re:` in vLLM; Quark's own export also writes wildcards."""
    if "*" in entry and not entry.startswith("re:"):
        return [path for path in names.paths if fnmatchcase(path, entry)]
    return _compressed_tensors(entry, names)


def _quark_layers(entry: str, names: Names) -> list[str]:
    """A wildcard where it has a `*`; else the module's name inside the entry, not the other way round."""
    if "*" in entry:
        return [path for path in names.paths if fnmatchcase(path, entry)]
    return [path for path in names.paths if path in entry]


@cache
def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error:
        return re.compile(re.escape(text))


def _as_name(_entry: str, module: str) -> str:
    return module


def _as_pattern(_entry: str, module: str) -> str:
    """A pattern for one module: a plain name would also speak for the fused experts above it."""
    return f"^{re.escape(module)}$"


def _as_gptq(entry: str, module: str) -> str:
    """A pattern for one module: `re.match` stops at no boundary of its own."""
    return f"{entry[:2] if entry[:2] in ('-:', '+:') else ''}^{re.escape(module)}$"


def _same(_entry: str, value: Json) -> Json:
    return value


def _gptq_outcome(entry: str, value: Json) -> Json:
    """`-:` leaves the module alone, whatever its value says."""
    return "-:" if entry.startswith("-:") else value


class Scheme(msgspec.Struct, frozen=True):
    """How the entries of one field are read. A list says yes of a module, a `mapping` has a value for it.

    `readings`: the strongest first; within one, the first entry that means a module counts. `written` is the entry for
    one module in place of another entry. `outcome` is what an entry and its value come to.
    """

    readings: tuple[Reading, ...]
    mapping: bool = False
    written: Callable[[str, str], str] = _as_name
    outcome: Callable[[str, Json], Json] = _same
    containers: bool = False
    """Whether entries can mean what is no linear layer (attention)."""
    fused: bool = False
    """Whether engines hold entries against fused names, which no tensor has."""
    required: bool = False
    """Whether an empty field means something else than none of the modules."""
    classes: bool = False
    """Whether an entry can be the name of a class."""

    def names(self, modules: Modules) -> Names:
        paths = modules.every if self.containers else modules.asked
        return Names([*paths, *_fused(paths)] if self.fused else paths)


_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""vLLM's packed_modules_mapping: the fused name and the parts that checkpoints have."""


def _fused(paths: Sequence[str]) -> list[str]:
    known = frozenset(paths)
    found = []
    for path in paths:
        above, dot, last = path.rpartition(".")
        for name, parts in _FUSED.items():
            if last == parts[0] and all(f"{above}{dot}{part}" in known for part in parts):
                found.append(f"{above}{dot}{name}")
    return [name for name in found if name not in known]


_COMPRESSED_TENSORS = Scheme((_compressed_tensors,), containers=True)
_TARGETS = Scheme((_compressed_tensors,), containers=True, classes=True)
_TRANSFORMERS = Scheme((_transformers,))
_SUBSTRING = Scheme((_substring,))
_IN_BLOCK = Scheme((_substring,), required=True)
_SEARCHED = Scheme((_searched,))
_MODELOPT = Scheme((_modelopt,))
_MODELOPT_LAYERS = Scheme((_exact, _above), mapping=True, required=True)
_GPTQ = Scheme((_gptq,), mapping=True, written=_as_gptq, outcome=_gptq_outcome, fused=True)
_AUTO_ROUND = Scheme((_exact, _above, _searched_pattern), mapping=True, written=_as_pattern)
_QUARK_EXCLUDE = Scheme((_quark_exclude,))
_QUARK_LAYERS = Scheme((_quark_layers,), mapping=True)

_FIELDS: tuple[tuple[str, str, Scheme], ...] = (
    ("ignore", "modelopt", _MODELOPT),
    ("ignore", "", _COMPRESSED_TENSORS),
    ("targets", "", _TARGETS),
    ("exclude_modules", "", _MODELOPT),
    ("quantized_layers", "", _MODELOPT_LAYERS),
    ("modules_to_not_convert", "awq", _SUBSTRING),
    ("modules_to_not_convert", "auto-round", _SEARCHED),
    ("modules_to_not_convert", "intel/auto-round", _SEARCHED),
    ("modules_to_not_convert", "", _TRANSFORMERS),
    ("ignored_layers", "", _TRANSFORMERS),
    ("llm_int8_skip_modules", "", _TRANSFORMERS),
    ("modules_to_convert", "", _TRANSFORMERS),
    ("modules_in_block_to_quantize", "", _IN_BLOCK),
    ("dynamic", "", _GPTQ),
    ("extra_config", "", _AUTO_ROUND),
    ("exclude", "", _QUARK_EXCLUDE),
    ("layer_quant_config", "", _QUARK_LAYERS),
)
"""Field, what `quant_method` begins with, and the scheme; the first that fits."""


EXCLUDING = {
    "modelopt-file": "exclude_modules",
    "modelopt": "ignore",
    "compressed-tensors": "ignore",
    "awq": "modules_to_not_convert",
    "fp8": "modules_to_not_convert",
    "fbgemm_fp8": "modules_to_not_convert",
    "mxfp4": "modules_to_not_convert",
    "bitsandbytes": "llm_int8_skip_modules",
    "quark": "exclude",
    "gptq": "dynamic",
    "auto-round": "extra_config",
    "intel/auto-round": "extra_config",
}
"""What `quant_method` begins with, and the field that leaves modules alone (vLLM's config classes of those names)."""


def scheme_of(field: str, method: str, value: Json) -> Scheme | None:
    """The scheme that reads `field`, where `value` is of its form: names in a list (or lists), or a mapping."""
    for name, prefix, scheme in _FIELDS:
        if name != field or not method.startswith(prefix):
            continue
        if scheme.mapping:
            return scheme if isinstance(value, dict) else None
        return scheme if isinstance(value, list) and all(isinstance(entry, str) for entry in value) else None
    return None
