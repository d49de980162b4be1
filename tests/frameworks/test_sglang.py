"""The attention backend of SGLang: its entry point, and SGLang's own conformance kit on the CPU.

The kit needs SGLang's Python alone: `pip install --no-deps sglang` beside PyTorch, transformers and small packages. It
runs in another process, with stand-ins for packages with kernels for GPUs.
"""

from __future__ import annotations

import json
import logging
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import plugins
import pytest
from workers import ROOT, need_checkout, run_python

need_checkout("pyproject.toml")
cuflash_sglang = plugins.load("sglang")
needs_sglang = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("torch", "transformers", "sglang")),
    reason="needs SGLang, PyTorch and transformers",
)


class Sglang:
    """SGLang's modules that the entry point calls, with the names that SGLang 0.5.23 has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        paths = ("sglang", "sglang.srt", "sglang.srt.arg_groups", "sglang.srt.layers", "sglang.srt.layers.attention")
        modules = [ModuleType(path) for path in paths]
        modules[0].__version__ = "9.9"  # type: ignore[attr-defined]
        self.lists: dict[str, list[str]] = {name: [] for name in cuflash_sglang._LISTS}
        self.choices, self.registry = ModuleType("choices"), ModuleType("attention_registry")
        self.choices.__dict__.update({name: values.extend for name, values in self.lists.items()})
        self.backends: dict[str, Any] = {}
        self.registry.__dict__.update(
            ATTENTION_BACKENDS=self.backends,
            register_attention_backend=lambda name: lambda create: self.backends.update({name: create}),
        )
        modules[2].choices, modules[4].attention_registry = self.choices, self.registry  # type: ignore[attr-defined]
        for module in modules:
            monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Sglang:
    return Sglang(monkeypatch)


def test_register_adds_one_backend_and_its_name_to_all_lists(sglang: Sglang, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):  # a process may load entry points twice
        cuflash_sglang.register()
    assert sglang.backends == {"cuflash": cuflash_sglang.create_backend}
    assert sglang.lists == {name: ["cuflash"] for name in cuflash_sglang._LISTS}
    assert not caplog.records


@pytest.mark.parametrize("missing", [*cuflash_sglang._LISTS, "register_attention_backend", "choices"])
def test_register_warns_once_of_a_changed_registry(
    missing: str, sglang: Sglang, caplog: pytest.LogCaptureFixture
) -> None:
    owners = [sglang.choices, sglang.registry, sys.modules["sglang.srt.arg_groups"]]
    delattr(next(owner for owner in owners if hasattr(owner, missing)), missing)
    with caplog.at_level(logging.WARNING):
        cuflash_sglang.register()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    message = caplog.records[0].getMessage()
    assert "\n" not in message
    assert all(word in message for word in ("9.9", missing, "--attention-backend"))
    assert not sglang.backends
    assert not any(sglang.lists.values())


@needs_sglang
@pytest.mark.parametrize(("group", "least"), [("kit", 38), ("further", 31)])
def test_backend_passes_all_cases_of_dense_attention(group: str, least: int) -> None:
    script = ROOT / "tests" / "support" / "sglang_cases.py"
    errors = json.loads(run_python("-W", "ignore", str(script), group).splitlines()[-1])
    assert not {name: error for name, error in errors.items() if error is not None}
    assert len(errors) >= least
