"""Calls that `.ci/versus.py` times: "before" and "after", by the two versions, alternating with others.

Cells of `speed` have these two only. Cells of `varlen` have packed sequences of one length, beside an equal dense call.
Cells of `mods` have score_mod, mask_mod, bias or sinks, beside a plain call. With --peers they also have PyTorch's
flex_attention by Triton ("flex") and by FlashAttention-4 if installed ("flash"), cuDNN and SDPA.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import product
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import versus_checks as checks

if TYPE_CHECKING:
    from versus_calls import Speed

Call = Callable[[], Any]
Calls = dict[str, Call]
SHORT = {"forward": "fwd", "backward": "bwd", "deterministic": "det"}
SHORT |= {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
SHOWN = {"causal": "causal", "window_size": "window", "softcap": "capped"}
OPS = ("forward", "backward")


class Cell(NamedTuple):
    """A group of calls that are timed alternately. make: returns the calls. mods: the row of `MODS`, if any."""

    group: str
    trial: checks.Trial
    make: Callable[[Speed, Cell], Calls]
    mods: str = ""
    captures: bool = True

    @property
    def name(self) -> str:
        """A short unique name."""
        trial = self.trial
        lengths, heads, dims = ("/".join(map(str, dict.fromkeys(n))) for n in (trial.seqlens, trial.heads, trial.dims))
        op = "deterministic" if trial.deterministic else trial.op
        words = [SHORT[op], SHORT[trial.dtype], f"{trial.batch}x{lengths}", f"h{heads}", f"d{dims}"]
        shown = [SHOWN[name] for name, value in trial.arguments.items() if value]
        return " ".join((*words, *shown, *[self.mods] * bool(self.mods)))


def of_version(version: ModuleType, arrays: list[Any], op: str, keywords: Any, **more: Any) -> tuple[Call, Any]:
    """Returns a call of a version, and out. more: keywords of backward alone."""
    q, k, v, dout = arrays
    out, lse = version.forward(q, k, v, return_lse=True, **keywords)
    if op == "forward":
        return partial(version.forward, q, k, v, **keywords), out
    return partial(version.backward, dout, q, k, v, out, lse, **keywords, **more), out


# Dense calls.


def dense_calls(speed: Speed, cell: Cell) -> Calls:
    """Returns the call of each version. Both read the same arrays, and forward writes to the same `out`."""
    (q, k, v, dout), trial = speed.arrays(cell.trial), cell.trial
    out, lse = speed.versions["before"].forward(q, k, v, return_lse=True, **trial.arguments)
    if trial.op == "forward":
        return {when: partial(x.forward, q, k, v, out=out, **trial.arguments) for when, x in speed.versions.items()}
    keywords = trial.keywords
    return {when: partial(x.backward, dout, q, k, v, out, lse, **keywords) for when, x in speed.versions.items()}


def dense_cells() -> list[Cell]:
    """Returns dense calls, by default with 16384 tokens and 2048 columns, as in the README."""
    cells: list[Cell] = []

    def add(group: str, ops: str, keys: int, *dims: int, queries: int = 0, batch: int = 0,
            heads: tuple[int, ...] = (), dtype: str = "bfloat16", **arguments: Any) -> None:  # fmt: skip
        heads, shape = heads or (2048 // dims[0],), (batch or 16384 // keys, (queries or keys, keys))
        for op in ops.split():
            name, ordered = ("forward" if op == "forward" else "backward"), op == "deterministic"
            trial = checks.Trial(name, dtype, *shape, (heads[0], heads[-1]), (dims[0], dims[-1]), arguments, ordered)
            cells.append(Cell(group, trial, dense_calls))

    for op, d, causal, n in product(list(SHORT)[:3], (64, 128, 256), (False, True), (512, 1024, 4096, 8192, 16384)):
        add(f"README {op}", op, n, d, causal=causal)
    for batch, heads, (queries, n) in product((1, 16), ((32, 8), (32, 32)), ((1, 4096), (1, 32768), (8, 8192))):
        add("decode", "forward", n, 128, queries=queries, batch=batch, heads=heads, causal=True)
    add("small", "forward backward deterministic", 256, 128, batch=1, heads=(4,), causal=True)
    add("small", "forward backward deterministic", 128, 64, batch=4, heads=(8,))
    for d in (64, 128, 256):
        add("capped", "forward backward", 4096, d, causal=True, softcap=30.0)
    add("float32", "forward backward", 8192, 64, batch=1, heads=(16,), dtype="float32")
    add("float16", "forward backward", 4096, 128, dtype="float16", causal=True)
    add("window", "forward backward", 8192, 128, causal=True, window_size=(1023, 0))
    add("grouped", "forward backward", 4096, 128, heads=(32, 8), causal=True)
    for dims in ((96,), (192,), (192, 128), (40,)):
        add("head dims", "forward backward", 4096, *dims, causal=True)
    return cells


# Variable-length sequences.

TOKENS = 16384
# Head dim, query heads, kv heads.
SHAPES = ((64, 32, 32), (64, 16, 16), (96, 16, 16), (128, 16, 16), (128, 32, 8), (192, 16, 16), (256, 8, 8))


def varlen_calls(speed: Speed, cell: Cell) -> Calls:
    """Returns a packed call of each version and the dense call, after comparing the bits of their forward."""
    trial, arrays, seqlen = cell.trial, speed.arrays(cell.trial), cell.trial.seqlens[0]
    packed = [x.reshape(-1, *x.shape[2:]) for x in arrays]
    bounds = speed.put(np.arange(0, trial.batch * seqlen + 1, seqlen, dtype=np.int32))
    lengths = {f"cu_seqlens_{side}": bounds for side in "qk"} | {f"max_seqlen_{side}": seqlen for side in "qk"}
    keywords = trial.arguments | lengths
    calls = {when: of_version(version, packed, trial.op, keywords) for when, version in speed.versions.items()}
    calls["dense"] = of_version(speed.versions["after"], arrays, trial.op, trial.arguments)
    result, expected = (speed.host(calls[name][1]) for name in ("after", "dense"))
    if not checks.same_bits(result.reshape(expected.shape), expected):
        raise RuntimeError("the packed call gives other bits than the dense one")
    return {name: call for name, (call, _) in calls.items()}


def varlen_cells() -> list[Cell]:
    """Returns calls on sequences of one length, 16k tokens in float16."""
    cells = []
    for op, (dim, *heads), seqlen, causal in product(OPS, SHAPES, (512, 1024, 2048, 8192), (False, True)):
        shape = TOKENS // seqlen, (seqlen, seqlen), tuple(heads), (dim, dim)
        cells.append(Cell(f"varlen {op}", checks.Trial(op, "float16", *shape, {"causal": causal}), varlen_calls))
    return cells


# Calls with mods.

WINDOW, PREFIX, CAP = 1024, 1024, 30.0


class Mods(NamedTuple):
    """Keywords of our call and of a plain call, our mask_mod for a block mask, and the functions for Flex."""

    ours: dict[str, Any]
    plain: dict[str, Any]
    mask_mod: Any = None
    flex_mask: Any = None
    flex_score: Any = None


MODS = ("none", "causal", "window", "alibi", "softcap", "documents", "causal_documents", "prefix", "sinks")


def mods_of(name: str, version: ModuleType, speed: Speed, heads: int, seqlen: int) -> Mods:
    """Returns a row of `MODS` for one version."""
    mods, yes, no = version.mods, {"causal": True}, {}
    slopes = speed.put(np.exp2(-8.0 * np.arange(1, heads + 1) / heads).astype(np.float32))
    sinks = speed.put(np.linspace(-1.0, 2.0, heads, dtype=np.float32))
    bounds = np.array([0, seqlen // 8, seqlen // 2, 3 * seqlen // 4, seqlen], np.int32)
    numbers = speed.put(np.repeat(np.arange(4, dtype=np.int32), np.diff(bounds)))
    document, tanh = mods.document(speed.put(bounds)), speed.torch and speed.torch.tanh

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    return {
        "none": Mods(no, no),
        "causal": Mods(yes, yes, None, causal),
        "window": Mods({"window_size": (WINDOW, 0)}, yes, None, lambda b, h, q, k: (q >= k) & (q - k <= WINDOW)),
        "alibi": Mods({"score_mod": mods.alibi(slopes), **yes}, yes, None, causal,
                      lambda score, b, h, q, k: score - slopes[h] * (q - k)),
        "softcap": Mods({"score_mod": mods.softcap(CAP), **yes}, {"softcap": CAP, **yes}, None, causal,
                        lambda score, b, h, q, k: CAP * tanh(score / CAP)),
        "documents": Mods(no, no, document, lambda b, h, q, k: numbers[q] == numbers[k]),
        "causal_documents": Mods(yes, yes, document, lambda b, h, q, k: (numbers[q] == numbers[k]) & (q >= k)),
        "prefix": Mods(no, yes, mods.prefix_lm(PREFIX), lambda b, h, q, k: (k < PREFIX) | (q >= k)),
        "sinks": Mods({"sinks": sinks, **yes}, yes, None, causal),
    }[name]  # fmt: skip


def mod_calls(speed: Speed, cell: Cell) -> Calls:
    """Returns calls with mods. A mask_mod has a prebuilt block mask, as in Flex; "mask_mod" builds it in each call."""
    trial, arrays, seqlen = cell.trial, speed.arrays(cell.trial), cell.trial.seqlens[0]
    grouped, after = trial.heads[0] != trial.heads[1], speed.versions["after"]

    def ours(version: ModuleType, way: str = "block_mask") -> tuple[Call, Any]:
        row = mods_of(cell.mods, version, speed, trial.heads[0], seqlen)
        if way == "plain":
            return of_version(version, arrays, trial.op, row.plain)
        mask = row.mask_mod
        if mask and way == "block_mask":
            mask = version.create_block_mask(mask, 1, 1, seqlen, seqlen, like=arrays[0])
        return of_version(version, arrays, trial.op, row.ours | ({way: mask} if mask else {}))

    row = mods_of(cell.mods, after, speed, trial.heads[0], seqlen)
    makers = {when: partial(ours, version) for when, version in speed.versions.items()}
    if row.mask_mod:
        makers["mask_mod"] = partial(ours, after, "mask_mod")
    if row.mask_mod or row.plain != row.ours:
        makers["plain"] = partial(ours, after, "plain")
    if speed.torch:
        makers["flex"] = lambda: peer(arrays, trial.op, flex(row, seqlen, grouped))
        if find_spec("flash_attn") and find_spec("flash_attn.cute"):
            by_flash = {"kernel_options": {"BACKEND": "FLASH"}}
            makers["flash"] = lambda: peer(arrays, trial.op, flex(row, seqlen, grouped, **by_flash))
        if cell.mods in ("none", "causal"):
            cudnn = sdpa("CUDNN_ATTENTION", is_causal=cell.mods == "causal", enable_gqa=grouped)
            makers["cuDNN"] = lambda: peer(arrays, trial.op, cudnn)
    return speed.working(makers)


def pair_bias_calls(speed: Speed, cell: Cell) -> Calls:
    """Returns calls along the rows of pairs, which share a bias; backward also computes its gradient."""
    trial, arrays, seqlen = cell.trial, speed.arrays(cell.trial), cell.trial.seqlens[0]
    bias, after = speed.array((1, trial.heads[0], seqlen, seqlen), trial.dtype, 4), speed.versions["after"]
    ours = partial(of_version, arrays=arrays, op=trial.op)
    with_bias = partial(ours, keywords={"bias": bias})
    makers = {when: partial(with_bias, version, captured_grads=(bias,)) for when, version in speed.versions.items()}
    makers["plain"] = partial(ours, after, keywords={})
    if trial.op == "backward":
        makers["without dbias"] = partial(with_bias, after)
    if speed.torch:
        makers["efficient"] = lambda: peer(arrays, trial.op, sdpa("EFFICIENT_ATTENTION"), bias)
    return speed.working(makers)


def block_mask_calls(speed: Speed, cell: Cell) -> Calls:
    """Returns calls that build a block mask of causal documents."""
    (q, *_), seqlen = speed.arrays(cell.trial), cell.trial.seqlens[0]

    def ours(version: ModuleType) -> tuple[Call, Any]:
        mask_mod = version.mods.and_masks(version.mods.causal, mods_of("documents", version, speed, 1, seqlen).mask_mod)
        return partial(version.create_block_mask, mask_mod, 1, 1, seqlen, seqlen, like=q), None

    makers = {when: partial(ours, version) for when, version in speed.versions.items()}
    if speed.torch:
        from torch.nn.attention.flex_attention import create_block_mask

        arguments = mods_of("causal_documents", speed.versions["after"], speed, 1, seqlen).flex_mask, None, None
        for name, make in (("flex, compiled", speed.torch.compile(create_block_mask)), ("flex", create_block_mask)):
            call = partial(make, *arguments, seqlen, seqlen, device="cuda")
            makers[name] = lambda call=call: (call, None)
    return speed.working(makers)


def new_function_calls(speed: Speed, cell: Cell) -> Calls:
    """Returns calls with a new score_mod each time, and with one whose kernels are in the cache on disk."""
    arrays, op, after = speed.arrays(cell.trial), cell.trial.op, speed.versions["after"]
    q, k, v, dout = arrays
    inputs = (q, k, v) if op == "forward" else (dout, q, k, v, *after.forward(q, k, v, return_lse=True))

    def new(number: float) -> Any:
        return lambda score, b, h, q, k: score * number + (q - k) * 0.01

    def ours(version: ModuleType, number: float = 0.0) -> None:
        getattr(version, op)(*inputs, score_mod=new(number or random.random()))

    def from_disk() -> None:
        from cuflash.runtime import compiler
        from cuflash.runtime.call import CALL_CACHE

        compiler._kernels.clear()
        CALL_CACHE.clear()
        ours(after, 0.7)

    def by_flex() -> None:
        peer(arrays, op, flex(Mods({}, {}, flex_score=new(random.random())), cell.trial.seqlens[0], False))[0]()

    calls = {when: partial(ours, version) for when, version in speed.versions.items()} | {"from disk": from_disk}
    return calls | ({"flex": by_flex} if speed.torch else {})


def mods_cells() -> list[Cell]:
    """Returns calls with mods in bfloat16, then pair bias, block masks and new functions."""
    cells: list[Cell] = []

    def add(group: str, make: Any, mods: str, op: str, batch: int, n: int, heads: Any, d: int, **more: Any) -> None:
        trial = checks.Trial(op, "bfloat16", batch, (n, n), heads, (d, d), {})
        cells.append(Cell(group, trial, make, mods, **more))

    for op, dim, seqlen, heads, name in product(OPS, (64, 128), (2048, 8192), ((16, 16), (16, 4)), MODS):
        add(f"mods {op}", mod_calls, name, op, 4, seqlen, heads, dim)
    for n, op in product((256, 384, 768), OPS):
        add("pair bias", pair_bias_calls, "pair_bias", op, n, n, (4, 4), 32)
    add("block mask", block_mask_calls, "block_mask", "forward", 1, 8192, (1, 1), 64)
    for op in OPS:
        add("new function", new_function_calls, "new_function", op, 4, 2048, (16, 16), 64, captures=False)
    return cells


CELLS = {"speed": dense_cells, "varlen": varlen_cells, "mods": mods_cells}


# Peers, on PyTorch's tensors.


def peer(arrays: list[Any], op: str, attend: Callable[..., Any], *more: Any) -> tuple[Call, Any]:
    """Returns a call of a function that takes (batch, heads, seqlen, dim) and `more`, and out in our layout."""
    import torch

    *inputs, dout = (x.transpose(1, 2).contiguous() for x in arrays)
    leaves = [x.detach().requires_grad_(op == "backward") for x in (*inputs, *more)]
    out = attend(*leaves)
    call = partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)
    return (partial(attend, *leaves) if op == "forward" else call), out.detach().transpose(1, 2)


def flex(row: Mods, seqlen: int, grouped: bool, **more: Any) -> Callable[..., Any]:
    """Returns flex_attention compiled for one cell."""
    import torch
    from torch.nn.attention import flex_attention as flex

    torch.compiler.reset()  # After a few problems it would no longer compile.
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    mask = row.flex_mask and flex.create_block_mask(row.flex_mask, None, None, seqlen, seqlen, device="cuda")
    attend = partial(compiled, score_mod=row.flex_score, block_mask=mask, enable_gqa=grouped, **more)
    if "sinks" not in row.ours:
        return attend

    def with_sinks(q: Any, k: Any, v: Any) -> Any:
        out, aux = attend(q, k, v, return_aux=flex.AuxRequest(lse=True))
        return out * torch.sigmoid(aux.lse - row.ours["sinks"][:, None])[..., None].to(out.dtype)

    return with_sinks


def sdpa(backend: str, **keywords: Any) -> Callable[..., Any]:
    """Returns scaled_dot_product_attention by one backend, with an optional bias for all sequences."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def attend(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
        mask = None if bias is None else bias.expand(len(q), -1, -1, -1)
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return scaled_dot_product_attention(q, k, v, attn_mask=mask, **keywords)

    return attend
