"""TMA descriptors: a 4-D operand as the copy engine sees it, encoded by the CUDA driver."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from .driver import function
from .errors import UnsupportedError
from .problem import ITEMSIZE
from .tiles_sm90 import PANEL_BYTES

MAP_BYTES = 128
# Source: CUDA driver API, "Tensor Map Object Management".
_DTYPE = {"float16": 6, "float32": 7, "bfloat16": 9}
_INTERLEAVE_NONE, _SWIZZLE_128B, _L2_PROMOTION_128B, _OUTSIDE_IS_ZERO = 0, 3, 2, 0


class TensorMap(NamedTuple):
    """An operand (batch, seqlen, heads, dim) from row `first` of each head on; a box is `rows` rows of 128 bytes.

    Strides are in elements, the last one is 1. Outside of `shape`, reads give zeros and writes go nowhere.
    """

    dtype: str
    shape: tuple[int, int, int, int]
    strides: Sequence[int]
    rows: int
    first: int = 0

    def encode(self, address: int, pointer: int) -> None:
        """Writes the 128 bytes of the descriptor to host memory at `address`, a multiple of 64."""
        batch, seqlen, heads, dim = self.shape
        size = ITEMSIZE[self.dtype]
        # why: of a dimension of length 1 no stride is used, but all are judged.
        steps = [
            size * stride if length > 1 else 16 for length, stride in zip(self.shape[:3], self.strides, strict=False)
        ]
        result = function("cuTensorMapEncodeTiled")(
            ctypes.c_void_p(address),
            _DTYPE[self.dtype],
            4,
            ctypes.c_void_p(pointer + self.offset),
            (ctypes.c_uint64 * 4)(dim, seqlen, heads, batch),
            (ctypes.c_uint64 * 3)(steps[1], steps[2], steps[0]),
            (ctypes.c_uint32 * 4)(PANEL_BYTES // size, self.rows, 1, 1),
            (ctypes.c_uint32 * 4)(1, 1, 1, 1),
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
        return self.first * self.strides[1] * ITEMSIZE[self.dtype]

    def move(self, address: int, pointer: int) -> None:
        """The descriptor at `address`, once encoded, with another first element."""
        replace = function("cuTensorMapReplaceAddress", ctypes.c_void_p, ctypes.c_void_p)
        if replace(address, pointer + self.offset):
            raise UnsupportedError(f"the driver refuses the address {pointer:#x} in a TMA descriptor of {self}")
