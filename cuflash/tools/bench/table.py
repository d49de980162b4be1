"""The report of a benchmark as a table on the terminal and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from rich import box
from rich.table import Table
from rich.text import Text

from ... import units
from ...errors import ProblemError
from ...ops.plan import plan
from ...planning.plan import Plan
from .. import info
from ..console import Console
from .mods import ModCase
from .presets import GRIDS, PRESETS
from .report import Report, Row
from .startup import PEERS_HEAD_DIM

Rows = TypeVar("Rows")
MIN_WIDTH = 130  # columns of a log file, which reports no width


def console() -> Console:
    """Returns the console for reports."""
    wide_console = Console(highlight=False)
    if not wide_console.is_terminal:
        wide_console.width = max(wide_console.width, MIN_WIDTH)
    return wide_console


def show(report: Report) -> None:
    """Prints a report."""
    out = console()
    out.print(info.line(report.machine))
    for rows in _sections(report.rows):
        op, dtype, first = rows[0].contender.op, rows[0].case.dtype, rows[0].contender.name
        unit = PRESETS[report.preset].unit or "memory of a call"
        over = "" if report.preset == "memory" else f" (in brackets: {first} over it)"
        out.print(f"\n{op}, {dtype}, {report.arrays} arrays, {unit}{over}")
        out.print(_speeds(report.preset, rows))
    if about := conditions(report.rows):
        out.print(about)
    if report.preset == "decode" and (most := report.bytes_per_second):
        limit = f"the memory of this GPU gives {most * 1e-9:.0f} GB/s at most"
        out.print(f"{limit}; what lies in the L2 cache comes faster")
    if report.host_seconds:
        host = {name: f"{seconds * 1e6:.1f} µs" for name, seconds in report.host_seconds.items()}
        out.print("host time of a repeated call", pairs(host), sep="\n")
    if report.startup:
        out.print("first call in a process", pairs(_startup(report.startup)), sep="\n")
    for name, reason in report.missing.items():
        out.print(f"not measured: {name} ({reason})", markup=False)
    remarks: dict[str, list[str]] = {}
    for row in report.rows:
        if row.note:
            kind = "WRONG" if row.wrong else "FAILED" if row.contender.must_run else "not run"
            kind = "by calls, not by graphs" if row.wall else kind
            remark = f"{kind}: {row.contender.op}, {row.contender.name}: {row.note}"
            remarks.setdefault(remark, []).append(row.case.name)
    for remark, problems in remarks.items():
        others = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        out.print(f"{remark} [{problems[0]}{others}]", markup=False)


def conditions(rows: list[Row]) -> str:
    """Describes the spread of times, the time of calls without graphs, and clocks and power during the runs."""
    spreads = [seconds.spread for row in rows if (seconds := row.graph or row.wall)]
    if not spreads:
        return ""
    lines = [f"quartiles of a time lie {median(spreads):.1%} apart in the median, {max(spreads):.1%} at most"]
    if both := [row.wall.median / row.graph.median for row in rows if row.wall and row.graph]:
        times = f"{median(both):.2f} times as long in the median, {max(both):.2f} at most"
        lines.append(f"calls without graphs take {times}")
    for name, unit in (("sm_clock_mhz", "MHz"), ("power_w", "W")):
        if values := [row.state[name] for row in rows if name in row.state]:
            lines.append(f"{min(values):.0f} to {max(values):.0f} {unit}")
    return "; ".join(lines)


def line(preset: str, rows: list[Row]) -> str:
    """Returns the line to print as soon as a problem is measured."""
    speeds = (f"{row.contender.name} {_speed(row, preset)}" for row in rows)
    return f"{rows[0].contender.op} {rows[0].case.name}: {', '.join(speeds)} {PRESETS[preset].unit}".rstrip()


def ratios(rows: list[Row], row: Row) -> dict[str, float]:
    """Returns our speed over each peer's in the same op and problem."""
    return {
        other.contender.name: ratio
        for other in rows
        if (other.contender.op, other.case) == (row.contender.op, row.case)
        and not other.contender.ours
        and (ratio := row.times_as_fast(other)) is not None
    }


def facts(report: Report) -> dict[str, Any]:
    """Returns the report for a JSON file: command, machine, host and start-up seconds, and all rows."""
    names = "command", "machine", "arrays", "preset", "missing", "host_seconds", "startup"
    rows = []
    for row in report.rows:
        more = {"kernel": _kernel(report, row), "ratios": ratios(report.rows, row)} if row.contender.ours else {}
        rows.append(row.facts() | more)
    return {name: getattr(report, name) for name in names} | {"rows": rows}


def file_of(content: dict[str, Any]) -> str:
    """Returns the text of a JSON file; rows come last, one a line."""
    start = json.dumps({name: x for name, x in content.items() if name != "rows"}, indent=1).removesuffix("\n}")
    lines = ",\n".join(f"  {json.dumps(row)}" for row in content["rows"])
    return f'{start},\n "rows": [\n{lines}\n ]\n}}\n'


def write(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file of `facts`; raises ProblemError if it cannot be written."""
    try:
        path.write_text(file_of(content), "utf-8")
    except OSError as error:
        raise ProblemError(f"{path} cannot be written: {error}") from error


def read(path: Path, command: str, rows_of: Callable[[dict[str, Any]], Rows]) -> tuple[dict[str, Any], Rows]:
    """Reads a file that a command wrote, and its rows by `rows_of`; raises ProblemError for any other file."""
    try:
        content: dict[str, Any] = json.loads(path.read_text("utf-8"))
        info.line(content["machine"])
        return content, rows_of(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProblemError(f"{path} is no file that `cuflash {command} --json` wrote: {error!r}") from error


def _sections(rows: list[Row]) -> list[list[Row]]:
    """Groups the rows by op and dtype."""
    sections: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        sections.setdefault((row.contender.op, row.case.dtype), []).append(row)
    return list(sections.values())


def _speeds(preset: str, rows: list[Row]) -> Table:
    """Returns a line for each problem; the speed of our first contender over a peer's stands beside it in brackets."""
    names = list(dict.fromkeys(row.contender.name for row in rows))
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("d", "mask", "seqlen", "batch", "heads") if preset in GRIDS else ("problem",):
        table.add_column(heading, justify="right" if preset in GRIDS else "left")
    for name in names:
        table.add_column(name, justify="right")
    for case in dict.fromkeys(row.case for row in rows):
        of_case = {row.contender.name: row for row in rows if row.case == case}
        ratio = ratios(list(of_case.values()), of_case[names[0]])
        speeds = []
        for name in names:
            speed = _speed(of_case[name], preset) if name in of_case else "–"
            speeds.append(f"{speed} ({ratio[name]:.2f})" if name in ratio and preset != "memory" else speed)
        mask = "causal" if case.causal else "full"
        facts = case.head_dim, mask, case.seqlen_q, case.batch, case.heads_q
        table.add_row(*(map(str, facts) if preset in GRIDS else (case.name,)), *speeds)
    return table


def pairs(values: dict[str, str]) -> Table:
    """Returns a table of names and values."""
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in values.items():
        table.add_row(Text(name), Text(value))
    return table


def _startup(timings: dict[str, Any]) -> dict[str, str]:
    rows_by_name: dict[str, str] = {}
    if "disk" in timings:
        cold, disk = timings["cold"], timings["disk"]
        rows_by_name["NVRTC loaded"] = f"{disk['nvrtc'] * 1e3:.0f} ms"
        for op in (name for name in disk if name != "nvrtc"):
            rows_by_name |= {f"{op} {dim}, compiled": f"{seconds:.2f} s" for dim, seconds in cold[op].items()}
            rows_by_name |= {f"{op} {dim}, from disk": f"{seconds * 1e3:.1f} ms" for dim, seconds in disk[op].items()}
    for op, of_op in timings.get("peers", {}).items():
        rows_by_name |= {f"{op} d{PEERS_HEAD_DIM}, {name}": f"{seconds:.2f} s" for name, seconds in of_op.items()}
    return rows_by_name | ({"not measured": timings["failed"]} if "failed" in timings else {})


def _speed(row: Row, preset: str) -> str:
    if row.seconds is None or row.tflops is None:
        return "WRONG" if row.wrong else "–"
    if preset == "memory":
        return units.memory(row.peak_bytes or 0)
    if preset == "decode":
        return f"{row.num_bytes / row.seconds * 1e-9:.0f}"
    return f"{row.tflops:.1f}" if row.tflops >= 10 else f"{row.tflops:.3f}"


def _kernel(report: Report, row: Row) -> str | None:
    """Returns the name of our kernel that ran; None if none did, or if it has score_mod or mask_mod."""
    if row.seconds is None or isinstance(row.case, ModCase):
        return None
    call_plan: Plan = plan(
        *row.case.shapes(),
        dtype=row.case.dtype,
        device="cpu" if report.arrays == "numpy" else "cuda:0",
        **(row.case.arguments() | row.contender.keywords | {"op": row.contender.op}),
    )
    return call_plan.kernel
