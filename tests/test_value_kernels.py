"""The few true computations of a plan against numpy and torch, by the executor and by the verifier."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from surgery.checkpoint import Checkpoint
from surgery.draft import draft_of, with_tensors
from surgery.errors import CannotApply, SourceError
from surgery.execute import Options, execute
from surgery.plan import make_plan
from surgery.plan_file import decode_plan, write_plan
from surgery.tensor import computed, concat, narrow, pad, take, transpose
from surgery.tiling import Remap, Widen
from surgery.value_kernels import computed_bytes
from surgery.verify import verify


def source_of(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text('{"model_type": "made of pieces"}')
    return directory


def written(source: Path, out: Path, make, **options) -> Path:
    draft = draft_of(Checkpoint.open(source))
    contents = make(draft.tensors)
    plan = make_plan(with_tensors(draft, contents, dict.fromkeys(draft.tensors, "not wanted")))
    import io

    file = io.BytesIO()
    write_plan(plan, file)
    execute(decode_plan(file.getvalue(), "plan"), out, Options(**options))
    return out


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_ids_are_remapped_in_any_cut_of_a_table(tmp_path_factory, data):
    tmp_path = tmp_path_factory.mktemp("remap")
    rows, columns = data.draw(st.integers(1, 700)), data.draw(st.integers(1, 5))
    table = data.draw(st.permutations(range(9)))
    ids = np.random.default_rng(rows).integers(0, 9, (rows, columns))
    source = source_of(tmp_path / "source", {"ids": torch.tensor(ids)})
    chosen = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=9))

    def make(tensors):
        made = computed(tensors["ids"], Remap(tuple(table)))
        return {"taken": take(made, 0, chosen), "turned": transpose(made, (1, 0)), "twice": concat([made, made], 1)}

    out = written(source, tmp_path / "out", make, memory_nbytes=1 << 20, workers=data.draw(st.integers(1, 2)))
    new = np.asarray(table)[ids]
    held = load_file(out / "model.safetensors")
    assert np.array_equal(held["taken"], new[chosen])
    assert np.array_equal(held["turned"], new.T)
    assert np.array_equal(held["twice"], np.concatenate([new, new], 1))
    assert not verify(out, against=source).failed


def test_a_wrong_id_in_the_output_is_found_by_the_proof(tmp_path):
    source = source_of(tmp_path / "source", {"ids": torch.tensor([[0, 1], [1, 2]])})
    out = written(source, tmp_path / "out", lambda held: {"ids": computed(held["ids"], Remap((2, 0, 1)))})
    assert not verify(out, against=source).failed
    path = out / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-8] = 2
    path.write_bytes(data)
    report = verify(out, against=source)
    assert report.source_proof is not None
    assert report.source_proof.verdict == "failed"


def test_an_id_without_a_new_one_stops_the_job_and_nothing_is_published(tmp_path):
    source = source_of(tmp_path / "source", {"ids": torch.tensor([0, 3])})
    with pytest.raises(SourceError, match="an id that has no new one"):
        written(source, tmp_path / "out", lambda held: {"ids": computed(held["ids"], Remap((0, 1, 2, -1)))})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("stored", "torch_stored", "dtype", "torch_dtype"),
    [
        ("BF16", torch.bfloat16, "F32", torch.float32),
        ("F16", torch.float16, "F32", torch.float32),
        ("F8_E8M0", torch.float8_e8m0fnu, "F32", torch.float32),
        ("F8_E8M0", torch.float8_e8m0fnu, "BF16", torch.bfloat16),
        ("BF16", torch.bfloat16, "F64", torch.float64),
        ("F16", torch.float16, "F64", torch.float64),
    ],
)
def test_widened_floats_are_torchs(stored, torch_stored, dtype, torch_dtype, tmp_path):
    every = np.arange(1 << (8 if stored == "F8_E8M0" else 16), dtype="u1" if stored == "F8_E8M0" else "<u2")
    wanted = torch.from_numpy(every.copy()).view(torch_stored).to(torch_dtype)
    made = computed_bytes(Widen(stored), dtype, memoryview(every.tobytes()), "t")
    got = torch.frombuffer(bytearray(made), dtype=torch_dtype)
    assert torch.equal(torch.isnan(got), torch.isnan(wanted))
    # Which NaN it is nobody promises.
    assert torch.equal(got[~torch.isnan(got)], wanted[~torch.isnan(wanted)])
    finite = torch.from_numpy(every.copy()).view(torch_stored)[~torch.isnan(wanted)]
    source = source_of(tmp_path / "source", {"t": finite.reshape(-1)})
    out = written(source, tmp_path / "out", lambda held: {"t": computed(held["t"], Widen(stored), dtype)})
    with safe_open(out / "model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("t"), wanted[~torch.isnan(wanted)])
    assert not verify(out, against=source).failed


def test_what_is_no_computation_without_loss_is_refused(tmp_path):
    source = source_of(tmp_path / "source", {"t": torch.zeros(4), "i": torch.zeros(4, dtype=torch.int64)})
    for make in (
        lambda held: {"t": computed(held["t"], Widen("F32"), "BF16")},
        lambda held: {"t": computed(held["t"], Remap((0,)))},
        lambda held: {"i": computed(held["i"], Remap((-2,)))},
        lambda held: {"i": pad(computed(held["i"], Remap((0,))), 0, 0, 1, bytes(8))},
        lambda held: {"i": concat([computed(held["i"], Remap((0,))), narrow(held["i"], 0, 0, 1)])},
        lambda held: {"i": computed(computed(held["i"], Remap((0,))), Remap((0,)))},
    ):
        with pytest.raises(CannotApply):
            written(source, tmp_path / "no", make)
        assert not (tmp_path / "no").exists()


def test_a_plan_without_computations_does_not_speak_of_them(tmp_path):
    source = source_of(tmp_path / "source", {"t": torch.zeros(4, 2)})
    out = written(source, tmp_path / "out", lambda held: {"t": narrow(held["t"], 0, 1, 2)})
    assert "kernel" not in (out / "surgery.json").read_text()
    assert json.loads((out / "surgery.json").read_text())["tensors"][0]["tiling"]
