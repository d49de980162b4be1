"""Measures how long calls take: contenders take turns on the same inputs, and the median of all turns counts."""

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

WARM_UP_SECONDS = 0.1  # of all contenders together, after which it is known how long each takes
READING_SECONDS = 2.5e-4  # what is read at once is at least this long, so that a launch does not count
# A contender's turn is this long, and only its second half counts. why: a GPU's clocks are then those that it has
# by itself. One that needs the most power has higher ones right after others (L1), and would seem faster than it is.
TURN_SECONDS = 0.1
CONTENDER_SECONDS = 3.0  # the most seconds that a contender's turns take in one cell
STARTUP_SECONDS = 300  # after which a process that makes first calls is ended


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
    def from_readings(cls, readings: list[float]) -> Seconds:
        """Returns the median and the spread of these readings."""
        low, middle, high = quantiles(readings, n=4, method="inclusive")
        return cls(middle, (high - low) / middle)


def seconds_per_call(
    arrays: NumpyArrays, prepared: Mapping[str, Callable[[], Run]], rounds: int
) -> tuple[dict[str, Seconds], dict[str, str]]:
    """Seconds per call of each contender, and why others have none; each has one turn in every round."""
    spans: dict[str, Callable[[], Callable[[], float]]] = {}
    repeats: dict[str, int] = {}
    reasons: dict[str, str] = {}
    for name, prepare in prepared.items():
        try:
            run = prepare()
            _span(arrays, run, 1)()
            seconds = _span(arrays, run, 1)()  # why again: what a call costs once everything is loaded
        except Exception as error:  # why: what cannot be repeated here must not end the others
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
    """Seconds per call by replays of CUDA graphs, without time of the host; and why others cannot be captured.

    about: seconds of a call. All graphs have so many calls that those of the fastest take READING_SECONDS, as what is
    between two launches counts for all alike. watch: called right after all is enqueued.
    """

    def begin(graph: Callable[[], None]) -> Callable[[], float]:
        # why: as triton's do_bench does it. To write takes less power than a call, and the clocks follow the power.
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
        except Exception as error:  # why: what cannot be captured has only the other time
            reasons[name] = reason(error)
    return _in_turns(spans, dict.fromkeys(spans, times), rounds, watch), reasons


def reason(error: Exception, *, whole: bool = False) -> str:
    """The text of an error, or its first line."""
    text = str(error).strip() or type(error).__name__
    return text if whole else text.splitlines()[0][:120]


def repeats_for(seconds: float) -> int:
    """The number of calls that take READING_SECONDS."""
    return min(64, _times_in(READING_SECONDS, seconds))


def _times_in(span: float, seconds: float) -> int:
    return max(1, math.ceil(span / max(seconds, 1e-6)))


def _in_turns(
    spans: dict[str, Callable[[], Callable[[], float]]],
    calls: dict[str, int],
    rounds: int,
    watch: Callable[[], None] = lambda: None,
) -> dict[str, Seconds]:
    """Seconds of one of the calls of each span, in so many rounds at most."""
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
    # why another order in every round: L1
    shuffled = random.Random(0)
    orders = [shuffled.sample(list(spans), len(spans)) for _ in range(rounds)]
    turns = [{name: [spans[name]() for _ in range(repeats[name])] for name in order} for order in orders]
    watch()
    readings = {name: [read() for turn in turns for read in turn[name][repeats[name] // 2 :]] for name in spans}
    return {name: Seconds.from_readings([x / calls[name] for x in of_one]) for name, of_one in readings.items()}


def _span(arrays: NumpyArrays, run: Run, repeats: int) -> Callable[[], float]:
    """Enqueues the calls; the returned function waits for them and gives the seconds."""
    with run.scope():
        return arrays.span(partial(run.repeat, repeats))


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

    "peers": those of the peers, in one more. "failed": what a process said that could not. Caches of NVRTC and of
    FlashAttention-4 are turned off, because otherwise only the first run on a machine would be cold.
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
                timings[name] = json.loads(done.stdout.splitlines()[-1])  # why the last: peers print, too
            except (ValueError, IndexError, subprocess.TimeoutExpired) as error:
                return timings | {"failed": f"{name}: {reason(error)}"}
    return timings
