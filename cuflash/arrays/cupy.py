"""CuPy arrays, whose pointer, shape and strides are read directly."""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

from ..problem.array_spec import ArraySpec
from .library import NOTHING, GpuLibrary, cupy_module, dtype_name, element_strides


class CupyLibrary(GpuLibrary):
    name = "cupy"

    def __init__(self) -> None:
        cupy = self._cupy = cupy_module()
        self._new = cupy.ndarray  # why not cupy.empty: it makes the same array, 0.3 µs later
        self._current_stream = cupy.cuda.get_current_stream
        self._current_device = cupy.cuda.runtime.getDevice

    def on_gpu(self, array: Any) -> bool:
        return True

    def spec(self, name: str, array: Any) -> ArraySpec:
        device = f"cuda:{array.data.device_id}"
        return ArraySpec(array.shape, element_strides(array), dtype_name(array.dtype), device, self.name)

    def key(self, array: Any) -> tuple[Any, ...]:
        return array.shape, array.strides, array.dtype, array.data.device_id

    def pointer(self, array: Any) -> int:
        return array.data.ptr  # type: ignore[no-any-return]

    def stream(self, ordinal: int) -> int:
        return self._current_stream().ptr  # type: ignore[no-any-return]

    def device(self, ordinal: int) -> contextlib.AbstractContextManager[Any]:
        if self._current_device() == ordinal:
            return NOTHING
        return self._cupy.cuda.Device(ordinal)  # type: ignore[no-any-return]

    def empty(self, shape: tuple[int, ...], dtype: str, ordinal: int) -> Any:
        return self._new(shape, dtype)

    def dense(self, array: Any) -> Any:
        return self._cupy.ascontiguousarray(array)

    def copy(self, source: Any, target: Any) -> None:
        target[...] = source

    def to_cupy(self, array: Any) -> Any:
        return array

    def from_cupy(self, array: Any) -> Any:
        return array

    def cupy_stream(self, ordinal: int) -> contextlib.AbstractContextManager[Any]:
        return NOTHING


@cache
def cupy() -> CupyLibrary:
    """The only adapter of CuPy; raises UnsupportedError if CuPy is missing."""
    return CupyLibrary()
