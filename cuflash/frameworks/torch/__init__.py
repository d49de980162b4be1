"""Attention for PyTorch with gradients; it works with `torch.compile`, `torch.func`, autocast and CUDA graphs.

Example::

    from cuflash.frameworks.torch import attention, flex_attention

    out = attention(q, k, v, causal=True)    # (batch, seqlen, heads, head_dim); out.sum().backward() works
    out = flex_attention(q, k, v, score_mod, block_mask)    # (batch, heads, seqlen, head_dim), as PyTorch's own
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
    """`cuflash.forward` with gradients, which flow through out and through lse.

    q (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_kv, head_dim), v (batch, seqlen_k, heads_kv,
    head_dim_v), or without batch, or without batch and heads; any strides. Arguments, results and errors are those of
    `cuflash.forward`, and so are limits and rules for NaN; those of gradients are in `cuflash.backward`.
    `deterministic=True` asks for bitwise repeatable gradients. Under autocast floating-point inputs are cast to its
    dtype, as PyTorch's own attention does. `torch.use_deterministic_algorithms` is honoured; with warn_only=True, the
    gradient of a captured array that is too large for sums in a fixed order is computed with a warning. Tensors on the
    CPU take the NumPy path. Those on the device meta are validated, and results and gradients have shapes there.

    Variable-length sequences are given as there: packed (`cu_seqlens_q`, `cu_seqlens_k`), used in part (`seqused_q`,
    `seqused_k`), in pages (`page_table`) or in rows of a cache (`cache_batch_idx`); the last two have no gradients.
    lse of packed q is (heads_q, total_q). `num_splits` and `split_size` are of the forward alone. `check=True` reads
    these tensors on a GPU and checks them, as there, between the graphs of torch.compile; torch.func and traces refuse
    it. A call without such tensors has nothing to check.

    score_mod, mask_mod, block_mask, bias, sinks and dropout are those of `cuflash.forward`. Beside q, k and v, the
    bias, the sinks and all tensors of floats that score_mod refers to get gradients if they require them. With
    dropout_p and no dropout_seed, one is drawn on the device by PyTorch's generator, which checkpoints restore and CUDA
    graphs advance. Such calls run between the graphs of torch.compile, not in them, and have no `vmap`.

    It works under `torch.compile(fullgraph=True)` with dynamic shapes, under `torch.utils.checkpoint`, under
    `torch.func.grad`, `vjp` and `vmap`, eager and compiled, on several GPUs, and in CUDA graphs (a call before the
    capture must compile the kernels). Returns out, or (out, lse) with `return_lse`.

    Raises ProblemError, UnsupportedError or CompileError as `cuflash.forward` does; second derivatives, forward-mode
    differentiation, the backward of calls over cached keys and `vmap` over variable-length sequences are an
    UnsupportedError.

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
    """`torch.nn.attention.flex_attention.flex_attention` on cuflash: its arguments, results, layout and gradients.

    query (batch, heads, seqlen_q, head_dim), key and value (batch, heads_kv, seqlen_k, …): views of any strides, of
    which none is copied. Heads that differ need enable_gqa, and a batch of keys may be 1 beside a block mask.
    block_mask: PyTorch's BlockMask, whose mask_mod is taken and whose cells are made anew by each call, or one of
    `cuflash.create_block_mask`, which many calls share. A BlockMask without a mask_mod of its own shows whole blocks.
    kernel_options are hints to PyTorch's own kernels, and without effect here.

    Returns out (batch, heads, seqlen_q, head_dim_v), whose axes have the order of those of query in memory, except that
    head_dim_v is always the last. With return_lse it returns (out, lse), and with return_aux=AuxRequest(lse=True) (out,
    AuxOutput), where lse is a natural logarithm. It needs no torch.compile: a function is traced once and becomes a
    part of one kernel. Tensors of floats that score_mod refers to get gradients.

    Raises ProblemError where PyTorch's raises ValueError, and UnsupportedError for max_scores. Other errors, limits and
    rules for NaN are those of `attention`.

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
    """Returns (out, lse) of `attention` with mods, written to memory in which the axes of out have that order."""
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
    """`cuflash.triangle_attention` with gradients of q, k, v and bias: its arguments, results, limits and errors.

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
    """Returns the function that records a call as an op, or None if the call runs now. numbers: those of the call."""
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        # Numbers of NumPy are arrays for the compiler.
        return ops.uncompiled_by_op if any(isinstance(x, np.ndarray) for x in numbers) else ops.by_op
    is_recording = is_functionalizing() if is_transforming() else torch._C._len_torch_dispatch_stack()
    return ops.by_op if is_recording else None
