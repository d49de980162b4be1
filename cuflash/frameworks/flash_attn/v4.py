"""The functions of FlashAttention-4 (`flash_attn.cute`) on cuflash: the same names, order, defaults and results.

    from cuflash.frameworks.flash_attn_4_interface import flash_attn_func    # was: from flash_attn.cute import …

As there, all functions return (out, lse), where lse is None unless it is asked for by `return_lse`, and an open side of
`window_size` is None. Causal masks are aligned bottom-right, `causal=True` closes the right side of the window, and
`softcap=0` means none. Lengths and tables are int32 on the device, where alone they are read; bounds and windows may be
numbers or tensors without axes in host memory. `num_splits` is how many blocks share the keys of a query, 0 for a
choice. `pack_gqa` and `min_seqlen_k` change no result and are taken without being used.

Unlike there, tensors may be float32 or on the CPU and have any strides, head dims and page sizes, all gradients may be
`deterministic`, and gradients also flow through lse and into `learnable_sink` (heads_q,), float32 or the dtype of q:
one more logit of each head, without a value. A second product qv is refused, and so are functions of scores and masks,
which are CuTe code there; as Python functions of scalars, `cuflash.frameworks.torch.attention` takes them.

Source: flash_attn/cute/interface.py of FlashAttention's main branch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import ProblemError, UnsupportedError
from ...problem.options import WindowSize, check_flag, check_window
from .arguments import attend, lengths_of, window_of
from .mods import later_mod_kwargs

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]

Result = tuple[torch.Tensor, torch.Tensor | None]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: list[torch.Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
) -> Result:
    """Attention, with gradients: q (batch, seqlen_q, heads_q, head_dim), k, v (batch, seqlen_k, heads_kv, head_dim).

    Returns (out, lse): out (batch, seqlen_q, heads_q, head_dim of v), and lse (batch, heads_q, seqlen_q) float32 with
    `return_lse`, else None.

    Raises UnsupportedError for qv, gather_kv_indices, and functions of scores and masks with what
    belongs to them; ProblemError for a window that ends before the query; other errors as `cuflash.forward` does.
    Limits and rules for NaN are those of `cuflash.forward` and, for gradients, of `cuflash.backward`.

    >>> import torch
    >>> from cuflash.frameworks.flash_attn_4_interface import flash_attn_func
    >>> q, k, v = torch.randn(3, 2, 100, 4, 64)
    >>> out, _ = flash_attn_func(q, k, v, causal=True, window_size=(31, None))
    >>> out.shape
    torch.Size([2, 100, 4, 64])
    """
    _refuse(
        pack_gqa,
        qv=qv,
        gather_kv_indices=gather_kv_indices,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        block_sparse_tensors=block_sparse_tensors,
        block_sparse_tensors_bwd=block_sparse_tensors_bwd,
    )
    window = _window(causal, window_size)
    shared_args = softmax_scale, causal, window, softcap, deterministic, return_lse, "return_lse", num_splits
    result = attend(q, k, v, *shared_args, later_mod_kwargs("learnable_sink", learnable_sink))
    return result if return_lse else (result, None)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: Any = None,
    aux_tensors: list[torch.Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    return_lse: bool = False,
) -> Result:
    """Attention of packed sequences, with gradients, and of pages.

    With `cu_seqlens_q`, q is (total_q, heads_q, head_dim), and with `cu_seqlens_k`, k and v are (total_k, heads_kv,
    head_dim): sequence b has the rows cu_seqlens[b] … cu_seqlens[b + 1] - 1, of which the first `seqused_q[b]`,
    `seqused_k[b]` count where given. A side without is (batch, seqlen, heads, head_dim). With `page_table` (batch,
    max_pages), k and v are pages (num_pages, page_size, heads_kv, head_dim), which have no gradients; cu_seqlens_k,
    which FlashAttention-4 refuses there, then tells lengths alone. Packed rows past max_seqlen_q, and keys past
    max_seqlen_k, do not count.

    Returns (out, lse): out in the shape of q (with the head_dim of v), and lse (heads_q, total_q), or (batch, heads_q,
    seqlen_q) where q is not packed, float32 with `return_lse`, else None. Errors are those of `flash_attn_func`.
    """
    _refuse(
        pack_gqa,
        qv=qv,
        gather_kv_indices=gather_kv_indices,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
    )
    window = _window(causal, window_size)
    varlen_kwargs = lengths_of(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, max_seqlen_q, max_seqlen_k)
    shared_args = softmax_scale, causal, window, softcap, deterministic, return_lse, "return_lse", num_splits
    result = attend(q, k, v, *shared_args, later_mod_kwargs("learnable_sink", learnable_sink), **varlen_kwargs)
    return result if return_lse else (result, None)


def _refuse(pack_gqa: Any, **arguments: Any) -> None:
    """Raises for the first of the arguments that has no counterpart here."""
    if pack_gqa is not None:
        check_flag("pack_gqa", pack_gqa)
    for name, value in arguments.items():
        if value is None:
            continue
        if name in ("qv", "gather_kv_indices"):
            raise UnsupportedError(
                f"{name}: cuflash does not have it; leave None, or take FlashAttention-4's own function"
            )
        raise UnsupportedError(
            f"{name} belongs to functions of scores and masks in CuTe code, which cuflash cannot read; call "
            "cuflash.frameworks.torch.attention, whose score_mod(score, b, h, q_idx, k_idx), mask_mod(b, h, q_idx, "
            "k_idx) and block_mask (of cuflash.create_block_mask) are Python code, or take FlashAttention-4's own "
            "function"
        )


def _window(causal: Any, window_size: Any) -> Any:
    """The window as `attention` takes it, where a side of -1 is open. FlashAttention-4 opens both if their sum is < 0.

    Else it takes the number as it is: right of -1 would hide the query's own key.
    """
    check_flag("causal", causal)
    window = window_of(window_size)
    check_window(window)
    left, right = window
    if causal:
        right = 0
    if left is not None and right is not None and left + right < 0:
        return -1, -1
    if -1 in (left, right):
        raise ProblemError(
            f"window_size={tuple(window)}: beside such a side FlashAttention-4 takes -1 as a number of keys, which "
            "ends the window before the query's own key; give None for an open side"
        )
    return left, right
