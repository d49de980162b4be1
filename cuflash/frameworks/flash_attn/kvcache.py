"""Attention over a cache in the interfaces of flash-attn 2 and 3; the call's new keys are written to it first."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...errors import REFUSALS, ProblemError, UnsupportedError
from ...problem.foreign import renamed
from ...problem.options import OptionContext, Options, WindowSize, check_flag, check_integer, check_window
from ..torch import check_tensor
from ..torch.ops import append
from ..torch.varlen import check_integers
from .arguments import attend, cap_of, check_rank, in_host_memory, refuse_leftpad, window_of

# Argument names in errors of `attention` and of `append_kv`, with the names here.
_NAMES = {"k": "k_cache", "v": "v_cache", "seqused_k": "cache_seqlens", "sinks": "s_aux"}
_APPEND_NAMES = {"seqused_k": "cache_seqlens", "cu_seqlens_k": "cu_seqlens_k_new"}


class New(NamedTuple):
    """flash-attn's arguments about new keys and values, and about the rotation of keys and queries."""

    k: torch.Tensor | None
    v: torch.Tensor | None
    rotary_cos: torch.Tensor | None
    rotary_sin: torch.Tensor | None
    rotary_interleaved: bool
    cu_seqlens_k_new: torch.Tensor | None = None


def over_cache(
    version: int,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    new: New,
    cache_seqlens: int | torch.Tensor | None,
    cache_leftpad: torch.Tensor | None,
    page_table: torch.Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_size: WindowSize,
    softcap: float,
    return_lse: bool,
    **sequences: Any,
) -> Any:
    """Computes `flash_attn_with_kvcache` of this version; `sequences` are further keywords of `attention`."""
    refuse_leftpad("cache_leftpad", cache_leftpad)
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, tensor)
        check_rank(name, tensor, 4)
    table = "block_table" if version == 2 else "page_table"
    check_integers(table, page_table)
    for name in ("cu_seqlens_q", "cache_batch_idx"):
        check_integers(name, sequences.get(name))
    if page_table is not None and sequences.get("cache_batch_idx") is not None:  # version 3: see `rows_of_table`
        raise ProblemError("block_table and cache_batch_idx place the same keys; give one of them")
    capacity = k_cache.shape[1] * (1 if page_table is None else page_table.shape[-1])
    rows = _check_new(new, cache_seqlens)
    length = used = None  # both None: all keys of the cache
    if isinstance(cache_seqlens, torch.Tensor):
        check_integers("cache_seqlens", cache_seqlens)
        used = cache_seqlens
    elif cache_seqlens is not None:
        length = check_integer("cache_seqlens", cache_seqlens)
        if not 0 <= length <= capacity - rows:
            lengths_text = f"cache_seqlens={length}" + (f" and {rows} new keys were given" if rows else "")
            raise ProblemError(f"{lengths_text}, but the cache has room for {capacity} keys of a sequence")
    if new.k is not None:
        _refuse_gradients(q=q, k_cache=k_cache, v_cache=v_cache, k=new.k, v=new.v)
        bounds = sequences.get("cu_seqlens_q")
        check_rank("q", q, 4 if bounds is None else 3)
        if used is None:
            batch = q.shape[0] if bounds is None else bounds.shape[0] - 1
            used = torch.full((batch,), length, dtype=torch.int32, device=k_cache.device)
        window_size = window_of(window_size)
        if not torch.compiler.is_compiling():
            # Options are validated before the cache is written. A q of a wrong shape is refused after that; the new
            # rows then lie behind the used ones, and count for nothing.
            check_flag("return_softmax_lse", return_lse)
            schedule = {name: sequences.get(name, 0) for name in ("num_splits", "sm_margin")}
            options = Options(softmax_scale, causal, window_size, softcap=cap_of(softcap), **schedule)
            options.validated(OptionContext(1, "float32"))
        longest = in_host_memory("max_seqlen_q", sequences.get("max_seqlen_q"))
        longest = q.shape[-3] if longest is None else longest
        widest = (capacity, capacity) if version == 2 else (capacity - 1, longest - 1)
        sides = zip(check_window(window_size), widest, strict=True)
        same = not causal and all(side is None or side >= wide for side, wide in sides)
        q = _write(q, k_cache, v_cache, new, used, page_table, capacity, same, table, sequences)
        if new.cu_seqlens_k_new is None and length is not None:
            length, used = length + rows, None
        else:
            used = used + (rows if new.cu_seqlens_k_new is None else new.cu_seqlens_k_new.diff())
    if used is not None:
        sequences["seqused_k"] = used
    elif length is not None and page_table is not None:
        sequences["seqused_k"] = torch.full(page_table.shape[:1], length, dtype=torch.int32, device=page_table.device)
    elif length is not None:
        k_cache, v_cache = k_cache[:, :length], v_cache[:, :length]
    shared_args = softmax_scale, causal, window_size, softcap, False, return_lse, "return_softmax_lse"
    names = _NAMES | {"page_table": table}
    return attend(q, k_cache, v_cache, *shared_args, names=names, page_table=page_table, **sequences)


def refuse_rotary_seqlens(name: str, lengths: Any, cache_seqlens: Any) -> None:
    """Raises for rotary positions that differ from positions in the cache."""
    if lengths is not None and lengths is not cache_seqlens:
        raise UnsupportedError(
            f"{name} was given, but cuflash rotates at positions in the cache, behind its used keys; leave None, or "
            "rotate q and k yourself"
        )


def _check_new(new: New, cache_seqlens: Any) -> int:
    """Returns the number of new keys of each sequence; 0 if it is on the device. Raises for incomplete arguments."""
    if new.k is new.v is new.rotary_cos is new.rotary_sin is None:
        return 0
    if new.k is None or new.v is None:
        for name, tensor in new._asdict().items():
            if tensor is not None and name in ("k", "v", "rotary_cos", "rotary_sin"):
                raise ProblemError(
                    f"{name} was given, but not both of k and v; give new keys and values, which {name} belongs to, or "
                    "rotate q yourself and leave None"
                )
        return 0
    if cache_seqlens is None:
        raise ProblemError("k was given, but not cache_seqlens; tell how many keys of the cache are used before it")
    check_integers("cu_seqlens_k_new", new.cu_seqlens_k_new)
    for name, tensor in (("k", new.k), ("v", new.v)):
        check_tensor(name, tensor)
        check_rank(name, tensor, 4 if new.cu_seqlens_k_new is None else 3)
    return new.k.shape[1] if new.cu_seqlens_k_new is None else 0


def _refuse_gradients(**tensors: Any) -> None:
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise UnsupportedError(
                f"{name} requires grad, but new keys are written to the cache in place, which has no gradients; call "
                "under torch.no_grad(), or give all keys to flash_attn_func"
            )


def _write(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    new: New,
    used: torch.Tensor,
    page_table: torch.Tensor | None,
    capacity: int,
    same: bool,
    table: str,
    sequences: dict[str, Any],
) -> torch.Tensor:
    """Writes the new keys behind the used ones; returns q, rotated with rotary tables. table: the page table's name."""
    tables: dict[str, Any] = {"rotary_cos": new.rotary_cos, "rotary_sin": new.rotary_sin}
    rotated: dict[str, Any] = {}
    if new.rotary_cos is not None or new.rotary_sin is not None:
        for name, tensor in tables.items():
            check_tensor(name, tensor)
            # `append_kv` would leave rows past the end of the table unrotated.
            if tensor.ndim != 2 or tensor.shape[0] < capacity:
                raise ProblemError(
                    f"{name} has shape {tuple(tensor.shape)}, but the cache has room for {capacity} keys of a "
                    "sequence; give (positions, rotary_dim / 2) with at least as many positions"
                )
        rotated = {"q": q, "cu_seqlens_q": sequences.get("cu_seqlens_q"), "q_same_position": same}
        rotated |= {**tables, "rotary_interleaved": new.rotary_interleaved}
    try:
        result = append(
            k_cache,
            v_cache,
            new.k,
            new.v,
            used,
            page_table=page_table,
            cache_batch_idx=sequences.get("cache_batch_idx"),
            cu_seqlens_k=new.cu_seqlens_k_new,
            **rotated,
        )
    except REFUSALS as error:
        raise renamed(error, _APPEND_NAMES | {"page_table": table}) from error.__cause__
    return result if rotated else q
