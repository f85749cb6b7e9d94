"""Judge a plan before it is trusted: it is data, and anyone may have written it."""

from __future__ import annotations

import msgspec

from surgery.errors import CannotApply, Problems
from surgery.moves import box_fault, coverage_fault, element_fault, moves
from surgery.plan_types import Check, Plan, PlannedTensor
from surgery.safetensors_file import StoredTensor, tensor_nbytes
from surgery.side_files import is_index_file
from surgery.tiling import Tiling, sources
from surgery.value_kernels import kernel_fault

_MEND = "make the plan again with `surgery plan`"

MANIFEST_NAME = "surgery.json"
"""The name that only the manifest may have."""


def check_plan(plan: Plan, *, proven: bool = False) -> None:
    """Raise `CannotApply` with every problem: names that leave a directory or collide, sources outside their files,
    tensors that are not covered exactly once, cuts inside a byte.

    `proven` leaves out what the makers of a draft have just proven: that names are unique (a draft is a map) and
    that stored tensors lie in their files (their headers were read).
    """
    problems = Problems()
    _check_output_names(plan, problems)
    _check_structure(plan, problems)
    _check_sources(plan, problems)
    bounds = [(source.data_offset, source.nbytes) for source in plan.sources]
    names: set[str] = set()
    for file in plan.files:
        for tensor in file.tensors:
            if proven and tensor.whole is not None and tensor.name != "__metadata__" and file.rank < 0:
                continue
            name = tensor.name if file.rank < 0 else f"{file.rank}\0{tensor.name}"
            if name in names or tensor.name in ("__metadata__", ""):
                problems.add(f"the tensor name {tensor.name!r} is there twice or is no tensor name", file.name, _MEND)
            names.add(name)
            _check_tensor(tensor, bounds, problems)
    checkable = {tensor.name: tensor for tensor in plan.tensors()} if plan.checks else {}
    for check in plan.checks:
        _check_source(check.tile.source, bounds, check.tile.source.name, problems)
        if check.twin is not None:
            _check_source(check.twin.source, bounds, check.twin.source.name, problems)
        _check_check(check, checkable, problems)
        if check.kind == "equal" and check.tensor not in checkable:
            problems.add(f"a check of {check.tensor!r}, which is no output tensor", "plan", _MEND)
    problems.raise_if_any(CannotApply, "the plan cannot be carried out")


def _check_check(check: Check, tensors: dict[str, PlannedTensor], problems: Problems) -> None:
    """The tile of a check lies in its source and, to be compared, in the tensor it is compared with."""
    tile = check.tile
    if check.kind == "equal" and check.tensor in tensors:
        target = tensors[check.tensor].content
        dtype, shape = target.dtype, target.shape
    else:
        dtype, shape = tile.source.dtype, tile.shape
        tile = msgspec.structs.replace(tile, offset=(0,) * len(tile.shape))
    fault = box_fault(tile, dtype, shape)
    if fault is None and check.kind == "same":
        twin = check.twin
        alike = twin is not None and (twin.source.dtype, twin.shape) == (dtype, tile.shape)
        fault = None if alike else "a tile and its twin of other shapes"
    if fault is None and check.kind == "constant":
        fault = element_fault(check.element, dtype)
    if fault is not None:
        problems.add(f"a check: {fault}", tile.source.name, _MEND)


def _check_structure(plan: Plan, problems: Problems) -> None:
    """Files that loaders find: weights named as such, several of them with an index; totals that are true."""
    for file in plan.files:
        if not file.name.endswith(".safetensors"):
            problems.add(f"the weight file {file.name!r} is not named *.safetensors", "plan", _MEND)
    if len(plan.files) > 1 and plan.index is None and any(file.rank < 0 for file in plan.files):
        problems.add(f"{len(plan.files)} weight files and no index", "plan", _MEND)
    if plan.index is not None and not is_index_file(plan.index):
        problems.add(f"the index {plan.index!r} is not named as one", "plan", _MEND)
    count = sum(len(file.tensors) for file in plan.files)
    if plan.totals.tensors_out != count:
        problems.add(f"the totals say {plan.totals.tensors_out} tensors go out; the files have {count}", "plan", _MEND)


def _check_output_names(plan: Plan, problems: Problems) -> None:
    names = [*(f.name for f in plan.files), *(s.name for s in plan.side_files)]
    names += [] if plan.index is None else [plan.index]
    taken = set(names)
    for name in names:
        first = name.partition("/")[0]
        reserved = first == "lost+found" or first.endswith(".surgery-partial") or first.lower() == MANIFEST_NAME
        if not is_plain(name) or reserved or (name == plan.index and "/" in name):
            problems.add(f"the output file name {name!r} is not a plain path inside the output", "plan", _MEND)
        parts = name.split("/")
        if any("/".join(parts[:depth]) in taken for depth in range(1, len(parts))):
            problems.add(f"{name!r} lies below the name of another output file", "plan", _MEND)
    if len({name.casefold() for name in names}) != len(names):
        problems.add("two output files have one name, or names that differ in case only", "plan", _MEND)


def _check_sources(plan: Plan, problems: Problems) -> None:
    roots = range(len(plan.roots))
    if any("\0" in root for root in plan.roots):
        problems.add("a root of the plan is no path", "plan", _MEND)
    for source in plan.sources:
        if not is_plain(source.name) or source.root not in roots:
            problems.add(f"the source {source.name!r} is not a plain path inside a root of the plan", "plan", _MEND)
        if not 0 <= source.data_offset <= source.nbytes:
            problems.add(f"the source {source.name!r} has impossible sizes", "plan", _MEND)
    for side in (*plan.side_files, *plan.inputs):
        if side.text is None and (not is_plain(side.source_name) or side.root not in roots):
            problems.add(f"the side file {side.source_name!r} is not a plain path inside a root", "plan", _MEND)


def _check_tensor(tensor: PlannedTensor, bounds: list[tuple[int, int]], problems: Problems) -> None:
    whole = tensor.whole
    if (whole is None) == (tensor.tiling is None):
        problems.add("a tensor is either whole or a tiling", tensor.name, _MEND)
        return
    if whole is not None:
        _check_source(whole, bounds, tensor.name, problems)
        return
    content = tensor.content
    for source in sources(content):
        _check_source(source, bounds, tensor.name, problems)
    try:
        tensor_nbytes(content.dtype, content.shape)
        assert isinstance(content, Tiling)
        stored = content.as_stored()
        fault = kernel_fault(content) or coverage_fault(stored)
        if fault is not None:
            problems.add(fault, tensor.name, _MEND)
            return
        for _ in moves(stored, tensor.name):
            pass
    except CannotApply as error:
        problems.add(error.what, error.where, error.mend)
    except ValueError as error:
        problems.add(str(error), tensor.name, _MEND)


def _check_source(source: StoredTensor, bounds: list[tuple[int, int]], where: str, problems: Problems) -> None:
    """A stored tensor has a size, and lies in the data of its file."""
    try:
        low, high = bounds[source.file] if source.file >= 0 else (1, 0)
        sound = low <= source.offset <= source.offset + source.nbytes <= high
        sound = sound and (not source.shape or min(source.shape) >= 0)
    except (IndexError, ValueError):
        sound = False
    if not sound:
        problems.add(
            f"{source.name} ({source.dtype}, shape {list(source.shape)}) does not lie in its file", where, _MEND
        )


def is_plain(name: str) -> bool:
    """Whether `name` is a relative path of ordinary parts, so that it cannot leave its directory."""
    parts = name.split("/")
    return all(part not in ("", ".", "..") and "\\" not in part and "\0" not in part for part in parts)
