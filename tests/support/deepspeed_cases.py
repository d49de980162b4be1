"""DeepSpeed's sequence parallelism on cuflash: run as one process of a gloo group, by test_deepspeed.py.

deepspeed_cases.py RANK RANKS STORE CHECK    prints what is wrong, then "ran CHECK"
"""

from __future__ import annotations

from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention
from gloo_ranks import run_check

from cuflash.distributed import Layout
from cuflash.frameworks.torch import attention

deepspeed.ops.__compatible_ops__.clear()  # init_distributed would compile a C++ extension first


def layer(rank: int, ranks: int) -> list[str]:
    """DistributedAttention has the results of one process, with cuflash's attention as local attention."""
    deepspeed.init_distributed("gloo")
    wrong = []
    torch.manual_seed(0)
    layout = Layout(23 * ranks, ranks, "contiguous", rank=rank)
    for heads_kv in (4, 2):
        dense = [torch.randn(2, layout.seqlen, heads, 8) for heads in (4, heads_kv, heads_kv, 4)]
        local_attention = partial(attention, causal=True, window_size=(9, 0), softcap=5.0)
        q, k, v = (x.clone().requires_grad_() for x in dense[:3])
        out = local_attention(q, k, v)
        expected = [out, *torch.autograd.grad(out, (q, k, v), dense[3])]
        *mine, dout = (layout.shard(x) for x in dense)
        q, k, v = (x.requires_grad_() for x in mine)
        shared = DistributedAttention(local_attention, dist.group.WORLD, scatter_idx=2, gather_idx=1)
        out = shared(q, k, v, 0)
        results = [out, *torch.autograd.grad(out, (q, k, v), dout)]
        for name, x, y in zip(("out", "dq", "dk", "dv"), results, expected, strict=True):
            if not torch.allclose(x, layout.shard(y), atol=1e-5):
                wrong.append(f"{name} of {heads_kv} kv heads differs")
    return wrong


def model(rank: int, ranks: int) -> list[str]:
    """ALST takes the registered name: loss and gradients of a model with windows, documents and grouped heads."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from models import model_of
    from region_cases import BOUNDS, gradients, losses

    from cuflash.frameworks.transformers import register

    deepspeed.init_distributed("gloo")
    register()
    mistral = model_of("mistral", "cuflash").train()
    ids, labels = torch.randint(1, 64, (2, 1, BOUNDS[-1]), generator=torch.Generator().manual_seed(1))
    layout = Layout(BOUNDS, ranks, "contiguous", rank=rank)
    loss = losses(mistral, ids, torch.from_numpy(Layout(BOUNDS, 1, rank=0).positions())[None], labels)
    loss.backward()
    expected = gradients(mistral)
    UlyssesSPAttentionHF.register_with_transformers(
        mistral, "cuflash", sequence_parallel_size=ranks, micro_batch_size=1
    )
    some = losses(mistral, layout.shard(ids), torch.from_numpy(layout.positions())[None], layout.shard(labels))
    some.backward()
    dist.all_reduce(some := some.detach())
    for weight in mistral.parameters():
        dist.all_reduce(weight.grad)
    results = gradients(mistral)
    wrong = [
        f"{name} differs" for name, x in expected.items() if not torch.allclose(results[name], x, atol=1e-4, rtol=1e-4)
    ]
    wrong += [] if torch.allclose(some, loss.detach(), rtol=1e-5) else [f"loss {float(some)}, not {float(loss)}"]
    return wrong


if __name__ == "__main__":
    run_check(globals())
