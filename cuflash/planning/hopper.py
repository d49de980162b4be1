"""Limits of the sm90 kernels (TMA and wgmma): the reasons why they cannot run a problem."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

from ..errors import UnsupportedError
from ..problem.dtypes import DTYPES
from ..problem.problem import Problem
from .device import Device

HOPPER = (9, 0)
# The operands of each op that TMA, the copy engine, copies.
MOVED = {
    "forward": ("q", "k", "v", "out"),
    "lse": ("q", "k"),
    "backward": ("q", "k", "v", "dout", "dq", "dk", "dv"),
}


def reason_against(problem: Problem, device: Device, misaligned: Collection[str]) -> str | None:
    """Returns the reason why sm90 kernels cannot run a problem, or None. It does not check that head dims have a tile.

    misaligned: operands assumed not to begin at a multiple of 16 bytes. Raises UnsupportedError if split_size is given
    and the layout is the only obstacle.
    """
    if device.capability != HOPPER:
        return f"{device.name} is {device.arch}"
    if DTYPES[problem.dtype].itemsize != 2:
        return f"it takes float16 and bfloat16, not {problem.dtype}"
    if problem.options.algorithm != "flash2":
        return f"it computes flash2, not {problem.options.algorithm}"
    if problem.op.mod_spec is not None and problem.options.split_size is not None:
        # With mods, bits would differ from varlen calls.
        return "with split_size it takes no mods"
    if problem.op.mod_spec is not None and problem.op.mod_spec.divides_float64:
        # The code of one division is so long that each tile compiled for half a minute and then spilled.
        return "its registers do not hold quotients and remainders of float64"
    begin, end = problem.mask.key_range(0, problem.seqlen_q)
    if (varlen := problem.seqlen_info) is not None:
        if not all((varlen.batch_q, varlen.rows_q, varlen.batch_k, varlen.rows_k)):
            return "there is no query, or no key"
    elif begin >= end:
        return "no query sees any key"
    if problem.options.split_size is None:
        return _reason_of_layout(problem, misaligned)
    # With split_size the choice of kernels must not depend on strides, because other kernels give other bits.
    if problem.head_dim % 8 or problem.head_dim_v % 8:
        return "with split_size it takes head dims that are multiples of 8"
    if (reason := _reason_of_layout(problem, misaligned)) is not None:
        raise UnsupportedError(
            f"on {device.name} split_size asks for the bits of kernels that cannot take this call: {reason}. Copy that "
            "array, so that it is contiguous, or leave split_size out."
        )
    return None


def _reason_of_layout(problem: Problem, misaligned: Collection[str]) -> str | None:
    """Returns the reason why TMA cannot copy some operand, or None."""
    specs, index, inputs = problem.specs_4d, problem.op.index, len(problem.op.inputs)
    for name in MOVED[problem.op.name]:
        if name in misaligned:
            return f"{name} does not begin at a multiple of 16 bytes"
        spec = specs[index[name]]
        if not allows_tma(spec.shape, spec.strides):
            return f"the strides of {name} are not positive multiples of 16 bytes, which the copy engine needs"
        # TMA stores would write past rows that end within 16 bytes (L47).
        if index[name] >= inputs and spec.shape[3] * spec.itemsize % 16:
            return f"rows of {name} end within 16 bytes, which the copy engine writes together"
    return None


@lru_cache(maxsize=256)
def allows_tma(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int = 2) -> bool:
    """Returns True if TMA can address a 4-D operand with these strides (in elements, the last one 1)."""
    for axis in range(3):
        step = itemsize * strides[axis]
        if shape[axis] > 1 and (step % 16 or not 0 < step < 2**40):
            return False
    return True
