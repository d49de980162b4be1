"""Calls of the CUDA driver that CuPy does not offer."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

Function = Callable[..., int]


@cache
def function(name: str, *argtypes: type) -> Function:
    """A function of the driver, which returns a CUresult; integers are taken as pointers where `argtypes` say so."""
    library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    # why: subscripted, it is an object of its own, whose argtypes nobody else sets.
    found = library[name]
    if argtypes:
        found.argtypes = argtypes
    return found
