"""The structs of `kernels_cu/common/params.cuh`, field by field in their order, and buffers that hold one.

Fields are filled by name. An `Operand`, a plain pointer or a tensor map (`x_map`) takes the operand or the part of the
workspace of its name. `problem` comes from the problem, `counter` and `arrivals` from `LoadedPlan`, all others from the
launch. A test compares the offset of every field with the CUDA struct's.
"""

from __future__ import annotations

import ctypes
import struct
from collections import deque
from collections.abc import Iterator, Mapping
from ctypes import Structure, c_char, c_float, c_int32, c_int64, c_uint64, c_void_p
from functools import cache, lru_cache
from typing import Any, ClassVar, NamedTuple

from ..planning.captured_gradients import MAX_AXES
from ..planning.merge import MAX_STATES
from ..planning.plan import Launch, Part
from ..problem.operands import Op
from ..problem.options import ScoreConstants
from ..problem.problem import Problem
from ..problem.seqlen_info import PADDED_SLOT
from .mod_params import mod_params
from .tensor_map import ALIGNMENT, MAP_BYTES, encoded, first_byte, mover, refusal

FREE_BYTES = 2**16  # of free buffers of one size: more than threads use at once
Fields = list[tuple[str, Any]]


def _ints(names: str) -> Fields:
    return [(name, c_int32) for name in names.split()]


def _pointers(names: str) -> Fields:
    return [(name, c_void_p) for name in names.split()]


class Map(Structure):
    """`TensorMap`: a TMA descriptor, encoded by the CUDA driver."""

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
    """The `ScoreConstants` of the options."""

    _fields_: ClassVar[Fields] = [(name, c_float) for name in ScoreConstants._fields]


class ProblemParams(Structure):
    """The problem, in the form that every attention kernel reads."""

    _fields_: ClassVar[Fields] = [
        *_ints("batch seqlen_q seqlen_k heads_q heads_per_kv head_dim head_dim_v mask_lo mask_hi"),
        *_ints("key_begin key_end row_begin row_end padding0"),
        ("score", ScoreParams),
        *_pointers("cu_seqlens_q cu_seqlens_k seqused_q seqused_k page_table cache_batch_idx"),
        ("page_table_stride", c_int64),
        *_ints("rows_q rows_k batch_k mask_first mask_last mask_from_end zero_unused_rows"),
        *_ints("padded_rows_q padded_rows_k padding1"),
    ]


def _derived(name: str, fields: Fields) -> Fields:
    """Returns the fields of a struct with a base: they begin behind the base's padding."""
    base = _STRUCTS[name]
    size, step = ctypes.sizeof(type(name, (Structure,), {"_fields_": base})), _alignment_of(base)
    padding: Fields = [("padding_of_base", c_char * (-size % step))] if size % step else []
    return [*base, *padding, *fields]


def _alignment_of(fields: Fields) -> int:
    """Returns the alignment of a struct in C++, which aligns tensor maps."""
    return ALIGNMENT if fields[0][1] is Map else 8


_PROBLEM: Fields = [("problem", ProblemParams)]
# The fields of ProblemParams before its pointers, and those after them.
_PACKED_PROBLEM = struct.Struct(f"=14i{len(ScoreConstants._fields)}f")
_PACKED_LENGTHS = struct.Struct("=q10i")
_LENGTHS_OFFSET = ProblemParams.page_table_stride.offset
_STRUCTS: dict[str, Fields] = {
    "ForwardParams": [*_operands("q k v out"), *_pointers("lse"), *_PROBLEM, *_ints("num_q_blocks num_slices")],
    "TiledForwardParams": [
        *_maps("q k v out"),
        *_pointers("lse counter"),
        *_PROBLEM,
        *_ints("num_q_blocks num_tiles heads_in_l2 unused"),
    ],
    "VarlenForwardParams": [
        *_maps("q k v out"),
        *_operands("k v"),
        *_pointers("lse counter"),
        *_PROBLEM,
        *_ints("heads_in_l2 in_pairs tail_parts page_box page_magic page_shift"),
    ],
    "DecodeParams": [
        *_maps("k v"),
        *_operands("q k v out"),
        *_pointers("lse counter arrivals partial_out partial_sums"),
        *_PROBLEM,
        *_ints("heads_kv page_box page_magic page_shift max_slots partial_rows split_tiles unused"),
    ],
    "SplitParams": [
        *_operands("q k v out"),
        *_pointers("lse arrivals partial_out partial_sums"),
        *_PROBLEM,
        *_ints("heads_kv head_parts queries splits"),
    ],
    "DeltaParams": [
        *_operands("dout out dq dk dv"),
        *_pointers("lse dlse stats dq_acc semaphores key_list key_shares q_blocks k_blocks"),
        *_PROBLEM,
        *_ints("stats_rows stats_step stats_delta num_q_blocks more_semaphores padded_dim heads_each num_slots"),
        *_ints("block_k max_key_blocks sorted_blocks takers shared_keys least_parts most_parts last_steps"),
        *_ints("sequences_together"),
    ],
    "BackwardParams": [
        *_operands("q k v dout dk dv"),
        *_pointers("stats dq_acc dk_acc dv_acc"),
        *_PROBLEM,
        *_ints("num_k_blocks splits heads_in_l2 stats_rows"),
    ],
    "BackwardDqParams": [
        *_operands("q k v dout dq"),
        *_pointers("stats"),
        *_PROBLEM,
        *_ints("num_q_blocks num_slices stats_rows unused"),
    ],
    "ModGradientParams": [
        *_operands("q k v dout"),
        *_pointers("stats tables result"),
        *_PROBLEM,
        *_ints("stats_rows stats_step stats_delta num_q_tiles num_k_tiles by_sequence by_head by_query by_key"),
        *_ints("num_steps parts adds_atomically table_places"),
        *[(name, c_int32 * MAX_AXES) for name in ("extents", "strides")],
        *_ints("result_kind"),
    ],
    "SinksGradientParams": [
        *_pointers("lse dlse stats tables"),
        *_PROBLEM,
        *_ints("stats_rows stats_step stats_delta num_slots slots_each unused"),
    ],
    "SumTablesParams": [
        *_pointers("tables total result"),
        *[(name, c_int64) for name in ("num_elements", "table_step")],
        ("strides", c_int64 * MAX_AXES),
        *[(name, c_int32 * MAX_AXES) for name in ("extents", "firsts", "counts")],
        *_ints("rank num_tables lanes adds result_kind unused"),
    ],
    "ConvertParams": [
        *_operands("dq dk dv"),
        *_pointers("dq_acc dk_acc dv_acc"),
        *_PROBLEM,
        *_ints("splits padded_dim padded_dim_v unused"),
    ],
    "TiledBackwardParams": [
        *_maps("q k v dout dq dk dv"),
        *_pointers("stats dq_acc dk_acc dv_acc semaphores key_list key_shares counter"),
        *_PROBLEM,
        *_ints("num_q_blocks num_k_blocks key_blocks heads_in_l2 stats_rows deterministic"),
        *_ints("whole_blocks shared_first shared_keys shared_steps parts_log2"),
        *_ints("list_lines list_stride_batch list_stride_head unused"),
        *_pointers("tile_counts key_steps key_order"),
    ],
    "TiledDqDkvParams": [
        *_maps("q k v dout dq dk dv"),
        *_pointers("stats q_blocks k_blocks counter acc semaphores"),
        *_PROBLEM,
        *_ints("num_q_blocks num_k_blocks heads_in_l2 stats_rows first_semaphore"),
    ],
    "BlockMaskParams": [
        *_pointers("mask_tiles"),
        *_PROBLEM,
        *_ints("num_mask_tiles heads mask_tiles_q mask_tiles_k of_call unused"),
    ],
    "TileCountsParams": [
        *_operands("dq"),
        *_pointers("mask_tiles tile_counts key_steps key_order step_counts semaphores"),
        *_PROBLEM,
        *[(name, c_int64) for name in ("mask_tiles_batch", "mask_tiles_head")],
        *_ints("mask_tiles_row num_q_blocks num_k_blocks block_q list_stride_batch list_stride_head"),
        *_ints("list_lines first_counter deterministic count_blocks"),
    ],
    "MergeParams": [
        ("outs", c_void_p * MAX_STATES),
        ("lses", c_void_p * MAX_STATES),
        *_pointers("out lse"),
        ("num_elements", c_int64),
        *_ints("head_dim_v heads seqlen num_states"),
    ],
    "AppendParams": [
        *_operands("k_cache v_cache k v q q_out"),
        *_pointers("seqused_k page_table cache_batch_idx cu_seqlens_k cu_seqlens_q rotary_cos rotary_sin"),
        *[(name, c_int64) for name in ("page_table_stride", "rotary_cos_stride", "rotary_sin_stride")],
        *_ints("batch rows_k rows_q heads_kv heads_q head_dim_v head_dim rotary_dim pieces pieces_v"),
        *_ints("num_pages page_size max_pages positions wide_table interleaved q_same_position num_key_blocks"),
    ],
}
_STRUCTS |= {
    "DeltaArrayParams": _derived("DeltaParams", _pointers("delta")),
    "TiledForwardStateParams": _derived("TiledForwardParams", [*_operands("out"), ("unused_of_state", c_int64 * 3)]),
    "VarlenForwardStateParams": _derived("VarlenForwardParams", [*_operands("out"), ("unused_of_state", c_int64 * 3)]),
    "TiledBackwardSumsParams": _derived("TiledBackwardParams", [*_operands("dk dv"), ("unused_of_sums", c_int64 * 6)]),
}
STRUCTS: dict[str, type[Structure]] = {
    name: type(name, (Structure,), {"_fields_": fields}) for name, fields in _STRUCTS.items()
}


@cache
def size_of(name: str, mod_words: int = 0) -> int:
    """Returns the bytes of a struct in C++, which aligns one with tensor maps as it aligns them.

    mod_words: words of 8 bytes behind the struct, for mods (runtime/mod_params.py).
    """
    size, step = ctypes.sizeof(STRUCTS[name]), _alignment_of(_STRUCTS[name])
    whole = -(-size // step) * step + 8 * mod_words
    return -(-whole // step) * step


class WordOffsets(NamedTuple):
    """Word offsets (8 bytes) in a struct that depend on pointers, with the index of the op's operand for each."""

    plain: list[tuple[int, int]]  # index of the operand, word
    operands: list[tuple[int, int]]
    maps: list[tuple[int, slice, str]]  # index of the operand, bytes, and the name
    workspace: list[tuple[str, int]]  # name of the workspace's part, word


@lru_cache(maxsize=64)
def _word_offsets(name: str, op: Op, aliases: tuple[tuple[str, str], ...] = ()) -> WordOffsets:
    word_offsets, names = WordOffsets([], [], [], []), dict(aliases)
    for field, kind, offset in _members(STRUCTS[name]):
        word, operand = offset // 8, names.get(field, field.removesuffix("_map"))
        number = op.index.get(operand)
        if field in ("outs", "lses"):
            numbers = (op.index.get(f"{field}[{i}]") for i in range(MAX_STATES))
            word_offsets.plain.extend((n, word + i) for i, n in enumerate(numbers) if n is not None)
        elif number is None and kind is c_void_p:
            word_offsets.workspace.append((operand, word))
        elif number is not None and kind is c_void_p:
            word_offsets.plain.append((number, word))
        elif number is not None and kind is Operand:
            word_offsets.operands.append((number, word))
        elif number is not None and kind is Map:
            word_offsets.maps.append((number, slice(offset, offset + MAP_BYTES), operand))
    return word_offsets


def _members(struct: type[Structure], begin: int = 0) -> Iterator[tuple[str, Any, int]]:
    """Yields (field, kind, offset in bytes) of a struct's fields, including fields of a `ProblemParams` in it."""
    for field, kind in struct._fields_:  # type: ignore[misc]
        offset = begin + getattr(struct, field).offset
        yield field, kind, offset
        if kind is ProblemParams:
            yield from _members(kind, offset)


@cache
def _numbers(name: str) -> dict[str, tuple[bool, int]]:
    """Returns (True for 64 bits, False for 32; offset in words of that width) by name of a number; arrays as `x[i]`."""
    sizes: dict[Any, int] = {c_int32: 4, c_int64: 8}
    words = {}
    for field, kind in _STRUCTS[name]:
        begin = getattr(STRUCTS[name], field).offset
        if (size := sizes.get(kind)) is not None:
            words[field] = size == 8, begin // size
        elif (size := sizes.get(getattr(kind, "_type_", None))) is not None:  # an array of numbers
            words |= {f"{field}[{i}]": (size == 8, begin // size + i) for i in range(kind._length_)}
    return words


class ParamBuffer:
    """Memory for a struct, at a fixed address.

    `arguments` holds the address for CuPy's launches, `pointers` the `void**` for `cuLaunchKernel`. A buffer that is
    not cached goes to `free_list` once its launches have returned, as the driver has then copied it.
    """

    __slots__ = ("_owner", "_pointers", "address", "arguments", "free_list", "ints", "memory", "pointers", "words")
    _free: ClassVar[dict[int, deque[ParamBuffer]]] = {}  # free lists by bytes of a buffer

    @classmethod
    def free_list_of(cls, size: int) -> deque[ParamBuffer]:
        """Returns the free list of buffers of so many bytes, which drops the oldest past `FREE_BYTES`."""
        return cls._free.setdefault(size, deque(maxlen=FREE_BYTES // size))

    def __init__(self, size: int) -> None:
        from cupy.cuda.function import CPointer

        memory = bytearray(size + ALIGNMENT)
        self._owner = (c_char * len(memory)).from_buffer(memory)
        begin = -ctypes.addressof(self._owner) % ALIGNMENT
        self.address = ctypes.addressof(self._owner) + begin
        self.memory = memoryview(memory)[begin : begin + size]
        self.words, self.ints = self.memory.cast("q"), self.memory.cast("i")
        self.arguments: tuple[Any, ...] = (CPointer(self.address),)
        self.free_list = self.free_list_of(size)
        self._pointers = c_void_p(self.address)
        self.pointers = ctypes.addressof(self._pointers)


class ParamTemplate:
    """The struct of a launch without its pointers."""

    __slots__ = ("_free_list", "_maps", "_move", "_operands", "_packed", "_plain", "_workspace", "name", "size")

    def __init__(self, problem: Problem, launch: Launch, workspace: Mapping[str, Part]) -> None:
        name = self.name = launch.variant.params
        mod_code = launch.variant.mod_code
        self.size = size_of(name, 0 if mod_code is None else mod_code.words)
        self._free_list = ParamBuffer.free_list_of(self.size)
        packed = self._packed = bytearray(self.size)
        # Written through a memoryview, five times as fast as setting fields of the ctypes struct.
        words, ints, numbers = memoryview(packed).cast("q"), memoryview(packed).cast("i"), _numbers(name)
        for field, value in launch.fields.items():
            wide, position = numbers[field]
            (words if wide else ints)[position] = value
        if _PROBLEM[0] in _STRUCTS[name]:
            _write_problem(problem, packed, STRUCTS[name].problem.offset)
        self._plain, operands, maps, parts = _word_offsets(name, problem.op, tuple(launch.aliases.items()))
        if mod_code is not None:
            more = mod_params(problem, packed, size_of(name) // 8)
            self._plain, parts = self._plain + more.plain, parts + more.workspace
        # Tuples, as a process keeps thousands and Python's collector does not walk tuples of numbers.
        self._workspace = tuple([(word, workspace[part].begin) for part, word in parts if part in workspace])
        specs, tma_boxes = problem.specs_4d, launch.tma_boxes
        operands = [(number, word) for number, word in operands if specs[number] is not None]
        for number, word in operands:
            words[word + 1], words[word + 2], words[word + 3] = specs[number].strides[:3]
        # Index, word, and the address bits that must be 0 for 16-byte accesses; -1 where no row is aligned.
        self._operands = tuple([(n, word, 15 if specs[n].has_aligned_rows else -1) for n, word in operands])
        self._move: Any = mover() if maps else None
        map_offsets = []  # index, byte offset in the struct, bytes from the operand's first row to the map's
        for number, span, operand in maps:
            spec, box = specs[number], tma_boxes[operand]
            packed[span] = encoded(spec, box)
            map_offsets.append((number, span.start, first_byte(spec, box)))
        self._maps = tuple(map_offsets)

    def pack(self, pointers: tuple[int, ...]) -> ParamBuffer:
        """Returns the struct with the pointers of the op's operands (0 for an absent one) and of the workspace."""
        try:
            buffer = self._free_list.pop()
        except IndexError:
            buffer = ParamBuffer(self.size)
        words = buffer.words
        buffer.memory[:] = self._packed
        for number, word in self._plain:
            words[word] = pointers[number]
        for word, begin in self._workspace:
            words[word] = pointers[-1] + begin
        for number, word, alignment_mask in self._operands:
            words[word] = pointer = pointers[number]
            buffer.ints[2 * word + 8] = not pointer & alignment_mask
        for number, offset, begin in self._maps:
            pointer = pointers[number]
            if pointer and (result := self._move(buffer.address + offset, pointer + begin)):
                raise refusal(result, f"the address {pointer:#x} in a TMA descriptor")
        return buffer


def _write_problem(problem: Problem, packed: bytearray, offset: int) -> None:
    mask = problem.mask
    _PACKED_PROBLEM.pack_into(
        packed,
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
    if (varlen := problem.seqlen_info) is not None:
        table = problem.specs[problem.op.index["page_table"]] if "page_table" in problem.op.index else None
        stride = 0 if table is None else table.strides[0]
        # Cut to int32: forward does not use it, and backward has refused larger ones.
        padded = (min(varlen.num_slots(side, problem.batch, PADDED_SLOT) * PADDED_SLOT, 2**31 - 1) for side in "qk")
        values = varlen.rows_q, varlen.rows_k, varlen.batch_k, *varlen.bounds, varlen.zero_unused_rows, *padded, 0
        _PACKED_LENGTHS.pack_into(packed, offset + _LENGTHS_OFFSET, stride, *values)
