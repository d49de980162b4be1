"""Mods on a GPU: hidden keys, empty axes, numbers that are not finite, and compiled and launched kernels."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hopper import ON_HOPPER
from libraries import recorded
from mod_table import SMALL as CASE
from mod_table import launched, names_of, of_lengths
from plans import for_any_gpu

import cuflash
from cuflash.mods import masks
from cuflash.runtime import compiler
from cuflash.testing.cases import Case
from cuflash.testing.functions import FUNCTIONS, Arguments, Put, bias_of, drawn, joined, shape_of, sinks_of, slopes_of
from cuflash.testing.layouts import host, identical
from cuflash.testing.mod_oracle import OracleInputs, OracleMods, check
from cuflash.testing.mods import check_backward, check_forward, make_oracle_mods, without_grads
from cuflash.testing.oracle import assert_units

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("new_memory_holds_nan")]


# Hidden keys, numbers that are not finite, and empty axes.


def some(keys: Any) -> Any:
    """Returns False for every seventh key, and for more than a tile of keys in the middle."""
    return (keys % 7 != 3) & ((keys < 100) | (keys >= 260))


def all_but_a_tile(keys: Any) -> Any:
    return (keys < 128) | (keys >= 256)


def by_mask(visible: Any) -> Any:
    return lambda put, case: {"mask_mod": lambda b, h, q_idx, k_idx: visible(k_idx)}


def by_bias(put: Put, case: Case) -> Arguments:
    return {"bias": put(some(np.arange(case.seqlen_k)))}


def by_least(put: Put, case: Case) -> Arguments:
    least = np.finfo(np.float32).min
    return {"bias": put(np.where(some(np.arange(case.seqlen_k)), 0, least).astype(np.float32)[None])}


# Makers, visible keys, and the content of the others. NaN only in whole hidden tiles: a pair that a mod hides has
# weight 0, and 0 * NaN is NaN, in v as in the k of a score that only a bias lowers.
NUMBERS, ANY = (0.0, 1e3, -1e3), (0.0, np.nan, np.inf, -np.inf)
HIDDEN: dict[str, tuple[Any, Any, Any]] = {
    "mask": (by_mask(some), some, NUMBERS),
    "tile": (by_mask(all_but_a_tile), all_but_a_tile, ANY),
    "bool": (by_bias, some, NUMBERS),
    "least": (by_least, some, NUMBERS),
}


@pytest.mark.parametrize(("name", "any_gpu"), [*((name, False) for name in HIDDEN), ("mask", True), ("tile", True)])
def test_invisible_keys_leave_no_trace(cupy: Any, name: str, any_gpu: bool) -> None:
    make, visible, fills = HIDDEN[name]
    case = of_lengths((200, 400))
    hidden = ~visible(np.arange(400))
    dout = cupy.asarray(np.random.default_rng(3).standard_normal(case.out_shape()).astype("f2"))
    runs = []
    with for_any_gpu() if any_gpu else nullcontext():
        for fill in fills:
            q, k, v = case.arrays()
            k[:, hidden] = v[:, hidden] = fill
            there, mod_kwargs = [cupy.asarray(x) for x in (q, k, v)], make(cupy.asarray, case)
            out, lse = cuflash.forward(*there, return_lse=True, **mod_kwargs)
            gradients = cuflash.backward(dout, *there, out, lse, deterministic=True, **mod_kwargs)
            assert not any(host(x)[:, hidden].any() for x in gradients[1:])
            runs.append((out, lse, *gradients))
            if not fill:
                check(OracleInputs.dense(case, (q, k, v)), make_oracle_mods(make, case), out, lse)
    assert all(identical(each, runs[0]) for each in runs[1:])


def test_rows_that_see_nothing_have_results_of_their_own(cupy: Any, any_gpu: bool) -> None:
    """The mask `striped` hides all keys from the first rows, whose q holds NaN."""
    case = of_lengths((130, 150))
    q, k, v = case.arrays()
    q[:, :3] = np.nan
    there, mod_kwargs = [cupy.asarray(x) for x in (q, k, v)], FUNCTIONS["striped"](cupy.asarray, case)
    out, lse = cuflash.forward(*there, return_lse=True, **mod_kwargs)
    sinks = sinks_of()(cupy.asarray, case)["sinks"]
    of_sink, lse_of_sink = cuflash.forward(*there, return_lse=True, sinks=sinks, **mod_kwargs)
    there[0][:, :3] = 1.0
    gradients = cuflash.backward(out, *there, out, lse, **mod_kwargs)
    assert not host(out)[:, :3].any()
    assert not host(of_sink)[:, :3].any()
    assert np.isneginf(host(lse)[:, :, :3]).all()
    assert (host(lse_of_sink)[:, :, :3] == host(sinks)[:, None]).all()
    assert all(np.isfinite(host(x).astype("f4")).all() for x in gradients)
    assert not host(gradients[0])[:, :3].any()


def test_scores_that_are_seen_and_not_finite_show(cupy: Any) -> None:
    case = of_lengths((130, 150))

    def with_inf(put: Put, case: Case) -> Arguments:
        bias = np.zeros((1, case.heads_q, case.seqlen_q, case.seqlen_k), np.float32)
        bias[0, 1, 70, 66], bias[0, 2, 5, 140], bias[0, 3, 9, 9], bias[0, 3, 11] = np.inf, np.nan, -np.inf, -np.inf
        return {"bias": put(bias)}

    outputs = check_forward(with_inf, case, cupy.asarray, with_lse=True)
    assert np.argwhere(np.isnan(host(outputs[0]).astype("f4")).any(axis=3)).tolist() == [
        [b, *row] for b in range(2) for row in ((5, 2), (70, 1))
    ]
    hidden = joined(with_inf, lambda put, case: {"mask_mod": lambda b, h, q_idx, k_idx: (k_idx != 66) & (k_idx < 140)})
    out, _ = check_forward(hidden, case, cupy.asarray)
    assert np.isfinite(host(out).astype("f4")).all()
    with for_any_gpu():
        check_forward(with_inf, case, cupy.asarray)


# Numbers that are added to all scores of a row. Products vanish beside large ones, so that all weights are equal.
SIZES = np.array([1e5, -1e6, 1e7, -1e8, 1e30], np.float32)


def check_large(put: Put, case: Case, letters: str) -> None:
    """Checks rows with large scores only, every third one, and that they do not change the bits of other rows."""
    queries = np.arange(case.seqlen_q)
    large = queries % 3 == 1
    sizes = SIZES[queries // 3 % len(SIZES)][:, None]
    q, k, v = case.arrays()
    q[:, large] = 0
    there, shape = [put(x) for x in (q, k, v)], shape_of(letters, case)
    runs = []
    for of_large in (sizes, 0.0):
        bias = np.where(large[:, None], of_large, drawn(letters, *shape)).astype(np.float32)
        runs.append([host(x) for x in cuflash.forward(*there, return_lse=True, bias=put(bias))])
    (out, lse), (of_ordinary, lse_of_ordinary) = runs
    check(OracleInputs.dense(case, (q, k, v)), OracleMods.from_kwargs({"bias": bias}), of_ordinary, lse_of_ordinary)
    assert identical([out[:, ~large]], [of_ordinary[:, ~large]])
    assert identical([lse[:, :, ~large]], [lse_of_ordinary[:, :, ~large]])
    mean = np.repeat(v.astype(np.float64).mean(axis=1, keepdims=True), case.heads_q // case.heads_kv, axis=2)
    assert_units("out", out[:, large], mean, ulps=4)
    expected = sizes[large, 0].astype(np.float64) + np.log(case.seqlen_k)
    np.testing.assert_allclose(lse[:, :, large], np.broadcast_to(expected, lse[:, :, large].shape), rtol=1e-6)


@pytest.mark.parametrize("letters", ["qk", "q1"])  # a bias for each score, and one for each row
@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 64), ("bfloat16", 64), ("bfloat16", 256)])
def test_rows_whose_scores_are_all_large(cupy: Any, dtype: str, head_dim: int, letters: str) -> None:
    case = of_lengths((200, 700), replace(CASE, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim))
    check_large(cupy.asarray, case, letters)
    if head_dim == 64:
        with for_any_gpu():
            check_large(cupy.asarray, case, letters)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_least_scores_that_weigh_something_weigh_nothing_beside_others(cupy: Any, dtype: str) -> None:
    """The last key, in the first tile of kernels, has scores on both sides of the least score."""
    case = of_lengths((70, 500), replace(CASE, dtype=dtype))
    steps = np.arange(-4, 5, dtype=np.int32)
    edge = (np.array(-1e37, np.float32).view(np.int32) + steps).view(np.float32)
    rows = np.arange(case.seqlen_q)

    def near_least(put: Put, case: Case) -> Arguments:
        bias = np.zeros((case.seqlen_q, case.seqlen_k), np.float32)
        bias[:, 120:] = -np.inf
        bias[:, -1] = edge[rows % len(edge)]
        bias[rows % 2 == 1, 130] = edge[0]
        return {"bias": put(bias)}

    check_forward(near_least, case, cupy.asarray, with_lse=True)
    with for_any_gpu():
        check_forward(near_least, case, cupy.asarray, with_lse=True)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
def test_axes_without_elements(cupy: Any, lengths: tuple[int, int]) -> None:
    for batch in (2, 0):
        case = of_lengths(lengths, batch=batch)
        mod_kwargs = without_grads(joined(FUNCTIONS["bounded"], sinks_of())(cupy.asarray, case))
        q, k, v = (cupy.asarray(x) for x in case.arrays())
        out, lse = cuflash.forward(q, k, v, return_lse=True, **mod_kwargs)
        assert not host(out).any()
        assert (host(lse) == host(mod_kwargs["sinks"])[:, None]).all()
        gradients = cuflash.backward(out, q, k, v, out, lse, captured_grads=(mod_kwargs["sinks"],), **mod_kwargs)
        assert [x.shape for x in gradients[:3]] == [x.shape for x in (q, k, v)]
        assert not any(host(x).any() for x in (*gradients[:3], *gradients[3]))


# Compiled and launched kernels.


def test_other_arrays_of_the_same_kind_compile_nothing(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check_forward(FUNCTIONS["everything"], CASE, cupy.asarray)
    check_backward(FUNCTIONS["everything"], CASE, cupy.asarray)
    monkeypatch.setattr(compiler, "compile_variant", lambda variant: pytest.fail(f"{variant.name} is compiled anew"))
    loaded = dict(compiler._kernels)
    for lengths in ((290, 280), (300, 300)):
        case = of_lengths(lengths)

        def other(put: Put, case: Case) -> Arguments:
            table = put(np.linspace(-1.0, 1.0, case.heads_q * 30).astype(np.float32).reshape(30, case.heads_q)).T

            def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
                return 2.0 * np.tanh(score / 2.0) + table[h, q_idx - k_idx]

            return {"score_mod": score_mod, "captured_grads": (table,)}

        make = joined(other, FUNCTIONS["segments"], bias_of("bh1k"), sinks_of())
        check_forward(make, case, cupy.asarray)
        check_backward(make, case, cupy.asarray)
    assert compiler._kernels == loaded


WINDOWS = {
    "causal": (masks.causal, {"causal": True}),
    "window": (masks.sliding_window(40, 3), {"window_size": (40, 3)}),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_masks_that_are_windows_launch_the_plain_kernels(cupy: Any, name: str) -> None:
    mask_mod, keywords = WINDOWS[name]
    arrays = [cupy.asarray(x) for x in of_lengths((200, 300)).arrays()]
    runs = []
    for mask_kwargs in (keywords, {"mask_mod": mask_mod}):
        with launched() as ran:
            out, lse = cuflash.forward(*arrays, return_lse=True, **mask_kwargs)
            gradients = cuflash.backward(out, *arrays, out, lse, deterministic=True, **mask_kwargs)
        runs.append((names_of(ran), (out, lse, *gradients)))
    (plain, expected), (with_mods, got) = runs
    assert with_mods == plain
    assert identical(got, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.skipif(ON_HOPPER[1].args[0], reason="needs a GPU of sm_90")
def test_hopper_runs_kernels_of_its_own(cupy: Any, dtype: str) -> None:
    case = replace(CASE, dtype=dtype)
    with launched() as ran:
        check_forward(FUNCTIONS["alibi"], case, cupy.asarray)
        check_backward(FUNCTIONS["alibi"], case, cupy.asarray)
    for plan in ran:
        assert any(launch.variant.source.startswith("sm90/") for launch in plan.launches), names_of([plan])


def test_slopes_change_in_place(cupy: Any) -> None:
    """Captured arrays are read when the call runs, and by a graph at each replay."""
    slopes, arrays = cupy.asarray(slopes_of(CASE)), [cupy.asarray(x) for x in CASE.arrays()]
    mod_kwargs = FUNCTIONS["alibi"](lambda _: slopes, CASE)
    del mod_kwargs["captured_grads"]
    out = cupy.empty(CASE.out_shape(), "float16")
    cuflash.forward(*arrays, out=out, **mod_kwargs)
    before = host(out)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        graph, _ = recorded(stream, partial(cuflash.forward, *arrays, out=out, **mod_kwargs))
        graph.launch()
        stream.synchronize()
        assert identical([out], [before])
        slopes *= 2
        graph.launch()
        stream.synchronize()
    expected = cuflash.forward(*arrays, **mod_kwargs)
    assert identical([out], [expected])
    assert not identical([expected], [before])
