"""A call of `cuflash.distributed.attention` on one rank: validated, compared with the other ranks, and run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ProblemError, UnsupportedError
from ..frameworks.torch.mods import check_seed
from ..problem.options import check_dropout, check_flag, check_window, is_zero
from .choice import SCHEMES, bias_lacks, choose
from .exchange import Link, check_agreement, needs_agreement
from .gather import gather, gather_gradients
from .layout import Layout
from .rectangles import Window
from .ring import ring, ring_gradients
from .scheme import Call, rank_of
from .shapes import check_shapes
from .ulysses import ring_of_ulysses, ring_of_ulysses_gradients, ulysses, ulysses_gradients

MODS = ("score_mod", "mask_mod", "bias", "sinks")
OPTIONS = ("softmax_scale", "softcap", "deterministic", "num_splits", "split_size")
# The functions of a scheme, for results and for gradients without autograd; the last is the ring on two axes.
_RUN: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "ring": (ring, ring_gradients),
    "ulysses": (ulysses, ulysses_gradients),
    "gather": (gather, gather_gradients),
    "ring of ulysses": (ring_of_ulysses, ring_of_ulysses_gradients),
}


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keywords: dict[str, Any], groups: Sequence[Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) of this rank's rows. keywords: those of `attention`. groups: one for each axis of the mesh."""
    scheme, call = _call(q, k, v, keywords, groups)
    out, lse = _RUN[scheme][0](call, q, k, v)
    return out, lse


def run_gradients(
    keywords: dict[str, Any], groups: Sequence[Any], leaf_names: Sequence[str], dout: Any, dlse: Any, *arrays: Any
) -> Any:
    """Returns dq, dk, dv, dbias and dsinks. arrays: q, k, v, out and lse. leaf_names: as in `Call`."""
    q, k, v, *_ = arrays
    scheme, call = _call(q, k, v, keywords, groups, leaf_names)
    return _RUN[scheme][1](call, dout, dlse, *arrays)


def _call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keywords: dict[str, Any],
    groups: Sequence[Any],
    leaf_names: Sequence[str] = (),
) -> tuple[str, Call]:
    """Returns the scheme and the call; raises for bad arguments, and on every rank if ranks disagree."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ProblemError(
                f"{name} has {tensor.dim()} axes; give (batch, rows of this rank, heads, head_dim), where packed "
                "documents have batch 1"
            )
    scheme, causal = keywords["scheme"], keywords["causal"]
    if scheme not in SCHEMES:
        raise ProblemError(f"scheme={scheme!r} is unknown; give one of {', '.join(map(repr, SCHEMES))}")
    for name in ("return_lse", "check", "causal"):
        check_flag(name, keywords[name])
    links = links_of(groups, "comparison of arguments")
    layout, rank = layout_of(keywords["layout"], links, q.shape[1])
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.shape[1] != layout.rows[rank]:
            raise ProblemError(
                f"{name} has {tensor.shape[1]} rows, but rank {rank} holds {layout.rows[rank]} of the layout; give "
                "layout.shard(x, dim=1) of the whole sequence"
            )
    if layout.is_packed and q.shape[0] != 1:
        raise ProblemError(f"q has batch {q.shape[0]}, but the layout packs documents; give batch 1")
    check_shapes(q, layout.seqlen, keywords["bias"], keywords["sinks"])
    left, right = check_window(keywords["window_size"])
    window = Window(left, 0 if causal else right)
    options = {name: keywords[name] for name in OPTIONS}
    options["deterministic"] = (
        check_flag("deterministic", options["deterministic"]) or torch.are_deterministic_algorithms_enabled()
    )
    mods = {name: x for name in MODS if (x := keywords[name]) is not None}
    bias_shape = mods["bias"].shape if "bias" in mods else None
    dropout_p, seed = keywords["dropout_p"], keywords["dropout_seed"]
    if keywords["check"] or needs_agreement(groups):
        shapes = {"q, k and v (batch, heads, head_dim)": [(x.shape[0], *x.shape[2:]) for x in (q, k, v)]}
        check_agreement(links, {
            "layout": layout.described(), **shapes, "dtype": q.dtype, "scheme": scheme,
            "window_size and causal": tuple(window), **options,
            "score_mod, mask_mod, bias and sinks": sorted(mods), "dropout_p": dropout_p,
            "rows of the bias": bias_lacks(layout, bias_shape, has_columns=True),
            "dropout_seed": seed if keywords["check"] or not torch.is_tensor(seed) else "a tensor",
        })  # fmt: skip
    if not is_zero(dropout_p) and check_dropout(dropout_p):
        if seed is None:
            raise ProblemError("dropout_p is not 0, but there is no dropout_seed; give all ranks the same seed")
        options |= {"dropout_p": dropout_p, "dropout_seed": seed}
    elif seed is not None:
        check_seed(seed, q)
    if len(links) > 1:
        if scheme not in ("auto", "ring"):
            raise UnsupportedError(
                f"scheme={scheme!r} runs on one axis, but the mesh has two; give scheme='ring' or 'auto', or a mesh of "
                "one"
            )
        scheme = "ring of ulysses"
    elif scheme == "auto":
        scheme = choose(layout, window, q.shape[2], k.shape[2], mods.keys() | options.keys(), bias_shape)
    purpose = f"scheme={scheme!r}" if len(links) == 1 else "the ring on a mesh of two axes"
    links = [link._replace(purpose=purpose) for link in links]
    return scheme, Call(layout, links, window, options, mods, leaf_names)


def links_of(groups: Sequence[Any], purpose: str) -> list[Link]:
    """Returns the links of groups, one for each axis of a mesh."""
    return [Link(group, dist.get_rank(group), dist.get_world_size(group), purpose) for group in groups]


def layout_of(layout: Layout | None, links: Sequence[Link], rows: int = 0) -> tuple[Layout, int]:
    """Returns the layout, by default one of so many rows of each rank, and this process's rank."""
    ranks, rank = prod([link.ranks for link in links]), rank_of(links)
    if layout is None:
        return _default_layout(rows * ranks, ranks), rank
    if not isinstance(layout, Layout):
        raise ProblemError(f"layout is {type(layout).__name__}; give a cuflash.distributed.Layout")
    if layout.ranks != ranks:
        raise ProblemError(f"the layout is for {layout.ranks} ranks, but the group has {ranks}; build it for the group")
    if layout.rank not in (None, rank):
        raise ProblemError(f"the layout is of rank {layout.rank}, but this process is rank {rank} of the group")
    return layout, rank


@lru_cache(64)
def _default_layout(seqlen: int, ranks: int) -> Layout:
    return Layout(seqlen, ranks)
