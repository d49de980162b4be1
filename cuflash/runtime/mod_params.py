"""Parameters of mods, behind a kernel's struct: `ModParams` in kernels_cu/common/params.cuh."""

from __future__ import annotations

import struct
from typing import NamedTuple

from ..planning.block_mask import mask_tile_strides
from ..planning.mod_code import offset_words, words_of
from ..problem.dropout import share_kept
from ..problem.problem import Problem
from .device_memory import zero

# Strides of the mask tiles by batch and by head, mask tiles of a row, 1 if sinks are float32, weights kept of 2^16, and
# their factor.
_NUMBERS = struct.Struct("=2q3if8x")
_OFFSETS = struct.Struct("=4i")  # of query, key, head and sequence


class ModWordOffsets(NamedTuple):
    """Word offsets of operand pointers (by index) and workspace pointers (by name)."""

    plain: list[tuple[int, int]]
    workspace: list[tuple[str, int]]


def mod_params(problem: Problem, packed: bytearray, first_word: int) -> ModWordOffsets:
    """Writes all but pointers, from a word of 8 bytes on, and returns the words of the pointers."""
    mod_spec, index, word = problem.op.mod_spec, problem.op.index, first_word
    assert mod_spec is not None
    offsets = ModWordOffsets([], [])
    words, ints = memoryview(packed).cast("q"), memoryview(packed).cast("i")
    for each in mod_spec.arrays:
        spec = problem.specs[index[each.name]]
        assert spec is not None
        if 0 in spec.shape:  # a load from it gives zero, but needs a valid address
            words[word] = zero(problem.ordinal or 0)
        else:
            offsets.plain.append((index[each.name], word))
            for axis, stride in enumerate(spec.strides, word + 1):
                words[axis] = stride
        begin = 2 * (word + 1 + max(each.rank, 1))
        for axis, extent in enumerate(spec.shape or (1,)):
            ints[begin + axis] = 1 if 0 in spec.shape else extent
        word += words_of(each.rank)
    if mod_spec.offsets:
        _OFFSETS.pack_into(packed, 8 * word, *problem.options.index_offsets)
        word += offset_words(mod_spec)
    sinks = problem.specs[index["sinks"]] if mod_spec.has_sinks else None
    if sinks is not None:
        offsets.plain.append((index["sinks"], word))
    if mod_spec.has_block_mask:
        offsets.plain.append((index["mask_tiles"], word + 1))
    else:
        # Mask tiles that the call computes: of all batches and heads, or of those on which the mask depends.
        offsets.workspace.append(("mask_tiles", word + 1))
    of_batch, of_head, columns = mask_tile_strides(problem)
    if mod_spec.drops:
        offsets.plain.append((index["dropout_seed"], word + 2))
    share = share_kept(problem.options.dropout_p)
    wide = int(sinks is not None and sinks.dtype == "float32")
    _NUMBERS.pack_into(packed, 8 * (word + 3), of_batch, of_head, columns, wide, share, 65536 / max(share, 1))
    return offsets
