"""Compares random calls of all kinds on this machine's GPUs with float64.

All arrays lie between guard bytes, new memory holds NaN, and repeated calls must be equal bit for bit. Without a GPU it
checks the NumPy path. It exits with 1 if a result is wrong.
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

FAMILY = 8  # consecutive trials that share kernels, because a new kernel compiles for seconds
MOST_FAILURES = 5
# Kinds are drawn with equal chances, so a repeated one is more frequent.
KINDS = Dense, Dense, Dense, Several, Several, Several, ModDense, ModVarlen, Chosen, Counted, Append, Merge


class Trial(Protocol):
    """A call and its expected results, all shown by its repr."""

    def run(self, xp: Any) -> None:
        """Makes the call in this array library; raises MismatchError if a result is wrong."""


class Cpu:
    """A machine for trials: NumPy on the CPU."""

    def run(self, trial: Trial, draw: Draw) -> None:
        trial.run(np)


class Gpus(Cpu):
    """A machine for trials: CuPy on any of the GPUs, on the default stream or another one, in guarded memory."""

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
    """Draws a trial of a run; returns it and the generator for its further draws."""
    family, draw = Draw(seed, number // FAMILY), Draw(seed, number // FAMILY, number)
    kind = family.one_of(*KINDS)
    return kind.drawn(family, draw), draw


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    number = partial(arguments.count, least=0)
    parser.add_argument("--minutes", type=_minutes, default=1.0, metavar="N", help="run time; default 1")
    parser.add_argument("--seed", type=number, metavar="S", help="seed of the problems; default a random one")
    parser.add_argument("--problems", type=number, metavar="N", help="end after N problems, or earlier by --minutes")
    parser.add_argument("--only", type=number, metavar="N", help="run only problem N, with a traceback")


def main(options: argparse.Namespace) -> int:
    """Runs the self-test and prints wrong results; returns 1 if there are any, or if nothing ran."""
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
            except Exception as error:  # a wrong kernel may raise errors of any type
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
