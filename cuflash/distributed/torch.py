"""`cuflash.distributed.attention`: attention over a sequence that the ranks of a group share, for PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
import torch.distributed as dist

from ..errors import ProblemError, UnsupportedError
from ..frameworks.torch import check_tensor
from ..frameworks.torch.tensors import autocast, is_autocast, uncompiled
from ..problem.options import WindowSize, check_flag, check_window
from ..units import kind_of
from .choice import SCHEMES, Scheme, choose
from .exchange import Link, check_agreement, exchange, needs_agreement
from .gather import gather
from .layout import Layout
from .rectangles import Window
from .ring import ring
from .scheme import Call, rank_of
from .ulysses import ulysses

_RUN = {"ring": ring, "ulysses": ulysses, "gather": gather}


class DistributedOptions(TypedDict, total=False):
    """Keywords of `attention` except return_lse."""

    layout: Layout | None
    group: Any
    scheme: Scheme
    softmax_scale: float | None
    causal: bool
    window_size: WindowSize
    softcap: float
    deterministic: bool
    num_splits: int
    split_size: int | None
    score_mod: Any
    mask_mod: Any
    bias: torch.Tensor | None
    sinks: torch.Tensor | None
    check: bool


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[DistributedOptions],
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[DistributedOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool, **options: Unpack[DistributedOptions]
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: Layout | None = None,
    group: Any = None,
    scheme: Scheme = "auto",
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    num_splits: int = 0,
    split_size: int | None = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    check: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes attention over a sequence whose rows the ranks of a group share, with gradients.

    Each rank passes its own rows and gets its own rows of out. Transport is torch.distributed's: NCCL, gloo or another
    backend of the group.

    Parameters
    ----------
    q : Tensor (batch, rows of this rank, heads_q, head_dim)
        This rank's queries. Packed documents have batch 1. A DTensor has placements [Shard(1)], as k and v then have,
        and results are DTensors.
    k, v : Tensor (batch, rows of this rank, heads_kv, …)
        This rank's keys and values.
    layout : Layout, optional
        The rows of each rank; by default "zigzag" over equally many rows of each rank.
    group : ProcessGroup or 1-D DeviceMesh, optional
        The ranks that share the sequence; by default all processes.
    scheme : {"auto", "ring", "ulysses", "gather"}, default "auto"
        "ulysses" exchanges heads for rows, and needs heads_q to be a multiple of the ranks. "ring" passes keys from
        rank to rank beside the kernels. "gather" fetches the keys that a rank's rows see, so that a window's bytes do
        not grow with the ranks. All ranks pass the same scheme.
    softmax_scale : float, default 1/sqrt(head_dim)
        Factor of the scores.
    causal : bool, default False
        Hides later keys of the same document.
    window_size : (left, right), default (-1, -1)
        Numbers of visible keys on both sides of a query's position; -1 or None for an open side.
    softcap : float, default 0.0
        A cap c > 0 turns each score into c tanh(score / c).
    deterministic : bool, default False
        Makes gradients bitwise repeatable.
    return_lse : bool, default False
        Returns (out, lse) instead of out.
    num_splits, split_size
        As in `cuflash.forward`.
    score_mod : function (score, b, h, q_idx, k_idx), optional
        Returns the score that replaces a scaled one. Indices are those of the whole problem: heads of all ranks, and
        positions within the document. Not for "ring".
    mask_mod : function (b, h, q_idx, k_idx), optional
        Returns True for visible keys, by the same indices. Not for "ring".
    bias : Tensor, optional
        Floats or bools as in `cuflash.frameworks.torch.attention`, broadcastable to (batch, heads_q, rows of this
        rank, seqlen): keys are those of the whole sequence, in its order. Not for "ring", nor with rows for "ulysses".
    sinks : Tensor (heads_q,), optional
        One more logit of each head, equal on all ranks.
    check : bool, default False
        Compares the arguments of all ranks in this call; by default only in a group's first call.

    Returns
    -------
    out : Tensor (batch, rows of this rank, heads_q, head_dim_v)
        This rank's rows.
    lse : Tensor (batch, heads_q, rows of this rank), with `return_lse`
        Float32 (float64 for float64).

    Raises
    ------
    ProblemError
        For arguments that do not fit the layout, ranks that disagree, or a group that is not initialised.
    UnsupportedError
        For options that the scheme does not have.

    Notes
    -----
    Gradients of sinks, of a bias without rows, and of tensors that score_mod refers to are this rank's part of a sum
    over the group, as for all replicated parameters: data-parallel wrappers reduce them. Under torch.compile calls run
    between graphs.

    References
    ----------
    Ring attention (arXiv 2310.01889), DeepSpeed Ulysses (arXiv 2309.14509), striped and zig-zag orders
    (arXiv 2311.09431).

    Examples
    --------
    Every process of `torchrun` runs this::

        torch.distributed.init_process_group("nccl")
        layout = Layout(seqlen, torch.distributed.group.WORLD)
        x = layout.shard(x, dim=1)
        out = attention(q, k, v, layout=layout, causal=True)
    """
    keywords: dict[str, Any] = {
        "layout": layout, "group": group, "scheme": scheme, "softmax_scale": softmax_scale, "causal": causal,
        "window_size": window_size, "softcap": softcap, "deterministic": deterministic, "return_lse": return_lse,
        "num_splits": num_splits, "split_size": split_size, "score_mod": score_mod, "mask_mod": mask_mod, "bias": bias,
        "sinks": sinks, "check": check,
    }  # fmt: skip
    if torch.compiler.is_dynamo_compiling():
        # Read as an attribute of the module: `__getattr__` makes it (`tensors.uncompiled`).
        call_outside: Any = sys.modules[__name__].uncompiled_attention
        results: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = call_outside(q, k, v, **keywords)
        return results
    if is_dtensor(q):
        return _of_dtensors(q, k, v, keywords)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor)
        if tensor.dim() != 4:
            raise ProblemError(
                f"{name} has {tensor.dim()} axes; give (batch, rows of this rank, heads, head_dim), where packed "
                "documents have batch 1"
            )
    if scheme not in SCHEMES:
        raise ProblemError(f"scheme={scheme!r} is unknown; give one of {', '.join(map(repr, SCHEMES))}")
    for name, flag in (("return_lse", return_lse), ("check", check), ("causal", causal)):
        check_flag(name, flag)
    if is_autocast(q):
        q, k, v = autocast(q, k, v)
    group = group_of(group)
    links = [Link(group, dist.get_rank(group), dist.get_world_size(group), "the comparison of arguments")]
    layout, rank = _layout_of(layout, links, q)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.shape[1] != layout.rows[rank]:
            raise ProblemError(
                f"{name} has {tensor.shape[1]} rows, but rank {rank} holds {layout.rows[rank]} of the layout; give "
                "layout.shard(x, dim=1) of the whole sequence"
            )
    if layout.is_packed and q.shape[0] != 1:
        raise ProblemError(f"q has batch {q.shape[0]}, but the layout packs documents; give batch 1")
    left, right = check_window(window_size)
    window = Window(left, 0 if causal else right)
    deterministic = check_flag("deterministic", deterministic) or torch.are_deterministic_algorithms_enabled()
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "softcap": softcap, "deterministic": deterministic,
                               "num_splits": num_splits, "split_size": split_size}  # fmt: skip
    named = {"score_mod": score_mod, "mask_mod": mask_mod, "bias": bias, "sinks": sinks}
    mods = {name: x for name, x in named.items() if x is not None}
    if check or needs_agreement([group]):
        shapes = {"q, k and v (batch, heads, head_dim)": [(x.shape[0], *x.shape[2:]) for x in (q, k, v)]}
        check_agreement(links, {
            "layout": layout.key, **shapes, "dtype": q.dtype, "scheme": scheme, "window_size and causal": tuple(window),
            **options, "score_mod, mask_mod, bias and sinks": sorted(mods),
        })  # fmt: skip
    if scheme == "auto":
        has_bias_rows = bias is not None and bias.shape[-2] > 1
        scheme = choose(layout, window, q.shape[2], k.shape[2], mods, has_bias_rows)
    links = [link._replace(purpose=f"scheme {scheme!r}") for link in links]
    call = Call(layout, links, window, options, mods)
    out, lse = _RUN[scheme](call, q, k, v)
    return (out, lse) if return_lse else out


def is_dtensor(x: Any) -> bool:
    """True for a DTensor. Imports nothing: without its module there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def _of_dtensors(q: Any, k: Any, v: Any, keywords: Any) -> Any:
    """Calls `attention` with the local rows of DTensors that are sharded by rows; results are such DTensors."""
    mesh = q.device_mesh
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not is_dtensor(x) or x.device_mesh != mesh or len(x.placements) != 1 or not x.placements[0].is_shard(1):
            placements = f" of {x.placements}" if is_dtensor(x) else ""
            raise ProblemError(
                f"q is a DTensor, but {name} is {kind_of(x)}{placements}; give q, k and v as DTensors of one 1-D mesh "
                "with placements [Shard(1)], or local tensors"
            )
    keywords["group"] = mesh if keywords["group"] is None else keywords["group"]
    keywords["layout"] = keywords["layout"] or Layout(q.shape[1], mesh)
    results = attention(*(x.to_local() for x in (q, k, v)), **keywords)
    outs = results if keywords["return_lse"] else (results,)
    rows = q.shape[1]
    wrapped = []
    for x, axis in zip(outs, (1, 2), strict=False):
        shape = torch.Size([*x.shape[:axis], rows, *x.shape[axis + 1 :]])
        stride = torch.empty(shape, device="meta").stride()
        shards = [type(q.placements[0])(axis)]
        wrapped.append(type(q).from_local(x, mesh, shards, run_check=False, shape=shape, stride=stride))
    return tuple(wrapped) if keywords["return_lse"] else wrapped[0]


def unshard(x: torch.Tensor, layout: Layout, dim: int = 1, group: Any = None) -> torch.Tensor:
    """Returns the whole sequence on every rank, from each rank's rows; gradients flow through.

    Parameters
    ----------
    x : Tensor
        This rank's rows along `dim`.
    layout : Layout
        The rows of each rank.
    dim : int, default 1
        Axis of the rows.
    group : ProcessGroup or 1-D DeviceMesh, optional
        The ranks; by default all processes.

    Returns
    -------
    Tensor
        All rows, in the order of the sequence.
    """
    group = group_of(group)
    links = [Link(group, dist.get_rank(group), dist.get_world_size(group), "unshard")]
    layout, rank = _layout_of(layout, links, x)
    rows = layout.rows
    by_rows = x.movedim(dim, 0)
    copies = by_rows.repeat(layout.ranks, *[1] * (x.dim() - 1))
    received = exchange(copies, [rows[rank]] * layout.ranks, rows, links[0])
    return layout.join(received.split(rows), 0).movedim(0, dim)


def group_of(group: Any) -> Any:
    """Returns the ProcessGroup of a group, a 1-D DeviceMesh or None; raises ProblemError without one."""
    if not dist.is_available():
        raise UnsupportedError("this build of PyTorch has no torch.distributed; install one that has")
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise ProblemError(f"group={group!r} has {group.ndim} axes; give a 1-D mesh, or mesh[name] of one axis")
        return group.get_group()
    if not dist.is_initialized():
        raise ProblemError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group(backend) in every process"
        )
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise ProblemError("this process is no member of the group; call from members only")
    return group


def _layout_of(layout: Layout | None, links: Sequence[Link], x: torch.Tensor) -> tuple[Layout, int]:
    """Returns the layout, by default one of equally many rows of each rank, and this process's rank."""
    ranks, rank = prod([link.ranks for link in links]), rank_of(links)
    if layout is None:
        return _default_layout(x.shape[1] * ranks, ranks), rank
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


def __getattr__(name: str) -> Any:
    """Makes `uncompiled_attention`: a graph of torch.compile ends before it."""
    return uncompiled(name, globals(), attention, "cuflash.distributed.attention runs between graphs")
