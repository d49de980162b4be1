"""Calls of the CUDA driver that CuPy does not offer."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator
from functools import cache

Function = Callable[..., int]
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE
CAPTURE_IMPLICIT = 906  # CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: the legacy default stream while another one is captured


@cache
def function(name: str, *argtypes: type) -> Function:
    """Returns a driver function, which returns a CUresult. With `argtypes`, integers are taken as pointers."""
    # PyDLL keeps the GIL: these functions return at once, and releasing it costs 30 ns, more under contention.
    library = ctypes.PyDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    # Unlike getattr, library[name] gives a new object each time, so no other code changes its argtypes.
    symbol = library[name]
    if argtypes:
        symbol.argtypes = argtypes
    return symbol


def failure(result: int, what: str) -> RuntimeError:
    """Returns the error to raise after a driver function failed, with CUDA's name for it."""
    name = ctypes.c_char_p()
    unknown = function("cuGetErrorName", ctypes.c_int, ctypes.c_void_p)(result, ctypes.addressof(name))
    return RuntimeError(f"{what}: {'CUDA error' if unknown or not name.value else name.value.decode()} ({result})")


def current_device() -> int:
    """Returns the number of the GPU whose context is current in this thread, -1 without a context."""
    # A new integer for each call: another thread could overwrite a shared one before it is read.
    ordinal = ctypes.c_int(-1)
    return -1 if _device_of_context()(ctypes.addressof(ordinal)) else ordinal.value


@cache
def _device_of_context() -> Function:
    return function("cuCtxGetDevice", ctypes.c_void_p)


@contextlib.contextmanager
def on_device(ordinal: int) -> Iterator[None]:
    """Makes a context of the GPU current in this thread, as driver calls need it.

    CUDA's runtime creates the context in its calls, but a thread of autograd or of a pool may not have made any.
    """
    from cupy.cuda import Device, runtime

    with Device(ordinal):
        runtime.setDevice(ordinal)  # even the runtime's current device may have no context yet
        yield


def is_capturing(stream: int) -> bool:
    """Returns True if a stream is being captured into a CUDA graph, or waits for a stream that is."""
    status = ctypes.c_int(0)  # CU_STREAM_CAPTURE_STATUS_NONE
    result = function("cuStreamIsCapturing", ctypes.c_void_p, ctypes.c_void_p)(stream, ctypes.addressof(status))
    return result == CAPTURE_IMPLICIT or status.value != 0


def zeroed(size: int) -> int:
    """Allocates so many zero bytes on the current GPU, which are never freed, and returns their address."""
    from cupy.cuda import Stream, runtime

    with relaxed_capture():
        address = int(runtime.malloc(size))
        # Not the default stream: it waits for other streams, which a capture forbids.
        stream = Stream(non_blocking=True)
        runtime.memsetAsync(address, 0, size, stream.ptr)
        stream.synchronize()
    return address


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Allows this thread to allocate memory and load modules while it or another thread captures a stream."""
    exchange, mode = function("cuThreadExchangeStreamCaptureMode", ctypes.c_void_p), ctypes.c_int(_RELAXED)
    exchange(ctypes.addressof(mode))
    try:
        yield
    finally:
        exchange(ctypes.addressof(mode))
