"""Validates the lengths and arrays of `create_block_mask`. Only arrays of lengths have any of these lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import ProblemError
from .array_spec import ArraySpec
from .checks import MAX_SEQLEN, check_operand
from .mod_arrays import MASK_TILE, check_mod_array
from .operands import ANYTHING, INTEGERS, Op, Sizes
from .options import check_integer
from .seqlen_info import SeqlenInfo

ValidatedMask = tuple[Sizes, SeqlenInfo | None, tuple[ArraySpec | None, ...]]


def check_sizes(batch: object, heads: object, seqlen_q: object, seqlen_k: object) -> Sizes:
    """Returns the lengths of a block mask as integers, if they are in range."""
    sizes = Sizes(*map(check_integer, Sizes._fields, (batch, heads, seqlen_q, seqlen_k)))
    for name, size in zip(Sizes._fields, sizes, strict=True):
        least = 1 if name == "heads" else 0
        if not least <= size <= MAX_SEQLEN:
            raise ProblemError(f"{name}={size}; give an integer from {least} to {MAX_SEQLEN}")
    return sizes


def validated(op: Op, specs: Sequence[ArraySpec | None]) -> ValidatedMask:
    """Validates a call; returns its lengths, the layout of variable-length sequences, and the specs of all operands.

    Packed sequences may lie in any number of rows: only the lengths of one are bounded.
    """
    sizes: Any = op.sizes
    like: Any = specs[0]
    checked, names = [*specs, *[None] * (len(op.operands) - len(specs))], set()
    for number, operand in enumerate(op.inputs):
        if (spec := checked[number]) is None or operand.dtype == ANYTHING:
            continue
        if operand.dtype == INTEGERS:
            names.add(operand.name)
            shape = (sizes.batch + (operand.axes == ("bounds",)),)
            check_operand(operand.name, spec, like, shape, (INTEGERS,), operand.axes, "like")
        else:
            check_mod_array(operand, spec, like, {}, owner="like")
    mask_tiles = sizes.batch, sizes.heads, -(-sizes.seqlen_q // MASK_TILE), -(-sizes.seqlen_k // MASK_TILE)
    checked[-1] = ArraySpec.contiguous(mask_tiles, "int8", like.device, like.library)
    if not names:
        return sizes, None, tuple(checked)
    is_packed_q, is_packed_k = "cu_seqlens_q" in names, "cu_seqlens_k" in names
    batch_q, rows_q = (1, MAX_SEQLEN) if is_packed_q else (sizes.batch, sizes.seqlen_q)
    batch_k, rows_k = (1, MAX_SEQLEN) if is_packed_k else (sizes.batch, sizes.seqlen_k)
    return sizes, SeqlenInfo(batch_q, rows_q, batch_k, rows_k, is_packed_q, is_packed_k), tuple(checked)
