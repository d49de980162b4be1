"""cuflash under the names that programs import of flash-attn, for code that is not to be changed.

from cuflash.frameworks import flash_attn
flash_attn.activate()                                     # before the program's own imports
flash_attn.activate(as_installed=True)                    # for transformers and diffusers

from flash_attn import flash_attn_func                    # cuflash.frameworks.flash_attn_interface
from flash_attn.bert_padding import unpad_input           # cuflash.frameworks.flash_attn.bert_padding
from flash_attn.cute import flash_attn_varlen_func        # cuflash.frameworks.flash_attn_4_interface
from flash_attn_interface import flash_attn_with_kvcache  # cuflash.frameworks.flash_attn_3_interface
"""

from __future__ import annotations

import importlib.util
import opcode
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ...errors import UnsupportedError
from . import bert_padding, v2, v2_gpu, v3, v4

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
_STANDS_IN = (
    "cuflash stands in for flash-attn here (cuflash.frameworks.flash_attn.activate), and does not have it; it has "
    f"{', '.join(_MODULES)}. For all else install flash-attn and call activate(force=True), or call restore()"
)
_IMPORT_FROM = opcode.opmap["IMPORT_FROM"]
# What imports a module, and what PyTorch calls to find FlashAttention-4: where the code is, and its name.
_IMPORTING = "importlib._bootstrap", "_find_and_load_unlocked"
_SEEKING_KERNELS = "torch._inductor.kernel.flex.flex_flash_attention", "ensure_flash_available"
# Distributions, their versions, and the modules that they bring.
_DISTRIBUTIONS = {
    "flash-attn": ("2.8.3", "flash_attn"),
    "flash-attn-3": ("3.0.0", "flash_attn_3\nflash_attn_interface"),
    "flash-attn-4": ("4.0.0", "flash_attn"),
}


class _Before(NamedTuple):
    """What `restore` puts back: modules under our names, and the finder that it removes."""

    modules: dict[str, ModuleType]
    finder: _Finder


_before: _Before | None = None


def activate(force: bool = False, *, as_installed: bool = False) -> None:
    """Registers `flash_attn`, `flash_attn_interface` and their modules, so that other code's imports find cuflash.

    The modules are `flash_attn` (`__version__` is 2.8.3), its `flash_attn_interface` and `bert_padding`,
    `flash_attn.cute` and `flash_attn.cute.interface`, and FlashAttention-3 as `flash_attn_interface` and
    `flash_attn_3.flash_attn_interface`. They have the functions and signatures of the modules of this package, and
    `flash_attn_gpu` of flash-attn 2, which xformers calls. What else the packages hold (`flash_attn.layers`, `.ops`,
    `.losses`, `.modules`, `flash_attn_2_cuda`) is a ModuleNotFoundError, also for code that looks for `flash_attn` and
    then imports such a module from it. `BACKEND="FLASH"` of PyTorch's flex_attention, which calls kernels of
    FlashAttention-4, is an UnsupportedError. Names that were imported before are not changed.

    as_installed: for programs that look for an installed distribution, which are transformers and diffusers: they do
    not offer "flash_attention_2" and the like by the modules alone. `as_installed=True` makes `importlib.metadata`
    answer that flash-attn 2.8.3, flash-attn-3 3.0.0 and flash-attn-4 4.0.0 are installed, in this process and until
    `restore`; nothing of `importlib.metadata` is replaced. Call it before they are imported, as they keep the answers.
    Not beside TransformerEngine, which then imports `flash_attn_2_cuda` and fails. Programs that look for modules
    (`import`, `importlib.util.find_spec`, `flash_attn.__version__`) find them without it: Megatron, xformers,
    ring-flash-attention, unsloth, nanochat. `cuflash.frameworks.transformers` needs none of it.

    force: also where one of the packages is installed. Its modules that are not named above stay importable.

    A second call does nothing, but `as_installed=True` counts then, too. Raises UnsupportedError where a package is
    installed, unless `force=True`; nothing is registered then. Limits and rules for NaN of the functions are those of
    `cuflash.forward` and `cuflash.backward`.

    >>> from cuflash.frameworks import flash_attn
    >>> flash_attn.activate()
    >>> from flash_attn import flash_attn_func
    >>> flash_attn_func.__module__
    'cuflash.frameworks.flash_attn.v2'
    >>> flash_attn.restore()
    """
    global _before
    if _before is not None:
        _before.finder.as_installed |= as_installed
        return
    installed = {root: _installed(root) for root in _ROOTS}
    places = [
        f"{root} ({where[0] if where else 'no place known'})" for root, where in installed.items() if where is not None
    ]
    if places and not force:
        raise UnsupportedError(
            f"{', '.join(places)} is installed; give force=True to put cuflash in its place in this process "
            "(as_installed=True, too, where transformers or diffusers shall offer it), or import from "
            "cuflash.frameworks.flash_attn_interface"
        )
    finder = _Finder(as_installed)
    _before = _Before({name: module for name, module in sys.modules.items() if _is_ours(name)}, finder)
    modules = {name: _module_named(name, installed) for name in _MODULES}
    sys.modules.update(modules)
    for name in list(filter(_is_ours, sys.modules)):  # those of an installed package, too
        parent, _, child = name.rpartition(".")
        if parent in modules:
            setattr(modules[parent], child, sys.modules[name])
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
    module = _StandIn(name, f"{source.__name__} under the name of {name}.\n\n{source.__doc__}")
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
    if name == "flash_attn.flash_attn_interface":
        module.__dict__["flash_attn_gpu"] = v2_gpu
    return module


class _StandIn(ModuleType):
    """A module of flash-attn, whose errors name cuflash, too."""

    def __init__(self, name: str, doc: str) -> None:
        self._spec: ModuleSpec | None = None
        super().__init__(name, doc)

    def __getattr__(self, name: str) -> Any:
        frame = sys._getframe(1)
        if frame.f_code.co_code[frame.f_lasti] == _IMPORT_FROM:  # why: Python's error in its place lacks the text
            raise ImportError(f"cannot import name {name!r} from {self.__name__!r}: {_STANDS_IN}", name=self.__name__)
        text = f"module {self.__name__!r} has no attribute {name!r}: {_STANDS_IN}"
        raise AttributeError(text, name=name, obj=self)

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)  # as cloudpickle takes plain modules

    @property
    def __spec__(self) -> ModuleSpec | None:
        """The spec; for PyTorch, which takes it for kernels of FlashAttention-4, an error before it compiles."""
        if self.__name__ == "flash_attn.cute" and _is_called_by(_SEEKING_KERNELS, 3):
            raise UnsupportedError(
                'BACKEND="FLASH" of flex_attention calls kernels of FlashAttention-4, but cuflash stands in for it '
                "here (cuflash.frameworks.flash_attn.activate), and does not have them; call "
                'cuflash.frameworks.torch.flex_attention, or leave BACKEND="TRITON"'
            )
        return self._spec

    @__spec__.setter
    def __spec__(self, spec: ModuleSpec | None) -> None:
        self._spec = spec


def _is_called_by(code: tuple[str, str], depth: int) -> bool:
    """True if the caller's frame so many calls up runs this code: the name of a module, and of a function in it."""
    frame = sys._getframe(1)
    for _ in range(depth - 1):
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return (frame.f_globals.get("__name__"), frame.f_code.co_name) == code


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
    """Finder that comes after the paths of installed packages: errors for missing modules, and distributions."""

    def __init__(self, as_installed: bool) -> None:
        self.as_installed = as_installed

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        # why not for importlib.util.find_spec: xformers and others look for modules by it, and None is the answer.
        if _is_ours(fullname) and _is_called_by(_IMPORTING, 3):
            raise ModuleNotFoundError(f"No module named {fullname!r}: {_STANDS_IN}", name=fullname)

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        if not self.as_installed:
            return
        required = None if context is None else context.name
        for name in _DISTRIBUTIONS:
            if required is None or name == required.lower().replace("_", "-").replace(".", "-"):
                yield _Installed(name)
