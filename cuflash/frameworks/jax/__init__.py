"""Attention for JAX: `attention` works eagerly and under jit, grad, vmap, scan, checkpoint and shard_map.

    from cuflash.frameworks.jax import attention
    gradient = jax.jit(jax.grad(lambda q, k, v: attention(q, k, v, causal=True).sum()))

`dot_product_attention` is the same function with the name and the arguments of the one in `jax.nn`, and
`ragged_paged_attention` with those of the one that JAX has for TPUs. `export_checks` is for `jax.export`.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import ProblemError, UnsupportedError
from ...mods.tracing.operand import is_real
from ...ops.mods import ModArgs
from ...ops.triangle import attended
from ...problem.foreign import answers_foreign
from ...problem.operands import Op, VarlenArgs
from ...problem.options import Options, WindowSize, check_flag, check_integer, check_scale, is_zero
from ...problem.problem import Problem
from ...problem.signatures import AttentionOptions
from ..bool_masks import visible_in
from . import autograd
from .arguments import arrays_of, bias_or_mask, integers, static_keywords, window_of
from .handlers import FORWARD, OPS, CallOptions, Shape, op_of, specs_of
from .mods import mod_operands
from .primitives import as_jax, check_not_reduced, checked_array

if jax.__version_info__ < (0, 8, 2):  # why: older ones fail where gradients are made of some arguments alone
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
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`cuflash.forward` as a JAX function with gradients: it returns out, or (out, lse) with return_lse.

    q (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_kv, head_dim), v (batch, seqlen_k, heads_kv,
    head_dim_v), or without batch, or without batch and heads; float16, bfloat16 or float32 (float64 on the CPU, if JAX
    has it enabled). out (batch, seqlen_q, heads_q, head_dim_v) has q's dtype, lse (batch, heads_q, seqlen_q) is float32
    (float64 for float64). The mask and scale arguments are those of `cuflash.forward` and static. Limits and rules for
    NaN are those of `cuflash.forward` and, for gradients, of `cuflash.backward`.

    Variable-length sequences are given as there, by int32 arrays, which may be traced: packed (`cu_seqlens_q`,
    `cu_seqlens_k`), used in part (`seqused_q`, `seqused_k`), in pages (`page_table`) or in rows of a cache
    (`cache_batch_idx`); the last two have no gradients. Rows of no sequence have out 0, lse -inf and gradient 0. lse of
    packed q is (heads_q, total_q). `max_seqlen_q`, `max_seqlen_k`, `num_splits` and `split_size` are static.

    score_mod, mask_mod, block_mask, bias and sinks are those of `cuflash.forward`. Arrays that the functions refer to
    may be traced values of any transformation; those that score_mod loads from, bias and sinks have gradients. Where a
    function calls what cuflash has no name for, JAX traces it, and whole arrays that it computes are computed once.
    block_mask is made of JAX arrays, outside of jit; it is a pytree of them, so that new ones may be arguments of a
    jitted function. dropout_p is static. dropout_seed, an int, a key of jax.random, or an array of one integer or two
    uint32, is not: equal seeds drop the same weights.

    Gradients are those of `cuflash.backward`, also through lse; `deterministic=True` makes them bitwise repeatable.
    They can be taken once, in reverse mode. vmap goes over anything but the lengths of rows that are packed or in a
    cache; with dropout it makes one call after the other. On several devices, plain jit splits a call over batch and kv
    heads, as q is split (packed rows and caches over heads alone). With functions, bias, sinks or dropout each device
    would gather whole arrays: call this in `jax.shard_map` there, where b and h count in a shard, and with arrays that
    explicit mesh axes split, which are refused elsewhere. On the CPU it runs in NumPy.

        out = attention(q, k, v, causal=True, cu_seqlens_q=bounds, cu_seqlens_k=bounds)    # q (total, heads, head_dim)

    Raises ProblemError, UnsupportedError and CompileError as `cuflash.forward` does, while the call is traced or
    lowered. `jax.export` takes `export_checks`.

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
    )
    if score_mod is mask_mod is block_mask is bias is sinks is dropout_seed is None and is_zero(dropout_p):
        return _called(named, options, check_flag("return_lse", return_lse))
    mod_args = ModArgs(score_mod, mask_mod, block_mask, bias, sinks, dropout_p)
    op, more = mod_operands(mod_args, dropout_seed, varlen_args if len(named) > 3 else (), options)
    options = options._replace(dropout_p=dropout_p)
    return _called(named | more, options, check_flag("return_lse", return_lse), op)


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
    """`jax.nn.dot_product_attention` on cuflash: query (B, T, N, H), key and value (B, S, K, H), or all without B.

    is_causal and local_window_size, which is (left, right) or one number for both, are aligned top-left, as in jax.nn.
    query_seq_lengths and key_value_seq_lengths, int32 (B,), say how many rows of each are used: queries behind them
    have out 0 and lse -inf, keys behind them are not seen, and the gradients of both are 0.
    return_residual gives (out, lse): lse is (B, T, N) in query's dtype, and no gradient flows through it. A query that
    sees no key has out 0, where jax.nn gives the mean of value.

    bias, of floats, and mask, of bools, are broadcastable to (B, N, T, S), or (N, T, S) without B; bias has a gradient.

    Raises UnsupportedError for implementation; other errors, limits and rules for NaN are those of `attention`.

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
    """`cuflash.triangle_attention` as a JAX function with gradients of q, k, v and bias: its arguments and results.

    Limits, rules for NaN and errors are those of `attention`.

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
    """`ragged_paged_attention` of `jax.experimental.pallas.ops.tpu` on cuflash: causal attention over a paged cache.

    q (max_num_batched_tokens, num_q_heads, head_dim), the queries of all sequences, packed. kv_pages (total_num_pages,
    page_size, 2 · num_kv_heads, head_dim): heads of K and of V in turns; they are read where they lie. All else is
    int32: kv_lens (max_num_seqs,), how many keys a sequence has; page_indices (max_num_seqs, pages_per_seq);
    cu_q_lens (max_num_seqs + 1,), where its queries begin; num_seqs (1,), how many sequences there are. Behind
    num_seqs nothing is looked at. The last query of a sequence stands at its last key.

    sliding_window: the keys that a query sees at most, its own among them. k_scale and v_scale: what K and V are
    multiplied by. mask_value: None or any number of -1e4 and less, as hidden keys count for nothing. The last three
    arguments tune the TPU's kernel and change no result. All keywords are static.

    Returns out (max_num_batched_tokens, num_q_heads, head_dim), 0 in rows of no sequence. It has no gradients.

    Raises ProblemError and UnsupportedError as `attention` does; limits and rules for NaN are the same, too.

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
    places = "(max_num_seqs, pages_per_seq)"
    if page_indices.ndim != 2:
        raise ProblemError(f"page_indices has shape {page_indices.shape}; give {places}")
    most = page_indices.shape[0]
    kv_lens = integers("kv_lens", kv_lens, (most,), "(max_num_seqs,), rows of page_indices")
    page_indices = integers("page_indices", page_indices, page_indices.shape, places)
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
    out = _called(named, options, False)
    return out if v_scale is None else (out * check_scale("v_scale", v_scale)).astype(out.dtype)


def export_checks() -> list[Any]:
    """Returns the checks that `jax.export.export` must leave out, for programs that call functions of this module.

    Exported programs may hold custom calls that JAX knows to be stable, and none of other libraries unless they are
    listed. Those of cuflash carry the version of their format: one that a later cuflash cannot read is refused.

    The list is for `disabled_checks`, of gradients as well (`serialize(vjp_order=1)`). The program runs in a process
    that has imported this module, on the platforms that it was exported for: `platforms=["cpu", "cuda"]` is for both. A
    machine without a GPU exports forward for cuda, and gradients for the CPU alone (UnsupportedError): backward takes a
    workspace that depends on the GPU. A symbolic size is taken on the CPU alone, of an axis that vmap maps.

        exported = jax.export.export(jax.jit(function), disabled_checks=export_checks())(q, k, v)

    Without `platforms`, JAX exports for that of its first device, wherever the arrays are.

    >>> import jax
    >>> from cuflash.frameworks.jax import attention, export_checks
    >>> q = jax.random.normal(jax.random.key(0), (2, 100, 4, 64))
    >>> platforms = ["cpu", "cuda"]
    >>> exported = jax.export.export(jax.jit(attention), platforms=platforms, disabled_checks=export_checks())(q, q, q)
    >>> exported.call(q, q, q).shape
    (2, 100, 4, 64)
    """
    from jax.export import DisabledSafetyCheck  # why here: exports alone need it

    return [DisabledSafetyCheck.custom_call(target) for target in OPS]


def _called(named: dict[str, Any], options: Options, with_lse: bool, op: Op | None = None) -> Any:
    """The result of a call of operands by name, in the order of the op's. op: None for that of a plain call."""
    arrays = arrays_of(**named)
    static = _static(tuple(named), arrays, options, op)
    return autograd.attention(static, with_lse, *_varying_alike(static.names, arrays))


def _static(names: tuple[str, ...], arrays: tuple[Any, ...], options: Options, op: Op | None) -> CallOptions:
    """Checks a call; returns everything but its arrays."""
    call_key = names, tuple(x.shape for x in arrays), tuple(x.dtype for x in arrays), options.key(), op
    try:
        try:
            return _validated(*call_key)
        except ProblemError:
            raise
        except (TypeError, ValueError):  # an argument cannot be hashed, so that the result cannot be cached
            return _validated.__wrapped__(*call_key)
    except ProblemError as error:
        axes = jax.sharding.get_abstract_mesh().manual_axes
        if not axes:
            raise
        raise ProblemError(f"{error}. The shapes are of one shard, over {', '.join(map(str, axes))}") from None


@functools.lru_cache(maxsize=4096)
def _validated(
    names: tuple[str, ...],
    shapes: tuple[Shape, ...],
    dtypes: tuple[Any, ...],
    options: tuple[Any, ...],
    op: Op | None,
) -> CallOptions:
    """`options` is `Options.key()`, which begins with the options and keeps 1 and True apart."""
    op = op or op_of(FORWARD, names)
    return CallOptions.from_problem(
        Problem.from_specs(op, specs_of(op, names, shapes, [*map(str, dtypes)]), options[0]), names
    )


def _varying_alike(names: tuple[str, ...], arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Under shard_map, marks all arrays as varying over the same mesh axes; JAX sums gradients over the added axes."""
    types = [jax.typeof(x) for x in arrays]
    # why: JAX up to 0.9 calls the axes `vma`.
    varying = [frozenset(t.vma if hasattr(t, "vma") else t.manual_axis_type.varying) for t in types]
    axes = frozenset().union(*varying)
    alike = tuple(
        x if varies == axes else jax.lax.pcast(x, tuple(sorted(axes - varies)), to="varying")
        for x, varies in zip(arrays, varying, strict=True)
    )
    for name, x in zip(names, alike, strict=True):
        check_not_reduced(name, x)
    return alike
