"""NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..problem.array_spec import ArraySpec
from .library import Library, element_strides


class NumpyLibrary(Library):
    name = "numpy"

    def on_gpu(self, array: Any) -> bool:
        return False

    def spec(self, name: str, array: Any) -> ArraySpec:
        return ArraySpec(array.shape, element_strides(array), array.dtype.name, "cpu", self.name)

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        return np.asarray(array)

    def from_numpy(self, array: np.ndarray[Any, Any], like: Any) -> Any:
        return array


NUMPY = NumpyLibrary()
