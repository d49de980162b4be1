"""The limits of Hopper's own kernels (TMA and wgmma): why they do not take a problem."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

from ..errors import UnsupportedError
from ..problem.dtypes import DTYPES
from ..problem.problem import Problem
from .device import Device

HOPPER = (9, 0)
# The operands of each op that the copy engine (TMA) moves.
MOVED = {
    "forward": ("q", "k", "v", "out"),
    "lse": ("q", "k"),
    "backward": ("q", "k", "v", "dout", "dq", "dk", "dv"),
}


def reason_against(problem: Problem, device: Device, misaligned: Collection[str]) -> str | None:
    """Returns why Hopper's kernels cannot take this problem, or None. Whether head dims have a tile is not looked at.

    misaligned: the operands that are taken as not beginning at a multiple of 16 bytes. With split_size it raises
    UnsupportedError where only the layout forbids it.
    """
    if device.capability != HOPPER:
        return f"{device.name} is {device.arch}"
    if DTYPES[problem.dtype].itemsize != 2:
        return f"it takes float16 and bfloat16, not {problem.dtype}"
    if problem.options.algorithm != "flash2":
        return f"it computes flash2, not {problem.options.algorithm}"
    if problem.op.mod_spec is not None and problem.options.split_size is not None:
        # why: the bits would differ from those of varlen calls.
        return "with split_size it takes no mods"
    if problem.op.mod_spec is not None and problem.op.mod_spec.divides_float64:
        # why: the code of one is so long that each tile compiled for half a minute, to spill in the end.
        return "its registers do not hold quotients and remainders of float64"
    begin, end = problem.mask.key_range(0, problem.seqlen_q)
    if (varlen := problem.seqlen_info) is not None:
        if not all((varlen.batch_q, varlen.rows_q, varlen.batch_k, varlen.rows_k)):
            return "there is no query, or no key"
    elif begin >= end:
        return "no query sees any key"
    if problem.options.split_size is None:
        return _reason_of_layout(problem, misaligned)
    # why: whether the kernels take a problem must not depend on its strides, because others give other bits.
    if problem.head_dim % 8 or problem.head_dim_v % 8:
        return "with split_size it takes head dims that are multiples of 8"
    if (reason := _reason_of_layout(problem, misaligned)) is not None:
        raise UnsupportedError(
            f"on {device.name} split_size asks for the bits of kernels that cannot take this call: {reason}. Copy that "
            "array, so that it is contiguous, or leave split_size out."
        )
    return None


def _reason_of_layout(problem: Problem, misaligned: Collection[str]) -> str | None:
    """Returns why the copy engine cannot move some operand."""
    specs, index, inputs = problem.specs_4d, problem.op.index, len(problem.op.inputs)
    for name in MOVED[problem.op.name]:
        if name in misaligned:
            return f"{name} does not begin at a multiple of 16 bytes"
        spec = specs[index[name]]
        if not allows_tma(spec.shape, spec.strides):
            return f"the strides of {name} are not positive multiples of 16 bytes, which the copy engine needs"
        if index[name] >= inputs and spec.shape[3] * spec.itemsize % 16:  # why: L47
            return f"rows of {name} end within 16 bytes, which the copy engine writes together"
    return None


@lru_cache(maxsize=256)
def allows_tma(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int = 2) -> bool:
    """Returns whether TMA can address a 4-D operand with these strides (in elements, the last one 1)."""
    for axis in range(3):
        step = itemsize * strides[axis]
        if shape[axis] > 1 and (step % 16 or not 0 < step < 2**40):
            return False
    return True
