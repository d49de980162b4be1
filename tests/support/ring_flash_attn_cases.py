"""ring-flash-attention's names beside one process and the package: one process of a gloo group.

ring_flash_attn_cases.py RANK RANKS STORE CHECK [ARGUMENT...]    prints what is wrong, then "ran CHECK"
"""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from gloo_ranks import run_check
from torch.distributed.device_mesh import init_device_mesh

from cuflash.errors import ProblemError, UnsupportedError
from cuflash.frameworks import ring_flash_attn
from cuflash.frameworks.torch import attention as whole_attention

MOST_ERROR = 1e-4  # of the largest element, for float32; sums have other orders
DENSE = "ring", "zigzag_ring", "stripe"
PACKED = "ring_varlen", "zigzag_ring_varlen", "llama3_varlen"
FORMS = "", "kvpacked_", "qkvpacked_"


class Case(NamedTuple):
    """A call of a family of functions over all ranks. rows: global rows of each rank. bounds: those of documents."""

    family: str
    form: str
    rows: list[torch.Tensor]
    bounds: list[int]
    heads: tuple[int, int]
    options: dict[str, Any]

    @classmethod
    def draw(cls, seed: int, ranks: int, family: str, plain: bool = False) -> Case:
        """Draws a case; all ranks draw the same. plain: draws options alone that the package has."""
        rng = random.Random(f"{seed} {family}")
        form = rng.choice(FORMS)
        heads_q = rng.choice((2, 4, ranks))
        heads_kv = heads_q if form == "qkvpacked_" or plain else rng.choice([h for h in (1, 2, 4) if heads_q % h == 0])
        unit = 2 * ranks
        lengths = [unit * rng.randrange(1, 9) for _ in range(1 if family in DENSE else rng.randrange(1, 5))]
        if family == "llama3_varlen":
            lengths = [length + rng.randrange(-ranks, ranks) for length in lengths]
            lengths.append(-sum(lengths) % ranks + ranks)
        bounds = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
        options: dict[str, Any] = {"causal": rng.random() < 0.6 or (plain and family != "ring")}
        if not plain:
            options |= {"window_size": rng.choice(((-1, -1), (-1, -1), (7, 0), (20, 5), (-1, 3)))}
            options |= {"softmax_scale": 0.3} if rng.random() < 0.3 else {}
            options |= {"deterministic": True} if rng.random() < 0.3 else {}
            slopes = torch.tensor([0.1 * rng.random() for _ in range(heads_q)])
            options |= {"alibi_slopes": slopes} if rng.random() < 0.3 else {}
        return cls(family, form, rows_of(family, bounds, ranks), bounds, (heads_q, heads_kv), options)

    def arguments(self, rank: int, ranks: int) -> tuple[Any, ...]:
        """Returns what a packed call passes between the tensors and dropout_p."""
        if self.family in DENSE:
            return ()
        bounds = torch.tensor(self.bounds, dtype=torch.int32)
        if self.family == "llama3_varlen":
            *lengths, local = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(
                bounds, self.options["causal"], rank, ranks
            )
            return *lengths, 1, local
        local = bounds // ranks
        return local, int(local.diff().max())


def rows_of(family: str, bounds: list[int], ranks: int) -> list[torch.Tensor]:
    """Returns the rows of each rank, as the package describes them."""
    total = bounds[-1]
    if family == "stripe":
        return [torch.arange(rank, total, ranks) for rank in range(ranks)]
    if family == "llama3_varlen":
        return list(torch.arange(total).chunk(ranks))
    documents = [torch.arange(a, b) for a, b in pairwise(bounds)]
    if family.startswith("zigzag"):
        parts = [x.chunk(2 * ranks) for x in documents]
        return [torch.cat([y for x in parts for y in (x[r], x[-1 - r])]) for r in range(ranks)]
    return [torch.cat([x.chunk(ranks)[r] for x in documents]) for r in range(ranks)]


def function_of(module: Any, family: str, form: str) -> Any:
    """Returns the function of a family, "ring" or "ring_varlen", and form, "" or "kvpacked_"."""
    base, *_ = family.split("_varlen")
    return getattr(module, f"{base}_flash_attn_{'varlen_' if family in PACKED else ''}{form}func")


def results_of(module: Any, case: Case, rank: int, ranks: int, whole: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns out, lse and gradients of q, k and v of this rank's rows, and of slopes the sum over ranks."""
    rows, (*qkv, dout, dlse) = case.rows[rank], whole
    axis = 1 if case.family in DENSE else 0
    leaves = [x.detach().index_select(axis, rows) for x in qkv]
    if case.form == "kvpacked_":
        leaves = [leaves[0], torch.stack(leaves[1:], axis + 1)]
    elif case.form == "qkvpacked_":
        leaves = [torch.stack(leaves, axis + 1)]
    leaves = [x.requires_grad_() for x in leaves]
    options = dict(case.options)
    slopes = [options["alibi_slopes"].clone().requires_grad_()] if "alibi_slopes" in options else []
    options |= {"alibi_slopes": slopes[0]} if slopes else {}
    function = function_of(module, case.family, case.form)
    out, lse, third = function(*leaves, *case.arguments(rank, ranks), **options, return_attn_probs=True)
    assert third is None
    loss = (out * dout.index_select(axis, rows)).sum()
    if module is ring_flash_attn:
        loss = loss + (torch.where(lse.isfinite(), lse, 0) * dlse[..., rows]).sum()
    grads = torch.autograd.grad(loss, leaves + slopes)
    named: list[torch.Tensor] = []
    for grad, count in zip(grads, {"": (1, 1, 1), "kvpacked_": (1, 2), "qkvpacked_": (3,)}[case.form], strict=False):
        named += [grad] if count == 1 else grad.unbind(axis + 1)
    results = {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), named, strict=True))}
    if slopes:
        dist.all_reduce(grads[-1])
        results["dslopes"] = grads[-1]
    return results


def expected_of(case: Case, rank: int, whole: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns what one process computes for the rows of a rank."""
    rows, (*qkv, dout, dlse) = case.rows[rank], whole
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    options = dict(case.options)
    if (slopes := options.pop("alibi_slopes", None)) is not None:
        leaves.append(slopes := slopes.clone().requires_grad_())
        options["score_mod"] = lambda score, b, h, i, j: score - slopes[h] * abs(i - j)
    axis = 1 if case.family in DENSE else 0
    if not axis:
        bounds = torch.tensor(case.bounds, dtype=torch.int32)
        options |= {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    out, lse = whole_attention(*leaves[:3], return_lse=True, **options)
    grads = torch.autograd.grad((out * dout).sum() + (torch.where(lse.isfinite(), lse, 0) * dlse).sum(), leaves)
    results = {"out": out.index_select(axis, rows), "lse": lse[..., rows]}
    results |= {name: x.index_select(axis, rows) for name, x in zip(("dq", "dk", "dv"), grads, strict=False)}
    return results | ({"dslopes": grads[3]} if len(grads) > 3 else {})


def tensors_of(case: Case, seed: int) -> list[torch.Tensor]:
    """Draws q, k, v and the gradients of out and lse of the whole problem."""
    torch.manual_seed(seed)
    batch, total, (heads_q, heads_kv) = (2,) if case.family in DENSE else (), case.bounds[-1], case.heads
    shapes = [(*batch, total, heads, 16) for heads in (heads_q, heads_kv, heads_kv, heads_q)]
    return [torch.randn(shape) for shape in (*shapes, (*batch, heads_q, total))]


def differences(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor], bound: float) -> list[str]:
    """Returns the names of results that differ."""
    wrong = [] if mine.keys() == other.keys() else [f"{mine.keys()}, {other.keys()}"]
    for name, x in other.items():
        if mine[name].shape != x.shape or mine[name].dtype != x.dtype:
            wrong.append(f"{name} has shape {tuple(mine[name].shape)} and {mine[name].dtype}")
        elif not torch.allclose(mine[name], x, rtol=0.0, atol=bound * max(1.0, float(x.abs().max()))):
            wrong.append(f"{name} differs by {float((mine[name] - x).abs().max()):.3g}")
    return wrong


def drawn(rank: int, ranks: int, count: str) -> list[str]:
    """Compares drawn calls of all families with one process."""
    wrong = []
    for seed in range(int(count)):
        for family in (*DENSE, *PACKED):
            case = Case.draw(seed, ranks, family)
            whole = tensors_of(case, seed)
            texts = differences(
                results_of(ring_flash_attn, case, rank, ranks, whole), expected_of(case, rank, whole), MOST_ERROR
            )
            wrong += [f"seed {seed}: {text} in {case}" for text in texts]
    return wrong


def real_package() -> Any:
    """Imports ring-flash-attention on cuflash's flash-attn. Its adapters need an older transformers, and are left out.

    Where it is not installed, returns None.
    """
    from importlib.util import find_spec

    from cuflash.frameworks import flash_attn

    if find_spec("ring_flash_attn") is None:
        return None
    flash_attn.activate(force=True)
    adapters: Any = ModuleType("ring_flash_attn.adapters")
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
    sys.modules["ring_flash_attn.adapters"] = adapters
    import ring_flash_attn as package

    return package


def package(rank: int, ranks: int, count: str) -> list[str]:
    """Compares drawn calls of all families with the package.

    Its gradients of float32 tensors are wrong: a sum and the buffer of its parts are one tensor. Its dq of "ring" is
    bfloat16.
    """
    wrong = []
    module = real_package()
    for seed in range(int(count)):
        for family in (*DENSE, *PACKED):
            case = Case.draw(seed, ranks, family, plain=True)
            whole = [x.half() for x in tensors_of(case, seed)]
            whole[4].zero_()  # the package has no gradient of lse
            mine, other = (results_of(each, case, rank, ranks, whole) for each in (ring_flash_attn, module))
            other["dq"] = other["dq"].half()
            wrong += [f"seed {seed}: {text} in {case}" for text in differences(mine, other, 1e-2)]
    return wrong


def raised(function: Any, *arguments: Any, **keywords: Any) -> str:
    """Returns the error of a call."""
    try:
        function(*arguments, **keywords)
    except (ProblemError, UnsupportedError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refusals(rank: int, ranks: int) -> list[str]:
    """Bad arguments are refused on every rank, by the names that the caller wrote."""
    x, qkv, one = torch.randn(1, 8, 2, 8), torch.randn(1, 8, 3, 2, 8), torch.randn(8, 2, 8)
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    three, dense, packed = (one, one, one), "ring_flash_attn_func", "ring_flash_attn_varlen_func"
    llama3, prepare = "llama3_flash_attn_varlen_func", "llama3_flash_attn_prepare_cu_seqlens"
    ring_flash_attn.ring_flash_attn_func(x, x, x)
    mesh, wrong = init_device_mesh("cpu", (ranks, 1)), []
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
        (dense, (x, x, x, 0.1), {}, "UnsupportedError: dropout_p=0.1: attention over the rows of"),
        (dense, (x, x, x, x), {}, "dropout_p=a Tensor"),
        (dense, (x, x, x, 0.0, True), {}, "softmax_scale=True is a bool"),
        (dense, (x, x, x), {"return_attn_probs": 1}, "return_attn_probs=1 is an int"),
        (dense, (one, x, x), {}, "q has shape (8, 2, 8); give (batch, seqlen, heads, head_dim)"),
        (dense, (x, x[:, :7], x), {}, "k has 7 rows, but q has 8; give the same"),
        (dense, (x, x, x[:, :7]), {}, "ProblemError: v has 7 rows, but q has 8; give the same"),
        (dense, (x, x, x), {"alibi_slopes": torch.ones(3)}, "alibi_slopes has shape (3,)"),
        (dense, (x, x, x), {"group": mesh}, "has two axes; give a mesh of one"),
        ("stripe_flash_attn_qkvpacked_func", (qkv[:, :, :2],), {}, "qkv has shape (1, 8, 2, 2, 8); give (batch"),
        ("stripe_flash_attn_kvpacked_func", (x, qkv[:, :7, :2]), {}, "k of kv has 7 rows, but q has 8"),
        (packed, (*three, bounds[:2], 3), {}, "cu_seqlens ends at 3, but q has 8"),
        (packed, (*three, bounds.long(), 3), {}, "cu_seqlens has dtype torch.int64"),
        (packed, (*three, bounds[:1], 3), {}, "cu_seqlens has shape (1,); give (doc"),
        (packed, (*three, [0, 8], 3), {}, "cu_seqlens is a list"),
        (packed, (x, one, one, bounds, 3), {}, "q has shape (1, 8, 2, 8); give (total, heads"),
        (f"zigzag_{packed}", (*three, bounds, 5), {}, "gives document 0 3 rows of this"),
        (llama3, (*three, bounds[:2], bounds, 3, 3, 1, slice(0, 8)), {}, "cu_seqlens_q ends at 3, but q has 8 rows"),
        (prepare, (bounds, True, 0, 3), {}, "ends at 8, no multiple of world_size=3"),
        (prepare, (bounds, True, 2, 2), {}, "rank=2 is outside a group of 2"),
        (prepare, (bounds, 1, 0, 2), {}, "causal=1 is an int"),
    ]
    for name, arguments, keywords, text in calls:
        error = raised(getattr(ring_flash_attn, name), *arguments, **keywords)
        wrong += [] if text in error else [f"{text}: {error}"]
    return wrong


def other_bounds(rank: int, ranks: int) -> list[str]:
    """llama3 takes bounds that are not of prepare_cu_seqlens, and bounds that change; compiled calls run, too."""
    wrong = []
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 24, 2, 16)
    reused_bounds = None
    for documents in ([0, 5, 12, 20, 24], [0, 7, 12, 20, 24]):
        bounds = torch.tensor(documents, dtype=torch.int32)
        expected = whole_attention(q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds, causal=True)
        mine = slice(rank * 24 // ranks, (rank + 1) * 24 // ranks)
        prepared = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(bounds, True, rank, ranks)
        bounds_q, bounds_k, *lengths, local = prepared
        if reused_bounds is None or reused_bounds.shape != bounds_q.shape:
            reused_bounds = bounds_q.clone()
        else:
            reused_bounds.copy_(bounds_q)

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any) -> Any:
            out = ring_flash_attn.llama3_flash_attn_varlen_func(q, k, v, *arguments, causal=True)
            return out * 2

        for name, function in (("plain", call), ("compiled", torch.compile(call, backend="eager"))):
            for _ in range(2):
                out = function(q[mine], k[mine], v[mine], reused_bounds, bounds_k, *lengths, 1, local)
                if not torch.allclose(out, 2 * expected[mine], atol=1e-5):
                    wrong.append(f"{name} {documents}: another out")
    return wrong


def model(rank: int, ranks: int) -> list[str]:
    """Models of transformers with flash_attention_2 compute their logits over the rows of all ranks."""
    import transformers

    wrong = []
    documents = torch.tensor([0, 5, 12, 24], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in documents.diff().tolist()])[None]
    tokens = torch.arange(24)[None] % 13
    ring_flash_attn.substitute_hf_flash_attn(None, 1)
    for name, extra in (("LlamaConfig", {}), ("MistralConfig", {"sliding_window": 4})):
        config = getattr(transformers, name)(
            vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, attn_implementation="eager", **extra,
        )  # fmt: skip
        torch.manual_seed(0)
        on_ranks = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        ring_flash_attn.update_ring_flash_attn_params(documents, None)
        mine = slice(rank * 24 // ranks, (rank + 1) * 24 // ranks)
        on_ranks.config._attn_implementation = "flash_attention_2"  # transformers loads it on GPUs alone
        logits = on_ranks(input_ids=tokens[:, mine], position_ids=positions[:, mine], use_cache=False).logits
        on_ranks.config._attn_implementation = "eager"
        for begin, end in pairwise(documents.tolist()):
            expected = on_ranks(input_ids=tokens[:, begin:end], use_cache=False).logits[0]
            for row in range(max(begin, mine.start), min(end, mine.stop)):
                if not torch.allclose(logits[0, row - mine.start], expected[row - begin], atol=1e-4):
                    wrong.append(f"{name}: row {row} has other logits")
    x = torch.zeros(1, 2, 4, 8)
    layer = torch.nn.Module()
    function = transformers.AttentionInterface()["flash_attention_2"]
    for keywords, text in (
        ({"dropout": 0.1}, "neither masks of padding nor dropout"),
        ({"attention_mask": torch.ones(1, 4)}, "neither masks of padding nor dropout"),
    ):
        error = raised(function, layer, x, x, x, **{"attention_mask": None, **keywords})
        wrong += [] if text in error else [f"{text}: {error}"]
    return wrong


if __name__ == "__main__":
    run_check(globals())
