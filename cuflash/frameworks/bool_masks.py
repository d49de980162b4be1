"""Boolean mask arrays of any library as mask_mods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def visible_in(mask: Any) -> Callable[..., Any]:
    """Returns the mask_mod of an array whose axes are the last ones of (batch, heads, seqlen_q, seqlen_k).

    An axis of length 1 holds for all indices.
    """
    lengths = mask.shape

    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        indices = (b, h, q_idx, k_idx)[4 - len(lengths) :]
        return mask[tuple([index if n > 1 else 0 for index, n in zip(indices, lengths, strict=True)])]

    return mask_mod
