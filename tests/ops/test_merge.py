"""`cuflash.merge_states`: attention over parts of the keys becomes attention over all of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.errors import ProblemError
from cuflash.planning.merge import MAX_STATES
from cuflash.testing import oracle
from cuflash.testing.cases import Case
from cuflash.testing.layouts import host, identical

CASES = [
    Case("halves", 2, 33, 128, 4, 2, 64, 64, "float32"),
    Case("odd_dim", 2, 33, 130, 4, 4, 40, 33, "float32"),
    Case("half_odd_dim", 1, 17, 90, 2, 1, 64, 37, "float16"),
    Case("bfloat16", 2, 65, 200, 4, 2, 128, 128, "bfloat16"),
]


def states(case: Case, xp: Any, parts: int) -> tuple[Any, list[Any], list[Any]]:
    """Returns (q, k, v) in xp and the states over `parts` parts of the keys."""
    arrays = [xp.asarray(x) for x in case.arrays()]
    q, k, v = arrays
    edges = np.linspace(0, case.seqlen_k, parts + 1).astype(int)
    pairs = [cuflash.forward(q, k[:, a:b], v[:, a:b], return_lse=True, **case.arguments()) for a, b in pairwise(edges)]
    return arrays, [out for out, _ in pairs], [lse for _, lse in pairs]


@pytest.mark.parametrize("parts", [1, 2, 7])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parts_of_the_keys_merge_to_the_whole(case: Case, parts: int, xp: Any) -> None:
    arrays, outs, lses = states(case, xp, parts)
    out, lse = cuflash.merge_states(outs, lses)
    assert out.dtype == outs[0].dtype
    # One unit for the rounding of the states before the merge, one for the result.
    oracle.assert_attention(case, list(map(host, arrays)), host(out), ulps=2)
    oracle.assert_attention(case, list(map(host, arrays)), None, host(lse), ulps=4)
    again, _ = cuflash.merge_states(outs, lses)
    assert bool((again == out).all())


def test_a_state_that_saw_nothing_counts_for_nothing(xp: Any) -> None:
    rng = np.random.default_rng(0)
    out = xp.asarray(rng.standard_normal((1, 5, 2, 8)).astype("f4"))
    lse = xp.asarray(rng.standard_normal((1, 2, 5)).astype("f4"))
    nothing = xp.full((1, 5, 2, 8), xp.nan, "f4"), xp.full((1, 2, 5), -xp.inf, "f4")
    whole, whole_lse = cuflash.merge_states([nothing[0], out, nothing[0]], [nothing[1], lse, nothing[1]])
    assert bool((whole == out).all())
    assert bool((whole_lse == lse).all())
    whole, whole_lse = cuflash.merge_states([nothing[0]] * 2, [nothing[1]] * 2)
    assert bool((whole == 0).all())
    assert bool(xp.isneginf(whole_lse).all())


def merged(outs: Any, lses: Any) -> tuple[Any, Any]:
    """Returns the merged out and lse of states (first axis) with finite lse, by whole arrays in their precision."""
    lse = lses.max(axis=0) + np.log(np.exp(lses - lses.max(axis=0)).sum(axis=0))
    return (np.exp(lses - lse)[..., None] * outs).sum(axis=0), lse


def test_stacked_states_and_lower_ranks(xp: Any) -> None:
    rng = np.random.default_rng(0)
    outs = xp.asarray(rng.standard_normal((3, 5, 8)).astype("f4"))
    lses = xp.asarray(rng.standard_normal((3, 5)).astype("f4"))
    out, lse = cuflash.merge_states(outs, lses)
    assert (out.shape, lse.shape) == ((5, 8), (5,))
    out, lse, outs, lses = map(host, (out, lse, outs, lses))
    exact = merged(outs.astype("f8"), lses.astype("f8"))
    for name, *results in zip(("out", "lse"), (out, lse), exact, merged(outs, lses), strict=True):
        oracle.assert_close(name, *results)


@pytest.mark.gpu
def test_gpu_states_of_any_layout_and_as_many_as_fit(cupy: Any) -> None:
    rng = cupy.random.default_rng(0)
    outs = rng.standard_normal((MAX_STATES, 2, 3, 9, 16), dtype="f4").transpose(0, 1, 3, 2, 4)
    lses = rng.standard_normal((MAX_STATES, 2, 9, 3), dtype="f4").transpose(0, 1, 3, 2)
    out, lse = cuflash.merge_states(outs, lses)
    rows = outs.get().transpose(0, 1, 3, 2, 4), lses.get()  # heads first, as lse has them
    exact, near = merged(*(x.astype("f8") for x in rows)), merged(*rows)
    # More units: the kernel adds the states one after the other, NumPy in pairs.
    oracle.assert_close("out", out.get().transpose(0, 2, 1, 3), exact[0], near[0], ulps=6)
    oracle.assert_close("lse", lse.get(), exact[1], near[1], ulps=6)


@pytest.mark.parametrize("count", [MAX_STATES + 1, 2 * MAX_STATES, 2 * MAX_STATES + 37])
def test_more_states_than_one_launch_takes_equal_pairwise_merges(count: int, xp: Any) -> None:
    rng = np.random.default_rng(0)
    outs = xp.asarray(rng.standard_normal((count, 2, 3, 2, 8)).astype("f4"))
    lses = xp.asarray(rng.standard_normal((count, 2, 2, 3)).astype("f4"))
    got = cuflash.merge_states(outs, lses)
    one = outs[0], lses[0]
    for out, lse in zip(outs[1:], lses[1:], strict=True):
        one = cuflash.merge_states([one[0], out], [one[1], lse])
    assert identical(got, one)
    narrow, lse = cuflash.merge_states(outs.astype("f2"), lses)
    assert identical([lse], got[1:])
    # At most three roundings, beside the rounding of the states.
    np.testing.assert_allclose(host(narrow).astype("f4"), host(got[0]), rtol=4e-3, atol=2e-3)


def test_all_states_are_validated_before_the_first_merge(xp: Any, nothing_runs: None) -> None:
    outs, lses = [xp.zeros((5, 2, 8), "f4")] * (MAX_STATES + 2), [xp.zeros((2, 5), "f4")] * (MAX_STATES + 2)
    with pytest.raises(ProblemError, match=rf"lses\[{MAX_STATES + 1}\] has shape \(2, 4\)"):
        cuflash.merge_states(outs, [*lses[:-1], lses[0][:, :4]])
    with pytest.raises(ProblemError, match=rf"outs\[{MAX_STATES + 1}\] is a list"):
        cuflash.merge_states([*outs[:-1], [0.0]], lses)
