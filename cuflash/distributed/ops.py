"""Distributed attention and its gradients as ops of PyTorch, for torch.compile and torch.export.

Groups go by name, and a layout by the bounds of its documents as a tensor on the host: other documents need no other
graph, and a graph is right in another process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import ProblemError, UnsupportedError
from ..frameworks.torch import ops as torch_ops
from ..frameworks.torch.mods import check_seed
from ..problem.options import is_zero
from .calls import run, run_gradients
from .layout import Kind, Layout


class Arguments(NamedTuple):
    """The arguments after the tensors in the ops' schemas. kind: None for no layout."""

    kind: Kind | None
    chunk: int
    groups: list[str]
    scheme: str
    softmax_scale: float | None
    causal: bool
    window_left: int
    window_right: int
    softcap: float
    deterministic: bool
    num_splits: int
    split_size: int | None
    check: bool

    def keywords(self, groups: Sequence[Any], bounds: Any, **tensors: Any) -> dict[str, Any]:
        """Returns the keywords of `cuflash.distributed.attention`."""
        ranks = prod(group.size() for group in groups)
        layout = None if self.kind is None else _layout(tuple(bounds.tolist()), ranks, self.kind, self.chunk)
        keywords = {name: x for name, x in self._asdict().items() if name not in ("kind", "chunk", "groups")}
        window = keywords.pop("window_left"), keywords.pop("window_right")
        unused = {"score_mod": None, "mask_mod": None, "dropout_p": 0.0, "dropout_seed": None, "return_lse": True}
        return keywords | tensors | unused | {"layout": layout, "window_size": window}


@lru_cache(64)
def _layout(bounds: tuple[int, ...], ranks: int, kind: Kind, chunk: int) -> Layout:
    return Layout(bounds, ranks, kind, chunk=chunk)


def is_between_graphs(keywords: dict[str, Any]) -> bool:
    """True for calls that have no op: with functions, dropout, numbers of NumPy, or a layout by runs."""
    if keywords["score_mod"] is not None or keywords["mask_mod"] is not None or not is_zero(keywords["dropout_p"]):
        return True
    if isinstance(keywords["layout"], Layout) and keywords["layout"].kind == "runs":
        return True
    return any(isinstance(keywords[name], np.ndarray) for name in ("softmax_scale", "softcap"))


def by_op(q: Any, k: Any, v: Any, keywords: dict[str, Any], groups: list[str]) -> Any:
    """Calls the op. keywords: those of `attention`. groups: names of ProcessGroups."""
    if is_between_graphs(keywords):
        raise UnsupportedError(
            "score_mod, mask_mod, dropout or a layout by runs under torch.export or a FakeTensorMode: such calls are "
            "not one op that it could record; call with tensors that have values"
        )
    if (seed := keywords["dropout_seed"]) is not None:
        check_seed(seed, q)
    layout: Layout | None = keywords["layout"]
    if layout is not None and not isinstance(layout, Layout):
        raise ProblemError(f"layout is {type(layout).__name__}; give a cuflash.distributed.Layout")
    of_layout = (None, 1) if layout is None else (layout.kind, layout.chunk)
    bounds = None if layout is None else torch.as_tensor(layout.bounds)
    names = ("softmax_scale", "causal", "window_size", "softcap", "num_splits", "split_size")
    options = {name: keywords[name] for name in names} | {"diagonal_offset": None}
    x = torch_ops.Arguments.from_keywords(options, keywords["deterministic"])
    return torch.ops.cuflash.distributed_attention(
        q, k, v, keywords["bias"], keywords["sinks"], bounds, *of_layout, groups, keywords["scheme"], x.softmax_scale,
        x.causal, x.window_left, x.window_right, x.softcap, x.deterministic, x.num_splits or 0, x.split_size,
        keywords["check"],
    )  # fmt: skip


# Schemas are written out: PyTorch cannot infer them, because annotations are strings in this module.
_ARGUMENTS = (
    "Tensor? bias, Tensor? sinks, Tensor? bounds, str? kind, SymInt chunk, str[] groups, str scheme, "
    "float? softmax_scale, bool causal, SymInt window_left, SymInt window_right, float softcap, bool deterministic, "
    "SymInt num_splits, SymInt? split_size, bool check"
)


def _groups(names: Iterable[str]) -> list[Any]:
    from torch.distributed.distributed_c10d import _resolve_process_group

    return [_resolve_process_group(name) for name in names]


@torch.library.custom_op(
    "cuflash::distributed_attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}) -> (Tensor, Tensor)",
)
def _attention_op(q: Any, k: Any, v: Any, bias: Any, sinks: Any, bounds: Any, *arguments: Any) -> Any:
    options = Arguments(*arguments)
    groups = _groups(options.groups)
    with torch.no_grad():
        results = run(q, k, v, options.keywords(groups, bounds, bias=bias, sinks=sinks), groups)
    return tuple(_apart(results))


@torch.library.custom_op(
    "cuflash::distributed_attention_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool needs_bias, "
    f"bool needs_sinks, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward_op(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, needs_bias: bool, needs_sinks: bool, bias: Any,
    sinks: Any, bounds: Any, *arguments: Any,
) -> Any:  # fmt: skip
    options = Arguments(*arguments)
    groups = _groups(options.groups)
    leaf_names = [name for name, needed in (("bias", needs_bias), ("sinks", needs_sinks)) if needed]
    with torch.no_grad():
        keywords = options.keywords(groups, bounds, bias=bias, sinks=sinks)
        grads = run_gradients(keywords, groups, leaf_names, dout, dlse, q, k, v, out, lse)
    return tuple(_apart([q.new_empty(0) if grad is None else grad for grad in grads]))


def _apart(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns dense tensors without common memory: results of an op are no views of one buffer."""
    buffers = [x.untyped_storage().data_ptr() for x in tensors]
    return [
        x.clone(memory_format=torch.contiguous_format) if buffers.count(buffer) > 1 else x.contiguous()
        for x, buffer in zip(tensors, buffers, strict=True)
    ]


@_attention_op.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ProblemError(
            f"q, k and v have {q.dim()}, {k.dim()} and {v.dim()} axes; give (batch, rows of this rank, heads, head_dim)"
        )
    batch, rows, heads, _ = q.shape
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((batch, rows, heads, v.shape[3])), q.new_empty((batch, heads, rows), dtype=lse_dtype)


@_backward_op.register_fake
def _(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, needs_bias: bool, needs_sinks: bool, bias: Any,
    sinks: Any, *arguments: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    leaves = (bias if needs_bias else None), (sinks if needs_sinks else None)
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, k, v, *leaves))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, bias, sinks, bounds, *ctx.arguments = inputs
    ctx.save_for_backward(q, k, v, *output, bias, sinks, bounds)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    dout = torch_ops.zeros_for_none(dout, out)
    needs = ctx.needs_input_grad[3:5]
    *grads, dbias, dsinks = torch.ops.cuflash.distributed_attention_backward(
        dout, dlse, q, k, v, out, lse, *needs, *tensors, *ctx.arguments
    )
    leaves = (grad if needed else None for grad, needed in zip((dbias, dsinks), needs, strict=True))
    return *grads, *leaves, None, *(None for _ in Arguments._fields)


_attention_op.register_autograd(_differentiate, setup_context=_save)
_backward_op.register_autograd(torch_ops.refuse_twice)
