"""Entry points of serving engines: modules of the top level in an installed cuflash, here loaded from the tree."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from workers import ROOT


def path_of(engine: str) -> str:
    """Returns the file of an engine's entry point."""
    return str(ROOT / "cuflash" / "frameworks" / engine / "plugin.py")


def load(engine: str) -> Any:
    """Returns the entry point of "sglang" or "vllm", as the module of the name that it is installed with."""
    name = f"cuflash_{engine}"
    spec = importlib.util.spec_from_file_location(name, path_of(engine))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
