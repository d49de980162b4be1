"""Memory of each GPU that outlives calls: counters of launches, a workspace that launches share, and zeros.

A launch counts the tiles that its blocks have taken, and which block came last. It leaves its counter at zero, so
launches that follow one another share one: each stream has a counter. CUDA's per-thread default stream is a stream of
each thread, all with one handle, so that each thread has a counter for it. A launch that is captured into a graph gets
a counter that is never given out again, because the graph may later run beside any other work. (It must not run beside
a clone or a second instance of it: both write the same out.)

A stream that was destroyed leaves its counters behind, which serve no other: its work may still go on. Only an event
after each launch would show when that ends, which would cost every call, and to wait for the whole GPU would end all
captures, those of other threads, too. So GPU memory grows with the streams that a process makes, and with the launches
that it captures: by 4 bytes for a launch that shares out tiles, and by 4 for each block of query rows of decoding (one
a sequence and kv head in a decode step, all rounded up to a power of two: 4 KB for 128 sequences of 8 heads). Host
memory does not, as CUDA gives out handles again. PyTorch and XLA keep the streams that they make.

Launches on the default stream follow one another, too, so one may take the workspace that another has done with. To
find it takes no time, while each framework needs 1 to 3 µs for a new array, a tenth of the host time of a call.

All addresses are of the GPU's primary context. cuflash does not survive that context, as neither do the kernels that it
has loaded nor the memory pools of CuPy and PyTorch: after `cudaDeviceReset` the process must be started anew.
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
PAGE = 4096  # counters of 4 bytes that are allocated together
SCRATCH_BYTES = 4 * 2**20  # as much as decoding needs for 132 SMs at head dim 256, and more

_lock = Lock(reentrant=True)
_free_counters: dict[tuple[int, int], list[int]] = {}  # by GPU and number of words
# The stream's unique number and its counter, by GPU, number of words, use, the stream's handle, and the thread where
# each has a stream of that handle. why the number, too: CUDA gives a handle to a new stream, and the system the number
# of a thread to a new thread, while work of the old stream still runs.
_stream_counters: dict[tuple[int, int, int, int, int], tuple[int, int]] = {}
_scratch: dict[int, int] = {}  # address by number of the GPU, 0 where there was no memory


def counter(ordinal: int, stream: int, words: int = 1, use: int = 0) -> int:
    """Returns the address of the counters, `words` of them, for a launch on this stream of the current GPU `ordinal`.

    use: distinguishes the counters of one launch, which count at the same time.
    """
    words, number, thread = _rounded(words), 0, 0
    if stream != DEFAULT_STREAM:
        if _query("cuStreamIsCapturing", stream, ctypes.c_int()):
            return _new_counter(ordinal, words)
        number = _query("cuStreamGetId", stream, ctypes.c_ulonglong())
        # why: the threads would take the entry from one another, and get a new counter in each call.
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
    """Makes sure that the next counter needs no allocation. The GPU must be the current device."""
    words = _rounded(words)
    with _lock:
        free = _free_counters.setdefault((ordinal, words), [])
        if not free:
            free += _page(words)


def _rounded(words: int) -> int:
    """Returns the power of two that is not below: calls of nearly the same size then share counters."""
    return 1 << (words - 1).bit_length()


def _new_counter(ordinal: int, words: int) -> int:
    with _lock:
        reserve_counter(ordinal, words)
        return _free_counters[ordinal, words].pop()


def _page(words: int) -> list[int]:
    """Returns addresses of new counters of so many words, all zero."""
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
    """Returns the address of 16 bytes on the GPU that are zero, in place of an array that has no element."""
    with on_device(ordinal):
        return zeroed(16)
