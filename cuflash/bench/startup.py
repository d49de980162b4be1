"""`python -m cuflash.bench.startup OP...` prints the seconds of first calls in this process as JSON, for `measure`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from ..ops.backward import backward
from ..ops.forward import forward
from ..runtime import compiler

HEAD_DIMS = (64, 128, 256)


def first_calls(ops: Iterable[str]) -> dict[str, Any]:
    """Seconds to load NVRTC, and afterwards of the first call of each op at each head dim."""
    import cupy

    def seconds(call: Callable[[], Any]) -> float:
        cupy.cuda.runtime.deviceSynchronize()
        started = time.perf_counter()
        call()
        cupy.cuda.runtime.deviceSynchronize()
        return time.perf_counter() - started

    inputs = {f"d{head_dim}": cupy.zeros((1, 128, 2, head_dim), "float16") for head_dim in HEAD_DIMS}
    timings: dict[str, Any] = {"nvrtc": seconds(compiler.nvrtc_version)}
    for op in ops:
        timings[op] = {}
        for name, x in inputs.items():
            call = partial(forward, x, x, x, causal=True)
            if op == "backward":
                call = partial(backward, x, x, x, x, *call(return_lse=True), causal=True)
            timings[op][name] = seconds(call)
    return timings


if __name__ == "__main__":
    print(json.dumps(first_calls(sys.argv[1:])))
