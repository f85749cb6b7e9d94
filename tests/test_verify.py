"""`verify`: a sound output passes, and whatever is damaged afterwards is found and named."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from surgery.checkpoint import Checkpoint
from surgery.draft import draft_of
from surgery.errors import SourceError, UsageError
from surgery.execute import execute
from surgery.operations.recipe import run_recipe
from surgery.operations.rename import Rename
from surgery.operations.repack import Repack
from surgery.operations.trim import Trim
from surgery.plan import make_plan
from surgery.safetensors_file import read_header
from surgery.verify import Report, report_text, sums, verify

HIDDEN, VOCABULARY, EXPERTS = 4, 8, 3
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": HIDDEN,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
}
MOE: dict[str, Any] = {**LLAMA, "model_type": "qwen3_moe", "num_experts": EXPERTS, "decoder_sparse_step": 1}


def llama_tensors(layers: int = 4) -> dict[str, np.ndarray[Any, Any]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(layers):
        shapes[f"model.layers.{layer}.self_attn.q_proj.weight"] = (HIDDEN, HIDDEN)
        shapes[f"model.layers.{layer}.input_layernorm.weight"] = (HIDDEN,)
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def moe_tensors(layers: int = 4) -> dict[str, np.ndarray[Any, Any]]:
    tensors = llama_tensors(layers)
    random = np.random.default_rng(1)
    for layer in range(layers):
        mlp = f"model.layers.{layer}.mlp"
        tensors[f"{mlp}.gate.weight"] = random.standard_normal((EXPERTS, HIDDEN)).astype(np.float32)
        for expert in range(EXPERTS):
            weight = random.standard_normal((2, HIDDEN)).astype(np.float32)
            tensors[f"{mlp}.experts.{expert}.up_proj.weight"] = weight
    return tensors


def write_model(
    directory: Path, tensors: dict[str, np.ndarray[Any, Any]], config: dict[str, Any] | None, shards: int = 2
) -> Path:
    directory.mkdir(parents=True)
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        held = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in held}, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(held, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    (directory / "README.md").write_text("The publisher's card.\n")
    return directory


def run(source: Path, out: Path, *operations: Any) -> Path:
    execute(make_plan(run_recipe(draft_of(Checkpoint.open(source)), operations)), out)
    return out


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("verify") / "source", moe_tensors(), MOE)


@pytest.fixture(scope="module")
def output(source: Path) -> Path:
    """Layers 0, 3, 3 in several shards."""
    return run(source, source.parent / "output", Trim("0,3,3"), Repack("400B"))


@pytest.fixture
def damaged(output: Path, tmp_path: Path) -> Path:
    """A copy of the output to be damaged."""
    return Path(shutil.copytree(output, tmp_path / "damaged"))


def flip(path: Path, position: int, mask: int = 0x01) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ mask]))


def kinds(report: Report, severity: str = "fault") -> set[str]:
    return {finding.kind for finding in report.findings if finding.severity == severity}


def names_file(report: Report, name: str) -> bool:
    return any(
        finding.severity == "fault" and (name in finding.where or name in finding.what) for finding in report.findings
    )


# ------------------------------------------------------------------------------------------- sound outputs


def test_a_sound_output_passes_and_says_what_it_was_not_asked(output: Path, source: Path) -> None:
    report = verify(output, against=source)
    assert not report.findings
    assert not report.failed
    assert (report.integrity.verdict, report.loading.verdict, report.runtime.verdict) == (
        "passed",
        "passed",
        "unverified",
    )
    assert report.runtime.not_looked_at == ["no engine was run"]
    proof = report.source_proof
    assert proof is not None
    assert (proof.verdict, proof.tensors, proof.share) == ("passed", report.counts.tensors, 1.0)
    assert report.counts.nbytes_expected == report.counts.nbytes_written == proof.nbytes


@pytest.mark.parametrize("family", ["llama", "llama_tied", "mistral", "qwen2", "qwen3", "qwen3_moe"])
def test_a_model_that_transformers_saved_passes_before_and_after_a_trim(
    family: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_model(family)
    before = verify(model)
    assert not before.failed
    assert before.loading.verdict == "passed"
    assert before.integrity.not_looked_at == ["tensor bytes: no manifest to compare with"]
    after = verify(run(model, tmp_path / "out", Trim("5,0,2")), against=model)
    assert not kinds(after)
    assert after.loading.verdict == "passed"


def test_repack_and_rename_are_proven_against_the_source(source: Path, tmp_path: Path) -> None:
    assert not verify(run(source, tmp_path / "repacked", Repack("500B")), against=source).findings
    renamed = verify(run(source, tmp_path / "renamed", Rename({"model": "decoder"})), against=source)
    assert not kinds(renamed)
    assert renamed.source_proof is not None
    assert renamed.source_proof.verdict == "passed"
    assert renamed.loading.verdict == "unverified"


def test_one_file_without_index_passes(source: Path, tmp_path: Path) -> None:
    out = run(source, tmp_path / "one", Trim("1"), Repack("1GB"))
    assert not (out / "model.safetensors.index.json").exists()
    assert not verify(out, against=source).findings


def test_a_report_is_json_and_a_page(output: Path, source: Path) -> None:
    report = verify(output, against=source)
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report
    page = report_text(report)
    assert "integrity: passed" in page
    assert "runtime: unverified" in page
    assert "source proof: passed" in page


def test_progress_hears_of_every_byte_once(output: Path, source: Path) -> None:
    class Heard:
        total = done = closed = 0

        def start(self, nbytes: int) -> None:
            self.total += nbytes

        def add(self, nbytes: int) -> None:
            self.done += nbytes

        def close(self) -> None:
            self.closed += 1

    heard = Heard()
    verify(output, against=source, progress=heard)
    assert (heard.done, heard.closed) == (heard.total, 1)
    assert heard.total > 0


# ------------------------------------------------------------------------------------------- damage


def test_one_flipped_byte_of_a_tensor_names_tensor_and_file(output: Path, damaged: Path, source: Path) -> None:
    for path in sorted(damaged.glob("*.safetensors")):
        for tensor in read_header(path).tensors:
            for position in (tensor.offset, tensor.offset + tensor.nbytes - 1):
                flip(path, position)
                report = verify(damaged, against=source)
                flip(path, position)
                assert report.integrity.verdict == "failed"
                told = [f for f in report.findings if f.kind == "tensor-bytes"]
                assert [(f.tensor, f.where) for f in told] == [(tensor.name, path.name)]
                assert report.source_proof is not None
                assert report.source_proof.verdict == "failed"
                assert tensor.name in {f.tensor for f in report.findings if f.kind == "source-bytes"}
    assert not verify(damaged).failed


def test_one_flipped_byte_in_any_region_of_any_file_is_found_and_the_file_named(damaged: Path) -> None:
    for path in sorted(damaged.iterdir()):
        size = path.stat().st_size
        for position in {0, size - 1, *range(0, size, max(1, size // 40))}:
            flip(path, position, 0x04)
            report = verify(damaged)
            flip(path, position, 0x04)
            assert report.integrity.verdict == "failed", (path.name, position)
            assert names_file(report, path.name), (path.name, position)
    assert not verify(damaged).failed


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_flipped_bits_anywhere_are_found(output: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(output.iterdir())))
    position = data.draw(st.integers(0, path.stat().st_size - 1))
    mask = data.draw(st.integers(1, 255))
    flip(path, position, mask)
    try:
        report = verify(output)
    finally:
        flip(path, position, mask)
    assert report.integrity.verdict == "failed"
    assert names_file(report, path.name)


def test_a_flipped_byte_in_the_padding_of_a_header_is_found(damaged: Path) -> None:
    for path in sorted(damaged.glob("*.safetensors")):
        last = read_header(path).data_offset - 1
        if path.read_bytes()[last : last + 1] == b" ":
            break
    else:
        pytest.fail("no header of the output is padded")
    raw = bytearray(path.read_bytes())
    raw[last] = ord("\n")  # The reference reads it, and so do we; only its hash tells.
    path.write_bytes(raw)
    report = verify(damaged)
    assert "header-bytes" in kinds(report)
    assert names_file(report, path.name)


def test_a_damaged_header_hides_no_damage_of_the_data(damaged: Path) -> None:
    path = min(damaged.glob("*.safetensors"))
    tensor = read_header(path).tensors[0]
    flip(path, 9)
    flip(path, tensor.offset)
    report = verify(damaged)
    assert {"header-bytes", "unreadable-file", "tensor-bytes"} <= kinds(report)
    assert {f.tensor for f in report.findings if f.kind == "tensor-bytes"} == {tensor.name}


def test_a_missing_file_is_named_with_the_number_of_its_tensors(damaged: Path) -> None:
    path = min(damaged.glob("*.safetensors"))
    count = len(read_header(path).tensors)
    path.unlink()
    (damaged / "tokenizer.json").unlink()
    told = {f.where: f.what for f in verify(damaged).findings if f.kind == "missing-file"}
    assert told.keys() == {path.name, "tokenizer.json"}
    assert f"{count} tensors" in told[path.name]


def test_a_truncated_file_names_the_tensors_that_lost_bytes(damaged: Path) -> None:
    path = max(damaged.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    last = read_header(path).tensors[-1]
    os.truncate(path, path.stat().st_size - 1)
    report = verify(damaged)
    assert {"file-size", "bytes-written", "tensor-bytes"} <= kinds(report)
    assert [f.tensor for f in report.findings if f.kind == "tensor-bytes"] == [last.name]
    assert report.counts.nbytes_written == (report.counts.nbytes_expected or 0) - 1


def test_weights_and_indexes_that_the_manifest_does_not_list_are_faults(damaged: Path) -> None:
    save_file({"w": np.zeros(2, np.float32)}, damaged / "extra.safetensors")
    (damaged / "pytorch_model.bin").write_bytes(b"x")
    (damaged / "nested").mkdir()
    (damaged / "nested" / "pytorch_model.bin.index.json").write_text("{}")
    (damaged / "notes.txt").write_text("mine")
    report = verify(damaged)
    assert {f.where for f in report.findings if f.kind == "surplus-file"} == {
        "extra.safetensors",
        "pytorch_model.bin",
        "nested/pytorch_model.bin.index.json",
    }
    assert [f.where for f in report.findings if f.kind == "foreign-file"] == ["notes.txt"]


def test_a_foreign_file_alone_is_a_note(damaged: Path) -> None:
    (damaged / "notes.txt").write_text("mine")
    report = verify(damaged)
    assert kinds(report, "note") == {"foreign-file"}
    assert not report.failed


def test_two_tensors_that_changed_places_are_both_named(damaged: Path) -> None:
    for path in sorted(damaged.glob("*.safetensors")):
        tensors = read_header(path).tensors
        pairs = [
            (a, b)
            for a in tensors
            for b in tensors
            if a.name < b.name and (a.dtype, a.shape) == (b.dtype, b.shape) and a.name[:16] == b.name[:16]
        ]
        if pairs:
            break
    else:
        pytest.fail("no two tensors of one shape share a file")
    first, second = pairs[0]
    raw = bytearray(path.read_bytes())
    a, b = (slice(t.offset, t.offset + t.nbytes) for t in (first, second))
    raw[a], raw[b] = raw[b], raw[a]
    path.write_bytes(raw)
    report = verify(damaged)
    assert {f.tensor for f in report.findings if f.kind == "tensor-bytes"} == {first.name, second.name}


# ------------------------------------------------------------------------------------------- the manifest


def rewrite_manifest(directory: Path, change: Callable[[str], str]) -> None:
    """Change the manifest's text and give it a right checksum again: damage that only its meaning shows."""
    path = directory / "surgery.json"
    body = path.read_text().rpartition(',\n"xxh3_128"')[0]
    changed = change(body)
    assert changed != body
    digest = xxhash.xxh3_128_hexdigest(changed.encode())
    path.write_text(f'{changed},\n"xxh3_128":"{digest}"}}\n')


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"tensors_out":', '"tensors_out":1', "tensors_out"),
        ('"nbytes_kept":', '"nbytes_kept":1', "nbytes_kept"),
        ('"tensors_dropped":', '"tensors_dropped":1', "tensors_dropped"),
        ('"model.layers.":[0,3,3]', '"model.layers.":[0,3,2]', "by the layer map"),
        ('"model.layers.":[0,3,3]', '"model.layers.":[0,3]', "the layer map has 2 layers"),
        ('"source":"model.norm.weight"', '"source":"lm_head.weight"', "by the layer map"),
        ('"format":1,', '"format":9,', "format 9"),
        ('"tokenizer.json":', '"../tokenizer.json":', "no plain path"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_found(damaged: Path, old: str, new: str, told: str) -> None:
    rewrite_manifest(damaged, lambda text: text.replace(old, new, 1))
    report = verify(damaged)
    assert any(told in f.what for f in report.findings if f.kind == "manifest")


def test_a_changed_checksum_in_the_manifest_names_the_tensor(damaged: Path) -> None:
    path = damaged / "surgery.json"
    line = next(n for n, text in enumerate(path.read_text().split("\n")) if '"model.norm.weight"' in text)
    position = len("\n".join(path.read_text().split("\n")[:line])) + path.read_text().split("\n")[line].index(
        '"xxh3_128":"'
    )
    raw = bytearray(path.read_bytes())
    at = position + 1 + len('"xxh3_128":"')
    raw[at : at + 1] = b"0" if raw[at : at + 1] != b"0" else b"1"
    path.write_bytes(raw)
    report = verify(damaged)
    assert {"manifest", "tensor-bytes"} <= kinds(report)
    assert {f.tensor for f in report.findings if f.kind == "tensor-bytes"} == {"model.norm.weight"}


@pytest.mark.parametrize("keep", [0, 1, 40, 400, -1, -3, -20, -60])
def test_a_manifest_cut_anywhere_is_damaged(damaged: Path, keep: int) -> None:
    path = damaged / "surgery.json"
    path.write_bytes(path.read_bytes()[:keep])
    report = verify(damaged)
    assert "manifest" in kinds(report)
    assert report.integrity.verdict == "failed"


def test_without_a_manifest_tensor_bytes_are_not_judged_and_nothing_is_proven(damaged: Path, source: Path) -> None:
    (damaged / "surgery.json").unlink()
    report = verify(damaged, against=source)
    assert report.integrity.verdict == "passed"
    assert report.integrity.not_looked_at == ["tensor bytes: no manifest to compare with"]
    assert report.source_proof is not None
    assert report.source_proof.verdict == "unverified"
    # A proof that was asked for and could not be made is no success.
    assert report.failed
    assert not verify(damaged).failed


def test_an_unfinished_output_is_a_fault(damaged: Path) -> None:
    (damaged / "surgery.json").unlink()
    (damaged / ".surgery-partial").mkdir()
    assert "not-finished" in kinds(verify(damaged))


@pytest.mark.parametrize("name", ["surgery.json", "config.json", "README.md"])
def test_no_file_of_an_output_can_make_verify_wait(damaged: Path, source: Path, name: str) -> None:
    (damaged / name).unlink()
    os.mkfifo(damaged / name)
    report = verify(damaged, against=source)
    assert report.integrity.verdict == "failed"
    assert names_file(report, name)


def test_a_link_out_of_the_output_is_told_though_its_bytes_are_right(damaged: Path, output: Path) -> None:
    path = min(damaged.glob("*.safetensors"))
    path.unlink()
    path.symlink_to(output / path.name)
    report = verify(damaged)
    assert report.integrity.verdict == "failed"
    assert "tensor-bytes" not in kinds(report)
    assert any("outside the checkpoint" in f.what and f.where == path.name for f in report.findings)


def test_where_there_is_no_directory_the_reason_is_told(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such directory"):
        verify(tmp_path / "nowhere")
    (tmp_path / ".out.surgery-partial").mkdir()
    with pytest.raises(SourceError, match="not finished"):
        verify(tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(SourceError, match="not a directory"):
        verify(tmp_path / "file")


# ------------------------------------------------------------------------------------------- source proof


def test_another_source_is_told_apart(output: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", {**moe_tensors(), "extra": np.zeros(3, np.float32)}, MOE)
    report = verify(output, against=other)
    assert "not-the-source" in kinds(report)
    assert report.integrity.verdict == "passed"
    assert report.failed


def test_a_source_with_the_same_headers_and_other_bytes_is_found(output: Path, source: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(source, tmp_path / "other"))
    tensor, path = next(
        (tensor, path)
        for path in other.glob("*.safetensors")
        for tensor in read_header(path).tensors
        if tensor.name == "lm_head.weight"
    )
    flip(path, tensor.offset + 7)
    report = verify(output, against=other)
    told = [f for f in report.findings if f.kind == "source-bytes"]
    assert [f.tensor for f in told] == ["lm_head.weight"]
    assert "from its byte 7 on" in told[0].what


def test_a_tensor_that_vanished_is_found(damaged: Path, source: Path) -> None:
    line = next(
        text for text in (damaged / "surgery.json").read_text().split("\n") if '"tensor":"model.layers.1.' in text
    )
    rewrite_manifest(damaged, lambda text: text.replace(line + "\n", "", 1))
    report = verify(damaged, against=source)
    assert "vanished-tensor" in kinds(report)


def test_a_config_change_that_is_not_recorded_is_found(damaged: Path, source: Path) -> None:
    config = {**json.loads((damaged / "config.json").read_text()), "vocab_size": VOCABULARY + 1}
    text = json.dumps(config)
    old = (damaged / "config.json").read_bytes()
    (damaged / "config.json").write_text(text)
    rewrite_manifest(
        damaged,
        lambda manifest: manifest.replace(
            f'"nbytes":{len(old)},"xxh3_128":"{xxhash.xxh3_128_hexdigest(old)}"',
            f'"nbytes":{len(text)},"xxh3_128":"{xxhash.xxh3_128_hexdigest(text.encode())}"',
        ),
    )
    report = verify(damaged, against=source)
    assert report.integrity.verdict == "passed"
    assert "config-change" in kinds(report)


def test_a_sample_takes_its_share_always_the_same_and_says_so(output: Path, source: Path) -> None:
    reports = [verify(output, against=source, sample=0.4, seed=seed) for seed in (1, 1, 2)]
    first, again, other = (report.source_proof for report in reports)
    assert first is not None
    assert other is not None
    assert first == again
    assert 0 < first.tensors < reports[0].counts.tensors
    assert first.share == first.tensors / reports[0].counts.tensors
    assert "--sample 0.4" in first.not_looked_at[0]
    for sample in (0.0, 1.5, -1.0, float("nan")):
        with pytest.raises(UsageError):
            verify(output, sample=sample)


# ------------------------------------------------------------------------------------------- index (X cases)


def test_x06_an_index_entry_without_tensor_names_tensor_and_file(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", llama_tensors(), LLAMA)
    index = json.loads((model / "model.safetensors.index.json").read_text())
    index["weight_map"]["mtp.fc.weight"] = "model-00002-of-00002.safetensors"
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    report = verify(model)
    told = [f for f in report.findings if f.severity == "fault"]
    assert [(f.tensor, f.where) for f in told] == [("mtp.fc.weight", "model-00002-of-00002.safetensors")]
    assert report.failed


@pytest.mark.parametrize("equal", [True, False])
def test_x08_a_tensor_in_two_files_is_a_fault_that_says_whether_the_bytes_agree(tmp_path: Path, equal: bool) -> None:
    tensors = llama_tensors()
    model = write_model(tmp_path / "model", tensors, LLAMA)
    norm = tensors["model.norm.weight"]
    file = model / "model-00001-of-00002.safetensors"
    held = {name: tensors[name] for name in (t.name for t in read_header(file).tensors)}
    save_file({**held, "model.norm.weight": norm if equal else norm + 1}, file, {"format": "pt"})
    report = verify(model)
    told = [f.what for f in report.findings if f.kind == "duplicate-tensor" and f.severity == "fault"]
    assert len(told) == 1
    assert ("equal bytes" if equal else "different bytes") in told[0]
    assert "model-00001-of-00002.safetensors" in told[0]
    assert "model-00002-of-00002.safetensors" in told[0]


# ------------------------------------------------------------------------------------------- loading


def loading(tmp_path: Path, tensors: dict[str, Any], config: dict[str, Any]) -> Report:
    return verify(write_model(tmp_path / "model", tensors, config))


def test_t10_a_counted_mtp_stage_without_tensors_is_a_fault(tmp_path: Path) -> None:
    report = loading(tmp_path, llama_tensors(), {**LLAMA, "num_nextn_predict_layers": 1})
    assert kinds(report) == {"missing-mtp"}
    assert report.loading.verdict == "failed"


@pytest.mark.parametrize("name", ["mtp.fc.weight", "model.layers.4.eh_proj.weight"])
def test_t10_a_counted_mtp_stage_with_tensors_is_fine(tmp_path: Path, name: str) -> None:
    config = {**LLAMA, "model_type": "unheard_of", "num_nextn_predict_layers": 1}
    assert not kinds(loading(tmp_path, {**llama_tensors(), name: np.zeros(2, np.float32)}, config))


def test_t12_ties(tmp_path: Path) -> None:
    tensors = llama_tensors()
    same = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    none = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    tied = {**LLAMA, "tie_word_embeddings": True}
    assert not kinds(loading(tmp_path / "a", same, tied))
    assert kinds(loading(tmp_path / "b", tensors, tied)) == {"tied-with-other-head"}
    assert kinds(loading(tmp_path / "c", none, LLAMA)) == {"untied-without-head"}
    assert not kinds(loading(tmp_path / "d", none, tied))
    nested = {"model_type": "wrapper", "text_config": {"tie_word_embeddings": True, "num_hidden_layers": 4}}
    assert kinds(loading(tmp_path / "e", tensors, nested)) == {"tied-with-other-head"}


def test_t16_missing_code_is_a_note_for_a_known_class_and_a_fault_for_any_other(tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "configuration_x.XConfig", "AutoModel": "owner/repo--modeling_x.XModel"}
    known = {**LLAMA, "auto_map": auto_map}
    report = loading(tmp_path / "known", llama_tensors(), known)
    assert kinds(report, "note") == {"missing-code"}
    assert not report.failed
    unknown = {**known, "model_type": "x"}
    model = write_model(tmp_path / "unknown", llama_tensors(), unknown)
    assert kinds(verify(model)) == {"missing-code"}
    (model / "configuration_x.py").write_text("from .util_x import y\n")
    assert [f.where for f in verify(model).findings if f.kind == "missing-code"] == ["configuration_x.py"]
    (model / "util_x.py").write_text("y = 1\n")
    report = verify(model)
    assert not report.findings
    assert report.loading.verdict == "unverified"
    assert "'x'" in report.loading.not_looked_at[0]


def test_layers_are_counted_and_the_missing_and_surplus_named(tmp_path: Path) -> None:
    tensors = llama_tensors(6)
    without = {name: tensor for name, tensor in tensors.items() if ".layers.2." not in name}
    report = loading(tmp_path, without, LLAMA)
    assert {f.kind: f.where for f in report.findings if "layer" in f.kind} == {
        "missing-layer": "model.layers.2",
        "surplus-layer": "model.layers.4",
    }


@pytest.mark.parametrize("damage", ["missing", "surplus", "shape"])
def test_a_layer_unlike_the_others_of_its_kind_is_named_with_one_tensor(tmp_path: Path, damage: str) -> None:
    tensors = llama_tensors()
    name = "model.layers.2.input_layernorm.weight"
    if damage == "missing":
        del tensors[name]
    elif damage == "shape":
        tensors[name] = np.zeros(HIDDEN + 1, np.float32)
    else:
        name = "model.layers.2.surplus.weight"
        tensors[name] = np.zeros(2, np.float32)
    report = loading(tmp_path, tensors, LLAMA)
    assert [(f.kind, f.tensor) for f in report.findings] == [("odd-layer", name)]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"num_hidden_layers": None}, "depth"),
        ({"n_layers": 3}, "depth"),
        ({"layer_types": ["full_attention"] * 3}, "per-layer-list"),
        ({"vocab_size": 9}, "embedding-shape"),
        ({"hidden_size": 5}, "embedding-shape"),
    ],
)
def test_a_config_that_the_tensors_contradict_is_a_fault(tmp_path: Path, change: dict[str, Any], kind: str) -> None:
    assert kind in kinds(loading(tmp_path, llama_tensors(), {**LLAMA, **change}))


def test_experts_are_counted_per_layer_and_so_are_router_rows(tmp_path: Path) -> None:
    tensors = moe_tensors()
    assert not kinds(loading(tmp_path / "sound", tensors, MOE))
    gap = {name: tensor for name, tensor in tensors.items() if ".3.mlp.experts.1." not in name}
    report = loading(tmp_path / "gap", gap, MOE)
    assert [f.where for f in report.findings if f.kind == "expert-ids"] == ["model.layers.3.mlp.experts.1"]
    fewer = loading(tmp_path / "fewer", tensors, {**MOE, "num_experts": 2})
    assert {"expert-ids", "expert-axis"} <= kinds(fewer)
    router = {**tensors, "model.layers.0.mlp.gate.weight": np.zeros((EXPERTS + 1, HIDDEN), np.float32)}
    assert {f.tensor for f in loading(tmp_path / "router", router, MOE).findings} >= {"model.layers.0.mlp.gate.weight"}


def test_fused_experts_have_the_counted_axis(tmp_path: Path) -> None:
    tensors = {**llama_tensors(), "model.layers.0.mlp.experts.gate_up_proj": np.zeros((4, 2, 2), np.float32)}
    config = {**LLAMA, "model_type": "fused", "num_local_experts": 4}
    assert not kinds(loading(tmp_path / "sound", tensors, config))
    assert kinds(loading(tmp_path / "other", tensors, {**config, "num_local_experts": 5})) == {"expert-axis"}


def test_without_config_loading_is_unverified(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", llama_tensors(), None)
    assert verify(model).loading.verdict == "unverified"


# ------------------------------------------------------------------------------------------- page and sums


def test_names_that_a_terminal_would_act_on_are_escaped(tmp_path: Path) -> None:
    evil = "model.layers.9.\x1b[31mred\u202e"
    report = loading(tmp_path, {**llama_tensors(), evil: np.zeros(1, np.float32)}, LLAMA)
    assert report.failed
    page = report_text(report)
    assert "\x1b" not in page
    assert "\u202e" not in page


def test_many_findings_of_a_kind_are_listed_to_twenty_and_counted(tmp_path: Path) -> None:
    tensors = llama_tensors(60)
    model = write_model(tmp_path / "model", tensors, {**LLAMA, "num_hidden_layers": 60})
    out = run(model, tmp_path / "out", Repack("1GB"))
    path = out / "model.safetensors"
    raw = bytearray(path.read_bytes())
    for tensor in read_header(path).tensors:
        raw[tensor.offset] ^= 1
    path.write_bytes(raw)
    report = verify(out)
    assert report.found["tensor-bytes"] == len(tensors)
    assert f"and {len(tensors) - 20} more of tensor-bytes" in report_text(report)


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="no sha256sum")
def test_sums_are_what_sha256sum_accepts(output: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(output, tmp_path / "copy"))
    (copy / "folder").mkdir()
    (copy / "folder" / "odd \\ name\nof two lines").write_text("x")
    lines = list(sums(copy))
    assert len(lines) == len([path for path in copy.rglob("*") if path.is_file()])
    digest = hashlib.sha256((copy / "config.json").read_bytes()).hexdigest()
    assert f"{digest}  config.json" in lines
    text = "\n".join(lines) + "\n"
    checked = subprocess.run(
        ["sha256sum", "-c", "--strict", "-"], input=text, cwd=copy, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
