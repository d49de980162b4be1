"""Sequences of growing length in a fixed memory: standard attention runs out of memory, flash attention does not.

It prints the memory of each call and, with `--picture FILE`, draws it (matplotlib). Both may use 4 GiB on a GPU, and
512 MiB on the CPU. It exits with 1 if flash attention runs out of memory, or if the two differ where both run.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from packages import explain_missing

import cuflash

GPU, CPU = "GPU", "CPU"
BUDGET = {GPU: 4 << 30, CPU: 512 << 20}  # bytes
LENGTHS = {GPU: [2**n for n in range(10, 21)], CPU: [2**n for n in range(9, 14)]}
ALGORITHMS = {"standard": "standard attention", "flash2": "flash attention"}
Peaks = dict[str, dict[int, float]]  # by algorithm and length: MiB, NaN if memory ran out


def main() -> int:
    """Calls both at all lengths, prints and draws the memory, and compares the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", metavar="FILE", help="draw the memory into FILE; needs matplotlib")
    picture = parser.parse_args().picture
    if picture is not None:
        with explain_missing():  # before the computation, so that a missing package is reported at once
            import matplotlib
        matplotlib.use("Agg")
    where = find()
    print(f"Running on the {where}, in at most {BUDGET[where] >> 20} MiB: batch 1, 4 heads of 64, causal")
    print("  seqlen" + "".join(f"{name:>24}" for name in ALGORITHMS.values()))
    peaks: Peaks = {name: {} for name in ALGORITHMS}
    differ = 0.0
    for length in LENGTHS[where]:
        arrays = inputs(where, length)
        results = []
        for name in ALGORITHMS:
            if np.isnan(list(peaks[name].values())[-1:]).any():
                continue  # it ran out of memory at a smaller length
            call = partial(cuflash.forward, *arrays, causal=True, algorithm=name)
            result, peaks[name][length] = measured(where, call)
            results += [] if result is None else [result]
        if len(results) == len(ALGORITHMS):
            differ = max(differ, float(abs(results[0].astype("float32") - results[1].astype("float32")).max()))
        mib = [peaks[name].get(length, np.nan) for name in ALGORITHMS]
        columns = ["not enough" if np.isnan(peak) else f"{peak:.0f} MiB" for peak in mib]
        print(f"{length:>8}" + "".join(f"{x:>24}" for x in columns), flush=True)
    goes_on = not np.isnan(peaks["flash2"][LENGTHS[where][-1]])
    print(f"flash attention {'goes on to the last' if goes_on else 'ran out of memory'}; they differ by {differ:.1e}")
    if picture is not None:
        draw(where, peaks, picture)
    return int(not goes_on or not differ < 4e-3)


def find() -> str:
    """Returns GPU or CPU, where this runs."""
    try:
        return CPU if cuflash.plan(*[(1, 8, 1, 64)] * 3, dtype="float16").device == "cpu" else GPU
    except cuflash.UnsupportedError as error:
        print(error)
        return CPU


def inputs(where: str, length: int) -> list[Any]:
    """Returns q, k and v."""
    rng = np.random.default_rng(0)
    host = [rng.standard_normal((1, length, 4, 64), dtype=np.float32) for _ in range(3)]
    if where == CPU:
        return host
    import cupy

    return [cupy.asarray(x.astype("float16")) for x in host]


def measured(where: str, call: Callable[[], Any]) -> tuple[Any, float]:
    """Returns the result of a call and its peak memory in MiB; None and NaN if memory ran out."""
    with on_the_gpu() if where == GPU else on_the_cpu() as peak:
        try:
            result = call()
        except MemoryError:
            return None, float("nan")
        return result, peak() / 2**20


@contextlib.contextmanager
def on_the_gpu() -> Iterator[Callable[[], float]]:
    """Uses a separate memory pool with a limit; yields a function that returns the pool's bytes."""
    import cupy

    pool = cupy.cuda.MemoryPool()
    pool.set_limit(size=BUDGET[GPU])
    with cupy.cuda.using_allocator(pool.malloc):
        yield pool.total_bytes


@contextlib.contextmanager
def on_the_cpu() -> Iterator[Callable[[], float]]:
    """Limits the memory of this process, if the system can; yields a function that returns the peak in bytes."""
    limit = None
    with contextlib.suppress(ImportError, OSError):
        import resource
        from pathlib import Path

        used = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
        limit = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + BUDGET[CPU], limit[1]))
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, limit)


def draw(where: str, peaks: Peaks, path: str) -> None:
    """Draws memory by length, and the limit."""
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 12, "axes.titlesize": 12})  # legible on a phone
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for (name, label), colour in zip(ALGORITHMS.items(), ("#D55E00", "#0072B2"), strict=True):
        there = {length: peak for length, peak in peaks[name].items() if not np.isnan(peak)}
        axes.plot(there.keys(), there.values(), "o-", color=colour, label=label)
    end = BUDGET[where] / 2**20
    axes.axhline(end, color="black", lw=0.8, ls="--", label=f"{end:.0f} MiB")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:g}k")
    axes.set(xlabel="seqlen", ylabel="MiB beside q, k and v", title=f"Memory of one call on the {where}, 4 heads of 64")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=160)
    print(f"drawn to {path}")


if __name__ == "__main__":
    sys.exit(main())
