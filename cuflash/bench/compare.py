"""Two files that the benchmark wrote, beside each other."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import geometric_mean

from rich import box
from rich.table import Table

from .. import info
from ..errors import ProblemError
from . import table

NO_RESULTS = OSError, ValueError, KeyError, TypeError  # what reading raises of a file that the benchmark did not write


def show(old: Path, new: Path) -> int:
    """Prints the times of both on the problems that both have, and how many times as fast the new one is; returns 0."""
    (before_on, before), (after_on, after) = _read(old), _read(new)
    both = [key for key in before if key in after]
    if not both:
        raise ProblemError(f"{old} and {new} have no problem in common that the same contender was timed on")
    shown = Table(box=box.SIMPLE_HEAD)
    for number, heading in enumerate(("problem", "contender", "old", "new", "times as fast")):
        shown.add_column(heading, justify="right" if number > 1 else "left")
    ratios: dict[str, list[float]] = {}
    for key in both:
        op, name, contender = key
        ratio = before[key] / after[key]
        ratios.setdefault(f"{op}, {contender}", []).append(ratio)
        times = (f"{x * 1e6:.1f} µs" for x in (before[key], after[key]))
        shown.add_row(f"{op} {name}", contender, *times, f"{ratio:.3f}")
    out = table.console()
    out.print(f"old: {before_on}", f"new: {after_on}", shown, sep="\n", markup=False)
    means = {name: f"{geometric_mean(found):.3f} ({len(found)} problems)" for name, found in ratios.items()}
    out.print("geometric mean of times as fast", table.pairs(means), sep="\n")
    return 0


def _read(path: Path) -> tuple[str, dict[tuple[str, str, str], float]]:
    """What a file was measured on, and seconds by op, problem and contender."""
    try:
        content = json.loads(path.read_text("utf-8"))
        timed = [row for row in content["rows"] if row["seconds"]]
        return info.line(content["machine"]), {(x["op"], x["name"], x["contender"]): x["seconds"] for x in timed}
    except NO_RESULTS as error:
        raise ProblemError(refusal(path, error)) from error


def refusal(path: Path, error: Exception) -> str:
    """What is told of a file that is none of the benchmark's."""
    return f"{path} is no file that `cuflash bench --json` wrote: {error!r}"
