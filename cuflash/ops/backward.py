"""`cuflash.backward`: exact gradients of attention, the weights recomputed from lse."""

from __future__ import annotations

from typing import Any

from ..problem.operands import BACKWARD
from ..problem.options import Options, WindowSize
from ..runtime.launch import run


def backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    deterministic: bool = False,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    diagonal_offset: int | None = None,
    softcap: float = 0.0,
) -> tuple[Any, Any, Any]:
    """Gradients (dq, dk, dv) of `sum(dout · out) + sum(dlse · lse)`, with nothing of size seqlen_q x seqlen_k kept.

    q, k, v and the mask and scale arguments are those of `forward`, out and lse its results (of any `algorithm`, or of
    `merge_states`); out may be float32 where q is not. dout has the shape of out and the dtype of q, dlse (optional)
    those of lse. dq, dk, dv have the shapes and dtype of q, k, v. A query that sees no key has gradient 0.

    `deterministic=True` asks for bitwise repeatable results; NumPy's always are. On a GPU dq is otherwise added up in
    no fixed order, in a float32 workspace of its size (head_dim rounded up to that of the kernel), and so are dk and dv
    of keys that several blocks share. Deterministic, Hopper's kernels add dq up in the order of the keys (over head dim
    128 nothing is added up, and all calls are deterministic); the others compute the scores twice instead and take
    about a third longer. Head dims up to 256 on a GPU; float16 needs |p (dout vᵀ - delta)| < 65504 there, as it is
    rounded to the inputs' dtype: scale a large loss down, or take bfloat16. Errors as in `forward`.

    Source: FlashAttention-2 (arXiv 2307.08691), algorithm 2.
    """
    options = Options(softmax_scale, causal, window_size, diagonal_offset, softcap, deterministic=deterministic)
    dq, dk, dv = run(BACKWARD, (q, k, v, dout, out, lse, dlse), options)
    return dq, dk, dv
