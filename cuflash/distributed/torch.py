"""`cuflash.distributed.attention`: attention over a sequence that the ranks of a group share, for PyTorch."""

from __future__ import annotations

import sys
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ProblemError, UnsupportedError
from ..frameworks.torch import check_tensor
from ..frameworks.torch.tensors import autocast, is_autocast, is_faking, refuse_tangents, uncompiled
from ..problem.options import WindowSize
from ..units import kind_of
from .calls import layout_of, links_of, run
from .choice import Scheme
from .exchange import exchange
from .layout import Layout
from .ops import by_op, is_between_graphs

_MODULE: Any = sys.modules[__name__]  # for `tensors.uncompiled`


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
    dropout_p: float
    dropout_seed: int | torch.Tensor | None
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
    dropout_p: float = 0.0,
    dropout_seed: int | torch.Tensor | None = None,
    check: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes attention over a sequence whose rows the ranks of a group share, with gradients.

    Each rank passes its own rows and gets its own rows of out. Transport is torch.distributed's: NCCL, gloo or another
    backend of the group.

    Parameters
    ----------
    q : Tensor (batch, rows of this rank, heads_q, head_dim)
        This rank's queries. Packed documents have batch 1. A DTensor has Shard(1) for each axis of its mesh, as k
        and v then have, and results are DTensors.
    k, v : Tensor (batch, rows of this rank, heads_kv, …)
        This rank's keys and values.
    layout : Layout, optional
        The rows of each rank; by default "zigzag" over equally many rows of each rank.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that share the sequence; by default all processes. On a mesh (outer, inner) the inner ranks exchange
        heads for rows, as "ulysses" does, and the ring runs over the outer ones. Its rank (i, j) is rank
        i * inner + j of the layout, and inner divides heads_q.
    scheme : {"auto", "ring", "ulysses", "gather"}, default "auto"
        "ulysses" exchanges heads for rows, and needs heads_q to be a multiple of the ranks. "ring" passes keys from
        rank to rank beside the kernels. "gather" fetches the keys that a rank's rows see, so that a window's bytes do
        not grow with the ranks. All ranks pass the same scheme. A mesh of two axes runs "ring".
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
        positions within the document.
    mask_mod : function (b, h, q_idx, k_idx), optional
        Returns True for visible keys, by the same indices.
    bias : Tensor, optional
        Floats or bools as in `cuflash.frameworks.torch.attention`, broadcastable to (batch, heads_q, rows of this
        rank, seqlen): keys are those of the whole sequence, in its order. "ulysses" and meshes of two axes take none
        with rows of its own, and "ulysses" none over the keys of packed documents.
    sinks : Tensor (heads_q,), optional
        One more logit of each head, equal on all ranks.
    dropout_p : float in [0, 1), default 0.0
        Fraction of weights to drop. They are those that one call on the whole sequence drops, in every scheme.
    dropout_seed : int or Tensor, optional
        Seed as in `cuflash.forward`, equal on all ranks. Needed with dropout.
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
    ExchangeError
        After the engine's timeout, if another rank has ended or makes another call.

    Notes
    -----
    Gradients of sinks, of a bias without rows, and of tensors that score_mod refers to are this rank's part of a sum
    over the group, as for all replicated parameters: data-parallel wrappers reduce them.

    Under torch.compile a call is one op. Its gradients exchange what "ulysses" or "gather" has exchanged in forward
    again, and other documents need no new graph. Calls with score_mod, mask_mod, dropout or a layout by runs run
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
        "sinks": sinks, "dropout_p": dropout_p, "dropout_seed": dropout_seed, "check": check,
    }  # fmt: skip
    if torch.compiler.is_dynamo_compiling() and is_between_graphs(keywords):
        # Read as an attribute of the module: `__getattr__` makes it (`tensors.uncompiled`).
        call_outside: Any = _MODULE.uncompiled_attention
        results: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = call_outside(q, k, v, **keywords)
        return results
    if is_dtensor(q):
        return _of_dtensors(q, k, v, keywords)
    for name, tensor in (("q", q), ("k", k), ("v", v), ("bias", bias), ("sinks", sinks)):
        if tensor is not None or name in "qkv":
            check_tensor(name, tensor)
    if bias is not None:
        keywords["bias"] = torch.atleast_2d(bias)
    if forward_ad._current_level >= 0:
        refuse_tangents(q=q, k=k, v=v, bias=bias, sinks=sinks)
    if is_autocast(q):
        q, k, v = autocast(q, k, v)
        keywords["sinks"] = None if sinks is None else sinks.float()
    groups = groups_of(group)
    if torch.compiler.is_compiling() or is_faking():
        out, lse = by_op(q, k, v, keywords, [each.group_name for each in groups])
    else:
        out, lse = run(q, k, v, keywords, groups)
    return (out, lse) if return_lse else out


def is_dtensor(x: Any) -> bool:
    """True for a DTensor. Imports nothing: without its module there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def _of_dtensors(q: Any, k: Any, v: Any, keywords: Any) -> Any:
    """Calls `attention` with the local rows of DTensors that are sharded by rows; results are such DTensors."""
    mesh = q.device_mesh
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not is_dtensor(x) or x.device_mesh != mesh or not all([each.is_shard(1) for each in x.placements]):
            placements = f" of {x.placements}" if is_dtensor(x) else ""
            of_q = "" if name == "q" else "q is a DTensor, but "
            raise ProblemError(
                f"{of_q}{name} is {kind_of(x)}{placements}; give q, k and v as DTensors of one mesh with Shard(1) for "
                "each of its axes, or local tensors"
            )
    keywords["group"] = mesh if keywords["group"] is None else keywords["group"]
    keywords["layout"] = keywords["layout"] or Layout(q.shape[1], mesh.size())
    results = attention(*(x.to_local() for x in (q, k, v)), **keywords)
    outs = results if keywords["return_lse"] else (results,)
    rows = q.shape[1]
    wrapped = []
    for x, axis in zip(outs, (1, 2), strict=False):
        shape = torch.Size([*x.shape[:axis], rows, *x.shape[axis + 1 :]])
        stride = torch.empty(shape, device="meta").stride()
        shards = [type(q.placements[0])(axis)] * mesh.ndim
        wrapped.append(type(q).from_local(x, mesh, shards, run_check=False, shape=shape, stride=stride))
    return tuple(wrapped) if keywords["return_lse"] else wrapped[0]


def unshard(x: torch.Tensor, layout: Layout, dim: int = 1, group: Any = None) -> torch.Tensor:
    """Returns the whole sequence on every rank, from each rank's rows.

    Gradients are those of the sum of all ranks' losses: a loss that each of n ranks computes from the whole sequence
    counts n times. Compute it from this rank's rows, or divide it by n.

    Parameters
    ----------
    x : Tensor
        This rank's rows along `dim`.
    layout : Layout
        The rows of each rank.
    dim : int, default 1
        Axis of the rows.
    group : ProcessGroup or DeviceMesh, optional
        The ranks, as in `attention`; by default all processes.

    Returns
    -------
    Tensor
        All rows, in the order of the sequence.
    """
    links = links_of(groups_of(group), "unshard")
    layout, rank = layout_of(layout, links, x.shape[dim])
    by_rows, rows = x.movedim(dim, 0), layout.rows
    if x.shape[dim] != rows[rank]:
        raise ProblemError(
            f"x has {x.shape[dim]} rows along axis {dim}, but rank {rank} of the layout holds {rows[rank]}; give this "
            "rank's rows, and their axis as dim"
        )
    for link in reversed(links):  # the rows of all ranks of an axis become those of each of them
        first = rank - link.rank
        copies = by_rows.repeat(link.ranks, *[1] * (x.dim() - 1))
        by_rows = exchange(copies, [rows[rank]] * link.ranks, rows[first : first + link.ranks], link)
        rank, rows = rank // link.ranks, tuple(sum(rows[i : i + link.ranks]) for i in range(0, len(rows), link.ranks))
    return layout.join(by_rows.split(layout.rows), 0).movedim(0, dim)


def groups_of(group: Any) -> list[Any]:
    """Returns the ProcessGroups of a group, of the axes of a DeviceMesh, or of None; raises ProblemError without."""
    if not dist.is_available():
        raise UnsupportedError("this build of PyTorch has no torch.distributed; install one that has")
    if isinstance(group, DeviceMesh):
        if group.ndim > 2:
            raise ProblemError(f"group={group!r} has {group.ndim} axes; give a mesh of 1 or 2, such as mesh[names]")
        if group.get_coordinate() is None:
            raise ProblemError("this process is no member of the mesh; call from members only")
        return [group.get_group(axis) for axis in range(group.ndim)]
    if not dist.is_initialized():
        raise ProblemError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group(backend) in every process"
        )
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise ProblemError("this process is no member of the group; call from members only")
    return [group]


def __getattr__(name: str) -> Any:
    """Makes `uncompiled_attention`: a graph of torch.compile ends before it."""
    reason = (
        "cuflash traces score_mod and mask_mod itself, a number of NumPy is an array for torch.compile, and the op "
        "takes no dropout and no layout by runs: such calls run between graphs; leave fullgraph=False"
    )
    return uncompiled(name, globals(), attention, reason)
