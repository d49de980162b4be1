"""The functions of flash-attn 2 on cuflash: the same names, order, defaults and results.

    from cuflash.frameworks.flash_attn_interface import flash_attn_func    # was: from flash_attn import flash_attn_func

FlashAttention-3 has the same names but another order of arguments: see `cuflash.frameworks.flash_attn_3_interface`.
A positional call meant for the other module is refused. The first argument after the tensors and lengths is `dropout_p`
here, which refuses None. There it is `softmax_scale`, which refuses 0.0. Both refuse a bool in place of a number.

As in flash-attn, causal masks are aligned bottom-right, and `causal=True` closes the right side of `window_size`. -1 is
an open side, and `softcap <= 0` means no softcap. Lengths and tables are int32 on the device, and only read there.
`max_seqlen_q`, `max_seqlen_k` and windows may be numbers or host tensors without axes; bounds may be None.

Beyond flash-attn, tensors may be float32 or on the CPU and have any strides. v may have another head dim, pages any
size, and gradients also flow through lse. A query that sees no key has lse -inf, which merges correctly; flash-attn 2
gives +inf. Rows of no sequence have out 0. Arguments that are not supported are refused, never ignored.

`alibi_slopes`, (heads,) or (batch, heads) float32, subtract slope · |i + seqlen_k - seqlen_q - j| from scores, also in
lse. (In causal calls, flash-attn 2 leaves a row's common term out of lse.) They get gradients if they require them.
`dropout_p` drops weights by a seed that PyTorch's generator draws on the device, and drops other weights than
flash-attn. `return_attn_probs` then returns S_dmask for tests: the weights, negative where they were dropped. It is
(batch, heads, seqlen_q, seqlen_k), both lengths rounded up to multiples of 128, and takes two calls for 128 keys.

The module also has the private functions that other packages import from flash-attn's module of this name.

Source: flash_attn/flash_attn_interface.py and csrc/flash_attn/flash_api.cpp of flash-attn 2.8.3.
"""

from __future__ import annotations

from typing import Any

import torch

from ...errors import REFUSALS
from ...problem.foreign import renamed
from ...problem.options import WindowSize
from ..torch.varlen import check_integers, paged_or_packed
from .arguments import FROM_BOUNDS, NAMES_2, packed_names, unpack
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
    """Computes attention, with gradients.

    Parameters
    ----------
    q : Tensor (batch, seqlen_q, heads_q, head_dim)
        Queries: float16, bfloat16 or float32, with any strides.
    k : Tensor (batch, seqlen_k, heads_kv, head_dim)
        Keys.
    v : Tensor (batch, seqlen_k, heads_kv, head_dim_v)
        Values.
    dropout_p : float in [0, 1), default 0.0
        Probability at which weights are dropped.
    softmax_scale : float, default 1/sqrt(head_dim)
        A number above 0.
    causal : bool, default False
        Hides later keys, aligned bottom-right.
    window_size : (left, right), default (-1, -1)
        Numbers of visible keys on both sides of the diagonal; -1 for an open side.
    softcap : float, default 0.0
        A cap c > 0 turns each score into c tanh(score / c).
    alibi_slopes : float32 Tensor (heads_q,) or (batch, heads_q), optional
        Slopes of ALiBi, which get gradients if they require them.
    deterministic : bool, default False
        Makes gradients bitwise repeatable.
    return_attn_probs : bool, default False
        Returns (out, lse, S_dmask).

    Returns
    -------
    out : Tensor (batch, seqlen_q, heads_q, head_dim_v)
        In q's dtype.
    lse : Tensor (batch, heads_q, seqlen_q), with `return_attn_probs`
        Float32.
    S_dmask : Tensor, with `return_attn_probs`
        Weights with dropout (see this module); empty without.

    Raises
    ------
    ProblemError, UnsupportedError, CompileError
        As in `cuflash.forward` and `cuflash.backward`, which also describe limits and rules for NaN.

    Examples
    --------
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
    """Computes `flash_attn_func` for k and v in kv (batch, seqlen_k, 2, heads_kv, head_dim), without copies."""
    k, v = unpack("kv", kv, 2)
    shared_args = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    try:
        return flash_attn_func(q, k, v, *shared_args)
    except REFUSALS as error:
        raise renamed(error, packed_names("kv")) from error.__cause__


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
    """Computes `flash_attn_func` for q, k and v in qkv (batch, seqlen, 3, heads, head_dim), without copies."""
    q, k, v = unpack("qkv", qkv, 3)
    shared_args = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    try:
        return flash_attn_func(q, k, v, *shared_args)
    except REFUSALS as error:
        raise renamed(error, packed_names("qkv")) from error.__cause__


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
        Bounds of the sequences. Beside `block_table`, cu_seqlens_k gives the lengths of keys.
    max_seqlen_q, max_seqlen_k : int
        Bounds on the lengths. Rows past them do not count.
    block_table : int32 Tensor (batch, max_pages), optional
        Pages of each sequence; k and v are then (num_pages, page_size, heads_kv, …), without gradients.
    dropout_p : float in [0, 1), default 0.0
        Probability at which weights are dropped.
    softmax_scale : float, default 1/sqrt(head_dim)
        A number above 0.
    causal : bool, default False
        Hides later keys, aligned bottom-right.
    window_size : (left, right), default (-1, -1)
        Numbers of visible keys on both sides of the diagonal; -1 for an open side.
    softcap : float, default 0.0
        A cap c > 0 turns each score into c tanh(score / c).
    alibi_slopes : float32 Tensor (heads_q,) or (batch, heads_q), optional
        Slopes of ALiBi, which get gradients if they require them.
    deterministic : bool, default False
        Makes gradients bitwise repeatable.
    return_attn_probs : bool, default False
        Returns (out, lse, S_dmask).

    Returns
    -------
    out : Tensor (total_q, heads_q, head_dim_v)
        In q's dtype.
    lse : Tensor (heads_q, total_q), with `return_attn_probs`
        Float32.
    S_dmask : Tensor, with `return_attn_probs`
        Weights with dropout (see this module); empty without.

    Raises
    ------
    UnsupportedError
        For S_dmask of pages and, in backward, for gradients of pages.
    ProblemError, CompileError
        As in `cuflash.forward`.
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
    """Computes `flash_attn_varlen_func` for k and v in kv (total_k, 2, heads_kv, head_dim), without copies."""
    k, v = unpack("kv", kv, 2, "total_k")
    shared_args = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    try:
        return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *shared_args)
    except REFUSALS as error:
        raise renamed(error, packed_names("kv")) from error.__cause__


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
    """Computes `flash_attn_varlen_func` for q, k and v in qkv (total, 3, heads, head_dim), without copies."""
    q, k, v = unpack("qkv", qkv, 3, "total")
    shared_args = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    try:
        return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *shared_args)
    except REFUSALS as error:
        names = {f"{name}_{side}": name for name in ("cu_seqlens", "max_seqlen") for side in "qk"}
        raise renamed(error, names | packed_names("qkv")) from error.__cause__


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
    """Computes attention over a cache; new keys and values are written to it first, in place.

    Parameters
    ----------
    q : Tensor (batch, seqlen_q, heads_q, head_dim)
        Queries.
    k_cache, v_cache : Tensor (batch_cache, capacity, heads_kv, …)
        Cache; with `block_table`, pages (num_pages, page_size, heads_kv, …).
    k, v : Tensor (batch, seqlen_new, heads_kv, …), optional
        New keys and values, written behind the used rows. This call attends to them; count them in the next call.
    rotary_cos, rotary_sin : Tensor (positions, rotary_dim / 2), optional
        Rotate new keys at their positions, and query i at the position of new key i. Without causal mask and window,
        all queries are rotated at the position of the first new key. positions is at least the cache's capacity.
    cache_seqlens : int or int32 Tensor (batch,), optional
        Numbers of used keys before the call; None for all.
    cache_batch_idx : int32 Tensor (batch,), optional
        Row of the cache for each sequence.
    block_table : int32 Tensor (batch, max_pages), optional
        Pages of each sequence.
    rotary_interleaved : bool, default True
        Rotates pairs of neighbours (GPT-J); False: pairs across halves (GPT-NeoX).
    num_splits : int, default 0
        Largest number of thread blocks that share the keys of a query; 0 for an automatic choice.
    softmax_scale : float, default 1/sqrt(head_dim)
        A number above 0.
    causal : bool, default False
        Hides later keys, aligned bottom-right.
    window_size : (left, right), default (-1, -1)
        Numbers of visible keys on both sides of the diagonal; -1 for an open side.
    softcap : float, default 0.0
        A cap c > 0 turns each score into c tanh(score / c).
    alibi_slopes : float32 Tensor (heads_q,) or (batch, heads_q), optional
        Slopes of ALiBi.
    cache_leftpad : None
        Not supported.
    return_softmax_lse : bool, default False
        Returns (out, lse).

    Returns
    -------
    out : Tensor (batch, seqlen_q, heads_q, head_dim_v)
        In q's dtype.
    lse : Tensor (batch, heads_q, seqlen_q), with `return_softmax_lse`
        Float32.

    Raises
    ------
    UnsupportedError
        For cache_leftpad, and tensors that require grad beside new keys. In backward, for pages and cache_batch_idx.
    ProblemError
        For a rotation without new keys, or new keys without `cache_seqlens`. With a number for it, also for new keys
        without room.
    ProblemError, UnsupportedError, CompileError
        As in `cuflash.append_kv` and `cuflash.forward`.

    Examples
    --------
        flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)    # lengths (batch,)
    """
    new = New(k, v, rotary_cos, rotary_sin, rotary_interleaved)
    shared_args = softmax_scale, causal, window_size, softcap, return_softmax_lse
    cache_args = cache_seqlens, cache_leftpad, block_table, *shared_args
    keywords: dict[str, Any] = {"cache_batch_idx": cache_batch_idx, "num_splits": num_splits}
    mod_kwargs = v2_mod_kwargs(q, 0.0, alibi_slopes)
    return over_cache(2, q, k_cache, v_cache, new, *cache_args, mod_kwargs=mod_kwargs, **keywords)
