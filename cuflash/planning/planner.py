"""Choice of the planner for a problem. All functions are pure: a plan needs no GPU."""

from __future__ import annotations

from collections.abc import Collection

from ..errors import UnsupportedError
from ..problem.dtypes import GPU_DTYPES
from ..problem.problem import Problem
from .append import append_plan
from .backward import backward_plan
from .block_mask import block_mask_plan
from .captured_gradients import with_captured_gradients
from .device import Device
from .forward import forward_plan
from .margin import with_margin
from .merge import MAX_STATES, merge_plan
from .plan import Plan
from .variant import Variant


def plan(
    problem: Problem,
    device: Device | None,
    misaligned: Collection[str] = (),
    avoided: Collection[Variant] = (),
) -> Plan:
    """Returns the plan of a call on a device; None stands for NumPy on the CPU.

    misaligned: operands assumed not to begin at a multiple of 16 bytes. avoided: kernels that must not run, as
    they spill registers or find no room for a cluster.
    """
    if device is None:
        return Plan(problem, "cpu", (), host_kernel=f"reference_{problem.op.name}_{problem.options.algorithm}")
    if problem.op.mod_spec is not None and misaligned:
        problem = problem._replace(misaligned=tuple(misaligned))
    if problem.op.name == "block_mask":
        return block_mask_plan(problem, device)
    if problem.seqlen_info is not None and problem.options.algorithm == "standard":
        raise UnsupportedError(
            "algorithm='standard' takes no variable-length sequences on a GPU; take another one, or NumPy arrays"
        )
    if problem.dtype not in GPU_DTYPES:
        raise UnsupportedError(
            f"{problem.dtype} has no GPU kernel; cast to float32, bfloat16 or float16, or pass NumPy arrays"
        )
    if problem.op.name == "merge":
        if (count := len(problem.op.inputs) // 2) > MAX_STATES:
            raise UnsupportedError(
                f"{count} states; one call merges at most {MAX_STATES} on a GPU. Merge groups of them, "
                "then the results (in float32, to round only once)."
            )
        return merge_plan(problem, device)
    if problem.op.name == "append_kv":
        return append_plan(problem, device)
    problem, device = with_margin(problem, device, misaligned)
    if problem.op.name == "backward":
        return with_captured_gradients(backward_plan(problem, device, misaligned, avoided), problem, device)
    if problem.options.algorithm == "standard":
        scores = problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k
        return Plan(problem, device.name, (), workspace_bytes=2 * 4 * scores, host_kernel="cupy_standard")
    return forward_plan(problem, device, misaligned, avoided)
