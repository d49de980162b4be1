"""Calls that leave SMs to other kernels: `sm_margin`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ..errors import ProblemError
from ..problem.problem import Problem
from ..problem.seqlen_info import SeqlenInfo
from .block_mask import is_block_sparse
from .device import Device
from .hopper import reason_against


def with_margin(problem: Problem, device: Device, misaligned: Collection[str]) -> tuple[Problem, Device]:
    """Returns the problem and the device without the SMs that the call leaves to other kernels.

    Dense backward on Hopper becomes a call on sequences of equal lengths. Its kernels take key blocks one by one from a
    list, in one thread block for each SM. The dense kernels have a thread block for each key block, and these fill
    every SM.
    """
    margin = problem.options.sm_margin
    if not margin:
        return problem, device
    if margin >= device.num_sms:
        raise ProblemError(
            f"sm_margin={margin}, but {device.name} has {device.num_sms} SMs; leave at least one of them to the call"
        )
    device = replace(device, num_sms=device.num_sms - margin)
    is_dense_backward = problem.op.name == "backward" and problem.seqlen_info is None
    # Block-sparse kernels take key blocks one by one already.
    if is_dense_backward and not is_block_sparse(problem) and reason_against(problem, device, misaligned) is None:
        problem = problem._replace(seqlen_info=_equal_lengths(problem))
    return problem, device


def _equal_lengths(problem: Problem) -> SeqlenInfo:
    """Returns the info of a dense batch, with its mask."""
    mask = problem.mask
    axes = problem.batch, problem.seqlen_q, problem.batch, problem.seqlen_k
    left, right = None if mask.lo == -mask.seqlen_q else -mask.lo, None if mask.hi == mask.seqlen_k else mask.hi
    return SeqlenInfo(*axes, left=left, right=right, offset=None if left is right is None else 0)
