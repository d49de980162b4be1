"""Docstrings of the frameworks' public names: each has an example, and examples run on the CPU."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
from doctests import run_examples


def run_all(module: str, **namespace: Any) -> None:
    """Runs the examples of a module's public names."""
    public = importlib.import_module(f"cuflash.frameworks.{module}")
    assert public.__all__
    for name in public.__all__:
        run_examples(getattr(public, name), **namespace)


def test_examples_of_torch() -> None:
    pytest.importorskip("torch")
    run_all("torch")


def test_examples_of_transformers() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers", minversion="4.53")
    run_all("transformers")


def test_examples_of_flash_attn() -> None:
    pytest.importorskip("torch")
    if any(importlib.util.find_spec(name) for name in ("flash_attn", "flash_attn_3", "flash_attn_interface")):
        pytest.skip("flash-attn itself is installed")
    run_all("flash_attn")


@pytest.mark.parametrize("version", ["", "3_", "4_"])
def test_the_example_of_flash_attn_func(version: str) -> None:
    pytest.importorskip("torch")
    run_examples(importlib.import_module(f"cuflash.frameworks.flash_attn_{version}interface").flash_attn_func)


def test_examples_of_sdpa(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        pytest.skip("needs PyTorch 2.10")
    from cuflash.frameworks.torch import sdpa

    if device == "cpu":  # PyTorch has the replaced ops for GPUs alone
        monkeypatch.setattr(torch.library, "get_kernel", lambda name, key: None)
        monkeypatch.setattr(sdpa.Override.__init__, "__defaults__", ("CPU",))
    q, k, v = torch.randn(3, 2, 4, 100, 64, dtype=torch.bfloat16, device=device)
    run_all("sdpa", q=q, k=k, v=v)


def test_examples_of_jax() -> None:
    jax = pytest.importorskip("jax")
    with jax.default_device(jax.devices("cpu")[0]):
        run_all("jax")
