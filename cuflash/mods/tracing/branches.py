"""Branches on traced values: a function runs once per outcome of its conditions, and `where` joins the results."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import NamedTuple

from ..graph.graph import Node
from ..graph.operations import Type
from ..graph.simplify import build, cast
from .operand import fault, faults

MAX_PATHS = 32


class _Path:
    """One path through a function: its conditions in order, and their outcomes. `count` paths came before.

    The initial outcomes are fixed: the last one is where the path leaves the path before. Later outcomes are True.
    """

    def __init__(self, outcomes: list[bool], count: int) -> None:
        self.outcomes, self.count = outcomes, count
        self.conditions: list[Node] = []

    def outcome(self, condition: Node) -> bool:
        if condition.op == "constant":
            return bool(condition.value)
        # A repeated condition of this path has its earlier outcome, and a negated one the opposite outcome.
        for earlier, outcome in zip(self.conditions, self.outcomes, strict=False):
            if condition is earlier:
                return outcome
            if condition is build("logical_not", earlier):
                return not outcome
        self.conditions.append(condition)
        if len(self.conditions) > len(self.outcomes):
            self.outcomes.append(True)
            # Each True leads to one more path, in which it is False.
            if self.count + 1 + sum(self.outcomes) > MAX_PATHS:
                raise fault(
                    f"more than {MAX_PATHS} paths through the function: a loop on a traced value cannot be traced, and "
                    "each if, and, or, not on one may double the paths; write where(condition, x, y), &, | and ~"
                )
        return self.outcomes[len(self.conditions) - 1]


class _Leaf(NamedTuple):
    """The end of one path or of joined paths: the conditions that led to it, their outcomes, and the result."""

    conditions: list[Node]
    outcomes: list[bool]
    result: Node | AssertionError


_path: ContextVar[_Path | None] = ContextVar("cuflash_path", default=None)


def branch_on(condition: Node) -> bool:
    """Returns the outcome of bool() of a traced value on the current path."""
    path = _path.get()
    if path is None:
        raise fault("the truth of a traced value is asked for outside of its function")
    return path.outcome(cast(condition, Type.BOOL))


def is_tracing() -> bool:
    """True if this thread is tracing a function."""
    return _path.get() is not None


def trace_branches(run: Callable[[], Node]) -> Node:
    """Returns the result of a function over all of its paths. A path that ends in a failed `assert` is left out."""
    leaves: list[_Leaf] = []
    outcomes: list[bool] = []
    while outcomes or not leaves:
        path = _Path(outcomes, len(leaves))
        path_token, faults_token = _path.set(path), faults.set([])
        result: Node | AssertionError
        try:
            result = run()
            if errors := faults.get():
                raise errors[0]  # the function caught this error
        except AssertionError as error:
            result = error
        finally:
            _path.reset(path_token)
            faults.reset(faults_token)
        leaves.append(_Leaf(path.conditions, path.outcomes, result))
        # The next path changes the last outcome that is True, and keeps all before it.
        outcomes = list(path.outcomes)
        while outcomes and not outcomes[-1]:
            outcomes.pop()
        if outcomes:
            outcomes[-1] = False
    result = _join(leaves)
    if isinstance(result, AssertionError):
        raise result
    return result


def _join(leaves: list[_Leaf]) -> Node | AssertionError:
    """Joins the results, starting with the last two paths, which differ in one outcome."""
    stack: list[_Leaf] = []
    for leaf in leaves:
        stack.append(leaf)
        while len(stack) > 1 and not stack[-1].outcomes[-1]:
            conditions, outcomes, otherwise = stack.pop()
            result = stack.pop().result
            if isinstance(result, AssertionError):
                result = otherwise
            elif isinstance(otherwise, Node):
                result = build("where", conditions[-1], result, otherwise)
            stack.append(_Leaf(conditions[:-1], outcomes[:-1], result))
    return stack[0].result
