"""transformers' "flash_attention_2" over the ranks of a group, by the two functions of ring-flash-attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ...distributed.layout import Layout
from ...distributed.torch import attention
from ...errors import ProblemError, UnsupportedError
from .rows import link_of, values_of

_layouts: dict[Any, Layout] = {}  # of the current batch, by group


def substitute_hf_flash_attn(process_group: Any, heads_k_stride: int) -> None:
    """Makes transformers' "flash_attention_2" compute attention over the rows of all ranks.

    Call `update_ring_flash_attn_params` before each forward. Models get this rank's part r of n of all packed rows, and
    position_ids of these.

    Parameters
    ----------
    process_group : ProcessGroup, 1-D DeviceMesh or None
        The ranks that share the rows; None for all processes.
    heads_k_stride : int
        Has no effect: the scheme sends all heads at once.

    Raises
    ------
    ProblemError
        If torch.distributed is not initialised.

    Notes
    -----
    Windows, softcap and sinks of models work. Dropout and masks for padding are refused. Without flash-attn call
    `cuflash.frameworks.flash_attn.activate(as_installed=True)` before transformers is imported.

    Examples
    --------
    Every process of `torchrun` runs this::

        substitute_hf_flash_attn(group, 1)
        for cu_seqlens, input_ids, position_ids in batches:
            update_ring_flash_attn_params(cu_seqlens, group)
            model(input_ids=input_ids, position_ids=position_ids)
    """
    from transformers import AttentionInterface

    AttentionInterface.register("flash_attention_2", partial(_flash_attention_forward, link_of(process_group).group))


def update_ring_flash_attn_params(cu_seqlens: torch.Tensor, process_group: Any) -> None:
    """Sets the documents of the next forward passes; reads cu_seqlens.

    Parameters
    ----------
    cu_seqlens : int32 Tensor (documents + 1,)
        Bounds of all documents, equal on all ranks.
    process_group : ProcessGroup, 1-D DeviceMesh or None
        The group of `substitute_hf_flash_attn`.

    Raises
    ------
    ProblemError
        For bounds that decrease or do not begin with 0.

    Examples
    --------
    See `substitute_hf_flash_attn`.
    """
    group = link_of(process_group).group
    _layouts[group] = Layout(values_of("cu_seqlens", cu_seqlens), group, "contiguous")


def _flash_attention_forward(
    group: Any,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes the attention of a layer; tensors are (batch, heads, rows of this rank, head_dim)."""
    if attention_mask is not None or dropout:
        raise UnsupportedError(
            "attention over the rows of several ranks has neither masks of padding nor dropout; pack documents without "
            "padding, and set attention_dropout=0.0"
        )
    if (layout := _layouts.get(group)) is None:
        raise ProblemError("the documents are not known; call update_ring_flash_attn_params(cu_seqlens, group) before")
    is_causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    before = None if sliding_window is None else sliding_window - 1
    out = attention(
        *(x.transpose(1, 2) for x in (query, key, value)), layout=layout, group=group, softmax_scale=scaling,
        causal=is_causal, window_size=(before, before), softcap=softcap or 0.0, sinks=s_aux,
    )  # fmt: skip
    return out, None
