"""Counters in device memory by which the blocks of a launch share out their tiles.

A launch leaves its counter at zero, so launches that follow one another can share one: each stream has a counter. A
launch that is captured into a graph gets a counter that is never given out again, because the graph may later run
beside any other work. (It must not run beside itself or another graph of the same capture: both write the same out.)
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from .driver import function, relaxed_capture

PAGE = 4096  # counters of 4 bytes that are allocated together

_lock = threading.RLock()
_free: dict[int, list[int]] = {}  # unused counters by GPU
# Counters by GPU and by the stream's unique number. why not its handle: CUDA reuses handles while work still runs.
_of_stream: dict[tuple[int, int], int] = {}


def counter(ordinal: int, stream: int) -> int:
    """Address of the counter for a launch on this stream of the GPU `ordinal`, the current device."""
    if _asked("cuStreamIsCapturing", stream, ctypes.c_int()):
        return _fresh(ordinal)
    key = ordinal, _asked("cuStreamGetId", stream, ctypes.c_ulonglong())
    found = _of_stream.get(key)
    if found is None:
        with _lock:
            found = _of_stream[key] = _of_stream.get(key) or _fresh(ordinal)
    return found


def _asked(name: str, stream: int, answer: Any) -> int:
    result = function(name, ctypes.c_void_p, ctypes.c_void_p)(stream, ctypes.addressof(answer))
    if result:
        raise RuntimeError(f"{name} failed for the stream {stream:#x} (CUresult {result})")
    return int(answer.value)


def reserve(ordinal: int) -> None:
    """Makes sure that the next counter needs no allocation. The GPU must be the current device."""
    with _lock:
        free = _free.setdefault(ordinal, [])
        if not free:
            free += _page()


def _fresh(ordinal: int) -> int:
    with _lock:
        reserve(ordinal)
        return _free[ordinal].pop()


def _page() -> list[int]:
    """Addresses of new counters, all zero."""
    from cupy.cuda import Stream, runtime

    with relaxed_capture():
        page = runtime.malloc(4 * PAGE)
        stream = Stream(non_blocking=True)  # why: the default stream waits for others, which a capture forbids
        runtime.memsetAsync(page, 0, 4 * PAGE, stream.ptr)
        stream.synchronize()
    return list(range(page, page + 4 * PAGE, 4))
