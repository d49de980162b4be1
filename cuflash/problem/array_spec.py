"""Arrays without their memory: shape, strides, dtype, device and library, as validation needs them."""

from __future__ import annotations

import math
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from ..errors import ProblemError
from .dtypes import ITEMSIZE


@lru_cache(maxsize=256)
def packed_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides of a C-contiguous array, in elements."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


class ArraySpec(NamedTuple):
    """An array without its memory. `strides` count elements; `device` reads "cpu" or "cuda:0"."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str
    library: str

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: str, device: str = "cpu", library: str = "numpy") -> ArraySpec:
        """Returns a C-contiguous array of this shape."""
        return cls(shape, packed_strides(shape), dtype, device, library)

    def with_packed_strides(self) -> ArraySpec:
        """Returns a C-contiguous copy of the array."""
        return self._replace(strides=packed_strides(self.shape))

    def as_4d(self) -> ArraySpec:
        """Returns the array viewed as (batch, seqlen, heads, head_dim): a missing batch or heads axis has length 1."""
        shape, strides = self.shape, self.strides
        if len(shape) == 4:
            return self
        if len(shape) == 2:
            shape, strides = (shape[0], 1, shape[1]), (strides[0], 0, strides[1])
        if len(shape) == 3:
            shape, strides = (1, *shape), (0, *strides)
        return self._replace(shape=shape, strides=strides)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ITEMSIZE[self.dtype]

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements, without gaps."""
        return math.prod(self.shape) * self.itemsize

    @property
    def last_dim_strided(self) -> bool:
        """True if the last dimension is not contiguous. Kernels cannot read such an array, so it is copied."""
        return self.strides[-1:] != (1,) and len(self.shape) > 1 and self.shape[-1] > 1 and 0 not in self.shape

    @property
    def has_packed_strides(self) -> bool:
        """True if the array is C-contiguous, strides of axes of length 1 included."""
        return self.strides == packed_strides(self.shape)

    @property
    def span(self) -> tuple[int, int]:
        """The byte range `begin … end - 1` that holds all elements, relative to the first one; (0, 0) without elements.

        Other arrays may lie in its gaps.
        """
        if 0 in self.shape:
            return 0, 0
        steps = [(length - 1) * stride for length, stride in zip(self.shape, self.strides, strict=True)]
        begin, end = sum([min(step, 0) for step in steps]), sum([max(step, 0) for step in steps])
        return begin * self.itemsize, (end + 1) * self.itemsize

    @property
    def has_aligned_rows(self) -> bool:
        """True if every row begins at a multiple of 16 bytes, given that the first element does."""
        size = self.itemsize
        return not any(stride * size % 16 for stride in self.strides[:-1])

    def __str__(self) -> str:
        return f"{self.library} {self.dtype}{list(self.shape)} on {self.device}"


# The first address of placeholders, and the limit of NumPy's search for a common byte. The limit takes a tenth of a
# second, and real layouts need less than a tenth of it. Without it, hostile strides block all Python threads for
# minutes.
_FAR, _MOST_WORK = 2**60, 100_000


def overlap(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool | None:
    """Returns True if two NumPy arrays share bytes of elements; None if their strides make the search too long."""
    try:
        return np.shares_memory(one, other, max_work=_MOST_WORK)  # type: ignore[arg-type]
    except (np.exceptions.TooHardError, OverflowError):
        return None


@lru_cache(maxsize=1024)  # parts of one array keep their distance in later calls
def share_memory(first: ArraySpec, second: ArraySpec, distance: int) -> bool:
    """Returns True if two arrays share bytes of elements; the second begins `distance` bytes behind the first.

    Raises ProblemError if their strides make the search too long.
    """
    pair = (first, 0), (second, distance)
    is_shared = overlap(*[_placeholder(spec.shape, spec.strides, spec.itemsize, begin) for spec, begin in pair])
    if is_shared is None:
        layouts = " and ".join([f"shape {spec.shape} with strides {spec.strides}" for spec, _ in pair])
        raise ProblemError(
            f"an array that is written to and another one, {layouts}, lie in one range of memory, and it takes too "
            "long to tell whether they share elements; give each memory of its own"
        )
    return is_shared


@lru_cache(maxsize=1024)
def repeats_memory(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool | None:
    """Returns True if two elements of an array of these strides share memory; None if the search takes too long."""
    if 0 in shape:
        return False
    reach = 0
    for stride, length in sorted([(abs(stride), length) for length, stride in zip(shape, strides, strict=True)]):
        if length > 1 and stride <= reach:
            break
        reach += stride * (length - 1)
    else:  # each stride exceeds the reach of all smaller ones
        return False
    # Two indices of one element differ first in some axis, where the smaller may count as 0. So for each axis, index 0
    # is compared with the indices behind it.
    whole = _placeholder(shape, strides)
    parts = [whole[(0,) * axis] for axis in range(len(shape))]
    overlaps = [overlap(part[:1], part[1:]) for part in parts]
    return True if True in overlaps else None if None in overlaps else False


def _placeholder(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int = 1, begin: int = 0
) -> np.ndarray[Any, Any]:
    """Returns an array at an address without memory. Its elements are never read."""
    steps = tuple([stride * itemsize for stride in strides])
    place = {"version": 3, "data": (_FAR + begin, True), "shape": shape, "strides": steps, "typestr": f"|V{itemsize}"}
    return np.asarray(SimpleNamespace(__array_interface__=place))
