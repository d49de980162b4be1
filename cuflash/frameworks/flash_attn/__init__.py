"""cuflash under the names that programs import of flash-attn, for code that is not to be changed.

from cuflash.frameworks import flash_attn
flash_attn.activate()                                     # before the program's own imports

from flash_attn import flash_attn_func                    # cuflash.frameworks.flash_attn_interface
from flash_attn.bert_padding import unpad_input           # cuflash.frameworks.flash_attn.bert_padding
from flash_attn.cute import flash_attn_varlen_func        # cuflash.frameworks.flash_attn_4_interface
from flash_attn_interface import flash_attn_with_kvcache  # cuflash.frameworks.flash_attn_3_interface
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ...errors import UnsupportedError
from . import bert_padding, v2, v3, v4

__all__ = ["activate", "restore"]

# What is registered: where its functions are, and its version if it has one. The versions are those whose signatures
# cuflash has; 2.8.3 is the newest that TransformerEngine takes.
_MODULES: dict[str, tuple[ModuleType, str | None]] = {
    "flash_attn": (v2, "2.8.3"),
    "flash_attn.flash_attn_interface": (v2, None),
    "flash_attn.bert_padding": (bert_padding, None),
    "flash_attn.cute": (v4, "4.0.0"),
    "flash_attn.cute.interface": (v4, None),
    "flash_attn_3": (v3, "3.0.0"),
    "flash_attn_3.flash_attn_interface": (v3, None),
    "flash_attn_interface": (v3, None),
}
_ROOTS = tuple(name for name in _MODULES if "." not in name)
# Distributions, their versions, and the modules that they bring.
_DISTRIBUTIONS = {
    "flash-attn": ("2.8.3", "flash_attn"),
    "flash-attn-3": ("3.0.0", "flash_attn_3\nflash_attn_interface"),
    "flash-attn-4": ("4.0.0", "flash_attn"),
}


class _Before(NamedTuple):
    """What `restore` puts back: modules under our names, and the finder that it removes."""

    modules: dict[str, ModuleType]
    finder: _Finder | None


_before: _Before | None = None


def activate(force: bool = False, *, as_installed: bool = False) -> None:
    """Registers `flash_attn`, `flash_attn_interface` and their modules, so that other code's imports find cuflash.

    The modules are `flash_attn` (`__version__` is 2.8.3), its `flash_attn_interface` and `bert_padding`,
    `flash_attn.cute` and `flash_attn.cute.interface`, and FlashAttention-3 as `flash_attn_interface` and
    `flash_attn_3.flash_attn_interface`. They have the functions and signatures of the modules of this package; what
    else the packages hold (`flash_attn.layers`, `flash_attn.ops`, `flash_attn_2_cuda`) is a ModuleNotFoundError, also
    for code that looks for `flash_attn` and then imports such a module from it. Names that were imported before are
    not changed.

    What asks for the modules (`import`, `importlib.util.find_spec`, `flash_attn.__version__`) finds them: Megatron,
    ring-flash-attention, unsloth, nanochat. transformers and diffusers ask `importlib.metadata` for distributions that
    are installed instead, and do not offer "flash_attention_2" and the like by the modules alone. For them
    `as_installed=True` makes it answer that flash-attn 2.8.3, flash-attn-3 3.0.0 and flash-attn-4 4.0.0 are installed,
    in this process and until `restore`; nothing of `importlib.metadata` is replaced. Call it before they are imported,
    as they keep the answers. Not beside TransformerEngine, which then imports `flash_attn_2_cuda` and fails.
    `cuflash.frameworks.transformers` needs none of it.

    force: also where one of the packages is installed. Its modules that are not named above stay importable.

    A second call does nothing. Raises UnsupportedError where a package is installed, unless `force=True`; nothing is
    registered then. Limits and rules for NaN of the functions are those of `cuflash.forward` and `cuflash.backward`.

    >>> from cuflash.frameworks import flash_attn
    >>> flash_attn.activate()
    >>> from flash_attn import flash_attn_func
    >>> flash_attn_func.__module__
    'cuflash.frameworks.flash_attn.v2'
    >>> flash_attn.restore()
    """
    global _before
    if _before is not None:
        return
    installed = {root: _installed(root) for root in _ROOTS}
    places = [
        f"{root} ({where[0] if where else 'no place known'})" for root, where in installed.items() if where is not None
    ]
    if places and not force:
        raise UnsupportedError(
            f"{', '.join(places)} is installed; give force=True to put cuflash in its place in this process, or import "
            "from cuflash.frameworks.flash_attn_interface"
        )
    finder = _Finder() if as_installed else None
    _before = _Before({name: module for name, module in sys.modules.items() if _is_ours(name)}, finder)
    modules = {name: _module_named(name, installed) for name in _MODULES}
    sys.modules.update(modules)
    for name in list(filter(_is_ours, sys.modules)):  # those of an installed package, too
        parent, _, child = name.rpartition(".")
        if parent in modules:
            setattr(modules[parent], child, sys.modules[name])
    if finder is not None:
        sys.meta_path.append(finder)


def restore() -> None:
    """Takes back what `activate` did: modules of these names are exactly those that were there before it.

    >>> import sys
    >>> from cuflash.frameworks import flash_attn
    >>> flash_attn.activate()
    >>> flash_attn.restore()
    >>> "flash_attn" in sys.modules
    False
    """
    global _before
    if _before is None:
        return
    for name in list(filter(_is_ours, sys.modules)):
        del sys.modules[name]
    sys.modules.update(_before.modules)
    if _before.finder in sys.meta_path:
        sys.meta_path.remove(_before.finder)
    _before = None


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] in _ROOTS


def _installed(root: str) -> list[str] | None:
    """Where the modules of an installed package are; None if there is none."""
    try:
        spec = importlib.util.find_spec(root)
    except ValueError:  # somebody registered a module without a spec
        return []
    return None if spec is None else list(spec.submodule_search_locations or [spec.origin or ""])


def _module_named(name: str, installed: dict[str, list[str] | None]) -> ModuleType:
    """The module of this name; that of a package finds further modules where those of an installed one are."""
    source, version = _MODULES[name]
    root, *inner = name.split(".")
    places = [str(Path(place, *inner)) for place in installed[root] or []]
    module = ModuleType(name, f"{source.__name__} under the name of {name}.\n\n{source.__doc__}")
    is_package = any(other.startswith(f"{name}.") for other in _MODULES)
    module.__spec__ = ModuleSpec(name, None, origin=source.__file__, is_package=is_package)
    module.__package__ = name if is_package else name.rpartition(".")[0]
    module.__file__ = source.__file__
    if is_package:
        module.__path__ = module.__spec__.submodule_search_locations = places
    if version is not None:
        module.__dict__["__version__"] = version
    module.__dict__["__all__"] = list(source.__all__)
    private = "_flash_attn_", "_wrapped_flash_attn_"
    for key, value in vars(source).items():
        if key in source.__all__ or key.startswith(private):
            setattr(module, key, value)
    return module


class _Installed(Distribution):
    """Metadata of a distribution."""

    def __init__(self, name: str) -> None:
        version, modules = _DISTRIBUTIONS[name]
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: cuflash under this name\n",
            "top_level.txt": modules,
        }

    def read_text(self, filename: str) -> str | None:
        return self._texts.get(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(path)  # there are no files


class _Finder(DistributionFinder):
    """What `importlib.metadata` asks beside the paths of installed packages."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        return None

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        required = None if context is None else context.name
        for name in _DISTRIBUTIONS:
            if required is None or name == required.lower().replace("_", "-").replace(".", "-"):
                yield _Installed(name)
