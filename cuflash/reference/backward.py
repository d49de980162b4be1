"""Gradients, with p recomputed from lse tile by tile (FlashAttention-2, arXiv 2307.08691, algorithm 2).

p  = exp(s - lse)                       dv = pᵀ dout
dp = dout vᵀ                            delta = rowsum(dout ∘ out) - dlse
ds = p ∘ (dp - delta)                   with a softcap also ∘ (1 - tanh²)
dq = softmax_scale ds k                 dk = softmax_scale dsᵀ q

rowsum(dout ∘ out) = rowsum(p ∘ dp), so a tile does not need its whole row of dp. d lse / d s = p, so the gradient of
lse is part of delta. The order of the sums is fixed, so the result is bitwise repeatable. All products are float32.
(Kernels round p and ds to the dtype of 16-bit inputs for the tensor cores, which would gain nothing here.)
"""

from __future__ import annotations

import numpy as np

from ..problem.problem import Problem
from .mods import ModGradients, ModScores
from .tiles import Array, accumulator, exp_below, key_tiles, kv_heads, query_blocks, visible_product


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
    delta: Array | None = None,
    block_q: int | None = None,
    block_k: int | None = None,
    mod_scores: ModScores | None = None,
    mod_gradients: ModGradients | None = None,
) -> tuple[Array, ...]:
    """Returns `(dq, dk, dv)`: gradients of `sum(dout * out) + sum(dlse * lse)`, in shapes and dtypes of q, k and v.

    dout and out are (b, sq, hq, dv), lse and dlse (b, hq, sq). Rows that see no key, and keys that no row sees, get 0.
    delta: the row sums, in place of out and dlse. They are one more result if the problem's op returns them. Results
    that are added to arrays have the accumulator's dtype.
    mod_gradients: sums to which the gradients of captured arrays are added, or None.
    """
    dtype, softcap = accumulator(problem), problem.options.softcap
    dq, dk, dv = (np.zeros(x.shape, dtype if problem.op.accumulates else x.dtype) for x in (q, k, v))
    with np.errstate(all="ignore"):
        if delta is None:
            products = dout.astype(dtype, "C") * out.astype(dtype, "C")
            delta = products.sum(axis=3).swapaxes(1, 2) - (0 if dlse is None else dlse.astype(dtype))
        for batch_idx, head_kv_idx in kv_heads(problem):
            dk_head = np.zeros((problem.seqlen_k, problem.head_dim), dtype)
            dv_head = np.zeros((problem.seqlen_k, problem.head_dim_v), dtype)
            for block in query_blocks(problem, q, batch_idx, head_kv_idx, block_q):
                dout_rows = block.fold(dout, dtype)
                lse_rows = block.fold_lse(lse, dtype)
                lse_rows = np.where(np.isneginf(lse_rows), np.inf, lse_rows)  # p = exp(s - inf) = 0: sees no key
                delta_rows = block.fold_lse(delta, dtype)
                are_finite = all(np.isfinite(x).all() for x in (delta_rows, block.q)) and not np.isnan(lse_rows).any()
                dq_rows = np.zeros_like(block.q)
                for tile in key_tiles(problem, block, k, v, block_k, mod_scores, are_finite):
                    keys, masked = slice(tile.begin, tile.end), tile.masked
                    # The slope is 0 at the cap, s = -c. Hidden keys have s = -inf and are clamped to it.
                    capped = tile.s if tile.mod_tile is None else tile.mod_tile.raw.reshape(tile.s.shape)
                    slope = 1 - np.square(np.maximum(capped / softcap, -1)) if softcap else None
                    p = exp_below(tile.s, lse_rows)
                    ds = dout_rows @ tile.v.T  # dp
                    if tile.mod_tile is not None:
                        ds = tile.mod_tile.dropped(ds)
                    ds -= delta_rows[:, None]
                    ds *= p
                    if masked is not None:  # hidden pairs pass no NaN between row and key
                        p[masked] = ds[masked] = 0
                        if slope is not None:
                            slope[masked] = 0
                    if tile.mod_tile is not None:
                        if mod_gradients is not None:
                            mod_gradients.add(tile.mod_tile, block.unfold(ds))
                        ds = tile.mod_tile.before_score_mod(ds)
                    if slope is not None:
                        ds *= slope
                    if tile.mod_tile is not None:
                        p = tile.mod_tile.dropped(p)
                    of_keys = None if masked is None else masked.T
                    dv_head[keys] += visible_product(p.T, dout_rows, of_keys)
                    dq_rows += visible_product(ds, tile.k, masked)
                    dk_head[keys] += visible_product(ds.T, block.q, of_keys)
                dq_rows *= problem.softmax_scale
                dq[batch_idx, block.queries, block.heads] = block.unfold(dq_rows)
            dk_head *= problem.softmax_scale
            dk[batch_idx, :, head_kv_idx] = dk_head
            dv[batch_idx, :, head_kv_idx] = dv_head
        if mod_gradients is not None:
            mod_gradients.add_sinks(dout, out, lse, dlse)
        deltas = (np.where(np.isneginf(lse), 0, delta).astype(dtype),) if problem.op.delta == "returns" else ()
    return dq, dk, dv, *deltas
