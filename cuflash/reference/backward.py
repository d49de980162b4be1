"""The gradients, with p recomputed from lse tile by tile (FlashAttention-2, arXiv 2307.08691, algorithm 2).

p  = exp(s - lse)                       dv = pᵀ dout
dp = dout vᵀ                            delta = rowsum(dout ∘ out) - dlse
ds = p ∘ (dp - delta)                   with a softcap also ∘ (1 - tanh²)
dq = softmax_scale ds k                 dk = softmax_scale dsᵀ q

rowsum(dout ∘ out) = rowsum(p ∘ dp), so the row of dp need not be known whole. d lse / d s = p, so the gradient of lse
joins delta. The order of the sums is fixed: the result is bitwise repeatable. All products are of float32 (the kernels
round p and ds to 16-bit inputs' dtype for the tensor cores; nothing is gained by that here).
"""

from __future__ import annotations

import numpy as np

from ..problem import Problem
from .tiles import Array, accumulator, exp_below, key_tiles, query_blocks


def backward(
    problem: Problem,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dlse: Array | None = None,
    *,
    block_q: int | None = None,
    block_k: int | None = None,
) -> tuple[Array, Array, Array]:
    """`(dq, dk, dv)` in the inputs' dtype and shapes, of `sum(dout * out) + sum(dlse * lse)`.

    dout and out are (b, sq, hq, dv), lse and dlse (b, hq, sq). Rows that see nothing, and keys that nobody sees, get 0.
    """
    dtype = accumulator(problem)
    dq, dk, dv = (np.zeros(x.shape, x.dtype) for x in (q, k, v))
    with np.errstate(all="ignore"):
        for batch_idx, head_kv_idx in np.ndindex(problem.batch, problem.heads_kv):
            dk_head = np.zeros((problem.seqlen_k, problem.head_dim), dtype)
            dv_head = np.zeros((problem.seqlen_k, problem.head_dim_v), dtype)
            for block in query_blocks(problem, q, batch_idx, head_kv_idx, block_q):
                dout_rows = block.fold(dout, dtype)
                lse_rows = block.fold_lse(lse, dtype)
                lse_rows = np.where(np.isneginf(lse_rows), np.inf, lse_rows)  # exp(s - inf) = 0: nothing was seen
                delta = (dout_rows * block.fold(out, dtype)).sum(axis=1)
                if dlse is not None:
                    delta -= block.fold_lse(dlse, dtype)
                dq_rows = np.zeros_like(block.q)
                for tile in key_tiles(problem, block, k, v, block_k):
                    keys = slice(tile.begin, tile.end)
                    # at the cap, s = -c, the slope is 0; hidden keys, s = -inf, are put there
                    slope = 1 - np.square(np.maximum(tile.s / problem.softcap, -1)) if problem.softcap else None
                    p = exp_below(tile.s, lse_rows)
                    ds = dout_rows @ tile.v.T  # dp
                    ds -= delta[:, None]
                    ds *= p
                    if slope is not None:
                        ds *= slope
                    dv_head[keys] += p.T @ dout_rows
                    dq_rows += ds @ tile.k
                    dk_head[keys] += ds.T @ block.q
                dq_rows *= problem.softmax_scale
                dq[batch_idx, block.queries, block.heads] = block.unfold(dq_rows)
            dk_head *= problem.softmax_scale
            dk[batch_idx, :, head_kv_idx] = dk_head
            dv[batch_idx, :, head_kv_idx] = dv_head
    return dq, dk, dv
