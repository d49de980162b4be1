"""Counters in device memory by which the blocks of a launch share out their tiles, and tell which of them was last.

A launch leaves its counter at zero, so launches that follow one another can share one: each stream has a counter. A
launch that is captured into a graph gets a counter that is never given out again, because the graph may later run
beside any other work. (It must not run beside itself or another graph of the same capture: both write the same out.)
"""

from __future__ import annotations

import ctypes
from typing import Any

from ..locks import Lock
from .driver import function, zeroed

DEFAULT = 0  # handle of the default stream, of which nothing is asked: it is never captured, and there is one a GPU
_OF_DEFAULT = -1  # in place of its unique number
PAGE = 4096  # counters of 4 bytes that are allocated together

_lock = Lock(reentrant=True)
_free: dict[tuple[int, int], list[int]] = {}  # unused counters by GPU and number of words
# Counters by GPU, number of words, use, and the stream's unique number. why not its handle: CUDA reuses handles while
# work still runs.
_of_stream: dict[tuple[int, int, int, int], int] = {}


def counter(ordinal: int, stream: int, words: int = 1, use: int = 0) -> int:
    """Address of the counter for a launch on this stream of the GPU `ordinal`, the current device; or of so many.

    use: tells the counters of one launch apart, which count at the same time.
    """
    words = _rounded(words)
    if stream == DEFAULT:
        key = ordinal, words, use, _OF_DEFAULT
    elif _asked("cuStreamIsCapturing", stream, ctypes.c_int()):
        return _fresh(ordinal, words)
    else:
        key = ordinal, words, use, _asked("cuStreamGetId", stream, ctypes.c_ulonglong())
    found = _of_stream.get(key)
    if found is None:
        with _lock:
            found = _of_stream[key] = _of_stream.get(key) or _fresh(ordinal, words)
    return found


def _asked(name: str, stream: int, answer: Any) -> int:
    result = function(name, ctypes.c_void_p, ctypes.c_void_p)(stream, ctypes.addressof(answer))
    if result:
        raise RuntimeError(f"{name} failed for the stream {stream:#x} (CUresult {result})")
    return int(answer.value)


def reserve(ordinal: int, words: int = 1) -> None:
    """Makes sure that the next counter needs no allocation. The GPU must be the current device."""
    words = _rounded(words)
    with _lock:
        free = _free.setdefault((ordinal, words), [])
        if not free:
            free += _page(words)


def _rounded(words: int) -> int:
    """The power of two that is not below: calls of nearly the same size then share counters."""
    return 1 << (words - 1).bit_length()


def _fresh(ordinal: int, words: int) -> int:
    with _lock:
        reserve(ordinal, words)
        return _free[ordinal, words].pop()


def _page(words: int) -> list[int]:
    """Addresses of new counters of so many words, all zero."""
    size = 4 * max(PAGE, words)
    page = zeroed(size)
    return list(range(page, page + size, 4 * words))
