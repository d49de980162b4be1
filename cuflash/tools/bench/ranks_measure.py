"""`cuflash bench ranks --measure`: links and distributed attention on the processes of torchrun, beside one GPU.

Ranks are timed together: a barrier, events around each call, the slowest rank of each call, and the median of all.
Contenders take turns. Every kernel compiles in the checks, before any time is read.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from rich import box
from rich.table import Table

from ... import units
from ...distributed.choice import choose, ulysses_lacks
from ...distributed.layout import Kind, Layout
from ...distributed.torch import attention
from ...errors import ProblemError
from ...frameworks.torch import attention as whole_attention
from .. import info
from . import table
from .check import LEAST_NORM, MAX_ERROR
from .measure import Seconds, reason
from .ranks_model import Cluster, shares
from .ranks_problems import OPS, ROWS, Heads, Work, kinds, selected

TURN_SECONDS, MOST_CALLS, LEAST_CALLS = 0.1, 32, 2
TIMEOUT = timedelta(seconds=120)  # of a collective whose other ranks have failed
LINK_BYTES, SMALL_BYTES = 1 << 27, 1 << 10
SLEEP = 20_000_000  # cycles, about 10 ms
# A longer forward on one GPU is replaced by the rows of one rank, with their time multiplied by the work.
MOST_FLOPS = 3e14
ROWS_AT_ONCE = 4096
Call = Callable[[], Any]
Attention = Callable[[Any, Any, Any], Any]  # out of q, k and v


class Machine(NamedTuple):
    """This process: its rank, the number of ranks, and the device and dtype of tensors."""

    rank: int
    ranks: int
    device: Any
    dtype: Any

    @property
    def on_gpu(self) -> bool:
        """True if each rank has a GPU."""
        return bool(self.device.type == "cuda")

    def reduced(self, values: list[float], op: Any) -> list[float]:
        """Returns the maximum, minimum or sum of each number over all ranks."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op)
        reduced: list[float] = tensor.tolist()
        return reduced

    def synchronize(self) -> None:
        """Waits for the GPU."""
        if self.on_gpu:
            torch.cuda.synchronize()


class Problem(NamedTuple):
    """A problem on this machine: whole arrays on every rank, and what one GPU computes of them."""

    work: Work
    whole: list[Any]  # q, k, v, dout
    expected: list[Any]  # out, dq, dk, dv of one GPU

    def shards(self, layout: Layout, rank: int) -> list[Any]:
        """Returns this rank's rows of q, k, v and dout."""
        return [layout.shard(x, 1, rank) for x in self.whole]


class Contender(NamedTuple):
    """A way to compute a rank's rows. scheme: of cuflash, else ""; scope: the context in which calls run."""

    name: str
    kind: Kind
    make: Callable[[Work, Layout], Attention]
    scheme: str = ""
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext


def main(options: argparse.Namespace, cluster: Cluster) -> int:
    """Measures links and problems, and prints and writes them on rank 0; returns 1 if a result is wrong."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ProblemError(
            "--measure runs in the processes of torchrun: torchrun --nproc-per-node=N -m cuflash bench ranks --measure"
        )
    with _group() as machine:
        works = _works(options, machine)
        content: dict[str, Any] = {
            "command": options.typed,
            "machine": info.machine() if machine.rank == 0 else {},
            "ranks": machine.ranks,
        }
        content |= {"links": links(machine), "missing": {}, "rows": []}
        fast = cluster._replace(within=content["links"]["shift"], alpha=content["links"]["alpha"])
        for work, ops in works:
            contenders, missing = _contenders(work, machine, options.quick)
            content["missing"] |= missing
            content["rows"] += measured(machine, fast, work, ops, contenders, options.rounds)
            if machine.rank == 0:
                print(_line(content["rows"], work), flush=True)
                if options.json:  # again after each problem, as a run may be ended
                    table.write(options.json, content)
        if machine.rank == 0:
            show(content)
        return int(any(row["wrong"] or (row["ours"] and row["note"]) for row in content["rows"]))


@contextmanager
def _group() -> Iterator[Machine]:
    """Joins the processes of torchrun, over NCCL with a GPU for each, else over gloo."""
    is_cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if is_cuda and local >= torch.cuda.device_count():
        raise ProblemError(f"process {local} has no GPU: this host has {torch.cuda.device_count()}; start fewer")
    device = torch.device(f"cuda:{local}" if is_cuda else "cpu")
    if is_cuda:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=TIMEOUT, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        dtype = torch.bfloat16 if is_cuda else torch.float32
        yield Machine(dist.get_rank(), dist.get_world_size(), device, dtype)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _works(options: argparse.Namespace, machine: Machine) -> list[tuple[Work, tuple[str, ...]]]:
    """Returns the problems and their ops; small ones without GPUs."""
    both, head_dim = tuple(OPS), (options.head_dims or (128 if machine.on_gpu else 16,))[0]
    rows = options.seqlens or (ROWS if machine.on_gpu else (96,))

    def problems(tokens: int, q: int, kv: int, *lengths: int) -> list[Work]:
        q, kv = options.heads or (q, kv)
        return kinds((tokens,), Heads(q, kv, head_dim), *lengths)

    if not machine.on_gpu:
        works = [work for tokens in rows for work in problems(tokens, 4, 2, 24, 40)]
    elif options.quick:
        works = problems(rows[0], 16, 16) + problems(rows[-1], 8, 8)[:1]
    else:
        heads = [(tokens, 16 if tokens <= ROWS[0] else 8) for tokens in rows]
        works = [work for tokens, count in heads for work in problems(tokens, count, count)]
        works += [work for tokens in rows for work in problems(tokens, 32, 8)]
    forward_only = works[-1] if options.quick and len(rows) > 1 else None
    some = selected([*dict.fromkeys(works)], options.only)
    return [(work, both[:1] if work == forward_only else both) for work in some]


def links(machine: Machine) -> dict[str, float]:
    """Measures bytes a second that a rank sends, by the ring's shift and all-to-all, and seconds of a small shift.

    Small shifts are enqueued while the GPU sleeps: without that, the host's time would be measured.
    """
    n, rank = machine.ranks, machine.rank
    to_next, from_last = [0] * n, [0] * n
    speeds: dict[str, float] = {}
    for name, num_bytes in (("alpha", SMALL_BYTES), ("shift", LINK_BYTES if machine.on_gpu else 1 << 18)):
        count = num_bytes // n * n
        sent = torch.zeros(count, dtype=torch.uint8, device=machine.device)
        received = torch.empty_like(sent)
        to_next[(rank + 1) % n] = from_last[(rank - 1) % n] = count
        calls: dict[str, Call] = {
            name: partial(dist.all_to_all_single, received, sent, from_last, to_next),
            "all_to_all": partial(dist.all_to_all_single, received, sent),
        }
        for call in calls.values():
            call()
        if name == "alpha":
            small = _seconds(machine, calls[name], MOST_CALLS, ahead=True)
            (speeds[name],) = machine.reduced([median(small)], dist.ReduceOp.MAX)
            continue
        seconds = in_turns(machine, calls, {}, 3)
        speeds[name] = seconds[name].median
    return {
        "alpha": speeds["alpha"],
        "shift": count / speeds["shift"],
        "all_to_all": count * max(n - 1, 1) / n / seconds["all_to_all"].median,
        "bytes": count,
    }


def _contenders(work: Work, machine: Machine, quick: bool | None) -> tuple[list[Contender], dict[str, str]]:
    """Returns the contenders for a problem, and reasons why others are missing."""
    chosen = choose(work.layout(machine.ranks), work.mask, work.heads.q, work.heads.kv)
    layouts: tuple[Kind, ...] = ("zigzag", work.kind) if work.kind != "zigzag" else ("zigzag",)
    some = [("ring", layouts[0]), ("ulysses", layouts[0]), *(("gather", kind) for kind in layouts)]
    if quick:
        some = [(scheme, kind) for scheme, kind in some if scheme != "gather" or work.mask.left is not None
                or work.mean_document is not None]  # fmt: skip
    contenders, missing = [], {}
    for scheme, kind in some:
        if scheme == "ulysses" and (lack := ulysses_lacks(work.heads.q, machine.ranks)):
            missing[f"{scheme}, {work.name}"] = lack
            continue
        contenders.append(Contender(f"cuflash {scheme}, {kind}", kind, partial(_ours, scheme), scheme))
    if chosen not in {contender.scheme for contender in contenders}:
        contenders.append(Contender(f"cuflash {chosen}, {work.kind}", work.kind, partial(_ours, chosen), chosen))
    if work.window is None and work.mean_document is None:
        for add in (_context_parallel, _ring_flash_attention):
            try:
                contenders += add(work, machine)
            except Exception as error:  # errors of these imports depend on their compiler packages
                missing[add.__name__.strip("_")] = reason(error)
    return contenders, missing


def _mask(work: Work) -> dict[str, Any]:
    return {"causal": True} if work.window is None else {"window_size": (work.window, 0)}


def _ours(scheme: Any, work: Work, layout: Layout) -> Attention:
    return partial(attention, layout=layout, scheme=scheme, **_mask(work))


def _sdpa(work: Work, layout: Layout) -> Attention:
    def call(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = work.heads.q != work.heads.kv
        sdpa = torch.nn.functional.scaled_dot_product_attention  # read here: context_parallel replaces it
        return sdpa(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)

    return call


def _context_parallel(work: Work, machine: Machine) -> list[Contender]:
    """Returns PyTorch's ring, whose load balancer has the rows of "zigzag"."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh(machine.device.type, (machine.ranks,))

    @contextmanager
    def scope(backend: Any) -> Iterator[None]:
        some = torch.zeros(work.rows * machine.ranks, device=machine.device)  # it needs a buffer, and shards it
        with ExitStack() as stack:
            stack.enter_context(sdpa_kernel(backend))
            stack.enter_context(context_parallel(mesh, buffers=[some], buffer_seq_dims=[0], no_restore_buffers={some}))
            yield

    return [
        Contender(f"torch context_parallel, {name}", "zigzag", _sdpa, scope=partial(scope, backend))
        for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION))
    ]


def _ring_flash_attention(work: Work, machine: Machine) -> list[Contender]:
    from ring_flash_attn import zigzag_ring_flash_attn_func

    def make(work: Work, layout: Layout) -> Attention:
        return partial(zigzag_ring_flash_attn_func, causal=True)

    return [Contender("ring-flash-attention", "zigzag", make)]


def measured(
    machine: Machine, cluster: Cluster, work: Work, ops: tuple[str, ...], contenders: list[Contender], rounds: int
) -> list[dict[str, Any]]:
    """Checks and times the contenders on one problem; returns a row for each contender and op."""
    problem = prepared(machine, work, "both" in ops)
    auto = choose(work.layout(machine.ranks), work.mask, work.heads.q, work.heads.kv)
    rows: dict[str, dict[str, Any]] = {}
    tasks: dict[str, Call] = {}
    scopes: dict[str, Callable[[], AbstractContextManager[Any]]] = {}
    for contender in contenders:
        layout = work._replace(kind=contender.kind).layout(machine.ranks)
        shards = problem.shards(layout, machine.rank)
        function = contender.make(work, layout)
        for op in ops:
            key = f"{contender.name}: {op}"
            task: Call = partial(run, function, shards, op == "both")
            rows[key] = {"problem": work.name, "op": op, "contender": contender.name, "scheme": contender.scheme,
                         "kind": contender.kind, "ours": bool(contender.scheme), "auto": contender.scheme == auto,
                         **checked(machine, contender, problem, layout, task, shards)}  # fmt: skip
            if not rows[key]["note"]:
                tasks[key], scopes[key] = task, contender.scope
    alone = {f"one GPU: {op}": one_gpu(machine, problem, op == "both") for op in ops}
    tasks |= {name: task for name, (task, _) in alone.items()}
    seconds = in_turns(machine, tasks, scopes, rounds, local=alone)
    for key, row in rows.items():
        name = f"one GPU: {row['op']}"
        row["one_gpu_seconds"] = seconds[name].median * alone[name][1]
        row |= {"seconds": None, "share": None, "computed": None}
        if key in seconds:
            row |= {"seconds": seconds[key].median, "spread": seconds[key].spread}
            row["share"] = row["one_gpu_seconds"] / row["seconds"]
        if row["scheme"] and machine.on_gpu and machine.rank == 0:
            of_kind = work._replace(kind=row["kind"])
            share = shares(cluster, of_kind, machine.ranks, OPS[row["op"]]).get(row["scheme"])
            row["computed"] = share.share if share else None
    return [*rows.values()]


def prepared(machine: Machine, work: Work, backward: bool) -> Problem:
    """Draws equal arrays on all ranks, and computes the results on each GPU alone."""
    generator = torch.Generator(machine.device).manual_seed(0)
    total, (q, kv, dim) = work.rows * machine.ranks, work.heads

    def drawn(heads: int) -> Any:
        shape = 1, total, heads, dim
        return torch.randn(shape, generator=generator, device=machine.device, dtype=machine.dtype)

    problem = Problem(work, [drawn(heads) for heads in (q, kv, kv, q)], [])
    return problem._replace(expected=run(_alone(machine, work), problem.whole, backward))


def _alone(machine: Machine, work: Work) -> Attention:
    """Returns a function that computes the whole problem, or the first rows of one sequence, on this GPU."""
    if work.mean_document is None:
        return partial(whole_attention, **_mask(work))
    bounds = work.layout(machine.ranks).cu_seqlens
    tensor, longest = torch.tensor(bounds, dtype=torch.int32, device=machine.device), max(np.diff(bounds).tolist())
    lengths = {"cu_seqlens_q": tensor, "cu_seqlens_k": tensor, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return lambda q, k, v: whole_attention(q[0], k[0], v[0], **lengths, **_mask(work))[None]


def run(function: Attention, arrays: list[Any], backward: bool) -> list[Any]:
    """Returns out, and with `backward` the gradients of q, k and v."""
    *qkv, dout = arrays
    if not backward:
        with torch.no_grad():
            return [function(*qkv)]
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def one_gpu(machine: Machine, problem: Problem, backward: bool) -> tuple[Call, float]:
    """Returns a call on one GPU, and the factor from its seconds to those of a rank's share of the whole problem."""
    work, whole = problem.work, problem.whole
    total = work.rows * machine.ranks
    flops = 2.0 * total**2 * work.heads.q * work.heads.dim
    factor = 1 / machine.ranks
    if flops > MOST_FLOPS and work.window is None and work.mean_document is None:
        whole = [x[:, : work.rows] for x in whole]
        factor *= machine.ranks**2
    return partial(run, _alone(machine, work), whole, backward), factor


def checked(
    machine: Machine, contender: Contender, problem: Problem, layout: Layout, task: Call, shards: list[Any]
) -> dict[str, Any]:
    """Runs a contender once and compares every row with one GPU; returns its error, memory and a note if it failed."""
    error, peak, note = math.nan, 0, ""
    try:
        with contender.scope():
            task()  # compiles, and takes more memory than later calls
            machine.synchronize()
            if machine.on_gpu:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            results = task()
            machine.synchronize()
        if machine.on_gpu:
            peak = torch.cuda.max_memory_allocated() - before + sum(x.nbytes for x in shards)
        expected = [layout.shard(x, 1, machine.rank) for x in problem.expected[: len(results)]]
        error = max(row_errors(results, expected))
    except Exception as failure:  # a peer that does not run here leaves a gap in the table
        note = reason(failure)
    failed, peak_bytes, error = machine.reduced([float(bool(note)), peak, 0.0 if note else error], dist.ReduceOp.MAX)
    note = note or ("it failed on another rank" if failed else "")
    bound = 2 * MAX_ERROR[str(machine.dtype).removeprefix("torch.")]
    wrong = not note and not error <= bound
    if wrong:
        note = f"a row differs from one GPU by {error:.2e}, more than {bound:.2e}"
    return {"error": None if failed else error, "bytes": int(peak_bytes), "note": note, "wrong": wrong}


def row_errors(results: list[Any], expected: list[Any]) -> list[float]:
    """Returns the largest |error| / |row| of the rows of each result, in the Euclidean norm; NaN counts as infinite."""
    errors = []
    for result, exact in zip(results, expected, strict=True):
        largest = 0.0
        floor = LEAST_NORM * float(exact.norm(dim=-1, dtype=torch.float32).max()) if exact.numel() else 1.0
        for a, b in zip(result.split(ROWS_AT_ONCE, 1), exact.split(ROWS_AT_ONCE, 1), strict=True):
            norms = b.norm(dim=-1, dtype=torch.float32).clamp(min=floor)
            ratio = ((a.float() - b.float()).norm(dim=-1) / norms).nan_to_num(math.inf)
            largest = max(largest, float(ratio.max()) if ratio.numel() else 0.0)
        errors.append(largest)
    return errors


def in_turns(
    machine: Machine,
    calls: Mapping[str, Call],
    scopes: Mapping[str, Callable[[], AbstractContextManager[Any]]],
    rounds: int,
    local: Mapping[str, Any] | None = None,
) -> dict[str, Seconds]:
    """Measures seconds of each call, one turn in every round. local: calls that count with the mean of the ranks.

    Each turn begins with a barrier, and its second half counts, when clocks no longer depend on the turn before.
    """

    def turn(name: str, count: int) -> list[float]:
        with scopes.get(name, nullcontext)():
            return _seconds(machine, calls[name], count)

    turn_seconds = TURN_SECONDS if machine.on_gpu else 0.0
    about = {name: turn(name, 2)[1] for name in calls}
    longest = dict(zip(about, machine.reduced([*about.values()], dist.ReduceOp.MAX), strict=True))
    counts = {
        name: min(max(math.ceil(turn_seconds / max(x, 1e-6)), LEAST_CALLS), MOST_CALLS) for name, x in longest.items()
    }
    shuffled, readings = random.Random(0), {name: list[float]() for name in calls}
    for _ in range(rounds):
        for name in shuffled.sample([*calls], len(calls)):
            readings[name] += turn(name, counts[name])[counts[name] // 2 :]
    seconds = {}
    for name, values in readings.items():
        is_local = name in (local or {})
        together = machine.reduced(values, dist.ReduceOp.SUM if is_local else dist.ReduceOp.MAX)
        seconds[name] = Seconds.from_readings([x / machine.ranks if is_local else x for x in together])
    return seconds


def _seconds(machine: Machine, call: Call, count: int, ahead: bool = False) -> list[float]:
    """Returns seconds of each of several calls after a barrier of all ranks.

    ahead: True to let the host enqueue them before the GPU begins.
    """
    dist.barrier()
    if not machine.on_gpu:
        times = [time.perf_counter()]
        for _ in range(count):
            call()
            times.append(time.perf_counter())
        return np.diff(times).tolist()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    if ahead:
        torch.cuda._sleep(SLEEP)
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [1e-3 * events[i].elapsed_time(events[i + 1]) for i in range(count)]


def _line(rows: list[dict[str, Any]], work: Work) -> str:
    """Returns the line to print as soon as a problem is measured."""
    shown = (f"{row['contender']} {row['op']} {_number(row['share'])}" for row in rows if row["problem"] == work.name)
    return f"{work.name}: {', '.join(shown)}"


def _cells(row: dict[str, Any] | None) -> tuple[str, str, str]:
    """Returns milliseconds, share and computed share."""
    if row is None or row["seconds"] is None:
        return "WRONG" if row and row["wrong"] else "–", "", ""
    return f"{row['seconds'] * 1e3:.3f}", _number(row["share"]), _number(row["computed"])


def _number(x: float | None) -> str:
    return "–" if x is None else f"{x:.2f}"


def show(content: dict[str, Any]) -> None:
    """Prints the links, and a line for each problem and contender."""
    out, speeds = table.console(), content["links"]
    out.print(info.line(content["machine"]))
    out.print(
        f"ranks: {content['ranks']}; links of each: ring's shift {speeds['shift'] * 1e-9:.1f} GB/s, all-to-all "
        f"{speeds['all_to_all'] * 1e-9:.1f} GB/s ({units.memory(speeds['bytes'])}), {speeds['alpha'] * 1e6:.0f} µs for "
        f"{units.memory(SMALL_BYTES)}"
    )
    out.print("share: one GPU's time for the whole problem over the ranks, over the time of the slowest rank")
    shown = Table(box=box.SIMPLE_HEAD)
    timed = [column for op in OPS for column in (f"{op}, ms", "share", "computed")]
    for number, heading in enumerate(("", *timed, "memory", "error")):
        shown.add_column(heading, justify="right" if number else "left")
    for problem in dict.fromkeys(row["problem"] for row in content["rows"]):
        rows = [row for row in content["rows"] if row["problem"] == problem]
        alone = {row["op"]: f"{row['one_gpu_seconds'] * 1e3:.3f}" for row in rows}
        shown.add_row(f"{problem}: one GPU", *(cell for op in OPS for cell in (alone.get(op, "–"), "", "")))
        for contender in dict.fromkeys(row["contender"] for row in rows):
            of_one = {row["op"]: row for row in rows if row["contender"] == contender}
            cells = [cell for op in OPS for cell in _cells(of_one.get(op))]
            last = [*of_one.values()][-1]
            error = "–" if last["error"] is None else f"{last['error']:.1e}"
            shown.add_row(
                f"  {contender}{' (auto)' * last['auto']}",
                *cells,
                units.memory(last["bytes"]) if last["bytes"] else "–",
                error,
            )
    out.print(shown)
    for row in content["rows"]:
        if row["note"]:
            out.print(f"{row['problem']}, {row['contender']}, {row['op']}: {row['note']}", markup=False)
    for name, why in content["missing"].items():
        out.print(f"not measured: {name} ({why})", markup=False)
