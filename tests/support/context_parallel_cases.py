"""PyTorch's `context_parallel` on cuflash's ring: run as one process of a gloo group, by test_context_parallel.py.

context_parallel_cases.py RANK RANKS STORE CHECK    prints what is wrong, then "ran CHECK"
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from gloo_ranks import run_check
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

from cuflash.errors import ProblemError, UnsupportedError
from cuflash.frameworks import context_parallel as cuflash_ring
from cuflash.frameworks import sdpa
from cuflash.frameworks.torch import attention

ATEN = torch.ops.aten
# Arguments behind q, k and v, for dropout_p and is_causal. SDPA on the CPU takes another op, which DTensor has not.
CALLS: dict[str, Any] = {
    "flash": lambda p, causal: (p, causal),
    "efficient": lambda p, causal: (None, True, p, causal),
    "cudnn": lambda p, causal: (None, True, p, causal),
}


def sharded(tensors: Any, mesh: Any) -> list[Any]:
    """Returns the rows of this rank as leaves of DTensors, sharded by rows."""
    from torch.distributed.tensor import DTensor, Shard

    return [DTensor.from_local(x.clone(), mesh, [Shard(2)], run_check=False).requires_grad_() for x in tensors]


def results(rank: int, ranks: int) -> list[str]:
    """Out and gradients of every op are those of one process: causal or not, grouped heads, balanced or not."""
    sdpa.activate()  # before PyTorch's package is imported
    from torch.distributed.tensor.experimental import _context_parallel, context_parallel
    from torch.distributed.tensor.experimental._context_parallel._attention import context_parallel_unshard

    options, wrong = _context_parallel._attention._cp_options, []
    mesh = init_device_mesh("cpu", (ranks,))
    cases = [("flash", causal, heads_kv, balanced) for causal in (False, True) for heads_kv in (1, 4)
             for balanced in (False, True)] + [("efficient", True, 4, True), ("cudnn", True, 4, True)]  # fmt: skip
    for case in cases:
        backend, causal, heads_kv, options.enable_load_balance = case
        torch.manual_seed(0)
        rows = 16 * ranks
        q, k, v = (torch.randn(2, heads, rows, 16) for heads in (4, heads_kv, heads_kv))
        dout = torch.randn(2, 4, rows, 16)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(*(x.transpose(1, 2) for x in leaves), causal=causal, softmax_scale=0.2).transpose(1, 2)
        expected = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
        with context_parallel(mesh, buffers=[q, k, v, dout], buffer_seq_dims=[2] * 4):
            mine = sharded((q, k, v), mesh)
            op = getattr(ATEN, f"_scaled_dot_product_{backend}_attention")
            some = op(*mine, *CALLS[backend](0.0, causal), scale=0.2)[0]
            grads = torch.autograd.grad(some, mine, sharded([dout], mesh)[0])
            parts = [x.detach().to_local() for x in (some, *grads)]
            whole = context_parallel_unshard(mesh, parts, [2] * 4)
        for name, x, y in zip(("out", "dq", "dk", "dv"), whole, expected, strict=True):
            if not torch.allclose(x, y, atol=1e-5):
                wrong.append(f"{name} differs by {float((x - y).abs().max()):.3g} in {case}")
    return wrong


def refusals(rank: int, ranks: int) -> list[str]:
    """Dropout and ranks that disagree raise; an active context has the ring from `activate` until `restore`."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.distributed.tensor.experimental import _context_parallel
    from torch.distributed.tensor.experimental._context_parallel._attention import (
        _disable_context_parallel_dispatcher,
        _enable_context_parallel_dispatcher,
    )

    module, wrong = _context_parallel._attention, []
    mesh = init_device_mesh("cpu", (ranks,))
    before = dict(module.custom_ops)

    def raised(rows: int = 4, rows_k: int = 4, p: float = 0.0, debug: bool = False) -> str:
        q, *kv = sharded((torch.randn(1, 2, n, 8) for n in (rows, rows_k, rows_k)), mesh)
        try:
            ATEN._scaled_dot_product_flash_attention(q, *kv, p, True, debug)
        except (ProblemError, UnsupportedError, NotImplementedError) as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    _enable_context_parallel_dispatcher()  # as TorchTitan does, once and for all
    sdpa.activate()
    for keywords, text in (
        ({"rows": 4 + 2 * rank, "rows_k": 4 + 2 * rank}, "ProblemError: ranks disagree about shapes"),
        ({}, "no error"),
        ({"p": 0.5}, "UnsupportedError: dropout_p=0.5: context_parallel on cuflash has no dropout; give 0.0, or call"),
        # PyTorch's own ring.
        ({"rows_k": 8}, "NotImplementedError: is_causal requires the same query and context sequence lengths"),
        ({"debug": True}, "NotImplementedError: return_debug_mask is not supported yet"),
    ):
        if text not in (got := raised(**keywords)):  # type: ignore[arg-type]
            wrong.append(f"{text}: {got}")
    with FakeTensorMode():  # as in a graph, whose nodes are those of PyTorch's own ring
        out = ATEN._scaled_dot_product_flash_attention(*sharded(torch.randn(3, 1, 2, 4, 8), mesh), 0.0, True)[0]
        wrong += [] if isinstance(out.to_local(), FakeTensor) else ["no graph can be built"]
    sdpa.restore()
    if "_scaled_dot_product_flash_attention' with arguments from the 'CPU' backend" not in (got := raised()):
        wrong.append(f"restored: {got}")
    _disable_context_parallel_dispatcher()
    if module.custom_ops != before:
        wrong.append("restore leaves other handlers")
    return wrong


def gpu(rank: int, ranks: int) -> list[str]:
    """SDPA within a context runs the ring on a GPU, here of one rank: float32 by the memory-efficient backend's op."""
    from torch.distributed.tensor.experimental import context_parallel

    wrong, calls, forward = [], [], cuflash_ring.ring_forward
    cuflash_ring.ring_forward = lambda *arguments: calls.append(1) or forward(*arguments)  # type: ignore[func-returns-value]
    mesh = DeviceMesh.from_group(dist.new_group(backend="nccl"), "cuda")
    sdpa.activate()
    for dtype, heads_kv in ((torch.bfloat16, 4), (torch.bfloat16, 1), (torch.float32, 4)):
        q, k, v = (torch.randn(2, heads, 256, 64, device="cuda", dtype=dtype, requires_grad=True)
                   for heads in (4, heads_kv, heads_kv))  # fmt: skip
        options = {"is_causal": True, "enable_gqa": heads_kv < 4}
        out = functional.scaled_dot_product_attention(q, k, v, **options)  # type: ignore[arg-type]
        expected = [out, *torch.autograd.grad(out.sum(), (q, k, v))]
        with context_parallel(mesh, buffers=[torch.zeros(2, 256, device="cuda")], buffer_seq_dims=[1]):
            out = functional.scaled_dot_product_attention(q, k, v, **options)  # type: ignore[arg-type]
            results = [out, *torch.autograd.grad(out.sum(), (q, k, v))]
        for name, x, y in zip(("out", "dq", "dk", "dv"), results, expected, strict=True):
            if not torch.allclose(x, y, atol=0.05 if dtype == torch.bfloat16 else 1e-4):
                wrong.append(f"{name} of {dtype} differs by {float((x - y).abs().max()):.3g}")
    return wrong if len(calls) == 3 else [*wrong, f"{len(calls)} calls of the ring, not 3"]


if __name__ == "__main__":
    run_check(globals())
