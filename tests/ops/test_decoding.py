"""Few queries over many keys on a GPU, split among thread blocks, against float64.

All of it runs on Hopper's kernels, if the GPU has them, and on the kernels for any GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hopper import assert_right
from plans import for_any_gpu

import cuflash
from cuflash.testing.cases import Case
from cuflash.testing.layouts import identical
from cuflash.testing.sequences import FAR, Sequences, check, varlen_arrays

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("new_memory_holds_nan")]
LENGTHS = (4097, 0, 1, 128, 129, 2500)
ROWS = Sequences("rows", (1,) * 6, LENGTHS, "rectangle", "rectangle", used_k=True, heads=(8, 2), causal=True)
CACHE = replace(ROWS, name="cache", place_k="cache")
PAGES = replace(ROWS, name="pages", place_q="packed", place_k="paged", page_size=64, bounded=True)
PACKED = replace(ROWS, name="packed", queries=(1, 2, 0, 3, 1, 8), place_q="packed", place_k="packed", bounded=True)
KINDS = [ROWS, CACHE, PAGES, PACKED]
DIMS = [(32, 32), (48, 48), (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (40, 72)]


@pytest.fixture(autouse=True, params=["own", "for_any"])
def family(request: pytest.FixtureRequest) -> Iterator[None]:
    with for_any_gpu() if request.param == "for_any" else nullcontext():
        yield


def forward(args: Any, cupy: Any, **more: Any) -> Any:
    return cuflash.forward(**args.arguments(cupy) | more, return_lse=True)


@pytest.mark.parametrize("case", KINDS, ids=lambda case: case.name)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_kind_of_cache_and_head_dim(cupy: Any, case: Sequences, dims: tuple[int, int], dtype: str) -> None:
    args = varlen_arrays(replace(case, dims=dims, dtype=dtype))
    got = forward(args, cupy)
    check(args, *got)
    assert identical(forward(args, cupy), got)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (8, 1), (32, 8), (33, 11), (64, 1), (96, 1)], ids=str)
@pytest.mark.parametrize("queries", [1, 2, 8, 16])
def test_heads_and_queries_are_rows_of_a_block(cupy: Any, heads: tuple[int, int], queries: int) -> None:
    for case in (ROWS, replace(PAGES, page_size=8)):
        args = varlen_arrays(replace(case, queries=(queries,) * 6, heads=heads))
        for num_splits in (0, 3):  # with 0 Hopper may run narrow.cu on up to 128 rows
            check(args, *forward(args, cupy, num_splits=num_splits))


@pytest.mark.parametrize("page_size", [8, 16, 24, 64, 96, 256, 1000, 3])
@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (256, 256)], ids=str)
def test_pages_of_any_size(cupy: Any, page_size: int, dims: tuple[int, int]) -> None:
    check(args := varlen_arrays(replace(PAGES, page_size=page_size, dims=dims)), *forward(args, cupy))


@pytest.mark.parametrize(
    "mask",
    [{"causal": False}, {"window_size": (700, -1)}, {"window_size": (0, 0)}, {"causal": False, "window_size": (130, 5)},
     {"diagonal_offset": 300}, {"diagonal_offset": -5}, {"softcap": 3.0}, {"softcap": 3.0, "window_size": (300, 0)}],
    ids=str,
)  # fmt: skip
def test_masks_and_capped_scores(cupy: Any, mask: dict[str, Any]) -> None:
    for case in (replace(ROWS, queries=(3,) * 6), PAGES, PACKED):
        check(args := varlen_arrays(replace(case, **mask)), *forward(args, cupy))


@pytest.mark.parametrize("num_splits", [0, 1, 2, 7, 50, 1000])
def test_any_number_of_splits(cupy: Any, num_splits: int) -> None:
    for case in (replace(ROWS, queries=(2,) * 6), PAGES, replace(PAGES, window_size=(900, -1))):
        args = varlen_arrays(case)
        got = forward(args, cupy, num_splits=num_splits)
        check(args, *got)
        for _ in range(3):
            assert identical(forward(args, cupy, num_splits=num_splits), got)


# batch, queries, keys, query heads, kv heads
IDLE = [(1, 1, 4097, 32, 8), (2, 3, 5000, 4, 1), (1, 100, 3000, 2, 2), (1, 300, 4000, 2, 1), (40, 1, 3001, 4, 2)]


@pytest.mark.parametrize("sizes", IDLE, ids=lambda sizes: "_".join(map(str, sizes)))
@pytest.mark.parametrize(
    "mask",
    [{}, {"causal": True}, {"causal": True, "softcap": 5.0}, {"window_size": (2500, 20)},
     {"causal": True, "diagonal_offset": 2222}, {"causal": True, "diagonal_offset": -1, "window_size": (-1, -1)}],
    ids=str,
)  # fmt: skip
def test_sequences_that_are_all_alike(cupy: Any, sizes: tuple[int, ...], mask: dict[str, Any]) -> None:
    for dims in (64, 64), (192, 128):
        case = Case("idle", *sizes, *dims, "bfloat16", **mask)
        arrays = case.arrays()
        inputs = [cupy.asarray(x) for x in arrays]
        results = {n: cuflash.forward(*inputs, **case.arguments(), return_lse=True, num_splits=n) for n in (0, 1, 3)}
        for out, lse in results.values():
            assert_right(case, arrays, out, lse)
        assert identical(cuflash.forward(*inputs, **case.arguments(), return_lse=True), results[0])
        rank3 = [x[0] for x in inputs]
        one = replace(case, batch=1).arguments()
        assert_right(replace(case, batch=1), tuple(x[:1] for x in arrays), *(
            x[None] for x in cuflash.forward(*rank3, **one, return_lse=True)
        ))  # fmt: skip


@pytest.mark.parametrize("out_dtype", [None, "float32"])
def test_rows_past_a_bound_that_is_too_small_count_as_unused(cupy: Any, out_dtype: str | None) -> None:
    args = varlen_arrays(replace(PACKED, queries=(1, 2, 0, 9, 1, 80), heads=(4, 1)))
    q, cu = (args.arguments(cupy)[name] for name in ("q", "cu_seqlens_q"))
    out, lse = forward(args, cupy, max_seqlen_q=1, out_dtype=out_dtype)
    begins = cu.get()[:-1]
    used = np.zeros(len(q), bool)
    used[[begin for begin, end in zip(begins, cu.get()[1:], strict=True) if begin < end]] = True
    assert not bool(cupy.isnan(out).any())
    assert not bool(out[~used].any())
    assert bool((lse[:, ~used] == -np.inf).all())


def test_wrong_integers_leave_nothing_behind(cupy: Any) -> None:
    for case in (PAGES, PACKED):
        args = varlen_arrays(case)
        right = forward(args, cupy)
        rng = np.random.default_rng(0)
        for _ in range(20):
            wild = {
                name: np.where(rng.random(x.shape) < 0.5, rng.choice([-FAR, -1, 3, 700, 90_000, FAR], x.shape), x)
                for name, x in args.varlen_kwargs.items()
            }
            forward(args, cupy, **{name: cupy.asarray(x.astype(np.int32)) for name, x in wild.items()})
            assert identical(forward(args, cupy), right)


def test_a_graph_captured_with_short_lengths_replays_with_long_ones(cupy: Any) -> None:
    args = varlen_arrays(PAGES)
    arguments = args.arguments(cupy)
    used = arguments["seqused_k"]
    expected, short = used.copy(), cupy.minimum(used, 5)
    used[...] = short
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cuflash.forward(**arguments)
        stream.synchronize()
        stream.begin_capture()
        out, lse = cuflash.forward(**arguments, return_lse=True)
        graph = stream.end_capture()
    for _ in range(3):
        out[...], lse[...] = cupy.nan, cupy.nan
        used[...] = expected
        cupy.cuda.get_current_stream().synchronize()
        graph.launch(stream)
        stream.synchronize()
        check(args, out, lse)


# A kernel that lets the next one begin, waits, and then writes lengths.
LATE = r"""
extern "C" __global__ void late(int* lengths, int count, int length, long long cycles) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  const long long begin = clock64();
  while (clock64() - begin < cycles) {}
  if (threadIdx.x < count) lengths[threadIdx.x] = length;
}"""


@pytest.mark.parametrize("sizes", [(1, 4000, 8, 2), (3, 3000, 8, 2), (30, 700, 4, 2)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [0, 4, 100])
def test_lengths_that_an_earlier_kernel_writes_last_count(
    cupy: Any, page_size: int, sizes: tuple[int, ...], head_dim: int
) -> None:
    batch, keys, *heads = sizes
    late, used = cupy.RawKernel(LATE, "late"), cupy.zeros(batch, "int32")
    rows = (batch * (keys // page_size), page_size) if page_size else (batch, keys)
    shapes = (batch, 1, heads[0], head_dim), *[(*rows, heads[1], head_dim)] * 2
    q, k, v = (cupy.random.standard_normal(shape, dtype="float32").astype("float16") for shape in shapes)
    more: dict[str, Any] = {"window_size": (300, -1) if head_dim == 64 else (-1, -1)}
    if page_size:
        more["page_table"] = cupy.random.permutation(rows[0]).astype("int32").reshape(batch, -1)
    for before, after in ((1, keys), (keys, 1), (0, keys), (keys, 0), (keys, keys - 200), (0, 0), (keys, keys)):
        used[...] = after
        right = cuflash.forward(q, k, v, seqused_k=used, return_lse=True, **more)
        for cycles in (0, 3000, 60_000):
            out = cupy.full_like(q, cupy.nan)
            used[...] = before
            cupy.cuda.get_current_stream().synchronize()
            late((1,), (32,), (used, np.int32(batch), np.int32(after), np.int64(cycles)))
            assert identical(cuflash.forward(q, k, v, seqused_k=used, return_lse=True, out=out, **more), right)


def test_there_is_room_for_all_splits_that_the_device_makes(cupy: Any) -> None:
    # Slightly more than four query blocks for each SM: about as many splits as possible.
    num_sms = cupy.cuda.runtime.getDeviceProperties(0)["multiProcessorCount"]
    for batch, keys in ((num_sms + 1, 8193), (num_sms + 1, 8320), (num_sms // 2 + 3, 2500)):
        shapes = (batch, 1, 16, 64), (batch, keys, 4, 64), (batch, keys, 4, 64)
        q, k, v = (cupy.random.standard_normal(shape, dtype="float32").astype("float16") for shape in shapes)
        used = cupy.full(batch, keys, "int32")
        whole, whole_lse = cuflash.forward(q, k, v, seqused_k=used, return_lse=True, num_splits=1)
        for _ in range(2):
            out = cupy.full_like(q, cupy.nan)
            _, lse = cuflash.forward(q, k, v, seqused_k=used, return_lse=True, out=out)
            assert float(abs(out - whole).max()) < 1e-3
            assert float(abs(lse - whole_lse).max()) < 1e-4


@pytest.mark.parametrize(("batch", "heads"), [(24, 32), (32, 8), (96, 8), (160, 8), (300, 8)])
@pytest.mark.parametrize("kind", ["any", "one long", "empty"])
def test_there_is_room_for_all_splits_of_unequal_sequences(batch: int, heads: int, kind: str, cupy: Any) -> None:
    rng = np.random.default_rng(batch)
    lengths = rng.integers(1, 8193, batch, dtype="int32")
    if kind != "any":
        lengths[1:] = 128 if kind == "one long" else 0
        lengths[0] = 8192
    q = cupy.asarray(rng.standard_normal((batch, 1, heads, 64)), "float16")
    k, v = cupy.asarray(rng.standard_normal((2, 64, 128, heads, 64), "float32"), "float16")
    pages = cupy.asarray(np.tile(np.arange(64, dtype="int32"), (batch, 1)))  # all sequences share the pages
    more: dict[str, Any] = {"seqused_k": cupy.asarray(lengths), "page_table": pages, "return_lse": True}
    whole, whole_lse = cuflash.forward(q, k, v, **more, num_splits=1)
    for _ in range(2):  # a work tile left over by the first call would break the second
        out = cupy.full_like(q, cupy.nan)
        _, lse = cuflash.forward(q, k, v, **more, out=out)
        assert float(abs(out - whole).max()) < 2e-3
        np.testing.assert_allclose(lse.get(), whole_lse.get(), atol=1e-4)


def test_calls_on_several_streams_at_once(cupy: Any) -> None:
    args = varlen_arrays(replace(ROWS, queries=(2,) * 6))
    right, streams = forward(args, cupy), [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    cupy.cuda.Device().synchronize()
    results = []
    for _ in range(20):
        for stream in streams:
            with stream:
                results.append(forward(args, cupy))
    cupy.cuda.Device().synchronize()
    assert all(identical(result, right) for result in results)
