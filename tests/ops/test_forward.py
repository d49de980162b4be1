"""`cuflash.forward`: shapes and frameworks on NumPy, and on a GPU every kernel against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from libraries import bits, poisoned
from problems import problems

import cuflash
from cuflash.testing import oracle
from cuflash.testing.cases import CASES, Case, numpy_dtype
from cuflash.testing.layouts import host

ALGORITHMS = ("flash2", "flash1", "flashd", "standard")
GPU_ALGORITHMS = [(case, algorithm) for case in CASES for algorithm in ALGORITHMS]


@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_outputs_have_the_rank_of_q(rank: int, algorithm: str) -> None:
    case = Case("rank", 1, 9, 11, 1, 1, 8, 4, "float32", causal=True)
    q, k, v = case.arrays()
    cut = {4: np.s_[:], 3: np.s_[0], 2: np.s_[0, :, 0]}[rank]
    out, lse = cuflash.forward(q[cut], k[cut], v[cut], causal=True, algorithm=algorithm, return_lse=True)
    assert out.shape == {4: (1, 9, 1, 4), 3: (9, 1, 4), 2: (9, 4)}[rank]
    assert lse.shape == cuflash.lse(q[cut], k[cut]).shape == {4: (1, 1, 9), 3: (1, 9), 2: (9,)}[rank]
    oracle.assert_attention(case, (q, k, v), out.reshape(1, 9, 1, 4), lse.reshape(1, 1, 9))


def test_out_is_written_and_returned() -> None:
    q, k, v = Case("out", 2, 5, 7, 4, 2, 8, 6, "float32").arrays()
    out = np.full((2, 4, 5, 6), np.nan, "float32").transpose(0, 2, 1, 3)
    assert cuflash.forward(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, cuflash.forward(q, k, v))


@pytest.mark.parametrize("out_dtype", [None, "float32"])
@pytest.mark.parametrize("dim", [60, 62, 40, 1])
def test_nothing_is_written_beside_an_out_that_is_a_slice(dim: int, out_dtype: str | None, xp: Any) -> None:
    case = Case("slice", 2, 65, 130, 4, 2, 64, dim, "float16", causal=True)
    arrays = case.arrays()
    q, k, v = map(xp.asarray, arrays)
    wide_v, wide = xp.full((*v.shape[:3], 64), xp.nan, v.dtype), xp.full((2, 65, 4, 64), 7.0, out_dtype or v.dtype)
    wide_v[..., :dim] = v
    out, lse = cuflash.forward(
        q, k, wide_v[..., :dim], causal=True, out_dtype=out_dtype, out=wide[..., :dim], return_lse=True
    )
    oracle.assert_attention(case, arrays, host(out).astype(arrays[0].dtype), host(lse), ulps=1)
    assert bool((wide[..., dim:] == 7.0).all())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_out_dtype_keeps_what_16_bits_would_round(dtype: str, xp: Any) -> None:
    case = Case("wide", 2, 100, 130, 4, 2, 40, 72, dtype, causal=True)
    arrays = case.arrays()
    exact, _ = oracle.attention64(case, *arrays)
    wide, narrow = (cuflash.forward(*map(xp.asarray, arrays), causal=True, out_dtype=x) for x in ("float32", None))
    assert (wide.dtype, narrow.dtype) == (np.float32, numpy_dtype(dtype))
    assert bool((wide.astype(narrow.dtype) == narrow).all())
    assert np.abs(host(wide) - exact).max() < np.abs(host(narrow).astype("f8") - exact).max()


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "algorithm"), GPU_ALGORITHMS, ids=[f"{c.name}-{a}" for c, a in GPU_ALGORITHMS])
def test_gpu_agrees_with_float64_and_repeats_bitwise(cupy: Any, case: Case, algorithm: str) -> None:
    arrays = case.arrays()
    q, k, v = map(cupy.asarray, arrays)
    out = poisoned((*q.shape[:3], case.head_dim_v), q.dtype)
    got, lse = cuflash.forward(q, k, v, algorithm=algorithm, return_lse=True, out=out, **case.arguments())
    assert got is out
    oracle.assert_attention(case, arrays, got.get(), lse.get(), ulps=1)
    again, lse_again = cuflash.forward(q, k, v, algorithm=algorithm, return_lse=True, **case.arguments())
    assert bool((bits(again) == bits(got)).all())
    assert bool((bits(lse_again) == bits(lse)).all())


# With head dims of multiples of 8 in 16 bits, rows begin at multiples of 16 bytes, as Hopper's kernels need.
DRAWN = problems(longest=200, widest=256) | problems(longest=200, widest=256, step=8)


@pytest.mark.gpu
@settings(max_examples=150)
@given(DRAWN, st.sampled_from(["flash2", "flash2", "flash1", "flashd"]), st.integers(0, 2**31))
def test_gpu_agrees_on_random_problems(cupy: Any, case: Case, algorithm: str, seed: int) -> None:
    arrays = case.arrays(seed)
    exact, exact_lse = oracle.attention64(case, *arrays)
    naive, naive_lse = oracle.naive(case, *arrays)
    q, k, v = map(cupy.asarray, arrays)
    out = poisoned(exact.shape, q.dtype)
    _, lse = cuflash.forward(q, k, v, algorithm=algorithm, return_lse=True, out=out, **case.arguments())
    # Few numbers have few errors: a floor of a few units keeps chance out of the comparison.
    unit, unit_of_lse = oracle.units_of(case.problem().softmax_scale, *arrays, case.dtype)
    oracle.assert_close("out", out.get(), exact, naive, ulps=4, unit=unit)
    oracle.assert_close("lse", lse.get(), exact_lse, naive_lse, ulps=4, unit=unit_of_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_gpu_hidden_keys_change_nothing_whatever_they_hold(cupy: Any, dtype: str) -> None:
    case = Case("hidden", 1, 70, 300, 2, 1, 64, 64, dtype, window_size=(20, 10), diagonal_offset=100)
    q, k, v = map(cupy.asarray, case.arrays())
    clean = cuflash.forward(q, k, v, return_lse=True, **case.arguments())
    begin, end = case.problem().mask.key_range(0, 70)
    assert (begin, end) == (80, 180)
    for poison in (cupy.nan, cupy.inf):
        for hidden in (np.s_[:, :begin], np.s_[:, end:]):
            k[hidden] = v[hidden] = poison
        poisoned = cuflash.forward(q, k, v, return_lse=True, **case.arguments())
        for one, other in zip(clean, poisoned, strict=True):
            assert bool((bits(one) == bits(other)).all())


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_gpu_visible_nan_comes_out_only_in_rows_that_see_it(cupy: Any, dtype: str, algorithm: str) -> None:
    q, k, v = map(cupy.asarray, Case("nan", 1, 200, 200, 1, 1, 64, 64, dtype).arrays())
    q[0, 3, 0, 5] = q[0, 150, 0, 63] = cupy.nan
    out, lse = cuflash.forward(q, k, v, algorithm=algorithm, return_lse=True)
    assert np.flatnonzero(np.isnan(out.get().astype("f4")).all((0, 2, 3))).tolist() == [3, 150]
    assert np.flatnonzero(np.isnan(out.get().astype("f4")).any((0, 2, 3))).tolist() == [3, 150]
    assert np.flatnonzero(np.isnan(lse.get()).ravel()).tolist() == [3, 150]


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_gpu_visible_nan_stays_out_of_rows_beside_it_that_see_nothing(cupy: Any, dtype: str, algorithm: str) -> None:
    q, k, v = map(cupy.asarray, Case("blind", 1, 64, 32, 2, 1, 64, 40, dtype).arrays())
    k[0, 0] = v[0, 0] = cupy.nan
    out, lse = cuflash.forward(q, k, v, causal=True, algorithm=algorithm, return_lse=True)
    assert not out[:, :32].any()
    assert bool(cupy.isneginf(lse[..., :32]).all())
    assert bool(cupy.isnan(out[:, 32:]).all())


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ["flash2", "flash1", "flashd"])
@pytest.mark.parametrize("pattern", ["rising", "falling", "equal", "alternating", "one_large"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_gpu_large_scores_stay_exact(cupy: Any, dtype: str, pattern: str, algorithm: str) -> None:
    rng, n = np.random.default_rng(1), 400
    height = {
        "rising": np.linspace(-1, 1, n),
        "falling": np.linspace(1, -1, n),
        "equal": np.ones(n),
        "alternating": np.where(np.arange(n) % 2, 1.0, -1.0),
        "one_large": np.where(np.arange(n) == 137, 1.0, 0.0),
    }[pattern]
    q = np.ones((1, 70, 1, 16)) * rng.uniform(0.5, 1.0, (1, 70, 1, 1))
    k = np.ones((1, n, 1, 16)) * 625.0 * height[None, :, None, None]  # scores up to 10^4
    v = rng.standard_normal((1, n, 1, 16))
    q, k, v = (x.astype(numpy_dtype(dtype)) for x in (q, k, v))
    case = Case("large", 1, 70, n, 1, 1, 16, 16, dtype, softmax_scale=1.0)
    exact, exact_lse = oracle.attention64(case, q, k, v)
    # Compared with scores in float32: rounding scores of 10^4 to 16 bits is too coarse.
    wide = replace(case, dtype="float32")
    naive, naive_lse = oracle.naive(wide, *(x.astype("f4") for x in (q, k, v)))
    arrays = map(cupy.asarray, (q, k, v))
    out, lse = cuflash.forward(*arrays, algorithm=algorithm, softmax_scale=1.0, return_lse=True)
    assert np.isfinite(out.get().astype("f4")).all()
    # The naive result is exact here where one key has all the weight; two TF32 numbers hold v to 2^-22, 2 units, and
    # the reciprocals of flash1 and flashd are off by one more in each of the tiles.
    ulps = 4 if algorithm == "flash2" else 16
    oracle.assert_close("out", out.get(), exact, naive, ulps=ulps)
    oracle.assert_close("lse", lse.get(), exact_lse, naive_lse, ulps=2)


MANY: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (2600, 20)},
    "softcap": {"softcap": 15.0},
    "rising": {},
    "falling": {"causal": True},
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", MANY)
@pytest.mark.parametrize(
    "head_dims", [(32, 32), (48, 48), (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gpu_many_keys_agree_with_float64(cupy: Any, dtype: str, head_dims: tuple[int, int], name: str) -> None:
    case = Case("many", 1, 200, 2900, 4, 2, *head_dims, dtype, **MANY[name])
    q, k, v = case.arrays()
    heights = {"rising": np.linspace(0, 20, 2900), "falling": np.linspace(20, 0, 2900)}.get(name)
    if heights is not None:  # maxima rise or fall from tile to tile
        k = (k * heights[None, :, None, None]).astype(k.dtype)
    out = poisoned((1, 200, 4, head_dims[1]), numpy_dtype(dtype))
    lse = cuflash.lse(*map(cupy.asarray, (q, k)), **case.arguments())
    arrays = map(cupy.asarray, (q, k, v))
    _, lse_of_forward = cuflash.forward(*arrays, return_lse=True, out=out, **case.arguments())
    oracle.assert_attention(case, (q, k, v), out.get(), ulps=2)
    for got in (lse, lse_of_forward):
        oracle.assert_attention(case, (q, k, v), None, got.get(), ulps=4)


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [1.0, 30.0, 1e3, 1e5, 1e8])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_gpu_softcap_of_any_size_is_exact(cupy: Any, dtype: str, softcap: float) -> None:
    case = Case("cap", 1, 100, 150, 2, 2, 64, 64, dtype, softcap=softcap)
    arrays = case.arrays()
    exact, exact_lse = oracle.attention64(case, *arrays)
    naive, naive_lse = oracle.naive(case, *arrays)
    out, lse = cuflash.forward(*map(cupy.asarray, arrays), softcap=softcap, return_lse=True)
    oracle.assert_close("out", out.get(), exact, naive)
    # lse is a float32 result of 16-bit inputs too: an error of 1e-6 in a score is an error of 1e-6 in lse.
    oracle.assert_close("lse", lse.get(), exact_lse, naive_lse, ulps=8, unit=8.0)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_gpu_float32_error_is_at_most_four_times_the_unfused_float32_error(cupy: Any, head_dim: int) -> None:
    case = Case("fp32", 1, 300, 2000, 1, 1, head_dim, head_dim, "float32")
    arrays = case.arrays()
    exact, _ = oracle.attention64(case, *arrays)
    naive, _ = oracle.naive(case, *arrays)
    out = cuflash.forward(*map(cupy.asarray, arrays)).get()
    oracle.assert_close("out", out, exact, naive + (naive - exact), ulps=0.0)  # twice the rule's 2 times


@pytest.mark.gpu
def test_gpu_a_row_does_not_depend_on_the_other_rows_or_the_batch(cupy: Any) -> None:
    q, k, v = map(cupy.asarray, Case("rows", 3, 300, 300, 4, 2, 128, 128, "bfloat16").arrays())
    whole, lse = cuflash.forward(q, k, v, return_lse=True)
    one, one_lse = cuflash.forward(q[1:2, 130:131], k[1:2], v[1:2], return_lse=True)
    assert bool((bits(one[0, 0]) == bits(cupy.ascontiguousarray(whole[1, 130]))).all())
    assert bool((bits(one_lse[0, :, 0].copy()) == bits(lse[1, :, 130].copy())).all())
