"""Draws the algorithm of cuflash: the computed tiles of the scores, and the division of work among warps on Hopper.

    python examples/how_it_works.py [FILE]        default how_it_works.png; needs matplotlib, no GPU

Top: a causal problem. Each block of queries stays in registers and shared memory, and loops over the key tiles that
some of its queries see, last to first. A tile of scores is computed, used and discarded, so that the matrix of all
scores is never in memory. Tiles above the diagonal are skipped, and only tiles that it crosses apply the mask.

Bottom: one block of queries on Hopper. One warp copies tiles of k and v into a ring in shared memory. Two warpgroups
have half of the queries each, and alternate: while the tensor cores compute products of one, the other computes exp.
The last p v runs with the first products of the next block of queries.
"""

from __future__ import annotations

import argparse
from typing import Any

from packages import explain_missing

with explain_missing():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Rectangle

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "#DDDDDD"
TILES, STEPS = 8, 3
AT_WORK = 5  # index of the highlighted block of queries


def box(axes: Any, x: float, y: float, width: float, height: float, colour: str, text: str = "") -> None:
    """Draws a filled box with a text in it."""
    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor="white", lw=1.5))
    on = "white" if colour in (BLUE, GREEN) else "black"
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=on)


def draw_tiles(axes: Any) -> None:
    """Draws the scores of a causal problem: rows are blocks of queries, columns are tiles of keys."""
    for row in range(TILES):
        for column in range(TILES):
            colour = GREY if column > row else ORANGE if column == row else BLUE
            box(axes, column, row, 1, 1, colour)
    axes.add_patch(Rectangle((0, AT_WORK), AT_WORK + 1, 1, fill=False, edgecolor="black", lw=2.5))
    axes.annotate("", (0.3, AT_WORK + 0.5), (AT_WORK + 0.7, AT_WORK + 0.5), arrowprops={"arrowstyle": "->", "lw": 2})
    label = "on the chip for\nthese queries:\nq, m, ℓ and o"
    axes.text(TILES + 0.2, AT_WORK + 0.5, label, va="center")
    legend = (BLUE, "no mask needed"), (ORANGE, "mask applied"), (GREY, "skipped")
    for row, (colour, what) in enumerate(legend):
        box(axes, TILES + 0.2, row + 0.25, 0.5, 0.5, colour)
        axes.text(TILES + 0.9, row + 0.5, what, va="center")
    axes.set(xlim=(0, TILES + 3.8), ylim=(TILES, 0), aspect="equal", title="Tiles of the scores, causal")
    axes.set_xticks([TILES / 2], ["tiles of keys"])
    axes.set_yticks([TILES / 2], ["blocks of queries"], rotation=90, va="center")


def draw_warps(axes: Any) -> None:
    """Draws the work of each warp over time, for one block of queries."""
    lanes = {"one warp copies": 0.5, "warpgroup 1": 2.1, "warpgroup 2": 3.7}
    for lane, y in lanes.items():
        axes.text(0, y - 0.1, lane, va="bottom")
    for step in range(STEPS):
        for number, name in enumerate("kv"):
            box(axes, 2 * step + number, lanes["one warp copies"], 1, 0.9, GREEN, f"{name}{step}")
    for lane, begin in (("warpgroup 1", 1.0), ("warpgroup 2", 2.0)):
        for step in range(STEPS):
            products = f"q k{step}" if step == 0 else f"q k{step}\np v{step - 1}"
            box(axes, begin + 2 * step, lanes[lane], 1, 0.9, BLUE, products)
            box(axes, begin + 2 * step + 1, lanes[lane], 1, 0.9, ORANGE, f"exp {step}")
        box(axes, begin + 2 * STEPS, lanes[lane], 1, 0.9, BLUE, f"next\nq k0\np v{STEPS - 1}")
    for x, colour, what in (0, GREEN, "TMA"), (1.9, BLUE, "tensor cores"), (5.1, ORANGE, "exp, sums, rounding"):
        box(axes, x, 5.5, 0.5, 0.45, colour)
        axes.text(x + 0.6, 5.72, what, va="center")
    title = "Warps of a block of queries on Hopper (k0: its last tile of keys)"
    axes.set(xlim=(0, 2 * STEPS + 3), ylim=(6.0, 0), title=title)
    axes.annotate("", (2 * STEPS + 3, 4.85), (0, 4.85), arrowprops={"arrowstyle": "->", "lw": 1.5})
    axes.text(2 * STEPS + 3, 5.02, "time", ha="right", va="top")
    axes.set_yticks([], [])
    axes.set_xticks([], [])


def main() -> None:
    """Draws both pictures into a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", default="how_it_works.png", help="the picture; default %(default)s")
    path = parser.parse_args().file
    pyplot.rcParams.update({"font.size": 12.5, "axes.titlesize": 12.5})  # legible on a phone: 11 of 375 pixels
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(6, 9.3), height_ratios=(1, 1.1), layout="constrained")
    draw_tiles(top)
    draw_warps(bottom)
    for axes in (top, bottom):
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    figure.savefig(path, dpi=130, facecolor="white")
    print(f"drawn: {path}")


if __name__ == "__main__":
    main()
