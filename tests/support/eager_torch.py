"""Eager attention in PyTorch, with all scores in memory, in float64 on the CPU, and with gradients."""

from __future__ import annotations

from typing import Any

import torch

from cuflash.reference.dropout import SHARES, is_kept, share_kept


def eager(
    q: Any, k: Any, v: Any, *, causal: bool = False, diagonal_offset: int | None = None, score_mod: Any = None,
    mask_mod: Any = None, bias: Any = None, sinks: Any = None, dropout_p: float = 0.0, dropout_seed: int = 0,
) -> tuple[Any, Any]:  # fmt: skip
    """Returns (out, lse) of (batch, seqlen, heads, head_dim); mods take whole tensors of indices."""
    q, k, v = (x.cpu().double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    grids = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    if score_mod is not None:
        scores = score_mod(scores, *grids)
    visible = torch.ones_like(scores, dtype=torch.bool) if mask_mod is None else mask_mod(*grids)
    if causal:
        offset = k.shape[2] - q.shape[2] if diagonal_offset is None else diagonal_offset
        visible = visible & (grids[3] <= grids[2] + offset)
    if bias is not None and bias.dtype == torch.bool:
        visible = visible & bias.cpu()
    elif bias is not None:
        scores = scores + bias.cpu().double()
    any_visible = visible.any(-1)
    hidden = scores.masked_fill(~visible, -torch.inf)
    lse = torch.where(any_visible, hidden.where(any_visible[..., None], scores).logsumexp(-1), -torch.inf)
    if sinks is not None:
        of_heads = sinks.cpu().double()[:, None].expand_as(lse)
        lse = torch.where(any_visible, torch.logaddexp(lse.where(any_visible, 0.0), of_heads), of_heads)
    weights = torch.where(visible, (scores - lse.where(any_visible, 0.0)[..., None]).exp(), 0.0)
    if dropout_p:
        keep = torch.from_numpy(is_kept(dropout_seed, dropout_p, *(x.numpy() for x in grids)))
        weights = weights * keep / (share_kept(dropout_p) / SHARES)
    return (weights @ v).transpose(1, 2), lse


def assert_close(result: Any, expected: Any, tolerance: float | None = None) -> None:
    """Checks that tensors, or tuples of them, are equal up to rounding: of float64 on the CPU, of float32 on a GPU."""
    result, expected = ([x] if torch.is_tensor(x) else x for x in (result, expected))
    for x, y in zip(result, expected, strict=True):
        assert x.shape == y.shape
        limit = tolerance or (1e-9 if x.dtype == torch.float64 else 2e-4)
        torch.testing.assert_close(x.detach().cpu().double(), y.detach().cpu().double(), rtol=limit, atol=limit)
