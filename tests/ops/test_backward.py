"""`cuflash.backward` on NumPy and on a GPU: states of any origin, layouts, masks.

`test_backward_gpu` has tests for a GPU only, `test_bad_gradients` bad input.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import parts, problems

import cuflash
from cuflash.problem.options import ALGORITHMS
from cuflash.testing.cases import Case, numpy_dtype
from cuflash.testing.gradients import BackwardArgs, backward, backward_args, check
from cuflash.testing.layouts import host, identical, laid_out
from cuflash.testing.oracle import ULPS


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_gradients_have_the_shapes_of_their_operands_in_every_rank(rank: int, deterministic: bool, xp: Any) -> None:
    case = Case("rank", 1, 40, 50, 1, 1, 16, 8, "float32", causal=True, softcap=3.0)
    args = backward_args(case, xp)
    cut = {4: np.s_[:], 3: np.s_[0], 2: np.s_[0, :, 0]}[rank]
    cut_lse = {4: np.s_[:], 3: np.s_[0], 2: np.s_[0, 0]}[rank]
    lower = BackwardArgs(*(x[cut] for x in args[:5]), args.lse[cut_lse], args.dlse[cut_lse])
    got = backward(case, lower, deterministic=deterministic)
    for gradient, like in zip(got, (lower.q, lower.k, lower.v), strict=True):
        assert type(gradient) is type(like)
        assert gradient.shape == like.shape
    check(case, args, tuple(gradient.reshape(x.shape) for gradient, x in zip(got, args[1:4], strict=True)))


STATES = [*ALGORITHMS, "merged", "merged_float32", "out_float32"]


@pytest.mark.parametrize("origin", STATES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_out_and_lse_of_any_origin_give_the_same_gradients(dtype: str, origin: str, xp: Any) -> None:
    case = Case("origin", 2, 65, 120, 4, 2, 64, 64, dtype, window_size=(50, 20))
    out_dtype = "float32" if origin.endswith("float32") else None
    algorithm = origin if origin in ALGORITHMS else "flash2"
    args = backward_args(case, xp, algorithm=algorithm, out_dtype=out_dtype)
    if origin.startswith("merged"):
        out, lse = cuflash.merge_states(*states(case, args, 70, out_dtype))
        args = args._replace(out=out, lse=lse)
    assert args.out.dtype == numpy_dtype(out_dtype or dtype)
    # A state merged in 16 bits is rounded twice.
    check(case, args, backward(case, args), ulps=2 * ULPS[dtype])
    check(case, args, backward(case, args, deterministic=True), ulps=2 * ULPS[dtype])


def states(case: Case, args: BackwardArgs, cut: int, out_dtype: str | None = None) -> tuple[list[Any], list[Any]]:
    """Returns outs and lses over the keys before and after `cut`."""
    results = [
        cuflash.forward(args.q, args.k[keys], args.v[keys], return_lse=True, out_dtype=out_dtype, **half.arguments())
        for half, keys in parts(case, [0, cut, case.seqlen_k])
    ]
    return [out for out, _ in results], [lse for _, lse in results]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_size": (40, 30), "diagonal_offset": 5}], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_halves_of_the_keys_with_the_merged_state_give_whole_gradients(
    dtype: str, mask: dict[str, Any], deterministic: bool, xp: Any
) -> None:
    case = Case("halves", 2, 100, 150, 4, 2, 64, 64, dtype, **mask)
    args = backward_args(case, xp)
    out, lse = cuflash.merge_states(*states(case, args, 70))
    args = args._replace(out=out, lse=lse)
    results = [
        backward(half, args._replace(k=args.k[keys], v=args.v[keys]), deterministic=deterministic)
        for half, keys in parts(case, [0, 70, 150])
    ]
    (dq0, dk0, dv0), (dq1, dk1, dv1) = ([host(x) for x in part] for part in results)
    dq = (dq0.astype("f8") + dq1.astype("f8")).astype(dq0.dtype)
    # Three roundings: of each half's dq before their sum, and of out before the merge.
    check(case, args, (dq, np.concatenate([dk0, dk1], 1), np.concatenate([dv0, dv1], 1)), ulps=3 * ULPS[dtype])


HIDING = [
    Case("rows_before", 2, 200, 130, 4, 2, 64, 64, "float16", causal=True),
    Case("rows_after_and_keys_before", 1, 150, 170, 2, 1, 64, 64, "bfloat16", window_size=(3, -1), diagonal_offset=70),
    Case("rows_before_and_keys_after", 1, 129, 129, 2, 2, 64, 64, "float32", causal=True, diagonal_offset=-70),
    Case("keys_on_both_sides", 1, 70, 300, 2, 1, 64, 64, "float16", window_size=(20, 10), diagonal_offset=100),
    Case("all", 1, 65, 65, 2, 1, 64, 64, "float32", causal=True, diagonal_offset=-1000),
]


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("case", HIDING, ids=lambda case: case.name)
def test_hidden_rows_get_gradient_zero_and_do_not_change_others(case: Case, poison: float, xp: Any) -> None:
    mask = case.problem().mask
    query_range, key_range = mask.row_range(0, case.seqlen_k), mask.key_range(0, case.seqlen_q)
    out_of_range = np.r_[0 : query_range[0], query_range[1] : case.seqlen_q]
    unseen = np.r_[0 : key_range[0], key_range[1] : case.seqlen_k]
    assert len(out_of_range) + len(unseen) > 40

    def with_masked(value: float) -> BackwardArgs:
        args = BackwardArgs(*(np.array(host(x)) for x in backward_args(case, xp)))
        for x, hidden in zip(args[:5], (out_of_range, out_of_range, unseen, unseen, out_of_range), strict=True):
            x[:, hidden] = value
        args.dlse[:, :, out_of_range] = value
        return args

    args = with_masked(0.0)
    clean = backward(case, args.on(xp), deterministic=True)
    assert identical(backward(case, with_masked(poison).on(xp), deterministic=True), clean)
    for got in (clean, backward(case, with_masked(poison).on(xp))):
        check(case, args, got)
        for gradient, hidden in zip(got, (out_of_range, unseen, unseen), strict=True):
            assert not host(gradient)[:, hidden].any()


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_visible_nan_stays_out_of_hidden_rows_and_keys_beside_it(deterministic: bool, xp: Any) -> None:
    rows = Case("rows", 1, 64, 32, 4, 2, 64, 40, "float16", causal=True)  # rows 0 to 31 see nothing
    args = backward_args(rows, xp)
    args.k[0, 0] = args.v[0, 0] = np.nan
    dq = host(backward(rows, args, deterministic=deterministic)[0])
    assert np.isnan(dq[:, 32:].astype("f4")).any()
    assert not dq[:, :32].any()
    keys = Case("keys", 1, 32, 64, 4, 2, 64, 40, "float16", causal=True, diagonal_offset=0)  # keys 32 to 63 are hidden
    args = backward_args(keys, xp)
    args.q[0, 5] = args.dout[0, 5] = np.nan
    for gradient in map(host, backward(keys, args, deterministic=deterministic)[1:]):
        assert np.isnan(gradient[:, :6].astype("f4")).any()
        assert not gradient[:, 32:].any()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_head_dims_padded_with_zeros_change_nothing(dtype: str, xp: Any) -> None:
    case = Case("padded", 2, 70, 90, 4, 2, 40, 40, dtype, causal=True, softmax_scale=0.2)
    args = backward_args(case, xp)
    wide = BackwardArgs(
        *(xp.asarray(np.pad(host(x), [(0, 0)] * 3 + [(0, 24)])) for x in args[:5]), lse=args.lse, dlse=args.dlse
    )
    got = backward(replace(case, head_dim=64, head_dim_v=64), wide)
    assert not any(host(gradient)[..., 40:].any() for gradient in got)
    check(case, args, tuple(gradient[..., :40] for gradient in got))


# NaN surrounds all of them. Only in "vectors" do rows begin at multiples of 16 bytes.
AROUND = {"before": (1, 1, 1, 1)}
LAYOUTS: dict[str, dict[str, Any]] = {
    "surrounded": {},
    "vectors": {"before": (1, 1, 1, 8)},
    "heads_first": {"axis_order": (0, 2, 1, 3)},
    "transposed": {"axis_order": (3, 2, 1, 0)},
    "reversed_rows": {"steps": (1, -1, 1, 1)},
    "reversed": {"steps": (-1, -1, -1, -1)},
    "every_second": {"steps": (2, 2, 2, 1)},
    "gaps": {"steps": (1, 1, 1, 2)},
}
TILED = ("vectors", "transposed", "reversed", "gaps")  # Hopper's kernels take these layouts, some after a copy


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_any_memory_layout_gives_the_same_bits_and_reads_nothing_else(dtype: str, layout: str, xp: Any) -> None:
    case = Case("layout", 2, 65, 129, 4, 2, 40, 64, dtype, causal=True)
    args = backward_args(case, xp)
    strange = BackwardArgs(*(laid_out(x, **AROUND | LAYOUTS[layout]) for x in args))
    assert strange.q.strides != args.q.strides
    assert strange.lse.strides != args.lse.strides
    assert identical(strange, args)
    expected = backward(case, args, deterministic=True)
    generic = backward(case, args._replace(q=laid_out(args.q, **AROUND)), deterministic=True)
    check(case, args, generic)
    assert identical(backward(case, strange, deterministic=True), expected if layout in TILED else generic)
    check(case, args, backward(case, strange))
    for name in BackwardArgs._fields:  # one strange operand among ordinary ones
        mixed = args._replace(**{name: getattr(strange, name)})
        by_copies = layout in TILED or name in ("out", "lse", "dlse")
        assert identical(backward(case, mixed, deterministic=True), expected if by_copies else generic), name


@settings(max_examples=80)
@given(problems(longest=24, widest=12), st.booleans(), st.integers(0, 2**31))
def test_numpy_agrees_on_random_problems(case: Case, dlse: bool, seed: int) -> None:
    args = backward_args(case, np, seed, dlse=dlse)
    check(case, args, backward(case, args), ulps=2 * ULPS[case.dtype])
