"""Mods in PyTorch: the part of `attention` that has functions, bias, sinks or dropout.

Functions are traced before autograd sees a call. What it then keeps are ops, which hold no tensor, and the tensors that
they read, as its own saved tensors: those of the functions, too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function, forward_ad

from ...errors import UnsupportedError
from ...log import logger
from ...mods.graph.operations import Type
from ...mods.tracing.trace import trace
from ...ops.dropout_seed import seed_array, seed_number
from ...ops.mods import ModArgs, ModCall, resolve_mods
from ...problem.array_spec import ArraySpec
from ...problem.mod_arrays import check_mod_array
from ...problem.operands import DROPOUT_SEED, VARLEN_ARGS, Op, VarlenArgs
from ...problem.options import Options, OptionsKey, options_key
from ...runtime.call import run
from .ops import given, refuse_cached, refuse_twice
from .tensors import (
    TANGENT,
    check_tensor,
    is_autocast,
    is_batched,
    is_functionalizing,
    is_mapped,
    is_transformed,
    is_transforming,
    refuse_tangents,
    uncompiled,
)

_NO_OP = (
    "score_mod, mask_mod, block_mask, bias, sinks and dropout_p under {tool}: such calls are not one op that it could "
    "record; {way}"
)
_MAPPED = (
    "score_mod, mask_mod, block_mask, bias, sinks and dropout_p under vmap: what is mapped has no place among the "
    "indices b, h, q_idx and k_idx; make it a part of the batch, or call in a loop"
)
_UNCOMPILED = "attention with score_mod, mask_mod, block_mask, bias, sinks or dropout_p runs"


@dataclass(frozen=True, slots=True)
class _Ops:
    """What a call runs, without any of its tensors. Its inputs are q, k, v, those that tell lengths, and its own.

    grads: for each of its own inputs, the numbers of the further results of backward whose sum is its gradient.
    """

    forward: Op
    options: OptionsKey
    backward: Op
    of_backward: OptionsKey
    grads: tuple[tuple[int, ...], ...]
    is_varlen: bool

    def split(self, rest: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns the tensors of lengths that backward takes, and those of mods, of all that follow q, k and v."""
        if not self.is_varlen:
            return (), rest
        lengths = VarlenArgs(*rest[: len(VARLEN_ARGS)])
        return lengths.packed_or_used, rest[len(VARLEN_ARGS) :]


def mod_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mod_args: ModArgs,
    dropout_seed: Any,
    options: Options,
    varlen_args: VarlenArgs | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) of a call on tensors that were checked."""
    mod_args = _checked(mod_args, q)
    _refuse_recording(q)
    deterministic = bool(options.deterministic) or torch.are_deterministic_algorithms_enabled()
    of_forward = options_key(**options._replace(deterministic=False)._asdict())
    of_backward = options_key(**options._replace(deterministic=deterministic, num_splits=0, split_size=None)._asdict())
    lengths: tuple[Any, ...] = () if varlen_args is None else varlen_args
    call = resolve_mods("forward", mod_args, lengths, options)
    if dropout_seed is not None and not call.needs_seed:
        check_seed(dropout_seed, q)
    if dropout_seed is None and call.needs_seed and any(map(is_mapped, (q, k, v))):
        raise UnsupportedError(_MAPPED)  # why here: vmap refuses that a seed is drawn, and blames randomness
    seed = _seed(dropout_seed, q) if call.needs_seed else None
    inputs = call.inputs_with(seed)
    if forward_ad._current_level >= 0:
        for x in filter(torch.is_tensor, inputs):
            refuse_tangents(**{"a tensor of score_mod or mask_mod, bias or sinks": x})
    is_func = is_transforming() or any(map(is_transformed, (q, k, v, *filter(torch.is_tensor, inputs))))
    wanted = _wanted(mod_args, is_func) if torch.is_grad_enabled() or is_func else []
    if not (is_func or wanted or (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))):
        with torch.no_grad():  # why: tensors of masks may require grad, and have none
            return _two(run(call.op, (q, k, v, *lengths, *inputs), of_forward, 2))
    if varlen_args is not None:
        refuse_cached(varlen_args.page_table, varlen_args.cache_batch_idx)
    packed_or_used = () if varlen_args is None else varlen_args.packed_or_used
    back = resolve_mods("backward", mod_args, packed_or_used, options, captured_grads=tuple(wanted))
    grads = _places(inputs, wanted, back)
    ops = _Ops(call.op, of_forward, back.op, of_backward, grads, varlen_args is not None)
    attend = _Transformed.apply if is_func else _apply
    return _two(attend(ops, q, k, v, *lengths, *inputs))


def _two(results: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = results
    return out, lse


def _checked(mod_args: ModArgs, q: torch.Tensor) -> ModArgs:
    """The arguments, of which bias and sinks are tensors; under autocast sinks may have another dtype than q."""
    for name, tensor in (("bias", mod_args.bias), ("sinks", mod_args.sinks)):
        if tensor is not None:
            check_tensor(name, tensor)
    if mod_args.sinks is not None and mod_args.sinks.dtype != q.dtype and is_autocast(q):
        mod_args = mod_args._replace(sinks=mod_args.sinks.float())
    return mod_args


def _refuse_recording(q: torch.Tensor) -> None:
    """Raises where somebody records what runs, instead of running it."""
    if torch._C._is_tracing():
        raise UnsupportedError(_NO_OP.format(tool="torch.jit.trace", way="take torch.compile"))
    if is_transforming() and is_functionalizing():
        raise UnsupportedError(_NO_OP.format(tool="torch.func.functionalize", way="leave it out"))
    # why: tensors of a mode that looks on, such as one that counts FLOPs, have values; fake ones have none.
    if type(q).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        tool = f"a mode of {type(q).__name__}, such as torch.export"
        raise UnsupportedError(_NO_OP.format(tool=tool, way="call with tensors that have values"))


def check_seed(seed: Any, q: torch.Tensor) -> None:
    """Validates the seed of a call that drops nothing, and so reads none. Compilers and transforms may look at it."""
    if seed_number(seed) is None:
        check_tensor("dropout_seed", seed)
        # why not TorchLibrary's: a tensor may be a fake one, and q may require gradients
        spec, like = (
            ArraySpec(tuple(x.shape), tuple(x.stride()), str(x.dtype).removeprefix("torch."), str(x.device), "torch")
            for x in (seed, q)
        )
        check_mod_array(DROPOUT_SEED, spec, like, {})


def _seed(dropout_seed: Any, q: torch.Tensor) -> torch.Tensor:
    """The seed that was given, or a new one: nothing waits for it, and a replayed CUDA graph draws the next one."""
    if dropout_seed is None:
        return torch.empty((), dtype=torch.int64, device=q.device).random_()
    seed: torch.Tensor = seed_array(dropout_seed, q)
    return seed


def _wanted(mod_args: ModArgs, is_func: bool) -> list[torch.Tensor]:
    """The tensors, beside q, k and v, that get gradients; under torch.func all that may have some."""
    found = [mod_args.sinks] if mod_args.sinks is not None else []
    found += [mod_args.bias] if mod_args.bias is not None and mod_args.bias.is_floating_point() else []
    if mod_args.score_mod is not None:
        found += [each.array for each in trace(mod_args.score_mod, "score_mod").arrays if each.type == Type.FLOAT32]
    found = [x for x in found if torch.is_tensor(x) and (is_func or x.requires_grad)]
    return list({id(x): x for x in found}.values())


def _places(inputs: tuple[Any, ...], wanted: list[torch.Tensor], back: ModCall) -> tuple[tuple[int, ...], ...]:
    """`_Ops.grads`. A tensor that is an input twice has all of its gradient at the first."""
    groups = {id(x): group for x, group in zip(wanted, back.grads, strict=True)}
    return tuple([groups.pop(id(x), ()) for x in inputs])


def __getattr__(name: str) -> Any:
    """`uncompiled_mod_attention`: a graph ends before it.

    why not an op: the functions that a graph calls would have to be a part of it.
    """
    reason = f"cuflash traces score_mod and mask_mod itself, so {_UNCOMPILED} between graphs; leave fullgraph=False"
    made = uncompiled(name, globals(), mod_attention, reason)
    logger.debug("torch.compile: %s between graphs, not in them", _UNCOMPILED)
    return made


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.ops = inputs[0]
    ctx.save_for_backward(*inputs[1:4], *output, *inputs[4:])
    ctx.set_materialize_grads(False)


def _forward(ops: _Ops, *tensors: Any) -> Any:
    return _two(run(ops.forward, tensors, ops.options, 2))


class _ModAttention(Function):
    """Eager calls; `_Attention` says why without a separate setup_context."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        result = _forward(*inputs)
        _keep(ctx, inputs, result)
        return result

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        check_pulled(dout, dlse)
        ops, (q, k, v, out, lse, *rest) = ctx.ops, ctx.saved_tensors
        tensors = given(dout, out), dlse, q, k, v, out, lse, *rest
        differentiate: Any = _ModGradients.apply if is_watched(tensors) else _gradients
        dq, dk, dv, *grads = differentiate(ops, *tensors)
        sums = iter(grads)
        grads = [next(sums) if group else None for group in ops.grads]
        return None, dq, dk, dv, *(None,) * (len(VARLEN_ARGS) if ops.is_varlen else 0), *grads


_apply: Any = super(Function, _ModAttention).apply  # why: as that of `_Attention`


class _Transformed(Function):
    """Calls under torch.func."""

    forward, setup_context, backward = staticmethod(_forward), staticmethod(_keep), _ModAttention.backward

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UnsupportedError(TANGENT.format(name="an input"))

    @staticmethod
    def vmap(*arguments: Any) -> Any:
        raise UnsupportedError(_MAPPED)


def _gradients(ops: _Ops, dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any) -> Any:
    """dq, dk, dv, and the gradients of its own inputs that have some."""
    varlen_args, mod_tensors = ops.split(rest)
    results = run(ops.backward, (q, k, v, dout, out, lse, dlse, *varlen_args, *mod_tensors), ops.of_backward)
    dq, dk, dv, *terms = results
    sums = [functools.reduce(torch.add, [terms[place] for place in group]) for group in ops.grads if group]
    return dq, dk, dv, *sums


class _ModGradients(Function):
    """Gradients under torch.func, and where someone may differentiate them again: only that itself is refused."""

    forward, backward = staticmethod(_gradients), staticmethod(refuse_twice)
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    jvp, vmap = _Transformed.jvp, _Transformed.vmap


def check_pulled(dout: torch.Tensor | None, dlse: torch.Tensor | None) -> None:
    """Raises for gradients of results that carry tangents, and for several at once."""
    if forward_ad._current_level >= 0:
        refuse_tangents(dout=dout, dlse=dlse)
    if any(x is not None and is_batched(x) for x in (dout, dlse)):
        raise UnsupportedError(
            "several gradients of out at once (is_grads_batched=True) are not supported; take torch.func.vmap of "
            "torch.func.vjp, or one at a time"
        )


def is_watched(tensors: Iterable[Any]) -> bool:
    """Whether gradients that are made of these tensors must be a Function: of torch.func, or to be refused a second."""
    return torch.is_grad_enabled() or any(torch.is_tensor(x) and is_transformed(x) for x in tensors)
