"""Shapes of a bias and of sinks: those that broadcast to a rank's scores pass, others raise."""

from __future__ import annotations

import numpy as np
import pytest

from cuflash import ProblemError
from cuflash.distributed.shapes import check_shapes

Q = np.zeros((2, 5, 4, 8))  # of a rank that holds 5 of 20 rows


@pytest.mark.parametrize("shape", [(), (20,), (1,), (5, 20), (4, 1, 20), (2, 4, 5, 20), (1, 1, 1, 1)])
def test_a_bias_that_broadcasts_is_taken(shape: tuple[int, ...]) -> None:
    check_shapes(Q, 20, bias=np.zeros(shape))
    np.broadcast_to(np.zeros(shape), (2, 4, 5, 20))


@pytest.mark.parametrize("shape", [(5,), (5, 5), (20, 20), (2, 5, 20), (4, 4, 5, 20), (1, 2, 4, 5, 20), (0,)])
def test_a_bias_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ProblemError, match=r"give one that broadcasts to \(2, 4, 5, 20\): \(batch, heads_q, rows of"):
        check_shapes(Q, 20, bias=np.zeros(shape))


@pytest.mark.parametrize("shape", [(1,), (8,), (4, 1), ()])
def test_sinks_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    check_shapes(Q, 20, sinks=np.zeros(4))
    with pytest.raises(ProblemError, match=r"give \(4,\): one for each head of all ranks"):
        check_shapes(Q, 20, sinks=np.zeros(shape))


@pytest.mark.parametrize("dtype", ["float16", "int64", "bool"])
def test_sinks_of_another_dtype_are_refused(dtype: str) -> None:
    with pytest.raises(ProblemError, match=f"sinks has dtype {dtype}; give float32 or float64"):
        check_shapes(Q, 20, sinks=np.zeros(4, dtype))


def test_a_rank_without_rows_takes_a_bias_of_its_rows() -> None:
    check_shapes(Q[:, :0], 20, bias=np.zeros((1, 4, 0, 20)))
