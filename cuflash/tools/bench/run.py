"""Checks and times the kernels of cuflash and of the peers on this machine, in turn on the same inputs.

It exits with 1 if a result is wrong or a call of cuflash did not run. Without a GPU it times the NumPy path.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ...errors import ProblemError
from ...problem.options import ALGORITHMS
from ...testing.arrays import CupyArrays, Inputs, NumpyArrays, TorchArrays, find
from ...testing.cases import Case
from .. import arguments
from ..console import Console
from . import check, compare, measure, peers, pictures, ranks, table
from .peers import Contender
from .presets import OF_PROBLEMS, PRESETS, square
from .ranks_problems import NAME as RANKS
from .report import Report, Row

ROTATED_BYTES = 1 << 28  # calls rotate through input sets that together exceed every GPU's L2 cache
OPS = tuple(check.OUTPUTS)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    presets = [f"{name}: {str(x.make.__doc__).rstrip('.')}" for name, x in PRESETS.items()]
    presets.append(f"{RANKS}: {ranks.HELP}")
    add = parser.add_argument
    add("preset", nargs="?", choices=(*PRESETS, RANKS), default="paper", help=f"the problems: {'; '.join(presets)}")
    add("--ops", type=partial(arguments.names, OPS), metavar="O,O", help="default forward,backward")
    add("--dtype", choices=list(check.MAX_ERROR), help="default bfloat16; float32 without a GPU")
    add("--head-dims", type=arguments.integers, metavar="N,N", help="default 64,128,256; 64 without a GPU")
    add("--seqlens", type=arguments.integers, metavar="N,N", help="such as 1k,16k")
    add("--causal", action=argparse.BooleanOptionalAction, help="only this mask; default both, quick only causal")
    algorithms = "for forward; default flash2; also flash1, flashd, standard"
    add("--algorithms", type=partial(arguments.names, ALGORITHMS), metavar="A,A", help=algorithms)
    add("--only", default="", metavar="TEXT", help="only problems with TEXT in their name")
    rounds, turns = partial(arguments.count, least=3), "turns of each contender, at least 3; default 3"
    add("--rounds", type=rounds, default=3, metavar="N", help=turns)
    add("--json", type=arguments.output, metavar="FILE", help="write everything measured to FILE")
    add("--pictures", type=arguments.folder, metavar="FOLDER", help="draw the results into FOLDER; needs matplotlib")
    add(
        "--draw", type=arguments.existing, metavar="FILE", help="draw a file of --json into --pictures; measure nothing"
    )
    files = "compare two files of --json; measure nothing"
    add("--compare", nargs=2, type=arguments.existing, metavar=("OLD", "NEW"), help=files)
    ranks.add_options(parser)


def main(options: argparse.Namespace) -> int:
    """Runs the benchmark, prints and writes the report; returns 1 if an output is wrong or one of ours did not run."""
    if options.compare:
        return compare.show(*options.compare)
    if options.preset == RANKS:
        return ranks.main(options)
    _refuse_what_is_not_taken(options)
    draw = pictures.bench() if options.pictures else None  # first, to report a missing package at once
    if options.draw and draw:
        content = compare.read(options.draw)
        if "ranks" in content:
            raise ProblemError(f"{options.draw} holds measurements of ranks, which have no picture; give another file")
        return _drawn(draw, content, options.pictures)
    arrays, no_gpu = find()
    if no_gpu:
        print(f"Timing the NumPy path on the CPU, in small problems: {no_gpu}")
    report = bench(arrays, options)
    content = table.facts(report)
    table.show(report)
    try:
        if options.json:
            table.write(options.json, content)
    finally:  # results are drawn even if the file cannot be written
        if draw is not None:
            _drawn(draw, content, options.pictures)
    return int(report.failed)


def _refuse_what_is_not_taken(options: argparse.Namespace) -> None:
    """Raises ProblemError for options that would have no effect."""
    names = [name for name in OF_PROBLEMS if getattr(options, name) is not None]
    if unused := [name for name in names if name not in PRESETS[options.preset].takes]:
        takers = ", ".join(name for name, preset in PRESETS.items() if unused[0] in preset.takes)
        raise ProblemError(f"--{unused[0].replace('_', '-')} goes with {takers}; leave it out")
    if unused := [name for name in ranks.OPTIONS if getattr(options, name) is not None]:
        raise ProblemError(f"--{unused[0]} goes with {RANKS}; leave it out")
    if options.draw and not options.pictures:
        raise ProblemError("--draw goes with --pictures FOLDER: add the folder to draw into")
    if options.draw and options.json:
        raise ProblemError("--draw measures nothing that --json could write; leave one of them out")


def _drawn(draw: Callable[[dict[str, Any], Path], list[Path]], content: dict[str, Any], folder: Path) -> int:
    paths = draw(content, folder)
    for path in paths:
        print(f"drawn: {path}")
    if not paths:
        print("drawn: nothing, as nothing was timed")
    return 0


def bench(arrays: NumpyArrays, options: argparse.Namespace) -> Report:
    """Measures all problems of the preset; on a GPU also host times of a grid, and start-up times for `paper`."""
    preset = PRESETS[options.preset]
    available, missing = peers.find(arrays, flex=preset.beside_flex)
    report = Report(peers.machine(arrays), arrays.name, options.preset, missing, command=options.typed)
    timed = [x for x in preset.make(arrays, options) if options.only.lower() in x.case.name.lower()]
    if not timed:
        of_ops = f" of {' and '.join(options.ops)}" if options.ops else ""
        raise ProblemError(f"no problem of {options.preset}{of_ops} has {options.only!r} in its name")
    ops = tuple(dict.fromkeys(x.op for x in timed))
    algorithms = options.algorithms or preset.algorithms
    contenders = {op: peers.ours(op, arrays, algorithms) + [x for x in available if x.op == op] for op in ops}
    columns = TextColumn("bench"), BarColumn(), TextColumn("{task.fields[name]}"), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=len(timed), name="")
        for op, case in timed:
            progress.update(bar, name=f"{op} {case.name}")
            report.rows += (rows := run_case(arrays, case, contenders[op], options.rounds))
            progress.console.print(table.line(options.preset, rows), markup=False, highlight=False, soft_wrap=True)
            progress.advance(bar)
    if isinstance(arrays, CupyArrays) and preset.is_grid:
        for op in ops:
            report.host_seconds |= host_times(arrays, contenders[op])
        if preset.times_first_calls:
            report.startup = measure.startup(ops)
    return report


def run_case(arrays: NumpyArrays, case: Case, contenders: list[Contender], rounds: int) -> list[Row]:
    """Checks every contender that takes this dtype, then times the right ones in turn."""
    present = [contender for contender in contenders if case.dtype in contender.dtypes]
    op = present[0].op
    inputs = arrays.inputs(op, case)
    rows = {row.contender.name: row for row in check_case(arrays, case, present, inputs)}
    arrays.release()
    num_sets = max(1, min(16, -(-ROTATED_BYTES // sum(x.nbytes for x in inputs)))) if arrays.on_gpu else 1
    input_sets = [inputs, *(arrays.inputs(op, case, seed) for seed in range(1, num_sets))]
    sound = [x for x in present if rows[x.name].error is not None and not rows[x.name].wrong]
    prepared = {x.name: partial(x.run, input_sets, case) for x in sound}
    seconds, notes = measure.seconds_per_call(arrays, prepared, rounds)
    arrays.release()
    on_gpu: dict[str, measure.Seconds] = {}
    state: dict[str, float] = {}
    if isinstance(arrays, CupyArrays):
        captured = {x.name: prepared[x.name] for x in sound if x.captures and x.name in seconds}
        on_gpu, more = measure.seconds_in_graphs(
            arrays, captured, seconds, rounds, lambda: state.update(arrays.state())
        )
        notes |= more
        arrays.release()
    return [
        replace(row, wall=seconds.get(name), graph=on_gpu.get(name), state=state, note=row.note or notes.get(name, ""))
        for name, row in rows.items()
    ]


def check_case(arrays: NumpyArrays, case: Case, contenders: list[Contender], inputs: Inputs) -> list[Row]:
    """Calls each contender once; compares sampled rows with float64, and all rows with the first right contender."""
    samples = check.sample(arrays, contenders[0].op, case, inputs)
    bound = check.MAX_ERROR[case.dtype]
    rows: list[Row] = []
    reference: tuple[str, dict[str, Any]] | None = None
    for contender in contenders:
        try:
            run = contender.run([inputs], case)
            with run.scope():
                run.repeat(1)  # a first call may take more memory than later ones
                arrays.synchronize()
                arrays.release()
                result, peak = arrays.peak(run.calls[0])
            arrays.synchronize()
            outputs = check.outputs(contender.op, result)
            del result
        except Exception as error:  # a peer that does not run here only leaves a gap in the table
            note = measure.reason(error, whole=contender.ours)
            rows.append(Row(case, contender, note=note))
            continue
        output, off = check.error(arrays, outputs, samples)
        wrong = not off <= bound  # True for NaN, too
        note = f"error {off:.2e} in sampled rows of {output} is over {bound:.2e}" if wrong else ""
        if not wrong and reference is None:
            reference = contender.name, outputs
        elif not wrong and reference is not None:
            output, apart = check.distance(arrays, outputs, reference[1])
            wrong = not apart <= 2 * bound
            note = f"{output} differs from {reference[0]} by {apart:.2e}, more than {2 * bound:.2e}" if wrong else ""
        rows.append(Row(case, contender, error=off, note=note, wrong=wrong, peak_bytes=peak))
    return rows


def host_times(arrays: CupyArrays, contenders: list[Contender]) -> dict[str, float]:
    """Measures seconds to enqueue a repeated call whose kernel takes less; ours also on CuPy arrays."""
    case = square(1, 128, 1, 64, "float16", True)
    timings: dict[str, float] = {}
    for kind in (CupyArrays(), arrays) if isinstance(arrays, TorchArrays) else (arrays,):
        for contender in contenders:
            if case.dtype in contender.dtypes and (contender.ours or kind is arrays):
                with contextlib.suppress(Exception):  # the rows show which contenders cannot run
                    run = contender.run([kind.inputs(contender.op, case)], case)
                    name = f"{contender.op}, {contender.name}, {kind.name} arrays"
                    timings[name] = measure.host_seconds(kind, run)
    return timings
