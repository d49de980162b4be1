"""What all tests share: hypothesis' profile, what is skipped where, and a kernel cache of a test's own."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from cuflash import device, jit
from cuflash.errors import UnsupportedError

settings.register_profile("cuflash", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("cuflash")


def no_gpu_reason() -> str | None:
    """Why tests marked `gpu` cannot run here; None if they can."""
    if importlib.util.find_spec("cupy") is None:
        return "needs a GPU: CuPy is not installed"
    if device.count() == 0:
        return "needs a GPU: CuPy finds none"
    try:
        device.query(0)
    except UnsupportedError as error:
        return f"needs a GPU of sm_80 or newer: {error}"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips, with the reason, what cannot run here and what was not asked for."""
    reason = no_gpu_reason() if any(item.get_closest_marker("gpu") for item in items) else None
    asked = "exhaustive" in (config.getoption("markexpr") or "")
    for item in items:
        if reason is not None and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))
        if not asked and item.get_closest_marker("exhaustive"):
            item.add_marker(pytest.mark.skip(reason="minutes long: run with -m exhaustive"))


def forget() -> None:
    """Empties the in-process caches of `cuflash.jit`, as a new process would find them."""
    for value in list(vars(jit).values()):
        if hasattr(value, "cache_clear"):
            value.cache_clear()


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty kernel cache on disk and in memory, for one test; the folder does not exist yet."""
    folder = tmp_path / "kernel-cache"
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(folder))
    monkeypatch.setattr(jit, "_kernels", {})
    monkeypatch.setattr(jit, "_locks", {})
    forget()
    yield folder
    forget()


@pytest.fixture(name="device", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def torch_device(request: pytest.FixtureRequest) -> str:
    """Where PyTorch's tensors of a test are: on the CPU, and on a GPU where there is one."""
    return str(request.param)
