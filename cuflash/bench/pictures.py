"""Pictures of what was measured, by matplotlib, which the extra `bench` installs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import UnsupportedError
from .report import Errors

# Colours that people who see few colours tell apart (Okabe and Ito), on a white or a black ground.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DTYPES = {"bfloat16": "-", "float16": "--", "float32": ":"}


def accuracy() -> Callable[[list[Errors], str, Path], None]:
    """What draws errors by length and by the size of the scores; UnsupportedError where matplotlib is not installed."""
    pyplot = _pyplot()

    def draw(rows: list[Errors], machine: str, path: Path) -> None:
        dims = sorted({row.setting.case.head_dim for row in rows})
        head_dim = dims[len(dims) // 2]
        rows = [row for row in rows if row.rms and row.setting.case.head_dim == head_dim and row.setting.case.causal]
        # why two: a third dtype hides the others, and peers of float32 are others.
        dtypes = list(dict.fromkeys(row.setting.case.dtype for row in rows))[:2]
        rows = [row for row in rows if row.setting.case.dtype in dtypes]
        names = list(dict.fromkeys(_name(row) for row in rows))
        figure, axes = pyplot.subplots(2, 2, figsize=(9, 7), squeeze=False, layout="constrained")
        for line, op in zip(axes, ("forward", "backward"), strict=True):
            of_op = [row for row in rows if row.op == op]
            middle = max((row.setting.case.seqlen_q for row in of_op if row.setting.size > 1), default=0)
            by_length = [(_short(row.setting.case.seqlen_q), row) for row in of_op if row.setting.size == 1]
            by_size = [(f"{row.setting.size:g}", row) for row in of_op if row.setting.case.seqlen_q == middle]
            _ratios(line[0], names, by_length)
            _ratios(line[1], names, by_size)
            line[0].set(title=f"{op}, scores of size 1", xlabel="seqlen", ylabel="error to the smallest one")
            line[1].set(title=f"{op}, seqlen {_short(middle)}", xlabel="size of the scores (standard deviation)")
        handles = {x.get_label(): x for line in axes for each in line for x in each.get_lines()}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False)
        title = f"Root mean square of errors against float64, head dim {head_dim}, causal: the smaller, the better"
        figure.suptitle(f"{title}\n{machine.split(':')[0]}", fontsize=11)
        figure.savefig(path, dpi=160)
        pyplot.close(figure)

    return draw


def _name(row: Errors) -> str:
    return "cuflash" if row.ours else row.contender


def _short(number: float) -> str:
    """A length as in "4k"."""
    return f"{number / 1024:g}k" if number >= 1024 else f"{number:g}"


def _ratios(axes: Any, names: list[str], points: list[tuple[str, Errors]]) -> None:
    """A line for each contender and dtype. Below each place stands our error to the output, in the first dtype."""
    places = list(dict.fromkeys(place for place, _ in points))
    least: dict[tuple[str, str], float] = {}
    of_ours: dict[str, str] = {}
    for place, row in points:
        key, error = (place, row.setting.case.dtype), row.worst
        least[key] = min(error, least.get(key, error))
        if row.ours:
            of_ours.setdefault(place, f"{error:.1e}")
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for place, row in points:
        dtype = row.setting.case.dtype
        lines.setdefault((_name(row), dtype), []).append((places.index(place), row.worst / least[place, dtype]))
    for (name, dtype), line in lines.items():
        number = names.index(name)
        # why thick and below: a line that lies on another one is still seen.
        drawn = {"color": COLOURS[number % len(COLOURS)], "lw": 1.3 if number else 3.0, "zorder": 2 if number else 1}
        axes.plot(*zip(*line, strict=True), DTYPES[dtype], marker="o", ms=3, label=f"{name}, {dtype}", **drawn)
    axes.set_xticks(range(len(places)), [f"{place}\n{of_ours.get(place, '')}" for place in places])
    axes.grid(alpha=0.3)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise UnsupportedError("pictures need matplotlib, which is not installed: pip install matplotlib") from error
    matplotlib.use("Agg")  # why: there may be no screen
    from matplotlib import pyplot

    return pyplot
