"""`python -m cuflash.bench.startup`: seconds of the first calls in this process, as JSON. `measure.startup` runs it."""

from __future__ import annotations

import json
import time
from typing import Any

from .. import jit
from ..forward import forward

HEAD_DIMS = (64, 128, 256)


def first_calls() -> dict[str, Any]:
    """Seconds to load NVRTC, and of the first forward of each head dim once that is done."""
    import cupy

    inputs = {head_dim: cupy.zeros((1, 128, 2, head_dim), "float16") for head_dim in HEAD_DIMS}
    cupy.cuda.runtime.deviceSynchronize()
    started = time.perf_counter()
    jit.nvrtc_version()
    nvrtc = time.perf_counter() - started
    seconds = {}
    for head_dim, x in inputs.items():
        started = time.perf_counter()
        forward(x, x, x, causal=True)
        cupy.cuda.runtime.deviceSynchronize()
        seconds[f"d{head_dim}"] = time.perf_counter() - started
    return {"nvrtc": nvrtc, "forward": seconds}


if __name__ == "__main__":
    print(json.dumps(first_calls()))
