"""Planner of `append_kv`."""

from __future__ import annotations

from typing import Any

from ..problem.dtypes import DTYPES
from ..problem.problem import Problem
from .device import Device
from .plan import Launch, Plan, blocks_of, make_plan, make_variant
from .variant import PORTABLE_THREADS

MAX_INT = 2**31 - 1


def append_plan(problem: Problem, device: Device) -> Plan:
    """Returns the plan of `append_kv`: thread blocks for new keys and values, then thread blocks for queries.

    Each thread handles one piece of a row: 16 bytes of each half of rotated pairs, or 16 bytes to copy.
    """
    variant = make_variant(problem, device, "append_kv", "portable/append_kv.cu", is_varlen=False)
    specs: dict[str, Any] = dict(zip(problem.op.names, problem.specs_4d, strict=True))
    num_pages, page_size = specs["k_cache"].shape[:2]
    table, cos, sin = specs["page_table"], specs["rotary_cos"], specs["rotary_sin"]
    positions, pairs = (0, 0) if cos is None else cos.shape
    chunk = 16 // DTYPES[problem.dtype].itemsize
    pieces = blocks_of(pairs, chunk) + blocks_of(problem.head_dim - 2 * pairs, chunk)
    pieces_v = blocks_of(problem.head_dim_v, chunk)
    assert problem.seqlen_info is not None
    threads_k = problem.seqlen_info.batch_k * problem.seqlen_info.rows_k * problem.heads_kv * (pieces + pieces_v)
    threads_q = problem.seqlen_info.batch_q * problem.seqlen_info.rows_q * problem.heads_q * pieces
    num_key_blocks = blocks_of(threads_k, PORTABLE_THREADS)
    fields = {
        "page_table_stride": 0 if table is None else table.strides[0],
        "rotary_cos_stride": 0 if cos is None else cos.strides[0],
        "rotary_sin_stride": 0 if sin is None else sin.strides[0],
        "batch": problem.batch,
        "rows_k": problem.seqlen_info.rows_k,
        "rows_q": problem.seqlen_info.rows_q,
        "heads_kv": problem.heads_kv,
        "heads_q": problem.heads_q,
        "head_dim_v": problem.head_dim_v,
        "head_dim": problem.head_dim,
        "rotary_dim": 2 * pairs,
        "pieces": pieces,
        "pieces_v": pieces_v,
        "num_pages": min(num_pages, MAX_INT),  # page numbers have 32 bits
        "page_size": page_size,
        "max_pages": 1 if table is None else table.shape[1],
        "positions": min(positions, MAX_INT),
        "wide_table": int(cos is not None and cos.dtype == "float32"),
        "interleaved": int(problem.options.rotary_interleaved),
        "q_same_position": int(problem.options.q_same_position),
        "num_key_blocks": num_key_blocks,
    }
    blocks = num_key_blocks + blocks_of(threads_q, PORTABLE_THREADS)
    return make_plan(problem, device, [Launch(variant, blocks, fields)])
