"""The dense functions of the flash-attn package, version 2, on cuflash: the same names, order, defaults and results.

    from cuflash.frameworks.flash_attn_interface import flash_attn_func    # was: from flash_attn import flash_attn_func

FlashAttention-3 uses the same names but another order of arguments; its functions are in
`cuflash.frameworks.flash_attn_3_interface`. A positional call that is meant for the other module is refused: the fourth
argument is `dropout_p` here, which must be 0.0, and `softmax_scale` there, which must be None or positive.

As in flash-attn, causal masks are aligned bottom-right, `causal=True` closes the right side of `window_size`, -1 is an
open side, and `softcap <= 0` means no softcap. Unlike there, tensors may be float32 or on the CPU and have any strides,
v may have its own head dim, and gradients also flow through lse. A query that sees no key has lse -inf, which merges
correctly; flash-attn 2 gives +inf. Arguments that are not supported are refused, never ignored.

Source: flash_attn/flash_attn_interface.py and csrc/flash_attn/flash_api.cpp of flash-attn 2.8.3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ..errors import ProblemError, UnsupportedError
from ..problem.options import WindowSize, check_flag
from .torch import attention, check_tensor

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


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
    (batch, heads_q, seqlen_q) float32, and S_dmask is empty, as in flash-attn without dropout.

    Raises UnsupportedError for dropout and ALiBi; other errors are those of `cuflash.forward`.
    """
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)):
        raise ProblemError(
            f"dropout_p={dropout_p!r} is a {type(dropout_p).__name__}; give 0.0. It stands before softmax_scale here, "
            "as in flash-attn 2; the order of flash-attn 3 is in cuflash.frameworks.flash_attn_3_interface"
        )
    if dropout_p != 0:
        raise UnsupportedError(
            f"dropout_p={dropout_p}: cuflash has no dropout; give 0.0. If this was meant as softmax_scale, pass it by "
            "name, or take cuflash.frameworks.flash_attn_3_interface, where it stands fourth"
        )
    if alibi_slopes is not None:
        raise UnsupportedError("alibi_slopes: cuflash has no ALiBi; leave None, or take flash-attn's own function")
    result = dense(q, k, v, softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs)
    return (*result, q.new_empty(0)) if return_attn_probs else result


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


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: WindowSize,
    softcap: float,
    deterministic: bool,
    return_lse: bool,
) -> Any:
    """Computes out, or (out, lse), from the arguments that both versions of the interface share."""
    check_flag("return_attn_probs", return_lse)
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)):
        raise ProblemError(f"softcap={softcap!r} is a {type(softcap).__name__}; give a number, 0.0 for none")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor)
        # why: a 3-D tensor is (total, heads, head_dim) of a misplaced varlen call, not a batch of one.
        if tensor.ndim != 4:
            raise ProblemError(f"{name} has shape {tuple(tensor.shape)}; give (batch, seqlen, heads, head_dim)")
    return attention(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=0.0 if softcap <= 0 else softcap,
        deterministic=deterministic,
        return_lse=return_lse,
    )


def unpack(name: str, packed: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """Views (batch, seqlen, heads, head_dim) of the tensors in one (batch, seqlen, count, heads, head_dim)."""
    check_tensor(name, packed)
    if packed.ndim != 5 or packed.shape[2] != count:
        raise ProblemError(
            f"{name} has shape {tuple(packed.shape)}; give (batch, seqlen, {count}, heads, head_dim), or the "
            f"{count} tensors by themselves"
        )
    return tuple(packed.unbind(2))


def refused(function: str, why: str) -> Callable[..., NoReturn]:
    """A function of the interface that is not supported, whatever its arguments."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"{function}: {why}")

    refuse.__name__ = refuse.__qualname__ = function
    refuse.__doc__ = f"Raises UnsupportedError: {why}."
    return refuse


NO_LENGTHS = (
    "cuflash has no sequences of several lengths in one tensor (cu_seqlens) yet; call flash_attn_func for each "
    "sequence, or for each group of equal lengths"
)
flash_attn_varlen_func = refused("flash_attn_varlen_func", NO_LENGTHS)
flash_attn_varlen_kvpacked_func = refused("flash_attn_varlen_kvpacked_func", NO_LENGTHS)
flash_attn_varlen_qkvpacked_func = refused("flash_attn_varlen_qkvpacked_func", NO_LENGTHS)
flash_attn_with_kvcache = refused(
    "flash_attn_with_kvcache",
    "cuflash has no attention that updates, looks up or rotates a cache yet; write the new keys to the cache, then "
    "call flash_attn_func with the part that is filled, k_cache[:, :length]",
)
