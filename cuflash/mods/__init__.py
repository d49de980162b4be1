"""Ready-made scores and masks, and functions for your own.

A score_mod or mask_mod may be one of these, or call them:

    out = cuflash.forward(q, k, v, mask_mod=mods.and_masks(mods.causal, mods.document(offsets)))

Functions of scalars, such as exp and where, take traced scalars and numbers. The result is a number if no argument is
traced. ProblemError is raised if the number or the types of the arguments do not fit.

Integers are computed as int64 where int32 may not hold them. Sums of captured integers of 32 and 64 bits wrap at 2^63,
as int64 does in NumPy and PyTorch. Sums of indices and lengths that may exceed 2^63 are refused. Captured uint64 are
compared, divided, shifted to the right and combined bit by bit; sums of them are refused.

Types meet as in NumPy: a number of Python is float32 beside float32, and float64 beside integers. An np.float64, or an
array of float64 without axes, makes float64 of both. Indices alone are float32 beside float32. In a comparison with a
float of 16 bits, a number of Python is rounded to 16 bits. All floats are computed in float32, as scores are, with two
exceptions.

- A comparison, a rounding, a remainder or a cast to integers takes float64 where float32 might decide otherwise. This
  concerns a captured float64, an integer that float32 may not hold, and an np.float64. It also concerns indices beside
  a number that float32 does not hold, as in `q_idx * 0.1 > k_idx`. Beside other numbers indices are float32. So are
  quotients of indices, and functions such as exp and log of them.
- A sum of captured float64 or such integers is rounded once, in any order: `score + t[k_idx] - t[q_idx]`. Take such a
  difference before a product or a choice that holds the score: `(score + t[k_idx]) * 2 - t[q_idx] * 2` is float32.

float64 takes 64 times as long as float32 on consumer GPUs, so subtract an offset beforehand where you can.

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
