"""The one call behind all names: checks their arguments, and computes attention over the ranks of a group."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...distributed.layout import Layout
from ...distributed.torch import attention
from ...errors import REFUSALS, ProblemError, UnsupportedError
from ...problem.foreign import renamed
from ...problem.options import check_flag
from ...units import kind_of
from ..flash_attn.arguments import check_rank, packed_names, unpack, window_of
from ..flash_attn.mods import slopes_of
from ..torch import check_tensor
from ..torch.tensors import uncompiled
from .rows import link_of, stripes_of

_MODULE: Any = sys.modules[__name__]  # for `tensors.uncompiled`


def attend(
    layout_of: Callable[[torch.Tensor, Any], Layout],
    axes: int,
    tensors: Sequence[torch.Tensor],
    shared: tuple[Any, ...],
    is_striped: bool = False,
) -> Any:
    """Returns out, or (out, lse, None).

    layout_of: returns the layout, from q and the group. axes: numbers of axes of q, k and v. tensors: these three, or q
    and kv, or qkv. shared: the arguments from dropout_p on. is_striped: rows lie in stripes, not in the layout's order.
    """
    if torch.compiler.is_dynamo_compiling():
        # Read as an attribute of the module: `__getattr__` makes it (`tensors.uncompiled`).
        return _MODULE.uncompiled_attend(layout_of, axes, tensors, shared, is_striped)
    dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group = shared
    if not isinstance(dropout_p, (int, float)) or dropout_p != 0:
        shown = dropout_p if isinstance(dropout_p, (int, float)) else kind_of(dropout_p)
        raise UnsupportedError(f"dropout_p={shown}: attention over the rows of several ranks has no dropout; give 0.0")
    if isinstance(softmax_scale, bool):
        raise ProblemError(f"softmax_scale={softmax_scale} is a bool; give a number. It stands before causal here")
    check_flag("return_attn_probs", return_attn_probs)
    *before, last = tensors
    names = {}
    if len(packed := "qkv"[len(before) :]) > 1:
        names = packed_names(packed)
        tensors = *before, *unpack(packed, last, len(packed), "batch, rows" if axes == 4 else "rows")
    try:
        for name, x in zip("qkv", tensors, strict=True):
            check_tensor(name, x)
            check_rank(name, x, axes)
            if x.shape[-3] != tensors[0].shape[-3]:
                raise ProblemError(
                    f"{name} has {x.shape[-3]} rows, but q has {tensors[0].shape[-3]}; give the same rows of this rank"
                )
        link = link_of(group)
        layout = layout_of(tensors[0], link.group)
        q, k, v = (x if axes == 4 else x[None] for x in tensors)
        mods: dict[str, Any] = {} if alibi_slopes is None else {"score_mod": _alibi(slopes_of(alibi_slopes, q, None))}
        if is_striped:
            stripes = stripes_of(layout, link.rank, q.device)
            q, k, v = (stripes.to_layout(x, 1, link) for x in (q, k, v))
        out, lse = attention(
            q, k, v, layout=layout, group=link.group, softmax_scale=softmax_scale, causal=causal,
            window_size=window_of(window_size), deterministic=deterministic, return_lse=True, **mods,
        )  # fmt: skip
    except REFUSALS as error:
        raise renamed(error, names) from error.__cause__
    if is_striped:
        out, lse = stripes.from_layout(out, 1, link), stripes.from_layout(lse, 2, link)
    if axes == 3:
        out, lse = out[0], lse[0]
    return (out, lse, None) if return_attn_probs else out


def __getattr__(name: str) -> Any:
    """Makes `uncompiled_attend`: a graph of torch.compile ends before it."""
    return uncompiled(name, globals(), attend, "attention over several ranks runs between graphs")


def _alibi(slopes: torch.Tensor) -> Callable[..., Any]:
    """Returns the score_mod of slopes; both indices are positions in a document, which is all that ranks share."""
    if slopes.ndim == 2 and len(slopes) > 1:
        return lambda score, b, h, i, j: score - slopes[b, h] * abs(i - j)
    slopes = slopes.flatten()
    return lambda score, b, h, i, j: score - slopes[h] * abs(i - j)
