"""TMA descriptors of 4-D operands, encoded by the CUDA driver for the copy engine (TMA)."""

from __future__ import annotations

import ctypes
import struct
from functools import lru_cache

from ..errors import UnsupportedError
from ..planning.plan import TmaBox
from ..planning.tile_shapes_sm90 import PANEL_BYTES
from ..problem.array_spec import ArraySpec
from ..problem.dtypes import DTYPES
from .driver import INVALID_VALUE, Function, failure, function

MAP_BYTES, ALIGNMENT = 128, 64
# Source: CUDA driver API, "Tensor Map Object Management".
_INTERLEAVE_NONE, _SWIZZLE_128B, _L2_PROMOTION_128B, _OUTSIDE_IS_ZERO = 0, 3, 2, 0
_ADDRESS, _ENUM = ctypes.c_void_p, ctypes.c_int
_ARGUMENTS = (_ADDRESS, _ENUM, ctypes.c_uint32, *[_ADDRESS] * 5, *[_ENUM] * 4)


# Lengths from the innermost axis on, bytes from one element of an outer axis to the next, the box, steps of elements.
_GEOMETRY = struct.Struct("<5Q4Q5I5I")
_STEPS, _BOX, _ELEMENT_STEPS = (struct.calcsize(before) for before in ("<5Q", "<5Q4Q", "<5Q4Q5I"))
_ONES = 1, 1, 1, 1, 1, 1, 1, 1
_Memory = ctypes.c_char * (2 * MAP_BYTES + _GEOMETRY.size)
_SOMEWHERE = 2**12  # a placeholder address


@lru_cache(maxsize=1024)  # in decoding only the cache's length changes, and k and v have one geometry
def encoded(spec: ArraySpec, box: TmaBox) -> bytes:
    """Returns the descriptor, without an address, of rows `begin … end - 1` of a 4-D array.

    Outside of these rows, reads give zeros and writes go nowhere. A varlen box has the axes of `VarlenMapRows`, and its
    descriptor begins as many rows before the operand as the operand has.
    """
    (batch, _, heads, dim), (outer, _, inner, _) = spec.shape, spec.strides
    size, seqlen = spec.itemsize, box.end - box.begin
    step = _row_bytes(spec, box)
    # 16 stands for the unused stride of a dimension of length 1, as the driver checks all strides.
    lengths, steps = [dim, seqlen, heads, batch], [step, size * inner if heads > 1 else 16, size * outer]
    if box.varlen:
        lengths.insert(3, seqlen + 1)
        steps.insert(2, step)
    if batch == 1:
        steps[-1] = 16
    rank = len(lengths)
    unused = [0] * (5 - rank)
    # All arguments share one buffer: an array for each takes six times as long.
    memory = _Memory()
    to = -(-ctypes.addressof(memory) // ALIGNMENT) * ALIGNMENT
    begin, address = to - ctypes.addressof(memory), to + MAP_BYTES
    sizes = PANEL_BYTES // size, box.rows, *_ONES
    _GEOMETRY.pack_into(memory, begin + MAP_BYTES, *lengths, *unused, *steps, *unused, *sizes)
    result = function("cuTensorMapEncodeTiled", *_ARGUMENTS)(
        to,
        DTYPES[spec.dtype].tma,
        rank,
        _SOMEWHERE,
        address,
        address + _STEPS,
        address + _BOX,
        address + _ELEMENT_STEPS,
        _INTERLEAVE_NONE,
        _SWIZZLE_128B,
        _L2_PROMOTION_128B,
        _OUTSIDE_IS_ZERO,
    )
    if result:
        raise refusal(result, f"a TMA descriptor of {spec}, {box}")
    return ctypes.string_at(to, MAP_BYTES)


def refusal(result: int, what: str) -> Exception:
    """Returns the error of a refused descriptor, or an older error, which each driver call reports again."""
    what = f"the driver refuses {what}"
    return UnsupportedError(what) if result == INVALID_VALUE else failure(result, what)


def _row_bytes(spec: ArraySpec, box: TmaBox) -> int:
    """Returns the row stride of the descriptor in bytes."""
    return spec.strides[1] * spec.itemsize if box.end - box.begin > 1 else 16


def first_byte(spec: ArraySpec, box: TmaBox) -> int:
    """Returns the begin of the descriptor, in bytes from the operand's first element."""
    if box.varlen:
        return -box.end * _row_bytes(spec, box)
    return box.begin and box.begin * spec.strides[1] * spec.itemsize


def mover() -> Function:
    """Returns a function of (descriptor, at a multiple of 64; pointer of its first row) that sets its address."""
    return function("cuTensorMapReplaceAddress", ctypes.c_void_p, ctypes.c_void_p)
