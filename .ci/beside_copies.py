"""Calls beside a kernel of 16 thread blocks that copies memory, as NCCL's do: `beside_copies.py [--cpu]`.

It runs on a stream of high priority for as long as the call alone takes. It is launched just before the call, or when
the call has begun. Prints what the call loses over its fair share, the time held times 16 of all SMs, and how late the
copies begin. Copies are enqueued behind a flag that the host writes, so that their wait holds no time of the host.
--cpu tries the script out, without copies.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import cuflash
from cuflash.planning import device
from cuflash.testing.arrays import NumpyArrays, TorchArrays

BLOCKS, THREADS = 16, 640
HELD = 200 * 1024  # bytes of shared memory, so that a block of copies shares its SM with no other kernel
ELEMENTS = 1 << 23  # of 16 bytes, so that copies miss L2
HIGH_PRIORITY = -5
MOST_LOST, MOST_LATE = 1.3, 50e-6  # bars: times the fair share; seconds
SOURCE = """
__device__ unsigned long long now() {
  unsigned long long time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}
// Copies for so many nanoseconds. Each block writes when it begins and ends, and its rounds.
extern "C" __global__ void __launch_bounds__(640) copy_for(uint4* to, const uint4* from, unsigned elements,
                                                           unsigned long long duration, unsigned long long* times) {
  unsigned long long begin = now(), end = begin, rounds = 0;
  unsigned i = blockIdx.x * 640 + threadIdx.x, step = gridDim.x * 640;
  do {
#pragma unroll
    for (int part = 0; part < 8; ++part) {
      unsigned place = (i + part * step) % elements;
      to[place] = from[place];
    }
    i = (i + 8 * step) % elements;
    ++rounds;
    end = now();
  } while (end - begin < duration);
  __syncthreads();
  if (threadIdx.x == 0) {
    times[3 * blockIdx.x] = begin;
    times[3 * blockIdx.x + 1] = now();
    times[3 * blockIdx.x + 2] = rounds;
  }
}
"""
Run = Callable[[int], Any]


class Case(NamedTuple):
    """A call with 16 heads and head dim 128; late: seconds after its begin when copies are launched."""

    name: str
    op: str
    seqlen_q: int
    seqlen_k: int
    causal: bool
    late: float = 100e-6

    def prepared(self, arrays: Any, heads: int, dim: int) -> Run:
        """Returns the call, by its sm_margin. The late launch falls into backward's largest kernel."""
        rows = self.seqlen_q, self.seqlen_k, self.seqlen_k, self.seqlen_q
        q, k, v, dout = (arrays.normal((1, each, heads, dim), "bfloat16", seed) for seed, each in enumerate(rows))

        def keywords(margin: int) -> Any:
            return {"causal": self.causal} | ({"sm_margin": margin} if margin else {})

        if self.op == "forward":
            return lambda margin: cuflash.forward(q, k, v, **keywords(margin))
        out, lse = cuflash.forward(q, k, v, causal=self.causal, return_lse=True)
        return lambda margin: cuflash.backward(dout, q, k, v, out, lse, **keywords(margin))


CASES = (
    Case("forward, full, 8k x 16k", "forward", 8192, 16384, False),
    Case("forward, causal, 16k", "forward", 16384, 16384, True),
    Case("forward, full, 16k x 32k", "forward", 16384, 32768, False),
    Case("forward, causal, 32k", "forward", 32768, 32768, True),
    Case("backward, full, 8k x 16k", "backward", 8192, 16384, False, 400e-6),
    Case("backward, full, 16k", "backward", 16384, 16384, False, 400e-6),
    Case("backward, causal, 16k", "backward", 16384, 16384, True, 400e-6),
)


class Measured(NamedTuple):
    """Seconds of the call, that copies held their SMs, and that they waited; and bytes that they copied a second."""

    call: float
    held: float
    waited: float
    rate: float


class OnGpu:
    """Runs calls and copies on two streams."""

    def __init__(self) -> None:
        import cupy
        import torch

        self.torch, self.arrays = torch, TorchArrays()
        self.num_sms, self.repeats = device.query(0).num_sms, 10
        self.copy = cupy.RawModule(code=SOURCE).get_function("copy_for")
        self.copy.max_dynamic_shared_size_bytes = HELD
        self.memory, self.times = cupy.zeros((2, ELEMENTS, 4), "uint32"), cupy.zeros((BLOCKS, 3), "uint64")
        self.main, self.beside = torch.cuda.Stream(), torch.cuda.Stream(priority=HIGH_PRIORITY)
        self.launch_stream = cupy.cuda.ExternalStream(self.beside.cuda_stream)
        self.wait_value = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
        self.flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def alone(self, run: Run, margin: int) -> float:
        """Returns the seconds of a call alone."""
        self.torch.cuda.synchronize()
        return self._seconds(self._call(run, margin))

    def together(self, run: Run | None, margin: int, seconds: float, late: float | None) -> Measured:
        """Measures a call, and copies that last so long. late: None to launch them first. run: None for no call."""
        self.torch.cuda.synchronize()
        events = self._copy(seconds)
        if late is None:
            self.flag += 1
        call = None if run is None else self._call(run, margin)
        if late is not None:
            begin = time.perf_counter()
            while time.perf_counter() - begin < late:
                pass
            self.flag += 1
        self.torch.cuda.synchronize()
        begins, ends, rounds = self.times.get().astype("int64").T
        held = float(ends.max() - begins.min()) * 1e-9
        # The first event passes when the host writes the flag.
        waited = self._seconds(events) - held
        return Measured(
            0.0 if call is None else self._seconds(call), held, waited, 16 * 8 * THREADS * float(rounds.sum()) / held
        )

    def _events(self) -> tuple[Any, Any]:
        return self.torch.cuda.Event(enable_timing=True), self.torch.cuda.Event(enable_timing=True)

    def _seconds(self, events: tuple[Any, Any]) -> float:
        events[1].synchronize()
        return float(events[0].elapsed_time(events[1])) * 1e-3

    def _call(self, run: Run, margin: int) -> tuple[Any, Any]:
        begin, end = self._events()
        with self.torch.cuda.stream(self.main):
            begin.record()
            run(margin)
            end.record()
        return begin, end

    def _copy(self, seconds: float) -> tuple[Any, Any]:
        """Enqueues copies that begin when the flag is raised by one."""
        begin, end = self._events()
        stream, flag = ctypes.c_void_p(self.beside.cuda_stream), ctypes.c_uint64(self.flag.data_ptr())
        error = self.wait_value(stream, flag, ctypes.c_uint32(int(self.flag) + 1), ctypes.c_uint32(0))  # until >=
        if error:
            raise RuntimeError(f"cuStreamWaitValue32 returned error {error}")
        begin.record(self.beside)
        with self.launch_stream:
            to, origin = self.memory
            arguments = to, origin, np.uint32(ELEMENTS), np.uint64(seconds * 1e9), self.times
            self.copy((BLOCKS,), (THREADS,), arguments, shared_mem=HELD)
        end.record(self.beside)
        return begin, end


class OnCpu:
    """Calls without copies, to try the script out."""

    arrays, num_sms, repeats = NumpyArrays(), 132, 2

    def alone(self, run: Run, margin: int) -> float:
        begin = time.perf_counter()
        run(margin)
        return time.perf_counter() - begin

    def together(self, run: Run | None, margin: int, seconds: float, late: float | None) -> Measured:
        return Measured(0.0 if run is None else self.alone(run, margin), seconds, late or 0.0, 0.0)


def measured(runner: Any, case: Case, run: Run, margin: int, late: float | None, seconds: float) -> str:
    """Returns a row of the table. Calls alone alternate with the others, as clocks change."""
    rounds = [(runner.alone(run, 0), runner.together(run, margin, seconds, late)) for _ in range(runner.repeats)]
    alone = median(each for each, _ in rounds)
    call, held, waited, rate = (median(column) for column in zip(*(each for _, each in rounds), strict=True))
    fair = min(held, call - (late or 0.0)) * BLOCKS / runner.num_sms  # SMs are held while the call runs, not later
    lost = call - alone
    marks = ("  OVER" if lost > MOST_LOST * fair else "") + ("  LATE" if waited > MOST_LATE else "")
    launched = "before" if late is None else "late"
    return (
        f"{case.name:26}{margin:9}  {launched:8}{alone * 1e3:9.3f}{call * 1e3:11.3f}{lost * 1e3:9.3f}{fair * 1e3:9.3f}"
        f"{lost / fair:11.2f}{waited * 1e6:11.1f}{rate * 1e-9:7.0f}{marks}"
    )


def main() -> None:
    on_cpu = "--cpu" in sys.argv
    runner: Any = OnCpu() if on_cpu else OnGpu()
    alone = [runner.together(None, 0, 1e-3, None) for _ in range(12)][2:]  # the first ones compile
    waited, rate = (median(getattr(each, name) for each in alone) for name in ("waited", "rate"))
    print(f"copies alone: they begin {waited * 1e6:.1f} us after their launch, {rate * 1e-9:.0f} GB/s")
    print(f"bars: lost at most {MOST_LOST} times the fair share, copies wait at most {MOST_LATE * 1e6:.0f} us\n")
    print(f"{'call':26}sm_margin  copies    alone ms  beside ms  lost ms  fair ms  lost/fair  waited us   GB/s")
    for case in CASES:
        case = case._replace(seqlen_q=64, seqlen_k=128) if on_cpu else case
        run = case.prepared(runner.arrays, *((2, 16) if on_cpu else (16, 128)))
        has_margin = "sm_margin" in inspect.signature(getattr(cuflash, case.op)).parameters
        margins = (0, BLOCKS) if has_margin else (0,)
        times_alone = {}
        for margin in margins:
            times = [runner.alone(run, margin) for _ in range(runner.repeats + 2)]
            times_alone[margin] = median(times[2:])  # the first ones compile
        for margin in margins:
            for late in (None, case.late):
                print(measured(runner, case, run, margin, late, times_alone[0]), flush=True)
        note = f"{times_alone[BLOCKS] * 1e3:.3f} ms alone" if has_margin else "it takes none"
        print(f"{case.name:26} with sm_margin={BLOCKS}: {note}", flush=True)


if __name__ == "__main__":
    main()
