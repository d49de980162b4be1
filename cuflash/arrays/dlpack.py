"""Arrays of JAX, and of unknown libraries that offer DLPack: CuPy or NumPy reads them without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import UnsupportedError
from ..problem.array_spec import ArraySpec
from .cupy import cupy
from .library import Library, cupy_module
from .numpy import NUMPY


class DlpackLibrary(Library):
    """JAX, or an unknown DLPack producer: its arrays are seen as CuPy or NumPy arrays of the same memory."""

    def __init__(self, name: str) -> None:
        self.name = name  # type: ignore[misc]

    def on_gpu(self, array: Any) -> bool:
        if self.name == "jax":
            import jax

            if isinstance(array, jax.core.Tracer):
                raise UnsupportedError(
                    "a traced JAX array (jit, grad or vmap) has no memory yet; take attention of "
                    "cuflash.frameworks.jax there, or call cuflash outside the transformation"
                )
        kind = int(array.__dlpack_device__()[0])
        if kind not in (1, 2, 13):  # kDLCPU, kDLCUDA, kDLCUDAManaged
            raise UnsupportedError(
                f"{self.name} arrays of DLPack device type {kind} are not supported; move them to cuda or cpu"
            )
        return kind != 1

    def spec(self, name: str, array: Any) -> ArraySpec:
        spec = cupy().spec(name, self.to_cupy(array)) if self.on_gpu(array) else NUMPY.spec(name, self.to_numpy(array))
        return spec._replace(library=self.name)

    def to_cupy(self, array: Any) -> Any:
        """The same memory as a CuPy array; CuPy's current stream waits for the producer."""
        return cupy_module().from_dlpack(array)

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        return np.asarray(array) if self.name == "jax" else np.from_dlpack(array)

    def from_numpy(self, array: np.ndarray[Any, Any], like: Any) -> Any:
        if self.name != "jax":
            return array
        import jax

        return jax.device_put(array, next(iter(like.devices())))

    def from_cupy(self, array: Any) -> Any:
        """A result as a JAX array for JAX, but as a CuPy array for producers that offer no way back."""
        if self.name != "jax":
            return array
        import jax

        # why: XLA may reuse the inputs' memory on its own streams as soon as Python drops them.
        with array.device:  # CuPy has a current stream for each device
            cupy_module().cuda.get_current_stream().synchronize()
        return jax.dlpack.from_dlpack(array)
