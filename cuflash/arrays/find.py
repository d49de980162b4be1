"""Finds the array library of a call's arrays."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import numpy as np

from ..errors import ProblemError
from ..problem.checks import check_alike
from ..problem.operands import Op
from ..units import kind_of
from .dlpack import DlpackLibrary
from .library import Library
from .numpy import NUMPY
from .packages import PACKAGES

_libraries: dict[type, Library] = {np.ndarray: NUMPY}
_singletons: dict[Any, Library] = {"numpy": NUMPY}


def libraries_of(op: Op, arrays: tuple[Any, ...]) -> tuple[Library, bool]:
    """Returns the library of a call's first operand, and True if that operand is on a GPU.

    Raises ProblemError if another operand is of another library.
    """
    kind = type(arrays[0])
    first = _libraries.get(kind) or library_of(op.names[0], arrays[0])
    # Counting types takes half as long as the loop below, and in most calls all types are equal.
    if [*map(type, arrays)].count(kind) < len(arrays):
        for number, array in enumerate(arrays):
            if type(array) is kind or (array is None and (op.operands[number].optional or number >= len(op.inputs))):
                continue
            name = op.operands[number].called
            if (other := library_of(name, array)) is not first:
                check_alike({op.names[0]: first.spec(op.names[0], arrays[0]), name: other.spec(name, array)})
    return first, first.on_gpu(arrays[0])


def library_of(name: str, array: Any) -> Library:
    """Returns the library of an array; raises ProblemError for a value that is no array."""
    library = _libraries.get(type(array))
    return _find(name, array) if library is None else library


def _find(name: str, array: Any) -> Library:
    if isinstance(array, type):
        raise ProblemError(f"{name} is the class {array.__name__}, and no array of it; give an array")
    for package, array_class in PACKAGES.items():
        if array_class is not None and _is_instance(array, package, array_class):
            library = _singleton(package, import_module(f".{package}", __package__).library)
            library.check_type(name, array)
            _libraries[type(array)] = library
            return library
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        # The key has both: one module may define several array classes, each with its own from_dlpack.
        module, from_dlpack = type(array).__module__, _from_dlpack(array)
        library = _singleton((module, from_dlpack), lambda: DlpackLibrary(module.split(".")[0], from_dlpack))
        # Cached by type only if the type has __dlpack__: with an instance attribute, arrays of one type may differ.
        if hasattr(type(array), "__dlpack__"):
            _libraries[type(array)] = library
        return library
    raise ProblemError(
        f"{name} is {kind_of(array)}; give a CuPy, PyTorch, JAX or NumPy array, or one that has __dlpack__"
    )


def _from_dlpack(array: Any) -> Any:
    """Returns `from_dlpack` of the library's array API namespace, or the identity if it has no such namespace."""
    namespace = getattr(array, "__array_namespace__", None)
    return _unchanged if namespace is None else namespace().from_dlpack


def _unchanged(result: Any) -> Any:
    return result


def _is_instance(array: Any, module: str, name: str) -> bool:
    # An array exists only if its framework has been imported, so nothing is imported for this check.
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(array, getattr(loaded, name, ()))


def _singleton(key: Any, make: Any) -> Library:
    # setdefault: if the first calls of two threads both create an adapter, both get the same one.
    return _singletons.get(key) or _singletons.setdefault(key, make())
