"""Attention over the ranks of a gloo group, beside one process: results and gradients of drawn cases, and bad input."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from gloo_ranks import assert_ranks, run_ranks, started_ranks

pytest.importorskip("torch")

CASES = 40  # of each number of ranks, unless --drawn gives a number
SCRIPT = "distributed_cases.py"


@pytest.mark.slow(30)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_drawn_cases_are_those_of_one_process(ranks: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    count = request.config.getoption("drawn") or CASES
    text = run_ranks(SCRIPT, ranks, tmp_path, "drawn", 0, count)
    assert text.count(f"ran {count}") == ranks, text
    assert "differs" not in text, text


@pytest.mark.slow(30)
@pytest.mark.parametrize(("ranks", "inner"), [(4, 2), (8, 4), (8, 2)])
def test_drawn_cases_on_a_mesh_of_two_axes(
    ranks: int, inner: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    count = request.config.getoption("drawn") or CASES // 2
    text = run_ranks(SCRIPT, ranks, tmp_path, "drawn", 0, count, inner)
    assert text.count(f"ran {count}") == ranks, text
    assert "differs" not in text, text


def test_bad_calls_on_a_mesh_of_two_axes(tmp_path: Path) -> None:
    assert_ranks(SCRIPT, 4, tmp_path, "two_axes")


@pytest.mark.parametrize("check", ["agreement", "refusals", "mesh", "autograd", "repeated", "torn_down"])
def test_calls_of_two_ranks(check: str, tmp_path: Path) -> None:
    assert_ranks(SCRIPT, 2, tmp_path, check)


@pytest.mark.slow(30)
def test_a_call_is_one_graph(tmp_path: Path) -> None:
    assert_ranks(SCRIPT, 2, tmp_path, "compiled")


@pytest.mark.slow(30)
@pytest.mark.parametrize("ranks", [2, 4])
def test_dropout_and_layouts_by_runs_run_between_graphs(ranks: int, tmp_path: Path) -> None:
    assert_ranks(SCRIPT, ranks, tmp_path, "between_graphs")


@pytest.mark.parametrize("how", ["forward", "backward", "check"])
def test_a_rank_that_ends_is_explained_to_the_others(how: str, tmp_path: Path) -> None:
    assert run_ranks(SCRIPT, 2, tmp_path, "lost", how).split() == ["explained"]


def test_a_rank_that_is_late_is_explained_after_the_timeout(tmp_path: Path) -> None:
    with started_ranks(SCRIPT, 2, tmp_path, "lost", "late") as running:
        assert "explained" in running[0].communicate(timeout=250)[0]


def test_ctrl_c_ends_ranks_that_wait_for_each_other(tmp_path: Path) -> None:
    with started_ranks(SCRIPT, 2, tmp_path, "interrupted") as running:
        for process in running:
            assert process.stdout is not None
            assert process.stdout.readline() == "waits\n"
        for process in running:
            process.send_signal(signal.SIGINT)
        for process in running:
            assert process.wait(timeout=250) != 0


def test_the_ring_holds_three_copies_of_keys_at_most(tmp_path: Path) -> None:
    assert_ranks(SCRIPT, 4, tmp_path, "memory")
