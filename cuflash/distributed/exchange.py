"""The one collective of all schemes: an all-to-all of rows, with gradients; and the agreement of ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd import Function

from ..errors import ExchangeError, ProblemError

# The groups that were compared together with a group.
_agreed: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()


class Link(NamedTuple):
    """The ranks of a group, this process's rank among them, and the user of the link for messages."""

    group: Any
    rank: int
    ranks: int
    purpose: str

    def is_nccl(self, x: torch.Tensor) -> bool:
        """True if transfers of such tensors run on GPUs, in the order in which they begin."""
        return x.is_cuda and "cuda:nccl" in dist.get_backend_config(self.group)

    def run(self, collective: Callable[..., Any], *operands: Any, **keywords: Any) -> Any:
        """Calls a collective; its errors say what to look at."""
        try:
            return collective(*operands, **keywords)
        except RuntimeError as error:
            raise ExchangeError(
                f"{self.purpose}: rank {self.rank} of {self.ranks} got no answer from the others, as one has ended or "
                "made another call. Look at the first error of any rank. If there is none, pass check=True, which "
                "compares layouts, schemes, shapes and options of all ranks; a longer timeout of init_process_group "
                "helps slow ranks"
            ) from error


class Parcel(NamedTuple):
    """Tensors that travel as one buffer, of which they are views."""

    buffer: torch.Tensor
    tensors: list[torch.Tensor]

    @classmethod
    def of_buffer(cls, buffer: torch.Tensor, like: Sequence[torch.Tensor]) -> Parcel:
        """Returns the tensors of these shapes in a buffer."""
        parts = buffer.split_with_sizes([x.numel() for x in like])
        return cls(buffer, [part.view(x.shape) for part, x in zip(parts, like, strict=True)])

    def empty_like(self, dtype: torch.dtype | None = None) -> Parcel:
        """Returns tensors of the same shapes in another buffer."""
        return Parcel.of_buffer(torch.empty_like(self.buffer, dtype=dtype), self.tensors)

    @classmethod
    def pack(cls, tensors: Sequence[torch.Tensor]) -> Parcel:
        """Returns copies of tensors."""
        return cls.of_buffer(torch.cat([x.reshape(-1) for x in tensors]), tensors)


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, send: list[int], receive: list[int], link: Link) -> torch.Tensor:
        ctx.counts = receive, send, link
        rows = x.new_empty((sum(receive), *x.shape[1:]))
        link.run(dist.all_to_all_single, rows, x.contiguous(), receive, send, group=link.group)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _Exchange.apply(grad, *ctx.counts), None, None, None


def exchange(x: torch.Tensor, send: Sequence[int], receive: Sequence[int], link: Link) -> torch.Tensor:
    """Returns the rows that all ranks sent, in the order of ranks.

    send: numbers of rows of x, along its first axis, for each rank. receive: numbers of rows from each rank. Gradients
    go back the same way.
    """
    rows: torch.Tensor = _Exchange.apply(x, list(send), list(receive), link)
    return rows


def start_shift(sent: torch.Tensor, received: torch.Tensor, link: Link) -> Callable[[], None]:
    """Begins to send a buffer to the next rank, and to receive the previous rank's; returns a function that waits.

    It is an all-to-all in which one split is not empty: every backend has it, and NCCL skips empty splits. All ranks
    have buffers of equal sizes.
    """
    _, rank, ranks, _ = link
    send, receive = [0] * ranks, [0] * ranks
    send[(rank + 1) % ranks] = receive[(rank - 1) % ranks] = sent.numel()
    work = link.run(dist.all_to_all_single, received, sent, receive, send, group=link.group, async_op=True)
    return lambda: link.run(work.wait)


def arrivals(first: Parcel, link: Link, ahead: int = 1) -> Iterator[Parcel]:
    """Yields a rank's own parcel, and those of the previous ranks as they arrive. Each is valid until the next is due.

    A transfer begins before the caller reads the parcel that it sends. ahead: transfers that are enqueued at a time. A
    second one costs one more buffer, and may lose a race for SMs with the kernels of a step. Only backends that keep
    the order of transfers, as NCCL does, take more than one.
    """
    last = link.ranks - 1
    parcels = [first, *(first.empty_like() for _ in range(min(ahead, last)))]
    waits: list[Callable[[], None]] = []
    for step in range(link.ranks):
        if step:
            waits[step - 1]()
        for number in range(len(waits), min(step + ahead, last)):
            sent, received = (parcels[i % len(parcels)].buffer for i in (number, number + 1))
            waits.append(start_shift(sent, received, link))
        yield parcels[step % len(parcels)]


def needs_agreement(groups: Sequence[Any]) -> bool:
    """True until the ranks of these groups, which are the axes of a mesh, were compared."""
    return groups[-1] not in _agreed.get(groups[0], ())


def check_agreement(links: Sequence[Link], call: dict[str, Any]) -> None:
    """Raises ProblemError on every rank if ranks disagree about a call.

    links: those of all axes of a mesh. call: what must be equal on all ranks, by name; values have a repr.
    """
    calls: list[Any] = [{name: repr(value) for name, value in call.items()}]
    for link in reversed(links):
        of_ranks: list[Any] = [None] * link.ranks
        link.run(dist.all_gather_object, of_ranks, calls, group=link.group)
        calls = [each for part in of_ranks for each in part]
    for name, value in calls[0].items():
        for rank, other in enumerate(calls):
            if other[name] != value:
                raise ProblemError(
                    f"ranks disagree about {name}: rank 0 has {value}, rank {rank} has {other[name]}; give all ranks "
                    "of a group the same"
                )
    _agreed.setdefault(links[0].group, weakref.WeakSet()).add(links[-1].group)
