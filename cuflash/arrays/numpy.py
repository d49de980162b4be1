"""Adapter for NumPy arrays."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..errors import ProblemError
from ..problem.array_spec import ArraySpec
from .library import Library, element_strides


class NumpyLibrary(Library):
    name = "numpy"

    def on_gpu(self, array: Any) -> bool:
        return False

    def spec(self, name: str, array: Any) -> ArraySpec:
        return ArraySpec(array.shape, element_strides(array), array.dtype.name, "cpu", self.name)

    def check_type(self, name: str, array: Any) -> None:
        # Looked up in loaded modules: importing numpy.ma takes 50 ms.
        if isinstance(array, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())):
            raise ProblemError(f"{name} is a NumPy masked array, whose mask has no meaning here; give a plain array")

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        return np.asarray(array)

    def from_numpy(self, array: np.ndarray[Any, Any], like: Any) -> Any:
        return array


NUMPY = NumpyLibrary()


def library() -> NumpyLibrary:
    """Returns the only adapter."""
    return NUMPY
