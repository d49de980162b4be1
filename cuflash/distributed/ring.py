"""Scheme "ring": keys travel from rank to rank, and each rank adds its rows' attention over them (arXiv 2310.01889).

The rank's own keys need one call: order, and so a causal mask, is that of the local rows. Keys of other ranks need
dense rectangles, and under a causal mask with "zigzag" at most one for each rank. With functions, a bias or dropout,
which depend on positions, each rectangle of consecutive rows and keys is a call. States are float32. Gradients of keys
follow their keys one step behind, and reach their rank after a full turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.autograd import Function

from .. import backward, forward, merge_states
from ..frameworks.torch.ops import refuse_twice
from ..mods.tracing.trace import trace
from .exchange import Parcel, arrivals, start_shift
from .layout import Layout
from .rectangles import Range, Rectangle
from .scheme import LAYOUTS, Call, bounds_of
from .shapes import part_of_bias

# SMs that forward leaves to transfers of NCCL. One makes full calls claim their tiles, so that thread blocks which wait
# for the SMs of a transfer compute fewer. Backward claims tiles in any case.
SM_MARGIN = 1
MAX_HEAD_DIM_V = {2: 256, 4: 128, 8: 128}  # of accumulate=True on all GPUs, by the bytes of an element

Leaves = Sequence[tuple[str, torch.Tensor]]  # tensors beside q, k and v whose gradients are needed, by mod
_forward: Any = forward  # overloads do not take keywords of a dict
_backward: Any = backward


def ring(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) of a rank's rows."""
    leaves = _leaves(call)
    out, lse = _Ring.apply(call, [name for name, _ in leaves], q, k, v, *(x for _, x in leaves))
    return out, lse


def ring_gradients(call: Call, dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any) -> Any:
    """Returns dq, dk, dv, dbias and dsinks."""
    dq, dk, dv, grads = ring_backward(call, dout, dlse, q, k, v, out, lse, [*call.leaves.items()])
    of_names = dict(zip(call.leaves, grads, strict=True))
    return dq, dk, dv, of_names.get("bias"), of_names.get("sinks")


class _Ring(Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, names: list[str], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *tensors: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.call, (out, lse) = call, ring_forward(call, q, k, v)
        ctx.leaves = [*zip(names, tensors, strict=True)]  # functions find their arrays by identity
        # Mods are saved for their version alone: backward raises if they were changed in place.
        ctx.save_for_backward(q, k, v, out, lse, *_tensors(call))
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, *_ = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        grads = _RingGradients.apply(ctx.call, ctx.leaves, dout, dlse, q, k, v, out, lse, *(x for _, x in ctx.leaves))
        return None, None, *grads


class _RingGradients(Function):
    """Gradients as a Function, so that a second derivative is refused where it is taken."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, leaves: Leaves, dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *_: Any
    ) -> tuple[torch.Tensor, ...]:
        *grads, of_leaves = ring_backward(call, dout, dlse, q, k, v, out, lse, leaves)
        return *grads, *of_leaves

    backward = staticmethod(refuse_twice)


def _leaves(call: Call) -> Leaves:
    """Returns the tensors of mods that require gradients: bias, sinks, and those that score_mod refers to."""
    leaves: list[tuple[str, Any]] = [(name, call.mods[name]) for name in ("bias", "sinks") if name in call.mods]
    if (score_mod := call.mods.get("score_mod")) is not None:
        arrays = [each.array for each in trace(score_mod, "score_mod").arrays]
        leaves += [("score_mod", x) for x in {id(x): x for x in arrays}.values()]
    return [(name, x) for name, x in leaves if torch.is_tensor(x) and x.requires_grad]


def _tensors(call: Call) -> list[torch.Tensor]:
    """Returns all tensors of mods."""
    arrays = [call.mods[name] for name in ("bias", "sinks") if name in call.mods]
    for kind in ("score_mod", "mask_mod"):
        if kind in call.mods:
            arrays += [each.array for each in trace(call.mods[kind], kind).arrays]
    return [x for x in arrays if torch.is_tensor(x)]


def ring_forward(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) of a rank's rows over the keys of all ranks, outside of autograd."""
    ranks, options, sinks = call.layout.ranks, dict(call.options), call.mods.get("sinks")
    options.pop("deterministic", None)
    wide = _state_dtype(q)
    # A sink is the lse of a state whose out is 0. Without sinks, a first step over all rows writes the state.
    writes_state = sinks is None and _keeps_order(call)
    make = q.new_empty if writes_state else q.new_zeros
    margin, ahead = (SM_MARGIN, 2) if call.link.is_nccl(q) else (0, 1)
    for step, keys in enumerate(arrivals(Parcel.pack([_padded(call, k), _padded(call, v)]), call.link, ahead)):
        if step == 0:
            # Filled here, as the first transfer gets its SMs meanwhile. A kernel first would hold all for its duration.
            state = make((*q.shape[:3], v.shape[3]), dtype=wide), _first_lse(q, sinks)
        options["sm_margin"] = margin if step < ranks - 1 else 0
        if step == 0 and _keeps_order(call):
            (*local, out, lse), mask = _local(call, (q, k, v, *state))
            if writes_state:
                _forward(*local, out=out, lse=lse, out_dtype=wide, **mask, **options)
            else:
                _add((out, lse), local, **mask, **options)
            continue
        for part, _, more in _parts(call, (call.rank - step) % ranks, q.device):
            arrays = _rows(q, part.q), *(_rows(x, part.k) for x in keys.tensors)
            _add((_rows(state[0], part.q), _rows(state[1], part.q, 2)), arrays, **more, **options)
    return state[0].to(q.dtype), state[1]


def ring_backward(
    call: Call,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    leaves: Leaves = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Returns dq, dk, dv and the gradients of leaves, which are this rank's part of a sum over all ranks."""
    ranks, wide = call.layout.ranks, _state_dtype(q)
    options = call.backward_options | {"accumulate": True}
    first = Parcel.pack([_padded(call, k), _padded(call, v)])
    dq = torch.zeros_like(q, dtype=wide)
    grads = [torch.zeros_like(x, dtype=wide) for _, x in leaves]
    # Sums for a step's keys are still on their way from the rank before, so it adds to zeros, while others are sent.
    *sums_of_steps, received = (first.empty_like(wide) for _ in range(3))
    delta, waits = None, list[Callable[[], None]]()
    for step, keys in enumerate(arrivals(first, call.link)):
        new = sums_of_steps[step % 2]
        new.buffer.zero_()
        if step == 0 and _keeps_order(call):
            local_sums = (x[:, : k.shape[1]] for x in new.tensors)
            local, mask = _local(call, (dout, q, k, v, out, lse, dq, *local_sums, *(() if dlse is None else (dlse,))))
            (*arrays, dq_rows, dk_rows, dv_rows), some_dlse = local[:9], local[9] if dlse is not None else None
            *_, delta = _backward(*arrays, dlse=some_dlse, grads_out=(dq_rows, dk_rows, dv_rows), return_delta=True,
                                  **mask, **options)  # fmt: skip
            delta = delta.view(lse.shape)
        else:
            for part, key_rows, more in _parts(call, (call.rank - step) % ranks, q.device):
                some: dict[str, Any] = {"delta": delta, "dlse": dlse if delta is None else None}
                some = {name: _rows(x, part.q, 2) for name, x in some.items() if x is not None}
                captured = [
                    (x, total) if name == "score_mod" else (more[name], part_of_bias(total, slice(*part.q), key_rows))
                    for (name, x), total in zip(leaves, grads, strict=True)
                    if name != "sinks"
                ]
                some |= {"captured_grads": [x for x, _ in captured]} if captured else {}
                arrays = [_rows(dout, part.q), _rows(q, part.q), *(_rows(x, part.k) for x in keys.tensors)]
                arrays += _rows(out, part.q), _rows(lse, part.q, 2)
                targets = _rows(dq, part.q), *(_rows(x, part.k) for x in new.tensors)
                *_, sums = _backward(*arrays, grads_out=targets, **some, **more, **options)
                for (_, total), grad in zip(captured, sums if captured else (), strict=True):
                    total += grad
        total = new.buffer
        if step == ranks - 1:  # complete sums travel home, rounded as their owner would round them
            total = sums_of_steps[ranks % 2].buffer.view(k.dtype)[: total.numel()]
        if step:
            waits[-1]()
            torch.add(new.buffer, received.buffer, out=total)
        elif ranks == 1:
            total.copy_(new.buffer)
        if step < ranks - 1:
            waits.append(start_shift(total, received.buffer, call.link))
    # Each to memory of its own, as a caller may keep or change one of them.
    home = [torch.empty_like(x) for x in first.tensors]
    for wait in [
        start_shift(part, x.view(-1), call.link)
        for part, x in zip(total.split_with_sizes([x.numel() for x in home]), home, strict=True)
    ]:
        wait()
    dk, dv = (x if x.shape[1] == k.shape[1] else x[:, : k.shape[1]].clone() for x in home)
    of_leaves = [
        _sinks_gradient(dout, dlse, out, lse, x) if name == "sinks" else total.to(x.dtype)
        for (name, x), total in zip(leaves, grads, strict=True)
    ]
    return dq.to(q.dtype), dk, dv, of_leaves


def _parts(call: Call, source: int, device: torch.device) -> Iterator[tuple[Rectangle, slice, dict[str, Any]]]:
    """Yields the rectangles of this rank's rows and another rank's keys; their keys' rows of the whole sequence where
    weights depend on them; and keywords of mask and mods, without sinks."""
    for part, mask in call.rectangles(source):
        if not call.has_indices:
            yield part, slice(0), mask
            continue
        begin, end = call.layout.cu_seqlens[part.document : part.document + 2]
        key_rows = slice(begin + part.k_index, begin + part.k_index + part.k[1] - part.k[0])
        mods = call.mods_of(slice(*part.q), key_rows, end - begin, device)
        yield part, key_rows, mask | {name: x for name, x in mods.items() if name != "sinks"}


def _rows(x: torch.Tensor, bounds: Range, axis: int = 1) -> torch.Tensor:
    """Returns some rows: x itself for all, as a view takes 2 µs."""
    begin, end = bounds
    return x if end - begin == x.shape[axis] else x.narrow(axis, begin, end - begin)


def _add(state: tuple[torch.Tensor, torch.Tensor], arrays: Sequence[torch.Tensor], **keywords: Any) -> None:
    """Adds keys and values, of q, k and v, to the state of the queries, in place."""
    v = arrays[2]
    if v.shape[-1] <= MAX_HEAD_DIM_V[v.element_size()]:
        _forward(*arrays, out=state[0], lse=state[1], accumulate=True, **keywords)
        return
    out, lse = _forward(*arrays, out_dtype=state[0].dtype, return_lse=True, **keywords)
    for target, merged in zip(state, merge_states((state[0], out), (state[1], lse)), strict=True):
        target.copy_(merged)


def _state_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _padded(call: Call, x: torch.Tensor) -> torch.Tensor:
    """Returns keys or values with the rows of the rank that has most, as all ranks send equal shapes."""
    missing = max(call.layout.rows) - x.shape[1]
    return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x


def _local_mask(call: Call, device: torch.device) -> dict[str, Any]:
    """Returns the keywords of a call over the rank's own rows and keys."""
    causal = {"causal": call.window.right == 0}
    if not call.layout.is_packed:
        return causal
    return causal | _local_documents(call.layout, call.rank, device)


@lru_cache(LAYOUTS)
def _local_documents(layout: Layout, rank: int, device: torch.device) -> dict[str, Any]:
    """Returns the keywords of the documents among a rank's rows as packed sequences."""
    bounds = layout.local_bounds(rank)
    return bounds_of(bounds, device, "q") | bounds_of(bounds, device, "k")


def _local(call: Call, arrays: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Returns the arrays and the keywords of a call over the rank's own rows and keys. Packed rows have no batch."""
    return [x[0] for x in arrays] if call.layout.is_packed else [*arrays], _local_mask(call, arrays[0].device)


def _keeps_order(call: Call) -> bool:
    """True if only the order of positions matters, which a rank's rows keep, and neither distances nor indices."""
    return call.window.left is None and call.window.right in (None, 0) and not call.has_indices


def _first_lse(q: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Returns the lse of the state before the first key."""
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=_state_dtype(q))
    return lse if sinks is None else lse.copy_(sinks[:, None])


def _sinks_gradient(
    dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """Returns the gradient of the sinks by a rank's rows: the weight of the sink times the gradient of its score."""
    wide = lse.dtype
    score_gradient = -(dout.to(wide) * out.to(wide)).sum(-1).transpose(1, 2)
    if dlse is not None:
        score_gradient += dlse
    weights = (sinks.to(wide)[:, None] - lse).exp()
    return (weights * score_gradient).sum((0, 2)).to(sinks.dtype)
