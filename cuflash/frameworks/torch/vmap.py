"""Rules of vmap: the mapped axis is folded into batch, so that one call computes all elements.

Operands are q, k, v (batch, seqlen, heads, head_dim) and lse (batch, heads, seqlen), or without batch, or without
batch and heads. An axis is None for an operand that is equal for all elements.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import ProblemError

Axes = Sequence[int | None]


def map_attention(call: Callable[..., Any], size: int, axes: Axes, operands: Sequence[Any]) -> tuple[Any, ...]:
    """Returns (out, lse) with the mapped axis in front.

    call: attention of folded q, k and v. size: the length of the mapped axis. axes: where it lies in each operand.
    """
    ranks = [x.dim() - (axis is not None) for x, axis in zip(operands, axes, strict=True)]
    if len(set(ranks)) > 1:
        raise ProblemError(f"q, k and v have ranks {ranks[0]}, {ranks[1]} and {ranks[2]} under vmap; give all alike")
    out, lse = call(*(_fold(x, axis, size, heads=2) for x, axis in zip(operands, axes, strict=True)))
    shape = _mapped(operands[0], axes[0], size).shape
    return _unfold(out, shape, heads=2), _unfold(lse, shape, heads=1)


def map_gradients(call: Callable[..., Any], size: int, axes: Axes, operands: Sequence[Any]) -> tuple[Any, ...]:
    """Returns (dq, dk, dv) with the mapped axis in front.

    call: gradients of folded dout, q, k, v, out, lse and dlse; other arguments as in `map_attention`.
    """
    heads = (2, 2, 2, 2, 2, 1, 1)
    gradients = call(*(_fold(x, axis, size, n) for x, axis, n in zip(operands, axes, heads, strict=True)))
    shape = _mapped(operands[1], axes[1], size).shape
    return tuple(_unfold(x, shape, heads=2) for x in gradients)


def in_a_loop(call: Callable[..., Any], size: int, axes: Axes, arguments: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Returns the results of one call for each element, stacked, and warns of the loop."""
    warnings.warn(
        "vmap over variable-length sequences runs one call of cuflash for each element; pack what is mapped as further "
        "sequences of one call",
        stacklevel=2,
    )
    pairs = list(zip(arguments, axes, strict=True))
    elements = [call(*(x if axis is None else x.select(axis, index) for x, axis in pairs)) for index in range(size)]
    return tuple(map(torch.stack, zip(*elements, strict=True)))


def _fold(tensor: Any, axis: int | None, size: int, heads: int) -> Any:
    """Folds the mapped axis of an operand into batch: 4-D (lse 3-D). heads: its axis of heads in 4-D."""
    if tensor is None:
        return None
    tensor = _mapped(tensor, axis, size)
    rank = 4 if heads == 2 else 3
    if tensor.dim() == rank - 1:  # without batch and heads
        tensor = tensor.unsqueeze(heads)
    return tensor.flatten(0, 1) if tensor.dim() == rank + 1 else tensor


def _unfold(tensor: torch.Tensor, q: torch.Size, heads: int) -> torch.Tensor:
    """Undoes `_fold` on a result. q: the shape of q with the mapped axis in front."""
    if len(q) == 5:
        size, batch, *_ = q
        return tensor.unflatten(0, (size, batch))
    return tensor.squeeze(heads) if len(q) == 3 else tensor


def _mapped(tensor: torch.Tensor, axis: int | None, size: int) -> torch.Tensor:
    """Returns the operand with the mapped axis in front; one without that axis is expanded."""
    return tensor.expand(size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
