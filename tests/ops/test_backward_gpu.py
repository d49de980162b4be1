"""`cuflash.backward` on a GPU only: the whole case table, lengths around a tile, repeats, streams and frameworks.

It also tests memory, split groups and offsets past 2³¹ elements. New memory is filled with NaN, so that elements that
no kernel writes show.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gradients import COMPUTED, DETERMINISTIC
from hypothesis import given, settings
from hypothesis import strategies as st
from libraries import GPU_MAKERS, as_numpy, bits, torch_of
from plans import for_any_gpu, planned_with
from problems import far_apart, need_memory, problems

import cuflash
from cuflash.errors import ProblemError, UnsupportedError
from cuflash.planning import backward_sm80
from cuflash.runtime.call import LoadedPlan
from cuflash.testing import oracle
from cuflash.testing.cases import Case, numpy_dtype
from cuflash.testing.gradients import BackwardArgs, backward, backward_args, check
from cuflash.testing.layouts import host, identical
from cuflash.testing.oracle import ULPS

pytestmark = pytest.mark.usefixtures("new_memory_holds_nan")
LAUNCHED = Case("launched", 2, 130, 150, 4, 2, 64, 64, "float16", causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_gpu_new_memory_holds_nan(cupy: Any, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workspaces = []

    def launch_nothing(kernels: LoadedPlan, pointers: tuple[int, ...], stream: int) -> bool:
        if kernels.workspace:
            held = np.zeros(kernels.workspace, "float32")
            cupy.cuda.runtime.memcpy(held.ctypes.data, pointers[-1], held.nbytes, 2)
            workspaces.append(bool(np.isnan(held).all()))
        return True

    monkeypatch.setattr(LoadedPlan, "launch", launch_nothing)
    q, k, v = map(GPU_MAKERS[name], replace(LAUNCHED, seqlen_k=1100, dtype=dtype).arrays())
    out, lse = cuflash.forward(q, k, v, causal=True, return_lse=True)
    grads = cuflash.backward(out, q, k, v, out, lse, causal=True)
    decoded = cuflash.forward(q[:, :1], k, v)  # its workspace lies in memory shared by calls
    assert all(np.isnan(as_numpy(x)).all() for x in (out, lse, *grads, decoded))
    assert len(workspaces) > 1
    assert all(workspaces)


@pytest.mark.gpu
@DETERMINISTIC
@pytest.mark.parametrize("case", COMPUTED, ids=lambda case: case.name)
def test_gpu_agrees_with_float64(cupy: Any, case: Case, deterministic: bool) -> None:
    for dlse in (True, False):
        args = backward_args(case, cupy, dlse=dlse)
        got = backward(case, args, deterministic=deterministic)
        check(case, args, got)
        if deterministic:
            assert identical(backward(case, args, deterministic=True), got)


@pytest.mark.gpu
@settings(max_examples=100)
@given(problems(longest=200, widest=256), st.booleans(), st.booleans(), st.integers(0, 2**31))
def test_gpu_agrees_on_random_problems(cupy: Any, case: Case, dlse: bool, deterministic: bool, seed: int) -> None:
    args = backward_args(case, cupy, seed, dlse=dlse)
    # A hundred draws meet larger errors than the table of cases.
    check(case, args, backward(case, args, deterministic=deterministic), ulps=2 * ULPS[case.dtype])


@pytest.mark.gpu
@DETERMINISTIC
@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65, 127, 128, 129])
def test_gpu_every_element_is_written_at_lengths_around_a_tile(cupy: Any, length: int, deterministic: bool) -> None:
    lengths = ((length, length), (length, 80), (80, length))
    for dtype, causal, (seqlen_q, seqlen_k) in itertools.product(("bfloat16", "float32"), (False, True), lengths):
        case = Case("length", 2, seqlen_q, seqlen_k, 2, 1, 64, 64, dtype, causal=causal)
        args = backward_args(case, cupy)
        check(case, args, backward(case, args, deterministic=deterministic))


@pytest.mark.gpu
@DETERMINISTIC
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
def test_gpu_float32_error_is_at_most_four_times_the_naive_float32_error(
    cupy: Any, head_dim: int, deterministic: bool
) -> None:
    case = Case("float32", 1, 300, 290, 2, 1, head_dim, head_dim, "float32")
    args = backward_args(case, cupy)
    got = backward(case, args, deterministic=deterministic)
    arguments = case, *map(host, (args.dout, args.q, args.k, args.v, args.dlse))
    for x, exact, naive in zip(got, oracle.gradients64(*arguments), oracle.naive_gradients(*arguments), strict=True):
        # The root mean square varies less than the largest error, which the rule takes.
        assert np.linalg.norm(host(x) - exact) <= 4 * np.linalg.norm(naive - exact)


@pytest.mark.gpu
def test_gpu_visible_nan_reaches_the_gradients(cupy: Any) -> None:
    case = Case("nan", 1, 200, 200, 1, 1, 64, 64, "float16", causal=True)
    args = backward_args(case, cupy)
    args.dout[0, 70, 0, 1] = cupy.nan
    for deterministic in (False, True):
        dq, dk, dv = (host(x).astype("f4") for x in backward(case, args, deterministic=deterministic))
        assert np.isnan(dq[0, 70]).all()
        assert np.isfinite(np.delete(dq, 70, axis=1)).all()
        assert np.isnan(dk[0, :71]).all()
        assert np.isnan(dv[0, :71, 0, 1]).all()
        assert np.isfinite(np.delete(dv, 1, axis=3)).all()


OVER_256 = itertools.product(("float16", "float32"), ((512, 512), (257, 64), (64, 257)))
UNSUPPORTED = [(dtype, dims, rf"{max(dims)}.*256") for dtype, dims in OVER_256]


@pytest.mark.gpu
@DETERMINISTIC
@pytest.mark.parametrize(("dtype", "dims", "words"), [*UNSUPPORTED, ("float64", (64, 64), "float64.*cast to float32")])
def test_gpu_a_call_without_a_kernel_is_unsupported_and_the_next_works(
    cupy: Any, dtype: str, dims: tuple[int, int], words: str, deterministic: bool
) -> None:
    q, v = (cupy.zeros((1, 33, 1, dim), dtype) for dim in dims)
    lse = cupy.zeros((1, 1, 33), "float64" if dtype == "float64" else "float32")
    with pytest.raises(UnsupportedError, match=words):
        cuflash.backward(v, q, q, v, v, lse, deterministic=deterministic)
    args = backward_args(LAUNCHED, cupy)
    check(LAUNCHED, args, backward(LAUNCHED, args))


@pytest.mark.gpu
def test_gpu_a_thousand_deterministic_repeats_have_the_same_bits(cupy: Any) -> None:
    case = Case("repeats", 1, 384, 384, 8, 2, 64, 64, "float16", causal=True)
    args = backward_args(case, cupy)
    first = backward(case, args, deterministic=True)
    same = cupy.ones((), bool)
    for _ in range(1000):
        for got, expected in zip(backward(case, args, deterministic=True), first, strict=True):
            same &= (bits(got) == bits(expected)).all()
    assert bool(same)
    furthest = [cupy.zeros((), "float32") for _ in first]
    for _ in range(100):
        for i, (got, expected) in enumerate(zip(backward(case, args), first, strict=True)):
            furthest[i] = cupy.maximum(furthest[i], cupy.abs(got.astype("f4") - expected.astype("f4")).max())
    for apart, expected in zip(furthest, first, strict=True):
        # float32 sums differ in their last bits, which may round to the next 16-bit number, or to the one after it if
        # another kernel computed dq.
        assert float(apart) <= 2 * 2.0**-10 * float(cupy.abs(expected).max())


@pytest.mark.gpu
@DETERMINISTIC
def test_gpu_offsets_past_2_to_the_31_elements_in_q_and_its_gradient(cupy: Any, deterministic: bool) -> None:
    need_memory(cupy, 28)
    small = Case("far", 3, 1024, 144, 4, 1, 64, 64, "float16")  # more than one key block, so dq is added up
    batch = 2**31 // (1024 * 4 * 64) + 3
    few = backward_args(small, cupy)
    expected = backward(small, few, deterministic=deterministic)
    many = []
    for x in few:
        many.append(cupy.zeros((batch, *x.shape[1:]), x.dtype))
        many[-1][0], many[-1][-2:] = x[0], x[1:]
    assert many[1].size > 2**31
    got = [cupy.concatenate([x[:1], x[-2:]]) for x in backward(small, BackwardArgs(*many), deterministic=deterministic)]
    check(small, few, got)
    if deterministic:
        assert identical(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["dout", "q", "k", "v", "out", "lse", "dlse"])
def test_gpu_rows_further_apart_than_2_to_the_31_elements(cupy: Any, name: str) -> None:
    need_memory(cupy, 16)
    case = Case("apart", 1, 96, 120, 1, 1, 64, 64, "float16")
    args = backward_args(case, cupy)
    x = getattr(args, name)
    far = far_apart(cupy, x, 2 if x.ndim == 3 else 1)
    got = backward(case, args._replace(**{name: far}), deterministic=True)
    assert identical(got, backward(case, args, deterministic=True))
    del far
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.gpu
@pytest.mark.parametrize("framework", GPU_MAKERS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_gpu_gradients_are_of_the_callers_framework(dtype: str, framework: str) -> None:
    case = Case("framework", 2, 60, 70, 4, 2, 64, 64, dtype, causal=True)
    on_host = backward_args(case, np)
    args = BackwardArgs(*map(GPU_MAKERS[framework], on_host))
    for deterministic in (False, True):
        got = backward(case, args, deterministic=deterministic)
        for x, like in zip(got, args[1:4], strict=True):
            assert type(x) is type(like)
            assert (tuple(x.shape), x.dtype, x.device) == (tuple(like.shape), like.dtype, like.device)
        check(case, on_host, tuple(as_numpy(x).astype(numpy_dtype(dtype)) for x in got))


@pytest.mark.gpu
@DETERMINISTIC
def test_gpu_work_runs_on_the_callers_stream(cupy: Any, deterministic: bool) -> None:
    args = backward_args(LAUNCHED, cupy)
    backward(LAUNCHED, args, deterministic=deterministic)
    cupy.cuda.Device().synchronize()
    results = []
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    for stream in streams:
        with stream:
            # The inputs are computed on this stream just before: on another stream they would not be ready.
            big = cupy.zeros(1 << 27, "float32")
            for _ in range(3):
                big += 1
            late = BackwardArgs(*(x * (big[0] / 3).astype(x.dtype) for x in args))
            results.append(backward(LAUNCHED, late, deterministic=deterministic))
    for stream, result in zip(streams, results, strict=True):
        stream.synchronize()
        check(LAUNCHED, args, result)


@pytest.mark.gpu
@DETERMINISTIC
def test_gpu_torch_work_runs_on_its_current_stream(deterministic: bool) -> None:
    torch = pytest.importorskip("torch")
    on_host = backward_args(LAUNCHED, np)
    args = BackwardArgs(*(torch_of(x, "cuda") for x in on_host))
    backward(LAUNCHED, args, deterministic=deterministic)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        late = [x.clone() for x in args]
        big = torch.zeros(1 << 27, device="cuda")
        for _ in range(3):
            big += 1
        late = BackwardArgs(*(x * (big[0] / 3).to(x.dtype) for x in late))
        got = backward(LAUNCHED, late, deterministic=deterministic)
    side.synchronize()
    check(LAUNCHED, on_host, tuple(as_numpy(x).astype("f2") for x in got))


@pytest.mark.gpu
def test_gpu_workspace_is_dq_in_float32_or_a_few_bytes_for_each_row(cupy: Any) -> None:
    case = Case("memory", 1, 8192, 8192, 4, 4, 64, 64, "float16", causal=True)
    args = backward_args(case, cupy)
    rows, slack = 4 * 8192, 8 * 512  # the pool hands out multiples of 512 bytes
    for deterministic in (False, True):
        used = cuflash.plan(args.q, args.k, args.v, op="backward", deterministic=deterministic, causal=True).variant
        assert used is not None
        float32 = used.of_warpgroups or not deterministic
        pool = cupy.cuda.MemoryPool()
        with cupy.cuda.using_allocator(pool.malloc):
            got = backward(case, args, deterministic=deterministic)
        outputs = sum(x.nbytes for x in got)
        grown = pool.total_bytes()  # freed memory counts, too, as the pool keeps it
        assert outputs <= grown <= outputs + 16 * rows + slack + (4 * args.q.size if float32 else 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("heads", [(7, 1), (8, 2)])
def test_gpu_every_split_of_a_group_gives_the_same_gradients(cupy: Any, heads: tuple[int, int], dtype: str) -> None:
    case = Case("split", 2, 150, 200, *heads, 72, 40, dtype, causal=True)
    args, group = backward_args(case, cupy), heads[0] // heads[1]
    for splits in {-(-group // heads_each) for heads_each in range(1, group + 1)}:
        with for_any_gpu(), planned_with(backward_sm80, choose_splits=lambda *_, splits=splits: splits):
            main = cuflash.plan(args.q, args.k, args.v, op="backward", causal=True).launches[1]
            assert main.fields["splits"] == splits
            check(case, args, backward(case, args))


@pytest.mark.gpu
@DETERMINISTIC
def test_gpu_more_heads_than_start_together_are_all_computed(cupy: Any, deterministic: bool) -> None:
    case = Case("many", 3, 200, 300, 14, 7, 40, 40, "float16", causal=True)  # 21 kv heads, and 16 start together
    args = backward_args(case, cupy)
    check(case, args, backward(case, args, deterministic=deterministic))


@pytest.mark.gpu
def test_gpu_work_runs_where_the_arrays_are(cupy: Any) -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    args = backward_args(LAUNCHED, cupy)
    with cupy.cuda.Device(1):
        other = args.on(cupy)
    got = backward(LAUNCHED, other, deterministic=True)  # GPU 0 is the current device
    assert {x.data.device_id for x in got} == {1}
    assert identical(got, backward(LAUNCHED, args, deterministic=True))
    with pytest.raises(ProblemError, match="cuda:1"):
        backward(LAUNCHED, args._replace(lse=other.lse))
