"""One file: whatever the reference refuses we refuse, and what we build is what the reference writes."""

from __future__ import annotations

import ctypes
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, TensorSpec, deserialize, safe_open, serialize

from surgery.errors import SourceError
from surgery.safetensors_file import (
    DTYPE_BITS,
    MAX_HEADER_NBYTES,
    Header,
    build_header,
    parse_header,
    read_header,
    tensor_nbytes,
)

ONE = '"dtype":"U8","shape":[1],"data_offsets":[0,1]'


def file_bytes(header: str | bytes | dict[str, Any], data: bytes = b"") -> bytes:
    if isinstance(header, dict):
        header = json.dumps(header)
    text = header if isinstance(header, bytes) else header.encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def read(directory: Path, content: bytes) -> Header:
    path = directory / "x.safetensors"
    path.write_bytes(content)
    return read_header(path)


def refusal(directory: Path, content: bytes) -> SourceError:
    """What we say of a file that the reference refuses too."""
    with pytest.raises(SafetensorError):
        deserialize(content)
    return own_refusal(directory, content)


def own_refusal(directory: Path, content: bytes) -> SourceError:
    with pytest.raises(SourceError) as caught:
        read(directory, content)
    assert caught.value.where.endswith("x.safetensors")
    assert caught.value.mend
    return caught.value


# What is no safetensors file at all (F01, F02)


def test_a_git_lfs_pointer_is_named_with_its_oid_and_size(tmp_path):
    oid = "0123456789abcdef" * 4
    error = refusal(
        tmp_path, f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize 4976698672\n".encode()
    )
    assert "Git LFS pointer" in error.what
    assert oid in error.what
    assert "4976698672 bytes" in error.what
    assert "git lfs pull" in error.mend
    assert "hf download" in error.mend


@pytest.mark.parametrize(
    "page",
    [
        b"<!DOCTYPE html><html>401 \x1b[31mUnauthorized</html>",
        b'<?xml version="1.0"?><Error><Code>NoSuchKey</Code></Error>',
        b"<Error><Code>AccessDenied</Code></Error>",
    ],
)
def test_a_page_saved_by_a_failed_download_is_shown_with_its_first_bytes_escaped(tmp_path, page):
    error = refusal(tmp_path, page)
    assert "HTML or XML" in error.what
    assert page[:8].decode() in error.what
    assert "\x1b" not in error.what


@pytest.mark.parametrize(
    ("start", "kind"), [(b"PK\x03\x04" + bytes(60), "zip"), (b"GGUF\x03\x00\x00\x00" + bytes(60), "GGUF")]
)
def test_weights_of_another_format_under_a_safetensors_name_are_told_apart(tmp_path, start, kind):
    assert kind in refusal(tmp_path, start).what


@pytest.mark.parametrize("content", [b"", bytes(7), b"\x01"])
def test_a_file_below_eight_bytes_is_refused_with_its_size(tmp_path, content):
    assert f"{len(content)} bytes" in refusal(tmp_path, content).what


def test_an_empty_header_is_refused(tmp_path):
    assert "header is empty" in refusal(tmp_path, bytes(8)).what


def test_a_file_one_byte_short_is_refused_with_both_sizes(tmp_path):
    error = refusal(tmp_path, file_bytes({"a": entry("F32", [2], 0, 8)}, bytes(7)))
    assert "1 byte short" in error.what
    assert "8 bytes" in error.what
    assert "has 7" in error.what


def test_a_file_cut_inside_its_header_is_refused_with_both_sizes(tmp_path):
    error = refusal(tmp_path, struct.pack("<Q", 1000) + b"{}")
    assert "1008 bytes expected" in error.what
    assert "has 10" in error.what


def test_surplus_bytes_after_the_last_tensor_are_counted(tmp_path):
    assert "4 bytes of surplus" in refusal(tmp_path, file_bytes({"a": entry("F32", [1], 0, 4)}, bytes(8))).what
    assert "1 byte of surplus" in refusal(tmp_path, file_bytes({}, b"x")).what


@pytest.mark.parametrize("length", [MAX_HEADER_NBYTES + 1, 2**40, 2**63, 2**64 - 1])
def test_an_absurd_header_length_is_refused_without_allocating(tmp_path, length):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    os.truncate(path, MAX_HEADER_NBYTES * 2)  # a hole: the size alone does not excuse the length
    with pytest.raises(SafetensorError):
        safe_open(path, "np").__enter__()
    with pytest.raises(SourceError) as caught:
        read_header(path)
    assert str(length) in caught.value.what
    assert str(MAX_HEADER_NBYTES) in caught.value.what


@pytest.mark.parametrize("kind", ["directory", "pipe", "device", "missing", "loop"])
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path, kind):
    path = tmp_path / "x.safetensors"
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path)
    with pytest.raises(SourceError) as caught:
        read_header(path)
    assert caught.value.where == str(path)


def test_reading_leaves_no_open_file_and_needs_no_right_to_write(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_bytes({"a": entry("F32", [1], 0, 4)}, bytes(4)))
    path.chmod(0o444)
    tmp_path.chmod(0o555)
    before = sorted(Path("/proc/self/fd").iterdir())
    status = path.stat()
    read_header(path)
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    assert (path.stat().st_mtime_ns, path.stat().st_size) == (status.st_mtime_ns, status.st_size)
    tmp_path.chmod(0o755)


# Names and metadata (F05, F07, F08)


@pytest.mark.parametrize("second", ['"a"', '"\\u0061"'])
@pytest.mark.parametrize("offsets", ["[0,4]", "[4,8]"])
def test_a_name_that_is_there_twice_is_refused_also_when_one_is_escaped(tmp_path, second, offsets):
    header = (
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        + second
        + ':{"dtype":"F32","shape":[1],"data_offsets":'
        + offsets
        + "}}"
    )
    error = own_refusal(tmp_path, file_bytes(header, bytes(8 if offsets == "[4,8]" else 4)))
    assert "'a' twice" in error.what


def test_a_field_that_is_there_twice_is_refused(tmp_path):
    header = '{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    assert "'dtype' twice" in refusal(tmp_path, file_bytes(header, b"x")).what


def test_metadata_that_is_there_twice_is_refused(tmp_path):
    header = '{"__metadata__":{},"\\u005f_metadata__":{},"a":{' + ONE + "}}"
    assert "'__metadata__' twice" in refusal(tmp_path, file_bytes(header, b"x")).what


@pytest.mark.parametrize(
    ("start", "metadata"),
    [('"__metadata__":{},', {}), ('"__metadata__":null,', None), ("", None), ('"__metadata__":{"k":"v"},', {"k": "v"})],
)
def test_metadata_is_no_tensor_and_null_is_none(tmp_path, start, metadata):
    content = file_bytes("{" + start + '"a":{' + ONE + "}}", b"x")
    header = read(tmp_path, content)
    assert [tensor.name for tensor in header.tensors] == ["a"]
    assert header.metadata == metadata
    with safe_open(tmp_path / "x.safetensors", "np") as reference:
        assert reference.metadata() == metadata


def test_a_file_without_tensors_is_read(tmp_path):
    assert read(tmp_path, file_bytes("{}")).tensors == []


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ('{"epoch":3}', "an integer"),
        ('{"epoch":{"bits":4}}', "an object"),
        ('{"epoch":null}', "null"),
        ('{"epoch":[]}', "an array"),
        ('{"epoch":true}', "a boolean"),
        ('{"epoch":1.5}', "a number"),
    ],
)
def test_metadata_that_is_no_string_is_refused_with_its_key_and_type(tmp_path, value, kind):
    error = refusal(tmp_path, file_bytes('{"__metadata__":' + value + "}"))
    assert "'epoch'" in error.what
    assert kind in error.what


@pytest.mark.parametrize("value", ["[]", '"x"', "3", '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'])
def test_metadata_that_is_no_object_of_strings_is_refused(tmp_path, value):
    assert "__metadata__" in refusal(tmp_path, file_bytes('{"__metadata__":' + value + "}")).what


def test_tensors_named_like_the_fields_of_an_entry_are_tensors(tmp_path):
    empty = '{"dtype":"U8","shape":[0],"data_offsets":[1,1]}'
    header = read(
        tmp_path, file_bytes('{"dtype":{' + ONE + '},"shape":' + empty + ',"data_offsets":' + empty + "}", b"x")
    )
    assert {tensor.name for tensor in header.tensors} == {"dtype", "shape", "data_offsets"}


# Shapes, sizes and ranges (F10, F11, F12, F14, F17, F19, F21)


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry("F32", [1], 0, 4), "z": entry("F8_E4M3", [0], 4, 4), "c": entry("F32", [1], 4, 8)},
        {"a": entry("F32", [0], 0, 0), "b": entry("F32", [3, 0, 2], 0, 0), "c": entry("F32", [2], 0, 8)},
        {"c": entry("F32", [2], 0, 8), "a": entry("F32", [0], 8, 8)},
        {"s": entry("F64", [], 0, 8)},
        {"a": entry("U8", [4], 0, 4), "b": entry("F32", [1], 4, 8)},
        {"b": entry("F32", [1], 3, 7), "a": entry("U8", [3], 0, 3), "c": entry("U8", [1], 7, 8)},
    ],
)
def test_empty_scalar_misaligned_and_unordered_tensors_are_read_as_the_reference_reads_them(tmp_path, header):
    content = file_bytes(header, bytes(range(8)))
    ours = read(tmp_path, content)
    theirs = {name: (info["dtype"], tuple(info["shape"]), bytes(info["data"])) for name, info in deserialize(content)}
    assert {t.name: (t.dtype, t.shape, content[t.offset : t.offset + t.nbytes]) for t in ours.tensors} == theirs
    assert [tensor.offset for tensor in ours.tensors] == sorted(tensor.offset for tensor in ours.tensors)


@pytest.mark.parametrize(
    ("header", "nbytes", "words"),
    [
        (
            {"a": entry("F32", [2], 0, 8), "z": entry("F8_E4M3", [0], 4, 4)},
            8,
            ["overlap", "a at [0, 8]", "z at [4, 4]"],
        ),
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 0, 8)}, 8, ["overlap", "a at [0, 8]", "b at [0, 8]"]),
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, 12, ["overlap", "b at [4, 12]"]),
        ({"a": entry("F32", [2], 0, 8), "z": entry("U8", [0], 99, 99)}, 8, ["gap of 91 bytes", "z"]),
        ({"a": entry("F32", [1], 4, 8)}, 8, ["gap of 4 bytes", "a"]),
        ({"a": entry("F32", [2], 0, 4)}, 4, ["a", "hold 4 bytes", "needs 8"]),
        ({"a": entry("U8", [1], 1, 0)}, 1, ["a", "[1, 0]"]),
        ({"s": entry("F32", [], 0, 0)}, 0, ["s", "needs 4"]),
        ({"a": entry("U8", [1], 2**64 - 1, 0)}, 1, ["a"]),
    ],
)
def test_ranges_that_do_not_cover_the_data_once_are_refused_with_the_names(tmp_path, header, nbytes, words):
    what = refusal(tmp_path, file_bytes(header, bytes(nbytes))).what
    assert [word for word in words if word not in what] == []


@pytest.mark.parametrize("shape", [[2**63, 4], [2**62, 4], [2**63, 4, 0], [2**64], [2**61], [-1], [2**64 - 1, 2]])
def test_a_shape_over_64_bits_is_refused_though_it_claims_no_bytes(tmp_path, shape):
    error = refusal(tmp_path, file_bytes({"a": entry("U8", shape, 0, 0)}))
    assert "tensor a" in error.what


@pytest.mark.parametrize("shape", [[0, 2**63, 4], [2**64 - 1, 0]])
def test_a_zero_before_an_absurd_axis_is_read_as_the_reference_reads_it(tmp_path, shape):
    content = file_bytes({"a": entry("F32", shape, 0, 0)})
    assert deserialize(content)[0][1]["shape"] == shape
    (tensor,) = read(tmp_path, content).tensors
    assert tensor.shape == tuple(shape)
    assert tensor.nbytes == 0


def test_dtypes_below_a_byte_count_bits_over_the_logical_shape(tmp_path):
    content = file_bytes({"a": entry("F4", [2, 4], 0, 4), "e": entry("F8_E8M0", [2, 4], 4, 12)}, bytes(12))
    assert [(t.dtype, t.shape, t.nbytes) for t in read(tmp_path, content).tensors] == [
        ("F4", (2, 4), 4),
        ("F8_E8M0", (2, 4), 8),
    ]
    assert "whole number of bytes" in refusal(tmp_path, file_bytes({"a": entry("F4", [3], 0, 1)}, b"x")).what
    with pytest.raises(ValueError, match="whole number"):
        tensor_nbytes("F6_E2M3", (3,))


@pytest.mark.parametrize("dtype", ["F8_E4M3FN", "f32", "U4", "", "\x1b[31m"])
def test_an_unknown_dtype_is_refused_with_the_tensor_and_the_known_ones(tmp_path, dtype):
    what = refusal(tmp_path, file_bytes({"w": entry(dtype, [4], 0, 4)}, bytes(4))).what
    assert "tensor w" in what
    assert repr(dtype) in what
    assert all(known in what for known in DTYPE_BITS)


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_has_the_size_that_the_reference_gives_it(dtype):
    nbytes = tensor_nbytes(dtype, (4, 2))
    content = file_bytes({"a": entry(dtype, [4, 2], 0, nbytes)}, bytes(nbytes))
    assert len(deserialize(content)[0][1]["data"]) == nbytes


# The JSON itself (F16 and what Python reads and serde does not)


@pytest.mark.parametrize(("text", "deviates"), [("%s      ", False), (" %s", True), ("\n%s", True), ("%s\n\t ", True)])
def test_white_space_that_the_specification_forbids_is_read_and_noted(tmp_path, text, deviates):
    content = file_bytes(text % ('{"a":{' + ONE + "}}"), b"x")
    assert len(deserialize(content)) == 1
    assert bool(read(tmp_path, content).deviations) == deviates


def test_an_unknown_field_of_an_entry_is_read_and_noted(tmp_path):
    header = read(tmp_path, file_bytes('{"a":{' + ONE + ',"block":{"size":[128]}}}', b"x"))
    assert "'block'" in header.deviations[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("\ufeff%s", "byte order mark"),
        ("%s\0\0\0", "goes on after"),
        ("%s{}", "goes on after"),
        ("%s,", "goes on after"),
        ("\f%s", "not JSON"),
        ("\0%s", "not JSON"),
    ],
)
def test_bytes_around_the_json_are_refused(tmp_path, text, says):
    assert says in refusal(tmp_path, file_bytes(text % ('{"a":{' + ONE + "}}"), b"x")).what


@pytest.mark.parametrize("header", ["[]", "1", '"a"', "null", "{", '{"a":5}', '{"a":null}', '{"a":{}}', '{"a":{%s},}'])
def test_a_header_that_is_no_object_of_entries_is_refused(tmp_path, header):
    refusal(tmp_path, file_bytes(header.replace("%s", ONE), b"x"))


@pytest.mark.parametrize(
    "fields",
    [
        '"dtype":"U8","shape":[1.0],"data_offsets":[0,1]',
        '"dtype":"U8","shape":[1e0],"data_offsets":[0,1]',
        '"dtype":"U8","shape":[true],"data_offsets":[0,1]',
        '"dtype":"U8","shape":[1],"data_offsets":[false,true]',
        '"dtype":"U8","shape":[1],"data_offsets":[-0,1]',
        '"dtype":"U8","shape":[01],"data_offsets":[0,1]',
        '"dtype":"U8","shape":["1"],"data_offsets":[0,1]',
        '"dtype":"U8","shape":[NaN],"data_offsets":[0,1]',
        '"dtype":"U8","shape":[' + "1" * 5000 + '],"data_offsets":[0,1]',
        '"dtype":"U8","shape":[1],"data_offsets":[0,1,2]',
        '"dtype":"U8","shape":[1],"data_offsets":[0]',
        '"dtype":"U8","shape":[1],"data_offsets":null',
        '"dtype":"U8","shape":null,"data_offsets":[0,1]',
        '"dtype":8,"shape":[1],"data_offsets":[0,1]',
        '"dtype":"U8","shape":[1]',
        ONE + ',"x":NaN',
        ONE + ',"x":-Infinity',
        ONE + ',"x":1e999',
        ONE + ',"x":' + "9" * 400,
        ONE + ',"x":"\\ud800"',
        ONE + ',"x":["\\udc00"]',
        ONE + ',"\\ud800":1',
        ONE + ',"x":"\n"',
        ONE + ',"x":' + "[" * 127 + "]" * 127,
        ONE + ',"x":' + "[" * 100_000 + "]" * 100_000,
    ],
)
def test_values_that_python_reads_and_the_format_does_not_are_refused(tmp_path, fields):
    refusal(tmp_path, file_bytes('{"a":{' + fields + "}}", b"x"))


@pytest.mark.parametrize("name", [b'"a\\ud800"', b'"a\xff"', b'"a\xed\xa0\x80"', b'"a\x00"'])
def test_a_name_that_is_no_text_is_refused(tmp_path, name):
    refusal(tmp_path, file_bytes(b"{" + name + b":{" + ONE.encode() + b"}}", b"x"))


@pytest.mark.parametrize("name", ["", "a\\u0000", "a\x7f", "\\ud83d\\ude00", "\u202e", "layer-0"])
def test_an_odd_name_that_the_reference_reads_is_read(tmp_path, name):
    content = file_bytes('{"' + name + '":{' + ONE + "}}", b"x")
    assert [t.name for t in read(tmp_path, content).tensors] == [deserialize(content)[0][0]]


# Building (F04, F20, F21)

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda name: name != "__metadata__")
FRAMEWORK_DTYPES = {  # what `serialize` takes; it has no name for F6
    "BOOL": "bool",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "BF16": "bfloat16",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}
dtypes = st.sampled_from(sorted(FRAMEWORK_DTYPES))
specs = st.dictionaries(names, st.tuples(dtypes, st.lists(st.integers(0, 4), max_size=3)), max_size=12)


@given(specs, st.none() | st.tuples(names, names))
@settings(deadline=None)
def test_a_built_file_is_the_one_that_the_reference_writes(tensors, metadata):
    data = {name: os.urandom(tensor_nbytes(dtype, tuple(shape))) for name, (dtype, shape) in tensors.items()}
    strings = dict([metadata]) if metadata else {}
    header, placed = build_header([(n, d, tuple(s)) for n, (d, s) in tensors.items()], strings)
    reference = as_the_reference_writes(tensors, data, strings)
    assert header + b"".join(data[name] for name, _ in placed) == reference
    parsed = parse_header(header, len(reference), "built")
    assert parsed.metadata == (strings or None)
    assert parsed.deviations == ()
    assert {t.name: (t.dtype, t.shape, t.offset - len(header)) for t in parsed.tensors} == {
        name: (tensors[name][0], tuple(tensors[name][1]), position) for name, position in placed
    }


def as_the_reference_writes(tensors: dict[str, tuple[str, list[int]]], data: dict[str, bytes], strings: Any) -> bytes:
    buffers = {name: ctypes.create_string_buffer(content, len(content) + 1) for name, content in data.items()}
    described = {
        name: TensorSpec(
            dtype=FRAMEWORK_DTYPES[dtype],
            shape=shape,
            data_ptr=ctypes.addressof(buffers[name]),
            data_len=len(data[name]),
        )
        for name, (dtype, shape) in tensors.items()
    }
    return bytes(serialize(described, strings or None))


sizes = st.sampled_from([0, 1, 2, 3, 4, 8, 2**62, 2**63, 2**64 - 1, 2**64, -1, 1.0, True, None, "1"])
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "F32", "F4", "F6_E2M3", "F8", "u8", 3]),
        "shape": st.lists(sizes, max_size=3),
        "data_offsets": st.lists(st.sampled_from([0, 1, 2, 4, 8, 2**64 - 1, -1, 1.0]), min_size=1, max_size=3),
    },
    optional={"extra": st.sampled_from([1, {"deep": [None]}, "x"])},
)


@given(st.dictionaries(st.sampled_from(["a", "b", "c", "__metadata__"]), entries, max_size=3), st.integers(0, 12))
@settings(max_examples=400, deadline=None)
def test_what_the_reference_refuses_is_refused_and_what_it_reads_is_read_alike(header, nbytes):
    agree(file_bytes(header, bytes(nbytes)))


valid_file = file_bytes(
    {
        "__metadata__": {"format": "pt"},
        "m.w": entry("F32", [2, 3], 0, 24),
        "m.b": entry("BF16", [3], 24, 30),
        "e": entry("U8", [0], 30, 30),
    },
    bytes(30),
)


@given(st.data())
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_damaged_byte_is_refused_wherever_the_reference_refuses_it(data):
    damaged = bytearray(valid_file)
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(damaged) - 31))
        damaged[position] = data.draw(st.sampled_from(list(b'0123456789[]{},:" \n\t\0\x80\xff-.eE')))
    agree(bytes(damaged))


@given(st.binary(max_size=80))
@settings(deadline=None)
def test_any_bytes_are_refused_or_read_never_a_crash(content):
    agree(content)


def agree(content: bytes) -> None:
    """We are as strict as the reference, and stricter only about what is there twice."""
    length = int.from_bytes(content[:8], "little")
    refused = ""
    try:
        theirs = {name: (info["dtype"], tuple(info["shape"])) for name, info in deserialize(content)}
    except SafetensorError:
        theirs = None
    if len(content) < 8 or length > min(len(content) - 8, MAX_HEADER_NBYTES):
        assert theirs is None  # and read_header does not come to the header
        return
    try:
        header = parse_header(content[: 8 + length], len(content), "x")
        ours = {tensor.name: (tensor.dtype, tensor.shape) for tensor in header.tensors}
    except SourceError as error:
        ours, refused = None, error.what
    assert ours == theirs or "twice" in refused, refused


def test_a_header_over_the_cap_is_never_built():
    long = "x" * 1000
    with pytest.raises(ValueError, match=str(MAX_HEADER_NBYTES)):
        build_header([(f"{long}{number}", "U8", (1,)) for number in range(100_000)], {})


@pytest.mark.parametrize("tensor_names", [["a", "a"], ["__metadata__"]])
def test_a_header_that_no_reader_takes_is_never_built(tensor_names):
    with pytest.raises(ValueError, match="unique"):
        build_header([(name, "U8", (1,)) for name in tensor_names], {})


def test_a_built_header_keeps_every_tensor_aligned_to_its_width():
    tensors = [("a", "U8", (3,)), ("b", "F32", (1,)), ("c", "F64", (1,)), ("d", "F8_E4M3", (5,)), ("e", "BF16", (1,))]
    header, placed = build_header(tensors, {})
    dtypes = {name: dtype for name, dtype, _ in tensors}
    assert len(header) % 8 == 0
    assert all(position % (DTYPE_BITS[dtypes[name]] // 8) == 0 for name, position in placed)


def test_equal_shapes_and_dtypes_are_one_object_in_memory():
    header, _ = build_header([(f"t{number}", "F8_E4M3", (0, 4096)) for number in range(50)], {})
    tensors = parse_header(header, len(header), "x").tensors
    assert len({id(tensor.shape) for tensor in tensors}) == 1
    assert len({id(tensor.dtype) for tensor in tensors}) == 1
