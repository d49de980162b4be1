"""`python -m cuflash.tools.bench.startup [--peers] OP...` prints seconds of first calls in this process as JSON.

`measure` runs it, for calls of cuflash or of the peers on this machine.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from ...ops.backward import backward
from ...ops.forward import forward
from ...runtime import compiler
from ...testing.arrays import NumpyArrays, find
from . import peers
from .presets import square

HEAD_DIMS = (64, 128, 256)
PEERS_HEAD_DIM = 128  # only one, as some peers compile for ten seconds


def first_calls(ops: Iterable[str]) -> dict[str, Any]:
    """Measures seconds to load NVRTC, then seconds of the first call of each op at each head dim."""
    import cupy

    wait = cupy.cuda.runtime.deviceSynchronize
    inputs = {f"d{head_dim}": cupy.zeros((1, 128, 2, head_dim), "float16") for head_dim in HEAD_DIMS}
    timings: dict[str, Any] = {"nvrtc": _seconds(compiler.nvrtc_version, wait)}
    for op in ops:
        timings[op] = {}
        for name, x in inputs.items():
            call = partial(forward, x, x, x, causal=True)
            if op == "backward":
                call = partial(backward, x, x, x, x, *call(return_lse=True), causal=True)
            timings[op][name] = _seconds(call, wait)
    return timings


def first_calls_of_peers(arrays: NumpyArrays, ops: Iterable[str]) -> dict[str, dict[str, float]]:
    """Measures seconds of each peer's first call by op, on existing arrays; its forward has run before backward."""
    case = square(1, 128, 2, PEERS_HEAD_DIM, "float16", True)
    timings: dict[str, dict[str, float]] = {op: {} for op in ops}
    for contender in peers.find(arrays)[0]:
        if contender.op in timings and case.dtype in contender.dtypes:
            inputs = arrays.inputs(contender.op, case)
            with suppress(Exception):  # the rows of the benchmark show which contenders cannot run
                run = contender.run([inputs], case)
                with run.scope():
                    timings[contender.op][contender.name] = _seconds(run.calls[0], arrays.synchronize)
    return timings


def _seconds(call: Callable[[], Any], wait: Callable[[], Any]) -> float:
    wait()
    started = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - started


if __name__ == "__main__":
    names = sys.argv[1:]
    of_peers = names[:1] == ["--peers"]
    print(json.dumps(first_calls_of_peers(find()[0], names[1:]) if of_peers else first_calls(names)))
