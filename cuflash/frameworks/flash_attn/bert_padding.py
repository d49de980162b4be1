"""The functions of `flash_attn.bert_padding`: rows of a padded batch become packed sequences, and back.

A mask (batch, seqlen) is 1, or True, where a token counts. Rows are found by their places in the flattened batch, so
gradients flow through all functions.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]

Packed = tuple[Tensor, Tensor, Tensor, int]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows of `input` (n, …) at these places."""
    return input[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """`values` (m, …) at these places of (first_axis_dim, …), zeros elsewhere."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """`index_first_axis`, and `input` without its history."""
    return index_first_axis(input, indices), input.detach()


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs a padded batch: (rows (total, …), indices, cu_seqlens (batch + 1), max_seqlen, seqused (batch)).

    hidden_states (batch, seqlen, …). Rows of `unused_mask` are packed as well, but are not counted in seqused; both
    counts are int32. It waits for the device, as max_seqlen is read from it.
    """
    attention_mask = attention_mask.bool()
    mask = attention_mask if unused_mask is None else attention_mask | unused_mask.bool()
    rows, indices, cu_seqlens, max_seqlen = _packed(hidden_states, mask, mask.sum(1, dtype=torch.int32))
    return rows, indices, cu_seqlens, max_seqlen, attention_mask.sum(1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(hidden_states: Tensor, attention_mask_in_length: Tensor) -> Packed:
    """Packs a batch whose rows hold several sequences each: (rows, indices, cu_seqlens, max_seqlen).

    attention_mask_in_length (batch, seqlen): the lengths of a row's sequences in their order, then zeros.
    """
    lengths = attention_mask_in_length.long()
    seqlen = hidden_states.shape[1]
    mask = torch.arange(seqlen, device=lengths.device) < lengths.sum(1, keepdim=True)
    return _packed(hidden_states, mask, lengths[lengths > 0].int())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`: (batch, seqlen, …), zeros where no row was."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _packed(hidden_states: Tensor, mask: Tensor, lengths: Tensor) -> Packed:
    indices = mask.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    max_seqlen = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, max_seqlen
