"""The report of a benchmark as a table on the terminal and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .. import info
from ..ops.plan import plan
from ..planning.plan import Plan
from .report import Report, Row

MIN_WIDTH = 130  # columns of a log file, which reports no width of its own


def console() -> Console:
    """Where reports are printed."""
    made = Console(highlight=False)
    if not made.is_terminal:
        made.width = max(made.width, MIN_WIDTH)
    return made


def show(report: Report) -> None:
    """Prints everything measured."""
    out = console()
    out.print(info.line(report.machine))
    for rows in _sections(report.rows):
        op, dtype, first = rows[0].contender.op, rows[0].cell.dtype, rows[0].contender.name
        out.print(f"\n{op}, {dtype}, {report.arrays} arrays, TFLOP/s (in brackets: {first} over it)")
        out.print(_speeds(rows))
    if report.host_seconds:
        host = {name: f"{seconds * 1e6:.1f} µs" for name, seconds in report.host_seconds.items()}
        out.print("host time of a repeated call", _pairs(host), sep="\n")
    if report.startup:
        out.print("first call in a process", _pairs(_startup(report.startup)), sep="\n")
    for name, reason in report.missing.items():
        out.print(f"not measured: {name} ({reason})")
    remarks: dict[str, list[str]] = {}
    for row in report.rows:
        if row.note:
            kind = "WRONG" if row.wrong else "FAILED" if row.contender.ours else "not run"
            remark = f"{kind}: {row.contender.op}, {row.contender.name}: {row.note}"
            remarks.setdefault(remark, []).append(row.cell.name)
    for remark, cells in remarks.items():
        others = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
        out.print(f"{remark} [{cells[0]}{others}]", markup=False)


def line(rows: list[Row]) -> str:
    """The line that is printed for a cell as soon as it is measured."""
    speeds = (f"{row.contender.name} {_speed(row)}" for row in rows)
    return f"{rows[0].contender.op} {rows[0].cell.name}: {', '.join(speeds)} TFLOP/s"


def ratios(rows: list[Row], row: Row) -> dict[str, float]:
    """Our speed over each peer's in the same op and cell."""
    return {
        other.contender.name: other.seconds / row.seconds
        for other in rows
        if (other.contender.op, other.cell) == (row.contender.op, row.cell)
        and not other.contender.ours
        and other.seconds
        and row.seconds
    }


def to_json(report: Report) -> str:
    """Machine facts, one object per contender and cell, host seconds and start-up seconds."""
    rows = [
        {
            "op": row.contender.op,
            **asdict(row.cell),
            "contender": row.contender.name,
            "ours": row.contender.ours,
            "kernel": _kernel(report, row),
            **{name: getattr(row, name) for name in ("flops", "seconds", "tflops", "error", "wrong", "note")},
        }
        | ({"ratios": ratios(report.rows, row)} if row.contender.ours else {})
        for row in report.rows
    ]
    content = {
        "machine": report.machine,
        "arrays": report.arrays,
        "missing": report.missing,
        "rows": rows,
        "host_seconds": report.host_seconds,
        "startup_seconds": report.startup,
    }
    return json.dumps(content, indent=1) + "\n"


def _sections(rows: list[Row]) -> list[list[Row]]:
    """Groups the rows by op and dtype."""
    sections: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        sections.setdefault((row.contender.op, row.cell.dtype), []).append(row)
    return list(sections.values())


def _speeds(rows: list[Row]) -> Table:
    """A line for each cell; in brackets beside a peer's speed stands the speed of our first contender over it."""
    names = list(dict.fromkeys(row.contender.name for row in rows))
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("d", "mask", "seqlen", "batch", "heads", *names):
        table.add_column(heading, justify="right")
    for cell in dict.fromkeys(row.cell for row in rows):
        of_cell = {row.contender.name: row for row in rows if row.cell == cell}
        ratio = ratios(list(of_cell.values()), of_cell[names[0]])
        speeds = []
        for name in names:
            speed = _speed(of_cell[name]) if name in of_cell else "–"
            speeds.append(f"{speed} ({ratio[name]:.2f})" if name in ratio else speed)
        mask = "causal" if cell.causal else "full"
        table.add_row(*map(str, (cell.head_dim, mask, cell.seqlen_q, cell.batch, cell.heads_q)), *speeds)
    return table


def _pairs(values: dict[str, str]) -> Table:
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in values.items():
        table.add_row(name, value)
    return table


def _startup(timings: dict[str, Any]) -> dict[str, str]:
    if "failed" in timings:
        return {"not measured": " ".join(timings["failed"])}
    cold, disk = timings["cold"], timings["disk"]
    found = {"NVRTC loaded": f"{disk['nvrtc'] * 1e3:.0f} ms"}
    for op in (name for name in disk if name != "nvrtc"):
        found |= {f"{op} {dim}, compiled": f"{seconds:.2f} s" for dim, seconds in cold[op].items()}
        found |= {f"{op} {dim}, from disk": f"{seconds * 1e3:.1f} ms" for dim, seconds in disk[op].items()}
    return found


def _speed(row: Row) -> str:
    if row.tflops is None:
        return "WRONG" if row.wrong else "–"
    return f"{row.tflops:.1f}" if row.tflops >= 10 else f"{row.tflops:.3f}"


def _kernel(report: Report, row: Row) -> str | None:
    """Name of our kernel that ran; None for peers, and if nothing ran."""
    if not row.contender.ours or row.seconds is None:
        return None
    found: Plan = plan(
        *row.cell.shapes(),
        op=row.contender.op,
        dtype=row.cell.dtype,
        device="cpu" if report.arrays == "numpy" else "cuda:0",
        **(row.cell.arguments() | row.contender.keywords),
    )
    return found.kernel
