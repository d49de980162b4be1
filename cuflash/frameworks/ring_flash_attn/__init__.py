"""The functions of ring-flash-attention 0.1.8 on cuflash: attention over a sequence that the ranks of a group share.

    from cuflash.frameworks.ring_flash_attn import zigzag_ring_flash_attn_func    # for: from ring_flash_attn import …

Names, arguments, results and the rows of each rank are those of the package. Of n ranks, rank r passes:

- `ring_…`: part r of n of the sequence; `ring_…_varlen_…`: of each document.
- `zigzag_ring_…`: parts r and 2n - 1 - r of 2n of the sequence; `zigzag_ring_…_varlen_…`: of each document.
- `stripe_…`: rows r, r + n, r + 2n, …
- `llama3_…_varlen_…`: part r of n of all packed rows.

`cuflash.distributed.attention` computes them and chooses the scheme: ring, Ulysses or gathered keys. It adds to the
package: windows over the whole sequence, where the package cuts each part by itself; masks that are not causal for all
names; ALiBi; gradients of lse; head dims of v unlike those of q. dropout_p is refused. The package's arguments
max_seqlen, max_seqlen_q, max_seqlen_k and heads_k_stride have no effect here.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from ...distributed.layout import Layout
from ...errors import ProblemError
from ...problem.options import WindowSize, check_flag, check_integer
from .adapters import substitute_hf_flash_attn, update_ring_flash_attn_params
from .call import attend
from .rows import of_documents, of_packed_rows, of_sequence, remember_layout, values_of

__all__ = [
    "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func",
    "llama3_flash_attn_varlen_kvpacked_func",
    "llama3_flash_attn_varlen_qkvpacked_func",
    "ring_flash_attn_func",
    "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_qkvpacked_func",
    "ring_flash_attn_varlen_func",
    "ring_flash_attn_varlen_kvpacked_func",
    "ring_flash_attn_varlen_qkvpacked_func",
    "stripe_flash_attn_func",
    "stripe_flash_attn_kvpacked_func",
    "stripe_flash_attn_qkvpacked_func",
    "substitute_hf_flash_attn",
    "update_ring_flash_attn_params",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_kvpacked_func",
    "zigzag_ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_varlen_func",
    "zigzag_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func",
]


def ring_flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: WindowSize = (-1, -1), alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, group: Any = None,
) -> Any:  # fmt: skip
    """Computes attention over the rows of all ranks, with gradients. Rank r passes part r of n of the sequence.

    Parameters
    ----------
    q : Tensor (batch, rows of this rank, heads_q, head_dim)
        This rank's queries.
    k : Tensor (batch, rows of this rank, heads_kv, head_dim)
        This rank's keys.
    v : Tensor (batch, rows of this rank, heads_kv, head_dim_v)
        This rank's values.
    dropout_p : 0.0
        Dropout is not supported.
    softmax_scale : float, default 1/sqrt(head_dim)
        A number above 0.
    causal : bool, default False
        Hides later keys of the sequence.
    window_size : (left, right), default (-1, -1)
        Numbers of visible keys of the sequence on both sides of a query; -1 for an open side.
    alibi_slopes : float32 Tensor (heads_q,) or (batch, heads_q), optional
        Subtract slope · distance from scores; equal on all ranks. Gradients are this rank's part of a sum.
    deterministic : bool, default False
        Makes gradients bitwise repeatable.
    return_attn_probs : bool, default False
        Returns (out, lse, None).
    group : ProcessGroup or 1-D DeviceMesh, optional
        The ranks that share the sequence; by default all processes.

    Returns
    -------
    out : Tensor (batch, rows of this rank, heads_q, head_dim_v)
        In q's dtype.
    lse : Tensor (batch, heads_q, rows of this rank), with `return_attn_probs`
        Float32.

    Raises
    ------
    ProblemError, UnsupportedError
        As in `cuflash.distributed.attention`, and for dropout.

    Examples
    --------
    Every process of `torchrun` runs this::

        torch.distributed.init_process_group("nccl")
        q, k, v = (x.chunk(torch.distributed.get_world_size(), 1)[torch.distributed.get_rank()] for x in (q, k, v))
        out = ring_flash_attn_func(q, k, v, causal=True)
    """
    shared = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    return attend(partial(of_sequence, "contiguous"), 4, (q, k, v), shared)


def ring_flash_attn_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: Any = None,
) -> Any:  # fmt: skip
    """Computes `ring_flash_attn_func` for k and v in kv (batch, rows of this rank, 2, heads_kv, head_dim)."""
    shared = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    return attend(partial(of_sequence, "contiguous"), 4, (q, kv), shared)


def ring_flash_attn_qkvpacked_func(
    qkv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: Any = None,
) -> Any:  # fmt: skip
    """Computes `ring_flash_attn_func` for q, k and v in qkv (batch, rows of this rank, 3, heads, head_dim)."""
    shared = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    return attend(partial(of_sequence, "contiguous"), 4, (qkv,), shared)


def zigzag_ring_flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: WindowSize = (-1, -1), alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, group: Any = None,
) -> Any:  # fmt: skip
    """Computes `ring_flash_attn_func`, with parts r and 2n - 1 - r of 2n of the sequence."""
    shared = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    return attend(partial(of_sequence, "zigzag"), 4, (q, k, v), shared)


def zigzag_ring_flash_attn_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: Any = None,
) -> Any:  # fmt: skip
    """Computes `zigzag_ring_flash_attn_func` for k and v in kv (batch, rows of this rank, 2, heads_kv, head_dim)."""
    shared = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    return attend(partial(of_sequence, "zigzag"), 4, (q, kv), shared)


def zigzag_ring_flash_attn_qkvpacked_func(
    qkv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: Any = None,
) -> Any:  # fmt: skip
    """Computes `zigzag_ring_flash_attn_func` for q, k and v in qkv (batch, rows of this rank, 3, heads, head_dim)."""
    shared = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    return attend(partial(of_sequence, "zigzag"), 4, (qkv,), shared)


def stripe_flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: WindowSize = (-1, -1), alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, group: Any = None,
) -> Any:  # fmt: skip
    """Computes `ring_flash_attn_func`, with rows r, r + n, r + 2n, … of the sequence."""
    shared = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    return attend(partial(of_sequence, "zigzag"), 4, (q, k, v), shared, is_striped=True)


def stripe_flash_attn_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: Any = None,
) -> Any:  # fmt: skip
    """Computes `stripe_flash_attn_func` for k and v in kv (batch, rows of this rank, 2, heads_kv, head_dim)."""
    shared = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    return attend(partial(of_sequence, "zigzag"), 4, (q, kv), shared, is_striped=True)


def stripe_flash_attn_qkvpacked_func(
    qkv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: Any = None,
) -> Any:  # fmt: skip
    """Computes `stripe_flash_attn_func` for q, k and v in qkv (batch, rows of this rank, 3, heads, head_dim)."""
    shared = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    return attend(partial(of_sequence, "zigzag"), 4, (qkv,), shared, is_striped=True)


def ring_flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: Any = None,
) -> Any:  # fmt: skip
    """Computes attention of packed documents, with gradients. Rank r passes part r of n of each document.

    Parameters
    ----------
    q : Tensor (rows of this rank, heads_q, head_dim)
        This rank's queries of all documents, packed.
    k : Tensor (rows of this rank, heads_kv, head_dim)
        This rank's keys.
    v : Tensor (rows of this rank, heads_kv, head_dim_v)
        This rank's values.
    cu_seqlens : int32 Tensor (documents + 1,)
        Bounds of the documents among this rank's rows, equal on all ranks: those of the whole, divided by n. A tensor
        on a GPU is read in the first call that passes it, and later only if PyTorch has changed it.
    max_seqlen : int
        Has no effect: lengths follow from cu_seqlens.
    dropout_p : 0.0
        Dropout is not supported.
    softmax_scale : float, default 1/sqrt(head_dim)
        A number above 0.
    causal : bool, default False
        Hides later keys of the document.
    window_size : (left, right), default (-1, -1)
        Numbers of visible keys of the document on both sides of a query; -1 for an open side.
    alibi_slopes : float32 Tensor (heads_q,), optional
        Subtract slope · distance from scores; equal on all ranks. Gradients are this rank's part of a sum.
    deterministic : bool, default False
        Makes gradients bitwise repeatable.
    return_attn_probs : bool, default False
        Returns (out, lse, None).
    group : ProcessGroup or 1-D DeviceMesh, optional
        The ranks that share the documents; by default all processes.

    Returns
    -------
    out : Tensor (rows of this rank, heads_q, head_dim_v)
        In q's dtype.
    lse : Tensor (heads_q, rows of this rank), with `return_attn_probs`
        Float32.

    Raises
    ------
    ProblemError
        For bounds that do not end at the last row. In zig-zag order also for an odd number of rows of a document.
    ProblemError, UnsupportedError
        As in `cuflash.distributed.attention`, and for dropout.
    """
    shared = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    return attend(partial(of_documents, 1, cu_seqlens), 3, (q, k, v), shared)


def ring_flash_attn_varlen_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: WindowSize = (-1, -1),
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    group: Any = None,
) -> Any:  # fmt: skip
    """Computes `ring_flash_attn_varlen_func` for k and v in kv (rows of this rank, 2, heads_kv, head_dim)."""
    shared = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    return attend(partial(of_documents, 1, cu_seqlens), 3, (q, kv), shared)


def ring_flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: WindowSize = (-1, -1),
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    group: Any = None,
) -> Any:  # fmt: skip
    """Computes `ring_flash_attn_varlen_func` for q, k and v in qkv (rows of this rank, 3, heads, head_dim)."""
    shared = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    return attend(partial(of_documents, 1, cu_seqlens), 3, (qkv,), shared)


def zigzag_ring_flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: Any = None,
) -> Any:  # fmt: skip
    """Computes `ring_flash_attn_varlen_func`, with parts r and 2n - 1 - r of 2n of each document."""
    shared = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    return attend(partial(of_documents, 2, cu_seqlens), 3, (q, k, v), shared)


def zigzag_ring_flash_attn_varlen_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: WindowSize = (-1, -1),
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    group: Any = None,
) -> Any:  # fmt: skip
    """Computes `zigzag_ring_flash_attn_varlen_func` for k and v in kv (rows of this rank, 2, heads_kv, head_dim)."""
    shared = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    return attend(partial(of_documents, 2, cu_seqlens), 3, (q, kv), shared)


def zigzag_ring_flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: WindowSize = (-1, -1),
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    group: Any = None,
) -> Any:  # fmt: skip
    """Computes `zigzag_ring_flash_attn_varlen_func` for q, k and v in qkv (rows of this rank, 3, heads, head_dim)."""
    shared = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    return attend(partial(of_documents, 2, cu_seqlens), 3, (qkv,), shared)


def llama3_flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, heads_k_stride: int, local_k_slice: slice, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: WindowSize = (-1, -1),
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    group: Any = None,
) -> Any:  # fmt: skip
    """Computes attention of packed documents, with gradients. Rank r passes part r of n of all packed rows.

    Parameters
    ----------
    q : Tensor (rows of this rank, heads_q, head_dim)
        This rank's queries.
    k : Tensor (rows of this rank, heads_kv, head_dim)
        This rank's keys.
    v : Tensor (rows of this rank, heads_kv, head_dim_v)
        This rank's values.
    cu_seqlens_q : int32 Tensor (documents of this rank + 1,)
        Bounds of the documents among this rank's rows, of `llama3_flash_attn_prepare_cu_seqlens`. Another tensor is
        read, and ranks compare their bounds, in the first call that passes it and after PyTorch has changed it.
    cu_seqlens_k : int32 Tensor (documents of this rank + 1,)
        Has no effect: keys follow from cu_seqlens_q and local_k_slice of all ranks.
    max_seqlen_q, max_seqlen_k : int
        Have no effect.
    heads_k_stride : int
        Has no effect: the scheme sends all heads at once.
    local_k_slice : slice
        Packed rows whose keys this rank's queries see; it begins with a document.
    dropout_p : 0.0
        Dropout is not supported.
    softmax_scale : float, default 1/sqrt(head_dim)
        A number above 0.
    causal : bool, default False
        Hides later keys of the document.
    window_size : (left, right), default (-1, -1)
        Numbers of visible keys of the document on both sides of a query; -1 for an open side.
    alibi_slopes : float32 Tensor (heads_q,), optional
        Subtract slope · distance from scores; equal on all ranks. Gradients are this rank's part of a sum.
    deterministic : bool, default False
        Makes gradients bitwise repeatable.
    return_attn_probs : bool, default False
        Returns (out, lse, None).
    group : ProcessGroup or 1-D DeviceMesh, optional
        The ranks that share the rows; by default all processes.

    Returns
    -------
    out : Tensor (rows of this rank, heads_q, head_dim_v)
        In q's dtype.
    lse : Tensor (heads_q, rows of this rank), with `return_attn_probs`
        Float32.

    Raises
    ------
    ProblemError
        For bounds that do not end at the last row.
    ProblemError, UnsupportedError
        As in `cuflash.distributed.attention`, and for dropout.

    Examples
    --------
    Every process of `torchrun` runs this::

        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        lengths = llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, rank, ranks)
        out = llama3_flash_attn_varlen_func(q, k, v, *lengths[:4], 1, lengths[4], causal=True)
    """
    shared = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    return attend(partial(of_packed_rows, cu_seqlens_q, local_k_slice), 3, (q, k, v), shared)


def llama3_flash_attn_varlen_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int,
    max_seqlen_k: int, heads_k_stride: int, local_k_slice: slice, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: WindowSize = (-1, -1),
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    group: Any = None,
) -> Any:  # fmt: skip
    """Computes `llama3_flash_attn_varlen_func` for k and v in kv (rows of this rank, 2, heads_kv, head_dim)."""
    shared = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    return attend(partial(of_packed_rows, cu_seqlens_q, local_k_slice), 3, (q, kv), shared)


def llama3_flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int,
    heads_k_stride: int, local_k_slice: slice, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: WindowSize = (-1, -1), alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, group: Any = None,
) -> Any:  # fmt: skip
    """Computes `llama3_flash_attn_varlen_func` for q, k and v in qkv (rows of this rank, 3, heads, head_dim)."""
    shared = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    return attend(partial(of_packed_rows, cu_seqlens_q, local_k_slice), 3, (qkv,), shared)


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: torch.Tensor, causal: bool, rank: int, world_size: int
) -> tuple[torch.Tensor, torch.Tensor, int, int, slice]:
    """Returns the arguments of `llama3_flash_attn_varlen_func` for a rank; reads cu_seqlens.

    Parameters
    ----------
    cu_seqlens : int32 Tensor (documents + 1,)
        Bounds of all documents. Their last is a multiple of world_size.
    causal : bool
        True if the rank's keys end with its last row, False if they end with its last document.
    rank : int
        Rank.
    world_size : int
        Number of ranks.

    Returns
    -------
    cu_seqlens_q, cu_seqlens_k : int32 Tensor (documents of this rank + 1,)
        Bounds of the rank's documents among its queries, and among the keys that these see.
    max_seqlen_q, max_seqlen_k : int
        The largest lengths.
    local_k_slice : slice
        Packed rows of the keys.

    Raises
    ------
    ProblemError
        For rows that ranks do not divide, or bounds that decrease or do not begin with 0.

    Examples
    --------
    >>> import torch
    >>> from cuflash.frameworks.ring_flash_attn import llama3_flash_attn_prepare_cu_seqlens
    >>> lengths = llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 6, 8], dtype=torch.int32), True, 1, 2)
    >>> [x.tolist() for x in lengths[:2]], *lengths[2:]
    ([[0, 2, 4], [0, 6, 8]], 2, 6, slice(0, 8, None))
    """
    bounds, ranks = values_of("cu_seqlens", cu_seqlens), check_integer("world_size", world_size)
    layout = Layout(bounds, ranks, "contiguous", rank=rank)
    if layout.seqlen % ranks:
        raise ProblemError(
            f"cu_seqlens ends at {layout.seqlen}, no multiple of world_size={ranks}; append rows as a further document"
        )
    rows = layout.seqlen // ranks
    begin, end = rows * rank, rows * (rank + 1)
    first, last = bisect_left(bounds, begin), bisect_left(bounds, end)
    first -= bounds[first] != begin
    inside, key_begin = bounds[first + 1 : last], bounds[first]
    key_end = end if check_flag("causal", causal) else bounds[last]
    sides = [0, *(x - begin for x in inside), rows], [x - key_begin for x in (key_begin, *inside, key_end)]
    bounds_q, bounds_k = (torch.tensor(side, dtype=torch.int32, device=cu_seqlens.device) for side in sides)
    longest_q, longest_k = (max(b - a for a, b in pairwise(side)) for side in sides)
    remember_layout(bounds_q, layout)
    return bounds_q, bounds_k, longest_q, longest_k, slice(key_begin, key_end)
