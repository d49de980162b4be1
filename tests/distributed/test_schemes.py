"""Attention over the ranks of a gloo group, beside one process: results and gradients of drawn cases, and bad input."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from workers import ROOT

pytest.importorskip("torch")

CASES = 40  # of each number of ranks, unless --drawn gives a number
SCRIPT = ROOT / "tests" / "support" / "distributed_cases.py"


def run_ranks(ranks: int, folder: Path, *arguments: object) -> str:
    """Runs the script as so many processes of a group; returns what they print. If one ends, so do the others."""
    store = folder / "store"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    running = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(ranks), str(store), *map(str, arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        return "\n".join(process.communicate()[0] for process in running)
    finally:
        for process in running:
            process.kill()
            process.wait()


@pytest.mark.slow(30)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_drawn_cases_are_those_of_one_process(ranks: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    count = request.config.getoption("drawn") or CASES
    text = run_ranks(ranks, tmp_path, "drawn", 0, count)
    assert text.count(f"ran {count}") == ranks, text
    assert "differs" not in text, text


@pytest.mark.parametrize("check", ["agreement", "refusals", "mesh", "autograd", "repeated"])
def test_calls_of_two_ranks(check: str, tmp_path: Path) -> None:
    text = run_ranks(2, tmp_path, check)
    assert text.count(f"ran {check}") == 2, text
    assert "differs" not in text, text
