"""Standard attention: S and P are whole matrices in memory. Tests compare the tiled algorithms with it.

s = softmax_scale q kᵀ,  p = softmax(s),  out = p v        (Vaswani et al. 2017, arXiv 1706.03762, eq. 1)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..problem.problem import Problem
from .tiles import accumulator, no_results, visible_product


def forward(problem: Problem, q: Any, k: Any, v: Any, xp: Any = np) -> tuple[Any, Any]:
    """Returns `(out, lse)`: out (b, sq, hq, dv) in out_dtype, lse (b, hq, sq); memory O(b · hq · sq · sk).

    `xp` is the array library of q, k and v: numpy, or cupy for algorithm="standard" on a GPU.
    """
    mask, heads_kv = problem.mask, problem.heads_kv
    group = problem.heads_q // heads_kv
    dtype = accumulator(problem)
    out, lse = no_results(problem, q, v, xp)
    # Rows that see no key keep 0 and -inf, and keys that no row sees are left out of the products.
    row_begin, row_end = mask.row_range(0, problem.seqlen_k)
    key_begin, key_end = mask.key_range(0, problem.seqlen_q)
    if problem.batch == 0 or row_begin == row_end:
        return out, lse

    # (b, hkv, group, rows, d) and (b, hkv, 1, keys, d): query head h uses kv head h // group
    q = q[:, row_begin:row_end].astype(dtype)
    q = q.reshape(problem.batch, row_end - row_begin, heads_kv, group, problem.head_dim).transpose(0, 2, 3, 1, 4)
    k = k[:, key_begin:key_end].astype(dtype).transpose(0, 2, 1, 3)[:, :, None]
    p_dtype, v = v.dtype, v[:, key_begin:key_end].astype(dtype).transpose(0, 2, 1, 3)[:, :, None]

    with np.errstate(all="ignore"):
        s = xp.matmul(q, k.swapaxes(3, 4))
        s *= problem.softmax_scale
        if problem.options.softcap:
            s = xp.tanh(s / problem.options.softcap) * problem.options.softcap
        if not mask.is_full:
            s = xp.where(mask.visible(xp.arange(row_begin, row_end), xp.arange(key_begin, key_end)), s, -xp.inf)
        m = s.max(axis=4, keepdims=True)
        p = xp.exp(s - xp.where(xp.isneginf(m), 0, m))  # a row with only -inf gives 0, not NaN
        row_sum = p.sum(axis=4, keepdims=True)
        p /= xp.where(row_sum == 0, 1, row_sum)
        p = p if p_dtype == dtype else p.astype(p_dtype).astype(dtype)
        # Only for NumPy: on a GPU, the host would have to wait for the values of v.
        is_plain = xp is not np or np.isfinite(v).all()
        o = visible_product(p, v, None if is_plain else np.isneginf(s))
        out[:, row_begin:row_end] = o.transpose(0, 3, 1, 2, 4).reshape(
            problem.batch, row_end - row_begin, problem.heads_q, v.shape[4]
        )
        lse[:, :, row_begin:row_end] = (m + xp.log(row_sum)).reshape(problem.batch, problem.heads_q, -1)
    return out, lse
