"""`cuflash bench ranks`: computed or measured time of `cuflash.distributed.attention` by numbers of ranks."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from ...errors import ProblemError, UnsupportedError
from .. import arguments
from . import pictures, table
from .ranks_model import Cluster, shares
from .ranks_problems import NAME, OPS, ROWS, Heads, Work, kinds, selected

HELP = "time of cuflash.distributed.attention by ranks, computed; measured with --measure"
# Options of `bench` that have no effect here, and those that have none elsewhere.
REFUSED = "ops", "dtype", "causal", "algorithms", "pictures", "draw"
OPTIONS = "measure", "quick", "heads", "rates", "links", "host", "alpha", "picture"
TITLES = {"forward": "forward", "both": "forward and backward"}
RANKS = 1, 2, 4, 8, 16, 32, 64, 256, 1024
MISSING = "Not in the numbers: skew of ranks, congestion of links, slow GPUs."


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the preset."""
    default = Cluster()
    add = parser.add_argument_group(NAME, HELP).add_argument
    add("--measure", action="store_true", default=None, help="measure on the processes of torchrun, one for each GPU")
    add("--quick", action="store_true", default=None, help="with --measure: some of the problems, in 150 s")
    add("--heads", type=heads, metavar="Q/KV", help="default 32/8")
    pair = partial(arguments.numbers, 2)
    rates = f"TFLOP/s on one GPU; default {default.forward / 1e12:g},{default.backward / 1e12:g}"
    add("--rates", type=pair, metavar="FORWARD,BACKWARD", help=rates)
    links = f"GB/s of a GPU; default {default.within / 1e9:g},{default.between / 1e9:g}"
    add("--links", type=pair, metavar="WITHIN,BETWEEN", help=links)
    add("--host", type=arguments.count, metavar="N", help=f"GPUs of a host; default {default.host}")
    add("--alpha", type=partial(arguments.numbers, 1), metavar="N", help="µs before a transfer; default 15")
    add("--picture", type=arguments.output, metavar="FILE", help="draw the computed shares; needs matplotlib")


def heads(text: str) -> tuple[int, int]:
    """Parses numbers of heads: "32/8", or "16" for equally many of q and of k and v."""
    q, _, kv = text.partition("/")
    numbers = [int(part) if part.isdecimal() else 0 for part in (q, kv or q)]
    if min(numbers) < 1 or numbers[0] % numbers[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: give heads such as 32/8, where the first is a multiple")
    return numbers[0], numbers[1]


def main(options: argparse.Namespace) -> int:
    """Prints and writes the computed shares, or runs the measurement."""
    _refuse_unused(options)
    cluster = cluster_of(options)
    if options.measure:
        try:
            from . import ranks_measure
        except ImportError as error:
            raise UnsupportedError(f"--measure needs PyTorch ({error}): pip install torch") from error
        return ranks_measure.main(options, cluster)
    draw = pictures.ranks() if options.picture else None  # first, to report a missing package at once
    content = computed(cluster, problems(options), options.typed)
    show(content)
    if options.json:
        table.write(options.json, content)
    if draw is not None:
        draw(content, Path(options.picture))
        print(f"drawn: {options.picture}")
    return 0


def _refuse_unused(options: argparse.Namespace) -> None:
    """Raises ProblemError for options that would have no effect."""
    refused = dict.fromkeys(REFUSED, f"leave it out of {NAME}")
    # With --measure links are measured, and so is what --picture would draw.
    refused |= (
        dict.fromkeys(("picture", "links", "alpha"), "leave it or --measure out")
        if options.measure
        else {"quick": "add --measure"}
    )
    for name, advice in refused.items():
        if getattr(options, name) not in (None, False):
            raise ProblemError(f"--{name.replace('_', '-')} has no effect; {advice}")
    if options.head_dims is not None and len(options.head_dims) > 1:
        raise ProblemError(f"--head-dims has {len(options.head_dims)} numbers; give one with {NAME}")


def cluster_of(options: argparse.Namespace) -> Cluster:
    """Returns the GPUs and links that the options describe."""
    cluster = Cluster()
    if options.rates:
        cluster = cluster._replace(forward=options.rates[0] * 1e12, backward=options.rates[1] * 1e12)
    if options.links:
        cluster = cluster._replace(within=options.links[0] * 1e9, between=options.links[1] * 1e9)
    if options.alpha:
        cluster = cluster._replace(alpha=options.alpha[0] / 1e6)
    return cluster._replace(host=options.host or cluster.host)


def problems(options: argparse.Namespace) -> list[Work]:
    """Returns a causal mask, a window and packed documents, each by tokens of a rank."""
    q, kv = options.heads or (32, 8)
    works = kinds(options.seqlens or ROWS, Heads(q, kv, (options.head_dims or (128,))[0]))
    return selected(works, options.only)


def computed(cluster: Cluster, works: list[Work], command: str = "") -> dict[str, Any]:
    """Returns the computed seconds and shares of all schemes, by problem and ranks, as the file has them."""
    rows = [
        {
            "problem": work.name,
            "kind": work.name.split(",")[0],
            "tokens": work.rows,
            "ranks": ranks,
            "op": op,
            "scheme": scheme,
            **share._asdict(),
        }
        for work in works
        for ranks in RANKS
        for op, ops in OPS.items()
        for scheme, share in shares(cluster, work, ranks, ops).items()
    ]
    return {"command": command, "cluster": cluster._asdict(), "missing": MISSING, "rows": rows}


def show(content: dict[str, Any]) -> None:
    """Prints the computed shares: a table for each op, a column for each number of ranks."""
    cluster, rows = Cluster(**content["cluster"]), content["rows"]
    out = table.console()
    out.print(
        f"Computed share of one GPU's rate, in hosts of {cluster.host} GPUs. {cluster.forward / 1e12:g} TFLOP/s "
        f"forward, {cluster.backward / 1e12:g} backward. Links: {cluster.within / 1e9:g} GB/s within a host, "
        f"{cluster.between / 1e9:g} between hosts.",
        soft_wrap=True,
    )
    counts = list(dict.fromkeys(row["ranks"] for row in rows))
    for op, title in TITLES.items():
        shown = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
        for number, heading in enumerate(("tokens of a GPU", "scheme", *counts)):
            shown.add_column(str(heading), justify="right" if number > 1 else "left")
        lines: dict[tuple[str, str], dict[int, float]] = {}
        for row in rows:
            if row["op"] == op:
                lines.setdefault((row["problem"], row["scheme"]), {})[row["ranks"]] = row["share"]
        for (problem, scheme), line in sorted(lines.items()):
            shown.add_row(problem, scheme, *(f"{line[n]:.2f}" if n in line else "–" for n in counts))
        out.print(shown)
    out.print(content["missing"])
    if any("x" in row["scheme"] for row in rows):
        out.print('"ulysses x ring" is the ring between hosts and Ulysses within: a mesh of (hosts, GPUs of a host).')
