"""The functions of the flash-attn package, version 2, on cuflash: the same names, order, defaults and results.

    from cuflash.frameworks.flash_attn_interface import flash_attn_func    # was: from flash_attn import flash_attn_func

FlashAttention-3 uses the same names but another order of arguments; its functions are in
`cuflash.frameworks.flash_attn_3_interface`. A positional call that is meant for the other module is refused: the first
argument after the tensors and lengths is `dropout_p` here and `softmax_scale` there: None is refused here, 0.0 there,
and a bool where a number belongs.

As in flash-attn, causal masks are aligned bottom-right, `causal=True` closes the right side of `window_size`, -1 is an
open side, and `softcap <= 0` means no softcap. Lengths and tables are int32 on the device, where alone they are read;
`max_seqlen_q`, `max_seqlen_k` and windows may be numbers or tensors without axes in host memory, and bounds None.
Unlike there, tensors may be float32 or on the CPU and have any strides, v may have its own head dim, pages may have any
size, and gradients also flow through lse. A query that sees no key has lse -inf, which merges correctly; flash-attn 2
gives +inf. Rows of no sequence have out 0. Arguments that are not supported are refused, never ignored.

`alibi_slopes`, (heads,) or (batch, heads) float32, subtract slope · |i + seqlen_k - seqlen_q - j| from scores, also in
lse (from that of causal calls flash-attn 2 leaves out what a row has in common), and get gradients if they require
them. `dropout_p` drops weights by a seed that PyTorch's generator draws on the device, others than flash-attn does.
`return_attn_probs` then returns S_dmask, (batch, heads, seqlen_q, seqlen_k) with both lengths rounded up to multiples
of 128: the weights, negative where they were dropped. It is meant for tests, and takes two calls for 128 keys.

The private functions that other packages import from flash-attn's module of this name are here, too.

Source: flash_attn/flash_attn_interface.py and csrc/flash_attn/flash_api.cpp of flash-attn 2.8.3.
"""

from __future__ import annotations

from typing import Any

import torch

from ...errors import REFUSALS
from ...problem.foreign import renamed
from ...problem.options import WindowSize
from ..torch.varlen import check_integers, paged_or_packed
from .arguments import FROM_BOUNDS, NAMES_2, unpack
from .kvcache import New, over_cache
from .mods import attend_with_weights, v2_mod_kwargs
from .v2_private import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention, with gradients: q (batch, seqlen_q, heads_q, head_dim), k, v (batch, seqlen_k, heads_kv, head_dim).

    Returns out (batch, seqlen_q, heads_q, head_dim of v), or (out, lse, S_dmask) with `return_attn_probs`: lse is
    (batch, heads_q, seqlen_q) float32, and S_dmask is empty without dropout. Errors, limits and rules for NaN are those
    of `cuflash.forward` and, for gradients, of `cuflash.backward`.

    >>> import torch
    >>> from cuflash.frameworks.flash_attn_interface import flash_attn_func
    >>> q, k, v = torch.randn(3, 2, 100, 4, 64)
    >>> flash_attn_func(q, k, v, causal=True).shape
    torch.Size([2, 100, 4, 64])
    """
    mod_kwargs = v2_mod_kwargs(q, dropout_p, alibi_slopes)
    shared_args = softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs
    return attend_with_weights(q, k, v, *shared_args, mod_kwargs)


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` for k and v in one tensor kv (batch, seqlen_k, 2, heads_kv, head_dim), which is not copied."""
    k, v = unpack("kv", kv, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` for q, k and v in one tensor qkv (batch, seqlen, 3, heads, head_dim), which is not copied."""
    q, k, v = unpack("qkv", qkv, 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """Attention of packed sequences, with gradients.

    q is (total_q, heads_q, head_dim), k and v are (total_k, heads_kv, head_dim). Sequence b has the rows
    cu_seqlens[b] … cu_seqlens[b + 1] - 1. With `block_table` (batch, max_pages), k and v are pages (num_pages,
    page_size, heads_kv, head_dim), which have no gradients, and cu_seqlens_k tells their lengths alone. Rows past
    max_seqlen_q, and keys past max_seqlen_k, do not count.

    Returns out (total_q, heads_q, head_dim of v), or (out, lse, S_dmask) with `return_attn_probs`: lse is (heads_q,
    total_q) float32, and S_dmask is empty without dropout.

    Raises UnsupportedError for S_dmask of pages and, in backward, for their gradients; other errors are those of
    `cuflash.forward`.
    """
    check_integers("cu_seqlens_q", cu_seqlens_q, required=True)
    mod_kwargs = v2_mod_kwargs(q, dropout_p, alibi_slopes, cu_seqlens_q)
    shared_args = softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs
    sequences = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    sequences |= paged_or_packed(cu_seqlens_k, None, block_table)
    return attend_with_weights(q, k, v, *shared_args, mod_kwargs, NAMES_2 | FROM_BOUNDS, **sequences)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` for k and v in one tensor kv (total_k, 2, heads_kv, head_dim), which is not copied."""
    k, v = unpack("kv", kv, 2, "total_k")
    shared_args = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *shared_args)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` for q, k and v in one tensor qkv (total, 3, heads, head_dim), which is not copied."""
    q, k, v = unpack("qkv", qkv, 3, "total")
    shared_args = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    try:
        return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *shared_args)
    except REFUSALS as error:
        names = {f"{name}_{side}": name for name in ("cu_seqlens", "max_seqlen") for side in "qk"}
        raise renamed(error, names) from error.__cause__


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention of q (batch, seqlen_q, heads_q, head_dim) over a cache (batch_cache, capacity, heads_kv, head_dim).

    `cache_seqlens`, a number or (batch,), tells how many keys of the cache are used; None: all. `cache_batch_idx`
    (batch,) tells which row of the cache a sequence has. With `block_table` (batch, max_pages), the cache is pages
    (num_pages, page_size, heads_kv, head_dim). `num_splits`: blocks that share the keys of a query, 0 for a choice.

    New keys and values, k and v (batch, seqlen_new, heads_kv, head_dim), are first written to the cache, in place,
    behind those that `cache_seqlens` counts, and are seen; count them in the next call. With `rotary_cos` and
    `rotary_sin` (positions, rotary_dim / 2), at least as many positions as the cache has room for, k and q are rotated
    at their positions: query i stands where new key i does, or, without causal mask and window, all queries stand where
    the first new key does. `rotary_interleaved`: pairs of neighbours (GPT-J), else of halves (GPT-NeoX); it says
    nothing without rotary_cos.

    Returns out (batch, seqlen_q, heads_q, head_dim of v), or (out, lse) with `return_softmax_lse`; lse is (batch,
    heads_q, seqlen_q) float32.

    Raises UnsupportedError for cache_leftpad, for tensors that require grad in calls with new keys, and in backward of
    calls over pages or rows by cache_batch_idx; ProblemError for a rotation without new keys, new keys without
    `cache_seqlens` or, where it is a number, without room; other errors are those of `cuflash.append_kv` and
    `cuflash.forward`.

        flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)    # lengths (batch,)
    """
    new = New(k, v, rotary_cos, rotary_sin, rotary_interleaved)
    shared_args = softmax_scale, causal, window_size, softcap, return_softmax_lse
    cache_args = cache_seqlens, cache_leftpad, block_table, *shared_args
    keywords: dict[str, Any] = {"cache_batch_idx": cache_batch_idx, "num_splits": num_splits}
    mod_kwargs = v2_mod_kwargs(q, 0.0, alibi_slopes)
    return over_cache(2, q, k_cache, v_cache, new, *cache_args, mod_kwargs=mod_kwargs, **keywords)
