"""`cuflash.lse`: the log-sum-exp of attention scores, without v and with half the work of forward."""

from __future__ import annotations

from typing import Any

from ..problem.operands import LSE_ONLY
from ..problem.options import Options, WindowSize
from ..runtime.launch import run


def lse(
    q: Any,
    k: Any,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    diagonal_offset: int | None = None,
    softcap: float = 0.0,
) -> Any:
    """lse (batch, heads_q, seqlen_q) = log sum exp of the visible scores of each query: `forward`'s lse, without v.

    q (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_kv, head_dim) and all arguments as in `forward`.
    float32 (float64 for float64), natural logarithm, -inf for a query that sees no key. Errors as in `forward`.
    """
    options = Options(softmax_scale, causal, window_size, diagonal_offset, softcap)
    return run(LSE_ONLY, (q, k), options)[0]
