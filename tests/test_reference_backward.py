"""The gradients in NumPy: against float64, finite differences, the identities of softmax, and merged halves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Array, assert_close, attention64, gradients64, naive_gradients
from test_reference import LAYOUTS, MASKED, ULPS, cases, one_head_for_all, parts_of, same

from cuflash import reference
from cuflash.bench.cases import CASES, Case, numpy_dtype
from cuflash.problem import ALGORITHMS

pytestmark = pytest.mark.filterwarnings("error")
SETTINGS = settings(deadline=None, derandomize=True, max_examples=100)
# why: a handful of terms may cancel, and then a unit of the sum is smaller than a unit of its terms.
DRAWN_ULPS = {"float16": 4, "bfloat16": 4} | {"float32": 16, "float64": 64}


def upstream(case: Case, seed: int = 7) -> tuple[Array, Array]:
    """`(dout, dlse)`: dout (b, sq, hq, dv) in the case's dtype, dlse (b, hq, sq) in that of lse."""
    rng = np.random.default_rng(seed)
    dout = rng.standard_normal((case.batch, case.seqlen_q, case.heads_q, case.head_dim_v))
    dlse = rng.standard_normal((case.batch, case.heads_q, case.seqlen_q))
    return dout.astype(numpy_dtype(case.dtype)), dlse.astype("float64" if case.dtype == "float64" else "float32")


def gradients(case: Case, q: Array, k: Array, v: Array, dout: Array, dlse: Array | None) -> tuple[Array, Array, Array]:
    out, lse = reference.forward(case.problem(), q, k, v)
    return reference.backward(case.problem(), dout, q, k, v, out, lse, dlse)


@pytest.mark.parametrize("with_dlse", [False, True], ids=["dout", "dout+dlse"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_float64(case: Case, with_dlse: bool) -> None:
    arrays, (dout, dlse) = case.arrays(), upstream(case)
    given_dlse = dlse if with_dlse else None
    got = gradients(case, *arrays, dout, given_dlse)
    exact = gradients64(case, dout, *arrays, given_dlse)
    near = naive_gradients(case, dout, *arrays, given_dlse)
    for name, x, *triple in zip(("dq", "dk", "dv"), arrays, got, exact, near, strict=True):
        assert triple[0].dtype == x.dtype
        assert_close(f"{case.name} {name}", *triple, ulps=ULPS[case.dtype])
    same(gradients(case, *arrays, dout, given_dlse), got)  # bitwise repeatable


@SETTINGS
@given(cases, st.tuples(*5 * [st.sampled_from(LAYOUTS)]), st.integers(1, 8), st.integers(1, 8), st.integers(0, 99))
def test_any_shape_stride_mask_and_tile(case: Case, layouts: Any, block_q: int, block_k: int, seed: int) -> None:
    (dout, dlse), problem = upstream(case, seed), case.problem()
    q, k, v, dout = (layout(x) for layout, x in zip(layouts[:4], (*case.arrays(seed), dout), strict=True))
    out, lse = reference.forward(problem, q, k, v)
    if layouts[4] is not one_head_for_all:  # which is the one that makes other numbers
        out = layouts[4](out)
    kept = [x.copy() for x in (q, k, v, dout, out, lse, dlse)]
    got = reference.backward(problem, dout, q, k, v, out, lse, dlse, block_q=block_q, block_k=block_k)
    same((q, k, v, dout, out, lse, dlse), tuple(kept))  # the caller's arrays are unchanged
    exact, near = gradients64(case, dout, q, k, v, dlse), naive_gradients(case, dout, q, k, v, dlse)
    for name, *triple in zip(("dq", "dk", "dv"), got, exact, near, strict=True):
        assert_close(name, *triple, ulps=DRAWN_ULPS[case.dtype])


DIFFERENCED = [
    Case("full", 1, 4, 5, 2, 2, 3, 2, "float64"),
    Case("group", 1, 4, 5, 4, 2, 2, 3, "float64", causal=True),
    Case("softcap", 1, 4, 6, 2, 1, 3, 3, "float64", softcap=0.7, softmax_scale=1.3),
    Case("softcap_causal", 1, 4, 6, 1, 1, 3, 3, "float64", causal=True, softcap=2.0),
    Case("window", 2, 6, 5, 1, 1, 2, 2, "float64", window_size=(1, 2), diagonal_offset=1),
    Case("rows_that_see_nothing", 1, 7, 4, 2, 1, 2, 2, "float64", causal=True),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("case", DIFFERENCED, ids=lambda case: case.name)
def test_finite_differences(case: Case, algorithm: str) -> None:
    arrays, (dout, dlse) = case.arrays(), upstream(case)
    problem = case.problem(algorithm)

    def loss() -> float:
        out, lse = reference.forward(problem, *arrays)
        return float((dout * out).sum() + (dlse * np.where(np.isneginf(lse), 0, lse)).sum())

    got = gradients(case, *arrays, dout, dlse)
    step = 1e-5
    for name, x, dx in zip(("dq", "dk", "dv"), arrays, got, strict=True):
        wanted = np.zeros_like(x)
        for at in np.ndindex(x.shape):
            value = x[at]
            x[at] = value + step
            above = loss()
            x[at] = value - step
            wanted[at] = (above - loss()) / (2 * step)
            x[at] = value
        np.testing.assert_allclose(dx, wanted, rtol=1e-6, atol=1e-8, err_msg=name)


@pytest.mark.parametrize("mask", [{}, *MASKED], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_identities(mask: dict[str, Any], softcap: float) -> None:
    """Rows of p sum to 1 and rows of ds to dlse; without a softcap that is seen in the sums over keys of dv and dk."""
    case = Case("", 2, 24, 24, 4, 2, 8, 6, "float64", softcap=softcap, **mask)
    (q, k, v), (dout, dlse) = case.arrays(), upstream(case)
    sees = slice(*case.problem().mask.row_range(0, 24))

    def over_group(x: Array) -> Array:  # (b, rows, hq, n) -> (b, hkv, n)
        return x.sum(axis=1).reshape(2, 2, 2, -1).sum(axis=2)

    dq, dk, dv = gradients(case, q, k, v, dout, None)
    np.testing.assert_allclose(dv.sum(axis=1), over_group(dout[:, sees]), rtol=1e-10, atol=1e-12)
    if not softcap:
        np.testing.assert_allclose(dk.sum(axis=1), 0, atol=1e-12)
        _, dk, _ = gradients(case, q, k, v, dout, dlse)
        wanted = over_group((dlse.transpose(0, 2, 1)[..., None] * q)[:, sees]) / np.sqrt(8)
        np.testing.assert_allclose(dk.sum(axis=1), wanted, rtol=1e-10, atol=1e-12)
    # scores do not change when q grows by as much as k shrinks
    dq, dk, _ = gradients(case, q, k, v, dout, dlse)
    np.testing.assert_allclose((dq * q).sum(), (dk * k).sum(), rtol=1e-10)


@pytest.mark.parametrize("mask", MASKED, ids=str)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_nobody_sees_gets_and_gives_nothing(mask: dict[str, Any], poison: float) -> None:
    case = Case("", 2, 24, 24, 4, 2, 8, 8, "float32", **mask)
    (q, k, v), (dout, dlse) = case.arrays(), upstream(case)
    problem = case.problem()
    clean = gradients(case, q, k, v, dout, dlse)
    keys, rows = problem.mask.key_range(0, 24), problem.mask.row_range(0, 24)
    for x, (begin, end) in ((q, rows), (k, keys), (v, keys), (dout, rows)):
        x[:, :begin], x[:, end:] = poison, poison
    dlse[:, :, : rows[0]], dlse[:, :, rows[1] :] = poison, poison
    got = gradients(case, q, k, v, dout, dlse)
    same(got, clean)
    for dx, (begin, end) in zip(got, (rows, keys, keys), strict=True):
        assert not dx[:, np.r_[0:begin, end:24]].any()


@pytest.mark.parametrize("arguments", [{"diagonal_offset": -100, "causal": True}, {"diagonal_offset": 10**9}])
def test_all_hidden_is_all_zero(arguments: dict[str, Any]) -> None:
    case = Case("", 1, 9, 7, 2, 1, 4, 4, "float16", window_size=(2, 2), **arguments)
    for dx in gradients(case, *case.arrays(), *upstream(case)):
        assert not dx.any()


def test_nan_that_is_seen_is_not_hidden() -> None:
    case = Case("", 1, 20, 20, 1, 1, 4, 4, "float32", causal=True)
    (q, k, v), (dout, _) = case.arrays(), upstream(case)
    dout[0, 7, 0, 1] = np.nan
    dq, dk, dv = gradients(case, q, k, v, dout, None)
    assert np.isnan(dq[0, 7]).all()
    assert np.isfinite(np.delete(dq, 7, axis=1)).all()
    assert np.isnan(dk[0, :8]).all()
    assert np.isnan(dv[0, :8, 0, 1]).all()
    assert np.isfinite(np.delete(dv, 1, axis=3)).all()


def test_scores_of_minus_infinity_get_nothing() -> None:
    case = Case("", 1, 3, 5, 1, 1, 1, 2, "float64")
    _, _, v = case.arrays()
    q, k = np.ones((1, 3, 1, 1)), np.full((1, 5, 1, 1), -np.inf)
    out, lse = reference.forward(case.problem(), q, k, v)
    _, _, dv = reference.backward(case.problem(), np.ones_like(out), q, k, v, out, lse)
    assert not dv.any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("mask", [{}, *MASKED], ids=str)
def test_backward_of_merged_halves(dtype: str, mask: dict[str, Any]) -> None:
    """Ring attention: each half of the keys gives its gradients from the merged out and lse; those of q are added."""
    case = Case("", 2, 24, 24, 4, 2, 8, 8, dtype, **mask)
    (q, k, v), (dout, dlse) = case.arrays(), upstream(case)
    merged = reference.merge_states(*parts_of(case, [0, 10, 24]))
    within = {"rtol": 1e-4, "atol": 1e-5} if dtype == "float32" else {"rtol": 1e-10, "atol": 1e-12}
    for got, wanted in zip(merged, attention64(case, q, k, v), strict=True):
        np.testing.assert_allclose(got, wanted, **within)

    offset = 0 if case.diagonal_offset is None else case.diagonal_offset
    halves = []
    for begin, end in ((0, 10), (10, 24)):
        half = replace(case, seqlen_k=end - begin, diagonal_offset=offset - begin).problem()
        halves.append(reference.backward(half, dout, q, k[:, begin:end], v[:, begin:end], *merged, dlse))
    (dq0, dk0, dv0), (dq1, dk1, dv1) = halves
    dq, dk, dv = gradients64(case, dout, q, k, v, dlse)
    np.testing.assert_allclose(dq0 + dq1, dq, **within)
    np.testing.assert_allclose(np.concatenate([dk0, dk1], axis=1), dk, **within)
    np.testing.assert_allclose(np.concatenate([dv0, dv1], axis=1), dv, **within)
