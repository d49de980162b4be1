"""Checks of the arrays that mods read beside q, k and v."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ProblemError
from ..units import with_article
from .array_spec import ArraySpec
from .checks import check_output
from .dtypes import DTYPES, ITEMSIZE
from .operands import BIAS, CAPTURED, MASK_TILES, SEED, Operand, Sizes

AXES = ("batch", "heads_q", "seqlen_q", "seqlen_k")  # axes of scores
MASK_TILE = 64  # queries, and keys, of a mask tile
MAX_EXTENT = 2**31 - 1  # elements of an axis of a captured array
BIAS_DTYPES = ("bool", *DTYPES)
SEED_SHAPES = {"int64": ((1,), ()), "uint64": ((1,), ()), "int32": ((2,),), "uint32": ((2,),)}


def check_mod_array(
    operand: Operand,
    spec: ArraySpec,
    first: ArraySpec,
    lengths: Mapping[str, int],
    is_output: bool = False,
    owner: str = "q",
) -> ArraySpec:
    """Validates an array of a mod. lengths: of the problem. owner: the name of the call's first array."""
    name = operand.name
    if (spec.library, spec.device) != (first.library, first.device):
        raise ProblemError(
            f"{operand.called} is {with_article(spec)}, but {owner} is {with_article(first.library)} array on "
            f"{first.device}; give all of one framework and device"
        )
    {CAPTURED: _check_captured, BIAS: _check_bias, SEED: _check_seed, MASK_TILES: _check_mask_tiles}[operand.dtype](
        operand, spec, lengths
    )
    if is_output:
        check_output(name, spec)
    return spec


def check_block_mask(sizes: Sizes, mask_tile_axes: tuple[str, ...], lengths: Mapping[str, int]) -> None:
    """Validates the sizes of a block mask against the lengths of a call.

    mask_tile_axes: axes along which its mask tiles differ.
    """
    call_sizes = Sizes(*[lengths[axis] for axis in AXES])
    for name, axis, size, needed in zip(Sizes._fields, AXES, sizes, call_sizes, strict=True):
        is_broadcast = size == 1 and axis in ("batch", "heads_q")
        if size == needed or (is_broadcast and axis not in mask_tile_axes):
            continue
        if is_broadcast:
            raise ProblemError(
                f"block_mask was made for {name}=1, but its mask_mod depends on {'b' if axis == 'batch' else 'h'}, and "
                f"the call has {needed}; give create_block_mask {name}={needed}"
            )
        raise ProblemError(
            f"block_mask was made for {_sizes_text(sizes)}, but the call has {_sizes_text(call_sizes)}; make one by "
            "create_block_mask for these (batch and heads may be 1)"
        )


def _sizes_text(sizes: Sizes) -> str:
    return ", ".join(f"{name} {size}" for name, size in zip(Sizes._fields, sizes, strict=True))


def _check_captured(operand: Operand, spec: ArraySpec, lengths: Mapping[str, int]) -> None:
    if max(spec.shape, default=0) > MAX_EXTENT:
        raise ProblemError(f"{operand.called} has shape {spec.shape}; give axes of at most {MAX_EXTENT} elements")
    if spec.dtype not in ITEMSIZE:
        raise ProblemError(f"{operand.called} has dtype {spec.dtype}; give one of {', '.join(ITEMSIZE)}")


def _check_bias(operand: Operand, spec: ArraySpec, lengths: Mapping[str, int]) -> None:
    whole = tuple(lengths[axis] for axis in AXES)
    pairs = zip(reversed(spec.shape), reversed(whole), strict=False)
    if len(spec.shape) > len(whole) or any(length not in (1, most) for length, most in pairs):
        raise ProblemError(
            f"bias has shape {spec.shape}; give (batch, heads_q, seqlen_q, seqlen_k) = {whole}, of which any may be 1 "
            "and the first may be left out"
        )
    if spec.dtype not in BIAS_DTYPES:
        raise ProblemError(f"bias has dtype {spec.dtype}; give one of {', '.join(BIAS_DTYPES)}, where bool is a mask")


def _check_seed(operand: Operand, spec: ArraySpec, lengths: Mapping[str, int]) -> None:
    if spec.shape not in SEED_SHAPES.get(spec.dtype, ()):
        raise ProblemError(
            f"dropout_seed has shape {spec.shape} and dtype {spec.dtype}; give an int, one integer of int64 or uint64, "
            "or two of int32 or uint32"
        )


def _check_mask_tiles(operand: Operand, spec: ArraySpec, lengths: Mapping[str, int]) -> None:
    rows, columns = (-(-lengths[axis] // MASK_TILE) for axis in ("seqlen_q", "seqlen_k"))
    batch, heads = lengths["batch"], lengths["heads_q"]
    fits = len(spec.shape) == 4 and spec.shape[2:] == (rows, columns)
    if not fits or spec.shape[0] not in (1, batch) or spec.shape[1] not in (1, heads) or spec.dtype != "int8":
        raise ProblemError(
            f"block_mask has cells {spec.shape}, but the call has batch {batch}, {heads} query heads and {rows} x "
            f"{columns} cells of {MASK_TILE} x {MASK_TILE}; make one by create_block_mask for these lengths"
        )
