"""Repeats every kernel under contention and compares the results bit for bit: `repeats.py REPEATS [NUMBER/PARTS]`.

Calls of sanitize.py that launch all kernels are captured into two graphs each, which run concurrently on two streams.
Meanwhile a third stream copies memory, and a fourth one repeatedly occupies half of the SMs. Results are filled with
NaN before each repeat. Gradients that are summed in any order are compared with a tolerance.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

import cupy
import sanitize

from cuflash.planning import device

IN_A_GRAPH = 8  # repeats
KINDS = {"float32": 0, "bfloat16": 1, "float16": 2}
TOLERANCE = 0.02  # relative to the largest element, for sums in any order
HELD = 200 * 1024  # bytes of shared memory, so that a block occupies an SM alone
SOURCE = """
__device__ unsigned bits(const void* numbers, long long i, int kind) {
  return kind == 0 ? static_cast<const unsigned*>(numbers)[i] : static_cast<const unsigned short*>(numbers)[i];
}
__device__ float number(unsigned bits, int kind) {
  if (kind == 0) return __uint_as_float(bits);
  if (kind == 1) return __uint_as_float(bits << 16);
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((unsigned short)bits));
  return x;
}

// Counts what differs by more than the tolerance, and leaves NaN.
extern "C" __global__ void compare(void* result, const void* expected, long long size, int kind, float tolerance,
                                   int* wrong) {
  for (long long i = blockIdx.x * 256LL + threadIdx.x; i < size; i += gridDim.x * 256LL) {
    unsigned x = bits(result, i, kind), y = bits(expected, i, kind);
    // NaN is beyond every tolerance
    bool close = tolerance > 0 && fabsf(number(x, kind) - number(y, kind)) <= tolerance;
    if (x != y && !close) atomicAdd(wrong, 1);
    if (kind == 0) static_cast<unsigned*>(result)[i] = -1;
    else static_cast<unsigned short*>(result)[i] = -1;
  }
}
extern "C" __global__ void hold(long long cycles) {
  long long begin = clock64();
  while (clock64() - begin < cycles) __nanosleep(500);
}
"""
Compare = Callable[[Any, Any, float], None]


class Traffic:
    """Work of other streams: copies of memory, and thread blocks that occupy half of the SMs."""

    def __init__(self, module: Any) -> None:
        self._streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
        self._memory = cupy.zeros((2, 32 << 20), "float32")
        self._hold = module.get_function("hold")
        self._hold.max_dynamic_shared_size_bytes = HELD
        self._half = device.query(0).num_sms // 2
        self._times = itertools.cycle((20_000, 150_000, 60_000, 5_000))  # cycles, 3 to 80 µs

    def go_on(self) -> None:
        """Enqueues more work on each stream that has finished."""
        copies, holds = self._streams
        if copies.done:
            with copies:
                self._memory[1] = self._memory[0]
        if holds.done:
            with holds:
                for _ in range(8):
                    self._hold((self._half,), (32,), (next(self._times),), shared_mem=HELD)


def repeat(prepared: sanitize.Prepared, times: int, compare: Compare, traffic: Traffic) -> None:
    """Repeats a call in graphs, and compares the results with the results of a call alone."""
    alone, again = prepared.call(), prepared.call()
    expected = [x.copy() for x in alone]
    # One graph if the call writes in place, as two would write at once.
    count = 1 if any(x.data.ptr == y.data.ptr for x, y in zip(alone, again, strict=True)) else 2
    largest = [0.0 if prepared.repeats or not x.size else float(cupy.abs(x.astype("float32")).max()) for x in expected]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(count)]
    graphs, results = [], []
    cupy.cuda.Device().synchronize()
    for stream in streams:
        with stream:
            stream.begin_capture()
            for _ in range(IN_A_GRAPH):
                results.append(prepared.call())
                for x, like, unit in zip(results[-1], expected, largest, strict=True):
                    compare(x, like, TOLERANCE * unit)
            graphs.append(stream.end_capture())
    for _ in range(-(-times // (count * IN_A_GRAPH))):
        for stream, graph in zip(streams, graphs, strict=True):
            graph.launch(stream)
        traffic.go_on()
    for stream in streams:
        stream.synchronize()


def main() -> None:
    if not sys.argv[1:] or not sys.argv[1].isdecimal():
        sys.exit("usage: repeats.py REPEATS [NUMBER/PARTS]")
    times, (part, parts) = int(sys.argv[1]), sanitize.part_of(sys.argv[2:])
    module, wrong, failed, started = cupy.RawModule(code=SOURCE), cupy.zeros(1, "int32"), 0, time.perf_counter()
    traffic = Traffic(module)

    def compare(result: Any, expected: Any, tolerance: float) -> None:
        assert result.flags.c_contiguous
        arguments = result, expected, result.size, KINDS[str(result.dtype)], cupy.float32(tolerance), wrong
        module.get_function("compare")((min(264, 1 + result.size // 2048),), (256,), arguments)

    for count, prepared in enumerate(sanitize.calls(part, parts, once=True)):
        # Printed before the call, so that the last line names a kernel that waits for ever.
        print(f"{part}/{parts} {count} ({time.perf_counter() - started:.0f} s): {prepared.name}", flush=True)
        repeat(prepared, times, compare, traffic)
        if differing := int(wrong[0]):
            failed += 1
            print(f"{prepared.name}: {differing} elements differ", flush=True)
            wrong[...] = 0
    sys.exit(f"{failed} calls differ" if failed else 0)


if __name__ == "__main__":
    main()
