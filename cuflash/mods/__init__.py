"""Traces score_mod and mask_mod into expression graphs, with derivatives, intervals and CUDA text.

Ready-made masks and scores, and the functions that user functions may call:

    out = cuflash.forward(q, k, v, mask_mod=mods.and_masks(mods.causal, mods.document(offsets)))

In the examples of their docstrings `np` is NumPy, and q, k and v hold 6 tokens of 2 heads, (6, 2, 4).
"""

from .language import FUNCTIONS, function, position_of, seqlen_k, seqlen_q
from .masks import (
    and_masks,
    block_diffusion,
    causal,
    chunked,
    dilated_window,
    document,
    global_window,
    neighborhood,
    or_masks,
    prefix_lm,
    segments,
    sliding_window,
    tree,
)
from .scores import alibi, relative_position, softcap

globals().update({name: function(name) for name in FUNCTIONS})

__all__ = [
    "alibi",
    "and_masks",
    "block_diffusion",
    "causal",
    "chunked",
    "dilated_window",
    "document",
    "global_window",
    "neighborhood",
    "or_masks",
    "position_of",
    "prefix_lm",
    "relative_position",
    "segments",
    "seqlen_k",
    "seqlen_q",
    "sliding_window",
    "softcap",
    "tree",
    *FUNCTIONS,  # pyright: ignore[reportUnsupportedDunderAll]
]
