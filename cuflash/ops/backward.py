"""`cuflash.backward`: exact gradients of attention, the weights recomputed from lse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Never, Unpack, overload

from ..errors import ProblemError, UnsupportedError
from ..problem.foreign import answers_foreign, refuse_foreign
from ..problem.operands import BACKWARD, VARLEN_OPS
from ..problem.options import Array, WindowSize, is_zero, options_key
from ..problem.signatures import BackwardOptions
from ..runtime.call import run
from ..runtime.device_integers import check_on_device
from ..units import kind_of
from .dropout_seed import check_seed
from .mods import ModArgs, VarlenInputs, resolve_mods


@overload
def backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Any,
    lse: Any,
    *,
    captured_grads: None = ...,
    **options: Unpack[BackwardOptions],
) -> tuple[Array, Array, Array]: ...
@overload
def backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Any,
    lse: Any,
    *,
    captured_grads: Sequence[Any],
    **options: Unpack[BackwardOptions],
) -> tuple[Array, Array, Array, tuple[Any, ...]]: ...
@answers_foreign
def backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    deterministic: bool = False,
    grads_out: Sequence[Any] | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    diagonal_offset: int | None = None,
    softcap: float = 0.0,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    page_table: Any = None,
    cache_batch_idx: Any = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    block_mask: Any = None,
    bias: Any = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: Any = None,
    captured_grads: Sequence[Any] | None = None,
    check: bool = False,
    **foreign: Never,
) -> tuple[Array, Array, Array] | tuple[Array, Array, Array, tuple[Any, ...]]:
    """Gradients (dq, dk, dv) of `sum(dout · out) + sum(dlse · lse)`, with nothing of size seqlen_q x seqlen_k kept.

    q, k, v and the mask and scale arguments are those of `forward`, out and lse its results (of any `algorithm`, or of
    `merge_states`); out may be float32 where q is not. dout has the shape of out and the dtype of q, dlse (optional)
    those of lse. dq, dk, dv have the shapes and dtype of q, k, v. A query that sees no key has gradient 0. On Hopper a
    pair whose product of q and k is -inf counts as hidden, and NaN in a row may reach gradients of keys that a mask
    hides from it.

    `deterministic=True` gives bitwise repeatable results; NumPy's always are. On a GPU dq is otherwise added up in
    no fixed order, in a float32 workspace of its size (head_dim rounded up to that of the kernel), and so are dk and dv
    of keys that several blocks share. Deterministic, Hopper's kernels add dq up in the order of the keys; those of any
    GPU compute the scores twice instead and take about a third longer. Over head dim 128 Hopper has a kernel for each
    gradient, whose bits repeat in any case. At most two blocks share keys there, and a sum of two has one order.
    Without `deterministic` it takes the kernels of any GPU there, too, where grouped heads have few keys (see `plan`).
    Head dims up to 256 on a GPU; float16 needs |p (dout vᵀ - delta)| < 65504 there, as it is
    rounded to the inputs' dtype: scale a large loss down, or take bfloat16. Errors as in `forward`.

    Weights are made again from lse, which is float32, and are off by up to 4e-7 |score| of themselves, 0.04 at 10^5.

    grads_out: (dq, dk, dv), arrays to write to, None for a new one. They have the shapes and dtype of q, k, v and any
    strides, such as those of views of one packed array, and are returned. ProblemError for one that shares an element
    with another of them or with an input, that repeats memory, or that cannot be written to (JAX's, read-only ones).

    score_mod, mask_mod, block_mask, bias, sinks, dropout_p and dropout_seed are those of `forward`; where, min, max,
    abs and the like have the usual subgradients. captured_grads: a tuple of arrays, each of which is, as the same
    object, one that score_mod refers to, the bias or the sinks. Then (dq, dk, dv, grads) is returned, where grads is
    the tuple of their gradients, in the shapes and dtypes of the arrays, with sums in float32. ProblemError for any
    other array; those of integers and bools, and those that mask_mod alone refers to, have no gradients.

        out, lse = cuflash.forward(q, k, v, score_mod=alibi, sinks=sinks, return_lse=True)
        dq, dk, dv, (dslopes, dsinks) = cuflash.backward(
            dout, q, k, v, out, lse, score_mod=alibi, sinks=sinks, captured_grads=(slopes, sinks))

    Packed and used lengths, and check=True, are those of `forward`; gradients of rows that are not used, or of no
    sequence, are 0, in `grads_out` too. Keys in pages, and those of `cache_batch_idx`, have no gradients: an
    UnsupportedError.

        dqkv = cupy.empty((batch, seqlen, 3, heads, head_dim), q.dtype)
        cuflash.backward(dout, q, k, v, out, lse, grads_out=[dqkv[:, :, i] for i in range(3)])

    >>> import numpy as np, cuflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 100, 4, 64), dtype="float32")
    >>> out, lse = cuflash.forward(q, k, v, causal=True, return_lse=True)
    >>> dq, dk, dv = cuflash.backward(out, q, k, v, out, lse, causal=True)  # of the loss |out|² / 2
    >>> dq.shape, dk.shape, dv.shape
    ((2, 100, 4, 64), (2, 100, 4, 64), (2, 100, 4, 64))

    Source: FlashAttention-2 (arXiv 2307.08691), algorithm 2.
    """
    if foreign:
        raise refuse_foreign(backward, foreign)
    if page_table is not None or cache_batch_idx is not None:
        raise cached_keys_error(page_table)
    options = options_key(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        diagonal_offset=diagonal_offset,
        softcap=softcap,
        deterministic=deterministic,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        dropout_p=dropout_p,
    )
    outs = () if grads_out is None else _three(grads_out)
    op = BACKWARD
    inputs: tuple[Any, ...] = (q, k, v, dout, out, lse, dlse)
    varlen_args: VarlenInputs = ()
    if not cu_seqlens_q is cu_seqlens_k is seqused_q is seqused_k is None:
        varlen_args = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
        op, inputs = VARLEN_OPS["backward"], (*inputs, *varlen_args)
    mod_call = None
    is_plain = score_mod is mask_mod is block_mask is bias is sinks is captured_grads is None
    if not (is_plain and is_zero(dropout_p)):
        mod_args = ModArgs(score_mod, mask_mod, block_mask, bias, sinks, dropout_p)
        mod_call = resolve_mods("backward", mod_args, varlen_args, options.options, captured_grads)
        op, inputs = mod_call.op, (*inputs, *mod_call.inputs(dropout_seed, q))
    elif dropout_seed is not None:
        check_seed(dropout_seed, q)
    if check is not False:
        check_on_device(op, (*inputs, *outs), options, check)
    dq, dk, dv, *sums = run(op, inputs, options, None, outs)
    if mod_call is None or captured_grads is None:
        return dq, dk, dv
    return dq, dk, dv, mod_call.captured_grads(sums)


def cached_keys_error(page_table: Any) -> UnsupportedError:
    """Returns the error of gradients of cached keys, which have none. page_table: None for rows of a cache."""
    name = "page_table" if page_table is not None else "cache_batch_idx"
    return UnsupportedError(
        f"{name} was given, but cached keys have no gradients, as several sequences may share them; gather them "
        "into k and v, packed or one row of the batch for each sequence"
    )


def _three(grads_out: Any) -> tuple[Any, ...]:
    """The arrays for dq, dk and dv."""
    if not isinstance(grads_out, (tuple, list)) or len(grads_out) != 3:
        count = f" of {len(grads_out)}" if isinstance(grads_out, (tuple, list)) else ""
        raise ProblemError(
            f"grads_out is {kind_of(grads_out)}{count}; give (dq, dk, dv), each an array or None for a new one"
        )
    return tuple(grads_out)
