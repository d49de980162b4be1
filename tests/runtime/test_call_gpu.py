"""Launching on a GPU: strides, alignment, streams, threads, graphs, offsets past 2³¹ elements, several GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from libraries import bits, poisoned
from problems import far_apart, need_memory
from workers import run_threads

import cuflash
from cuflash.errors import ProblemError
from cuflash.planning import device
from cuflash.testing import oracle
from cuflash.testing.cases import Case
from cuflash.testing.layouts import every_second, heads_first, odd_rows, odd_start, reversed_keys, wide_rows

pytestmark = pytest.mark.gpu


def arrays(case: Case, seed: int = 0) -> list[Any]:
    import cupy

    return [cupy.asarray(x) for x in case.arrays(seed)]


CASE = Case("launch", 2, 130, 150, 4, 2, 64, 64, "float16", causal=True)


# Layouts that Hopper's kernels take, if only by a copy, and others.
TILED = {"heads_first": heads_first, "wide_rows": wide_rows, "every_second": every_second}
OTHERS = {"reversed_keys": reversed_keys, "odd_rows": odd_rows, "odd_start": odd_start}


@pytest.mark.parametrize("layout", [*TILED, *OTHERS])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_any_memory_layout_gives_the_same_bits(cupy: Any, layout: str, dtype: str) -> None:
    case = Case("layout", 2, 130, 150, 4, 2, 40, 64, dtype)
    q, k, v = arrays(case)
    like, strange = heads_first if layout in TILED else odd_start, (TILED | OTHERS)[layout]
    expected = cuflash.forward(*map(like, (q, k, v)))
    oracle.assert_attention(case, case.arrays(), expected.get(), ulps=1)
    got = cuflash.forward(*map(strange, (q, k, v)))
    assert bool((bits(got) == bits(expected)).all())
    out = strange(poisoned(expected.shape, expected.dtype))
    assert cuflash.forward(q, k, v, out=out) is out
    assert bool((bits(cupy.ascontiguousarray(out)) == bits(expected)).all())
    lse = cuflash.lse(strange(q), strange(k))
    assert bool((lse == cuflash.lse(like(q), like(k))).all())


@pytest.mark.parametrize("strange", "qkv")
def test_a_misaligned_operand_changes_the_kernel_and_results_little(strange: str) -> None:
    named = dict(zip("qkv", arrays(CASE), strict=True))
    for layout in OTHERS.values():
        mixed = named | {strange: layout(named[strange])}
        oracle.assert_attention(CASE, CASE.arrays(), cuflash.forward(*mixed.values(), causal=True).get(), ulps=1)


def test_a_broadcast_operand_is_read_through_its_zero_strides(cupy: Any) -> None:
    q, k, v = arrays(CASE)
    k, v = (cupy.broadcast_to(x[:1], x.shape) for x in (k, v))
    got = cuflash.forward(q, k, v, causal=True)
    expected = cuflash.forward(q, odd_start(k), v.copy(), causal=True)  # the same kernel on Hopper
    assert bool((got == expected).all())


def test_out_at_the_address_of_an_input_is_refused() -> None:
    q, k, v = arrays(Case("same", 1, 64, 64, 2, 2, 64, 64, "float16"))
    before = v.copy()
    with pytest.raises(ProblemError, match="out, which is written to, shares memory with v"):
        cuflash.forward(q, k, v, out=v)
    with pytest.raises(ProblemError, match="out, which is written to, shares memory with k"):
        cuflash.forward(q[:, :32], k, v, out=k[:, 20:52])
    assert bool((v == before).all())


def test_work_runs_on_the_callers_stream(cupy: Any) -> None:
    q, k, v = arrays(CASE)
    expected = cuflash.forward(q, k, v, causal=True)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    cupy.cuda.Device().synchronize()
    results = []
    for stream in streams:
        with stream:
            # The inputs are computed on this stream just before: another stream would not have them yet.
            big = cupy.zeros(1 << 27, "float32")
            for _ in range(3):
                big += 1
            late = [x * (big[0] / 3).astype(x.dtype) for x in (q, k, v)]
            results.append(cuflash.forward(*late, causal=True))
    for stream in streams:
        stream.synchronize()
    for result in results:
        assert bool((bits(result) == bits(expected)).all())


def test_threads_do_not_share_parameters(cupy: Any) -> None:
    problems = [Case("thread", 1, 64 + 7 * i, 100 + i, 2, 2, 64, 64, "float16") for i in range(8)]
    inputs = [arrays(case, i) for i, case in enumerate(problems)]
    expected = [cuflash.forward(*x) for x in inputs]
    cupy.cuda.Device().synchronize()
    wrong: list[int] = []

    def work(index: int) -> None:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for turn in range(100):
                which = (index + turn) % len(problems)
                got = cuflash.forward(*inputs[which])
                stream.synchronize()
                if not bool((bits(got) == bits(expected[which])).all()):
                    wrong.append(which)

    run_threads(work, 8)
    assert not wrong


def test_a_captured_graph_replays_on_new_values(cupy: Any) -> None:
    q, k, v = arrays(CASE)
    out = poisoned((2, 130, 4, 64), q.dtype)
    cuflash.forward(q, k, v, causal=True, out=out)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        cuflash.forward(q, k, v, causal=True, out=out)
        graph = stream.end_capture()
    q[...], k[...], v[...] = arrays(CASE, seed=5)
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    assert bool((bits(out) == bits(cuflash.forward(q, k, v, causal=True))).all())


def test_new_threads_reuse_cached_calls_of_an_old_thread_number() -> None:
    q, k, v = arrays(CASE)
    expected, out = cuflash.forward(q, k, v), q.copy()
    for _ in range(4):  # the system reuses a thread's number
        out.fill(0)
        run_threads(lambda _: cuflash.forward(q, k, v, out=out), 1)
        assert bool((bits(out) == bits(expected)).all())


def test_a_thread_that_has_not_used_the_gpu_calls_with_a_new_shape() -> None:
    """With all kernels loaded, the first driver call of the thread encodes descriptors."""
    q, k, v = arrays(CASE)
    cuflash.forward(q, k, v)
    for rows in (q.shape[1] - 1, q.shape[1] - 2):
        fewer, out = q[:, :rows], q[:, :rows].copy()
        run_threads(lambda _, fewer=fewer, out=out: cuflash.forward(fewer, k, v, out=out), 1)
        assert bool((bits(out) == bits(cuflash.forward(fewer, k, v))).all())


def test_nothing_is_allocated_beyond_the_outputs(cupy: Any) -> None:
    q, k, v = arrays(Case("memory", 1, 2000, 2000, 8, 8, 64, 64, "float16", causal=True))
    for return_lse in (False, True):
        pool = cupy.cuda.MemoryPool()  # a new pool: free blocks of other tests in the shared one could be reused
        with cupy.cuda.using_allocator(pool.malloc):
            result = cuflash.forward(q, k, v, return_lse=return_lse)
        outputs = result if return_lse else (result,)
        assert pool.total_bytes() == sum(-(-x.nbytes // 512) * 512 for x in outputs)


def test_offsets_past_2_to_the_31_elements(cupy: Any) -> None:
    need_memory(cupy, 24)
    inputs = arrays(Case("far", 1, 96, 200, 1, 1, 64, 64, "float16"))
    expected = cuflash.forward(*inputs)
    for far in range(3):
        got = cuflash.forward(*(far_apart(cupy, x, 1) if n == far else x for n, x in enumerate(inputs)))
        assert bool((bits(got) == bits(expected)).all()), "qkv"[far]
        cupy.get_default_memory_pool().free_all_blocks()


def test_two_gpus(cupy: Any) -> None:
    if device.count() < 2:
        pytest.skip("needs two GPUs")
    q, k, v = arrays(CASE)
    expected = cuflash.forward(q, k, v, causal=True).get()
    with cupy.cuda.Device(1):
        other = [cupy.asarray(x.get()) for x in (q, k, v)]
    got = cuflash.forward(*other, causal=True)  # while GPU 0 is the current one
    assert got.data.device_id == 1
    np.testing.assert_array_equal(got.get(), expected)
    with pytest.raises(ProblemError, match="cuda:1"):
        cuflash.forward(q, other[1], v)
