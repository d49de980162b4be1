"""Interfaces of array libraries, which `runtime` calls."""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np

from ..errors import INSTALL_HINT, UnsupportedError
from ..locks import uninterrupted
from ..problem.array_spec import ArraySpec


@cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """The name of a NumPy dtype. why: NumPy takes 1 µs to make it."""
    return dtype.name


def element_strides(array: Any) -> tuple[int, ...]:
    """Strides of a NumPy or CuPy array in elements."""
    itemsize = array.itemsize or 1  # why: elements of no bytes are refused by their dtype, which is judged later
    return tuple([stride // itemsize for stride in array.strides])


class Library:
    """Interface of every library. Arrays on a GPU cross over to CuPy and back, unless it is a `GpuLibrary`."""

    name: ClassVar[str]

    def on_gpu(self, array: Any) -> bool: ...

    def spec(self, name: str, array: Any) -> ArraySpec: ...

    def check_type(self, name: str, array: Any) -> None:
        """Raises an error for an array whose class means more than its elements. It is called once for each class."""

    def check_writable(self, name: str, array: Any, otherwise: str = "") -> None:
        """Raises ProblemError for an array that cannot be written to. otherwise: ends its text."""

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        """A NumPy view of an array in host memory."""

    def from_numpy(self, array: np.ndarray[Any, Any], like: Any) -> Any:
        """An array of this framework that takes over a NumPy result, on the device of `like`."""

    def to_cupy(self, array: Any) -> Any:
        """A CuPy array of the same memory, for whose content CuPy's current stream waits."""
        raise UnsupportedError(f"{self.name} arrays on a GPU are not supported; move them to the CPU")

    def from_cupy(self, array: Any) -> Any:
        """A CuPy result as an array of this framework, without a copy."""

    def seed(self, number: int, like: Any) -> Any:
        """A new array of an int64, or of its halves as uint32, on the device of `like`."""
        return self.from_numpy(np.array(number, np.int64), like)

    def arange(self, count: int, like: Any) -> Any:
        """0, 1, … as integers, on the device of `like`."""
        return self.from_numpy(np.arange(count), like)

    def without_values(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A result of a call on the device meta: shape and dtype, and no memory (PyTorch alone has that device)."""


class GpuLibrary(Library):
    """A library whose GPU arrays are given to kernels directly. `to_cupy` serves `algorithm="standard"` only.

    key: returns all of a call's arrays but their memory, as a value that is cheap to hash; None is no array.
    current_device: returns the number of the GPU on which the framework makes arrays.
    device: returns a context in which a GPU is the current one.
    stream: returns the handle of the caller's current stream on a GPU.
    """

    # why attributes: functions of the frameworks take their place, without a step in between.
    key: Callable[[Sequence[Any]], Hashable]
    current_device: Callable[[], int]
    device: Callable[[int], contextlib.AbstractContextManager[Any]]
    stream: Callable[[int], int]

    def pointers(self, arrays: Sequence[Any]) -> list[int]:
        """The addresses of arrays, 0 for None."""

    def allocator(self, shape: tuple[int, ...], dtype: str, ordinal: int) -> Callable[[], Any]:
        """A function that makes a new dense array by the framework's own allocator, while the GPU is current."""

    def with_packed_strides(self, array: Any) -> Any:
        """The array if it is contiguous, else a contiguous copy."""

    def copy(self, source: Any, target: Any) -> None:
        """Copies the elements: target[...] = source."""

    def read(self, array: Any) -> np.ndarray[Any, Any]:
        """Returns a copy of an array in host memory, once the current stream has computed it."""

    def cupy_stream(self, ordinal: int) -> contextlib.AbstractContextManager[Any]:
        """Inside, the caller's stream is CuPy's current one."""


def as_4d(array: Any) -> Any:
    """A NumPy or CuPy array seen as (batch, seqlen, heads, dim), like `ArraySpec.as_4d`."""
    if array.ndim == 2:
        array = array[:, None]
    return array[None] if array.ndim == 3 else array


@cache
def bfloat16() -> np.dtype[Any]:
    """NumPy's bfloat16, which the package ml_dtypes defines."""
    try:
        with uninterrupted:
            import ml_dtypes
    except ImportError as error:
        raise UnsupportedError("bfloat16 on the CPU needs ml_dtypes: pip install ml_dtypes") from error
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of that name."""
    return bfloat16() if name == "bfloat16" else np.dtype(name)


def cupy_module() -> Any:
    """The package cupy; raises UnsupportedError and says what to do if it cannot be imported."""
    try:
        with uninterrupted:
            import cupy
    except ImportError as error:
        raise UnsupportedError(f"GPU arrays need CuPy, which is not installed: {INSTALL_HINT}") from error
    except OSError as error:  # why: as it is imported, CuPy makes a folder for kernels of its own
        raise UnsupportedError(
            f"GPU arrays need CuPy, which cannot use {error.filename} ({error.strerror or error}); "
            "set CUPY_CACHE_DIR to a folder that can be written"
        ) from error
    return cupy
