"""Scheme "gather": each rank fetches the keys that its rows see, and no others; then it computes its rows."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.autograd import Function

from .. import backward
from ..frameworks.torch import attention
from .assembly import Assembly, Run
from .exchange import exchange
from .layout import Layout
from .rectangles import Piece, Range, Window, needed_keys, pieces_of
from .scheme import LAYOUTS, Call, bounds_of
from .shapes import part_of_bias

_backward: Any = backward  # overloads do not take keywords of a dict


class Fetch(NamedTuple):
    """Rows that a rank sends and receives, and the keys of its pieces out of received and local rows.

    send, receive: numbers of rows for and from each other rank. sent: its local rows, in the order of ranks. ordered:
    needed rows in the order of the sequence. starts: the first of each piece's keys among them. packed: the keys of one
    piece after the other, None if the pieces cannot be packed sequences of one call. bounds: their keywords.
    """

    send: list[int]
    receive: list[int]
    sent: Assembly
    pieces: list[Piece]
    ordered: Assembly
    starts: list[int]
    packed: Assembly | None
    bounds: dict[str, Any]


def gather(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) of a rank's rows."""
    fetch, assembly, is_one_call = _plan(call, q)
    k, v = (_Keys.apply(x, call, fetch, assembly) for x in (k, v))
    if is_one_call:
        window = call.window.left, call.window.right
        out, lse = attention(q[0], k[0], v[0], window_size=window, return_lse=True, **fetch.bounds, **call.options,
                             **call.mods)  # fmt: skip
        return out[None], lse[None]
    results = []
    for rows, keys, _, keywords in _parts(call, fetch, q.device):
        results.append(attention(q[:, rows], k[:, keys], v[:, keys], return_lse=True, **call.options, **keywords))
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, 1), torch.cat(lses, 2)


def gather_gradients(call: Call, dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any) -> Any:
    """Returns dq, dk, dv, dbias and dsinks; the latter is this rank's part of a sum. Keys are fetched again."""
    fetch, assembly, is_one_call = _plan(call, q)
    k, v = (_fetched(x, call, fetch, assembly) for x in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    if is_one_call:
        packed = [x[0] for x in (dout, q, k, v, out, lse)]
        *results, sums = _backward(*packed, dlse=None if dlse is None else dlse[0], window_size=tuple(call.window),
                                   captured_grads=[*call.leaves.values()], **fetch.bounds, **call.backward_options,
                                   **call.mods)  # fmt: skip
        dq, dk, dv = (x[None] for x in results)
        grads = dict(zip(call.leaves, sums, strict=True))
    else:
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        grads = {name: torch.zeros_like(x, dtype=wide) for name, x in call.leaves.items()}
        for rows, keys, columns, keywords in _parts(call, fetch, q.device):
            captured = [keywords[name] for name in grads]
            *results, sums = _backward(dout[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse[..., rows],
                                       dlse=None if dlse is None else dlse[..., rows], captured_grads=captured,
                                       **call.backward_options, **keywords)  # fmt: skip
            dq[:, rows] = results[0]
            dk[:, keys] += results[1]
            dv[:, keys] += results[2]
            for (name, total), part in zip(grads.items(), sums, strict=True):
                (total if name == "sinks" else part_of_bias(total, rows, columns)).add_(part)
    dk, dv = (_returned(x, call, fetch, assembly).to(q.dtype) for x in (dk, dv))
    grads = {name: total.to(call.leaves[name].dtype) for name, total in grads.items()}
    return dq, dk, dv, grads.get("bias"), grads.get("sinks")


def _parts(call: Call, fetch: Fetch, device: torch.device) -> Iterator[tuple[slice, slice, slice, dict[str, Any]]]:
    """Yields the rows, the fetched keys and the keys of the sequence of each piece; and keywords of mask and mods."""
    for piece, start in zip(fetch.pieces, fetch.starts, strict=True):
        rows, columns = slice(*piece.local), slice(*piece.keys)
        keys = slice(start, start + columns.stop - columns.start)
        mods = call.mods_of(rows, columns, piece.seqlen, device)
        mask = {"window_size": tuple(call.window), "diagonal_offset": piece.q_index - piece.k_index}
        yield rows, keys, columns, mask | mods | {"index_offsets": piece.index_offsets}


def _plan(call: Call, q: torch.Tensor) -> tuple[Fetch, Assembly, bool]:
    """Returns the rows to fetch, their order, and True if all pieces are computed in one call."""
    fetch = _fetch(call.layout, call.rank, call.window, q.device)
    if fetch.packed is None or q.shape[0] != 1 or call.has_indices:
        return fetch, fetch.ordered, False
    return fetch, fetch.packed, True


def _fetched(x: torch.Tensor, call: Call, fetch: Fetch, assembly: Assembly) -> torch.Tensor:
    """Returns keys or values out of this rank's rows and those of others."""
    local = x.transpose(0, 1)
    return assembly.take(
        exchange(fetch.sent.take(local, local[:0]), fetch.send, fetch.receive, call.link), local
    ).transpose(0, 1)


def _returned(grad: torch.Tensor, call: Call, fetch: Fetch, assembly: Assembly) -> torch.Tensor:
    """Returns the gradient of this rank's rows, in float32 at least, from those of the keys of all ranks."""
    received, local = assembly.sum(grad.transpose(0, 1))
    wide = received.to(torch.promote_types(grad.dtype, torch.float32))  # on all ranks: not each of them adds up
    of_others = exchange(wide, fetch.receive, fetch.send, call.link)
    total, _ = fetch.sent.sum(of_others)
    return (total + local).transpose(0, 1)


class _Keys(Function):
    """`_fetched` with a gradient that is rounded once, and has one of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        ctx.arguments = arguments
        return _fetched(x, *arguments)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _KeysGradient.apply(grad, *ctx.arguments), None, None, None


class _KeysGradient(Function):
    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, *arguments: Any) -> torch.Tensor:
        ctx.arguments = arguments
        return _returned(grad, *arguments).to(grad.dtype, copy=True)  # a view may not be changed in place

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _Keys.apply(grad, *ctx.arguments), None, None, None


@lru_cache(LAYOUTS)
def _fetch(layout: Layout, rank: int, window: Window, device: torch.device) -> Fetch:
    needed = [needed_keys(layout, each, window) for each in range(layout.ranks)]

    lasts = [[end for _, end in ranges] for ranges in needed]

    def held(receiver: int, sender: int) -> list[tuple[Range, int]]:
        """Returns the ranges of needed rows that a rank sends to another, and the first local row of each."""
        ranges = []
        for span in layout.spans[sender]:
            for number in range(bisect_right(lasts[receiver], span.begin), len(needed[receiver])):
                begin, end = needed[receiver][number]
                if begin >= span.end:
                    break
                a, b = max(begin, span.begin), min(end, span.end)
                ranges.append(((a, b), a - span.begin + span.local))
        return ranges

    ranks = range(layout.ranks)
    give = [held(each, rank) if each != rank else [] for each in ranks]
    take = [held(rank, each) if each != rank else [] for each in ranks]
    send, receive = ([sum(b - a for (a, b), _ in ranges) for ranges in each] for each in (give, take))
    sent = Assembly([Run(0, first, b - a) for each in give for (a, b), first in each], (layout.rows[rank], 0), None)
    of_others = [bounds for each in take for bounds, _ in each]
    rows = [((span.begin, span.end), Run(1, span.local, span.size)) for span in layout.spans[rank]]
    rows += [(each, Run(0, *run)) for each, run in zip(of_others, _consecutive(of_others), strict=True)]
    rows, sizes = sorted(rows), (sum(receive), layout.rows[rank])
    pieces = pieces_of(layout, rank, window) or [Piece((0, 0), (0, 0), 0, 0, True)]  # a rank without rows
    keys, fetched = [piece.keys for piece in pieces], needed[rank] or [(0, 0)]
    starts, bounds = [], _consecutive(fetched)
    for begin, _ in keys:
        number = bisect_right(fetched, (begin, layout.seqlen)) - 1
        starts.append(bounds[number][0] + begin - fetched[number][0])
    packed: Assembly | None = None
    keywords: dict[str, Any] = {}
    # Diagonals of packed sequences end at their last keys.
    if len(pieces) > 1 and (window.is_open or all(piece.ends_with_keys for piece in pieces)):
        packed = Assembly.of_ranges(keys, rows, sizes, device)
        for name, ranges in (("q", [piece.local for piece in pieces]), ("k", keys)):
            keywords |= bounds_of((0, *(first + size for first, size in _consecutive(ranges))), device, name)
    ordered = Assembly.of_ranges(needed[rank], rows, sizes, device)
    return Fetch(send, receive, sent, pieces, ordered, starts, packed, keywords)


def _consecutive(ranges: list[Range]) -> list[tuple[int, int]]:
    """Returns where each range begins if one follows the other, and its length."""
    lengths = [end - begin for begin, end in ranges]
    return [*zip(itertools.accumulate(lengths, initial=0), lengths, strict=False)]
