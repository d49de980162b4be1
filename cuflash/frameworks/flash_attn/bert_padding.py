"""The functions of `flash_attn.bert_padding`: rows of a padded batch become packed sequences, and back.

A mask (batch, seqlen) is 1, or True, where a token counts. Rows are addressed by index in the flattened batch, so
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
    """Returns the rows of `input` (n, …) at these indices."""
    return input[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Returns (first_axis_dim, …) with `values` (m, …) at these indices, zeros elsewhere."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `index_first_axis`, and `input` detached."""
    return index_first_axis(input, indices), input.detach()


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the rows of a padded batch that a mask keeps. The host waits, as max_seqlen is read from the device.

    Parameters
    ----------
    hidden_states : Tensor (batch, seqlen, …)
        Rows.
    attention_mask : Tensor (batch, seqlen)
        1 or True where a token counts.
    unused_mask : Tensor (batch, seqlen), optional
        Rows to pack as well, without counting them in seqused.

    Returns
    -------
    rows : Tensor (total, …)
        Packed rows.
    indices : Tensor (total,)
        Their indices in the flattened batch.
    cu_seqlens : int32 Tensor (batch + 1,)
        Bounds of the sequences.
    max_seqlen : int
        Length of the longest sequence.
    seqused : int32 Tensor (batch,)
        Numbers of rows that count.
    """
    attention_mask = attention_mask.bool()
    mask = attention_mask if unused_mask is None else attention_mask | unused_mask.bool()
    rows, indices, cu_seqlens, max_seqlen = _packed(hidden_states, mask, mask.sum(1, dtype=torch.int32))
    return rows, indices, cu_seqlens, max_seqlen, attention_mask.sum(1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(hidden_states: Tensor, attention_mask_in_length: Tensor) -> Packed:
    """Packs a batch whose rows hold several sequences each.

    Parameters
    ----------
    hidden_states : Tensor (batch, seqlen, …)
        Rows.
    attention_mask_in_length : Tensor (batch, seqlen)
        Lengths of a row's sequences in order, then zeros.

    Returns
    -------
    rows, indices, cu_seqlens, max_seqlen
        As in `unpad_input`.
    """
    lengths = attention_mask_in_length.long()
    seqlen = hidden_states.shape[1]
    mask = torch.arange(seqlen, device=lengths.device) < lengths.sum(1, keepdim=True)
    return _packed(hidden_states, mask, lengths[lengths > 0].int())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Returns rows as (batch, seqlen, …), zeros elsewhere: the inverse of `unpad_input`."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _packed(hidden_states: Tensor, mask: Tensor, lengths: Tensor) -> Packed:
    indices = mask.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    max_seqlen = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, max_seqlen
