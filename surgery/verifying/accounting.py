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


def sources_of(tensor: ManifestTensor) -> list[tuple[int, str]]:
    """Source file and name of every stored tensor that `tensor` takes bytes from."""
    if tensor.tiling is not None:
        return [(tile.source.file, tile.source.name) for tile in tensor.tiling.tiles if isinstance(tile, Tile)]
    if tensor.source is None or tensor.source_file is None:
        return []
    return [(tensor.source_file, tensor.source)]


def check_accounts(
    reader: ManifestReader,
    roots: Sequence[Path],
    survey: Callable[[Path], Mapping[str, Sized]],
    fault: Fault,
) -> bool:
    """Whether every source file could be read; a tensor of the source that is neither kept nor dropped is a fault.

    Of a further source (`graft`) only what was taken came in. Of a tensor in two storage shards one counts, of rank
    files each.
    """
    sizes: list[dict[str, int]] = []
    for source in reader.head.sources:
        try:
            places = survey(roots[source.root] / source.name)
        except OSError as error:
            fault("not-the-source", f"{source.name}: {error.strerror}", source.name, None)
            return False
        sizes.append({name: place.nbytes for name, place in places.items()})
    _leave_out(reader, sizes)
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
        for file, name in sources_of(tensor):
            if 0 <= file < len(sizes):
                sizes[file].pop(name, None)
    for dropped in reader.dropped():
        nbytes = sizes[dropped.file].pop(dropped.tensor, None) if 0 <= dropped.file < len(sizes) else None
        if nbytes != dropped.nbytes:
            why = "it is kept, or is no tensor of it" if nbytes is None else f"there it has {nbytes} bytes"
            what = f"{dropped.tensor}, {dropped.nbytes} bytes, is listed as dropped from the source: {why}"
            fault("accounting", what, MANIFEST_NAME, dropped.tensor)
    for name in (name for each in sizes for name in each):
        what = f"{name} of the source is neither kept nor dropped: it has vanished"
        fault("vanished-tensor", what, MANIFEST_NAME, name)
    return True


def _leave_out(reader: ManifestReader, sizes: list[dict[str, int]]) -> None:
    """Tensors that never came in: the other copy of one that is there twice, and what was not taken of a further
    source."""
    files = reader.head.sources
    seen: dict[str, int] = {}
    twice: set[str] = set()
    if not reader.head.ranks:
        for file, each in enumerate(sizes):
            for name in each if not files[file].root else ():
                if name in seen:
                    twice.add(name)
                seen[name] = file
    del seen
    further = {file for file, source in enumerate(files) if source.root}
    if not twice and not further:
        return
    named = {(file, name) for file, name in _named(reader) if name in twice or file in further}
    for file, each in enumerate(sizes):
        for name in [name for name in each if (file in further or name in twice) and (file, name) not in named]:
            # A tensor that nobody speaks of has vanished, in whichever file.
            if file in further or any((other, name) in named for other in range(len(sizes))):
                del each[name]


def _named(reader: ManifestReader) -> Iterator[tuple[int, str]]:
    """Source file and name of every tensor that the manifest speaks of."""
    for tensor in reader.tensors():
        yield from sources_of(tensor)
    for dropped in reader.dropped():
        yield dropped.file, dropped.tensor


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
