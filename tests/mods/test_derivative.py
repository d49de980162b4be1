"""Derivatives: those of central differences where a function is smooth, and PyTorch's and JAX's at its corners."""

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


def of(op: str, *arguments: Node) -> Node:
    return build(op, *arguments)


def at_score(root: Node, *scores: float) -> list[float]:
    """The values of a node at some scores, at the first point."""
    inputs = {name: x[0] for name, x in POINTS.items()} | {"score": np.array(scores)}
    return list(np.broadcast_to(evaluate([root], inputs, ARRAYS, np.float64)[0], len(scores)))


@SETTINGS
@given(floats(smooth=True))
def test_the_derivative_by_the_score_is_that_of_differences(root: Node) -> None:
    found = values(differentiate(root).get(SCORE, number(0.0)), POINTS)
    up, down = (values(root, POINTS | {"score": POINTS["score"] + step}) for step in (STEP, -STEP))
    np.testing.assert_allclose(found, (up - down) / (2 * STEP), rtol=2e-4, atol=2e-5)


@SETTINGS
@given(floats(smooth=True))
def test_the_derivatives_by_loads_add_up_to_those_of_the_table(root: Node) -> None:
    found, table = np.zeros(5), ARRAYS[FLOATS].astype(np.float64)
    for each, adjoint in differentiate(root).items():
        if each.op == "load":
            index = np.clip(values(each.arguments[0], POINTS), -5, 4).astype(int)
            np.add.at(found, index, values(adjoint, POINTS))

    def total(number: int, step: float) -> Any:
        moved = table.copy()
        moved[number] += step
        return values(root, POINTS, (moved, ARRAYS[1])).sum()

    wanted = [(total(number, STEP) - total(number, -STEP)) / (2 * STEP) for number in range(5)]
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-4)


def test_the_derivative_of_alibi_by_the_score_is_the_number_one() -> None:
    slope = of_floats(H)
    distance = cast(of("subtract", K, Q), Type.FLOAT32)
    found = differentiate(of("add", SCORE, of("multiply", slope, distance)))
    assert found[SCORE] is number(1.0)
    assert found[slope] is distance


def test_the_seed_is_a_factor() -> None:
    seed = of("sin", cast(Q, Type.FLOAT32))
    assert differentiate(of("multiply", SCORE, number(3.0)), seed)[SCORE] is of("multiply", seed, number(3.0))


def test_a_branch_that_is_not_taken_adds_nothing_though_its_derivative_is_infinite() -> None:
    root = of("where", of("less", number(0.0), SCORE), of("sqrt", SCORE), number(0.0))
    assert at_score(differentiate(root)[SCORE], -1.0, 0.0, 4.0) == [0.0, 0.0, 0.25]
    doubled = of("multiply", root, of("exp", SCORE))
    assert np.isfinite(at_score(differentiate(doubled)[SCORE], -1.0, 0.0)).all()


@pytest.mark.parametrize("op", ["minimum", "maximum", "fmin", "fmax"])
def test_equal_arguments_share(op: str) -> None:
    found = at_score(differentiate(of(op, SCORE, number(1.0)))[SCORE], 0.0, 1.0, 2.0)
    assert found == ([1.0, 0.5, 0.0] if op in ("minimum", "fmin") else [0.0, 0.5, 1.0])


@pytest.mark.parametrize(
    ("root", "wanted"),
    [
        (of("absolute", SCORE), [-1.0, 0.0, 1.0]),
        (of("floor", SCORE), [0.0, 0.0, 0.0]),
        (of("round", SCORE), [0.0, 0.0, 0.0]),
        (of("sign", SCORE), [0.0, 0.0, 0.0]),
        (of("remainder", SCORE, number(0.75)), [1.0, 1.0, 1.0]),
        (cast(of("less", number(0.5), SCORE), Type.FLOAT32), [0.0, 0.0, 0.0]),
        (cast(cast(SCORE, Type.INT32), Type.FLOAT32), [0.0, 0.0, 0.0]),
        (of("power", SCORE, number(3.0)), [12.0, 0.0, 12.0]),
        (number(2.0), [0.0, 0.0, 0.0]),
    ],
    ids=repr,
)
def test_corners_and_steps_are_those_of_torch_and_jax(root: Node, wanted: list[float]) -> None:
    assert at_score(differentiate(root).get(SCORE, number(0.0)), -2.0, 0.0, 2.0) == wanted


def test_the_divisor_of_a_remainder_has_the_quotient() -> None:
    found = differentiate(of("remainder", number(7.0), SCORE))[SCORE]
    assert at_score(found, 2.0, -2.0) == [-3.0, 4.0]
    assert at_score(differentiate(of("truncated_remainder", number(7.0), SCORE))[SCORE], 2.0, -2.0) == [-3.0, 3.0]


def test_derivatives_can_be_differentiated_again() -> None:
    root = of("multiply", of("tanh", SCORE), SCORE)
    first = differentiate(root)[SCORE]
    second = differentiate(first)[SCORE]
    score = POINTS["score"]
    up, down = (values(first, POINTS | {"score": score + step}) for step in (STEP, -STEP))
    np.testing.assert_allclose(values(second, POINTS), (up - down) / (2 * STEP), rtol=1e-4, atol=1e-6)
