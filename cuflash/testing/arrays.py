"""The benchmark's input arrays in whichever library is installed, and how their values get back to the host."""

from __future__ import annotations

import subprocess
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UnsupportedError
from ..planning import device
from ..runtime import compiler
from .cases import Case, numpy_dtype

Inputs = tuple[Any, ...]  # q, k, v, and for backward dout
TENSOR_FLOPS = {(8, 0): 2048, (9, 0): 4096}  # of 16 bits, a clock and SM: NVIDIA's papers on A100 and H100
OTHERS_BYTES = 2**28  # five times what the L2 of an H100 holds, as triton's do_bench writes


class NumpyArrays:
    """Arrays in host memory; the GPU libraries below differ in how they make and read theirs."""

    name = "numpy"
    on_gpu = False
    xp: Any = np  # the library that `wide` arrays are of

    def normal(self, shape: tuple[int, ...], dtype: str, seed: int) -> Any:
        """An array drawn from the standard normal distribution."""
        return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32).astype(numpy_dtype(dtype))

    def inputs(self, op: str, case: Case, seed: int = 0) -> Inputs:
        """The inputs of an op for a case."""
        shapes = case.shapes() if op == "forward" else (*case.shapes(), case.out_shape())
        return tuple(self.normal(shape, case.dtype, len(shapes) * seed + n) for n, shape in enumerate(shapes))

    def put(self, array: NDArray[Any]) -> Any:
        """The array in this library."""
        return array

    def head(self, array: Any, batch: int, head: int) -> Any:
        """One head of a (batch, seqlen, heads, head_dim) array, as (seqlen, head_dim), as `wide` gives it."""
        return np.asarray(self._host(array)[batch, :, head], np.float64)

    def constant(self, array: NDArray[Any]) -> Any:
        """The array where those of `wide` are."""
        return array

    def host(self, array: Any) -> NDArray[np.float64]:
        """An array that `wide` returned, on the host."""
        return np.asarray(array)

    def distance(self, array: Any, reference: Any) -> float:
        """|array - reference| / |reference| in the Euclidean norm."""
        expected = np.asarray(self._host(reference), np.float32)
        difference = np.asarray(self._host(array), np.float32) - expected
        return float(np.linalg.norm(difference) / np.linalg.norm(expected))

    def wide(self, array: Any) -> Any:
        """The array in float64, where products of float64 are fast."""
        return np.asarray(self._host(array), np.float64)

    def synchronize(self) -> None:
        """Waits until the GPU has nothing left to do."""

    def release(self) -> None:
        """Gives memory that the library keeps for later back to the GPU."""

    def overwrite_l2(self) -> None:
        """Begins to write so much that the GPU's cache then holds nothing of any array."""

    def bandwidth(self) -> float | None:
        """The most bytes a second that the GPU's memory gives; None if it is not known."""
        return None

    def tensor_flops(self) -> float | None:
        """The most FLOP a second of 16-bit products, at the GPU's highest clock; None if it is not known."""
        return None

    def peak(self, call: Callable[[], Any]) -> tuple[Any, int]:
        """Returns the result of a call, and the most bytes that were allocated at a time since its begin."""
        tracemalloc.start()
        try:
            result = call()
            return result, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    def span(self, enqueue: Callable[[], Any]) -> Callable[[], float]:
        """Begins work; the returned function waits for its end and gives its seconds."""
        started = time.perf_counter()
        enqueue()
        elapsed = time.perf_counter() - started
        return lambda: elapsed

    def _host(self, array: Any) -> NDArray[Any]:
        return np.asarray(array)


class CupyArrays(NumpyArrays):
    # why: random numbers, sums and casts are made by NumPy, because CuPy's own need CUDA headers and libraries that
    # cuflash does not need.
    name = "cupy"
    on_gpu = True

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy
        self._others: Any = None  # memory that is written to overwrite L2

    def put(self, array: NDArray[Any]) -> Any:
        return self.cupy.asarray(array)

    def normal(self, shape: tuple[int, ...], dtype: str, seed: int) -> Any:
        return self.put(super().normal(shape, dtype, seed))

    def synchronize(self) -> None:
        self.cupy.cuda.runtime.deviceSynchronize()

    def release(self) -> None:
        self.cupy.get_default_memory_pool().free_all_blocks()

    def overwrite_l2(self) -> None:
        if self._others is None:
            self._others = self.cupy.cuda.alloc(OTHERS_BYTES)
        self._others.memset_async(0, OTHERS_BYTES)

    def bandwidth(self) -> float | None:
        facts = self.cupy.cuda.Device(0).attributes
        clock, bits = facts.get("MemoryClockRate"), facts.get("GlobalMemoryBusWidth")  # kHz; two transfers a clock
        return 2e3 * clock * bits / 8 if clock and bits else None

    def tensor_flops(self) -> float | None:
        facts = self.cupy.cuda.Device(0).attributes
        each = TENSOR_FLOPS.get((facts.get("ComputeCapabilityMajor"), facts.get("ComputeCapabilityMinor")))
        clock, count = facts.get("ClockRate"), facts.get("MultiProcessorCount")  # kHz
        return 1e3 * clock * count * each if each and clock and count else None

    def peak(self, call: Callable[[], Any]) -> tuple[Any, int]:
        pool = self.cupy.get_default_memory_pool()
        before = most = pool.used_bytes()

        class Hook(self.cupy.cuda.MemoryHook):  # type: ignore[misc, name-defined]
            name = "peak"

            def malloc_postprocess(self, **facts: Any) -> None:
                nonlocal most
                most = max(most, pool.used_bytes())

        with Hook():
            result = call()
        return result, most - before

    def state(self) -> dict[str, float]:
        """The clock of the SMs in MHz and the power in W at this moment, where nvidia-smi reports them."""
        names = "clocks.sm", "power.draw"
        number = self.cupy.cuda.Device().pci_bus_id
        command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits", "-i", number]
        try:
            output = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
            return dict(zip(("sm_clock_mhz", "power_w"), map(float, output.split(",")), strict=True))
        except (OSError, ValueError, subprocess.SubprocessError):
            return {}

    def span(self, enqueue: Callable[[], Any]) -> Callable[[], float]:
        # why CuPy's events for PyTorch, too: the default streams of both are the same legacy stream of the driver.
        cuda = self.cupy.cuda
        begin, end = cuda.Event(), cuda.Event()
        begin.record()
        enqueue()
        end.record()

        def seconds() -> float:
            end.synchronize()
            return float(cuda.get_elapsed_time(begin, end)) * 1e-3

        return seconds

    def captured(self, prepare: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        """A CUDA graph of what `prepare` makes, called twice: to be ready for it, and for the graph.

        The result launches it, on the stream that is current then: on streams of their own, graphs would run beside
        each other. Memory is its own.
        """
        cuda, pool = self.cupy.cuda, self.cupy.cuda.MemoryPool()
        stream = cuda.Stream(non_blocking=True)
        with cuda.using_allocator(pool.malloc), stream:
            work = prepare()
            work()
            stream.synchronize()
            stream.begin_capture()
            try:
                work()
            finally:
                graph = stream.end_capture()

        def launch() -> None:
            graph.launch(cuda.get_current_stream())

        launch.buffers = work, pool  # type: ignore[attr-defined] # why: the graph reads and writes their memory
        return launch

    def _host(self, array: Any) -> NDArray[Any]:
        host: NDArray[Any] = self.cupy.asnumpy(array)
        return host


class TorchArrays(CupyArrays):
    name = "torch"

    def __init__(self) -> None:
        super().__init__()
        import torch

        self.torch = self.xp = torch

    def put(self, array: NDArray[Any]) -> Any:
        return self.torch.from_numpy(array).cuda()

    def constant(self, array: NDArray[Any]) -> Any:
        return self.put(array)

    def wide(self, array: Any) -> Any:
        return array.double()

    def normal(self, shape: tuple[int, ...], dtype: str, seed: int) -> Any:
        generator = self.torch.Generator(device="cuda").manual_seed(seed)
        values = self.torch.randn(shape, generator=generator, device="cuda", dtype=self.torch.float32)
        return values.to(getattr(self.torch, dtype))

    def peak(self, call: Callable[[], Any]) -> tuple[Any, int]:
        cuda = self.torch.cuda
        before = cuda.memory_allocated()
        cuda.reset_peak_memory_stats()
        result, most = super().peak(call)  # why both: what is made through CuPy lies in its pool
        return result, most + cuda.max_memory_allocated() - before

    def captured(self, prepare: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        cuda = self.torch.cuda
        stream, graph = cuda.Stream(), cuda.CUDAGraph()
        with cuda.stream(stream):
            work = prepare()
            work()
        stream.synchronize()
        with cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            work()

        def launch() -> None:
            graph.replay()

        launch.buffers = work  # type: ignore[attr-defined]
        return launch

    def head(self, array: Any, batch: int, head: int) -> Any:
        return self.wide(array[batch, :, head])

    def host(self, array: Any) -> NDArray[np.float64]:
        values: NDArray[np.float64] = array.cpu().numpy()
        return values

    def distance(self, array: Any, reference: Any) -> float:
        expected = reference.float()
        return float((array.float() - expected).norm() / expected.norm())

    def release(self) -> None:
        super().release()
        with suppress(RuntimeError):  # why: after a capture that failed PyTorch gives nothing back
            self.torch.cuda.empty_cache()


def why_no_gpu() -> str:
    """The reason why nothing can run on a GPU here; "" if it can."""
    try:
        compiler.nvrtc_version()
        if not device.count():
            return "no NVIDIA GPU or driver was found"
        device.query(0)
    except UnsupportedError as error:
        return str(error)
    return ""


def find() -> tuple[NumpyArrays, str]:
    """The arrays to measure on, and why they are not on a GPU ("" if they are)."""
    if reason := why_no_gpu():
        return NumpyArrays(), reason
    try:
        import torch

        if torch.cuda.is_available():
            return TorchArrays(), ""
    except ImportError:
        pass
    return CupyArrays(), ""
