"""The executor against numpy: any tiling, any dtype width, small buffers, several workers, checks."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surgery import tensor as algebra
from surgery.draft import SourceFile
from surgery.errors import SourceError
from surgery.execute import Options, execute
from surgery.plan_check import check_plan
from surgery.plan_types import PLAN_FORMAT, Check, Plan, PlannedFile, PlannedTensor, Totals
from surgery.safetensors_file import build_header, read_header
from surgery.tiling import Tile, tiling, whole_source

WIDTHS = {"U8": 1, "I16": 2, "F32": 4, "I64": 8}


def write_file(path: Path, arrays: dict[str, tuple[str, np.ndarray]]) -> None:
    """A safetensors file with raw little-endian bytes of each array under the dtype named."""
    header, placed = build_header([(n, d, a.shape) for n, (d, a) in arrays.items()], {"format": "pt"})
    with path.open("wb") as file:
        file.write(header)
        for name, _ in placed:
            file.write(np.ascontiguousarray(arrays[name][1]).tobytes())


def plan_of(root: Path, names: list[str], outputs: dict[str, object], checks=(), per_file=2) -> Plan:
    sources = []
    for number, name in enumerate(names):
        header = read_header(root / name, number)
        sources.append(SourceFile(0, name, header.file_nbytes, header.data_offset, header.digest))
    contents = list(outputs.items())
    files = []
    for start in range(0, len(contents), per_file):
        chunk = dict(contents[start : start + per_file])
        header, placed = build_header([(n, c.dtype, c.shape) for n, c in chunk.items()], {})
        tensors = tuple(
            PlannedTensor(n, whole=whole_source(chunk[n]))
            if whole_source(chunk[n])
            else PlannedTensor(n, tiling=tiling(chunk[n]))
            for n, _ in placed
        )
        nbytes = len(header) + sum(t.nbytes for t in tensors)
        files.append(PlannedFile(f"part-{start}.safetensors", nbytes, tensors))
    plan = Plan(
        format=PLAN_FORMAT,
        tool="test",
        roots=(str(root),),
        recipe=(),
        sources=tuple(sources),
        metadata={},
        index="model.safetensors.index.json" if len(files) > 1 else None,
        files=tuple(files),
        side_files=(),
        checks=tuple(checks),
        dropped=(),
        layers={},
        config_changes=(),
        decisions=(),
        totals=Totals(0, 0, 0, 0, 0, 0, len(outputs), 0),
    )
    check_plan(plan)
    return plan


def read_back(out: Path, dtype_width: dict[str, int]) -> dict[str, np.ndarray]:
    found = {}
    for path in sorted(out.glob("*.safetensors")):
        for tensor in read_header(path).tensors:
            data = path.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
            found[tensor.name] = np.frombuffer(data, f"u{dtype_width[tensor.dtype]}").reshape(tensor.shape)
    return found


@st.composite
def jobs(draw):
    """Sources in two files and outputs that share them: ranks, merges, transposes, repeats, pads."""
    dtype = draw(st.sampled_from(sorted(WIDTHS)))
    width = WIDTHS[dtype]
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows, columns = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    arrays = {
        name: generator.integers(0, 2 ** (8 * width), (rows, columns), dtype=f"u{width}", endpoint=False)
        for name in ("a", "b", "c")
    }
    steps = draw(st.lists(st.sampled_from("csrtkmpi"), min_size=1, max_size=4))
    return dtype, width, arrays, steps, draw(st.integers(1, 4))


def outputs_of(dtype, width, arrays, steps, ranks, stored):
    """Output contents and what numpy says they are."""
    contents, expected = {}, {}

    def put(name, content, array):
        contents[name], expected[name] = content, array

    rows, columns = arrays["a"].shape
    for number, step in enumerate(steps):
        a, b = stored["a"], stored["b"]
        if step == "c":
            put(f"{number}.copy", a, arrays["a"])
        elif step == "s":
            for rank, part in enumerate(np.array_split(np.arange(columns), ranks)):
                if len(part):
                    cut = algebra.narrow(a, 1, int(part[0]), len(part))
                    put(f"{number}.rank{rank}", cut, arrays["a"][:, part])
        elif step == "m":
            put(f"{number}.merge", algebra.concat([a, b], 1), np.concatenate([arrays["a"], arrays["b"]], 1))
        elif step == "r":
            order = list(range(rows))[::-1]
            put(f"{number}.reverse", algebra.take(a, 0, order), arrays["a"][order])
        elif step == "t":
            put(f"{number}.transpose", algebra.transpose(b, (1, 0)), arrays["b"].T)
        elif step == "k":
            put(f"{number}.stack", algebra.stack([a, b, a], 1), np.stack([arrays[x] for x in "aba"], 1))
        elif step == "p":
            padded = algebra.pad(stored["c"], 1, 1, 2, b"\x05" * width)
            fill = int.from_bytes(b"\x05" * width, "little")
            put(f"{number}.pad", padded, np.pad(arrays["c"], ((0, 0), (1, 2)), constant_values=fill))
        elif step == "i":
            pair = algebra.reshape(algebra.stack([a, b], 1), (2 * rows, columns))
            put(f"{number}.interleave", pair, np.stack([arrays["a"], arrays["b"]], 1).reshape(-1, columns))
    return contents, expected


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(jobs(), st.sampled_from([64, 300, 1 << 20]), st.integers(1, 3))
def test_any_tiling_comes_out_as_numpy_says(tmp_path_factory, job, buffer_nbytes, workers):
    dtype, width, arrays, steps, ranks = job
    root = tmp_path_factory.mktemp("job")
    source = root / "source"
    source.mkdir()
    write_file(source / "one.safetensors", {"a": (dtype, arrays["a"]), "c": (dtype, arrays["c"])})
    write_file(source / "two.safetensors", {"b": (dtype, arrays["b"])})
    names = ["one.safetensors", "two.safetensors"]
    stored = {t.name: t for n, f in enumerate(names) for t in read_header(source / f, n).tensors}
    contents, expected = outputs_of(dtype, width, arrays, steps, ranks, stored)
    plan = plan_of(source, names, contents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("surgery.engine.worker.MIN_MEMORY_NBYTES", buffer_nbytes * workers)
        execute(plan, root / "out", Options(workers=workers, memory_nbytes=1, readback=True))
    found = read_back(root / "out", WIDTHS)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].shape == array.shape, name
        assert (found[name] == array).all(), name


def two_files(root: Path, rows=300, columns=256):
    source = root / "source"
    source.mkdir()
    generator = np.random.default_rng(0)
    first = generator.integers(0, 256, (rows, columns), dtype="u1")
    write_file(source / "one.safetensors", {"a": ("U8", first), "z": ("U8", np.zeros((8, 4), "u1"))})
    write_file(source / "two.safetensors", {"b": ("U8", first.copy())})
    names = ["one.safetensors", "two.safetensors"]
    return source, names, {t.name: t for n, f in enumerate(names) for t in read_header(source / f, n).tensors}


@pytest.mark.parametrize("buffer_nbytes", [512, 1 << 20])
def test_replicas_and_constants_are_checked_while_they_stream(tmp_path, monkeypatch, buffer_nbytes):
    source, names, stored = two_files(tmp_path)
    monkeypatch.setattr("surgery.engine.worker.MIN_MEMORY_NBYTES", buffer_nbytes)
    checks = [
        Check("equal", tiling(stored["b"]).tiles[0], tensor="a"),
        Check("constant", tiling(stored["z"]).tiles[0], element="00"),
    ]
    plan = plan_of(source, names, {"a": stored["a"]}, checks)
    execute(plan, tmp_path / "good", Options(workers=1, memory_nbytes=1))
    assert (read_back(tmp_path / "good", WIDTHS)["a"] == read_back(source, WIDTHS)["a"]).all()

    data = bytearray((source / "two.safetensors").read_bytes())
    data[-5] ^= 1
    (source / "two.safetensors").write_bytes(data)
    with pytest.raises(SourceError, match="differ"):
        execute(plan, tmp_path / "bad", Options(workers=1, memory_nbytes=1))
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize("cut", ["columns", "transpose"])
def test_comparisons_work_where_the_copy_comes_in_another_order(tmp_path, monkeypatch, cut):
    source, names, stored = two_files(tmp_path)
    monkeypatch.setattr("surgery.engine.worker.MIN_MEMORY_NBYTES", 2000)
    whole = stored["a"]
    if cut == "columns":
        content = algebra.narrow(whole, 1, 8, 64)
        tile = algebra.narrow(stored["b"], 1, 8, 64).tiles[0]
    else:
        content = algebra.transpose(whole, (1, 0))
        tile = algebra.transpose(stored["b"], (1, 0)).tiles[0]
    plan = plan_of(source, names, {"x": content}, [Check("equal", tile, tensor="x")])
    execute(plan, tmp_path / "good", Options(workers=1, memory_nbytes=1, readback=True))
    data = bytearray((source / "two.safetensors").read_bytes())
    data[-256 + 9] ^= 1
    (source / "two.safetensors").write_bytes(data)
    with pytest.raises(SourceError, match="differ"):
        execute(plan, tmp_path / "bad", Options(workers=1, memory_nbytes=1))


def test_a_constant_that_is_none_is_named(tmp_path):
    source, names, stored = two_files(tmp_path)
    data = bytearray((source / "one.safetensors").read_bytes())
    data[-1] = 1
    (source / "one.safetensors").write_bytes(data)
    check = Check("constant", tiling(stored["z"]).tiles[0], element="00")
    with pytest.raises(SourceError, match=r"z: not every element is 00"):
        execute(plan_of(source, names, {"a": stored["a"]}, [check]), tmp_path / "out")


def test_a_column_split_reads_each_source_byte_once(tmp_path, monkeypatch):
    source, names, stored = two_files(tmp_path, rows=1000)
    reads = []
    from surgery.engine.reading import SourceRange

    fill = SourceRange.fill
    monkeypatch.setattr(SourceRange, "fill", lambda self, into, at: (reads.append(len(into)), fill(self, into, at)))
    monkeypatch.setattr("surgery.engine.worker.MIN_MEMORY_NBYTES", 1 << 14)
    ranks = {f"r{rank}": algebra.narrow(stored["a"], 1, rank * 64, 64) for rank in range(4)}
    execute(plan_of(source, names, ranks), tmp_path / "out", Options(workers=1, memory_nbytes=1))
    assert sum(reads) == math.prod(stored["a"].shape)


def test_a_row_slice_of_a_wide_tensor_does_not_read_the_rest(tmp_path, monkeypatch):
    source, names, stored = two_files(tmp_path, rows=4, columns=1 << 20)
    reads = []
    from surgery.engine.reading import SourceRange

    fill = SourceRange.fill
    monkeypatch.setattr(SourceRange, "fill", lambda self, into, at: (reads.append(len(into)), fill(self, into, at)))
    part = algebra.narrow(stored["a"], 1, 0, 1 << 17)
    execute(plan_of(source, names, {"x": part}), tmp_path / "out", Options(workers=1))
    assert sum(reads) == part.nbytes


def test_the_element_of_a_tile_is_bound_by_its_source(tmp_path):
    source, names, stored = two_files(tmp_path)
    outside = Tile(stored["a"], 10, (256, 1), (0, 0), (300, 256))
    with pytest.raises(Exception, match="reads element"):
        plan_of(source, names, {"x": algebra.Tiling("U8", (300, 256), (outside,))})
