"""Calls of any kind that are drawn at random, on this machine's GPUs, each held against float64.

All arrays lie between bytes that nothing may write, memory holds NaN until it is written, and calls are repeated bit
for bit. Without a GPU it checks the NumPy path. It exits with 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import math
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any, Protocol

import numpy as np
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ..arrays.library import cupy_module
from ..errors import UnsupportedError
from ..planning import device
from ..testing.arrays import why_no_gpu
from ..testing.dense import Dense, Merge
from ..testing.draw import Draw
from ..testing.exact import Chosen, Counted
from ..testing.memory import GuardedMemory
from ..testing.varlen import Append, ModDense, ModVarlen, Several
from . import arguments, info
from .console import Console

FAMILY = 8  # trials in a row that share what kernels depend on, because a new kernel compiles for seconds
MOST_FAILURES = 5
# Each kind as often as it stands here.
KINDS = Dense, Dense, Dense, Several, Several, Several, ModDense, ModVarlen, Chosen, Counted, Append, Merge


class Trial(Protocol):
    """A call and its expected results. Its repr shows all of it."""

    def run(self, xp: Any) -> None:
        """Makes the call in this array library, and raises MismatchError if it is wrong."""


class Cpu:
    """The machine that trials run on: here, NumPy on the CPU."""

    def run(self, trial: Trial, draw: Draw) -> None:
        trial.run(np)


class Gpus(Cpu):
    """CuPy on any of the GPUs, on the default stream or another one, in guarded memory."""

    def __init__(self) -> None:
        self._cupy = cupy_module()
        self._ordinals = range(device.count())
        self._memory = {ordinal: GuardedMemory(self._cupy) for ordinal in self._ordinals}
        self._streams: dict[int, tuple[Any, ...]] = {}

    def run(self, trial: Trial, draw: Draw) -> None:
        cuda, ordinal = self._cupy.cuda, draw.one_of(*self._ordinals)
        memory = self._memory[ordinal]
        with cuda.Device(ordinal):
            if ordinal not in self._streams:
                self._streams[ordinal] = cuda.Stream.null, *(cuda.Stream(non_blocking=True) for _ in range(2))
            stream = draw.one_of(*self._streams[ordinal])
            try:
                with stream, memory.active():
                    trial.run(self._cupy)
                    stream.synchronize()
                    memory.check()
            finally:
                memory.forget()


def trial_of(seed: int, number: int) -> tuple[Trial, Draw]:
    """A trial of a run, and what is left to draw for it."""
    family, draw = Draw(seed, number // FAMILY), Draw(seed, number // FAMILY, number)
    kind = family.one_of(*KINDS)
    return kind.drawn(family, draw), draw


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    number = partial(arguments.count, least=0)
    parser.add_argument("--minutes", type=_minutes, default=1.0, metavar="N", help="how long; default 1")
    parser.add_argument("--seed", type=number, metavar="S", help="of the problems; by default a new one")
    parser.add_argument("--problems", type=number, metavar="N", help="end after so many, too")
    parser.add_argument("--only", type=number, metavar="N", help="only the problem of this number, with a traceback")


def main(options: argparse.Namespace) -> int:
    """Runs the self-test and prints what was wrong; returns 1 if anything was, or if nothing ran."""
    seed = int(np.random.SeedSequence().generate_state(1)[0] % 10**6) if options.seed is None else options.seed
    print(f"Self-test of seed {seed}. {info.line(info.machine())}", flush=True)
    if no_gpu := why_no_gpu():
        print(f"The NumPy path is checked, on the CPU: {no_gpu}")
    machine = Cpu() if no_gpu else Gpus()
    if options.only is not None:
        trial, draw = trial_of(seed, options.only)
        print(trial, flush=True)
        machine.run(trial, draw)
        print("It is right.")
        return 0
    return _run(machine, seed, options)


def _run(machine: Cpu, seed: int, options: argparse.Namespace) -> int:
    console = Console(stderr=True)
    passed: Counter[str] = Counter()
    refused, failures, started = 0, 0, time.perf_counter()
    columns = TextColumn("selftest"), BarColumn(), TextColumn("{task.fields[done]}"), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=60 * options.minutes, done="")
        for number in _numbers(options):
            elapsed = time.perf_counter() - started
            if elapsed > 60 * options.minutes:
                break
            progress.update(bar, completed=elapsed, done=f"{passed.total()} problems, seed {seed}")
            trial, draw = trial_of(seed, number)
            try:
                machine.run(trial, draw)
            except UnsupportedError:
                refused += 1
            except Exception as error:  # why: what a wrong kernel raises is no kind of error in particular
                failures += 1
                console.print(_failure(trial, number, seed, error), markup=False, highlight=False, soft_wrap=True)
                if failures == MOST_FAILURES:
                    break
            else:
                passed[type(trial).__name__] += 1
    kinds = ", ".join(f"{name} {times}" for name, times in sorted(passed.items()))
    print(f"{passed.total()} problems are right ({kinds}), {failures} wrong, {refused} refused as unsupported, in "
          f"{time.perf_counter() - started:.0f} s")  # fmt: skip
    return int(failures > 0 or not passed)


def _numbers(options: argparse.Namespace) -> Iterator[int]:
    return count() if options.problems is None else iter(range(options.problems))


def _failure(trial: Trial, number: int, seed: int, error: Exception) -> str:
    text = "".join(traceback.format_exception_only(error)).strip()
    return f"Wrong: {trial}\n  {text}\n  Repeat it: python -m cuflash selftest --seed {seed} --only {number}"


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of minutes above 0")
    return minutes
