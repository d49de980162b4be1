"""The functions of FlashAttention-3's interface on cuflash: the same names, order, defaults and results.

    from cuflash.frameworks.flash_attn_3_interface import flash_attn_func    # was: from flash_attn_interface import …

The order of arguments differs from version 2, in `cuflash.frameworks.flash_attn_interface`. That module's text on
masks, lengths, dtypes and refused arguments also holds here. `num_splits` is the largest number of thread blocks that
share the keys of a query, 0 for an automatic choice. `sm_margin` is that of `cuflash.forward`. `pack_gqa` and
`scheduler_metadata` are accepted without effect: cuflash schedules each call itself.

`s_aux` (heads_q,), float32, float16 or bfloat16, is one more logit of each head, without a value. FlashAttention's own
functions lack it; vLLM's copy of them has it, and transformers passes sinks by this name. With `attention_chunk`, which
has gradients here, a query sees only keys of its own chunk of that many positions.

The module also has the private functions that other packages import from FlashAttention-3's module.

Source: hopper/flash_attn_interface.py and hopper/flash_api.cpp of FlashAttention's main branch; in release 2.8.3 these
functions have no `return_attn_probs`.
"""

from __future__ import annotations

from typing import Any

import torch

from ...errors import ProblemError
from ...problem.options import WindowSize
from ..torch import check_tensor
from .arguments import (
    NAMES_3,
    attend,
    lengths_of,
    packed_names,
    refuse_of_version_3,
    row_error,
    rows_of_table,
    unpack,
)
from .combine import combine
from .kvcache import New, over_cache, refuse_rotary_seqlens
from .mods import later_mod_kwargs
from .v3_private import _flash_attn_backward as _flash_attn_backward
from .v3_private import _flash_attn_forward as _flash_attn_forward

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

_PACKED_NAMES = NAMES_3 | packed_names("qkv")


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: torch.Tensor | None = None,
) -> Any:
    """Computes attention, with gradients.

    Parameters
    ----------
    q : Tensor (batch, seqlen_q, heads_q, head_dim)
        Queries: float16, bfloat16 or float32, with any strides.
    k : Tensor (batch, seqlen_k, heads_kv, head_dim)
        Keys.
    v : Tensor (batch, seqlen_k, heads_kv, head_dim_v)
        Values.
    qv, q_descale, k_descale, v_descale : None
        Not supported.
    softmax_scale : float, default 1/sqrt(head_dim)
        A number above 0.
    causal : bool, default False
        Hides later keys, aligned bottom-right.
    window_size : (left, right), default (-1, -1)
        Numbers of visible keys on both sides of the diagonal; -1 for an open side.
    softcap : float, default 0.0
        A cap c > 0 turns each score into c tanh(score / c).
    attention_chunk : int, default 0
        Number of positions in a chunk, outside of which keys are hidden; 0 for none.
    num_splits : int, default 1
        Largest number of thread blocks that share the keys of a query; 0 for an automatic choice.
    pack_gqa : optional
        Accepted without effect.
    sm_margin : int, default 0
        Number of SMs that the kernels leave to others.
    deterministic : bool, default False
        Makes gradients bitwise repeatable.
    return_attn_probs : bool, default False
        Returns (out, lse).
    s_aux : Tensor (heads_q,), optional
        One more logit of each head, without a value: float32, float16 or bfloat16.

    Returns
    -------
    out : Tensor (batch, seqlen_q, heads_q, head_dim_v)
        In q's dtype.
    lse : Tensor (batch, heads_q, seqlen_q), with `return_attn_probs`
        Float32.

    Raises
    ------
    UnsupportedError
        For qv and descales.
    ProblemError, UnsupportedError, CompileError
        As in `cuflash.forward` and `cuflash.backward`, which also describe limits and rules for NaN.

    Examples
    --------
    >>> import torch
    >>> from cuflash.frameworks.flash_attn_3_interface import flash_attn_func
    >>> q, k, v = torch.randn(3, 2, 100, 4, 64)
    >>> flash_attn_func(q, k, v, causal=True).shape
    torch.Size([2, 100, 4, 64])
    """
    refuse_of_version_3(softmax_scale, pack_gqa, qv, q_descale, k_descale, v_descale)
    shared_args = softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs
    mod_kwargs = later_mod_kwargs("s_aux", s_aux, q, attention_chunk)
    return attend(q, k, v, *shared_args, num_splits=num_splits, sm_margin=sm_margin, mod_kwargs=mod_kwargs)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: torch.Tensor | None = None,
) -> Any:
    """Computes attention of packed sequences, with gradients.

    Parameters
    ----------
    q : Tensor (total_q, heads_q, head_dim)
        Packed queries: sequence b has the rows `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1] - 1`.
    k : Tensor (total_k, heads_kv, head_dim)
        Packed keys.
    v : Tensor (total_k, heads_kv, head_dim_v)
        Packed values.
    cu_seqlens_q, cu_seqlens_k : int32 Tensor (batch + 1,)
        Bounds of the sequences. With None, that side is (batch, seqlen, heads, head_dim).
    max_seqlen_q, max_seqlen_k : int
        Bounds on the lengths. Packed rows past them do not count.
    seqused_q, seqused_k : int32 Tensor (batch,), optional
        Numbers of rows that count in each sequence.
    qv, q_descale, k_descale, v_descale : None
        Not supported.
    softmax_scale : float, default 1/sqrt(head_dim)
        A number above 0.
    causal : bool, default False
        Hides later keys, aligned bottom-right.
    window_size : (left, right), default (-1, -1)
        Numbers of visible keys on both sides of the diagonal; -1 for an open side.
    softcap : float, default 0.0
        A cap c > 0 turns each score into c tanh(score / c).
    attention_chunk : int, default 0
        Number of positions in a chunk, outside of which keys are hidden; 0 for none.
    num_splits : int, default 1
        Largest number of thread blocks that share the keys of a query; 0 for an automatic choice.
    pack_gqa : optional
        Accepted without effect.
    sm_margin : int, default 0
        Number of SMs that the kernels leave to others.
    deterministic : bool, default False
        Makes gradients bitwise repeatable.
    return_attn_probs : bool, default False
        Returns (out, lse).
    s_aux : Tensor (heads_q,), optional
        One more logit of each head, without a value: float32, float16 or bfloat16.

    Returns
    -------
    out : Tensor (total_q, heads_q, head_dim_v)
        In q's dtype.
    lse : Tensor (heads_q, total_q), with `return_attn_probs`
        Float32.

    Raises
    ------
    ProblemError, UnsupportedError, CompileError
        As in `flash_attn_func`.
    """
    if isinstance(seqused_q, (int, float)):
        raise ProblemError(
            f"seqused_q={seqused_q} is a number; give a tensor (batch,) or None. If this was meant as dropout_p, take "
            "cuflash.frameworks.flash_attn_interface: it has the order of flash-attn 2"
        )
    refuse_of_version_3(softmax_scale, pack_gqa, qv, q_descale, k_descale, v_descale)
    shared_args = softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs
    mod_kwargs = later_mod_kwargs("s_aux", s_aux, q, attention_chunk)
    sequences = lengths_of(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, None, max_seqlen_q, max_seqlen_k)
    return attend(q, k, v, *shared_args, num_splits=num_splits, sm_margin=sm_margin, mod_kwargs=mod_kwargs, **sequences)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Computes `flash_attn_func` for q, k and v packed in one tensor, without copies.

    qkv is (batch, seqlen, 3, heads, head_dim), or (batch, seqlen, heads_q + 2 heads_kv, head_dim) with `num_heads_q`.
    """
    check_tensor("qkv", qkv)
    if qkv.ndim == 4:
        q, k, v = _split_heads(qkv, num_heads_q)
    else:
        q, k, v = unpack("qkv", qkv, 3)
    refuse_of_version_3(softmax_scale, None, None, q_descale, k_descale, v_descale)
    mod_kwargs = later_mod_kwargs("s_aux", None, q, attention_chunk)
    options = softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs
    return attend(q, k, v, *options, mod_kwargs=mod_kwargs, names=_PACKED_NAMES, sm_margin=sm_margin)


def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges attention over num_splits disjoint sets of keys into attention over all of them; it has no gradients.

    Parameters
    ----------
    out_partial : float32 Tensor (num_splits, batch, seqlen, heads, head_dim)
        Results.
    lse_partial : float32 Tensor (num_splits, batch, seqlen, heads)
        Their log-sum-exp.
    out : Tensor (batch, seqlen, heads, head_dim), optional
        Memory for the result, in `out_dtype`.
    out_dtype : torch.dtype, default float32
        Also float16 or bfloat16.

    Returns
    -------
    out : Tensor (batch, seqlen, heads, head_dim)
        In `out_dtype`.
    lse : float32 Tensor (batch, seqlen, heads)
        Contiguous along seqlen.

    Raises
    ------
    ProblemError
        For other shapes and dtypes.
    UnsupportedError
        For more splits than `merge_states` takes.
    """
    return combine(out_partial, lse_partial, out, out_dtype, ranks=(5,), dtypes=(torch.float32,))


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: torch.Tensor | None = None,
) -> Any:
    """Computes attention over a cache, as `flash_attn_with_kvcache` of version 2, which describes shared arguments.

    Parameters
    ----------
    q : Tensor (batch, seqlen_q, heads_q, head_dim)
        Queries; with `cu_seqlens_q` packed, (total_q, heads_q, head_dim).
    k, v : Tensor (batch, seqlen_new, heads_kv, …), optional
        New keys and values; with `cu_seqlens_k_new` packed, (total_new, heads_kv, …).
    cache_batch_idx : int32 Tensor (batch,), optional
        Row of the cache, or of the page table, for each sequence.
    page_table : int32 Tensor (batch, max_pages), optional
        Pages of each sequence.
    cu_seqlens_q, cu_seqlens_k_new : int32 Tensor (batch + 1,), optional
        Bounds of packed q, and of packed k and v. The latter has no effect without k.
    max_seqlen_q : int, optional
        Bound on the lengths of packed q; without effect otherwise.
    rotary_seqlens : Tensor, optional
        None, or `cache_seqlens` itself.
    attention_chunk : int, default 0
        Number of positions in a chunk, outside of which keys are hidden; 0 for none.
    s_aux : Tensor (heads_q,), optional
        One more logit of each head, without a value: float32, float16 or bfloat16.
    scheduler_metadata, pack_gqa : optional
        Accepted without effect.
    sm_margin : int, default 0
        Number of SMs that the kernels leave to others.
    qv, q_descale, k_descale, v_descale, cache_leftpad : None
        Not supported.
    return_softmax_lse : bool, default False
        Returns (out, lse, out_accum, lse_accum).

    Returns
    -------
    out : Tensor
        In q's shape, with v's head dim.
    lse : Tensor (batch, heads_q, seqlen_q), with `return_softmax_lse`
        Float32; (heads_q, total_q) for packed q.
    out_accum, lse_accum : Tensor, with `return_softmax_lse`
        Empty.

    Raises
    ------
    UnsupportedError
        For other rotary_seqlens, qv and descales.
    ProblemError, UnsupportedError, CompileError
        As in version 2.
    """
    refuse_of_version_3(softmax_scale, pack_gqa, qv, q_descale, k_descale, v_descale)
    refuse_rotary_seqlens("rotary_seqlens", rotary_seqlens, cache_seqlens)
    table, rows = rows_of_table(page_table, "cache_batch_idx", cache_batch_idx)
    new = New(k, v, rotary_cos, rotary_sin, rotary_interleaved, cu_seqlens_k_new)
    shared_args = softmax_scale, causal, window_size, softcap, return_softmax_lse
    cache_args = cache_seqlens, cache_leftpad, table, *shared_args
    keywords: dict[str, Any] = {"cache_batch_idx": rows, "num_splits": num_splits, "sm_margin": sm_margin}
    keywords |= {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": None if cu_seqlens_q is None else max_seqlen_q}
    mod_kwargs = later_mod_kwargs("s_aux", s_aux, q, attention_chunk)
    try:
        result = over_cache(3, q, k_cache, v_cache, new, *cache_args, mod_kwargs=mod_kwargs, **keywords)
    except ProblemError as error:
        raise row_error(error, "cache_batch_idx", page_table, cache_batch_idx) from error.__cause__
    if not return_softmax_lse:
        return result
    return *result, *(q.new_empty(0, dtype=torch.float32) for _ in range(2))


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> torch.Tensor:
    """Returns a schedule for `flash_attn_with_kvcache`: an empty int32 tensor on the device of `cache_seqlens`.

    It can be kept, copied into a longer buffer and passed back. cuflash schedules each call itself and does not read
    it. `cache_seqlens` must be a tensor; other arguments are not validated.
    """
    check_tensor("cache_seqlens", cache_seqlens)
    return cache_seqlens.new_empty(0, dtype=torch.int32)


def _split_heads(qkv: torch.Tensor, num_heads_q: int | None) -> tuple[torch.Tensor, ...]:
    heads = qkv.shape[2]
    if num_heads_q is None or not 0 < num_heads_q < heads or (heads - num_heads_q) % 2:
        raise ProblemError(
            f"qkv has shape {tuple(qkv.shape)} and num_heads_q={num_heads_q}; give (batch, seqlen, heads_q + 2 "
            "heads_kv, head_dim) with num_heads_q=heads_q, or (batch, seqlen, 3, heads, head_dim)"
        )
    heads_kv = (heads - num_heads_q) // 2
    q, k, v = qkv.split([num_heads_q, heads_kv, heads_kv], dim=2)
    return q, k, v
