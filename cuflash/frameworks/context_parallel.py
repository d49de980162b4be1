"""Ring attention of cuflash in PyTorch's `context_parallel`, while `cuflash.frameworks.sdpa` is activated.

    from cuflash.frameworks import sdpa
    from torch.distributed.tensor.experimental import context_parallel

    sdpa.activate()
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        ...    # scaled_dot_product_attention passes keys from rank to rank

PyTorch calls a handler for each op of its flash, memory-efficient and cuDNN backends. The handlers here run the ring of
`cuflash.distributed`: keys travel beside the kernels, and states and gradients are summed in float32. Accelerate's
`cp_size`, TRL, the Trainer of transformers and TorchTitan's SDPA path call `context_parallel` or its parts.

PyTorch's own ring stays for what this one does not take, with cuflash in each step: compiled graphs, and queries and
keys of different lengths. Masks raise there. Dropout raises UnsupportedError. Sources: _context_parallel/_attention.py
of PyTorch 2.11 and 2.14, whose table of handlers is private.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

import torch

from ..distributed.exchange import Link, check_agreement, needs_agreement
from ..distributed.layout import Kind, Layout
from ..distributed.rectangles import Window
from ..distributed.ring import ring_backward, ring_forward
from ..distributed.scheme import Call
from ..errors import UnsupportedError
from ..log import logger

PACKAGE = "torch.distributed.tensor.experimental"
MODULE = f"{PACKAGE}._context_parallel._attention"
OPS = [
    getattr(torch.ops.aten, f"_scaled_dot_product_{backend}_attention{suffix}").default
    for backend in ("flash", "efficient", "cudnn")
    for suffix in ("", "_backward")
]


class RingOverride:
    """Replaces the handlers of `context_parallel` until `remove` is called.

    PyTorch's package takes seconds to import. Where it is not imported yet, this is a finder that waits for it.
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[dict[Any, Any], Any, Any]] = []
        if PACKAGE in sys.modules:
            self._replace()
        else:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Gives the handlers back to PyTorch."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for table, op, original in self._replaced:
            table[op] = original
        self._replaced.clear()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Finds PyTorch's package, and replaces the handlers once it is imported."""
        if name != PACKAGE or (spec := PathFinder.find_spec(name, path, target)) is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._replace()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _replace(self) -> None:
        try:
            module: Any = sys.modules[MODULE]
            module._cp_options.enable_load_balance  # noqa: B018 - is it there?
            originals = {op: module.custom_ops[op] for op in OPS}
            # Where a context is active, its handlers are a copy.
            tables = module.custom_ops, module.DTensor._op_dispatcher._custom_op_handlers
        except (AttributeError, KeyError):
            logger.warning(
                "PyTorch %s has no table of context_parallel's handlers that cuflash knows: PyTorch's own ring stays, "
                "with cuflash in each step; cuflash.distributed.attention has all of cuflash's",
                torch.__version__,
            )
            return
        self._replaced = [(table, op, x) for table in tables for op, x in originals.items() if table.get(op) is x]
        for table, op, original in self._replaced:
            table[op] = _handler(module, original)


def _handler(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a handler of DTensor's for ops of fused attention. module: PyTorch's, original: its handler."""

    def handle(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dispatcher = module.DTensor._op_dispatcher
        info = dispatcher.unwrap_to_op_info(op, args, kwargs)
        names = [argument.name.rstrip("_") for argument in op._schema.arguments]
        operands = dict(zip(names, info.local_args, strict=False)) | info.local_kwargs
        dispatcher.sharding_propagator.propagate(info)
        if info.output_sharding.needs_redistribute or not _is_taken(info.compute_mesh, operands):
            return original(op, args, kwargs)
        kind: Kind = "zigzag" if module._cp_options.enable_load_balance else "contiguous"
        with torch.no_grad():  # autograd is outside, yet the tensors may require grad
            results = _run(op, info.compute_mesh.get_group(), kind, **operands)
        return dispatcher.wrap(results, info.output_sharding.output_spec)

    return handle


def _is_taken(mesh: Any, operands: dict[str, Any]) -> bool:
    """True for calls of the ring here. Others have no values yet, two lengths, a mask, or weights to return."""
    query, key = operands["query"], operands["key"]
    return (
        type(query) is torch.Tensor
        and mesh.ndim == 1
        and query.shape[2] == key.shape[2]
        and operands.get("attn_bias") is None
        and not operands.get("return_debug_mask", False)
    )


def _run(
    op: Any,
    group: Any,
    kind: Kind,
    *,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grad_out: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    logsumexp: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **others: Any,
) -> tuple[Any, ...]:
    """Computes an op, forward or backward, over the rows of all ranks; operands are (batch, heads, rows, head_dim)."""
    if dropout_p:
        raise UnsupportedError(
            f"dropout_p={dropout_p}: context_parallel on cuflash has no dropout; give 0.0, or call "
            "cuflash.frameworks.sdpa.restore()"
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    link = Link(group, group.rank(), group.size(), "context_parallel")
    if needs_agreement([group]):
        shapes = [tuple(x.shape) for x in (q, k, v)]
        check_agreement([link], {"shapes": shapes, "dtype": q.dtype, "is_causal": is_causal, "scale": scale})
    options = {"softmax_scale": scale, "softcap": 0.0, "deterministic": torch.are_deterministic_algorithms_enabled()}
    window = Window(None, 0 if is_causal else None)
    call = Call(_layout(q.shape[1], link.ranks, kind), [link], window, options, {})
    if grad_out is not None and out is not None and logsumexp is not None:
        dout, o, lse = grad_out.transpose(1, 2), out.transpose(1, 2), logsumexp.view(logsumexp.shape[:3])
        dq, dk, dv, _ = ring_backward(call, dout, None, q, k, v, o, lse)
        return *(x.transpose(1, 2) for x in (dq, dk, dv)), *(None for _ in op._schema.returns[3:])
    o, lse = ring_forward(call, q, k, v)
    is_cudnn = "cudnn" in op._schema.name
    rest = [_unused(result.name, query) for result in op._schema.returns[2:]]
    return o.transpose(1, 2), lse[..., None] if is_cudnn else lse, *rest


@lru_cache(64)
def _layout(rows: int, ranks: int, kind: Kind) -> Layout:
    return Layout(rows * ranks, ranks, kind)


def _unused(name: str, query: torch.Tensor) -> Any:
    """Returns a result of an op beside out and lse. The random state and the weights are scalars without a value."""
    if name.startswith("max_"):
        return query.shape[2]
    return None if name.startswith("cum_seq_") else query.new_empty((), dtype=torch.int64)
