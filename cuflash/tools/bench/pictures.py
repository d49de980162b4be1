"""Pictures of measurements, by matplotlib, which the extra `bench` installs."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from itertools import accumulate, product
from pathlib import Path
from typing import Any

from ...errors import ProblemError, UnsupportedError
from .presets import BOTH, GRIDS
from .report import Errors

# Colours for colour-blind readers (Okabe and Ito), on a white or a black ground.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")
OF_PEERS = "torch flash", "torch cuDNN", "FlashAttention-4", "torch efficient", "torch flex"  # the colours after ours
Colours = dict[str, str]  # by contender
DTYPES = {"bfloat16": "-", "float16": "--", "float32": ":"}
WIDTH, LETTERS = 6.0, 13  # inches and points: letters of 11 pixels where a phone shows 375 pixels
PIXELS_PER_INCH = 130  # 780 pixels: sharp on a phone with two pixels a point


def accuracy() -> Callable[[list[Errors], str, Path], None]:
    """Returns a function that draws errors by length and size of scores; UnsupportedError without matplotlib."""
    pyplot = _pyplot()

    def draw(rows: list[Errors], machine: str, path: Path) -> None:
        dims = sorted({row.setting.case.head_dim for row in rows})
        head_dim = dims[len(dims) // 2]
        rows = [row for row in rows if row.rms and row.setting.case.head_dim == head_dim and row.setting.case.causal]
        # Two dtypes: a third would hide the others, and float32 has other peers.
        dtypes = list(dict.fromkeys(row.setting.case.dtype for row in rows))[:2]
        second_row = f"second row: error of cuflash in {dtypes[0]}" if dtypes else ""
        rows = [row for row in rows if row.setting.case.dtype in dtypes]
        names = list(dict.fromkeys(_name(row) for row in rows))
        panels = [(op, by) for op in ("forward", "backward") for by in ("length", "size")]
        title = f"Errors (root mean square) against float64\nhead dim {head_dim}, causal: the smaller, the better"
        device = re.sub(r"^\d+ x ", "", machine.split(":")[0])  # one GPU measures, however many there are
        figure, axes = _subplots(pyplot, len(panels), 1, 12.9, f"{title}\n{device}")
        for panel, (op, by) in zip(axes[:, 0], panels, strict=True):
            of_op = [row for row in rows if row.op == op]
            middle = max((row.setting.case.seqlen_q for row in of_op if row.setting.size > 1), default=0)
            if by == "length":
                points = [(short(row.setting.case.seqlen_q), row) for row in of_op if row.setting.size == 1]
                panel.set(title=f"{op}, scores of size 1", xlabel=f"seqlen; {second_row}")
            else:
                points = [(f"{row.setting.size:g}", row) for row in of_op if row.setting.case.seqlen_q == middle]
                label = f"size of the scores (standard deviation)\n{second_row}"
                panel.set(title=f"{op}, seqlen {short(middle)}", xlabel=label)
            panel.set_ylabel("times the smallest")
            _ratios(panel, names, points)
        colours = [(name, {"color": COLOURS[number % len(COLOURS)]}) for number, name in enumerate(names)]
        styles = [(dtype, {"color": "black", "linestyle": DTYPES[dtype]}) for dtype in dtypes]
        lines = [pyplot.Line2D([], [], label=label, **style) for label, style in colours + styles]
        figure.legend(handles=lines, loc="outside lower center", ncols=2, frameon=False)
        figure.savefig(path, dpi=PIXELS_PER_INCH)
        pyplot.close(figure)

    return draw


def bench() -> Callable[[dict[str, Any], Path], list[Path]]:
    """Returns a function that draws the file of a benchmark into a folder; UnsupportedError without matplotlib.

    The function returns the pictures' paths: bars of each op and a summary, or ratios to the best peer, and a roofline.
    """
    pyplot = _pyplot()

    def draw(content: dict[str, Any], folder: Path) -> list[Path]:
        machine, rows = content["machine"], [row for row in content["rows"] if row["seconds"]]
        if not rows:
            return []
        gpus = machine["gpus"] or [{}]
        where, most, preset = gpus[0].get("name", "CPU"), gpus[0].get("bytes_per_second"), content["preset"]
        colours, figures = _colours(rows), {}
        if preset == "memory":
            figures[preset] = _lines_of_memory(pyplot, colours, rows, f"Memory of a call, {where}")
        elif preset in GRIDS:
            for op in dict.fromkeys(row["op"] for row in rows):
                of_op = [row for row in rows if row["op"] == op]
                figures[op] = _bars_by_seqlen(pyplot, colours, of_op, f"{op}, {where}")
            figures["summary"] = _summary(pyplot, colours, rows, where)
        elif preset == "decode":
            figures[preset] = _bars_of_reads(pyplot, colours, rows, most, f"Decoding, one query a sequence\n{where}")
        elif any(row.get("ratios") for row in rows):
            figures[preset] = _bars_of_ratios(
                pyplot, rows, f"Times as fast as the fastest other library\n{where} (orange: slower)"
            )
        limits = most, gpus[0].get("flops_per_second")
        title = f"Work and memory, {where}\n(circles: forward, triangles: backward)"
        figures["roofline"] = _roofline(pyplot, colours, rows, *limits, title)
        paths = []
        for name, figure in figures.items():
            paths.append(folder / f"{preset}-{name}.png".replace(f"{preset}-{preset}", preset))
            try:
                figure.savefig(paths[-1], dpi=PIXELS_PER_INCH)
            except OSError as error:
                raise ProblemError(f"{paths[-1]} cannot be written: {error}") from error
            finally:
                pyplot.close(figure)
        return paths

    return draw


def ranks() -> Callable[[dict[str, Any], Path], None]:
    """Returns a function that draws the shares of `ranks` by ranks; UnsupportedError without matplotlib."""
    pyplot = _pyplot()

    def draw(content: dict[str, Any], path: Path) -> None:
        rows = [row for row in content["rows"] if row["op"] == "both"]
        names, kinds = (list(dict.fromkeys(row[name] for row in rows)) for name in ("scheme", "kind"))
        tokens = sorted({row["tokens"] for row in rows})
        title = "Computed share of one GPU's rate\nforward and backward; no skew, no congestion"
        size = len(kinds), len(tokens)
        figure, axes = _subplots(pyplot, *size, 2.3 * len(kinds) + 1.6, title, sharex=True, sharey=True)
        for (line, kind), (column, number) in product(enumerate(kinds), enumerate(tokens)):
            panel = axes[line][column]
            for colour, name in enumerate(names):
                of_name = [row for row in rows if (row["kind"], row["tokens"], row["scheme"]) == (kind, number, name)]
                points = [(row["ranks"], row["share"]) for row in of_name]
                if points:
                    panel.plot(*zip(*points, strict=True), marker="o", ms=3, color=COLOURS[colour], label=name)
            panel.set(title=f"{kind}, {short(number)} a GPU", ylim=(0, 1.05), xscale="log")
            panel.set_xticks([1, 8, 64, 1024], ["1", "8", "64", "1k"])
            panel.set_xticks([], minor=True)
            panel.grid(alpha=0.3)
        for panel in axes[-1]:
            panel.set_xlabel("GPUs")
        _with_legend(figure, axes).savefig(path, dpi=PIXELS_PER_INCH)
        pyplot.close(figure)

    return draw


def _bars_by_seqlen(pyplot: Any, colours: Colours, rows: list[dict[str, Any]], title: str) -> Any:
    """Draws TFLOP/s by length, as in papers: a panel for each head dim and mask of the most frequent dtype."""
    rows = _of_one_dtype(rows)
    dims, masks = (sorted({row[name] for row in rows}) for name in ("head_dim", "causal"))
    panels = [
        [
            (
                f"head dim {dim}, {_mask(causal)}",
                [row for row in rows if (row["head_dim"], row["causal"]) == (dim, causal)],
            )
            for causal in masks
        ]
        for dim in dims
    ]
    return _panels_of_bars(pyplot, colours, panels, f"{title}, {rows[0]['dtype']}\nthe higher, the better")


def _summary(pyplot: Any, colours: Colours, rows: list[dict[str, Any]], title: str) -> Any:
    """Draws bars of one mask, a panel for each head dim and op, with only the first of our contenders."""
    rows = _of_one_dtype(rows)
    dims, masks, ops = (sorted({row[name] for row in rows}) for name in ("head_dim", "causal", "op"))
    panels: list[list[tuple[str, list[dict[str, Any]]]]] = []
    for dim in dims:
        line: list[tuple[str, list[dict[str, Any]]]] = []
        for op in reversed(ops):
            here = [row for row in rows if (row["op"], row["head_dim"], row["causal"]) == (op, dim, masks[-1])]
            first = next((row["contender"] for row in here if row["ours"]), None)
            shown = [row for row in here if row["contender"] == first or not row["ours"]]
            named = [row | {"contender": "cuflash"} if row["ours"] else row for row in shown]
            line.append((f"{op}, head dim {dim}", named))
        panels.append(line)
    about = f"{_mask(masks[-1])}, {rows[0]['dtype']}"
    return _panels_of_bars(pyplot, colours, panels, f"{title}, {about}\nthe higher, the better")


def _colours(rows: list[dict[str, Any]]) -> Colours:
    """Returns a colour for each contender: the first for ours in each op, fixed ones for OF_PEERS."""
    firsts = {op: next((row["contender"] for row in rows if row["ours"] and row["op"] == op), "") for op in BOTH}
    colours = dict.fromkeys(("cuflash", *firsts.values()), COLOURS[0]) | dict(zip(OF_PEERS, COLOURS[1:], strict=False))
    others = dict.fromkeys(row["contender"] for row in rows if row["contender"] not in colours)
    left = COLOURS[1 + len(OF_PEERS) :]
    return colours | {name: left[number % len(left)] for number, name in enumerate(others)}


def _of_one_dtype(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    dtypes = [row["dtype"] for row in rows]
    return [row for row in rows if row["dtype"] == max(dict.fromkeys(dtypes), key=dtypes.count)]


def _mask(causal: bool) -> str:
    return "causal" if causal else "no mask"


def _panels_of_bars(
    pyplot: Any, colours: Colours, panels: list[list[tuple[str, list[dict[str, Any]]]]], title: str
) -> Any:
    """Draws bars of TFLOP/s by length in panels, each with a title and rows."""
    names = list(dict.fromkeys(row["contender"] for line in panels for _, rows in line for row in rows))
    lines = len(panels)
    figure, axes = _subplots(pyplot, lines, len(panels[0]), 2.3 * lines + 1.0 + 0.13 * len(names), title)
    for line, each in zip(axes, panels, strict=True):
        for panel, (heading, rows) in zip(line, each, strict=True):
            seqlens = sorted({row["seqlen_q"] for row in rows})
            for number, name in enumerate(names):
                by_length = {row["seqlen_q"]: row["tflops"] for row in rows if row["contender"] == name}
                width = 0.84 / len(names)
                centers = [index + (number - (len(names) - 1) / 2) * width for index in range(len(seqlens))]
                heights = [by_length.get(seqlen, 0.0) for seqlen in seqlens]
                panel.bar(centers, heights, width, color=colours[name], label=name)
            panel.set(title=heading)
            panel.set_xticks(range(len(seqlens)), [short(seqlen) for seqlen in seqlens])
            panel.grid(axis="y", alpha=0.3)
            panel.set_axisbelow(True)
        line[0].set_ylabel("TFLOP/s")
    for panel in axes[-1]:
        panel.set_xlabel("seqlen")
    return _with_legend(figure, axes)


def _lines_of_memory(pyplot: Any, colours: Colours, rows: list[dict[str, Any]], title: str) -> Any:
    """Draws peak bytes by length, a panel for each op."""
    ops = list(dict.fromkeys(row["op"] for row in rows))
    figure, axes = _subplots(pyplot, len(ops), 1, 3.2 * len(ops) + 1.6, f"{title}\nthe lower, the better")
    for panel, op in zip(axes[:, 0], ops, strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for row in rows:
            if row["op"] == op:
                lines.setdefault(row["contender"], []).append((row["seqlen_q"], row["peak_bytes"] / 2**20))
        for number, (name, line) in enumerate(lines.items()):
            width = 1.0 + 1.2 * (len(lines) - 1 - number)  # so that overlapping lines are all visible
            panel.plot(*zip(*line, strict=True), lw=width, color=colours[name], label=name)
        seqlens = sorted({row["seqlen_q"] for row in rows})
        panel.set(xscale="log", yscale="log", title=op, ylabel="MiB")
        panel.set_xticks(seqlens, [short(seqlen) for seqlen in seqlens])
        panel.set_xticks([], minor=True)
        panel.grid(alpha=0.3)
    axes[-1][0].set_xlabel("seqlen")
    return _with_legend(figure, axes)


def _bars_of_reads(pyplot: Any, colours: Colours, rows: list[dict[str, Any]], most: float | None, title: str) -> Any:
    """Draws bytes a second of each problem, beside the bandwidth of the memory."""
    names, cases = (list(dict.fromkeys(row[name] for row in rows)) for name in ("contender", "name"))
    labels = [re.sub(r"decode d(\d+) (.*) batch", r"head dim \1, \2\nbatch", case) for case in cases]
    figure, axes = _subplots(pyplot, 1, 1, 0.6 * len(cases) + 2.0, f"{title}\nthe higher, the better")
    panel, thickness = axes[0][0], 0.84 / len(names)
    for number, name in enumerate(names):
        by_name = {row["name"]: row["num_bytes"] / row["seconds"] * 1e-9 for row in rows if row["contender"] == name}
        centers = [index + (number - (len(names) - 1) / 2) * thickness for index in range(len(cases))]
        panel.barh(centers, [by_name.get(case, 0.0) for case in cases], thickness, color=colours[name], label=name)
    if most:
        panel.axvline(most * 1e-9, color="black", lw=1, ls="--", label="memory's limit")
    _name_bars(panel, list(range(len(cases))), labels)
    panel.set_xlabel("GB/s")
    return _with_legend(figure, axes)


def _bars_of_ratios(pyplot: Any, rows: list[dict[str, Any]], title: str) -> Any:
    """Draws our speed over the fastest peer's on each problem, a panel for each op."""
    ours = [row for row in rows if row["ours"] and row["ratios"]]
    ours = [row for row in ours if row["contender"] == next(x["contender"] for x in ours if x["op"] == row["op"])]
    cases, ops = (list(dict.fromkeys(row[name] for row in ours)) for name in ("name", "op"))
    labels = [textwrap.fill(case, 28) for case in cases]
    ends = list(accumulate(label.count("\n") + 1 for label in labels))  # in lines of text
    centers = [end - (label.count("\n") + 1) / 2 for end, label in zip(ends, labels, strict=True)]
    figure, axes = _subplots(pyplot, 1, len(ops), 0.26 * ends[-1] + 1.4, title, sharey=True)
    for panel, op in zip(axes[0], ops, strict=True):
        by_name = {row["name"]: min(row["ratios"].values()) for row in ours if row["op"] == op}
        values = [by_name.get(case, 0.0) for case in cases]
        panel.barh(centers, values, color=[COLOURS[0 if x >= 1 else 1] for x in values])
        panel.axvline(1.0, color="black", lw=1)
        panel.set_title(op)
        _name_bars(panel, centers, labels)
    return figure


def _roofline(
    pyplot: Any, colours: Colours, rows: list[dict[str, Any]], most: float | None, peak: float | None, title: str
) -> Any:
    """Draws speed by operations a byte of the arrays, below the limits of memory and tensor cores."""
    figure, axes = _subplots(pyplot, 1, 1, 5.4, title)
    panel, points = axes[0][0], dict[tuple[str, str], list[tuple[float, float]]]()
    for row in rows:
        point = row["flops"] / row["num_bytes"], row["tflops"]
        points.setdefault((row["contender"], row["op"]), []).append(point)
    for (name, op), of_one in points.items():
        label = "cuflash" if colours[name] == COLOURS[0] else name
        marker = "o" if op == "forward" else "^"
        panel.scatter(*zip(*of_one, strict=True), s=12, marker=marker, color=colours[name], label=label)
    work = [x for of_one in points.values() for x, _ in of_one]
    if most:
        ridge = (peak or max(row["tflops"] for row in rows) * 1e12) / most
        ends = [min(*work, ridge), ridge]
        panel.plot(ends, [x * most * 1e-12 for x in ends], color="black", lw=1, ls="--", label="memory's limit")
        if peak:
            ends = [ridge, max(*work, ridge)]
            panel.plot(ends, [peak * 1e-12] * 2, color="black", lw=1, label="16-bit tensor cores")
    panel.set_xscale("log", base=2)  # labels of powers of 10 lie over each other where there are few
    panel.xaxis.set_major_formatter(lambda x, _: short(x))
    panel.set(yscale="log", xlabel="FLOP for each byte of the arrays", ylabel="TFLOP/s")
    return _with_legend(figure, axes)


def _subplots(pyplot: Any, lines: int, columns: int, height: float, title: str, **more: Any) -> tuple[Any, Any]:
    """Returns a figure of WIDTH with a title, and its panels by line and column. height: in inches."""
    size = WIDTH, height
    figure, axes = pyplot.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained", **more)
    figure.suptitle("\n".join(textwrap.fill(line, 52) for line in title.splitlines()))
    return figure, axes


def _name_bars(panel: Any, centers: list[Any], labels: list[str]) -> None:
    """Names horizontal bars, the first on top, and draws a grid behind them."""
    panel.set_yticks(centers, labels, linespacing=1.0)
    panel.set_ylim(centers[-1] + 0.6, centers[0] - 0.6)
    panel.locator_params(axis="x", nbins=4)
    panel.grid(axis="x", alpha=0.3)
    panel.set_axisbelow(True)


def _with_legend(figure: Any, axes: Any) -> Any:
    """Adds one legend below all panels."""
    handles: dict[str, Any] = {}
    for panel in (each for line in axes for each in line):
        shown, labels = panel.get_legend_handles_labels()
        handles |= zip(labels, shown, strict=True)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, frameon=False)
    return figure


def _name(row: Errors) -> str:
    return "cuflash" if row.ours else row.contender


def short(number: float) -> str:
    """Formats a length, as in "4k"."""
    return f"{number / 1024:g}k" if number >= 1024 else f"{number:g}"


def _ratios(axes: Any, names: list[str], points: list[tuple[str, Errors]]) -> None:
    """Draws a line for each contender and dtype. Tick labels show our error over the output, in the first dtype."""
    ticks = list(dict.fromkeys(tick for tick, _ in points))
    least: dict[tuple[str, str], float] = {}
    of_ours: dict[str, str] = {}
    for tick, row in points:
        key, error = (tick, row.setting.case.dtype), row.worst
        least[key] = min(error, least.get(key, error))
        if row.ours:
            of_ours.setdefault(tick, f"{error:.1e}".replace("e-0", "e-"))
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for tick, row in points:
        dtype = row.setting.case.dtype
        lines.setdefault((_name(row), dtype), []).append((ticks.index(tick), row.worst / least[tick, dtype]))
    for (name, dtype), line in lines.items():
        number = names.index(name)
        # Thick and below, so that overlapping lines stay visible.
        drawn = {"color": COLOURS[number % len(COLOURS)], "lw": 1.3 if number else 3.0, "zorder": 2 if number else 1}
        axes.plot(*zip(*line, strict=True), DTYPES[dtype], marker="o", ms=3, label=f"{name}, {dtype}", **drawn)
    axes.set_xticks(range(len(ticks)), [f"{tick}\n{of_ours.get(tick, '')}" for tick in ticks])
    axes.grid(alpha=0.3)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise UnsupportedError("pictures need matplotlib, which is not installed: pip install matplotlib") from error
    matplotlib.use("Agg")  # works without a screen
    from matplotlib import pyplot

    white = {"figure.facecolor": "white", "savefig.facecolor": "auto"}  # legible on a dark page, too
    pyplot.rcParams.update({"font.size": LETTERS, "axes.titlesize": LETTERS, "figure.titlesize": LETTERS} | white)
    return pyplot
