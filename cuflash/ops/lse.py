"""`cuflash.lse`: the log-sum-exp of attention scores, without v and with half the work of forward."""

from __future__ import annotations

from typing import Any, Never

from ..problem.foreign import answers_foreign, refuse_foreign
from ..problem.operands import LSE_ONLY, VARLEN_OPS, VarlenArgs
from ..problem.options import Array, WindowSize, options_key
from ..runtime.call import run
from ..runtime.device_integers import check_on_device
from .mods import ModArgs, VarlenInputs, resolve_mods


@answers_foreign
def lse(
    q: Array,
    k: Array,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    diagonal_offset: int | None = None,
    softcap: float = 0.0,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    page_table: Any = None,
    cache_batch_idx: Any = None,
    num_splits: int = 0,
    split_size: int | None = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    block_mask: Any = None,
    bias: Any = None,
    sinks: Any = None,
    check: bool = False,
    **foreign: Never,
) -> Array:
    """lse (batch, heads_q, seqlen_q) = log sum exp of the visible scores of each query: `forward`'s lse, without v.

    q (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_kv, head_dim) and all arguments as in `forward`.
    float32 (float64 for float64), natural logarithm, -inf for a query that sees no key. Errors as in `forward`.

    >>> import numpy as np, cuflash
    >>> q, k = np.zeros((1, 1, 1, 64)), np.ones((1, 3, 1, 64))
    >>> np.exp(cuflash.lse(q, k)).round(6)  # three keys, all of score 0
    array([[[3.]]])

    Source: FlashAttention-2, arXiv 2307.08691.
    """
    if foreign:
        raise refuse_foreign(lse, foreign)
    options = options_key(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        diagonal_offset=diagonal_offset,
        softcap=softcap,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        num_splits=num_splits,
        split_size=split_size,
    )
    op = LSE_ONLY
    inputs: tuple[Any, ...] = (q, k)
    varlen_args: VarlenInputs = ()
    if not cu_seqlens_q is cu_seqlens_k is seqused_q is seqused_k is page_table is cache_batch_idx is None:
        varlen_args = VarlenArgs(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, cache_batch_idx)
        op, inputs = VARLEN_OPS["lse"], (*inputs, *varlen_args)
    if not score_mod is mask_mod is block_mask is bias is sinks is None:
        mod_args = ModArgs(score_mod, mask_mod, block_mask, bias, sinks)
        mod_call = resolve_mods("lse", mod_args, varlen_args, options.options)
        op, inputs = mod_call.op, (*inputs, *mod_call.inputs(None, q))
    if check is not False:
        check_on_device(op, inputs, options, check)
    results: tuple[Array] = run(op, inputs, options)
    return results[0]
