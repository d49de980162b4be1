"""Entry points of serving engines, without an engine: imports; for vLLM also what is registered, and warnings."""

from __future__ import annotations

import enum
import pickle
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import plugins
import pytest
from workers import ROOT, need_checkout, run_python

need_checkout("pyproject.toml")
REGISTRY = "vllm.v1.attention.backends.registry"


class Name(enum.Enum):
    """A registry of two backends."""

    FLASH_ATTN = "vllm.FlashAttention"


def register_backend(name: str, path: str) -> None:
    """Adds a member, as vLLM does."""
    member: Any = object.__new__(Name)
    member._name_, member._value_ = name, path
    Name._member_map_[name] = member


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the module under the name that it is installed with."""
    monkeypatch.setitem(sys.modules, "cuflash_vllm", None)  # so that the entry of `load` is taken back
    return plugins.load("vllm")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a stand-in for vLLM's registry of attention backends."""
    parts = REGISTRY.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
    sys.modules["vllm"].__version__ = "0.99"  # type: ignore[attr-defined]
    module: Any = sys.modules[REGISTRY]
    module.AttentionBackendEnum, module.register_backend = Name, register_backend
    monkeypatch.setattr(Name, "_member_map_", dict(Name._member_map_))
    return module


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_plugin_imports_nothing_heavy(engine: str) -> None:
    code = f"""if True:
        import logging, sys, typing
        before = set(sys.modules)
        text = open({plugins.path_of(engine)!r}).read()
        exec(compile(text, "plugin", "exec"), {{"__name__": "plugin"}})
        print(*set(sys.modules) - before)
        """
    assert set(run_python("-c", code).split()) <= {"__future__"}


@pytest.mark.parametrize(("engine", "group"), [("sglang", "sglang.srt.plugins"), ("vllm", "vllm.general_plugins")])
def test_plugin_is_the_entry_point_of_the_wheel(engine: str, group: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert project["project"]["entry-points"][group] == {"cuflash": f"cuflash_{engine}:register"}
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included[Path(plugins.path_of(engine)).relative_to(ROOT).as_posix()] == f"cuflash_{engine}.py"


def test_plugin_registers_a_path_once_and_its_name_is_pickled(plugin: Any, registry: Any) -> None:
    for _ in range(2):
        plugin.register()
    member = Name["CUFLASH"]
    assert member.value == plugin.PATH == "cuflash.frameworks.vllm.Backend"
    data = pickle.dumps({"backend": member})
    assert pickle.loads(data)["backend"] is member
    del Name._member_map_["CUFLASH"]  # as in a spawned process, before plugins are loaded
    assert pickle.loads(data)["backend"] is Name["CUFLASH"]


@pytest.mark.parametrize("missing", ["AttentionBackendEnum", "register_backend", "__members__", "module"])
def test_plugin_with_a_changed_registry_warns_once(
    missing: str, plugin: Any, registry: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if missing == "module":
        monkeypatch.setitem(sys.modules, REGISTRY, None)
    elif missing == "__members__":
        registry.AttentionBackendEnum = object()
    else:
        delattr(registry, missing)
    plugin.register()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    message = record.getMessage()
    assert "\n" not in message
    assert "--attention-backend CUFLASH is not available, as vLLM 0.99 has another registry" in message
    assert missing in message or missing == "module"
    assert message.endswith("install another version of vLLM or cuflash")
