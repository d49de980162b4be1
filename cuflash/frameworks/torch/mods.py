"""Mods in PyTorch: `attention` with score_mod, mask_mod, block_mask, bias, sinks or dropout.

Functions are traced before autograd sees a call. Autograd then keeps ops, which hold no tensor, and saves all tensors
that they read, captured ones included.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.autograd import forward_ad

from ...errors import UnsupportedError
from ...log import logger
from ...mods.tracing.trace import trace
from ...ops.dropout_seed import seed_array, seed_number
from ...ops.mods import ModArgs, ModCall, resolve_mods
from ...problem.array_spec import ArraySpec
from ...problem.mod_arrays import check_mod_array
from ...problem.operands import DROPOUT_SEED, OPS, VARLEN_OPS, VarlenArgs
from ...problem.options import is_zero, options_key
from ...runtime.call import run
from .autograd import MAPPED, Ops, attend, outs_of, plain_ops
from .tensors import (
    check_tensor,
    is_autocast,
    is_faking,
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
_UNCOMPILED = "attention with score_mod, mask_mod, block_mask, bias, sinks or dropout_p runs"
_MODULE: Any = sys.modules[__name__]  # for `tensors.uncompiled`


def mod_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mod_args: ModArgs,
    dropout_seed: Any,
    keywords: dict[str, Any],
    deterministic: bool,
    varlen_args: VarlenArgs | tuple[()],
    out_axes: tuple[int, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) of a call on validated tensors.

    keywords: the options of the forward. deterministic: required by the call, whatever PyTorch's setting is.
    out_axes: as in `Ops`. A graph of torch.compile ends here, even where the compiler gave up on the caller's code.
    """
    if torch.compiler.is_dynamo_compiling():
        # Read as an attribute of the module: `__getattr__` makes it (`tensors.uncompiled`).
        call_outside: Any = _MODULE.uncompiled_mod_attention
        results: tuple[torch.Tensor, torch.Tensor] = call_outside(
            q, k, v, mod_args, dropout_seed, keywords, deterministic, varlen_args, out_axes
        )
        return results
    options = options_key(**keywords)
    mod_args = _checked(mod_args, q)
    _refuse_recording(q)
    plain = VARLEN_OPS if varlen_args else OPS
    call = resolve_mods(plain["forward"], mod_args, varlen_args, options.options)
    if dropout_seed is not None and not call.needs_seed:
        check_seed(dropout_seed, q)
    if dropout_seed is None and call.needs_seed and any(map(is_mapped, (q, k, v))):
        raise UnsupportedError(MAPPED)  # vmap would refuse the draw of a seed first, and blame randomness
    inputs = call.inputs_with(_seed(dropout_seed, q) if call.needs_seed else None)
    mod_tensors = tuple(filter(torch.is_tensor, inputs))
    if forward_ad._current_level >= 0:
        for x in mod_tensors:
            refuse_tangents(**{"a tensor of score_mod or mask_mod, bias or sinks": x})
    is_func = is_transforming() or any(map(is_transformed, (q, k, v, *mod_tensors)))
    is_grad = torch.is_grad_enabled()
    leaves = _leaves(mod_args, is_func) if is_grad or is_func else []
    if not (is_func or leaves or (is_grad and (q.requires_grad or k.requires_grad or v.requires_grad))):
        with torch.no_grad():  # tensors of masks may require grad, but get no gradient
            out, lse = run(call.op, (q, k, v, *varlen_args, *inputs), options, 2, outs_of(out_axes, q, k, v))
            return out, lse
    packed_or_used = varlen_args.packed_or_used if varlen_args else ()
    backward = resolve_mods(plain["backward"], mod_args, packed_or_used, options.options, captured_grads=tuple(leaves))
    is_varlen = bool(varlen_args)
    is_set = deterministic or torch.are_deterministic_algorithms_enabled()
    backward_options = plain_ops(options, is_set, is_varlen).backward_options
    grads = _groups(inputs, leaves, backward)
    has_mods = any(x is not None for x in mod_args[:-1]) or not is_zero(mod_args.dropout_p)
    ops = Ops(call.op, options, backward.op, backward_options, is_varlen, has_mods, grads, out_axes, deterministic)
    return attend(ops, is_func, q, k, v, *varlen_args, *inputs)


def _checked(mod_args: ModArgs, q: torch.Tensor) -> ModArgs:
    """Validates bias and sinks; under autocast sinks may have another dtype than q, and become float32."""
    for name, tensor in (("bias", mod_args.bias), ("sinks", mod_args.sinks)):
        if tensor is not None:
            check_tensor(name, tensor)
    if mod_args.sinks is not None and mod_args.sinks.dtype != q.dtype and is_autocast(q):
        mod_args = mod_args._replace(sinks=mod_args.sinks.float())
    return mod_args


def _refuse_recording(q: torch.Tensor) -> None:
    """Raises where a tool records the call instead of running it."""
    if torch._C._is_tracing():
        raise UnsupportedError(_NO_OP.format(tool="torch.jit.trace", way="take torch.compile"))
    if is_transforming() and is_functionalizing():
        raise UnsupportedError(_NO_OP.format(tool="torch.func.functionalize", way="leave it out"))
    # Tensors under a mode that only observes, such as one that counts FLOPs, have values; fake ones have none.
    if torch._C._len_torch_dispatch_stack() and is_faking():
        raise UnsupportedError(_NO_OP.format(tool="a FakeTensorMode, such as torch.export", way="call outside of it"))
    if type(q).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        tool = f"a mode of {type(q).__name__}, such as torch.export"
        raise UnsupportedError(_NO_OP.format(tool=tool, way="call with tensors that have values"))


def check_seed(seed: Any, q: torch.Tensor) -> None:
    """Validates the seed of a call that drops nothing, and so reads none; it may be traced or transformed."""
    if seed_number(seed) is None:
        check_tensor("dropout_seed", seed)
        # Specs of TorchLibrary refuse fake tensors, and a q that requires gradients
        spec, like = (
            ArraySpec(tuple(x.shape), tuple(x.stride()), str(x.dtype).removeprefix("torch."), str(x.device), "torch")
            for x in (seed, q)
        )
        check_mod_array(DROPOUT_SEED, spec, like, {})


def _seed(dropout_seed: Any, q: torch.Tensor) -> torch.Tensor:
    """Returns the seed as a tensor. One drawn on the device costs no wait, and a replayed CUDA graph draws anew."""
    if dropout_seed is None:
        return torch.empty((), dtype=torch.int64, device=q.device).random_()
    seed: torch.Tensor = seed_array(dropout_seed, q)
    return seed


def _leaves(mod_args: ModArgs, is_func: bool) -> list[torch.Tensor]:
    """Returns the tensors besides q, k and v that get gradients; under torch.func all that may have some."""
    tensors = [mod_args.sinks] if mod_args.sinks is not None else []
    tensors += [mod_args.bias] if mod_args.bias is not None and mod_args.bias.is_floating_point() else []
    if mod_args.score_mod is not None:
        tensors += [each.array for each in trace(mod_args.score_mod, "score_mod").arrays if each.type.is_float]
    tensors = [x for x in tensors if torch.is_tensor(x) and (is_func or x.requires_grad)]
    return list({id(x): x for x in tensors}.values())


def _groups(inputs: tuple[Any, ...], leaves: list[torch.Tensor], backward: ModCall) -> tuple[tuple[int, ...], ...]:
    """Returns `Ops.grads`. A tensor that is an input twice has all of its gradient at the first."""
    groups = {id(x): group for x, group in zip(leaves, backward.grads, strict=True)}
    return tuple([groups.pop(id(x), ()) for x in inputs])


def __getattr__(name: str) -> Any:
    """Makes `uncompiled_mod_attention`: a graph ends before it.

    An op would need the functions that a graph calls as a part of it.
    """
    reason = f"cuflash traces score_mod and mask_mod itself, so {_UNCOMPILED} between graphs; leave fullgraph=False"
    function = uncompiled(name, globals(), mod_attention, reason)
    logger.debug("torch.compile: %s between graphs, not in them", _UNCOMPILED)
    return function
