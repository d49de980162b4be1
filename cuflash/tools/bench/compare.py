"""Comparison of two files that the benchmark wrote."""

from __future__ import annotations

from pathlib import Path
from statistics import geometric_mean
from typing import Any

from rich import box
from rich.table import Table

from ...errors import ProblemError
from .. import info
from . import table


def show(old: Path, new: Path) -> int:
    """Prints times on the problems of both files, and how many times as fast the new file is; returns 0."""
    files = read(old), read(new)
    before, after = map(_timed, files)
    both = [key for key in before if key in after]
    if not both:
        raise ProblemError(f"{old} and {new} have no problem in common that the same contender was timed on")
    shown = Table(box=box.SIMPLE_HEAD)
    for number, heading in enumerate(("problem", "contender", "old", "new", "times as fast")):
        shown.add_column(heading, justify="right" if number > 1 else "left")
    ratios: dict[str, list[float]] = {}
    for key in both:
        op, name, contender = key
        kind = "graph" if before[key]["graph"] and after[key]["graph"] else "wall"  # the kinds differ by host time
        seconds = [row[kind]["median"] for row in (before[key], after[key])]
        ratio = seconds[0] / seconds[1]
        ratios.setdefault(f"{op}, {contender}", []).append(ratio)
        times = (f"{x * 1e6:.1f} µs" for x in seconds)
        shown.add_row(f"{op} {name}", contender, *times, f"{ratio:.3f}")
    out = table.console()
    before_on, after_on = (info.line(content["machine"]) for content in files)
    out.print(f"old: {before_on}", f"new: {after_on}", shown, sep="\n", markup=False)
    means = {name: f"{geometric_mean(by_peer):.3f} ({len(by_peer)} problems)" for name, by_peer in ratios.items()}
    out.print("geometric mean of times as fast", table.pairs(means), sep="\n")
    return 0


def read(path: Path) -> dict[str, Any]:
    """Reads a file that the benchmark wrote."""
    return table.read(path, "bench", _timed)[0]


def _timed(content: dict[str, Any]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Returns the rows with times, by op, problem and contender."""
    if "ranks" in content:  # measured by `bench ranks`: seconds of calls without graphs
        return {
            (row["op"], row["problem"], row["contender"]): {"graph": None, "wall": {"median": row["seconds"]}}
            for row in content["rows"]
            if row["seconds"]
        }
    rows = [row for row in content["rows"] if row["wall"] or row["graph"]]
    return {(row["op"], row["name"], row["contender"]): row for row in rows}
