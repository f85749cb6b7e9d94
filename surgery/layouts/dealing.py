"""From rules to splits: packed weights, scales and biases follow the cut of the module they belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from surgery.errors import CannotApply
from surgery.layouts.rules import NUMBER, Model, Role
from surgery.layouts.splits import Split, scaled, whole
from surgery.packed_weights import COMPANIONS, unpacked
from surgery.safetensors_file import StoredTensor
from surgery.tiling import Content

_LEAVES = COMPANIONS | {"weight", "bias"}
_OUT = {"bias": -1, "qweight": -1, "qzeros": -1, "scales": -1, "g_idx": 0, "weight_g_idx": 0}
"""Axis of a module's outputs in its tensors, -2 where the name is not here; 0: it has none."""
_IN = {"bias": 0, "qweight": -2, "qzeros": -2, "scales": -2, "g_idx": -1, "weight_g_idx": -1}
"""Axis of a module's inputs, -1 where the name is not here."""
_ONE_FOR_ALL = frozenset(
    (
        "weight_shape",
        "input_scale",
        "weight_scale_2",
        "weight_global_scale",
        "input_global_scale",
        "input_zero_point",
        "output_scale",
        "activation_scale",
        "k_scale",
        "v_scale",
        "q_scale",
        "kv_scale",
    )
)
_BLOCKS = ("weight_scale_inv", "scale_inv")
Shape = tuple[int, ...]


class Place(msgspec.Struct, frozen=True):
    """What a name is: a tensor `leaf` of `module`, or a bare parameter (leaf ""), and the role of it."""

    module: str
    leaf: str
    role: Role


class Dealer:
    """Splits of the tensors of one model for a number of ranks."""

    def __init__(self, model: Model, config: Mapping[str, Any]) -> None:
        self._model = model
        self._config = config
        self._block = _block_size(config)
        self._known: dict[tuple[str, Shape, Shape | None], Split] = {}

    def place(self, name: str) -> Place:
        """Raises `CannotApply` for a name that no rule means."""
        module, _, leaf = name.rpartition(".")
        if leaf in _LEAVES and (role := self._model.role(module)) is not None:
            return Place(module, leaf, role)
        if (role := self._model.role(name)) is not None:
            return Place(name, "", role)
        raise CannotApply(f"no split rule means {name}", name, "this architecture needs a rule for it")

    def split(self, name: str, content: Content, logical: Shape | None) -> Split:
        """How a whole tensor is dealt; `logical` is the shape [out, in] of its module's weight."""
        key = (NUMBER.sub("0", name), content.shape, logical)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._split(name, content, logical)
        return found

    def _split(self, name: str, content: Content, logical: Shape | None) -> Split:
        place = self.place(name)
        role = place.role
        ranks = self._model.ranks
        if role.side == "whole" or (place.leaf == "bias" and role.side == "in") or place.leaf in _ONE_FOR_ALL:
            return whole(ranks)
        if role.side == "bare" or not place.leaf:
            return self._model.split(role.deal, role.axis, content.shape[role.axis], name)
        axis, factor, size = self._axis(place, content.shape, logical, name)
        if axis is None:
            return whole(ranks)
        return self.scaled_split(role, axis, size, factor, content.shape[axis], name)

    def scaled_split(self, role: Role, axis: int, size: int, factor: int, held: int, name: str) -> Split:
        """The split of an axis that has one entry for `factor` of the module's `size`."""
        split = self._model.split(role.deal, axis, size, name)
        return split if factor == 1 else scaled(split, axis, held, factor, name)

    def whole_split(self, name: str, parts: Sequence[Content | None], logical: Sequence[Shape | None]) -> Split:
        """How the tensor was dealt whose parts the ranks have; `logical` are the shapes of the weight on each rank."""
        place = self.place(name)
        role = place.role
        ranks = self._model.ranks
        held = [each for each in parts if each is not None]
        if role.side == "whole" or (place.leaf == "bias" and role.side == "in") or place.leaf in _ONE_FOR_ALL:
            return whole(ranks)
        if role.side == "bare" or not place.leaf:
            size = self._model.whole_size(role.deal, [each.shape[role.axis] for each in held])
            return self._model.split(role.deal, role.axis, size, name)
        axis, factor, _ = self._axis(place, held[0].shape, logical[0], name)
        if axis is None:
            return whole(ranks)
        side = -2 if role.side == "out" else -1
        if place.leaf == "bias" and logical[0] is None:
            local = [each.shape[-1] for each in held]
        else:
            local = [shape[side] for shape in logical if shape is not None]
        size = self._model.whole_size(role.deal, local)
        return self.scaled_split(role, axis, size, factor, -(-size // factor), name)

    def _axis(self, place: Place, shape: Shape, logical: Shape | None, name: str) -> tuple[int | None, int, int]:
        """The axis of the tensor that the module's dealt side is, how many of its elements one entry stands for, and
        the size of that side. No axis: one for all of them."""
        outputs = place.role.side == "out"
        axis = _OUT.get(place.leaf, -2) if outputs else _IN.get(place.leaf, -1)
        if axis == 0 or len(shape) == 0:
            return None, 1, 0
        if logical is None:
            if place.leaf == "bias":
                return -1, 1, shape[-1]
            raise CannotApply(f"{name} belongs to no weight", name, "get the missing weight")
        size = logical[-2] if outputs else logical[-1]
        if len(shape) == 1 and place.leaf not in ("bias", "g_idx", "weight_g_idx"):
            # One number for a channel, or for all.
            return (-1, 1, size) if outputs and shape[0] == size and size > 1 else (None, 1, 0)
        held = shape[axis]
        if place.leaf in _BLOCKS:
            block = self._block[0 if outputs else 1]
            if held != -(-size // block):
                raise CannotApply(
                    f"{name} has shape {list(shape)}; {size} in blocks of {block} are {-(-size // block)}",
                    name,
                    "correct weight_block_size",
                )
            return axis, block, size
        if held == size:
            return axis, 1, size
        if held == 1:
            return None, 1, 0
        if size % held:
            raise CannotApply(f"{name} has {held} entries for {size}", name, "its group size is not understood")
        return axis, size // held, size


def _block_size(config: Mapping[str, Any]) -> tuple[int, int]:
    for place in (config, *(value for value in config.values() if isinstance(value, Mapping))):
        section = place.get("quantization_config")
        block = section.get("weight_block_size") if isinstance(section, Mapping) else None
        if isinstance(block, list) and len(block) == 2 and all(isinstance(each, int) and each > 0 for each in block):
            return block[0], block[1]
    return 128, 128


def logical_shapes(tensors: Mapping[str, Content], config: Mapping[str, Any]) -> dict[str, Shape]:
    """Module -> the shape [out, in] of its weight, packed or not. Raises `CannotApply` where headers do not tell."""
    stored = {
        name: StoredTensor(name, content.dtype, content.shape, 0, 0)
        if not isinstance(content, StoredTensor)
        else content
        for name, content in tensors.items()
    }
    found = unpacked(stored, config)
    if found.untold:
        raise CannotApply(
            f"{found.untold[0]} is packed in a way that its header does not tell",
            found.untold[0],
            "this packing has no split rule",
        )
    return {name.removesuffix(".weight"): weight.shape for name, weight in found.weights.items()}
