"""The functions of flash-attn 2's compiled module, `flash_attn.flash_attn_interface.flash_attn_gpu`.

xformers calls them by position. Unlike `cuflash.frameworks.flash_attn_interface` they have no gradients, take all
arguments, and write into `out` if it is given. Results, limits and errors are equal.

Source: csrc/flash_attn/flash_api.cpp of flash-attn 2.8.3.
"""

from __future__ import annotations

from typing import Any

import torch

from ...errors import UnsupportedError
from ..torch import check_tensor
from . import v2
from .arguments import check_out
from .v2_private import (
    Results,
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]


@torch.no_grad()
def fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen: torch.Generator | None,
) -> Results:
    """Computes `_flash_attn_forward`: (out, softmax_lse, S_dmask, rng_state)."""
    _refuse_generator(gen)
    check_out("out", out, q, v)
    window = window_size_left, window_size_right
    result, *rest = _flash_attn_forward(
        q, k, v, p_dropout, softmax_scale, is_causal, *window, softcap, alibi_slopes, return_softmax
    )
    return result if out is None else out.copy_(result), *rest


@torch.no_grad()
def varlen_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    seqused_k: torch.Tensor | None,
    leftpad_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen: torch.Generator | None,
    num_splits: int = 0,
) -> Results:
    """Computes `_flash_attn_varlen_forward`: (out, softmax_lse, S_dmask, rng_state)."""
    _refuse_generator(gen)
    check_out("out", out, q, v)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    window = window_size_left, window_size_right
    cache: Any = block_table, leftpad_k, seqused_k, zero_tensors, num_splits
    options: Any = p_dropout, softmax_scale, is_causal, *window, softcap, alibi_slopes, return_softmax
    result, *rest = _flash_attn_varlen_forward(q, k, v, *lengths, *options, *cache)
    return result if out is None else out.copy_(result), *rest


def bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    gen: torch.Generator | None,
    rng_state: torch.Tensor | None,
) -> Results:
    """Computes `_flash_attn_backward`: (dq, dk, dv, softmax_d). A dq, dk or dv of None is allocated."""
    _refuse_generator(gen)
    grads = _targets(q, k, v, dq, dk, dv)
    window = window_size_left, window_size_right
    options = p_dropout, softmax_scale, is_causal, *window, softcap, alibi_slopes, deterministic
    arguments: Any = dout, q, k, v, out, softmax_lse, *grads, *options, rng_state
    return *grads, _flash_attn_backward(*arguments)


def varlen_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    gen: torch.Generator | None,
    rng_state: torch.Tensor | None,
) -> Results:
    """Computes `_flash_attn_varlen_backward`: (dq, dk, dv, softmax_d). A dq, dk or dv of None is allocated."""
    _refuse_generator(gen)
    grads = _targets(q, k, v, dq, dk, dv)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    window = window_size_left, window_size_right
    options = p_dropout, softmax_scale, is_causal, *window, softcap, alibi_slopes, deterministic
    arguments: Any = dout, q, k, v, out, softmax_lse, *grads, *lengths, *options, rng_state, zero_tensors
    return *grads, _flash_attn_varlen_backward(*arguments)


@torch.no_grad()
def fwd_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    seqlens_k: torch.Tensor | None,
    rotary_cos: torch.Tensor | None,
    rotary_sin: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    leftpad_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    out: torch.Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    is_rotary_interleaved: bool,
    num_splits: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `flash_attn_with_kvcache`: (out, softmax_lse)."""
    check_out("out", out, q, v_cache)
    window = window_size_left, window_size_right
    result, lse = v2.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos,
        rotary_sin,
        cache_seqlens=seqlens_k,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=leftpad_k,
        block_table=block_table,
        softmax_scale=softmax_scale,
        causal=is_causal,
        window_size=window,
        softcap=softcap,
        rotary_interleaved=is_rotary_interleaved,
        alibi_slopes=alibi_slopes,
        num_splits=num_splits,
        return_softmax_lse=True,
    )
    return result if out is None else out.copy_(result), lse


def _refuse_generator(gen: Any) -> None:
    if gen is not None:
        raise UnsupportedError("gen was given, but PyTorch's default generator draws what is dropped; give None")


def _targets(*tensors: Any) -> tuple[Any, ...]:
    """Returns the tensors for gradients: dq, dk and dv of (q, k, v, dq, dk, dv), allocated where None."""
    for name, tensor in zip("qkv", tensors, strict=False):
        check_tensor(name, tensor)
    pairs = zip(tensors[:3], tensors[3:], strict=True)
    return tuple(torch.empty_like(like) if grad is None else grad for like, grad in pairs)
