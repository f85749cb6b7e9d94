"""The source proof of tensors that are put together from pieces: any tiling, any dtype, damage in either side."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from surgery import tensor as algebra
from surgery.checkpoint import Checkpoint
from surgery.draft import draft_of, with_tensors
from surgery.errors import CannotApply
from surgery.execute import execute
from surgery.plan import make_plan
from surgery.safetensors_file import StoredTensor, build_header, read_header, tensor_nbytes
from surgery.tiling import Content, Fill, Tile, Tiling
from surgery.verify import verify
from surgery.verifying import source_tiles
from surgery.verifying.source_tiles import coverage_fault

DTYPES = {"F32": 32, "BF16": 16, "F8_E4M3": 8, "C64": 64, "F4": 4, "F6_E2M3": 6}


def write_source(directory: Path, dtype: str, shape: tuple[int, ...], names: str = "abc") -> Path:
    """One tensor a file, random bytes."""
    directory.mkdir()
    random = np.random.default_rng(len(shape))
    weight_map = {}
    for number, name in enumerate(names):
        file = f"model-{number + 1:05d}-of-{len(names):05d}.safetensors"
        header, _ = build_header([(name, dtype, shape)], {"format": "pt"})
        (directory / file).write_bytes(header + random.bytes(tensor_nbytes(dtype, shape)))
        weight_map[name] = file
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text('{"model_type": "made of pieces"}')
    return directory


def write_output(source: Path, out: Path, contents: dict[str, Content]) -> Path:
    draft = draft_of(Checkpoint.open(source))
    assert draft.tensors.keys() == set("abc")
    execute(make_plan(with_tensors(draft, contents, dict.fromkeys(draft.tensors, "not wanted"))), out)
    return out


@st.composite
def contents(draw: st.DrawFn, stored: dict[str, StoredTensor], element: bytes) -> Content:
    """A tensor made of `stored` by some steps of the algebra; a step that the dtype forbids is left out."""
    content: Content = stored["a"]
    for step in draw(st.lists(st.sampled_from(["narrow", "take", "concat", "stack", "pad", "transpose", "reshape"]))):
        shape = content.shape
        axis = draw(st.integers(0, len(shape) - 1))
        try:
            if step == "narrow":
                start = draw(st.integers(0, shape[axis] - 1))
                content = algebra.narrow(content, axis, start, draw(st.integers(1, shape[axis] - start)))
            elif step == "take":
                indices = st.lists(st.integers(0, shape[axis] - 1), min_size=1, max_size=6)
                content = algebra.take(content, axis, draw(indices))
            elif step in ("concat", "stack") and math.prod(shape) < 4000:
                other = stored["b"] if shape == stored["b"].shape else content
                content = getattr(algebra, step)([content, other, content], axis)
            elif step == "pad":
                content = algebra.pad(content, axis, draw(st.integers(0, 4)), draw(st.integers(0, 4)), element)
            elif step == "transpose":
                content = algebra.transpose(content, draw(st.permutations(range(len(shape)))))
            elif step == "reshape":
                content = algebra.reshape(content, (math.prod(shape),))
        except CannotApply:
            continue
    return content


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), dtype=st.sampled_from(sorted(DTYPES)), block=st.sampled_from([16, 200, 4 << 20]))
def test_any_tiling_is_proven_and_a_flipped_bit_of_it_is_found(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, dtype: str, block: int
) -> None:
    root = tmp_path_factory.mktemp("proof")
    shape = data.draw(st.sampled_from([(8, 8), (4, 12), (3, 4, 8), (64,)]))
    source = write_source(root / "source", dtype, shape)
    stored = Checkpoint.open(source).tensors
    element = {"F4": b"\x21", "F6_E2M3": b"\x01\x02\x03"}.get(dtype, bytes(range(1, DTYPES[dtype] // 8 + 1)))
    made = {f"t{number}": data.draw(contents(stored, element)) for number in range(2)}
    assume(all(math.prod(content.shape) * DTYPES[dtype] % 8 == 0 for content in made.values()))
    try:
        out = write_output(source, root / "out", made)
    except CannotApply:
        assume(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_tiles, "BLOCK_NBYTES", block)
        patch.setattr(source_tiles, "_SMALL_SPAN_NBYTES", min(block, 64 << 10))
        sound = verify(out, against=source)
        assert not [finding for finding in sound.findings if finding.severity == "fault"]
        assert sound.source_proof is not None
        assert sound.source_proof.tensors == len(made)
        (path,) = out.glob("*.safetensors")
        tensor = data.draw(st.sampled_from(read_header(path).tensors))
        assume(tensor.nbytes)
        raw = bytearray(path.read_bytes())
        raw[tensor.offset + data.draw(st.integers(0, tensor.nbytes - 1))] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(raw)
        report = verify(out, against=source)
    for kind in ("tensor-bytes", "source-bytes"):
        assert [finding.tensor for finding in report.findings if finding.kind == kind] == [tensor.name]


def test_a_source_that_changed_under_a_column_cut_is_found(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", "BF16", (16, 16))
    stored = Checkpoint.open(source).tensors
    left = algebra.narrow(stored["a"], 1, 0, 4)
    out = write_output(source, tmp_path / "out", {"left": left})
    path = source / "model-00001-of-00003.safetensors"
    raw = bytearray(path.read_bytes())
    raw[stored["a"].offset + 2 * (16 * 5 + 7)] ^= 1  # Row 5, column 7: not in the cut.
    path.write_bytes(raw)
    assert not verify(out, against=source).failed
    raw[stored["a"].offset + 2 * (16 * 5 + 3)] ^= 1
    path.write_bytes(raw)
    report = verify(out, against=source)
    assert [finding.tensor for finding in report.findings] == ["left"]
    assert report.integrity.verdict == "passed"


def test_large_transposes_and_columns_are_compared_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block that is read at once stays within the bound, however the bytes lie."""
    source = write_source(tmp_path / "source", "BF16", (1500, 1100))
    stored = Checkpoint.open(source).tensors
    made: dict[str, Content] = {
        "transposed": algebra.transpose(stored["a"], (1, 0)),
        "columns": algebra.narrow(stored["b"], 1, 3, 7),
        "eighths": algebra.take(stored["c"], 1, range(0, 1100, 8)),
    }
    out = write_output(source, tmp_path / "out", made)
    block = 1 << 16
    monkeypatch.setattr(source_tiles, "BLOCK_NBYTES", block)
    read = source_tiles.ByteFile.read
    largest = 0

    def noted(self: source_tiles.ByteFile, start: int, nbytes: int) -> Any:
        nonlocal largest
        largest = max(largest, nbytes)
        return read(self, start, nbytes)

    monkeypatch.setattr(source_tiles.ByteFile, "read", noted)
    assert not verify(out, against=source).findings
    assert largest <= 4 * block


def tile(offset: tuple[int, ...], shape: tuple[int, ...]) -> Tile:
    return Tile(StoredTensor("a", "F32", (9, 9), 0, 0), 0, (9, 1), offset, shape)


@pytest.mark.parametrize(
    ("tiles", "told"),
    [
        ((tile((0, 0), (4, 4)),), None),
        ((tile((0, 0), (4, 2)), tile((0, 2), (3, 2)), Fill("00000000", (3, 2), (1, 2))), None),
        ((), "exactly once"),
        ((tile((0, 0), (4, 3)),), "exactly once"),
        ((tile((0, 0), (4, 4)), tile((1, 1), (1, 1))), "exactly once"),
        ((tile((0, 0), (4, 3)), tile((0, 2), (4, 1))), "exactly once"),
        ((tile((0, 0), (5, 4)),), "out of the tensor"),
        ((tile((0,), (4,)),), "number of axes"),
    ],
)
def test_boxes_cover_every_element_exactly_once_or_the_fault_is_told(tiles: tuple[Any, ...], told: str | None) -> None:
    fault = coverage_fault(Tiling("F32", (4, 4), tiles))
    assert fault is None if told is None else fault is not None and told in fault
