"""Variable-length sequences in NumPy: rows of each sequence, missing keys, and rows that stay untouched.

`ops/test_sequences` compares the results of calls with float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from libraries import same

import cuflash
from cuflash import reference
from cuflash.problem.array_spec import ArraySpec
from cuflash.problem.operands import VARLEN_OPS
from cuflash.problem.options import ALGORITHMS, Options
from cuflash.problem.problem import Problem
from cuflash.reference import sequences
from cuflash.reference.sequences import One, each, run
from cuflash.testing import oracle
from cuflash.testing.sequences import FAR, Sequences, VarlenArrays, assembled, check, varlen_arrays

pytestmark = pytest.mark.filterwarnings("error")
PAGED = Sequences("paged", (3, 1, 0, 9), (40, 17, 5, 33), "packed", "paged", used_k=True, page_size=3)
USED = Sequences("used", (3, 0, 5), (4, 6, 0), used_q=True, used_k=True, spare_q=(2, 1, 0), spare_k=(0, 1, 2))
# Pages of a sequence's keys, and the ranges of existing keys.
HOLES = {
    "all": ([2, 0, 5, 1], [(0, 4)]),
    "none": ([-1, -1, -1], [(0, 0)]),
    "no_keys": ([], [(0, 0)]),
    "first": ([-1, 3, 3], [(1, 3)]),
    "last": ([3, 3, -1], [(0, 2)]),
    "middle": ([0, -1, -1, 4, -1, 7], [(0, 1), (3, 4), (5, 6)]),
}


def problem_of(inputs: VarlenArrays, **options: Any) -> Problem:
    arguments = inputs.arguments()
    specs = []
    for operand in VARLEN_OPS["forward"].inputs:
        x = arguments.get(operand.name)
        specs.append(None if x is None else ArraySpec.contiguous(x.shape, x.dtype.name))
    return Problem.from_specs(VARLEN_OPS["forward"], specs, Options(**inputs.sequences.options(), **options))


@pytest.mark.parametrize("name", HOLES)
def test_keys_that_are_there_are_ranges_between_those_that_are_not(name: str) -> None:
    rows, expected = HOLES[name]
    one = One(0, slice(0, 1), (np.array(rows, int), np.arange(len(rows))))
    assert [(run.start, run.stop) for run in one.runs()] == expected


@pytest.mark.parametrize("case", [PAGED, USED, replace(PAGED, place_k="cache"), replace(PAGED, place_k="packed")])
def test_each_sequence_with_queries_has_its_rows_and_keys(case: Sequences) -> None:
    inputs = varlen_arrays(case)
    by_number = dict(each(problem_of(inputs), inputs.varlen_kwargs))
    assert sorted(by_number) == [b for b, count in enumerate(case.queries) if count]
    for b, one in by_number.items():
        queries, keys = inputs.queries[b], inputs.keys[b]
        assert np.r_[one.queries].tolist() == queries[1].tolist()
        assert {*np.ravel(one.batch_q).tolist()} >= {*queries[0].tolist()}
        same(one.keys, keys)


def test_keys_outside_the_pool_are_marked_and_outside_rows_left_out() -> None:
    inputs = varlen_arrays(PAGED)
    table = inputs.varlen_kwargs["page_table"].copy()
    table[0, 1], table[1, 0] = len(inputs.k), -FAR - 1
    varlen_kwargs = inputs.varlen_kwargs | {"page_table": table}
    by_number = dict(each(problem_of(inputs), varlen_kwargs))
    assert np.flatnonzero(by_number[0].keys[0] < 0).tolist() == [3, 4, 5]
    assert np.flatnonzero(by_number[1].keys[0] < 0).tolist() == [0, 1, 2]
    packed = varlen_arrays(replace(USED, queries=(3, 1, 5)))
    wild = packed.varlen_kwargs | {"cu_seqlens_k": np.array([FAR, -FAR - 1, 9, 3], np.int32)}
    used = wild | {"seqused_k": np.full(3, FAR, np.int32)}
    # Sequences without visible keys come first: if bounds decrease, they do not overwrite computed rows.
    (_, no_keys), (_, with_keys) = each(problem_of(packed), used)
    assert [one.keys[1].tolist() for one in (with_keys, no_keys)] == [list(range(9)), []]
    for name, rows in (("batch_q", 0), ("queries", 1)):
        assert getattr(no_keys, name).tolist() == [*packed.queries[0][rows], *packed.queries[2][rows]]


@pytest.mark.usefixtures("unchecked_integers")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_size": (7, 1), "softcap": 3.0}], ids=str)
def test_keys_with_holes_match_a_dense_problem_with_hidden_keys(
    mask: dict[str, Any], dtype: str, algorithm: str
) -> None:
    inputs = varlen_arrays(replace(PAGED, dtype=dtype, **mask)).without_pages(1)
    check(inputs, *cuflash.forward(**inputs.arguments(), algorithm=algorithm, return_lse=True))


@pytest.mark.usefixtures("unchecked_integers")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_results_over_ranges_of_keys_are_rounded_once_after_the_merge(dtype: str) -> None:
    inputs = varlen_arrays(replace(PAGED, page_size=1, dtype=dtype)).without_pages(1)
    assert max(len(one.runs()) for _, one in each(problem_of(inputs), inputs.varlen_kwargs)) > 5
    out, wide = (cuflash.forward(**inputs.arguments(), out_dtype=name) for name in (None, "float32"))
    np.testing.assert_array_equal(out, wide.astype(out.dtype))
    exact, near = assembled(inputs)["out"]
    oracle.assert_close("out", wide, exact[0], near[0])
    assert np.abs(wide - exact[0]).max() < np.abs(out.astype("f8") - exact[0]).max()


def test_rows_that_are_not_used_are_not_even_written() -> None:
    inputs = varlen_arrays(USED)
    named = {name: getattr(inputs, name) for name in "qkv"} | inputs.varlen_kwargs
    out = np.full((*inputs.q.shape[:3], inputs.sequences.dims[1]), 7.0, inputs.q.dtype)
    results = run(problem_of(inputs), reference.forward, named, out)
    assert results[0] is out
    unused = inputs.unused("q")
    assert (out[unused] == 7.0).all()
    assert (out[~unused] != 7.0).any(axis=(-1, -2)).all()
    fresh = run(problem_of(inputs), reference.forward, named, None)
    np.testing.assert_array_equal(fresh[0][~unused], out[~unused])
    assert not fresh[0][unused].any()
    same([fresh[1]], [results[1]])


def test_what_is_computed_with_is_the_rows_of_each_sequence_alone() -> None:
    inputs = varlen_arrays(USED)
    shapes = []

    def compute(problem: Problem, *arrays: Any) -> Any:
        assert problem.seqlen_info is None
        shapes.append((problem.batch, problem.seqlen_q, problem.seqlen_k, *(x.shape[:2] for x in arrays)))
        return reference.forward(problem, *arrays)

    run(problem_of(inputs), compute, {name: getattr(inputs, name) for name in "qkv"} | inputs.varlen_kwargs, None)
    lengths = zip(inputs.sequences.queries, inputs.sequences.keys, strict=True)
    assert sorted(shapes) == sorted((1, n, m, (1, n), (1, m), (1, m)) for n, m in lengths if n)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Returns a function that counts dense problems since its last call."""
    lengths: list[int] = []
    alone = sequences._alone
    monkeypatch.setattr(sequences, "_alone", lambda *args: lengths.append(1) or alone(*args))

    def count() -> int:
        calls = len(lengths)
        lengths.clear()
        return calls

    return count


MANY = 10**5


def test_many_sequences_without_queries_cost_no_step_of_a_loop(counted: Callable[[], int]) -> None:
    """One sequence among them has rows; gradients of the other sequences' keys are 0."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((rows, 2, 8)).astype("f4") for rows in (3, 5, 5))
    bounds_q, bounds_k = np.zeros(MANY + 1, np.int32), np.zeros(MANY + 1, np.int32)
    bounds_q[MANY // 2 :], bounds_k[MANY // 2 :], bounds_k[-1] = 3, 4, 5
    varlen_kwargs = {"cu_seqlens_q": bounds_q, "cu_seqlens_k": bounds_k, "max_seqlen_q": 3, "max_seqlen_k": 5}
    out, lse = cuflash.forward(q, k, v, return_lse=True, **varlen_kwargs)
    alone, alone_lse = cuflash.forward(q[None], k[None, :4], v[None, :4], return_lse=True)
    same([out, lse], [alone[0], alone_lse[0]])
    same([cuflash.lse(q, k, **varlen_kwargs)], [lse])
    grads = cuflash.backward(out, q, k, v, out, lse, **varlen_kwargs)
    expected = cuflash.backward(alone, q[None], k[None, :4], v[None, :4], alone, alone_lse)
    same([grads[0], *(x[:4] for x in grads[1:])], [x[0] for x in expected])
    assert not any(x[4:].any() for x in grads[1:])
    assert counted() == 3  # one in each call


def ones(*begin: int, heads: int = 1) -> Any:
    return np.ones((*begin, heads, 4), "f4")


def each_of(number: int, *shape: int) -> Any:
    return np.full((MANY, *shape), number, np.int32)


BOUNDS = np.arange(MANY + 1, dtype=np.int32)
# Many sequences, each with a query that sees no key, except the last one in all but one of the cases.
NOTHING: dict[str, dict[str, Any]] = {
    "no keys at all": {"k": ones(0), "cu_seqlens_k": 0 * BOUNDS},
    "no keys": {"k": ones(1), "cu_seqlens_k": np.r_[0 * BOUNDS[1:], [1]].astype("i4")},
    "no keys used": {"k": ones(MANY, 1), "seqused_k": BOUNDS[1:] // MANY},
    "no rows of the cache": {"k": ones(2, 1), "cache_batch_idx": BOUNDS[1:] // MANY - 1},
    "no pages": {"k": ones(2, 1), "page_table": (BOUNDS[1:] // MANY - 1)[:, None]},
    "no used pages": {"k": ones(2, 1), "page_table": each_of(0, 1), "seqused_k": BOUNDS[1:] // MANY},
    "no keys in the window": {"k": ones(2 * MANY + 1), "window_size": (0, -1), "diagonal_offset": 2,
                              "cu_seqlens_k": np.r_[2 * BOUNDS[:-1], [2 * MANY + 1]].astype("i4")},
}  # fmt: skip


@pytest.mark.usefixtures("unchecked_integers")
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", NOTHING)
def test_many_queries_that_see_nothing_are_one_step_of_a_loop(
    name: str, packed: bool, counted: Callable[[], int]
) -> None:
    varlen_kwargs, steps = dict(NOTHING[name]), 1 + (name != "no keys at all")
    q = ones(MANY, heads=2)
    if packed:
        varlen_kwargs |= {"cu_seqlens_q": BOUNDS, "max_seqlen_q": 1}
    else:
        q = q[:, None]
    k, target = varlen_kwargs.pop("k"), np.full_like(q, 7.0)
    out, lse = cuflash.forward(q, k, k, return_lse=True, out=target, **varlen_kwargs)
    assert counted() == steps
    of_lse = lse.T if packed else lse[..., 0]
    assert not out[: MANY + 1 - steps].any()
    assert np.isneginf(of_lse[: MANY + 1 - steps]).all()
    assert (out[MANY + 1 - steps :] == 1.0).all()
    assert np.isfinite(of_lse[MANY + 1 - steps :]).all()
    same([cuflash.lse(q, k, **varlen_kwargs)], [lse])
    assert counted() == steps
    if not varlen_kwargs.keys() & {"cache_batch_idx", "page_table"}:
        grads = cuflash.backward(q, q, k, k, out, lse, dlse=lse, **varlen_kwargs)
        assert counted() == steps
        assert not grads[0][: MANY + 1 - steps].any()
        assert all(np.isfinite(x).all() for x in grads)


def test_of_rows_that_see_nothing_sinks_are_all_that_there_is(counted: Callable[[], int]) -> None:
    sinks, varlen_kwargs = np.array([0.5, -1.0], "f4"), {"cu_seqlens_q": BOUNDS, "cu_seqlens_k": 0 * BOUNDS}
    q, none = ones(MANY, heads=2), ones(0)
    out, lse = cuflash.forward(q, none, none, sinks=sinks, return_lse=True, **varlen_kwargs)
    assert not out.any()
    assert (lse == sinks[:, None]).all()
    dlse = np.full_like(lse, 0.25)
    *_, (of_sinks,) = cuflash.backward(
        q, q, none, none, out, lse, dlse=dlse, sinks=sinks, captured_grads=(sinks,), **varlen_kwargs
    )
    assert of_sinks.tolist() == [MANY / 4] * 2
    assert counted() == 2
