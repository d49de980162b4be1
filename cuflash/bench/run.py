"""Times our kernels and those of the peers found on this machine, in turn on the same inputs; checks results before.

It exits with 1 if a result is wrong or one of ours did not run. Without a GPU it times the NumPy path.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import replace
from functools import partial
from typing import Any

from .. import arguments
from ..problem.options import ALGORITHMS
from . import check, measure, peers, table
from .arrays import CupyArrays, Inputs, NumpyArrays, TorchArrays, find
from .cases import Case
from .peers import Contender
from .report import Report, Row

TOKENS = 16384  # batch x seqlen of a cell on a GPU
HIDDEN = 2048  # heads x head_dim
ROTATED_BYTES = 1 << 28  # calls rotate through input sets, which together exceed every GPU's L2 cache
LONG_SEQLENS = (8192, 65536)  # of the float32 section: the score matrix fits into memory in the first alone
LONG_HEADS = 16
OPS = tuple(check.OUTPUTS)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "--ops", type=partial(arguments.names, OPS), default=OPS, metavar="O,O", help="default forward,backward"
    )
    parser.add_argument("--dtype", choices=list(check.MAX_ERROR), help="default bfloat16; float32 without a GPU")
    parser.add_argument(
        "--head-dims", type=arguments.integers, metavar="N,N", help="default 64,128,256; 64 without a GPU"
    )
    parser.add_argument(
        "--seqlens", type=arguments.integers, metavar="N,N", help="default 1k,4k,16k; 512,2k without a GPU"
    )
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, help="only this mask; default both")
    parser.add_argument(
        "--algorithms",
        type=partial(arguments.names, ALGORITHMS),
        metavar="A,A",
        help="of forward; default flash2,flash1,flashd; also standard",
    )
    parser.add_argument(
        "--rounds", type=arguments.count, default=30, metavar="N", help="turns of each contender in a cell; default 30"
    )
    parser.add_argument("--json", type=arguments.output, metavar="FILE", help="write everything measured to FILE")
    parser.add_argument("--quick", action="store_true", help="seqlen 4k, flash2 alone, 10 rounds, no start-up times")


def main(options: argparse.Namespace) -> int:
    """Runs the benchmark, prints and writes the report; returns 1 if an output is wrong or one of ours did not run."""
    arrays, no_gpu = find()
    if no_gpu:
        print(f"Timing the NumPy path on the CPU, in small cells: {no_gpu}")
    report = bench(arrays, options)
    table.show(report)
    if options.json:
        options.json.write_text(table.to_json(report), "utf-8")
    return int(report.failed)


def bench(arrays: NumpyArrays, options: argparse.Namespace) -> Report:
    """Measures all cells, then host and start-up times on a GPU."""
    found, missing = peers.find(arrays)
    report = Report(peers.machine(), arrays.name, missing)
    algorithms = options.algorithms or (("flash2",) if options.quick else ("flash2", "flash1", "flashd"))
    rounds = min(options.rounds, 10) if options.quick else options.rounds
    for op in options.ops:
        ours, others = peers.ours(op, arrays, algorithms), [contender for contender in found if contender.op == op]
        for cell in cells(arrays, options):
            report.rows += run_cell(arrays, cell, ours + others, rounds)
        if isinstance(arrays, CupyArrays):
            for cell in long_cells(op, options):
                report.rows += run_cell(arrays, cell, ours[:1] + others, rounds)
            report.host_seconds |= host_times(arrays, ours + others)
    if arrays.on_gpu and not options.quick:
        report.startup = measure.startup(options.ops)
    return report


def cells(arrays: NumpyArrays, options: argparse.Namespace) -> list[Case]:
    """The grid of head dims, masks and lengths."""
    on_gpu = arrays.on_gpu
    tokens, hidden = (TOKENS, HIDDEN) if on_gpu else (2048, 256)
    dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    seqlens = options.seqlens or ((1024, 4096, 16384) if on_gpu else (512, 2048))
    if options.quick and not options.seqlens:
        seqlens = (4096,) if on_gpu else (512,)
    return [
        _cell(max(1, tokens // seqlen), seqlen, max(1, hidden // head_dim), head_dim, dtype, causal)
        for head_dim in options.head_dims or ((64, 128, 256) if on_gpu else (64,))
        for causal in ((False, True) if options.causal is None else (options.causal,))
        for seqlen in seqlens
    ]


def long_cells(op: str, options: argparse.Namespace) -> list[Case]:
    """float32 cells of head_dim 64: the score matrix fits into memory in the first; the second is for forward alone."""
    seqlens = LONG_SEQLENS[:1] if options.quick or op == "backward" else LONG_SEQLENS
    return [_cell(1, seqlen, LONG_HEADS, 64, "float32", False) for seqlen in seqlens]


def run_cell(arrays: NumpyArrays, cell: Case, contenders: list[Contender], rounds: int) -> list[Row]:
    """Checks every contender that takes this dtype, then times in turn those that are right."""
    present = [contender for contender in contenders if cell.dtype in contender.dtypes]
    op = present[0].op
    inputs = arrays.inputs(op, cell)
    rows = {row.contender.name: row for row in check_cell(arrays, cell, present, inputs)}
    arrays.release()
    num_sets = max(1, min(16, -(-ROTATED_BYTES // sum(x.nbytes for x in inputs)))) if arrays.on_gpu else 1
    input_sets = [inputs, *(arrays.inputs(op, cell, seed) for seed in range(1, num_sets))]
    sound = [x for x in present if rows[x.name].error is not None and not rows[x.name].wrong]
    seconds = measure.seconds_per_call(arrays, {x.name: x.run(input_sets, cell.causal) for x in sound}, rounds)
    arrays.release()
    timed = [replace(row, seconds=seconds.get(name)) for name, row in rows.items()]
    print(table.line(timed), file=sys.stderr, flush=True)
    return timed


def check_cell(arrays: NumpyArrays, cell: Case, contenders: list[Contender], inputs: Inputs) -> list[Row]:
    """Calls each contender once; compares sampled rows with float64, and all rows with the first right contender."""
    samples = check.sample(arrays, contenders[0].op, cell, inputs)
    bound = check.MAX_ERROR[cell.dtype]
    rows: list[Row] = []
    reference: tuple[str, dict[str, Any]] | None = None
    for contender in contenders:
        try:
            run = contender.run([inputs], cell.causal)
            with run.scope():
                found = check.outputs(contender.op, run.calls[0]())
            arrays.synchronize()
        except Exception as error:  # why: a peer that does not run here leaves a gap in the table, not more
            text = str(error).strip() or type(error).__name__
            rows.append(Row(cell, contender, note=text if contender.ours else text.splitlines()[0][:120]))
            continue
        output, off = check.error(arrays, found, samples)
        wrong = not off <= bound  # why: NaN is wrong too
        note = f"error {off:.2e} in sampled rows of {output} is over {bound:.2e}" if wrong else ""
        if not wrong and reference is None:
            reference = contender.name, found
        elif not wrong and reference is not None:
            output, apart = check.distance(arrays, found, reference[1])
            wrong = not apart <= 2 * bound
            note = f"{output} differs from {reference[0]} by {apart:.2e}, more than {2 * bound:.2e}" if wrong else ""
        rows.append(Row(cell, contender, error=off, note=note, wrong=wrong))
    return rows


def host_times(arrays: CupyArrays, contenders: list[Contender]) -> dict[str, float]:
    """Seconds to enqueue a repeated call on a problem whose kernel takes less; ours are timed on CuPy arrays, too."""
    case = _cell(1, 128, 1, 64, "float16", True)
    timings: dict[str, float] = {}
    for kind in (CupyArrays(), arrays) if isinstance(arrays, TorchArrays) else (arrays,):
        for contender in contenders:
            if case.dtype in contender.dtypes and (contender.ours or kind is arrays):
                with contextlib.suppress(Exception):  # why: the rows say which contenders cannot run
                    run = contender.run([kind.inputs(contender.op, case)], case.causal)
                    name = f"{contender.op}, {contender.name}, {kind.name} arrays"
                    timings[name] = measure.host_seconds(kind, run)
    return timings


def _cell(batch: int, seqlen: int, heads: int, head_dim: int, dtype: str, causal: bool) -> Case:
    name = f"{dtype} d{head_dim} {'causal' if causal else 'full'} seqlen {seqlen} batch {batch} heads {heads}"
    return Case(name, batch, seqlen, seqlen, heads, heads, head_dim, head_dim, dtype, causal)
