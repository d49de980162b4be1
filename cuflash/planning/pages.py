"""How keys in pages are found and copied."""

from __future__ import annotations

import math

from ..problem.problem import Problem

PAGE_STEP = 8  # keys: the rows of shared memory that are swizzled together


def page_cut(problem: Problem, block_k: int) -> dict[str, int]:
    """Of a page of d keys, key // d == key * magic >> shift for keys below 2^31.

    A copy brings whole swizzled groups of rows; of pages that do not consist of them, threads copy each key by itself.
    """
    if not problem.has("page_table"):
        return {"page_box": 0, "page_magic": 0, "page_shift": 0}
    assert problem.seqlen_info is not None
    size = problem.seqlen_info.rows_k
    shift = 31 + (size - 1).bit_length()
    magic = -(-(1 << shift) // size)
    box = math.gcd(size, block_k)
    box = box if box % PAGE_STEP == 0 else 0
    return {"page_box": box, "page_magic": magic - (magic >> 31 << 32), "page_shift": shift}
