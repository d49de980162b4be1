"""Limits of large and small numbers, and the reach of NaN, as the docstrings of `forward` and `backward` state them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from plans import for_any_gpu

import cuflash
from cuflash.errors import UnsupportedError
from cuflash.planning import device
from cuflash.testing import oracle
from cuflash.testing.cases import Case, numpy_dtype
from cuflash.testing.layouts import host, identical, reversed_keys

Array = np.ndarray[Any, Any]
EPS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-22}
# Aligned arrays take Hopper's kernels, reversed ones the kernels for any GPU. One query takes the decoding kernels.
LAYOUTS = {"aligned": lambda x: x, "reversed": reversed_keys}


def of_scores(case: Case, height: float) -> tuple[Array, Array, Array]:
    """Returns arrays with scores of about this height, which differ by about 1 from key to key if the dtype allows."""
    rng, large = np.random.default_rng(int(abs(height))), min(abs(height) ** 0.5, 6e4)
    q, k, v = (rng.standard_normal(x.shape) for x in case.arrays())
    k /= np.sqrt(case.head_dim)
    q[..., 0] = np.sign(height) * (1.0 + rng.random(q.shape[:-1])) * large / 2.0
    k[..., 0] = abs(height) / large
    q, k, v = (x.astype(numpy_dtype(case.dtype)) for x in (q, k, v))
    return q, k, v


@pytest.mark.parametrize("height", [1e2, -1e4, 1e5, -1e6, 1e6, 1e8, -1e8])
@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize(("layout", "algorithm", "queries"), [
    ("aligned", "flash2", 100), ("reversed", "flash2", 100), ("aligned", "flash2", 1), ("aligned", "flash1", 100),
    ("aligned", "flashd", 100),
])  # fmt: skip
def test_weights_are_off_by_a_part_that_grows_with_the_scores(
    layout: str, algorithm: str, queries: int, dtype: str, height: float, xp: Any
) -> None:
    case = Case("scores", 1, queries, 300, 2, 1, 64, 64, dtype, softmax_scale=1.0)
    arrays = of_scores(case, height)
    exact, exact_lse = oracle.attention64(case, *arrays)
    there = [LAYOUTS[layout](xp.asarray(x)) for x in arrays]
    out, lse = map(host, cuflash.forward(*there, softmax_scale=1.0, algorithm=algorithm, return_lse=True))
    assert np.isfinite(out.astype("f4")).all()
    largest = np.abs(arrays[2].astype("f8")).max()
    assert np.abs(out.astype("f8") - exact).max() <= (1e-7 * abs(height) + 2 * EPS[dtype]) * largest
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-6)


@pytest.mark.parametrize("height", [1e2, -1e4, 1e5, -1e6, 1e6])
@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_weights_of_backward_are_off_by_more(head_dim: int, layout: str, dtype: str, height: float, xp: Any) -> None:
    case = Case("scores", 1, 100, 200, 2, 1, head_dim, head_dim, dtype, softmax_scale=1.0)
    q, k, v = of_scores(case, height)
    dout = np.random.default_rng(2).standard_normal(q.shape).astype(q.dtype)
    exact = oracle.gradients64(case, dout, q, k, v)
    there = [LAYOUTS[layout](xp.asarray(x)) for x in (q, k, v)]
    out, lse = cuflash.forward(*there, softmax_scale=1.0, return_lse=True)
    gradients = cuflash.backward(xp.asarray(dout), *there, out, lse, softmax_scale=1.0)
    # Without dq: weights that cancel are multiplied there by a k as large as the scores.
    for name, got, expected in zip(("dk", "dv"), gradients[1:], exact[1:], strict=True):
        off = np.abs(host(got).astype("f8") - expected).max() / np.abs(expected).max()
        assert off <= 4e-7 * abs(height) + 4 * EPS[dtype], (name, off)


@pytest.mark.parametrize("keys", [1, 200, 1000])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_v_may_be_so_large_that_all_keys_together_are_in_range(dtype: str, layout: str, keys: int, xp: Any) -> None:
    case = Case("large", 1, 100, keys, 2, 1, 64, 64, dtype)
    q, k, v = case.arrays()
    v = np.full_like(v, 3.3e38 / keys)
    out = host(cuflash.forward(*(LAYOUTS[layout](xp.asarray(x)) for x in (q, k, v)))).astype("f8")
    np.testing.assert_allclose(out, float(v.flat[0]), rtol=max(1e-5, EPS[dtype]))


@pytest.mark.gpu
def test_gpu_of_bfloat16_on_hopper_v_may_be_any_number(cupy: Any) -> None:
    if device.query(0).arch != "sm_90":
        pytest.skip("kernels of Hopper's")
    case = Case("largest", 1, 100, 1000, 2, 1, 64, 64, "bfloat16")
    q, k, v = case.arrays()
    v = np.full_like(v, 3.3e38)
    out = cuflash.forward(*map(cupy.asarray, (q, k, v)))
    np.testing.assert_array_equal(host(out).astype("f8"), float(v.flat[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("operand", [0, 1, 2])
def test_gpu_the_last_numbers_of_float32_count_as_infinite(cupy: Any, operand: int) -> None:
    case = Case("top", 1, 100, 3, 1, 1, 64, 64, "float32")
    for top, is_finite in ((3.4e38, True), (3.402e38, False)):
        arrays = list(case.arrays())
        arrays[operand] = np.zeros_like(arrays[operand])
        arrays[operand][0, :1, 0, :1] = top
        if operand < 2:  # keeps the score small
            arrays[1 - operand] = arrays[1 - operand] * np.float32(1e-38)
        out = host(cuflash.forward(*map(cupy.asarray, arrays)))
        assert np.isfinite(out).all() == is_finite


@pytest.mark.parametrize("queries", [1, 100])
@pytest.mark.parametrize("exponent", [-100, -113, -120])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_small_numbers_of_bfloat16_are_right_to_1e_36(head_dim: int, exponent: int, queries: int, xp: Any) -> None:
    case = Case("small", 1, queries, 300, 2, 1, head_dim, head_dim, "bfloat16")
    q, k, v = case.arrays()
    v = (v.astype("f4") * np.float32(2.0**exponent)).astype(v.dtype)
    exact, _ = oracle.attention64(case, q, k, v)
    out = host(cuflash.forward(*map(xp.asarray, (q, k, v)))).astype("f8")
    assert np.abs(out - exact).max() <= 1e-36 + 2 * EPS["bfloat16"] * np.abs(exact).max()


REACH = 128  # rows, and keys: no tile of the kernels for any GPU is larger
PADDING = 7, 5  # packed rows before the sequence and after it, so that its tiles begin anywhere in memory
DIMS = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (512, 512))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [(300, 40), (0, 0)], ids=str)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_gpu_nan_hidden_in_v_only_reaches_near_queries_and_repeats(
    cupy: Any, dtype: str, dims: tuple[int, int], packed: bool, window: tuple[int, int]
) -> None:
    """It tests the kernels for any GPU; `kernels/test_softmax_sm90.py` tests Hopper's kernels by their tiles."""
    length, keys = 2500, np.array([0, 200, 777, 1490])
    case = Case("near", 1 if packed else 2, length, length, 4, 2, *dims, dtype, window_size=window)
    bounds = cupy.asarray(np.array([PADDING[0], PADDING[0] + length], "i4"))
    varlen_kwargs = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds} if packed else {}
    keywords, rows = {**case.arguments(), **varlen_kwargs, "num_splits": 1}, np.arange(length)
    visible, near = case.problem().mask.visible(rows, rows), np.zeros(length, bool)
    for key in keys:
        rows_near = np.flatnonzero(visible[:, np.abs(rows - key) < REACH].any(axis=1))
        near |= (np.abs(rows[:, None] - rows_near) < REACH).any(axis=1)
    assert near.mean() < 0.9

    def there(x: Array) -> Any:
        return cupy.asarray(np.pad(x[0], (PADDING, (0, 0), (0, 0))) if packed else x)

    def attended(*arrays: Any) -> tuple[Array, Array]:
        out, lse = map(host, cuflash.forward(*arrays, return_lse=True, **keywords))
        used = slice(PADDING[0], PADDING[0] + length)
        return (out[None, used], lse[None, :, used]) if packed else (out, lse)

    q, k, v = case.arrays()
    bad_v = v.copy()
    bad_v[:, keys, :, 5] = np.nan
    q, k, v, bad_v = map(there, (q, k, v, bad_v))
    with for_any_gpu():
        try:
            variant = cuflash.plan(q, k, v, **keywords).variant
        except UnsupportedError as error:  # the widest head dims need more shared memory than some GPUs have
            pytest.skip(str(error))
        assert variant is not None
        assert variant.source == "sm80/forward.cu"
        clean, clean_lse = attended(q, k, v)
        poisoned = [attended(q, k, bad_v) for _ in range(3)]
    for out, lse in poisoned:
        assert np.isnan(out[:, visible[:, keys].any(axis=1), :, 5]).all()
        assert identical([lse, out[:, ~near]], [clean_lse, clean[:, ~near]])
        assert identical([np.delete(out, 5, axis=3), out], [np.delete(clean, 5, axis=3), poisoned[0][0]])
