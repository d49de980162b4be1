"""The dense functions of FlashAttention-3's interface on cuflash: the same names, order, defaults and results.

    from cuflash.frameworks.flash_attn_3_interface import flash_attn_func    # was: from flash_attn_interface import …

The order of arguments differs from version 2, whose functions are in `cuflash.frameworks.flash_attn_interface`; what
that module says about masks, dtypes and refused arguments also holds here. cuflash schedules each call itself, so it
accepts only `num_splits` 0 or 1, `pack_gqa=None` and `sm_margin=0`.

Source: hopper/flash_attn_interface.py and hopper/flash_api.cpp of FlashAttention's main branch; in release 2.8.3 these
functions have no `return_attn_probs`.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ProblemError, UnsupportedError
from ..ops.merge import merge_states
from ..problem.options import WindowSize
from .flash_attn_interface import dense, flash_attn_varlen_func, flash_attn_with_kvcache, refused, unpack
from .torch import check_tensor

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

_ELSEWHERE = "leave the default, or take FlashAttention-3's own function"


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
) -> Any:
    """Attention, with gradients: q (batch, seqlen_q, heads_q, head_dim), k, v (batch, seqlen_k, heads_kv, head_dim).

    Returns out (batch, seqlen_q, heads_q, head_dim of v), or (out, lse) with `return_attn_probs`; lse is (batch,
    heads_q, seqlen_q) float32.

    Raises UnsupportedError for qv, descales, attention_chunk and scheduling, other errors as `cuflash.forward` does.
    """
    _refuse(softmax_scale, attention_chunk, sm_margin, qv, q_descale, k_descale, v_descale)
    if num_splits not in (0, 1):
        raise UnsupportedError(
            f"num_splits={num_splits}: cuflash chooses how keys are split; give 0 or 1, or split the keys yourself and "
            "merge the results with flash_attn_combine"
        )
    if pack_gqa is not None:
        raise UnsupportedError(f"pack_gqa={pack_gqa}: cuflash chooses how heads share a tile; leave None")
    return dense(q, k, v, softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs)


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
    _refuse(softmax_scale, attention_chunk, sm_margin, None, q_descale, k_descale, v_descale)
    return dense(q, k, v, softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs)


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
    for name, tensor in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        check_tensor(name, tensor)
        if tensor.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError(
                f"{name} requires grad, but merging has no gradients; detach it, or take flash_attn_func of all keys"
            )
    if out_partial.ndim != 5 or lse_partial.shape != out_partial.shape[:-1]:
        raise ProblemError(
            f"out_partial has shape {tuple(out_partial.shape)} and lse_partial {tuple(lse_partial.shape)}; give "
            "(num_splits, batch, seqlen, heads, head_dim) and (num_splits, batch, seqlen, heads)"
        )
    for name, tensor in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        if tensor.dtype != torch.float32:
            raise ProblemError(f"{name} has dtype {tensor.dtype}; give float32")
    dtype = torch.float32 if out_dtype is None else out_dtype
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ProblemError(f"out_dtype={out_dtype}; give torch.float32, torch.float16 or torch.bfloat16")
    wanted = (out_partial.shape[1:], dtype, out_partial.device)
    if out is not None and (out.shape, out.dtype, out.device) != wanted:
        raise ProblemError(
            f"out has shape {tuple(out.shape)} and dtype {out.dtype} on {out.device}; give {tuple(wanted[0])} and "
            f"{dtype} on {wanted[2]}"
        )
    whole, lse = merge_states(out_partial.unbind(), lse_partial.transpose(2, 3).unbind())
    return whole.to(dtype) if out is None else out.copy_(whole), lse.transpose(1, 2)


# Schedules made ahead serve `flash_attn_with_kvcache`.
get_scheduler_metadata = refused("get_scheduler_metadata", "cuflash makes its schedule in each call; pass none")


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


def _refuse(softmax_scale: Any, attention_chunk: Any, sm_margin: Any, *tensors: Any) -> None:
    """Raises for arguments that both functions have; the tensors are qv and the three descales."""
    if softmax_scale == 0:
        raise ProblemError(
            f"softmax_scale={softmax_scale} is not positive; give None for 1/sqrt(head_dim). If this was meant as "
            "dropout_p, take cuflash.frameworks.flash_attn_interface: its order is that of flash-attn 2"
        )
    for name, tensor in zip(("qv", "q_descale", "k_descale", "v_descale"), tensors, strict=True):
        if tensor is not None:
            raise UnsupportedError(f"{name}: cuflash has neither a second product qv nor 8-bit inputs; {_ELSEWHERE}")
    for name, value in (("attention_chunk", attention_chunk), ("sm_margin", sm_margin)):
        if value != 0:
            raise UnsupportedError(f"{name}={value}: cuflash does not have it; {_ELSEWHERE}")
