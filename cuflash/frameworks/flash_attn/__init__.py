"""cuflash under the names that programs import from flash-attn, for code that must stay unchanged.

    from cuflash.frameworks import flash_attn
    flash_attn.activate()                                     # before the program's own imports
    flash_attn.activate(as_installed=True)                    # for transformers and diffusers

    from flash_attn import flash_attn_func                    # cuflash.frameworks.flash_attn_interface
    from flash_attn.bert_padding import unpad_input           # cuflash.frameworks.flash_attn.bert_padding
    from flash_attn.cute import flash_attn_varlen_func        # cuflash.frameworks.flash_attn_4_interface
    from flash_attn_interface import flash_attn_with_kvcache  # cuflash.frameworks.flash_attn_3_interface

`activate` registers these modules, and `restore` removes them.
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

# Registered modules: the source of their functions, and a version, whose signatures cuflash has. 2.8.3 is the newest
# version that TransformerEngine accepts.
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
# Functions, as (module, name), that import a module, and that PyTorch calls to find FlashAttention-4.
_IMPORTING = "importlib._bootstrap", "_find_and_load_unlocked"
_SEEKING_KERNELS = "torch._inductor.kernel.flex.flex_flash_attention", "ensure_flash_available"
# Distributions: their versions and top-level modules.
_DISTRIBUTIONS = {
    "flash-attn": ("2.8.3", "flash_attn"),
    "flash-attn-3": ("3.0.0", "flash_attn_3\nflash_attn_interface"),
    "flash-attn-4": ("4.0.0", "flash_attn"),
}


class _Before(NamedTuple):
    """The state that `restore` brings back: modules under flash-attn's names, and the finder to remove."""

    modules: dict[str, ModuleType]
    finder: _Finder


_before: _Before | None = None


def activate(force: bool = False, *, as_installed: bool = False) -> None:
    """Registers `flash_attn`, `flash_attn_interface` and their modules, so that other code's imports find cuflash.

    The modules are `flash_attn` (`__version__` is 2.8.3), its `flash_attn_interface` and `bert_padding`,
    `flash_attn.cute` and `flash_attn.cute.interface`, and FlashAttention-3 as `flash_attn_interface` and
    `flash_attn_3.flash_attn_interface`. They have the functions and signatures of this package's modules, and
    `flash_attn_gpu` of flash-attn 2, which xformers calls. A second call only adds `as_installed=True`.

    Parameters
    ----------
    force : bool, default False
        Registers also where one of the packages is installed. Its other modules stay importable.
    as_installed : bool, default False
        Makes `importlib.metadata` report flash-attn 2.8.3, flash-attn-3 3.0.0 and flash-attn-4 4.0.0 as installed, in
        this process and until `restore`.

    Raises
    ------
    UnsupportedError
        Where a package is installed, unless `force=True`; nothing is registered then.

    Notes
    -----
    transformers and diffusers look for an installed distribution, and offer "flash_attention_2" and the like only with
    `as_installed=True`. Call it before they are imported, as they cache the answers. It adds a finder and replaces
    nothing of `importlib.metadata`. Do not use it beside TransformerEngine, which then imports `flash_attn_2_cuda` and
    fails. Megatron, xformers, ring-flash-attention, unsloth and nanochat look for modules (`import`,
    `importlib.util.find_spec`, `flash_attn.__version__`), and do not need it. Neither does
    `cuflash.frameworks.transformers`.

    Other modules of the packages (`flash_attn.layers`, `.ops`, `.losses`, `.modules`, `flash_attn_2_cuda`) raise
    ModuleNotFoundError. `BACKEND="FLASH"` of PyTorch's flex_attention calls kernels of FlashAttention-4, and is an
    UnsupportedError. Names imported before the call keep their values. Limits and rules for NaN are described in
    `cuflash.forward` and `cuflash.backward`.

    Examples
    --------
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
    locations = [
        f"{root} ({where[0] if where else 'no place known'})" for root, where in installed.items() if where is not None
    ]
    if locations and not force:
        raise UnsupportedError(
            f"{', '.join(locations)} is installed; give force=True to put cuflash in its place in this process "
            "(as_installed=True, too, where transformers or diffusers shall offer it), or import from "
            "cuflash.frameworks.flash_attn_interface"
        )
    finder = _Finder(as_installed)
    _before = _Before({name: module for name, module in sys.modules.items() if _is_ours(name)}, finder)
    modules = {name: _module_named(name, installed) for name in _MODULES}
    sys.modules.update(modules)
    for name in list(filter(_is_ours, sys.modules)):  # also modules of an installed package
        parent, _, child = name.rpartition(".")
        if parent in modules:
            setattr(modules[parent], child, sys.modules[name])
    sys.meta_path.append(finder)


def restore() -> None:
    """Undoes `activate`: modules of these names are again exactly as before it.

    Examples
    --------
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
    """Returns the folders of the modules of an installed package; None if there is none."""
    try:
        spec = importlib.util.find_spec(root)
    except ValueError:  # a registered module without a spec
        return []
    return None if spec is None else list(spec.submodule_search_locations or [spec.origin or ""])


def _module_named(name: str, installed: dict[str, list[str] | None]) -> ModuleType:
    """Returns the module of this name. A package also finds further modules in the folders of an installed package."""
    source, version = _MODULES[name]
    root, *inner = name.split(".")
    folders = [str(Path(place, *inner)) for place in installed[root] or []]
    module = _StandIn(name, f"{source.__name__} under the name of {name}.\n\n{source.__doc__}")
    is_package = any(other.startswith(f"{name}.") for other in _MODULES)
    module.__spec__ = ModuleSpec(name, None, origin=source.__file__, is_package=is_package)
    module.__package__ = name if is_package else name.rpartition(".")[0]
    module.__file__ = source.__file__
    if is_package:
        module.__path__ = module.__spec__.submodule_search_locations = folders
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
    """A module in place of flash-attn, whose errors name cuflash, too."""

    def __init__(self, name: str, doc: str) -> None:
        self._spec: ModuleSpec | None = None
        super().__init__(name, doc)

    def __getattr__(self, name: str) -> Any:
        frame = sys._getframe(1)
        if frame.f_code.co_code[frame.f_lasti] == _IMPORT_FROM:  # Python's own ImportError would lose the text
            raise ImportError(f"cannot import name {name!r} from {self.__name__!r}: {_STANDS_IN}", name=self.__name__)
        text = f"module {self.__name__!r} has no attribute {name!r}: {_STANDS_IN}"
        raise AttributeError(text, name=name, obj=self)

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)  # as cloudpickle takes plain modules

    @property
    def __spec__(self) -> ModuleSpec | None:
        """The spec. PyTorch, which takes it for FlashAttention-4's kernels, gets an error before it compiles."""
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
    """True if the frame `depth` calls up runs this code: the names of a module and of a function."""
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
    """Finder behind the paths of installed packages: raises for missing modules, and finds distributions."""

    def __init__(self, as_installed: bool) -> None:
        self.as_installed = as_installed

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        # Only imports raise: xformers and others look for modules by importlib.util.find_spec, which expects None.
        if _is_ours(fullname) and _is_called_by(_IMPORTING, 3):
            raise ModuleNotFoundError(f"No module named {fullname!r}: {_STANDS_IN}", name=fullname)

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        if not self.as_installed:
            return
        required = None if context is None else context.name
        for name in _DISTRIBUTIONS:
            if required is None or name == required.lower().replace("_", "-").replace(".", "-"):
                yield _Installed(name)
