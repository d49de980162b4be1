"""The functions of FlashAttention-4 (`flash_attn.cute`) on cuflash: the same names, order, defaults and results.

    from cuflash.frameworks.flash_attn_4_interface import flash_attn_func    # was: from flash_attn.cute import …

As in FlashAttention-4, attention returns (out, lse), where lse is None without `return_lse`. An open side of
`window_size` is None. A query at position p, bottom-right aligned, sees the keys p - left … p + right. A negative side
moves that interval wholly to one side of p; with two negative sides both are open. `causal=True` closes the right side,
and `softcap=0` means none. Lengths and tables are int32 on the device, and only read there. Bounds and windows may be
numbers or host tensors; a bound on the device is a hint that is not read. `num_splits` is the largest number of thread
blocks that share the keys of a query, 0 for an automatic choice. `pack_gqa`, `min_seqlen_k` and `scheduler_metadata`
are accepted without effect.

Beyond FlashAttention-4, tensors may be float32 or on the CPU, with any strides, head dims and page sizes. All
gradients may be `deterministic`. They also flow through lse and into `learnable_sink` (heads_q,), float32, float16 or
bfloat16: one more logit of each head, without a value.

A second product qv is refused, with its arguments, and so are score and mask functions, which are CuTe code in
FlashAttention-4. `cuflash.frameworks.torch.attention` takes them as Python functions of scalars. The kernels
`_flash_attn_fwd` and `_flash_attn_bwd`, which PyTorch's flex_attention calls with `BACKEND="FLASH"`, are absent.

Source: flash_attn/cute/interface.py of flash-attn-4 4.0.0b36. Up to b20, a window whose sides have a sum below 0 was
open. Since then it shows no key, unless both sides are negative.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from ...errors import ProblemError, UnsupportedError
from ...problem.options import SPLIT_STEP, WindowSize, check_flag, check_integer, check_window
from ..torch import check_tensor
from ..torch.tensors import uncompiled
from ..torch.varlen import check_integers
from .arguments import FROM_BOUNDS, NAMES_4, attend, lengths_of, window_of
from .combine import combine
from .mods import interval, later_mod_kwargs

__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func", "get_scheduler_metadata"]

Result = tuple[torch.Tensor, torch.Tensor | None]
_MODULE: Any = sys.modules[__name__]  # for `tensors.uncompiled`


class SchedulerMetadata(NamedTuple):
    """A schedule, by FlashAttention-4's names. All tensors are None, as in FlashAttention-4 where none is needed."""

    num_m_blocks_ptr: torch.Tensor | None = None
    num_splits_dynamic_ptr: torch.Tensor | None = None
    virtual_batch_idx_ptr: torch.Tensor | None = None
    num_nheads_in_l2_ptr: torch.Tensor | None = None
    tile_count_semaphore: torch.Tensor | None = None
    cu_total_m_blocks: torch.Tensor | None = None
    cu_total_splits_m_blocks: torch.Tensor | None = None
    blocks_to_batch_idx: torch.Tensor | None = None


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: list[torch.Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> Result:
    """Computes attention, with gradients.

    Parameters
    ----------
    q : Tensor (batch, seqlen_q, heads_q, head_dim)
        Queries: float16, bfloat16 or float32, with any strides.
    k : Tensor (batch, seqlen_k, heads_kv, head_dim)
        Keys.
    v : Tensor (batch, seqlen_k, heads_kv, head_dim_v)
        Values.
    softmax_scale : float, default 1/sqrt(head_dim)
        A number above 0.
    causal : bool, default False
        Hides later keys, aligned bottom-right.
    window_size : (left, right), default (None, None)
        Numbers of visible keys on both sides of the diagonal; None for an open side.
    softcap : float, default 0.0
        A cap c > 0 turns each score into c tanh(score / c).
    learnable_sink : Tensor (heads_q,), optional
        One more logit of each head, without a value: float32, float16 or bfloat16. It gets a gradient.
    num_splits : int, default 1
        Largest number of thread blocks that share the keys of a query; 0 for an automatic choice.
    pack_gqa : optional
        Accepted without effect.
    deterministic : bool, default False
        Makes gradients bitwise repeatable.
    return_lse : bool, default False
        Returns lse; otherwise None in its place.
    qv, gather_kv_indices, gather_bwd_recompute_p, gather_bwd_token_chunk : optional
        Not supported.
    score_mod, score_mod_bwd, mask_mod, aux_tensors, aux_scalars : None
        Not supported; see `cuflash.frameworks.torch.attention`.
    block_sparse_tensors, block_sparse_tensors_bwd : None
        Not supported.

    Returns
    -------
    out : Tensor (batch, seqlen_q, heads_q, head_dim_v)
        In q's dtype.
    lse : Tensor (batch, heads_q, seqlen_q) or None
        Float32 with `return_lse`.

    Raises
    ------
    UnsupportedError
        For qv, arguments whose names begin with `gather`, and score and mask functions with their arguments.
    ProblemError, UnsupportedError, CompileError
        As in `cuflash.forward` and `cuflash.backward`, which also describe limits and rules for NaN.

    Examples
    --------
    >>> import torch
    >>> from cuflash.frameworks.flash_attn_4_interface import flash_attn_func
    >>> q, k, v = torch.randn(3, 2, 100, 4, 64)
    >>> out, _ = flash_attn_func(q, k, v, causal=True, window_size=(31, None))
    >>> out.shape
    torch.Size([2, 100, 4, 64])
    """
    _refuse(
        pack_gqa,
        qv=qv,
        gather_kv_indices=gather_kv_indices,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        block_sparse_tensors=block_sparse_tensors,
        block_sparse_tensors_bwd=block_sparse_tensors_bwd,
        gather_bwd_recompute_p=_set(gather_bwd_recompute_p),
        gather_bwd_token_chunk=gather_bwd_token_chunk,
    )
    causal, window, mod_kwargs = _masked(causal, window_size)
    mod_kwargs |= later_mod_kwargs("learnable_sink", learnable_sink, q)
    shared_args = softmax_scale, causal, window, softcap, deterministic, return_lse, "return_lse", num_splits
    result = attend(q, k, v, *shared_args, mod_kwargs, NAMES_4)
    return result if return_lse else (result, None)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: Any = None,
    aux_tensors: list[torch.Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> Result:
    """Computes attention of packed sequences, with gradients, and of pages.

    Parameters
    ----------
    q : Tensor (total_q, heads_q, head_dim)
        Packed queries: sequence b has the rows `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1] - 1`.
    k : Tensor (total_k, heads_kv, head_dim)
        Packed keys.
    v : Tensor (total_k, heads_kv, head_dim_v)
        Packed values.
    cu_seqlens_q, cu_seqlens_k : int32 Tensor (batch + 1,), optional
        Bounds of the sequences. With None, that side is (batch, seqlen, heads, head_dim).
    max_seqlen_q, max_seqlen_k : int, optional
        Bounds on the lengths of packed and paged sides. Rows past them do not count.
    seqused_q, seqused_k : int32 Tensor (batch,), optional
        Numbers of rows that count in each sequence.
    page_table : int32 Tensor (batch, max_pages), optional
        Pages of each sequence; k and v are then (num_pages, page_size, heads_kv, …), without gradients. Beside it,
        cu_seqlens_k, which FlashAttention-4 refuses there, gives lengths alone.
    seqlen_k_per_split : int, optional
        A positive number, for batch-invariant results as by `split_size` of `cuflash.forward`. All numbers have
        the same effect, beside any num_splits.
    softmax_scale : float, default 1/sqrt(head_dim)
        A number above 0.
    causal : bool, default False
        Hides later keys, aligned bottom-right.
    window_size : (left, right), default (None, None)
        Numbers of visible keys on both sides of the diagonal; None for an open side.
    softcap : float, default 0.0
        A cap c > 0 turns each score into c tanh(score / c).
    learnable_sink : Tensor (heads_q,), optional
        One more logit of each head, without a value: float32, float16 or bfloat16. It gets a gradient.
    num_splits : int, default 1
        Largest number of thread blocks that share the keys of a query; 0 for an automatic choice.
    pack_gqa, min_seqlen_k, scheduler_metadata, disable_scheduler_metadata : optional
        Accepted without effect.
    deterministic : bool, default False
        Makes gradients bitwise repeatable.
    return_lse : bool, default False
        Returns lse; otherwise None in its place.
    qv, gather_kv_indices, gather_bwd_recompute_p, gather_bwd_token_chunk : optional
        Not supported.
    score_mod, score_mod_bwd, mask_mod, aux_tensors, aux_scalars : None
        Not supported; see `cuflash.frameworks.torch.attention`.
    block_sparse_tensors : None
        Not supported.

    Returns
    -------
    out : Tensor
        In q's shape, with v's head dim.
    lse : Tensor (heads_q, total_q) or None
        Float32 with `return_lse`; (batch, heads_q, seqlen_q) for q that is not packed.

    Raises
    ------
    ProblemError, UnsupportedError, CompileError
        As in `flash_attn_func`.
    """
    _refuse(
        pack_gqa,
        qv=qv,
        gather_kv_indices=gather_kv_indices,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        gather_bwd_recompute_p=_set(gather_bwd_recompute_p),
        gather_bwd_token_chunk=gather_bwd_token_chunk,
    )
    check_flag("disable_scheduler_metadata", disable_scheduler_metadata)
    causal, window, mod_kwargs = _masked(causal, window_size)
    mod_kwargs |= later_mod_kwargs("learnable_sink", learnable_sink, q)
    bounds = _bound(max_seqlen_q), _bound(max_seqlen_k)
    varlen_kwargs = lengths_of(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, *bounds)
    if seqlen_k_per_split is not None:
        varlen_kwargs["split_size"] = _split_size(seqlen_k_per_split)
    shared_args = softmax_scale, causal, window, softcap, deterministic, return_lse, "return_lse", num_splits
    names = NAMES_4 | FROM_BOUNDS if seqused_k is None else NAMES_4
    result = attend(q, k, v, *shared_args, mod_kwargs, names, **varlen_kwargs)
    return result if return_lse else (result, None)


def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: torch.Tensor | None = None,
    seqused: torch.Tensor | None = None,
    virtual_batch_idx: torch.Tensor | None = None,
    return_lse: bool = True,
) -> Result:
    """Merges attention over num_splits disjoint sets of keys into attention over all of them; it has no gradients.

    Parameters
    ----------
    out_partial : Tensor (num_splits, batch, seqlen, heads, head_dim)
        Results, float32, float16 or bfloat16; packed, (num_splits, total_q, heads, head_dim).
    lse_partial : float32 Tensor
        Their log-sum-exp, in the same shape without head_dim.
    out : Tensor, optional
        Memory for the result, in `out_dtype`.
    out_dtype : torch.dtype, default dtype of out_partial
        Float32, float16 or bfloat16.
    cu_seqlens, seqused, virtual_batch_idx : int32 Tensor, optional
        Without effect: all rows are merged. FlashAttention-4 skips unused rows.
    return_lse : bool, default True
        Returns lse; otherwise None in its place.

    Returns
    -------
    out : Tensor (batch, seqlen, heads, head_dim) or (total_q, heads, head_dim)
        In `out_dtype`.
    lse : float32 Tensor (batch, seqlen, heads) or (total_q, heads), or None
        Contiguous along seqlen.

    Raises
    ------
    ProblemError
        For other shapes and dtypes.
    """
    for name, integers in (("cu_seqlens", cu_seqlens), ("seqused", seqused), ("virtual_batch_idx", virtual_batch_idx)):
        check_integers(name, integers)
    check_flag("return_lse", return_lse)
    dtypes = torch.float32, torch.float16, torch.bfloat16
    whole, lse = combine(out_partial, lse_partial, out, out_dtype, ranks=(5, 4), dtypes=dtypes)
    return whole, lse if return_lse else None


def get_scheduler_metadata(
    max_seqlen_q: int,
    max_seqlen_k: int,
    nheads: int,
    nheads_kv: int,
    headdim: int,
    num_splits: int,
    headdim_v: int | None = None,
    pack_gqa: int | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqlen_k_new: int = 0,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqlen_k_per_split: int | None = None,
    _arch: int | None = None,
) -> SchedulerMetadata:
    """Returns a schedule for `flash_attn_varlen_func`, without tensors: cuflash schedules each call itself.

    It can be kept and passed back, and is never read. One of cu_seqlens_q, cu_seqlens_k, seqused_q and seqused_k must
    be a tensor; other arguments are not validated.
    """
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    lengths |= {"seqused_q": seqused_q, "seqused_k": seqused_k}
    for name, tensor in lengths.items():
        if tensor is not None:
            check_tensor(name, tensor)
    if all(tensor is None for tensor in lengths.values()):
        raise ProblemError(f"no lengths were given; give at least one of {', '.join(lengths)}")
    return SchedulerMetadata()


def _refuse(pack_gqa: Any, **arguments: Any) -> None:
    """Raises for the first argument that has no counterpart here."""
    if pack_gqa is not None:
        check_flag("pack_gqa", pack_gqa)
    for name, value in arguments.items():
        if value is None:
            continue
        if name == "qv" or name.startswith("gather"):
            raise UnsupportedError(
                f"{name}: cuflash does not have it; leave None, or take FlashAttention-4's own function"
            )
        raise UnsupportedError(
            f"{name} belongs to functions of scores and masks in CuTe code, which cuflash cannot read; call "
            "cuflash.frameworks.torch.attention, whose score_mod(score, b, h, q_idx, k_idx), mask_mod(b, h, q_idx, "
            "k_idx) and block_mask (of cuflash.create_block_mask) are Python code, or take FlashAttention-4's own "
            "function"
        )


def _set(flag: Any) -> Any:
    """Returns a flag, or None if it is not set."""
    return flag or None


def _bound(bound: Any) -> Any:
    """Returns a bound on lengths, or None for one on the device."""
    return None if isinstance(bound, torch.Tensor) and bound.device.type != "cpu" else bound


def _split_size(seqlen_k_per_split: Any) -> int:
    number = check_integer("seqlen_k_per_split", seqlen_k_per_split)
    if number < 1:
        raise ProblemError(f"seqlen_k_per_split={number}; give a positive number of keys, or None")
    return -(-number // SPLIT_STEP) * SPLIT_STEP


def _masked(causal: Any, window_size: Any) -> tuple[bool, Any, dict[str, Any]]:
    """Returns causal, the window for `attention`, which takes no negative sides, and a mask_mod for those."""
    check_flag("causal", causal)
    # The sides' signs choose the call, and an array in a graph has no values; scalars are guarded by value.
    is_unread = torch.compiler.is_dynamo_compiling() and isinstance(window_size, (torch.Tensor, np.ndarray))
    # Read as an attribute of the module: `__getattr__` makes it (`tensors.uncompiled`).
    window = (_MODULE.uncompiled_window_of if is_unread else window_of)(window_size)
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        check_window(window)  # which raises
    left, right = window
    left = None if left is None else check_integer("window_size left", left)
    right = None if right is None else check_integer("window_size right", right)
    if left is not None and right is not None and left < 0 and right < 0:
        left = right = None
    if causal:
        right = 0
    if (left is None or left >= 0) and (right is None or right >= 0):
        return causal, (left, right), {}
    return False, (None, None), {"mask_mod": interval(left, right)}


def __getattr__(name: str) -> Any:
    """Makes `uncompiled_window_of`: a graph ends before it."""
    reason = (
        "window_size is one tensor or array, whose values decide which call is computed; give two Python ints, or "
        "leave fullgraph=False"
    )
    return uncompiled(name, globals(), window_of, reason)
