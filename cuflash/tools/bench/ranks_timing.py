"""Time of calls on the processes of torchrun: in turns, and by the slowest rank; and the links between them."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from .measure import Seconds

TURN_SECONDS, MOST_CALLS, LEAST_CALLS = 0.1, 32, 2
LINK_BYTES, SMALL_BYTES = 1 << 27, 1 << 10
SLEEP = 20_000_000  # cycles, about 10 ms
Call = Callable[[], Any]


class Machine(NamedTuple):
    """This process: its rank, the number of ranks, and the device and dtype of tensors."""

    rank: int
    ranks: int
    device: Any
    dtype: Any

    @property
    def on_gpu(self) -> bool:
        """True if each rank has a GPU."""
        return bool(self.device.type == "cuda")

    def reduced(self, values: list[float], op: Any) -> list[float]:
        """Returns the maximum, minimum or sum of each number over all ranks."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op)
        reduced: list[float] = tensor.tolist()
        return reduced

    def synchronize(self) -> None:
        """Waits for the GPU."""
        if self.on_gpu:
            torch.cuda.synchronize()


def links(machine: Machine) -> dict[str, float]:
    """Measures bytes a second that a rank sends, by the ring's shift and all-to-all, and seconds of a small shift.

    Small shifts are enqueued while the GPU sleeps: without that, the host's time would be measured.
    """
    n, rank = machine.ranks, machine.rank
    to_next, from_last = [0] * n, [0] * n
    speeds: dict[str, float] = {}
    for name, num_bytes in (("alpha", SMALL_BYTES), ("shift", LINK_BYTES if machine.on_gpu else 1 << 18)):
        count = num_bytes // n * n
        sent = torch.zeros(count, dtype=torch.uint8, device=machine.device)
        received = torch.empty_like(sent)
        to_next[(rank + 1) % n] = from_last[(rank - 1) % n] = count
        calls: dict[str, Call] = {
            name: partial(dist.all_to_all_single, received, sent, from_last, to_next),
            "all_to_all": partial(dist.all_to_all_single, received, sent),
        }
        for call in calls.values():
            call()
        if name == "alpha":
            small = _seconds(machine, calls[name], MOST_CALLS, ahead=True)
            (speeds[name],) = machine.reduced([median(small)], dist.ReduceOp.MAX)
            continue
        seconds = in_turns(machine, calls, {}, 3)
        speeds[name] = seconds[name].median
    return {
        "alpha": speeds["alpha"],
        "shift": count / speeds["shift"],
        "all_to_all": count * max(n - 1, 1) / n / seconds["all_to_all"].median,
        "bytes": count,
    }


def in_turns(
    machine: Machine,
    calls: Mapping[str, Call],
    scopes: Mapping[str, Callable[[], AbstractContextManager[Any]]],
    rounds: int,
    local: Mapping[str, Any] | None = None,
) -> dict[str, Seconds]:
    """Measures seconds of each call, one turn in every round. local: calls that count with the mean of the ranks.

    Each turn begins with a barrier, and its second half counts, when clocks no longer depend on the turn before.
    """

    def turn(name: str, count: int) -> list[float]:
        with scopes.get(name, nullcontext)():
            return _seconds(machine, calls[name], count)

    turn_seconds = TURN_SECONDS if machine.on_gpu else 0.0
    about = {name: turn(name, 2)[1] for name in calls}
    longest = dict(zip(about, machine.reduced([*about.values()], dist.ReduceOp.MAX), strict=True))
    counts = {
        name: min(max(math.ceil(turn_seconds / max(x, 1e-6)), LEAST_CALLS), MOST_CALLS) for name, x in longest.items()
    }
    shuffled, readings = random.Random(0), {name: list[float]() for name in calls}
    for _ in range(rounds):
        for name in shuffled.sample([*calls], len(calls)):
            readings[name] += turn(name, counts[name])[counts[name] // 2 :]
    seconds = {}
    for name, values in readings.items():
        is_local = name in (local or {})
        together = machine.reduced(values, dist.ReduceOp.SUM if is_local else dist.ReduceOp.MAX)
        seconds[name] = Seconds.from_readings([x / machine.ranks if is_local else x for x in together])
    return seconds


def _seconds(machine: Machine, call: Call, count: int, ahead: bool = False) -> list[float]:
    """Returns seconds of each of several calls after a barrier of all ranks.

    ahead: True to let the host enqueue them before the GPU begins.
    """
    dist.barrier()
    if not machine.on_gpu:
        times = [time.perf_counter()]
        for _ in range(count):
            call()
            times.append(time.perf_counter())
        return np.diff(times).tolist()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    if ahead:
        torch.cuda._sleep(SLEEP)
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [1e-3 * events[i].elapsed_time(events[i + 1]) for i in range(count)]
