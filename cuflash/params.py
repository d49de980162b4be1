"""Run-time arguments of the kernels as bytes: mirrors `kernels_cu/common/params.cuh`, which asserts the sizes.

Constants of a problem are packed once; per call only pointers, and the alignment they have, are written.
"""

from __future__ import annotations

import math
import struct
from typing import Any

from .plan import PARAMS_BYTES, Plan
from .problem import ITEMSIZE, Problem

LOG2_E = 1.4426950408889634
Strides = tuple[int, ...]

# Operand q, k, v, out (pointer and the strides of batch, seqlen, heads); lse; 12 ints; 2 floats; aligned; padding.
_FORWARD = struct.Struct("<" + 4 * "Q3q" + "Q" + "12i" + "2f" + "2i")
_POINTER_OFFSETS = (0, 32, 64, 96, 128)
_POINTER = struct.Struct("<Q")
_ALIGNED = struct.Struct("<i")
_ALIGNED_OFFSET = 192
assert _FORWARD.size == PARAMS_BYTES["forward"]

MAX_MERGE_STATES = 248  # the struct stays within the 4 KiB of parameters that every architecture takes
# Pointers of outs and lses; out, lse; elements of an out; head_dim_v, heads, seqlen, number of states, vector; padding.
_MERGE = struct.Struct(f"<{2 * MAX_MERGE_STATES}Q" + "2Q" + "q" + "6i")
assert _MERGE.size == PARAMS_BYTES["merge"]


def pack_forward(problem: Problem, plan: Plan, out_strides: Strides) -> bytes:
    """The bytes of `ForwardParams` with null pointers; `out_strides` are those of the 4-D out in elements."""
    mask = problem.mask
    key_begin, key_end = mask.key_range(0, problem.seqlen_q)
    strides = [*problem.strides, *([(0, 0, 0, 1)] * (3 - len(problem.strides))), out_strides]
    operands: list[int] = []
    for operand in strides:
        operands += [0, operand[0], operand[1], operand[2]]
    capped = problem.softcap > 0.0
    return _FORWARD.pack(
        *operands,
        0,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.heads_q,
        problem.heads_q // problem.heads_kv,
        problem.head_dim,
        problem.head_dim_v,
        mask.lo,
        mask.hi,
        key_begin,
        key_end,
        plan.num_q_blocks,
        plan.num_slices,
        (problem.softcap if capped else problem.softmax_scale) * LOG2_E,
        problem.softmax_scale / problem.softcap if capped else 0.0,
        0,
        0,
    )


def write_pointers(buffer: Any, pointers: tuple[int, int, int, int, int], aligned: int) -> None:
    """Writes q, k, v, out, lse and which of the first four allow 16-byte accesses (bits 0 to 3) into packed bytes."""
    for offset, pointer in zip(_POINTER_OFFSETS, pointers, strict=True):
        _POINTER.pack_into(buffer, offset, pointer)
    _ALIGNED.pack_into(buffer, _ALIGNED_OFFSET, aligned)


def allows_vectors(strides: Strides, dtype: str) -> bool:
    """Whether every row of an operand starts at a multiple of 16 bytes once its pointer does."""
    return all(stride * ITEMSIZE[dtype] % 16 == 0 for stride in strides[:-1])


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
