"""Timing of calls: contenders take turns on the same inputs, and the median of all turns counts."""

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
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles
from typing import Any, NamedTuple

from ...testing.arrays import CupyArrays, NumpyArrays

WARM_UP_SECONDS = 0.1  # of all contenders together, to estimate the time of each
READING_SECONDS = 2.5e-4  # shortest reading, so that the time of a launch does not count
# Length of a contender's turn. Only the second half counts: by then a GPU's clocks no longer depend on the contender
# before (L1). A contender that needs the most power has higher clocks right after others, and would seem too fast.
TURN_SECONDS = 0.1
CONTENDER_SECONDS = 3.0  # limit of a contender's turns on one problem
STARTUP_SECONDS = 300  # limit of a process that makes first calls


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
    """The median of several readings, and the distance of their quartiles over the median."""

    median: float
    spread: float

    @classmethod
    def from_readings(cls, readings: list[float]) -> Seconds:
        """Computes the median and the spread of readings."""
        low, middle, high = quantiles(readings, n=4, method="inclusive")
        return cls(middle, (high - low) / middle)


def seconds_per_call(
    arrays: NumpyArrays, prepared: Mapping[str, Callable[[], Run]], rounds: int
) -> tuple[dict[str, Seconds], dict[str, str]]:
    """Measures seconds per call of each contender, with one turn in every round; also returns reasons for gaps."""
    spans: dict[str, Callable[[], Callable[[], float]]] = {}
    repeats: dict[str, int] = {}
    reasons: dict[str, str] = {}
    for name, prepare in prepared.items():
        try:
            run = prepare()
            _span(arrays, run, 1)()
            seconds = _span(arrays, run, 1)()  # the second call, once everything is loaded
        except Exception as error:  # a contender that fails must not end the others
            reasons[name] = reason(error)
            continue
        repeats[name] = repeats_for(seconds) if arrays.on_gpu else 1
        spans[name] = partial(_span, arrays, run, repeats[name])
    return _in_turns(spans, repeats, rounds), reasons


def seconds_in_graphs(
    arrays: CupyArrays,
    prepared: Mapping[str, Callable[[], Run]],
    about: Mapping[str, Seconds],
    rounds: int,
    watch: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Seconds], dict[str, str]]:
    """Measures seconds per call by replays of CUDA graphs, without host time; also returns reasons for gaps.

    about: seconds of a call. All graphs have the same number of calls, which take the fastest READING_SECONDS: the gap
    between two launches then counts alike for all. watch: called right after all work is enqueued.
    """

    def begin(graph: Callable[[], None]) -> Callable[[], float]:
        # As in triton's do_bench. Writing takes less power than a call, and the clocks follow the power.
        arrays.overwrite_l2()
        return arrays.span(graph)

    spans: dict[str, Callable[[], Callable[[], float]]] = {}
    reasons: dict[str, str] = {}
    times = repeats_for(min(about[name].median for name in prepared)) if prepared else 0
    for name, prepare in prepared.items():

        def work(prepare: Callable[[], Run] = prepare) -> Callable[[], None]:
            run = prepare()

            def repeat() -> None:
                with run.scope():
                    run.repeat(times)

            return repeat

        try:
            spans[name] = partial(begin, arrays.captured(work))
        except Exception as error:  # a call that cannot be captured has only its wall time
            reasons[name] = reason(error)
    return _in_turns(spans, dict.fromkeys(spans, times), rounds, watch), reasons


def reason(error: Exception, *, whole: bool = False) -> str:
    """Returns the first line of an error's text, or the whole text."""
    text = str(error).strip() or type(error).__name__
    return text if whole else text.splitlines()[0][:120]


def repeats_for(seconds: float) -> int:
    """Returns the number of calls that take READING_SECONDS."""
    return min(64, _times_in(READING_SECONDS, seconds))


def _times_in(span: float, seconds: float) -> int:
    return max(1, math.ceil(span / max(seconds, 1e-6)))


def _in_turns(
    spans: dict[str, Callable[[], Callable[[], float]]],
    calls: dict[str, int],
    rounds: int,
    watch: Callable[[], None] = lambda: None,
) -> dict[str, Seconds]:
    """Measures seconds of one call of each span, in so many rounds at most."""
    if not spans:
        return {}
    started = time.perf_counter()
    while True:
        readers = {name: span() for name, span in spans.items()}
        seconds = {name: read() for name, read in readers.items()}
        if time.perf_counter() - started > WARM_UP_SECONDS:
            break
    repeats = {name: _times_in(TURN_SECONDS, x) for name, x in seconds.items()}
    longest = max(seconds[name] * repeats[name] for name in spans)
    rounds = max(3, min(rounds, int(CONTENDER_SECONDS / longest)))
    # Another order in every round, as the contender before changes the GPU's clocks (L1).
    shuffled = random.Random(0)
    orders = [shuffled.sample(list(spans), len(spans)) for _ in range(rounds)]
    turns = [{name: [spans[name]() for _ in range(repeats[name])] for name in order} for order in orders]
    watch()
    readings = {name: [read() for turn in turns for read in turn[name][repeats[name] // 2 :]] for name in spans}
    return {name: Seconds.from_readings([x / calls[name] for x in of_one]) for name, of_one in readings.items()}


def _span(arrays: NumpyArrays, run: Run, repeats: int) -> Callable[[], float]:
    """Enqueues the calls; returns a function that waits for them and returns the seconds."""
    with run.scope():
        return arrays.span(partial(run.repeat, repeats))


def host_seconds(arrays: NumpyArrays, run: Run, calls: int = 200, rounds: int = 15) -> float:
    """Measures median seconds to enqueue a call. The GPU must need less per call, else waits for its queue count."""
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
    """Measures seconds of first calls in fresh processes: "cold" with an empty cache folder, "disk" with a filled one.

    "peers": first calls of the peers, in a third process. "failed": the message of a process that failed. Caches of
    NVRTC and of FlashAttention-4 are turned off, because otherwise only the first run on a machine would be cold.
    """
    timings: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="cuflash-bench-") as folder:
        of_others = {"CUDA_CACHE_DISABLE": "1", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0"}
        environment = os.environ | {"CUFLASH_CACHE_DIR": folder} | of_others
        for name, of_whom in (("cold", ()), ("disk", ()), ("peers", ("--peers",))):
            command = [sys.executable, "-m", "cuflash.tools.bench.startup", *of_whom, *ops]
            try:
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, check=False, timeout=STARTUP_SECONDS
                )
                if done.returncode:
                    return timings | {"failed": (done.stderr.strip().splitlines() or ["no output"])[-1]}
                timings[name] = json.loads(done.stdout.splitlines()[-1])  # the last line, as peers print, too
            except (ValueError, IndexError, subprocess.TimeoutExpired) as error:
                return timings | {"failed": f"{name}: {reason(error)}"}
    return timings
