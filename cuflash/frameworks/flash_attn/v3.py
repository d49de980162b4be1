"""The functions of FlashAttention-3's interface on cuflash: the same names, order, defaults and results.

    from cuflash.frameworks.flash_attn_3_interface import flash_attn_func    # was: from flash_attn_interface import …

The order of arguments differs from version 2, whose functions are in `cuflash.frameworks.flash_attn_interface`; what
that module says about masks, lengths, dtypes and refused arguments also holds here. `num_splits` is how many blocks
share the keys of a query, 0 for a choice. `pack_gqa`, `sm_margin` and `scheduler_metadata` change no result; cuflash
schedules each call itself, and takes them without using them.

`s_aux` (heads_q,), float32, float16 or bfloat16, is one more logit of each head, without a value. FlashAttention's own
functions do not have it; it is the name of vLLM's copy of them, by which transformers passes sinks. With
`attention_chunk`, which has gradients here, a query sees keys of its own chunk of that many positions alone.

The private functions that other packages import from FlashAttention-3's module are here, too.

Source: hopper/flash_attn_interface.py and hopper/flash_api.cpp of FlashAttention's main branch; in release 2.8.3 these
functions have no `return_attn_probs`.
"""

from __future__ import annotations

from typing import Any

import torch

from ...errors import ProblemError
from ...problem.options import WindowSize
from ..torch import check_tensor
from .arguments import attend, lengths_of, refuse_of_version_3, row_error, rows_of_table, unpack
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
    """Attention, with gradients: q (batch, seqlen_q, heads_q, head_dim), k, v (batch, seqlen_k, heads_kv, head_dim).

    Returns out (batch, seqlen_q, heads_q, head_dim of v), or (out, lse) with `return_attn_probs`; lse is (batch,
    heads_q, seqlen_q) float32.

    Raises UnsupportedError for qv and descales, other errors as `cuflash.forward` does. Limits and rules for NaN are
    those of `cuflash.forward` and, for gradients, of `cuflash.backward`.

    >>> import torch
    >>> from cuflash.frameworks.flash_attn_3_interface import flash_attn_func
    >>> q, k, v = torch.randn(3, 2, 100, 4, 64)
    >>> flash_attn_func(q, k, v, causal=True).shape
    torch.Size([2, 100, 4, 64])
    """
    refuse_of_version_3(softmax_scale, (pack_gqa, sm_margin), qv, q_descale, k_descale, v_descale)
    shared_args = softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs
    mod_kwargs = later_mod_kwargs("s_aux", s_aux, q, attention_chunk)
    return attend(q, k, v, *shared_args, num_splits=num_splits, mod_kwargs=mod_kwargs)


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
    """Attention of packed sequences, with gradients.

    q is (total_q, heads_q, head_dim), k and v are (total_k, heads_kv, head_dim). Sequence b has the rows
    cu_seqlens[b] … cu_seqlens[b + 1] - 1, of which the first `seqused_q[b]`, `seqused_k[b]` count where given.
    A side without cu_seqlens is (batch, seqlen, heads, head_dim). Packed rows past max_seqlen_q, and packed keys past
    max_seqlen_k, do not count.

    Returns out (total_q, heads_q, head_dim of v), or (out, lse) with `return_attn_probs`; lse is (heads_q, total_q)
    float32. Errors are those of `flash_attn_func`.
    """
    if isinstance(seqused_q, (int, float)):
        raise ProblemError(
            f"seqused_q={seqused_q} is a number; give a tensor (batch,) or None. If this was meant as dropout_p, take "
            "cuflash.frameworks.flash_attn_interface: its order is that of flash-attn 2"
        )
    refuse_of_version_3(softmax_scale, (pack_gqa, sm_margin), qv, q_descale, k_descale, v_descale)
    shared_args = softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs
    mod_kwargs = later_mod_kwargs("s_aux", s_aux, q, attention_chunk)
    sequences = lengths_of(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, None, max_seqlen_q, max_seqlen_k)
    return attend(q, k, v, *shared_args, num_splits=num_splits, mod_kwargs=mod_kwargs, **sequences)


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
    """`flash_attn_func` for q, k and v packed in one tensor, which is not copied.

    qkv is (batch, seqlen, 3, heads, head_dim), or (batch, seqlen, heads_q + 2 heads_kv, head_dim) with `num_heads_q`.
    """
    check_tensor("qkv", qkv)
    if qkv.ndim == 4:
        q, k, v = _split_heads(qkv, num_heads_q)
    else:
        q, k, v = unpack("qkv", qkv, 3)
    refuse_of_version_3(softmax_scale, (None, sm_margin), None, q_descale, k_descale, v_descale)
    mod_kwargs = later_mod_kwargs("s_aux", None, q, attention_chunk)
    return attend(
        q, k, v, softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs, mod_kwargs=mod_kwargs
    )


def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges attention over num_splits disjoint sets of keys into attention over all of them; it has no gradients.

    out_partial (num_splits, batch, seqlen, heads, head_dim) and lse_partial (num_splits, batch, seqlen, heads), both
    float32. Returns out (batch, seqlen, heads, head_dim) in `out_dtype` (default float32), written into `out` if that
    is given with the same dtype, and lse (batch, seqlen, heads) float32, which is contiguous along seqlen.

    Raises ProblemError for other shapes and dtypes, UnsupportedError for more parts than `merge_states` takes.
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
    """Attention over a cache, as `flash_attn_with_kvcache` of version 2, which tells about the arguments of its names.

    Beyond it, q may be packed, (total_q, heads_q, head_dim) with `cu_seqlens_q`; `max_seqlen_q` then bounds its
    sequences, and otherwise says nothing. New keys and values may be packed, (total_new, heads_kv, head_dim) with
    `cu_seqlens_k_new`, which says nothing without k. The table of pages is `page_table`; beside it, sequence b has its
    row `cache_batch_idx[b]`. `rotary_seqlens` may be `cache_seqlens` itself.

    Returns out in the shape of q (with the head_dim of v), or (out, lse, out_accum, lse_accum) with
    `return_softmax_lse`: lse is (batch, heads_q, seqlen_q), of packed q (heads_q, total_q), float32; the last two are
    empty.

    Raises UnsupportedError for other rotary_seqlens, qv and descales; other errors as version 2 does.
    """
    refuse_of_version_3(softmax_scale, (pack_gqa, sm_margin), qv, q_descale, k_descale, v_descale)
    refuse_rotary_seqlens("rotary_seqlens", rotary_seqlens, cache_seqlens)
    table, rows = rows_of_table(page_table, "cache_batch_idx", cache_batch_idx)
    new = New(k, v, rotary_cos, rotary_sin, rotary_interleaved, cu_seqlens_k_new)
    shared_args = softmax_scale, causal, window_size, softcap, return_softmax_lse
    cache_args = cache_seqlens, cache_leftpad, table, *shared_args
    keywords: dict[str, Any] = {"cache_batch_idx": rows, "num_splits": num_splits}
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
    """A schedule for `flash_attn_with_kvcache`: an int32 tensor of no elements on the device of `cache_seqlens`.

    It can be kept, copied into a longer buffer and passed back; cuflash schedules each call itself and does not read
    it, so whatever it was made for, results are the same. `cache_seqlens` must be a tensor; nothing else is judged.
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
