"""Derivatives: central differences where a function is smooth, PyTorch's and JAX's values at its corners."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from expressions import ARRAYS, FLOATS, SCORE, H, K, Q, floats, number, of_floats, points, values
from hypothesis import given, settings

from cuflash.mods.graph.derivative import differentiate
from cuflash.mods.graph.graph import Node
from cuflash.mods.graph.operations import Type
from cuflash.mods.graph.simplify import build, cast
from cuflash.reference.evaluate import evaluate

SETTINGS = settings(deadline=None, derandomize=True, max_examples=100)
POINTS = points()
STEP = 1e-6


def evaluate_at(root: Node, *scores: float) -> list[float]:
    """Returns the values of a node at some scores, at the first point."""
    inputs = {name: x[0] for name, x in POINTS.items()} | {"score": np.array(scores)}
    return list(np.broadcast_to(evaluate([root], inputs, ARRAYS, np.float64)[0], len(scores)))


def difference(root: Node) -> Any:
    """Returns the central difference of a node by the score."""
    up, down = (values(root, POINTS | {"score": POINTS["score"] + step}) for step in (STEP, -STEP))
    return (up - down) / (2 * STEP)


@SETTINGS
@given(floats(smooth=True))
def test_the_derivative_by_the_score_is_that_of_differences(root: Node) -> None:
    derivative = values(differentiate(root).get(SCORE, number(0.0)), POINTS)
    np.testing.assert_allclose(derivative, difference(root), rtol=2e-4, atol=2e-5)


@SETTINGS
@given(floats(smooth=True))
def test_the_derivatives_by_loads_add_up_to_those_of_the_table(root: Node) -> None:
    sums, table = np.zeros(5), ARRAYS[FLOATS].astype(np.float64)
    for each, adjoint in differentiate(root).items():
        if each.op == "load":
            index = np.clip(values(each.arguments[0], POINTS), -5, 4).astype(int)
            np.add.at(sums, index, values(adjoint, POINTS))

    def total(number: int, step: float) -> Any:
        moved = table.copy()
        moved[number] += step
        return values(root, POINTS, (moved, ARRAYS[1])).sum()

    differences = [(total(number, STEP) - total(number, -STEP)) / (2 * STEP) for number in range(5)]
    np.testing.assert_allclose(sums, differences, rtol=2e-4, atol=2e-4)


def test_the_derivative_of_alibi_by_the_score_is_the_number_one() -> None:
    slope = of_floats(H)
    distance = cast(build("subtract", K, Q), Type.FLOAT32)
    derivatives = differentiate(build("add", SCORE, build("multiply", slope, distance)))
    assert derivatives[SCORE] is number(1.0)
    assert derivatives[slope] is distance


def test_the_seed_is_a_factor() -> None:
    seed = build("sin", cast(Q, Type.FLOAT32))
    assert differentiate(build("multiply", SCORE, number(3.0)), seed)[SCORE] is build("multiply", seed, number(3.0))


def test_the_other_branch_adds_nothing_though_its_derivative_is_infinite() -> None:
    root = build("where", build("less", number(0.0), SCORE), build("sqrt", SCORE), number(0.0))
    assert evaluate_at(differentiate(root)[SCORE], -1.0, 0.0, 4.0) == [0.0, 0.0, 0.25]
    doubled = build("multiply", root, build("exp", SCORE))
    assert np.isfinite(evaluate_at(differentiate(doubled)[SCORE], -1.0, 0.0)).all()


@pytest.mark.parametrize("op", ["minimum", "maximum", "fmin", "fmax"])
def test_equal_arguments_share(op: str) -> None:
    slopes = evaluate_at(differentiate(build(op, SCORE, number(1.0)))[SCORE], 0.0, 1.0, 2.0)
    assert slopes == ([1.0, 0.5, 0.0] if op in ("minimum", "fmin") else [0.0, 0.5, 1.0])


@pytest.mark.parametrize(
    ("root", "slopes"),
    [
        (build("absolute", SCORE), [-1.0, 0.0, 1.0]),
        (build("floor", SCORE), [0.0, 0.0, 0.0]),
        (build("round", SCORE), [0.0, 0.0, 0.0]),
        (build("sign", SCORE), [0.0, 0.0, 0.0]),
        (build("remainder", SCORE, number(0.75)), [1.0, 1.0, 1.0]),
        (cast(build("less", number(0.5), SCORE), Type.FLOAT32), [0.0, 0.0, 0.0]),
        (cast(cast(SCORE, Type.INT32), Type.FLOAT32), [0.0, 0.0, 0.0]),
        (build("power", SCORE, number(3.0)), [12.0, 0.0, 12.0]),
        (number(2.0), [0.0, 0.0, 0.0]),
        (build("where", build("less", SCORE, number(1.0)), build("negative", SCORE), SCORE), [-1.0, -1.0, 1.0]),
    ],
    ids=repr,
)
def test_corners_and_steps_are_those_of_torch_and_jax(root: Node, slopes: list[float]) -> None:
    assert evaluate_at(differentiate(root).get(SCORE, number(0.0)), -2.0, 0.0, 2.0) == slopes


def test_the_divisor_of_a_remainder_has_the_quotient() -> None:
    for op, slopes in (("remainder", [-3.0, 4.0]), ("truncated_remainder", [-3.0, 3.0])):
        assert evaluate_at(differentiate(build(op, number(7.0), SCORE))[SCORE], 2.0, -2.0) == slopes


def test_derivatives_can_be_differentiated_again() -> None:
    first = differentiate(build("multiply", build("tanh", SCORE), SCORE))[SCORE]
    second = differentiate(first)[SCORE]
    np.testing.assert_allclose(values(second, POINTS), difference(first), rtol=1e-4, atol=1e-6)
