"""`.ci/versus.py` times calls with this: on the GPU by replays of CUDA graphs, and the host's part of a call."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from itertools import groupby, product
from pathlib import Path
from statistics import median, quantiles
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import versus_checks as checks

LEAST_RATIO = 0.99  # Every cell keeps this share of its speed.
Call = Callable[[], Any]
Row = dict[str, Any]


# Speed.

SPAN, MOST_CALLS = 0.3e-3, 256  # A replay takes at least so many seconds, unless it holds so many calls.
WARM_UP = 0.5  # The clocks of an idle GPU need so many seconds to rise.
LEAST_ROUNDS, REPEATS = 9, 3  # A cell that seems slower is measured again, with more rounds, before it is believed.
SHORT = {"forward": "fwd", "backward": "bwd", "deterministic": "det"}
SHORT |= {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
SHOWN = {"causal": "causal", "window_size": "window", "softcap": "capped"}


class Cell(NamedTuple):
    """Describes one call that is timed."""

    group: str
    trial: checks.Trial

    @property
    def name(self) -> str:
        """Gives a short name that no other cell has."""
        trial = self.trial
        lengths, heads, dims = ("/".join(map(str, dict.fromkeys(n))) for n in (trial.seqlens, trial.heads, trial.dims))
        op = "deterministic" if trial.deterministic else trial.op
        words = [SHORT[op], SHORT[trial.dtype], f"{trial.batch}x{lengths}", f"h{heads}", f"d{dims}"]
        return " ".join((*words, *(SHOWN[name] for name, value in trial.arguments.items() if value)))


def cells() -> list[Cell]:
    """Lists what is timed. A cell has 16384 tokens and 2048 columns, as in the README, unless it says otherwise."""
    found: list[Cell] = []

    def add(group: str, ops: str, keys: int, *dims: int, queries: int = 0, batch: int = 0,
            heads: tuple[int, ...] = (), dtype: str = "bfloat16", **arguments: Any) -> None:  # fmt: skip
        heads, shape = heads or (2048 // dims[0],), (batch or 16384 // keys, (queries or keys, keys))
        for op in ops.split():
            name, ordered = ("forward" if op == "forward" else "backward"), op == "deterministic"
            trial = checks.Trial(name, dtype, *shape, (heads[0], heads[-1]), (dims[0], dims[-1]), arguments, ordered)
            found.append(Cell(group, trial))

    for op, d, causal, n in product(list(SHORT)[:3], (64, 128, 256), (False, True), (512, 1024, 4096, 8192, 16384)):
        add(f"README {op}", op, n, d, causal=causal)
    for batch, heads, (queries, n) in product((1, 16), ((32, 8), (32, 32)), ((1, 4096), (1, 32768), (8, 8192))):
        add("decode", "forward", n, 128, queries=queries, batch=batch, heads=heads, causal=True)
    add("small", "forward backward deterministic", 256, 128, batch=1, heads=(4,), causal=True)
    add("small", "forward backward deterministic", 128, 64, batch=4, heads=(8,))
    for d in (64, 128, 256):
        add("capped", "forward backward", 4096, d, causal=True, softcap=30.0)
    add("float32", "forward backward", 8192, 64, batch=1, heads=(16,), dtype="float32")
    add("float16", "forward backward", 4096, 128, dtype="float16", causal=True)
    add("window", "forward backward", 8192, 128, causal=True, window_size=(1023, 0))
    add("grouped", "forward backward", 4096, 128, heads=(32, 8), causal=True)
    for dims in ((96,), (192,), (192, 128), (40,)):
        add("head dims", "forward backward", 4096, *dims, causal=True)
    return found


class Speed:
    """Times cells on a stream of its own; arrays and results come from CuPy's memory pool."""

    def __init__(self, versions: list[ModuleType], rounds: int, seconds: float) -> None:
        import cupy

        self.cupy, self.versions, self.rounds, self.seconds = cupy, versions, rounds, seconds
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.noise = cache(self._noise)

    def _noise(self, dtype: str) -> Any:
        values = np.random.default_rng(0).standard_normal((1 << 24) + 4096, dtype=np.float32)
        return self.cupy.asarray(values.astype(checks.numpy_dtype(dtype)))

    def array(self, shape: tuple[int, ...], dtype: str, seed: int) -> Any:
        """Makes an array of normal numbers, which repeat themselves if it is large, by copies that need no kernel."""
        noise = self.noise(dtype)
        made, done, skip = self.cupy.empty(shape, noise.dtype), 0, seed << 20
        while done < made.nbytes:
            size = min(made.nbytes - done, noise.nbytes - skip)
            (made.data + done).copy_from_device_async(noise.data + skip, size, self.stream)
            done, skip = done + size, 0
        return made

    def calls(self, cell: Cell) -> list[Call]:
        """Makes the call of each version. Both read the same arrays, and forward writes to the same `out`."""
        shapes, keywords = cell.trial.shapes, cell.trial.arguments
        q, k, v, dout = (self.array(shapes[x], cell.trial.dtype, n) for n, x in enumerate(("q", "k", "v", "dout")))
        out, lse = self.versions[0].forward(q, k, v, return_lse=True, **keywords)
        if cell.trial.op == "forward":
            return [partial(version.forward, q, k, v, out=out, **keywords) for version in self.versions]
        return [partial(version.backward, dout, q, k, v, out, lse, **cell.trial.keywords) for version in self.versions]

    def captured(self, call: Call, times: int) -> Any:
        """Captures so many calls. Two calls before leave in the pool what these allocate: both versions get that."""
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
        """Times replays in seconds. All are enqueued before one is waited for, because a full queue hides launches."""
        from cupy.cuda import Event, get_elapsed_time

        marks = []
        for graph in graphs:
            marks.append((Event(), Event()))
            marks[-1][0].record(self.stream)
            graph.launch(self.stream)
            marks[-1][1].record(self.stream)
        meanwhile()
        self.stream.synchronize()
        return [float(get_elapsed_time(*pair)) * 1e-3 for pair in marks]

    def measure(self, cell: Cell, meanwhile: Call) -> Row:
        """Gives median seconds of a call of both versions, and quartiles of before over after in pairs of replays."""
        started, times, replay = time.perf_counter(), 0, 0.0
        calls = self.calls(cell)
        while replay < SPAN and times < MOST_CALLS:
            times = min(MOST_CALLS, math.ceil(1.2 * times * SPAN / replay)) if times else 1
            graphs = [self.captured(calls[0], times)]
            replay = min(self.spans(graphs * 4))
        graphs.append(self.captured(calls[1], times))
        left = max(0.2, self.seconds - (time.perf_counter() - started))
        rounds = max(LEAST_ROUNDS, min(self.rounds, int(left / (2 * replay))))
        for repeat in range(1, REPEATS + 1):
            # Each version follows itself as often as the other one, because after less work the clocks are higher.
            order = [which for turn in range(rounds * repeat) for which in ((0, 1) if turn % 2 else (1, 0))]
            found = self.spans([graphs[0], *(graphs[which] for which in order)], meanwhile)[1:]
            pairs = list(enumerate(zip(found[::2], found[1::2], strict=True)))
            before, after = ([pair[(turn + which) % 2] / times for turn, pair in pairs] for which in (1, 0))
            low, ratio, high = quantiles((b / a for b, a in zip(before, after, strict=True)), n=4)
            if ratio >= LEAST_RATIO:
                break
        row = {"before": median(before), "after": median(after), "ratio": ratio, "quartiles": (low, high)}
        return row | {"rounds": len(before), "calls_in_a_graph": times}


def sm_clock() -> int | None:
    """Reads the clock of the multiprocessors in MHz, where nvidia-smi tells it."""
    command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "-i", "0"]
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        return int(subprocess.run(command, stdout=-1, timeout=5, check=True).stdout)
    return None


def run_speed(versions: list[ModuleType], chosen: list[Cell], rounds: int, seconds: float) -> list[Row]:
    """Times all cells, group by group, and reads the clock at the beginning of each group."""
    speed, rows = Speed(versions, rounds, seconds / max(1, len(chosen))), []
    with speed.stream:
        started = time.perf_counter()
        while chosen and time.perf_counter() - started < WARM_UP:
            with contextlib.suppress(Exception):
                speed.measure(chosen[0], lambda: None)
        for group, of_group in groupby(chosen, lambda cell: cell.group):
            clocks: list[int | None] = []
            for cell in of_group:
                row: Row = {"group": group, "name": cell.name, "problem": cell.trial._asdict(), "ratio": None}
                try:
                    row |= speed.measure(cell, lambda c=clocks: c or c.append(sm_clock()))
                except Exception as error:  # The other cells still have something to tell.
                    row["note"] = repr(error)
                rows.append(row | {"clock": clocks[0] if clocks else None})
                speed.cupy.get_default_memory_pool().free_all_blocks()
    return rows


# Host time.

BLOCKS, CALLS = 7, 300  # So many blocks of each version are timed, and a block has so many calls.
FIRST_LENGTH, LENGTHS = 2048, 100  # The first call has so many keys, and a block so many lengths.
Block = Callable[[int], list[Call]]  # It makes the calls of the block of this number.
Wait = Callable[[Any], Any]  # It waits for a result.


def direct_calls(version: ModuleType, put: Callable[[Any], Any]) -> dict[str, Block]:
    """Makes calls of the package itself, whose kernels take less time than the host."""
    x, q, k = (put(np.ones(shape, np.float16)) for shape in ((1, 128, 1, 64), (1, 1, 8, 128), (1, 4096, 8, 128)))
    out, lse = version.forward(x, x, x, causal=True, return_lse=True)

    def longer(block: int) -> list[Call]:
        first = FIRST_LENGTH + LENGTHS * block
        keys = [k[:, :length] for length in range(first, first + LENGTHS)]
        return [partial(version.forward, q, some, some, causal=True) for some in keys]

    return repeated(
        {
            "forward": partial(version.forward, x, x, x, causal=True),
            "backward": partial(version.backward, out, x, x, x, out, lse, causal=True),
            "merge of two": partial(version.merge_states, (out, out), (lse, lse)),
        }
    ) | {"forward, a new length in each call": longer}


def repeated(calls: Mapping[str, Call]) -> dict[str, Block]:
    """Makes blocks in which a call is repeated."""
    return {name: lambda block, call=call: [call] * CALLS for name, call in calls.items()}


@cache
def framework_calls(kind: str) -> tuple[dict[str, Block], Wait]:
    """Makes calls of this process's `cuflash.frameworks.torch` or `.jax`, and what waits for a result."""
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
    """Lists the names of a framework's calls."""
    return list(framework_calls(kind)[0])


def framework_seconds(kind: str, name: str, block: int) -> float:
    """Times a block of one of a framework's calls."""
    calls, wait = framework_calls(kind)
    return seconds_of(calls[name](block), wait)


def seconds_of(calls: list[Call], wait: Wait) -> float:
    """Times the host, in seconds for one of these calls."""
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
    """Gives the medians of both versions, whose blocks alternate. The first block of each warms up."""
    found = {}
    for name in names:
        taken: list[list[float]] = [[], []]
        for block in range(BLOCKS + 1):
            for which in (0, 1) if block % 2 else (1, 0):
                taken[which].append(timers[which](name, block))
        found[name] = [median(seconds[1:]) for seconds in taken]
    return found


def run_host(versions: list[ModuleType], trees: list[Path]) -> dict[str, Any]:
    """Gives seconds of the host by kind and call, before and after, or the error of a framework that is not there."""
    import cupy

    puts: dict[str, Callable[[Any], Any]] = {"CuPy arrays": cupy.asarray}
    with contextlib.suppress(ImportError):
        import torch

        if torch.cuda.is_available():
            puts["PyTorch arrays"] = lambda x: torch.from_numpy(x).cuda()

    def direct(blocks: dict[str, Block], name: str, block: int) -> float:
        return seconds_of(blocks[name](block), lambda result: cupy.cuda.runtime.deviceSynchronize())

    found: dict[str, Any] = {}
    for kind, put in puts.items():
        both = [direct_calls(version, put) for version in versions]
        found[kind] = in_turns(both[0], [partial(direct, blocks) for blocks in both])
    return found | {f"cuflash.frameworks.{kind}": run_framework(kind, trees) for kind in ("torch", "jax")}


def run_framework(kind: str, trees: list[Path]) -> Any:
    """Gives seconds of the host by call, before and after, or the text of an error, in a process for each version."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    with checks.process(trees[0]) as before, checks.process(trees[1]) as after:

        def seconds(process: Any, name: str, block: int) -> float:
            return float(process.submit(framework_seconds, kind, name, block).result())

        try:
            names, _ = [process.submit(framework_names, kind).result() for process in (before, after)]
            return in_turns(names, [partial(seconds, process) for process in (before, after)])
        except Exception as error:  # The framework is not there, or not on this GPU.
            return repr(error)
