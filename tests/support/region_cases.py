"""Models of transformers in a `region`: run as one process of a gloo group, by test_transformers_region.py.

region_cases.py RANK RANKS STORE CHECK [MODEL]    prints what is wrong, then "ran CHECK"
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from gloo_ranks import run_check
from models import model_of
from torch.nn.functional import cross_entropy

import cuflash.frameworks.transformers as bridge
from cuflash.distributed import Layout, region
from cuflash.errors import ProblemError, UnsupportedError

BOUNDS = (0, 9, 24, 25, 46)  # longer than the windows of the models


def losses(model: Any, ids: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the losses of some tokens."""
    logits = model(ids, position_ids=positions, use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Returns the gradients of all weights, and removes them."""
    grads = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    return grads


def training(rank: int, ranks: int, name: str) -> list[str]:
    """Loss and gradients are those of one process: packed or not, of all schemes, with checkpointed layers."""
    wrong = []
    bridge.register()
    model = model_of(name, "cuflash", attention_dropout=0.0).train()
    ids, labels = torch.randint(1, 64, (2, 1, BOUNDS[-1]), generator=torch.Generator().manual_seed(1))
    for bounds in (BOUNDS, (0, BOUNDS[-1])):
        whole = Layout(bounds, 1, rank=0)
        loss = losses(model, ids, torch.from_numpy(whole.positions())[None], labels)
        loss.backward()
        expected = gradients(model)
        layout = Layout(bounds, dist.group.WORLD)  # type: ignore[arg-type]
        mine = [layout.shard(x) for x in (ids, labels)]
        positions = torch.from_numpy(layout.positions())[None]
        for scheme, checkpointing in (("auto", False), ("ring", True), ("ulysses", False), ("gather", False)):
            (model.gradient_checkpointing_enable if checkpointing else model.gradient_checkpointing_disable)()
            with region(layout, scheme=scheme):  # type: ignore[arg-type]
                some = losses(model, mine[0], positions, mine[1])
                some.backward()
            dist.all_reduce(some := some.detach())
            for weight in model.parameters():
                dist.all_reduce(weight.grad)
            for part, x in gradients(model).items():
                if not torch.allclose(x, expected[part], atol=1e-4, rtol=1e-4):
                    error = float((x - expected[part]).abs().max())
                    wrong.append(f"{scheme} of {bounds}: the gradient of {part} differs by {error:.3g}")
            if not torch.allclose(some, loss.detach(), rtol=1e-5):
                wrong.append(f"{scheme} of {bounds}: loss {float(some)}, not {float(loss)}")
    return wrong


def refusals(rank: int, ranks: int) -> list[str]:
    """A layer raises for what holds for one rank alone; regions are nested, and those of a thread end with them."""
    bridge.register()
    wrong: list[str] = []
    layer = torch.nn.Module()
    q, rows = torch.randn(1, 2, 5, 8), torch.arange(5)[None]
    layout, other = Layout(5 * ranks, dist.group.WORLD), Layout(7 * ranks, ranks)  # type: ignore[arg-type]
    model = model_of("llama", "cuflash").train()
    model.gradient_checkpointing_enable()
    ids = torch.ones(1, 5, dtype=torch.long)

    def attend(**keywords: Any) -> Any:
        return bridge.cuflash_attention_forward(layer, q, q, q, **({"attention_mask": None} | keywords))[0]

    def enter(*arguments: Any, **keywords: Any) -> None:
        with region(*arguments, **keywords):
            attend()

    def expect(text: str, function: Any, *arguments: Any, **keywords: Any) -> None:
        try:
            function(*arguments, **keywords)
            wrong.append(f"{text}: no error")
        except (ProblemError, UnsupportedError) as error:
            wrong.extend([] if text in f"{type(error).__name__}: {error}" else [f"{text}: {error}"])

    alone = attend()
    with region(layout):
        shared = attend()
        expect("UnsupportedError: dropout=0.5 within cuflash.distributed.region", attend, dropout=0.5)
        expect("UnsupportedError: attention_mask of a layer within", attend, attention_mask=torch.ones(1, 1, 5, 5))
        expect("UnsupportedError: position_bias of a layer within", attend, position_bias=torch.ones(1, 2, 5, 5))
        expect("ProblemError: cu_seq_lens_q within a region", attend, cu_seq_lens_q=torch.tensor([0, 5]))
        padded = torch.tensor([[1, 1, 1, 1, 0]])
        expect("UnsupportedError: attention_mask hides tokens", model, ids, position_ids=rows, attention_mask=padded)
        expect("ProblemError: q has 5 rows, but rank", enter, other)
        if not torch.equal(attend(), shared):
            wrong.append("a region ends with an inner one")
        text = "ran in a cuflash.distributed.region, and checkpointing computes it again outside of it"
        loss = model(ids, position_ids=rows, use_cache=False).logits.sum()
    expect(text, loss.backward)
    if torch.equal(shared, alone) or not torch.equal(attend(), alone):
        wrong.append("a region does not end")
    model(ids, position_ids=rows, use_cache=False).logits.sum().backward()
    expect("ProblemError: layout is int; give a cuflash.distributed.Layout", enter, 5)
    expect("ProblemError: the layout is for 3 ranks, but the group has 2", enter, Layout(5, 3))
    expect("ProblemError: scheme='rings' is unknown; give one of 'auto'", enter, layout, scheme="rings")
    compiled = torch.compile(attend, backend="eager")
    with region(layout):
        if not torch.equal(compiled(), shared):
            wrong.append("a compiled layer does not run in the region")
    if not torch.equal(compiled(), alone):
        wrong.append("a compiled layer runs in a region that has ended")
    return wrong


def gpu(rank: int, ranks: int) -> list[str]:
    """On a GPU the thread of backward computes checkpointed layers in the region around the call of backward."""
    group = dist.new_group(backend="nccl")
    bridge.register()
    model = model_of("llama", "cuflash").to("cuda", torch.bfloat16).train()
    model.gradient_checkpointing_enable()
    ids = torch.randint(1, 64, (1, 46), device="cuda")
    positions = torch.arange(46, device="cuda")[None]
    losses(model, ids, positions, ids).backward()
    expected = gradients(model)
    with region(Layout(46, 1), group=group):
        losses(model, ids, positions, ids).backward()
    pairs = ((name, x, expected[name]) for name, x in gradients(model).items())
    return [f"the gradient of {name} differs" for name, x, y in pairs if not torch.allclose(x, y, rtol=0.05, atol=0.1)]


if __name__ == "__main__":
    run_check(globals())
