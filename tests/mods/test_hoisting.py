"""Hoisting: keys are a tile's first key plus a column, values stay equal, and rows compute most of them."""

from __future__ import annotations

import numpy as np
import pytest
from expressions import ARRAYS, SCORE, H, K, Q, conditions, floats, integers, of_floats, of_integers, points
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash.mods.codegen.hoisting import COLUMN, KEY_BEGIN, stage_of, staged
from cuflash.mods.graph.graph import Node, post_order
from cuflash.mods.graph.operations import Type
from cuflash.mods.graph.simplify import build, cast, constant
from cuflash.reference.evaluate import evaluate

SETTINGS = settings(deadline=None, derandomize=True, max_examples=150)
POINTS = points()
STAGED = POINTS | {"column": POINTS["k_idx"] % 8, "key_begin": POINTS["k_idx"] // 8 * 8}


def op(name: str, *arguments: Node | float) -> Node:
    return build(name, *(each if isinstance(each, Node) else constant(each) for each in arguments))


@SETTINGS
@given(st.one_of(integers(), conditions()))
def test_integers_and_conditions_keep_their_values_and_types(root: Node) -> None:
    (new,) = staged([root])
    assert new.type == root.type
    assert "k_idx" not in new.inputs
    np.testing.assert_array_equal(*(evaluate([each], STAGED, ARRAYS)[0] for each in (new, root)))


@SETTINGS
@given(floats(smooth=True))
def test_floats_keep_their_values_but_for_rounding(root: Node) -> None:
    (new,) = staged([root])
    values = [evaluate([each], STAGED, ARRAYS, np.float64)[0] for each in (new, root)]
    np.testing.assert_allclose(*values, rtol=1e-6, atol=1e-6)  # constants and their inverses are float32


def elements(root: Node) -> list[str]:
    """Returns the operations of a root for each element, except operations of constants for the compiler."""
    order = post_order(staged([root]))
    return [each.op for each in order if stage_of(each) == 2 and each.arguments and each.inputs != {"column"}]


@pytest.mark.parametrize("slope", [of_floats(H), constant(0.25), op("exp2", op("negative", H))])
def test_a_score_plus_a_multiple_of_the_distance_is_two_sums(slope: Node) -> None:
    bias = op("multiply", slope, op("subtract", K, Q))
    for root in (op("add", SCORE, bias), op("add", bias, SCORE), op("subtract", SCORE, op("negative", bias))):
        products = [] if slope.op == "constant" else ["multiply"]
        assert sorted(elements(root)) == ["add", "add", *products]


def test_the_distance_becomes_a_float_once_a_row() -> None:
    (root,) = staged([cast(op("subtract", K, Q), Type.FLOAT32)])
    casts = [each for each in post_order([root]) if each.op == "cast"]
    assert {frozenset({"column"}), frozenset({"q_idx", "key_begin"})} == {each.inputs for each in casts}


def test_a_comparison_of_a_key_is_one_of_a_column() -> None:
    for root in (op("less_equal", K, Q), op("less", op("subtract", Q, K), 5), op("equal", op("multiply", K, 2), Q)):
        (new,) = staged([root])
        assert elements(root) == [new.op]
        assert {each.inputs for each in new.arguments} == {frozenset({"column"}), frozenset({"q_idx", "key_begin"})}


def test_terms_are_not_moved_across_a_comparison_that_then_may_wrap() -> None:
    (root,) = staged([op("less", op("subtract", Q, K), of_integers(H, H))])
    assert [each.op for each in root.arguments] == ["subtract", "load"]


def test_terms_of_a_sum_that_wraps_are_not_exchanged() -> None:
    root = cast(op("add", op("multiply", Q, 2**29), K), Type.FLOAT32)
    np.testing.assert_array_equal(*(evaluate([each], STAGED, ARRAYS)[0] for each in (root, *staged([root]))))


def test_a_division_by_a_value_of_the_row_is_a_product_unless_it_is_sharp() -> None:
    assert elements(op("divide", SCORE, of_floats(Q))) == ["multiply"]
    assert elements(op("divide", SCORE, 3.0)) == ["multiply"]
    assert elements(op("floor", op("divide", SCORE, 3.0))) == ["divide", "floor"]
    assert elements(op("less", op("divide", SCORE, 3.0), 1.0)) == ["divide", "less"]


def test_a_stage_has_the_inputs_of_stages_before() -> None:
    roots = constant(1), H, op("add", H, Q), KEY_BEGIN, COLUMN, SCORE
    assert [stage_of(each) for each in roots] == [0, 0, 1, 1, 2, 2]
