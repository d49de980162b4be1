"""Branches: each condition on a traced value has both outcomes, and the results are joined."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from expressions import H, K, Q
from traces import check

from cuflash.errors import ProblemError
from cuflash.mods.graph.graph import Node
from cuflash.mods.graph.simplify import build, constant
from cuflash.mods.tracing.branches import MAX_PATHS, branch_on, is_tracing, trace_branches


def less(x: Node, y: Node | int) -> Node:
    return build("less", x, y if isinstance(y, Node) else constant(y))


def test_a_condition_has_both_outcomes() -> None:
    root = trace_branches(lambda: Q if branch_on(less(H, 2)) else K)
    assert root is build("where", less(H, 2), Q, K)


def test_earlier_and_constant_conditions_have_one_outcome() -> None:
    calls = []

    def run() -> Node:
        calls.append(None)
        first = branch_on(less(H, 2))
        assert branch_on(less(H, 2)) == first
        assert branch_on(build("less_equal", constant(2), H)) != first
        assert branch_on(constant(True))
        assert not branch_on(less(Q, 0))
        return constant(first)

    assert trace_branches(run) is less(H, 2)
    assert len(calls) == 2


@pytest.mark.parametrize("count", [1, 2, MAX_PATHS - 1])
def test_a_chain_of_conditions_ends_in_as_many_paths(count: int) -> None:
    def chain(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for i in range(count):
            if q == i:
                return score * i
        return score - 100

    check(chain, "score_mod")


def test_a_tree_of_conditions_joins_in_its_order() -> None:
    def tree(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        result = score
        for place in range(5):
            result = result + (q >> place if (k >> place) % 2 else -1)
        return result

    check(tree, "score_mod")


@pytest.mark.parametrize("is_tree", [False, True])
def test_more_paths_are_refused(is_tree: bool) -> None:
    calls = []

    def function() -> Node:
        calls.append(None)
        for i in range(6 if is_tree else MAX_PATHS):
            if branch_on(less(Q, i + 1)) and not is_tree:
                return Q
        return K

    with pytest.raises(ProblemError, match=f"more than {MAX_PATHS} paths"):
        trace_branches(function)
    assert len(calls) <= MAX_PATHS


def test_an_outcome_outside_of_a_trace_is_refused() -> None:
    assert not is_tracing()
    with pytest.raises(ProblemError, match="outside of its function"):
        branch_on(less(Q, 2))
    states = []
    trace_branches(lambda: states.append(is_tracing()) or Q)
    assert states == [True]
    assert not is_tracing()


def test_an_error_on_a_path_ends_the_tracing() -> None:
    def run() -> Node:
        raise KeyError("mine")

    with pytest.raises(KeyError):
        trace_branches(run)
    assert not is_tracing()


def test_results_of_different_types_meet() -> None:
    root = trace_branches(lambda: constant(1.5) if branch_on(less(H, 2)) else Q)
    assert root.type.numpy is np.float32
