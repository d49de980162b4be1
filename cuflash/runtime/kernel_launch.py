"""Launches of a kernel: through CuPy, or early, before the kernels ahead of it on the stream have ended."""

from __future__ import annotations

import ctypes
import struct
from functools import cache, lru_cache
from typing import Any, NamedTuple

from .driver import failure, function
from .structs import ParamBuffer


class Stream(NamedTuple):
    """A stream as CuPy's launches take it."""

    ptr: int


_stream = lru_cache(Stream)  # a lookup is faster than a new object


class PlainLaunch:
    """A launch of a kernel that begins once those ahead of it on the stream have ended."""

    __slots__ = ("_kernel", "_shape")

    def __init__(self, kernel: Any, grid: tuple[int, ...], block: tuple[int, ...], smem_bytes: int) -> None:
        self._kernel, self._shape = kernel, (grid, block, smem_bytes)

    def __call__(self, buffer: ParamBuffer, stream: int) -> None:
        """Launches on the stream of this address."""
        grid, block, smem_bytes = self._shape
        self._kernel(grid, block, buffer.arguments, smem_bytes, _stream(stream))


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, with numbers for its value."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


# CUlaunchConfig: the grid, the block, bytes of shared memory, the stream, the attributes and their number.
_CONFIG = struct.Struct("=7I4xQQI4x")
_EARLY = _Attribute(6, 0, (1,))  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_INVALID_CLUSTER_SIZE = 912  # CUDA_ERROR_INVALID_CLUSTER_SIZE
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, with three numbers for its value
EARLY_DRIVER = 12040  # the first driver whose graphs take such launches from every capture


@cache
def launches_early() -> bool:
    """Returns True if the driver can start a kernel before the one ahead of it has ended."""
    version = ctypes.c_int(0)
    failed = function("cuDriverGetVersion", ctypes.c_void_p)(ctypes.addressof(version))
    return not failed and version.value >= EARLY_DRIVER


class EarlyLaunch:
    """A launch of a kernel that waits by itself for the kernels ahead of it (`griddepcontrol.wait`).

    Its blocks begin while the blocks of the kernel ahead of it end. It is for one thread at a time.
    """

    __slots__ = ("_function", "_latest", "_launch", "_shape")

    def __init__(self, kernel: Any, grid: tuple[int, ...], block: tuple[int, ...], smem_bytes: int) -> None:
        self._launch = function("cuLaunchKernelEx", ctypes.c_char_p, *[ctypes.c_void_p] * 3)
        self._function, self._shape = kernel.ptr, (*grid, *block, smem_bytes)
        self._latest = -1, b""  # stream and CUlaunchConfig of the latest launch

    def __call__(self, buffer: ParamBuffer, stream: int) -> None:
        """Launches on the stream of this address."""
        latest = self._latest  # read once, as a finalizer may launch in between
        if latest[0] != stream:
            latest = self._latest = stream, _CONFIG.pack(*self._shape, stream, ctypes.addressof(_EARLY), 1)
        if result := self._launch(latest[1], self._function, buffer.pointers, None):
            raise failure(result, "a kernel was not launched")


def has_room_for_cluster(kernel: int, size: int, num_threads: int, smem_bytes: int) -> bool:
    """Returns True if the current GPU has SMs of one GPC for a cluster of `size` thread blocks, as MIG may leave none.

    kernel: the address of a CUfunction.
    """
    attribute, clusters = _Attribute(_CLUSTER_DIMENSION, 0, (size, 1, 1)), ctypes.c_int(0)
    config = _CONFIG.pack(size, 1, 1, num_threads, 1, 1, smem_bytes, 0, ctypes.addressof(attribute), 1)
    count = function("cuOccupancyMaxActiveClusters", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    result = count(ctypes.addressof(clusters), kernel, config)
    if result not in (0, _INVALID_CLUSTER_SIZE):
        raise failure(result, "clusters were not counted")
    return result == 0 and clusters.value > 0
