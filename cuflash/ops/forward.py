"""`cuflash.forward`: exact attention, tiled over keys."""

from __future__ import annotations

from typing import Any, Literal, Never, Unpack, overload

from ..errors import ProblemError
from ..problem.foreign import answers_foreign, refuse_foreign
from ..problem.index_offsets import NO_OFFSETS, IndexOffsets
from ..problem.operands import FORWARD, VARLEN_OPS, VarlenArgs, summing
from ..problem.options import (
    Algorithm,
    Array,
    OutDtype,
    WindowSize,
    check_algorithm,
    check_flag,
    is_zero,
    options_key,
)
from ..problem.signatures import ForwardOptions
from ..runtime.call import run
from ..runtime.device_integers import check_on_device
from .dropout_seed import check_seed
from .mods import ModArgs, VarlenInputs, resolve_mods


@overload
def forward(
    q: Array, k: Array, v: Array, *, return_lse: Literal[False] = ..., **options: Unpack[ForwardOptions]
) -> Array: ...
@overload
def forward(
    q: Array, k: Array, v: Array, *, return_lse: Literal[True], **options: Unpack[ForwardOptions]
) -> tuple[Array, Array]: ...
@overload
def forward(
    q: Array, k: Array, v: Array, *, return_lse: bool, **options: Unpack[ForwardOptions]
) -> Array | tuple[Array, Array]: ...
@answers_foreign
def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    diagonal_offset: int | None = None,
    softcap: float = 0.0,
    algorithm: Algorithm = "flash2",
    return_lse: bool = False,
    out: Any = None,
    out_dtype: OutDtype | None = None,
    lse: Any = None,
    accumulate: bool = False,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    page_table: Any = None,
    cache_batch_idx: Any = None,
    num_splits: int = 0,
    split_size: int | None = None,
    sm_margin: int = 0,
    score_mod: Any = None,
    mask_mod: Any = None,
    block_mask: Any = None,
    bias: Any = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: Any = None,
    index_offsets: IndexOffsets = NO_OFFSETS,
    check: bool = False,
    **foreign: Never,
) -> Array | tuple[Array, Array]:
    """Returns exact attention, `softmax(mask(cap(softmax_scale q kᵀ))) v`.

    It reads keys tile by tile, so no matrix of seqlen_q x seqlen_k scores is stored.
    On a GPU, work runs on the caller's current stream.

    Parameters
    ----------
    q : array (batch, seqlen_q, heads_q, head_dim)
        Queries: a CuPy, PyTorch, JAX, NumPy or other DLPack array with any strides. The dtype is float16, bfloat16 or
        float32, on the CPU also float64. head_dim is 1 to 512, in float32 to 256 on sm_86, sm_89, sm_120 and sm_121; on
        the CPU any. (seqlen, heads, head_dim) and (seqlen, head_dim) are accepted too, for all of q, k and v.
    k : array (batch, seqlen_k, heads_kv, head_dim)
        Keys, of the framework, device and dtype of q. heads_q is a multiple of heads_kv. Query head h uses kv head
        `h // (heads_q // heads_kv)`.
    v : array (batch, seqlen_k, heads_kv, head_dim_v)
        Values, like k. head_dim_v may differ from head_dim and has the same limits.
    softmax_scale : float, default 1/sqrt(head_dim)
        Factor of the scores, from 1e-15 to 1e15.
    causal : bool, default False
        Hides later keys: key j is visible to query i iff `j <= i + diagonal_offset`.
    window_size : tuple (left, right), default (-1, -1)
        Numbers of keys that are visible left and right of the diagonal; -1 or None is open. causal sets right to 0.
    diagonal_offset : int, default seqlen_k - seqlen_q
        Key index of the diagonal at query 0. The default aligns the diagonal bottom-right, 0 top-left. For
        variable-length sequences the default is computed from the lengths of each sequence.
    softcap : float, default 0.0
        A cap c > 0 turns scores into c·tanh(score / c); 0 is no cap.
    algorithm : {"flash2", "flash1", "flashd", "standard"}, default "flash2"
        Algorithm. "standard" stores all scores and is for comparison. It takes no mods, and on a GPU no
        variable-length sequences.
    return_lse : bool, default False
        True returns lse, too.
    out : array, optional
        Array to write the result to. It shares no memory with another argument.
    out_dtype : "float32" or dtype object, optional
        Dtype of out; by default the dtype of q. "float32", or an object such as numpy.float32, keeps the full precision
        of 16-bit inputs.
    lse : array (batch, heads_q, seqlen_q), optional
        Array to write lse to.
    accumulate : bool, default False
        True adds these keys to a state over other keys, in place: out and lse hold it, and then the state over both
        (see Notes). Both are required, in float32 (float64 for float64).
    cu_seqlens_q : int32 array (batch + 1,), optional
        Offsets of packed queries: q is (total, heads_q, head_dim). Sequence b has the rows
        cu_seqlens_q[b] … cu_seqlens_q[b + 1] - 1. It is legal without cu_seqlens_k.
    cu_seqlens_k : int32 array (batch + 1,), optional
        Offsets of packed keys and values, (total, heads_kv, …), like cu_seqlens_q. It is legal without cu_seqlens_q.
    max_seqlen_q : int, optional
        Upper bound of the queries of a variable-length sequence, if known. Rows past it count as unused.
    max_seqlen_k : int, optional
        Upper bound of the keys of a variable-length sequence, if known. Rows past it count as unused.
    seqused_q : int32 array (batch,), optional
        Number of used queries of each sequence: packed, or of q (batch, seqlen_q, …).
    seqused_k : int32 array (batch,), optional
        Number of used keys of each sequence: packed, of a cache k (batch, capacity, …), or of pages.
    page_table : int32 array (batch, max_pages), optional
        Pages of each sequence: k and v are (num_pages, page_size, heads_kv, …). Key j of sequence b lies in page
        page_table[b, j // page_size].
    cache_batch_idx : int32 array (batch,), optional
        Row of k and v that holds the keys of each sequence. k and v are a cache with any number of rows.
    num_splits : int, default 0
        Upper bound of the thread blocks that share the keys of a query. 0 chooses by the GPU's size and the lengths.
        More than one share them where most of the GPU would idle, as queries are few.
    split_size : int, optional
        Switch for equal bits in every layout (see Notes). Despite its name, it splits no keys: any multiple of
        128 has the same effect.
    sm_margin : int, default 0
        Number of SMs that the kernels leave to others, such as NCCL's beside them; fewer than the GPU has (see Notes).
    score_mod : callable (score, b, h, q_idx, k_idx), optional
        Returns the score that replaces the scaled and capped one.
    mask_mod : callable (b, h, q_idx, k_idx), optional
        Returns True for visible keys. causal and window_size hide keys beside it.
    block_mask : BlockMask, optional
        Tiles of a mask, together with its mask_mod, from `create_block_mask`. Without it, each call with a mask_mod
        computes one.
    bias : array broadcastable to (batch, heads_q, seqlen_q, seqlen_k), optional
        Floats to add to the scores, or bools: True is visible. Strides are free.
    sinks : array (heads_q,), optional
        One more logit of each head, without a value, in float32 or the dtype of q.
    dropout_p : float, default 0.0
        Fraction of weights to drop, in [0, 1). Other weights are divided by the fraction that is kept. lse does not
        depend on it.
    dropout_seed : int or array, optional
        Seed of dropout: an int of 64 bits, or an array on the device of q. The array holds one such integer, or two of
        32 bits, the low one first. With an array, a CUDA graph may be replayed with other seeds. Equal seeds drop equal
        weights, in `backward` too.
    index_offsets : tuple of 2 to 4 ints, default (0, 0)
        Positions of this call's first query, key, head and sequence in a larger call, of which it is a part; the last
        two may be left out. They are added to the indices that score_mod, mask_mod and dropout get (see Notes).
    check : bool, default False
        True reads the int32 arrays above from a GPU and validates them; this waits for the caller's stream. It is an
        UnsupportedError for traced arrays, and while a CUDA graph is captured.

    Returns
    -------
    out : array (batch, seqlen_q, heads_q, head_dim_v)
        Attention, in the rank and framework of q. A query that sees no key has out 0.
    lse : array (batch, heads_q, seqlen_q)
        Only with return_lse: the natural logarithm of the sum of exp of the visible scores. It is float32, or float64
        for float64. A query that sees no key has -inf. For packed q it is (heads_q, total_q).

    Raises
    ------
    ProblemError
        Arguments fit no attention problem.
    UnsupportedError
        This build or machine has no kernel for the call.
    CompileError
        NVRTC refuses a kernel.

    Notes
    -----
    Variable lengths. All int32 arrays lie on the device of q. Rows of no sequence and unused rows have out 0 and
    lse -inf; an `out` argument keeps its values there. In host memory these integers are validated in every call.
    cu_seqlens begin at 0, never decrease and end within the rows. Beside seqused of that side, they may begin anywhere.
    Used lengths are at most the rows of the sequence. Keys that causal and window_size show lie in pages or rows that
    exist. On a GPU the host does not read the integers. Lengths outside the arrays are clamped, and keys in missing
    pages are hidden.

    Mods. The order is scale, softcap, score_mod, bias, masks. b is the sequence and h the query head; q_idx and k_idx
    count from the start of the sequence. `cuflash.mods.seqlen_q()` and `cuflash.mods.seqlen_k()` are its used lengths.
    The functions take scalars and are traced once. They may use operators, `if`, and functions of NumPy, CuPy, PyTorch,
    jax.numpy, math and `cuflash.mods`. They may load `array[index, …]` from arrays that they refer to. Each call reads
    the values of these arrays. Negative indices count from the end, and others outside are clamped. `cuflash.mods`
    lists the types in which they compute: masks are exact for captured float64 and for integers beyond int32. A score
    of at most -1e37 weighs nothing.

    Index offsets. A call on slices, with the positions where they begin, is the part of one call on the whole: with
    dropout, score_mod and mask_mod, and in gradients. causal, window_size, diagonal_offset, a bias, sinks, seqlen_q()
    and seqlen_k() stay those of the call. For several sequences of one call, all have the same offsets of query and
    key. A block_mask holds tiles without offsets and is refused beside them. Offsets are integers in host memory, of at
    least 0; offset plus length stays within 2^30 - 4096. All offsets share a kernel, except that dropout has another
    one where the offset of keys is no multiple of 32: it draws 2.5 to 4 times as many random numbers.

    Equal bits. With split_size, the bits of a row depend only on its q and on the keys and values that it sees. This
    holds for out and lse on one kind of GPU: dense, packed, in a cache, in pages, and beside any other queries. One
    thread block takes all keys of a query, whatever num_splits is, so few queries over many keys are slower. On Hopper,
    16-bit inputs with head dims that are multiples of 8 need alignment. They and their rows must begin at multiples of
    16 bytes, else UnsupportedError is raised.

    SMs. With sm_margin, Hopper's kernels start one thread block on each other SM, and these take tiles until none is
    left. So a kernel on another stream starts at once. Kernels for any GPU, and gradients with a mask_mod over head dim
    128, have many short thread blocks instead: a kernel on a stream of higher priority starts when some of them end. A
    margin may change the number of splits, and so bits, where num_splits is 0 and split_size is not given. On the CPU
    it has no effect.

    States. With accumulate, out and lse become those over the keys of both, as `merge_states` computes them, without
    arrays in between. A query that sees no key here keeps its state. A state without keys has lse -inf, and its out is
    not read. Give sinks to one of the parts alone. The algorithm is "flash2", no keys are split, and on a GPU
    head_dim_v is at most 256, in float32 128.

    Precision. Scores are float32, so a weight is off by up to 1e-7 |score| of itself (0.01 at 10^5). On a GPU, scores
    past 10^8 may give NaN. |v| times seqlen_k must stay below 3.4e38; in bfloat16 on Hopper, |v| alone. On a GPU,
    float32 inputs are computed as three TF32 products. There a visible infinite element gives NaN, and elements past
    3.4e38 count as infinite. On Hopper, bfloat16 out is right to 1e-36 at best. Hopper's kernels round weights to 16
    bits at the scale of a past maximum. So out is off by up to 1.1 times the error that an exact maximum leaves. With
    score_mod it is up to 1.4 times, where one key outweighs all others.

    Hidden keys. A mask hides k and v whatever they hold, with one exception. On a GPU, NaN or infinity in a hidden row
    of v may reach some queries, the same in each run. Such a query is less than 128 rows (Hopper: 192) from a query
    that sees a key less than 128 from that row. With algorithm="standard" it may be any query. Rows past a length
    reach no query. A score of -inf, from score_mod or a bias of floats, is no mask: NaN in k stays NaN.

    References
    ----------
    FlashAttention (arXiv 2205.14135), FlashAttention-2 (arXiv 2307.08691), FLASH-D (arXiv 2505.14201).

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 100, 4, 64), dtype="float32")
    >>> out, lse = cuflash.forward(q, k, v, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    ((2, 100, 4, 64), (2, 4, 100))

    ALiBi of two heads, on a GPU.

        slopes = cupy.array([0.5, 0.25], "float32")
        out = cuflash.forward(q, k, v, causal=True, score_mod=lambda s, b, h, i, j: s - slopes[h] * abs(i - j))
    """
    if foreign:
        raise refuse_foreign(forward, foreign)
    options = options_key(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        diagonal_offset=diagonal_offset,
        softcap=softcap,
        algorithm=algorithm,
        out_dtype=out_dtype,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        num_splits=num_splits,
        split_size=split_size,
        sm_margin=sm_margin,
        dropout_p=dropout_p,
        index_offsets=index_offsets,
    )
    # Type check inlined: this is the hot path.
    return_lse = return_lse if type(return_lse) is bool else check_flag("return_lse", return_lse)
    outs: tuple[Any, ...] = () if out is lse is None else (out,) if lse is None else (out, lse)
    outputs = max(len(outs), 1 + return_lse)
    op = FORWARD
    inputs: tuple[Any, ...] = (q, k, v)
    varlen_args: VarlenInputs = ()
    if not cu_seqlens_q is cu_seqlens_k is seqused_q is seqused_k is page_table is cache_batch_idx is None:
        varlen_args = VarlenArgs(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, cache_batch_idx)
        op, inputs = VARLEN_OPS["forward"], (*inputs, *varlen_args)
    if accumulate is not False and check_flag("accumulate", accumulate):
        _check_state(out, lse, algorithm, out_dtype)
        op = summing(op, True)
    if not (score_mod is mask_mod is block_mask is bias is sinks is None and is_zero(dropout_p)):
        mod_args = ModArgs(score_mod, mask_mod, block_mask, bias, sinks, dropout_p)
        mod_call = resolve_mods(op, mod_args, varlen_args, options.options)
        op, inputs = mod_call.op, (*inputs, *mod_call.inputs(dropout_seed, q))
    elif dropout_seed is not None:
        check_seed(dropout_seed, q)
    if check is not False:
        check_on_device(op, (*inputs, *outs), options, check)
    results: tuple[Array, Array] = run(op, inputs, options, outputs, outs)
    return results if return_lse else results[0]


def _check_state(out: Any, lse: Any, algorithm: Any, out_dtype: Any) -> None:
    """Raises ProblemError for arguments with which a call cannot add to a state."""
    for name, x in (("out", out), ("lse", lse)):
        if x is None:
            raise ProblemError(
                f"accumulate=True adds to the state in out and lse, but {name} is None; give both, in float32. lse "
                "filled with -inf is a state without keys."
            )
    if check_algorithm(algorithm) != "flash2" or out_dtype is not None:
        raise ProblemError("accumulate=True takes neither algorithm nor out_dtype; leave them out")
