"""Memory of each GPU that outlives calls: counters of launches, a workspace that launches share, and zeros.

A launch counts the tiles that its thread blocks have taken, and the blocks that have finished. It leaves its counter at
zero, so consecutive launches on a stream share one. CUDA's per-thread default stream is a stream of each thread, all
with one handle, so each thread has a counter for it. A launch captured into a graph gets a counter that is never
reused, because the graph may later run beside any other work. A graph must not run beside a clone or a second instance
of itself: both write the same out.

The counters of a destroyed stream are not reused, as its work may still run. Only an event after each launch would show
when that work ends, and every call would pay for it. Waiting for the whole GPU would end the captures of all threads.
So GPU memory grows with the streams that a process creates and with the launches that it captures. A launch that shares
out tiles takes 4 bytes. Decoding takes 4 bytes for each block of query rows, rounded up to a power of two. A decode
step has one block a sequence and kv head: 4 KB for 128 sequences of 8 heads. Host memory does not grow, as CUDA reuses
handles. PyTorch and XLA keep the streams that they create.

Launches on the default stream run in order, so each may take the workspace of the one before. Finding it takes no time,
while a new array takes each framework 1 to 3 µs, a tenth of the host time of a call.

All addresses belong to the GPU's primary context. After `cudaDeviceReset` the process must be restarted: loaded kernels
and the memory pools of CuPy and PyTorch do not survive that context either.
"""

from __future__ import annotations

import ctypes
from functools import cache
from threading import get_ident
from typing import Any

from ..locks import Lock
from .driver import failure, function, on_device, relaxed_capture, zeroed

DEFAULT_STREAM = 0  # its handle. The driver is not called for it: it is never captured, and each GPU has one
PER_THREAD_STREAM = 2  # CU_STREAM_PER_THREAD, the handle of a default stream of each thread
PAGE = 4096  # counters of 4 bytes, allocated together
SCRATCH_BYTES = 4 * 2**20  # more than decoding needs for 132 SMs at head dim 256

_lock = Lock(reentrant=True)
_free_counters: dict[tuple[int, int], list[int]] = {}  # by GPU and number of words
# (unique number of the stream, counter) by GPU, number of words, use, handle and, for the per-thread stream, thread.
# The number is compared, as CUDA reuses handles and the system numbers of threads while work of the old stream runs.
_stream_counters: dict[tuple[int, int, int, int, int], tuple[int, int]] = {}
_scratch: dict[int, int] = {}  # address by number of the GPU, 0 where there was no memory


def counter(ordinal: int, stream: int, words: int = 1, use: int = 0) -> int:
    """Returns the address of `words` counters for a launch on this stream of the current GPU `ordinal`.

    use: distinguishes counters that one launch uses at the same time.
    """
    words, number, thread = _rounded(words), 0, 0
    if stream != DEFAULT_STREAM:
        if _query("cuStreamIsCapturing", stream, ctypes.c_int()):
            return _new_counter(ordinal, words)
        number = _query("cuStreamGetId", stream, ctypes.c_ulonglong())
        # With one entry for all, threads would overwrite it in turn and take a new counter in each call.
        thread = get_ident() if stream == PER_THREAD_STREAM else 0
    key = ordinal, words, use, stream, thread
    entry = _stream_counters.get(key)
    if entry is None or entry[0] != number:
        with _lock:
            entry = _stream_counters.get(key)
            if entry is None or entry[0] != number:
                entry = _stream_counters[key] = number, _new_counter(ordinal, words)
    return entry[1]


def _query(name: str, stream: int, answer: Any) -> int:
    result = function(name, ctypes.c_void_p, ctypes.c_void_p)(stream, ctypes.addressof(answer))
    if result:
        raise failure(result, f"{name} failed for the stream {stream:#x}")
    return int(answer.value)


def reserve_counter(ordinal: int, words: int = 1) -> None:
    """Allocates counters, if needed, so that the next one needs no allocation. The GPU must be the current device."""
    words = _rounded(words)
    with _lock:
        free = _free_counters.setdefault((ordinal, words), [])
        if not free:
            free += _page(words)


def _rounded(words: int) -> int:
    """Rounds up to a power of two, so that calls of nearly the same size share counters."""
    return 1 << (words - 1).bit_length()


def _new_counter(ordinal: int, words: int) -> int:
    with _lock:
        reserve_counter(ordinal, words)
        return _free_counters[ordinal, words].pop()


def _page(words: int) -> list[int]:
    """Allocates counters of so many words, all zero; returns their addresses."""
    size = 4 * max(PAGE, words)
    page = zeroed(size)
    return list(range(page, page + size, 4 * words))


def scratch(ordinal: int) -> int:
    """Returns the address of `SCRATCH_BYTES` bytes on the GPU `ordinal`, or 0 if there is no memory for them."""
    address = _scratch.get(ordinal)
    if address is None:
        with _lock:
            address = _scratch.get(ordinal)
            if address is None:
                address = _scratch[ordinal] = _new_scratch(ordinal)
    return address


def _new_scratch(ordinal: int) -> int:
    from cupy.cuda import runtime

    try:
        with on_device(ordinal), relaxed_capture():
            return int(runtime.malloc(SCRATCH_BYTES))
    except runtime.CUDARuntimeError:
        return 0


@cache
def zero(ordinal: int) -> int:
    """Returns the address of 16 zero bytes on the GPU, for an array without elements."""
    with on_device(ordinal):
        return zeroed(16)
