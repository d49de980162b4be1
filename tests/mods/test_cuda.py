"""The text of expression graphs: on the CPU it has the values of the graph, and NVRTC compiles it."""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from expressions import SCORE, B, H, K, Q, conditions, floats, integers, op
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from texts import COLUMNS, INPUTS, KERNELS, Case, check, compiled, computed, element, with_derivative

from cuflash.mods.graph.graph import Node, variable
from cuflash.mods.graph.operations import Type
from cuflash.mods.graph.simplify import cast, constant
from cuflash.reference.evaluate import evaluate

if not KERNELS.is_dir():
    pytest.skip("needs a checkout", allow_module_level=True)

SEQLEN_K = variable("seqlen_k")


@settings(deadline=None, derandomize=True, max_examples=4, phases=[Phase.generate], suppress_health_check=HealthCheck)
@given(st.lists(st.one_of(floats(), integers(), conditions()), min_size=20, max_size=20))
def test_the_text_of_random_graphs_has_their_values(
    tmp_path_factory: pytest.TempPathFactory, roots: list[Node]
) -> None:
    check([Case([root]) for root in roots], tmp_path_factory.mktemp("random"))


def distance() -> Node:
    return op("subtract", K, Q)


def alibi(slope: Node) -> Node:
    return op("add", SCORE, op("multiply", slope, distance()))


def computed_slope() -> Node:
    return op("exp2", op("multiply", op("add", H, 1), -0.5))


def softcap(cap: float = 20.0) -> Node:
    return op("multiply", op("tanh", op("divide", SCORE, cap)), cap)


def t5_bucket() -> Node:
    """Returns T5's bucket of a distance in both directions: exact up to 8, then on a logarithmic scale."""
    far = op("maximum", op("absolute", distance()), 1)
    log = op("divide", op("log", op("divide", cast(far, Type.FLOAT32), 8.0)), float(np.log(16)))
    on_scale = op("minimum", op("add", cast(op("multiply", log, 8.0), Type.INT32), 8), 15)
    bucket = op("where", op("less", far, 8), far, on_scale)
    return op("add", op("multiply", op("less", 0, distance()), 16), bucket)


def window(last: Node | int) -> Node:
    near = op("less_equal", op("absolute", op("subtract", Q, K)), last)
    return op("bitwise_and", op("less_equal", K, Q), near)


RNG = np.random.default_rng(0)
SLOPES = RNG.random(4).astype(np.float32)
BUCKETS = RNG.standard_normal((32, 4)).astype(np.float32)
DOCUMENTS = np.sort(RNG.integers(0, 4, (2, 60)))
OFFSETS = RNG.standard_normal((4, 119)).astype(np.float32)
WIDTHS = np.array([3, 2**31 - 1, 0, -5], np.int32)  # the second width sees all keys, and a sum with it may wrap
DOCUMENT = op("equal", element(DOCUMENTS, 0, B, Q), element(DOCUMENTS, 0, B, K))
SQUARE = op("subtract", op("multiply", SCORE, SCORE), element(SLOPES, 0, H))
RELATIVE = op("add", op("subtract", Q, K), 59)

NAMED = {
    "alibi_computed": Case([alibi(computed_slope())], []),
    "alibi_loaded": Case([alibi(element(SLOPES, 0, H))], [SLOPES]),
    "alibi_both_directions": Case([op("subtract", SCORE, op("multiply", op("absolute", distance()), 0.25))], []),
    "alibi_from_the_end": Case([op("add", SCORE, op("multiply", op("subtract", distance(), SEQLEN_K), 0.5))], []),
    "softcap": Case([softcap()], []),
    "t5": Case([op("add", SCORE, element(BUCKETS, 0, t5_bucket(), H)), t5_bucket()], [BUCKETS]),
    "document": Case([DOCUMENT, op("where", DOCUMENT, SCORE, -np.inf)], [DOCUMENTS]),
    "window": Case([window(7)], []),
    "loaded_window": Case([window(element(WIDTHS, 0, H))], [WIDTHS]),
    "relative": Case([op("add", SCORE, element(OFFSETS, 0, H, RELATIVE))], [OFFSETS]),
    "rounded_quotient": Case([op("floor", op("divide", op("multiply", K, n), float(n))) for n in (49, -41)], []),
    "transposed": Case([element(OFFSETS.T, 0, RELATIVE, H)], [OFFSETS.T]),
    "scaled": Case([op("divide", SCORE, op("add", element(SLOPES, 0, H), distance())), SQUARE], [SLOPES]),
}


@pytest.mark.parametrize("short", [True, False])
def test_the_text_of_known_functions_has_their_values(tmp_path: Path, short: bool) -> None:
    check(list(NAMED.values()), tmp_path, short=short)


def test_an_index_counts_from_the_end_or_stays_inside_the_array(tmp_path: Path) -> None:
    table = np.arange(12, dtype=np.float32).reshape(3, 4)
    wide = [op("subtract", cast(each, Type.INT64), 2**33 + 5) for each in (Q, K)]
    indices = [(-1, -4), (-4, 2), (3, 100), (-(2**31), 2**31 - 1), (distance(), Q), (B, distance()), wide, (wide[0], 2)]
    for short in (True, False):
        check([Case([element(table, 0, *each)], [table]) for each in indices], tmp_path, short=short)


@pytest.mark.parametrize("in_pairs", [False, True])
def test_elements_along_a_row_are_zero_outside_the_array(tmp_path: Path, in_pairs: bool) -> None:
    keys = 2 * COLUMNS + 4  # the last tile goes past the array
    names = "bool int8 uint8 int16 uint16 int32 float16 bfloat16 float32" + " float64" * (not in_pairs)
    cases, tables = [], []
    for name in names.split():
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        table = np.arange(3 * keys).reshape(3, keys) % 7 % (2 if name == "bool" else 100)
        cases.append(Case([element(table.astype(dtype), 0, H, K)], [table.astype(dtype)], runs={(0, 1): in_pairs}))
        tables.append(np.pad(table, ((0, 0), (0, 3 * COLUMNS - keys))))
        assert cases[-1].text().count("template pair<") == 1
        assert "clamped(1" not in cases[-1].text()
    h, k = (each.ravel() for each in np.indices((3, 3 * COLUMNS)))
    zero = np.zeros_like(h)
    inputs = {"b": zero, "h": h, "seqlen_q": zero, "seqlen_k": zero, "q_idx": zero, "k_idx": k, "score": zero}
    for results, table in zip(computed(cases, inputs, tmp_path), tables, strict=True):
        np.testing.assert_array_equal(results[0], table[h, k])
    compiled(cases, "sm_90a")


def test_loads_along_a_row_have_the_key_as_their_only_index_of_an_element() -> None:
    table = np.zeros((8, 8), np.float32)
    runs = {(0, 1): True}
    assert "template pair<true>" in Case([element(table, 0, op("floor_divide", Q, 2), K)], [table], runs=runs).text()
    for indices in ((Q, op("add", K, 1)), (K, K), (op("minimum", Q, K), K), (K, Q)):
        assert "template pair<" not in Case([element(table, 0, *indices)], [table], runs=runs).text(), indices


def test_every_dtype_is_read_as_numpy_reads_it(tmp_path: Path) -> None:
    names = "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64"
    values = np.array([0, 1, 100, 3, -2.5, -120, 6e-8])
    arrays = []
    for name in names.split():
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        arrays.append(np.abs(values).astype(dtype) if dtype.kind in "ub" else values.astype(dtype))
    scalar = np.array(2.5, np.float32)
    check([Case([element(each, 0, Q)], [each]) for each in arrays] + [Case([element(scalar, 0)], [scalar])], tmp_path)


def test_integers_wrap_shift_and_divide_as_in_numpy(tmp_path: Path) -> None:
    numbers = np.array([0, 1, -1, 7, -8, 33, -(2**31), 2**31 - 1], np.int32)
    x, y = element(numbers, 0, Q), element(numbers, 0, op("add", K, 1))
    least = constant(-(2**31))
    names = ["add", "subtract", "multiply", "left_shift", "right_shift", "minimum", "fmax", "bitwise_xor"]
    roots = [op(name, *pair) for name in names for pair in ((x, y), (x, least), (cast(x, Type.INT64), y))]
    roots += [op(name, x) for name in ("negative", "absolute", "invert")] + [op("less", x, least)]
    divisors = [element(np.array([0, 3, -7]), 1, K), constant(8), constant(-3), constant(-1), op("add", K, 1)]
    for name in ("floor_divide", "remainder", "truncated_divide", "truncated_remainder"):
        roots += [op(name, each, divisor) for divisor in divisors for each in (x, Q)]
    check([Case(roots, [numbers, np.array([0, 3, -7])])], tmp_path)


def _wrapped(x: int) -> int:
    return (x + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_the_least_integer_is_divided_by_minus_one(dtype: str, tmp_path: Path) -> None:
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    numbers = np.array([least, least + 1, most, 12, -12, 0], dtype)
    divisors = np.array([-1, 1, 5, -5, least, 0], dtype)
    every = {"q_idx": np.arange(36) // 6, "k_idx": np.arange(36) % 6, "score": np.zeros(36)}
    x, y = element(numbers, 0, Q), element(divisors, 1, K)
    roots = [op(name, x, divisor) for divisor in (y, -1) for name in ("floor_divide", "remainder")]
    case = Case(roots, [numbers, divisors])
    # A quotient of int32 is int64, which holds 2^31; one of int64 wraps.
    pairs = [(int(a), int(b)) for a in numbers for b in divisors]
    expected = [_wrapped(a // b if b else 0) for a, b in pairs], [a % b if b else 0 for a, b in pairs]
    expected += [_wrapped(-a) for a, _ in pairs], [0] * 36
    by_graph = evaluate(case.roots, every, case.arrays)
    (by_text,) = computed([case], dict.fromkeys(INPUTS, 0) | every, tmp_path)
    for values in (by_graph, by_text):
        for value, right in zip(values, expected, strict=True):
            np.testing.assert_array_equal(np.broadcast_to(value, 36).astype(float), np.array(right, float))
    compiled([case], "sm_90a")


def test_floats_that_are_not_finite_are_those_of_numpy(tmp_path: Path) -> None:
    numbers = np.array([0.0, -0.0, 1.5, -2.5, np.inf, -np.inf, np.nan], np.float32)
    x, y = element(numbers, 0, Q), element(numbers, 0, K)
    pairs = ["minimum", "maximum", "fmin", "fmax", "remainder", "truncated_remainder", "floor_divide", "less", "equal"]
    roots = [op("floor", op("divide", x, 49.0))]
    roots += [op(name, x, y) for name in pairs] + [op(name, x) for name in ("sign", "round", "absolute", "floor")]
    roots += [op(name, constant(each), x) for name in ("add", "maximum") for each in (np.nan, np.inf, -np.inf, -0.0)]
    every = {"q_idx": np.arange(49) // 7, "k_idx": np.arange(49) % 7, "score": np.zeros(49)}
    check([Case(roots, [numbers])], tmp_path, dict.fromkeys(INPUTS, 0) | every)


def test_values_and_derivatives_share_a_struct(tmp_path: Path) -> None:
    cases = [with_derivative(NAMED[name]) for name in ("softcap", "alibi_loaded", "scaled")]
    assert [len(case.roots) for case in cases] == [2, 2, 2]
    check(cases, tmp_path)
    assert cases[0].text().count("hyperbolic_tangent") == 1


def test_exact_results_have_the_same_operations_in_every_kernel(tmp_path: Path) -> None:
    x, y = cast(Q, Type.FLOAT32), cast(K, Type.FLOAT32)
    mixed = op("subtract", op("multiply", op("tanh", op("multiply", x, 0.125)), y), op("add", y, 0.5))
    root = op("less", mixed, op("multiply", x, x))
    case = Case([root], [], is_exact=True)
    check([case], tmp_path)
    assert not re.search(r"fmaf|hyperbolic_tangent| [-+*] value", case.text())
    names = "__fadd_rn", "__fsub_rn", "__fmul_rn", "tanhf"
    assert [case.text().count(f"{name}(") for name in names] == [2, 1, 3, 1]
    assert re.search(r"fmaf.*\n", Case([root], []).text())
    compiled([case], "sm_90a")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_nvrtc_compiles_values_and_derivatives(arch: str) -> None:
    extremes = Case([op("minimum", op("round", SCORE), op("floor_divide", SCORE, 3.0))], [])
    halves = [np.ones(3, ml_dtypes.bfloat16), np.ones(3, np.float16), np.ones(3, np.uint8)]
    loads = Case([op("add", element(each, number, Q), SCORE) for number, each in enumerate(halves)], halves)
    compiled([with_derivative(case) for case in NAMED.values()] + [extremes, loads], arch)


def test_equal_graphs_have_equal_text() -> None:
    text = NAMED["t5"].text()
    assert text == Case([op("add", SCORE, element(BUCKETS, 0, t5_bucket(), H)), t5_bucket()], [BUCKETS]).text()
    other_values = Case(NAMED["t5"].roots, [np.zeros((9, 9), np.float32)])
    assert text == other_values.text()


DOUBLE = re.compile(r"(?<![\w.])(?:0x[\da-f.]+p[+-]\d+|\d+\.\d*(?:e[+-]?\d+)?|\d+e[+-]?\d+)(?![f\d])")


def test_double_literals_match_in_text() -> None:
    assert DOUBLE.findall("x * 0x1.8p+1 + 2.5 - 3. + 1e9") == ["0x1.8p+1", "2.5", "3.", "1e9"]
    assert not DOUBLE.findall("x * 0x1.8p+1f + 2.5f - 3.f + 7 + value3.x + 0x7f800000u")


@pytest.mark.parametrize("name", NAMED)
def test_no_number_of_the_text_is_a_double(name: str) -> None:
    text = with_derivative(NAMED[name]).text()
    assert "double" not in text
    assert not DOUBLE.findall(text)


def function(case: Case, name: str) -> str:
    """Returns the body of a function of the struct."""
    return case.text().partition(f" {name}(const Arrays& arrays")[2].partition("  }\n")[0]


def test_an_element_of_alibi_is_an_addition_and_a_fused_multiplication() -> None:
    for name in ("alibi_computed", "alibi_loaded"):
        body = function(NAMED[name], "element")
        assert body.count("fmaf") == 1
        assert body.count(" = ") == 3, body  # the column as a float, the sum with the row's part, the column's part
        assert "arrays." not in body


def test_an_element_of_a_window_compares_columns_with_a_value_of_the_row() -> None:
    causal = function(Case([op("less_equal", K, Q)], []), "element")
    assert causal.count(" = ") == 1
    assert re.search(r"column <= row\.value\d", causal)


def test_values_of_a_head_or_a_row_are_computed_there() -> None:
    case = NAMED["document"]
    assert "array0" in function(case, "row")
    assert function(case, "element").count("array0.at(head.offset0 +") == 1
    slopes = NAMED["alibi_loaded"]
    assert "array0" in function(slopes, "head")
    assert "array0" not in function(slopes, "row")


def test_a_tangent_in_a_head_or_a_row_is_exact() -> None:
    table = np.zeros(8, np.float32)
    for index, exact in ((H, 1), (Q, 1), (K, 0)):
        text = Case([op("multiply", SCORE, op("tanh", element(table, 0, index)))], [table]).text()
        assert (text.count("tanhf("), text.count("hyperbolic_tangent(")) == (exact, 1 - exact)


def test_indices_that_cannot_be_negative_are_not_wrapped() -> None:
    assert "wrapped" not in NAMED["document"].text()
    assert "wrapped(1" in NAMED["relative"].text()
