"""Run-time arguments of the kernels as bytes: mirrors `kernels_cu/common/params.cuh`, which asserts the sizes.

Constants of a problem are packed once; per call only pointers, and the alignment they have, are written.
"""

from __future__ import annotations

import copy
import ctypes
import itertools
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from typing import NamedTuple, Self

from .problem import ITEMSIZE, Problem
from .tensor_map import MAP_BYTES, TensorMap
from .tiles_sm80 import BackwardTile
from .tiles_sm90 import GROUP_ROWS, OUT_ROWS, WarpgroupBackwardTile, WarpgroupRowsTile, WarpgroupTile
from .variant import PARAMS_BYTES, WARPGROUP_PARAMS_BYTES, Plan

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

# Tensor maps of q, k, v and out; ForwardParams; counter; 2 ints; padding to 64 bytes.
_MAPS_BYTES = 4 * MAP_BYTES
_WARPGROUP = struct.Struct(f"<{_MAPS_BYTES}x{_FORWARD.size}sQ2i40x")
WARPGROUP = Layout(tuple(_MAPS_BYTES // 8 + at for at in FORWARD.pointers), _MAPS_BYTES // 4 + FORWARD.aligned)
_COUNTER = (_MAPS_BYTES + _FORWARD.size) // 8
assert _WARPGROUP.size == WARPGROUP_PARAMS_BYTES["forward"]

# Operand q, k, v, dout, out, dq, dk, dv; lse, dlse, stats, dq_acc, dk_acc, dv_acc, turns; 22 ints; 3 floats; aligned;
# deterministic, sm90; those of SharedKeys.
_BACKWARD = struct.Struct("<" + 8 * "Q3q" + "7Q" + "22i" + "3f" + "7i")
BACKWARD = Layout((*range(0, 32, 4), *range(32, 39)), 103)
assert _BACKWARD.size == PARAMS_BYTES["backward"]

# BackwardParams; padding to 64 bytes; tensor maps of q, k, v, dout, dq, dk and dv.
_GRADIENT_MAPS = {"q": 0, "k": 1, "v": 2, "dout": 3, "dq": 5, "dk": 6, "dv": 7}  # and which operand each is of
_GRADIENT_MAPS_AT = -(-_BACKWARD.size // 64) * 64
assert _GRADIENT_MAPS_AT + len(_GRADIENT_MAPS) * MAP_BYTES == WARPGROUP_PARAMS_BYTES["backward"]

MAX_MERGE_STATES = 248  # the struct stays within the 4 KiB of parameters that every architecture takes
# Pointers of outs and lses; out, lse; elements of an out; head_dim_v, heads, seqlen, number of states, vector; padding.
_MERGE = struct.Struct(f"<{2 * MAX_MERGE_STATES}Q" + "2Q" + "q" + "6i")
MERGE = Layout((), 0)  # nothing: its launches are not repeated
assert _MERGE.size == PARAMS_BYTES["merge"]


_ALIGNMENT = 64  # of a tensor map


class Parameters:
    """A packed struct in memory that stays where it is. What changes from call to call is written in place.

    `misaligning`: of each of the operands, the first of the pointers, the bits that forbid 16-byte accesses.
    """

    def __init__(self, packed: bytes, layout: Layout, misaligning: Sequence[int] = ()) -> None:
        self._layout, self._misaligning = layout, misaligning
        self._unknown = (-1,) * len(layout.pointers)
        self._written = self._unknown
        self._hold(packed)

    def _hold(self, packed: bytes) -> None:
        memory = bytearray(len(packed) + _ALIGNMENT)
        self._owner = (ctypes.c_char * len(memory)).from_buffer(memory)
        begin = -ctypes.addressof(self._owner) % _ALIGNMENT
        self.address = ctypes.addressof(self._owner) + begin
        view = memoryview(memory)[begin : begin + len(packed)]
        view[:] = packed
        self._words, self._ints = view.cast("Q"), view.cast("i")

    def copy(self) -> Self:
        """The same in memory of its own."""
        made = copy.copy(self)
        made._hold(bytes(self))
        return made

    def write(self, pointers: tuple[int, ...]) -> None:
        """The pointers, in the struct's order, and which of the operands allow 16-byte accesses."""
        before = self._written
        self._written = self._unknown  # why: or what an error leaves half written would be taken for the old
        for number, (pointer, old) in enumerate(zip(pointers, before, strict=True)):
            if pointer != old:
                self._place(number, pointer)
        self._written = pointers

    def _place(self, number: int, pointer: int) -> None:
        self._words[self._layout.pointers[number]] = pointer
        if number < len(self._misaligning):
            bit, aligned = 1 << number, self._layout.aligned
            others = self._ints[aligned] & ~bit
            self._ints[aligned] = others if pointer & self._misaligning[number] else others | bit

    def __bytes__(self) -> bytes:
        return bytes(self._words)


class WarpgroupParameters(Parameters):
    """`Parameters` with tensor maps in a row from byte `first` on; a map is made anew only where its operand has moved.

    `operands`: which one of the pointers each map is of.
    """

    def __init__(
        self,
        packed: bytes,
        layout: Layout,
        misaligning: Sequence[int],
        maps: Sequence[TensorMap],
        first: int,
        operands: Iterable[int],
    ) -> None:
        super().__init__(packed, layout, misaligning)
        self._maps = dict(zip(operands, zip(itertools.count(first, MAP_BYTES), maps, strict=False), strict=False))
        self._encoded: frozenset[int] = frozenset()  # operands whose maps were made

    def _place(self, number: int, pointer: int) -> None:
        super()._place(number, pointer)
        if number in self._maps and pointer:
            offset, tensor_map = self._maps[number]
            (tensor_map.move if number in self._encoded else tensor_map.encode)(self.address + offset, pointer)
            self._encoded |= {number}

    def count_with(self, counter: int) -> None:
        """The address of the counter that hands out tiles."""
        self._words[_COUNTER] = counter


def forward_parameters(problem: Problem, plan: Plan, out_strides: Strides) -> Parameters:
    """What the kernel of this plan takes, with null pointers; `out_strides` are those of the 4-D out in elements."""
    assert plan.variant is not None
    strides = [*problem.strides, *([(0, 0, 0, 1)] * (3 - len(problem.strides))), out_strides]  # lse has no v
    packed = _pack_forward(problem, plan, strides)
    misaligning = [_misaligning_bits(x, problem.dtype) for x in strides[:3]]
    misaligning.append(_misaligning_bits(out_strides, problem.out_dtype))
    if not isinstance(plan.variant.tile, WarpgroupTile):
        return Parameters(packed, FORWARD, misaligning)
    maps = _forward_maps(problem, plan.variant.tile, out_strides)
    num_tiles = plan.num_q_blocks * problem.heads_q * problem.batch
    packed = _WARPGROUP.pack(packed, 0, num_tiles, plan.heads_together)
    return WarpgroupParameters(packed, WARPGROUP, misaligning, maps, 0, itertools.count())


def _pack_forward(problem: Problem, plan: Plan, strides: Sequence[Strides]) -> bytes:
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


def _forward_maps(problem: Problem, tile: WarpgroupTile, out_strides: Strides) -> list[TensorMap]:
    """Of q, of the keys of k and v that are seen, and, but for lse, of out."""
    begin, end = problem.mask.key_range(0, problem.seqlen_q)
    q, *kv = problem.operand_shapes
    maps = [TensorMap(problem.dtype, q, problem.strides[0], GROUP_ROWS)]
    for shape, strides in zip(kv, problem.strides[1:], strict=False):
        seen = (shape[0], end - begin, *shape[2:])
        maps.append(TensorMap(problem.dtype, seen, strides, tile.block_k, begin))
    if len(maps) == 3:
        maps.append(TensorMap(problem.out_dtype, (*q[:3], problem.head_dim_v), out_strides, OUT_ROWS))
    return maps


def backward_parameters(problem: Problem, plan: Plan, strides: Sequence[Strides]) -> Parameters:
    """What this plan's kernels take, with null pointers; `strides` of the 4-D dout, out, dq, dk and dv in elements."""
    assert plan.variant is not None
    tile = plan.variant.tile
    assert isinstance(tile, (BackwardTile, WarpgroupBackwardTile, WarpgroupRowsTile))
    on_hopper = not isinstance(tile, BackwardTile)
    operands = [*problem.strides, *strides]
    packed = _BACKWARD.pack(
        *_operands(operands),
        *[0] * 7,
        problem.batch,
        *_sizes(problem),
        *problem.mask.row_range(0, problem.seqlen_k),
        plan.num_q_blocks,
        plan.num_slices,
        plan.num_k_blocks,
        plan.num_splits,
        plan.key_blocks,
        plan.heads_together,
        plan.stats_rows,
        tile.head_dim,
        tile.head_dim_v,
        problem.softmax_scale,
        *_scales(problem),
        0,
        plan.deterministic,
        on_hopper,
        *(astuple(plan.shared) if plan.shared is not None else (plan.launches[1].num_blocks, 0, 0, 0)),
    )
    dtypes = 4 * [problem.dtype] + [problem.out_dtype] + 3 * [problem.dtype]
    misaligning = [_misaligning_bits(x, dtype) for x, dtype in zip(operands, dtypes, strict=True)]
    if isinstance(tile, BackwardTile):
        return Parameters(packed, BACKWARD, misaligning)
    maps = _gradient_maps(problem, tile.boxes, strides)
    packed = packed.ljust(_GRADIENT_MAPS_AT + len(maps) * MAP_BYTES, b"\0")
    return WarpgroupParameters(packed, BACKWARD, misaligning, maps, _GRADIENT_MAPS_AT, _GRADIENT_MAPS.values())


def _gradient_maps(problem: Problem, boxes: tuple[int, int], strides: Sequence[Strides]) -> list[TensorMap]:
    """Of q and dout the rows that see, of k and v those that are seen, of the gradients all.

    why not of dq the rows that see, too: no store may begin at a row before the first.
    """
    rows, keys = problem.mask.row_range(0, problem.seqlen_k), problem.mask.key_range(0, problem.seqlen_q)
    q, k, v = problem.operand_shapes
    dout, _, *gradients = strides
    described = [(q, problem.strides[0], boxes[0], rows), (k, problem.strides[1], boxes[1], keys)]
    described += [(v, problem.strides[2], boxes[1], keys), ((*q[:3], v[3]), dout, boxes[0], rows)]
    described += [(shape, of, OUT_ROWS, (0, shape[1])) for shape, of in zip((q, k, v), gradients, strict=True)]
    return [
        TensorMap(problem.dtype, (shape[0], end - begin, *shape[2:]), of, box, begin)
        for shape, of, box, (begin, end) in described
    ]


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


def _misaligning_bits(strides: Strides, dtype: str) -> int:
    """Bits of a pointer that forbid 16-byte accesses: the low four, or any where the strides forbid them already."""
    return 15 if allows_vectors(strides, dtype) else -1


def merge_parameters(
    outs: list[int], lses: list[int], out: int, lse: int, shape: tuple[int, int, int, int], dtype: str
) -> Parameters:
    """`MergeParams`: pointers of contiguous states of shape (batch, seqlen, heads, head_dim_v)."""
    padding = [0] * (MAX_MERGE_STATES - len(outs))
    _, seqlen, heads, head_dim_v = shape
    vector = head_dim_v * ITEMSIZE[dtype] % 16 == 0 and all(pointer % 16 == 0 for pointer in (*outs, out))
    packed = _MERGE.pack(
        *outs, *padding, *lses, *padding, out, lse, math.prod(shape), head_dim_v, heads, seqlen, len(outs), vector, 0
    )
    return Parameters(packed, MERGE)
