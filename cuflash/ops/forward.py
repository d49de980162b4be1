"""`cuflash.forward`: exact attention, the keys taken tile by tile."""

from __future__ import annotations

from typing import Any, Literal, Never, Unpack, overload

from ..problem.foreign import answers_foreign, refuse_foreign
from ..problem.operands import FORWARD, VARLEN_OPS, VarlenArgs
from ..problem.options import Algorithm, Array, OutDtype, WindowSize, check_flag, is_zero, options_key
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
    score_mod: Any = None,
    mask_mod: Any = None,
    block_mask: Any = None,
    bias: Any = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: Any = None,
    check: bool = False,
    **foreign: Never,
) -> Array | tuple[Array, Array]:
    """Exact attention, `softmax(mask(cap(softmax_scale q kᵀ))) v`, with no seqlen_q x seqlen_k matrix in memory.

    q (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_kv, head_dim), v (batch, seqlen_k, heads_kv,
    head_dim_v): CuPy, PyTorch, JAX, NumPy or any DLPack arrays of one framework, device and dtype (float16, bfloat16,
    float32; float64 on the CPU), with any strides. (seqlen, heads, head_dim) and (seqlen, head_dim) are accepted too.
    float32 on a GPU is computed as three TF32 products; an infinite element that is seen gives NaN there. A mask hides
    k and v whatever they hold. On a GPU, NaN or infinity in a hidden row of v may still reach some queries, the same in
    each run: those less than 128 rows (Hopper: 192) from a query that sees a key less than 128 from that row, and with
    algorithm="standard" all. What lies past a length reaches no query.
    head_dim and head_dim_v go independently from 1 to 256, to 512 where the GPU's shared memory allows; on the CPU any.
    heads_q is a multiple of heads_kv; query head h uses kv head `h // (heads_q // heads_kv)`.

    softmax_scale: a finite number above 0, default 1/sqrt(head_dim). causal: key j is visible to query i iff
    `j <= i + diagonal_offset`. window_size: (left, right) keys besides the diagonal, -1 or None for open.
    diagonal_offset: default seqlen_k - seqlen_q (bottom-right aligned); 0 aligns top-left. softcap c > 0: scores become
    c·tanh(score / c).
    algorithm: "flash2" (default), "flash1", "flashd" or "standard" (materialises the scores; for comparison).
    out: array to write to, of its own memory. out_dtype: "float32" (or a dtype object, such as numpy.float32) keeps the
    full precision of 16-bit inputs.

    How large numbers may be: scores are float32, so a weight is off by up to 1e-7 |score| of itself (0.01 at 10^5), and
    on a GPU scores past 10^8 may give NaN. |v| times seqlen_k must stay below 3.4e38 (in bfloat16 on Hopper |v| alone).
    Elements of float32 past 3.4e38 count as infinite on a GPU. Of bfloat16 out is right to 1e-36 at best on Hopper.
    There weights are rounded to 16 bits at the scale of a past maximum, and out is off by up to 1.1 times what an exact
    maximum leaves; with score_mod by up to 1.4 times where one key outweighs all others.

    Returns out (batch, seqlen_q, heads_q, head_dim_v) in the rank and framework of q; with return_lse also lse
    (batch, heads_q, seqlen_q), float32 (float64 for float64): the natural logarithm of the sum of exp of the visible
    scores. A query that sees no key has out 0 and lse -inf. Work runs on the caller's current stream.

    Variable-length sequences, given by int32 arrays on the device of q. `cu_seqlens_q`, `cu_seqlens_k` (batch + 1,):
    q, or k and v, are packed, (total, heads, head_dim), and sequence b has the rows cu_seqlens[b] … cu_seqlens[b + 1] -
    1; either alone is legal. `seqused_q`, `seqused_k` (batch,): how many rows of a sequence are used, packed, of q
    (batch, seqlen_q, …), of a cache k (batch, capacity, …) or of pages. `page_table` (batch, max_pages): k and v are
    pages, (num_pages, page_size, heads_kv, …), and key j of sequence b lies in page page_table[b, j // page_size].
    `cache_batch_idx` (batch,): sequence b has that row of the cache. `max_seqlen_q`, `max_seqlen_k`: bounds that the
    caller knows; rows past them count as unused. `diagonal_offset` counts from each sequence's own lengths. Rows that
    belong to no sequence or are not used have lse -inf and out 0; an `out` that was given keeps what it holds there.
    lse of packed q is (heads_q, total_q).

    In host memory these integers are checked: cu_seqlens begin at 0 (beside seqused of that side anywhere), never
    decrease and end within the rows, used lengths have room, and keys that causal and window_size show lie in pages or
    rows that exist. On a GPU the host does not read them: lengths outside the arrays are clamped, and keys in pages
    that do not exist are not seen. check=True reads them once and checks them there, too: it waits for the caller's
    stream, and is an UnsupportedError while a CUDA graph is captured and for traced arrays.

    num_splits: how many thread blocks share the keys of a query at most, 0 for a choice by the GPU's size and the
    lengths. More than one do where queries are so few that most of the GPU would idle.
    split_size: a switch; any multiple of 128 keys has the same effect, and no keys are split. On one kind of GPU, the
    bits of a row of out and lse then depend on its q and on the keys and values that it sees alone. They are the same
    dense, packed, in a cache, in pages, and with any other queries. One thread block takes all keys of a query,
    whatever num_splits is, so few queries over many keys are slower. On Hopper, 16-bit inputs of head dims that are
    multiples of 8 raise UnsupportedError with it where they, or their rows, do not begin at multiples of 16 bytes.

    Mods, in the order scale, softcap, score_mod, bias, masks. Indices count from the
    begin of each sequence, b is its number and h the query head; inside a function `cuflash.mods.seqlen_q()` and
    `seqlen_k()` are its used lengths. score_mod(score, b, h, q_idx, k_idx) gives the score that takes the place of the
    scaled one; mask_mod(b, h, q_idx, k_idx) is True where a key is seen, beside causal and window_size. They are Python
    functions of scalars, traced once: operators, `if`, functions of NumPy, PyTorch, jax.numpy, math or `cuflash.mods`,
    and `array[index, …]` of arrays that they refer to, whose values each call reads (indices outside are clamped).
    `cuflash.mods` says in which types they compute: masks are exact for captured float64 and integers beyond int32.
    block_mask: of `create_block_mask`, with its mask_mod; otherwise the call makes one. bias: an array to add,
    broadcastable to (batch, heads_q, seqlen_q, seqlen_k) with any strides, of floats, or of bool (True is seen).
    sinks (heads_q,), float32 or the dtype of q: one more logit of each head, without a value. A score of at most -1e37
    weighs nothing. dropout_p in [0, 1): weights are dropped, and the others divided by the share that is kept; lse is
    that without dropout. dropout_seed: an int of 64 bits, or an array of one such integer (two of 32 bits, the low one
    first) on the device, so that CUDA graphs may be replayed with others. Equal seeds drop the same weights, in
    `backward` too. All of these go with every algorithm but "standard".

        slopes = cupy.array([0.5, 0.25])
        out = cuflash.forward(q, k, v, causal=True, score_mod=lambda s, b, h, i, j: s - slopes[h] * abs(i - j))

    Raises ProblemError for arguments that fit no attention problem, UnsupportedError where this build or machine has no
    kernel, CompileError where NVRTC refuses one.

    >>> import numpy as np, cuflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 100, 4, 64), dtype="float32")
    >>> out, lse = cuflash.forward(q, k, v, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    ((2, 100, 4, 64), (2, 4, 100))

    Sources: FlashAttention (arXiv 2205.14135), FlashAttention-2 (arXiv 2307.08691), FLASH-D (arXiv 2505.14201).
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
        dropout_p=dropout_p,
    )
    # why by the type first: no step of a repeated call may grow.
    return_lse = return_lse if type(return_lse) is bool else check_flag("return_lse", return_lse)
    outs, outputs = () if out is None else (out,), 1 + return_lse
    op = FORWARD
    inputs: tuple[Any, ...] = (q, k, v)
    varlen_args: VarlenInputs = ()
    if not cu_seqlens_q is cu_seqlens_k is seqused_q is seqused_k is page_table is cache_batch_idx is None:
        varlen_args = VarlenArgs(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, cache_batch_idx)
        op, inputs = VARLEN_OPS["forward"], (*inputs, *varlen_args)
    if not (score_mod is mask_mod is block_mask is bias is sinks is None and is_zero(dropout_p)):
        mod_args = ModArgs(score_mod, mask_mod, block_mask, bias, sinks, dropout_p)
        mod_call = resolve_mods("forward", mod_args, varlen_args, options.options)
        op, inputs = mod_call.op, (*inputs, *mod_call.inputs(dropout_seed, q))
    elif dropout_seed is not None:
        check_seed(dropout_seed, q)
    if check is not False:
        check_on_device(op, (*inputs, *outs), options, check)
    results: tuple[Array, Array] = run(op, inputs, options, outputs, outs)
    return results if return_lse else results[0]
