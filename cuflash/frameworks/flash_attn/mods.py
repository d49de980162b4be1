"""ALiBi, sinks, chunks and dropout of the flash-attn interfaces, as keywords of `attention`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from ...errors import ProblemError, UnsupportedError
from ...mods.language import position_of
from ...mods.masks import chunked
from ...mods.scores import alibi
from ...problem.options import WindowSize, check_integer
from ...units import kind_of
from ..torch import check_tensor
from .arguments import NAMES_2, attend

_ORDER = (
    "It stands before softmax_scale here, as in flash-attn 2; the order of flash-attn 3 is in "
    "cuflash.frameworks.flash_attn_3_interface"
)
_COLUMNS = 128  # weight columns that one call extracts
_STEP = 128  # rows and columns of S_dmask are rounded up to multiples of it, as in flash-attn


def v2_mod_kwargs(
    q: Any, dropout_p: Any, alibi_slopes: Any, cu_seqlens_q: Any = None, rng_state: Any = None, *, draws: bool = True
) -> dict[str, Any]:
    """Returns the keywords of `attention` for flash-attn 2's dropout and ALiBi.

    rng_state: returned by a forward, for its backward. draws: draws a seed if there is none.
    """
    mod_kwargs = {} if alibi_slopes is None else {"score_mod": alibi(slopes_of(alibi_slopes, q, cu_seqlens_q))}
    number = _dropout(dropout_p)
    if number == 0.0:
        return mod_kwargs
    if rng_state is None:
        if not draws:
            raise ProblemError(
                f"dropout_p={number}, but there is no rng_state, which tells what was dropped; give the forward's"
            )
        check_tensor("q", q)
        rng_state = torch.empty(1, dtype=torch.int64, device=q.device).random_()
    check_tensor("rng_state", rng_state)
    return mod_kwargs | {"dropout_p": number, "dropout_seed": rng_state.flatten()[:1]}


def later_mod_kwargs(name: str, sink: Any, q: Any, attention_chunk: Any = 0) -> dict[str, Any]:
    """Returns the keywords of `attention` for sinks, whose argument has that name, and for flash-attn 3's chunks.

    Sinks may have any 16-bit dtype, as in flash-attn 4: float32 holds them exactly.
    """
    mod_kwargs: dict[str, Any] = {}
    if sink is not None:
        check_tensor(name, sink)
        is_narrow = sink.dtype in (torch.float16, torch.bfloat16)
        mod_kwargs["sinks"] = sink.float() if is_narrow and sink.dtype != getattr(q, "dtype", None) else sink
    if type(attention_chunk) is not int or attention_chunk != 0:  # by type: arrays may have no truth value
        chunk = check_integer("attention_chunk", attention_chunk)
        if chunk < 0:
            raise ProblemError(f"attention_chunk={chunk}; give a number of keys, 0 for no chunks")
        if chunk:
            mod_kwargs["mask_mod"] = chunked(chunk)
    return mod_kwargs


@lru_cache(64)  # cached, so that each function is traced once
def interval(left: int | None, right: int | None) -> Any:
    """Returns the mask_mod of a window with sides of any sign: keys position - left … position + right."""

    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        position, is_visible = position_of(q_idx), True
        if left is not None:
            is_visible = (k_idx >= position - left) & is_visible
        return is_visible if right is None else (k_idx <= position + right) & is_visible

    return mask_mod


def _dropout(dropout_p: Any) -> float:
    """Returns the dropout probability; 0.0 if it is too small to drop anything."""
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)):
        shown = type(dropout_p).__name__ if isinstance(dropout_p, torch.Tensor) else repr(dropout_p)
        raise ProblemError(f"dropout_p={shown} is {kind_of(dropout_p)}; give a number. {_ORDER}")
    if not 0.0 <= dropout_p < 1.0:
        raise ProblemError(f"dropout_p={dropout_p} is outside [0, 1). {_ORDER}")
    # diffusers passes 1e-30, which drops nothing, to make flash-attn return lse.
    return 0.0 if 1.0 - dropout_p == 1.0 else float(dropout_p)


def slopes_of(slopes: Any, q: Any, cu_seqlens_q: Any) -> torch.Tensor:
    """Returns the slopes, validated as in flash-attn."""
    for name, tensor in (("q", q), ("alibi_slopes", slopes)):
        check_tensor(name, tensor)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    heads = q.shape[-2] if q.ndim > 1 else 1
    if slopes.dtype != torch.float32 or slopes.shape not in ((heads,), (batch, heads)):
        raise ProblemError(
            f"alibi_slopes has shape {tuple(slopes.shape)} and dtype {slopes.dtype}; give torch.float32 in "
            f"shape ({heads},) or ({batch}, {heads}): (heads_q,) or (batch, heads_q)"
        )
    result: torch.Tensor = slopes
    return result


def attend_with_weights(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: WindowSize,
    softcap: float,
    deterministic: bool,
    return_weights: bool,
    mod_kwargs: dict[str, Any],
    names: Mapping[str, str] = NAMES_2,
    **sequences: Any,
) -> Any:
    """Returns the results of `attend`; with `return_weights` (out, lse, S_dmask). S_dmask is empty without dropout."""
    if isinstance(softmax_scale, bool):
        raise ProblemError(f"softmax_scale={softmax_scale} is a bool; give a number. dropout_p: {_ORDER}")
    options = softmax_scale, causal, window_size, softcap
    result = attend(q, k, v, *options, deterministic, return_weights, mod_kwargs=mod_kwargs, names=names, **sequences)
    if not return_weights:
        return result
    if "dropout_p" not in mod_kwargs:
        return *result, q.new_empty(0)
    if sequences.get("page_table") is not None:
        raise UnsupportedError(
            "block_table, dropout_p and return_attn_probs: weights of keys in pages are not returned; leave one out"
        )
    return *result, _signed_weights(q, k, options, mod_kwargs, sequences)


@torch.no_grad()
def _signed_weights(
    q: torch.Tensor,
    k: torch.Tensor,
    options: tuple[Any, Any, Any, Any],
    mod_kwargs: dict[str, Any],
    sequences: dict[str, Any],
) -> torch.Tensor:
    """Returns the weights (batch, heads, rows, keys), both lengths rounded up, negative where they were dropped.

    Columns of the unit matrix as values extract the weights of 128 keys a call. A second call on zero q and k, whose
    weights are equal, shows which are dropped: dropout depends on indices alone.
    """
    sides = _SequenceRows("q", q, sequences), _SequenceRows("k", k, sequences)
    rows, keys = (-(-each.longest // _STEP) * _STEP for each in sides)
    weights = q.new_zeros((sides[0].batch, q.shape[-2], rows, keys))
    no_q, no_k = (x.new_zeros((*x.shape[:-1], 8)) for x in (q, k))
    dropout = {name: mod_kwargs[name] for name in ("dropout_p", "dropout_seed")}
    plain = {name: x for name, x in mod_kwargs.items() if name not in dropout}
    position = sides[1].position()
    for begin in range(0, sides[1].longest, _COLUMNS):
        columns = torch.arange(begin, begin + _COLUMNS, device=k.device)
        values = (position[..., None] == columns).to(k.dtype)[..., None, :].expand(*k.shape[:-1], -1).contiguous()
        undropped = attend(q, k, values, *options, False, False, mod_kwargs=plain, **sequences)
        dropped = attend(no_q, no_k, values, None, False, (-1, -1), 0.0, False, False, mod_kwargs=dropout, **sequences)
        signed = sides[0].padded(torch.where(dropped > 0, undropped, -undropped)).transpose(1, 2)
        shown = min(_COLUMNS, keys - begin)
        weights[:, :, : signed.shape[2], begin : begin + shown] = signed[..., :shown]
    return weights


class _SequenceRows:
    """Positions of the rows of each sequence, on one side. The host never waits for the device."""

    def __init__(self, side: str, x: torch.Tensor, sequences: dict[str, Any]) -> None:
        self._rows = x.shape[-3]
        self._bounds: torch.Tensor | None = sequences.get(f"cu_seqlens_{side}")
        most = sequences.get(f"max_seqlen_{side}")
        self.longest = self._rows if self._bounds is None or most is None else int(most)
        self.batch = x.shape[0] if self._bounds is None else self._bounds.shape[0] - 1
        self._device = x.device

    def position(self) -> torch.Tensor:
        """Returns the position of each row in its sequence."""
        rows = torch.arange(self._rows, device=self._device)
        if self._bounds is None:
            return rows
        sequences_idx = torch.searchsorted(self._bounds, rows.to(self._bounds.dtype), right=True) - 1
        return rows - self._bounds[sequences_idx.clamp(min=0)]

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """Returns rows of packed sequences as (batch, longest, …), zeros past the end of each."""
        if self._bounds is None:
            return x
        indices = self._bounds[:-1, None] + torch.arange(self.longest, device=self._device)
        rows = x[indices.clamp(0, max(self._rows - 1, 0))]
        return torch.where((indices < self._bounds[1:, None])[..., None, None], rows, 0)
