"""Long tests begin first in different processes of pytest-xdist."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from order import slow_first
from workers import ROOT, run_python

scheduler = pytest.importorskip("xdist.scheduler.worksteal", reason="needs pytest-xdist")


class Process:
    """A worker process of pytest-xdist, as its scheduler addresses it."""

    shutting_down = False

    def __init__(self) -> None:
        self.tests: list[int] = []
        self.gateway = SimpleNamespace(id=id(self))

    def send_runtest_some(self, tests: list[int]) -> None:
        self.tests += tests

    def send_steal(self, tests: list[int]) -> None:
        """Steals no test, as no process has run any yet."""

    def shutdown(self) -> None:
        self.shutting_down = True


def runs_of(tests: list[str], processes: int) -> list[list[str]]:
    """Returns the first tests of each process under `--dist worksteal`."""
    config: Any = SimpleNamespace(getvalue=lambda name: [f"{processes}*popen"], hook=None)
    scheduling, nodes = scheduler.WorkStealingScheduling(config), [Process() for _ in range(processes)]
    for node in nodes:
        scheduling.add_node(node)
        scheduling.add_node_collection(node, tests)
    scheduling.schedule()
    return [[tests[index] for index in node.tests] for node in nodes]


def seconds(test: str) -> float:
    """Returns the seconds at the begin of a test's name."""
    return float(test.split("_")[0])


@pytest.mark.parametrize("count", [0, 1, 5, 40, 41, 47, 1000])
@pytest.mark.parametrize("processes", [1, 2, 3, 16])
def test_the_longest_begin_first_in_different_processes(count: int, processes: int) -> None:
    durations = {index * 7 % max(count, 1): 10 * index for index in range(min(count, 9))}
    tests = [f"{durations.get(index, 0)}_{index}" for index in range(count)]
    order = slow_first(tests, seconds, processes)
    runs = runs_of(order, processes)
    assert sorted(order) == sorted(tests)
    assert [test for test in order if not seconds(test)] == [test for test in tests if not seconds(test)]
    long = [[seconds(test) for test in run if seconds(test)] for run in runs]
    assert [[seconds(test) for test in run[: len(x)]] for run, x in zip(runs, long, strict=True)] == [
        sorted(x, reverse=True) for x in long
    ]
    if count > 2 * len(durations):  # each run has room for some
        assert max(map(sum, long)) - min(map(sum, long)) <= max(durations.values())


TESTS = """
import os, pytest

@pytest.mark.slow(60)
@pytest.mark.parametrize("number", range(12))
def test_left_out(number): pass

slow = [pytest.param(x, marks=pytest.mark.slow(60)) for x in (4, 5)]

@pytest.mark.parametrize("number", [*range(4), *slow, *range(6, 12)])
def test_chosen(number):
    with open(os.environ["PYTEST_XDIST_WORKER"], "a") as file:
        print(number, file=file)
"""


def test_slow_tests_begin_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_some.py").write_text(TESTS, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"), prepend=os.pathsep)
    of_this_suite = ["-c", str(ROOT / "pyproject.toml"), "-p", "conftest"]
    run_python("-m", "pytest", *of_this_suite, "-n", "2", "--dist", "worksteal", "-k", "chosen", "test_some.py")
    assert {(tmp_path / name).read_text("utf-8").split()[0] for name in ("gw0", "gw1")} == {"4", "5"}
