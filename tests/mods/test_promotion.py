"""Type promotion: numbers of Python and NumPy, arrays and indices meet and compare as in NumPy."""

from __future__ import annotations

import math
import operator
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from exact_mods import PLACES, ROWS, SECONDS, TIMES
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import INPUTS, KERNELS, Case, case_of, check_equal, check_values, compiled

import cuflash
from cuflash.mods.graph.derivative import differentiate
from cuflash.mods.graph.graph import post_order, variable
from cuflash.mods.graph.operations import Type
from cuflash.mods.tracing.trace import trace
from cuflash.reference.evaluate import evaluate

ZERO_D = np.array(1_700_000_030.2)
TENTHS = np.float32(0.1) * PLACES.astype(np.float32)
SHORT = PLACES.astype(np.int8)
MEETINGS = {
    "a number of Python": lambda b, h, i, j: (TENTHS[j] <= 0.3) & (TENTHS[i] + 0.1 >= TENTHS[j] * 1.7),
    "a number of NumPy": lambda b, h, i, j: (TENTHS[j] <= np.float64(0.3)) | (TENTHS[i] + np.float64(0.1) > 0.2),
    "an array without axes": lambda b, h, i, j: (TENTHS[j] + ZERO_D <= ZERO_D + 0.4) & (TIMES[i] < ZERO_D),
    "a float32 of NumPy": lambda b, h, i, j: TENTHS[j] <= np.float32(0.3),
    "short integers": lambda b, h, i, j: (SHORT[j] * 0.1 + 0.2 <= 0.3) | (SHORT[i] == 2.0),
    "indices": lambda b, h, i, j: (i * 0.1 + 0.2 <= 0.3) | (j > 4.9999999999),
    "a larger index": lambda b, h, i, j: (2**28 + i + 0.25 > 2**28 + j) & (i < np.float64(1e300)),
    "a cast float32": lambda b, h, i, j: TENTHS[j].astype("float64") + 0.25 <= TENTHS[i] + np.float32(0.25),
    "a function of a number": lambda b, h, i, j: TENTHS[j] > np.sqrt(np.float64(0.09)),
}


@pytest.mark.parametrize("name", MEETINGS)
def test_numbers_meet_as_in_numpy(name: str) -> None:
    visible = np.broadcast_to(MEETINGS[name](0, 0, PLACES[:, None], PLACES), (ROWS, ROWS))
    one = np.zeros((1, ROWS, 1, 8), np.float32)
    counts = np.exp(cuflash.lse(one, one, mask_mod=MEETINGS[name])).ravel()
    np.testing.assert_allclose(counts, visible.sum(axis=1), rtol=1e-6)


def test_functions_of_the_language_take_numbers_of_numpy() -> None:
    assert cuflash.mods.exp(np.float64(0.3)) == pytest.approx(math.exp(0.3), rel=1e-12)


def test_a_guard_of_a_gradient_decides_as_the_function_does() -> None:
    later = SECONDS + np.float32(60)

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score * np.where(SECONDS[i] + np.float64(60.0) <= later[j], 2.0, 1.0)

    slope = differentiate(trace(score_mod, "score_mod").root)[variable("score")]
    (values,) = evaluate([slope], {"q_idx": PLACES[:, None], "k_idx": PLACES}, [SECONDS, later])
    is_double = SECONDS[:, None] + np.float64(60.0) <= later
    assert (is_double != (SECONDS[:, None] + np.float32(60.0) <= later)).any()
    np.testing.assert_array_equal(values, np.where(is_double, 2.0, 1.0))


INTEGERS = np.array([0, 1, -1, 2**24, 2**24 + 1, 2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63)])
NATURALS = np.array([0, 1, 2**24 + 1, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1], np.uint64)
NUMBERS = st.one_of(
    st.floats(),
    st.sampled_from([*map(float, INTEGERS), *map(float, NATURALS)]),
    st.integers(-(2**66), 2**66).map(float),
    st.integers(-9, 9).map(lambda n: n + 1e-9),
)
COMPARED = ("lt", "le", "gt", "ge", "eq", "ne")


@pytest.mark.filterwarnings("ignore:mask_mod .* was traced with")
@settings(deadline=None, derandomize=True, max_examples=100)
@given(NUMBERS, st.sampled_from(COMPARED), st.sampled_from([float, np.float64]))
def test_integers_compare_exactly_with_numbers(number: float, name: str, kind: Any) -> None:
    compare, value = getattr(operator, name), kind(number)
    for array in (INTEGERS, NATURALS):
        for is_first in (True, False):
            pair = (lambda x: (x, value)) if is_first else (lambda x: (value, x))
            graph = trace(lambda b, h, i, j, pair=pair, array=array: compare(*pair(array[j])), "mask_mod")
            (visible,) = evaluate([graph.root], {"k_idx": np.arange(len(array))}, [x.array for x in graph.arrays])
            pairs = [(x, number) if is_first else (number, x) for x in array.tolist()]
            assert np.broadcast_to(visible, len(array)).tolist() == [compare(*each) for each in pairs]


def test_indices_compare_as_integers_where_float32_is_not_exact() -> None:
    for mask_mod in (
        lambda b, h, i, j: j - i > 0.3,
        lambda b, h, i, j: j - i < 2.0**24 + 1,
        lambda b, h, i, j: i == 1e30,
    ):
        assert all(not each.type.is_float for each in post_order([trace(mask_mod, "mask_mod").root]))
    root = trace(lambda b, h, i, j: j - i > 0.5, "mask_mod").root
    assert {each.type for each in post_order([root]) if each.type.is_float} == {Type.FLOAT32}


# Floats of 16 bits.

SHORT_FLOATS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
_BITS = np.random.default_rng(0).integers(0, 2**32, 3000, np.uint32).view(np.float32)
_HALVES = np.arange(2**16, dtype=np.uint16)[::7]
with np.errstate(all="ignore"):
    _STEPS = [
        *(_HALVES.view(kind).astype(np.float32) for kind in SHORT_FLOATS.values()),
        _HALVES.view(np.float16).astype(np.float32) * np.float32(1 + 2.0**-11),  # halfway to the next number
        _HALVES.view(ml_dtypes.bfloat16).astype(np.float32) * np.float32(1 + 2.0**-8),
        *(_BITS, _BITS * np.float32(2.0**-20)),
    ]
_ENDS = [65519.996, 65520, -65520, 2.0**-25, 2.0**-24 * 1.5, -(2.0**-26), np.inf, -np.inf, np.nan, 0.0, -0.0]
LONG = np.concatenate([*_STEPS, np.linspace(-7e4, 7e4, 1001, dtype=np.float32), np.float32(_ENDS)])
CASTS: dict[str, Any] = {
    "a method": lambda x, dtype: x.astype(dtype),
    "a name": lambda x, dtype: x.astype(np.dtype(dtype).name),
    "a method of a tensor": lambda x, dtype: getattr(x, {"float16": "half"}.get(np.dtype(dtype).name, "bfloat16"))(),
    "a keyword": lambda x, dtype: x.to(dtype=dtype),
    "twice": lambda x, dtype: x.astype(dtype).astype(np.float32).astype(dtype),
}


def casts(name: str, dtype: str) -> tuple[list[Case], Any]:
    """Returns casts to a float of 16 bits, and their values for `OF_LONG`."""
    kind = SHORT_FLOATS[dtype]
    with np.errstate(all="ignore"):
        expected = LONG.astype(kind).astype(np.float32)

    def of_element(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return CASTS[name](LONG[j], kind)

    def of_array(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return CASTS[name](LONG, kind)[j]

    def of_score(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return CASTS[name](score, kind)

    functions = [of_element, of_score, of_array][: 3 if name in ("a method", "a name") else 2]
    graphs = [trace(function, "score_mod") for function in functions]
    return [Case([graph.root], [each.array for each in graph.arrays]) for graph in graphs], expected


OF_LONG = dict.fromkeys(INPUTS, 0) | {"k_idx": np.arange(LONG.size), "score": LONG}


@pytest.mark.parametrize("dtype", SHORT_FLOATS)
@pytest.mark.parametrize("name", CASTS)
def test_casts_to_16_bits_round(name: str, dtype: str) -> None:
    cases, expected = casts(name, dtype)
    for case in cases:
        (values,) = evaluate(case.roots, OF_LONG, case.arrays)
        assert np.asarray(values).dtype == np.float32
        np.testing.assert_array_equal(values, expected)


@pytest.mark.skipif(not KERNELS.is_dir(), reason="needs a checkout")
def test_the_texts_of_casts_round_and_compile(tmp_path: Path) -> None:
    cases: dict[str, tuple[Case, Any]] = {}
    for name, dtype in product(CASTS, SHORT_FLOATS):
        each, expected = casts(name, dtype)
        cases |= {f"{name}, {dtype}, {number}": (case, expected) for number, case in enumerate(each)}
    check_values(cases, OF_LONG, tmp_path, signs=True)
    compiled([case for case, _ in cases.values()], "sm_80")


TENTH = np.arange(32) * 0.1
LONGER = TENTH.astype(np.float32)
# Comparisons of floats of 16 bits, by a class c, with numbers of Python. ml_dtypes does not round them, so n does.
COMPARED: dict[str, Any] = {
    "equal": lambda x, c, n: x == n(0.3),
    "reversed": lambda x, c, n: operator.le(n(0.7), x),
    "less": lambda x, c, n: (x < n(0.7)) | (x > n(1.3)),
    "unequal": lambda x, c, n: x != n(0.3),
    "a function": lambda x, c, n: np.less_equal(n(0.7), x) & np.equal(x, n(0.7)),
    "an integer": lambda x, c, n: x * 0 + x == n(2),
    "a set": lambda x, c, n: (x == n(0.1)) | (x == n(0.3)),
    "negative": lambda x, c, n: -x == n(-0.3),
    "absolute": lambda x, c, n: abs(-x) >= n(0.7),
    "a choice": lambda x, c, n: np.where(x < n(0.7), x, -x) == n(-0.7),
    "an extreme": lambda x, c, n: np.minimum(x, -x) <= n(-0.7),
    "a strong float32": lambda x, c, n: x >= np.float32(0.7),
    "a strong float64": lambda x, c, n: (x >= np.float64(0.7)) | (x == np.float64(0.3)),
    "a cast": lambda x, c, n: (x.astype(np.float32) == 0.3) | (x.astype(np.float32) >= 0.7),
    "a cast to float64": lambda x, c, n: (x.astype(np.float64) == 0.3) | (x.astype(np.float64) >= 0.7),
    "a class": lambda x, c, n: np.float32(x) >= 0.7,
    "twice": lambda x, c, n: x.astype(np.float32).astype(c) == n(0.3),
    "a sum": lambda x, c, n: x.astype(np.float32) + 0.1 == 0.3,
    "beyond": lambda x, c, n: (x > -1e5) & (x < 1e6),
}


SOURCES = ("captured", "computed", "whole")
OF_SHORT = dict.fromkeys(INPUTS, 0) | {"k_idx": np.arange(TENTH.size), "score": np.zeros(TENTH.size)}


def comparison(name: str, source: str, dtype: str) -> tuple[Case, Any]:
    """Returns a comparison of floats of 16 bits, and its values for `OF_SHORT`."""
    kind, compare = SHORT_FLOATS[dtype], COMPARED[name]
    short = TENTH.astype(kind)
    functions: dict[str, Any] = {
        "captured": lambda b, h, i, j: compare(short[j], kind, float),
        "computed": lambda b, h, i, j: compare((j * 0.1).astype(kind), kind, float),
        "whole": lambda b, h, i, j: compare(LONGER.astype(kind)[j], kind, float),
    }
    with np.errstate(all="ignore"):
        expected = compare(short, kind, float if dtype == "float16" else kind)
    graph = trace(functions[source], "mask_mod")
    return Case([graph.root], [each.array for each in graph.arrays], is_exact=True), expected


@pytest.mark.parametrize("dtype", SHORT_FLOATS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", COMPARED)
def test_numbers_beside_16_bits_are_rounded_as_in_numpy(name: str, source: str, dtype: str) -> None:
    case, expected = comparison(name, source, dtype)
    (values,) = evaluate(case.roots, OF_SHORT, case.arrays)
    np.testing.assert_array_equal(values, expected)


@pytest.mark.skipif(not KERNELS.is_dir(), reason="needs a checkout")
def test_texts_round_numbers_beside_16_bits_as_numpy_does(tmp_path: Path) -> None:
    names = [each for each in product(COMPARED, SOURCES, SHORT_FLOATS) if each[1:] != ("captured", "bfloat16")]
    check_values({", ".join(each): comparison(*each) for each in names}, OF_SHORT, tmp_path)


def test_captured_floats_of_16_bits_are_not_rounded_again() -> None:
    short = TENTH.astype(np.float16)
    for mask_mod in (
        lambda b, h, i, j: short[j] == 0.3,
        lambda b, h, i, j: short[j].astype(np.float32) <= -short[i],
        lambda b, h, i, j: abs(short[j]) > 0.1,
    ):
        assert all(each.op not in ("as_float16", "multiply") for each in post_order([trace(mask_mod, "mask_mod").root]))


NEAR_TIES = np.array(
    [
        2049.0000001,
        2051 - 1e-7,
        65519.9999,
        -65519.9999,
        65520.0,
        1.00048828125 + 1e-12,
        2.0**-25 + 2e-17,
        2.0**-25,
        1 + 2.0**-8 + 1e-12,
        1 + 3 * 2.0**-8 - 1e-12,
        3.4e38,
        3.3961775292304e38,
        1e39,
        -1e-50,
        -0.0,
        np.nan,
        np.inf,
    ]
)


def test_float64_becomes_16_bits_by_one_rounding(tmp_path: Path) -> None:
    with np.errstate(all="ignore"):
        table = np.concatenate([NEAR_TIES, LONG.astype(np.float64) * (1 + 2.0**-45), LONG.astype(np.float64)])
        # NumPy rounds once; ml_dtypes would round to float32 first.
        expected = {"float16": table.astype(np.float16), "bfloat16": nearest_bfloat16(table)}
    inputs = dict.fromkeys(INPUTS, 0) | {"k_idx": np.arange(table.size), "score": np.zeros(table.size)}
    cases = {}
    for dtype, kind in SHORT_FLOATS.items():
        case = case_of(lambda s, b, h, i, j, kind=kind: table[j].astype(kind), "score_mod")
        (values,) = evaluate(case.roots, inputs, case.arrays)
        check_equal(values, expected[dtype], dtype, signs=True)
        cases[dtype] = case, expected[dtype]
    if KERNELS.is_dir():
        check_values(cases, inputs, tmp_path, signs=True)
        compiled([case for case, _ in cases.values()], "sm_80")


def nearest_bfloat16(x: Any) -> Any:
    """Returns the nearest bfloat16 by exact arithmetic of float64; ties go to even."""
    _, exponent = np.frexp(x)
    step = np.ldexp(1.0, np.maximum(exponent - 8, -133))
    rounded = np.rint(x / step) * step
    return np.where(np.abs(rounded) >= 2.0**128, np.copysign(np.inf, x), rounded)


def test_rounded_values_decide_and_have_gradients() -> None:
    table = np.linspace(0.0, 1.0, ROWS, dtype=np.float32)
    graph = trace(lambda b, h, i, j: table[i].astype(np.float16) <= np.float16(0.1) * (j + 1), "mask_mod")
    (visible,) = evaluate([graph.root], {"q_idx": PLACES[:, None], "k_idx": PLACES}, [table])
    halves = table.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(visible, halves[:, None] <= np.float32(np.float16(0.1)) * (PLACES + 1))
    slope = differentiate(trace(lambda s, b, h, i, j: s.astype(np.float16) * 3, "score_mod").root)[variable("score")]
    assert evaluate([slope], {"score": np.float32(0.1)}, []) == [3.0]
    root = trace(lambda s, b, h, i, j: int(np.tanh(table[j]).astype(np.float16) * 60000) + s, "score_mod").root
    assert {each.type for each in post_order([root]) if each.type.is_integer} == {Type.INT32}


@pytest.mark.parametrize("dtype", SHORT_FLOATS)
def test_casts_to_16_bits_round_as_in_torch(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    table = torch.tensor(LONG)
    functions = (
        lambda x: x.to(getattr(torch, dtype)),
        lambda x: x.type(getattr(torch, dtype)).float(),
        lambda x: x.type_as(torch.zeros((), dtype=getattr(torch, dtype))),
    )
    for function in functions:
        graph = trace(lambda s, b, h, i, j, function=function: function(table[j]), "score_mod")
        (values,) = evaluate([graph.root], {"k_idx": np.arange(LONG.size)}, [LONG])
        np.testing.assert_array_equal(values, function(table).float().numpy())
