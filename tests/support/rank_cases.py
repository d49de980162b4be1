"""Cases of `cuflash.distributed`: drawn problems, the results of one process, and those of a rank."""

from __future__ import annotations

import inspect
import random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cuflash.distributed import Layout, attention, unshard
from cuflash.distributed.ops import by_op
from cuflash.distributed.torch import groups_of
from cuflash.frameworks.torch import attention as whole_attention
from cuflash.mods import position_of, seqlen_k, seqlen_q

REPLICATED = "sinks", "slopes", "row_bias"  # inputs that are equal on all ranks
MOST_ERROR = 1e-4  # of the largest element, for float32; sums have other orders


class Case(NamedTuple):
    """One problem; rows and documents of the whole sequence."""

    layout: Layout
    scheme: str
    batch: int
    heads: tuple[int, int]
    dims: tuple[int, int]
    options: dict[str, Any]
    mods: frozenset[str]
    dtype: torch.dtype = torch.float32

    @classmethod
    def draw(cls, seed: int, ranks: int, device: str = "cpu", inner: int = 1) -> Case:
        """Draws a case; all ranks draw the same. On "cuda" some sequences are long, and inputs have 16 bits.

        inner: ranks of the inner axis of a mesh of two.
        """
        rng = random.Random(seed)
        on_gpu = device == "cuda"
        scheme = rng.choice(("ring", "auto") if inner > 1 else ("ring", "ulysses", "gather", "auto"))
        heads_q = rng.choice((1, 2)) * ranks if scheme == "ulysses" else rng.choice((1, 4, 6, 2 * ranks))
        heads_q = heads_q if inner == 1 else inner * rng.choice((1, 2, 3))
        heads_kv = rng.choice([heads for heads in range(1, heads_q + 1) if heads_q % heads == 0])
        long = (1000, 1999) if on_gpu else ()
        seqlen: Any = rng.choice((0, 1, ranks, 2 * ranks + 1, 64, 127, 129, 300, *long))
        is_packed = rng.random() < 0.5
        if is_packed:
            seqlen = [0, *sorted(rng.randrange(seqlen + 1) for _ in range(rng.randrange(6))), seqlen]
        layout = Layout(seqlen, ranks, rng.choice(("zigzag", "contiguous", "balanced")), chunk=rng.choice((8, 40)))
        options: dict[str, Any] = rng.choice(
            ({}, {"causal": True}, {"causal": True}, {"window_size": (rng.randrange(40), 0)},
             {"window_size": (rng.choice((-1, 5, 60)), rng.choice((0, 3, 70)))})
        )  # fmt: skip
        options |= {"softcap": 5.0} if rng.random() < 0.3 else {}
        options |= {"softmax_scale": 0.3} if rng.random() < 0.3 else {}
        mods = {"sinks"} if rng.random() < 0.4 else set()
        mods |= {name for name in ("score_mod", "mask_mod") if rng.random() < 0.3}
        sends_heads = scheme == "ulysses" or inner > 1  # such a bias has one row, which ranks of one row do not show
        if len(layout.cu_seqlens) == 2 and rng.random() < 0.3 and not (sends_heads and min(layout.rows) < 2):
            mods.add("row_bias" if sends_heads else rng.choice(("bias", "row_bias")))
        dims = rng.choice(((64, 64), (128, 128)) if on_gpu else ((16, 16), (8, 24)))
        batch = 1 if is_packed else rng.choice((1, 2))
        options |= {"dropout_p": 0.3, "dropout_seed": seed} if not on_gpu and rng.random() < 0.4 else {}
        dtype = rng.choice((torch.bfloat16, torch.float16)) if on_gpu else torch.float32
        if on_gpu and rng.random() < 0.5:
            options |= {"split_size": 128, "deterministic": mods <= {"sinks"}}
        return cls(layout, scheme, batch, (heads_q, heads_kv), dims, options, frozenset(mods), dtype)

    def leaves(self, seed: int, device: str = "cpu") -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        """Draws q, k, v and what mods refer to, of the whole sequence; and the gradients of out and lse."""
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device)

        (heads_q, heads_kv), (dim, dim_v), rows = self.heads, self.dims, self.layout.seqlen
        leaves = {
            "q": drawn(self.batch, rows, heads_q, dim).to(self.dtype),
            "k": drawn(self.batch, rows, heads_kv, dim).to(self.dtype),
            "v": drawn(self.batch, rows, heads_kv, dim_v).to(self.dtype),
            "sinks": drawn(heads_q), "slopes": drawn(heads_q) * 0.01,
            "bias": drawn(1, heads_q, rows, rows) if "bias" in self.mods else torch.empty(0),
            "row_bias": drawn(1, heads_q, 1, rows),
        }  # fmt: skip
        used = {"q", "k", "v"} | self.mods | ({"slopes"} if "score_mod" in self.mods else set())
        leaves = {name: x.requires_grad_() for name, x in leaves.items() if name in used}
        dout = drawn(self.batch, rows, heads_q, dim_v).to(self.dtype)
        return leaves, dout, drawn(self.batch, heads_q, rows)

    def mod_kwargs(self, leaves: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Returns the keywords of mods; indices of functions are those of the whole problem."""
        slopes = leaves.get("slopes")
        names = {"sinks": "sinks", "bias": "bias", "row_bias": "bias"}
        mod_kwargs: dict[str, Any] = {keyword: leaves[name] for name, keyword in names.items() if name in leaves}
        if slopes is not None:
            mod_kwargs["score_mod"] = lambda score, b, h, i, j: (
                score + slopes[h] * (position_of(i) - j) + 0.01 * h * (b + i)
            )
        if "mask_mod" in self.mods:
            mod_kwargs["mask_mod"] = lambda b, h, i, j: (i * 3 + j + h + b + seqlen_q() + seqlen_k()) % 5 != 0
        return mod_kwargs


def loss_of(out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor) -> torch.Tensor:
    """Returns a number whose gradients by out and lse are dout and dlse, but 0 by an lse of -inf."""
    return (out * dout).sum() + (torch.where(lse.isfinite(), lse, 0.0) * dlse).sum()


class Whole(NamedTuple):
    """The inputs of a case, and the results of one process: out, lse, and the gradients "dq", "dk", …"""

    leaves: dict[str, torch.Tensor]
    dout: torch.Tensor
    dlse: torch.Tensor
    results: dict[str, torch.Tensor]

    @classmethod
    def computed(cls, case: Case, seed: int, device: str = "cpu") -> Whole:
        """Draws the inputs, and computes."""
        leaves, dout, dlse = case.leaves(seed, device)
        q, k, v = (leaves[name] for name in "qkv")
        options = case.options | case.mod_kwargs(leaves)
        if len(case.layout.cu_seqlens) > 2:
            bounds = torch.tensor(case.layout.cu_seqlens, dtype=torch.int32, device=device)
            out, lse = whole_attention(
                q[0], k[0], v[0], cu_seqlens_q=bounds, cu_seqlens_k=bounds, return_lse=True, **options
            )
            out, lse = out[None], lse[None]
        else:
            out, lse = whole_attention(q, k, v, return_lse=True, **options)
        grads = torch.autograd.grad(loss_of(out, lse, dout, dlse), [*leaves.values()])
        names = ["d" + name for name in leaves]
        return cls(leaves, dout, dlse, {"out": out, "lse": lse, **dict(zip(names, grads, strict=True))})


def shard(layout: Layout, rank: int, name: str, x: torch.Tensor) -> torch.Tensor:
    """Returns a rank's part of an input or a result of this name."""
    axis = {"q": 1, "k": 1, "v": 1, "out": 1, "bias": 2, "lse": 2}.get(name.removeprefix("d"))
    return x if axis is None else layout.shard(x, axis, rank)


def as_op(*tensors: torch.Tensor, group: Any = None, **options: Any) -> Any:
    """Calls the op that stands for `attention` in graphs."""
    parameters = inspect.signature(attention).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
    return by_op(*tensors, defaults | options, [each.group_name for each in groups_of(group)])


def results_of(
    case: Case, whole: Whole, rank: int, group: Any = None, call: Any = attention
) -> dict[str, torch.Tensor]:
    """Returns the results of this rank, by the names of `Whole`; gradients of REPLICATED are added up."""
    layout = case.layout
    mine = {name: shard(layout, rank, name, x.detach()).clone() for name, x in whole.leaves.items()}
    mine = {name: x.requires_grad_() for name, x in mine.items()}
    out, lse = call(mine["q"], mine["k"], mine["v"], layout=layout, group=group, scheme=case.scheme, return_lse=True,
                    **case.options, **case.mod_kwargs(mine))  # fmt: skip
    loss = loss_of(out, lse, shard(layout, rank, "out", whole.dout), shard(layout, rank, "lse", whole.dlse))
    grads = dict(zip(mine, torch.autograd.grad(loss, [*mine.values()]), strict=True))
    for name in REPLICATED:
        if name in grads:
            dist.all_reduce(grads[name])
    return {"out": out, "lse": lse, **{"d" + name: grad for name, grad in grads.items()}}


def failures(case: Case, seed: int, rank: int, group: Any = None) -> list[str]:
    """Returns what differs between the ranks' results of a case and those of one process."""
    whole, wrong = Whole.computed(case, seed), []
    has_op = case.mods.isdisjoint(("score_mod", "mask_mod")) and "dropout_p" not in case.options
    results = results_of(case, whole, rank, group, as_op if has_op and seed % 2 else attention)
    results["unsharded"] = unshard(results["out"], case.layout, group=group)
    for name, result in results.items():
        correct = shard(case.layout, rank, name, (whole.results | {"unsharded": whole.results["out"]})[name])
        scale = max([1.0, *correct.detach().nan_to_num(posinf=0.0, neginf=0.0).abs().flatten().tolist()])
        if not torch.allclose(result, correct, rtol=0.0, atol=MOST_ERROR * scale):
            wrong.append(f"{name} differs by {float((result - correct).abs().max()):.3g}")
    return wrong
