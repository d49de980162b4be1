"""`cuflash.backward` as it is called: ranks, states of any origin, dlse. Its numbers: `test_reference_backward`."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest

import cuflash
from cuflash.bench.cases import Case
from cuflash.errors import ProblemError, UnsupportedError

CASE = Case("backward", 1, 40, 50, 1, 1, 16, 8, "float32", causal=True, softcap=3.0)


def inputs() -> tuple[Any, ...]:
    """q, k, v, out, lse, dout, dlse."""
    rng = np.random.default_rng(3)
    q, k, v = CASE.arrays()
    out, lse = cuflash.forward(q, k, v, return_lse=True, **CASE.arguments())
    return q, k, v, out, lse, rng.standard_normal(out.shape).astype("f4"), rng.standard_normal(lse.shape).astype("f4")


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_gradients_have_the_shapes_of_their_operands_in_every_rank(rank: int) -> None:
    q, k, v, out, lse, dout, dlse = inputs()
    exact = oracle.gradients64(CASE, dout, q, k, v, dlse)
    cut = {4: np.s_[:], 3: np.s_[0], 2: np.s_[0, :, 0]}[rank]
    lse, dlse = ({4: x, 3: x[0], 2: x[0, 0]}[rank] for x in (lse, dlse))
    gradients = cuflash.backward(
        dout[cut], q[cut], k[cut], v[cut], out[cut], lse, dlse=dlse, deterministic=True, **CASE.arguments()
    )
    for got, wanted in zip(gradients, exact, strict=True):
        np.testing.assert_allclose(got, wanted[cut], atol=2e-5)


@pytest.mark.parametrize("algorithm", ["standard", "flash1", "flashd"])
def test_gradients_do_not_depend_on_the_algorithm_of_forward(algorithm: str) -> None:
    q, k, v, out, lse, dout, _ = inputs()
    wanted = cuflash.backward(dout, q, k, v, out, lse, **CASE.arguments())
    out, lse = cuflash.forward(q, k, v, algorithm=algorithm, return_lse=True, **CASE.arguments())
    got = cuflash.backward(dout, q, k, v, out, lse, **CASE.arguments())
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_deterministic_is_a_bool() -> None:
    q, k, v, out, lse, dout, _ = inputs()
    with pytest.raises(ProblemError, match="deterministic=1 is a int"):
        cuflash.backward(dout, q, k, v, out, lse, deterministic=1, **CASE.arguments())  # type: ignore[arg-type]


@pytest.mark.gpu
def test_gpu_arrays_are_refused_with_the_way_out() -> None:
    import cupy

    q, k, v, out, lse, dout, _ = map(cupy.asarray, inputs())
    with pytest.raises(UnsupportedError, match="pass NumPy arrays"):
        cuflash.backward(dout, q, k, v, out, lse, **CASE.arguments())
