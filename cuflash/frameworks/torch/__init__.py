"""Attention for PyTorch with gradients; it works with `torch.compile`, `torch.func`, autocast and CUDA graphs.

Example::

    from cuflash.frameworks.torch import attention, flex_attention

    out = attention(q, k, v, causal=True)    # (batch, seqlen, heads, head_dim); out.sum().backward() works
    out = flex_attention(q, k, v, score_mod, block_mask)    # (batch, heads, seqlen, head_dim), as PyTorch's own
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.autograd import Function, forward_ad

from ...errors import ProblemError, UnsupportedError
from ...mods.tracing.operand import name_of_dtype
from ...ops.backward import backward
from ...ops.forward import forward
from ...ops.mods import ModArgs
from ...ops.triangle import attended
from ...problem.operands import VARLEN_ARGS, VarlenArgs
from ...problem.options import Options, WindowSize, check_flag, is_zero
from . import mods, ops
from .flex import arguments_of_flex, results_of_flex, wants_lse
from .mods import check_pulled, check_seed, is_watched, mod_attention
from .ops import BOUNDS, Arguments, by_op, given, refuse_cached, refuse_twice, whole
from .tensors import (
    TANGENT,
    autocast,
    is_autocast,
    is_functionalizing,
    is_transformed,
    is_transforming,
    refuse_tangents,
)
from .tensors import becomes_an_op as becomes_an_op
from .tensors import check_tensor as check_tensor

__all__ = ["attention", "flex_attention", "triangle_attention"]


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
) -> Any:
    """`cuflash.forward` with gradients, which flow through out and through lse.

    q (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_kv, head_dim), v (batch, seqlen_k, heads_kv,
    head_dim_v), or without batch, or without batch and heads; any strides. Arguments, results and errors are those of
    `cuflash.forward`, and so are limits and rules for NaN; those of gradients are in `cuflash.backward`.
    `deterministic=True` asks for bitwise repeatable gradients. Under autocast floating-point inputs are cast to its
    dtype, as PyTorch's own attention does. `torch.use_deterministic_algorithms` is honoured. Tensors on the CPU take
    the NumPy path.

    Variable-length sequences are given as there: packed (`cu_seqlens_q`, `cu_seqlens_k`), used in part (`seqused_q`,
    `seqused_k`), in pages (`page_table`) or in rows of a cache (`cache_batch_idx`); the last two have no gradients.
    lse of packed q is (heads_q, total_q). `num_splits` and `split_size` are of the forward alone.

    score_mod, mask_mod, block_mask, bias, sinks and dropout are those of `cuflash.forward`. Beside q, k and v, the
    bias, the sinks and all tensors of floats that score_mod refers to get gradients if they require them. With
    dropout_p and no dropout_seed, one is drawn on the device by PyTorch's generator, which checkpoints restore and CUDA
    graphs advance. Such calls run between the graphs of torch.compile, not in them, and have no `vmap`.

    It works under `torch.compile(fullgraph=True)` with dynamic shapes, under `torch.utils.checkpoint`, eagerly under
    `torch.func.grad`, `vjp` and `vmap`, on several GPUs, and in CUDA graphs (a call before the capture must compile the
    kernels). Returns out, or (out, lse) with `return_lse`.

    Raises ProblemError, UnsupportedError or CompileError as `cuflash.forward` does; second derivatives, forward-mode
    differentiation, gradients of cached keys and `vmap` over variable-length sequences are an UnsupportedError.

    >>> import torch
    >>> from cuflash.frameworks.torch import attention
    >>> q, k, v = (torch.randn(2, 100, 4, 64, requires_grad=True) for _ in range(3))
    >>> out = attention(q, k, v, causal=True)
    >>> out.sum().backward()
    >>> out.shape, q.grad.shape
    (torch.Size([2, 100, 4, 64]), torch.Size([2, 100, 4, 64]))
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor)
    check_flag("return_lse", return_lse)
    check_flag("deterministic", deterministic)
    if forward_ad._current_level >= 0:
        refuse_tangents(q=q, k=k, v=v)
    if is_autocast(q):
        q, k, v = autocast(q, k, v)
    varlen_args = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, cache_batch_idx
    has_varlen_args = (
        not cu_seqlens_q is cu_seqlens_k is seqused_q is seqused_k is page_table is cache_batch_idx is None
    )
    if has_varlen_args:
        for name, tensor in zip(VARLEN_ARGS, varlen_args, strict=True):
            if tensor is not None:
                check_tensor(name, tensor)
    if not (score_mod is mask_mod is block_mask is bias is sinks is None and is_zero(dropout_p)):
        mod_args = ModArgs(score_mod, mask_mod, block_mask, bias, sinks, dropout_p)
        is_compiling = torch.compiler.is_compiling()
        attend = mods.uncompiled_mod_attention if is_compiling else mod_attention
        options = Options(
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            diagonal_offset=diagonal_offset,
            softcap=softcap,
            deterministic=deterministic,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            num_splits=num_splits,
            split_size=split_size,
            dropout_p=dropout_p,
        )
        lengths = VarlenArgs(*varlen_args) if has_varlen_args else None
        out, lse = attend(q, k, v, mod_args, dropout_seed, options, lengths)
        return (out, lse) if return_lse else out
    if dropout_seed is not None:
        check_seed(dropout_seed, q)
    run = _way(q, k, v, (softmax_scale, softcap, diagonal_offset))
    if run is None:
        return forward(
            q,
            k,
            v,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            diagonal_offset=diagonal_offset,
            softcap=softcap,
            return_lse=return_lse,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            seqused_q=seqused_q,
            seqused_k=seqused_k,
            page_table=page_table,
            cache_batch_idx=cache_batch_idx,
            num_splits=num_splits,
            split_size=split_size,
        )
    deterministic = bool(deterministic) or torch.are_deterministic_algorithms_enabled()
    keywords: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "diagonal_offset": diagonal_offset,
        "softcap": softcap,
    }
    more: tuple[Any, ...] = ()  # the keywords of the forward alone, then the tensors of VARLEN_ARGS
    if has_varlen_args or not max_seqlen_q is max_seqlen_k is None:
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            refuse_cached(page_table, cache_batch_idx)
        bounds = zip(BOUNDS, (max_seqlen_q, max_seqlen_k), strict=True)
        keywords |= {name: bound for name, bound in bounds if bound is not None}  # backward takes them, too
        more = ({}, *varlen_args)
    # why the type: False is refused, and equals 0.
    if type(num_splits) is not int or num_splits != 0 or split_size is not None:
        splits = {"num_splits": num_splits}
        more = (splits if split_size is None else {**splits, "split_size": split_size}, *more[1:])
    out, lse = run(q, k, v, keywords, deterministic, *more)
    return (out, lse) if return_lse else out


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
) -> Any:
    """`torch.nn.attention.flex_attention.flex_attention` on cuflash: its arguments, results, layout and gradients.

    query (batch, heads, seqlen_q, head_dim), key and value (batch, heads_kv, seqlen_k, …): views of any strides, of
    which none is copied. Heads that differ need enable_gqa, and a batch of keys may be 1 beside a block mask.
    block_mask: PyTorch's BlockMask, whose mask_mod is taken and whose cells are made anew by each call, or one of
    `cuflash.create_block_mask`, which many calls share. A BlockMask without a mask_mod of its own shows whole blocks.
    kernel_options are hints to PyTorch's own kernels, and without effect here.

    Returns out (batch, heads, seqlen_q, head_dim_v), a view of memory by seqlen; with return_lse (out, lse), and with
    return_aux=AuxRequest(lse=True) (out, AuxOutput), where lse is a natural logarithm. It needs no torch.compile: a
    function is traced once and becomes a part of one kernel. Tensors of floats that score_mod refers to get gradients.

    Raises ProblemError where PyTorch's raises ValueError, and UnsupportedError for max_scores. Other errors, limits and
    rules for NaN are those of `attention`.

    >>> import torch
    >>> from cuflash.frameworks.torch import flex_attention
    >>> query, key, value = torch.randn(3, 2, 4, 100, 64)
    >>> flex_attention(query, key, value, lambda score, b, h, q_idx, k_idx: score - abs(q_idx - k_idx)).shape
    torch.Size([2, 4, 100, 64])
    """
    asks_lse = wants_lse(return_lse, return_aux)
    q, k, v, masks = arguments_of_flex(query, key, value, block_mask, enable_gqa, kernel_options, return_aux)
    results = attention(q, k, v, softmax_scale=scale, score_mod=score_mod, return_lse=asks_lse, **masks)
    out, lse = results if asks_lse else (results, None)
    return results_of_flex(out.transpose(1, 2), lse, return_lse, return_aux)


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


def _way(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, numbers: tuple[Any, ...]) -> Any:
    """What a call on these tensors goes through: a function of its own, or None for `cuflash.forward`."""
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        # why: numbers of NumPy are arrays for the compiler.
        return ops.uncompiled_by_op if any(isinstance(x, np.ndarray) for x in numbers) else by_op
    if is_transforming():
        return by_op if is_functionalizing() else _Transformed.apply
    if torch._C._len_torch_dispatch_stack():
        return by_op
    if is_transformed(q) or is_transformed(k) or is_transformed(v):  # the tensor outlived its transform
        return _Transformed.apply
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _apply
    return None


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.options = inputs[3:5]
    ctx.save_for_backward(*inputs[:3], *output, *inputs[6:])
    ctx.set_materialize_grads(False)


class _Attention(Function):
    """Eager calls. why neither the custom op nor a separate setup_context: they cost 14 and 12 µs more."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        keywords = inputs[3] if len(inputs) == 5 else whole(inputs[3], *inputs[5:])
        result = forward(*inputs[:3], return_lse=True, **keywords)
        _keep(ctx, inputs, result)
        return result

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        check_pulled(dout, dlse)
        q, k, v, out, lse, *varlen_args = (
            ctx.saved_tensors
        )  # why only once: under a checkpoint they can be read only once
        tensors: tuple[Any, ...] = (given(dout, out), q, k, v, out, lse, dlse)
        run: Any = _Gradients.apply if is_watched(tensors) else gradients
        return *run(*tensors, *ctx.options, *varlen_args), *(None,) * 9  # autograd takes more than there are


# why not `_Attention.apply`: it takes 5 µs to ask whether torch.func is or was active, which is known here.
_apply: Any = super(Function, _Attention).apply


class _Transformed(Function):
    """Calls under torch.func, with its rules for vmap and jvp."""

    @staticmethod
    def forward(q: Any, k: Any, v: Any, keywords: dict[str, Any], deterministic: bool, *more: Any) -> Any:
        if torch._C._len_torch_dispatch_stack():
            return by_op(q, k, v, keywords, deterministic, *more)
        return forward(q, k, v, return_lse=True, **(whole(keywords, *more) if more else keywords))

    setup_context = staticmethod(_keep)
    backward = _Attention.backward

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UnsupportedError(TANGENT.format(name="an input"))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        _refuse_mapped(arguments[6:])
        rank, *others = (x.dim() - (axis is not None) for x, axis in zip(arguments[:3], in_dims, strict=False))
        if others != [rank, rank]:
            raise ProblemError(f"q, k and v have ranks {rank}, {others[0]} and {others[1]} under vmap; give all alike")
        folded = [_fold(x, axis, info.batch_size, heads=2) for x, axis in zip(arguments[:3], in_dims, strict=False)]
        out, lse = _Transformed.apply(*folded, *arguments[3:])
        of_q = _mapped(arguments[0], in_dims[0], info.batch_size).shape
        return (_unfold(out, of_q, heads=2), _unfold(lse, of_q, heads=1)), (0, 0)


def gradients(*arguments: Any) -> Any:
    """dq, dk and dv of dout, q, k, v, out, lse, dlse, the keywords, whether it is deterministic, and VARLEN_ARGS.

    The last may also be among the keywords.
    """
    dout, q, k, v, out, lse, dlse, keywords, deterministic, *varlen_args = arguments
    if varlen_args:
        keywords = whole(keywords, {}, *varlen_args)
    if becomes_an_op():
        of_both = Arguments.of(keywords, deterministic)[:15]
        return torch.ops.cuflash.attention_backward(dout, q, k, v, out, lse, dlse, *of_both)
    return backward(dout, q, k, v, out, lse, dlse=dlse, deterministic=deterministic, **keywords)


class _Gradients(Function):
    """Gradients under torch.func, and where someone may differentiate them again: only that itself is refused."""

    forward, backward = staticmethod(gradients), staticmethod(refuse_twice)
    setup_context = staticmethod(lambda ctx, inputs, output: None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UnsupportedError(TANGENT.format(name="an input of the gradients"))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        _refuse_mapped(arguments[9:])
        heads = (2, 2, 2, 2, 2, 1, 1)
        folded = [
            _fold(x, axis, info.batch_size, at) for x, axis, at in zip(arguments[:7], in_dims, heads, strict=False)
        ]
        gradients = _Gradients.apply(*folded, *arguments[7:])
        of_q = _mapped(arguments[1], in_dims[1], info.batch_size).shape
        return tuple(_unfold(x, of_q, heads=2) for x in gradients), (0, 0, 0)


def _refuse_mapped(varlen_args: tuple[Any, ...]) -> None:
    named = [name for name, tensor in zip(VARLEN_ARGS, varlen_args, strict=False) if tensor is not None]
    if named:
        raise UnsupportedError(
            f"{', '.join(named)} under vmap: variable-length sequences have no axis to map over; pack what is "
            "mapped as further sequences of one call, or call in a loop"
        )


def _fold(tensor: Any, axis: int | None, size: int, heads: int) -> Any:
    """A mapped operand as 4-D (lse as 3-D), its mapped axis folded into batch; `heads` is its axis of heads in 4-D."""
    if tensor is None:
        return None
    tensor = _mapped(tensor, axis, size)
    rank = 4 if heads == 2 else 3
    if tensor.dim() == rank - 1:  # it has neither batch nor heads
        tensor = tensor.unsqueeze(heads)
    return tensor.flatten(0, 1) if tensor.dim() == rank + 1 else tensor


def _unfold(tensor: torch.Tensor, q: torch.Size, heads: int) -> torch.Tensor:
    """Undoes `_fold` on a result; `q` is the shape of q with the mapped axis in front."""
    if len(q) == 5:
        return tensor.unflatten(0, q[:2])
    return tensor.squeeze(heads) if len(q) == 3 else tensor


def _mapped(tensor: torch.Tensor, axis: int | None, size: int) -> torch.Tensor:
    """The operand with the mapped axis in front; one without that axis is expanded."""
    return tensor.expand(size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
