"""Attention over 8 devices of JAX on the host, beside one: results and gradients of drawn cases, and bad input."""

from __future__ import annotations

import pytest
from workers import ROOT, run_python

pytest.importorskip("jax")

CASES = 6  # of each number of ranks, unless --drawn gives a number
SCRIPT = ROOT / "tests" / "support" / "distributed_jax_cases.py"


@pytest.mark.slow(60)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_drawn_cases_are_those_of_one_device(ranks: int, request: pytest.FixtureRequest) -> None:
    count = request.config.getoption("drawn") or CASES
    text = run_python(str(SCRIPT), str(ranks), "0", str(count), XLA_FLAGS="--xla_force_host_platform_device_count=8",
                      JAX_PLATFORMS="cpu")  # fmt: skip
    assert f"ran {count}" in text
    assert "differs" not in text, text


def test_bad_calls_are_refused_while_they_are_traced() -> None:
    text = run_python(str(SCRIPT), "2", "refusals", XLA_FLAGS="--xla_force_host_platform_device_count=8",
                      JAX_PLATFORMS="cpu")  # fmt: skip
    assert "ran refusals" in text
    assert "differs" not in text, text
