"""Virtual ranks: threads of one process, which share one GPU or the CPU; drawn cases of `cuflash.distributed` on them.

virtual_ranks.py RANKS FIRST COUNT [DEVICE]    prints what is wrong, and after each case "ran" and their number
torchrun --standalone --nproc-per-node=RANKS virtual_ranks.py RANKS FIRST COUNT    with a GPU for each rank, and NCCL

DEVICE is cuda where there is a GPU. There inputs have 16 bits and results are compared with float64; with split_size,
results of "ulysses" and "gather" must have the bits of one call. Several processes may share a GPU, to compile kernels
on all cores.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from unittest import mock

import rank_cases
import torch
import torch.distributed as dist
from rank_cases import MOST_ERROR, Case, Whole, loss_of, results_of, shard
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup, ThreadLocalWorld

from cuflash.distributed.choice import kv_copies

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run_ranks(ranks: int, function: Callable[[int], Any]) -> list[Any]:
    """Calls function(rank) for each rank of a group, in threads; returns the results, or raises the first error.

    On a GPU all threads use the default stream, so that a rank's copies follow the kernels of another rank. Backward
    runs in the rank's thread: `ProcessLocalGroup` turns autograd's threads off.
    """
    store, world, hook = dist.HashStore(), dist.distributed_c10d._world, sys.excepthook

    def run(rank: int) -> Any:
        try:
            dist.init_process_group("threaded", store=store, rank=rank, world_size=ranks)
            return function(rank)
        except BaseException as error:
            ProcessLocalGroup.exception_handle(error)  # ends the other ranks by SystemExit
            raise

    _set_thread_isolation_mode(True)
    dist.distributed_c10d._world = ThreadLocalWorld()
    try:
        with ThreadPoolExecutor(ranks) as pool:
            futures = [pool.submit(run, rank) for rank in range(ranks)]
        errors = [error for each in futures if (error := each.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, SystemExit)):
            raise error
        return [each.result() for each in futures]
    finally:
        ProcessLocalGroup.reset()
        dist.distributed_c10d._world, sys.excepthook = world, hook
        _set_thread_isolation_mode(False)


class Exact(NamedTuple):
    """Results in float64, and for sums over rows the size of their summands, by the names of `Whole`."""

    results: dict[str, torch.Tensor]
    units: dict[str, float]

    @classmethod
    def computed(cls, case: Case, whole: Whole) -> Exact:
        """Computes attention and its gradients with whole score matrices."""
        layout, (heads_q, heads_kv) = case.layout, case.heads
        leaves = {name: x.detach().double().requires_grad_() for name, x in whole.leaves.items()}
        group, device, rows = heads_q // heads_kv, whole.dout.device, layout.seqlen
        q, k, v = (leaves[name].transpose(1, 2) for name in "qkv")
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        document = torch.bucketize(torch.arange(rows), torch.tensor(layout.cu_seqlens[1:]), right=True).to(device)
        position = torch.arange(rows, device=device) - torch.tensor(layout.cu_seqlens, device=device)[document]
        h, i, j = torch.arange(heads_q, device=device)[:, None, None], position[:, None], position
        bounds = torch.tensor(layout.cu_seqlens, device=device)
        length = (bounds[document + 1] - bounds[document])[:, None]
        batch = document[:, None] if len(bounds) > 2 else torch.arange(case.batch, device=device)[:, None, None, None]
        mods = case.mod_kwargs(leaves)
        # Outside of a trace, lengths and positions are those of each row's document.
        stand_ins = {"seqlen_q": lambda: length, "seqlen_k": lambda: length, "position_of": lambda index: index}
        s = q @ k.transpose(2, 3) * case.options.get("softmax_scale", case.dims[0] ** -0.5)
        if cap := case.options.get("softcap"):
            s = cap * torch.tanh(s / cap)
        with mock.patch.multiple(rank_cases, **stand_ins):
            s = mods["score_mod"](s, batch, h, i, j) if "score_mod" in mods else s + 0
            of_mod = mods["mask_mod"](batch, h, i, j) if "mask_mod" in mods else True
        scores = s
        s = s + mods.get("bias", 0.0)
        left, right = case.options.get("window_size", (-1, 0 if case.options.get("causal") else -1))
        visible = (document[:, None] == document).expand(heads_q, rows, rows)
        visible = visible & (i - j <= (left if left >= 0 else rows)) & (j - i <= (right if right >= 0 else rows))
        visible = visible & of_mod
        sinks = leaves["sinks"] if "sinks" in leaves else q.new_full((heads_q,), -torch.inf)
        by_row = sinks[:, None].expand(case.batch, heads_q, rows).clone().requires_grad_()
        s = torch.cat([s.masked_fill(~visible, -torch.inf), by_row[..., None]], -1)
        largest = s.detach().amax(-1).nan_to_num(neginf=0.0)
        weights = (s - largest[..., None]).exp()
        total = weights.sum(-1)
        some = torch.where(total > 0, total, 1.0)
        lse = torch.where(total > 0, largest + some.log(), -torch.inf)
        out = ((weights / some[..., None])[..., :-1] @ v).transpose(1, 2)
        loss = loss_of(out, lse, whole.dout.double(), whole.dlse.double())
        *grads, ds, of_sinks = torch.autograd.grad(loss, [*leaves.values(), scores, by_row])
        names = ["d" + name for name in leaves]
        sums = {"dsinks": of_sinks.square().sum((0, 2)), "dslopes": (ds * (i - j)).square().sum((0, 2, 3)),
                "drow_bias": ds.square().sum((0, 2))}  # fmt: skip
        units = {name: float(x.sqrt().max()) for name, x in sums.items() if x.numel()}
        return cls({"out": out, "lse": lse, **dict(zip(names, grads, strict=True))}, units)


def wrong_bits(case: Case, name: str, result: torch.Tensor, expected: torch.Tensor) -> bool:
    """True if a result lacks the bits of one call that it should have."""
    is_fixed = "split_size" in case.options or case.options.get("num_splits") == 1
    # Code of a score_mod that knows offsets and lengths of the whole sequence may order its sums in another way.
    if not is_fixed or case.scheme not in ("ulysses", "gather")[: 1 if "score_mod" in case.mods else 2]:
        return False
    names = {"out", "lse"}
    if case.scheme == "ulysses" and case.options["deterministic"]:
        # Gradients of kv heads that several ranks read are added up outside of the kernels.
        names |= {"dq"} if kv_copies(*case.heads, case.layout.ranks) > 1 else {"dq", "dk", "dv"}
    return name in names and not torch.equal(result, expected)


def limit(case: Case, name: str, whole: Whole, exact: Exact) -> float:
    """Returns the largest error of a result: twice that of one call, and a few units in the last place."""
    correct, one = exact.results[name].detach(), whole.results[name].detach()
    finite = correct.isfinite() & one.isfinite()
    if not finite.any():
        return 0.0
    size = float(correct[finite].abs().max())
    unit = max(size, 1.0 + size if name == "lse" else 0.0, exact.units.get(name, 0.0))
    # Sums over rows of replicated parameters are float32, but weights are rounded to the inputs' dtype.
    dtype = case.dtype if name in exact.units else one.dtype
    ulps = 16 if name == "lse" else 4 if name in exact.units or case.layout.seqlen < 32 else 2
    return 2 * float((one - correct)[finite].abs().max()) + ulps * torch.finfo(dtype).eps * unit


def failures(case: Case, seed: int, device: str = DEVICE) -> list[str]:
    """Returns what differs between the results of a case on ranks and those of one call.

    In a process of torchrun these are the results of its rank; else of all ranks, as threads.
    """
    ranks = case.layout.ranks
    whole = Whole.computed(case, seed, device)
    is_threads = "RANK" not in os.environ
    numbers = range(ranks) if is_threads else [dist.get_rank()]

    def computed(rank: int) -> dict[str, torch.Tensor]:
        return results_of(case, whole, rank)

    def of_ranks() -> list[dict[str, torch.Tensor]]:
        return run_ranks(ranks, computed) if is_threads else [computed(rank) for rank in numbers]

    parts = of_ranks()
    again = of_ranks() if case.scheme == "ring" else parts
    is_exact = case.dtype == torch.float32
    exact = Exact(whole.results, {}) if is_exact else Exact.computed(case, whole)
    wrong = []
    for name, one in whole.results.items():
        size = one.detach().nan_to_num(posinf=0.0, neginf=0.0).abs().max() if one.numel() else 1.0
        most = MOST_ERROR * max(1.0, float(size)) if is_exact else limit(case, name, whole, exact)
        for rank, part, repeated in zip(numbers, parts, again, strict=True):
            result, correct = part[name].detach(), shard(case.layout, rank, name, exact.results[name]).detach()
            error = (result - correct).abs().masked_fill(result == correct, 0.0).nan_to_num(nan=torch.inf)
            if error.numel() and float(error.max()) > most:
                wrong.append(f"rank {rank}: {name} is off by {float(error.max()):.3g}, over {most:.3g}")
            if wrong_bits(case, name, result, shard(case.layout, rank, name, one)):
                wrong.append(f"rank {rank}: {name} has other bits")
            repeats = name in ("out", "lse") or case.options.get("deterministic", device == "cpu")
            if repeats and not torch.equal(result, repeated[name]):
                wrong.append(f"rank {rank}: {name} does not repeat")
    if device == "cuda":
        torch.cuda.empty_cache()  # score matrices take gigabytes, and other processes may share the GPU
    return [f"seed {seed}: {text} in {case}" for text in wrong]


def drawn(ranks: int, first: int, count: int, device: str = DEVICE) -> list[str]:
    """Runs `count` cases; returns the failures."""
    wrong = []
    for seed in range(first, first + count):
        case = Case.draw(seed, ranks, device)
        try:
            wrong += failures(case, seed, device)
        except Exception:
            wrong.append(f"seed {seed}: {case}\n{traceback.format_exc()}")
    return wrong


def main() -> None:
    """Runs drawn cases."""
    ranks, first, count = map(int, sys.argv[1:4])
    device = sys.argv[4] if len(sys.argv) > 4 else DEVICE
    if "RANK" in os.environ:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    wrong = []
    for number in range(count):
        wrong += (texts := drawn(ranks, first + number, 1, device))
        print(*texts, f"ran {number + 1}", sep="\n", flush=True)
    if "RANK" in os.environ:
        dist.barrier()
        dist.destroy_process_group()
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
