"""Linear forms: a form and its node have equal values, and the spelling of a sum changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
from expressions import ARRAYS, B, H, K, Q, integers, number, of_integers, points, values
from hypothesis import given, settings
from hypothesis import strategies as st
from workers import run_python

from cuflash.mods.graph.affine import from_linear
from cuflash.mods.graph.graph import Node
from cuflash.mods.graph.linear import LinearForm, linear
from cuflash.mods.graph.operations import Type
from cuflash.mods.graph.simplify import build, cast, constant

SETTINGS = settings(deadline=None, derandomize=True, max_examples=100)
POINTS = points()
CHUNK = build("floor_divide", Q, number(4))


def add(x: Node, y: Node) -> Node:
    return build("add", x, y)


def subtract(x: Node, y: Node) -> Node:
    return build("subtract", x, y)


def evaluate_form(form: LinearForm) -> object:
    return form.constant + sum(factor * values(atom, POINTS).astype(int) for atom, factor in form.coefficients.items())


@SETTINGS
@given(integers())
def test_a_form_has_the_value_of_its_node(node: Node) -> None:
    np.testing.assert_array_equal(np.broadcast_to(evaluate_form(linear(node)), 40), values(node, POINTS))


@SETTINGS
@given(integers())
def test_the_node_of_a_form_has_its_value_and_its_form(node: Node) -> None:
    form = linear(node)
    back = from_linear(form)
    np.testing.assert_array_equal(values(back, POINTS), values(node, POINTS))
    assert linear(back) == form


@SETTINGS
@given(integers(), integers(), st.integers(-5, 5))
def test_forms_are_added_and_multiplied_as_their_values_are(x: Node, y: Node, factor: int) -> None:
    form = linear(x) * factor - linear(y) + 3
    expected = values(x, POINTS).astype(int) * factor - values(y, POINTS) + 3
    np.testing.assert_array_equal(np.broadcast_to(evaluate_form(form), 40), expected)
    assert all(form.coefficients.values())


@SETTINGS
@given(integers())
def test_the_bounds_of_a_form_hold_its_values(node: Node) -> None:
    least, greatest = linear(node).bounds
    assert least <= values(node, POINTS).min()
    assert values(node, POINTS).max() <= greatest


def test_atoms_that_cancel_are_gone() -> None:
    assert linear(subtract(add(Q, K), add(K, number(2)))) == LinearForm(-2, {Q: 1})
    assert linear(subtract(add(Q, K), add(K, Q))) == LinearForm(0, {})


@pytest.mark.parametrize(
    ("node", "form"),
    [
        (build("multiply", subtract(Q, number(2)), number(3)), LinearForm(-6, {Q: 3})),
        (build("left_shift", add(Q, K), number(2)), LinearForm(0, {Q: 4, K: 4})),
        (build("invert", Q), LinearForm(-1, {Q: -1})),
        (add(cast(subtract(Q, K), Type.INT64), constant(2**40)), LinearForm(2**40, {Q: 1, K: -1})),
        (build("multiply", Q, K), LinearForm(0, {build("multiply", Q, K): 1})),
        (add(CHUNK, CHUNK), LinearForm(0, {CHUNK: 2})),
        (number(7), LinearForm(7, {})),
    ],
    ids=repr,
)
def test_sums_are_taken_apart(node: Node, form: LinearForm) -> None:
    assert linear(node) == form


def test_casts_that_lose_bits_are_atoms() -> None:
    wide = add(cast(of_integers(B, H), Type.INT64), constant(2**40))
    narrow = cast(wide, Type.INT32)
    assert linear(narrow) == LinearForm(0, {narrow: 1})
    is_visible = cast(build("less", Q, K), Type.INT32)
    assert linear(is_visible) == LinearForm(0, {is_visible: 1})


def test_a_node_that_is_used_many_times_costs_no_more_than_once() -> None:
    node = Q
    for _ in range(30):
        node = add(node, node)
    assert linear(node) == LinearForm(0, {Q: 2**30})
    for _ in range(200):
        node = add(node, node)
    assert linear(node) == LinearForm(0, {node: 1})  # the factor does not fit the type


def test_positive_parts_come_first() -> None:
    assert from_linear(linear(subtract(Q, K))) is subtract(Q, K)
    assert from_linear(LinearForm(-3, {K: -1, Q: 1})) is subtract(subtract(Q, K), number(3))
    assert from_linear(LinearForm(3, {Q: -1})) is subtract(number(3), Q)
    assert from_linear(LinearForm(-3, {Q: -1})) is subtract(build("negative", Q), number(3))
    assert from_linear(LinearForm(0, {})) is number(0)
    assert from_linear(LinearForm(0, {Q: 2})) is build("multiply", Q, number(2))


def test_the_order_of_a_forms_parts_changes_nothing() -> None:
    orders = [(B, H, Q, K), (K, Q, H, B), (Q, B, K, H)]
    assert len({from_linear(LinearForm(1, dict.fromkeys(order, 2))) for order in orders}) == 1


def test_nodes_of_forms_are_the_same_in_every_process() -> None:
    code = """
from cuflash.mods.graph.graph import variable
from cuflash.mods.graph.affine import from_linear
from cuflash.mods.graph.linear import LinearForm
names = {order}
print(from_linear(LinearForm(5, dict((variable(name), place % 2 * 2 - 1) for place, name in names))))
"""
    order = list(enumerate(["b", "h", "q_idx", "k_idx"]))
    assert len({run_python("-c", code.format(order=names)) for names in (order, order[::-1])}) == 1


def test_sums_that_int32_may_not_hold_are_int64() -> None:
    entry = of_integers(B, H)
    assert from_linear(LinearForm(0, {entry: 1})) is entry
    wide = from_linear(LinearForm(1, {entry: 1}))
    assert wide.type == Type.INT64
    greatest = (ARRAYS[0], np.full((2, 3), 2**31 - 1, np.int32))
    assert (values(wide, POINTS, greatest) == 2**31).all()
    assert from_linear(LinearForm(1, {Q: 1, K: -1})).type == Type.INT32
