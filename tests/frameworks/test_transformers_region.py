"""Models of transformers whose sequence two ranks share: loss and gradients beside one process, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
from gloo_ranks import assert_ranks

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="4.53")


@pytest.mark.parametrize(
    "check", [("training", "llama"), ("training", "mistral"), ("training", "gemma2"), ("refusals",)], ids="-".join
)
def test_models_of_two_ranks(check: tuple[str, ...], tmp_path: Path) -> None:
    assert_ranks("region_cases.py", 2, tmp_path, *check)


@pytest.mark.gpu
def test_checkpointed_layers_on_one_gpu(tmp_path: Path) -> None:
    assert_ranks("region_cases.py", 1, tmp_path, "gpu")
