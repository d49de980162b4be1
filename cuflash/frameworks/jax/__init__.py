"""Attention for JAX: `attention` works eagerly and under jit, grad, vmap, scan, checkpoint and shard_map.

    from cuflash.frameworks.jax import attention
    gradient = jax.jit(jax.grad(lambda q, k, v: attention(q, k, v, causal=True).sum()))

`dot_product_attention` has the name and arguments of the function in `jax.nn`. `ragged_paged_attention` has the
arguments of JAX's function for TPUs. `export_checks` serves `jax.export`.
"""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import ProblemError, UnsupportedError
from ...mods.tracing.operand import is_real
from ...ops.mods import ModArgs
from ...ops.triangle import attended
from ...problem.foreign import answers_foreign
from ...problem.index_offsets import NO_OFFSETS, IndexOffsets, check_index_offsets
from ...problem.operands import VarlenArgs
from ...problem.options import Options, WindowSize, check_flag, check_integer, check_scale, is_zero
from ...problem.signatures import AttentionOptions
from ..bool_masks import visible_in
from .arguments import arrays_of, bias_or_mask, integers, static_keywords, window_of
from .call import run
from .handlers import OPS
from .mods import mod_operands
from .primitives import as_jax, checked_array

if jax.__version_info__ < (0, 8, 2):  # older versions fail at gradients of some arguments alone
    raise UnsupportedError(
        f"cuflash.frameworks.jax needs JAX 0.8.2 or later, and this is {jax.__version__}; install a newer one, or call "
        "cuflash.forward and cuflash.backward outside of jit"
    )

__all__ = [
    "attention",
    "dot_product_attention",
    "export_checks",
    "ragged_paged_attention",
    "triangle_attention",
]

_DEFAULT_MASK_VALUE = -0.7 * float(np.finfo("float32").max)


@overload
def attention(
    q: Any, k: Any, v: Any, *, return_lse: Literal[False] = ..., **options: Unpack[AttentionOptions[Any]]
) -> jax.Array: ...
@overload
def attention(
    q: Any, k: Any, v: Any, *, return_lse: Literal[True], **options: Unpack[AttentionOptions[Any]]
) -> tuple[jax.Array, jax.Array]: ...
@overload
def attention(
    q: Any, k: Any, v: Any, *, return_lse: bool, **options: Unpack[AttentionOptions[Any]]
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
@static_keywords
@answers_foreign
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    diagonal_offset: int | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
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
    index_offsets: IndexOffsets = NO_OFFSETS,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes `cuflash.forward` as a JAX function with gradients, also through lse.

    Limits and rules for NaN are described in `cuflash.forward`, and for gradients in `cuflash.backward`.

    Parameters
    ----------
    q : array (batch, seqlen_q, heads_q, head_dim)
        Queries: float16, bfloat16 or float32 (float64 on the CPU, if JAX has it enabled). All of q, k and v may lack
        batch, or batch and heads.
    k : array (batch, seqlen_k, heads_kv, head_dim)
        Keys; heads_q is a multiple of heads_kv.
    v : array (batch, seqlen_k, heads_kv, head_dim_v)
        Values.
    softmax_scale : float, default 1/sqrt(head_dim)
        A finite number above 0; static.
    causal : bool, default False
        Shows key j to query i only if `j <= i + diagonal_offset`; static.
    window_size : (left, right), default (-1, -1)
        Numbers of visible keys on both sides of the diagonal; -1 or None for an open side; static.
    diagonal_offset : int, default seqlen_k - seqlen_q
        Alignment of causal masks and windows: bottom-right by default; 0 is top-left; static.
    softcap : float, default 0.0
        A cap c > 0 turns each score into c tanh(score / c); static.
    deterministic : bool, default False
        Makes gradients bitwise repeatable; static.
    return_lse : bool, default False
        Returns (out, lse) instead of out; static.
    cu_seqlens_q, cu_seqlens_k : int32 array (batch + 1,), optional
        Bounds of packed sequences, maybe traced. That side is then (total, heads, head_dim).
    max_seqlen_q, max_seqlen_k : int, optional
        Bounds on the lengths; static. Rows past them do not count.
    seqused_q, seqused_k : int32 array (batch,), optional
        Numbers of rows that count in each sequence, maybe traced.
    page_table : int32 array (batch, max_pages), optional
        Pages of each sequence; k and v are then (num_pages, page_size, heads_kv, …), without gradients.
    cache_batch_idx : int32 array (batch,), optional
        Row of the cache that each sequence reads; k and v then have no gradients.
    num_splits : int, default 0
        Largest number of thread blocks that share the keys of a query; 0 for an automatic choice; static.
    split_size : int, optional
        A multiple of 128, for batch-invariant results (see `cuflash.forward`); static.
    score_mod : function (score, b, h, q_idx, k_idx), optional
        Returns the score that replaces a scaled one. Arrays that it loads from get gradients, and may be traced.
    mask_mod : function (b, h, q_idx, k_idx), optional
        Returns True for visible keys, besides causal and window_size.
    block_mask : BlockMask, optional
        A mask by `cuflash.create_block_mask` of JAX arrays, made outside of jit. It is a pytree, so a jitted function
        may take it as an argument.
    bias : array, optional
        Floats to add to scores, or bools (True is visible), broadcastable to (batch, heads_q, seqlen_q, seqlen_k).
        A float bias gets a gradient.
    sinks : array (heads_q,), optional
        One more logit of each head, without a value; it gets a gradient.
    dropout_p : float in [0, 1), default 0.0
        Probability at which weights are dropped; static.
    dropout_seed : int, key of jax.random, or array of one integer or two uint32
        Required with dropout; it may be traced. Equal seeds drop the same weights.
    index_offsets : tuple of 2 to 4 ints, default (0, 0)
        Positions of this call's first query, key, head and sequence in a larger call, for score_mod, mask_mod and
        dropout (see `cuflash.forward`); static.

    Returns
    -------
    out : array (batch, seqlen_q, heads_q, head_dim_v)
        In q's rank and dtype. A query that sees no key, or belongs to no sequence, has 0.
    lse : array (batch, heads_q, seqlen_q), with `return_lse`
        Float32 (float64 for float64) log-sum-exp of visible scores; (heads_q, total_q) for packed q. It is -inf
        where out has no key.

    Raises
    ------
    ProblemError, UnsupportedError, CompileError
        As in `cuflash.forward`, while the call is traced or lowered.
    jax.errors.JaxRuntimeError, ValueError
        On the CPU, in the call or where results are read: for wrong values of lengths, pages or rows of a cache that
        were traced. JAX raises ValueError in repeated calls of a jitted function. The message begins with
        "INVALID_ARGUMENT: ProblemError", and arguments have their names here, also in calls of the other functions.
        Values that are not traced raise ProblemError in the call. On a GPU, values are not read.

    Notes
    -----
    Gradients can be taken once, in reverse mode. vmap takes all arguments, except lengths of packed rows and of
    caches; with dropout it makes one call for each element. A function that calls what cuflash has no name for is
    traced by JAX, and whole arrays that it computes are computed once. On the CPU it runs in NumPy.

    Plain jit on several devices splits a call over batch and kv heads, following q (packed rows and caches over heads
    alone). With mods, each device would gather whole arrays: call this in `jax.shard_map`, where b and h
    count within a shard. Arrays split by explicit mesh axes need it, too. `jax.export` takes `export_checks`.

    Examples
    --------
    >>> import jax
    >>> from cuflash.frameworks.jax import attention
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 100, 4, 64))
    >>> jax.jit(attention, static_argnames="causal")(q, k, v, causal=True).shape
    (2, 100, 4, 64)
    >>> jax.grad(lambda q: attention(q, k, v, causal=True).sum())(q).shape
    (2, 100, 4, 64)
    """
    varlen_args = VarlenArgs(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, cache_batch_idx)
    named = {"q": q, "k": k, "v": v} | {name: x for name, x in varlen_args._asdict().items() if x is not None}
    options = Options(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        diagonal_offset=diagonal_offset,
        softcap=softcap,
        deterministic=deterministic,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        num_splits=num_splits,
        split_size=split_size,
        index_offsets=check_index_offsets(index_offsets),
    )
    if score_mod is mask_mod is block_mask is bias is sinks is dropout_seed is None and is_zero(dropout_p):
        return run(named, options, check_flag("return_lse", return_lse))
    mod_args = ModArgs(score_mod, mask_mod, block_mask, bias, sinks, dropout_p)
    op, more = mod_operands(mod_args, dropout_seed, varlen_args if len(named) > 3 else (), options)
    options = options._replace(dropout_p=dropout_p)
    return run(named | more, options, check_flag("return_lse", return_lse), op)


@static_keywords
@answers_foreign
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """Computes `jax.nn.dot_product_attention` on cuflash, with its arguments and results.

    Parameters
    ----------
    query : array (B, T, N, H)
        Queries. All of query, key and value may lack B.
    key, value : array (B, S, K, H)
        Keys and values; N is a multiple of K.
    bias : array (B, N, T, S), optional
        Floats to add to scores, broadcastable; B may be absent. It gets a gradient.
    mask : array (B, N, T, S), optional
        Bools, True for visible keys, broadcastable; B may be absent.
    scale : float, default 1/sqrt(H)
        Softmax scale.
    is_causal : bool, default False
        Aligned top-left, as in jax.nn.
    query_seq_lengths, key_value_seq_lengths : int32 array (B,), optional
        Numbers of rows that count. Queries past them have out 0 and lse -inf, and both sides have gradient 0 there.
    local_window_size : int or (left, right), optional
        Numbers of visible keys on both sides of the diagonal, aligned top-left; one number is for both sides.
    implementation : None
        Kept for the signature.
    return_residual : bool, default False
        Returns (out, lse).

    Returns
    -------
    out : array (B, T, N, H)
        A query that sees no key has 0, where jax.nn gives the mean of value.
    lse : array (B, T, N), with `return_residual`
        In query's dtype, without a gradient.

    Raises
    ------
    UnsupportedError
        For an implementation. Other errors, limits and rules for NaN are described in `attention`.

    Examples
    --------
    >>> import jax
    >>> from cuflash.frameworks.jax import dot_product_attention
    >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 100, 4, 64))
    >>> out, lse = dot_product_attention(query, key, value, is_causal=True, return_residual=True)
    >>> out.shape, lse.shape
    ((2, 100, 4, 64), (2, 100, 4))
    """
    if implementation is not None:
        raise UnsupportedError(
            "cuflash has no implementation; leave it None, as there is one alone, or call jax.nn.dot_product_attention"
        )
    arrays = arrays_of(query=query, key=key, value=value)
    for name, array in zip(("query", "key", "value"), arrays, strict=True):
        if array.ndim not in (3, 4):
            raise ProblemError(f"{name} has shape {array.shape}; give (B, T, N, H) or (T, N, H)")
    if scale is not None:
        check_scale("scale", scale)
    check_flag("is_causal", is_causal)
    with_lse = check_flag("return_residual", return_residual)
    batch = (arrays[0].shape[0] if arrays[0].ndim == 4 else 1,)
    lengths = {"query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths}
    used = [None if x is None else integers(name, as_jax(name, x), batch, "(B,)") for name, x in lengths.items()]
    of_scores = *batch, arrays[0].shape[-2], arrays[0].shape[-3], arrays[1].shape[-3]
    bias, mask = bias_or_mask("bias", bias, of_scores), bias_or_mask("mask", mask, of_scores)
    out = attention(
        *arrays,
        softmax_scale=scale,
        causal=is_causal,
        window_size=window_of(local_window_size),
        diagonal_offset=0,
        return_lse=with_lse,
        seqused_q=used[0],
        seqused_k=used[1],
        bias=mask if bias is None else bias,
        mask_mod=None if bias is None or mask is None else visible_in(mask),
    )
    if not with_lse:
        return out
    out, lse = out
    return out, jax.lax.stop_gradient(jnp.swapaxes(lse, -1, -2).astype(out.dtype))


@static_keywords
@answers_foreign
def triangle_attention(
    q: Any, k: Any, v: Any, bias: Any, mask: Any = None, *, softmax_scale: float | None = None
) -> jax.Array:
    """Computes `cuflash.triangle_attention` as a JAX function with gradients of q, k, v and bias.

    Parameters
    ----------
    q : array (batch, rows, heads, seqlen_q, head_dim)
        Queries.
    k, v : array (batch, rows, heads_kv, seqlen_k, …)
        Keys and values.
    bias : array (batch, heads, seqlen_q, seqlen_k)
        Floats, added to the scores of every row without a copy.
    mask : bool array (batch, rows, seqlen_k), optional
        True for visible keys.
    softmax_scale : float, default 1/sqrt(head_dim)
        A finite number above 0; static.

    Returns
    -------
    out : array (batch, rows, heads, seqlen_q, head_dim_v)
        A query that sees no key has 0.

    Raises
    ------
    ProblemError, UnsupportedError, CompileError
        As in `attention`, which also describes limits and rules for NaN.

    Examples
    --------
    >>> import jax
    >>> from cuflash.frameworks.jax import triangle_attention
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 50, 4, 50, 32))
    >>> jax.grad(lambda bias: triangle_attention(q, k, v, bias).sum())(jax.numpy.zeros((1, 4, 50, 50))).shape
    (1, 4, 50, 50)
    """

    def dtype_of(name: str, x: Any) -> str:
        return str(checked_array(name, x).dtype)

    return attended(attention, dtype_of, lambda count, _: jnp.arange(count), q, k, v, bias, mask, softmax_scale)


@static_keywords
@answers_foreign
def ragged_paged_attention(
    q: Any,
    kv_pages: Any,
    kv_lens: Any,
    page_indices: Any,
    cu_q_lens: Any,
    num_seqs: Any,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = _DEFAULT_MASK_VALUE,
    k_scale: float | None = None,
    v_scale: float | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
) -> jax.Array:
    """Computes `ragged_paged_attention` of `jax.experimental.pallas.ops.tpu`: causal attention over a paged cache.

    Parameters
    ----------
    q : array (max_num_batched_tokens, num_q_heads, head_dim)
        Packed queries of all sequences. The last query of a sequence is aligned with its last key.
    kv_pages : array (total_num_pages, page_size, 2 · num_kv_heads, head_dim)
        Pages with heads of K and V interleaved, read without a copy.
    kv_lens : int32 array (max_num_seqs,)
        Numbers of keys of the sequences.
    page_indices : int32 array (max_num_seqs, pages_per_seq)
        Pages of the sequences.
    cu_q_lens : int32 array (max_num_seqs + 1,)
        Bounds of the sequences in q.
    num_seqs : int32 array (1,)
        Number of sequences. Entries past it are never read.
    sm_scale : float, default 1.0
        Softmax scale.
    sliding_window : int, optional
        Largest number of keys that a query sees, including the key at its own position.
    soft_cap : float, optional
        Cap on scores, as softcap in `attention`.
    mask_value : float, optional
        None or a number of at most -1e4. It has no effect: hidden keys count for nothing.
    k_scale, v_scale : float, optional
        Factors of K and V.
    num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes : int, optional
        Tuning of the TPU's kernel, without effect here. All keywords are static.

    Returns
    -------
    out : array (max_num_batched_tokens, num_q_heads, head_dim)
        0 in rows of no sequence. It has no gradients.

    Raises
    ------
    ProblemError, UnsupportedError
        As in `attention`, which also describes limits and rules for NaN.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from cuflash.frameworks.jax import ragged_paged_attention
    >>> q, kv_pages = jnp.ones((3, 4, 64)), jnp.ones((5, 8, 2 * 2, 64))  # 5 pages of 8 keys, of 2 heads
    >>> kv_lens, page_indices = jnp.int32([5, 9]), jnp.int32([[0, 0], [3, 1]])
    >>> cu_q_lens, num_seqs = jnp.int32([0, 1, 3]), jnp.int32([2])  # 1 query, and 2
    >>> ragged_paged_attention(q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs).shape
    (3, 4, 64)
    """
    q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs = arrays_of(
        q=q, kv_pages=kv_pages, kv_lens=kv_lens, page_indices=page_indices, cu_q_lens=cu_q_lens, num_seqs=num_seqs
    )
    if q.ndim != 3 or kv_pages.ndim != 4 or kv_pages.shape[2] % 2 or kv_pages.shape[3] != q.shape[2]:
        raise ProblemError(
            f"q has shape {q.shape} and kv_pages {kv_pages.shape}; give (tokens, num_q_heads, head_dim) and (pages, "
            "page_size, 2 * num_kv_heads, head_dim)"
        )
    shape_text = "(max_num_seqs, pages_per_seq)"
    if page_indices.ndim != 2:
        raise ProblemError(f"page_indices has shape {page_indices.shape}; give {shape_text}")
    most = page_indices.shape[0]
    kv_lens = integers("kv_lens", kv_lens, (most,), "(max_num_seqs,), rows of page_indices")
    page_indices = integers("page_indices", page_indices, page_indices.shape, shape_text)
    cu_q_lens = integers("cu_q_lens", cu_q_lens, (most + 1,), "(max_num_seqs + 1,)")
    num_seqs = integers("num_seqs", num_seqs, (1,), "one number of sequences")
    if sliding_window is not None and check_integer("sliding_window", sliding_window) < 1:
        raise ProblemError(f"sliding_window={sliding_window}; give how many keys a query sees, 1 or more, or None")
    if mask_value is not None and not (is_real(mask_value) and mask_value <= -1e4):
        raise UnsupportedError(
            f"mask_value={mask_value}: hidden keys are not seen at all here; give None, or -1e4 and less"
        )
    scale = check_scale("sm_scale", sm_scale) * (1.0 if k_scale is None else check_scale("k_scale", k_scale))
    bounds = cu_q_lens[jnp.minimum(jnp.arange(most + 1), jnp.clip(num_seqs[0], 0, most))]
    pages, page_size, heads, head_dim = kv_pages.shape
    named = {
        "q": q,
        "kv": kv_pages.reshape(pages, page_size, heads // 2, 2 * head_dim),
        "cu_seqlens_q": bounds,
        "seqused_k": kv_lens,
        "page_table": page_indices,
    }
    left = None if sliding_window is None else sliding_window - 1
    softcap = 0.0 if soft_cap is None else soft_cap
    options = Options(softmax_scale=scale, causal=True, window_size=(left, None), softcap=softcap)
    out = run(named, options, False)
    return out if v_scale is None else (out * check_scale("v_scale", v_scale)).astype(out.dtype)


def export_checks() -> list[Any]:
    """Returns the checks that `jax.export.export` must leave out, for programs that call functions of this module.

    JAX exports only custom calls that are listed or that it knows to be stable. cuflash's carry the version of their
    format, and a cuflash that cannot read it refuses them.

    Returns
    -------
    checks : list of jax.export.DisabledSafetyCheck
        For the argument `disabled_checks`, of gradients as well (`serialize(vjp_order=1)`).

    Notes
    -----
    The program runs in a process that has imported this module, on the platforms of the export:
    `platforms=["cpu", "cuda"]` is for both. By default JAX exports for the platform of its first device, wherever the
    arrays are.

    A machine without a GPU exports forward for cuda, but gradients for the CPU alone (UnsupportedError): the workspace
    of backward depends on the GPU. Symbolic sizes work on the CPU alone, for an axis that vmap maps.

    Examples
    --------
    >>> import jax
    >>> from cuflash.frameworks.jax import attention, export_checks
    >>> q = jax.random.normal(jax.random.key(0), (2, 100, 4, 64))
    >>> platforms = ["cpu", "cuda"]
    >>> exported = jax.export.export(jax.jit(attention), platforms=platforms, disabled_checks=export_checks())(q, q, q)
    >>> exported.call(q, q, q).shape
    (2, 100, 4, 64)
    """
    from jax.export import DisabledSafetyCheck  # imported here: only exports need it

    return [DisabledSafetyCheck.custom_call(target) for target in OPS]
