"""Attention for PyTorch with gradients; it works with `torch.compile`, `torch.func`, autocast and CUDA graphs.

    from cuflash.frameworks.torch import attention

    out = attention(q, k, v, causal=True)    # (batch, seqlen, heads, head_dim); out.sum().backward() works
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import Function, forward_ad

from ..errors import ProblemError, UnsupportedError
from ..ops.backward import backward
from ..ops.forward import forward
from ..problem.options import WindowSize, check_flag

__all__ = ["attention"]

_TWICE = (
    "cuflash has no second derivative: its gradients cannot be differentiated again. Take them without "
    "create_graph=True, or compute this part with torch.nn.functional.scaled_dot_product_attention under "
    "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"
)
_TANGENT = (
    "{name} carries a tangent of forward-mode differentiation, which cuflash does not have; take gradients by "
    "torch.autograd.grad or backward(), or torch.func.vjp"
)
# These tell whether a torch.func transform is active, and whether it wraps a tensor, which then has no memory itself.
_is_transforming = torch._C._are_functorch_transforms_active
_is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
# This tells whether autograd's own vmap wraps a tensor. That vmap does not use the rules below.
_is_batched = torch._C._functorch.is_legacy_batchedtensor


class _Options(NamedTuple):
    """All arguments that are not tensors, in the order of the custom ops' schemas."""

    softmax_scale: float | None
    causal: bool
    window_left: int
    window_right: int
    diagonal_offset: int | None
    softcap: float
    deterministic: bool

    @classmethod
    def of(cls, keywords: dict[str, Any], deterministic: bool) -> _Options:
        """The options of a call. It refuses bools as numbers, because the ops' schemas would take True for 1."""
        for name in ("softmax_scale", "diagonal_offset", "softcap"):
            if isinstance(keywords[name], bool):
                raise ProblemError(f"{name}={keywords[name]} is a bool; give a number")
        left, right = (-1 if side is None else side for side in keywords["window_size"])
        if isinstance(left, bool) or isinstance(right, bool):
            raise ProblemError(f"window_size={keywords['window_size']} holds a bool; give numbers of keys")
        causal = check_flag("causal", keywords["causal"])
        scale, offset, softcap = (keywords[name] for name in ("softmax_scale", "diagonal_offset", "softcap"))
        return cls(scale, causal, left, right, offset, softcap, deterministic)

    def keywords(self) -> dict[str, Any]:
        """The options as keyword arguments of `cuflash.forward`."""
        scale, causal, left, right, offset, softcap, _ = self
        masks = {"causal": causal, "window_size": (left, right), "diagonal_offset": offset}
        return {"softmax_scale": scale, "softcap": softcap, **masks}


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
) -> Any:
    """`cuflash.forward` with gradients of q, k and v, which flow through out and through lse.

    q (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_kv, head_dim), v (batch, seqlen_k, heads_kv,
    head_dim_v), or without batch, or without batch and heads; any strides. Arguments, results and errors are those of
    `cuflash.forward`; `deterministic=True` asks for bitwise repeatable gradients. Under autocast floating-point inputs
    are cast to its dtype, as PyTorch's own attention does. `torch.use_deterministic_algorithms` is honoured. Tensors on
    the CPU take the NumPy path.

    It works under `torch.compile(fullgraph=True)` with dynamic shapes, under `torch.utils.checkpoint`, eagerly under
    `torch.func.grad`, `vjp` and `vmap`, on several GPUs, and in CUDA graphs (a call before the capture must compile the
    kernels). Returns out, or (out, lse) with `return_lse`.

    Raises ProblemError, UnsupportedError or CompileError as `cuflash.forward` does; second derivatives and forward-mode
    differentiation are an UnsupportedError.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor)
    check_flag("return_lse", return_lse)
    deterministic = check_flag("deterministic", deterministic) or torch.are_deterministic_algorithms_enabled()
    if forward_ad._current_level >= 0:
        _refuse_tangents(q=q, k=k, v=v)
    if torch.is_autocast_enabled("cuda" if q.is_cuda else q.device.type):
        q, k, v = _autocast(q, k, v)
    keywords: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "diagonal_offset": diagonal_offset,
        "softcap": softcap,
    }
    run: Any
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        run = _by_op
    elif _is_transforming():
        run = _by_op if _is_functionalizing() else _Transformed.apply
    elif torch._C._len_torch_dispatch_stack():
        run = _by_op
    elif _is_transformed(q) or _is_transformed(k) or _is_transformed(v):  # the tensor outlived its transform
        run = _Transformed.apply
    elif torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        run = _apply
    else:
        return forward(q, k, v, return_lse=return_lse, **keywords)
    out, lse = run(q, k, v, keywords, deterministic)
    return (out, lse) if return_lse else out


def _is_functionalizing() -> bool:
    """Whether torch.func.functionalize is active, which has rules for ops but none for autograd Functions."""
    return any(x.key() == TransformType.Functionalize for x in retrieve_all_functorch_interpreters())


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    narrow = torch.float32, torch.float16, torch.bfloat16
    return tuple(x.to(dtype) if x.dtype in narrow else x for x in tensors)


def check_tensor(name: str, tensor: Any) -> None:
    """Raises unless an operand is a dense torch tensor with its elements in memory."""
    if not isinstance(tensor, torch.Tensor):
        raise ProblemError(f"{name} is a {type(tensor).__name__}; give a torch tensor (torch.as_tensor makes one)")
    if tensor.is_nested or tensor.layout != torch.strided:
        raise UnsupportedError(f"{name} is a nested or sparse tensor; give a dense one")
    if tensor.is_meta:
        raise UnsupportedError(f"{name} is on the device meta, where nothing is computed; move it to cuda or cpu")


def _refuse_tangents(**tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and not _is_transformed(tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            raise UnsupportedError(_TANGENT.format(name=name))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


class _Attention(Function):
    """Eager calls. why neither the custom op nor a separate setup_context: they cost 14 and 12 µs more."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        q, k, v, keywords, _ = inputs
        result = forward(q, k, v, return_lse=True, **keywords)
        _keep(ctx, inputs, result)
        return result

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if forward_ad._current_level >= 0:
            _refuse_tangents(dout=dout, dlse=dlse)
        if any(x is not None and _is_batched(x) for x in (dout, dlse)):
            raise UnsupportedError(
                "several gradients of out at once (is_grads_batched=True) are not supported; take torch.func.vmap of "
                "torch.func.vjp, or one at a time"
            )
        saved = ctx.saved_tensors  # why only once: under a checkpoint they can be read only once
        tensors: tuple[Any, ...] = (_given(dout, saved[3]), *saved, dlse)
        as_function = torch.is_grad_enabled() or any(x is not None and _is_transformed(x) for x in tensors)
        run: Any = _Gradients.apply if as_function else _gradients
        return *run(*tensors, *ctx.options), None, None


# why not `_Attention.apply`: it takes 5 µs to ask whether torch.func is or was active, which is known here.
_apply: Any = super(Function, _Attention).apply


class _Transformed(Function):
    """Calls under torch.func, with its rules for vmap and jvp."""

    @staticmethod
    def forward(q: Any, k: Any, v: Any, keywords: dict[str, Any], deterministic: bool) -> Any:
        if torch._C._len_torch_dispatch_stack():
            return _by_op(q, k, v, keywords, deterministic)
        return forward(q, k, v, return_lse=True, **keywords)

    setup_context = staticmethod(_keep)
    backward = _Attention.backward

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UnsupportedError(_TANGENT.format(name="an input"))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        rank, *others = (x.dim() - (axis is not None) for x, axis in zip(arguments[:3], in_dims, strict=False))
        if others != [rank, rank]:
            raise ProblemError(f"q, k and v have ranks {rank}, {others[0]} and {others[1]} under vmap; give all alike")
        folded = [_fold(x, axis, info.batch_size, heads=2) for x, axis in zip(arguments[:3], in_dims, strict=False)]
        out, lse = _Transformed.apply(*folded, *arguments[3:])
        of_q = _mapped(arguments[0], in_dims[0], info.batch_size).shape
        return (_unfold(out, of_q, heads=2), _unfold(lse, of_q, heads=1)), (0, 0)


def _gradients(*arguments: Any) -> Any:
    """dq, dk and dv of dout, q, k, v, out, lse, dlse, the keywords of the call, and whether it is deterministic."""
    *tensors, dlse, keywords, deterministic = arguments
    if torch._C._len_torch_dispatch_stack():
        return torch.ops.cuflash.attention_backward(*tensors, dlse, *_Options.of(keywords, deterministic))
    return backward(*tensors, dlse=dlse, deterministic=deterministic, **keywords)


def _refuse_twice(ctx: Any, *gradients: Any) -> Any:
    raise UnsupportedError(_TWICE)


class _Gradients(Function):
    """Gradients under torch.func, and where someone may differentiate them again: only that itself is refused."""

    forward, backward = staticmethod(_gradients), staticmethod(_refuse_twice)
    setup_context = staticmethod(lambda ctx, inputs, output: None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UnsupportedError(_TANGENT.format(name="an input of the gradients"))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        heads = (2, 2, 2, 2, 2, 1, 1)
        folded = [
            _fold(x, axis, info.batch_size, at) for x, axis, at in zip(arguments[:7], in_dims, heads, strict=False)
        ]
        gradients = _Gradients.apply(*folded, *arguments[7:])
        of_q = _mapped(arguments[1], in_dims[1], info.batch_size).shape
        return tuple(_unfold(x, of_q, heads=2) for x in gradients), (0, 0, 0)


def _given(dout: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """The gradient of out, which is zero where the loss depends on lse alone."""
    return torch.zeros_like(out) if dout is None else dout


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


# The same calls as custom ops, for tools that look at calls before running them: torch.compile, export, dispatch modes.


def _by_op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keywords: dict[str, Any], deterministic: bool) -> Any:
    return torch.ops.cuflash.attention(q, k, v, *_Options.of(keywords, deterministic))


# why schemas: PyTorch cannot infer them, because annotations are strings in this module.
_OPTIONS = (
    "float? softmax_scale, bool causal, SymInt window_left, SymInt window_right, SymInt? diagonal_offset, "
    "float softcap, bool deterministic"
)


@torch.library.custom_op(
    "cuflash::attention", mutates_args=(), schema=f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)"
)
def _attention_op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> Any:
    with torch.no_grad():
        return forward(q, k, v, return_lse=True, **_Options(*options).keywords())


@torch.library.custom_op(
    "cuflash::attention_backward",
    mutates_args=(),
    schema=f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor)",
)
def _backward_op(*arguments: Any) -> Any:
    given = _Options(*arguments[7:])
    with torch.no_grad():
        return backward(*arguments[:6], dlse=arguments[6], deterministic=given.deterministic, **given.keywords())


@_attention_op.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if not q.dim() == k.dim() == v.dim() or not 2 <= q.dim() <= 4:
        raise ProblemError(
            f"q, k and v have ranks {q.dim()}, {k.dim()} and {v.dim()}; give all (batch, seqlen, heads, head_dim), "
            "(seqlen, heads, head_dim) or (seqlen, head_dim)"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ProblemError(f"q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}; cast all to one dtype")
    lse_shape = q.shape[:-1] if q.dim() == 2 else (*q.shape[:-3], q.shape[-2], q.shape[-3])
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(lse_shape, dtype=lse_dtype)


@_backward_op.register_fake
def _(dout: torch.Tensor, *operands: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in operands[:3])


def _differentiate(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    gradients = torch.ops.cuflash.attention_backward(_given(dout, saved[3]), *saved, dlse, *ctx.options)
    return *gradients, *(None for _ in ctx.options)


_attention_op.register_autograd(_differentiate, setup_context=_keep)
_backward_op.register_autograd(_refuse_twice)
