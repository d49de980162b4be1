"""Building: types, constants and simpler forms of expressions, which have the values that NumPy gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from expressions import ARRAYS, SCORE, B, H, K, Q, conditions, floats, integers, number, of_integers, points
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash.errors import ProblemError
from cuflash.mods.graph.graph import Node, node, variable
from cuflash.mods.graph.operations import ARITHMETIC, BITS, COMPARISONS, NUMPY, Type
from cuflash.mods.graph.simplify import build, cast, constant
from cuflash.reference.evaluate import evaluate

BOOL, INT32, INT64, FLOAT32 = Type
SETTINGS = settings(deadline=None, derandomize=True, max_examples=150)
POINTS = points()
SEEN = build("less_equal", K, Q)


def of(*roots: Node) -> list[Any]:
    return [np.broadcast_to(each, 40) for each in evaluate(roots, POINTS, ARRAYS)]


OF_INTEGERS = sorted({*ARITHMETIC, *BITS, *COMPARISONS} - {"left_shift", "right_shift"})


@SETTINGS
@given(st.sampled_from(OF_INTEGERS), integers(), integers())
def test_what_is_built_has_the_value_of_the_operation_on_integers(op: str, x: Node, y: Node) -> None:
    arguments = [x] if op in ("negative", "absolute", "invert") else [x, y]
    wide = [cast(each, INT64) for each in arguments]
    found, *values = of(build(op, *wide), *wide)
    wanted = np.broadcast_to(NUMPY[op](*values), 40)
    np.testing.assert_array_equal(found, wanted)
    assert found.dtype == wanted.dtype


@SETTINGS
@given(st.sampled_from(sorted({*ARITHMETIC, *COMPARISONS})), floats(), floats())
def test_what_is_built_has_the_value_of_the_operation_on_floats(op: str, x: Node, y: Node) -> None:
    arguments = [x] if op in ("negative", "absolute") else [x, y]
    found, *values = of(build(op, *arguments), *arguments)
    with np.errstate(all="ignore"):
        wanted = NUMPY[op](*values)
    np.testing.assert_array_equal(found, wanted)


@SETTINGS
@given(conditions(), conditions(), integers(), integers())
def test_conditions_and_choices_have_the_values_of_numpy(x: Node, y: Node, one: Node, other: Node) -> None:
    both, either, differ, neither, chosen, *values = of(
        build("bitwise_and", x, y),
        build("bitwise_or", x, y),
        build("bitwise_xor", x, y),
        build("logical_not", x),
        build("where", x, one, other),
        *(x, y, one, other),
    )
    x_value, y_value, one_value, other_value = values
    np.testing.assert_array_equal(both, x_value & y_value)
    np.testing.assert_array_equal(either, x_value | y_value)
    np.testing.assert_array_equal(differ, x_value ^ y_value)
    np.testing.assert_array_equal(neither, ~x_value)
    np.testing.assert_array_equal(chosen, np.where(x_value, one_value, other_value))


@SETTINGS
@given(integers())
def test_the_range_of_a_node_holds_its_values(x: Node) -> None:
    least, greatest = x.bounds
    (values,) = of(x)
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
        (build("add", SEEN, SEEN), BOOL),
        (build("add", SEEN, number(1)), INT32),
        (build("floor_divide", SEEN, SEEN), INT32),
        (build("where", SEEN, Q, SCORE), FLOAT32),
        (build("tanh", Q), FLOAT32),
        (build("floor", Q), INT32),
        (build("less", Q, SCORE), BOOL),
    ],
    ids=repr,
)
def test_types_are_torchs_without_float64(root: Node, type: Type) -> None:
    assert root.type == type


@pytest.mark.parametrize("op", ["negative", "subtract"])
def test_bools_are_not_subtracted(op: str) -> None:
    with pytest.raises(ProblemError, match=f"{op} of bool"):
        build(op, *[SEEN] * (1 if op == "negative" else 2))


@pytest.mark.parametrize("op", sorted(BITS))
def test_floats_have_no_bits(op: str) -> None:
    with pytest.raises(ProblemError, match="of a float"):
        build(op, *[SCORE] * (1 if op == "invert" else 2))


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
        (build("logical_not", build("logical_not", SEEN)), SEEN),
        (build("logical_not", build("less", Q, K)), build("less_equal", K, Q)),
        (build("negative", build("subtract", Q, K)), build("subtract", K, Q)),
        (build("bitwise_and", SEEN, constant(True)), SEEN),
        (build("where", SEEN, Q, Q), Q),
        (build("where", SEEN, constant(True), constant(False)), SEEN),
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
def test_what_is_known_is_folded(root: Node, simpler: Node) -> None:
    assert root is simpler


def test_zeros_of_floats_are_kept_where_they_matter() -> None:
    assert build("add", SCORE, number(0.0)).op == "add", "-0.0 + 0.0 is 0.0"
    assert build("multiply", SCORE, number(0.0)).op == "multiply", "infinity and NaN stay NaN"
    assert build("subtract", SCORE, SCORE).op == "subtract"
    assert build("logical_not", build("less", SCORE, number(0.0))).op == "logical_not", "both are false of NaN"


def test_a_range_says_nothing_where_integers_wrap() -> None:
    product = build("multiply", Q, K)
    assert product.bounds == INT32.limits
    assert build("less", number(-1), product).op == "less"
    assert build("absolute", of_integers(B, H)).bounds == INT32.limits, "the least integer has no opposite"


@pytest.mark.parametrize("type", list(Type))
def test_casts_have_the_values_of_numpy(type: Type) -> None:
    for x in (Q, SEEN, SCORE, build("subtract", K, Q)):
        found, value = of(cast(x, type), x)
        np.testing.assert_array_equal(found, value.astype(type.numpy))
        assert cast(x, type).type == type


def test_values_that_are_only_cast_stay_one_node() -> None:
    assert cast(Q, INT32) is Q
    assert cast(Q, INT64).bounds == Q.bounds
    assert cast(constant(2.75), INT32) is number(2)
    assert cast(constant(-2.75), INT32) is number(-2)
    assert node("cast", FLOAT32, [variable("q_idx")]) is cast(Q, FLOAT32)
