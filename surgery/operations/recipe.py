"""Recipes: operations as data. The keys of a recipe are the operations' fields, and so are the flags.

    recipe:
    - operation: trim
      layers: 0,6,7
    - operation: repack
      max_shard_size: 5GB

An output's `surgery.json` is a recipe too: it has the same list under the same key.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from surgery.draft import Draft, Operation, changed
from surgery.errors import SurgeryError, UsageError
from surgery.operations.dummy import Dummy
from surgery.operations.graft import Graft
from surgery.operations.prune import Prune
from surgery.operations.rename import Rename
from surgery.operations.repack import Repack
from surgery.operations.reshard import Reshard
from surgery.operations.trim import Trim

AnyOperation = Trim | Prune | Graft | Rename | Reshard | Repack | Dummy
"""The operation table: a recipe entry is one of these, told apart by `operation`."""


def run_recipe(draft: Draft, operations: Sequence[Operation]) -> Draft:
    """Apply `operations` in their order, in one pass over names and config; the draft remembers the recipe."""
    for number, operation in enumerate(operations, 1):
        try:
            if isinstance(operation, Trim | Prune):
                operation = operation.resolved(draft)
            draft = operation.apply(draft)
        except SurgeryError as error:
            if len(operations) > 1:
                error.where = f"operation {number} of {len(operations)}" + (f": {error.where}" if error.where else "")
            raise
        recorded = operation.recorded() if isinstance(operation, Graft) else operation
        draft = changed(draft, recipe=(*draft.recipe, msgspec.to_builtins(recorded)))
    return draft


def with_sources(operations: Sequence[AnyOperation], others: Sequence[str]) -> list[AnyOperation]:
    """The grafts that do not say where from (a manifest names no paths) with `others`, in order."""
    left = list(others)
    found: list[AnyOperation] = []
    for each in operations:
        asks = isinstance(each, Graft) and not each.other and left
        found.append(msgspec.structs.replace(each, other=left.pop(0)) if asks else each)
    if left:
        raise UsageError(f"no graft of the recipe asks for {left[0]!r}", "--from", "name one for each graft without")
    return found


def read_recipe(path: Path) -> list[AnyOperation]:
    """The operations in a YAML recipe or a manifest. Raises `UsageError` that names the entry and the field."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the recipe: {error}", str(path), "name a YAML file") from error
    return parse_recipe(text, str(path))


def parse_recipe(text: str, where: str) -> list[AnyOperation]:
    mend = "`surgery run --help` shows a recipe"
    data = _load(text, where)
    entries = data.get("recipe") if isinstance(data, dict) else None
    if not isinstance(entries, list) or not entries:
        raise UsageError("a recipe has a list under the key `recipe`", where, mend)
    operations: list[AnyOperation] = []
    for number, entry in enumerate(entries, 1):
        try:
            operations.append(msgspec.convert(_as_written(entry), type=AnyOperation, strict=False))
        except msgspec.ValidationError as error:
            raise UsageError(f"entry {number} of the recipe: {error}", where, mend) from error
    return operations


def _load(text: str, where: str) -> Any:
    if text.lstrip().startswith("{"):
        # A manifest: JSON, far larger than a recipe, and only its `recipe` is wanted.
        try:
            return {"recipe": msgspec.json.decode(text, type=_RecipeOnly).recipe}
        except (msgspec.DecodeError, RecursionError) as error:
            raise UsageError(f"neither a recipe nor a manifest: {error}", where, "check the file") from error
    import yaml

    try:
        # Every scalar stays as it is written: `layers: 010` is no octal number, `1:30` no time.
        return yaml.load(text, Loader=_unique_keys(yaml.BaseLoader))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UsageError(f"not YAML: {error}", where, "check the file") from error


def _unique_keys(base: Any) -> Any:
    """The loader `base`, refusing a key that is there twice: the last would win in silence."""

    class Unique(base):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            repeated = [key for number, key in enumerate(keys) if key in keys[:number]]
            if repeated:
                raise ValueError(f"the key {repeated[0]!r} is there twice")
            return super().construct_mapping(node, deep)

    return Unique


class _RecipeOnly(msgspec.Struct):
    recipe: list[Any]


def _as_written(entry: Any) -> Any:
    """YAML reads `layers: 5` as a number and `layers: [0, 6]` as a list; both are layer lists."""
    if isinstance(entry, dict) and not isinstance(entry.get("layers"), str) and "layers" in entry:
        layers = entry["layers"]
        listed = layers if isinstance(layers, list) else [layers]
        return {**entry, "layers": ",".join(str(layer) for layer in listed)}
    return entry
