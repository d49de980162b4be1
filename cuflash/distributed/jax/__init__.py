"""`cuflash.distributed.jax.attention`: attention over a sequence that an axis of a mesh shares, within `jax.shard_map`.

All devices run one program: what differs between ranks is read from tables by the rank, or is a branch of
`lax.switch`. So all ranks hold equally many rows.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..errors import ProblemError, UnsupportedError
from ..frameworks import jax as on_device
from ..frameworks.jax.call import static_of
from ..frameworks.jax.mods import check_seed
from ..frameworks.jax.primitives import backward, checked_array
from ..problem.options import Options, WindowSize, check_dropout, check_flag, check_window, is_zero
from .choice import INDEXED, SCHEMES, Scheme, bias_lacks, choose, kv_copies, ulysses_lacks
from .layout import Layout
from .lengths import with_length
from .rectangles import Piece, Range, Rectangle, Window, needed_keys, pieces_of, rectangles
from .shapes import check_shapes

_attention: Any = on_device.attention  # overloads do not take keywords of a dict


class Call(NamedTuple):
    """One call: everything but its arrays. Hashable, as a static argument of a custom_vjp."""

    layout: Layout
    axis_name: str
    window: Window
    softmax_scale: float | None
    softcap: float

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of `attention` that all parts of the call share."""
        return {"softmax_scale": self.softmax_scale, "softcap": self.softcap}


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
    ranks = lax.axis_size(axis_name)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ProblemError(f"{name} has {x.ndim} axes; give (batch, rows of this rank, heads, head_dim)")
    layout = Layout(q.shape[1] * ranks, ranks) if layout is None else layout
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


def _packed(call: Call, q: Any, k: Any, v: Any, bounds_q: Any, bounds_k: Any, **options: Any) -> tuple[Any, Any]:
    """Returns (out, lse) of packed sequences for every element of the batch."""
    window = call.window.left, call.window.right
    results = [
        _attention(*(x[b] for x in (q, k, v)), cu_seqlens_q=bounds_q, cu_seqlens_k=bounds_k, window_size=window,
                        return_lse=True, **options, **call.options)
        for b in range(q.shape[0])
    ]  # fmt: skip
    outs, lses = zip(*results, strict=True)
    return jnp.stack(outs), jnp.stack(lses)


def _ulysses(call: Call, q: Any, k: Any, v: Any, sinks: Any, mods: dict[str, Any]) -> tuple[Any, Any]:
    """Sends heads for rows, computes whole heads, and sends rows for heads."""
    layout, axis, ranks, heads_q, heads_kv = call.layout, call.axis_name, call.layout.ranks, q.shape[2], k.shape[2]
    if (copies := kv_copies(heads_q, heads_kv, ranks)) > 1:
        k, v = (jnp.repeat(x, copies, 2) for x in (k, v))
    order = layout.order
    back = np.argsort(order)
    q, k, v = (jnp.take(lax.all_to_all(x, axis, 2, 1, tiled=True), back, 1) for x in (q, k, v))
    first = lax.axis_index(axis) * (heads_q // ranks)
    options: dict[str, Any] = {}
    if sinks is not None:
        options["sinks"] = lax.dynamic_slice_in_dim(sinks, first, heads_q // ranks)

    def attend(head: int, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        more = options | mods | {"index_offsets": (0, 0, head)}
        if (bias := mods.get("bias")) is not None and bias.ndim > 2 and bias.shape[-3] > 1:
            more["bias"] = bias[..., head : head + heads_q // ranks, :, :]
        if layout.is_packed:
            bounds = np.array(layout.cu_seqlens, np.int32)
            return _packed(call, q, k, v, bounds, bounds, **more)
        window = call.window.left, call.window.right
        out, lse = _attention(q, k, v, window_size=window, return_lse=True, **more, **call.options)
        return out, lse

    if mods:  # index offsets are static: a branch for each rank
        branches = [functools.partial(attend, rank * (heads_q // ranks)) for rank in range(ranks)]
        out, lse = lax.switch(lax.axis_index(axis), branches, q, k, v)
    else:
        out, lse = attend(0, q, k, v)
    out = lax.all_to_all(jnp.take(out, order, 1), axis, 1, 2, tiled=True)
    return out, lax.all_to_all(jnp.take(lse, order, 2), axis, 2, 1, tiled=True)


class _Tables(NamedTuple):
    """Tables of "gather" by rank: rows to send to each rank, fetched rows by key, and bounds of the pieces."""

    send: np.ndarray[Any, Any]
    keys: np.ndarray[Any, Any]
    bounds_q: np.ndarray[Any, Any]
    bounds_k: np.ndarray[Any, Any]


@functools.lru_cache(64)
def _tables(layout: Layout, window: Window) -> _Tables:
    ranks = range(layout.ranks)
    needed = [needed_keys(layout, rank, window) for rank in ranks]

    def shared(sender: int, receiver: int) -> list[Range]:
        """Returns the ranges of rows of the sequence that one rank sends to another."""
        pairs = ((span, keys) for span in layout.spans[sender] for keys in needed[receiver])
        cuts = ((max(span.begin, keys[0]), min(span.end, keys[1])) for span, keys in pairs)
        return [cut for cut in cuts if cut[0] < cut[1]]

    def rows_of(ranges: Sequence[Range]) -> Any:
        return np.concatenate([np.empty(0, np.int64), *(np.arange(*each) for each in ranges)])

    def padded(rows: list[Any], size: int, value: int = 0) -> Any:
        return np.stack([np.pad(row, (0, size - len(row)), constant_values=value) for row in rows]).astype(np.int32)

    sent = [[rows_of(shared(sender, receiver)) for receiver in ranks] for sender in ranks]
    slots = max(max(len(rows) for rows in each) for each in sent)
    local = [dict(zip(layout.indices(rank).tolist(), range(layout.num_rows(rank)), strict=True)) for rank in ranks]
    send = np.stack(
        [padded([np.array([local[s][row] for row in rows], np.int64) for rows in sent[s]], slots) for s in ranks]
    )
    keys, bounds_q, bounds_k = [], [], []
    for rank in ranks:
        slot_of = {row: s * slots + n for s in ranks for n, row in enumerate(sent[s][rank].tolist())}
        pieces = pieces_of(layout, rank, window)
        keys.append(np.array([slot_of[row] for row in rows_of([piece.keys for piece in pieces]).tolist()], np.int64))
        bounds_q.append(np.cumsum([0, *(piece.local[1] - piece.local[0] for piece in pieces)]))
        bounds_k.append(np.cumsum([0, *(piece.keys[1] - piece.keys[0] for piece in pieces)]))
    # Ranks with fewer pieces have empty ones at the end.
    count = max(map(len, bounds_q))
    bounds = ([np.pad(each, (0, count - len(each)), "edge") for each in side] for side in (bounds_q, bounds_k))
    return _Tables(send, padded(keys, max(map(len, keys))), *(np.stack(side).astype(np.int32) for side in bounds))


def _gather(call: Call, q: Any, k: Any, v: Any, sinks: Any, mods: dict[str, Any]) -> tuple[Any, Any]:
    """Fetches the keys that this rank's rows see, by one all-to-all of padded slots; then computes its rows."""
    tables, axis = _tables(call.layout, call.window), call.axis_name
    send, keys, bounds_q, bounds_k = (jnp.asarray(table)[lax.axis_index(axis)] for table in tables)

    def fetched(x: Any) -> Any:
        slots = jnp.take(x, send.reshape(-1), 1)
        return jnp.take(lax.all_to_all(slots, axis, 1, 1, tiled=True), keys, 1)

    options = {} if sinks is None else {"sinks": sinks}
    if not mods and (call.window.is_open or call.window.right == 0):
        return _packed(call, q, fetched(k), fetched(v), bounds_q, bounds_k, **options)
    # Index offsets and diagonals that do not end at the last keys are static: a branch for each rank.
    branches = [functools.partial(_by_pieces, call, rank, options | mods) for rank in range(call.layout.ranks)]
    out, lse = lax.switch(lax.axis_index(axis), branches, q, fetched(k), fetched(v))
    return out, lse


def _by_pieces(call: Call, rank: int, mods: dict[str, Any], q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Returns (out, lse) of a rank's rows, whose fetched keys follow each other by piece."""
    results, first = [], 0
    for piece in pieces_of(call.layout, rank, call.window) or [Piece((0, 0), (0, 0), 0, 0, True)]:
        rows, columns = slice(*piece.local), slice(*piece.keys)
        keys = slice(first, first + columns.stop - columns.start)
        first = keys.stop
        more = _with_length(mods, piece.seqlen)
        if (bias := mods.get("bias")) is not None:
            bias = bias[..., rows, :] if bias.shape[-2] > 1 else bias
            more["bias"] = bias[..., columns] if bias.shape[-1] > 1 else bias
        results.append(_attention(q[:, rows], k[:, keys], v[:, keys], window_size=tuple(call.window), return_lse=True,
                                  diagonal_offset=piece.q_index - piece.k_index, index_offsets=piece.index_offsets,
                                  **more, **call.options))  # fmt: skip
    outs, lses = zip(*results, strict=True)
    return jnp.concatenate(outs, 1), jnp.concatenate(lses, 2)


def _with_length(mods: dict[str, Any], seqlen: int) -> dict[str, Any]:
    """Returns mods whose functions find the length of the document."""
    new = dict(mods)
    for name, x in mods.items():
        # Functions that take JAX's tracers alone raise errors of any type; they have no lengths.
        with contextlib.suppress(Exception):
            new |= with_length({name: x}, np.array(seqlen, np.int32))
    return new


def _branches(layout: Layout, step: int, window: Window) -> tuple[list[list[Rectangle]], Any]:
    """Returns the different lists of rectangles of a step of the ring, and which of them each rank has."""
    lists = [rectangles(layout, rank, (rank - step) % layout.ranks, window) for rank in range(layout.ranks)]
    lists = [[part._replace(q_index=0, k_index=0, document=0) for part in parts] for parts in lists]
    different: list[list[Rectangle]] = []
    for parts in lists:
        if parts not in different:
            different.append(parts)
    return different, np.array([different.index(parts) for parts in lists], np.int32)


def _shifted(call: Call, arrays: Any) -> Any:
    ranks = call.layout.ranks
    to_next = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
    return jax.tree.map(lambda x: lax.ppermute(x, call.axis_name, to_next), arrays)


def _at_step(call: Call, step: int, run: Callable[[list[Rectangle]], Callable[..., Any]], *arrays: Any) -> Any:
    """Runs a step of the ring with this rank's rectangles."""
    different, choice = _branches(call.layout, step, call.window)
    branches = [run(parts) for parts in different]
    if len(branches) == 1:
        return branches[0](*arrays)
    return lax.switch(jnp.asarray(choice)[lax.axis_index(call.axis_name)], branches, *arrays)


def _merged(state: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    """Blends two states (out, lse) in the accumulator's dtype; -inf has no weight."""
    lse = jnp.logaddexp(state[1], other[1])
    finite = jnp.where(jnp.isneginf(lse), 0, lse)

    def weighted(out: Any, part: Any) -> Any:
        return out.astype(lse.dtype) * jnp.exp(part - finite).swapaxes(1, 2)[..., None]

    return weighted(*state) + weighted(*other), lse


def _ring_states(call: Call, q: Any, k: Any, v: Any, sinks: Any) -> tuple[Any, Any]:
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    # A sink is the lse of a state whose out is 0.
    first = jnp.full(q.shape[2], -jnp.inf, wide) if sinks is None else sinks.astype(wide)
    lse = jnp.broadcast_to(first[:, None], (q.shape[0], q.shape[2], q.shape[1]))
    state = jnp.zeros((*q.shape[:3], v.shape[3]), wide), lse
    keys = k, v

    def run(parts: list[Rectangle]) -> Callable[..., Any]:
        def branch(state: Any, q: Any, keys: Any) -> Any:
            out, lse = state
            for part in parts:
                rows, (ks, vs) = slice(*part.q), (x[:, slice(*part.k)] for x in keys)
                one = _attention(q[:, rows], ks, vs, return_lse=True, **part.mask(call.window), **call.options)
                some = _merged((out[:, rows], lse[..., rows]), one)
                out, lse = out.at[:, rows].set(some[0]), lse.at[..., rows].set(some[1])
            return out, lse

        return branch

    for step in range(call.layout.ranks):
        arriving = _shifted(call, keys) if step < call.layout.ranks - 1 else keys
        state = _at_step(call, step, run, state, q, keys)
        keys = arriving
    return state[0].astype(q.dtype), state[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring_call(call: Call, q: Any, k: Any, v: Any, sinks: Any) -> tuple[Any, Any]:
    return _ring_states(call, q, k, v, sinks)


def _ring_and_keep(call: Call, q: Any, k: Any, v: Any, sinks: Any) -> tuple[Any, Any]:
    out, lse = _ring_states(call, q, k, v, sinks)
    return (out, lse), (q, k, v, sinks, out, lse)


def _ring_gradients(call: Call, residuals: tuple[Any, ...], cotangents: tuple[Any, Any]) -> tuple[Any, ...]:
    """Sends keys round the ring again, and the sums of their gradients behind them; memory does not grow with ranks."""
    q, k, v, sinks, out, lse = residuals
    dout, dlse = cotangents
    wide, ranks = lse.dtype, call.layout.ranks

    def run(parts: list[Rectangle]) -> Callable[..., Any]:
        def branch(sums: Any, keys: Any) -> Any:
            dq, dk, dv = sums
            for part in parts:
                rows, columns = slice(*part.q), slice(*part.k)
                some_k, some_v = (x[:, columns] for x in keys)
                grads = _gradients(call, part, q[:, rows], some_k, some_v, dout[:, rows], out[:, rows],
                                   lse[..., rows], dlse[..., rows])  # fmt: skip
                dq = dq.at[:, rows].add(grads[0].astype(wide))
                dk, dv = (x.at[:, columns].add(g.astype(wide)) for x, g in ((dk, grads[1]), (dv, grads[2])))
            return dq, dk, dv

        return branch

    keys, sums = (k, v), tuple(jnp.zeros(x.shape, wide) for x in (q, k, v))
    for step in range(ranks):
        arriving = _shifted(call, keys) if step < ranks - 1 else keys
        dq, *key_sums = _at_step(call, step, run, sums, keys)
        sums = dq, *_shifted(call, tuple(key_sums))
        keys = arriving
    grads = [x.astype(y.dtype) for x, y in zip(sums, (q, k, v), strict=True)]
    if sinks is None:
        return *grads, None
    score_gradient = dlse - (dout.astype(wide) * out.astype(wide)).sum(-1).swapaxes(1, 2)
    weights = jnp.exp(sinks.astype(wide)[:, None] - lse)
    return *grads, (weights * score_gradient).sum((0, 2)).astype(sinks.dtype)


def _gradients(
    call: Call, part: Rectangle, q: Any, k: Any, v: Any, dout: Any, out: Any, lse: Any, dlse: Any
) -> tuple[Any, ...]:
    """Returns dq, dk and dv of a rectangle, by the lse over all keys."""
    options = Options(call.softmax_scale, softcap=call.softcap, **part.mask(call.window))
    static = static_of(("q", "k", "v"), (q, k, v), options)
    named = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse[..., None], "dlse": dlse[..., None]}
    dq, dk, dv = backward.bind(*named.values(), static=static._replace(names=tuple(named)))
    return dq, dk, dv


_ring_call.defvjp(_ring_and_keep, _ring_gradients)


def _ring(call: Call, q: Any, k: Any, v: Any, sinks: Any, mods: dict[str, Any]) -> tuple[Any, Any]:
    out, lse = _ring_call(call, q, k, v, sinks)
    return out, lse


_SCHEMES = {"ring": _ring, "ulysses": _ulysses, "gather": _gather}
