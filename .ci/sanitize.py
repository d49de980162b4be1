"""Runs every kernel once on small shapes, for compute-sanitizer: `compile` fills the cache, `run` calls the library.

`run 3/8` makes a part of the calls, for the fourth of eight concurrent processes. `run-generic` leaves out
calls with sm90 kernels, as initcheck does not track writes by TMA. `run-short` leaves out calls in which a thread block
takes many work tiles, as racecheck does not track the release of their slots (L41).

A GPU uses the rows of the tile tables that suit its shared memory. To reach the other rows, the planner gets a smaller
GPU, so one machine runs all rows. Hopper also runs the generic kernels, on a reversed q, which sm90 kernels cannot
read. Only Hopper runs the sm90 kernels.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import cupy
import numpy as np
import sanitize_cases as cases
from sanitize_cases import ALGORITHMS, BACKWARD, ModCase, SequenceCase, put_all
from sanitize_sums import sums

import cuflash
from cuflash.errors import UnsupportedError
from cuflash.planning import device, tiles_sm80, tiles_sm90
from cuflash.planning.device import Device
from cuflash.planning.plan import Plan
from cuflash.planning.planner import plan
from cuflash.planning.variant import Variant
from cuflash.problem.array_spec import ArraySpec
from cuflash.problem.operands import APPEND_KV, merge_op
from cuflash.problem.options import Options
from cuflash.problem.problem import Problem
from cuflash.runtime import compiler
from cuflash.runtime.call import CALL_CACHE
from cuflash.testing import appends
from cuflash.testing.cases import CASES, Case
from cuflash.testing.layouts import laid_out
from cuflash.testing.sequences import shaped

BACKWARDS = ", q backwards"  # appended to flash2 and to keys of BACKWARD, for the kernels that take any strides
backwards = partial(laid_out, steps=(-1, -1, -1, 1))  # three axes, as an axis of length 1 has no direction
AnyCase = Case | SequenceCase | ModCase
USAGE = "usage: sanitize.py compile | run | run-generic | run-short [NUMBER/PARTS]"
Results = tuple[Any, ...]  # arrays
Call = tuple[Device, AnyCase, str]  # the GPU, and an algorithm of forward or a key of BACKWARD, perhaps with BACKWARDS


class Prepared(NamedTuple):
    """A call with its arrays.

    defined: the number of first results that must not hold NaN; None for all. repeats: True if bits repeat.
    """

    name: str
    call: Callable[[], Results]
    defined: int | None = None
    repeats: bool = True


def plans(gpu: Device, case: AnyCase, how: str) -> list[Plan]:
    """Returns the plans of the library calls that `call` makes."""
    op, misaligned = how.removesuffix(BACKWARDS), ("q",) if how.endswith(BACKWARDS) else ()
    if isinstance(case, ModCase):
        return mod_plans(case, how)
    if op in BACKWARD:
        problems = [case.problem("backward", deterministic=BACKWARD[op])]
    elif op == "flash2":
        problems = [case.problem(op) for op in ("forward", "lse")]
    else:
        problems = [case.problem(algorithm=op)]
    return [plan(problem, gpu, misaligned) for problem in problems]


@cache
def work() -> dict[Call, list[Variant]]:
    """Returns all plain calls and their kernels, without calls that launch the same kernels on a larger GPU."""
    calls: list[Call] = [(device.query(0), case, how) for case in CASES for how in ("flash2", *BACKWARD)]
    calls += [(device.query(0), case, how) for case in cases.hopper_cases() for how in ("flash2", *BACKWARD)]
    for gpu, case in itertools.product(cases.devices(), cases.tile_cases()):
        # flashd runs without float16: it differs from bfloat16 in single instructions only.
        algorithms = ALGORITHMS[:2] if case.dtype == "float16" else ALGORITHMS
        generic = [op + BACKWARDS for op in ("flash2", *BACKWARD)]
        calls += [(gpu, case, how) for how in (*algorithms, *generic, *BACKWARD)]
    for gpu, (case, ways) in itertools.product(cases.devices(), cases.sequence_cases()):
        generic = [how + BACKWARDS for how in ways if how in ("flash2", *BACKWARD)]
        calls += [(gpu, case, how) for how in (*ways, *generic)]
    calls += [(device.query(0), case, how) for case, ways in cases.hopper_sequence_cases() for how in ways]
    distinct: dict[tuple[Any, ...], tuple[Call, list[Variant]]] = {}
    for gpu, case, how in calls:
        with contextlib.suppress(UnsupportedError):  # backward and the smallest GPUs lack the largest head dims
            variants = variants_of(plans(gpu, case, how))
            distinct.setdefault((case, how.removesuffix(BACKWARDS), *variants), ((gpu, case, how), variants))
    return dict(distinct.values())


@cache
def mod_work() -> dict[Call, list[Variant]]:
    """Returns all calls with mods, by both families of kernels, and their kernels."""
    ways = [(case, how) for case, hows in cases.mod_cases() for how in hows]
    dense = [(case, how) for case, how in ways if isinstance(case.base, Case)]
    generic = [(case, how + BACKWARDS) for case, how in dense if how not in ALGORITHMS[1:]]
    # Packed calls only, which reach all of these kernels.
    few = [(case, how) for case, how in ways if case.base.name.startswith("few_") and case.base.place_q == "packed"]
    calls = [*ways, *generic, *((case, how + BACKWARDS) for case, how in few)]
    return {(device.query(0), *call): variants_of(mod_plans(*call)) for call in calls}


def variants_of(plans: list[Plan]) -> list[Variant]:
    return [launch.variant for each in plans for launch in each.launches]


def mod_plans(case: ModCase, how: str) -> list[Plan]:
    """Returns the plans of the library calls that `call` makes with mods."""
    (arguments, grads), op = arguments_of(case, how, np.asarray, shaped), how.removesuffix(BACKWARDS)
    arguments["device"] = device.query(0).arch
    if op in BACKWARD:
        more = {"op": "backward", "deterministic": BACKWARD[op], "captured_grads": grads}
        return [cuflash.plan(**arguments), cuflash.plan(**arguments, **more)]
    forward = [cuflash.plan(**arguments, algorithm=op)]
    return forward if op != "flash2" else [*forward, cuflash.plan(**keys_alone(arguments), op="lse")]


def arguments_of(case: AnyCase, how: str, *ways: Any) -> tuple[dict[str, Any], tuple[Any, ...] | None]:
    """Returns all arguments of `cuflash.forward`, and a `ModCase`'s arrays with gradients, else None.

    ways: converts an array to the library of the call, and for a `ModCase` builds q, k and v of sequences.
    """
    if isinstance(case, ModCase):
        arguments, grads = case.arguments(*ways)
    else:
        plain = cases.dense_arguments(case) if isinstance(case, Case) else case.arguments()
        arguments, grads = put_all(plain, *ways), None
    return arguments | ({"q": backwards(arguments["q"])} if how.endswith(BACKWARDS) else {}), grads


def keys_alone(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `cuflash.lse`, from arguments of `cuflash.forward`."""
    return {name: x for name, x in arguments.items() if name not in ("v", "out_dtype", "dropout_p", "dropout_seed")}


def variants() -> list[Variant]:
    """Returns all kernels that `run` launches, but for `sums` and some of `merges_and_views`, `appends_to_caches`."""
    launched = _reached(work() | mod_work())
    lse = ArraySpec.contiguous((1, 1, 1), "float32")
    states = [[ArraySpec.contiguous((1, 1, 1, 64), dtype), lse] for dtype in tiles_sm80.TILES]
    plans = [plan(Problem.from_specs(merge_op(1), specs, Options()), device.query(0)) for specs in states]
    caches = [[row] * 4 + [ArraySpec.contiguous((1,), "int32")] for row, _ in states]
    plans += [plan(Problem.from_specs(APPEND_KV, specs, Options()), device.query(0)) for specs in caches]
    return list(dict.fromkeys([*launched, *variants_of(plans)]))


def unreached(launched: list[Variant]) -> list[str]:
    """Returns the rows of the tile tables that no call uses on this GPU."""
    reached = {(variant.dtype, variant.tile, variant.softcap, variant.is_varlen) for variant in launched}
    rows: list[tuple[str, Any, bool, bool]] = []  # dtype, row, True with softcap, True for varlen
    for dtype, lengths in itertools.product(tiles_sm80.TILES, (False, True)):
        rows += [(dtype, row, False, lengths) for row in (*tiles_sm80.TILES[dtype], *tiles_sm80.DQ[dtype])]
        both = itertools.product(tiles_sm80.BACKWARD[dtype], (True, False))
        rows += [(dtype, replace(row, with_dq=dq), False, lengths) for row, dq in both]
    for dtype in ("float16", "bfloat16"):
        for row, capped in itertools.product(tiles_sm90.TILES, (False, True)):
            rows += [(dtype, row, capped, False)] if row.softcap in (None, capped) else []
            rows.append((dtype, tiles_sm90.choose("lse", row.head_dim, 0, 0.0, capped), capped, False))
        of_each = cases.dense_dq_dkv()
        alone = [row for row in of_each if tiles_sm90.choose_cluster(row.head_dim, row.head_dim_v) is None]
        sharing = *tiles_sm90.BACKWARD, *(row for row in alone if row.gradient != "dq")
        dense = (
            *tiles_sm90.BACKWARD,
            *tiles_sm90.CLUSTER_BACKWARD,
            *of_each,
            *(replace(row, shares_heads=True) for row in sharing),
        )
        of_lengths = *(row.for_varlen() for row in tiles_sm90.BACKWARD if not row.min_queries), *tiles_sm90.DQ_DKV
        both = (dense, False), (of_lengths, True)
        for (gradients, lengths), capped in itertools.product(both, (False, True)):
            rows += [(dtype, row, capped, lengths) for row in gradients if row.softcap in (None, capped)]
    missing = [row for row in dict.fromkeys(rows) if row not in reached]
    return [f"{dtype} {row}{', capped' * capped}{', varlen' * varlen}" for dtype, row, capped, varlen in missing]


def calls(part: int = 0, parts: int = 1, *, once: bool = False, which: str = "run") -> Iterator[Prepared]:
    """Yields calls of `work` and `mod_work`, merges and appends, or a part of them. Each is prepared when it is due.

    once: True to skip calls whose kernels all occurred in earlier calls, and to use valid lengths only. Results then
    repeat except for sums in any order; with wrong lengths, two sequences might write the same rows.
    which: the command, as in the module's docstring.
    """
    chosen, generic = work() | mod_work(), which == "run-generic"
    if which == "run-short":
        short = {call: kernels for call, kernels in chosen.items() if cases.MANY_PIECES not in call[1].name}
        assert {*_reached(short)} == {*_reached(chosen)}, f"calls of {cases.MANY_PIECES} alone reach some kernel"
        chosen = short
    if generic:
        chosen = {call: kernels for call, kernels in chosen.items() if _are_generic([*kernels, *_forward_of(*call)])}
    if once:
        covered: set[Variant] = set()
        tame = {(gpu, _tame(case), how): kernels for (gpu, case, how), kernels in chosen.items()}
        chosen = {call: kernels for call, kernels in tame.items() if _adds(kernels, covered)}
        print(f"{len(chosen)} calls of {len(covered)} kernels", flush=True)
    query = device.query
    for gpu, case, how in itertools.islice(chosen, part, None, parts):
        device.query = lambda ordinal, gpu=gpu: gpu
        CALL_CACHE.clear()
        defined = 0 if getattr(case, "wild", False) else None
        yield Prepared(f"{case.name} {how}", call(case, how), defined, repeats=not _sums(how))
    device.query = query
    CALL_CACHE.clear()
    turns: list[Callable[[Any], Any]] = [backwards] if generic else [lambda q: q, backwards]
    added = (Prepared(*each) for turned in turns for each in sums(cupy, once, turned))
    others = itertools.chain(merges_and_views(once, generic), added, appends_to_caches(is_wild=not once))
    yield from itertools.islice(others, part, None, parts)


def _reached(calls: dict[Call, list[Variant]]) -> list[Variant]:
    return list(dict.fromkeys(itertools.chain.from_iterable(calls.values())))


def _are_generic(kernels: list[Variant]) -> bool:
    return not any(variant.of_warpgroups for variant in kernels)


def _forward_of(gpu: Device, case: AnyCase, how: str) -> list[Variant]:
    """Returns the kernels that compute out and lse for a call of backward."""
    if how.removesuffix(BACKWARDS) not in BACKWARD:
        return []
    forward = "flash2" + (BACKWARDS if how.endswith(BACKWARDS) else "")
    return variants_of(plans(gpu, case, forward))


def _tame(case: AnyCase) -> AnyCase:
    return replace(case, wild=False) if isinstance(case, SequenceCase) else case


def _sums(how: str) -> bool:
    """Returns True if a call sums something in any order."""
    return not BACKWARD.get(how.removesuffix(BACKWARDS), True)


def _adds(kernels: list[Variant], covered: set[Variant]) -> bool:
    """Adds kernels to the covered ones; returns True if one is new."""
    before = len(covered)
    covered.update(kernels)
    return len(covered) > before


def run(part: int, parts: int, which: str) -> None:
    """Makes all calls, or a part of them, and checks every result for NaN."""
    cupy.cuda.set_allocator(None)  # a memory pool would hide accesses just past an array from memcheck
    for count, prepared in enumerate(calls(part, parts, which=which)):
        for number, result in enumerate(prepared.call()):
            host = cupy.asnumpy(result).astype("float32")
            is_free = prepared.defined is not None and number >= prepared.defined
            assert is_free or not (host != host).any(), f"{prepared.name}: NaN"
        if count % 20 == 0:
            print(f"{count}: {prepared.name}", flush=True)


def call(case: AnyCase, how: str) -> Callable[[], Results]:
    """Returns a call of forward and lse, or of backward for |out|² / 2; windows without mods add a gradient of lse."""
    (arguments, grads), op = arguments_of(case, how, cupy.asarray), how.removesuffix(BACKWARDS)
    if op not in BACKWARD:
        lse = (lambda: (cuflash.lse(**keys_alone(arguments)),)) if op == "flash2" else tuple
        return lambda: (*cuflash.forward(**arguments, algorithm=op, return_lse=True), *lse())
    out, lse_of_rows = cuflash.forward(**arguments, return_lse=True)
    arguments.pop("out_dtype", None)
    more = {"deterministic": BACKWARD[op], "captured_grads": grads}
    if grads is None and arguments["window_size"] != (-1, -1):
        more["dlse"] = cupy.maximum(lse_of_rows, -100.0)  # finite also for rows that see no key, whose lse is -inf
    backward = partial(cuflash.backward, out.astype(arguments["q"].dtype), out=out, lse=lse_of_rows, **arguments)

    def gradients() -> Results:
        dq, dk, dv, *captured = backward(**more)
        return dq, dk, dv, *itertools.chain(*captured)

    return gradients


def merges_and_views(deterministic: bool, generic: bool) -> Iterator[Prepared]:
    """Yields merges in each dtype and alignment, and forward on slices of keys, unaligned rows and with float32 out.

    generic: True to reverse q, for the generic kernels.
    """
    for dtype, head_dim in itertools.product(tiles_sm80.TILES, (64, 33)):
        case = Case("merge", 2, 65, 40, 3, 3, head_dim, head_dim, dtype)
        q, k, v = (cupy.asarray(x) for x in case.arrays())
        q = backwards(q) if generic else q
        states = [cuflash.forward(q, k[:, part], v[:, part], return_lse=True) for part in (slice(17), slice(17, None))]
        yield Prepared(f"merge {dtype}", partial(cuflash.merge_states, *zip(*states, strict=True)))
        wide = [cupy.asarray(x) for x in replace(case, head_dim=head_dim + 1, head_dim_v=head_dim + 1).arrays()]
        views = [x[..., 1:] for x in wide]
        yield Prepared(f"views {dtype}", partial(cuflash.forward, *views, causal=True, return_lse=True))
        if dtype != "float32":
            wide_out = partial(cuflash.forward, q, k, v, return_lse=True, out_dtype="float32")
            yield Prepared(f"float32 out {dtype}", wide_out)
            states = q.copy(), q, k, v, *wide_out()
            yield Prepared(f"gradients {dtype}", partial(cuflash.backward, *states, deterministic=deterministic))


def appends_to_caches(is_wild: bool) -> Iterator[Prepared]:
    """Yields appends in each dtype, kind of cache, rotation and alignment.

    is_wild: True to make half of the integers on the device wrong.
    """
    ways = itertools.product(tiles_sm80.TILES, (64, 33), ("rows", "indexed", "pages of 3"), (False, True))
    for seed, (dtype, dim, place, packed) in enumerate(ways):
        rotations: tuple[dict[str, Any], ...] = (
            {},
            {"rotary_dim": 32, "q_same_position": packed},
            {"rotary_dim": 30, "rotary_interleaved": True, "wide": True, "positions": 20},
        )
        for rotation in rotations:
            new = (4, 0, 5) if packed else 5
            drawn = appends.drawn(dtype, place, new=new, dims=(dim, dim), **rotation)
            arguments = put_all(cases.wild(drawn, seed) if is_wild else drawn, cupy.asarray)

            def append(arguments: dict[str, Any] = arguments) -> Results:
                caches = arguments["k_cache"], arguments["v_cache"]
                for rows in caches:
                    rows[...] = 0.5
                rotated = cuflash.append_kv(**arguments)
                return caches if rotated is None else (*caches, rotated)

            # Only the two caches are checked: rows of packed q that belong to no sequence may hold anything.
            yield Prepared(f"append to {place}", append, 2 if packed else None)


def part_of(arguments: list[str]) -> tuple[int, int]:
    """Returns (index, number of parts) from the arguments after `run`."""
    match = re.fullmatch(r"(\d+)/(\d+)", " ".join(arguments) or "0/1")
    if match is None or not int(match[1]) < int(match[2]):
        sys.exit(USAGE)
    return int(match[1]), int(match[2])


def compiled(variant: Variant) -> None:
    with contextlib.suppress(compiler.SpilledError):  # another kernel runs in place of one that spills
        compiler.cubin(variant)


def main() -> None:
    started = time.perf_counter()
    launched = variants()
    missing = unreached(launched)
    for row in missing:
        print(f"not reached on this GPU: {row}")
    if missing and device.query(0).arch == "sm_90":
        sys.exit("Hopper, with the most shared memory and kernels of its own, reaches all: add a case")
    if sys.argv[1:] == ["compile"]:
        with ThreadPoolExecutor() as pool:
            list(pool.map(compiled, launched))
    elif sys.argv[1:2] in (["run"], ["run-generic"], ["run-short"]):
        run(*part_of(sys.argv[2:]), sys.argv[1])
    else:
        sys.exit(USAGE)
    print(f"{sys.argv[1]}: {len(launched)} kernels, {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
