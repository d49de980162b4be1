"""Block masks as problems: their lengths, and the arrays of lengths of sequences."""

from __future__ import annotations

import pytest

from cuflash.errors import ProblemError
from cuflash.mods.masks import causal
from cuflash.mods.tracing.trace import trace
from cuflash.problem.array_spec import ArraySpec
from cuflash.problem.block_mask import check_sizes
from cuflash.problem.checks import MAX_SEQLEN
from cuflash.problem.mod_spec import make_mod_spec
from cuflash.problem.operands import Sizes, block_mask_op
from cuflash.problem.options import Options
from cuflash.problem.problem import Problem

OP = block_mask_op(make_mod_spec(None, trace(causal, "mask_mod")), Sizes(2, 3, 130, 65))
LIKE = ArraySpec.contiguous((7,), "int64")


def problem_of(**specs: ArraySpec) -> Problem:
    return Problem.from_specs(OP, [LIKE if name == "like" else specs.get(name) for name in OP.names], Options())


def test_a_block_mask_is_a_problem_without_head_dims() -> None:
    result = problem_of()
    assert (result.batch, result.heads_q, result.heads_kv, result.seqlen_q, result.seqlen_k) == (2, 3, 3, 130, 65)
    assert result.mask.is_full
    assert result.seqlen_info is None
    assert result.outputs == (((2, 3, 3, 2), "int8"),)


def test_packed_sequences_may_lie_in_any_number_of_rows() -> None:
    bounds, used = ArraySpec.contiguous((3,), "int32"), ArraySpec.contiguous((2,), "int32")
    lengths = problem_of(cu_seqlens_q=bounds, seqused_k=used).seqlen_info
    assert lengths is not None
    assert (lengths.is_packed_q, lengths.is_packed_k) == (True, False)
    assert (lengths.rows_q, lengths.batch_k, lengths.rows_k) == (MAX_SEQLEN, 2, 65)
    with pytest.raises(ProblemError, match="seqused_k has shape"):
        problem_of(seqused_k=bounds)


def test_lengths_are_integers_that_fit() -> None:
    assert check_sizes(1, 1, 0, 5) == (1, 1, 0, 5)
    for wrong in ((1, 0, 5, 5), (-1, 1, 5, 5), (1, 1, 5, 2**31), (1, True, 5, 5), (1, 1, "5", 5)):
        with pytest.raises(ProblemError, match="give an integer"):
            check_sizes(*wrong)
