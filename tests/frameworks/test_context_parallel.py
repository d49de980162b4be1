"""PyTorch's `context_parallel` on cuflash's ring, over gloo; and PyTorch versions with another table of handlers."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from gloo_ranks import assert_ranks
from workers import run_python

torch = pytest.importorskip("torch")
if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
    pytest.skip("needs PyTorch 2.10", allow_module_level=True)

from cuflash.frameworks import context_parallel


@pytest.mark.parametrize("check", ["results", "refusals"])
def test_context_parallel_of_two_ranks(check: str, tmp_path: Path) -> None:
    assert_ranks("context_parallel_cases.py", 2, tmp_path, check)


@pytest.mark.gpu
def test_context_parallel_of_one_gpu(tmp_path: Path) -> None:
    assert_ranks("context_parallel_cases.py", 1, tmp_path, "gpu")


def test_activation_waits_for_the_import_of_pytorchs_package() -> None:
    code = f"""
import sys, torch
from cuflash.frameworks import sdpa
before = list(sys.meta_path)
sdpa.activate()
assert "{context_parallel.PACKAGE}" not in sys.modules
sdpa.restore()
assert sys.meta_path == before
sdpa.activate()
import {context_parallel.MODULE} as module
assert sys.meta_path == before
assert {{x.__module__ for x in module.custom_ops.values()}} == {{"cuflash.frameworks.context_parallel"}}
sdpa.restore()
assert {{x.__module__ for x in module.custom_ops.values()}} == {{module.__name__}}
"""
    run_python("-c", code)


@pytest.mark.parametrize("is_there", [False, True])
def test_another_table_of_handlers_is_left_alone_with_a_warning(
    is_there: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, context_parallel.PACKAGE, ModuleType("package"))
    monkeypatch.delitem(sys.modules, context_parallel.MODULE, raising=False)
    if is_there:
        module: Any = ModuleType("module")
        module.custom_ops, module._cp_options = {}, SimpleNamespace(enable_load_balance=True)
        monkeypatch.setitem(sys.modules, context_parallel.MODULE, module)
    override = context_parallel.RingOverride()
    assert caplog.messages == [
        f"PyTorch {torch.__version__} has no table of context_parallel's handlers that cuflash knows: PyTorch's own "
        "ring stays, with cuflash in each step; cuflash.distributed.attention has all of cuflash's"
    ]
    override.remove()
