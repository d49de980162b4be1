#!/usr/bin/env python3
"""Compares the speed and the results of the working tree with an older version, both in one process.

    .ci/versus.py COMMIT                    runs all parts that can run here
    .ci/versus.py COMMIT --extract FOLDER   only writes the needed files of COMMIT, for a machine without git
    .ci/versus.py FOLDER --json FILE        compares with that folder, and writes all figures

speed      times calls on the GPU: replays of CUDA graphs of both versions, alternating, on the same arrays
varlen     times packed calls whose sequences have one length, beside dense ones; only if named
mods       times calls with score_mod, mask_mod, bias or sinks, beside plain ones; only if named
outputs    compares results of random problems bit by bit, on NumPy arrays if there is no GPU
host       times the host in calls through CuPy, PyTorch and JAX, for information only
registers  compares registers, spills, stack, shared memory and resident blocks of every kernel, without a GPU
cubins     compares the SHA-256 of all cubins, compiled under one symbol name, without a GPU; only if named

`--parts mods --peers` also times other libraries, on PyTorch tensors and without CUDA graphs, for information only: the
host counts where it is slower than the GPU. Both versions build block masks beforehand, as Flex does.
`--cells "fwd d64 alibi"` selects cells whose group and name contain all these words, in speed, varlen and mods.

`--parts cubins` covers all kernels of `registers`, and kernels with score_mod, mask_mod, bias, sinks and dropout. It
takes about 15 minutes on two cores for each tree whose digests are not in the folder of --cache. After that, only
kernels with changed text are compiled. It uses the NVRTC of this interpreter: run it with 13.0.88, which PyTorch and
JAX pin, and with the newest one. `--kernels TEXT` selects kernels by label.

The exit status is 1 if an output or a cubin differs. It is 1 if a kernel spills more, fits an SM fewer times or lacks a
partner in the other version (RENAMED in versus_kernels.py pairs some). It is also 1 if a cell has less than
0.99 of its speed, or if the geometric mean of all cells is under 0.998.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from statistics import geometric_mean
from types import ModuleType
from typing import Any

import versus_calls as calls
import versus_cases as cases
import versus_checks as checks
import versus_kernels as kernels
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
TREE = ("cuflash", "kernels_cu", "tests")
LEAST_MEAN = 0.998  # The geometric mean of all cells' speed is at least this.
PARTS = ("speed", "varlen", "mods", "outputs", "host", "registers", "cubins")
NEED_A_GPU = ("speed", "varlen", "mods", "host")
ONLY_IF_NAMED = ("varlen", "mods", "cubins")
MOST_LINES = 60  # The table of kernels ends here; the JSON file has all of them.

console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 150)


# The two versions.


def extract(commit: str, folder: Path) -> None:
    """Writes the package, the kernels and the tests, which list kernels, from a commit or a folder."""
    if folder.exists() and any(folder.iterdir()):
        sys.exit(f"{folder} is not empty: what is in it would become a part of the older version")
    folder.mkdir(parents=True, exist_ok=True)
    git = ["git", "-C", str(ROOT), "archive", commit]
    pack = ["tar", "-chC", commit, "--exclude=__pycache__"] if (Path(commit) / "cuflash").is_dir() else git
    archive = subprocess.run([*pack, *TREE], stdout=-1, check=False)
    if archive.returncode:
        sys.exit(f"{commit} is neither a folder with {', '.join(TREE)}, nor a commit of this repository with them")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)


def load_both(tree: Path, folder: Path) -> list[ModuleType]:
    """Imports the older version as `cuflash_before`, with its kernels inside, and the working tree's `cuflash`."""
    before = folder / "cuflash_before"
    shutil.copytree(tree / "cuflash", before)
    shutil.copytree(tree / "kernels_cu", before / "kernels_cu")
    sys.path[:0] = [str(folder), str(ROOT / "tests" / "support")]
    versions = [importlib.import_module(name) for name in ("cuflash_before", "cuflash")]
    assert [Path(str(version.__file__)).parent for version in versions] == [before, ROOT / "cuflash"], versions
    return versions


# All parts.


def main() -> int:
    """Runs the parts, prints and writes the results, and returns 1 if something got worse."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help=f"a git revision, or a folder that holds {', '.join(TREE)}")
    parser.add_argument("--extract", type=Path, metavar="FOLDER", help="only write the files of the commit there")
    parser.add_argument("--parts", metavar="P,P", help=f"some of {','.join(PARTS)}; see above for what is left out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that is found")
    parser.add_argument("--rounds", type=int, default=120, help="most replays of each call of a cell (default 120)")
    parser.add_argument("--seconds", type=float, default=150.0, help="all cells together, about (default 150)")
    parser.add_argument("--cells", default="", metavar="WORDS", help="only cells whose group and name hold all these")
    parser.add_argument("--peers", action="store_true", help="mods: other libraries, too, which compile for long")
    parser.add_argument("--problems", type=int, default=500, help="outputs: how many (default 500)")
    parser.add_argument("--seed", type=int, default=0, help="outputs: of the first problem; the next has the next seed")
    parser.add_argument("--archs", default="sm_80,sm_90", help="registers, cubins: default sm_80,sm_90")
    cache = Path(tempfile.gettempdir()) / "cuflash-versus"
    parser.add_argument("--cache", type=Path, default=cache, metavar="FOLDER", help="registers, cubins: %(default)s")
    parser.add_argument("--kernels", default="", metavar="TEXT", help="registers, cubins: only of these labels")
    options = parser.parse_args()
    if options.extract:
        extract(options.commit, options.extract)
        return 0
    sys.path[:0] = [str(ROOT)]
    if importlib.util.find_spec("platformdirs") is None:  # A machine without network may have the wheel, see .ci/gpu.
        sys.path += map(str, (ROOT / ".whl").glob("platformdirs*.whl"))
    from cuflash.planning import device  # Processes of the older version import this file, too.

    on_gpu = device.count() > 0
    can_run = [part for part in PARTS if on_gpu or part not in NEED_A_GPU]
    parts = options.parts.split(",") if options.parts else [part for part in can_run if part not in ONLY_IF_NAMED]
    if wrong := set(parts) - set(can_run):
        parser.error(f"{', '.join(wrong)}: no such part can run here; {', '.join(can_run)} can")
    if unknown := set(options.archs.split(",")) - set(kernels.LIMITS):
        parser.error(f"{', '.join(unknown)}: give some of {', '.join(kernels.LIMITS)}")

    report: dict[str, Any] = {"options": {x: str(y) for x, y in vars(options).items()}, "seconds": {}, "failures": []}
    with tempfile.TemporaryDirectory(prefix="cuflash-versus-") as name:
        folder = Path(name).resolve()
        tree = folder / "tree"
        extract(options.commit, tree)
        versions = load_both(tree, folder)
        for part in parts:
            started = time.perf_counter()
            try:
                report[part] = run(part, options, versions, [tree, ROOT], on_gpu)
                show(part, report[part])
            except Exception as error:  # The other parts still run.
                traceback.print_exc()
                report["failures"].append(f"{part} ended with {error!r}")
            report["seconds"][part] = time.perf_counter() - started
            console.print(f"{part}: {report['seconds'][part]:.0f} s")
    report["failures"] += failures(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    for line in report["failures"]:
        console.print(f"FAILED: {line}")
    if not report["failures"]:
        console.print(f"Nothing got worse in {', '.join(parts)}.")
    return int(bool(report["failures"]))


def run(part: str, options: argparse.Namespace, versions: list[ModuleType], trees: list[Path], on_gpu: bool) -> Any:
    """Runs a part and returns its results."""
    if part in cases.CELLS:
        words = options.cells.split()
        chosen = [cell for cell in cases.CELLS[part]() if all(word in f"{cell.group} {cell.name}" for word in words)]
        checks.compile_ahead(versions, [cell.trial for cell in chosen])
        return calls.run_speed(versions, chosen, options.rounds, options.seconds, options.peers and part == "mods")
    if part == "outputs":
        trials = [checks.Trial.drawn(seed) for seed in range(options.seed, options.seed + options.problems)]
        if on_gpu:
            checks.compile_ahead(versions, trials)
        return checks.run_outputs(versions, trials, on_gpu)
    if part == "host":
        return calls.run_host(versions, trees)
    return kernels.run(part, trees, options.archs.split(","), options.cache, options.kernels)


def show_table(headings: str, lines: Iterable[Iterable[Any]]) -> None:
    """Prints a table; the first column is text, the others are numbers."""
    table = Table(box=None)
    for number, heading in enumerate(headings.split("; ")):
        table.add_column(heading, justify="right" if number else "left")
    for line in lines:
        table.add_row(*map(str, line))
    console.print(table)


def show_speed(rows: list[dict[str, Any]]) -> None:
    """Prints a line for each cell, then one for each group. Times of other calls come with their ratio to ours."""
    timed = [row for row in rows if row["ratio"]]
    others = dict.fromkeys(name for row in timed for name in row["others"])
    lines: list[tuple[Any, ...]] = []
    for row in timed:
        low, high = row["quartiles"]
        times = (f"{row[when] * 1e6:.1f}" for when in ("before", "after"))
        beside = ((row["others"].get(name), row["after"]) for name in others)
        texts = (f"{other * 1e6:.1f} ({other / after:.3f})" if other else "-" for other, after in beside)
        lines.append((row["name"], *times, f"{row['ratio']:.3f}", f"{50 * (high - low):.1f}", *texts))
    show_table("; ".join(("cell; before, µs; after, µs; ratio; ± %", *others)), lines)
    for row in timed:
        for note in row["notes"]:
            console.print(f"{row['name']}: {note}")
    groups = {group: list(members) for group, members in groupby(timed, lambda row: row["group"])}
    lines = []
    for group, members in (groups | {"all": timed} if timed else {}).items():
        least = min(members, key=lambda row: row["ratio"])
        mean = geometric_mean(row["ratio"] for row in members)
        lines.append((group, len(members), f"{mean:.4f}", f"{least['ratio']:.3f}", least["name"], least["clock"] or ""))
    show_table("group; cells; mean; least; of cell; SM clock, MHz", lines)


def show(part: str, result: Any) -> None:
    """Prints the table of a part."""
    if part in cases.CELLS:
        show_speed(result)
    elif part == "outputs":
        verdicts = ("equal", "close", "refused", "different")
        lines = [(op, *(counts.get(verdict, 0) for verdict in verdicts)) for op, counts in result["counts"].items()]
        where = "the GPU" if result["on_gpu"] else "NumPy arrays"
        show_table("; ".join((f"problems on {where}", *verdicts)), lines)
    elif part == "host":
        for kind, times in result.items():
            if isinstance(times, str):
                console.print(f"{kind} is not measured: {times}")
            else:
                lines = [(name, *(f"{seconds * 1e6:.1f}" for seconds in pair)) for name, pair in times.items()]
                show_table(f"{kind}; before, µs; after, µs", lines)
    elif part == "cubins":
        console.print(f"{len(result['differ'])} of {result['kernels']} kernels differ")
    else:
        lines = []
        for name, (old, new) in result["differ"].items():
            before, after = old or {}, new or {}
            differ = [key for key in before | after if before.get(key) != after.get(key)]
            lines.append((name, ", ".join(f"{key} {before.get(key)} to {after.get(key)}" for key in differ)))
        show_table(f"{len(lines)} of {result['kernels']} kernels differ; before to after", lines[:MOST_LINES])


def failures(report: dict[str, Any]) -> Iterable[str]:
    """Yields a line for each result that got worse. Times without CUDA graphs are ignored."""
    for part in (part for part in cases.CELLS if part in report):
        rows = [row for row in report[part] if row.get("captured", True)]
        for row in rows:
            if row["ratio"] is None:
                yield f"{part}: {row['name']} was not timed: {row['note']}"
            elif row["ratio"] < calls.LEAST_RATIO:
                yield f"{part}: {row['name']} has {row['ratio']:.4f} of its speed"
        mean = geometric_mean([row["ratio"] or 1.0 for row in rows] or [1.0 if report[part] else math.nan])
        if not mean >= LEAST_MEAN:
            yield f"{part}: the geometric mean of {len(rows)} cells is {mean:.4f}"
    if differences := report.get("outputs", {}).get("differences"):
        yield f"outputs: {len(differences)} problems differ, the first with seed {differences[0]['seed']}"
    for part in (part for part in ("registers", "cubins") if part in report):
        yield from kernels.failures(part, report[part])


if __name__ == "__main__":
    sys.exit(main())
