"""Attention, its gradients and `append_kv` as ops of PyTorch, for tools that record calls.

`torch.compile`, `torch.export`, dispatch modes and `torch.utils.flop_counter` see `torch.ops.cuflash.attention`,
`attention_backward` and `append_kv`. FLOPs of the first two are counted as for PyTorch's attention: all pairs of a
query and a key of one sequence, masked ones included. Counting alone reads lengths from the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd.function import _SingleLevelFunction
from torch.utils.flop_counter import register_flop_formula

from ...errors import ProblemError, UnsupportedError
from ...ops.append import append_kv
from ...ops.backward import backward
from ...ops.forward import forward
from ...problem.operands import VARLEN_ARGS, VarlenArgs
from ...problem.options import DEFAULTS, ROWS, OptionContext, check_flag, check_window
from .tensors import uncompiled
from .vmap import in_a_loop, map_attention, map_gradients

BOUNDS, SPLITS = ("max_seqlen_q", "max_seqlen_k"), ("num_splits", "split_size")
_SEQUENCES = (*VARLEN_ARGS, *BOUNDS, *SPLITS)
_TWICE = (
    "cuflash has no second derivative: its gradients cannot be differentiated again. Take them without "
    "create_graph=True, or compute this part with torch.nn.functional.scaled_dot_product_attention under "
    "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"
)

# Types of numbers that the ops take unchanged; torch's are symbolic.
_INTEGERS = (int, torch.SymInt)
_NUMBERS = dict.fromkeys(("softmax_scale", "softcap"), (*_INTEGERS, float, torch.SymFloat)) | dict.fromkeys(
    ("diagonal_offset", *BOUNDS, *SPLITS, "sm_margin"), _INTEGERS
)
_ANY_CALL = OptionContext(1, "float32")  # no default is used


def _is_number(value: Any, types: tuple[type, ...]) -> bool:
    return isinstance(value, types) and not isinstance(value, bool)


class Arguments(NamedTuple):
    """The arguments after the tensors in the ops' schemas; the op of gradients has them up to `max_seqlen_k`."""

    softmax_scale: float | None
    causal: bool
    window_left: int
    window_right: int
    diagonal_offset: int | None
    softcap: float
    deterministic: bool
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    seqused_q: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    cache_batch_idx: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    num_splits: int | None = None
    split_size: int | None = None
    sm_margin: int = 0

    @classmethod
    def from_keywords(cls, keywords: dict[str, Any], deterministic: bool) -> Arguments:
        """Builds the arguments of a call. Types are validated here, as the schemas take tensors and True for numbers.

        keywords: options, without bounds and splits where unset, and perhaps `VARLEN_ARGS`.
        """
        keywords = dict(keywords)
        for name, types in _NUMBERS.items():
            value = keywords.get(name, DEFAULTS[name])
            if not (_is_number(value, types) or value is DEFAULTS[name] is None):
                keywords[name] = ROWS[name].validate(value, _ANY_CALL)
        window = keywords["window_size"]
        is_pair = isinstance(window, (tuple, list)) and len(window) == 2
        if not (is_pair and all([side is None or _is_number(side, _INTEGERS) for side in window])):
            window = check_window(window)
        left, right = (-1 if side is None else side for side in window)
        causal = check_flag("causal", keywords["causal"])
        scale, offset, softcap = (keywords[name] for name in ("softmax_scale", "diagonal_offset", "softcap"))
        keywords["num_splits"] = keywords.get("num_splits") or None  # the schema's default stands for 0
        sequences: Any = [keywords.get(name) for name in _SEQUENCES]
        arguments = cls(scale, causal, left, right, offset, softcap, deterministic, *sequences)
        return arguments._replace(sm_margin=keywords.get("sm_margin", 0))

    @property
    def varlen_args(self) -> VarlenArgs:
        """The arrays of lengths, pages and cache rows."""
        return VarlenArgs(*[getattr(self, name) for name in VARLEN_ARGS])

    def with_varlen_args(self, arrays: Iterable[Any]) -> Arguments:
        """Returns the arguments with other arrays of lengths, pages and cache rows."""
        return self._replace(**dict(zip(VARLEN_ARGS, arrays, strict=True)))

    def without_splits(self) -> list[Any]:
        """Returns the arguments of `attention_backward`."""
        return [x for name, x in zip(self._fields, self, strict=True) if name not in SPLITS]

    def keywords(self) -> dict[str, Any]:
        """Returns the arguments as keywords of `cuflash.forward`."""
        names = "softmax_scale", "causal", "diagonal_offset", "softcap", "sm_margin"
        plain = {name: getattr(self, name) for name in names}
        sequences = {name: x for name in _SEQUENCES if (x := getattr(self, name)) is not None}
        return {**plain, "window_size": (self.window_left, self.window_right), **sequences}


def by_op(q: Any, k: Any, v: Any, keywords: dict[str, Any], deterministic: bool) -> Any:
    """Calls the op, which stands for the whole call in a graph. keywords: as in `Arguments.from_keywords`."""
    return torch.ops.cuflash.attention(q, k, v, *Arguments.from_keywords(keywords, deterministic))


def backward_by_op(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, keywords: dict[str, Any], deterministic: bool
) -> Any:
    """Calls the op of gradients. keywords: as in `Arguments.from_keywords`."""
    arguments = Arguments.from_keywords(keywords, deterministic).without_splits()
    return torch.ops.cuflash.attention_backward(dout, q, k, v, out, lse, dlse, *arguments)


def __getattr__(name: str) -> Any:
    """Makes `uncompiled_by_op`: a graph ends before it."""
    reason = "a number of NumPy is an array for torch.compile; give float() of it, or leave fullgraph=False"
    return uncompiled(name, globals(), by_op, reason)


def zeros_for_none(dout: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of out, which is zero where the loss depends on lse alone."""
    return torch.zeros_like(out) if dout is None else dout


def refuse_twice(ctx: Any, *gradients: Any) -> Any:
    """Raises for second derivatives."""
    raise UnsupportedError(_TWICE)


# Schemas are written out: PyTorch cannot infer them, because annotations are strings in this module.
_ARGUMENTS = (
    "float? softmax_scale, bool causal, SymInt window_left, SymInt window_right, SymInt? diagonal_offset, "
    f"float softcap, bool deterministic, {', '.join(f'Tensor? {name}=None' for name in VARLEN_ARGS)}, "
    f"{', '.join(f'SymInt? {name}=None' for name in BOUNDS)}"
)


@torch.library.custom_op(
    "cuflash::attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}, {', '.join(f'SymInt? {name}=None' for name in SPLITS)}"
    ", SymInt sm_margin=0)"
    " -> (Tensor, Tensor)",
)
def _attention_op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any) -> Any:
    with torch.no_grad():
        return forward(q, k, v, return_lse=True, **Arguments(*arguments).keywords())


@torch.library.custom_op(
    "cuflash::attention_backward",
    mutates_args=(),
    schema=f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, {_ARGUMENTS}"
    ", SymInt sm_margin=0)"
    " -> (Tensor, Tensor, Tensor)",
)
def _backward_op(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, *arguments: Any
) -> tuple[torch.Tensor, ...]:
    options = Arguments(*arguments)
    with torch.no_grad():
        return backward(dout, q, k, v, out, lse, dlse=dlse, deterministic=options.deterministic, **options.keywords())


@_attention_op.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    is_dense = all(x is None for x in Arguments(*arguments).varlen_args)
    # Dense calls only: packed q may have a 4-D cache. Varlen ranks are validated at run time.
    if is_dense and (not q.dim() == k.dim() == v.dim() or not 2 <= q.dim() <= 4):
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
def _(dout: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *operands: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, *rest = inputs
    arguments = Arguments(*rest)
    ctx.arguments = arguments.with_varlen_args(VarlenArgs())
    ctx.save_for_backward(q, k, v, *output, *arguments.varlen_args)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, *varlen_args = ctx.saved_tensors
    arguments = ctx.arguments.with_varlen_args(varlen_args).without_splits()
    dout = zeros_for_none(dout, out)
    gradients = torch.ops.cuflash.attention_backward(dout, q, k, v, out, lse, dlse, *arguments)
    return *gradients, *(None for _ in Arguments._fields)


def _register_gradients(custom_op: Any, differentiate: Any, save: Any = None) -> None:
    """Registers the gradients of an op, also for torch.func inside of torch.compile.

    `register_autograd` alone does not suffice: its Function has no rules for transforms and is refused under them. The
    Function defined here runs at one level of transforms, where tensors have no wrapper.
    """
    custom_op.register_autograd(differentiate, setup_context=save)
    op, count = custom_op._opoverload, len(custom_op._opoverload._schema.arguments)

    class Gradients(_SingleLevelFunction):
        @staticmethod
        def forward(ctx: Any, *operands: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                results = op(*operands)
            if save is not None:
                save(ctx, operands, results)
            return results

        backward = staticmethod(differentiate)

    def kernel(keys: Any, *operands: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*operands):
            with enable_single_level_autograd_function():
                # The dispatcher leaves defaults out: None stands for each.
                return Gradients.apply(*operands, *[None] * (count - len(operands)))
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keys & torch._C._after_autograd_keyset, *operands)

    for device in ("CPU", "CUDA", "Meta"):  # takes precedence over register_autograd, which is for all devices
        _LIBRARY.impl(op._opname, kernel, f"Autograd{device}", with_keyset=True)


def _register_vmap(custom_op: Any, rule: Any, count: int) -> None:
    """Registers the rule of vmap of an op whose first `count` arguments have an axis to map over."""

    def mapped(info: Any, in_dims: tuple[int | None, ...], *operands: Any) -> Any:
        op, size = custom_op._opoverload, info.batch_size
        tensors, arguments = operands[:count], operands[count:]
        if any(x is not None for x in Arguments(*arguments).varlen_args):
            results = in_a_loop(op, size, in_dims, operands)
        else:
            results = rule(lambda *folded: op(*folded, *arguments), size, in_dims[:count], tensors)
        return results, (0,) * len(results)

    if hasattr(custom_op, "register_vmap"):  # PyTorch before 2.5 lacks it, and maps by its own loop
        custom_op.register_vmap(mapped)


_LIBRARY = torch.library.Library("cuflash", "FRAGMENT")
_register_gradients(_attention_op, _differentiate, _save)
_register_gradients(_backward_op, refuse_twice)
_register_vmap(_attention_op, map_attention, 3)
_register_vmap(_backward_op, map_gradients, 7)


_APPEND_ARRAYS = ("page_table", "cache_batch_idx", "cu_seqlens_k", "q", "cu_seqlens_q", "rotary_cos", "rotary_sin")
_FLAGS = ("q_same_position", "rotary_interleaved")


@torch.library.custom_op(
    "cuflash::append_kv",
    mutates_args=("k_cache", "v_cache"),
    schema="(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor seqused_k, "
    f"{', '.join(f'Tensor? {name}' for name in _APPEND_ARRAYS)}, {', '.join(f'bool {name}' for name in _FLAGS)})"
    " -> Tensor",
)
def _append_op(k_cache: Any, v_cache: Any, k: Any, v: Any, seqused_k: Any, *arguments: Any) -> torch.Tensor:
    keywords = dict(zip((*_APPEND_ARRAYS, *_FLAGS), arguments, strict=True))
    with torch.no_grad():
        q: torch.Tensor | None = append_kv(k_cache, v_cache, k, v, seqused_k, **keywords)
    return k.new_empty(0) if q is None else q


@_append_op.register_fake
def _(k_cache: Any, v_cache: Any, k: torch.Tensor, v: Any, seqused_k: Any, *arguments: Any) -> torch.Tensor:
    q = dict(zip((*_APPEND_ARRAYS, *_FLAGS), arguments, strict=True))["q"]
    return k.new_empty(0) if q is None else q.new_empty(q.shape)


def append(*arrays: torch.Tensor, **keywords: Any) -> torch.Tensor | None:
    """Calls `cuflash.append_kv`, as an op under torch.compile and dispatch modes."""
    if not (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()):
        return append_kv(*arrays, **keywords)
    flags = (check_flag(name, keywords.get(name, False)) for name in _FLAGS)
    q = torch.ops.cuflash.append_kv(*arrays, *(keywords.get(name) for name in _APPEND_ARRAYS), *flags)
    return None if keywords.get("q") is None else q


@register_flop_formula(torch.ops.cuflash.attention, get_raw=True)
def _flops(q: Any, k: Any, v: Any, *arguments: Any, out_val: Any = None) -> int:
    return 2 * _pairs(q, k, Arguments(*arguments)) * int(q.shape[-1] + v.shape[-1])


@register_flop_formula(torch.ops.cuflash.attention_backward, get_raw=True)
def _backward_flops(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, *arguments: Any, out_val: Any = None
) -> int:
    # Three products over head_dim (s, dq, dk), two over head_dim_v (dp, dv).
    return 2 * _pairs(q, k, Arguments(*arguments)) * int(3 * q.shape[-1] + 2 * v.shape[-1])


def _pairs(q: Any, k: Any, arguments: Arguments) -> int:
    """Counts the scores, masked ones included."""
    rows_q, rows_k = (x.shape[-3] if x.dim() > 2 else x.shape[0] for x in (q, k))
    batch_q, batch_k = (x.shape[0] if x.dim() == 4 else 1 for x in (q, k))
    if arguments.page_table is not None:
        batch_k, rows_k = arguments.page_table.shape[0], arguments.page_table.shape[1] * rows_k
    elif arguments.cache_batch_idx is not None:
        batch_k = arguments.cache_batch_idx.shape[0]
    queries = _lengths(batch_q, rows_q, arguments.cu_seqlens_q, arguments.seqused_q, arguments.max_seqlen_q)
    keys = _lengths(batch_k, rows_k, arguments.cu_seqlens_k, arguments.seqused_k, arguments.max_seqlen_k)
    return (q.shape[-2] if q.dim() > 2 else 1) * sum(m * n for m, n in zip(queries, keys, strict=True))


def _lengths(batch: int, rows: int, bounds: Any, used: Any, most: int | None) -> list[int]:
    """Returns the lengths of all sequences, or upper bounds where tensors have no values."""
    most = rows if most is None else min(rows, most)
    lengths = [most] * (batch if bounds is None else bounds.shape[0] - 1)
    if bounds is not None and _has_values(bounds):
        lengths = [min(length, most) for length in bounds.diff().tolist()]
    if used is not None and _has_values(used):
        lengths = [min(count, length) for count, length in zip(used.tolist(), lengths, strict=True)]
    return lengths


def _has_values(tensor: torch.Tensor) -> bool:
    return not tensor.is_meta and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
