"""Scripts in `.ci/` that time a rank on a GPU: all of their code but copies on a GPU runs on the CPU."""

from __future__ import annotations

import pytest
from workers import ROOT, need_checkout, run_python

need_checkout(".ci")
pytest.importorskip("torch")


@pytest.mark.slow(10)
@pytest.mark.parametrize(("script", "last"), [
    ("rank_steps", "results and sums in float32\nforward"), ("beside_copies", "backward, causal, 16k  ")
])  # fmt: skip
def test_a_script_prints_its_tables(script: str, last: str) -> None:
    assert last in run_python(str(ROOT / ".ci" / f"{script}.py"), "--cpu")
