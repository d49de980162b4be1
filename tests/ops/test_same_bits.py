"""With one split_size, or one split, a row has the same bits in calls of every kind: dense, packed, cached, in pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from libraries import host, identical

import cuflash
from cuflash.bench.cases import numpy_dtype


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("cut", [{"split_size": 128}, {"num_splits": 1}], ids=str)
@pytest.mark.parametrize("more", [{}, {"window_size": (70, 0)}, {"softcap": 5.0}], ids=["plain", "window", "softcap"])
def test_gpu_a_row_has_the_same_bits_in_calls_of_every_kind(
    cupy: Any, dtype: str, dims: tuple[int, int], cut: dict[str, int], more: dict[str, Any]
) -> None:
    rng, rows = np.random.default_rng(dims[0]), 300
    shapes = (rows, 4, dims[0]), (rows, 2, dims[0]), (rows, 2, dims[1])
    q, k, v = (cupy.asarray((2 * rng.standard_normal(shape)).astype(numpy_dtype(dtype))) for shape in shapes)
    more = {"causal": True, "return_lse": True} | cut | more
    out, lse = (host(x[0]) for x in cuflash.forward(q[None], k[None], v[None], **more))

    def ints(*numbers: Any) -> Any:
        return cupy.asarray(np.array(numbers, np.int32))

    def same(got: Any, first: int) -> None:
        """Whether the call gave the rows from `first` on of the dense one."""
        count = got[0].shape[-3]
        at = slice(first, first + count)
        assert identical([host(got[0]).reshape(count, 4, -1)], [out[at]])
        assert identical([host(got[1]).reshape(4, count)], [np.ascontiguousarray(lse[:, at])])

    twice, bounds = [cupy.concatenate([x[:45], x]) for x in (q, k, v)], ints(0, 45, 345)
    got = cuflash.forward(*twice, cu_seqlens_q=bounds, cu_seqlens_k=bounds, **more)
    same([got[0][45:], got[1][:, 45:]], 0)
    same([got[0][:45], got[1][:, :45]], 0)
    pages = np.random.default_rng(0).permutation(50).astype(np.int32)[None]
    pool_k, pool_v = (cupy.full((50, 8, *x.shape[1:]), cupy.nan, x.dtype) for x in (k, v))
    for number, page in enumerate(pages[0, :38]):
        pool_k[page, : rows - 8 * number], pool_v[page, : rows - 8 * number] = (
            x[8 * number : 8 * number + 8] for x in (k, v)
        )
    for first, count in ((0, 129), (129, 70), (199, 1), (200, 99), (299, 1)):
        part, end = q[None, first : first + count], first + count
        same(cuflash.forward(part, k[None, :end], v[None, :end], **more), first)
        same(cuflash.forward(part, k[None], v[None], seqused_k=ints(end), **more), first)
        same(cuflash.forward(part, pool_k, pool_v, page_table=cupy.asarray(pages), seqused_k=ints(end), **more), first)
