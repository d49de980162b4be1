"""Shared code of the flash-attn 2 and 3 interfaces: translates their arguments for `attention`, and refuses others.

Both have dense, packed and cached calls, with equal names and conventions. Their functions differ in the order of
arguments, and in some arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ...errors import REFUSALS, ProblemError, UnsupportedError
from ...problem.foreign import renamed
from ...problem.options import WindowSize, check_flag
from ...units import kind_of
from ..torch import attention, check_tensor
from ..torch.ops import BOUNDS
from ..torch.varlen import check_integers, paged_or_packed

# Argument names in errors of `attention`, with the callers' names. Lengths of pages may come from cu_seqlens_k.
NAMES_2 = {"page_table": "block_table"}
NAMES_3, NAMES_4 = {"sinks": "s_aux"}, {"sinks": "learnable_sink"}
FROM_BOUNDS = {"seqused_k": "cu_seqlens_k.diff()"}
_AXES = {3: "(total, heads, head_dim)", 4: "(batch, seqlen, heads, head_dim)"}
_SHAPES = _AXES | {4: f"{_AXES[4]}, and of a cache (num_pages, page_size, heads, head_dim) too"}


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: WindowSize,
    softcap: float,
    deterministic: bool,
    return_lse: bool,
    returned: str = "return_attn_probs",
    num_splits: int = 0,
    mod_kwargs: dict[str, Any] | None = None,
    names: Mapping[str, str] = NAMES_3,
    sm_margin: int = 0,
    **sequences: Any,
) -> Any:
    """Computes out, or (out, lse), from the arguments that both versions share, and varlen keywords of `attention`.

    returned: the name of the flag for lse. mod_kwargs: the mod keywords of `attention`. names: argument names in errors
    of `attention`, with the caller's names.
    """
    check_flag(returned, return_lse)
    rank_q = rank_k = 4
    if sequences:
        rank_q, rank_k = (3 if sequences.get(f"cu_seqlens_{side}") is not None else 4 for side in "qk")
        bounds_to_host(sequences)
    window, cap = window_of(window_size), cap_of(softcap)
    try:
        for name, tensor, rank in (("q", q, rank_q), ("k", k, rank_k), ("v", v, rank_k)):
            check_rank(name, tensor, rank)
        return attention(
            q,
            k,
            v,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window,
            softcap=cap,
            deterministic=deterministic,
            return_lse=return_lse,
            num_splits=num_splits,
            sm_margin=sm_margin,
            **sequences,
            **(mod_kwargs or {}),
        )
    except REFUSALS as error:
        raise renamed(error, names) from error.__cause__


def refuse_leftpad(name: str, leftpad: Any) -> None:
    """Raises for keys that begin after the first row of a cache."""
    if leftpad is not None:
        raise UnsupportedError(
            f"{name} was given, but the keys of a sequence begin at the first row of its cache; leave None, and keep "
            "them there"
        )


def refuse_of_version_3(softmax_scale: Any, pack_gqa: Any, *tensors: Any) -> None:
    """Raises for unsupported arguments, and a pack_gqa that is no flag. tensors: qv and descales."""
    if isinstance(softmax_scale, (int, float)) and softmax_scale == 0:  # by type: arrays may have no truth value
        raise ProblemError(
            f"softmax_scale={softmax_scale} is not positive; give None for 1/sqrt(head_dim). If this was meant as "
            "dropout_p, take cuflash.frameworks.flash_attn_interface: it has the order of flash-attn 2"
        )
    for name, tensor in zip(("qv", "q_descale", "k_descale", "v_descale"), tensors, strict=True):
        if tensor is not None:
            raise UnsupportedError(
                f"{name}: cuflash has neither a second product qv nor 8-bit inputs; leave the default, or take "
                "FlashAttention-3's own function"
            )
    if pack_gqa is not None:
        check_flag("pack_gqa", pack_gqa)


def lengths_of(
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    seqused_q: Any,
    seqused_k: Any,
    page_table: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
) -> dict[str, Any]:
    """Returns the varlen keywords of `attention`, from arguments of versions 3 and 4, all of which may be None.

    As in these versions, a bound on lengths has no effect on a side that is dense.
    """
    check_integers("cu_seqlens_q", cu_seqlens_q)
    check_integers("seqused_q", seqused_q)
    keywords = {"cu_seqlens_q": cu_seqlens_q, "seqused_q": seqused_q}
    keywords |= paged_or_packed(cu_seqlens_k, seqused_k, page_table, "page_table", required=False)
    if cu_seqlens_q is not None:
        keywords["max_seqlen_q"] = max_seqlen_q
    if cu_seqlens_k is not None or page_table is not None:
        keywords["max_seqlen_k"] = max_seqlen_k
    return keywords


def rows_of_table(page_table: Any, name: str, rows: Any) -> tuple[Any, Any]:
    """Returns the page table and the cache rows, one of which is None. With both, sequence b has page_table[rows[b]].

    name: the name of `rows`. A row out of range gets pages -1: masked on a GPU, an error in host memory.
    """
    if page_table is None or rows is None:
        return page_table, rows
    check_integers("page_table", page_table)
    check_integers(name, rows)
    if page_table.ndim != 2 or rows.ndim != 1 or page_table.device != rows.device:
        raise ProblemError(
            f"page_table has shape {tuple(page_table.shape)} on {page_table.device}, and {name} {tuple(rows.shape)} on "
            f"{rows.device}; give (rows, max_pages) and (batch,) on one device"
        )
    table = torch.cat([page_table, page_table.new_full((1, page_table.shape[1]), -1)])  # the appended row has no pages
    nowhere = len(page_table)
    return table[torch.where((rows >= 0) & (rows < nowhere), rows, nowhere)], None


def row_error(error: Exception, name: str, page_table: Any, rows: Any) -> Exception:
    """Returns the error of a call over `rows_of_table`, or the error for a host row out of the table's range.

    name: the name of `rows`.
    """
    match = re.match(r"page_table\[(\d+), \d+\] is -1,", str(error))
    if match is None or page_table is None or rows is None or 0 <= (row := int(rows[int(match[1])])) < len(page_table):
        return error
    return ProblemError(
        f"{name}[{match[1]}] is {row}, but page_table has {len(page_table)} rows; give one of these, or no keys to "
        f"sequence {match[1]}"
    )


def in_host_memory(name: str, value: Any, shape: tuple[int, ...] = ()) -> Any:
    """Returns `value`, or the value of a host tensor of this shape. Reading one on a GPU would wait for the device."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != shape or value.device.type != "cpu":
        kinds = "number, or a tensor without axes" if shape == () else f"tuple, or a tensor of shape {shape}"
        raise ProblemError(
            f"{name} is a tensor of shape {tuple(value.shape)} on {value.device}; give a {kinds} in host memory"
        )
    return value.tolist() if shape else value.item()


def bounds_to_host(sequences: dict[str, Any]) -> None:
    """Replaces bounds on lengths that are host tensors by numbers."""
    for name in BOUNDS:
        if name in sequences:
            sequences[name] = in_host_memory(name, sequences[name])


def window_of(window_size: Any) -> Any:
    """Returns the window as numbers; it may be one host tensor or array, and so may each side."""
    if isinstance(window_size, (tuple, list)):
        for side in window_size:
            if type(side) is not int and isinstance(side, torch.Tensor):  # isinstance is slow: int first
                return tuple(in_host_memory("window_size", side) for side in window_size)
    elif isinstance(window_size, (torch.Tensor, np.ndarray)):
        return in_host_memory("window_size", torch.as_tensor(window_size), (2,))
    return window_size


def cap_of(softcap: Any) -> Any:
    """Returns the softcap; as in flash-attn, values of at most 0 mean none."""
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)):
        raise ProblemError(f"softcap={softcap!r} is {kind_of(softcap)}; give a number, 0.0 for none")
    return 0.0 if softcap <= 0 else softcap


def unpack(name: str, packed: torch.Tensor, count: int, leading: str = "batch, seqlen") -> tuple[torch.Tensor, ...]:
    """Returns views (…, heads, head_dim) of the tensors in one (…, count, heads, head_dim) with these leading axes."""
    check_tensor(name, packed)
    axis = leading.count(",") + 1
    if packed.ndim != axis + 3 or packed.shape[axis] != count:
        raise ProblemError(
            f"{name} has shape {tuple(packed.shape)}; give ({leading}, {count}, heads, head_dim), or the "
            f"{count} tensors by themselves"
        )
    return tuple(packed.unbind(axis))


def packed_names(name: str) -> dict[str, str]:
    """Returns the names of the tensors in "qkv" or "kv", for errors: "k of kv"."""
    return {part: f"{part} of {name}" for part in name}


def check_out(name: str, out: Any, q: torch.Tensor, v: torch.Tensor) -> None:
    """Raises unless out is None or fits the result of attention of q and v."""
    if out is None:
        return
    for each, tensor in ((name, out), ("q", q), ("v", v)):
        check_tensor(each, tensor)
    check_fits(name, out, (*q.shape[:-1], v.shape[-1]), q.dtype, q.device)


def check_fits(name: str, out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raises unless a result or gradient tensor has this shape, dtype and device."""
    if (out.shape, out.dtype, out.device) != (shape, dtype, device):
        axes = f": {_AXES[len(shape)]}" if len(shape) in _AXES else ""
        raise ProblemError(
            f"{name} has shape {tuple(out.shape)} and dtype {out.dtype} on {out.device}; give {dtype} on {device} in "
            f"shape {tuple(shape)}{axes}, or None"
        )


def check_rank(name: str, tensor: Any, rank: int) -> None:
    """Raises unless a tensor has the axes of a packed (3) or a dense tensor (4)."""
    # A 3-D tensor is (total, heads, head_dim) of a misplaced varlen call, not a batch of one.
    if isinstance(tensor, torch.Tensor) and tensor.ndim != rank:  # `attention` refuses other types
        raise ProblemError(f"{name} has shape {tuple(tensor.shape)}; give {_SHAPES[rank]}")
