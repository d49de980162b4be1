"""`cuflash.lse`: the lse of forward, without v. `test_forward` has its ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.testing import oracle
from cuflash.testing.cases import CASES, Case
from cuflash.testing.layouts import host


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_lse_agrees_with_float64_and_repeats_bitwise(case: Case, xp: Any) -> None:
    arrays = case.arrays()
    q, k, v = map(xp.asarray, arrays)
    lse = cuflash.lse(q, k, **case.arguments())
    oracle.assert_attention(case, arrays, None, host(lse), ulps=1)
    assert bool((cuflash.lse(q, k, **case.arguments()) == lse).all())
    if xp is np:  # on a GPU, other tiles add up in another order
        np.testing.assert_array_equal(lse, cuflash.forward(q, k, v, return_lse=True, **case.arguments())[1])
