"""Input arrays of the benchmark in the installed library, timing on its GPU, and copies back to the host."""

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
TENSOR_FLOPS = {(8, 0): 2048, (9, 0): 4096}  # 16-bit FLOP for each clock and SM: NVIDIA's papers on A100 and H100
OTHERS_BYTES = 2**28  # five times the L2 of an H100; triton's do_bench writes as much


class NumpyArrays:
    """Arrays in host memory; GPU libraries below override how arrays are created and read."""

    name = "numpy"
    on_gpu = False
    xp: Any = np  # library of `wide` arrays

    def normal(self, shape: tuple[int, ...], dtype: str, seed: int) -> Any:
        """Returns an array drawn from the standard normal distribution."""
        return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32).astype(numpy_dtype(dtype))

    def inputs(self, op: str, case: Case, seed: int = 0) -> Inputs:
        """Returns the inputs of an op for a case."""
        shapes = case.shapes() if op == "forward" else (*case.shapes(), case.out_shape())
        return tuple(self.normal(shape, case.dtype, len(shapes) * seed + n) for n, shape in enumerate(shapes))

    def put(self, array: NDArray[Any]) -> Any:
        """Returns the array in this library."""
        return array

    def head(self, array: Any, batch: int, head: int) -> Any:
        """Returns one head of a (batch, seqlen, heads, head_dim) array as (seqlen, head_dim), wide as in `wide`."""
        return np.asarray(self._host(array)[batch, :, head], np.float64)

    def constant(self, array: NDArray[Any]) -> Any:
        """Returns the array in the library and memory of `wide` arrays."""
        return array

    def host(self, array: Any) -> NDArray[np.float64]:
        """Returns a `wide` array on the host."""
        return np.asarray(array)

    def distance(self, array: Any, reference: Any) -> float:
        """Returns |array - reference| / |reference| in the Euclidean norm."""
        expected = np.asarray(self._host(reference), np.float32)
        difference = np.asarray(self._host(array), np.float32) - expected
        return float(np.linalg.norm(difference) / np.linalg.norm(expected))

    def wide(self, array: Any) -> Any:
        """Returns the array in float64, in memory with fast float64 products."""
        return np.asarray(self._host(array), np.float64)

    def synchronize(self) -> None:
        """Waits until the GPU has finished all work."""

    def release(self) -> None:
        """Frees GPU memory that the library caches."""

    def overwrite_l2(self) -> None:
        """Enqueues writes that evict all arrays from the GPU's L2 cache."""

    def bandwidth(self) -> float | None:
        """Returns the peak bytes a second of the GPU's memory; None if unknown."""
        return None

    def tensor_flops(self) -> float | None:
        """Returns the peak FLOP a second of 16-bit products, at the GPU's highest clock; None if unknown."""
        return None

    def peak(self, call: Callable[[], Any]) -> tuple[Any, int]:
        """Returns the result of a call, and the peak number of bytes that it allocated."""
        tracemalloc.start()
        try:
            result = call()
            return result, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    def span(self, enqueue: Callable[[], Any]) -> Callable[[], float]:
        """Enqueues work; the returned function waits for its end and returns its time in seconds."""
        started = time.perf_counter()
        enqueue()
        elapsed = time.perf_counter() - started
        return lambda: elapsed

    def _host(self, array: Any) -> NDArray[Any]:
        return np.asarray(array)


class CupyArrays(NumpyArrays):
    # Random numbers, sums and casts use NumPy, because CuPy's need CUDA headers and libraries that cuflash does not.
    name = "cupy"
    on_gpu = True

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy
        self._others: Any = None  # memory that `overwrite_l2` writes

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
        """Returns the current SM clock in MHz and power in W, if nvidia-smi reports them."""
        names = "clocks.sm", "power.draw"
        number = self.cupy.cuda.Device().pci_bus_id
        command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits", "-i", number]
        try:
            output = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
            return dict(zip(("sm_clock_mhz", "power_w"), map(float, output.split(",")), strict=True))
        except (OSError, ValueError, subprocess.SubprocessError):
            return {}

    def span(self, enqueue: Callable[[], Any]) -> Callable[[], float]:
        # CuPy's events serve PyTorch, too: the default streams of both are the driver's legacy stream.
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
        """Returns a function that launches a CUDA graph of the call that `prepare` returns.

        The call runs twice: once to warm up, once for the capture. The graph has a separate memory pool. It runs on the
        stream that is current at its launch; graphs on separate streams would run concurrently.
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

        launch.buffers = work, pool  # type: ignore[attr-defined] # keeps the graph's memory alive
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
        result, most = super().peak(call)  # allocations through CuPy are in CuPy's pool
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
        with suppress(RuntimeError):  # after a failed capture PyTorch frees nothing
            self.torch.cuda.empty_cache()


def why_no_gpu() -> str:
    """Returns the reason why calls cannot run on a GPU here; "" if they can."""
    try:
        compiler.nvrtc_version()
        if not device.count():
            return "no NVIDIA GPU or driver was found"
        device.query(0)
    except UnsupportedError as error:
        return str(error)
    return ""


def find() -> tuple[NumpyArrays, str]:
    """Returns the arrays to measure with, and the reason why they are not on a GPU ("" if they are)."""
    if reason := why_no_gpu():
        return NumpyArrays(), reason
    try:
        import torch

        if torch.cuda.is_available():
            return TorchArrays(), ""
    except ImportError:
        pass
    return CupyArrays(), ""
