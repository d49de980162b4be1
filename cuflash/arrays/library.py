"""Interfaces of array libraries, as `runtime` calls them."""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np

from ..errors import INSTALL_HINT, UnsupportedError
from ..locks import uninterrupted
from ..problem.array_spec import ArraySpec


@cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Returns the name of a NumPy dtype. Cached because NumPy takes 1 µs to build it."""
    return dtype.name


def element_strides(array: Any) -> tuple[int, ...]:
    """Returns the strides of a NumPy or CuPy array in elements."""
    itemsize = array.itemsize or 1  # validation refuses dtypes of 0 bytes later
    return tuple([stride // itemsize for stride in array.strides])


class Library:
    """Interface of every library. GPU arrays are converted to CuPy and back, except for a `GpuLibrary`."""

    name: ClassVar[str]

    def on_gpu(self, array: Any) -> bool: ...

    def spec(self, name: str, array: Any) -> ArraySpec: ...

    def check_type(self, name: str, array: Any) -> None:
        """Raises an error for an unsupported array class. Called once for each class."""

    def check_writable(self, name: str, array: Any, otherwise: str = "") -> None:
        """Raises ProblemError for an array that cannot be written to. otherwise: text at the message's end."""

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        """Returns a NumPy view of an array in host memory."""

    def from_numpy(self, array: np.ndarray[Any, Any], like: Any) -> Any:
        """Returns a NumPy result as an array of this library, on the device of `like`."""

    def to_cupy(self, array: Any) -> Any:
        """Returns a CuPy array of the same memory; CuPy's current stream waits for its content."""
        raise UnsupportedError(f"{self.name} arrays on a GPU are not supported; move them to the CPU")

    def from_cupy(self, array: Any) -> Any:
        """Returns a CuPy result as an array of this library, without a copy."""

    def on_host(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function that computes with NumPy, outside of the graphs of torch.compile if it traces the caller."""
        if "torch._dynamo" in sys.modules and (compiler := sys.modules["torch"].compiler).is_dynamo_compiling():
            function = compiler.disable(function)  # NumPy's calls, traced as torch's, fail or change results
        return function(*arguments)

    def seed(self, number: int, like: Any) -> Any:
        """Returns a new array of one int64, or of its halves as uint32, on the device of `like`."""
        return self.from_numpy(np.array(number, np.int64), like)

    def arange(self, count: int, like: Any) -> Any:
        """Returns the integers 0, 1, …, `count` - 1 on the device of `like`."""
        return self.from_numpy(np.arange(count), like)

    def without_values(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Returns a result on PyTorch's device meta: shape and dtype without memory."""


class GpuLibrary(Library):
    """A library whose GPU arrays are passed to kernels directly. `to_cupy` serves `algorithm="standard"` only.

    key: returns a value that is cheap to hash for a call's arrays: everything but their memory; None is no array.
    current_device: returns the index of the GPU on which the framework creates arrays.
    device: returns a context that makes a GPU the current one.
    stream: returns the handle of the caller's current stream on a GPU.
    """

    # Attributes, not methods: each holds the framework's own function, without a call in between.
    key: Callable[[Sequence[Any]], Hashable]
    current_device: Callable[[], int]
    device: Callable[[int], contextlib.AbstractContextManager[Any]]
    stream: Callable[[int], int]

    def pointers(self, arrays: Sequence[Any]) -> list[int]:
        """Returns the addresses of arrays, 0 for None."""

    def allocator(self, shape: tuple[int, ...], dtype: str, ordinal: int) -> Callable[[], Any]:
        """Returns a function that allocates a dense array by the framework's allocator, while the GPU is current."""

    def with_packed_strides(self, array: Any) -> Any:
        """Returns the array if it is contiguous, else a contiguous copy."""

    def copy(self, source: Any, target: Any) -> None:
        """Copies elements: target[...] = source."""

    def read(self, array: Any) -> np.ndarray[Any, Any]:
        """Returns a copy of an array in host memory, once the current stream has computed it."""

    def cupy_stream(self, ordinal: int) -> contextlib.AbstractContextManager[Any]:
        """Returns a context that makes the caller's stream CuPy's current one."""


def as_4d(array: Any) -> Any:
    """Returns a NumPy or CuPy array as (batch, seqlen, heads, dim), like `ArraySpec.as_4d`."""
    if array.ndim == 2:
        array = array[:, None]
    return array[None] if array.ndim == 3 else array


@cache
def bfloat16() -> np.dtype[Any]:
    """Returns NumPy's bfloat16, which the package ml_dtypes defines."""
    try:
        with uninterrupted:
            import ml_dtypes
    except ImportError as error:
        raise UnsupportedError("bfloat16 on the CPU needs ml_dtypes: pip install ml_dtypes") from error
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Returns NumPy's dtype of a name."""
    return bfloat16() if name == "bfloat16" else np.dtype(name)


def cupy_module() -> Any:
    """Returns the package cupy; raises UnsupportedError with the remedy if it cannot be imported."""
    try:
        with uninterrupted:
            import cupy
    except ImportError as error:
        raise UnsupportedError(f"GPU arrays need CuPy, which is not installed: {INSTALL_HINT}") from error
    except OSError as error:  # importing CuPy creates the folder of its kernel cache
        raise UnsupportedError(
            f"GPU arrays need CuPy, which cannot use {error.filename} ({error.strerror or error}); "
            "set CUPY_CACHE_DIR to a folder that can be written"
        ) from error
    return cupy
