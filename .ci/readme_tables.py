"""Writes the figures of README.md, the guide and examples/results/README.md from the files under examples/results.

`readme_tables.py --check` compares instead, and exits with 1 if a figure differs. In README.md and the pages of
examples/guide, figures are between `<!-- NAME -->` and `<!-- end -->`; the other document is written as a whole.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import geometric_mean

from result_tables import (
    GPUS,
    OURS,
    RESULTS,
    ROOT,
    best,
    card,
    details,
    errors,
    first_of_ours,
    read,
    rows_of,
    span,
    speed,
    table,
)

from cuflash.tools.bench import accuracy as of_errors

README, GUIDE = ROOT / "README.md", ROOT / "examples" / "guide"


def shown(preset: str = "paper") -> str:
    """Returns the GPU whose figures README.md shows for a preset."""
    return next(gpu for gpu in GPUS if (RESULTS / gpu / f"{preset}.json").is_file())


def speed_in_words(op: str, gpu: str) -> str:
    """Returns a sentence with the mean and range of ratios to the fastest peers."""
    rows = [row for row in first_of_ours(rows_of(gpu, "paper", op)) if row["dtype"] == "bfloat16"]
    ratios = [ratio for row in rows if (ratio := best(row)) is not None]
    return f"{geometric_mean(ratios):.2f} times in the geometric mean of {len(ratios)} calls, {span(ratios)}"


def best_ranks() -> str:
    """Returns a table of shares of one GPU's rate, by problem: of the best scheme, and of PyTorch."""
    gpu = shown("ranks")
    content = read(gpu, "ranks")
    lines = []
    for problem in dict.fromkeys(row["problem"] for row in content["rows"]):
        line = [problem]
        for op, is_ours in ((op, is_ours) for op in ("forward", "both") for is_ours in (True, False)):
            shares = [row["share"] for row in content["rows"]
                      if (row["problem"], row["op"], row["ours"]) == (problem, op, is_ours)]  # fmt: skip
            line.append(f"{max(shares):.2f}" if shares else "–")
        lines.append(line)
    head = f"{content['ranks']} {card(gpu, 'ranks')}, tokens a GPU", "forward", "PyTorch", "both passes", "PyTorch"
    return table(head, lines)


def accuracy_in_words() -> str:
    """Returns these ratios of errors in sentences."""
    largest, smallest, (*sizes, last) = errors(max), errors(min), of_errors.SIZES

    def of(op: str, *dtypes: str) -> str:
        return span(x for dtype in dtypes for size in of_errors.SIZES for x in largest[dtype, op, size])

    def most(sizes: list[float], *dtypes: str) -> str:
        return f"{max(x for dtype in dtypes for op in OURS for size in sizes for x in smallest[dtype, op, size]):.1f}"

    both = "float16", "bfloat16"
    return (
        f"Root mean square errors against float64, on one {card('', 'accuracy')}, beside the least accurate other "
        f"library: in 16 bits {of('forward', *both)} times in forward, and {of('backward', *both)} times in backward; "
        f"in float32 (three TF32 products) {of('forward', 'float32')} and {of('backward', 'float32')} times.\n\n"
        f"Beside the most accurate one, with scores up to {sizes[-1]:g}: up to {most(sizes, *both)} times in 16 bits, "
        f"and {most(sizes, 'float32')} times in float32. With scores of {last:g}: up to {most([last], 'float16')} "
        f"times in float16, {most([last], 'bfloat16')} in bfloat16 and {most([last], 'float32')} in float32."
    )


def installed(stack: str, kind: str = "bytes", unit: str = "MB") -> str:
    """Returns the size of a stack that pip downloads or installs. kind: the name of a column of the file."""
    rows = read("", "install")["rows"]
    size = next(row[kind] for row in rows if row["stack"] == stack)
    return f"{size / 1e6:.0f} MB" if unit == "MB" else f"{size / 1e9:.1f} GB"


def speeds() -> str:
    """Returns a table of speed with a description of the machine."""
    gpu, ops = shown(), ("forward", "backward")
    versions = read(gpu, "paper")["machine"]["versions"]
    means = [f"{op} {speed_in_words(op, gpu)}" for op in ops]
    text = (
        f"TFLOP/s on one {card(gpu, 'paper')}, bfloat16, 16k tokens, hidden 2048; backward is counted as 2.5 "
        "times the work of forward. In brackets: how many times as fast as the fastest of PyTorch "
        f"{versions['torch']}'s flash and cuDNN ({versions['cuDNN']}) backends and FlashAttention-4 "
        f"{versions['FlashAttention-4']}: {'; '.join(means)}."
    )
    return f"{text}\n\n{speed(gpu, ops, (1024, 4096, 16384))}"


def filled(text: str) -> str:
    """Returns a text with its paragraphs wrapped at 120 columns, except tables."""
    paragraphs = text.split("\n\n")
    wrap = partial(textwrap.fill, width=120, break_long_words=False, break_on_hyphens=False)
    return "\n\n".join(each if each.startswith("|") else wrap(each) for each in paragraphs)


def first_calls(kind: str) -> str:
    """Returns the time of first calls of our kernels: "cold" with a compile, "disk" from the cache."""
    startup = read(shown(), "paper")["startup"][kind]
    times = [seconds for op in ("forward", "backward") for seconds in startup[op].values()]
    return f"{span(times, 1)} s" if kind == "cold" else f"{span((1e3 * x for x in times), 0)} ms"


def first_calls_of_peer(name: str, factor: float, unit: str) -> str:
    """Returns the time of first calls of another library."""
    startup = read(shown(), "paper")["startup"]["peers"]
    return f"{span((factor * of_op[name] for of_op in startup.values()), 1)} {unit}"


def host_times(name: str) -> str:
    """Returns the host time of a contender's repeated calls."""
    host_seconds = read(shown(), "paper")["host_seconds"]
    seconds = {op: host_seconds[f"{op}, {name.format(op=ours)}, torch arrays"] for op, ours in OURS.items()}
    return ", ".join(f"{op} {each * 1e6:.0f} µs" for op, each in seconds.items())


def models_in_words() -> str:
    """Returns mean ratios over calls of models, the number of calls in which we are fastest, and the GPU."""
    gpu, rows = shown("models"), []
    for op in OURS:
        ratios = [ratio for row in first_of_ours(rows_of(gpu, "models", op)) if (ratio := best(row)) is not None]
        ahead = sum(ratio > 1 for ratio in ratios)
        rows.append(f"{op} {geometric_mean(ratios):.2f} times, ahead in {ahead} of {len(ratios)} calls")
    return f"{'; '.join(rows)}, on one {card(gpu, 'models')}"


def decode_in_words() -> str:
    """Returns the range of ratios of decode steps, and the number of calls in which we are slower, on each GPU."""
    parts = []
    for gpu in GPUS:
        rows = first_of_ours(rows_of(gpu, "decode", "forward"))
        ratios = [ratio for row in rows if (ratio := best(row)) is not None]
        slower = sum(ratio < 1 for ratio in ratios)
        parts.append(f"{span(ratios)} times, slower in {slower} of {len(ratios)} calls, on one {card(gpu, 'decode')}")
    return "; ".join(parts)


PLACES: dict[str, Callable[[], str]] = {
    "decode": decode_in_words,
    "models": models_in_words,
    "host": partial(host_times, "cuflash {op}"),
    "host of FlashAttention-4": partial(host_times, "FlashAttention-4"),
    "host of PyTorch": partial(host_times, "torch flash"),
    "ranks": best_ranks,
    "speed": speeds,
    "compiled": partial(first_calls, "cold"),
    "loaded": partial(first_calls, "disk"),
    "compiled by FlashAttention-4": partial(first_calls_of_peer, "FlashAttention-4", 1.0, "s"),
    "first of PyTorch": partial(first_calls_of_peer, "torch flash", 1e3, "ms"),
    "accuracy": accuracy_in_words,
    "download": partial(installed, "cuflash[cuda13]"),
    "download of cuda12": partial(installed, "cuflash[cuda12]"),
    "download beside PyTorch": partial(installed, "cuflash[cuda13]", "bytes_beside_torch"),
    "download of FlashAttention-4": partial(installed, "flash-attn-4", "bytes_beside_torch"),
    "download of PyTorch": partial(installed, "torch", unit="GB"),
    "on disk": partial(installed, "cuflash[cuda13]", "bytes_on_disk"),
}
PLACE = re.compile(r"(<!-- ([\w -]+) -->(\n?)).*?<!-- end -->", re.DOTALL)


def with_figures(path: Path) -> str:
    """Returns the text of a page with the figures of the files. Figures on separate lines are wrapped."""

    def figure(match: re.Match[str]) -> str:
        if match[2] not in PLACES:
            sys.exit(f"{path.name} has a place for {match[2]!r}, but there are figures for {sorted(PLACES)}")
        text = PLACES[match[2]]()
        return f"{match[1]}{filled(text) if match[3] else text}{match[3]}<!-- end -->"

    return PLACE.sub(figure, path.read_text("utf-8"))


def is_alike(path: Path, text: str) -> bool:
    """Returns True if a page has this text, apart from line breaks."""
    return path.read_text("utf-8").split() == text.split()


def main() -> None:
    pages = [README, *sorted(GUIDE.glob("*.md"))]
    texts = {path: with_figures(path) for path in pages} | {RESULTS / "README.md": details()}
    shown_names = {match[2] for path in pages for match in PLACE.finditer(texts[path])}
    if unused := PLACES.keys() - shown_names:
        sys.exit(f"no page has a place for {sorted(unused)}")
    if sys.argv[1:] == ["--check"]:
        off = [path.relative_to(ROOT).as_posix() for path, text in texts.items() if not is_alike(path, text)]
        sys.exit(f"{off} differ from the files under examples/results: run .ci/readme_tables.py" if off else 0)
    for path, text in texts.items():
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
