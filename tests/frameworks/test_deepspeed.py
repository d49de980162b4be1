"""DeepSpeed's sequence parallelism with cuflash, over gloo: `DS_BUILD_OPS=0 pip install deepspeed` beside PyTorch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from gloo_ranks import assert_ranks

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="4.53")
if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)


@pytest.mark.parametrize("check", ["layer", "model"])
def test_deepspeed_of_two_ranks(check: str, tmp_path: Path) -> None:
    assert_ranks("deepspeed_cases.py", 2, tmp_path, check)
