"""Building nodes: types, constants and simpler forms of expressions, with NumPy's values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from expressions import ARRAYS, SCORE, B, H, K, Q, conditions, floats, integers, number, of_integers, points
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash.errors import ProblemError
from cuflash.mods.graph.graph import MAX_INDEX, Node, node, variable
from cuflash.mods.graph.operations import ARITHMETIC, BITS, COMPARISONS, NUMPY, Type
from cuflash.mods.graph.simplify import build, cast, constant
from cuflash.reference.evaluate import evaluate

BOOL, INT32, INT64, FLOAT32, *_ = Type
SETTINGS = settings(deadline=None, derandomize=True, max_examples=150)
POINTS = points()
VISIBLE = build("less_equal", K, Q)


def evaluate_at_points(*roots: Node) -> list[Any]:
    return [np.broadcast_to(each, 40) for each in evaluate(roots, POINTS, ARRAYS)]


INTEGER_OPS = sorted({*ARITHMETIC, *BITS, *COMPARISONS} - {"left_shift", "right_shift"})


@SETTINGS
@given(st.sampled_from(INTEGER_OPS), integers(), integers())
def test_built_nodes_have_the_values_of_operations_on_integers(op: str, x: Node, y: Node) -> None:
    arguments = [x] if op in ("negative", "absolute", "invert") else [x, y]
    wide = [cast(each, INT64) for each in arguments]
    result, *values = evaluate_at_points(build(op, *wide), *wide)
    expected = np.broadcast_to(NUMPY[op](*values), 40)
    np.testing.assert_array_equal(result, expected)
    assert result.dtype == expected.dtype


@SETTINGS
@given(st.sampled_from(sorted({*ARITHMETIC, *COMPARISONS})), floats(), floats())
def test_built_nodes_have_the_values_of_operations_on_floats(op: str, x: Node, y: Node) -> None:
    arguments = [x] if op in ("negative", "absolute") else [x, y]
    result, *values = evaluate_at_points(build(op, *arguments), *arguments)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(result, NUMPY[op](*values))


@SETTINGS
@given(conditions(), conditions(), integers(), integers())
def test_conditions_and_choices_have_the_values_of_numpy(x: Node, y: Node, one: Node, other: Node) -> None:
    logic = {"bitwise_and": (x, y), "bitwise_or": (x, y), "bitwise_xor": (x, y), "logical_not": (x,)}
    for op, arguments in (logic | {"where": (x, one, other)}).items():
        result, *values = evaluate_at_points(build(op, *arguments), *arguments)
        np.testing.assert_array_equal(result, NUMPY[op](*values))


@SETTINGS
@given(integers())
def test_the_range_of_a_node_holds_its_values(x: Node) -> None:
    least, greatest = x.bounds
    (values,) = evaluate_at_points(x)
    assert least <= values.min()
    assert values.max() <= greatest


@pytest.mark.parametrize(
    ("root", "type"),
    [
        (build("add", Q, number(1)), INT32),
        (build("add", Q, constant(2**40)), INT64),
        (build("multiply", Q, number(0.5)), FLOAT32),
        (build("divide", Q, number(3)), FLOAT32),
        (build("floor_divide", Q, number(3)), INT32),
        (build("add", VISIBLE, VISIBLE), BOOL),
        (build("add", VISIBLE, number(1)), INT32),
        (build("floor_divide", VISIBLE, VISIBLE), INT32),
        (build("where", VISIBLE, Q, SCORE), FLOAT32),
        (build("tanh", Q), FLOAT32),
        (build("floor", Q), INT32),
        (build("less", Q, SCORE), BOOL),
    ],
    ids=repr,
)
def test_types_are_torchs_without_float64(root: Node, type: Type) -> None:
    assert root.type == type


@pytest.mark.parametrize("op", ["negative", "subtract", *sorted(BITS)])
def test_bools_are_not_subtracted_and_floats_have_no_bits(op: str) -> None:
    x, kind = (SCORE, "a float") if op in BITS else (VISIBLE, "bool")
    with pytest.raises(ProblemError, match=f"{op} of {kind}"):
        build(op, *[x] * (1 if op in ("negative", "invert") else 2))


@pytest.mark.parametrize(
    ("root", "simpler"),
    [
        (build("add", Q, number(0)), Q),
        (build("multiply", Q, number(0)), number(0)),
        (build("multiply", SCORE, number(1.0)), SCORE),
        (build("subtract", Q, Q), number(0)),
        (build("maximum", Q, number(0)), Q),
        (build("less_equal", number(0), Q), constant(True)),
        (build("absolute", Q), Q),
        (build("logical_not", build("logical_not", VISIBLE)), VISIBLE),
        (build("logical_not", build("less", Q, K)), build("less_equal", K, Q)),
        (build("negative", build("subtract", Q, K)), build("subtract", K, Q)),
        (build("bitwise_and", VISIBLE, constant(True)), VISIBLE),
        (build("where", VISIBLE, Q, Q), Q),
        (build("where", VISIBLE, constant(True), constant(False)), VISIBLE),
        (build("power", SCORE, number(2.0)), build("multiply", SCORE, SCORE)),
        (build("power", SCORE, number(0.5)), build("sqrt", SCORE)),
        (build("divide", SCORE, number(4.0)), build("multiply", SCORE, number(0.25))),
        (build("exp", number(0.0)), number(1.0)),
        (build("floor_divide", number(7), number(0)), number(0)),
        (build("floor_divide", number(-3), number(2)), number(-2)),
        (build("truncated_divide", number(-3), number(2)), number(-1)),
    ],
    ids=repr,
)
def test_simpler_forms(root: Node, simpler: Node) -> None:
    assert root is simpler


def test_zeros_of_floats_stay_where_they_matter() -> None:
    assert build("add", SCORE, number(0.0)).op == "add", "-0.0 + 0.0 is 0.0"
    assert build("multiply", SCORE, number(0.0)).op == "multiply", "infinity and NaN stay NaN"
    assert build("subtract", SCORE, SCORE).op == "subtract"
    assert build("logical_not", build("less", SCORE, number(0.0))).op == "logical_not", "both are false of NaN"


def test_integers_that_int32_may_not_hold_are_int64() -> None:
    product = build("multiply", Q, K)
    assert (product.type, product.bounds) == (INT64, (0, MAX_INDEX**2))
    assert build("multiply", Q, number(2)).type == INT32
    absolute = build("absolute", of_integers(B, H))
    assert (absolute.type, absolute.bounds) == (INT64, (0, 2**31)), "the least integer has no opposite in int32"


def test_a_range_is_the_whole_type_where_integers_wrap() -> None:
    total = build("add", cast(of_integers(B, H), INT64), number(2**63 - 1))
    assert total.bounds == INT64.limits
    assert build("less", number(-1), total).op == "less"


@pytest.mark.parametrize("type", list(Type))
def test_casts_have_the_values_of_numpy(type: Type) -> None:
    for x in (Q, VISIBLE, SCORE, build("subtract", K, Q)):
        result, value = evaluate_at_points(cast(x, type), x)
        value = value.clip(0) if x is SCORE and type.numpy is np.uint64 else value  # NumPy leaves other casts undefined
        np.testing.assert_array_equal(result, value.astype(type.numpy))
        assert cast(x, type).type == type


def test_values_that_are_only_cast_stay_one_node() -> None:
    assert cast(Q, INT32) is Q
    assert cast(Q, INT64).bounds == Q.bounds
    assert cast(constant(2.75), INT32) is number(2)
    assert cast(constant(-2.75), INT32) is number(-2)
    assert node("cast", FLOAT32, [variable("q_idx")]) is cast(Q, FLOAT32)
