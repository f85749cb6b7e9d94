"""The manifest judged by itself: what it says in one place must follow from what it says in another."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from surgery.draft import CONFIG_NAME
from surgery.families.records import find_family
from surgery.manifest import MANIFEST_FORMAT, MANIFEST_NAME, Manifest, ManifestTensor
from surgery.safetensors_file import StoredTensor, tensor_nbytes
from surgery.tiling import Tile
from surgery.verifying.manifest_reader import ManifestReader
from surgery.verifying.verdicts import Findings

_KEEPS_NAMES = frozenset({"trim", "repack"})
"""Operations after which a whole copy has its source's name, but for the layer's number."""

_MEND = "the manifest was changed after it was written: make the output again"


class Accounts(msgspec.Struct):
    """What the manifest's tensors add up to."""

    data_nbytes: dict[str, int]
    tensors: int = 0
    nbytes: int = 0


def check_manifest(reader: ManifestReader, config: dict[str, Any] | None, findings: Findings) -> Accounts:
    """One pass over the whole manifest. Raises `ManifestDamaged` where an entry cannot be read."""
    head = reader.head
    checksum_fault = reader.checksum_fault()
    if checksum_fault is not None:
        _fault(findings, f"the manifest is damaged: {checksum_fault}")
    if head.format != MANIFEST_FORMAT:
        _fault(findings, f"the manifest has format {head.format}; this version reads format {MANIFEST_FORMAT}")
    for name in head.files:
        if not is_plain(name):
            _fault(findings, f"the manifest lists {name!r}, which is no plain path inside the output")
    accounts = Accounts({name: 0 for name, entry in head.files.items() if entry.header_xxh3_128})
    used, nbytes_kept = _check_tensors(reader, config, accounts, findings)
    nbytes_dropped = tensors_dropped = 0
    for dropped in reader.dropped():
        tensors_dropped += 1
        nbytes_dropped += dropped.nbytes
    _check_totals(head, accounts, (used, nbytes_kept, tensors_dropped, nbytes_dropped), findings)
    if config is not None:
        _check_config_changes(head, config, findings)
    return accounts


def _fault(findings: Findings, what: str, tensor: str | None = None) -> None:
    findings.fault("manifest", what, MANIFEST_NAME, _MEND, tensor)


def is_plain(name: str) -> bool:
    """Whether `name` is a relative path of ordinary parts, so that reading it cannot leave the directory."""
    parts = name.split("/")
    return all(part not in ("", ".", "..") and "\\" not in part and "\0" not in part for part in parts)


def _check_tensors(
    reader: ManifestReader, config: Mapping[str, Any] | None, accounts: Accounts, findings: Findings
) -> tuple[int, int]:
    """Fill `accounts`; the source tensors that are used, each counted once, and their bytes."""
    head = reader.head
    layer_names = _LayerNames(head, config)
    used: set[int] = set()
    nbytes_kept = 0
    for tensor in reader.tensors():
        accounts.tensors += 1
        try:
            nbytes = tensor_nbytes(tensor.dtype, tensor.shape)
        except ValueError as error:
            _fault(findings, f"{tensor.name}: {error}", tensor.name)
            continue
        accounts.nbytes += nbytes
        if tensor.file in accounts.data_nbytes:
            accounts.data_nbytes[tensor.file] += nbytes
        else:
            _fault(findings, f"{tensor.name} is placed in {tensor.file!r}, no weight file of it", tensor.name)
        # Numbers instead of names: a set of 150,000 names would be most of the memory that verify needs.
        for file, name, size in _sources(tensor, nbytes):
            if not 0 <= file < len(head.sources):
                _fault(findings, f"{tensor.name} comes from source file {file}, which is not listed", tensor.name)
            elif (key := hash((file, name))) not in used:
                used.add(key)
                nbytes_kept += size
        wrong = layer_names.fault(tensor)
        if wrong is not None:
            _fault(findings, wrong, tensor.name)
    return len(used), nbytes_kept


def _sources(tensor: ManifestTensor, nbytes: int) -> list[tuple[int, str, int]]:
    """File, name and size of every stored tensor that `tensor` takes bytes from."""
    if tensor.tiling is not None:
        stored = [tile.source for tile in tensor.tiling.tiles if isinstance(tile, Tile)]
        return [(source.file, source.name, _stored_nbytes(source)) for source in stored]
    if tensor.source is None or tensor.source_file is None:
        return []
    return [(tensor.source_file, tensor.source, nbytes)]


def _stored_nbytes(source: StoredTensor) -> int:
    try:
        return source.nbytes
    except ValueError:
        return 0


class _LayerNames:
    """Names under the layer map: the new `model.layers.J.x` is a copy of `model.layers.<layers[J]>.x`."""

    def __init__(self, head: Manifest, config: Mapping[str, Any] | None) -> None:
        operations = {str(entry.get("operation")) for entry in head.recipe if isinstance(entry, dict)}
        self._layers = head.layers
        family = find_family(config) if config is not None else None
        stacks = (family, *family.also) if family is not None else ()
        self._held_for_all = tuple(suffix for stack in stacks for suffix in stack.first_only)
        in_ranks = head.ranks or head.partition is not None
        self._judged = bool(operations) and operations <= _KEEPS_NAMES and not in_ranks
        self._behind: int | None = None

    def fault(self, tensor: ManifestTensor) -> str | None:
        if not self._judged or tensor.source is None:
            return None
        for prefix, kept in self._layers.items():
            number, _, rest = tensor.name.removeprefix(prefix).partition(".")
            if not tensor.name.startswith(prefix) or not re.fullmatch(r"[0-9]{1,9}", number):
                continue
            if int(number) >= len(kept):
                return self._stage_fault(tensor, prefix, kept, int(number), rest)
            # What the first layer holds for all of them stays with the first layer, whichever that is.
            source = 0 if number == "0" and rest.endswith(self._held_for_all) else kept[int(number)]
            expected = f"{prefix}{source}.{rest}"
            return None if tensor.source == expected else _other_source(tensor, expected)
        return None if tensor.source == tensor.name else _other_source(tensor, tensor.name)

    def _stage_fault(
        self, tensor: ManifestTensor, prefix: str, kept: Sequence[int], number: int, rest: str
    ) -> str | None:
        """Behind the layers lie MTP stages: all moved by the same number of places."""
        source, _, source_rest = str(tensor.source).removeprefix(prefix).partition(".")
        if source_rest != rest or not re.fullmatch(r"[0-9]{1,9}", source) or int(source) <= max(kept, default=-1):
            return f"{tensor.name} is in layer {number}; the layer map has {len(kept)} layers"
        moved = int(source) - number
        if self._behind is None:
            self._behind = moved
        return None if moved == self._behind else _other_source(tensor, f"{prefix}{number + self._behind}.{rest}")


def _other_source(tensor: ManifestTensor, expected: str) -> str:
    return f"{tensor.name} is said to come from {tensor.source}; by the layer map it comes from {expected}"


def _check_totals(head: Manifest, accounts: Accounts, parts: tuple[int, int, int, int], findings: Findings) -> None:
    """`in = kept + dropped`, and every total is the sum of what the manifest lists."""
    totals = head.totals
    tensors_kept, nbytes_kept, tensors_dropped, nbytes_dropped = parts
    said_and_summed = {
        "tensors_out": (totals.tensors_out, accounts.tensors),
        "nbytes_out": (totals.nbytes_out, accounts.nbytes),
        "tensors_kept": (totals.tensors_kept, tensors_kept),
        "nbytes_kept": (totals.nbytes_kept, nbytes_kept),
        "tensors_dropped": (totals.tensors_dropped, tensors_dropped),
        "nbytes_dropped": (totals.nbytes_dropped, nbytes_dropped),
        "tensors_in": (totals.tensors_in, tensors_kept + tensors_dropped),
        "nbytes_in": (totals.nbytes_in, nbytes_kept + nbytes_dropped),
    }
    for name, (said, summed) in said_and_summed.items():
        if said != summed:
            _fault(findings, f"the manifest says {name} {said}; what it lists adds up to {summed}")
    for name, data_nbytes in accounts.data_nbytes.items():
        header_nbytes = head.files[name].nbytes - data_nbytes
        if header_nbytes < 8 or header_nbytes % 8:
            _fault(
                findings,
                f"the manifest says {name} has {head.files[name].nbytes} bytes, its tensors {data_nbytes}: "
                f"{header_nbytes} are left for the header",
            )


def _check_config_changes(head: Manifest, config: dict[str, Any], findings: Findings) -> None:
    """The last recorded value of a changed field is what config.json has."""
    in_config = [change for change in head.config_changes if change.file == CONFIG_NAME]
    for change in {change.path: change for change in in_config}.values():
        found = _looked_up(config, change.keys)
        if found is not _ABSENT and found != change.new:
            what = f"{change.path} became {change.new!r} when the output was made; config.json has {found!r}"
            findings.fault(
                "config-change", what, "config.json", "one of the two was edited since: make the output again"
            )


_ABSENT = object()


def _looked_up(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        if not isinstance(value, dict) or key not in value:
            return _ABSENT
        value = value[key]
    return value
