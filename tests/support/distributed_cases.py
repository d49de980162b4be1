"""Drawn cases of `cuflash.distributed` beside one process: run as one process of a gloo group, by tests/distributed.

distributed_cases.py RANK RANKS STORE CHECK [ARGUMENT...]    prints what is wrong, then "ran CHECK"
"""

from __future__ import annotations

import datetime
import os
import signal
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from gloo_ranks import run_check
from rank_cases import Case, as_op, failures, loss_of

from cuflash.distributed import ExchangeError, Layout, attention, unshard
from cuflash.distributed import ring as ring_module
from cuflash.errors import ProblemError, UnsupportedError
from cuflash.frameworks.torch import attention as whole_attention


def drawn(rank: int, ranks: int, first: str, count: str, inner: str = "1") -> list[str]:
    """Runs `count` cases; returns the failures. inner: ranks of the inner axis of a mesh of two."""
    from torch.distributed.device_mesh import init_device_mesh

    wrong, columns = [], int(inner)
    group = init_device_mesh("cpu", (ranks // columns, columns)) if columns > 1 else None
    for seed in range(int(first), int(first) + int(count)):
        case = Case.draw(seed, ranks, inner=columns)
        try:
            wrong += [f"seed {seed}: {text} in {case}" for text in failures(case, seed, rank, group)]
        except Exception as error:
            raise RuntimeError(f"seed {seed}: {case}") from error
    print(f"ran {count}", flush=True)
    return wrong


def raised(*tensors: torch.Tensor, **keywords: Any) -> str:
    """Returns the error of a call."""
    try:
        attention(*tensors, **keywords)
    except (ProblemError, UnsupportedError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def agreement(rank: int, ranks: int) -> list[str]:
    """Ranks that disagree get an error on every rank: in a group's first call, and with check=True."""
    q = torch.randn(1, 8, 2 * ranks, 8)
    calls: list[tuple[dict[str, Any], str]] = [
        ({"softcap": float(rank)}, "ranks disagree about softcap: rank 0 has 0.0, rank 1 has 1.0"),
        ({"scheme": "ring" if rank else "gather"}, "ranks disagree about scheme: rank 0 has 'gather'"),
        (
            {"layout": Layout(16, ranks, "zigzag" if rank else "contiguous")},
            "ranks disagree about layout: rank 0 has 'Layout(contiguous, 16 rows, ",
        ),
        ({"sinks": torch.zeros(2 * ranks)} if rank else {}, "ranks disagree about score_mod, mask_mod, bias and sinks"),
        ({"dropout_p": 0.1, "dropout_seed": rank}, "ranks disagree about dropout_seed: rank 0 has 0, rank 1 has 1"),
    ]
    wrong = [f"{text}: {raised(q, q, q, **call)}" for call, text in calls if text not in raised(q, q, q, **call)]
    attention(q, q, q)
    for call, text in calls:
        if text not in (got := raised(q, q, q, **call, check=True)):
            wrong.append(f"{text}: {got}")
    return wrong


def refusals(rank: int, ranks: int) -> list[str]:
    """Bad arguments are refused on a rank before anything is sent."""
    q = torch.randn(1, 8, 3, 8)
    layout = Layout(16, ranks)
    attention(q, q, q)
    wrong = []
    for tensors, keywords, text in (
        ((q[:, :7], q, q), {"layout": layout}, f"q has 7 rows, but rank {rank} holds 8 of the layout"),
        ((q[0], q, q), {}, "q has 3 axes; give (batch, rows of this rank, heads, head_dim)"),
        ((q, q, q), {"scheme": "rings"}, "scheme='rings' is unknown; give one of 'auto', 'ring', 'ulysses', 'gather'"),
        (
            (q, q, q),
            {"scheme": "ulysses"},
            "3 query heads are no multiple of 2 ranks; give scheme='gather', 'ring' or 'auto'",
        ),
        ((q, q, q), {"bias": q.new_zeros(8, 8)}, "(batch, heads_q, rows of this rank, seqlen)"),
        ((q, q, q), {"bias": [0.0]}, "bias is a list; give a torch tensor"),
        ((q, q, q), {"sinks": q.new_zeros(1)}, "sinks has shape (1,); give (3,)"),
        ((q, q, q), {"layout": Layout(16, 3)}, "the layout is for 3 ranks, but the group has 2"),
        ((q, q, q), {"layout": Layout(16, 2, rank=1 - rank)}, "but this process is rank"),
        ((q, q, q), {"layout": 16}, "layout is int; give a cuflash.distributed.Layout"),
        (
            (q.repeat(2, 1, 1, 1),) * 3,
            {"layout": Layout([0, 3, 16], 2)},
            "q has batch 2, but the layout packs documents",
        ),
        ((q, q, q), {"causal": 1}, "causal=1 is an int; give True or False"),
        ((q, q, q), {"window_size": 3}, "window_size=3 is not a pair"),
        ((q, q, q), {"dropout_p": 0.1}, "there is no dropout_seed; give all ranks the same seed"),
        ((q, q, q), {"dropout_p": 1.0, "dropout_seed": 0}, "dropout_p=1.0 is outside [0, 1)"),
    ):
        got = raised(*tensors, **keywords)  # type: ignore[arg-type]
        wrong += [] if text in got else [f"{text}: {got}"]
    return wrong


def mesh(rank: int, ranks: int) -> list[str]:
    """A mesh is a group, and DTensors are sharded by rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    torch.manual_seed(0)
    wrong = []
    device_mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    q, k, v = torch.randn(3, 2, 20, 2, 8)
    layout = Layout(20, device_mesh)
    locals_ = [layout.shard(x).requires_grad_() for x in (q, k, v)]
    out, lse = attention(*locals_, layout=layout, group=device_mesh, causal=True, return_lse=True)  # type: ignore[misc]
    expected = whole_attention(q, k, v, causal=True)
    if not torch.allclose(unshard(out, layout, group=device_mesh), expected, atol=1e-5):
        wrong.append("a mesh gives another out")
    wrapped = [DTensor.from_local(x, device_mesh, [Shard(1)], run_check=False) for x in locals_]
    out_2, lse_2 = attention(*wrapped, causal=True, return_lse=True)  # type: ignore[misc]
    if not (torch.equal(out_2.to_local(), out) and torch.equal(lse_2.to_local(), lse)):
        wrong.append("DTensors give another out")
    if (tuple(out_2.shape), tuple(lse_2.shape)) != ((2, 20, 2, 8), (2, 2, 20)):
        wrong.append(f"shapes {out_2.shape}, {lse_2.shape}")
    out_2.to_local().sum().backward()
    (dq,) = torch.autograd.grad(out.sum(), locals_[:1])
    if not torch.allclose(locals_[0].grad, dq, atol=1e-6):
        wrong.append("DTensors give another gradient")
    if "with Shard(1) for each of its axes, or local tensors" not in raised(wrapped[0], *locals_[1:]):
        wrong.append("a local k beside a DTensor q is taken")
    return wrong


def autograd(rank: int, ranks: int) -> list[str]:
    """Gradients flow through unshard and checkpoints, second reads of saved tensors are not needed; inputs stay."""
    from torch.utils.checkpoint import checkpoint

    wrong = []
    layout = Layout(17, ranks, rank=rank)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for scheme in ("ring", "ulysses", "gather"):
            torch.manual_seed(0)
            x = torch.randn(1, 17, 2, 8, dtype=dtype)
            sinks = torch.randn(2, dtype=dtype)
            before = sinks.clone()
            mine = layout.shard(x).requires_grad_()

            def call(y: torch.Tensor, scheme: str = scheme, sinks: torch.Tensor = sinks) -> torch.Tensor:
                return unshard(attention(y, y, y, layout=layout, scheme=scheme, causal=True, sinks=sinks), layout)

            whole = x.clone().requires_grad_()
            expected = whole_attention(whole, whole, whole, causal=True, sinks=sinks)
            bound = 0.05 if dtype == torch.bfloat16 else 1e-5
            weights = torch.randn_like(expected)
            (correct,) = torch.autograd.grad((expected * weights).sum() * ranks, whole)
            for name, out in (("plain", call(mine)), ("checkpoint", checkpoint(call, mine, use_reentrant=False))):
                (grad,) = torch.autograd.grad((out * weights).sum(), mine)
                if out.dtype != dtype or not torch.allclose(out, expected, atol=bound):
                    wrong.append(f"{name} {dtype} {scheme}: another out")
                if not torch.allclose(grad, layout.shard(correct), atol=8 * bound):
                    wrong.append(f"{name} {dtype} {scheme}: another gradient")
            if not torch.equal(sinks, before):
                wrong.append(f"{scheme} writes to sinks")
            with torch.autocast("cpu", torch.bfloat16):
                if call(mine).dtype != (dtype if dtype == torch.float64 else torch.bfloat16):
                    wrong.append(f"{scheme} ignores autocast of {dtype}")
            (first,) = torch.autograd.grad((call(mine) * weights).sum(), mine, create_graph=True)
            try:
                torch.autograd.grad(first.sum(), mine)
                wrong.append(f"{scheme} has a second derivative")
            except (RuntimeError, UnsupportedError):
                pass
    return wrong


def repeated(rank: int, ranks: int) -> list[str]:
    """A repeated call computes nothing of its layout again, and builds none."""
    wrong = []
    layouts = Layout([0, 5, 6, 20, 24], ranks), Layout(24, ranks), None
    x = torch.randn(3, 1, 12, ranks, 8, requires_grad=True)

    def step(**options: Any) -> None:
        torch.autograd.grad(attention(*x, causal=True, **options).sum(), x)

    counted = Layout.pieces, Layout.__init__
    for scheme in ("ring", "ulysses", "gather"):
        for layout in layouts:
            step(scheme=scheme, layout=layout)
            try:
                Layout.pieces = Layout.__init__ = None  # type: ignore[assignment, method-assign]
                step(scheme=scheme, layout=layout)
            except TypeError as error:
                wrong.append(f"{scheme} over {layout}: {error}")
            finally:
                Layout.pieces, Layout.__init__ = counted  # type: ignore[method-assign]
    return wrong


def two_axes(rank: int, ranks: int) -> list[str]:
    """A mesh of two axes refuses what it does not run; ranks that disagree anywhere get an error everywhere."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    group, q = init_device_mesh("cpu", (ranks // 2, 2)), torch.randn(1, 6, 2, 8)
    calls: list[tuple[torch.Tensor, dict[str, Any], str]] = [
        (q, {"softcap": float(rank == 1)}, "ranks disagree about softcap: rank 0 has 0.0, rank 1 has 1.0"),
        (q, {"scheme": "gather"}, "scheme='gather' runs on one axis, but the mesh has two"),
        (q, {"bias": q.new_zeros(1, 1, 6, 6 * ranks)}, "a bias with rows of its own is sharded by rows, not by heads"),
        (q[:, :, :1], {}, "1 query heads are no multiple of 2 ranks; give another mesh"),
        (q, {"dropout_p": 0.1}, "there is no dropout_seed; give all ranks the same seed"),
        (q, {"layout": Layout(12, 2)}, f"the layout is for 2 ranks, but the group has {ranks}"),
        (q[:, 1:], {"layout": Layout(24, ranks)}, f"q has 5 rows, but rank {rank} holds {24 // ranks} of the layout"),
    ]
    got = [(text, raised(x, x, x, group=group, **options)) for x, options, text in calls]
    wrong = [f"{text}: {error}" for text, error in got if text not in error]
    wrapped = DTensor.from_local(q, group, [Shard(1)] * 2, run_check=False)
    out = attention(wrapped, wrapped, wrapped)
    if not (out.shape == (1, 6 * ranks, 2, 8) and torch.equal(out.to_local(), attention(q, q, q, group=group))):
        wrong.append("DTensors on two axes give another out")
    return wrong


def between_graphs(rank: int, ranks: int) -> list[str]:
    """Calls with dropout or a layout by runs run between graphs; a whole graph and the op refuse them."""
    from torch.distributed.device_mesh import init_device_mesh

    wrong = []
    x = torch.randn(1, 6, 2, 8, requires_grad=True)
    by_runs = Layout(6 * ranks, ranks, runs=[[(6 * each, 6 * each + 6)] for each in range(ranks)])
    group = init_device_mesh("cpu", (ranks // 2, 2)) if ranks > 2 else None
    calls: tuple[dict[str, Any], ...] = (
        {"layout": by_runs}, {"layout": by_runs.joined(1)}, {"dropout_p": 0.3, "dropout_seed": 5}
    )  # fmt: skip
    for keywords in calls:

        def step(x: Any, keywords: dict[str, Any] = keywords) -> Any:
            return attention(x * 1, x, x, causal=True, group=group, **keywords) * 2

        torch._dynamo.reset()
        results = [step(x), torch.compile(step, backend="eager")(x)]
        pairs = [(out, *torch.autograd.grad(out.square().sum(), x)) for out in results]
        wrong += [
            f"{keywords} in graphs" for eager, result in zip(*pairs, strict=True) if not torch.equal(eager, result)
        ]
        for call, text in (
            (torch.compile(step, backend="eager", fullgraph=True), "such calls run between graphs"),
            (lambda x, keywords=keywords: as_op(x, x, x, group=group, **keywords), "dropout or a layout by runs under"),
        ):
            torch._dynamo.reset()
            try:
                call(x)
                wrong.append(f"{keywords}: no error")
            except (RuntimeError, UnsupportedError) as error:
                wrong += [] if text in str(error) else [f"{text}: {error}"]
    if not torch.equal(as_op(x, x, x, group=group, dropout_seed=5)[0], attention(x, x, x, group=group)):
        wrong.append("a seed without dropout changes out")
    return wrong


def lost(rank: int, ranks: int, how: str) -> list[str]:
    """A rank that ends, or makes another call later, ends the others by the engine's timeout, with our sentence."""
    q = torch.randn(1, 8, 2, 8, requires_grad=True)
    group = dist.new_group(timeout=datetime.timedelta(seconds=5)) if how == "late" else None
    out = attention(q, q, q, scheme="ring" if how == "backward" else "gather")
    if rank == 1:
        if how == "late":
            time.sleep(60)
        os._exit(0)
    try:
        if how == "backward":
            out.sum().backward()
        else:
            attention(q, q, q, scheme="ulysses", group=group, check=how == "check")
    except ExchangeError as error:
        scheme = {"backward": "scheme='ring'", "forward": "scheme='ulysses'"}.get(how, "comparison of arguments")
        is_ours = str(error).startswith(f"{scheme}: rank 0 of 2 got no answer from the others")
        print("explained" if is_ours and isinstance(error.__cause__, RuntimeError) else f"another: {error}", flush=True)
    os._exit(0)


def interrupted(rank: int, ranks: int) -> list[str]:
    """Rank 0 waits for rank 1, which computes; Ctrl-C ends both."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    q = torch.randn(1, 8, 2, 8)
    attention(q, q, q)
    print("waits", flush=True)
    while rank == 1:  # in short sleeps: Python would see a signal that comes just before a sleep only after it
        time.sleep(0.1)
    attention(q, q, q)
    return []


def torn_down(rank: int, ranks: int) -> list[str]:
    """A group is destroyed and another one is built after calls."""
    wrong = []
    for turn in range(2):
        group = dist.new_group(backend="gloo")
        q = torch.randn(1, 8, 2, 8)
        attention(q, q, q, group=group)
        if "ranks disagree about softcap" not in raised(q, q, q, group=group, softcap=float(rank), check=True):
            wrong.append(f"turn {turn} compares nothing")
        dist.barrier()
        dist.destroy_process_group(group)
    member = dist.new_group([0])
    if rank == 1 and "this process is no member of the group" not in raised(q, q, q, group=member):
        wrong.append("a rank outside of the group calls")
    return wrong


def memory(rank: int, ranks: int) -> list[str]:
    """The ring holds at most three copies of the rank's keys and values beside its inputs, state and results."""
    rows, heads, dim = 8, 64, 64
    q, k, v = (torch.randn(1, rows, count, dim) for count in (heads, heads, heads))
    size, states = 2 * k.nbytes, q.nbytes + q[..., 0].nbytes

    def partial(q: torch.Tensor, *arrays: Any, **options: Any) -> Any:
        return q, q[..., 0].transpose(1, 2)

    with mock.patch.object(ring_module, "_forward", partial), torch.no_grad():
        attention(q, k, v, scheme="ring")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            attention(q, k, v, scheme="ring")
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held, most = 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    copies = (most - states) / size
    return [] if events and 1 < copies <= 3.01 else [f"{copies:.2f} copies are held"]


def compiled(rank: int, ranks: int) -> list[str]:
    """A whole graph holds a call: results and gradients are those of an eager call; other documents need no new one."""
    from torch._dynamo.backends.debugging import aot_eager  # the import takes seconds
    from torch.distributed.device_mesh import init_device_mesh

    wrong, graphs = [], 0

    def backend(module: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return aot_eager(module, inputs)

    packed, group = Layout([0, 5, 6, 20, 24], ranks), init_device_mesh("cpu", (ranks,))
    for scheme, layouts, most in (
        ("ring", (None, Layout(24, ranks), packed, Layout([0, 3, 15, 16, 24], ranks)), 3),  # one graph of any documents
        ("ulysses", (packed, Layout(24, ranks)), 2),
        ("gather", (packed, Layout(24, ranks)), 2),
    ):

        def step(q: Any, k: Any, v: Any, sinks: Any, layout: Any, scheme: str = scheme) -> Any:
            out, lse = attention(q * 1, k, v, layout=layout, scheme=scheme, causal=True, sinks=sinks, return_lse=True,
                                 group=group if scheme == "gather" else None)  # fmt: skip
            return loss_of(out * 2, lse, torch.cos(out.detach()), torch.sin(lse.detach()))

        torch._dynamo.reset()
        whole = torch.compile(step, backend=backend, fullgraph=True)
        graphs = 0
        for layout in layouts:
            torch.manual_seed(rank)
            x = [torch.randn(1, 24 // ranks, heads, 8, requires_grad=True) for heads in (2 * ranks, 2, 2)]
            x += [torch.linspace(-1, 1, 2 * ranks).requires_grad_()]
            pairs = [(loss, *torch.autograd.grad(loss, x)) for loss in (step(*x, layout), whole(*x, layout))]
            for name, eager, result in zip(("loss", "dq", "dk", "dv", "dsinks"), *pairs, strict=True):
                if not torch.allclose(eager, result, atol=1e-5):
                    wrong.append(f"{scheme} {layout} {name}: {(eager - result).abs().max():.3g}")
        if graphs > most:
            wrong.append(f"{scheme}: {graphs} graphs")
    return wrong


if __name__ == "__main__":
    run_check(globals())
