"""`create_block_mask`: which lengths it may be of. No array has them but those that tell the lengths of sequences."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ProblemError
from .array_spec import ArraySpec
from .checks import MAX_SEQLEN, check_operand
from .mod_arrays import MASK_TILE, check_mod_array
from .operands import INTEGERS, Op, Sizes
from .options import check_integer
from .seqlen_info import SeqlenInfo

ValidatedMask = tuple[Sizes, SeqlenInfo | None, tuple[ArraySpec | None, ...]]


def check_sizes(batch: object, heads: object, seqlen_q: object, seqlen_k: object) -> Sizes:
    """The lengths of a block mask, if it may have them."""
    sizes = Sizes(*map(check_integer, Sizes._fields, (batch, heads, seqlen_q, seqlen_k)))
    for name, size in zip(Sizes._fields, sizes, strict=True):
        least = 1 if name == "heads" else 0
        if not least <= size <= MAX_SEQLEN:
            raise ProblemError(f"{name}={size}; give an integer from {least} to {MAX_SEQLEN}")
    return sizes


def validated(op: Op, specs: Sequence[ArraySpec | None]) -> ValidatedMask:
    """The lengths of a block mask, where its sequences lie if arrays tell it, and the specs of all operands.

    Packed sequences may lie in any number of rows, so their lengths alone are bounded.
    """
    sizes, like = op.sizes, specs[0]
    assert sizes is not None
    assert like is not None
    checked, names = [*specs, *[None] * (len(op.operands) - len(specs))], set()
    for number, operand in enumerate(op.inputs[1:], 1):
        if (spec := checked[number]) is None:
            continue
        if operand.dtype == INTEGERS:
            names.add(operand.name)
            shape = (sizes.batch + (operand.axes == ("bounds",)),)
            check_operand(operand.name, spec, like, shape, (INTEGERS,), "like")
        else:
            check_mod_array(operand, spec, like, {}, owner="like")
    mask_tiles = *sizes[:2], *[-(-length // MASK_TILE) for length in sizes[2:]]
    checked[-1] = ArraySpec.contiguous(mask_tiles, "int8", like.device, like.library)
    if not names:
        return sizes, None, tuple(checked)
    is_packed = ["cu_seqlens_q" in names, "cu_seqlens_k" in names]
    rows = [MAX_SEQLEN if packed else length for packed, length in zip(is_packed, sizes[2:], strict=True)]
    batches = [1 if packed else sizes.batch for packed in is_packed]
    return sizes, SeqlenInfo(batches[0], rows[0], batches[1], rows[1], *is_packed), tuple(checked)
