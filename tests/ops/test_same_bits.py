"""Equal bits: with a split_size, or one split, a row is the same in dense, packed, cached, paged and decoding calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.testing.cases import numpy_dtype
from cuflash.testing.layouts import host, identical

CHUNKS = ((0, 129), (129, 70), (199, 1), (200, 99), (299, 1))
Arrays = tuple[Any, Any, Any]  # q, k and v of one sequence: (rows, heads, head_dim)


def check(cupy: Any, arrays: Arrays, chunks: Iterable[tuple[int, int]], page_size: int, **options: Any) -> None:
    """Compares the rows of calls of every kind with the rows of one dense call.

    chunks: the first row of calls with fewer rows, and their number of rows; their keys end where their rows end.
    """
    q, k, v = arrays
    rows, heads = q.shape[:2]
    options |= {"causal": True, "return_lse": True}
    out, lse = (host(x[0]) for x in cuflash.forward(q[None], k[None], v[None], **options))

    def ints(*numbers: Any) -> Any:
        return cupy.asarray(np.array(numbers, np.int32))

    def same(got: Any, first: int) -> None:
        """Asserts that a call's results are the rows from `first` on of the dense call."""
        count = got[0].shape[-3]
        subset = slice(first, first + count)
        assert identical([host(got[0]).reshape(count, heads, -1)], [out[subset]])
        assert identical([host(got[1]).reshape(heads, count)], [np.ascontiguousarray(lse[:, subset])])

    neighbour = min(45, rows)
    twice, bounds = [cupy.concatenate([x[:neighbour], x]) for x in arrays], ints(0, neighbour, neighbour + rows)
    got = cuflash.forward(*twice, cu_seqlens_q=bounds, cu_seqlens_k=bounds, **options)
    same([got[0][neighbour:], got[1][:, neighbour:]], 0)
    same([got[0][:neighbour], got[1][:, :neighbour]], 0)
    used = -(-rows // page_size)
    pages = np.random.default_rng(0).permutation(used + 12).astype(np.int32)[None]
    pool_k, pool_v = (cupy.full((used + 12, page_size, *x.shape[1:]), cupy.nan, x.dtype) for x in (k, v))
    for number, page in enumerate(pages[0, :used]):
        begin = number * page_size
        for pool, x in ((pool_k, k), (pool_v, v)):
            pool[page, : rows - begin] = x[begin : begin + page_size]
    for first, count in chunks:
        part, end = q[None, first : first + count], first + count
        same(cuflash.forward(part, k[None, :end], v[None, :end], **options), first)
        same(cuflash.forward(part, k[None], v[None], seqused_k=ints(end), **options), first)
        in_pages = {"page_table": cupy.asarray(pages), "seqused_k": ints(end)}
        same(cuflash.forward(part, pool_k, pool_v, **in_pages, **options), first)


def normal(cupy: Any, seed: int, dtype: str, *shapes: tuple[int, ...], deviation: float = 2.0) -> Any:
    """Returns arrays of normal numbers."""
    rng = np.random.default_rng(seed)
    return [cupy.asarray((deviation * rng.standard_normal(shape)).astype(numpy_dtype(dtype))) for shape in shapes]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dims", [(32, 32), (48, 48), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("cut", [{"split_size": 128}, {"num_splits": 1}], ids=str)
@pytest.mark.parametrize("more", [{}, {"window_size": (70, 0)}, {"softcap": 5.0}], ids=["plain", "window", "softcap"])
def test_gpu_a_row_has_the_same_bits_in_every_kind_of_call(
    cupy: Any, dtype: str, dims: tuple[int, int], cut: dict[str, int], more: dict[str, Any]
) -> None:
    arrays = normal(cupy, dims[0], dtype, (300, 4, dims[0]), (300, 2, dims[0]), (300, 2, dims[1]))
    check(cupy, arrays, CHUNKS, 8, **cut, **more)


@pytest.mark.gpu
@pytest.mark.drawn(12)
def test_gpu_a_row_of_a_drawn_problem_has_the_same_bits_in_every_call(cupy: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    dtype, rows = rng.choice(["float16", "bfloat16", "bfloat16", "float32"]), int(np.exp(rng.uniform(0.0, 6.6)))
    head_dim, head_dim_v = (8 * int(rng.integers(1, 33 if dtype != "float32" else 17)) for _ in range(2))
    head_dim_v = head_dim_v if rng.random() < 0.3 else head_dim
    heads_kv, group = int(rng.integers(1, 4)), int(rng.choice([1, 2, 3, 4, 8]))
    cut = {"num_splits": 1} if rng.random() < 0.3 else {"split_size": 128 * int(rng.integers(1, 5))}
    more: dict[str, Any] = {}
    if rng.random() < 0.3:
        more["window_size"] = int(rng.integers(0, rows + 1)), 0
    if rng.random() < 0.2:
        more["softcap"] = float(rng.uniform(1.0, 40.0))
    shapes = (heads_kv * group, head_dim), (heads_kv, head_dim), (heads_kv, head_dim_v)
    arrays = normal(cupy, seed, dtype, *((rows, *shape) for shape in shapes), deviation=rng.uniform(0.5, 4.0))
    begins = [int(rng.integers(0, rows)) for _ in range(6)]
    most = [rows, 200, 16, 8, 1, 1]
    chunks = [
        (first, int(rng.integers(1, min(each, rows - first) + 1))) for first, each in zip(begins, most, strict=True)
    ]
    check(cupy, arrays, chunks, int(rng.choice([1, 3, 8, 16, 64, 256])), **cut, **more)


def with_sums_between_limits(cupy: Any, dtype: str, head_dim: int, heads: int) -> tuple[Arrays, int]:
    """Returns q, k and v of rows that Hopper's kernels scale if they keep 16 bits of a limit, and not if they keep 32.

    The last of the four key tiles of a row gives its first maximum. Keys of the third outweigh it, and half of their
    sum becomes the limit of a lane (softmax.cuh). The sum of this lane over the second tile lies between the limit and
    its upper 16 bits. The second result is the number of keys of a tile. Calls must use softmax_scale=1.
    """
    rng = np.random.default_rng(head_dim)
    shape = (1, 256, 1, head_dim)
    plan = cuflash.plan(shape, shape, shape, dtype=dtype, device="sm_90", causal=True)
    assert plan.variant is not None
    tile = plan.variant.tile.block_k
    lane = [8 * j + i for j in range(tile // 8) for i in range(2)]  # the columns of a warp's first lane
    patterns = head_dim // 3
    scores = np.zeros((heads, patterns, 4 * tile))
    peaks = rng.uniform(0.25, 1.0, (heads, patterns, len(lane)))
    peaks[..., 0] = 1.0
    scores[..., [2 * tile + column for column in lane]] = 17 * np.log(2.0) + np.log(peaks)  # over kPeakOfFew
    limit = (peaks.sum(-1) / 2).astype(np.float32)
    upper = (limit.view(np.uint32) & 0xFFFF0000).view(np.float32)
    scores[..., tile + lane[3]] = 17 * np.log(2.0) + np.log((limit.astype(np.float64) + upper) / 2)
    # A score is the sum of three 16-bit numbers, so that its weight is right to about 2^-16.
    k = np.zeros((4 * tile, heads, head_dim), numpy_dtype(dtype))
    rest = scores
    for part in range(3):
        rounded = rest.astype(k.dtype)
        k[..., part : 3 * patterns : 3] = rounded.transpose(2, 0, 1)
        rest = rest - rounded.astype(np.float64)
    q = np.repeat(np.eye(patterns), 3, axis=1)[np.arange(4 * tile) % patterns]
    q = np.pad(q, ((0, 0), (0, head_dim - 3 * patterns)))
    v = rng.standard_normal(k.shape)
    arrays = np.repeat(q[:, None], heads, axis=1), k, v
    return tuple(cupy.asarray(x.astype(k.dtype)) for x in arrays), tile


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_gpu_a_row_with_a_sum_near_a_limit_has_the_same_bits_everywhere(cupy: Any, dtype: str, head_dim: int) -> None:
    # Among 10,240 rows at head dim 256, varlen calls once had other bits than dense ones.
    arrays, tile = with_sums_between_limits(cupy, dtype, head_dim, heads=160)
    rows = 4 * tile
    check(cupy, arrays, ((3 * tile, tile), (rows - 5, 5), (rows - 1, 1)), 8, softmax_scale=1.0, num_splits=1)
