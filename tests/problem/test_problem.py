"""Problems: their fields from arrays, their equality, and limits that no real array reaches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.errors import ProblemError
from cuflash.problem.array_spec import ArraySpec
from cuflash.problem.operands import OPS, merge_op
from cuflash.problem.options import Options
from cuflash.problem.problem import MAX_SEQLEN, Problem
from cuflash.testing.cases import CASES, Case


def problem(*shapes: tuple[int, ...], dtype: str = "float16", **arguments: Any) -> Problem:
    """Returns the problem of dense arrays of these shapes; the shape of v may be left out."""
    specs = [ArraySpec.contiguous(shape, dtype) for shape in shapes]
    return Problem.from_specs(OPS["forward" if len(specs) == 3 else "lse"], specs, Options(**arguments))


def shapes_of(result: Problem) -> list[tuple[int, ...]]:
    """Returns the shapes of a problem's results."""
    return [shape for shape, _ in result.outputs]


SHAPES = ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6))


@given(st.lists(st.integers(0, 5), max_size=5).map(tuple))
def test_dense_strides_are_those_of_numpy(shape: tuple[int, ...]) -> None:
    # Lengths are at least 1: NumPy chooses other strides for arrays without elements, where they have no use.
    reference = np.empty(tuple(max(n, 1) for n in shape), np.float32)
    spec = ArraySpec.contiguous(tuple(max(n, 1) for n in shape), "float32")
    assert spec.strides == tuple(stride // 4 for stride in reference.strides)
    assert len(ArraySpec.contiguous(shape, "float32").strides) == len(shape)


@pytest.mark.parametrize(
    ("shape", "strides", "shape_4d", "strides_4d"),
    [
        ((5, 8), (9, 1), (1, 5, 1, 8), (0, 9, 0, 1)),
        ((5, 4, 8), (40, 9, 1), (1, 5, 4, 8), (0, 40, 9, 1)),
        ((2, 5, 4, 8), (500, 40, 9, 1), (2, 5, 4, 8), (500, 40, 9, 1)),
    ],
)
def test_as_4d_adds_axes_of_length_one_and_keeps_the_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], shape_4d: tuple[int, ...], strides_4d: tuple[int, ...]
) -> None:
    spec = ArraySpec(shape, strides, "float16", "cuda:1", "torch")
    assert spec.as_4d() == ArraySpec(shape_4d, strides_4d, "float16", "cuda:1", "torch")


def test_an_array_spec_prints_in_words() -> None:
    assert str(ArraySpec.contiguous((5, 8), "float16", "cuda:1", "torch")) == "torch float16[5, 8] on cuda:1"


@pytest.mark.parametrize(
    ("rank", "out", "lse"), [(2, (5, 6), (5,)), (3, (5, 1, 6), (1, 5)), (4, (1, 5, 1, 6), (1, 1, 5))]
)
def test_results_have_the_rank_of_q(rank: int, out: tuple[int, ...], lse: tuple[int, ...]) -> None:
    shapes = [{2: (n, d), 3: (n, 1, d), 4: (1, n, 1, d)}[rank] for n, d in ((5, 8), (7, 8), (7, 6))]
    result = problem(*shapes)
    assert shapes_of(result) == [out, lse]
    assert (result.batch, result.seqlen_q, result.seqlen_k, result.heads_q, result.heads_kv) == (1, 5, 7, 1, 1)
    assert (result.head_dim, result.head_dim_v) == (8, 6)
    assert shapes_of(problem(*shapes[:2])) == [lse]


def test_every_fact_of_the_arrays_is_kept() -> None:
    q = ArraySpec((2, 5, 4, 8), (999, 160, 9, 1), "bfloat16", "cuda:3", "torch")
    k, v = (ArraySpec.contiguous(shape, "bfloat16", "cuda:3", "torch") for shape in SHAPES[1:])
    result = Problem.from_specs(OPS["forward"], [q, k, v], Options())
    assert (result.batch, result.seqlen_q, result.seqlen_k, result.heads_q, result.heads_kv) == (2, 5, 7, 4, 2)
    assert (result.dtype, result.device, result.library, result.ordinal) == ("bfloat16", "cuda:3", "torch", 3)
    assert result.specs[:3] == (q, k, v)
    assert shapes_of(result) == [(2, 5, 4, 6), (2, 4, 5)]


def test_defaults_follow_the_contract() -> None:
    result = problem(*SHAPES)
    assert result.softmax_scale == 1 / math.sqrt(8)
    assert (result.options.softcap, result.options.algorithm, result.out_dtype) == (0.0, "flash2", "float16")
    assert result.ordinal is None
    assert result.mask.is_full
    assert result == problem(*SHAPES, **Options()._asdict())
    assert hash(result) == hash(problem(*SHAPES))


def test_lse_problems_have_no_v() -> None:
    result = problem(*SHAPES[:2])
    assert result.head_dim_v == 0
    assert result.flops == 2 * 2 * 4 * 5 * 7 * 8


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_flops_count_the_visible_pairs(case: Case) -> None:
    result = case.problem()
    rows, keys = np.arange(case.seqlen_q), np.arange(case.seqlen_k)
    pairs = int(np.count_nonzero(result.mask.visible(rows, keys)))
    assert result.flops == 2 * pairs * case.batch * case.heads_q * (case.head_dim + case.head_dim_v)


def test_masks_that_hide_the_same_keys_make_the_same_problem() -> None:
    assert problem(*SHAPES, window_size=(100, 100)) == problem(*SHAPES) == problem(*SHAPES, window_size=(None, None))
    assert problem(*SHAPES, causal=True) == problem(*SHAPES, window_size=(-1, 0), diagonal_offset=2)
    assert problem(*SHAPES, causal=True) != problem(*SHAPES, causal=True, diagonal_offset=0)


@pytest.mark.parametrize("scale", [1, 0.25, np.float32(0.5), np.float64(2.0), np.int64(3)])
def test_any_real_number_is_a_scale(scale: Any) -> None:
    result = problem(*SHAPES, softmax_scale=scale, softcap=scale)
    assert result.softmax_scale == result.options.softcap == float(scale)
    assert type(result.softmax_scale) is float


@pytest.mark.parametrize("long", ["q", "k"])
def test_lengths_over_the_limit_of_the_kernels_are_refused(long: str) -> None:
    def problem_of_length(length: int) -> Problem:
        n, m = (length, 7) if long == "q" else (5, length)
        return problem((1, n, 1, 8), (1, m, 1, 8), (1, m, 1, 8))

    assert shapes_of(problem_of_length(MAX_SEQLEN))[1][-1] in (MAX_SEQLEN, 5)
    with pytest.raises(ProblemError, match=f"seqlen {MAX_SEQLEN + 1} is over the limit of {MAX_SEQLEN}"):
        problem_of_length(MAX_SEQLEN + 1)


def test_index_arithmetic_of_the_kernels_fits_32_bits_at_the_limit() -> None:
    result = problem((1, MAX_SEQLEN, 1, 8), (1, MAX_SEQLEN, 1, 8), causal=True, diagonal_offset=10**12)
    for mask in (result.mask, problem((1, MAX_SEQLEN, 1, 8), (1, MAX_SEQLEN, 1, 8), window_size=(0, 0)).mask):
        for bound in (mask.lo, mask.hi):
            for row in (0, MAX_SEQLEN + 4095):
                assert -(2**31) <= row + bound < 2**31


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("device", "cuda:1", r"k is on cuda:1, but q is on cuda:0; move all to one device"),
        ("library", "cupy", r"k is a cupy array, but q is a torch array; .*one framework"),
        ("dtype", "bfloat16", r"k has dtype bfloat16, but q has float16; cast all to one dtype"),
    ],
)
def test_mixed_operands_are_refused(name: str, value: str, words: str) -> None:
    q, k, v = (ArraySpec.contiguous(shape, "float16", "cuda:0", "torch") for shape in SHAPES)
    Problem.from_specs(OPS["forward"], [q, k, v], Options())
    with pytest.raises(ProblemError, match=words):
        Problem.from_specs(OPS["forward"], [q, k._replace(**{name: value}), v], Options())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shape": (2, 5, 4, 8)}, r"out has shape \(2, 5, 4, 8\); this problem needs \(2, 5, 4, 6\)"),
        ({"dtype": "float32"}, "out has dtype float32.*float16"),
        ({"device": "cuda:0"}, "out is a numpy .* on cuda:0, but q is a numpy array on cpu"),
        ({"library": "torch"}, "out is a torch .*, but q is a numpy array"),
    ],
)
def test_further_operands_are_validated_against_the_problem(changes: dict[str, Any], words: str) -> None:
    specs, out = problem(*SHAPES).specs[:3], ArraySpec.contiguous((2, 5, 4, 6), "float16")
    assert Problem.from_specs(OPS["forward"], [*specs, out], Options()) == problem(*SHAPES)
    with pytest.raises(ProblemError, match=words):
        Problem.from_specs(OPS["forward"], [*specs, out._replace(**changes)], Options())


def states(outs: list[ArraySpec], lses: list[ArraySpec]) -> Problem:
    return Problem.from_specs(merge_op(len(outs)), [*outs, *lses], Options())


@pytest.mark.parametrize("shape", [(5, 6), (5, 4, 6), (2, 5, 4, 6)])
def test_states_of_every_rank_are_legal(shape: tuple[int, ...]) -> None:
    lse = {2: (5,), 3: (4, 5), 4: (2, 4, 5)}[len(shape)]
    outs = [ArraySpec.contiguous(shape, "float16")] * 3
    result = states(outs, [ArraySpec.contiguous(lse, "float32")] * 3)
    assert (result.batch, result.seqlen_q, result.heads_q, result.head_dim_v) == outs[0].as_4d().shape
    assert list(result.outputs) == [(shape, "float16"), (lse, "float32")]
    with pytest.raises(ProblemError, match=r"lses\[0\]"):
        states(outs, [ArraySpec.contiguous((*lse, 1), "float32")] * 3)


def test_states_of_float64_have_a_float64_lse() -> None:
    outs = [ArraySpec.contiguous((5, 6), "float64")]
    assert [dtype for _, dtype in states(outs, [ArraySpec.contiguous((5,), "float64")]).outputs] == ["float64"] * 2
    with pytest.raises(ProblemError, match="float64"):
        states(outs, [ArraySpec.contiguous((5,), "float32")])


def test_states_on_two_devices_are_refused() -> None:
    outs = [ArraySpec.contiguous((5, 6), "float16", "cuda:0", "torch")]
    with pytest.raises(ProblemError, match=r"lses\[0\].*cuda:1.*cuda:0.*give both alike"):
        states(outs, [ArraySpec.contiguous((5,), "float32", "cuda:1", "torch")])
