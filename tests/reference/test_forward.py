"""The four algorithms in NumPy, compared with float64 and the papers' worked example, and at every edge."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from libraries import problem_of, same
from problems import MASKED, cases, parts_of

from cuflash import reference
from cuflash.problem.options import ALGORITHMS
from cuflash.reference import flash1, flash2, flashd
from cuflash.reference.tiles import rounded
from cuflash.testing.cases import CASES, Case, numpy_dtype
from cuflash.testing.layouts import LAYOUTS
from cuflash.testing.oracle import ULPS, Array, assert_attention, assert_units

pytestmark = pytest.mark.filterwarnings("error")
LAYOUT = st.sampled_from(list(LAYOUTS.values()))
SETTINGS = settings(deadline=None, derandomize=True, max_examples=150)
TILED = {"flash1": flash1.forward, "flash2": flash2.forward, "flashd": flashd.forward}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_float64(case: Case, algorithm: str) -> None:
    arrays, problem = case.arrays(), case.problem(algorithm=algorithm)
    copies = [x.copy() for x in arrays]
    out, lse = reference.forward(problem, *arrays)
    assert out.dtype == numpy_dtype(case.dtype)
    assert lse.dtype == np.float32
    assert_attention(case, arrays, out, lse, ulps=1)
    same((reference.lse(problem, *arrays[:2]),), (lse,))  # equal bits, as the loop is the same
    same(reference.forward(problem, *arrays), (out, lse))  # repeatable
    same(arrays, tuple(copies))  # the caller's arrays are unchanged


# q, k and v of the worked example, in tiles of two queries and two keys.
Q = np.array([[1, 0], [0, 1], [1, 1], [0, 0]], dtype=np.float64)
K = np.array([[1, 0], [0, 1], [1, 1], [0.5, 0.5]], dtype=np.float64)
V = np.array([[1, 2], [3, 4], [5, 6], [7, 8]], dtype=np.float64)


def worked_example(scale: float) -> list[tuple[Array, Array, Array]]:
    """Returns (m, ℓ, o not divided by ℓ) after tiles 1 and 2, by hand with x = exp(-scale), y = exp(-scale / 2)."""
    x, y = math.exp(-scale), math.exp(-scale / 2)
    first_o = [[1 + 3 * x, 2 + 4 * x], [3 + x, 4 + 2 * x], [4, 6], [4, 6]]
    second_o = [[6 + 3 * x + 7 * y, 8 + 4 * x + 8 * y], [8 + x + 7 * y, 10 + 2 * x + 8 * y]]
    second_o += [[5 + 11 * x, 6 + 14 * x], [16, 20]]
    first = ([scale, scale, scale, 0], [1 + x, 1 + x, 2, 2], first_o)
    second = ([scale, scale, 2 * scale, 0], [2 + x + y, 2 + x + y, 1 + 3 * x, 4], second_o)
    return [tuple(np.array(part, dtype=np.float64) for part in state) for state in (first, second)]


def states(algorithm: str, scale: float, dtype: str) -> tuple[list[list[Array]], Array, Array]:
    """Returns the states after tiles 1 and 2, each field over all four rows, and out and lse."""
    q, k, v = (x.astype(dtype)[None, :, None, :] for x in (Q, K, V))
    by_block: dict[int, list[Any]] = {0: [], 2: []}
    forward = TILED[algorithm]
    problem = problem_of(q, k, v, softmax_scale=scale)

    def on_tile(block: Any, tile: Any, state: Any) -> None:
        by_block[block.begin].append((state.lse, state.o) if isinstance(state, flashd.State) else state)

    out, lse = forward(problem, q, k, v, block_q=2, block_k=2, on_tile=on_tile)
    assert len(by_block[0]) == len(by_block[2]) == 2
    return (
        [
            [np.concatenate(parts) for parts in zip(top, bottom, strict=True)]
            for top, bottom in zip(by_block[0], by_block[2], strict=True)
        ],
        out[0, :, 0],
        lse[0, 0],
    )


@pytest.mark.parametrize("scale", [1.0, 1 / math.sqrt(2)], ids=["scale1", "scale1/sqrt2"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_states_of_the_worked_example(scale: float, dtype: str) -> None:
    expected = worked_example(scale)
    by_algorithm = {name: states(name, scale, dtype) for name in TILED}
    for step, (m, ell, o) in enumerate(expected):
        normalised = o / ell[:, None]
        for name, parts in (
            ("flash1", (m, ell, normalised)),
            ("flash2", (m, ell, o)),
            ("flashd", (m + np.log(ell), normalised)),
        ):
            for got, part in zip(by_algorithm[name][0][step], parts, strict=True):
                assert_units(f"{name}, tile {step + 1}", got, part, ULPS[dtype])
    s = scale * Q @ K.T
    p = np.exp(s) / np.exp(s).sum(axis=1, keepdims=True)
    for _, out, lse in by_algorithm.values():
        assert_units("out", out, p @ V, ULPS[dtype])
        assert_units("lse", lse, np.log(np.exp(s).sum(axis=1)), ULPS[dtype])


@pytest.mark.parametrize("spread", [1.0, 30.0, 800.0])
def test_flash_d_key_after_key(spread: float) -> None:
    """The weight w_i = σ(s_i - s_{i-1} + ln w_{i-1}) is exp(s_i) / Σ_{j<=i} exp(s_j); o_i is attention over i keys."""
    rng = np.random.default_rng(0)
    s, v = spread * rng.standard_normal(40), rng.standard_normal((40, 3))
    w_before, tiny = 1.0, 1e-280  # smaller numbers need no relative precision
    for i, (w, o) in enumerate(flashd.per_key(s, v)):
        so_far = s[: i + 1]
        e = np.exp(so_far - so_far.max())
        assert_units("w", w, e[-1] / e.sum(), 8 * spread, unit=tiny)
        assert_units("o", o, e @ v[: i + 1] / e.sum(), 64 * spread, unit=float(np.abs(v).max()))
        if i and w_before > 1e-300:
            x = s[i] - s[i - 1] + math.log(w_before)
            assert_units("w", w, 1 / (1 + np.exp(-max(x, -700.0))), 8 * spread, unit=tiny)
        w_before = float(w)


@SETTINGS
@given(cases, st.tuples(*3 * [LAYOUT]), st.integers(1, 8), st.integers(1, 8), st.integers(0, 99))
def test_any_shape_stride_mask_and_tile(case: Case, layouts: Any, block_q: int, block_k: int, seed: int) -> None:
    q, k, v = (layout(x) for layout, x in zip(layouts, case.arrays(seed), strict=True))
    for name in ALGORITHMS:
        problem = case.problem(algorithm=name)
        results = reference.forward(problem, q, k, v)
        same((reference.lse(problem, q, k),), results[1:])
        if name in TILED:
            results = TILED[name](problem, q, k, v, block_q=block_q, block_k=block_k)
        assert_attention(case, (q, k, v), *results)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("mask", MASKED, ids=str)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_invisible_rows_and_keys_change_nothing(algorithm: str, mask: dict[str, Any], poison: float) -> None:
    case = Case("", 2, 24, 24, 4, 2, 8, 8, "float32", softmax_scale=None, **mask)
    q, k, v = case.arrays()
    problem = case.problem(algorithm=algorithm)
    clean = reference.forward(problem, q, k, v)
    keys, rows = problem.mask.key_range(0, 24), problem.mask.row_range(0, 24)
    for x, (begin, end) in ((q, rows), (k, keys), (v, keys)):
        x[:, :begin], x[:, end:] = poison, poison
    same(reference.forward(problem, q, k, v), clean)
    out_of_range = np.r_[0 : rows[0], rows[1] : 24]
    assert not clean[0][:, out_of_range].any()
    assert np.isneginf(clean[1][:, :, out_of_range]).all()


def test_poison_is_where_the_masks_above_hide() -> None:
    hidden = [Case("", 1, 24, 24, 1, 1, 8, 8, "float32", **mask).problem().mask for mask in MASKED]
    assert any(mask.key_range(0, 24) != (0, 24) for mask in hidden)
    assert any(mask.row_range(0, 24) != (0, 24) for mask in hidden)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("mask", MASKED, ids=str)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_row_depends_on_what_it_sees_alone(algorithm: str, dtype: str, mask: dict[str, Any], poison: float) -> None:
    case = Case("", 2, 24, 24, 4, 2, 8, 8, dtype, **mask)
    problem, (q, k, v) = case.problem(algorithm=algorithm), case.arrays()
    visible, clean = problem.mask.visible(np.arange(24), np.arange(24)), reference.forward(problem, q, k, v)
    for key in (0, 5, 12, 23):
        of_v, of_k = v.copy(), k.copy()
        of_v[:, key, :, 3] = of_k[:, key] = poison
        out, lse = reference.forward(problem, q, k, of_v)
        assert not np.isfinite(out[:, visible[:, key], :, 3]).any()
        same((np.delete(out, 3, axis=3), lse), (np.delete(clean[0], 3, axis=3), clean[1]))
        for poisoned in ((out, lse), reference.forward(problem, q, of_k, of_v)):
            hidden_rows = ~visible[:, key]
            same(
                (poisoned[0][:, hidden_rows], poisoned[1][:, :, hidden_rows]),
                (clean[0][:, hidden_rows], clean[1][:, :, hidden_rows]),
            )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_infinities_of_both_signs_that_are_seen_are_nan(algorithm: str) -> None:
    case = Case("", 1, 20, 20, 2, 1, 4, 4, "float32", causal=True)
    q, k, v = case.arrays()
    v[0, 3, 0], v[0, 9, 0, 1:3], v[0, 15, 0, 2] = np.inf, -np.inf, np.nan
    out, _ = reference.forward(case.problem(algorithm=algorithm), q, k, v)
    assert np.isfinite(out[:, :3]).all()
    assert np.isposinf(out[:, 3:9]).all()
    assert np.isposinf(out[:, 9:, :, [0, 3]]).all()
    assert np.isnan(out[:, 9:, :, 1:3]).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_is_seen_is_not_hidden(algorithm: str, poison: float) -> None:
    case = Case("", 1, 20, 20, 2, 1, 4, 4, "float32", causal=True)
    problem, (q, k, v) = case.problem(algorithm=algorithm), case.arrays()
    k[0, 11, 0, 0] = np.nan
    out, lse = reference.forward(problem, q, k, v)
    assert np.isnan(out[:, 11:]).all()
    assert np.isnan(lse[:, :, 11:]).all()
    before = replace(case, seqlen_q=11, seqlen_k=11)
    assert_attention(before, [x[:, :11] for x in case.arrays()], out[:, :11], lse[:, :, :11])

    q, k, v = case.arrays()
    q[0, 5, 1, 2] = poison  # a score of +inf has no softmax either
    k[0, :, 0, 2] = np.abs(k[0, :, 0, 2])
    out, lse = reference.forward(problem, q, k, v)
    assert np.isnan(out[0, 5, 1]).all()
    assert np.isnan(lse[0, 1, 5])
    assert np.isnan(out).sum() == 4
    assert np.isnan(lse).sum() == 1

    q, k, v = case.arrays()
    v[0, 11, 0, 3] = poison
    out, lse = reference.forward(problem, q, k, v)
    assert not np.isfinite(out[0, 11:, :, 3]).any()
    assert np.isfinite(out[..., :3]).all()
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_large_scores_do_not_overflow(algorithm: str) -> None:
    q, k, v = Case("", 1, 9, 33, 1, 1, 4, 4, "float32").arrays()
    for factor in (1e3, 1e8, -1e8):
        problem = problem_of(q, k, v, algorithm=algorithm, softmax_scale=1.0)
        out, lse = reference.forward(problem, np.float32(factor) * q, k, v)
        assert_attention(problem, (np.float32(factor) * q, k, v), None, lse)
        assert np.isfinite(out).all()


@pytest.mark.parametrize("algorithm", TILED)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("size", [1e4, -1e6, 1e7, -1e8])
@pytest.mark.parametrize("mask", [{}, MASKED[0], MASKED[-1]], ids=str)
def test_weights_of_large_scores_are_those_of_float64(
    mask: dict[str, Any], size: float, dtype: str, algorithm: str
) -> None:
    """Scores near `size` differ by 0, 1 or 2 steps of float32, in several tiles, some with -inf only."""
    step = max(0.5, float(np.spacing(np.float32(abs(size)))))  # every product below is exact in float32
    case = Case("", 1, 24, 24, 1, 1, 2, 4, dtype, softmax_scale=step, **mask)
    q, k, v = case.arrays()
    exponent = int(math.log2(abs(size) / step))
    q[..., 0], q[..., 1] = 2.0 ** (exponent // 2), 1
    k[..., 0] = math.copysign(2.0 ** (exponent - exponent // 2), size)
    k[..., 1] = np.random.default_rng(0).integers(0, 3, k.shape[:3])
    k[0, [0, 7, *range(10, 15)], 0, 0] = -np.inf
    doubles = [x.astype("f8") for x in (q, k, v)]
    exact = problem_of(*doubles, algorithm="standard", **case.arguments())
    expected, expected_lse = reference.forward(exact, *doubles)
    out, lse = TILED[algorithm](case.problem(algorithm=algorithm), q, k, v, block_q=7, block_k=5)
    unit = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(dtype, 2.0**-22)
    np.testing.assert_allclose(out.astype("f8"), expected, rtol=0, atol=unit * np.abs(doubles[2]).max())
    np.testing.assert_allclose(lse, expected_lse, rtol=2.0**-22)
    assert np.isneginf(lse).any() == bool(mask)


@pytest.mark.parametrize("dims", [(0, 3), (3, 0), (0, 0)])
def test_a_batch_that_sees_nothing_costs_no_step_of_a_loop(
    dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    block_calls = []
    for name in ("tiles", "backward"):
        module = import_module(f"cuflash.reference.{name}")
        monkeypatch.setattr(module, "query_blocks", lambda *args: block_calls.append(args) or ())
    queries, keys = dims
    q, k = np.ones((1000, queries, 2, 4), np.float32), np.ones((1000, keys, 2, 4), np.float32)
    for algorithm in ALGORITHMS:
        out, lse = reference.forward(problem_of(q, k, k, algorithm=algorithm), q, k, k)
        assert not out.any()
        assert np.isneginf(lse).all()
    assert not any(x.any() for x in reference.backward(problem_of(q, k, k), out, q, k, k, out, lse))
    assert not block_calls


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("score", [1e6, 3e7, -3e7, 1e30])
def test_equal_scores_of_any_size_give_the_mean(algorithm: str, score: float) -> None:
    q, k = np.full((1, 1, 1, 1), score, np.float32), np.ones((1, 2048, 1, 1), np.float32)
    v = np.tile(np.arange(2, dtype=np.float32), 1024).reshape(1, 2048, 1, 1) * 5
    out, _ = reference.forward(problem_of(q, k, v, algorithm=algorithm, softmax_scale=1.0), q, k, v)
    assert out.item() == 2.5


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_scores_of_minus_infinity_are_no_keys(algorithm: str) -> None:
    q, k, v = np.ones((1, 2, 1, 1)), np.full((1, 5, 1, 1), -np.inf), np.ones((1, 5, 1, 1))
    out, lse = reference.forward(problem_of(q, k, v, algorithm=algorithm), q, k, v)
    assert not out.any()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_p_is_rounded_and_its_sum_is_not(algorithm: str, dtype: str) -> None:
    narrow = numpy_dtype(dtype)
    q = np.ones((1, 1, 1, 1), narrow)
    k, v = (np.array(x, narrow).reshape(1, 2, 1, 1) for x in ([0.0, -0.3], [0.0, 1.0]))
    out, _ = reference.forward(problem_of(q, k, v, algorithm=algorithm, out_dtype="float32"), q, k, v)
    e = np.exp(float(k[0, 1, 0, 0]))
    if algorithm == "standard":  # P is normalised before it is rounded
        expected = float(np.float32(e / (1 + e)).astype(narrow))
    else:
        expected = float(np.float32(e).astype(narrow)) / (1 + e)
    assert out.dtype == np.float32
    assert abs(expected - e / (1 + e)) > 1e-5 * expected
    assert_units("out", out[0, 0, 0, 0], expected, 4)


def test_rounding_to_float16_is_that_of_a_cast() -> None:
    rng = np.random.default_rng(0)
    steps = np.arange(1 << 12, dtype=np.float32) * np.float32(2.0**-26)  # every tie between subnormals
    for x in (steps, *(rng.random(4096, np.float32) * np.float32(2.0**-n) for n in (0, 10, 13, 14, 15, 20, 24))):
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(rounded(x, np.dtype("float16")), x.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("mask", [{}, *MASKED], ids=str)
def test_merged_parts_are_the_whole(dtype: str, mask: dict[str, Any]) -> None:
    case = Case("", 2, 24, 24, 4, 2, 8, 16, dtype, **mask)
    outs, lses = parts_of(case, [0, 5, 5, 12, 24])  # one part has no keys, and with a mask some rows see none of a part
    out, lse = reference.merge_states(outs, lses)
    assert out.dtype == numpy_dtype(dtype)
    assert lse.dtype == (np.float64 if dtype == "float64" else np.float32)
    assert_attention(case, case.arrays(), out, lse)


def test_merging_with_nothing() -> None:
    out, lse = np.full((1, 2, 3, 4), 2.5, np.float32), np.full((1, 3, 2), -3.0, np.float32)
    nothing, never = np.zeros_like(out), np.full_like(lse, -np.inf)
    same(reference.merge_states([out], [lse]), (out, lse))
    same(reference.merge_states([nothing, out, nothing], [never, lse, never]), (out, lse))
    same(reference.merge_states([nothing, nothing], [never, never]), (nothing, never))
    merged, merged_lse = reference.merge_states([out, 3 * out], [lse, lse])
    assert_units("out", merged, 2 * out, 4)
    assert_units("lse", merged_lse, lse.astype("f8") + math.log(2), 4)
    far, far_lse = reference.merge_states([out, 3 * out], [lse, lse + 1000])
    same((far, far_lse), (3 * out, lse + 1000))
    bad = reference.merge_states([out, out], [lse, np.full_like(lse, np.nan)])
    assert np.isnan(bad[0]).all()
    assert np.isnan(bad[1]).all()


NOT_FINITE: dict[str, tuple[str, float, dict[str, Any]]] = {  # operand and value of key 10, and arguments
    "hidden by its value": ("k", -np.inf, {}),
    "over the cap": ("k", np.inf, {"softcap": 2.0}),
    "v": ("v", np.nan, {}),
    "v of a weight that is 0": ("v", np.inf, {"softmax_scale": 300.0}),
    "v of a key that is hidden by its value": ("kv", -np.inf, {}),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", NOT_FINITE)
def test_what_is_not_finite_reaches_the_same_rows_whatever_the_tiles(name: str, causal: bool) -> None:
    where, value, more = NOT_FINITE[name]
    case = Case("", 1, 1100, 1100, 1, 1, 4, 4, "float32", causal=causal, **more)
    inputs = dict(zip("qkv", case.arrays(), strict=True))
    for operand in where:
        inputs[operand][0, 10] = value
    outs = {
        (algorithm, block_k): reference.forward(case.problem(algorithm=algorithm), *inputs.values(), block_k=block_k)[0]
        for algorithm, block_k in itertools.product(TILED, (64, 512, 2048))
    }
    outs["standard", 0] = reference.forward(case.problem(algorithm="standard"), *inputs.values())[0]
    for out in outs.values():
        for kind in np.isnan, np.isposinf, np.isneginf:
            np.testing.assert_array_equal(kind(out), kind(outs["standard", 0]))
