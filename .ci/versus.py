#!/usr/bin/env python3
"""Tells whether the working tree is as fast and as exact as an older version, by measuring both in one process.

    .ci/versus.py COMMIT                    runs all parts that can run here
    .ci/versus.py COMMIT --extract FOLDER   only writes what is needed of COMMIT, for a machine without git
    .ci/versus.py FOLDER --json FILE        compares with that, and writes all figures

speed      times calls on the GPU: replays of CUDA graphs, of both versions in turns, on the same arrays
outputs    compares results of random problems bit by bit; without a GPU these are on NumPy arrays
host       times the host in calls through CuPy, PyTorch and JAX; nothing is judged by it
registers  compares registers, spills, stack, shared memory and resident blocks of every kernel, without a GPU
cubins     compares the SHA-256 of all cubins, each compiled under one symbol name: without a GPU, and only if named

`--parts cubins` covers all kernels of `registers` and those with score_mod, mask_mod, bias, sinks and dropout. It takes
some 15 minutes on two cores for each tree whose digests are not in the folder of --cache; then only kernels whose
text changed are compiled. It uses the NVRTC of this interpreter: run it with 13.0.88, which PyTorch and JAX pin, and
with the newest one. `--kernels TEXT` takes a part of the kernels.

The exit status is 1 if an output or a cubin differs, a kernel spills more, fits a multiprocessor fewer times or has no
partner in the other version, a cell has less than 0.99 of its speed, or the geometric mean of all cells is under 0.998.
Kernels that were renamed are paired by the table RENAMED in versus_kernels.py.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from statistics import geometric_mean
from types import ModuleType
from typing import Any

import versus_calls as calls
import versus_checks as checks
import versus_kernels as kernels
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
LEAST_MEAN = 0.998  # The geometric mean of all cells' speed is at least this.
PARTS = ("speed", "outputs", "host", "registers", "cubins")
NEED_A_GPU = ("speed", "host")
ONLY_IF_NAMED = ("cubins",)
MOST_LINES = 60  # The table of kernels ends here; the JSON file has all of them.

console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 150)


# The two versions.


def extract(commit: str, folder: Path) -> None:
    """Writes the package, the kernels and the tests, which list kernels, of a commit or of a folder that holds them."""
    wanted, source = ("cuflash", "kernels_cu", "tests"), Path(commit)
    if folder.exists() and any(folder.iterdir()):
        sys.exit(f"{folder} is not empty: what is in it would become a part of the older version")
    folder.mkdir(parents=True, exist_ok=True)
    if (source / "cuflash").is_dir():
        pack, listed = ["tar", "-chC", commit, "--exclude=__pycache__"], [x for x in wanted if (source / x).exists()]
    else:
        git = ["git", "-C", str(ROOT)]
        names = subprocess.run([*git, "ls-tree", "--name-only", commit, *wanted], stdout=-1, text=True, check=False)
        pack, listed = [*git, "archive", commit], names.stdout.split()
    if not {*wanted[:2]} <= {*listed}:
        sys.exit(f"{commit} is neither a folder with cuflash and kernels_cu, nor a commit of this repository with them")
    archive = subprocess.run([*pack, *listed], stdout=-1, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)


def load_both(tree: Path, folder: Path) -> list[ModuleType]:
    """Imports the older version as package `cuflash_before`, with its kernels inside, and that of the working tree."""
    before = folder / "cuflash_before"
    shutil.copytree(tree / "cuflash", before)
    shutil.copytree(tree / "kernels_cu", before / "kernels_cu")
    sys.path[:0] = [str(ROOT), str(folder), str(ROOT / "tests" / "support")]
    if importlib.util.find_spec("platformdirs") is None:  # A machine without network may carry it, as for .ci/gpu.
        sys.path += map(str, (ROOT / ".whl").glob("platformdirs*.whl"))
    versions = [importlib.import_module(name) for name in ("cuflash_before", "cuflash")]
    assert [Path(str(version.__file__)).parent for version in versions] == [before, ROOT / "cuflash"], versions
    return versions


# Registers.

# A multiprocessor has so many warps, blocks and KiB of shared memory. Source: CUDA C++ Programming Guide, "Compute
# Capabilities".
LIMITS = {"sm_80": (64, 32, 164), "sm_86": (48, 16, 100), "sm_89": (48, 24, 100), "sm_90": (64, 32, 228)}
LIMITS |= {"sm_100": (64, 32, 228), "sm_120": (48, 24, 100)}


def resident_blocks(arch: str, registers: int, threads: int, shared: int) -> int:
    """Counts the blocks that fit a multiprocessor. Registers go to four warps at a time, in units of 256 a warp."""
    warps, blocks, kib = LIMITS[arch.rstrip("a")]
    of_block = -(-threads // 128) * 4
    by_registers = 65536 // (-(-registers * 32 // 256) * 256) // 4 * 4 // of_block
    by_shared = kib * 1024 // (-(-(shared + 1024) // 128) * 128)  # The system takes 1 KiB for each block.
    return min(blocks, warps // of_block, by_registers, by_shared)


def figures_of(variant: Any, folder: Path) -> dict[str, Any]:
    """Compiles a kernel and keeps its figures in a file, whose name is a digest of all that they depend on."""
    options, version = checks.inner("cuflash", "options")(variant), checks.inner("cuflash", "nvrtc_version")()
    digest = hashlib.sha256(repr((options, version, variant.smem_bytes, variant.num_threads)).encode())
    for path in checks.inner("cuflash", "included_files")(checks.inner("cuflash", "source_root")() / variant.source):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    kept = folder / f"{digest.hexdigest()}.json"
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(kept.read_text("utf-8")))
    try:
        log = checks.inner("cuflash", "compile_variant")(variant)[1]
    except Exception as error:
        return {"error": str(error)}
    registers = max(map(int, re.findall(r"Used (\d+) registers", log)))
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    stack, stores, loads = (max(map(int, figures)) for figures in zip(*frames, strict=True))
    shared = variant.smem_bytes + max(map(int, re.findall(r"(\d+) bytes smem", log)), default=0)
    figures = {"registers": registers, "spill": stores + loads, "stack": stack, "shared": shared}
    figures["blocks"] = resident_blocks(variant.arch, registers, variant.num_threads, shared)
    kernels.keep(kept, json.dumps(figures))
    return figures


def figures_of_all(archs: list[str], folder: Path, is_older: bool) -> dict[str, dict[str, Any]]:
    """Gives the figures of every kernel of this process's version, by architecture and today's name."""
    folder.mkdir(parents=True, exist_ok=True)
    variants = kernels.plain_kernels(archs, is_older)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        figures = pool.map(figures_of, variants.values(), repeat(folder))
    return dict(zip(variants, figures, strict=True))


def run_registers(trees: list[Path], archs: list[str], folder: Path) -> dict[str, Any]:
    """Gives the figures of both versions for kernels that differ, and None where one of them has no such kernel."""
    figures = []
    for number, tree in enumerate(trees):
        with checks.process(tree) as of_tree:
            figures.append(of_tree.submit(figures_of_all, archs, folder, number == 0).result())
    return kernels.paired(figures, lambda old, new: old != new)


# All parts.


def main() -> int:
    """Runs the parts, prints and writes what they find, and gives 1 if something got worse."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="a git revision, or a folder that holds cuflash and kernels_cu")
    parser.add_argument("--extract", type=Path, metavar="FOLDER", help="only write the files of the commit there")
    parser.add_argument(
        "--parts", metavar="P,P", help=f"some of {','.join(PARTS)}; default all that can run here but cubins"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that is found")
    parser.add_argument("--rounds", type=int, default=120, help="speed: most pairs of replays of a cell (default 120)")
    parser.add_argument("--seconds", type=float, default=150.0, help="speed: all cells together, about (default 150)")
    parser.add_argument("--cells", default="", metavar="TEXT", help="speed: only cells whose group or name holds this")
    parser.add_argument("--problems", type=int, default=500, help="outputs: how many (default 500)")
    parser.add_argument("--seed", type=int, default=0, help="outputs: of the first problem; the next has the next seed")
    parser.add_argument("--archs", default="sm_80,sm_90", help="registers, cubins: default sm_80,sm_90")
    kept = Path(tempfile.gettempdir()) / "cuflash-versus"
    parser.add_argument("--cache", type=Path, default=kept, metavar="FOLDER", help=f"registers, cubins: default {kept}")
    parser.add_argument("--kernels", default="", metavar="TEXT", help="cubins: only kernels whose label holds this")
    options = parser.parse_args()
    if options.extract:
        extract(options.commit, options.extract)
        return 0
    on_gpu = has_gpu()
    can_run = [part for part in PARTS if on_gpu or part not in NEED_A_GPU]
    parts = options.parts.split(",") if options.parts else [part for part in can_run if part not in ONLY_IF_NAMED]
    if wrong := set(parts) - set(can_run):
        parser.error(f"{', '.join(wrong)}: no such part can run here; {', '.join(can_run)} can")
    if unknown := set(options.archs.split(",")) - set(LIMITS):
        parser.error(f"{', '.join(unknown)}: give some of {', '.join(LIMITS)}")

    given = {name: str(value) for name, value in vars(options).items()}
    report: dict[str, Any] = {"options": given, "seconds": {}, "failures": []}
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
            except Exception as error:  # What the other parts find is worth having.
                traceback.print_exc()
                report["failures"].append(f"{part} ended with {error!r}")
            console.print(f"{part}: {time.perf_counter() - started:.0f} s")
            report["seconds"][part] = time.perf_counter() - started
    report["failures"] += failures(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    for line in report["failures"]:
        console.print(f"FAILED: {line}")
    if not report["failures"]:
        console.print(f"Nothing got worse in {', '.join(parts)}.")
    return int(bool(report["failures"]))


def has_gpu() -> bool:
    """Tells whether CuPy finds a GPU."""
    try:
        from cupy.cuda import runtime

        return bool(runtime.getDeviceCount() > 0)
    except Exception:  # CuPy raises errors of its own where the driver is missing.
        return False


def run(part: str, options: argparse.Namespace, versions: list[ModuleType], trees: list[Path], on_gpu: bool) -> Any:
    """Runs a part and gives what it finds."""
    if part == "speed":
        chosen = [cell for cell in calls.cells() if options.cells in f"{cell.group} {cell.name}"]
        checks.compile_ahead(versions, [cell.trial for cell in chosen])
        return calls.run_speed(versions, chosen, options.rounds, options.seconds)
    if part == "outputs":
        trials = [checks.Trial.of(seed) for seed in range(options.seed, options.seed + options.problems)]
        if on_gpu:
            checks.compile_ahead(versions, trials)
        return checks.run_outputs(versions, trials, on_gpu)
    if part == "host":
        return calls.run_host(versions, trees)
    if part == "cubins":
        return kernels.run_cubins(trees, options.archs.split(","), options.cache, options.kernels)
    return run_registers(trees, options.archs.split(","), options.cache)


def show_table(headings: str, lines: Iterable[Iterable[Any]]) -> None:
    """Prints a table; the first column is text, the others are numbers."""
    table = Table(box=None)
    for number, heading in enumerate(headings.split("; ")):
        table.add_column(heading, justify="right" if number else "left")
    for line in lines:
        table.add_row(*map(str, line))
    console.print(table)


def show_speed(rows: list[dict[str, Any]]) -> None:
    """Prints a line for each cell, then one for each group."""
    timed = [row for row in rows if row["ratio"]]
    lines: list[tuple[Any, ...]] = []
    for row in timed:
        low, high = row["quartiles"]
        times = (f"{row[when] * 1e6:.1f}" for when in ("before", "after"))
        lines.append((row["name"], *times, f"{row['ratio']:.3f}", f"{50 * (high - low):.1f}"))
    show_table("cell; before, µs; after, µs; ratio; ± %", lines)
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in timed:
        groups.setdefault(row["group"], []).append(row)
    lines = []
    for group, members in (groups | {"all": timed} if timed else {}).items():
        least = min(members, key=lambda row: row["ratio"])
        mean = geometric_mean(row["ratio"] for row in members)
        lines.append((group, len(members), f"{mean:.4f}", f"{least['ratio']:.3f}", least["name"], least["clock"] or ""))
    show_table("group; cells; mean; least; of cell; SM clock, MHz", lines)


def show(part: str, found: Any) -> None:
    """Prints the table of a part."""
    if part == "speed":
        show_speed(found)
    elif part == "outputs":
        verdicts = ("equal", "close", "refused", "different")
        lines = [(op, *(counts.get(verdict, 0) for verdict in verdicts)) for op, counts in found["counts"].items()]
        where = "the GPU" if found["on_gpu"] else "NumPy arrays"
        show_table("; ".join((f"problems on {where}", *verdicts)), lines)
    elif part == "host":
        for kind, times in found.items():
            if isinstance(times, str):
                console.print(f"{kind} is not measured: {times}")
            else:
                lines = [(name, *(f"{seconds * 1e6:.1f}" for seconds in pair)) for name, pair in times.items()]
                show_table(f"{kind}; before, µs; after, µs", lines)
    elif part == "cubins":
        console.print(f"{len(found['differ'])} of {found['kernels']} kernels differ")
    else:
        lines = []
        for name, (old, new) in found["differ"].items():
            missing = "before: none" if old is None else "after: none" if new is None else ""
            before, after = old or {}, new or {}
            differ = [key for key in before | after if before.get(key) != after.get(key)]
            lines.append((name, missing, ", ".join(f"{key} {before.get(key)} to {after.get(key)}" for key in differ)))
        show_table(f"{len(lines)} of {found['kernels']} kernels differ; ; before to after", lines[:MOST_LINES])


def failures(report: dict[str, Any]) -> Iterable[str]:
    """Says what got worse."""
    ratios = []
    for row in report.get("speed", ()):
        ratios.append(row["ratio"] or 1.0)
        if row["ratio"] is None:
            yield f"speed: {row['name']} was not timed: {row['note']}"
        elif row["ratio"] < calls.LEAST_RATIO:
            yield f"speed: {row['name']} has {row['ratio']:.4f} of its speed"
    if "speed" in report and (mean := geometric_mean(ratios or [math.nan])) and not mean >= LEAST_MEAN:
        yield f"speed: the geometric mean of {len(ratios)} cells is {mean:.4f}"
    if differences := report.get("outputs", {}).get("differences"):
        yield f"outputs: {len(differences)} problems differ, the first with seed {differences[0]['seed']}"
    if "cubins" in report:
        yield from kernels.cubin_failures(report["cubins"])
    if "registers" in report:
        yield from kernels.without_partner("registers", report["registers"])
    for name, (old, new) in report.get("registers", {}).get("differ", {}).items():
        before, after = old or {}, new or {}
        if "error" in after and "error" not in before:
            yield f"registers: {name} does not compile: {after['error']}"
        if after.get("spill", 0) > before.get("spill", 0):
            yield f"registers: {name} spills {after['spill']} bytes, before {before.get('spill', 0)}"
        if after.get("blocks", math.inf) < before.get("blocks", 0):
            yield f"registers: {name} fits {after['blocks']} times, before {before['blocks']}"


if __name__ == "__main__":
    sys.exit(main())
