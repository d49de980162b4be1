"""Rows of a padded batch become packed sequences and go back."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from cuflash.frameworks.flash_attn.bert_padding import (
    index_first_axis_residual,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 1, 0, 1, 0]])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_rows_are_packed_in_their_order_and_go_back(dtype: torch.dtype) -> None:
    x = torch.randn(4, 5, 2, 3)
    rows, indices, cu_seqlens, max_seqlen, used = unpad_input(x, MASK.to(dtype))
    assert torch.equal(rows, x[MASK.bool()])
    assert indices.tolist() == [0, 1, 2, 10, 11, 12, 13, 14, 16, 18]
    assert (cu_seqlens.tolist(), max_seqlen, used.tolist()) == ([0, 3, 3, 8, 10], 5, [3, 0, 5, 2])
    assert cu_seqlens.dtype == used.dtype == torch.int32
    assert torch.equal(pad_input(rows, indices, 4, 5), x * MASK[..., None, None])


def test_unused_rows_are_packed_but_not_counted() -> None:
    unused = torch.zeros_like(MASK)
    unused[0, 3] = unused[1, 0] = 1
    rows, _, cu_seqlens, max_seqlen, used = unpad_input(torch.randn(4, 5, 2), MASK, unused)
    assert (len(rows), cu_seqlens.tolist(), max_seqlen, used.tolist()) == (12, [0, 4, 5, 10, 12], 5, [3, 0, 5, 2])


def test_rows_with_several_sequences_are_cut_at_their_lengths() -> None:
    x = torch.randn(3, 6, 2)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    rows, indices, cu_seqlens, max_seqlen = unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(rows, torch.cat([x[0, :5], x[1, :5], x[2]]))
    assert (cu_seqlens.tolist(), max_seqlen) == ([0, 2, 5, 8, 10, 16], 6)
    assert torch.equal(pad_input(rows, indices, 3, 6)[2], x[2])


def test_empty_batches_are_packed() -> None:
    rows, indices, cu_seqlens, max_seqlen, _ = unpad_input(torch.randn(2, 3, 4), torch.zeros(2, 3))
    assert (rows.shape, cu_seqlens.tolist(), max_seqlen) == ((0, 4), [0, 0, 0], 0)
    assert torch.equal(pad_input(rows, indices, 2, 3), torch.zeros(2, 3, 4))


def test_gradients_flow() -> None:
    x = torch.randn(4, 5, 2, dtype=torch.float64, requires_grad=True)

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        rows, indices, *_ = unpad_input(x, MASK)
        return pad_input(rows.sin(), indices, 4, 5)

    assert torch.autograd.gradcheck(there_and_back, x)
    rows, same = index_first_axis_residual(x.flatten(0, 1), torch.tensor([3, 1]))
    assert rows.requires_grad
    assert not same.requires_grad
