"""Tracing: the graph of a function has the values that the function returns, and what cannot be traced says why."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import numpy as np
import pytest
from expressions import ARRAYS
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import called, check, values_of

from cuflash.errors import ProblemError
from cuflash.mods.graph.graph import variable
from cuflash.mods.tracing.trace import MAX_OF_CODE, trace

SETTINGS = settings(deadline=None, derandomize=True, max_examples=100)
FLOATS, INTEGERS = ARRAYS
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
NAMES = {"np": np, "math": math, "FLOATS": FLOATS, "INTEGERS": INTEGERS, "__name__": "user"}


def _texts(leaves: list[str], one: list[str], two: list[str], most: int) -> st.SearchStrategy[str]:
    def more(below: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        pairs = st.tuples(st.sampled_from(two), below, below).map(lambda x: x[0].format(*x[1:]))
        return st.one_of(pairs, st.tuples(st.sampled_from(one), below).map(lambda x: x[0].format(x[1])))

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


def function_of(text: str, arguments: str) -> Any:
    return eval(f"lambda {arguments}: {text}", dict(NAMES))


@SETTINGS
@given(MASK_TEXTS)
def test_graphs_of_random_masks_have_the_values_of_the_functions(text: str) -> None:
    check(function_of(f"bool({text})", "b, h, q, k"), "mask_mod")


@SETTINGS
@given(SCORE_TEXTS)
def test_graphs_of_random_scores_have_the_values_of_the_functions(text: str) -> None:
    check(function_of(f"({text}) * 1.0", "score, b, h, q, k"), "score_mod")


def alibi(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return score + SLOPES[h] * (k_idx - q_idx)


def test_a_graph_refers_to_the_arrays_that_it_loads_from() -> None:
    graph = trace(alibi, "score_mod")
    assert [each.array is SLOPES for each in graph.arrays] == [True]
    assert (graph.arrays[0].dtype, graph.arrays[0].shape) == ("float32", (4,))


def test_an_array_of_which_nothing_is_left_is_no_part_of_a_graph() -> None:
    unused, used = np.ones(3, np.float32), np.arange(3, dtype=np.float32)

    def function(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return np.where(q_idx < 0, unused[b], used[h]) + used.shape[0]

    graph = trace(function, "score_mod")
    assert [each.array is used for each in graph.arrays] == [True]
    np.testing.assert_array_equal(values_of(graph), called(lambda s, b, h, q, k: used[min(h, 2)] + 3, "score_mod"))


def test_equal_functions_have_one_digest_and_others_have_their_own() -> None:
    def of(window: Any, table: Any) -> Any:
        return lambda b, h, q_idx, k_idx: (q_idx - k_idx < window) & (table[b, k_idx] > 0)

    own = trace(of(5, INTEGERS), "mask_mod").digest
    for table in (INTEGERS + 1, np.ones((9, 9), "i4")):
        assert trace(of(5, table), "mask_mod").digest == own
    others = [of(6, INTEGERS), of(5, INTEGERS.astype("i8")), of(5, FLOATS.reshape(5, 1)), of(5.0, INTEGERS)]
    assert len({own, *(trace(each, "mask_mod").digest for each in others)}) == 5


def test_numbers_become_scores_and_conditions_masks() -> None:
    assert trace(lambda score, b, h, q, k: q, "score_mod").root.type.name == "FLOAT32"
    assert trace(lambda b, h, q, k: True, "mask_mod").root.value is True
    assert trace(lambda score, b, h, q, k: 2, "score_mod").root.value == 2.0


@pytest.mark.parametrize(
    ("kind", "function", "wanted"),
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
        ("mask_mod", 3, r"mask_mod is a int; it must be a function of \(b, h, q_idx, k_idx\)"),
        ("mask_mod", lambda b, h, q, k: q + "a" < k, "NoneType|a str meets|unsupported operand"),
    ],
)  # fmt: skip
def test_what_is_no_score_or_mask_is_refused(kind: str, function: Any, wanted: str) -> None:
    with pytest.raises((ProblemError, TypeError), match=wanted):
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


def summed(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return np.cumsum(SLOPES)[h] < q_idx


def sliced(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return SLOPES[1:][h] < q_idx


def outside(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return SLOPES[4] < q_idx


def by_a_float(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return SLOPES[h / 2] < q_idx


def unknown(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return np.arctan2(q_idx, k_idx) < 1


def made_inside(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return np.arange(3)[h] < q_idx


def too_many_axes(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return SLOPES[b, h] < q_idx


def of_complex(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return COMPLEX[h] == 0


def of_swapped(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
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
    summed: "cumsum of a traced value is not known|is computed with as a whole",
    sliced: "slice it before the call",
    outside: "index 4 is outside of an axis of 4",
    by_a_float: "an index of type float32",
    unknown: "numpy.arctan2 of a traced value is not known; these are: .*tanh",
    made_inside: "has no number yet|make it before",
    too_many_axes: "2 indices of an array of 1 axes",
    of_complex: "complex64 has no place in a mod",
    of_swapped: "are not in this machine's order",
    minus: "subtract of bool has no meaning",
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda each: each.__name__)
def test_what_cannot_be_traced_names_the_line_and_the_way_out(function: Any) -> None:
    with pytest.raises(ProblemError, match=REFUSED[function]) as caught:
        trace(function, "mask_mod")
    if function not in (of_complex, of_swapped):  # these fail before a line runs
        assert re.match(rf"{re.escape(__file__)}:\d+, in {function.__name__}: ", str(caught.value))
        line = int(str(caught.value).split(":")[1].partition(",")[0])
        assert 0 < line - function.__code__.co_firstlineno < 3


def test_other_errors_stay_and_tell_what_was_traced() -> None:
    def function(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return {}["missing"]

    with pytest.raises(KeyError) as caught:
        trace(function, "mask_mod")
    assert re.search(r"traced the mask_mod .*function .*test_trace.py:\d+", caught.value.__notes__[0])


def test_a_function_that_was_traced_is_not_called_again_until_something_changes() -> None:
    calls = []
    window = [3]

    def function(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        count()
        return q_idx - k_idx < window[0]

    count = np.vectorize(lambda: calls.append(1)).pyfunc
    first = trace(function, "mask_mod")
    before = len(calls)
    assert trace(function, "mask_mod").root is first.root
    assert len(calls) == before
    window[0] = 4
    assert trace(function, "mask_mod").root is not first.root


def test_another_function_of_the_same_code_brings_its_own_arrays() -> None:
    def of(table: Any) -> Any:
        return lambda score, b, h, q_idx, k_idx: score + table[h]

    one, other = np.zeros(4, np.float32), np.ones(4, np.float32)
    graphs = [trace(of(each), "score_mod") for each in (one, other)]
    assert [graph.arrays[0].array is array for graph, array in zip(graphs, (one, other), strict=True)] == [True, True]
    assert graphs[0].root is graphs[1].root


def test_two_names_of_one_array_are_told_from_two_arrays() -> None:
    def of(x: Any, y: Any) -> Any:
        return lambda score, b, h, q_idx, k_idx: x[h] - y[q_idx]

    one, other = np.zeros(4, np.float32), np.ones(4, np.float32)
    assert len(trace(of(one, one), "score_mod").arrays) == 1
    assert [id(each.array) for each in trace(of(one, other), "score_mod").arrays] == [id(one), id(other)]
    assert len(trace(of(other, other), "score_mod").arrays) == 1


def test_traces_keep_no_array_alive() -> None:
    import gc
    import weakref

    def of(table: Any) -> Any:
        return functools.partial(lambda table, score, b, h, q_idx, k_idx: score + table[h], table)

    table = np.zeros(4, np.float32)
    gone = weakref.ref(table)
    graph = trace(of(table), "score_mod")
    del graph, table
    gc.collect()
    assert gone() is None


def test_few_traces_are_kept_of_one_code() -> None:
    from cuflash.mods.tracing import trace as module

    for window in range(3 * MAX_OF_CODE):
        trace(lambda b, h, q_idx, k_idx, window=window: q_idx - k_idx < window, "mask_mod")
    assert max(map(len, module._traces.values())) == MAX_OF_CODE
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
    q, k = variable("q_idx"), variable("k_idx")
    graph = trace(lambda b, h, q_idx, k_idx: 0 <= q_idx - k_idx < 8, "mask_mod")
    assert graph.root is trace(lambda b, h, q_idx, k_idx: (q_idx - k_idx >= 0) & (q_idx - k_idx < 8), "mask_mod").root
    graph = trace(lambda b, h, q_idx, k_idx: q_idx < 3 or k_idx < 5, "mask_mod")
    assert graph.root.op == "bitwise_or"
    assert graph.root.inputs == {q.value, k.value}
