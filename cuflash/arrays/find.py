"""Finds the library that the arrays of a call belong to."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..errors import ProblemError, UnsupportedError
from ..problem.checks import check_alike
from ..problem.operands import Op
from .cupy import cupy
from .dlpack import DlpackLibrary
from .library import Library
from .numpy import NUMPY
from .torch import TorchLibrary

_libraries: dict[type, Library] = {np.ndarray: NUMPY}
_singletons: dict[Any, Library] = {"numpy": NUMPY}


def libraries_of(op: Op, arrays: tuple[Any, ...]) -> tuple[Library, bool]:
    """Returns the library of a call's operands, that of the first, and whether it is on a GPU.

    Raises ProblemError for operands of others.
    """
    kind = type(arrays[0])
    first = _libraries.get(kind) or library_of(op.names[0], arrays[0])
    # why counted first: it takes half as long as to look at each, and in most calls all are of one kind.
    if [*map(type, arrays)].count(kind) < len(arrays):
        for number, array in enumerate(arrays):
            if type(array) is kind or (array is None and (op.operands[number].optional or number >= len(op.inputs))):
                continue
            name = op.operands[number].called
            if (other := library_of(name, array)) is not first:
                check_alike({op.names[0]: first.spec(op.names[0], arrays[0]), name: other.spec(name, array)})
    return first, first.on_gpu(arrays[0])


def library_of(name: str, array: Any) -> Library:
    """The library that an array belongs to; raises ProblemError if it is no array."""
    library = _libraries.get(type(array))
    if library is None:
        library = _find(name, array)
        # why by the type: of others, each array may have another library, or none.
        if hasattr(type(array), "__dlpack__"):
            _libraries[type(array)] = library
    return library


def _find(name: str, array: Any) -> Library:
    if isinstance(array, type):
        raise ProblemError(f"{name} is the class {array.__name__}, and no array of it; give an array")
    if _is_instance(array, "numpy.ma", "MaskedArray"):
        raise ProblemError(f"{name} is a NumPy masked array, whose mask has no meaning here; give a plain array")
    if isinstance(array, np.ndarray):
        return NUMPY
    if _is_instance(array, "torch", "Tensor"):
        # why: FakeTensor, DTensor, nested and quantised tensors have no memory of their own: data_ptr() is 0.
        if type(array).__torch_dispatch__ is not sys.modules["torch"].Tensor.__torch_dispatch__:
            raise UnsupportedError(f"{name} is a torch {type(array).__name__}; give the plain tensor it stands for")
        return _singleton("torch", TorchLibrary)
    if _is_instance(array, "cupy", "ndarray"):
        return _singleton("cupy", cupy)
    if _is_instance(array, "jax", "Array"):
        return _singleton("jax", lambda: DlpackLibrary("jax", sys.modules["jax"].dlpack.from_dlpack))
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        # why both: arrays of several kinds that come back as their own may be defined in one module.
        module, from_dlpack = type(array).__module__, _from_dlpack(array)
        return _singleton((module, from_dlpack), lambda: DlpackLibrary(module.split(".")[0], from_dlpack))
    raise ProblemError(
        f"{name} is a {type(array).__name__}; give a CuPy, PyTorch, JAX or NumPy array, or one that has __dlpack__"
    )


def _from_dlpack(array: Any) -> Any:
    """Returns the array API's function that makes arrays of this library; the identity if it does not follow it."""
    namespace = getattr(array, "__array_namespace__", None)
    return _unchanged if namespace is None else namespace().from_dlpack


def _unchanged(result: Any) -> Any:
    return result


def _is_instance(array: Any, module: str, name: str) -> bool:
    # why: an array of a framework exists only if the framework has been imported, so nothing is imported just to look
    # (numpy.ma alone takes 50 ms).
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(array, getattr(loaded, name, ()))


def _singleton(key: Any, make: Any) -> Library:
    # why setdefault: two threads may both make one in their first calls, and all are to get the same.
    return _singletons.get(key) or _singletons.setdefault(key, make())
