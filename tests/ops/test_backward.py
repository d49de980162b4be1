"""`cuflash.backward` as it is called, on NumPy and on a GPU alike: states of any origin, layouts, masks, identities.

What only a GPU has stands in `test_backward_gpu`, what is refused in `test_bad_gradients`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import oracle
import pytest
from gradients import Given, backward, check, given_for, units_of
from hypothesis import given, settings
from hypothesis import strategies as st
from libraries import host, identical
from oracle import ULPS, Array
from problems import parts, problems

import cuflash
from cuflash.bench.cases import Case, numpy_dtype
from cuflash.problem.options import ALGORITHMS


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_gradients_have_the_shapes_of_their_operands_in_every_rank(rank: int, deterministic: bool, xp: Any) -> None:
    case = Case("rank", 1, 40, 50, 1, 1, 16, 8, "float32", causal=True, softcap=3.0)
    made = given_for(case, xp)
    cut = {4: np.s_[:], 3: np.s_[0], 2: np.s_[0, :, 0]}[rank]
    cut_lse = {4: np.s_[:], 3: np.s_[0], 2: np.s_[0, 0]}[rank]
    lower = Given(*(x[cut] for x in made[:5]), made.lse[cut_lse], made.dlse[cut_lse])
    got = backward(case, lower, deterministic=deterministic)
    for gradient, like in zip(got, (lower.q, lower.k, lower.v), strict=True):
        assert type(gradient) is type(like)
        assert gradient.shape == like.shape
    check(case, made, tuple(gradient.reshape(x.shape) for gradient, x in zip(got, made[1:4], strict=True)))


STATES = [*ALGORITHMS, "merged", "merged_float32", "out_float32"]


@pytest.mark.parametrize("origin", STATES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_out_and_lse_of_any_origin_give_the_same_gradients(dtype: str, origin: str, xp: Any) -> None:
    case = Case("origin", 2, 65, 120, 4, 2, 64, 64, dtype, window_size=(50, 20))
    out_dtype = "float32" if origin.endswith("float32") else None
    algorithm = origin if origin in ALGORITHMS else "flash2"
    made = given_for(case, xp, algorithm=algorithm, out_dtype=out_dtype)
    if origin.startswith("merged"):
        out, lse = cuflash.merge_states(*states(case, made, 70, out_dtype))
        made = made._replace(out=out, lse=lse)
    assert made.out.dtype == numpy_dtype(out_dtype or dtype)
    # A state that was merged in 16 bits has been rounded twice.
    check(case, made, backward(case, made), ulps=2 * ULPS[dtype])
    check(case, made, backward(case, made, deterministic=True), ulps=2 * ULPS[dtype])


def states(case: Case, made: Given, cut: int, out_dtype: str | None = None) -> tuple[list[Any], list[Any]]:
    """Outs and lses over the keys before and after `cut`."""
    results = [
        cuflash.forward(made.q, made.k[keys], made.v[keys], return_lse=True, out_dtype=out_dtype, **half.arguments())
        for half, keys in parts(case, [0, cut, case.seqlen_k])
    ]
    return [out for out, _ in results], [lse for _, lse in results]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_size": (40, 30), "diagonal_offset": 5}], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_halves_of_the_keys_with_the_merged_state_give_the_gradients_of_the_whole(
    dtype: str, mask: dict[str, Any], deterministic: bool, xp: Any
) -> None:
    case = Case("halves", 2, 100, 150, 4, 2, 64, 64, dtype, **mask)
    made = given_for(case, xp)
    out, lse = cuflash.merge_states(*states(case, made, 70))
    made = made._replace(out=out, lse=lse)
    found = [
        backward(half, made._replace(k=made.k[keys], v=made.v[keys]), deterministic=deterministic)
        for half, keys in parts(case, [0, 70, 150])
    ]
    (dq0, dk0, dv0), (dq1, dk1, dv1) = ([host(x) for x in part] for part in found)
    dq = (dq0.astype("f8") + dq1.astype("f8")).astype(dq0.dtype)
    # Each half's dq was rounded before they were added, and out before it was merged.
    check(case, made, (dq, np.concatenate([dk0, dk1], 1), np.concatenate([dv0, dv1], 1)), ulps=3 * ULPS[dtype])


def test_rows_of_p_sum_to_one_and_rows_of_ds_to_dlse(xp: Any) -> None:
    case = Case("sums", 2, 70, 64, 4, 2, 64, 64, "float32", window_size=(30, 9))
    made = given_for(case, xp)
    sees = slice(*case.problem().mask.row_range(0, 64))
    # Keys that share a coordinate: along it, dq is the sum of the row of ds, times that coordinate and the scale.
    made.k[..., -1] = 2.0
    # Values that are unit vectors: out is p itself, and dv = pᵀ dout.
    made.v[...] = xp.eye(64, dtype="f4")[:, None]
    out, lse = cuflash.forward(made.q, made.k, made.v, return_lse=True, **case.arguments())
    made = made._replace(out=out, lse=lse)
    dq, _, dv = map(host, backward(case, made))
    wanted = np.zeros_like(dq[..., -1])
    wanted[:, sees] = 2.0 / 8.0 * host(made.dlse).transpose(0, 2, 1)[:, sees]
    units = units_of(case, made)
    oracle.assert_units("rows of ds", dq[..., -1], wanted, 16, units[0])
    # (b, i, kv head, group, key or column)
    p, dout = (host(x).astype("f8").reshape(2, 70, 2, 2, 64) for x in (made.out, made.dout))
    oracle.assert_units("dv", dv, np.einsum("bihgj,bihgc->bjhc", p, dout), 16, units[2])
    oracle.assert_units("rows of p", p.sum(axis=-1)[:, sees].astype("f4"), 1.0, 16)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_the_gradient_of_lse_alone_is_p_times_k_and_p_transposed_times_q(softcap: float, xp: Any) -> None:
    case = Case("dlse", 2, 70, 64, 4, 2, 64, 64, "float32", causal=True, diagonal_offset=-3, softcap=softcap)
    made = given_for(case, xp)
    dlse = made.dlse.transpose(0, 2, 1)[..., None]
    alone = made._replace(dout=xp.zeros_like(made.dout))
    dq, dk, dv = map(host, backward(case, alone))
    assert not dv.any()
    if not softcap:
        by_forward = cuflash.forward(made.q, made.k, made.k, **case.arguments())  # p k
        units = units_of(case, alone)
        oracle.assert_units("dq", dq, host(dlse * by_forward) / 8, 16, units[0])
        _, _, by_dv = backward(case, made._replace(dout=dlse * made.q, v=made.k, out=by_forward))  # pᵀ (dlse q)
        oracle.assert_units("dk", dk, host(by_dv) / 8, 16, units[1])
    # Scores, capped or not, stay the same when q grows by as much as k shrinks.
    products = [x.astype("f8") * host(y) for x, y in ((dq, made.q), (dk, made.k))]
    sums = [x.sum() for x in products]
    oracle.assert_units("q and k", np.float32(sums[0]), sums[1], 4, float(np.abs(products[0]).sum()))


DIFFERENCED = [
    Case("group", 2, 40, 70, 4, 2, 64, 40, "float32", causal=True),
    Case("window", 1, 70, 40, 2, 2, 40, 64, "float32", window_size=(12, 9)),
    Case("softcap", 1, 60, 60, 2, 1, 64, 64, "float32", causal=True, diagonal_offset=-5, softcap=1.5),
]


@pytest.mark.parametrize("case", DIFFERENCED, ids=lambda case: case.name)
def test_a_step_changes_the_loss_by_as_much_as_the_gradients_say(case: Case, xp: Any) -> None:
    # float32 holds the loss to 1e-7 of its terms, so the step there is the longest that is still straight.
    dtype, step, within = ("float64", 1e-5, 1e-7) if xp is np else ("float32", 4e-3, 2e-3)
    case = replace(case, dtype=dtype)
    made = given_for(case, xp)
    dout, dlse = host(made.dout).astype("f8"), host(made.dlse).astype("f8")
    rng = np.random.default_rng(11)
    direction = [xp.asarray(rng.standard_normal(x.shape).astype(dtype)) for x in made[1:4]]

    def loss(length: float) -> float:
        moved = (x + xp.asarray(length, dtype) * along for x, along in zip(made[1:4], direction, strict=True))
        out, lse = cuflash.forward(*moved, return_lse=True, **case.arguments())
        lse = np.where(np.isneginf(host(lse)), 0, host(lse))
        return float((dout * host(out)).sum() + (dlse * lse).sum())

    slope = (loss(step) - loss(-step)) / (2 * step)
    gradients = [host(x).astype("f8") for x in backward(case, made)]
    size = np.sqrt(sum((gradient**2).sum() for gradient in gradients))
    got = sum((gradient * host(along)).sum() for gradient, along in zip(gradients, direction, strict=True))
    assert abs(got - slope) <= within * size


HIDING = [
    Case("rows_before", 2, 200, 130, 4, 2, 64, 64, "float16", causal=True),
    Case("rows_after_and_keys_before", 1, 150, 170, 2, 1, 64, 64, "bfloat16", window_size=(3, -1), diagonal_offset=70),
    Case("rows_before_and_keys_after", 1, 129, 129, 2, 2, 64, 64, "float32", causal=True, diagonal_offset=-70),
    Case("keys_on_both_sides", 1, 70, 300, 2, 1, 64, 64, "float16", window_size=(20, 10), diagonal_offset=100),
    Case("all", 1, 65, 65, 2, 1, 64, 64, "float32", causal=True, diagonal_offset=-1000),
]


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("case", HIDING, ids=lambda case: case.name)
def test_what_nobody_sees_gets_zeros_and_gives_nothing_whatever_it_holds(case: Case, poison: float, xp: Any) -> None:
    mask = case.problem().mask
    seeing, seen = mask.row_range(0, case.seqlen_k), mask.key_range(0, case.seqlen_q)
    blind = np.r_[0 : seeing[0], seeing[1] : case.seqlen_q]
    unseen = np.r_[0 : seen[0], seen[1] : case.seqlen_k]
    assert len(blind) + len(unseen) > 40

    def with_hidden(value: float) -> Given:
        made = Given(*(np.array(host(x)) for x in given_for(case, xp)))
        for x, hidden in zip(made[:5], (blind, blind, unseen, unseen, blind), strict=True):
            x[:, hidden] = value
        made.dlse[:, :, blind] = value
        return made

    made = with_hidden(0.0)
    clean = backward(case, made.on(xp), deterministic=True)
    assert identical(backward(case, with_hidden(poison).on(xp), deterministic=True), clean)
    for got in (clean, backward(case, with_hidden(poison).on(xp))):
        check(case, made, got)
        for gradient, hidden in zip(got, (blind, unseen, unseen), strict=True):
            assert not host(gradient)[:, hidden].any()


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_nan_that_is_seen_stays_out_of_rows_and_keys_beside_it_that_see_nothing(deterministic: bool, xp: Any) -> None:
    rows = Case("rows", 1, 64, 32, 4, 2, 64, 40, "float16", causal=True)  # rows 0 to 31 see nothing
    made = given_for(rows, xp)
    made.k[0, 0] = made.v[0, 0] = np.nan
    dq = host(backward(rows, made, deterministic=deterministic)[0])
    assert np.isnan(dq[:, 32:].astype("f4")).any()
    assert not dq[:, :32].any()
    keys = Case("keys", 1, 32, 64, 4, 2, 64, 40, "float16", causal=True, diagonal_offset=0)  # 32 to 63 are not seen
    made = given_for(keys, xp)
    made.q[0, 5] = made.dout[0, 5] = np.nan
    for gradient in map(host, backward(keys, made, deterministic=deterministic)[1:]):
        assert np.isnan(gradient[:, :6].astype("f4")).any()
        assert not gradient[:, 32:].any()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_head_dims_padded_with_zeros_change_nothing(dtype: str, xp: Any) -> None:
    case = Case("padded", 2, 70, 90, 4, 2, 40, 40, dtype, causal=True, softmax_scale=0.2)
    made = given_for(case, xp)
    wide = Given(
        *(xp.asarray(np.pad(host(x), [(0, 0)] * 3 + [(0, 24)])) for x in made[:5]), lse=made.lse, dlse=made.dlse
    )
    got = backward(replace(case, head_dim=64, head_dim_v=64), wide)
    assert not any(host(gradient)[..., 40:].any() for gradient in got)
    check(case, made, tuple(gradient[..., :40] for gradient in got))


LAYOUTS = ("surrounded", "vectors", "heads_first", "transposed", "reversed_rows", "reversed", "every_second", "gaps")


def laid_out(x: Array, layout: str, xp: Any) -> Any:
    """x in memory of xp that is laid out like this, with NaN wherever x is not: around it and between its elements."""
    around, steps, order = [1] * x.ndim, [1] * x.ndim, list(range(x.ndim))
    if layout == "vectors":  # rows begin at multiples of 16 bytes, as nowhere else here
        around[-1] = 8
    elif layout == "heads_first":
        order[1:3] = 2, 1
    elif layout == "transposed":
        order.reverse()
    elif layout == "reversed_rows":
        steps[1] = -1
    elif layout == "reversed":
        steps = [-1] * x.ndim
    elif layout == "every_second":
        steps[:-1] = [2] * (x.ndim - 1)
    elif layout == "gaps":
        steps[-1] = 2
    lengths = [2 * margin + n * abs(step) for margin, n, step in zip(around, x.shape, steps, strict=True)]
    where = tuple(
        slice(margin, margin + n * step, step) if step > 0 else slice(margin + n - 1, margin - 1, -1)
        for margin, n, step in zip(around, x.shape, steps, strict=True)
    )
    memory = np.full([lengths[axis] for axis in order], np.nan, x.dtype)
    back = tuple(map(order.index, range(x.ndim)))
    memory.transpose(back)[where] = x
    return xp.asarray(memory).transpose(back)[where]


TILED = ("vectors", "transposed", "reversed", "gaps")  # for which Hopper has a kernel of its own, if only by a copy


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_any_memory_layout_gives_the_same_bits_and_reads_nothing_else(dtype: str, layout: str, xp: Any) -> None:
    case = Case("layout", 2, 65, 129, 4, 2, 40, 64, dtype, causal=True)
    made = given_for(case, xp)
    strange = Given(*(laid_out(host(x), layout, xp) for x in made))
    assert strange.q.strides != made.q.strides
    assert strange.lse.strides != made.lse.strides
    assert identical(strange, made)
    wanted = backward(case, made, deterministic=True)
    generic = backward(case, made._replace(q=laid_out(host(made.q), "surrounded", xp)), deterministic=True)
    check(case, made, generic)
    assert identical(backward(case, strange, deterministic=True), wanted if layout in TILED else generic)
    check(case, made, backward(case, strange))
    for name in Given._fields:  # one strange operand among ordinary ones
        mixed = made._replace(**{name: getattr(strange, name)})
        by_copies = layout in TILED or name in ("out", "lse", "dlse")
        assert identical(backward(case, mixed, deterministic=True), wanted if by_copies else generic), name


@settings(max_examples=80)
@given(problems(longest=24, widest=12), st.booleans(), st.integers(0, 2**31))
def test_numpy_agrees_on_random_problems(case: Case, dlse: bool, seed: int) -> None:
    made = given_for(case, np, seed, dlse=dlse)
    check(case, made, backward(case, made), ulps=2 * ULPS[case.dtype])
