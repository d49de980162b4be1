"""Captured values and integers are exact where they decide a mask or an index, in the definition and in CUDA."""

from __future__ import annotations

import math
import operator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exact_mods import DIFFERENCES, GRID, MASKS, NOW, PLACES, ROWS, SECONDS, TIMES, exact
from expressions import ARRAYS, K, Q, floats, op, points
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import KERNELS, case_of, check, compiled, computed, element

import cuflash
from cuflash import mods
from cuflash.errors import ProblemError
from cuflash.mods.analysis.intervals import band
from cuflash.mods.graph.float_ranges import rounded_range
from cuflash.mods.graph.graph import Node, post_order
from cuflash.mods.graph.operations import Type
from cuflash.mods.graph.simplify import cast
from cuflash.mods.tracing.trace import trace
from cuflash.reference.evaluate import evaluate


@pytest.mark.parametrize("name", MASKS)
def test_masks_show_what_exact_numbers_show(name: str) -> None:
    visible = exact(MASKS[name])
    one = np.zeros((1, ROWS, 1, 8), np.float32)
    counts = np.exp(cuflash.lse(one, one, mask_mod=MASKS[name])).ravel()
    np.testing.assert_allclose(counts, visible.sum(axis=1), rtol=1e-6)
    block_mask = cuflash.create_block_mask(MASKS[name], 1, 1, ROWS, ROWS, like=one)
    assert block_mask.cells.item() == (0 if not visible.any() else 2 if visible.all() else 1)


@pytest.mark.skipif(not KERNELS.is_dir(), reason="needs a checkout")
def test_their_texts_have_their_values_and_compile(tmp_path: Path) -> None:
    cases = [case_of(each) for each in MASKS.values()]
    for name, (values,) in zip(MASKS, computed(cases, GRID, tmp_path), strict=True):
        np.testing.assert_array_equal(values.reshape(ROWS, ROWS), exact(MASKS[name]), err_msg=name)
    for arch in ("sm_80", "sm_90a"):
        compiled(cases, arch)


# Random functions of integers.

LEAST, MOST = -(2**63), 2**63 - 1
TABLES = {
    name: np.random.default_rng(0).integers(*ends, size=ROWS, dtype=name, endpoint=True)
    for name, ends in {
        **{name: (np.iinfo(name).min, np.iinfo(name).max) for name in ("int8", "uint8", "int16", "int32", "uint32")},
        "int64": (-(2**40), 2**40),
    }.items()
}
OPERATIONS: dict[str, Any] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "floordiv", "mod", "and_", "or_", "xor")},
    **{"minimum": min, "maximum": max, "negative": operator.neg, "absolute": abs, "invert": operator.invert},
    **{f"shifted by {n}": lambda x, n=n: x << n for n in (1, 20)},
    **{f"shifted back by {n}": lambda x, n=n: x >> n for n in (3, 35)},
}
ONE = [name for name in OPERATIONS if name in ("negative", "absolute", "invert") or "shift" in name]
LEAVES = st.one_of(
    st.sampled_from(
        [("index", name) for name in ("i", "j")] + [("element", name, place) for name in TABLES for place in "ij"]
    ),
    st.sampled_from([3, -2, 7, 65_536, 2**31 - 1, -(2**31), 2**33]).map(lambda number: ("number", number)),
)
EXPRESSIONS = st.recursive(
    LEAVES,
    lambda below: st.one_of(
        st.tuples(st.sampled_from(ONE), below),
        st.tuples(st.sampled_from([name for name in OPERATIONS if name not in ONE]), below, below),
    ),
    max_leaves=6,
)


def value_of(expression: Any, i: Any, j: Any, tables: Any, checked: Any) -> Any:
    """Returns the value of an expression, for traced values or Python's integers."""
    name, *parts = expression
    indices = {"i": i, "j": j}
    if name == "number":
        return parts[0]
    if name == "index":
        return indices[parts[0]]
    if name == "element":
        return tables[parts[0]][indices[parts[1]]]
    values = [value_of(part, i, j, tables, checked) for part in parts]
    if name in ("floordiv", "mod"):
        values[1] = (values[1] & 1023) + 1
    return checked(OPERATIONS[name](*values))


def within(x: int) -> int:
    """Returns an exact result if int64 holds it."""
    if not LEAST <= x <= MOST:
        raise OverflowError
    return x


@settings(deadline=None, derandomize=True, max_examples=200)
@given(EXPRESSIONS, EXPRESSIONS)
def test_random_integers_are_exact(x: Any, y: Any) -> None:
    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        sides = [value_of(each, i, j, TABLES, lambda value: value) for each in (x, y)]
        return sides[0] < sides[1] if h == 0 else sides[0] == sides[1]

    lists = {name: table.tolist() for name, table in TABLES.items()}
    try:
        graph = trace(mask_mod, "mask_mod")
    except ProblemError as error:
        if "may leave 64 bits" in str(error) or "is no integer of 64 bits" in str(error):
            return
        raise
    arrays = [each.array for each in graph.arrays]
    for h in (0, 1):
        values = np.broadcast_to(evaluate([graph.root], GRID | {"h": h}, arrays)[0], ROWS * ROWS)
        for place, value in enumerate(values):
            i, j = divmod(place, ROWS)
            try:
                sides = [value_of(each, i, j, lists, within) for each in (x, y)]
            except OverflowError:
                continue
            assert value == (sides[0] < sides[1] if h == 0 else sides[0] == sides[1])


@pytest.mark.skipif(not KERNELS.is_dir(), reason="needs a checkout")
@settings(deadline=None, derandomize=True, max_examples=2)
@given(st.lists(EXPRESSIONS, min_size=30, max_size=30))
def test_the_text_of_random_integers_has_their_values(tmp_path_factory: pytest.TempPathFactory, many: Any) -> None:
    cases = []
    for x in many:
        try:
            cases.append(
                case_of(lambda b, h, i, j, x=x: value_of(x, i, j, TABLES, lambda value: value) < i * 2**33 + j)
            )
        except ProblemError:
            continue
    check(cases, tmp_path_factory.mktemp("random"), GRID)


# Refused and accepted expressions.

UNSIGNED = 2**63 + PLACES.astype(np.uint64)
REFUSED = {
    "multiply of integers may leave 64 bits": lambda b, h, i, j: i * j * h < 3,
    "left_shift of integers may leave 64 bits": lambda b, h, i, j: 1 << i < 3,
    "add of uint64, which may leave its 64 bits; make an int64 array": lambda b, h, i, j: UNSIGNED[i] + 1 < UNSIGNED[j],
    "subtract of uint64": lambda b, h, i, j: UNSIGNED[i] - UNSIGNED[j] < 3,
    "where of uint64 and of an integer that may be neg": lambda b, h, i, j: np.where(i < j, UNSIGNED[i], -1) < 3,
    "18446744073709551616 is no integer of 64 bits": lambda b, h, i, j: UNSIGNED[i] < 2**64,
}


@pytest.mark.parametrize("message", REFUSED)
def test_integers_beyond_64_bits_are_refused_with_the_line(message: str) -> None:
    with pytest.raises(ProblemError, match=f"{Path(__file__).name}:\\d+, in <lambda>: .*{message}"):
        trace(REFUSED[message], "mask_mod")


def test_integers_that_int32_holds_stay_int32() -> None:
    for mask_mod in (mods.sliding_window(5, 7), mods.chunked(4), mods.neighborhood(3, 9), mods.dilated_window(9, 2, 9)):
        root = trace(
            mods.and_masks(mask_mod, lambda b, h, i, j: (j % 5 > 0) & (i + j - 9 > i * 2 - 5)), "mask_mod"
        ).root
        assert all(each.type in (Type.BOOL, Type.INT32) for each in post_order([root]))


def test_a_mask_whose_sums_may_wrap_is_no_window() -> None:
    shifts = np.array([2**63 - 1, 3])
    assert band(trace(lambda b, h, i, j: (j <= i) & (j <= i + max(shifts[h], 0)), "mask_mod").root) is None
    assert band(trace(lambda b, h, i, j: (j <= i) & (j <= i + abs(i - 7)), "mask_mod").root) is not None


@settings(deadline=None, derandomize=True, max_examples=150)
@given(EXPRESSIONS)
def test_extents_hold_all_values(x: Any) -> None:
    root = None
    try:
        root = trace(lambda b, h, i, j: value_of(x, i, j, TABLES, lambda value: value) < 0, "mask_mod")
    except ProblemError:
        return
    order = [each for each in post_order([root.root]) if not each.type.is_float]
    values = evaluate(order, GRID, [each.array for each in root.arrays])
    for each, value in zip(order, values, strict=True):
        assert each.ends[0] <= int(value.min()) <= int(value.max()) <= each.ends[1], each


SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, 3e38], np.float32)
INTEGRAL = st.sampled_from([Type.INT32, Type.INT64, Type.UINT64])


@settings(deadline=None, derandomize=True, max_examples=150)
@given(floats(), INTEGRAL, st.sampled_from([Type.FLOAT32, Type.FLOAT64]), st.booleans())
def test_rounded_ranges_hold_all_values(x: Node, type: Type, source: Type, is_finite: bool) -> None:
    root, inputs = cast(x, source), points()
    if not is_finite:
        inputs["score"] = np.resize(SPECIAL, inputs["score"].shape)
    (value,) = evaluate([cast(root, type)], inputs, ARRAYS if is_finite else (SPECIAL, ARRAYS[1]))
    least, greatest = rounded_range(root, type)
    assert least <= int(np.min(value)) <= int(np.max(value)) <= greatest


X = element(SPECIAL, 0, K)
# Casts of NaN and infinities, some of which rounding causes.
UNBOUNDED = {
    "a curve": op("tanh", X),
    "an angle": op("cos", X),
    "a product": op("multiply", op("tanh", X), 5.0),
    "a choice": op("where", op("less", Q, K), op("sign", X), 7.0),
    "a clip": op("minimum", op("maximum", X, 2.0), 9.0),
    "a clip without NaN": op("fmin", op("fmax", X, 2.0), 9.0),
    "the other argument": op("fmin", op("tanh", X), 9.0),
    "an overflow": op("tanh", op("subtract", op("multiply", K, 1e38), op("multiply", K, 1.1e38))),
    "a lost term": op("divide", 0.01, op("subtract", op("add", op("fmax", K, 1.0), 2.0**25), 2.0**25)),
    "a large integer": op("divide", 0.01, op("subtract", op("multiply", op("add", K, 2**25 + 1), 1.0), 2.0**25)),
    "a quotient": op("tanh", op("divide", op("multiply", K, 1e-44), op("multiply", K, 1e-44))),
}


@pytest.mark.parametrize("type", [Type.INT32, Type.INT64, Type.UINT64], ids=str)
@pytest.mark.parametrize("source", [Type.FLOAT32, Type.FLOAT64], ids=str)
@pytest.mark.parametrize("name", UNBOUNDED)
def test_the_range_of_a_cast_holds_what_floats_become(name: str, source: Type, type: Type) -> None:
    pairs = {"q_idx": np.arange(100) // 10, "k_idx": np.arange(100) % 10}
    root = cast(cast(UNBOUNDED[name], source), type)
    (values,) = evaluate([root], pairs, [SPECIAL])
    assert root.ends[0] <= int(np.min(values)) <= int(np.max(values)) <= root.ends[1]
    if name == "a clip without NaN":
        assert root.ends == (0, 10)


def test_a_sum_with_a_captured_nan_does_not_wrap_in_int32() -> None:
    table = np.array([np.nan, 0.5, 20.0])
    graph = trace(lambda b, h, i, j: np.tanh(table[j]).astype(np.int32) - 9 < 0, "mask_mod")
    (visible,) = evaluate([graph.root], {"k_idx": np.arange(3)}, [table])
    assert visible.tolist() == [True, True, True]


# Divisors that become 0, so that their quotients leave the range of exact numbers.
SMALL: dict[str, Any] = {
    "a float16": lambda j: np.float16(np.minimum(np.maximum(j * 1e-8, 1e-8), 1.0)),
    "a negative float16": lambda j: np.float16(np.minimum(j * 1e-9 - 2e-8, -1e-8)),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("sign", [1, -1])
def test_small_floats_do_not_leave_the_range_of_a_cast(name: str, sign: int) -> None:
    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        quotient = (sign * 0.01 / SMALL[name](j)).astype(np.int32)
        return quotient + 1 > 0 if sign * (-1 if "negative" in name else 1) > 0 else quotient - 2 < 0

    root = trace(mask_mod, "mask_mod").root
    (values,) = evaluate([root], GRID, ())
    np.testing.assert_array_equal(values, True)
    (division,) = (each for each in post_order([root]) if each.op == "cast" and each.arguments[0].op == "divide")
    (values,) = evaluate([division], GRID, ())
    assert division.ends[0] <= int(np.min(values)) <= int(np.max(values)) <= division.ends[1]
    assert 2**31 - 1 in np.abs(values.astype(np.int64) + (values < 0))


def test_rounded_quotients_and_logarithms_are_int32() -> None:
    for mask_mod in (
        lambda b, h, i, j: math.floor(i / 3) + math.ceil(j / 2) < 9,
        lambda b, h, i, j: int(np.log2(max(abs(i - j), 1)) * 8) + 5 < 30,
        lambda b, h, i, j: round(math.tanh(i - j) * 50) + 1 < j,
    ):
        order = post_order([trace(mask_mod, "mask_mod").root])
        assert {each.type for each in order if each.type.is_integer} == {Type.INT32}


# Scores.


def types_of(function: Any) -> set[Type]:
    return {each.type for each in post_order([trace(function, "score_mod").root]) if each.type.is_float}


def test_scores_are_float32_except_decisions_and_differences() -> None:
    wide = np.linspace(0.0, 1.0, ROWS)
    for score_mod in (
        lambda score, b, h, i, j: score - wide[h] * abs(i - j) + 0.1,
        lambda score, b, h, i, j: np.tanh(score.astype("float64") * wide[h]) * (i / 3) + (i * 0.5 > j),
        lambda score, b, h, i, j: score + i * 0.3 - min(wide[i], wide[j]),
        lambda score, b, h, i, j: score * NOW + SECONDS[i] * 0.1 * (SECONDS[j] - 0.1 > i * 0.1),
        lambda score, b, h, i, j: wide[i] - np.exp(-abs(i - j) * 0.1) - score,
        lambda score, b, h, i, j: score + int(np.log(max(i - j, 1) / 16) / np.log(8) * 16) + int(i / 3),
    ):
        assert types_of(score_mod) == {Type.FLOAT32}
    for score_mod in (
        lambda score, b, h, i, j: np.where(wide[i] > wide[j], score, -np.inf),
        lambda score, b, h, i, j: np.where(i * 0.1 > j, score, -np.inf),
    ):
        assert types_of(score_mod) == {Type.FLOAT32, Type.FLOAT64}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_differences_of_large_values_are_exact_in_scores(name: str) -> None:
    (values,) = evaluate([(graph := trace(DIFFERENCES[name], "score_mod")).root], GRID, [x.array for x in graph.arrays])
    expected = 0.1 * (PLACES - PLACES[:, None])
    np.testing.assert_allclose(np.reshape(values, (ROWS, ROWS)), expected, atol=2e-6)


@pytest.mark.skipif(not KERNELS.is_dir(), reason="needs a checkout")
def test_their_texts_have_these_values_and_compile(tmp_path: Path) -> None:
    cases = [case_of(each, "score_mod") for each in DIFFERENCES.values()]
    for name, (values,) in zip(DIFFERENCES, computed(cases, GRID, tmp_path), strict=True):
        expected = 0.1 * (PLACES - PLACES[:, None])
        np.testing.assert_allclose(values.reshape(ROWS, ROWS), expected, atol=2e-6, err_msg=name)
    compiled(cases, "sm_90a")


def test_a_difference_of_times_is_exact_in_scores_and_has_gradients() -> None:
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, ROWS, 1, 4)).astype(np.float32) for _ in range(4))

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return np.where(TIMES[j] <= TIMES[i], score - 0.01 * (TIMES[i] - TIMES[j]), -np.inf)

    bias = np.where(PLACES[:, None] >= PLACES, -0.1 * (PLACES[:, None] - PLACES), -np.inf).astype(np.float32)
    out, lse = cuflash.forward(q, k, v, return_lse=True, score_mod=score_mod)
    expected = cuflash.forward(q, k, v, return_lse=True, bias=bias)
    np.testing.assert_allclose(out, expected[0], rtol=1e-5, atol=1e-6)
    more = {"score_mod": score_mod, "captured_grads": (TIMES,)}
    *_, (of_times,) = cuflash.backward(dout, q, k, v, out, lse, **more)
    *_, (of_bias,) = cuflash.backward(dout, q, k, v, *expected, bias=bias, captured_grads=(bias,))
    assert of_times.dtype == np.float64
    np.testing.assert_allclose(of_times, 0.01 * (of_bias.sum(axis=0) - of_bias.sum(axis=1)), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["negative", "from the score", "to the score", "of large offsets"])
def test_their_gradients_are_those_of_a_bias(name: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, ROWS, 1, 4)).astype(np.float32) for _ in range(4))
    bias = (0.1 * (PLACES - PLACES[:, None])).astype(np.float32)
    more = {"score_mod": DIFFERENCES[name], "captured_grads": (TIMES,)}
    *_, (of_times,) = cuflash.backward(dout, q, k, v, *forward(q, k, v, score_mod=DIFFERENCES[name]), **more)
    *_, (of_bias,) = cuflash.backward(dout, q, k, v, *forward(q, k, v, bias=bias), bias=bias, captured_grads=(bias,))
    np.testing.assert_allclose(of_times, 0.01 * (of_bias.sum(axis=0) - of_bias.sum(axis=1)), rtol=1e-4, atol=1e-7)


def forward(*arrays: Any, **more: Any) -> Any:
    return cuflash.forward(*arrays, return_lse=True, **more)
