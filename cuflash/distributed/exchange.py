"""The one collective of all schemes: an all-to-all of rows, with gradients; and the agreement of ranks."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function

from ..errors import ProblemError

_agreed: weakref.WeakSet[Any] = weakref.WeakSet()  # groups whose ranks were compared


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, send: list[int], receive: list[int], group: Any) -> torch.Tensor:
        ctx.counts = receive, send, group
        rows = x.new_empty((sum(receive), *x.shape[1:]))
        dist.all_to_all_single(rows, x.contiguous(), receive, send, group=group)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _Exchange.apply(grad, *ctx.counts), None, None, None


def exchange(x: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: Any) -> torch.Tensor:
    """Returns the rows that all ranks sent, in the order of ranks.

    send: numbers of rows of x, along its first axis, for each rank. receive: numbers of rows from each rank. Gradients
    go back the same way.
    """
    rows: torch.Tensor = _Exchange.apply(x, list(send), list(receive), group)
    return rows


def start_shift(tensors: Sequence[torch.Tensor], rank: int, ranks: int, group: Any) -> tuple[list[torch.Tensor], Any]:
    """Begins to send tensors to the next rank; returns those of the previous rank, and the work to wait for.

    It is an all-to-all in which one split is not empty: every backend has it, and NCCL skips empty splits. All ranks
    have tensors of equal shapes.
    """
    sent = torch.cat([x.reshape(-1) for x in tensors])
    received = torch.empty_like(sent)
    send, receive = [0] * ranks, [0] * ranks
    send[(rank + 1) % ranks] = receive[(rank - 1) % ranks] = sent.numel()
    work = dist.all_to_all_single(received, sent, receive, send, group=group, async_op=True)
    parts = received.split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)], work


def needs_agreement(group: Any) -> bool:
    """True until the ranks of a group were compared."""
    return group not in _agreed


def check_agreement(group: Any, call: dict[str, Any]) -> None:
    """Raises ProblemError on every rank if ranks disagree about a call.

    call: what must be equal on all ranks, by name; values have a repr.
    """
    mine = {name: repr(value) for name, value in call.items()}
    calls: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(calls, mine, group=group)
    for name, value in calls[0].items():
        for rank, other in enumerate(calls):
            if other[name] != value:
                raise ProblemError(
                    f"ranks disagree about {name}: rank 0 has {value}, rank {rank} has {other[name]}; give all ranks "
                    "of a group the same"
                )
    _agreed.add(group)
