"""Attention for PyTorch with gradients, under `torch.compile`, `torch.func`, autocast and in CUDA graphs.

Example::

    from cuflash.frameworks.torch import attention, flex_attention

    out = attention(q, k, v, causal=True)    # (batch, seqlen, heads, head_dim)
    out.sum().backward()
    out = flex_attention(q, k, v, score_mod, block_mask)    # (batch, heads, seqlen, head_dim), as in PyTorch
"""

from __future__ import annotations

from typing import Any, Literal, Never, Unpack, overload

import numpy as np
import torch
from torch.autograd import forward_ad

from ...errors import REFUSALS
from ...mods.tracing.operand import name_of_dtype
from ...ops.mods import ModArgs
from ...ops.triangle import attended
from ...problem.foreign import answers_foreign, refuse_foreign, renamed
from ...problem.operands import OPS, VARLEN_ARGS, VARLEN_OPS, VarlenArgs
from ...problem.options import WindowSize, check_flag, is_zero, options_key
from ...problem.signatures import CheckedOptions
from ...runtime.call import run
from . import mods, ops
from .autograd import attend, plain_ops
from .flex import NAMES, arguments_of_flex, axes_of_out, ordered, results_of_flex, wants_lse
from .mods import check_seed
from .tensors import (
    autocast,
    becomes_an_op,
    is_autocast,
    is_functionalizing,
    is_transformed,
    is_transforming,
    refuse_tangents,
)
from .tensors import check_tensor as check_tensor
from .varlen import check_values

__all__ = ["attention", "flex_attention", "triangle_attention"]


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[CheckedOptions[torch.Tensor]],
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[CheckedOptions[torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: bool,
    **options: Unpack[CheckedOptions[torch.Tensor]],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@answers_foreign
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    diagonal_offset: int | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    num_splits: int = 0,
    split_size: int | None = None,
    sm_margin: int = 0,
    score_mod: Any = None,
    mask_mod: Any = None,
    block_mask: Any = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Any = None,
    check: bool = False,
    **foreign: Never,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes `cuflash.forward` with gradients, which flow through out and through lse.

    Limits and rules for NaN are described in `cuflash.forward`, and for gradients in `cuflash.backward`.

    Parameters
    ----------
    q : Tensor (batch, seqlen_q, heads_q, head_dim)
        Queries: float16, bfloat16 or float32 (float64 on the CPU), with any strides. All of q, k and v may lack batch,
        or batch and heads.
    k : Tensor (batch, seqlen_k, heads_kv, head_dim)
        Keys; heads_q is a multiple of heads_kv.
    v : Tensor (batch, seqlen_k, heads_kv, head_dim_v)
        Values.
    softmax_scale : float, default 1/sqrt(head_dim)
        A finite number above 0.
    causal : bool, default False
        Shows key j to query i only if `j <= i + diagonal_offset`.
    window_size : (left, right), default (-1, -1)
        Numbers of visible keys on both sides of the diagonal; -1 or None for an open side.
    diagonal_offset : int, default seqlen_k - seqlen_q
        Alignment of causal masks and windows: bottom-right by default; 0 is top-left.
    softcap : float, default 0.0
        A cap c > 0 turns each score into c tanh(score / c).
    deterministic : bool, default False
        Makes gradients bitwise repeatable.
    return_lse : bool, default False
        Returns (out, lse) instead of out.
    cu_seqlens_q, cu_seqlens_k : int32 Tensor (batch + 1,), optional
        Bounds of packed sequences. That side is then (total, heads, head_dim).
    max_seqlen_q, max_seqlen_k : int, optional
        Bounds on the lengths. Rows past them do not count.
    seqused_q, seqused_k : int32 Tensor (batch,), optional
        Numbers of rows that count in each sequence.
    page_table : int32 Tensor (batch, max_pages), optional
        Pages of each sequence; k and v are then (num_pages, page_size, heads_kv, …), without gradients.
    cache_batch_idx : int32 Tensor (batch,), optional
        Row of the cache that each sequence reads; k and v then have no gradients.
    num_splits : int, default 0
        Largest number of thread blocks that share the keys of a query in forward; 0 for an automatic choice.
    split_size : int, optional
        A multiple of 128, for batch-invariant results of forward (see `cuflash.forward`).
    sm_margin : int, default 0
        Number of SMs that the kernels leave to others, such as NCCL's beside them (see `cuflash.forward`).
    score_mod : function (score, b, h, q_idx, k_idx), optional
        Returns the score that replaces a scaled one. Float tensors that it refers to get gradients.
    mask_mod : function (b, h, q_idx, k_idx), optional
        Returns True for visible keys, besides causal and window_size.
    block_mask : BlockMask, optional
        A mask by `cuflash.create_block_mask`, together with its mask_mod.
    bias : Tensor, optional
        Floats to add to scores, or bools (True is visible), broadcastable to (batch, heads_q, seqlen_q, seqlen_k).
        A float bias gets a gradient.
    sinks : Tensor (heads_q,), optional
        One more logit of each head, without a value; float32 or q's dtype. It gets a gradient.
    dropout_p : float in [0, 1), default 0.0
        Probability at which weights are dropped.
    dropout_seed : int or Tensor, optional
        Seed as in `cuflash.forward`. By default PyTorch's generator draws one on the device: checkpoints restore it,
        and CUDA graphs advance it.
    check : bool, default False
        Reads lengths and indices on a GPU once and checks them. The host waits, and graphs of torch.compile end here.

    Returns
    -------
    out : Tensor (batch, seqlen_q, heads_q, head_dim_v)
        In q's rank and dtype. A query that sees no key has 0.
    lse : Tensor (batch, heads_q, seqlen_q), with `return_lse`
        Float32 (float64 for float64) log-sum-exp of visible scores; (heads_q, total_q) for packed q.

    Raises
    ------
    ProblemError, UnsupportedError, CompileError
        As in `cuflash.forward`.
    UnsupportedError
        For second derivatives, forward-mode differentiation, backward over cached keys, and vmap over variable-length
        sequences. Also for `check=True` under torch.func and in traces.

    Notes
    -----
    It works under `torch.utils.checkpoint`, and `torch.func.grad`, `vjp` and `vmap`. Without mods it works under
    `torch.compile(fullgraph=True)`, with dynamic shapes. It runs on several GPUs, and in CUDA graphs whose kernels were
    compiled before the capture. Calls with mods (score_mod, mask_mod, block_mask, bias, sinks or dropout) run between
    graphs of torch.compile, so `fullgraph=True` raises for them. They have no vmap.

    Autocast casts floating-point inputs to its dtype, as for PyTorch's attention.
    `torch.use_deterministic_algorithms` is honoured. With warn_only=True, a captured array too large for sums in a
    fixed order gets its gradient with a warning. Tensors on the CPU run in NumPy. Tensors on the device meta
    are validated, and results and gradients have shapes there.

    Examples
    --------
    >>> import torch
    >>> from cuflash.frameworks.torch import attention
    >>> q, k, v = (torch.randn(2, 100, 4, 64, requires_grad=True) for _ in range(3))
    >>> out = attention(q, k, v, causal=True)
    >>> out.sum().backward()
    >>> out.shape, q.grad.shape
    (torch.Size([2, 100, 4, 64]), torch.Size([2, 100, 4, 64]))
    """
    if foreign:
        raise refuse_foreign(attention, foreign)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor)
    check_flag("return_lse", return_lse)
    check_flag("deterministic", deterministic)
    if forward_ad._current_level >= 0:
        refuse_tangents(q=q, k=k, v=v)
    if is_autocast(q):
        q, k, v = autocast(q, k, v)
    varlen_args: VarlenArgs | tuple[()] = ()
    if not cu_seqlens_q is cu_seqlens_k is seqused_q is seqused_k is page_table is cache_batch_idx is None:
        varlen_args = VarlenArgs(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, cache_batch_idx)
        for name, tensor in zip(VARLEN_ARGS, varlen_args, strict=True):
            if tensor is not None:
                check_tensor(name, tensor)
    is_required = bool(deterministic)
    deterministic = is_required or torch.are_deterministic_algorithms_enabled()
    keywords: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "diagonal_offset": diagonal_offset,
        "softcap": softcap,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "num_splits": num_splits,
        "split_size": split_size,
        "sm_margin": sm_margin,
        "dropout_p": dropout_p,
    }
    if check is not False:
        check_values(check, q, k, v, varlen_args or VarlenArgs(), keywords)
    if not (score_mod is mask_mod is block_mask is bias is sinks is None and is_zero(dropout_p)):
        mod_args = ModArgs(score_mod, mask_mod, block_mask, bias, sinks, dropout_p)
        out, lse = mods.mod_attention(q, k, v, mod_args, dropout_seed, keywords, is_required, varlen_args)
        return (out, lse) if return_lse else out
    if dropout_seed is not None:
        check_seed(dropout_seed, q)
    is_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if by_op := _recorded(softmax_scale, softcap, diagonal_offset):
        out, lse = by_op(q, k, v, keywords | dict(zip(VARLEN_ARGS, varlen_args, strict=False)), deterministic)
        return (out, lse) if return_lse else out
    options, is_varlen = options_key(**keywords), bool(varlen_args)
    is_func = is_transforming() or is_transformed(q) or is_transformed(k) or is_transformed(v)
    if not (is_func or is_grad):
        op = (VARLEN_OPS if is_varlen else OPS)["forward"]
        results = run(op, (q, k, v, *varlen_args), options, 1 + bool(return_lse))
        return results if return_lse else results[0]
    out, lse = attend(plain_ops(options, deterministic, is_varlen), is_func, q, k, v, *varlen_args)
    return (out, lse) if return_lse else out


@answers_foreign
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
    **foreign: Never,
) -> Any:
    """Computes PyTorch's `flex_attention` on cuflash, with its arguments, results and gradients.

    Parameters
    ----------
    query : Tensor (batch, heads, seqlen_q, head_dim)
        Queries, with any strides, which are never copied.
    key, value : Tensor (batch, heads_kv, seqlen_k, …)
        Keys and values. Beside a block mask their batch may be 1.
    score_mod : function (score, b, h, q_idx, k_idx), optional
        Returns the new score. Float tensors that it refers to get gradients.
    block_mask : BlockMask, optional
        PyTorch's, or one by `cuflash.create_block_mask`, which many calls share. Of PyTorch's each call reads the
        mask_mod and finds the visible tiles again; without a mask_mod it shows whole blocks.
    scale : float, default 1/sqrt(head_dim)
        Softmax scale.
    enable_gqa : bool, default False
        Must be True if heads differs from heads_kv.
    return_lse : bool, default False
        Returns (out, lse).
    kernel_options : dict, optional
        Hints to PyTorch's kernels, without effect here.
    return_aux : AuxRequest, optional
        `AuxRequest(lse=True)` returns (out, AuxOutput).

    Returns
    -------
    out : Tensor (batch, heads, seqlen_q, head_dim_v)
        Its axes have query's order in memory, except that head_dim_v is always last.
    lse : Tensor (batch, heads, seqlen_q), on request
        A natural logarithm.

    Raises
    ------
    ProblemError
        Where PyTorch raises ValueError.
    UnsupportedError
        For `AuxRequest(max_scores=True)`. Other errors, limits and rules for NaN are described in `attention`.

    Notes
    -----
    It needs no torch.compile: a function is traced once and becomes a part of one kernel.

    Examples
    --------
    >>> import torch
    >>> from cuflash.frameworks.torch import flex_attention
    >>> query, key, value = torch.randn(3, 2, 4, 100, 64)
    >>> flex_attention(query, key, value, lambda score, b, h, q_idx, k_idx: score - abs(q_idx - k_idx)).shape
    torch.Size([2, 4, 100, 64])
    """
    if foreign:
        raise refuse_foreign(flex_attention, foreign)
    needs_lse = wants_lse(return_lse, return_aux)
    q, k, v, masks = arguments_of_flex(query, key, value, block_mask, enable_gqa, kernel_options, return_aux)
    try:
        out_axes = axes_of_out(query)
        is_op = score_mod is None and not masks and bool(_recorded() or becomes_an_op())
        if out_axes and not is_op:
            out, lse = _in_order(out_axes, q, k, v, scale, ModArgs(score_mod, **masks))
        else:
            results: Any = attention(q, k, v, softmax_scale=scale, score_mod=score_mod, return_lse=needs_lse, **masks)
            out, lse = results if needs_lse else (results, None)
            out = ordered(out, out_axes) if out_axes else out  # the op's out has no other order
    except REFUSALS as error:
        raise renamed(error, NAMES) from error.__cause__
    return results_of_flex(out.transpose(1, 2), lse if needs_lse else None, return_lse, return_aux)


def _in_order(
    out_axes: tuple[int, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, mod_args: ModArgs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) of `attention` with mods; the axes of out have that order in memory."""
    if forward_ad._current_level >= 0:
        refuse_tangents(query=q, key=k, value=v)
    if is_autocast(q):
        q, k, v = autocast(q, k, v)
    out, lse = mods.mod_attention(q, k, v, mod_args, None, {"softmax_scale": scale}, False, (), out_axes)
    return out, lse


@answers_foreign
def triangle_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """Computes `cuflash.triangle_attention` with gradients of q, k, v and bias.

    Parameters
    ----------
    q : Tensor (batch, rows, heads, seqlen_q, head_dim)
        Queries, with any strides.
    k, v : Tensor (batch, rows, heads_kv, seqlen_k, …)
        Keys and values.
    bias : Tensor (batch, heads, seqlen_q, seqlen_k)
        Floats, added to the scores of every row without a copy.
    mask : bool Tensor (batch, rows, seqlen_k), optional
        True for visible keys.
    softmax_scale : float, default 1/sqrt(head_dim)
        A finite number above 0.

    Returns
    -------
    out : Tensor (batch, rows, heads, seqlen_q, head_dim_v)
        A query that sees no key has 0.

    Raises
    ------
    ProblemError, UnsupportedError, CompileError
        As in `attention`, which also describes limits.

    Examples
    --------
    >>> import torch
    >>> from cuflash.frameworks.torch import triangle_attention
    >>> q, k, v = torch.randn(3, 1, 50, 4, 50, 32)
    >>> bias = torch.zeros(1, 4, 50, 50, requires_grad=True)
    >>> triangle_attention(q, k, v, bias).sum().backward()
    >>> bias.grad.shape
    torch.Size([1, 4, 50, 50])
    """

    def dtype_of(name: str, x: Any) -> str:
        check_tensor(name, x)
        return name_of_dtype(x.dtype)

    def numbers(count: int, like: torch.Tensor) -> torch.Tensor:
        return torch.arange(count, device=like.device)

    out: torch.Tensor = attended(attention, dtype_of, numbers, q, k, v, bias, mask, softmax_scale)
    return out


def _recorded(*numbers: Any) -> Any:
    """Returns the function that records a call as an op, or None if the call runs now.

    numbers: softmax_scale and the like, whose types decide under torch.compile.
    """
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        # Numbers of NumPy are arrays for the compiler.
        return ops.uncompiled_by_op if any(isinstance(x, np.ndarray) for x in numbers) else ops.by_op
    is_recording = is_functionalizing() if is_transforming() else torch._C._len_torch_dispatch_stack()
    return ops.by_op if is_recording else None
