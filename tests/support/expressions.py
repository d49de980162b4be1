"""Random expression graphs for tests, the tables that they load from, and points at which to evaluate them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cuflash.mods.graph.graph import Node, variable
from cuflash.mods.graph.operations import Type
from cuflash.mods.graph.simplify import build, cast, constant, load
from cuflash.reference.evaluate import evaluate

B, H, Q, K = (variable(name) for name in ("b", "h", "q_idx", "k_idx"))
SCORE = variable("score")
LENGTH = 60  # of queries and of keys
# The captured arrays, by the index in loads.
FLOATS, INTEGERS = 0, 1
ARRAYS: tuple[Any, ...] = (
    np.linspace(-1.0, 1.0, 5).astype(np.float32),
    np.array([[3, -1, 2], [0, 7, -5]], np.int32),
)


def number(value: float) -> Node:
    return constant(value)


def of_floats(index: Node) -> Node:
    """Returns an element of the table of floats."""
    return load(FLOATS, Type.FLOAT32, [index])


def of_integers(row: Node, column: Node) -> Node:
    """Returns an element of the table of integers."""
    return load(INTEGERS, Type.INT32, [row, column])


def points(count: int = 40) -> dict[str, Any]:
    """Returns the inputs of `count` random points, with scores in float64."""
    rng = np.random.default_rng(0)
    most = {"b": 2, "h": 4, "q_idx": LENGTH, "k_idx": LENGTH, "seqlen_q": LENGTH, "seqlen_k": LENGTH}
    return {name: rng.integers(0, end, count) for name, end in most.items()} | {"score": rng.standard_normal(count)}


def grid() -> dict[str, Any]:
    """Returns the inputs of all points of two sequences, in the order b, q_idx, k_idx; h is 1."""
    rows, keys = np.arange(LENGTH)[:, None], np.arange(LENGTH)
    lengths = {"seqlen_q": LENGTH, "seqlen_k": LENGTH}
    return {"b": np.arange(2)[:, None, None], "h": 1, "q_idx": rows, "k_idx": keys} | lengths


def values(root: Node, inputs: dict[str, Any], arrays: tuple[Any, ...] = ARRAYS) -> Any:
    """Returns the values of a node, one for each point, in float64."""
    shape = np.broadcast_shapes(*(np.shape(each) for each in inputs.values()))
    return np.broadcast_to(evaluate([root], inputs, arrays, np.float64)[0], shape)


def op(name: str, *arguments: Node | float) -> Node:
    return build(name, *(each if isinstance(each, Node) else constant(each) for each in arguments))


def _many(one: dict[str, tuple[float, ...]], two: tuple[str, ...], below: st.SearchStrategy[Node]) -> Any:
    """Returns a strategy of operations on a node and one of the given numbers, and on two nodes."""
    with_numbers = [st.builds(op, st.just(name), below, st.sampled_from(numbers)) for name, numbers in one.items()]
    return st.one_of(*with_numbers, st.builds(op, st.sampled_from(two), below, below))


# Numbers that an integer is combined with. All are small, so that sums do not wrap.
_INTEGER_NUMBERS: dict[str, tuple[float, ...]] = {
    "multiply": (3, -2),
    "floor_divide": (4, -3),
    "truncated_divide": (4, 5),
    "remainder": (5, -4),
    "truncated_remainder": (7,),
    "bitwise_and": (6,),
    "left_shift": (1,),
    "right_shift": (1, 2),
}
_INTEGER_PAIRS = ("add", "subtract", "minimum", "maximum")


def _more_integers(below: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    return st.one_of(
        _many(_INTEGER_NUMBERS, _INTEGER_PAIRS, below),
        st.builds(op, st.sampled_from(["absolute", "negative", "invert"]), below),
        st.builds(cast, below, st.just(Type.INT64)),
        st.builds(of_integers, below, below),
        st.builds(lambda x, y, z: op("where", op("less", x, y), y, z), below, below, below),
    )


@cache
def integers() -> st.SearchStrategy[Node]:
    """Returns a strategy of integer nodes."""
    leaves = st.sampled_from([B, H, Q, K, Q, K, number(3), number(-2), number(7)])
    return st.recursive(leaves, _more_integers, max_leaves=8)


@cache
def conditions() -> st.SearchStrategy[Node]:
    """Returns a strategy of bool nodes that compare integers."""
    names = st.sampled_from(["less", "less_equal", "equal", "not_equal"])
    return st.recursive(
        st.builds(op, names, integers(), integers()),
        lambda below: st.one_of(
            st.builds(op, st.sampled_from(["bitwise_and", "bitwise_or", "bitwise_xor"]), below, below),
            st.builds(op, st.just("logical_not"), below),
            st.builds(op, st.just("where"), below, below, below),
        ),
        max_leaves=5,
    )


def _positive(x: Node) -> Node:
    """Returns a node between 1/2 and 5/2, whose root and logarithm are finite."""
    return op("add", op("tanh", x), 1.5)


def _more_floats(below: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    of_any = st.sampled_from(["tanh", "sin", "cos", "erf", "negative"])
    of_bounded = st.sampled_from(["exp", "exp2", "expm1"])
    of_positive = st.sampled_from(["log", "log2", "log1p", "sqrt", "rsqrt"])
    return st.one_of(
        st.builds(op, st.sampled_from(["add", "subtract"]), below, below),
        st.builds(lambda x, y: op("multiply", x, op("tanh", y)), below, below),
        st.builds(lambda x, y: op("divide", x, _positive(y)), below, below),
        st.builds(lambda x, y: op("power", _positive(x), op("tanh", y)), below, below),
        st.builds(op, of_any, below),
        st.builds(lambda name, x: op(name, op("tanh", x)), of_bounded, below),
        st.builds(lambda name, x: op(name, _positive(x)), of_positive, below),
        st.builds(op, st.just("where"), conditions(), below, below),
    )


def _more_rough_floats(below: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    two = ["minimum", "maximum", "fmin", "fmax", "remainder", "truncated_remainder", "floor_divide"]
    return st.one_of(
        _more_floats(below),
        st.builds(op, st.sampled_from(two), below, below),
        st.builds(op, st.sampled_from(["absolute", "floor", "ceil", "trunc", "round", "sign"]), below),
        st.builds(lambda x, y, z: op("where", op("less", x, y), y, z), below, below, below),
    )


@cache
def floats(smooth: bool = False) -> st.SearchStrategy[Node]:
    """Returns a strategy of float nodes. smooth: True for functions without corners and jumps."""
    constants = st.sampled_from([SCORE, SCORE, number(0.5), number(-1.25), of_floats(H), of_floats(op("add", Q, K))])
    leaves = st.one_of(constants, integers().map(lambda x: op("sin", op("multiply", x, 0.125))))
    return st.recursive(leaves, _more_floats if smooth else _more_rough_floats, max_leaves=8)
