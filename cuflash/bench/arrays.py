"""The benchmark's input arrays in whichever library is installed, and how their values get back to the host."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UnsupportedError
from ..planning import device
from ..runtime import compiler
from .cases import Case, numpy_dtype

Inputs = tuple[Any, ...]  # q, k, v, and for backward dout


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

    def head(self, array: Any, batch: int, head: int) -> NDArray[np.float64]:
        """One head of a (batch, seqlen, heads, head_dim) array, as (seqlen, head_dim) float64 on the host."""
        return np.asarray(self._host(array)[batch, :, head], np.float64)

    def distance(self, array: Any, reference: Any) -> float:
        """|array - reference| / |reference| in the Euclidean norm."""
        wanted = np.asarray(self._host(reference), np.float32)
        difference = np.asarray(self._host(array), np.float32) - wanted
        return float(np.linalg.norm(difference) / np.linalg.norm(wanted))

    def wide(self, array: Any) -> Any:
        """The array in float64, where products of float64 are fast."""
        return np.asarray(self._host(array), np.float64)

    def synchronize(self) -> None:
        """Waits until the GPU has nothing left to do."""

    def release(self) -> None:
        """Gives memory that the library keeps for later back to the GPU."""

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

    def normal(self, shape: tuple[int, ...], dtype: str, seed: int) -> Any:
        return self.cupy.asarray(super().normal(shape, dtype, seed))

    def synchronize(self) -> None:
        self.cupy.cuda.runtime.deviceSynchronize()

    def release(self) -> None:
        self.cupy.get_default_memory_pool().free_all_blocks()

    def _host(self, array: Any) -> NDArray[Any]:
        host: NDArray[Any] = self.cupy.asnumpy(array)
        return host


class TorchArrays(CupyArrays):
    name = "torch"

    def __init__(self) -> None:
        super().__init__()
        import torch

        self.torch = self.xp = torch

    def wide(self, array: Any) -> Any:
        return array.double()

    def normal(self, shape: tuple[int, ...], dtype: str, seed: int) -> Any:
        generator = self.torch.Generator(device="cuda").manual_seed(seed)
        values = self.torch.randn(shape, generator=generator, device="cuda", dtype=self.torch.float32)
        return values.to(getattr(self.torch, dtype))

    def head(self, array: Any, batch: int, head: int) -> NDArray[np.float64]:
        values: NDArray[np.float64] = array[batch, :, head].double().cpu().numpy()
        return values

    def distance(self, array: Any, reference: Any) -> float:
        wanted = reference.float()
        return float((array.float() - wanted).norm() / wanted.norm())

    def release(self) -> None:
        super().release()
        self.torch.cuda.empty_cache()


def why_no_gpu() -> str:
    """Why nothing can run on a GPU here; "" if it can."""
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
