"""The order of tests over the processes of pytest-xdist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Test = TypeVar("Test")


def slow_first(tests: Sequence[Test], seconds: Callable[[Test], float], processes: int) -> list[Test]:
    """Returns the tests in an order in which long ones begin first, each in the process that has the least.

    seconds: the duration of a test, 0 for all but the long ones. processes: of `--dist worksteal`, which gives each a
    run of consecutive tests, and the ends of runs to those that have none left. why: a long test in the midst of a run
    began late, and all processes but one waited for it.
    """
    sizes: list[int] = []
    for remaining in range(processes, 0, -1):
        sizes.append((len(tests) - sum(sizes)) // remaining)
    beginnings: list[list[Test]] = [[] for _ in sizes]
    totals = [0.0] * processes
    for test in sorted(filter(seconds, tests), key=seconds, reverse=True):
        process = min((i for i in range(processes) if len(beginnings[i]) < sizes[i]), key=totals.__getitem__)
        beginnings[process].append(test)
        totals[process] += seconds(test)
    others = iter([test for test in tests if not seconds(test)])
    order = []
    for size, beginning in zip(sizes, beginnings, strict=True):
        order += beginning + [next(others) for _ in range(size - len(beginning))]
    return order
