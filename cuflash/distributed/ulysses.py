"""Scheme "ulysses": each rank computes whole heads over the whole sequence (DeepSpeed Ulysses, arXiv 2309.14509)."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from ..errors import UnsupportedError
from ..frameworks.torch import attention
from .choice import kv_copies, ulysses_lacks
from .exchange import exchange
from .layout import Layout
from .scheme import LAYOUTS, Call, bounds_of, with_offsets


def ulysses(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) of a rank's rows. It sends heads for rows, computes, and sends rows for heads."""
    layout, rank, ranks = call.layout, call.rank, call.layout.ranks
    heads_q, heads_kv = q.shape[2], k.shape[2]
    bias = call.mods.get("bias")
    if reason := ulysses_lacks(heads_q, ranks, call.has_bias_rows):
        raise UnsupportedError(f"scheme='ulysses': {reason}; give scheme='gather' or 'auto'")
    if (copies := kv_copies(heads_q, heads_kv, ranks)) > 1:
        # Each kv head goes to all ranks whose query heads read it. Gradients add up.
        k, v = (x.repeat_interleave(copies, 2) for x in (k, v))
    q, k, v = (_to_heads(call, x) for x in (q, k, v))
    mods, first = dict(call.mods), rank * (heads_q // ranks)
    mine = slice(first, first + heads_q // ranks)
    if (sinks := mods.get("sinks")) is not None:
        mods["sinks"] = sinks[mine]
    if bias is not None and bias.dim() > 2 and bias.shape[-3] > 1:
        mods["bias"] = bias[..., mine, :, :]
    mods = with_offsets(mods, q.device, head=first)
    window = call.window
    run = partial(attention, window_size=(window.left, window.right), return_lse=True, **call.options, **mods)
    if layout.is_packed:
        out, lse = run(q[0], k[0], v[0], **_documents(layout, q.device))
        out, lse = out[None], lse[None]
    else:
        out, lse = run(q, k, v)
    return _to_rows(call, out), _to_rows(call, lse.transpose(1, 2)[..., None])[..., 0].transpose(1, 2)


def _to_heads(call: Call, x: torch.Tensor) -> torch.Tensor:
    """Turns (batch, rows of this rank, heads, dim) into (batch, all rows, heads of this rank, dim)."""
    ranks, (batch, rows, heads, dim) = call.layout.ranks, x.shape
    by_rank = x.reshape(batch, rows, ranks, heads // ranks, dim).permute(2, 1, 0, 3, 4).flatten(0, 1)
    all_rows = exchange(by_rank, [rows] * ranks, call.layout.rows, call.link)
    return all_rows.index_select(0, _order(call.layout, x.device)[1]).transpose(0, 1)


def _to_rows(call: Call, x: torch.Tensor) -> torch.Tensor:
    """Turns (batch, all rows, heads of this rank, dim) into (batch, rows of this rank, heads, dim)."""
    ranks, rows, (batch, _, heads, dim) = call.layout.ranks, call.layout.rows[call.rank], x.shape
    by_rank = x.transpose(0, 1).index_select(0, _order(call.layout, x.device)[0])
    sent_back = exchange(by_rank, call.layout.rows, [rows] * ranks, call.link)
    return (
        sent_back.reshape(ranks, rows, batch, heads, dim)
        .permute(2, 1, 0, 3, 4)
        .reshape(batch, rows, ranks * heads, dim)
    )


@lru_cache(LAYOUTS)
def _documents(layout: Layout, device: torch.device) -> dict[str, Any]:
    """Returns the keywords of the layout's documents as packed sequences."""
    return bounds_of(layout.cu_seqlens, device, "q") | bounds_of(layout.cu_seqlens, device, "k")


@lru_cache(LAYOUTS)
def _order(layout: Layout, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows of the sequence in the order of ranks, and the inverse permutation."""
    order: Any = layout.order
    return torch.from_numpy(order).to(device), torch.from_numpy(np.argsort(order)).to(device)
