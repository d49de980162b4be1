"""`cuflash.append_kv`: new keys and values go behind those that a cache holds, rotated on the way."""

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
    """Writes new keys and values, in place, behind those that are used; returns the rotated q, or None without q.

    Key i of the new ones of sequence b goes to position seqused_k[b] + i. No length changes: add the counts of new keys
    to seqused_k for the `forward` that follows, whose arguments describe a cache in the same way.

    k_cache (batch, capacity, heads_kv, head_dim) and v_cache (batch, capacity, heads_kv, head_dim_v): CuPy, PyTorch or
    NumPy arrays of one framework, device and dtype (float16, bfloat16, float32; float64 on the CPU), written to in any
    strides but those with gaps in the last dimension. seqused_k (batch,): how many keys of each sequence are used.
    `cache_batch_idx` (batch,): sequence b has that row of a cache with any number of rows. `page_table` (batch,
    max_pages): the caches are pages, (num_pages, page_size, heads_kv, …), and position j of sequence b lies in page
    page_table[b, j // page_size]. All integers are int32, on the device of the caches.

    k (batch, seqlen_new, heads_kv, head_dim) and v (batch, seqlen_new, heads_kv, head_dim_v), or packed with
    `cu_seqlens_k` (batch + 1,): (total, heads_kv, …), where sequence b has the rows cu_seqlens_k[b] … cu_seqlens_k[b +
    1] - 1. q (batch, seqlen_q, heads_q, head_dim), or packed with `cu_seqlens_q`, only beside a rotation.

    `rotary_cos`, `rotary_sin` (positions, rotary_dim / 2), in the dtype of k or float32, rotate the first rotary_dim
    elements of k and q: new key i at position seqused_k[b] + i, and query i there too, or all queries of a sequence at
    seqused_k[b] with `q_same_position=True`, as FlashAttention has it without a causal mask. `rotary_interleaved`: pair
    j is the elements 2j and 2j + 1 (GPT-J), else j and rotary_dim / 2 + j (GPT-NeoX). It is computed in float32
    (float64 for float64) and rounded once, to the same bits on every device.

    In host memory integers are checked: each new key must have a place in the cache. On a GPU the host does not read
    them, and nothing outside the arrays is read or written, whatever they say: lengths are clamped to the capacity;
    keys past it, or of a page or row that the cache does not have, are not written. check=True reads them once and
    checks them before, as in `forward`.
    Rows at positions past the end of rotary_cos are not rotated; rows of q that belong to no sequence become 0.
    Positions that two new keys share hold either.

    Raises ProblemError for arguments that do not fit together, for arrays that cannot be written to (JAX's, read-only
    ones) and for caches that are seen to share memory with another argument; UnsupportedError and CompileError as in
    `forward`.

        cuflash.append_kv(k_cache, v_cache, k, v, lengths)                    # k, v (batch, 1, heads_kv, head_dim)
        out = cuflash.forward(q, k_cache, v_cache, seqused_k=lengths + 1, causal=True)

    >>> import numpy as np, cuflash
    >>> k_cache, v_cache = np.zeros((2, 2, 6, 1, 64), "float32")  # two sequences, of which 0 and 4 rows are used
    >>> new = np.ones((2, 1, 1, 64), "float32")
    >>> cuflash.append_kv(k_cache, v_cache, new, new, np.array([0, 4], "int32"))
    >>> k_cache[:, :, 0, 0]
    array([[1., 0., 0., 0., 0., 0.],
           [0., 0., 0., 0., 1., 0.]], dtype=float32)

    Source: RoFormer, arXiv 2104.09864 (rotary position embedding).
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
