"""Gradients in NumPy, compared with float64, finite differences, identities of softmax, and merged halves."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from libraries import same
from problems import MASKED, cases, parts, parts_of

from cuflash import reference
from cuflash.problem.options import ALGORITHMS
from cuflash.testing.cases import CASES, Case
from cuflash.testing.gradients import BackwardArgs, check, upstream
from cuflash.testing.layouts import LAYOUTS, one_head_for_all
from cuflash.testing.oracle import ULPS, Array, assert_attention, assert_close, gradients64, naive_gradients

pytestmark = pytest.mark.filterwarnings("error")
LAYOUT = st.sampled_from(list(LAYOUTS.values()))
SETTINGS = settings(deadline=None, derandomize=True, max_examples=100)
# Few terms may cancel: a unit of the sum is then smaller than a unit of its terms.
DRAWN_ULPS = {"float16": 4, "bfloat16": 4} | {"float32": 16, "float64": 64}


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
@given(cases, st.tuples(*5 * [LAYOUT]), st.integers(1, 8), st.integers(1, 8), st.integers(0, 99))
def test_any_shape_stride_mask_and_tile(case: Case, layouts: Any, block_q: int, block_k: int, seed: int) -> None:
    (dout, dlse), problem = upstream(case, seed), case.problem()
    q, k, v, dout = (layout(x) for layout, x in zip(layouts[:4], (*case.arrays(seed), dout), strict=True))
    out, lse = reference.forward(problem, q, k, v)
    if layouts[4] is not one_head_for_all:  # that layout would change the numbers
        out = layouts[4](out)
    copies = [x.copy() for x in (q, k, v, dout, out, lse, dlse)]
    got = reference.backward(problem, dout, q, k, v, out, lse, dlse, block_q=block_q, block_k=block_k)
    same((q, k, v, dout, out, lse, dlse), tuple(copies))  # the caller's arrays are unchanged
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
    problem = case.problem(algorithm=algorithm)

    def loss() -> float:
        out, lse = reference.forward(problem, *arrays)
        return float((dout * out).sum() + (dlse * np.where(np.isneginf(lse), 0, lse)).sum())

    got = gradients(case, *arrays, dout, dlse)
    for name, x, dx in zip(("dq", "dk", "dv"), arrays, got, strict=True):
        slopes = {step: np.zeros_like(x) for step in (1e-4, 2e-4)}
        for (step, slope), index in product(slopes.items(), np.ndindex(x.shape)):
            value = x[index]
            x[index] = value + step
            above = loss()
            x[index] = value - step
            slope[index] = (above - loss()) / (2 * step)
            x[index] = value
        # Twice the step has four times the error, so the two slopes differ by more than the first one's error. The loss
        # has an error of one unit in its last place, and its slope that error divided by the step.
        assert_close(name, dx, *slopes.values(), ulps=4, unit=abs(loss()) / 1e-4)


@pytest.mark.parametrize("mask", MASKED, ids=str)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_invisible_rows_and_keys_get_and_give_nothing(mask: dict[str, Any], poison: float) -> None:
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


@pytest.mark.parametrize("operand", ["dout", "q", "k", "v", "dlse"])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("mask", MASKED, ids=str)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_row_and_a_key_that_it_does_not_see_get_nothing_of_each_other(
    mask: dict[str, Any], softcap: float, operand: str, poison: float
) -> None:
    case = Case("", 2, 24, 24, 4, 2, 8, 8, "float32", softcap=softcap, **mask)
    (q, k, v), (dout, dlse) = case.arrays(), upstream(case)
    visible = case.problem().mask.visible(np.arange(24), np.arange(24))
    clean = gradients(case, q, k, v, dout, dlse)
    for number in (0, 5, 12, 23):
        inputs = {name: x.copy() for name, x in (("q", q), ("k", k), ("v", v), ("dout", dout), ("dlse", dlse))}
        inputs[operand][(np.s_[:, :, number] if operand == "dlse" else np.s_[:, number])] = poison
        rows = visible[:, number] if operand in "kv" else np.arange(24) == number
        keys = visible[rows].any(axis=0)
        grads = gradients(case, *inputs.values())
        for dx, expected, others in zip(grads, clean, (~rows, ~keys, ~keys), strict=True):
            same((dx[:, others],), (expected[:, others],))


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
    """As in ring attention, each half of the keys has gradients from the merged out and lse; dq is summed."""
    case = Case("", 2, 24, 24, 4, 2, 8, 8, dtype, **mask)
    (q, k, v), (dout, dlse) = case.arrays(), upstream(case)
    merged = reference.merge_states(*parts_of(case, [0, 10, 24]))
    assert_attention(case, (q, k, v), *merged)
    halves = [
        reference.backward(half.problem(), dout, q, k[keys], v[keys], *merged, dlse)
        for half, keys in parts(case, [0, 10, 24])
    ]
    (dq0, dk0, dv0), (dq1, dk1, dv1) = halves
    grads = dq0 + dq1, np.concatenate([dk0, dk1], axis=1), np.concatenate([dv0, dv1], axis=1)
    check(case, BackwardArgs(dout, q, k, v, *merged, dlse), grads)


@pytest.mark.parametrize("operand", "qkv")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_reaches_the_same_gradients_whatever_the_tiles(operand: str, value: float) -> None:
    case = Case("", 1, 1100, 1100, 1, 1, 4, 4, "float32", causal=True)
    inputs, (dout, _) = dict(zip("qkv", case.arrays(), strict=True)), upstream(case)
    inputs[operand][0, 10] = value
    out, lse = reference.forward(case.problem(), *inputs.values())
    of_sizes = [
        reference.backward(case.problem(), dout, *inputs.values(), out, lse, block_k=size) for size in (64, 512, 2048)
    ]
    for grads in zip(*of_sizes, strict=True):
        for kind in np.isnan, np.isposinf, np.isneginf:
            assert (kind(grads[0]) == kind(grads[1])).all()
            assert (kind(grads[0]) == kind(grads[2])).all()
