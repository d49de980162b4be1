"""Run-time arguments of the kernels as bytes: mirrors `kernels_cu/common/params.cuh`, which asserts the sizes.

Constants of a problem are packed once; per call only pointers, and the alignment they have, are written.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

from .plan import PARAMS_BYTES, Plan, stats_rows
from .problem import ITEMSIZE, Problem
from .tiles_sm80 import BackwardTile

LOG2_E = 1.4426950408889634
Strides = tuple[int, ...]


class Layout(NamedTuple):
    """Where a struct has what changes from call to call."""

    pointers: tuple[int, ...]  # in 8-byte words; the operands first
    aligned: int  # in 4-byte words


# Operand q, k, v, out (pointer and the strides of batch, seqlen, heads); lse; 12 ints; 2 floats; aligned; padding.
_FORWARD = struct.Struct("<" + 4 * "Q3q" + "Q" + "12i" + "2f" + "2i")
FORWARD = Layout((0, 4, 8, 12, 16), 48)
assert _FORWARD.size == PARAMS_BYTES["forward"]

# Operand q, k, v, dout, out, dq, dk, dv; lse, dlse, stats, dq_acc, dk_acc, dv_acc; 21 ints; 3 floats; aligned; padding.
_BACKWARD = struct.Struct("<" + 8 * "Q3q" + "6Q" + "21i" + "3f" + "2i")
BACKWARD = Layout((*range(0, 32, 4), *range(32, 38)), 100)
assert _BACKWARD.size == PARAMS_BYTES["backward"]

MAX_MERGE_STATES = 248  # the struct stays within the 4 KiB of parameters that every architecture takes
# Pointers of outs and lses; out, lse; elements of an out; head_dim_v, heads, seqlen, number of states, vector; padding.
_MERGE = struct.Struct(f"<{2 * MAX_MERGE_STATES}Q" + "2Q" + "q" + "6i")
assert _MERGE.size == PARAMS_BYTES["merge"]


class Parameters:
    """A packed struct in memory that stays where it is. What changes from call to call is written in place."""

    def __init__(self, packed: bytes) -> None:
        memory = bytearray(packed)
        self._owner = (ctypes.c_char * len(memory)).from_buffer(memory)
        self.address = ctypes.addressof(self._owner)
        self._words, self._ints = memoryview(memory).cast("Q"), memoryview(memory).cast("i")

    def write(self, layout: Layout, pointers: Sequence[int], misaligning: Sequence[int]) -> None:
        """The pointers in the struct's order, and which of the operands, the first, allow 16-byte accesses.

        `misaligning` are the bits of each operand's pointer that forbid them (`misaligning_bits`).
        """
        words = self._words
        for at, pointer in zip(layout.pointers, pointers, strict=True):
            words[at] = pointer
        aligned, bit = 0, 1
        for pointer, bits in zip(pointers, misaligning, strict=False):
            if not pointer & bits:
                aligned |= bit
            bit <<= 1
        self._ints[layout.aligned] = aligned

    def __bytes__(self) -> bytes:
        return bytes(self._words)


def pack_forward(problem: Problem, plan: Plan, out_strides: Strides) -> bytes:
    """The bytes of `ForwardParams` with null pointers; `out_strides` are those of the 4-D out in elements."""
    strides = [*problem.strides, *([(0, 0, 0, 1)] * (3 - len(problem.strides))), out_strides]
    return _FORWARD.pack(
        *_operands(strides),
        0,
        *_sizes(problem),
        plan.num_q_blocks,
        plan.num_slices,
        *_scales(problem),
        0,
        0,
    )


def pack_backward(problem: Problem, plan: Plan, strides: Sequence[Strides]) -> bytes:
    """The bytes of `BackwardParams` with null pointers; `strides` of the 4-D dout, out, dq, dk and dv in elements."""
    assert plan.variant is not None
    tile = plan.variant.tile
    assert isinstance(tile, BackwardTile)
    return _BACKWARD.pack(
        *_operands([*problem.strides, *strides]),
        *[0] * 6,
        problem.batch,
        *_sizes(problem),
        *problem.mask.row_range(0, problem.seqlen_k),
        plan.num_q_blocks,
        plan.num_slices,
        -(-problem.seqlen_k // tile.block_k),
        plan.num_splits,
        plan.heads_together,
        stats_rows(problem),
        tile.head_dim,
        tile.head_dim_v,
        problem.softmax_scale,
        *_scales(problem),
        0,
        0,
    )


def _operands(strides: Sequence[Strides]) -> list[int]:
    return [number for operand in strides for number in (0, *operand[:3])]


def _sizes(problem: Problem) -> tuple[int, ...]:
    """seqlen_q up to key_end, which all the structs of a problem have."""
    mask = problem.mask
    return (
        problem.seqlen_q,
        problem.seqlen_k,
        problem.heads_q,
        problem.heads_q // problem.heads_kv,
        problem.head_dim,
        problem.head_dim_v,
        mask.lo,
        mask.hi,
        *mask.key_range(0, problem.seqlen_q),
    )


def _scales(problem: Problem) -> tuple[float, float]:
    """scale_log2 and softcap_scale."""
    if problem.softcap > 0.0:
        return problem.softcap * LOG2_E, problem.softmax_scale / problem.softcap
    return problem.softmax_scale * LOG2_E, 0.0


def allows_vectors(strides: Strides, dtype: str) -> bool:
    """Whether every row of an operand starts at a multiple of 16 bytes once its pointer does."""
    return all(stride * ITEMSIZE[dtype] % 16 == 0 for stride in strides[:-1])


def misaligning_bits(strides: Strides, dtype: str) -> int:
    """Bits of a pointer that forbid 16-byte accesses: the low four, or any where the strides forbid them already."""
    return 15 if allows_vectors(strides, dtype) else -1


def pack_merge(
    outs: list[int], lses: list[int], out: int, lse: int, shape: tuple[int, int, int, int], dtype: str
) -> bytes:
    """The bytes of `MergeParams`: pointers of contiguous states of shape (batch, seqlen, heads, head_dim_v)."""
    padding = [0] * (MAX_MERGE_STATES - len(outs))
    _, seqlen, heads, head_dim_v = shape
    vector = head_dim_v * ITEMSIZE[dtype] % 16 == 0 and all(pointer % 16 == 0 for pointer in (*outs, out))
    return _MERGE.pack(
        *outs, *padding, *lses, *padding, out, lse, math.prod(shape), head_dim_v, heads, seqlen, len(outs), vector, 0
    )
