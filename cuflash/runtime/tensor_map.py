"""TMA descriptors: a 4-D operand as the copy engine sees it, encoded by the CUDA driver."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import UnsupportedError
from ..planning.plan import Box
from ..planning.tiles_sm90 import PANEL_BYTES
from ..problem.array_spec import ArraySpec
from ..problem.dtypes import DTYPES
from .driver import function

MAP_BYTES = 128
# Source: CUDA driver API, "Tensor Map Object Management".
_INTERLEAVE_NONE, _SWIZZLE_128B, _L2_PROMOTION_128B, _OUTSIDE_IS_ZERO = 0, 3, 2, 0
_RANK = 4
_ADDRESS, _ENUM = ctypes.c_void_p, ctypes.c_int
_ARGUMENTS = (_ADDRESS, _ENUM, ctypes.c_uint32, *[_ADDRESS] * 5, *[_ENUM] * 4)


# Lengths from the innermost axis on, bytes from one element of an outer axis to the next, the box, steps of elements.
_GEOMETRY = struct.Struct("<4Q3Q4I4I")
_STEPS, _BOX, _ELEMENT_STEPS = (struct.calcsize(before) for before in ("<4Q", "<4Q3Q", "<4Q3Q4I"))
_ONES = 1, 1, 1, 1, 1, 1
_Memory = ctypes.c_char * _GEOMETRY.size


class TensorMap(NamedTuple):
    """An operand (batch, seqlen, heads, dim) from row `first` of each head on; a box is `rows` rows of 128 bytes.

    Strides are in elements, the last one is 1. Outside of `shape`, reads give zeros and writes go nowhere.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: Sequence[int]
    rows: int
    first: int = 0

    @classmethod
    def of(cls, spec: ArraySpec, box: Box) -> TensorMap:
        """A 4-D array as a launch has it moved."""
        shape = spec.shape[0], box.end - box.begin, *spec.shape[2:]
        return cls(spec.dtype, shape, spec.strides, box.rows, box.begin)

    def encode(self, address: int, pointer: int) -> None:
        """Writes the 128 bytes of the descriptor to host memory at `address`, a multiple of 64."""
        batch, seqlen, heads, dim = self.shape
        size = DTYPES[self.dtype].itemsize
        # why 16: of a dimension of length 1 no stride is used, but all are judged.
        outer, middle, inner, _ = self.strides
        steps = (
            size * middle if seqlen > 1 else 16,
            size * inner if heads > 1 else 16,
            size * outer if batch > 1 else 16,
        )
        # why one piece of memory: to make an array for each argument takes six times as long.
        geometry = _Memory()
        _GEOMETRY.pack_into(geometry, 0, dim, seqlen, heads, batch, *steps, PANEL_BYTES // size, self.rows, *_ONES)
        at = ctypes.addressof(geometry)
        result = function("cuTensorMapEncodeTiled", *_ARGUMENTS)(
            address,
            DTYPES[self.dtype].tma,
            _RANK,
            pointer + self.offset,
            at,
            at + _STEPS,
            at + _BOX,
            at + _ELEMENT_STEPS,
            _INTERLEAVE_NONE,
            _SWIZZLE_128B,
            _L2_PROMOTION_128B,
            _OUTSIDE_IS_ZERO,
        )
        if result:
            raise UnsupportedError(f"the driver refuses a TMA descriptor of {self} (CUresult {result})")

    @property
    def offset(self) -> int:
        """Bytes from the operand's first element to that of row `first`."""
        return self.first * self.strides[1] * DTYPES[self.dtype].itemsize

    def move(self, address: int, pointer: int) -> None:
        """The descriptor at `address`, once encoded, with another first element."""
        replace = function("cuTensorMapReplaceAddress", ctypes.c_void_p, ctypes.c_void_p)
        if replace(address, pointer + self.offset):
            raise UnsupportedError(f"the driver refuses the address {pointer:#x} in a TMA descriptor of {self}")
