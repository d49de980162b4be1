"""What PyTorch's BlockMask lists: the blocks of which something is seen, beside its mask_mod."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ...ops.block_mask import create_block_mask
from ...problem.mod_arrays import MASK_TILE
from .tensors import uncompiled

_known: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def lists_all(block_mask: Any) -> bool:
    """Whether mask_mod shows nothing outside of the blocks that are listed. Lists that were made by hand may lack some.

    It is found once for each mask, for which the host waits; while a graph is captured nothing is found.
    """
    found = _known.get(block_mask)
    if found is None:
        seen = block_mask.to_dense() != 0
        sizes = block_mask.BLOCK_SIZE
        if any(size % MASK_TILE for size in sizes) or (seen.is_cuda and torch.cuda.is_current_stream_capturing()):
            return False
        mask_tiles = create_block_mask(block_mask.mask_mod, *block_mask.shape, like=seen).cells != 0
        for axis, size in zip((2, 3), sizes, strict=True):
            seen = seen.repeat_interleave(size // MASK_TILE, axis)
        found = _known[block_mask] = not bool(
            (mask_tiles & ~seen[:, :, : mask_tiles.shape[2], : mask_tiles.shape[3]]).any()
        )
    return found


def of_blocks(block_mask: Any) -> Any:
    """The mask of a BlockMask that lists blocks, all of which are seen whole."""
    seen, (rows, columns) = block_mask.to_dense(), block_mask.BLOCK_SIZE
    varies_b, varies_h = (length > 1 for length in seen.shape[:2])

    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return seen[b if varies_b else 0, h if varies_h else 0, q_idx // rows, k_idx // columns] != 0

    return mask_mod


def __getattr__(name: str) -> Any:
    """`uncompiled_lists_all`: a graph ends before it."""
    return uncompiled(name, globals(), lists_all, "cuflash reads block masks between graphs")
