"""`cuflash.lse`: the lse of forward, without v."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest

import cuflash
from cuflash.bench.cases import CASES, Case


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_numpy_lse_is_that_of_forward(case: Case) -> None:
    q, k, v = case.arrays()
    _, wanted = cuflash.forward(q, k, v, return_lse=True, **case.arguments())
    np.testing.assert_array_equal(cuflash.lse(q, k, **case.arguments()), wanted)


@pytest.mark.parametrize("rank", [2, 3])
def test_lse_has_the_rank_of_q_less_one(rank: int) -> None:
    q, k, _ = Case("rank", 1, 9, 11, 1, 1, 8, 8, "float32").arrays()
    cut = {3: np.s_[0], 2: np.s_[0, :, 0]}[rank]
    assert cuflash.lse(q[cut], k[cut]).shape == {3: (1, 9), 2: (9,)}[rank]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gpu_lse_agrees_with_float64_and_with_forward(cupy: Any, case: Case) -> None:
    arrays = case.arrays()
    q, k, v = map(cupy.asarray, arrays)
    lse = cuflash.lse(q, k, **case.arguments())
    oracle.assert_attention(case, arrays, None, lse.get(), ulps=1)
    assert bool((cuflash.lse(q, k, **case.arguments()) == lse).all())
    _, other = cuflash.forward(q, k, v, return_lse=True, **case.arguments())
    oracle.assert_attention(case, arrays, None, other.get(), ulps=1)
