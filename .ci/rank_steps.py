"""Speed, host time and memory of one rank of a ring of 4, on one GPU: `rank_steps.py [--cpu]`, --cpu to try it out.

The rank runs `cuflash.distributed.attention` in a group without peers: the keys that arrive are the ones that it sent.
So all of its kernels count, and links do not. "local" sends nothing; "copied" copies within the GPU instead.
A share is the rank's FLOP/s over the FLOP/s of one causal call with the sequence of all ranks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cuflash.distributed import Layout, attention, plan, ring
from cuflash.distributed.exchange import Link
from cuflash.frameworks.torch import attention as whole_attention
from cuflash.testing.arrays import NumpyArrays, TorchArrays

RANKS = 4
SLEEP = 20_000_000  # cycles, about 10 ms, in which the host enqueues a call


class Size(NamedTuple):
    """Rows of a rank, heads, and the least shares of forward and of both passes."""

    rows: int
    heads_q: int
    heads_kv: int
    dim: int = 128
    bars: tuple[float, float] = (0.0, 0.0)


ON_CPU = "--cpu" in sys.argv
SIZES = [Size(16384, 16, 16, bars=(0.94, 0.92)), Size(65536, 8, 8, bars=(0.97, 0.96))]
OF_HOST, OF_MEMORY = [Size(4096, 16, 16)], [Size(16384, 16, 16), Size(16384, 16, 4)]
REPEATS, DEVICE, ARRAYS = 10, "cuda", TorchArrays
if ON_CPU:
    SIZES, OF_HOST, OF_MEMORY = [Size(64, 2, 2, 16)], [Size(32, 2, 1, 16)], [Size(64, 2, 2, 16)]
    REPEATS, DEVICE, ARRAYS = 2, "cpu", NumpyArrays


class Transport:
    """Replaces torch.distributed's collectives: what arrives is a copy of what was sent."""

    @classmethod
    def all_to_all_single(cls, received: Any, sent: Any, *_: Any, **__: Any) -> type[Transport]:
        received.copy_(sent)
        return cls

    @staticmethod
    def wait() -> None:
        """Everything has arrived."""

    @staticmethod
    def all_gather_object(objects: list[Any], mine: Any, **_: Any) -> None:
        objects[:] = [mine] * len(objects)


@contextmanager
def as_rank(rank: int, copies: bool = False) -> Iterator[None]:
    """Makes this process a rank of a group without peers, as of NCCL. copies: what arrives is a copy."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=RANKS)
    try:
        with ExitStack() as stack:
            stack.enter_context(patch.object(Link, "is_nccl", lambda link, x: True))
            if not copies:
                stack.enter_context(patch.object(ring, "arrivals", lambda first, link, *_: repeat(first, link.ranks)))
                stack.enter_context(patch.object(ring, "start_shift", lambda *_: Transport.wait))
            yield
    finally:
        dist.destroy_process_group()


class Passes(NamedTuple):
    """Calls of forward alone, of both passes, and of backward after a forward that ran before."""

    forward: Callable[[], Any]
    both: Callable[[], Any]
    backward: Callable[[], Any]

    @classmethod
    def prepared(cls, rows: int, size: Size, call: Callable[..., Any]) -> Passes:
        """Draws inputs."""
        heads = size.heads_q, size.heads_kv, size.heads_kv, size.heads_q
        shapes = [(1, rows, each, size.dim) for each in heads]
        q, k, v, dout = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for shape in shapes)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        graphs: list[Any] = []

        def forward() -> Any:
            with torch.no_grad():
                return call(q, k, v)

        def backward() -> Any:
            if not graphs:
                graphs.append(call(*leaves))
            return torch.autograd.grad(graphs[0], leaves, dout, retain_graph=True)

        return cls(forward, lambda: torch.autograd.grad(call(*leaves), leaves, dout), backward)


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def host_seconds(call: Callable[[], Any]) -> float:
    """Returns the time until the last launch of a call returns."""
    synchronize()
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def seconds(call: Callable[[], Any]) -> float:
    """Returns the time of a call's kernels, which are enqueued while the GPU sleeps."""
    if DEVICE == "cpu":
        return host_seconds(call)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    synchronize()
    torch.cuda._sleep(SLEEP)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


def medians(timer: Callable[[Callable[[], Any]], float], calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Returns the median time of each call; calls alternate."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(REPEATS + 2):
        for name, call in calls.items():
            elapsed = timer(call)
            if number >= 2:
                times[name].append(elapsed)
    return {name: median(each) for name, each in times.items()}


def print_shares(size: Size) -> None:
    """Prints the shares of all ranks."""
    layout = Layout(RANKS * size.rows, RANKS)
    ranks = plan(layout, size.heads_q, size.heads_kv, size.dim, scheme="ring", causal=True).ranks
    flops = sum(each.flops for each in ranks)
    one = Passes.prepared(RANKS * size.rows, size, lambda *x: whole_attention(*x, causal=True))
    full = Passes.prepared(size.rows, size, whole_attention)
    mine = Passes.prepared(size.rows, size, lambda *x: attention(*x, layout=layout, scheme="ring", causal=True))
    full_flops = 2 * size.rows**2 * size.heads_q * 2 * size.dim
    print(f"\n{size.rows} rows a rank, {size.heads_q} heads, head dim {size.dim}: shares of one causal call's rate")
    print("rank transport pass       rank ms  one call ms   share    bar   share of a full call of its rows")
    for rank, transport in [*((rank, "local") for rank in range(RANKS)), (RANKS - 1, "copied")]:
        with as_rank(rank, transport == "copied"):
            for name, bar in zip(("forward", "both"), size.bars, strict=True):
                calls = {"rank": getattr(mine, name), "one": getattr(one, name), "full": getattr(full, name)}
                times = medians(seconds, calls)
                rate = ranks[rank].flops / times["rank"]
                share, of_full = rate / (flops / times["one"]), rate / (full_flops / times["full"])
                mark = "" if share >= bar or transport == "copied" else "  BELOW"
                line = f"{rank:4} {transport:9} {name:8} {times['rank'] * 1e3:9.3f} {times['one'] * 1e3:12.3f}"
                print(f"{line} {share:7.3f} {bar:6.2f} {of_full:7.3f}{mark}", flush=True)


def print_host_times(size: Size) -> None:
    """Prints the host's time of a rank, beside its kernels' time. Each call follows calls of its own."""
    layout = Layout(RANKS * size.rows, RANKS)
    heads = f"{size.rows} rows a rank, {size.heads_q} heads"
    print(f"\n{heads}: time until the last launch returns, one call after the other, and of the kernels, ms")
    mine = Passes.prepared(size.rows, size, lambda *x: attention(*x, layout=layout, scheme="ring", causal=True))
    for rank in range(RANKS):
        with as_rank(rank):
            calls: dict[str, Any] = {"forward": mine.forward, "both": mine.both}
            for name, call in calls.items():
                of_host, of_kernels = (medians(timer, {name: call})[name] for timer in (host_seconds, seconds))
                mark = "" if of_host < of_kernels else "  ABOVE"
                print(f"{rank:4} {name:8} {of_host * 1e3:8.3f} {of_kernels * 1e3:8.3f}{mark}", flush=True)


def print_memory(size: Size) -> None:
    """Prints a rank's peak of memory beyond inputs, results and sums in float32, in copies of its k and v.

    At most 3 are allowed. Sums: out and lse in forward; in backward dq, and dk and dv three times, as they are
    computed, sent and received at once.
    """
    layout = Layout(RANKS * size.rows, RANKS)
    heads = f"{size.heads_q} and {size.heads_kv} heads"
    print(f"\n{size.rows} rows a rank, {heads}: copies of k and v beyond inputs, results and sums in float32")
    mine = Passes.prepared(size.rows, size, lambda *x: attention(*x, layout=layout, scheme="ring", causal=True))
    row, row_kv = (size.rows * heads * size.dim for heads in (size.heads_q, size.heads_kv))
    of_keys = 2 * row_kv * 2
    with as_rank(RANKS - 1, copies=True):
        for name, sums in (("forward", row + size.rows * size.heads_q), ("backward", row + 3 * 2 * row_kv)):
            call = getattr(mine, name)
            call()  # compiles, and holds the graph for backward
            synchronize()
            results, most = ARRAYS().peak(call)
            of_results = sum(x.nbytes for x in results)  # of a tensor, too, over its batch
            copies = (most - of_results - 4 * sums) / of_keys
            del results
            print(f"{name:8} {copies:6.2f}{'' if copies <= 3 else '  OVER 3'}", flush=True)


def main() -> None:
    dist.all_to_all_single, dist.all_gather_object = Transport.all_to_all_single, Transport.all_gather_object
    torch.manual_seed(0)
    for size in SIZES:
        print_shares(size)
    for size in OF_HOST:
        print_host_times(size)
    for size in OF_MEMORY:
        print_memory(size)


if __name__ == "__main__":
    main()
