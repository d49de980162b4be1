"""`flash_attn_combine` of flash-attn 3 and 4: merges attention over disjoint sets of keys."""

from __future__ import annotations

import torch

from ...errors import ProblemError, UnsupportedError
from ...ops.merge import merge_states
from ..torch import check_tensor
from .arguments import check_fits

_SHAPES = {
    5: "(num_splits, batch, seqlen, heads, head_dim) and (num_splits, batch, seqlen, heads)",
    4: "(num_splits, total_q, heads, head_dim) and (num_splits, total_q, heads)",
}
_OUT_DTYPES = torch.float32, torch.float16, torch.bfloat16


def combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    *,
    ranks: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) over all splits. ranks, dtypes: accepted for out_partial."""
    for name, tensor in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        check_tensor(name, tensor)
        if tensor.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError(
                f"{name} requires grad, but merging has no gradients; detach it, or take flash_attn_func of all keys"
            )
    if out_partial.ndim not in ranks or lse_partial.shape != out_partial.shape[:-1]:
        raise ProblemError(
            f"out_partial has shape {tuple(out_partial.shape)} and lse_partial {tuple(lse_partial.shape)}; give "
            + ", or ".join(_SHAPES[rank] for rank in ranks)
        )
    for name, tensor, accepted in (
        ("out_partial", out_partial, dtypes),
        ("lse_partial", lse_partial, (torch.float32,)),
    ):
        if tensor.dtype not in accepted:
            raise ProblemError(f"{name} has dtype {tensor.dtype}; give {' or '.join(map(str, accepted))}")
    dtype = out_partial.dtype if out_dtype is None else out_dtype
    if dtype not in _OUT_DTYPES:
        raise ProblemError(f"out_dtype={out_dtype}; give torch.float32, torch.float16 or torch.bfloat16")
    if out is not None:
        check_fits("out", out, tuple(out_partial.shape[1:]), dtype, out_partial.device)
    # In float32: a 16-bit merge would round once more, before the cast to the dtype of out.
    whole, lse = merge_states(out_partial.float().unbind(), lse_partial.transpose(-1, -2).unbind())
    return whole.to(dtype) if out is None else out.copy_(whole), lse.transpose(-1, -2)
