"""Autograd Functions of attention over an op and its inputs, with and without mods.

Inputs are `Ops`, which hold no tensor, then q, k, v, the arrays of `VarlenArgs` (varlen ops alone), and the inputs of
mods. All tensors are saved as autograd's saved tensors.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function, forward_ad

from ...errors import UnsupportedError
from ...ops.backward import cached_keys_error
from ...planning.captured_gradients import NotDeterministicError
from ...problem.operands import OPS, VARLEN_ARGS, VARLEN_OPS, Op, VarlenArgs
from ...problem.options import MAX_KEYS, OptionsKey, options_key
from ...runtime.call import run
from .ops import backward_by_op, by_op, refuse_twice, zeros_for_none
from .tensors import TANGENT, becomes_an_op, is_batched, is_transformed, refuse_tangents
from .vmap import map_attention, map_gradients

MAPPED = (
    "score_mod, mask_mod, block_mask, bias, sinks and dropout_p under vmap: what is mapped has no place among the "
    "indices b, h, q_idx and k_idx; make it a part of the batch, or call in a loop"
)


@dataclass(frozen=True, slots=True)
class Ops:
    """The ops of a call with gradients and their options, without any tensor.

    grads: for each input of mods, the indices of the results after dq, dk and dv whose sum is its gradient.
    out_axes: the axes of out from the slowest to the fastest in memory; () for the order of the shape.
    must_repeat: gradients must be deterministic, whatever PyTorch's setting, which may allow a warning instead.
    """

    forward: Op
    forward_options: OptionsKey
    backward: Op
    backward_options: OptionsKey
    is_varlen: bool
    has_mods: bool = False
    grads: tuple[tuple[int, ...], ...] = ()
    out_axes: tuple[int, ...] = ()
    must_repeat: bool = False

    def split(self, rest: tuple[Any, ...]) -> tuple[VarlenArgs | tuple[()], tuple[Any, ...]]:
        """Splits the inputs after q, k and v into the arrays of lengths and the inputs of mods."""
        if not self.is_varlen:
            return (), rest
        count = len(VARLEN_ARGS)
        return VarlenArgs(*rest[:count]), rest[count:]

    def keywords(self, varlen_args: Iterable[Any]) -> dict[str, Any]:
        """Returns the keywords of a plain call for `by_op`."""
        return self.forward_options.options._asdict() | dict(zip(VARLEN_ARGS, varlen_args, strict=False))


def plain_ops(options: OptionsKey, deterministic: bool, is_varlen: bool) -> Ops:
    """Returns the ops of a call without mods, by the options of its forward."""
    find_ops = _plain_ops if options.is_cacheable else _plain_ops.__wrapped__
    return find_ops(options, deterministic, is_varlen)


@functools.lru_cache(MAX_KEYS)
def _plain_ops(options: OptionsKey, deterministic: bool, is_varlen: bool) -> Ops:
    backward_options = options.options._replace(deterministic=deterministic, num_splits=0, split_size=None)
    table = VARLEN_OPS if is_varlen else OPS
    return Ops(table["forward"], options, table["backward"], options_key(**backward_options._asdict()), is_varlen)


def outs_of(out_axes: tuple[int, ...], q: torch.Tensor, k: Any, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns memory for an out whose axes have that order; () for the default order."""
    if not out_axes:
        return ()
    shape = *q.shape[:-1], v.shape[-1]
    dense = torch.empty([shape[axis] for axis in out_axes], dtype=q.dtype, device=q.device)
    return (dense.permute([out_axes.index(axis) for axis in range(len(shape))]),)


def attend(ops: Ops, is_func: bool, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse). is_func: a transform of torch.func is active, or wraps an input."""
    out, lse = _Transformed.apply(ops, *inputs) if is_func else _apply(ops, *inputs)
    return out, lse


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.ops, q, k, v, *rest = inputs
    # In the order of `ops.py`: a checkpoint may record one of these Functions and recompute by the other.
    ctx.save_for_backward(q, k, v, *output, *rest)
    ctx.set_materialize_grads(False)


class _Attention(Function):
    """Function of eager calls. The custom op and a separate setup_context would each add 12 µs or more to a call."""

    @staticmethod
    def forward(ctx: Any, ops: Ops, *tensors: Any) -> Any:
        outs = outs_of(ops.out_axes, *tensors[:3]) if ops.out_axes else ()
        results = run(ops.forward, tensors, ops.forward_options, 2, outs)
        _save(ctx, (ops, *tensors), results)
        return results

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _check_cotangents(dout, dlse)
        ops = ctx.ops
        q, k, v, out, lse, *rest = ctx.saved_tensors  # read once: a checkpoint forbids a second read
        operands = zeros_for_none(dout, out), q, k, v, out, lse, dlse, *rest
        differentiate: Any = _Gradients.apply if _is_watched(operands) else _gradients
        dq, dk, dv, *sums = differentiate(ops, *operands)
        varlen_grads = (None,) * len(VARLEN_ARGS) if ops.is_varlen else ()
        if not ops.grads:
            return None, dq, dk, dv, *varlen_grads
        mod_grads = iter(sums)
        return None, dq, dk, dv, *varlen_grads, *(next(mod_grads) if group else None for group in ops.grads)


# `Function.apply` would look for torch.func again, which takes 5 µs; the caller has done so.
_apply: Any = super(Function, _Attention).apply


class _Transformed(Function):
    """Calls under torch.func, with its rules for vmap and jvp."""

    setup_context, backward = staticmethod(_save), _Attention.backward

    @staticmethod
    def forward(ops: Ops, q: Any, k: Any, v: Any, *rest: Any) -> Any:
        if torch._C._len_torch_dispatch_stack() and not ops.has_mods:
            return by_op(q, k, v, ops.keywords(rest), ops.backward_options.options.deterministic)
        return run(ops.forward, (q, k, v, *rest), ops.forward_options, 2, outs_of(ops.out_axes, q, k, v))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UnsupportedError(TANGENT.format(name="an input"))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], ops: Ops, q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, Any]:
        _refuse_mapped(ops, rest)
        call = functools.partial(_Transformed.apply, ops)
        return map_attention(call, info.batch_size, in_dims[1:4], (q, k, v)), (0, 0)


def _gradients(ops: Ops, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, *rest: Any) -> Any:
    """Returns dq, dk, dv, then the gradients of the mod inputs that have one."""
    varlen_args, mod_inputs = ops.split(rest)
    if not ops.has_mods and becomes_an_op():
        keywords, options = ops.keywords(varlen_args), ops.backward_options.options
        return backward_by_op(dout, q, k, v, out, lse, dlse, keywords, options.deterministic)
    lengths: tuple[Any, ...] = ()
    if varlen_args:
        if varlen_args.page_table is not None or varlen_args.cache_batch_idx is not None:
            raise cached_keys_error(varlen_args.page_table)
        lengths = varlen_args.packed_or_used
    inputs = q, k, v, dout, out, lse, dlse, *lengths, *mod_inputs
    try:
        results = run(ops.backward, inputs, ops.backward_options)
    except NotDeterministicError as error:
        if ops.must_repeat or not torch.is_deterministic_algorithms_warn_only_enabled():
            raise
        warnings.warn(
            "the gradients of cuflash.frameworks.torch.attention are not deterministic here, though "
            f"torch.use_deterministic_algorithms(True, warn_only=True) is set: {error}",
            stacklevel=2,
        )
        options = ops.backward_options.options._replace(deterministic=False)
        results = run(ops.backward, inputs, options_key(**options._asdict()))
    if not ops.grads:
        return results
    dq, dk, dv, *terms = results
    sums = [functools.reduce(torch.add, [terms[index] for index in group]) for group in ops.grads if group]
    return dq, dk, dv, *sums


class _Gradients(Function):
    """Function of gradients under torch.func, and where a second derivative is refused only once it is taken."""

    forward, backward = staticmethod(_gradients), staticmethod(refuse_twice)
    setup_context = staticmethod(lambda ctx, inputs, output: None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UnsupportedError(TANGENT.format(name="an input of the gradients"))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], ops: Ops, *operands: Any) -> tuple[Any, Any]:
        tensors, rest = operands[:7], operands[7:]
        _refuse_mapped(ops, rest)
        call = functools.partial(_Gradients.apply, ops)
        return map_gradients(call, info.batch_size, in_dims[1:8], tensors), (0, 0, 0)


def _check_cotangents(dout: torch.Tensor | None, dlse: torch.Tensor | None) -> None:
    """Raises for gradients of results that carry tangents, and for several gradients at once."""
    if forward_ad._current_level >= 0:
        refuse_tangents(dout=dout, dlse=dlse)
    if any(x is not None and is_batched(x) for x in (dout, dlse)):
        raise UnsupportedError(
            "several gradients of out at once (is_grads_batched=True) are not supported; take torch.func.vmap of "
            "torch.func.vjp, or one at a time"
        )


def _is_watched(tensors: Iterable[Any]) -> bool:
    """True if the gradients must be a Function: under torch.func, or to refuse a second derivative."""
    return torch.is_grad_enabled() or any(torch.is_tensor(x) and is_transformed(x) for x in tensors)


def _refuse_mapped(ops: Ops, rest: Iterable[Any]) -> None:
    """Raises for calls without a rule for vmap."""
    if ops.has_mods:
        raise UnsupportedError(MAPPED)
    names = [name for name, tensor in zip(VARLEN_ARGS, rest, strict=False) if tensor is not None]
    if names:
        raise UnsupportedError(
            f"{', '.join(names)} under vmap: variable-length sequences have no axis to map over; pack what is "
            "mapped as further sequences of one call, or call in a loop"
        )
