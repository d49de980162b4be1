"""Large calls: 2²⁰ queries and keys, more than 65,535 batches and heads, more than 2³¹ elements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from problems import need_memory

import cuflash
from cuflash.testing import oracle
from cuflash.testing.cases import Case
from cuflash.testing.dense import check
from cuflash.testing.layouts import host, identical, reversed_keys

pytestmark = pytest.mark.gpu

BATCH = 70_001  # over 65,535, CUDA's limit for the second and third dimension of a grid
LAYOUTS = pytest.mark.parametrize("is_aligned", [True, False], ids=["aligned", "reversed"])  # Hopper's kernels, or any


@pytest.fixture(autouse=True)
def _memory_is_given_back(cupy: Any) -> Iterator[None]:
    yield
    cupy.get_default_memory_pool().free_all_blocks()


def layout(is_aligned: bool) -> Any:
    return (lambda x: x) if is_aligned else reversed_keys


@pytest.mark.parametrize(("head_dim", "causal"), [(64, True), (128, True), (64, False)])
def test_a_million_queries_and_keys(cupy: Any, head_dim: int, causal: bool) -> None:
    need_memory(cupy, 4)
    length = 2**20 + 5
    case = Case("million", 1, length, length, 1, 1, head_dim, head_dim, "bfloat16", causal=causal)
    q, k, v = (cupy.asarray(x) for x in case.arrays())
    out, lse = cuflash.forward(q, k, v, causal=causal, return_lse=True)
    for row in (0, 1, 127, 128, 65_535, 65_536, 524_287, length - 2, length - 1):
        num_visible = row + 1 if causal else length
        of_row = Case("row", 1, 1, num_visible, 1, 1, head_dim, head_dim, "bfloat16")
        arrays = host(q[:, row : row + 1]), host(k[:, :num_visible]), host(v[:, :num_visible])
        check(of_row, arrays, host(out[:, row : row + 1]), host(lse[..., row : row + 1]))
    np.testing.assert_allclose(host(cuflash.lse(q, k, causal=causal)), host(lse), rtol=1e-6)


@LAYOUTS
@pytest.mark.parametrize("heads", [(1, 1), (4, 2)])
@pytest.mark.parametrize("queries", [1, 7])
def test_more_batches_than_a_grid_has_in_a_dimension(
    cupy: Any, queries: int, heads: tuple[int, int], is_aligned: bool
) -> None:
    """A few problems, repeated: their results have the same bits each time."""
    few, change = 1000, layout(is_aligned)
    case = Case("batch", few, queries, 20, *heads, 64, 64, "bfloat16", causal=True)
    small = [cupy.asarray(x) for x in case.arrays()]
    number = cupy.arange(BATCH) % few
    many = [change(x[number]) for x in small]
    small = [change(x) for x in small]
    # A fixed number of splits: by default it depends on the number of batches.
    more = {"causal": True, "return_lse": True, "num_splits": 1}
    results = [(*cuflash.forward(*arrays, **more), cuflash.lse(*arrays[:2], causal=True)) for arrays in (small, many)]
    check(case, [host(x) for x in small], *results[0])
    assert identical([x[number] for x in results[0]], results[1])
    gradients = []
    for (q, k, v), (out, lse, _) in zip((small, many), results, strict=True):
        gradients.append(cuflash.backward(out, q, k, v, out, lse, causal=True, deterministic=True))
    assert identical([x[number] for x in gradients[0]], gradients[1])


def test_more_sequences_than_a_grid_has_in_a_dimension(cupy: Any) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 4, BATCH)
    bounds = cupy.asarray(np.append(0, np.cumsum(lengths)).astype("int32"))
    total = int(lengths.sum())
    q, k, v = (cupy.asarray(rng.standard_normal((total, 2, 64)).astype("float16")) for _ in range(3))
    varlen_kwargs = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": 3, "max_seqlen_k": 3}
    out, lse = cuflash.forward(q, k, v, **varlen_kwargs, causal=True, return_lse=True)
    gradients = cuflash.backward(out, q, k, v, out, lse, **varlen_kwargs, causal=True, deterministic=True)
    # All sequences of one length are the batches of a dense call.
    begins = np.append(0, np.cumsum(lengths))[:-1]
    for length in (1, 2, 3):
        rows = cupy.asarray(begins[lengths == length][:, None] + np.arange(length))
        dense = [x[rows] for x in (q, k, v)]
        of_dense, lse_of_dense = cuflash.forward(*dense, causal=True, return_lse=True)
        cupy.testing.assert_allclose(out[rows].astype("f4"), of_dense.astype("f4"), atol=2e-3)
        cupy.testing.assert_allclose(lse.T[rows].swapaxes(1, 2), lse_of_dense, atol=1e-5)
        dense_gradients = cuflash.backward(of_dense, *dense, of_dense, lse_of_dense, causal=True, deterministic=True)
        for got, expected in zip(gradients, dense_gradients, strict=True):
            cupy.testing.assert_allclose(got[rows].astype("f4"), expected.astype("f4"), atol=4e-3)


@LAYOUTS
@pytest.mark.parametrize("queries", [1, 130])
def test_k_and_v_and_their_gradients_of_more_than_2_31_elements(cupy: Any, queries: int, is_aligned: bool) -> None:
    """1024 keys, repeated so often that each weighs 2⁻¹⁵ of its weight alone."""
    need_memory(cupy, 44)
    few, times, change = 1024, 2**15, layout(is_aligned)
    case = Case("keys", 1, queries, few, 1, 1, 80, 80, "bfloat16")
    q, k, v = (cupy.asarray(x) for x in case.arrays())
    q, *many = map(change, (q, *(cupy.tile(x, (1, times, 1, 1)) for x in (k, v))))
    assert many[0].size > 2**31
    out, lse = cuflash.forward(q, *many, return_lse=True)
    exact, exact_lse = oracle.attention64(case, *map(host, (q, k, v)))
    assert np.abs(host(out).astype("f8") - exact).max() < 2**-7 * np.abs(exact).max()
    # A float32 sum of repeated weights rounds the same way each time, by 1.4e-3 in all here.
    for got in (lse, cuflash.lse(q, many[0])):
        np.testing.assert_allclose(host(got), exact_lse + np.log(times), atol=4e-3)
    if not is_aligned and queries == 1:
        return  # the other layout's kernels compute its gradients, too
    dout = cupy.asarray(np.random.default_rng(1).standard_normal(q.shape).astype(q.dtype))
    _, dk, dv = cuflash.backward(dout, q, *many, out, lse)
    _, dk_few, dv_few = oracle.gradients64(case, *map(host, (dout, q, k, v)))
    for got, expected in ((dk, dk_few), (dv, dv_few)):
        unit = np.abs(expected).max()
        for part in (got[:, :few], got[:, few * times // 2 :][:, :few], got[:, -few:]):
            assert np.abs(host(part).astype("f8") * times - expected).max() < 2**-5 * unit


@LAYOUTS
def test_q_and_out_of_more_than_2_31_elements(cupy: Any, is_aligned: bool) -> None:
    need_memory(cupy, 20)
    change = layout(is_aligned)
    case = Case("queries", 1, 1024, 40, 1, 1, 80, 80, "float16")
    q, k, v = (cupy.asarray(x) for x in case.arrays())
    many = change(cupy.tile(q, (1, 2**15, 1, 1)))
    assert many.size > 2**31
    out, lse = cuflash.forward(many, k, v, return_lse=True)
    for begin in (0, 2**14, 2**15 - 1):
        rows = slice(begin * 1024, begin * 1024 + 1024)
        check(case, [host(x) for x in (q, k, v)], out[:, rows], lse[..., rows])
