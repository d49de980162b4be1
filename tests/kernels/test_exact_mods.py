"""Masks by integers beyond int32, by float64 and by uint64 on a GPU equal masks by exact numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from exact_mods import DIFFERENCES, MASKS, PLACES, ROWS, TIMES, exact, with_arrays

import cuflash

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", MASKS)
def test_masks_show_what_exact_numbers_show(cupy: Any, name: str, dtype: str) -> None:
    visible, mask_mod = exact(MASKS[name]), with_arrays(MASKS[name], cupy.asarray)
    zeros = cupy.zeros((1, ROWS, 1, 32), dtype)
    v = cupy.zeros((1, ROWS, 1, 32), dtype)
    v[0, :, 0, :ROWS] = cupy.eye(ROWS, dtype=dtype)
    out, lse = cuflash.forward(zeros, zeros, v, return_lse=True, mask_mod=mask_mod)
    np.testing.assert_allclose(np.exp(lse.get()).ravel(), visible.sum(axis=1), rtol=1e-5)
    np.testing.assert_array_equal(out.get()[0, :, 0, :ROWS] > 0, visible)
    _, _, dv = cuflash.backward(cupy.ones_like(v), zeros, zeros, v, out, lse, mask_mod=mask_mod)
    np.testing.assert_array_equal(dv.get()[0, :, 0, 0] > 0, visible.any(axis=0))


def test_differences_of_times_are_those_of_numpy_in_scores_and_gradients(cupy: Any) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, ROWS, 1, 32)).astype(np.float32) for _ in range(4)]

    def results(put: Any) -> list[Any]:
        q, k, v, dout = map(put, arrays)
        times = put(TIMES)

        def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return np.where(times[j] <= times[i], score - 0.01 * (times[i] - times[j]), -np.inf)

        out, lse = cuflash.forward(q, k, v, return_lse=True, score_mod=score_mod)
        *of_inputs, of_times = cuflash.backward(dout, q, k, v, out, lse, score_mod=score_mod, captured_grads=(times,))
        return [cupy.asnumpy(x) for x in (out, lse, *of_inputs, *of_times)]

    assert len(PLACES) == len(TIMES)
    for x, y in zip(results(cupy.asarray), results(np.asarray), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_differences_of_large_values_are_exact_in_scores(cupy: Any, name: str) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, ROWS, 1, 32)).astype(np.float32) for _ in range(4)]

    def results(put: Any, **change: Any) -> list[Any]:
        q, k, v, dout = map(put, arrays)
        out, lse = cuflash.forward(q, k, v, return_lse=True, **change)
        return [cupy.asnumpy(x) for x in (out, lse, *cuflash.backward(dout, q, k, v, out, lse, **change))]

    bias = (0.1 * (PLACES - PLACES[:, None])).astype(np.float32)
    computed = results(cupy.asarray, score_mod=with_arrays(DIFFERENCES[name], cupy.asarray))
    for x, y in zip(computed, results(np.asarray, bias=bias), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
