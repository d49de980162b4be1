"""What own_scores times: the calls of a row, ours and those of peers, and how long they take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import cuflash
from cuflash import mods

BATCH, WINDOW, PREFIX, CAP = 4, 1024, 1024, 30.0
Call = Callable[[], Any]
OPS = ("forward", "backward")
LEAST_SPAN = 8e-3  # seconds between two events: several calls, so that the host prepares one while another runs


class Row(NamedTuple):
    """What is timed."""

    kind: str
    heads: tuple[int, int]
    dim: int
    seqlen: int
    op: str

    @property
    def name(self) -> str:
        """How a line begins."""
        return f"{self.op[:3]} {self.kind:16} h{self.heads[0]}/{self.heads[1]:<2} d{self.dim:<3} {self.seqlen:5}"


class Kind(NamedTuple):
    """How ours is called and, with another mask_mod and score_mod, Flex. plain: the keywords of a plain call.

    mask: our mask_mod, for a block mask. cudnn: whether cuDNN can do it.
    """

    ours: dict[str, Any]
    plain: dict[str, Any]
    mask: Any = None
    flex_score: Any = None
    flex_mask: Any = None
    sinks: Any = None
    cudnn: bool = False


def kind_of(name: str, heads: int, seqlen: int) -> Kind:
    """The calls of a row."""
    slopes = torch.exp2(-8.0 * torch.arange(1, heads + 1, device="cuda") / heads)
    bounds = torch.tensor([0, seqlen // 8, seqlen // 2, 3 * seqlen // 4, seqlen], dtype=torch.int32, device="cuda")
    numbers = torch.bucketize(torch.arange(seqlen, device="cuda", dtype=torch.int32), bounds[1:], right=True)

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    def window(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (q - k <= WINDOW)

    def documents(b: Any, h: Any, q: Any, k: Any) -> Any:
        return numbers[q] == numbers[k]

    def causal_documents(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (numbers[q] == numbers[k]) & (q >= k)

    def prefix(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k < PREFIX) | (q >= k)

    def alibi(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score - slopes[h] * (q - k)

    def capped(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return CAP * torch.tanh(score / CAP)

    yes, no = {"causal": True}, {}
    sinks = torch.linspace(-1.0, 2.0, heads, device="cuda")
    document = mods.document(bounds)
    return {
        "none": lambda: Kind(no, no, cudnn=True),
        "causal": lambda: Kind(yes, yes, flex_mask=causal, cudnn=True),
        "window": lambda: Kind({"window_size": (WINDOW, 0)}, yes, flex_mask=window),
        "alibi": lambda: Kind({"score_mod": mods.alibi(slopes), **yes}, yes, None, alibi, causal),
        "softcap": lambda: Kind({"score_mod": mods.softcap(CAP), **yes}, {"softcap": CAP, **yes}, None, capped, causal),
        "documents": lambda: Kind({}, no, document, flex_mask=documents),
        "causal_documents": lambda: Kind(yes, yes, document, flex_mask=causal_documents),
        "prefix": lambda: Kind({}, yes, mods.prefix_lm(PREFIX), flex_mask=prefix),
        "sinks": lambda: Kind({"sinks": sinks, **yes}, yes, None, None, causal, sinks),
    }[name]()


KINDS = ("none", "causal", "window", "alibi", "softcap", "documents", "causal_documents", "prefix", "sinks")


# Timing.


def spans(calls: dict[str, Call], seconds: float) -> dict[str, float]:
    """Milliseconds of each call: medians of spans, which take turns."""
    times = {}
    for name, call in calls.items():
        for _ in range(2):
            call()
        times[name] = max(1, math.ceil(LEAST_SPAN / max(_span(call, 3), 1e-6)))
    found: dict[str, list[float]] = {name: [] for name in calls}
    started, turns = time.perf_counter(), 0
    while turns < 5 or (time.perf_counter() - started < seconds * len(calls) and turns < 200):
        turns += 1
        for name in calls if turns % 2 else reversed(calls):
            found[name].append(_span(calls[name], times[name]))
    return {name: median(each) * 1e3 for name, each in found.items()}


def _span(call: Call, times: int) -> float:
    """Seconds of a call."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize()
    marks[0].record()
    for _ in range(times):
        call()
    marks[1].record()
    torch.cuda.synchronize()
    return float(marks[0].elapsed_time(marks[1])) * 1e-3 / times


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:160]


# The calls of a row.


def arrays_of(row: Row) -> list[Any]:
    """q, k, v and dout, (batch, seqlen, heads, dim)."""
    torch.manual_seed(0)
    counts = (row.heads[0], row.heads[1], row.heads[1], row.heads[0])
    shapes = [(BATCH, row.seqlen, heads, row.dim) for heads in counts]
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def ours(arrays: list[Any], op: str, keywords: dict[str, Any]) -> tuple[Call, Any]:
    """A call of ours, and out."""
    q, k, v, dout = arrays
    out, lse = cuflash.forward(q, k, v, return_lse=True, **keywords)
    if op == "forward":
        return partial(cuflash.forward, q, k, v, **keywords), out
    return partial(cuflash.backward, dout, q, k, v, out, lse, **keywords), out


def peer(arrays: list[Any], op: str, attend: Callable[..., Any]) -> tuple[Call, Any]:
    """A call of a peer that takes (batch, heads, seqlen, dim), and out in our layout."""
    q, k, v, dout = (x.transpose(1, 2).contiguous() for x in arrays)
    if op == "forward":
        with torch.no_grad():
            out = attend(q, k, v)

        def forward() -> Any:
            with torch.no_grad():
                return attend(q, k, v)

        return forward, out.transpose(1, 2)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    return partial(torch.autograd.grad, out, leaves, dout, retain_graph=True), out.detach().transpose(1, 2)


def flex_of(row: Row, kind: Kind, backend: str) -> Callable[..., Any]:
    """flex_attention, compiled for one row."""
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    lengths = row.seqlen, row.seqlen
    blocks = create_block_mask(kind.flex_mask, None, None, *lengths, device="cuda") if kind.flex_mask else None
    options: dict[str, Any] = {"kernel_options": {"BACKEND": backend}} if backend else {}
    options |= {"enable_gqa": row.heads[0] != row.heads[1], "score_mod": kind.flex_score, "block_mask": blocks}
    if kind.sinks is None:
        return partial(compiled, **options)

    def attend(q: Any, k: Any, v: Any) -> Any:
        out, found = compiled(q, k, v, return_aux=AuxRequest(lse=True), **options)
        lse = found.lse
        return out * torch.sigmoid(lse - kind.sinks[:, None])[..., None].to(out.dtype)

    return attend


def cudnn_of(row: Row, kind: Kind) -> Callable[..., Any]:
    def attend(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            causal, grouped = bool(kind.plain), row.heads[0] != row.heads[1]
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    return attend


def calls_of(row: Row, alone: bool) -> tuple[dict[str, Call], list[str]]:
    """The calls by name, and what went wrong. alone: ours alone."""
    kind, arrays = kind_of(row.kind, row.heads[0], row.seqlen), arrays_of(row)
    keywords = dict(kind.ours)
    makers: dict[str, Callable[[], tuple[Call, Any]]] = {}
    if kind.mask is not None:
        keywords["block_mask"] = cuflash.create_block_mask(kind.mask, 1, 1, row.seqlen, row.seqlen, like=arrays[0])
        makers["alone"] = lambda: ours(arrays, row.op, {**kind.ours, "mask_mod": kind.mask})
    makers = {"ours": lambda: ours(arrays, row.op, keywords), **makers}
    if kind.plain != kind.ours or kind.mask is not None:
        makers["plain"] = lambda: ours(arrays, row.op, kind.plain)
    if not alone:
        makers["flex"] = lambda: peer(arrays, row.op, flex_of(row, kind, ""))
        if find_spec("flash_attn") and find_spec("flash_attn.cute"):
            makers["flash"] = lambda: peer(arrays, row.op, flex_of(row, kind, "FLASH"))
        if kind.cudnn:
            makers["cudnn"] = lambda: peer(arrays, row.op, cudnn_of(row, kind))
    calls, notes, wanted = {}, [], None
    for name, make in makers.items():
        try:
            calls[name], out = make()
            calls[name]()
            torch.cuda.synchronize()
        except Exception as error:  # The others still have something to tell.
            calls.pop(name, None)
            notes.append(f"{name}: {first_line(error)}")
            continue
        if name == "ours":
            wanted = out.float()
        elif name != "plain" and wanted is not None:
            apart = float((out.float() - wanted).abs().max())
            if not apart < 0.05:
                notes.append(f"{name} DIFFERS by {apart:.3g}")
    return calls, notes
