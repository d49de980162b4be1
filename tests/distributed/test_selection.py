"""Rows by index, with gradients, beside PyTorch's own."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cuflash.distributed.selection import Selection

CPU = torch.device("cpu")


@pytest.mark.parametrize("index", [[], [0], [2, 0, 1], [1, 2, 2, 3, 0, 1, 2], [4, 4, 4], [3, 2, 1]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_rows_and_gradients_are_those_of_index_select(index: list[int], dtype: torch.dtype) -> None:
    size = 3 if index == [2, 0, 1] else 5 if index else 0
    selection = Selection.from_index(np.array(index, np.int64), size, CPU)
    x, dout = (torch.randn(rows, 2, 3, dtype=torch.float64).to(dtype) for rows in (size, len(index)))
    results = []
    for wide, take in ((dtype, selection.take), (torch.float64, lambda x: x.index_select(0, selection.index))):
        leaf = x.to(wide).requires_grad_()
        rows = take(leaf)
        results.append([rows, *torch.autograd.grad(rows, leaf, dout.to(wide))])
    for result, exact in zip(*results, strict=True):
        assert result.dtype == dtype
        assert torch.allclose(result.double(), exact, atol=(eps := torch.finfo(dtype).eps), rtol=eps)


def test_sums_of_16_bits_are_rounded_once() -> None:
    selection = Selection.from_index(np.zeros(300, np.int64), 2, CPU)
    x = torch.ones(2, 1, dtype=torch.bfloat16, requires_grad=True)
    (grad,) = torch.autograd.grad(selection.take(x), x, torch.ones(300, 1, dtype=torch.bfloat16))
    assert grad.tolist() == [[300.0], [0.0]]  # 256 where each addition is rounded


def test_a_permutation_and_its_inverse() -> None:
    selection = Selection.from_index(np.array([3, 1, 0, 2]), 4, CPU)
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.equal(selection.reversed.take(selection.take(x)), x)
    assert torch.autograd.gradcheck(selection.take, x)
    assert torch.autograd.gradgradcheck(selection.take, x)
