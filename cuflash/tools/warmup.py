"""Compiles kernels into the cache on disk, so that first calls do not wait for the compiler.

One or two kernels serve all masks, scales, lengths, numbers of heads and strides, so no option names them. The options
name features that need separate kernels. Arrays are assumed to be dense. Kernels for variable-length sequences and
kernels with mods are compiled in the first such call. With --device this needs NVRTC, but no GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from functools import partial
from itertools import product
from typing import Any

from ..errors import CompileError, UnsupportedError
from ..planning import device as devices
from ..planning.device import Device
from ..planning.planner import plan
from ..planning.variant import ALGORITHM_CODES, Variant
from ..problem.array_spec import ArraySpec
from ..problem.dtypes import GPU_DTYPES
from ..problem.operands import APPEND_KV, INTEGERS, merge_op
from ..problem.operands import OPS as PUBLIC
from ..problem.options import Options
from ..problem.problem import Problem
from ..runtime import compiler
from ..runtime.disk_cache import cache_dir, writable_dir
from . import arguments

OPS = ("forward", "lse", "backward", "merge", "append_kv")
# Sizes on which the choice of a kernel depends; their combinations cover the dense calls of programs.
BATCHES, SEQLENS, HEADS = (1, 16, 128), (1, 128, 1024, 4096, 16384, 65536), ((2, 2), (16, 1), (32, 8))
COMPILED, THERE, FAILED, UNUSABLE = "compiled", "there", "failed", "unusable"
SIGNAL_SECONDS = 1.0  # longest wait before a check for Ctrl-C
HEAD_DIMS = re.compile(r"([1-9]\d*)(?:x([1-9]\d*))?")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""

    def add_list(name: str, default: str, parse: Callable[[str], Any], more: str) -> None:
        parser.add_argument(name, type=parse, default=default, metavar="X,X", help=f"default {default}; {more}")

    add_list("--dtypes", "float16,bfloat16", partial(arguments.names, GPU_DTYPES), "also float32")
    add_list("--head-dims", "64,128", _head_dims, "one for q, k and v, or one for q and k and one for v, as in 192x128")
    add_list("--ops", "forward,backward", partial(arguments.names, OPS), "also lse, merge, append_kv")
    add_list("--algorithms", "flash2", partial(arguments.names, ALGORITHM_CODES), "also flash1, flashd; for forward")
    parser.add_argument("--out-dtype", choices=["float32"], help="dtype of out; default the dtype of the inputs")
    parser.add_argument("--softcap", action="store_true", help="also kernels with softcap, where they differ")
    parser.add_argument("--deterministic", action="store_true", help="also the deterministic kernels of backward")
    parser.add_argument(
        "--device", help=f"cuda:0, or one of {', '.join(devices.DEVICES)}; default every GPU of this machine"
    )
    cpus = os.cpu_count() or 1
    parser.add_argument("--jobs", type=arguments.count, default=cpus, metavar="N", help="threads; default one a CPU")


def main(options: argparse.Namespace) -> int:
    """Compiles the kernels that are not cached; returns 1 if one did not compile, or if the options have no kernel."""
    compiler.nvrtc_version()  # raises an error with the package to install if NVRTC is missing
    chosen, problems = _devices(options.device)
    variants, skipped = _variants(options, chosen)
    for line in (*problems, *skipped):
        print(line, file=sys.stderr)
    missing = [variant for variant in variants if not _is_there(variant)]
    # Checked before compiling, as kernels that cannot be cached would be lost.
    folder = writable_dir() if missing else cache_dir()
    started = time.perf_counter()
    counts, errors = _compile_all(missing, options.jobs)
    counts[THERE] = len(variants) - len(missing)
    if counts[UNUSABLE]:  # plans take others, as they do in calls
        others = [variant for variant in _variants(options, chosen)[0] if variant not in variants]
        more, more_errors = _compile_all([variant for variant in others if not _is_there(variant)], options.jobs)
        counts, errors, variants = counts + more, errors | more_errors, variants | dict.fromkeys(others)
    seconds = time.perf_counter() - started
    for error in errors:
        print(error, file=sys.stderr)
    archs = ", ".join(dict.fromkeys(device.arch for device in chosen))
    summary = f"{len(variants)} kernel{'' if len(variants) == 1 else 's'} for {archs}"
    outcomes = {
        COMPILED: f"compiled in {seconds:.1f} s",
        THERE: "were there",
        FAILED: "failed",
        UNUSABLE: "replaced, as they must not run",
    }
    if variants:
        summary += ": " + ", ".join(f"{counts[kind]} {words}" for kind, words in outcomes.items() if counts[kind])
        summary += f"; {folder}"
    print(summary)
    return int(bool(errors) or not variants)


def _devices(name: str | None) -> tuple[list[Device], list[str]]:
    """Returns the GPUs to compile for, each kind once, and the reasons why others of this machine are left out."""
    if name is not None:
        return [devices.of_name(name)], []
    gpus: dict[Device, None] = {}
    problems = []
    for ordinal in range(devices.count()):
        try:
            gpus[devices.query(ordinal)] = None
        except UnsupportedError as error:
            problems.append(f"left out: {error}")
    if not gpus:
        raise UnsupportedError(
            "\n".join((*problems, "there is no GPU to compile for (python -m cuflash info says why);"))
            + f" give --device, one of {', '.join(devices.DEVICES)}"
        )
    return list(gpus), problems


def _variants(options: argparse.Namespace, chosen: list[Device]) -> tuple[dict[Variant, None], dict[str, None]]:
    """Returns all kernels that dense calls with these options launch, and a line for each combination without one."""
    variants: dict[Variant, None] = {}
    skipped: dict[str, None] = {}
    for device, dtype, head_dims, (op, more) in product(chosen, options.dtypes, options.head_dims, _calls(options)):
        try:
            variants |= _variants_of(op, dtype, head_dims, device, more)
        except UnsupportedError as error:
            skipped[f"left out: {op}: {error}"] = None
    return variants, skipped


def _calls(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (op, keyword arguments) of each call to plan, without dtypes and head dims."""
    for op, softcap in product(options.ops, (0.0, 1.0) if options.softcap else (0.0,)):
        more = {"softcap": softcap, "out_dtype": options.out_dtype}
        if op == "forward":
            yield from ((op, more | {"algorithm": algorithm}) for algorithm in options.algorithms)
        elif op == "backward":
            kinds = (False, True) if options.deterministic else (False,)
            yield from ((op, more | {"deterministic": deterministic}) for deterministic in kinds)
        else:
            yield op, {"softcap": softcap}


def _variants_of(
    op: str, dtype: str, head_dims: tuple[int, int], device: Device, more: dict[str, Any]
) -> dict[Variant, None]:
    problems: Iterable[Problem]
    if op in PUBLIC:
        problems = _dense(op, dtype, head_dims, more)
    else:
        q, v = (ArraySpec.contiguous((2, 128, 2, dim), dtype) for dim in head_dims)
        lse, lengths = ArraySpec.contiguous((2, 2, 128), "float32"), ArraySpec.contiguous((2,), INTEGERS)
        of_merge, of_append = (merge_op(1), [v, lse]), (APPEND_KV, [q, v, q, v, lengths])
        problems = [Problem.from_specs(*(of_merge if op == "merge" else of_append), Options())]
    avoided = compiler.unusable()
    return dict.fromkeys(
        launch.variant for problem in problems for launch in plan(problem, device, (), avoided).launches
    )


def _dense(op: str, dtype: str, head_dims: tuple[int, int], more: dict[str, Any]) -> Iterator[Problem]:
    """Yields calls of all sizes, without a mask and causal; for forward also with few queries, which split keys."""
    out_dtype = more.get("out_dtype") or dtype
    for batch, seqlen, (heads_q, heads_kv), causal in product(BATCHES, SEQLENS, HEADS, (True, False)):
        few = product((1, 8), (0, 2)) if op == "forward" else ()
        for queries, splits in ((seqlen, 0), *few):
            q, out = (ArraySpec.contiguous((batch, queries, heads_q, dim), dtype) for dim in head_dims)
            k, v = (ArraySpec.contiguous((batch, seqlen, heads_kv, dim), dtype) for dim in head_dims)
            of_gradients = [out, out._replace(dtype=out_dtype)] if op == "backward" else []
            options = Options(causal=causal, num_splits=splits, **more)
            yield Problem.from_specs(PUBLIC[op], [q, k, v][: 2 if op == "lse" else 3] + of_gradients, options)


def _compile_all(variants: list[Variant], jobs: int) -> tuple[Counter[str], dict[str, None]]:
    """Compiles the variants; returns the count of each outcome, and the errors. A terminal shows a progress bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from .console import Console

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
            pending = set(futures)
            while pending:
                # Limited: Ctrl-C just as a wait begins takes effect only when the wait ends.
                completed, pending = wait(pending, SIGNAL_SECONDS, FIRST_COMPLETED)
                for done in completed:
                    outcome, text = done.result()
                    counts[outcome] += 1
                    if outcome == FAILED:
                        errors[text] = None
                    elif not watched:
                        print(text, file=sys.stderr, flush=True)
                    progress.update(task, advance=1, description=futures[done])
        finally:
            pool.shutdown(cancel_futures=True)  # after an interrupt, leaving `with` would compile the remaining kernels
    return counts, errors


def _is_there(variant: Variant) -> bool:
    try:
        return compiler.is_cached(variant)
    except (CompileError, UnsupportedError):
        return False  # its compilation reports the error


def _compile(variant: Variant) -> tuple[str, str]:
    """Compiles a kernel into the cache; returns the outcome and a message."""
    started = time.perf_counter()
    try:
        compiler.cubin(variant)
        is_cached = compiler.is_cached(variant)
    except compiler.UnusableError as error:
        return UNUSABLE, str(error)
    except (CompileError, UnsupportedError) as error:
        return FAILED, str(error)
    if not is_cached:
        return FAILED, f"no kernel was kept in {cache_dir()} any more: the warning says why, and what to do"
    return COMPILED, f"compiled {variant.name} for {variant.arch} in {time.perf_counter() - started:.1f} s"


def _head_dims(text: str) -> tuple[tuple[int, int], ...]:
    """Parses head dims such as "64,192x128" to pairs: one for q and k, one for v."""
    matches = [HEAD_DIMS.fullmatch(part) for part in text.split(",")]
    if None in matches:
        raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers above 0, or pairs of them, such as 64,192x128")
    return tuple((int(match[1]), int(match[2] or match[1])) for match in matches if match)
