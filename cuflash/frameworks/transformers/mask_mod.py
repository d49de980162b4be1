"""Mask functions of transformers, its own or a user's, as mask_mods that cuflash traces.

transformers passes absolute positions; cuflash counts queries and keys from the start of the call. The offsets are
added here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...log import logger
from ...mods.analysis.intervals import band
from ...mods.language import position_of
from ...mods.tracing.trace import trace
from ...ops.block_mask import create_block_mask

Mod = Callable[..., Any]


def mask_mod_of(
    mask_function: Mod, padding_mask: Tensor | None, begin: Any, kv_offset: Any, device: torch.device
) -> Mod:
    """Returns the mask_mod of a function of transformers, and of padding.

    padding_mask (batch, positions): True where a key counts; None: everywhere. begin: the position of the first query,
    or of each query; None if the last query is at the last key. kv_offset: the position of the first key.
    """
    padding_mask = None if padding_mask is None else padding_mask.bool()
    first_q, first_k = _number(begin, device), _number(kv_offset, device)
    is_of_each = first_q is not None and first_q.dim() > 0
    is_at_end = begin is None

    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        key = k_idx if first_k is None else k_idx + first_k
        if is_at_end:
            query = position_of(q_idx) if first_k is None else position_of(q_idx) + first_k
        elif is_of_each:
            query = first_q[q_idx]  # type: ignore[index]
        else:
            query = q_idx if first_q is None else q_idx + first_q
        visible = mask_function(b, h, query, key)
        return visible if padding_mask is None else visible & padding_mask[b, key]

    return mask_mod


def _number(value: Any, device: torch.device) -> Tensor | None:
    """Returns a number on the device, so that kernels do not depend on it; None for 0."""
    if isinstance(value, Tensor):
        return value.to(device)
    return torch.full((), value, dtype=torch.int32, device=device) if value else None


def keywords_of(mask_mod: Mod, shape: tuple[int, ...], heads: int, device: torch.device) -> dict[str, Any] | None:
    """Returns the keywords of `attention` for a mask_mod, with its mask tiles if needed; None if it cannot be traced.

    shape: (batch, 1, seqlen_q, seqlen_k).
    """
    try:
        root = trace(mask_mod, "mask_mod").root
    except Exception as error:  # any error: the function can still be called with tensors
        logger.debug("a mask function of transformers becomes a mask tensor, as it cannot be traced: %s", error)
        return None
    if band(root) is not None:
        return {"mask_mod": mask_mod}
    batch, heads = (length if name in root.inputs else 1 for name, length in (("b", shape[0]), ("h", heads)))
    like = torch.empty(1, device=device)
    return {"block_mask": create_block_mask(mask_mod, batch, heads, shape[2], shape[3], like=like)}
