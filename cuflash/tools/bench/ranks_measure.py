"""`cuflash bench ranks --measure`: links and distributed attention on the processes of torchrun, beside one GPU.

Ranks are timed together: a barrier, events around each call, the slowest rank of each call, and the median of all.
Contenders take turns. Every kernel compiles in the checks, before any time is read.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from rich import box
from rich.table import Table

from ... import units
from ...distributed.choice import choose
from ...distributed.layout import Layout
from ...errors import ProblemError
from ...frameworks.torch import attention as whole_attention
from .. import info
from . import table
from .check import LEAST_NORM, MAX_ERROR
from .measure import reason
from .ranks_contenders import Attention, Contender, find, mask_of
from .ranks_model import Cluster, shares
from .ranks_problems import OPS, ROWS, Heads, Work, kinds, selected
from .ranks_timing import SMALL_BYTES, Call, Machine, in_turns, links

TIMEOUT = timedelta(seconds=120)  # of a collective whose other ranks have failed
# A longer forward on one GPU is replaced by the rows of one rank, with their time multiplied by the work.
MOST_FLOPS = 3e14
ROWS_AT_ONCE = 4096


class Problem(NamedTuple):
    """A problem on this machine: whole arrays on every rank, and what one GPU computes of them."""

    work: Work
    whole: list[Any]  # q, k, v, dout
    expected: list[Any]  # out, dq, dk, dv of one GPU

    def shards(self, layout: Layout, rank: int) -> list[Any]:
        """Returns this rank's rows of q, k, v and dout."""
        return [layout.shard(x, 1, rank) for x in self.whole]


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
            contenders, missing = find(work, machine, options.quick)
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
        gc.collect()  # a graph in the traceback of a failed contender may hold the group, and gloo then aborts
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
        return partial(whole_attention, **mask_of(work))
    bounds = work.layout(machine.ranks).cu_seqlens
    tensor, longest = torch.tensor(bounds, dtype=torch.int32, device=machine.device), max(np.diff(bounds).tolist())
    lengths = {"cu_seqlens_q": tensor, "cu_seqlens_k": tensor, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return lambda q, k, v: whole_attention(q[0], k[0], v[0], **lengths, **mask_of(work))[None]


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
