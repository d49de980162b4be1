"""`cuflash.append_kv`: writes new keys and values behind the used ones of a cache, rotated on the way."""

from __future__ import annotations

from typing import Any, Never, Unpack, overload

from ..problem.foreign import answers_foreign, refuse_foreign
from ..problem.operands import APPEND_KV
from ..problem.options import Array, options_key
from ..problem.signatures import AppendOptions
from ..runtime.call import run
from ..runtime.device_integers import check_on_device


@overload
def append_kv(
    k_cache: Array,
    v_cache: Array,
    k: Array,
    v: Array,
    seqused_k: Any,
    *,
    q: None = ...,
    **options: Unpack[AppendOptions],
) -> None: ...
@overload
def append_kv(
    k_cache: Array, v_cache: Array, k: Array, v: Array, seqused_k: Any, *, q: Array, **options: Unpack[AppendOptions]
) -> Array: ...
@answers_foreign
def append_kv(
    k_cache: Array,
    v_cache: Array,
    k: Array,
    v: Array,
    seqused_k: Any,
    *,
    page_table: Any = None,
    cache_batch_idx: Any = None,
    cu_seqlens_k: Any = None,
    q: Array | None = None,
    cu_seqlens_q: Any = None,
    q_same_position: bool = False,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_interleaved: bool = False,
    check: bool = False,
    **foreign: Never,
) -> Array | None:
    """Writes new keys and values in place behind the used ones; returns the rotated q, or None without q.

    New key i of sequence b goes to position seqused_k[b] + i. No length changes: add the numbers of new keys to
    seqused_k for the `forward` that follows. Its arguments describe a cache in the same way.

    Parameters
    ----------
    k_cache : array (batch, capacity, heads_kv, head_dim)
        Cache of keys: a CuPy, PyTorch or NumPy array. Its dtype is float16, bfloat16 or float32, on the CPU also
        float64. The last dimension is contiguous; other strides are free.
    v_cache : array (batch, capacity, heads_kv, head_dim_v)
        Cache of values, of the framework, device and dtype of k_cache.
    k : array (batch, seqlen_new, heads_kv, head_dim)
        New keys, or (total, heads_kv, head_dim) with cu_seqlens_k.
    v : array (batch, seqlen_new, heads_kv, head_dim_v)
        New values, or (total, heads_kv, head_dim_v) with cu_seqlens_k.
    seqused_k : int32 array (batch,)
        Number of used keys of each sequence before the call.
    page_table : int32 array (batch, max_pages), optional
        Pages of each sequence: the caches are (num_pages, page_size, heads_kv, …). Position j of sequence b lies in
        page page_table[b, j // page_size].
    cache_batch_idx : int32 array (batch,), optional
        Row of the caches for each sequence. The caches may have any number of rows.
    cu_seqlens_k : int32 array (batch + 1,), optional
        Offsets of packed new keys and values. Sequence b has the rows cu_seqlens_k[b] … cu_seqlens_k[b + 1] - 1.
    q : array (batch, seqlen_q, heads_q, head_dim), optional
        Queries to rotate, or (total, heads_q, head_dim) with cu_seqlens_q. They need rotary_cos and rotary_sin.
    cu_seqlens_q : int32 array (batch + 1,), optional
        Offsets of packed queries.
    q_same_position : bool, default False
        True rotates all queries of sequence b at position seqused_k[b], as FlashAttention does without a causal mask.
        False rotates query i at seqused_k[b] + i.
    rotary_cos : array (positions, rotary_dim / 2), optional
        Cosines, in the dtype of k or float32. They rotate the first rotary_dim elements of k and q by position.
    rotary_sin : array (positions, rotary_dim / 2), optional
        Sines, in the dtype of rotary_cos.
    rotary_interleaved : bool, default False
        True pairs elements 2j and 2j + 1 (GPT-J), False elements j and rotary_dim / 2 + j (GPT-NeoX).
    check : bool, default False
        True reads the int32 arrays above from a GPU and validates them, as in `forward`.

    Returns
    -------
    q : array (batch, seqlen_q, heads_q, head_dim) or None
        The rotated queries, in the layout of the argument; None without q. Rows of no sequence are 0.

    Raises
    ------
    ProblemError
        Arguments do not fit together. This includes caches that cannot be written to (JAX's, read-only ones), and
        caches that share memory with another argument.
    UnsupportedError, CompileError
        As in `forward`.

    Notes
    -----
    All int32 arrays lie on the device of the caches. In host memory they are validated in every call: each new key must
    have a place in the cache. On a GPU the host does not read them, and no memory outside the arrays is read or
    written. Lengths are clamped to the capacity. Keys past it are not written, nor are keys of pages or rows that the
    cache lacks. Positions that two new keys share hold either.

    The rotation is computed in float32 (float64 for float64) and rounded once, to the same bits on every device. Rows
    at positions past the end of rotary_cos are not rotated.

    References
    ----------
    RoFormer (arXiv 2104.09864), for the rotary position embedding.

    Examples
    --------
    Two sequences, of which 0 and 4 rows are used.

    >>> import numpy as np, cuflash
    >>> k_cache, v_cache = np.zeros((2, 2, 6, 1, 64), "float32")
    >>> new = np.ones((2, 1, 1, 64), "float32")
    >>> cuflash.append_kv(k_cache, v_cache, new, new, np.array([0, 4], "int32"))
    >>> k_cache[:, :, 0, 0]
    array([[1., 0., 0., 0., 0., 0.],
           [0., 0., 0., 0., 1., 0.]], dtype=float32)

    A decode step, with k and v (batch, 1, heads_kv, head_dim).

        cuflash.append_kv(k_cache, v_cache, k, v, lengths)
        out = cuflash.forward(q, k_cache, v_cache, seqused_k=lengths + 1, causal=True)
    """
    if foreign:
        raise refuse_foreign(append_kv, foreign)
    options = options_key(q_same_position=q_same_position, rotary_interleaved=rotary_interleaved)
    arrays = (k_cache, v_cache, k, v, seqused_k, page_table, cache_batch_idx, cu_seqlens_k, q, cu_seqlens_q,
              rotary_cos, rotary_sin)  # fmt: skip
    if check is not False:
        check_on_device(APPEND_KV, arrays, options, check)
    results = run(APPEND_KV, arrays, options)
    return results[0] if results else None
