"""Measures how long calls take: contenders take turns on the same inputs, and medians of many rounds count."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles
from typing import Any, NamedTuple

from .arrays import CupyArrays, NumpyArrays

WARM_UP_SECONDS = 0.3  # the clocks of an idle GPU take that long to rise
ROUND_SECONDS = 1e-3  # a contender's share of a round is at least this long, so that a launch does not count
CONTENDER_SECONDS = 3.0  # the most seconds that a contender's rounds take in one cell


@dataclass(frozen=True, slots=True)
class Run:
    """The calls of one contender, one for each input set, and the context that they run in."""

    calls: list[Callable[[], Any]]
    scope: Callable[[], AbstractContextManager[Any]]

    def repeat(self, times: int) -> None:
        """Makes `times` calls, taking the input sets in turn."""
        for turn in range(times):
            self.calls[turn % len(self.calls)]()


class Seconds(NamedTuple):
    """The median of several readings, and how far apart their quartiles are, to the median."""

    median: float
    spread: float

    @classmethod
    def of(cls, readings: list[float]) -> Seconds:
        """That of these readings."""
        low, middle, high = quantiles(readings, n=4, method="inclusive")
        return cls(middle, (high - low) / middle)


def seconds_per_call(arrays: NumpyArrays, runs: dict[str, Run], rounds: int) -> dict[str, Seconds]:
    """Seconds per call of each contender; each has one turn in every round, on rotating input sets."""
    if not runs:
        return {}
    span = _gpu_span if arrays.on_gpu else _host_span
    repeats = dict.fromkeys(runs, 1)
    for warming in (True, False):  # the second pass measures what a call costs once everything is loaded
        for name, run in runs.items():
            seconds = span(run, 1)()
            if not warming and arrays.on_gpu:
                repeats[name] = repeats_for(seconds)
    turns = _in_turns({name: partial(span, run, repeats[name]) for name, run in runs.items()}, rounds)
    return {name: Seconds.of([seconds / repeats[name] for seconds in of_one]) for name, of_one in turns.items()}


def seconds_in_graphs(
    arrays: CupyArrays,
    prepared: Mapping[str, Callable[[], Run]],
    about: dict[str, Seconds],
    rounds: int,
    watch: Callable[[], None] = lambda: None,
) -> dict[str, Seconds]:
    """The same by replays of CUDA graphs, so that no time of the host counts; of those that can be captured.

    about: seconds of a call, by which a graph has so many that they take ROUND_SECONDS. watch: called while they run.
    """
    graphs: dict[str, Callable[[], Callable[[], float]]] = {}
    repeats = {name: repeats_for(about[name].median) for name in prepared}
    for name, prepare in prepared.items():

        def work(prepare: Callable[[], Run] = prepare, times: int = repeats[name]) -> Callable[[], None]:
            run = prepare()

            def repeat() -> None:
                with run.scope():
                    run.repeat(times)

            return repeat

        with suppress(Exception):  # why: what cannot be captured has only the other time
            graphs[name] = arrays.captured(work)
    turns = _in_turns(graphs, rounds, watch) if graphs else {}
    return {name: Seconds.of([seconds / repeats[name] for seconds in of_one]) for name, of_one in turns.items()}


def repeats_for(seconds: float) -> int:
    """How many calls take ROUND_SECONDS."""
    return max(1, min(64, math.ceil(ROUND_SECONDS / max(seconds, 1e-6))))


def _in_turns(
    spans: dict[str, Callable[[], Callable[[], float]]], rounds: int, watch: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Seconds of each, in so many rounds at most, after the clocks have risen."""
    started, slowest = time.perf_counter(), 0.0
    while True:
        readers = [span() for span in spans.values()]
        slowest = max(read() for read in readers)
        if time.perf_counter() - started > WARM_UP_SECONDS:
            break
    rounds = max(3, min(rounds, int(CONTENDER_SECONDS / slowest)))
    # why another order in every round: L1. After a contender that needs less power the clocks are higher.
    shuffled = random.Random(0)
    orders = [shuffled.sample(list(spans), len(spans)) for _ in range(rounds)]
    turns = [{name: spans[name]() for name in order} for order in orders]
    watch()
    return {name: [turn[name]() for turn in turns] for name in spans}


def _gpu_span(run: Run, repeats: int) -> Callable[[], float]:
    """Enqueues the calls between two events; the returned function waits for them and gives the seconds.

    Torch's default stream and CuPy's are the same legacy stream of the driver, so CuPy's events time both.
    """
    from cupy import cuda

    begin, end = cuda.Event(), cuda.Event()
    with run.scope():
        begin.record()
        run.repeat(repeats)
        end.record()

    def seconds() -> float:
        end.synchronize()
        return float(cuda.get_elapsed_time(begin, end)) * 1e-3

    return seconds


def _host_span(run: Run, repeats: int) -> Callable[[], float]:
    started = time.perf_counter()
    with run.scope():
        run.repeat(repeats)
    elapsed = time.perf_counter() - started
    return lambda: elapsed


def host_seconds(arrays: NumpyArrays, run: Run, calls: int = 200, rounds: int = 15) -> float:
    """Median seconds to enqueue one call. The GPU must need less per call, or waits for a full queue would be timed."""
    timings = []
    with run.scope():
        for _ in range(rounds + 3):
            arrays.synchronize()
            started = time.perf_counter()
            run.repeat(calls)
            timings.append((time.perf_counter() - started) / calls)
            arrays.synchronize()
    return median(timings[3:])


def startup(ops: Iterable[str]) -> dict[str, Any]:
    """Seconds of first calls in a fresh process: "cold" with an empty cache folder, then "disk" with the filled one.

    "peers": those of the peers, in one more. "failed": what a process said that could not. NVRTC's own cache is turned
    off, because otherwise only the first run on a machine would be cold.
    """
    timings: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="cuflash-bench-") as folder:
        for name, of_whom in (("cold", ()), ("disk", ()), ("peers", ("--peers",))):
            done = subprocess.run(
                [sys.executable, "-m", "cuflash.bench.startup", *of_whom, *ops],
                env=os.environ | {"CUFLASH_CACHE_DIR": folder, "CUDA_CACHE_DISABLE": "1"},
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                return timings | {"failed": (done.stderr.strip().splitlines() or ["no output"])[-1]}
            timings[name] = json.loads(done.stdout)
    return timings
