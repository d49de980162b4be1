"""Calls of the CUDA driver that CuPy does not offer."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator
from functools import cache

Function = Callable[..., int]
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@cache
def function(name: str, *argtypes: type) -> Function:
    """A function of the driver, which returns a CUresult; integers are taken as pointers where `argtypes` say so."""
    library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    # why: subscripted, it is an object of its own, whose argtypes nobody else sets.
    found = library[name]
    if argtypes:
        found.argtypes = argtypes
    return found


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Inside, a capture, by whomever, does not forbid this thread to allocate or to load modules."""
    exchange, mode = function("cuThreadExchangeStreamCaptureMode", ctypes.c_void_p), ctypes.c_int(_RELAXED)
    exchange(ctypes.addressof(mode))
    try:
        yield
    finally:
        exchange(ctypes.addressof(mode))
