"""The truth of traced values: a function that asks for it runs again for each answer, and `where` joins the results."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

from ..graph.graph import Node
from ..graph.operations import Type
from ..graph.simplify import build, cast
from .operand import fault, faults

MAX_PATHS = 32


class _Path:
    """One way through a function: the answers that it begins with, and what it was asked. `done` paths came before."""

    def __init__(self, answers: list[bool], done: int) -> None:
        self.answers = answers
        self.asked: list[Node] = []
        self.done = done

    def answer(self, condition: Node) -> bool:
        if condition.op == "constant":
            return bool(condition.value)
        # why: a condition that was asked before on this path has that answer, as its opposite has the other one.
        for known, answer in zip(self.asked, self.answers, strict=False):
            if condition is known:
                return answer
            if condition is build("logical_not", known):
                return not answer
        self.asked.append(condition)
        if len(self.asked) > len(self.answers):
            self.answers.append(True)
            # Every True waits for a path of its own with False.
            if self.done + 1 + sum(self.answers) > MAX_PATHS:
                raise fault(
                    f"more than {MAX_PATHS} paths through the function: a loop on a traced value cannot be traced, and "
                    "each if, and, or, not on one may double the paths; write where(condition, x, y), &, | and ~"
                )
        return self.answers[len(self.asked) - 1]


# The conditions that a path asked, its answers, and its result.
_Leaf = tuple[list[Node], list[bool], Node | AssertionError]
_path: ContextVar[_Path | None] = ContextVar("cuflash_path", default=None)


def truth(condition: Node) -> bool:
    """The answer to bool() of a traced value on the path that runs."""
    path = _path.get()
    if path is None:
        raise fault("the truth of a traced value is asked for outside of its function")
    return path.answer(cast(condition, Type.BOOL))


def is_tracing() -> bool:
    """Whether a function is being traced now, in this thread."""
    return _path.get() is not None


def all_paths(run: Callable[[], Node]) -> Node:
    """The result of a function on all paths through it. A path that ends in a failed `assert` is never taken."""
    leaves: list[_Leaf] = []
    answers: list[bool] = []
    while True:
        path = _Path(list(answers), len(leaves))
        token, raised = _path.set(path), faults.set([])
        result: Node | AssertionError
        try:
            result = run()
            if found := faults.get():
                raise found[0]  # why: the function caught it
        except AssertionError as error:
            result = error  # why: the function says that this path is never taken
        finally:
            _path.reset(token)
            faults.reset(raised)
        leaves.append((path.asked, path.answers, result))
        # The next path changes the last answer that was True; all answers before it stay.
        answers = list(path.answers)
        while answers and not answers[-1]:
            answers.pop()
        if not answers:
            break
        answers[-1] = False
    result = _joined(leaves)
    if isinstance(result, AssertionError):
        raise result
    return result


def _joined(leaves: list[_Leaf]) -> Node | AssertionError:
    """The results joined, from the last two paths on, which differ in one answer."""
    stack: list[_Leaf] = []
    for leaf in leaves:
        stack.append(leaf)
        while len(stack) > 1 and not stack[-1][1][-1]:
            asked, answers, no = stack.pop()
            yes = stack.pop()[2]
            if isinstance(yes, AssertionError) or isinstance(no, AssertionError):
                result = no if isinstance(yes, AssertionError) else yes
            else:
                result = build("where", asked[-1], yes, no)
            stack.append((asked[:-1], answers[:-1], result))
    return stack[0][2]
