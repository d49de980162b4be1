"""Computes exact causal attention on a GPU with CuPy arrays, or on the CPU with NumPy arrays if there is no GPU.

It checks the result against float64, and prints size, time and error. It exits with 1 if the error is over the bound.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

import cuflash

# Bounds on the relative error of a row. float16: 4 roundings, as p and out are rounded. float32: errors of long sums.
BOUNDS = {"float16": 4 * 2.0**-11, "float32": 1e-5}


def main() -> int:
    """Runs attention, checks it, and reports."""
    shape, dtype = (2, 4096, 16, 64), "float16"  # batch, seqlen, heads, head_dim
    device = find_device(shape, dtype)
    if device != "cpu":
        import cupy

        print(f"Running on the GPU ({device}) with CuPy arrays.")
        from_host, to_host, wait = cupy.asarray, cupy.asnumpy, cupy.cuda.runtime.deviceSynchronize
    else:
        print("Running on the CPU with NumPy arrays, as there is no GPU to run on or no CuPy to reach it.")
        shape, dtype = (1, 2048, 8, 64), "float32"
        from_host, to_host, wait = np.asarray, np.asarray, lambda: None

    rng = np.random.default_rng(0)
    host = [rng.standard_normal(shape, dtype=np.float32).astype(dtype) for _ in range(3)]
    q, k, v = (from_host(x) for x in host)

    seconds = []
    for _ in range(3):
        wait()
        started = time.perf_counter()
        out = cuflash.forward(q, k, v, causal=True)
        wait()
        seconds.append(time.perf_counter() - started)

    error, bound = largest_error(to_host(out), *host), BOUNDS[dtype]
    plan = cuflash.plan(q, k, v, causal=True)
    print(f"size   batch {shape[0]}, seqlen {shape[1]}, {shape[2]} heads of {shape[3]}, {dtype}, causal")
    print(f"kernel {plan.kernel}")
    best = min(seconds)
    print(f"time   {best * 1e3:.2f} ms, {plan.flops / best * 1e-12:.3f} TFLOP/s (the first call {seconds[0]:.2f} s)")
    print(f"error  {error:.1e} of float64 in sampled rows; the bound is {bound:.1e}")
    print(f"The result is {'right' if error <= bound else 'wrong'}.")
    return int(not error <= bound)


def find_device(shape: tuple[int, ...], dtype: str) -> str:
    """Returns the name of the GPU that runs this, or "cpu"."""
    try:
        return cuflash.plan(shape, shape, shape, dtype=dtype, causal=True).device
    except cuflash.UnsupportedError as error:
        print(error)
        return "cpu"


def largest_error(out: Any, q: Any, k: Any, v: Any) -> float:
    """Returns the largest |out - exact| / |exact| of 16 sampled rows; exact is attention written out in float64."""
    errors = []
    rng = np.random.default_rng(1)
    for _ in range(16):
        b, i, h = (int(rng.integers(n)) for n in q.shape[:3])
        scores = k[b, : i + 1, h].astype(np.float64) @ q[b, i, h].astype(np.float64) / np.sqrt(q.shape[3])
        p = np.exp(scores - scores.max())
        exact = p @ v[b, : i + 1, h].astype(np.float64) / p.sum()
        errors.append(np.linalg.norm(out[b, i, h] - exact) / np.linalg.norm(exact))
    return float(max(errors))


if __name__ == "__main__":
    sys.exit(main())
