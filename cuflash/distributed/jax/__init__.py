"""`cuflash.distributed.jax.attention`: attention over a sequence that an axis of a mesh shares, within `jax.shard_map`.

All devices run one program: what differs between ranks is read from tables by the rank, or is a branch of
`lax.switch`. So all ranks hold equally many rows.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from ...errors import ProblemError, UnsupportedError
from ...frameworks.jax.mods import check_seed
from ...frameworks.jax.primitives import checked_array
from ...problem.options import WindowSize, check_dropout, check_flag, check_window, is_zero
from ...units import kind_of
from ..choice import INDEXED, SCHEMES, Scheme, bias_lacks, choose, ulysses_lacks
from ..layout import Layout
from ..rectangles import Window
from ..shapes import check_shapes
from .call import Call
from .gather import by_gather
from .ring import by_ring
from .ulysses import by_ulysses

_SCHEMES = {"ring": by_ring, "ulysses": by_ulysses, "gather": by_gather}


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    axis_name: str,
    layout: Layout | None = None,
    scheme: Scheme = "auto",
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    sinks: Any = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    bias: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: Any = None,
    return_lse: bool = False,
) -> Any:
    """Computes attention over a sequence whose rows the devices of a mesh axis share, with gradients.

    Call it within `jax.shard_map`. Each device passes its own rows and gets its own rows of out.

    Parameters
    ----------
    q : array (batch, rows of this rank, heads_q, head_dim)
        This rank's queries. Packed documents have batch 1.
    k, v : array (batch, rows of this rank, heads_kv, …)
        This rank's keys and values.
    axis_name : str
        Axis of the mesh.
    layout : Layout, optional
        The rows of each rank, equally many; by default "zigzag".
    scheme : {"auto", "ring", "ulysses", "gather"}, default "auto"
        As in `cuflash.distributed.attention`.
    softmax_scale : float, default 1/sqrt(head_dim)
        Factor of the scores.
    causal : bool, default False
        Hides later keys of the same document.
    window_size : (left, right), default (-1, -1)
        Numbers of visible keys on both sides of a query's position; -1 or None for an open side.
    softcap : float, default 0.0
        A cap c > 0 turns each score into c tanh(score / c).
    sinks : array (heads_q,), optional
        One more logit of each head, equal on all ranks.
    score_mod : function (score, b, h, q_idx, k_idx), optional
        Returns the score that replaces a scaled one, by the indices of the whole problem. Not for "ring".
    mask_mod : function (b, h, q_idx, k_idx), optional
        Returns True for visible keys, by the same indices. Not for "ring".
    bias : array, optional
        Floats or bools as in `cuflash.frameworks.jax.attention`, broadcastable to (batch, heads_q, rows of this rank,
        seqlen): keys are those of the whole sequence, in its order. Not for "ring", nor with rows for "ulysses".
    dropout_p : float in [0, 1), default 0.0
        Fraction of weights to drop: those that one call on the whole sequence drops; static. Not for "ring".
    dropout_seed : int, key of jax.random, or array of one integer or two uint32
        Seed, equal on all devices. Needed with dropout.
    return_lse : bool, default False
        Returns (out, lse) instead of out.

    Returns
    -------
    out : array (batch, rows of this rank, heads_q, head_dim_v)
        This rank's rows.
    lse : array (batch, heads_q, rows of this rank), with `return_lse`
        Float32 (float64 for float64).

    Raises
    ------
    ProblemError
        For arguments that do not fit the layout.
    UnsupportedError
        For ranks with different numbers of rows, and options that the scheme does not have.

    Examples
    --------
    ::

        layout = Layout(seqlen, ranks=mesh.shape["context"])
        attend = functools.partial(attention, axis_name="context", layout=layout, causal=True)
        spec = jax.P(None, "context")
        attend = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
        out = attend(q[:, layout.order], k[:, layout.order], v[:, layout.order])[:, np.argsort(layout.order)]
    """
    if scheme not in SCHEMES:
        raise ProblemError(f"scheme={scheme!r} is unknown; give one of {', '.join(map(repr, SCHEMES))}")
    check_flag("causal", causal)
    check_flag("return_lse", return_lse)
    try:
        ranks = lax.axis_size(axis_name)
    except NameError as error:
        raise ProblemError(
            f"axis_name={axis_name!r} is no axis of a mesh here; call within jax.shard_map over a mesh with that axis"
        ) from error
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ProblemError(f"{name} has {x.ndim} axes; give (batch, rows of this rank, heads, head_dim)")
    layout = Layout(q.shape[1] * ranks, ranks) if layout is None else layout
    if not isinstance(layout, Layout):
        raise ProblemError(f"layout is {kind_of(layout)}; give a cuflash.distributed.Layout")
    if layout.ranks != ranks:
        raise ProblemError(f"the layout is for {layout.ranks} ranks, but axis {axis_name!r} has {ranks}")
    rows = {layout.num_rows(rank) for rank in range(ranks)}
    if len(rows) > 1:
        raise UnsupportedError(
            f"ranks hold {min(rows)} to {max(rows)} rows, but arrays of all devices have one shape in JAX; pad the "
            f"sequence to a multiple of {2 * ranks} rows, as a document of its own"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.shape[1] != layout.num_rows(0):
            raise ProblemError(f"{name} has {x.shape[1]} rows, but each rank holds {layout.num_rows(0)} of the layout")
    if layout.is_packed and q.shape[0] != 1:
        raise ProblemError(f"q has batch {q.shape[0]}, but the layout packs documents; give batch 1")
    left, right = check_window(window_size)
    call = Call(layout, axis_name, Window(left, 0 if causal else right), softmax_scale, softcap)
    named = {"score_mod": score_mod, "mask_mod": mask_mod, "bias": bias}
    mods = {name: x for name, x in named.items() if x is not None}
    if bias is not None:
        mods["bias"] = bias = jnp.atleast_2d(checked_array("bias", bias))
    sinks = None if sinks is None else checked_array("sinks", sinks)
    check_shapes(q, layout.seqlen, bias, sinks)
    if not is_zero(dropout_p) and check_dropout(dropout_p):
        mods |= {"dropout_p": dropout_p, "dropout_seed": dropout_seed}
    elif dropout_seed is not None:
        check_seed(dropout_seed)
    bias_shape = None if bias is None else bias.shape
    if scheme == "auto":
        scheme = choose(layout, call.window, q.shape[2], k.shape[2], mods, bias_shape, not_by_ring=INDEXED)
    if mods and scheme == "ring":
        names = ", ".join(name for name in mods if name != "dropout_seed")
        raise UnsupportedError(f"scheme='ring' has no {names} in JAX; give scheme='gather', 'ulysses' or 'auto'")
    if scheme == "ulysses" and (reason := ulysses_lacks(q.shape[2], ranks) or bias_lacks(layout, bias_shape)):
        raise UnsupportedError(f"scheme='ulysses': {reason}; give scheme='gather' or 'auto'")
    out, lse = _SCHEMES[scheme](call, q, k, v, sinks, mods)
    return (out, lse) if return_lse else out
