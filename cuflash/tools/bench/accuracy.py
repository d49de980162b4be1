"""Errors of cuflash and of the peers on this machine, against float64, on the same inputs.

Rows are dtypes, head dims, lengths and sizes of the scores, forward and backward. It exits with 1 if an error of
cuflash exceeds the largest error of the peers times a limit: 1.1 for most rows, see `allowed`. Without a GPU it
measures the NumPy path, in small problems.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from ...errors import ProblemError
from ...testing.arrays import Inputs, NumpyArrays, TorchArrays, find
from ...testing.cases import Case
from .. import arguments, info
from . import check, measure, peers, pictures, table
from .report import Errors, Setting

OPS = tuple(check.OUTPUTS)
LENGTHS = (512, 4096, 32768, 131072)
SIZES = (1.0, 3.0, 10.0, 100.0, 1000.0, 10000.0)  # standard deviations of the scores
MIDDLE = 4096  # length at which scores of all sizes are measured
TOKENS = 1 << 16  # rows of a problem, in up to MOST_HEADS heads: their mean error repeats to a percent
MOST_HEADS = 16
CHUNK = 1 << 27  # float64 scores in memory at once: 1 GiB
# Limits of our error over the peers' largest. float32 is three products of TF32, held to four times float32's error.
ALLOWED = {"bfloat16": 1.1, "float16": 1.1, "float32": 4.0}
# In 16 bits, for scores so large that float32 holds their exponents only to 2^-8, without the peer that scales scores
# as we do. PyTorch's kernels subtract the maximum first, so that their largest weight is exactly 1.
LARGE, ALLOWED_OF_LARGE, SCALES_AS_WE_DO = 1000.0, 8.0, "FlashAttention-4"
# In 16 bits, for out where scores have sizes between these. The largest weight dominates the error, and it is seldom
# exact, because rows of such scores keep the maximum of their first keys (stale maximum, L42).
BETWEEN, ALLOWED_BETWEEN = (1.0, 10.0), 1.3


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add = parser.add_argument
    add("--quick", action="store_true", help="only head dim 128, up to 4k keys")
    add("--json", type=arguments.output, metavar="FILE", help="write all errors to FILE")
    add("--picture", type=arguments.output, metavar="FILE", help="draw the errors into FILE; needs matplotlib")
    add("--draw", type=arguments.existing, metavar="FILE", help="draw a file of --json into --picture; measure nothing")


def main(options: argparse.Namespace) -> int:
    """Measures, prints and writes the errors; returns 1 if one of ours is too large, NaN or missing."""
    if options.draw and (options.json or not options.picture):
        raise ProblemError("--draw measures nothing: give it --picture, the file to draw into, and no --json")
    draw = pictures.accuracy() if options.picture else None  # first, to report a missing package at once
    if options.draw and draw:
        machine, rows = read(options.draw)
        draw(rows, info.line(machine), options.picture)
        return 0
    arrays, no_gpu = find()
    if no_gpu:
        print(f"The NumPy path is measured, on the CPU: {no_gpu}")
    available, missing = peers.find(arrays)
    rows = []
    for op in OPS:
        contenders = [*peers.ours(op, arrays, ("flash2",))[:1], *(x for x in available if x.op == op)]
        for setting in settings(arrays, options.quick):
            rows += (new := measured(arrays, op, setting, [x for x in contenders if setting.case.dtype in x.dtypes]))
            print(_line(new), file=sys.stderr, flush=True)
    machine = peers.machine(arrays)
    _show(machine, rows, missing)
    if options.json:
        facts = {"command": options.typed, "machine": machine, "missing": missing}
        table.write(options.json, facts | {"rows": [row.facts() for row in rows]})
    if draw is not None:
        draw(rows, info.line(machine), options.picture)
    return int(any(row.ours and is_bad(rows, row) for row in rows))


def read(path: Path) -> tuple[dict[str, Any], list[Errors]]:
    """Reads the machine and the errors from a file that the command wrote."""
    content, rows = table.read(path, "accuracy", lambda content: [Errors.of_facts(facts) for facts in content["rows"]])
    return content["machine"], rows


def settings(arrays: NumpyArrays, quick: bool) -> Iterator[Setting]:
    """Yields all problems for each dtype and head dim: lengths without a mask and causal, then sizes of the scores."""
    # Large ones need torch: float64 scores of 128k keys take seconds on the GPU, and hours on the host.
    is_large = isinstance(arrays, TorchArrays)
    dtypes = ("bfloat16", "float16", "float32") if arrays.on_gpu else ("float32",)
    middle = MIDDLE if is_large else 512
    lengths = [x for x in LENGTHS if x <= middle or (is_large and not quick)]
    for dtype in dtypes:
        for head_dim in (64, 128, 256) if is_large and not quick else (128,):
            for causal in (False, True):
                # Peers of float32 hold whole score matrices in memory, or take minutes.
                for seqlen in (x for x in lengths if dtype != "float32" or x <= middle):
                    yield _setting(seqlen, head_dim, dtype, causal, 1.0)
            for size in SIZES[1:]:
                yield _setting(middle, head_dim, dtype, True, size)


def _setting(seqlen: int, head_dim: int, dtype: str, causal: bool, size: float) -> Setting:
    heads = min(MOST_HEADS, max(1, TOKENS // seqlen))
    return Setting.one_sequence(seqlen, heads, head_dim, dtype, causal, size)


def measured(arrays: NumpyArrays, op: str, setting: Setting, contenders: list[peers.Contender]) -> list[Errors]:
    """Measures the errors of each contender."""
    case = setting.case
    q, *rest = arrays.inputs(op, case)
    inputs = q * setting.size if setting.size != 1.0 else q, *rest
    exact = gradients(arrays, case, inputs) if op == "backward" else out(arrays, case, inputs)
    rows = [Errors(op, setting, x.name, x.ours) for x in contenders]
    for contender, row in zip(contenders, rows, strict=True):
        try:
            run = contender.run([inputs], case)
            with run.scope():
                outputs = check.outputs(op, run.calls[0]())
            arrays.synchronize()
        except Exception as error:  # a peer that does not run here only leaves a gap
            row.note = measure.reason(error)
            continue
        for name, expected in exact.items():
            got = arrays.wide(outputs[name])
            off = abs(got - expected)
            row.rms[name] = float(((off * off).mean() / (expected * expected).mean()) ** 0.5)
            row.largest[name] = float(off.max() / abs(expected).max())
        del outputs, run
        arrays.release()
    return rows


def out(arrays: NumpyArrays, case: Case, inputs: Inputs) -> dict[str, Any]:
    """Returns the exact output of forward, in float64."""
    exact, (q, k, v) = check.Exact(arrays, case), map(arrays.wide, inputs)
    result = arrays.xp.zeros_like(q)
    for block, rows in _blocks(case):
        p, _, part = exact.weights(block, q[0, :, block], k[0, :, block], np.arange(rows.start, rows.stop))
        result[0, rows, block] = p @ v[0, part, block]
    return {"out": result}


def gradients(arrays: NumpyArrays, case: Case, inputs: Inputs) -> dict[str, Any]:
    """Returns the exact gradients, in float64."""
    exact, (q, k, v, dout) = check.Exact(arrays, case), map(arrays.wide, inputs)
    dq, dk, dv = (arrays.xp.zeros_like(x) for x in (q, k, v))
    for block, rows in _blocks(case):
        p, _, part = exact.weights(block, q[0, :, block], k[0, :, block], np.arange(rows.start, rows.stop))
        dv[0, part, block] += p.T @ dout[0, rows, block]
        ds = dout[0, rows, block] @ v[0, part, block].T
        ds -= (p * ds).sum(-1)[:, None]
        ds *= p
        ds *= exact.problem.softmax_scale
        dq[0, rows, block] = ds @ k[0, part, block]
        dk[0, part, block] += ds.T @ q[0, rows, block]
    return {"dq": dq, "dk": dk, "dv": dv}


def _blocks(case: Case) -> Iterator[tuple[int, slice]]:
    """Yields each head with chunks of rows whose scores fit into memory."""
    step = max(1, CHUNK // 5 // case.seqlen_k)
    for head in range(case.heads_q):
        for begin in range(0, case.seqlen_q, step):
            yield head, slice(begin, min(begin + step, case.seqlen_q))


def ratio(rows: list[Errors], row: Errors, statistic: Callable[[list[float]], float]) -> float:
    """Returns a row's error over the largest (`max`) or smallest (`min`) error of its peers on the same problem.

    Returns the largest ratio of all outputs, NaN if the row has no number, and 0 without a peer.
    """
    return float(np.max([0.0, *(ratio_of_output(rows, row, name, statistic) or 0.0 for name in row.rms)]))


def ratio_of_output(
    rows: list[Errors], row: Errors, name: str, statistic: Callable[[list[float]], float]
) -> float | None:
    """Returns the `ratio` of one output; None if no peer has a number for it."""
    if not np.isfinite(row.rms[name]):
        return float("nan")
    theirs = [x.rms[name] for x in _peers(rows, row) if np.isfinite(x.rms[name])]
    return row.rms[name] / max(statistic(theirs), 1e-300) if theirs else None


def is_bad(rows: list[Errors], row: Errors) -> bool:
    """Returns True if a row of ours has no number, or one that is too large."""
    return bool(row.note) or not ratio(rows, row, max) <= allowed(rows, row)


def allowed(rows: list[Errors], row: Errors) -> float:
    """Returns the limit of our error over the largest error of the peers."""
    dtype, size = row.setting.case.dtype, row.setting.size
    if dtype != "float32":
        if size > LARGE and all(peer.contender != SCALES_AS_WE_DO for peer in _peers(rows, row)):
            return ALLOWED_OF_LARGE
        if row.op == "forward" and BETWEEN[0] < size < BETWEEN[1]:
            return ALLOWED_BETWEEN
    return ALLOWED[dtype]


def _peers(rows: list[Errors], row: Errors) -> list[Errors]:
    """Returns the peers' rows with numbers on the same problem."""
    return [x for x in rows if (x.op, x.setting) == (row.op, row.setting) and not x.ours and x.rms]


def _line(rows: list[Errors]) -> str:
    """Returns the line to print as soon as a problem is measured."""
    columns = (f"{row.contender} {_text(row)}" for row in rows)
    return f"{rows[0].op} {rows[0].setting.case.name}: {', '.join(columns)}"


def _text(row: Errors) -> str:
    return f"{row.worst:.2e}" if row.rms else "–"


def _show(machine: dict[str, Any], rows: list[Errors], missing: dict[str, str]) -> None:
    console = table.console()
    console.print(info.line(machine))
    for op in OPS:
        of_op = [row for row in rows if row.op == op]
        names = list(dict.fromkeys(row.contender for row in of_op))
        shown = Table(box=box.SIMPLE_HEAD)
        for heading in ("dtype", "d", "mask", "seqlen", "scores", "of", *names, "to the worst", "to the best"):
            shown.add_column(heading, justify="right")
        for setting in dict.fromkeys(row.setting for row in of_op):
            by_contender = {row.contender: row for row in of_op if row.setting == setting}
            case, ours = setting.case, next(row for row in by_contender.values() if row.ours)
            problem = case.dtype, case.head_dim, "causal" if case.causal else "full", case.seqlen_q, f"{setting.size:g}"
            # A line for each output: the two ratios may be largest in different outputs, and neither in the output
            # with the largest error.
            for output in dict.fromkeys(output for row in by_contender.values() for output in row.rms):
                errors = (by_contender[name].rms if name in by_contender else {} for name in names)
                columns = (f"{each[output]:.3e}" if output in each else "–" for each in errors)
                ratios = (
                    ratio_of_output(rows, ours, output, statistic) if ours.rms else None for statistic in (max, min)
                )
                shown.add_row(
                    *map(str, problem), output, *columns, *("–" if each is None else f"{each:.2f}" for each in ratios)
                )
        console.print(f"\n{op}: root mean square of the error, relative to the output, against float64", shown)
    for row in rows:
        if row.note or (row.ours and is_bad(rows, row)):
            kind = "TOO LARGE" if row.rms else "FAILED" if row.ours else "not run"
            console.print(f"{kind}: {row.op} {row.setting.case.name}: {row.contender} {row.note}", markup=False)
    for name, reason in missing.items():
        console.print(f"not measured: {name} ({reason})")
