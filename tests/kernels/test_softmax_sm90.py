"""The stale maximum of sm90 forward under hostile scores and values, and independence of rows."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hopper import (
    MASKS,
    ON_HOPPER,
    ROWS,
    Arrays,
    assert_right,
    assert_same,
    case_of,
    check,
    every_dtype,
    every_kernel,
    every_tile,
    padded,
    run,
)
from problems import need_memory

from cuflash.planning.tile_shapes_sm90 import WarpgroupTile
from cuflash.testing import oracle
from cuflash.testing.cases import Case, numpy_dtype
from cuflash.testing.layouts import host

pytestmark = ON_HOPPER
LN2 = math.log(2.0)


def steered(case: Case, slopes: Any, heights: Any, noise: float = 0.25) -> Arrays:
    """Returns q, k and v with scores `slopes[row] * heights[key]` plus noise, for a softmax_scale of 1.

    The last column has the slopes and heights, so that products which round like large numbers are added last.
    """
    q, k, v = (x.astype("f4") for x in case.arrays())
    q, k = noise * q, noise * k
    q[..., -1], k[..., -1] = np.reshape(slopes, (-1, 1)), np.reshape(heights, (-1, 1))
    return tuple(x.astype(numpy_dtype(case.dtype)) for x in (q, k, v))


def check_steered(case: Case, tile: WarpgroupTile, arrays: Arrays, ulps: float) -> None:
    # Compared in float32, as large scores rounded to 16 bits are no yardstick.
    out, _ = check(case, tile, arrays, wide=True, ulps=ulps)
    assert np.isfinite(host(out).astype("f8")).all()


def assert_same_rows(results: Any, calm: Any, rows: Any) -> None:
    assert_same(results[0], calm[0], np.s_[:, rows])
    assert_same(results[1], calm[1], np.s_[:, :, rows])


PATTERNS = {
    "rising": lambda n: np.linspace(-1, 1, n),
    "falling": lambda n: np.linspace(1, -1, n),
    "equal": np.ones,
    "low": lambda n: -np.ones(n),
    "alternating": lambda n: np.where(np.arange(n) % 2, 1.0, -1.0),
    "hill": lambda n: 1.0 - np.abs(np.linspace(-1, 1, n)),
    "first": lambda n: np.where(np.arange(n) == 0, 1.0, 0.0),
    "middle": lambda n: np.where(np.arange(n) == n // 2, 1.0, 0.0),
    "last": lambda n: np.where(np.arange(n) == n - 1, 1.0, 0.0),
}


@every_kernel
@pytest.mark.parametrize("pattern", PATTERNS)
def test_scores_of_thousands_stay_exact(tile: WarpgroupTile, dtype: str, pattern: str) -> None:
    for causal in (False, True):
        case = case_of(tile, dtype, 150, 4 * tile.block_k + 29, heads=(2, 1), batch=1, causal=causal, softmax_scale=1.0)
        heights = PATTERNS[pattern](case.seqlen_k)
        slopes = np.random.default_rng(1).uniform(0.5, 1.0, 150)
        check_steered(case, tile, steered(case, slopes, 1e4 * heights), ulps=4)
        # Scores of 1e8 without noise: products of two 16-bit numbers, which float32 holds.
        check_steered(case, tile, steered(case, 1e4 * slopes, 1e4 * heights, noise=0.0), ulps=4)


LEVELS = {
    "once": lambda t: np.minimum(t, 1),
    "every_tile": lambda t: t,
    "slowly": lambda t: t / 4,
    "late": lambda t: t // 6,
    "and_falling_again": lambda t: 3 - np.abs(t - 3),
    "up_and_down": lambda t: t % 2,
    "never": lambda t: -t,
}


@every_kernel
@pytest.mark.parametrize("levels", LEVELS)
def test_a_maximum_that_rises_by_any_number_of_bits(tile: WarpgroupTile, dtype: str, levels: str) -> None:
    # 0 to 40 bits a level, by row in random order; tiles run from the last key on.
    slopes = np.random.default_rng(2).permutation(160) / 4
    windowed, early = {"window_size": (3 * tile.block_k, -1)}, {"causal": True, "diagonal_offset": -9}
    for mask in ({}, {"causal": True}, windowed, early):
        case = case_of(tile, dtype, 160, 7 * tile.block_k, heads=(2, 1), batch=1, softmax_scale=1.0, **mask)
        heights = LN2 * np.repeat(LEVELS[levels](np.arange(7)[::-1]), tile.block_k)
        check_steered(case, tile, steered(case, slopes, heights), ulps=2)


@every_kernel
def test_the_mean_of_20000_equal_scores(tile: WarpgroupTile, dtype: str) -> None:
    # Keys before the last tile have equal weights, larger by 0 to 32 bits.
    case = case_of(tile, dtype, 128, 20011, heads=(1, 1), batch=1, softmax_scale=1.0)
    heights = np.where(np.arange(20011) < 20011 - 100, LN2, 0.0)
    check_steered(case, tile, steered(case, np.arange(128) / 4, heights, noise=0.0), ulps=2)


@every_kernel
@pytest.mark.parametrize("size", [10.0, 100.0])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_where_one_key_outweighs_others_its_weight_is_exact(
    tile: WarpgroupTile, dtype: str, causal: bool, size: float
) -> None:
    case = case_of(tile, dtype, 512, 4096, heads=(2, 1), batch=1, causal=causal)
    q, k, v = case.arrays()
    q = (size * q.astype("f4")).astype(q.dtype)
    out, _ = run(q, k, v, tile=tile, **case.arguments())
    exact, _ = oracle.attention64(case, q, k, v)
    with_maximum = np.empty_like(exact)  # weights rounded relative to the row's true maximum
    for head in range(2):
        scores = q[0, :, head].astype("f8") @ k[0, :, 0].astype("f8").T / case.head_dim**0.5
        scores[~case.problem().mask.visible(np.arange(512), np.arange(4096))] = -np.inf
        weights = np.exp(scores - scores.max(1, keepdims=True))
        rounded = weights.astype(q.dtype).astype("f8") @ v[0, :, 0].astype("f8")
        with_maximum[0, :, head] = (rounded / weights.sum(1, keepdims=True)).astype(q.dtype)
    error, unavoidable = (np.square(host(x).astype("f8") - exact).mean() ** 0.5 for x in (out, with_maximum))
    assert error <= 1.15 * unavoidable  # 1.3 to 1.5 times under a stale maximum alone


@every_kernel
@pytest.mark.parametrize("strength", [3, 50])  # factor of a key: its weight is scaled down, or all are recomputed
@pytest.mark.parametrize("mask", ["full", "causal", "softcap_full"])
def test_a_row_with_an_outlier_leaves_its_neighbours_alone(
    tile: WarpgroupTile, dtype: str, mask: str, strength: int
) -> None:
    case = case_of(tile, dtype, tile.block_q, 5 * tile.block_k + 7, heads=(1, 1), batch=1, **MASKS[mask])
    arrays = case.arrays()
    calm = run(*arrays, tile=tile, **case.arguments())
    for key in (0, case.seqlen_k // 2, case.seqlen_k - tile.block_q, case.seqlen_k - 1):
        alone = []
        for changed in ([5], [13], [5, 13], [tile.block_q - 1]):
            q = arrays[0].copy()
            for row in changed:
                times = strength if row == 5 else 50
                q[0, row] = (times * arrays[1][0, key].astype("f4")).astype(q.dtype)
            out, lse = check(case, tile, (q, *arrays[1:]), wide=True, ulps=4)
            assert_same_rows((out, lse), calm, np.setdiff1d(np.arange(case.seqlen_q), changed))
            alone.append(out)
        assert_same(alone[2], alone[0], np.s_[:, 5])
        assert_same(alone[2], alone[1], np.s_[:, 13])


@every_kernel
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_infinite_scores(tile: WarpgroupTile, dtype: str, causal: bool) -> None:
    case = case_of(tile, dtype, 150, 4 * tile.block_k + 29, heads=(2, 1), causal=causal)
    q, k, _ = arrays = case.arrays()
    sign = np.where(np.arange(150) % 2, -1, 1).astype(q.dtype)[:, None]
    q[..., 0] = sign * np.abs(q[..., 0])
    k[..., 1] = np.abs(k[..., 1])
    # Even rows have -inf there, for all keys of the first tiles; odd rows have +inf, which makes them NaN.
    k[:, [0, 77], :, 0] = k[:, -2 * tile.block_k :, :, 0] = -np.inf
    q[:, 20, :, 1] = np.inf  # +inf wherever it is not inf - inf
    k[:, 5, :, 2] = 0.0
    q[:, 40, :, 2] = np.inf  # +inf, -inf and one NaN
    check(case, tile, arrays, wide=True, ulps=4)
    # Scores of -inf have weight 0, like hidden keys.
    k[..., 0] = -np.inf
    out, lse = map(host, run(*arrays, tile=tile, **case.arguments()))
    plain = [row for row in range(0, 150, 2) if row not in (20, 40)]
    assert not out[:, plain].view("u2").any()
    assert np.isneginf(lse[:, :, plain]).all()
    assert np.isnan(out[:, 1::2].astype("f4")).all()
    assert np.isnan(lse[:, :, 1::2]).all()


@every_dtype
def test_infinite_values_that_are_seen_come_out(dtype: str) -> None:
    for tile in ROWS:
        case = case_of(tile, dtype, 150, 4 * tile.block_k + 29, heads=(2, 1))
        arrays = case.arrays()
        arrays[2][:, 3, :, 0] = np.inf
        arrays[2][:, -1, :, 7] = -np.inf
        arrays[2][:, [100, -9], :, 9] = np.array([np.inf, -np.inf], arrays[2].dtype)[:, None]
        check(case, tile, arrays)


@every_kernel
def test_nan_comes_out_in_the_rows_that_see_it_alone(tile: WarpgroupTile, dtype: str) -> None:
    seqlen_k = 4 * tile.block_k + 29
    case = case_of(tile, dtype, 2 * tile.block_q + 5, seqlen_k, heads=(2, 1), causal=True, diagonal_offset=-11)
    arrays = case.arrays()
    calm = run(*arrays, tile=tile, **case.arguments())
    for key in (0, 100, min(seqlen_k, case.seqlen_q) - 15):
        for operand, index, first in ((0, key, key), (1, key, key + 11)):
            poisoned = [x.copy() for x in arrays]
            poisoned[operand][:, index, :, 3] = np.nan
            rows = np.arange(first, first + 1 if operand == 0 else case.seqlen_q)
            if operand == 0 and key < 11:
                rows = rows[:0]  # it sees no key
            out, lse = run(*poisoned, tile=tile, **case.arguments())
            assert np.isnan(host(out)[:, rows].astype("f4")).all()
            assert np.isnan(host(lse)[:, :, rows]).all()
            assert_same_rows((out, lse), calm, np.setdiff1d(np.arange(case.seqlen_q), rows))


@every_kernel
@pytest.mark.parametrize("window", [(300, 40), (0, 0), (150, 20)], ids=str)
def test_nan_in_v_stays_near_and_comes_out_alike_in_each_run(
    tile: WarpgroupTile, dtype: str, window: tuple[int, int]
) -> None:
    seqlen, keys = 2500, [0, 200, 777, 1490]
    # Many query blocks, so that their order within a thread block differs between runs.
    case = case_of(tile, dtype, seqlen, seqlen, batch=4, heads=(8, 8), window_size=window)
    q, k, v = case.arrays()
    calm = run(q, k, v, tile=tile, **case.arguments())
    v[:, keys, :, 5] = np.nan
    visible = case.problem().mask.visible(np.arange(seqlen), np.arange(seqlen))
    near = np.zeros(seqlen, bool)
    for first, key in itertools.product(range(0, seqlen, tile.block_q), keys):
        begin = key // tile.block_k * tile.block_k
        near[first : first + tile.block_q] |= visible[first : first + tile.block_q, begin : begin + tile.block_k].any()
    assert near.mean() < 0.9
    poisoned = [run(q, k, v, tile=tile, **case.arguments()) for _ in range(10)]
    for out, lse in poisoned:
        assert np.isnan(host(out)[:, visible[:, keys].any(1), :, 5].astype("f4")).all()
        assert_same(lse, calm[1])
        assert_same(out, calm[0], np.s_[:, ~near])
        assert_same(out, calm[0], np.s_[..., np.arange(out.shape[3]) != 5])
        assert_same(out, poisoned[0][0])


@every_kernel
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_invisible_rows_and_keys_change_no_bit(tile: WarpgroupTile, dtype: str, poison: float) -> None:
    case = case_of(tile, dtype, 70, 700, window_size=(20, 10), diagonal_offset=300)
    q, k, v = case.arrays()
    clean = run(q, k, v, tile=tile, **case.arguments())
    begin, end = case.problem().mask.key_range(0, 70)
    assert (begin, end) == (280, 380)
    for hidden in (np.s_[:, :begin], np.s_[:, end:]):
        k[hidden] = v[hidden] = poison
    # NaN also surrounds every row, head and batch element.
    poisoned = run(*(padded(x, poison) for x in (q, k, v)), tile=tile, **case.arguments())
    for got, expected in zip(poisoned, clean, strict=True):
        assert_same(got, expected)


@every_tile
@pytest.mark.parametrize(
    ("dtype", "size"),
    [("bfloat16", 3e38), ("bfloat16", 2.0**-90), ("bfloat16", 2.0**-100), ("float16", 6e4), ("float16", 2.0**-21)],
)
@pytest.mark.parametrize("levels", ["equal", "signed", "once", "every_tile", "never"])
def test_values_at_the_ends_of_the_range(tile: WarpgroupTile, dtype: str, size: float, levels: str) -> None:
    case = case_of(tile, dtype, 160, 7 * tile.block_k, heads=(2, 1), batch=1, softmax_scale=1.0)
    rng = np.random.default_rng(3)
    level = LEVELS.get(levels, np.zeros_like)(np.arange(7)[::-1])
    q, k, v = steered(case, rng.permutation(160) / 4, LN2 * np.repeat(level, tile.block_k), noise=0.0)
    # Of one sign, so that nothing cancels, in all but one case.
    heights = rng.uniform(0.5, 1.0, v.shape) if levels != "equal" else np.ones(v.shape)
    signs = rng.choice([-1.0, 1.0], v.shape if levels == "signed" else (1, 1, 1, v.shape[3]))
    arrays = q, k, (size * heights * signs).astype(v.dtype)
    check_steered(case, tile, arrays, ulps=2)


@every_dtype
@pytest.mark.parametrize("mask", ["last_rows_blind", "offset_negative"])
def test_rows_that_see_nothing_are_exactly_zero(mask: str, dtype: str) -> None:
    for tile in ROWS:
        case = case_of(tile, dtype, 400, 290, **MASKS[mask])
        q, k, v = case.arrays()
        visible = case.problem().mask.visible(np.arange(400), np.arange(290))
        k[:, visible.any(0)] = v[:, visible.any(0)] = np.nan
        out, lse = map(host, run(q, k, v, tile=tile, **case.arguments()))
        no_visible_key = ~visible.any(1)
        assert 100 < no_visible_key.sum() < 300
        assert not out[:, no_visible_key].view("u2").any()
        assert np.isneginf(lse[:, :, no_visible_key]).all()
        assert np.isnan(out[:, ~no_visible_key].astype("f4")).all()


@every_kernel
@pytest.mark.parametrize("mask", ["full", "causal_window", "offset"])
def test_a_row_depends_on_no_other_and_not_on_its_place(cupy: Any, tile: WarpgroupTile, dtype: str, mask: str) -> None:
    case = case_of(tile, dtype, 2 * tile.block_q + 37, 3 * tile.block_k + 29, batch=7, **MASKS[mask])
    q, k, v = map(cupy.asarray, case.arrays())
    out, lse = run(q, k, v, tile=tile, **case.arguments())
    parts = [(np.s_[3:4], np.s_[:], np.s_[:], np.s_[:]), (np.s_[5:], np.s_[:], np.s_[5:6], np.s_[1:2])]
    if mask == "full":
        parts += [(np.s_[:], np.s_[37:], np.s_[:], np.s_[:]), (np.s_[6:], np.s_[100:101], np.s_[:], np.s_[:])]
    for batch, rows, heads, kv in parts:
        cut = q[batch, rows, heads], k[batch, :, kv], v[batch, :, kv]
        got, got_lse = run(*cut, tile=tile, **case.arguments())
        assert_same(got, out[batch, rows, heads])
        assert_same(got_lse, lse[batch, heads, rows])


@every_dtype
@pytest.mark.parametrize(("axis", "step"), [(0, 2**31), (1, 2**24), (2, 2**30)], ids=["batch", "seqlen", "heads"])
def test_more_than_2_31_elements(cupy: Any, axis: int, step: int, dtype: str) -> None:
    case = Case("", *((2, 150, 150, 3, 3) if axis != 1 else (1, 150, 150, 3, 3)), 64, 64, dtype, causal=True)
    length = case.shapes()[0][axis]
    need_memory(cupy, -(-2 * length * step // 2**30) + 1)
    memory, views = cupy.empty((length, step), numpy_dtype(dtype)), []
    arrays = case.arrays()
    for n, array in enumerate((*arrays, np.full(arrays[0].shape, np.nan, arrays[0].dtype))):
        # The axis is strided by `step`, other axes are dense, and the four operands are interleaved.
        moved = np.moveaxis(array, axis, 0)
        flat = np.ascontiguousarray(moved).reshape(length, -1)
        part = memory[:, n * flat.shape[1] : (n + 1) * flat.shape[1]]
        part[...] = cupy.asarray(flat)
        strides = np.moveaxis(np.empty((2, *moved.shape[1:]), "u2"), 0, axis).strides
        strides = tuple(2 * step if i == axis else stride for i, stride in enumerate(strides))
        views.append(cupy.lib.stride_tricks.as_strided(part, array.shape, strides))
    assert (length - 1) * step >= 2**31
    for view, array in zip(views, arrays, strict=False):
        np.testing.assert_array_equal(host(view).view("u2"), array.view("u2"))
    out, lse = run(*views[:3], out=views[3], causal=True)
    assert_right(case, arrays, out, lse)
    del memory, part, views, out, view
    cupy.get_default_memory_pool().free_all_blocks()


@every_dtype
@pytest.mark.parametrize("window", [1024, -1])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_sampled_rows_of_a_long_causal_sequence(dims: tuple[int, int], window: int, dtype: str) -> None:
    length = 16421
    case = Case("", 1, length, length, 2, 1, *dims, dtype, causal=True, window_size=(window, -1))
    rows = [0, 1, 63, 127, 128, 191, 192, 1023, 1024, 1025, 1151, 1152, 1153, 8191, 8192, length - 2, length - 1]
    rows += np.random.default_rng(4).integers(0, length, 40).tolist()
    check(case, rows=rows)
