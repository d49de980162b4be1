"""Evaluation of expression graphs on NumPy arrays."""

from __future__ import annotations

import numpy as np
import pytest
from expressions import ARRAYS, SCORE, B, H, K, Q, floats, number, of_floats, of_integers, points
from hypothesis import given, settings

from cuflash.mods.graph.graph import Node
from cuflash.mods.graph.operations import NUMPY, Type
from cuflash.mods.graph.simplify import build, cast
from cuflash.reference.evaluate import evaluate

POINTS = points()


@settings(deadline=None, derandomize=True, max_examples=60)
@given(floats())
def test_values_at_all_points_are_those_at_each_point(root: Node) -> None:
    (together,) = evaluate([root], POINTS, ARRAYS)
    for place in range(0, 40, 7):
        (alone,) = evaluate([root], {name: x[place] for name, x in POINTS.items()}, ARRAYS)
        np.testing.assert_array_equal(alone, np.broadcast_to(together, 40)[place])


def test_results_have_the_types_of_their_nodes() -> None:
    roots = build("less", K, Q), build("add", K, Q), cast(Q, Type.INT64), SCORE
    for each, value in zip(roots, evaluate(roots, POINTS, ARRAYS), strict=True):
        assert value.dtype == each.type.numpy
    assert evaluate([SCORE], POINTS, ARRAYS, np.float64)[0].dtype == np.float64


@pytest.mark.parametrize(("index", "expected"), [(-1, 1.0), (-5, -1.0), (-9, -1.0), (2, 0.0), (4, 1.0), (7, 1.0)])
def test_a_negative_index_counts_from_the_end_and_others_are_clamped(index: int, expected: float) -> None:
    shifted = build("add", Q, number(index))
    assert evaluate([of_floats(shifted)], {"q_idx": 0}, ARRAYS)[0] == expected


def test_an_element_of_an_array_without_elements_is_zero() -> None:
    assert evaluate([of_floats(Q)], {"q_idx": 3}, (np.zeros(0, np.float32),))[0] == 0.0


def test_loads_take_an_index_for_each_axis() -> None:
    values = evaluate([of_integers(B, H)], {"b": np.array([0, 1]), "h": np.array([2, 1])}, ARRAYS)[0]
    assert values.tolist() == [2, 7]


@pytest.mark.parametrize("op", ["floor_divide", "remainder", "truncated_divide", "truncated_remainder"])
def test_integers_divided_by_zero_give_zero_and_floats_what_numpy_gives(op: str) -> None:
    zero = build("subtract", Q, K)
    assert evaluate([build(op, build("add", Q, number(7)), zero)], {"q_idx": 3, "k_idx": 3}, ())[0] == 0
    with np.errstate(all="ignore"):
        expected = NUMPY[op](np.float32(3.0), np.float32(0.0))
    (value,) = evaluate([build(op, SCORE, cast(zero, Type.FLOAT32))], {"score": 3.0, "q_idx": 3, "k_idx": 3}, ())
    np.testing.assert_array_equal(value, expected)


def test_python_rounds_down_and_c_towards_zero() -> None:
    root = build("subtract", Q, number(7))
    values = [evaluate([build(op, root, number(2))], {"q_idx": 0}, ())[0] for op in (
        "floor_divide", "remainder", "truncated_divide", "truncated_remainder")]  # fmt: skip
    assert values == [-4, 1, -3, -1]
    least = number(-(2**31))
    divided = build("truncated_divide", build("add", Q, least), number(3))
    assert evaluate([divided], {"q_idx": 0}, ())[0] == -715827882
