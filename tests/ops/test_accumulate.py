"""`accumulate`, `delta` and `sm_margin`: sums of calls over parts of the keys, on NumPy and on a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from plans import ARCHS, for_any_gpu

import cuflash
from cuflash.errors import ProblemError, UnsupportedError
from cuflash.testing import gradients, oracle
from cuflash.testing.cases import Case, numpy_dtype
from cuflash.testing.layouts import host, identical

DIMS = [(64, 64), (128, 128), (32, 32), (48, 48), (96, 96), (80, 80), (60, 36), (192, 128), (256, 256)]
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (200, 30)},
    "capped": {"causal": True, "softcap": 5.0},
}
CASES = [
    Case(f"{dtype}_{d}_{dv}_{mask}", 1, 200, 420, 4, 2, d, dv, dtype, **MASKS[mask])
    for dtype in ("bfloat16", "float16", "float32")
    for d, dv in DIMS
    for mask in (("full", "causal", "window", "capped") if (d, dtype) == (128, "bfloat16") else ("causal",))
    if not (dtype == "float32" and d > 128)
]
EDGES = 0, 100, 357, 420


@pytest.fixture(
    params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu), pytest.param("any_gpu", marks=pytest.mark.gpu)]
)
def xp(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Returns the array library of a test; "any_gpu" takes the kernels for any GPU, also on Hopper."""
    with for_any_gpu() if request.param == "any_gpu" else nullcontext():
        yield importlib.import_module("numpy" if request.param == "numpy" else "cupy")


def of_library(case: Case, xp: Any) -> None:
    """Skips head dims that make no difference to NumPy."""
    if xp is np and (case.head_dim, case.head_dim_v) not in ((64, 64), (60, 36)):
        pytest.skip("NumPy has one kernel")


def parts(case: Case, edges: tuple[int, ...] = EDGES) -> list[tuple[slice, dict[str, Any]]]:
    """Returns ranges of the keys, and the keywords of a call over each."""
    offset = case.seqlen_k - case.seqlen_q
    return [(slice(a, b), case.arguments() | {"diagonal_offset": offset - a}) for a, b in pairwise(edges)]


def state(case: Case, xp: Any) -> tuple[Any, Any]:
    """Returns a state without keys. Its out is not read."""
    lse_shape = case.batch, case.heads_q, case.seqlen_q
    return xp.full(case.out_shape(), xp.nan, "float32"), xp.full(lse_shape, -xp.inf, "float32")


def accumulated(case: Case, q: Any, k: Any, v: Any, xp: Any, **more: Any) -> tuple[Any, Any]:
    """Returns the state over all keys, by a call for each part of them."""
    out, lse = state(case, xp)
    for keys, keywords in parts(case):
        got = cuflash.forward(q, k[:, keys], v[:, keys], out=out, lse=lse, accumulate=True, **keywords, **more)
        assert got is out
    return out, lse


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parts_of_the_keys_add_up_to_the_whole(case: Case, xp: Any) -> None:
    of_library(case, xp)
    arrays = [xp.asarray(x) for x in case.arrays()]
    out, lse = accumulated(case, *arrays, xp)
    # The rule of one call with a float32 out; the lse of a state is rounded once more for each part.
    oracle.assert_attention(case, list(map(host, arrays)), host(out))
    oracle.assert_attention(case, list(map(host, arrays)), None, host(lse), ulps=4)
    again = accumulated(case, *arrays, xp)
    assert identical(list(map(host, again)), [host(out), host(lse)])


@pytest.mark.parametrize("case", CASES[:6], ids=lambda case: case.name)
def test_the_error_is_no_larger_than_that_of_merged_float32_parts(case: Case, xp: Any) -> None:
    arrays = [xp.asarray(x) for x in case.arrays()]
    q, k, v = arrays
    exact = cuflash.forward(*(np.asarray(host(x), "float64") for x in arrays), **case.arguments())
    out, _ = accumulated(case, q, k, v, xp)
    wide = {} if case.dtype == "float32" else {"out_dtype": "float32"}
    states = [cuflash.forward(q, k[:, keys], v[:, keys], return_lse=True, **wide, **kw) for keys, kw in parts(case)]
    merged, _ = cuflash.merge_states([x for x, _ in states], [x for _, x in states])
    errors = [np.abs(host(x) - exact).max() for x in (out, merged)]
    assert errors[0] <= errors[1] + 4 * np.finfo("float32").eps * np.abs(exact).max(), errors


def test_rows_that_see_nothing_keep_their_state(xp: Any) -> None:
    for dtype, dim in (("bfloat16", 64), ("float16", 128), ("float32", 64)):
        case = Case("few", 1, 200, 64, 2, 2, dim, dim, dtype, causal=True, diagonal_offset=-70)
        q, k, v = (xp.asarray(x) for x in case.arrays())
        out, lse = xp.full(case.out_shape(), 7.0, "float32"), xp.full((1, 2, 200), 3.0, "float32")
        cuflash.forward(q, k, v, out=out, lse=lse, accumulate=True, **case.arguments())
        assert bool((out[:, :70] == 7.0).all() and (lse[..., :70] == 3.0).all())
        assert bool((lse[..., 70:] > 3.0).all())


def test_views_of_any_strides_are_states(xp: Any) -> None:
    case = Case("views", 2, 130, 100, 4, 2, 64, 64, "float16")
    q, k, v = (xp.asarray(x) for x in case.arrays())
    whole, whole_lse = cuflash.forward(q, k, v, return_lse=True, out_dtype="float32")
    for order in ((0, 1, 2, 3), (0, 2, 1, 3)):
        shape = [(2, 260, 4, 67)[axis] for axis in order]
        big = xp.full(shape, 5.0, "float32").transpose([order.index(axis) for axis in range(4)])
        lses = xp.full((2, 4, 260), -xp.inf, "float32")
        out, lse = big[:, ::2, :, :64], lses[..., ::2]
        assert cuflash.forward(q, k, v, out=out, lse=lse, accumulate=True) is out
        np.testing.assert_allclose(host(out), host(whole), atol=1e-6)
        np.testing.assert_allclose(host(lse), host(whole_lse), atol=1e-5)
        assert bool((big[:, 1::2] == 5.0).all() and (big[..., 64:] == 5.0).all())
        assert bool(xp.isneginf(lses[..., 1::2]).all())


def test_packed_sequences_with_sinks_and_unused_rows(xp: Any) -> None:
    rng = np.random.default_rng(0)
    for dtype in ("float16", "float32"):
        q, k, v = (xp.asarray(rng.standard_normal((450, 4, 64)).astype(dtype)) for _ in range(3))
        bounds = {f"cu_seqlens_{side}": xp.asarray(np.array([0, 37, 37, 401], "int32")) for side in "qk"}
        keywords = {**bounds, "causal": True, "seqused_k": xp.asarray(np.array([37, 0, 300], "int32"))}
        sinks = xp.asarray(rng.standard_normal(4).astype("float32"))
        wide = {} if dtype == "float32" else {"out_dtype": "float32"}
        whole, whole_lse = cuflash.forward(q, k, v, sinks=sinks, return_lse=True, **wide, **keywords)
        out, lse = xp.full(q.shape, 2.0, "float32"), xp.full((4, 450), -xp.inf, "float32")
        cuflash.forward(q, k, v, sinks=sinks, out=out, lse=lse, accumulate=True, **keywords)
        used = slice(0, 401)
        np.testing.assert_allclose(host(lse), host(whole_lse), atol=1e-5)
        visible = ~np.isneginf(host(lse)[0, used])
        np.testing.assert_allclose(host(out)[used][visible], host(whole)[used][visible], atol=1e-6)
        assert bool((out[401:] == 2.0).all())


@pytest.mark.parametrize("deterministic", [False, True], ids=["any_order", "deterministic"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_of_parts_add_up_to_those_of_the_whole(case: Case, deterministic: bool, xp: Any) -> None:
    of_library(case, xp)
    args = gradients.backward_args(case, xp)
    dout, q, k, v, out, lse, dlse = args
    first = [xp.full(x.shape, 0.0, "float32") for x in (q, k, v)]
    more: dict[str, Any] = {"dlse": dlse, "return_delta": True}
    for keys, keywords in parts(case):
        targets = first[0], first[1][:, keys], first[2][:, keys]
        got = cuflash.backward(dout, q, k[:, keys], v[:, keys], out, lse, grads_out=targets, accumulate=True,
                               deterministic=deterministic, **keywords, **more)  # fmt: skip
        assert all(x is y for x, y in zip(got, targets, strict=False))
        if len(got) == 4:
            more = {"delta": got[3]}
    # The rule is for results in the dtype of the inputs.
    gradients.check(case, args, tuple(host(x).astype(numpy_dtype(case.dtype)) for x in first))


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [{}, {"causal": True, "diagonal_offset": -100}, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (6, 1)], ids=str)
def test_many_queries_add_to_the_rows_of_all(heads: tuple[int, int], mask: dict[str, Any], cupy: Any) -> None:
    """Queries enough for Hopper's tile of 80, whose dq is transposed, and keys that thread blocks share."""
    case = Case("long", 1, 8751, 420, *heads, 128, 128, "bfloat16", **mask)
    args = gradients.backward_args(case, cupy)
    for deterministic in (False, True):
        calls = []
        for _ in range(2):
            totals = [cupy.full(x.shape, 1.0, "float32") for x in args[1:4]]
            gradients.backward(case, args, grads_out=totals, accumulate=True, deterministic=deterministic)
            calls.append(list(map(host, totals)))
        assert not deterministic or identical(*calls)
        hidden = host(args.lse)[0, 0] == -np.inf
        assert bool((calls[0][0][:, hidden] == 1.0).all())
        gradients.check(case, args, tuple((x - 1.0).astype(numpy_dtype(case.dtype)) for x in calls[0]))


def test_sums_go_on_from_what_the_arrays_hold_and_repeat(xp: Any) -> None:
    for dtype, dim in (("bfloat16", 128), ("float16", 256), ("float32", 64)):
        case = Case("held", 1, 300, 300, 2, 2, dim, dim, dtype, causal=True, diagonal_offset=-40)
        args = gradients.backward_args(case, xp)
        zeros, ones = ([xp.full(x.shape, value, "float32") for x in args[1:4]] for value in (0.0, 1.0))
        for targets in (zeros, ones):
            gradients.backward(case, args, grads_out=targets, accumulate=True, deterministic=True)
        for x, y in zip(zeros, ones, strict=True):
            np.testing.assert_allclose(host(x) + 1.0, host(y), atol=1e-5)
        # Rows 0 … 39 and the last 40 keys are in no visible pair.
        assert bool(
            (ones[0][:, :40] == 1.0).all() and (ones[1][:, 260:] == 1.0).all() and (ones[2][:, 260:] == 1.0).all()
        )
        again = [xp.full(x.shape, 1.0, "float32") for x in args[1:4]]
        gradients.backward(case, args, grads_out=again, accumulate=True, deterministic=True)
        assert identical(list(map(host, again)), list(map(host, ones)))


def test_delta_is_the_row_sums(xp: Any) -> None:
    for layout in ("dense", "packed"):
        case = Case("delta", 1, 200, 150, 4, 2, 64, 64, "float16", window_size=(30, 10), diagonal_offset=-20)
        args = gradients.backward_args(case, xp)
        keywords: dict[str, Any] = {}
        if layout == "packed":
            edges = {"cu_seqlens_q": [0, 60, 190], "cu_seqlens_k": [0, 70, 140]}
            keywords = {name: xp.asarray(np.array(x, "int32")) for name, x in edges.items()}
            args = gradients.BackwardArgs(*(x[0] for x in args))
            out, lse = cuflash.forward(*args[1:4], return_lse=True, **case.arguments(), **keywords)
            args = args._replace(out=out, lse=lse)
        *grads, delta = gradients.backward(case, args, return_delta=True, **keywords)
        dout, _, _, _, out, lse, dlse = (host(x).astype("float32") for x in args)
        expected = np.where(np.isneginf(lse), 0.0, (dout * out).sum(-1).swapaxes(-1, -2) - dlse)
        assert np.isneginf(lse).any()
        np.testing.assert_allclose(host(delta), expected, atol=1e-4)
        same = gradients.backward(case, args._replace(dlse=None, out=xp.full_like(args.out, xp.nan)), delta=delta,
                                  deterministic=True, **keywords)  # fmt: skip
        plain = gradients.backward(case, args, deterministic=True, **keywords)
        assert identical(list(map(host, same)), list(map(host, plain)))
        assert len(grads) == 3


def test_captured_gradients_come_before_delta() -> None:
    case = Case("sinks", 1, 20, 30, 2, 2, 16, 16, "float32")
    args, sinks = gradients.backward_args(case, np), np.ones(2, "float32")
    out, lse = cuflash.forward(*args[1:4], sinks=sinks, return_lse=True)
    args = args._replace(out=out, lse=lse)
    *_, grads, delta = gradients.backward(case, args, sinks=sinks, captured_grads=(sinks,), return_delta=True)
    assert grads[0].shape == (2,)
    assert delta.shape == lse.shape


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_a_margin_changes_no_bits(mask: str, dims: tuple[int, int], cupy: Any) -> None:
    case = Case("margin", 2, 1500, 1500, 8, 2, *dims, "bfloat16", **MASKS[mask])
    args = gradients.backward_args(case, cupy)
    expected = [args.out, args.lse, *gradients.backward(case, args, deterministic=True)]
    for margin in (1, 16, 100):
        out, lse = cuflash.forward(*args[1:4], return_lse=True, sm_margin=margin, **case.arguments())
        grads = gradients.backward(case, args, deterministic=True, sm_margin=margin)
        assert identical([host(x) for x in (out, lse, *grads)], [host(x) for x in expected])
        gradients.check(case, args, gradients.backward(case, args, sm_margin=margin))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no lse": ({"lse": None}, "lse is None"),
    "no out": ({"out": None}, "out is None"),
    "no flag": ({"accumulate": 1}, "accumulate=1"),
    "algorithm": ({"algorithm": "flash1"}, "neither algorithm"),
    "out_dtype": ({"out_dtype": "float32"}, "neither algorithm nor out_dtype"),
    "narrow out": ({"out": np.zeros((1, 4, 2, 16), "float16")}, "out has dtype float16"),
    "shape of lse": ({"lse": np.zeros((1, 2, 5), "float32")}, "lse has shape"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_states_are_validated_before_anything_runs(name: str, nothing_runs: None) -> None:
    q = np.zeros((1, 4, 2, 16), "float16")
    keywords = {"out": np.zeros(q.shape, "float32"), "lse": np.zeros((1, 2, 4), "float32"), "accumulate": True}
    with pytest.raises(ProblemError, match=REFUSED[name][1]):
        cuflash.forward(q, q, q, **(keywords | REFUSED[name][0]))


def test_gradients_to_add_to_are_validated(nothing_runs: None) -> None:
    q, lse = np.zeros((1, 4, 2, 16), "float16"), np.zeros((1, 2, 4), "float32")
    wide = [np.zeros(q.shape, "float32") for _ in range(3)]
    for keywords, text in (
        ({"accumulate": True}, "give grads_out"),
        ({"accumulate": True, "grads_out": (*wide[:2], None)}, "give grads_out"),
        ({"accumulate": True, "grads_out": (*wide[:2], q.copy())}, "dv has dtype float16"),
        ({"grads_out": wide}, "dq has dtype float32"),
        ({"delta": lse, "dlse": lse}, "leave dlse out"),
        ({"delta": lse, "return_delta": True}, "leave return_delta out"),
        ({"delta": lse[..., :3]}, "delta has shape"),
    ):
        with pytest.raises(ProblemError, match=text):
            cuflash.backward(q, q, q, q, q, lse, **keywords)  # type: ignore[arg-type]


def test_plans_of_sums() -> None:
    q, k = (1, 4096, 8, 128), (1, 8192, 2, 128)
    for op in ("forward", "backward"):
        plan = cuflash.plan(q, k, k, op=op, dtype="bfloat16", device="sm_90", accumulate=True)
        assert "accumulates" in plan.kernel
        assert plan.out_bytes == 4 * 128 * (8 * 4096 if op == "forward" else 8 * 4096 + 2 * 2 * 8192)
    with pytest.raises(ProblemError, match="accumulate"):
        cuflash.plan(q, k, op="lse", dtype="bfloat16", device="sm_90", accumulate=True)


@pytest.mark.parametrize(("dtype", "limit"), [("float16", 256), ("bfloat16", 256), ("float32", 128)])
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_limits_of_head_dim_v(dtype: str, limit: int, arch: str, head_dim: int) -> None:
    q, fits, wide = ((1, 4096, 8, dim) for dim in (head_dim, limit, limit + 8))
    assert "accumulates" in cuflash.plan(q, q, fits, dtype=dtype, device=arch, accumulate=True).kernel
    with pytest.raises(UnsupportedError, match=f"up to {limit} on .*merge_states"):
        cuflash.plan(q, q, wide, dtype=dtype, device=arch, accumulate=True)
