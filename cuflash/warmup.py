"""Compiles kernels into the cache on disk, so that no first call waits for the compiler.

A kernel serves every mask, scale, length, number of heads and stride: these are passed to it when it runs, so no option
asks for them. What differs is what the options name; arrays are taken to be dense. With --device no GPU is needed, only
NVRTC.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from typing import Any

from . import device as devices
from . import jit
from .device import Device
from .errors import CompileError, UnsupportedError
from .plan import merge_plan, plan
from .problem import ArraySpec, Problem
from .variant import ALGORITHM_CODES, DTYPE_CODES, Launch, Variant

OPS = ("forward", "lse", "backward", "merge")
SEQLEN = 128
COMPILED, THERE, FAILED = "compiled", "there", "failed"
HEAD_DIMS = re.compile(r"([1-9]\d*)(?:x([1-9]\d*))?")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""

    def add_list(name: str, default: str, parse: Callable[[str], Any], more: str) -> None:
        parser.add_argument(name, type=parse, default=default, metavar="X,X", help=f"default {default}; {more}")

    add_list("--dtypes", "float16,bfloat16", _some_of(DTYPE_CODES), "also float32")
    add_list("--head-dims", "64,128", _head_dims, "each of q, k and v, or of q and k and of v as in 192x128")
    add_list("--ops", "forward,backward", _some_of(OPS), "also lse, merge")
    add_list("--algorithms", "flash2", _some_of(ALGORITHM_CODES), "also flash1, flashd; of forward")
    parser.add_argument("--out-dtype", choices=["float32"], help="of out; default the dtype of the inputs")
    parser.add_argument("--softcap", action="store_true", help="the kernels of capped scores, too, where they differ")
    parser.add_argument("--deterministic", action="store_true", help="of backward: the deterministic kernels, too")
    parser.add_argument(
        "--device", help=f"default every GPU of this machine; or cuda:0, or one of {', '.join(devices.KNOWN)}"
    )
    parser.add_argument("--jobs", type=_jobs, default=os.cpu_count() or 1, metavar="N", help="default one a CPU")


def main(options: argparse.Namespace) -> int:
    """Compiles what is not there yet; 1 if a kernel did not compile, or if there is none for what was asked for."""
    jit.nvrtc_version()  # says what to install where it is missing
    chosen, problems = _devices(options.device)
    variants, skipped = _variants(options, chosen)
    for line in (*problems, *skipped):
        print(line, file=sys.stderr)
    started = time.perf_counter()
    counts, errors = _compile_all(list(variants), options.jobs)
    seconds = time.perf_counter() - started
    for error in errors:
        print(error, file=sys.stderr)
    archs = ", ".join(dict.fromkeys(device.arch for device in chosen))
    told = f"{len(variants)} kernel{'' if len(variants) == 1 else 's'} for {archs}"
    outcomes = {COMPILED: f"compiled in {seconds:.1f} s", THERE: "were there", FAILED: "failed"}
    if variants:
        told += ": " + ", ".join(f"{counts[kind]} {words}" for kind, words in outcomes.items() if counts[kind])
        told += f"; {jit.cache_dir()}"
    print(told)
    return int(bool(errors) or not variants)


def _devices(name: str | None) -> tuple[list[Device], list[str]]:
    """Those to compile for, each kind once, and why others of this machine are left out."""
    if name is not None:
        return [devices.of_name(name)], []
    found: dict[Device, None] = {}
    problems = []
    for ordinal in range(devices.count()):
        try:
            found[devices.query(ordinal)] = None
        except UnsupportedError as error:
            problems.append(f"left out: {error}")
    if not found:
        raise UnsupportedError(
            "\n".join((*problems, "there is no GPU to compile for (python -m cuflash info says why);"))
            + f" give --device, one of {', '.join(devices.KNOWN)}"
        )
    return list(found), problems


def _variants(options: argparse.Namespace, chosen: list[Device]) -> tuple[dict[Variant, None], dict[str, None]]:
    """Every kernel that the plans of what was asked for launch, and a line for each combination that has none."""
    found: dict[Variant, None] = {}
    skipped: dict[str, None] = {}
    for device, dtype, head_dims, (op, *more) in product(chosen, options.dtypes, options.head_dims, _calls(options)):
        try:
            found |= dict.fromkeys(launch.variant for launch in _launches(op, dtype, head_dims, device, *more))
        except UnsupportedError as error:
            skipped[f"left out: {op}: {error}"] = None
    return found, skipped


def _calls(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any], dict[str, bool]]]:
    """(op, arguments of its problem, arguments of its plan) of the calls to plan, dtypes and head dims aside."""
    softcaps = (0.0, 1.0) if options.softcap else (0.0,)
    for op in options.ops:
        if op == "forward":
            for algorithm, softcap in product(options.algorithms, softcaps):
                yield op, {"algorithm": algorithm, "out_dtype": options.out_dtype, "softcap": softcap}, {}
        elif op == "lse":
            for softcap in softcaps:
                yield op, {"softcap": softcap}, {}
        elif op == "backward":
            for deterministic, softcap in product((False, True) if options.deterministic else (False,), softcaps):
                yield op, {"out_dtype": options.out_dtype, "softcap": softcap}, {"deterministic": deterministic}
        else:
            yield op, {}, {}


def _launches(
    op: str, dtype: str, head_dims: tuple[int, int], device: Device, of: dict[str, Any], how: dict[str, bool]
) -> tuple[Launch, ...]:
    if op == "merge":
        return merge_plan(dtype, (1, 1, 1, head_dims[1]), device).launches
    found: dict[Launch, None] = {}
    q, v = (ArraySpec.dense((2, SEQLEN, 2, dim), dtype) for dim in head_dims)
    for causal in (True, False):  # why: Hopper may have another kernel for few keys under a mask
        problem = Problem.of(q, q, None if op == "lse" else v, causal=causal, **of)
        found |= dict.fromkeys(plan(problem, op, device, **how).launches)
    return tuple(found)


def _compile_all(variants: list[Variant], jobs: int) -> tuple[Counter[str], dict[str, None]]:
    """How many were compiled, were there and failed, and the errors; with a bar where a person watches."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    watched = sys.stderr.isatty()
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
    counts: Counter[str] = Counter()
    errors: dict[str, None] = {}
    with (
        Progress(*columns, console=Console(stderr=True), transient=True, disable=not watched) as progress,
        ThreadPoolExecutor(jobs) as pool,
    ):
        task = progress.add_task("", total=len(variants))
        futures = {pool.submit(_compile, variant): variant.name for variant in variants}
        try:
            for done in as_completed(futures):
                outcome, text = done.result()
                counts[outcome] += 1
                if outcome == FAILED:
                    errors[text] = None
                elif text and not watched:
                    print(text, file=sys.stderr, flush=True)
                progress.update(task, advance=1, description=futures[done])
        finally:
            pool.shutdown(cancel_futures=True)  # why: after an interrupt, leaving `with` would compile all the rest
    return counts, errors


def _compile(variant: Variant) -> tuple[str, str]:
    """Brings a kernel into the cache: what came of it, and what there is to tell."""
    started = time.perf_counter()
    try:
        if jit.is_cached(variant):
            return THERE, ""
        kept = jit.cubin_path(variant).parent == jit.cache_dir()
    except (CompileError, UnsupportedError) as error:
        return FAILED, str(error)
    if not kept:
        folder = jit.cache_dir()
        return FAILED, f"no kernel was kept: {folder} cannot be written; set CUFLASH_CACHE_DIR to a folder that can"
    return COMPILED, f"compiled {variant.name} for {variant.arch} in {time.perf_counter() - started:.1f} s"


def _some_of(names: Any) -> Callable[[str], tuple[str, ...]]:
    """A parser of such as "float16,float32"."""

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        if unknown := [name for name in chosen if name not in names]:
            raise argparse.ArgumentTypeError(f"{', '.join(map(repr, unknown))}: give some of {', '.join(names)}")
        return chosen

    return parse


def _head_dims(text: str) -> tuple[tuple[int, int], ...]:
    """Such as "64,192x128": of q and k, and of v."""
    found = [HEAD_DIMS.fullmatch(part) for part in text.split(",")]
    if None in found:
        raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers above 0, or pairs of them, such as 64,192x128")
    return tuple((int(match[1]), int(match[2] or match[1])) for match in found if match)


def _jobs(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number above 0")
    return int(text)
