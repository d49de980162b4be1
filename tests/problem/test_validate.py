"""Validation of a call by specs: operands to copy, the order of errors, memory that may overlap."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cuflash.errors import ProblemError
from cuflash.problem.array_spec import ArraySpec
from cuflash.problem.operands import BACKWARD, FORWARD
from cuflash.problem.options import Options
from cuflash.problem.validate import overlap_ranges, validated

SHAPE = (2, 5, 4, 8)
PACKED = ArraySpec.contiguous(SHAPE, "float32", "cuda:0", "recorded")
STRIDED = PACKED._replace(strides=(320, 64, 16, 2))  # every second element of rows
LSE = ArraySpec.contiguous((2, 4, 5), "float32", "cuda:0", "recorded")


def test_strided_operands_are_copied_once_and_the_problem_has_the_copy() -> None:
    call = validated(FORWARD, [PACKED, STRIDED, PACKED, STRIDED], Options())
    assert call.needs_copy == (False, True, False, True)
    assert call.problem.specs[:4] == (PACKED,) * 4
    assert call.specs == [PACKED, STRIDED, PACKED, STRIDED]


def test_an_output_that_repeats_memory_is_refused_even_if_it_is_copied() -> None:
    repeated = PACKED._replace(strides=(320, 64, 0, 2))
    with pytest.raises(ProblemError, match="rows share memory"):
        validated(FORWARD, [PACKED, PACKED, PACKED, repeated], Options())


def test_the_error_is_that_of_the_first_operand_that_has_one() -> None:
    def specs() -> Iterator[ArraySpec]:
        yield from [*[PACKED] * 5, LSE, LSE, PACKED._replace(strides=(320, 64, 0, 2))]
        pytest.fail("an operand behind the wrong one was looked at")

    with pytest.raises(ProblemError, match="rows share memory"):
        validated(BACKWARD, specs(), Options())


def test_pairs_are_of_arrays_that_are_written_to_and_others() -> None:
    assert overlap_ranges(validated(FORWARD, [PACKED] * 3, Options())) == []
    size = 4 * 2 * 5 * 4 * 8
    ranges = overlap_ranges(validated(FORWARD, [PACKED] * 4, Options()))
    assert ranges == [(3, other, -size, size) for other in range(3)]
    grads = [None, PACKED, PACKED]
    call = validated(BACKWARD, [*[PACKED] * 5, LSE, None, *grads], Options())
    pairs = [(number, other) for number, other, *_ in overlap_ranges(call)]
    assert pairs == [*((8, other) for other in (*range(6), 9)), *((9, other) for other in range(6))]
