"""Arrays of every library in tests: creation, conversion to NumPy, and comparison bit by bit."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import plans
import pytest

from cuflash.arrays.library import GpuLibrary, numpy_dtype
from cuflash.problem.array_spec import ArraySpec
from cuflash.problem.problem import Problem
from cuflash.runtime import device_memory
from cuflash.runtime.call import CALL_CACHE
from cuflash.testing.oracle import Array


def bits(array: Any) -> Any:
    """Returns the bytes of a CuPy array, for comparisons in which NaN equals itself."""
    return array.ravel().view("uint8")


def poisoned(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns a CuPy array of NaN, in which unwritten elements show."""
    import cupy

    return cupy.full(shape, cupy.nan, dtype)


def recorded(stream: Any, call: Callable[[], Any]) -> tuple[Any, Any]:
    """Returns a CUDA graph of a call, and the results of the captured call, its third on this stream."""
    for _ in range(2):
        call()
    stream.begin_capture()
    results = call()
    return stream.end_capture(), results


@contextlib.contextmanager
def memory_of_nan(*libraries: type[GpuLibrary]) -> Iterator[None]:
    """Fills memory that calls of these libraries allocate inside with NaN: outputs and workspaces, also shared ones."""

    def fill(address: int, size: int, stream: int) -> None:
        from cupy.cuda import runtime

        if size:
            runtime.memsetAsync(address, 0xFF, size, stream)  # in every dtype of floats, that is NaN

    def filling(allocator: Callable[..., Callable[[], Any]]) -> Callable[..., Callable[[], Any]]:
        def of_nan(self: GpuLibrary, shape: tuple[int, ...], dtype: str, ordinal: int) -> Callable[[], Any]:
            make, size = allocator(self, shape, dtype, ordinal), math.prod(shape) * numpy_dtype(dtype).itemsize

            def allocate() -> Any:
                array = make()
                fill(*self.pointers([array]), size, self.stream(ordinal))
                return array

            return allocate

        return of_nan

    find_shared = device_memory.scratch

    def shared(ordinal: int) -> int:
        if address := find_shared(ordinal):
            fill(address, device_memory.SCRATCH_BYTES, device_memory.DEFAULT_STREAM)
        return address

    with pytest.MonkeyPatch.context() as patch:
        for library in libraries:
            patch.setattr(library, "allocator", filling(library.allocator))
        patch.setattr(device_memory, "scratch", shared)
        try:
            CALL_CACHE.clear()  # cached calls hold their allocators
            yield
        finally:
            CALL_CACHE.clear()


class Producer:
    """A DLPack producer of an unknown framework, which may report a wrong device.

    device: the result of `__dlpack_device__`, or the error that it raises.
    """

    def __init__(self, array: Any, *device: Any) -> None:
        self.array, (self.device,) = array, device or (tuple(array.__dlpack_device__()),)

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self) -> Any:
        if isinstance(self.device, Exception):
            raise self.device
        return self.device


def torch_of(array: np.ndarray[Any, Any], device: str) -> Any:
    torch = pytest.importorskip("torch")
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.astype("f4")).to(device, torch.bfloat16)
    return torch.from_numpy(array).to(device)


def jax_of(array: np.ndarray[Any, Any], platform: str) -> Any:
    jax = pytest.importorskip("jax")
    try:
        return jax.device_put(array, jax.devices(platform)[0])
    except RuntimeError:
        pytest.skip(f"JAX has no {platform} here")


def cupy_of(array: np.ndarray[Any, Any]) -> Any:
    import cupy

    return cupy.asarray(array)


MAKERS = {"numpy": lambda x: x, "torch": lambda x: torch_of(x, "cpu"), "jax": lambda x: jax_of(x, "cpu")}
GPU_MAKERS = {"cupy": cupy_of, "torch": lambda x: torch_of(x, "cuda"), "jax": lambda x: jax_of(x, "gpu")}


def as_numpy(array: Any) -> np.ndarray[Any, Any]:
    if hasattr(array, "detach"):
        return array.detach().cpu().float().numpy()
    return np.asarray(array.get() if hasattr(array, "get") else array).astype("f4")


def problem_of(*arrays: Array, **options: Any) -> Problem:
    """Returns the problem of q, k and v in NumPy, as if contiguous."""
    return plans.problem_of(*(ArraySpec.contiguous(x.shape, x.dtype.name) for x in arrays), **options)


def same(got: tuple[Array, ...], expected: tuple[Array, ...]) -> None:
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a.astype(np.float64), b.astype(np.float64))
