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
    sm_margin: int = 0,
    score_mod: Any = None,
    mask_mod: Any = None,
    block_mask: Any = None,
    bias: Any = None,
    sinks: Any = None,
    check: bool = False,
    **foreign: Never,
) -> Array:
    """Returns the log-sum-exp of the visible scores of each query: `forward`'s lse, without v.

    Parameters
    ----------
    q : array (batch, seqlen_q, heads_q, head_dim)
        Queries, in the frameworks, dtypes and ranks of `forward`.
    k : array (batch, seqlen_k, heads_kv, head_dim)
        Keys, of the framework, device and dtype of q. heads_q is a multiple of heads_kv.
    softmax_scale : float, default 1/sqrt(head_dim)
        Factor of the scores, from 1e-15 to 1e15.
    causal : bool, default False
        Hides later keys: key j is visible to query i iff `j <= i + diagonal_offset`.
    window_size : tuple (left, right), default (-1, -1)
        Numbers of keys that are visible left and right of the diagonal; -1 or None is open.
    diagonal_offset : int, default seqlen_k - seqlen_q
        Key index of the diagonal at query 0. The default aligns the diagonal bottom-right, 0 top-left.
    softcap : float, default 0.0
        A cap c > 0 turns scores into c·tanh(score / c); 0 is no cap.
    cu_seqlens_q : int32 array (batch + 1,), optional
        Offsets of packed queries: q is (total, heads_q, head_dim).
    cu_seqlens_k : int32 array (batch + 1,), optional
        Offsets of packed keys: k is (total, heads_kv, head_dim).
    max_seqlen_q : int, optional
        Upper bound of the queries of a variable-length sequence, if known.
    max_seqlen_k : int, optional
        Upper bound of the keys of a variable-length sequence, if known.
    seqused_q : int32 array (batch,), optional
        Number of used queries of each sequence.
    seqused_k : int32 array (batch,), optional
        Number of used keys of each sequence.
    page_table : int32 array (batch, max_pages), optional
        Pages of each sequence: k is (num_pages, page_size, heads_kv, head_dim).
    cache_batch_idx : int32 array (batch,), optional
        Row of k that holds the keys of each sequence.
    num_splits : int, default 0
        Upper bound of the thread blocks that share the keys of a query; 0 chooses.
    split_size : int, optional
        Switch for equal bits in every layout; any multiple of 128 has the same effect.
    sm_margin : int, default 0
        Number of SMs that the kernels leave to others.
    score_mod : callable (score, b, h, q_idx, k_idx), optional
        Returns the score that replaces the scaled and capped one.
    mask_mod : callable (b, h, q_idx, k_idx), optional
        Returns True for visible keys.
    block_mask : BlockMask, optional
        Tiles of a mask, together with its mask_mod, from `create_block_mask`.
    bias : array broadcastable to (batch, heads_q, seqlen_q, seqlen_k), optional
        Floats to add to the scores, or bools: True is visible.
    sinks : array (heads_q,), optional
        One more logit of each head.
    check : bool, default False
        True reads the int32 arrays above from a GPU and validates them.

    Returns
    -------
    lse : array (batch, heads_q, seqlen_q)
        The natural logarithm of the sum of exp of the visible scores: float32, or float64 for float64. A query that
        sees no key has -inf. For packed q it is (heads_q, total_q).

    Raises
    ------
    ProblemError, UnsupportedError, CompileError
        As in `forward`.

    Notes
    -----
    Every argument has the meaning and the limits that `forward` describes.

    References
    ----------
    FlashAttention-2 (arXiv 2307.08691).

    Examples
    --------
    Three keys, all of score 0.

    >>> import numpy as np, cuflash
    >>> q, k = np.zeros((1, 1, 1, 64)), np.ones((1, 3, 1, 64))
    >>> np.exp(cuflash.lse(q, k)).round(6)
    array([[[3.]]])
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
        sm_margin=sm_margin,
    )
    op = LSE_ONLY
    inputs: tuple[Any, ...] = (q, k)
    varlen_args: VarlenInputs = ()
    if not cu_seqlens_q is cu_seqlens_k is seqused_q is seqused_k is page_table is cache_batch_idx is None:
        varlen_args = VarlenArgs(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, cache_batch_idx)
        op, inputs = VARLEN_OPS["lse"], (*inputs, *varlen_args)
    if not score_mod is mask_mod is block_mask is bias is sinks is None:
        mod_args = ModArgs(score_mod, mask_mod, block_mask, bias, sinks)
        mod_call = resolve_mods(op, mod_args, varlen_args, options.options)
        op, inputs = mod_call.op, (*inputs, *mod_call.inputs(None, q))
    if check is not False:
        check_on_device(op, inputs, options, check)
    results: tuple[Array] = run(op, inputs, options)
    return results[0]
