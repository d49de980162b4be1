"""Arrays of every library in tests: how they are made, how they come back to NumPy, and when two are the same bits."""

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
    """The bytes of a CuPy array, for comparisons in which NaN equals itself."""
    return array.ravel().view("uint8")


def poisoned(shape: tuple[int, ...], dtype: Any) -> Any:
    """A CuPy array of NaN: what is not written shows."""
    import cupy

    return cupy.full(shape, cupy.nan, dtype)


def recorded(stream: Any, call: Callable[[], Any]) -> tuple[Any, Any]:
    """A CUDA graph of a call, and what the call returned when it was recorded: its third time on this stream."""
    for _ in range(2):
        call()
    stream.begin_capture()
    results = call()
    return stream.end_capture(), results


@contextlib.contextmanager
def memory_of_nan(*libraries: type[GpuLibrary]) -> Iterator[None]:
    """Inside, what calls allocate for arrays of these libraries holds NaN: outputs, workspaces and the shared one."""

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
            CALL_CACHE.clear()  # why: calls that were made before keep what allocates for them
            yield
        finally:
            CALL_CACHE.clear()


class Producer:
    """A DLPack producer of an unknown framework, that may say it lives elsewhere than it does.

    device: what it tells of its device, or the error that it raises then.
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
    """The problem of q, k and v in NumPy, which may have any strides."""
    return plans.problem_of(*(ArraySpec.contiguous(x.shape, x.dtype.name) for x in arrays), **options)


def same(got: tuple[Array, ...], expected: tuple[Array, ...]) -> None:
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a.astype(np.float64), b.astype(np.float64))
