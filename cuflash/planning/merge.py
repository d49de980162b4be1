"""The plan of `merge_states`."""

from __future__ import annotations

from ..problem.dtypes import DTYPES
from ..problem.problem import States
from .device import Device
from .plan import Launch, Plan, blocks_of, compile_arch, make_plan
from .variant import PORTABLE_THREADS, Variant

MAX_STATES = 248  # their pointers are kernel parameters, and every architecture takes 4 KiB of these


def merge_plan(states: States, device: Device) -> Plan:
    """The plan of a merge: it has a thread for each 16 bytes of out."""
    arch = compile_arch("portable", device)
    variant = Variant("merge", "portable/merge.cu", arch, states.dtype, states.dtype)
    rows = states.batch * states.seqlen_q * states.heads_q
    chunks = blocks_of(states.head_dim_v * DTYPES[states.dtype].itemsize, 16)
    fields = {
        "num_elements": states.num_elements,
        "head_dim_v": states.head_dim_v,
        "heads": states.heads_q,
        "seqlen": states.seqlen_q,
        "num_states": len(states.op.inputs) // 2,
    }
    return make_plan(states, device, [Launch(variant, blocks_of(rows * chunks, PORTABLE_THREADS), fields)])
