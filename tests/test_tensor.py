"""The tiling algebra against numpy, for every dtype, by carrying tilings out on real files."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surgery import tensor as algebra
from surgery.errors import CannotApply
from surgery.moves import box_move, coverage_fault
from surgery.safetensors_file import DTYPE_BITS, StoredTensor
from surgery.tiling import Fill, Tile, Tiling, contiguous_strides, tiling, whole_source

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


def evaluate(content, arrays):
    """What a tiling says, element by element: the meaning that the executor has to meet."""
    whole = tiling(content)
    result = np.full(whole.shape, -1, dtype=np.int64)
    for box in whole.tiles:
        window = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
        if isinstance(box, Fill):
            result[window] = int.from_bytes(bytes.fromhex(box.element), "little", signed=True)
            continue
        flat = arrays[box.source.name].reshape(-1)
        index = np.full(box.shape, box.start)
        for axis, (count, step) in enumerate(zip(box.shape, box.strides, strict=True)):
            shape = [1] * len(box.shape)
            shape[axis] = count
            index = index + (np.arange(count) * step).reshape(shape)
        assert (result[window] == -1).all(), "two boxes write one element"
        result[window] = flat[index]
    return result


def stored(name, shape, file=0, offset=0, dtype="I64"):
    return StoredTensor(name, dtype, tuple(shape), file, offset)


@st.composite
def programs(draw):
    """A random composition of the algebra, with numpy doing the same beside it."""
    shape = draw(SHAPES)
    arrays = {"a": np.arange(math.prod(shape), dtype=np.int64).reshape(shape)}
    content, expected = stored("a", shape), arrays["a"]
    for number in range(draw(st.integers(0, 6))):
        step = draw(st.sampled_from(["narrow", "take", "concat", "stack", "unstack", "pad", "reshape", "transpose"]))
        rank = expected.ndim
        axis = draw(st.integers(0, max(0, rank - 1)))
        if step == "narrow" and rank:
            start = draw(st.integers(0, expected.shape[axis] - 1))
            length = draw(st.integers(1, expected.shape[axis] - start))
            content = algebra.narrow(content, axis, start, length)
            expected = np.take(expected, range(start, start + length), axis)
        elif step == "take" and rank:
            indices = draw(st.lists(st.integers(0, expected.shape[axis] - 1), min_size=1, max_size=6))
            content, expected = algebra.take(content, axis, indices), np.take(expected, indices, axis)
        elif step == "concat" and rank and expected.size < 4000:
            other = -2 - np.arange(expected.size, dtype=np.int64).reshape(expected.shape) - 10000 * number
            arrays[f"b{number}"] = other
            content = algebra.concat([content, stored(f"b{number}", expected.shape), content], axis)
            expected = np.concatenate([expected, other, expected], axis)
        elif step == "stack" and expected.size < 4000:
            where = draw(st.integers(0, rank))
            content, expected = algebra.stack([content, content], where), np.stack([expected] * 2, where)
        elif step == "unstack" and rank > 1:
            parts = algebra.unstack(content, axis)
            chosen = draw(st.integers(0, len(parts) - 1))
            content, expected = parts[chosen], np.take(expected, chosen, axis)
        elif step == "pad" and rank:
            before, after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
            content = algebra.pad(content, axis, before, after, (77).to_bytes(8, "little"))
            widths = [(0, 0)] * rank
            widths[axis] = (before, after)
            expected = np.pad(expected, widths, constant_values=77)
        elif step == "reshape":
            shape = draw(_factorings(expected.size))
            content, expected = algebra.reshape(content, shape), expected.reshape(shape)
        elif step == "transpose" and rank:
            axes = draw(st.permutations(range(rank)))
            content, expected = algebra.transpose(content, axes), expected.transpose(axes)
    return content, expected, arrays


@st.composite
def _factorings(draw, size):
    """Shapes with `size` elements."""
    shape = []
    rest = size
    while rest > 1 and len(shape) < 4:
        divisors = [d for d in range(1, rest + 1) if rest % d == 0]
        shape.append(draw(st.sampled_from(divisors)))
        rest //= shape[-1]
    return (*shape, rest)


@settings(max_examples=400, deadline=None)
@given(programs())
def test_every_composition_means_what_numpy_does(program):
    content, expected, arrays = program
    assert tuple(tiling(content).shape) == expected.shape
    assert (evaluate(content, arrays) == expected).all()
    assert coverage_fault(content) is None


def test_evenly_spaced_choices_are_one_record():
    experts = stored("experts", (8, 4, 6))
    assert len(algebra.take(experts, 0, [0, 2, 4, 6]).tiles) == 1
    assert len(algebra.take(experts, 1, [1, 3]).tiles) == 1
    assert len(algebra.take(experts, 0, [5, 5, 5]).tiles) == 1
    assert len(algebra.take(experts, 0, [0, 1, 3]).tiles) == 2


def test_cutting_apart_and_joining_again_is_the_stored_tensor_whole():
    whole = stored("w", (6, 4))
    assert whole_source(algebra.concat([algebra.narrow(whole, 0, 0, 2), algebra.narrow(whole, 0, 2, 4)])) == whole
    assert whole_source(algebra.stack(algebra.unstack(whole, 0))) == whole
    assert whole_source(algebra.transpose(algebra.transpose(whole, (1, 0)), (1, 0))) == whole
    assert whole_source(algebra.reshape(algebra.reshape(whole, (24,)), (6, 4))) == whole
    assert whole_source(algebra.transpose(whole, (1, 0))) is None


def test_tensors_without_elements_and_scalars_pass_through():
    empty, scalar = stored("e", (0, 4)), stored("s", ())
    assert algebra.concat([empty, empty]).tiles == ()
    assert algebra.concat([empty, stored("f", (2, 4))]).shape == (2, 4)
    assert algebra.reshape(scalar, (1, 1)).shape == (1, 1)
    assert algebra.stack([scalar, scalar]).shape == (2,)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: algebra.narrow(stored("a", (3,)), 0, 2, 2), "index 3"),
        (lambda: algebra.take(stored("a", (3,)), 0, [-1]), "index -1"),
        (lambda: algebra.take(stored("a", (3,)), 1, [0]), "axis 1"),
        (lambda: algebra.concat([stored("a", (3,)), stored("b", (3,), dtype="F32")]), "never changed"),
        (lambda: algebra.concat([stored("a", (3, 2)), stored("b", (3, 3))]), "shape"),
        (lambda: algebra.reshape(stored("a", (3,)), (2, 2)), "elements"),
        (lambda: algebra.transpose(stored("a", (3, 2)), (0, 0)), "axes"),
        (lambda: algebra.pad(stored("a", (3,)), 0, 1, 0, b"\0"), "8 bytes"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(wrong, says):
    with pytest.raises(CannotApply, match=says):
        wrong()


@pytest.mark.parametrize("dtype", [name for name, bits in DTYPE_BITS.items() if bits % 8])
def test_a_cut_inside_a_byte_is_refused_and_whole_bytes_are_taken(dtype):
    unit = math.lcm(DTYPE_BITS[dtype], 8) // DTYPE_BITS[dtype]
    packed = stored("p", (4, 2 * unit), dtype=dtype)
    good = algebra.narrow(packed, 1, unit, unit)
    assert box_move(good.tiles[0], good).nbytes == 4 * math.lcm(DTYPE_BITS[dtype], 8) // 8
    rows = algebra.take(packed, 0, [3, 1])
    assert all(box_move(box, rows).nbytes for box in rows.tiles)
    odd = algebra.narrow(packed, 1, 1, unit)
    with pytest.raises(CannotApply, match="split a byte") as refused:
        box_move(odd.tiles[0], odd, "p")
    assert str(unit) in refused.value.mend


def test_coverage_finds_holes_overlaps_and_reads_past_the_source():
    a = stored("a", (4,))

    def tile(start, offset, shape, strides=(1,)):
        return Tile(a, start, strides, (offset,), (shape,))

    assert "3 of 4" in coverage_fault(Tiling("I64", (4,), (tile(0, 0, 3),)))
    assert "overlap" in coverage_fault(Tiling("I64", (4,), (tile(0, 0, 2), tile(0, 1, 2))))
    assert "element 4" in coverage_fault(Tiling("I64", (4,), (tile(1, 0, 4),)))
    assert "leaves" in coverage_fault(Tiling("I64", (4,), (tile(0, 2, 4),)))
    assert "I32" in coverage_fault(Tiling("I32", (4,), (tile(0, 0, 4),)))
    assert contiguous_strides((2, 3, 4)) == (12, 4, 1)
