"""Timing for `.ci/versus.py`: of calls on the GPU by replays of CUDA graphs, and of the host's work in a call."""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from statistics import median, quantiles
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import versus_checks as checks
from versus_cases import Call, Cell

LEAST_RATIO = 0.99  # least ratio of new to old speed for every cell
Row = dict[str, Any]


# Speed.

SPAN, LONG_SPAN, MOST_CALLS = 0.3e-3, 8e-3, 256  # least seconds of a replay, of a loop; most calls in either
WARM_UP = 0.5  # seconds until the clocks of an idle GPU have risen
LEAST_ROUNDS, REPEATS = 9, 3  # A cell that seems slower is measured up to three times, with more rounds each time.
MOST_APART = 0.05  # largest difference of out between calls of the same problem


class Loop(NamedTuple):
    """A replacement for a CUDA graph: the host makes the calls, and its time counts if it is slower than the GPU."""

    call: Call
    times: int

    def launch(self, stream: Any) -> None:
        """Makes the calls on the current stream."""
        for _ in range(self.times):
            self.call()


class Speed:
    """A timer of cells: by CUDA graphs of calls on CuPy arrays or, with peers, by loops of calls on PyTorch tensors."""

    def __init__(self, versions: list[ModuleType], rounds: int, seconds: float, peers: bool) -> None:
        import cupy

        self.cupy, self.rounds, self.seconds = cupy, rounds, seconds
        self.versions = dict(zip(("before", "after"), versions, strict=True))
        self.torch = importlib.import_module("torch") if peers else None
        # PyTorch's default stream is the null stream, too.
        self.stream = cupy.cuda.Stream.null if peers else cupy.cuda.Stream(non_blocking=True)
        self.noise = cache(self._noise)
        self.notes: list[str] = []  # for the current cell: errors of other calls, and wrong results

    def _noise(self, dtype: str) -> Any:
        values = np.random.default_rng(0).standard_normal((1 << 24) + 4096, dtype=np.float32)
        return self.cupy.asarray(values.astype(checks.numpy_dtype(dtype)))

    def array(self, shape: tuple[int, ...], dtype: str, seed: int) -> Any:
        """Returns an array of normal numbers, which repeat if it is large, built by copies that need no kernel."""
        noise = self.noise(dtype)
        memory, done, skip = self.cupy.empty(shape, noise.dtype), 0, seed << 20
        while done < memory.nbytes:
            size = min(memory.nbytes - done, noise.nbytes - skip)
            (memory.data + done).copy_from_device_async(noise.data + skip, size, self.stream)
            done, skip = done + size, 0
        if self.torch:
            return self.torch.from_dlpack(memory.view(f"i{noise.itemsize}")).view(getattr(self.torch, dtype))
        return memory

    def arrays(self, trial: checks.Trial) -> list[Any]:
        """Returns q, k, v and dout."""
        return [self.array(trial.shapes[x], trial.dtype, n) for n, x in enumerate(("q", "k", "v", "dout"))]

    def put(self, array: Any) -> Any:
        """Copies a NumPy array to the GPU."""
        return self.torch.from_numpy(array).cuda() if self.torch else self.cupy.asarray(array)

    def host(self, array: Any) -> Any:
        """Copies an array to the host; PyTorch tensors become float32."""
        return array.float().cpu().numpy() if self.torch else self.cupy.asnumpy(array)

    def working(self, makers: Mapping[str, Callable[[], tuple[Call, Any]]]) -> dict[str, Call]:
        """Returns the working calls. Notes errors, and each out unlike the first one, except the plain call's."""
        calls: dict[str, Call] = {}
        expected = None
        for name, make in makers.items():
            try:
                calls[name], out = make()
                calls[name]()
                self.stream.synchronize()
            except Exception as error:  # The other calls still run.
                calls.pop(name, None)
                self.notes.append(f"{name}: {error!r}"[:160])
                continue
            if out is not None and name != "plain":
                out = self.host(out[:, ::16]).astype(np.float32)
                expected = out if expected is None else expected
                if not (apart := float(abs(out - expected).max())) < MOST_APART:
                    self.notes.append(f"{name} DIFFERS by {apart:.3g}")
        return calls

    def captured(self, call: Call, times: int) -> Any:
        """Captures `times` calls. Two calls before fill the memory pool, from which the captured calls allocate."""
        for _ in range(2):
            call()
        self.stream.synchronize()
        self.stream.begin_capture()
        try:
            for _ in range(times):
                call()
        finally:
            graph = self.stream.end_capture()
        return graph

    def spans(self, graphs: Iterable[Any], meanwhile: Call = lambda: None) -> list[float]:
        """Times replays in seconds. All are enqueued before the first wait, because a full queue hides launches."""
        from cupy.cuda import Event, get_elapsed_time

        marks = []
        for graph in graphs:
            if isinstance(graph, Loop):  # Work enqueued before would hide its time on the host.
                self.stream.synchronize()
            marks.append((Event(), Event()))
            marks[-1][0].record(self.stream)
            graph.launch(self.stream)
            marks[-1][1].record(self.stream)
        meanwhile()
        self.stream.synchronize()
        return [float(get_elapsed_time(*pair)) * 1e-3 for pair in marks]

    def measure(self, cell: Cell, meanwhile: Call = lambda: None) -> Row:
        """Returns median seconds of each call, and quartiles of before / after in pairs of replays."""
        started, times, replay = time.perf_counter(), 0, 0.0
        captures = cell.captures and not self.torch
        make, span = (self.captured, SPAN) if captures else (Loop, LONG_SPAN)
        self.notes.clear()
        calls = cell.make(self, cell)
        if not {"before", "after"} <= {*calls}:
            raise RuntimeError("; ".join(self.notes))
        while replay < span and times < MOST_CALLS:
            times = min(MOST_CALLS, math.ceil(1.2 * times * span / replay)) if times else 1
            graphs = {"before": make(calls["before"], times)}
            replay = min(self.spans([graphs["before"]] * 4))
        graphs |= {name: make(call, times) for name, call in calls.items() if name != "before"}
        left = max(0.2, self.seconds - (time.perf_counter() - started))
        rounds = max(LEAST_ROUNDS, min(self.rounds, int(left / (len(graphs) * replay))))
        for repeat in range(1, REPEATS + 1):
            # Each call follows itself as often as another call, because clocks are higher after less work.
            order = [name for turn in range(rounds * repeat) for name in (graphs if turn % 2 else reversed(graphs))]
            replays = self.spans([graphs["before"], *(graphs[name] for name in order)], meanwhile)[1:]
            turns: dict[str, list[float]] = {name: [] for name in graphs}
            for name, seconds in zip(order, replays, strict=True):
                turns[name].append(seconds / times)
            low, ratio, high = quantiles((b / a for b, a in zip(turns["before"], turns["after"], strict=True)), n=4)
            if ratio >= LEAST_RATIO or not captures:
                break
        others = {name: median(seconds) for name, seconds in turns.items()}
        row = {when: others.pop(when) for when in ("before", "after")} | {"ratio": ratio, "quartiles": (low, high)}
        row |= {"rounds": len(turns["after"]), "calls_in_a_graph": times, "captured": captures}
        return row | {"others": others, "notes": [*self.notes]}


def run_speed(versions: list[ModuleType], chosen: list[Cell], rounds: int, seconds: float, peers: bool) -> list[Row]:
    """Times all cells, group by group, and reads the clock at the beginning of each group."""
    from cuflash.testing.arrays import CupyArrays

    speed, rows = Speed(versions, rounds, seconds / max(1, len(chosen)), peers), []
    clock = cache(lambda group: CupyArrays().state().get("sm_clock_mhz"))
    with speed.stream:
        started = time.perf_counter()
        while chosen and chosen[0].captures and time.perf_counter() - started < WARM_UP:
            with contextlib.suppress(Exception):
                speed.measure(chosen[0])
        for cell in chosen:
            row: Row = {"group": cell.group, "name": cell.name, "problem": cell.trial._asdict(), "ratio": None}
            try:
                row |= speed.measure(cell, partial(clock, cell.group))
            except Exception as error:  # The other cells are still measured.
                row["note"] = repr(error)
            rows.append(row | {"clock": clock(cell.group)})
            speed.cupy.get_default_memory_pool().free_all_blocks()
            if speed.torch:
                speed.torch.cuda.empty_cache()
    return rows


# Host time.

BLOCKS, CALLS = 7, 300  # timed blocks of each version, and calls of a block
FIRST_LENGTH, LENGTHS = 2048, 100  # keys of the first call, and lengths in a block
Block = Callable[[int], list[Call]]  # returns the calls of the block with this index
Wait = Callable[[Any], Any]  # waits for a result


def direct_calls(version: ModuleType, put: Callable[[Any], Any]) -> dict[str, Block]:
    """Returns calls of the package itself whose kernels take less time than the host."""
    x, q, k = (put(np.ones(shape, np.float16)) for shape in ((1, 128, 1, 64), (1, 1, 8, 128), (1, 4096, 8, 128)))
    out, lse = version.forward(x, x, x, causal=True, return_lse=True)

    def longer(block: int) -> list[Call]:
        first = FIRST_LENGTH + LENGTHS * block
        keys = [k[:, :length] for length in range(first, first + LENGTHS)]
        return [partial(version.forward, q, some, some, causal=True) for some in keys]

    calls: dict[str, Call] = {
        "forward": partial(version.forward, x, x, x, causal=True),
        "backward": partial(version.backward, out, x, x, x, out, lse, causal=True),
        "merge of two": partial(version.merge_states, (out, out), (lse, lse)),
    }
    return repeated(calls) | {"forward, a new length in each call": longer}


def repeated(calls: Mapping[str, Call]) -> dict[str, Block]:
    """Returns blocks in which one call repeats."""
    return {name: lambda block, call=call: [call] * CALLS for name, call in calls.items()}


@cache
def framework_calls(kind: str) -> tuple[dict[str, Block], Wait]:
    """Returns calls of this process's `cuflash.frameworks.torch` or `.jax`, and a function that waits for a result."""
    if kind == "jax":
        import jax

        from cuflash.frameworks.jax import attention

        where, x = jax.default_backend(), jax.numpy.ones((1, 128, 1, 64), "float16")
        plain = partial(attention, causal=True)
        gradients = jax.grad(lambda *arrays: plain(*arrays).sum(), argnums=(0, 1, 2))
        calls = {"attention": partial(jax.jit(plain), x, x, x), "gradients": partial(jax.jit(gradients), x, x, x)}
        return repeated({f"{where}, {name} in jit": call for name, call in calls.items()}), jax.block_until_ready
    import torch

    from cuflash.frameworks.torch import attention

    where = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.ones(1, 128, 1, 64, dtype=torch.float16, device=where)
    leaves = [x.clone().requires_grad_() for _ in "qkv"]
    calls: dict[str, Call] = {
        f"{where}, no gradients": partial(attention, x, x, x, causal=True),
        f"{where}, keeping what gradients need": partial(attention, *leaves, causal=True),
        f"{where}, with gradients": lambda: torch.autograd.grad(attention(*leaves, causal=True), leaves, x),
    }
    return repeated(calls), lambda result: torch.cuda.synchronize() if where == "cuda" else None


def framework_names(kind: str) -> list[str]:
    """Returns the names of a framework's calls."""
    return list(framework_calls(kind)[0])


def framework_seconds(kind: str, name: str, block: int) -> float:
    """Times a block of a framework's call with this name."""
    calls, wait = framework_calls(kind)
    return seconds_of(calls[name](block), wait)


def seconds_of(calls: list[Call], wait: Wait) -> float:
    """Returns the host's seconds for each of these calls."""
    wait(None)
    gc.disable()
    started = time.perf_counter()
    for call in calls:
        result = call()
    seconds = time.perf_counter() - started
    gc.enable()
    wait(result)
    return seconds / len(calls)


def in_turns(names: Iterable[str], timers: list[Callable[[str, int], float]]) -> dict[str, list[float]]:
    """Returns the medians of both versions, whose blocks alternate. The first block of each warms up."""
    medians = {}
    for name in names:
        taken: list[list[float]] = [[], []]
        for block in range(BLOCKS + 1):
            for which in (0, 1) if block % 2 else (1, 0):
                taken[which].append(timers[which](name, block))
        medians[name] = [median(seconds[1:]) for seconds in taken]
    return medians


def run_host(versions: list[ModuleType], trees: list[Path]) -> dict[str, Any]:
    """Returns the host's seconds by kind and call, before and after, or the error of a missing framework."""
    import cupy

    puts: dict[str, Callable[[Any], Any]] = {"CuPy arrays": cupy.asarray}
    with contextlib.suppress(ImportError):
        import torch

        if torch.cuda.is_available():
            puts["PyTorch arrays"] = lambda x: torch.from_numpy(x).cuda()

    def direct(blocks: dict[str, Block], name: str, block: int) -> float:
        return seconds_of(blocks[name](block), lambda result: cupy.cuda.runtime.deviceSynchronize())

    seconds: dict[str, Any] = {}
    for kind, put in puts.items():
        both = [direct_calls(version, put) for version in versions]
        seconds[kind] = in_turns(both[0], [partial(direct, blocks) for blocks in both])
    return seconds | {f"cuflash.frameworks.{kind}": run_framework(kind, trees) for kind in ("torch", "jax")}


def run_framework(kind: str, trees: list[Path]) -> Any:
    """Returns the host's seconds by call, before and after, or an error's text, from one process for each version."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    with checks.process(trees[0]) as before, checks.process(trees[1]) as after:

        def seconds(process: Any, name: str, block: int) -> float:
            return float(process.submit(framework_seconds, kind, name, block).result())

        try:
            names, _ = [process.submit(framework_names, kind).result() for process in (before, after)]
            return in_turns(names, [partial(seconds, process) for process in (before, after)])
        except Exception as error:  # The framework is not installed, or cannot use this GPU.
            return repr(error)
