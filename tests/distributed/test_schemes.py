"""Attention over the ranks of a gloo group, beside one process: results and gradients of drawn cases, and bad input."""

from __future__ import annotations

from pathlib import Path

import pytest
from gloo_ranks import assert_ranks, run_ranks

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


@pytest.mark.parametrize("check", ["agreement", "refusals", "mesh", "autograd"])
def test_calls_of_two_ranks(check: str, tmp_path: Path) -> None:
    assert_ranks(SCRIPT, 2, tmp_path, check)
