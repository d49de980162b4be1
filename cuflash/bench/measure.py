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
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median
from typing import Any

from .arrays import NumpyArrays

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


def seconds_per_call(arrays: NumpyArrays, runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """Median seconds per call of each contender; each has one turn in every round, on rotating input sets."""
    if not runs:
        return {}
    span = _gpu_span if arrays.on_gpu else _host_span
    repeats = dict.fromkeys(runs, 1)
    for warming in (True, False):  # the second pass measures what a call costs once everything is loaded
        for name, run in runs.items():
            seconds = span(run, 1)()
            if not warming and arrays.on_gpu:
                repeats[name] = max(1, min(64, math.ceil(ROUND_SECONDS / max(seconds, 1e-6))))
    started, slowest = time.perf_counter(), 0.0
    while True:
        spans = [span(run, repeats[name]) for name, run in runs.items()]
        slowest = max(read() for read in spans)
        if time.perf_counter() - started > WARM_UP_SECONDS:
            break
    rounds = max(3, min(rounds, int(CONTENDER_SECONDS / slowest)))
    # why another order in every round: L1. After a contender that needs less power the clocks are higher.
    shuffled = random.Random(0)
    orders = [shuffled.sample(list(runs), len(runs)) for _ in range(rounds)]
    turns = [{name: span(runs[name], repeats[name]) for name in order} for order in orders]
    return {name: median(turn[name]() for turn in turns) / repeats[name] for name in runs}


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

    NVRTC's own cache is turned off, because otherwise only the first run on a machine would be cold.
    """
    timings = {}
    with tempfile.TemporaryDirectory(prefix="cuflash-bench-") as folder:
        for name in ("cold", "disk"):
            done = subprocess.run(
                [sys.executable, "-m", "cuflash.bench.startup", *ops],
                env=os.environ | {"CUFLASH_CACHE_DIR": folder, "CUDA_CACHE_DISABLE": "1"},
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                return {"failed": done.stderr.strip().splitlines()[-1:] or ["no output"]}
            timings[name] = json.loads(done.stdout)
    return timings
