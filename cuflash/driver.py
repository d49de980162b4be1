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
    # why PyDLL: these return at once. To let go of the interpreter for one costs 30 ns, and more where it is wanted.
    library = ctypes.PyDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    # why: subscripted, it is an object of its own, whose argtypes nobody else sets.
    found = library[name]
    if argtypes:
        found.argtypes = argtypes
    return found


def current_device() -> int:
    """Number of the GPU whose context this thread works in, -1 where it has none."""
    # why not one for all calls: another thread may run between the call and the look at its answer.
    ordinal = ctypes.c_int(-1)
    return -1 if function("cuCtxGetDevice", ctypes.c_void_p)(ctypes.addressof(ordinal)) else ordinal.value


@contextlib.contextmanager
def on_device(ordinal: int) -> Iterator[None]:
    """Inside, this thread works in a context of the GPU, which calls of the driver need.

    CUDA's runtime sees to it in its own calls; a thread that autograd began, or one of a pool, may not have made any.
    """
    from cupy.cuda import Device, runtime

    with Device(ordinal):
        runtime.setDevice(ordinal)  # why: what is the runtime's device already may not have a context yet
        yield


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Inside, a capture, by whomever, does not forbid this thread to allocate or to load modules."""
    exchange, mode = function("cuThreadExchangeStreamCaptureMode", ctypes.c_void_p), ctypes.c_int(_RELAXED)
    exchange(ctypes.addressof(mode))
    try:
        yield
    finally:
        exchange(ctypes.addressof(mode))
