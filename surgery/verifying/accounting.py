"""`in = kept + dropped`, counted on the source's own files, and names that say where the maps say they come from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from surgery.manifest import MANIFEST_NAME, ManifestTensor
from surgery.tiling import Tile
from surgery.verifying.manifest_reader import ManifestReader


class Sized(Protocol):
    """Where a tensor lies in its file."""

    @property
    def nbytes(self) -> int: ...


Fault = Callable[[str, str, str, str | None], None]
_EXPERT = re.compile(
    r"^(?P<layer>.*?[^.]*\.(?P<number>[0-9]+))\.(?P<rest>(?:[A-Za-z_]\w*\.)*experts\.)(?P<id>[0-9]+)\."
)


def sources_of(reader: ManifestReader, tensor: ManifestTensor) -> list[tuple[int, str]]:
    """Root and name of every source tensor that `tensor` takes bytes from."""
    files = reader.head.sources

    def root(file: int) -> int:
        return files[file].root if 0 <= file < len(files) else 0

    if tensor.tiling is not None:
        copies = [tile.source for tile in tensor.tiling.tiles if isinstance(tile, Tile)]
        return [(root(source.file), source.name) for source in copies]
    if tensor.source is None or tensor.source_file is None:
        return []
    return [(root(tensor.source_file), tensor.source)]


def check_accounts(
    reader: ManifestReader,
    roots: Sequence[Path],
    survey: Callable[[Path], Mapping[str, Sized]],
    fault: Fault,
) -> bool:
    """Whether every source file could be read; a tensor of the source that is neither kept nor dropped is a fault.

    Of a further source (`graft`) only what was taken came in.
    """
    sizes: list[dict[str, int]] = [{} for _ in roots]
    chosen = {
        tensor.source: reader.head.sources[tensor.source_file].name
        for tensor in reader.tensors()
        if tensor.source is not None and tensor.source_file is not None
    }
    for source in reader.head.sources:
        try:
            places = survey(roots[source.root] / source.name)
        except OSError as error:
            fault("not-the-source", f"{source.name}: {error.strerror}", source.name, None)
            return False
        for name, place in places.items():
            # Of a tensor in two files, the one that the output was made from counts.
            if name not in sizes[source.root] or chosen.get(name) == source.name:
                sizes[source.root][name] = place.nbytes
    if len(roots) > 1:
        named = set(_named(reader))
        for root in range(1, len(roots)):
            sizes[root] = {name: nbytes for name, nbytes in sizes[root].items() if (root, name) in named}
    totals = reader.head.totals
    found = (sum(map(len, sizes)), sum(sum(each.values()) for each in sizes))
    if found != (totals.tensors_in, totals.nbytes_in):
        fault(
            "accounting",
            f"the source has {found[0]} tensors of {found[1]} bytes; the manifest accounts for "
            f"{totals.tensors_in} of {totals.nbytes_in}",
            MANIFEST_NAME,
            None,
        )
    for tensor in reader.tensors():
        for root, name in sources_of(reader, tensor):
            sizes[root].pop(name, None)
    for dropped in reader.dropped():
        nbytes = sizes[dropped.root].pop(dropped.tensor, None) if dropped.root < len(sizes) else None
        if nbytes != dropped.nbytes:
            why = "it is kept, or is no tensor of it" if nbytes is None else f"there it has {nbytes} bytes"
            what = f"{dropped.tensor}, {dropped.nbytes} bytes, is listed as dropped from the source: {why}"
            fault("accounting", what, MANIFEST_NAME, dropped.tensor)
    for name in (name for each in sizes for name in each):
        what = f"{name} of the source is neither kept nor dropped: it has vanished"
        fault("vanished-tensor", what, MANIFEST_NAME, name)
    return True


def _named(reader: ManifestReader) -> Iterator[tuple[int, str]]:
    """Root and name of every source tensor that the manifest speaks of."""
    for tensor in reader.tensors():
        yield from sources_of(reader, tensor)
    for dropped in reader.dropped():
        yield dropped.root, dropped.tensor


def check_maps(reader: ManifestReader, fault: Fault) -> None:
    """A tensor of an expert comes from the expert of the source that the manifest's expert map names. Names that a
    rename changed are no matter of the maps."""
    experts = reader.head.experts
    if not experts:
        return
    for tensor in reader.tensors():
        new, old = _EXPERT.match(tensor.name), _EXPERT.match(tensor.source or "")
        if new is None or old is None or new["rest"] != old["rest"] or old["layer"] not in experts:
            continue
        ids = experts[old["layer"]]
        place = int(new["id"])
        if place >= len(ids) or ids[place] != int(old["id"]):
            wanted = f"expert {ids[place]}" if place < len(ids) else "no expert"
            what = f"{tensor.name} comes from {tensor.source}; the map of {old['layer']} says {wanted}"
            fault("expert-map", what, MANIFEST_NAME, tensor.name)
