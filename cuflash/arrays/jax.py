"""Adapter for JAX arrays: CuPy and NumPy read them through DLPack. `frameworks/jax` handles traced arrays."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ..errors import ProblemError, UnsupportedError
from .dlpack import DlpackLibrary
from .library import cupy_module


class JaxLibrary(DlpackLibrary):
    def __init__(self) -> None:
        import jax

        super().__init__("jax", jax.dlpack.from_dlpack)
        self._jax = jax

    def on_gpu(self, array: Any, name: str = "the first array") -> bool:
        if isinstance(array, self._jax.core.Tracer):
            raise UnsupportedError(
                "a traced JAX array (jit, grad or vmap) has no memory yet; take attention of cuflash.frameworks.jax "
                "there, or call cuflash outside the transformation"
            )
        return super().on_gpu(array, name)

    def _kind_of_device(self, name: str, array: Any) -> int:
        try:
            return super()._kind_of_device(name, array)
        except ProblemError as error:
            check_alive(name, array)
            if (count := len(array.sharding.device_set)) > 1:
                raise UnsupportedError(
                    f"{name} lies on {count} devices; take attention of cuflash.frameworks.jax, which splits a call "
                    "over them, or give an array on one of them (jax.device_put moves it)"
                ) from error
            raise

    def to_numpy(self, array: Any, name: str = "an array") -> np.ndarray[Any, Any]:
        return np.asarray(array)

    def from_numpy(self, array: np.ndarray[Any, Any], like: Any) -> Any:
        return self._jax.device_put(array, next(iter(like.devices())))

    def from_cupy(self, array: Any) -> Any:
        # Synchronized because XLA may reuse the inputs' memory on its own streams as soon as Python drops them.
        with array.device:  # CuPy has one current stream for each device
            cupy_module().cuda.get_current_stream().synchronize()
        return super().from_cupy(array)

    def seed(self, number: int, like: Any) -> Any:
        self.on_gpu(like)  # refuses traced arrays
        # Two halves of 32 bits: JAX disables 64-bit integers by default.
        return self.from_numpy(np.array([number & 0xFFFFFFFF, number >> 32 & 0xFFFFFFFF], np.uint32), like)

    def arange(self, count: int, like: Any) -> Any:
        return self.from_numpy(np.arange(count), like)


library = cache(JaxLibrary)


def check_alive(name: str, array: Any) -> None:
    """Raises ProblemError for a JAX array whose memory was deleted or donated."""
    if array.is_deleted():
        raise ProblemError(f"{name} was deleted, or donated to a jitted function; give an array that is still there")
