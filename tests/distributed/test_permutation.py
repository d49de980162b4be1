"""Permutations of rows, with gradients, beside PyTorch's own."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cuflash.distributed.permutation import Permutation

CPU = torch.device("cpu")


@pytest.mark.parametrize("index", [[], [0], [2, 0, 1]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_rows_and_gradients_are_those_of_index_select(index: list[int], dtype: torch.dtype) -> None:
    order = Permutation.from_index(np.array(index, np.int64), CPU)
    x, dout = (torch.randn(len(index), 2, 3, dtype=torch.float64).to(dtype) for _ in range(2))
    results = []
    for take in (order.take, lambda x: x.index_select(0, order.index)):
        leaf = x.clone().requires_grad_()
        rows = take(leaf)
        results.append([rows, *torch.autograd.grad(rows, leaf, dout)])
    for result, exact in zip(*results, strict=True):
        assert result.dtype == dtype
        assert torch.equal(result, exact)


def test_a_permutation_and_its_inverse() -> None:
    order = Permutation.from_index(np.array([3, 1, 0, 2]), CPU)
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.equal(order.reversed.take(order.take(x)), x)
    assert torch.autograd.gradcheck(order.take, x)
    assert torch.autograd.gradgradcheck(order.take, x)
