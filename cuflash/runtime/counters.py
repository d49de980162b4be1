"""Counters in device memory by which the blocks of a launch share out their tiles, and tell which of them was last.

A launch leaves its counter at zero, so launches that follow one another can share one: each stream has a counter. A
launch that is captured into a graph gets a counter that is never given out again, because the graph may later run
beside any other work. (It must not run beside a clone or a second instance of it: both write the same out.)

A stream that was destroyed leaves its counters behind, which serve no other: its work may still go on. Nothing tells
when that ends but an event after each launch, which would cost every call, and to wait for the whole GPU would end all
captures, those of other threads, too. So GPU memory grows with the streams that a process makes, and with the launches
that it captures: by 4 bytes for a launch that shares out tiles, and by 4 for each block of query rows of decoding (one
a sequence and kv head in a decode step, all rounded up to a power of two: 4 KB for 128 sequences of 8 heads). Host
memory does not, as CUDA gives out handles again. PyTorch and XLA keep the streams that they make.

All addresses are of the GPU's primary context. cuflash does not survive that context, as neither do the kernels that it
has loaded nor the memory pools of CuPy and PyTorch: after `cudaDeviceReset` the process must be started anew.
"""

from __future__ import annotations

import ctypes
from typing import Any

from ..locks import Lock
from .driver import failure, function, zeroed

DEFAULT = 0  # handle of the default stream, of which nothing is asked: it is never captured, and there is one a GPU
PAGE = 4096  # counters of 4 bytes that are allocated together

_lock = Lock(reentrant=True)
_free: dict[tuple[int, int], list[int]] = {}  # unused counters by GPU and number of words
# The stream's unique number and its counter, by GPU, number of words, use and the stream's handle. why the number, too:
# CUDA gives a handle to a new stream while work of the old one still runs.
_of_stream: dict[tuple[int, int, int, int], tuple[int, int]] = {}


def counter(ordinal: int, stream: int, words: int = 1, use: int = 0) -> int:
    """Address of the counter for a launch on this stream of the GPU `ordinal`, the current device; or of so many.

    use: tells the counters of one launch apart, which count at the same time.
    """
    words, number = _rounded(words), 0
    if stream != DEFAULT:
        if _asked("cuStreamIsCapturing", stream, ctypes.c_int()):
            return _fresh(ordinal, words)
        number = _asked("cuStreamGetId", stream, ctypes.c_ulonglong())
    key = ordinal, words, use, stream
    found = _of_stream.get(key)
    if found is None or found[0] != number:
        with _lock:
            found = _of_stream.get(key)
            if found is None or found[0] != number:
                found = _of_stream[key] = number, _fresh(ordinal, words)
    return found[1]


def _asked(name: str, stream: int, answer: Any) -> int:
    result = function(name, ctypes.c_void_p, ctypes.c_void_p)(stream, ctypes.addressof(answer))
    if result:
        raise failure(result, f"{name} failed for the stream {stream:#x}")
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
