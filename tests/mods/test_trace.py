"""Tracing: the graph of a function has its values, and errors name the line and the remedy."""

from __future__ import annotations

import functools
import gc
import math
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from expressions import ARRAYS
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import called, check, values_of

from cuflash import mods
from cuflash.errors import ProblemError
from cuflash.mods.tracing.trace import MAX_FORMS, MAX_NUMBERS, MAX_TRACES_OF_CODE, trace

SETTINGS = settings(deadline=None, derandomize=True, max_examples=100)
FLOATS, INTEGERS = ARRAYS
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
NAMES = {"np": np, "math": math, "FLOATS": FLOATS, "INTEGERS": INTEGERS, "__name__": "user"}


def _texts(leaves: list[str], one: list[str], two: list[str], most: int) -> st.SearchStrategy[str]:
    def more(texts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        pairs = st.tuples(st.sampled_from(two), texts, texts).map(lambda x: x[0].format(*x[1:]))
        return st.one_of(pairs, st.tuples(st.sampled_from(one), texts).map(lambda x: x[0].format(x[1])))

    return st.recursive(st.sampled_from(leaves), more, max_leaves=most)


INTEGER_TEXTS = _texts(
    ["b", "h", "q", "k", "3", "-2", "7"],
    ["({} // 4)", "({} // -3)", "({} % 5)", "({} % -4)", "abs({})", "(-{})", "({} * 3)", "({} & 6)", "({} >> 1)",
     "np.floor_divide({}, 3)", "divmod({}, 3)[1]", "int(INTEGERS[1, ({0}) % 3])", "(({}) ** 2)", "round({})"],
    ["({} + {})", "({} - {})", "min({}, {})", "max({}, {})", "({0} if {0} < {1} else {1})", "np.minimum({}, {})"],
    8,
)  # fmt: skip
MASK_TEXTS = st.builds(
    lambda ops, x, y, z: ops.format(x, y, z),
    st.sampled_from(
        ["{} < {}", "{} <= {} <= {}", "({} == {}) | ({} > 3)", "{} in ({}, {}, 5)", "not ({} != {})",
         "any([{} < {}, q > 9])", "({} < {}) and ({} >= 2)", "all([{} < {}, {} < 9])",
         "bool({}) or {} > {}", "np.logical_xor({} < {}, {} < 3)"]
    ),
    INTEGER_TEXTS, INTEGER_TEXTS, INTEGER_TEXTS,
)  # fmt: skip
SCORE_TEXTS = _texts(
    ["score", "score", "0.5", "-1.25", "FLOATS[h % 5]", "FLOATS[(q + k) % 5]", "float(q - k)", "(q * 0.125)"],
    ["np.tanh({})", "math.exp(math.tanh({}))", "np.sin({})", "(-{})", "({} / 3.0)", "np.sqrt(1.5 + np.tanh({}))",
     "np.where(q < k, {}, 0.0)", "abs({})", "np.clip({}, -1.0, 2.0)", "(1.0 / (2.0 + math.cos({})))", "np.floor({})"],
    ["({} + {})", "({} - {})", "({} * np.tanh({}))", "min({}, {})", "np.maximum({}, {})", "({} if q < k else {})"],
    8,
)  # fmt: skip


def from_text(text: str, arguments: str) -> Any:
    return eval(f"lambda {arguments}: {text}", dict(NAMES))


@SETTINGS
@given(MASK_TEXTS)
def test_graphs_of_random_masks_have_the_values_of_the_functions(text: str) -> None:
    check(from_text(f"bool({text})", "b, h, q, k"), "mask_mod")


@SETTINGS
@given(SCORE_TEXTS)
def test_graphs_of_random_scores_have_the_values_of_the_functions(text: str) -> None:
    check(from_text(f"({text}) * 1.0", "score, b, h, q, k"), "score_mod")


def alibi(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return score + SLOPES[h] * (k_idx - q_idx)


def test_a_graph_refers_to_the_arrays_that_it_loads_from() -> None:
    graph = trace(alibi, "score_mod")
    assert [each.array is SLOPES for each in graph.arrays] == [True]
    assert (graph.arrays[0].dtype, graph.arrays[0].shape) == ("float32", (4,))


def test_an_array_without_loads_is_no_part_of_a_graph() -> None:
    unused, used = np.ones(3, np.float32), np.arange(3, dtype=np.float32)

    def function(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return np.where(q_idx < 0, unused[b], used[h]) + used.shape[0]

    graph = trace(function, "score_mod")
    assert [each.array is used for each in graph.arrays] == [True]
    np.testing.assert_array_equal(values_of(graph), called(lambda s, b, h, q, k: used[min(h, 2)] + 3, "score_mod"))


def test_equal_functions_have_one_digest_and_others_differ() -> None:
    def digest(window: Any, table: Any) -> str:
        return trace(lambda b, h, q_idx, k_idx: (q_idx - k_idx < window) & (table[b, k_idx] > 0), "mask_mod").digest

    assert len({digest(5, table) for table in (INTEGERS, INTEGERS + 1, np.ones((9, 9), "i4"))}) == 1
    others = [(6, INTEGERS), (5, INTEGERS.astype("i8")), (5, FLOATS.reshape(5, 1)), (5.0, INTEGERS), (5, INTEGERS)]
    assert len({digest(*each) for each in others}) == 5


def test_numbers_become_scores_and_conditions_masks() -> None:
    assert trace(lambda score, b, h, q, k: q, "score_mod").root.type.name == "FLOAT32"
    assert trace(lambda b, h, q, k: True, "mask_mod").root.value is True
    assert trace(lambda score, b, h, q, k: 2, "score_mod").root.value == 2.0


@pytest.mark.parametrize(
    ("kind", "function", "message"),
    [
        ("mask_mod", lambda b, h, q, k: q - k, "returned a value of type int32; it must return bool"),
        ("score_mod", lambda score, b, h, q, k: q < k, "returned a value of type bool; it must return a number"),
        ("mask_mod", lambda b, h, q, k: None, "returned a NoneType"),
        ("mask_mod", lambda b, h, q, k: (q < k, True), "returned a tuple"),
        ("score_mod", lambda score, b, h, q, k: SLOPES * score, "returned a whole array"),
        ("score_mod", lambda b, h, q, k: q, r"must be a function of \(score, b, h, q_idx, k_idx\), but .*<lambda>"),
        ("score_mod", lambda score, b, h, q, k: score + np.timedelta64(3), "a timedelta64 meets traced values"),
        ("mask_mod", lambda b, h, q, k: q < np.timedelta64(3, "ns"), "a timedelta64 meets traced values"),
        ("mask_mod", dict, "mask_mod is the class dict; it must be a function of"),
        ("mask_mod", 3, r"mask_mod is an int; it must be a function of \(b, h, q_idx, k_idx\)"),
        ("mask_mod", lambda b, h, q, k: q + "a" < k, "NoneType|a str meets|unsupported operand"),
    ],
)  # fmt: skip
def test_results_other_than_a_score_or_mask_are_refused(kind: str, function: Any, message: str) -> None:
    with pytest.raises((ProblemError, TypeError), match=message):
        trace(function, kind)


def loop(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    while q_idx > 0:
        q_idx = q_idx - 1
    return q_idx == 0


def counting(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return sum(i < k_idx for i in range(q_idx)) > 2


def in_a_list(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return [1, 2, 3][h] < q_idx


def in_a_set(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return h in {1, 2}


def whole_array(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return (SLOPES * 2)[h] < q_idx


def cumulated(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return np.cumsum(SLOPES)[h] < q_idx


def sliced(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return SLOPES[1:][h] < q_idx


def outside(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return SLOPES[4] < q_idx


def by_a_float(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return SLOPES[h / 2] < q_idx


def unknown(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return np.arctan2(q_idx, k_idx) < 1


def array_inside(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return np.arange(3)[h] < q_idx


def too_many_axes(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return SLOPES[b, h] < q_idx


def complex_table(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return COMPLEX[h] == 0


def swapped_table(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return SWAPPED[h] == 0


def minus(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return (q_idx < k_idx) - (h < 2)


COMPLEX, SWAPPED = np.ones(4, "c8"), np.ones(4, ">f4")
REFUSED = {
    loop: "more than 32 paths",
    counting: "has no number yet",
    in_a_list: "has no number yet",
    in_a_set: "has no number yet",
    whole_array: "compute it before the call",
    cumulated: "cumsum of a traced value is not known|is computed with as a whole",
    sliced: "slice it before the call",
    outside: "index 4 is outside of an axis of 4",
    by_a_float: "an index of type float64",
    unknown: "numpy.arctan2 of a traced value is not known; these are: .*tanh",
    array_inside: "has no number yet|make it before",
    too_many_axes: "2 indices of an array of 1 axes",
    complex_table: "complex64 has no place in a mod",
    swapped_table: "are not in this machine's order",
    minus: "subtract of bool has no meaning",
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda each: each.__name__)
def test_untraceable_functions_name_the_line_and_the_remedy(function: Any) -> None:
    with pytest.raises(ProblemError, match=REFUSED[function]) as caught:
        trace(function, "mask_mod")
    if function not in (complex_table, swapped_table):  # these fail before a line runs
        assert re.match(rf"{re.escape(__file__)}:\d+, in {function.__name__}: ", str(caught.value))
        line = int(str(caught.value).split(":")[1].partition(",")[0])
        assert 0 < line - function.__code__.co_firstlineno < 3


def test_other_errors_stay_and_name_the_traced_function() -> None:
    def function(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return {}["missing"]

    with pytest.raises(KeyError) as caught:
        trace(function, "mask_mod")
    assert re.search(r"traced the mask_mod .*function .*test_trace.py:\d+", caught.value.__notes__[0])


def test_a_traced_function_is_called_again_after_changes_only() -> None:
    calls = []
    window = [3]

    def function(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        count()
        return q_idx - k_idx < window[0]

    count = np.vectorize(lambda: calls.append(1)).pyfunc
    first = trace(function, "mask_mod")
    count_before = len(calls)
    assert trace(function, "mask_mod").root is first.root
    assert len(calls) == count_before
    window[0] = 4
    assert trace(function, "mask_mod").root is not first.root


def test_another_function_of_the_same_code_brings_its_own_arrays() -> None:
    tables = np.zeros(4, np.float32), np.ones(4, np.float32)
    graphs = [trace(lambda score, b, h, q, k, table=table: score + table[h], "score_mod") for table in tables]
    assert [id(graph.arrays[0].array) for graph in graphs] == [id(table) for table in tables]
    assert graphs[0].root is graphs[1].root


def test_two_names_of_one_array_are_one_array() -> None:
    def ids(x: Any, y: Any) -> list[int]:
        graph = trace(lambda score, b, h, q_idx, k_idx: x[h] - y[q_idx], "score_mod")
        return [id(each.array) for each in graph.arrays]

    x, y = np.zeros(4, np.float32), np.ones(4, np.float32)
    assert ids(x, x) == [id(x)]
    assert ids(x, y) == [id(x), id(y)]
    assert ids(y, y) == [id(y)]


def test_traces_keep_no_array_alive() -> None:
    table = np.zeros(4, np.float32)
    reference = weakref.ref(table)
    trace(functools.partial(lambda table, score, b, h, q_idx, k_idx: score + table[h], table), "score_mod")
    del table
    gc.collect()
    assert reference() is None


def test_traces_of_one_code_are_bounded() -> None:
    from cuflash.mods.tracing import trace as module

    for window in range(3 * MAX_TRACES_OF_CODE):
        trace(lambda b, h, q_idx, k_idx, window=window: q_idx - k_idx < window, "mask_mod")
    assert max(map(len, module._traces.values())) == MAX_TRACES_OF_CODE
    assert len(module._traces) <= module.MAX_TRACES


def test_a_path_that_is_not_taken_adds_nothing() -> None:
    def function(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        if h == 0:
            return score
        if h == 1 and q_idx > k_idx:
            return score * 2
        return score - 1 if q_idx != k_idx else 0

    check(function, "score_mod")


def test_paths_of_conditions_become_and_and_or() -> None:
    graph = trace(lambda b, h, q_idx, k_idx: 0 <= q_idx - k_idx < 8, "mask_mod")
    assert graph.root is trace(lambda b, h, q_idx, k_idx: (q_idx - k_idx >= 0) & (q_idx - k_idx < 8), "mask_mod").root
    graph = trace(lambda b, h, q_idx, k_idx: q_idx < 3 or k_idx < 5, "mask_mod")
    assert graph.root.op == "bitwise_or"
    assert graph.root.inputs == {"q_idx", "k_idx"}


def warnings_of(make: Callable[[int], Any], numbers: Any, kind: str = "score_mod") -> list[str]:
    """Traces the functions of these numbers, and returns the warnings."""
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        for number in numbers:
            trace(make(number), kind)
    return [str(each.message) for each in records if each.category is RuntimeWarning]


def scale_by(factor: Any) -> Any:
    return lambda score, b, h, q, k: score * factor


def test_recompiling_warns_once_with_line_and_remedy() -> None:
    assert warnings_of(lambda n: scale_by(n + 0.5), range(MAX_NUMBERS - 1)) == []
    (text,) = warnings_of(lambda n: scale_by(n + 0.5), range(3 * MAX_NUMBERS))
    place = rf"score_mod scale_by\.<locals>\.<lambda> \({re.escape(__file__)}:\d+\)"
    assert re.match(rf"{place} was traced with {MAX_NUMBERS} different", text)
    assert "as an array without axes" in text
    assert warnings_of(lambda n: scale_by(n - 99.5), range(MAX_NUMBERS)) == []
    values = np.linspace(0, 1, 2 * MAX_NUMBERS, dtype=np.float32)
    assert len({trace(scale_by(np.array(value)), "score_mod").digest for value in values}) == 1


def test_a_number_that_comes_back_counts_once() -> None:
    def capped(cap: float) -> Any:
        return lambda score, b, h, q, k: cap * np.tanh(score / cap)

    assert warnings_of(lambda n: capped(n % (MAX_NUMBERS - 1) + 2.0), range(9 * MAX_NUMBERS)) == []


def test_other_functions_and_arrays_are_other_forms() -> None:
    parts = [lambda s, n=n: sum([s] * n, s) * 0.5 for n in range(1, 2 * MAX_NUMBERS)]
    assert warnings_of(lambda n: lambda score, b, h, q, k: parts[n](score) + n, range(len(parts))) == []

    def with_rank(n: int) -> Any:
        table = np.ones((2,) * (n % 7), np.float32 if n < 7 else np.float64)
        return lambda score, b, h, q, k: score * table[(h,) * (n % 7)]

    assert warnings_of(with_rank, range(14)) == []


def test_the_table_of_forms_is_bounded() -> None:
    def with_form(n: int) -> Any:
        def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            for _ in range(n // 2 % (MAX_FORMS + 8)):
                score = score * score
            return score + n

        return score_mod

    assert warnings_of(with_form, range(4 * MAX_FORMS)) == []


def test_chunks_are_a_part_of_a_kernel_and_windows_are_not() -> None:
    assert warnings_of(mods.sliding_window, range(3 * MAX_NUMBERS), "mask_mod") == []
    assert len(warnings_of(mods.chunked, range(2, 3 * MAX_NUMBERS), "mask_mod")) == 1
