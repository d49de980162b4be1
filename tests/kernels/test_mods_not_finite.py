"""Scores, products and sinks that are not finite, on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mod_table import of_lengths
from plans import for_any_gpu

import cuflash
from cuflash.testing.cases import Case, numpy_dtype
from cuflash.testing.functions import FUNCTIONS, Arguments, Put, joined, softcap
from cuflash.testing.layouts import host
from cuflash.testing.mod_oracle import OracleInputs, OracleMods, check, check_gradients
from cuflash.testing.mods import without_grads

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("new_memory_holds_nan")]

ROW = 70  # it sees every second of the first 40 keys


def dout_of(case: Case) -> Any:
    return np.random.default_rng(3).standard_normal(case.out_shape()).astype(numpy_dtype(case.dtype))


def nan_row(*more: Any) -> Any:
    """Returns the maker of a NaN among the scores of one row, under a mask that hides most keys from it."""

    def make(put: Put, case: Case) -> Arguments:
        bias = np.zeros((case.seqlen_q, case.seqlen_k), np.float32)
        bias[ROW, 4] = np.nan

        def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
            return (q_idx != ROW) | ((k_idx < 40) & (k_idx % 2 == 0))

        return {"bias": put(bias), "mask_mod": mask_mod}

    return joined(make, *more)


@pytest.mark.parametrize("more", [(), (softcap,)], ids=["products", "slopes"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_row_that_is_nan_leaves_keys_alone_that_it_does_not_see(
    cupy: Any, head_dim: int, more: tuple[Any, ...]
) -> None:
    """Gradients of the row and of the keys that it sees are NaN; all others are finite."""
    case = of_lengths((200, 300), dtype="bfloat16", head_dim=head_dim, head_dim_v=head_dim)
    visible, others = np.arange(0, 40, 2), np.arange(case.seqlen_q) != ROW
    hidden = ~np.isin(np.arange(case.seqlen_k), visible)
    there, mod_kwargs = [cupy.asarray(x) for x in case.arrays()], without_grads(nan_row(*more)(cupy.asarray, case))
    with for_any_gpu():  # not sm90 kernels: see limits.md
        out, lse = cuflash.forward(*there, return_lse=True, **mod_kwargs)
        assert np.isnan(host(lse)[:, :, ROW]).all()
        for deterministic in (False, True):
            more_kwargs = {"deterministic": deterministic, **mod_kwargs}
            gradients = cuflash.backward(cupy.asarray(dout_of(case)), *there, out, lse, **more_kwargs)
            dq, dk, dv = (host(x).astype("f4") for x in gradients)
            assert np.isnan(dq[:, ROW]).all()
            assert np.isfinite(dq[:, others]).all()
            for of_keys in (dk, dv):
                assert np.isnan(of_keys[:, visible]).all()
                assert np.isfinite(of_keys[:, hidden]).all()


@pytest.mark.parametrize("head_dim", [64, 256])
def test_a_product_of_minus_infinity_is_not_hidden(cupy: Any, head_dim: int) -> None:
    """A score_mod may map a product of -inf to any score, in forward and backward alike."""
    case = of_lengths((200, 200), dtype="bfloat16", head_dim=head_dim, head_dim_v=head_dim, causal=True)
    q, k, v = case.arrays()
    q[..., 0] = k[..., 0] = 0
    q[:, ROW] = 0
    q[:, ROW, :, 0], k[:, 20, :, 0] = 3e38, -3e38
    there, dout = [cupy.asarray(x) for x in (q, k, v)], dout_of(case)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return np.where(score < -1000.0, 2.0, score)

    keywords = {"score_mod": score_mod, "causal": True}
    with for_any_gpu():  # not sm90 kernels: see limits.md
        out, lse = cuflash.forward(*there, return_lse=True, **keywords)
        dv = cuflash.backward(cupy.asarray(dout), *there, out, lse, **keywords)[2]
    inputs, oracle_mods = OracleInputs.dense(case, (q, k, v)), OracleMods.from_kwargs({"score_mod": score_mod})
    check(inputs, oracle_mods, out, lse)
    check_gradients(inputs, oracle_mods, dout, None, (None, None, dv))  # dq and dk are sums of numbers near 3e38


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_functions_may_be_nan_where_keys_are_hidden(cupy: Any, head_dim: int) -> None:
    """The score_mods are NaN for the keys that the causal mask hides."""
    case = of_lengths((200, 200), dtype="bfloat16", head_dim=head_dim, head_dim_v=head_dim, causal=True)

    def bounded(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return 50.0 * np.tanh((score - np.log(q_idx - k_idx + 1.0)) / 50.0)

    def unbounded(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return score - np.log(q_idx - k_idx + 1.0)

    there, dout = [cupy.asarray(x) for x in case.arrays()], cupy.asarray(dout_of(case))
    for keywords in ({"score_mod": bounded}, {"score_mod": unbounded, "softcap": 30.0}):
        out, lse = cuflash.forward(*there, return_lse=True, causal=True, **keywords)
        gradients = cuflash.backward(dout, *there, out, lse, causal=True, **keywords)
        for x in (out, lse, *gradients):
            assert np.isfinite(host(x).astype("f4")).all()


def test_sinks_that_are_not_finite(cupy: Any, any_gpu: bool) -> None:
    """Results equal NumPy's; the first rows of `striped` see only the sink."""
    case = of_lengths((130, 150))
    # No NaN with sm90 kernels: see limits.md.
    sinks = np.array([np.inf, -np.inf, np.nan if any_gpu else 0.25, 0.5], np.float32)
    results = []
    for put in (np.asarray, cupy.asarray):
        mod_kwargs = FUNCTIONS["striped"](put, case) | {"sinks": put(sinks)}
        there = [put(x) for x in case.arrays()]
        out, lse = cuflash.forward(*there, return_lse=True, **mod_kwargs)
        *gradients, dsinks = cuflash.backward(
            put(dout_of(case)), *there, out, lse, captured_grads=(mod_kwargs["sinks"],), **mod_kwargs
        )
        results.append([host(x).astype("f4") for x in (out, lse, *gradients, *dsinks)])
    expected, result = results
    assert not result[0][:, :, 0].any()
    assert np.isposinf(result[1][:, 0]).all()
    assert np.isnan(result[1][:, 2]).all() == any_gpu
    for one, other in zip(result, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0.01, atol=0.02)
