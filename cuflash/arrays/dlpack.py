"""Adapter for arrays of any library with DLPack: CuPy or NumPy reads them without a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import ProblemError, UnsupportedError
from ..problem.array_spec import ArraySpec
from ..units import with_article
from .cupy import library as cupy
from .library import Library, cupy_module
from .numpy import NUMPY


class DlpackLibrary(Library):
    """Adapter of a DLPack producer: reads its arrays as CuPy or NumPy arrays of the same memory, without writing."""

    def __init__(self, name: str, from_dlpack: Callable[[Any], Any]) -> None:
        """from_dlpack: converts a result to an array of this library; the identity if the library has no importer."""
        self.name = name  # type: ignore[misc]
        self._from_dlpack = from_dlpack

    def on_gpu(self, array: Any, name: str = "the first array") -> bool:
        kind = self._kind_of_device(name, array)
        if kind not in (1, 2, 13):  # kDLCPU, kDLCUDA, kDLCUDAManaged
            raise UnsupportedError(
                f"{name} is {with_article(self.name)} array of DLPack device type {kind}, which is not supported; move "
                "it to cuda or cpu"
            )
        return kind != 1

    def spec(self, name: str, array: Any) -> ArraySpec:
        if self.on_gpu(array, name):
            spec = cupy().spec(name, self.to_cupy(array, name))
        else:
            spec = NUMPY.spec(name, self.to_numpy(array, name))
        return spec._replace(library=self.name)

    def _kind_of_device(self, name: str, array: Any) -> int:
        """Returns DLPack's device type of an array."""
        try:
            dl_device = array.__dlpack_device__()
        except Exception as error:  # an unknown library may raise anything
            raise _without_device(name, f"raised {error!r}") from error
        try:
            return int(dl_device[0])
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise _without_device(name, f"returned {dl_device!r}") from error

    def to_cupy(self, array: Any, name: str = "an array") -> Any:
        """Returns a CuPy array of the same memory; CuPy's current stream waits for the producer."""
        return self._read(cupy_module().from_dlpack, array, name)

    def to_numpy(self, array: Any, name: str = "an array") -> np.ndarray[Any, Any]:
        view: np.ndarray[Any, Any] = self._read(np.from_dlpack, array, name)
        return view

    def _read(self, from_dlpack: Callable[[Any], Any], array: Any, name: str) -> Any:
        try:
            return from_dlpack(array)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            # Libraries raise different errors for unsupported dtypes, byte orders and devices.
            dtype = f" of {array.dtype}" if hasattr(array, "dtype") else ""
            raise UnsupportedError(
                f"{name} is {with_article(self.name)} array{dtype} that cannot be read through DLPack ({error}); give "
                "float16, float32 or float64 in the machine's order of bytes, or a CuPy, PyTorch, JAX or NumPy array"
            ) from error

    def from_numpy(self, array: np.ndarray[Any, Any], like: Any) -> Any:
        return self._from_dlpack(array)

    def from_cupy(self, array: Any) -> Any:
        """Returns a result as an array of this library, or as a CuPy array if the library has no importer."""
        return self._from_dlpack(array)

    def check_writable(self, name: str, array: Any, otherwise: str = "") -> None:
        raise ProblemError(
            f"{name} is {with_article(self.name)} array, which cannot be written to here; give a NumPy, CuPy or "
            f"PyTorch array{otherwise}"
        )

    def seed(self, number: int, like: Any) -> Any:
        raise ProblemError(f"dropout_seed={number} with {self.name} arrays; give an array of theirs, one int64")

    def arange(self, count: int, like: Any) -> Any:
        raise ProblemError(f"q is {with_article(self.name)} array; give CuPy, PyTorch, JAX or NumPy arrays")


def _without_device(name: str, done: str) -> ProblemError:
    return ProblemError(
        f"{name} does not tell its device: __dlpack_device__ {done}; give an array that returns two integers, the type "
        "and the number of its device, or a CuPy, PyTorch, JAX or NumPy array"
    )
