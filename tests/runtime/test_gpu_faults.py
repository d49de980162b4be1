"""Faults around a call on a GPU: no memory, a failed capture, an older error. The next call is right."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from workers import run_python

import cuflash
from cuflash.errors import ProblemError
from cuflash.testing.cases import Case

pytestmark = pytest.mark.gpu

CASE = Case("fault", 2, 300, 330, 4, 2, 64, 64, "float16", causal=True)


def states(case: Case = CASE) -> tuple[Any, ...]:
    """Returns inputs of backward: dout, q, k, v, out and lse."""
    import cupy

    q, k, v = (cupy.asarray(x) for x in case.arrays())
    out, lse = cuflash.forward(q, k, v, causal=True, return_lse=True)
    return out * 0.5, q, k, v, out, lse


def gradients(deterministic: bool) -> Callable[..., tuple[Any, ...]]:
    return lambda *arrays: cuflash.backward(*arrays, causal=True, deterministic=deterministic)


def numpy_gradients(*arrays: Any) -> tuple[Any, ...]:
    """Returns gradients including a bias's, summed over several launches."""
    import cupy

    bias = cupy.ones((4, 1, 330), "float32")
    dq, dk, dv, (dbias,) = cuflash.backward(*arrays, bias=bias, captured_grads=(bias,), deterministic=True)
    return dq, dk, dv, dbias


CALLS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "forward": lambda _, q, k, v, *rest: cuflash.forward(q, k, v, causal=True, return_lse=True),
    "gaps": lambda _, q, k, v, *rest: (cuflash.forward(q[..., ::2], k[..., ::2], v),),  # needs copies
    "splits": lambda _, q, k, v, *rest: cuflash.forward(q[:, :1], k, v, num_splits=3, return_lse=True),
    "backward": gradients(deterministic=True),
    "bias": numpy_gradients,
}


def same_bits(arrays: tuple[Any, ...], expected: tuple[Any, ...]) -> bool:
    """Compares on the host, as the GPU may have no memory left."""
    return all(x.get().tobytes() == y.get().tobytes() for x, y in zip(arrays, expected, strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_memory_that_runs_out_at_any_place_of_a_call_costs_nothing_else(cupy: Any, name: str) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)  # the default stream has a shared workspace already
    arrays, pool, limit = states(), cupy.cuda.MemoryPool(), 0
    expected, failed = CALLS[name](*arrays), 0
    cupy.cuda.Device().synchronize()
    with cupy.cuda.using_allocator(pool.malloc), stream:
        result = None
        while result is None:
            limit += 512  # the unit of the pool
            pool.set_limit(size=limit)
            try:
                result = CALLS[name](*arrays)
            except cupy.cuda.memory.OutOfMemoryError:
                failed += 1
            if result is None:  # outside of `except`, where the error still holds the call's arrays
                assert pool.used_bytes() == 0
                pool.free_all_blocks()
                limit += limit // 7 // 512 * 512  # larger steps, as a megabyte is thousands of units
        stream.synchronize()
        assert failed >= 2
        assert same_bits(result, expected)
        del result
    assert pool.used_bytes() == 0


def test_torch_memory_that_runs_out_costs_nothing_else() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(1, 4096, 8, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    expected = cuflash.forward(q, k, v, causal=True)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    used = torch.cuda.memory_allocated()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**20) / whole)
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            cuflash.forward(q.expand(64, -1, -1, -1), k.expand(64, -1, -1, -1), v.expand(64, -1, -1, -1))
        assert torch.cuda.memory_allocated() == used
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(cuflash.forward(q, k, v, causal=True), expected)


def test_a_refused_call_within_a_capture_leaves_the_capture_intact(cupy: Any) -> None:
    dout, q, k, v, *_ = states()
    out, expected = cupy.zeros_like(q), cuflash.forward(q, k, v, causal=True)
    cupy.cuda.Device().synchronize()  # the stream below does not wait for the default stream
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        cuflash.forward(q, k, v, causal=True, out=out)
        with pytest.raises(ProblemError):
            cuflash.forward(q, k, v, window_size=(-7, 0))
        cuflash.backward(dout, q, k, v, *cuflash.forward(q, k, v, return_lse=True))
        graph = stream.end_capture()
        graph.launch(stream)
    stream.synchronize()
    assert same_bits((out,), (expected,))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_call_in_a_failed_capture_raises_and_the_next_one_is_right(cupy: Any, deterministic: bool) -> None:
    arrays = states()
    call = gradients(deterministic)
    expected = call(*arrays)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
            stream.synchronize()  # forbidden in a capture, which ends it
        with pytest.raises(Exception, match="CAPTURE_INVALIDATED"):
            call(*arrays)
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
            stream.end_capture()
        result = call(*arrays)
        stream.synchronize()
    np.testing.assert_allclose(*(cupy.asnumpy(x[1]).astype("f4") for x in (result, expected)), atol=2e-3)
    if deterministic:
        assert same_bits(result, expected)


def test_freed_arrays_and_changing_streams_give_right_results(cupy: Any) -> None:
    """Inputs are computed on one stream, used on the next, and freed while that one still runs."""
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    host, pool, results = states(), cupy.get_default_memory_pool(), []
    expected = [tuple(cupy.asnumpy(x) for x in CALLS["backward"](*(x * scale for x in host[:1]), *host[1:]))
              for scale in (1.0, 0.25)]  # fmt: skip
    cupy.cuda.Device().synchronize()
    gc.collect()  # arrays that earlier tests left
    before = pool.used_bytes()
    for turn in range(60):
        makes, works = streams[turn % 3], streams[(turn + 1) % 3]
        with makes:
            arrays = tuple(x * (1.0 if number or turn % 2 == 0 else 0.25) for number, x in enumerate(host))
        works.wait_event(makes.record())
        with works:
            results.append(CALLS["backward"](*(x.astype(y.dtype) for x, y in zip(arrays, host, strict=True))))
        makes.wait_event(works.record())  # required by CuPy before memory goes back to the other stream
        del arrays
    cupy.cuda.Device().synchronize()
    for turn, gradients_found in enumerate(results):
        for x, y in zip(gradients_found, expected[turn % 2], strict=True):
            np.testing.assert_array_equal(cupy.asnumpy(x), y)
    del results, gradients_found, x
    assert pool.used_bytes() == before


BROKEN = """
import pathlib, sys
import cupy, cuflash
from cuflash.runtime import disk_cache

q = cupy.ones((1, 64, 2, 64), "float16")
cuflash.forward(q, q, q)
cupy.cuda.Device().synchronize()
files = set(pathlib.Path(disk_cache.cache_dir()).glob("*.cubin"))
cupy.RawKernel('extern "C" __global__ void bad(int* p) { *p = 1; }', "bad")((1,), (1,), (cupy.uintp(8),))
shapes = q, q[:, :32], cupy.broadcast_to(q, (1, 64, 2, 64))
errors = []
for call in (lambda: cuflash.forward(q, q, q), lambda: cuflash.forward(q[:, :32], q, q, window_size=(3, 2)),
             lambda: cuflash.forward(q[..., :40], q[..., :40], q, softcap=2.0)):
    try:
        call()
        cupy.cuda.Device().synchronize()
    except Exception as error:
        errors.append(f"{type(error).__name__} {error}")
    else:
        sys.exit("a call after the error gave a result")
assert all("ILLEGAL_ADDRESS" in x or "IllegalAddress" in x for x in errors), errors
assert files <= set(pathlib.Path(disk_cache.cache_dir()).glob("*.cubin"))
print("errors", len(errors))
import os
os._exit(0)  # CuPy cannot free its arrays any more
"""


def test_after_a_gpu_error_each_call_reports_it_and_none_hangs() -> None:
    assert "errors 3" in run_python("-c", BROKEN)


INTERRUPTED = """
import random, signal
import cupy, cuflash

class Interrupted(BaseException):  # as KeyboardInterrupt
    pass

def interrupt(*_):
    raise Interrupted

signal.signal(signal.SIGALRM, interrupt)
rng, interrupted = random.Random(1), 0
shapes = [(1, 60 + n, 2, 64) for n in range(400)]
make = cupy.random.default_rng(0).standard_normal
x = make((1, 500, 2, 64), "float32").astype("float16")
stream = cupy.cuda.Stream(non_blocking=True)
with stream:
    for turn in range(3000):
        n = shapes[turn % len(shapes)][1]
        q = x[:, :n]
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(2e-6, 6e-4))
            out, lse = cuflash.forward(q, x, x, causal=True, return_lse=True)
            cuflash.backward(out, q, x, x, out, lse, causal=True)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupted:
            interrupted += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    for n in range(60, 460, 40):
        q = x[:, :n]
        out, lse = cuflash.forward(q, x, x, causal=True, return_lse=True)
        found = cuflash.backward(out, q, x, x, out, lse, causal=True, deterministic=True)
        stream.synchronize()
        host = [cupy.asnumpy(a).astype("float32") for a in (q, x, x)]
        wanted, wanted_lse = cuflash.forward(*(a.astype("float16") for a in host), causal=True, return_lse=True)
        assert abs(cupy.asnumpy(out).astype("f4") - wanted.astype("f4")).max() < 4e-3, n
        assert abs(cupy.asnumpy(lse) - wanted_lse).max() < 1e-3, n
assert interrupted > 500, interrupted
print("sound")
"""


def test_calls_that_are_interrupted_anywhere_leave_the_next_ones_right() -> None:
    assert "sound" in run_python("-c", INTERRUPTED)
