"""The structs of `kernels_cu/common/params.cuh`, field by field in their order, and one of them filled in memory.

Fields are filled by name: an `Operand`, a plain pointer or a tensor map (`x_map`) takes the operand or the part of the
workspace of its name, `problem` is the problem's, everything else comes with the launch. A test compares the offset of
every field with that of the CUDA struct.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from ctypes import Structure, c_float, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from typing import Any, ClassVar

from ..planning.merge import MAX_STATES
from ..planning.plan import Launch, Part
from ..problem.options import Scores
from ..problem.problem import Problem, States
from .tensor_map import MAP_BYTES, TensorMap

ALIGNMENT = 64  # of a tensor map
Fields = list[tuple[str, Any]]


def _ints(names: str) -> Fields:
    return [(name, c_int32) for name in names.split()]


def _pointers(names: str) -> Fields:
    return [(name, c_void_p) for name in names.split()]


class Map(Structure):
    """`TensorMap`: what the CUDA driver encodes."""

    _fields_: ClassVar[Fields] = [("words", c_uint64 * (MAP_BYTES // 8))]


class Operand(Structure):
    """A (batch, seqlen, heads, dim) operand; strides in elements."""

    _fields_: ClassVar[Fields] = [
        ("pointer", c_void_p),
        ("stride_batch", c_int64),
        ("stride_seqlen", c_int64),
        ("stride_head", c_int64),
        *_ints("aligned unused"),
    ]


def _maps(names: str) -> Fields:
    return [(f"{name}_map", Map) for name in names.split()]


def _operands(names: str) -> Fields:
    return [(name, Operand) for name in names.split()]


class ScoreParams(Structure):
    """`Scores` of the options."""

    _fields_: ClassVar[Fields] = [(name, c_float) for name in Scores._fields]


class ProblemParams(Structure):
    """What every attention kernel knows of its problem."""

    _fields_: ClassVar[Fields] = [
        *_ints("batch seqlen_q seqlen_k heads_q heads_per_kv head_dim head_dim_v mask_lo mask_hi"),
        *_ints("key_begin key_end row_begin row_end unused"),
        ("score", ScoreParams),
    ]


_PROBLEM: Fields = [("problem", ProblemParams)]
_PACKED_PROBLEM = struct.Struct(f"={len(ProblemParams._fields_) - 1}i{len(Scores._fields)}f")
_STRUCTS: dict[str, Fields] = {
    "ForwardParams": [*_operands("q k v out"), *_pointers("lse"), *_PROBLEM, *_ints("num_q_blocks num_slices")],
    "TiledForwardParams": [
        *_maps("q k v out"),
        *_pointers("lse counter"),
        *_PROBLEM,
        *_ints("num_q_blocks num_tiles heads_together unused"),
    ],
    "DeltaParams": [
        *_operands("dout out dq"),
        *_pointers("lse dlse stats dq_acc turns"),
        *_PROBLEM,
        *_ints("stats_rows stats_step stats_delta num_q_blocks shared_keys padded_dim"),
    ],
    "BackwardParams": [
        *_operands("q k v dout dk dv"),
        *_pointers("stats dq_acc dk_acc dv_acc"),
        *_PROBLEM,
        *_ints("num_k_blocks splits heads_together stats_rows"),
    ],
    "BackwardDqParams": [
        *_operands("q k v dout dq"),
        *_pointers("stats"),
        *_PROBLEM,
        *_ints("num_q_blocks num_slices stats_rows unused"),
    ],
    "ConvertParams": [
        *_operands("dq dk dv"),
        *_pointers("dq_acc dk_acc dv_acc"),
        *_PROBLEM,
        *_ints("splits padded_dim padded_dim_v unused"),
    ],
    "TiledBackwardParams": [
        *_maps("q k v dout dq dk dv"),
        *_pointers("stats dq_acc dk_acc dv_acc turns"),
        *_PROBLEM,
        *_ints("num_q_blocks num_k_blocks key_blocks heads_together stats_rows deterministic"),
        *_ints("whole_blocks shared_first shared_keys shared_steps"),
    ],
    "TiledRowsParams": [
        *_maps("q k v dout dq dk dv"),
        *_pointers("stats"),
        *_PROBLEM,
        *_ints("num_q_blocks num_k_blocks heads_together stats_rows"),
    ],
    "MergeParams": [
        ("outs", c_void_p * MAX_STATES),
        ("lses", c_void_p * MAX_STATES),
        *_pointers("out lse"),
        ("num_elements", c_int64),
        *_ints("head_dim_v heads seqlen num_states"),
    ],
}
STRUCTS: dict[str, type[Structure]] = {
    name: type(name, (Structure,), {"_fields_": fields}) for name, fields in _STRUCTS.items()
}


@cache
def size_of(name: str) -> int:
    """Bytes of a struct as C++ has it: with tensor maps it is aligned as they are."""
    size, step = ctypes.sizeof(STRUCTS[name]), ALIGNMENT if _STRUCTS[name][0][1] is Map else 8
    return -(-size // step) * step


@cache
def _places(name: str) -> list[tuple[str, Any, int]]:
    """(operand or part of the workspace, what the struct has of it, at which byte)."""
    found: list[tuple[str, Any, int]] = []
    for field, kind in _STRUCTS[name]:
        offset = getattr(STRUCTS[name], field).offset
        if kind in (Map, Operand, c_void_p):
            found.append((field.removesuffix("_map"), kind, offset))
        elif field in ("outs", "lses"):
            found += [(f"{field}[{i}]", c_void_p, offset + 8 * i) for i in range(MAX_STATES)]
    return found


@cache
def _numbers(name: str) -> dict[str, tuple[bool, int]]:
    """Whether a number of the struct has 64 bits, not 32, and which word of that width it is."""
    sizes = {c_int32: 4, c_int64: 8}
    found = [(field, sizes[kind]) for field, kind in _STRUCTS[name] if kind in sizes]
    return {field: (size == 8, getattr(STRUCTS[name], field).offset // size) for field, size in found}


class Block:
    """The bytes of a struct in memory that stays where it is."""

    __slots__ = ("_counter", "_ints", "_owner", "_words", "address")

    def __init__(self, packed: bytes, counter: int | None) -> None:
        memory = bytearray(len(packed) + ALIGNMENT)
        self._owner = (ctypes.c_char * len(memory)).from_buffer(memory)
        begin = -ctypes.addressof(self._owner) % ALIGNMENT
        self.address = ctypes.addressof(self._owner) + begin
        view = memoryview(memory)[begin : begin + len(packed)]
        view[:] = packed
        self._words, self._ints = view.cast("q"), view.cast("i")
        self._counter = counter  # the word of the counter's address

    def count_with(self, counter: int) -> None:
        """The address of the counter that hands out work."""
        assert self._counter is not None
        self._words[self._counter] = counter

    def copy(self) -> Block:
        """The same bytes in memory of their own."""
        return Block(bytes(self), self._counter)

    def __bytes__(self) -> bytes:
        return bytes(self._words)


class Parameters(Block):
    """The struct of a launch; what changes from call to call is written in place.

    Pointers are given in the order of the op's operands, that of the workspace last.
    """

    __slots__ = ("_encoded", "_pointers", "_written")

    def __init__(self, problem: Problem | States, launch: Launch, workspace: Mapping[str, Part]) -> None:
        name = launch.variant.params
        counter = STRUCTS[name].counter.offset // 8 if launch.counted else None
        super().__init__(bytes(size_of(name)), counter)
        # why not through the ctypes structs: numbers are written five times as fast as their fields are set.
        words, ints, numbers = self._words, self._ints, _numbers(name)
        for field, value in launch.fields.items():
            wide, at = numbers[field]
            (words if wide else ints)[at] = value
        if isinstance(problem, Problem):
            self._write_problem(problem, STRUCTS[name].problem.offset)
        # Which pointer goes where: (its number, offset to add, word, word of `aligned` or -1, bits that misalign, map).
        self._pointers: list[tuple[int, int, int, int, int, TensorMap | None]] = []
        add, index, boxes = self._pointers.append, problem.op.index, launch.boxes
        for operand, kind, offset in _places(name):
            number, word = index.get(operand), offset // 8
            if number is None:
                if operand in workspace:
                    add((len(index), workspace[operand].begin, word, -1, 0, None))
            elif kind is c_void_p:
                add((number, 0, word, -1, 0, None))
            elif kind is Operand:
                spec = problem.spec(operand)
                words[word + 1], words[word + 2], words[word + 3] = spec.strides[:3]
                add((number, 0, word, 2 * word + 8, 15 if spec.has_aligned_rows else -1, None))
            elif operand in boxes:
                add((number, 0, offset, -1, 0, TensorMap.of(problem.spec(operand), boxes[operand])))
        self._written: tuple[int, ...] = (-1,) * (len(index) + 1)
        self._encoded: set[int] = set()

    def _write_problem(self, problem: Problem, offset: int) -> None:
        mask = problem.mask
        _PACKED_PROBLEM.pack_into(
            self._ints,
            offset,
            problem.batch,
            problem.seqlen_q,
            problem.seqlen_k,
            problem.heads_q,
            problem.heads_q // problem.heads_kv,
            problem.head_dim,
            problem.head_dim_v,
            mask.lo,
            mask.hi,
            *mask.key_range(0, problem.seqlen_q),
            *mask.row_range(0, problem.seqlen_k),
            0,
            *problem.options.scores,
        )

    def write(self, pointers: tuple[int, ...]) -> None:
        """The pointers of operands and workspace; 0 for what is not there."""
        before = self._written
        self._written = (-1,) * len(pointers)  # why: or what an error leaves half written would be taken for the old
        for number, begin, at, aligned, misaligning, tensor_map in self._pointers:
            pointer = pointers[number]
            if pointer == before[number]:
                continue
            if tensor_map is None:
                self._words[at] = pointer + begin
                if aligned >= 0:
                    self._ints[aligned] = not pointer & misaligning
            elif pointer:
                write = tensor_map.move if number in self._encoded else tensor_map.encode
                write(self.address + at, pointer)
                self._encoded.add(number)
        self._written = pointers
