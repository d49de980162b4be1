"""`cuflash.backward`: exact gradients of attention, the weights recomputed from lse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Never, Unpack, overload

from ..errors import ProblemError, UnsupportedError
from ..problem.foreign import answers_foreign, refuse_foreign
from ..problem.index_offsets import NO_OFFSETS, IndexOffsets
from ..problem.operands import BACKWARD, VARLEN_OPS, Op, summing
from ..problem.options import Array, WindowSize, check_flag, is_zero, options_key
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
    return_delta: Literal[False] = ...,
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
    captured_grads: None = ...,
    return_delta: Literal[True],
    **options: Unpack[BackwardOptions],
) -> tuple[Array, Array, Array, Array]: ...
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
    return_delta: Literal[False] = ...,
    **options: Unpack[BackwardOptions],
) -> tuple[Array, Array, Array, tuple[Any, ...]]: ...
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
    return_delta: Literal[True],
    **options: Unpack[BackwardOptions],
) -> tuple[Array, Array, Array, tuple[Any, ...], Array]: ...
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
    sm_margin: int = 0,
    grads_out: Sequence[Any] | None = None,
    accumulate: bool = False,
    delta: Any = None,
    return_delta: bool = False,
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
    index_offsets: IndexOffsets = NO_OFFSETS,
    captured_grads: Sequence[Any] | None = None,
    check: bool = False,
    **foreign: Never,
) -> Any:
    """Returns the gradients (dq, dk, dv) of `sum(dout · out) + sum(dlse · lse)`.

    It computes weights again from lse, so nothing of size seqlen_q x seqlen_k is stored.

    Parameters
    ----------
    dout : array (batch, seqlen_q, heads_q, head_dim_v)
        Gradient of out, in the dtype of q.
    q : array (batch, seqlen_q, heads_q, head_dim)
        Queries, as in the call of `forward`. On a GPU, head dims are 1 to 256.
    k : array (batch, seqlen_k, heads_kv, head_dim)
        Keys, as in that call.
    v : array (batch, seqlen_k, heads_kv, head_dim_v)
        Values, as in that call.
    out : array (batch, seqlen_q, heads_q, head_dim_v)
        Result of `forward` with any algorithm, or of `merge_states`. It may be float32 where q is not.
    lse : array (batch, heads_q, seqlen_q)
        The other result of that call: float32, or float64 for float64. For packed q it is (heads_q, total_q).
    dlse : array (batch, heads_q, seqlen_q), optional
        Gradient of lse, in the shape and dtype of lse.
    deterministic : bool, default False
        True gives bitwise repeatable results (see Notes).
    sm_margin : int, default 0
        Number of SMs that the kernels leave to others.
    grads_out : tuple (dq, dk, dv), optional
        Arrays to write to and return, None for a new one. They have the shapes and dtype of q, k, v and any strides,
        such as views of one packed array. They share no element with each other or with an input, repeat no memory and
        are writable.
    accumulate : bool, default False
        True adds the gradients to grads_out, three float32 arrays (float64 for float64). They are not rounded to the
        dtype of q, and rows without a gradient keep their values.
    delta : array (batch, heads_q, seqlen_q), optional
        Row sums of dout · out less dlse, from a call with return_delta. out is then not read, and dlse must be None. It
        saves a pass over dout and out for each further part of the keys.
    return_delta : bool, default False
        True returns delta, too.
    softmax_scale : float, default 1/sqrt(head_dim)
        Factor of the scores, from 1e-15 to 1e15.
    causal : bool, default False
        Hides later keys: key j is visible to query i iff `j <= i + diagonal_offset`.
    window_size : tuple (left, right), default (-1, -1)
        Numbers of keys that are visible left and right of the diagonal; -1 or None is open.
    diagonal_offset : int, default seqlen_k - seqlen_q
        Key index of the diagonal at query 0. The default aligns the diagonal bottom-right, 0 top-left.
    softcap : float, default 0.0
        A cap c > 0 turns scores into c·tanh(score / c); 0 is no cap.
    cu_seqlens_q : int32 array (batch + 1,), optional
        Offsets of packed queries: q, dout and out are (total, heads_q, …).
    cu_seqlens_k : int32 array (batch + 1,), optional
        Offsets of packed keys and values: k and v are (total, heads_kv, …).
    max_seqlen_q : int, optional
        Upper bound of the queries of a variable-length sequence, if known.
    max_seqlen_k : int, optional
        Upper bound of the keys of a variable-length sequence, if known.
    seqused_q : int32 array (batch,), optional
        Number of used queries of each sequence.
    seqused_k : int32 array (batch,), optional
        Number of used keys of each sequence.
    page_table : None
        Keys in pages have no gradients: an array raises UnsupportedError.
    cache_batch_idx : None
        Keys of a cache have no gradients: an array raises UnsupportedError.
    score_mod : callable (score, b, h, q_idx, k_idx), optional
        Returns the score that replaces the scaled and capped one. where, min, max, abs and the like have the usual
        subgradients.
    mask_mod : callable (b, h, q_idx, k_idx), optional
        Returns True for visible keys.
    block_mask : BlockMask, optional
        Tiles of a mask, together with its mask_mod, from `create_block_mask`.
    bias : array broadcastable to (batch, heads_q, seqlen_q, seqlen_k), optional
        Floats to add to the scores, or bools: True is visible.
    sinks : array (heads_q,), optional
        One more logit of each head, without a value.
    dropout_p : float, default 0.0
        Fraction of weights that `forward` dropped, in [0, 1).
    dropout_seed : int or array, optional
        Seed of dropout in `forward`.
    index_offsets : tuple of 2 to 4 ints, default (0, 0)
        Positions of this call's first query, key, head and sequence in a larger call, as in `forward`.
    captured_grads : tuple of arrays, optional
        Arrays whose gradients are returned, as the same objects: arrays that score_mod refers to, the bias or the
        sinks. Integers, bools and arrays that mask_mod alone refers to have no gradients.
    check : bool, default False
        True reads the int32 arrays above from a GPU and validates them, as in `forward`.

    Returns
    -------
    dq : array (batch, seqlen_q, heads_q, head_dim)
        Gradient of q, in its dtype. A query that sees no key has gradient 0.
    dk : array (batch, seqlen_k, heads_kv, head_dim)
        Gradient of k, in its dtype.
    dv : array (batch, seqlen_k, heads_kv, head_dim_v)
        Gradient of v, in its dtype.
    grads : tuple of arrays
        Only with captured_grads: their gradients, in the shapes and dtypes of the arrays. Sums are float32.
    delta : array (batch, heads_q, seqlen_q)
        Only with return_delta, in the dtype of lse. A query that sees no key has 0.

    Raises
    ------
    ProblemError
        Arguments fit no attention problem. This includes grads_out that cannot be written to (JAX's, read-only ones),
        and captured_grads that have no gradient.
    UnsupportedError
        This build or machine has no kernel for the call, or keys lie in pages or in a cache.
    CompileError
        NVRTC refuses a kernel.

    Notes
    -----
    Every argument that `forward` has, too, has the meaning and the limits described there.

    Variable lengths. Unused rows and rows of no sequence have gradient 0, in grads_out too.

    Bits. Without deterministic, kernels add dq in no fixed order on a GPU. The sums take a float32 workspace of dq's
    size, head_dim rounded up to the kernel's head dim. So do dk and dv of keys that several thread blocks share. With
    accumulate, Hopper's kernels for all gradients need neither, as they add to grads_out. With deterministic, they add
    dq in the order of the keys. The kernels for any GPU compute the scores twice instead, which takes about a third
    longer. Some calls on Hopper have one kernel for each gradient, whose bits repeat in any case: at most two thread
    blocks share keys, and a sum of two has one order. Over head dim 128 these are calls with lengths, sm_margin or
    tiles that a mask_mod hides. Over (192, 128) they are deterministic calls, too, those with accumulate or functions,
    and all up to (192, 192). There, without deterministic, grouped heads with few keys take the kernels for any GPU
    (see `plan`). With sm_margin, calls take the kernels of packed rows. Their bits may differ over head dim 128, and up
    to it where 8192 queries or more see a key. NumPy's results always repeat.

    Precision. Weights are off by up to 4e-7 |score| of themselves (0.04 at 10^5), as lse is float32. On a GPU,
    |p (dout vᵀ - delta)| is rounded to the inputs' dtype, so in float16 it must stay below 65504. Scale a large loss
    down, or take bfloat16. On Hopper, a pair whose product of q and k is -inf counts as hidden. There, NaN in a row may
    reach gradients of keys that a mask hides from it.

    References
    ----------
    FlashAttention-2 (arXiv 2307.08691), algorithm 2.

    Examples
    --------
    Gradients of the loss |out|² / 2.

    >>> import numpy as np, cuflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 100, 4, 64), dtype="float32")
    >>> out, lse = cuflash.forward(q, k, v, causal=True, return_lse=True)
    >>> dq, dk, dv = cuflash.backward(out, q, k, v, out, lse, causal=True)
    >>> dq.shape, dk.shape, dv.shape
    ((2, 100, 4, 64), (2, 100, 4, 64), (2, 100, 4, 64))

    Gradients of captured arrays.

        out, lse = cuflash.forward(q, k, v, score_mod=alibi, sinks=sinks, return_lse=True)
        dq, dk, dv, (dslopes, dsinks) = cuflash.backward(
            dout, q, k, v, out, lse, score_mod=alibi, sinks=sinks, captured_grads=(slopes, sinks))

    Gradients in one packed array.

        dqkv = cupy.empty((batch, seqlen, 3, heads, head_dim), q.dtype)
        cuflash.backward(dout, q, k, v, out, lse, grads_out=[dqkv[:, :, i] for i in range(3)])
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
        sm_margin=sm_margin,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        dropout_p=dropout_p,
        index_offsets=index_offsets,
    )
    outs = () if grads_out is None else _three(grads_out)
    op = BACKWARD
    inputs: tuple[Any, ...] = (q, k, v, dout, out, lse, dlse)
    varlen_args: VarlenInputs = ()
    if not cu_seqlens_q is cu_seqlens_k is seqused_q is seqused_k is None:
        varlen_args = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
        op, inputs = VARLEN_OPS["backward"], (*inputs, *varlen_args)
    if delta is not None or accumulate is not False or return_delta is not False:
        op = _summing(op, outs, accumulate, delta, return_delta, dlse)
        inputs = inputs if delta is None else (*inputs, delta)
    mod_call = None
    is_plain = score_mod is mask_mod is block_mask is bias is sinks is captured_grads is None
    if not (is_plain and is_zero(dropout_p)):
        mod_args = ModArgs(score_mod, mask_mod, block_mask, bias, sinks, dropout_p)
        mod_call = resolve_mods(op, mod_args, varlen_args, options.options, captured_grads)
        op, inputs = mod_call.op, (*inputs, *mod_call.inputs(dropout_seed, q))
    elif dropout_seed is not None:
        check_seed(dropout_seed, q)
    if check is not False:
        check_on_device(op, (*inputs, *outs), options, check)
    dq, dk, dv, *more = run(op, inputs, options, None, outs)
    deltas = (more.pop(0),) if op.delta == "returns" else ()
    if mod_call is None or captured_grads is None:
        return dq, dk, dv, *deltas
    return dq, dk, dv, mod_call.captured_grads(more), *deltas


def _summing(op: Op, outs: tuple[Any, ...], accumulate: Any, delta: Any, return_delta: Any, dlse: Any) -> Op:
    """Returns the op with sums in float32 arrays, or an array of delta; raises ProblemError if arguments disagree."""
    accumulates, returns_delta = check_flag("accumulate", accumulate), check_flag("return_delta", return_delta)
    if accumulates and (not outs or any(x is None for x in outs)):
        raise ProblemError(
            "accumulate=True adds to grads_out; give grads_out=(dq, dk, dv), three float32 arrays, zeros at first"
        )
    if delta is not None and (returns_delta or dlse is not None):
        name = "dlse" if dlse is not None else "return_delta"
        raise ProblemError(f"delta and {name} were given; leave {name} out, as delta is known and includes dlse")
    return summing(op, accumulates, "takes" if delta is not None else "returns" if returns_delta else None)


def cached_keys_error(page_table: Any) -> UnsupportedError:
    """Returns the error for gradients of cached keys. page_table: None if the keys are rows of a cache."""
    name = "page_table" if page_table is not None else "cache_batch_idx"
    return UnsupportedError(
        f"{name} was given, but cached keys have no gradients, as several sequences may share them; gather them "
        "into k and v, packed or one row of the batch for each sequence"
    )


def _three(grads_out: Any) -> tuple[Any, ...]:
    """Returns the arrays for dq, dk and dv."""
    if not isinstance(grads_out, (tuple, list)) or len(grads_out) != 3:
        count = f" of {len(grads_out)}" if isinstance(grads_out, (tuple, list)) else ""
        raise ProblemError(
            f"grads_out is {kind_of(grads_out)}{count}; give (dq, dk, dv), each an array or None for a new one"
        )
    return tuple(grads_out)
