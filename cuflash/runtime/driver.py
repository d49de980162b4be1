"""Calls of the CUDA driver that CuPy does not offer."""

from __future__ import annotations

import contextlib
import ctypes
import struct
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

Function = Callable[..., int]
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@cache
def function(name: str, *argtypes: type) -> Function:
    """A function of the driver, which returns a CUresult. With `argtypes`, integers are taken as pointers."""
    # why PyDLL: these functions return at once; releasing the GIL costs 30 ns, and more if other threads want it.
    library = ctypes.PyDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    # why not getattr: library[name] is a new object each time, so that nobody else changes its argtypes.
    found = library[name]
    if argtypes:
        found.argtypes = argtypes
    return found


def current_device() -> int:
    """Number of the GPU whose context this thread works in, -1 where it has none."""
    # why a new one for each call: another thread could overwrite a shared one before it is read.
    ordinal = ctypes.c_int(-1)
    return -1 if function("cuCtxGetDevice", ctypes.c_void_p)(ctypes.addressof(ordinal)) else ordinal.value


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, with a number for its value."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


# CUlaunchConfig: the grid, the block, bytes of shared memory, the stream, the attributes and their number.
_CONFIG = struct.Struct("=7I4xQQI4x")
_EARLY = _Attribute(6, 0, 1)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
EARLY_DRIVER = 12040  # the first driver whose graphs take such launches from every capture


@cache
def launches_early() -> bool:
    """Whether the driver lets a kernel begin before the one ahead of it has ended."""
    version = ctypes.c_int(0)
    failed = function("cuDriverGetVersion", ctypes.c_void_p)(ctypes.addressof(version))
    return not failed and version.value >= EARLY_DRIVER


class EarlyLaunch:
    """Launches a kernel that waits by itself for the kernels ahead of it (`griddepcontrol.wait`).

    Its blocks begin while those of the kernel ahead of it end. It is for one thread at a time.
    """

    __slots__ = ("_function", "_latest", "_launch", "_shape")

    def __init__(self, kernel: Any, grid: tuple[int, ...], block: tuple[int, ...], smem_bytes: int) -> None:
        self._launch = function("cuLaunchKernelEx", ctypes.c_char_p, *[ctypes.c_void_p] * 3)
        self._function, self._shape = kernel.ptr, (*grid, *block, smem_bytes)
        self._latest = -1, b""  # stream and CUlaunchConfig of the latest launch

    def __call__(self, pointers: int, stream: int) -> None:
        """`pointers` is the address of the arguments' addresses, `stream` that of the stream."""
        latest = self._latest  # why read once: a finalizer may launch in between
        if latest[0] != stream:
            latest = self._latest = stream, _CONFIG.pack(*self._shape, stream, ctypes.addressof(_EARLY), 1)
        if result := self._launch(latest[1], self._function, pointers, None):
            from cupy.cuda.driver import CUDADriverError

            raise CUDADriverError(result)


@contextlib.contextmanager
def on_device(ordinal: int) -> Iterator[None]:
    """Inside, this thread works in a context of the GPU, which calls of the driver need.

    CUDA's runtime makes the context in its own calls, but a thread of autograd or of a pool may have made none of them.
    """
    from cupy.cuda import Device, runtime

    with Device(ordinal):
        runtime.setDevice(ordinal)  # why: even the runtime's current device may have no context yet
        yield


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Inside, this thread may allocate memory and load modules while it or another thread captures a stream."""
    exchange, mode = function("cuThreadExchangeStreamCaptureMode", ctypes.c_void_p), ctypes.c_int(_RELAXED)
    exchange(ctypes.addressof(mode))
    try:
        yield
    finally:
        exchange(ctypes.addressof(mode))
