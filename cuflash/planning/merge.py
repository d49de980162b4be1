"""Planner of `merge_states`."""

from __future__ import annotations

from ..problem.dtypes import DTYPES
from ..problem.problem import Problem
from .device import Device
from .plan import Launch, Plan, blocks_of, make_plan, make_variant
from .variant import PORTABLE_THREADS

MAX_STATES = 248  # their pointers are kernel parameters, of which every architecture takes 4 KiB


def merge_plan(problem: Problem, device: Device) -> Plan:
    """Returns the plan of a merge, with a thread for each 16 bytes of out."""
    variant = make_variant(problem, device, "merge", "portable/merge.cu")
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    chunks = blocks_of(problem.head_dim_v * DTYPES[problem.dtype].itemsize, 16)
    fields = {
        "num_elements": rows * problem.head_dim_v,
        "head_dim_v": problem.head_dim_v,
        "heads": problem.heads_q,
        "seqlen": problem.seqlen_q,
        "num_states": len(problem.op.inputs) // 2,
    }
    return make_plan(problem, device, [Launch(variant, blocks_of(rows * chunks, PORTABLE_THREADS), fields)])
