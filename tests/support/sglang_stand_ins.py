"""Stand-ins for packages that SGLang imports at its start, and that attention on the CPU does not call."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

# Large packages, with kernels for GPUs. SGLang's other requirements for attention are installed.
NAMES = ("sgl_kernel", "torchao", "torchcodec", "torchvision")


class StandIn(ModuleType):
    """A module in which each capitalised name is a class, and any other name a function."""

    __path__: list[str] = []  # noqa: RUF012
    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            return type(name, (), {"__class_getitem__": classmethod(lambda cls, item: cls)})
        return MagicMock()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves stand-ins for packages of these names."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = set(names)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_ours = fullname.split(".")[0] in self.names
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """Serves stand-ins for packages that are missing. transformers looks for some of them and is imported before."""
    from transformers import AutoConfig, AutoProcessor, AutoTokenizer, LlamaForCausalLM, PretrainedConfig  # noqa: F401

    sys.meta_path.append(Finder(name for name in NAMES if find_spec(name) is None))
