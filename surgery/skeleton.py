"""Skeletons: the model class that a config gets, built on the meta device, as a witness that shares nothing with ours.

It answers two questions without reading a weight. What is each layer (`layer_prints`): module classes, parameter and
buffer shapes, simple attributes, and the class's own per-layer lists. And what would loading say (`load`): the class's
real load path is run on meta tensors made from headers, name conversions, fused experts, ties and all.

The calls are no public promise of transformers (read and run: 5.24), so they live here and nowhere else, and whatever
they raise becomes `NoSkeleton`: a question that stays unverified, never one that passed. Buffers are put on the meta
device too: accelerate's default creates every parameter on the CPU first, 30 GB in one piece for DeepSeek-V3.
"""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

Config = Mapping[str, Any]
Shape = tuple[int, ...]

QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_INDEX_ATTRIBUTES = frozenset(
    ("layer_idx", "layer_id", "layer_number", "layer_index", "layer_num", "block_idx", "block_id", "idx", "training")
) | {"store_full_length_kv", "kv_shared_layer_index", "has_relative_attention_bias"}
"""Attributes that are the layer's number itself, or say what it is to the others: whether one that shares its cache is
built, which, and whether it holds what the first holds for all. Those are the family record's business."""
_PER_LAYER = re.compile(r"layer|_types|pattern|freq|ratios|indexer")


class NoSkeleton(Exception):
    """There is no class for the config, or it cannot be built: the reason in one line."""


@dataclass(frozen=True)
class Skeleton:
    """A model on the meta device. `class_name` and `library` say what bears witness."""

    model: PreTrainedModel
    class_name: str
    library: str

    def dtypes(self) -> dict[str, str]:
        """The dtype of every parameter and stored buffer, by the class's own names."""
        held = self.model.state_dict(keep_vars=True)
        return {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in held.items()}


@dataclass(frozen=True)
class Cut:
    """What became of one stack: layer j of the new is layer `kept[j]` of the old, which had `depth`.

    `section` is the path to its config. `moved` end the names of tensors that the first layer holds for all of them,
    whichever it is.
    """

    stack: str
    section: tuple[str, ...]
    kept: tuple[int, ...]
    depth: int
    moved: tuple[str, ...] = ()


@dataclass
class Loading:
    """What the class's load path says of names and shapes. `misshapen`: name, shape in the file, shape demanded."""

    missing: list[str] = field(default_factory=list)
    surplus: list[str] = field(default_factory=list)
    misshapen: list[tuple[str, Shape, Shape]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class LayerPrint:
    """What one layer is: by submodule path, its class, simple attributes, and the shapes it holds."""

    parts: Mapping[str, tuple[Any, ...]]
    holds_weights: bool
    run_length: int = 0

    def without(self, suffixes: Sequence[str]) -> LayerPrint:
        """The print but for the modules that hold tensors of these names."""
        paths = tuple(suffix.rpartition(".")[0] for suffix in suffixes)
        kept = {path: part for path, part in self.parts.items() if not (paths and path.endswith(paths))}
        return LayerPrint(kept, self.holds_weights, self.run_length)

    def difference(self, other: LayerPrint) -> str:
        """The first thing that differs, in words; empty where nothing does."""
        for path in dict.fromkeys((*self.parts, *other.parts)):
            mine, theirs = self.parts.get(path), other.parts.get(path)
            if mine == theirs:
                continue
            if mine is None or theirs is None:
                return f"{path or 'the layer'} is only in one of them"
            here, there = dict(_named(mine)), dict(_named(theirs))
            for name in dict.fromkeys((*here, *there)):
                one, two = here.get(name, "nothing"), there.get(name, "nothing")
                if one != two and not (self.is_each(one) and other.is_each(two)):
                    return f"{path or 'the layer'}: {name} {one} there, {two} here"
        return ""

    def is_each(self, value: Any) -> bool:
        """Whether a value has an entry for each layer of the run: it is the whole stack's, and changes with it."""
        return isinstance(value, tuple) and len(value) == self.run_length


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers logs and warns about configs; what counts of it is in our findings."""
    from transformers.utils import logging as library_logging

    before, bars = library_logging.get_verbosity(), library_logging.is_progress_bar_enabled()
    library_logging.set_verbosity(logging.CRITICAL)
    library_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        library_logging.set_verbosity(before)
        if bars:
            library_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def class_config(config: Config, native: str = "") -> PretrainedConfig:
    """The class's own reading of a raw config. `native` is the model type whose class serves it, where it is another.

    Raises `NoSkeleton` where transformers has no class for it or the class refuses it.
    """
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        raise NoSkeleton(f"transformers cannot be imported: {error}") from None
    kind = native or str(config.get("model_type"))
    plain = {key: value for key, value in copy.deepcopy(dict(config)).items() if key not in QUANTIZATION_KEYS}
    plain = _with_floats(plain) | {"model_type": kind}
    try:
        if kind not in CONFIG_MAPPING:
            raise NoSkeleton(f"transformers {_version()} has no class for model_type {kind!r}")
        with _quiet():
            return CONFIG_MAPPING[kind].from_dict(plain)
    except NoSkeleton:
        raise
    except Exception as error:  # Whatever a config class raises is its refusal.
        raise NoSkeleton(f"the class refuses the config: {_one_line(error)}") from error


def derived_lists(config: Config) -> dict[str, Sequence[Any]]:
    """The lists with an entry a layer that the class makes of a config. Raises `NoSkeleton`."""
    read = class_config(config)
    inner = read.get_text_config()
    depth = getattr(inner, "num_hidden_layers", None)
    return _per_layer_lists(inner, depth) if isinstance(depth, int) else {}


def _with_floats(value: Any) -> Any:
    """Infinities, which transformers writes as `{"__float__": "Infinity"}`."""
    if isinstance(value, dict):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_floats(entry) for key, entry in value.items()}
    return [_with_floats(entry) for entry in value] if isinstance(value, list) else value


def build(config: Config, native: str = "") -> Skeleton:
    """The model that `config` gets, without a byte of weights. Quantisation sections are left out: packed tensors are
    judged by `quantization`. Raises `NoSkeleton`."""
    read = class_config(config, native)
    model_class = _model_class(config, read)
    try:
        from accelerate import init_empty_weights

        read._attn_implementation = "eager"
        with _quiet(), init_empty_weights(include_buffers=True):
            model = model_class(read)
    except Exception as error:
        raise NoSkeleton(f"{model_class.__name__} cannot be built from the config: {_one_line(error)}") from error
    return Skeleton(model, model_class.__name__, f"transformers {_version()}")


def _model_class(config: Config, read: PretrainedConfig) -> type[PreTrainedModel]:
    """The class that `architectures` names, where transformers has it for the config, else one of the auto maps."""
    import transformers
    from transformers.models.auto import modeling_auto

    listed = config.get("architectures")
    for name in listed if isinstance(listed, list) else ():
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(found, type) and getattr(found, "config_class", None) is type(read):
            return cast("type[PreTrainedModel]", found)
    for mapping in (
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
        "MODEL_FOR_CAUSAL_LM_MAPPING",
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
        "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
        "MODEL_FOR_MASKED_LM_MAPPING",
        "MODEL_MAPPING",
    ):
        known = getattr(modeling_auto, mapping, None)
        if known is not None and type(read) in known:
            mapped: Any = known[type(read)]
            return cast("type[PreTrainedModel]", mapped[0] if isinstance(mapped, (list, tuple)) else mapped)
    raise NoSkeleton(f"transformers {_version()} has a config class for {read.model_type!r} and no model class")


def layer_prints(skeleton: Skeleton) -> dict[str, list[LayerPrint]]:
    """The prints of every numbered run of modules, by its path in the class (`model.layers`)."""
    return {path: [_print_of(layer, len(run)) for layer in run] for path, run in _runs(skeleton.model)}


def difference(old: Skeleton, new: Skeleton, cuts: Sequence[Cut]) -> list[str]:
    """Where a layer of the new skeleton is not what the layer it came from was; empty where every one is.

    Runs that no cut speaks of must be as they were, where they hold weights.
    """
    before, after = layer_prints(old), layer_prints(new)
    found = []
    judged: set[Cut] = set()
    for path in dict.fromkeys((*before, *after)):
        mine, theirs = before.get(path, []), after.get(path, [])
        cut = next((each for each in cuts if len(mine) == each.depth and _is_of(old.model, path, each)), None)
        if cut is None and not any(run.holds_weights for run in (*mine, *theirs)):
            continue  # Rotary tables and their like: as many as the layers that are left need.
        order = cut.kept if cut is not None else range(len(mine))
        moved = cut.moved if cut is not None else ()
        if len(theirs) != len(order):
            found.append(f"{path}: {len(theirs)} layers are built, {len(order)} belong there")
            continue
        for place, source in enumerate(order):
            if what := mine[source].without(moved).difference(theirs[place].without(moved)):
                found.append(f"{path}.{place} is not what {path}.{source} was: {what}")
        if cut is not None:
            judged.add(cut)
            found += _entry_differences(old.model, new.model, path, cut.kept, cut.depth)
    found += [
        f"the class builds no run of {cut.depth} layers for the {cut.stack} stack" for cut in cuts if cut not in judged
    ]
    return found


def _entry_differences(
    old: PreTrainedModel, new: PreTrainedModel, path: str, kept: Sequence[int], depth: int
) -> Iterator[str]:
    """Lists of the class's own config with an entry a layer: what a forward pass looks up by the layer's number."""
    was = _per_layer_lists(owner_config(old, path), depth)
    now = _per_layer_lists(owner_config(new, path), len(kept))
    for name in was.keys() & now.keys():
        for place, source in enumerate(kept):
            if was[name][source] != now[name][place]:
                yield f"{name}: {now[name][place]} for {path}.{place}, {was[name][source]} for {path}.{source}"


def _is_of(model: PreTrainedModel, path: str, cut: Cut) -> bool:
    """Whether a run of modules belongs to the stack: by its name in models with two, else by the config above it."""
    if cut.stack in ("encoder", "decoder"):
        return f".{cut.stack}." in f".{path}."
    if not cut.section:
        return True
    inner: Any = model.config
    for key in cut.section:
        inner = getattr(inner, key, None)
    return inner is not None and owner_config(model, path).model_type == inner.model_type


def _runs(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    """The outermost module lists: a list below a numbered layer is a part of that layer."""
    from torch import nn

    seen: list[str] = []
    for path, module in model.named_modules():
        if (
            isinstance(module, nn.ModuleList)
            and len(module)
            and not any(path.startswith(f"{above}.") for above in seen)
        ):
            seen.append(path)
            yield path, module


def owner_config(model: PreTrainedModel, path: str) -> PretrainedConfig:
    """The config of the nearest model above a module."""
    found = model.config
    at: Any = model
    for part in path.split("."):
        at = getattr(at, part)
        config = getattr(at, "config", None)
        if config is not None and hasattr(config, "model_type") and hasattr(at, "_keys_to_ignore_on_load_unexpected"):
            found = config
    return found


def _per_layer_lists(config: PretrainedConfig, length: int) -> dict[str, Sequence[Any]]:
    return {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == length and _PER_LAYER.search(name) and not _is_ids(value)
    }


def _is_ids(values: Sequence[Any]) -> bool:
    """Whether a list holds numbers of layers, not an entry for each."""
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values) and (
        len(set(values)) == len(values)
    )


def _print_of(layer: nn.Module, run_length: int) -> LayerPrint:
    parts: dict[str, tuple[Any, ...]] = {}
    for path, module in layer.named_modules():
        held = [
            (name, tuple(tensor.shape), str(tensor.dtype))
            for source in (module._parameters, module._buffers)
            for name, tensor in source.items()
            if tensor is not None
        ]
        simple = [
            (name, _plain(value))
            for name, value in sorted(vars(module).items())
            if name not in _INDEX_ATTRIBUTES and not name.startswith("_") and _is_plain(value)
        ]
        parts[path] = (("class", type(module).__name__), *held, *simple)
    return LayerPrint(parts, next(layer.parameters(), None) is not None, run_length)


def _named(part: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """Name and what is held under it: a class, an attribute, a tensor's shape and dtype."""
    for entry in part:
        yield entry[0], entry[1] if len(entry) == 2 else f"{entry[2]} {list(entry[1])}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(entry) for entry in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _plain(value: Any) -> Any:
    return tuple(_plain(entry) for entry in value) if isinstance(value, (list, tuple)) else repr(value)


def load(skeleton: Skeleton, tensors: Mapping[str, tuple[str, Shape]]) -> Loading:
    """Run the class's load path on meta tensors: `tensors` gives a torch dtype name and a shape by tensor name.

    The skeleton's parameters are replaced: build another for another question. Raises `NoSkeleton`.
    """
    import torch

    made = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for name, (dtype, shape) in tensors.items()
    }
    model = skeleton.model
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        settings = LoadStateDictConfig(
            ignore_mismatched_sizes=True,
            weight_mapping=cast("Any", get_model_conversion_mapping(model)),
            device_map={"": "meta"},
        )
        with _quiet():
            told, _ = convert_and_load_state_dict_in_model(model, made, settings)
            missing = set(told.missing_keys)
            model._adjust_missing_and_unexpected_keys(told)
    except Exception as error:
        raise NoSkeleton(f"the load path of {skeleton.class_name} failed: {_one_line(error)}") from error
    return Loading(
        missing=sorted(set(told.missing_keys) - _satisfied_ties(model, missing)),
        surplus=sorted(told.unexpected_keys),
        misshapen=sorted((name, tuple(held), tuple(wanted)) for name, held, wanted in told.mismatched_keys),
        errors=sorted(f"{name}: {_one_line(error)}" for name, error in dict(told.conversion_errors).items()),
    )


def _satisfied_ties(model: PreTrainedModel, missing: set[str]) -> set[str]:
    """Names that are tied to one that is there."""
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    return {target for target, source in ties.items() if source not in missing}


def _version() -> str:
    import transformers

    return str(transformers.__version__)


def _one_line(error: BaseException | str) -> str:
    text = " ".join(str(error).split())
    name = type(error).__name__ if isinstance(error, BaseException) else ""
    return (f"{name}: {text}" if name and text else name or text)[:300]
