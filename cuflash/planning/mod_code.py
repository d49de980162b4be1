"""CUDA code of mods, compiled together with a kernel's source.

The text has three parts: functions of common/mod_functions.cuh, the struct template `ModFunctions` printed here, and
the kernel's source. `ModFunctions::element` maps a product q kᵀ, softcapped if the call is, to three results. `score`
is in powers of two, `visible` is true if the query sees the key, and `slope` is the derivative of score_mod.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..mods.analysis.bounds import abs_bound, assume_causal
from ..mods.codegen.cuda import print_struct
from ..mods.codegen.hoisting import ADDEND, SOFTMAX_SCALE
from ..mods.graph.derivative import differentiate
from ..mods.graph.graph import INDEX_OFFSETS, CapturedArray, Node, post_order, variable
from ..mods.graph.operations import Type
from ..mods.graph.simplify import build, constant, pick_form
from ..problem.array_spec import ArraySpec
from ..problem.dtypes import ITEMSIZE
from ..problem.mod_spec import LEAST_SCORE, SCORE, ModSpec, exchanged, substituted
from ..problem.options import LOG2_E
from ..problem.problem import Problem

RESULTS = ("score", "visible", "slope")
# Results with equal bits in all kernels: one kernel computes mask tiles, others evaluate single elements.
EXACT = ("visible",)
# Words of 8 bytes behind the captured arrays: `ModParams` in kernels_cu/common/params.cuh.
MORE_WORDS = 8
# Scores and slopes below it need no check for inf and NaN in gradients, for any product q kᵀ.
MODERATE = 2.0**64
_ONE = constant(1.0)


class ModCode(NamedTuple):
    """The text of mods, its digest, its macros, and the number of 8-byte words that it adds to a kernel's parameters.

    vector_loaded: arrays, by name, that must begin at a multiple of the size of two elements, and this size in bytes.
    """

    digest: str
    text: str
    constants: tuple[tuple[str, int], ...]
    words: int
    vector_loaded: tuple[tuple[str, int], ...] = ()


def make_mod_code(problem: Problem, keys_as_rows: bool = False, *, is_sparse: bool = False) -> ModCode | None:
    """Returns the code of a problem's mods; None for a plain call.

    keys_as_rows: True if rows of the kernel's fragments are keys, and columns are queries. is_sparse: True if the
    kernel reads mask tiles, which mark 64 x 64 scores as empty, partial or full.
    """
    mod_spec = problem.op.mod_spec
    if mod_spec is None:
        return None
    runs = _runs(problem, mod_spec, keys_as_rows)
    return _generate(mod_spec, keys_as_rows, is_sparse, _is_short(problem, mod_spec), _is_causal(problem), runs)


def _is_causal(problem: Problem) -> bool:
    """Returns True if the mask hides every key behind the query's position."""
    return problem.seqlen_info is None and problem.mask.hi <= problem.seqlen_k - problem.seqlen_q


def _is_short(problem: Problem, mod_spec: ModSpec) -> bool:
    """Returns True if offsets in all captured arrays, and their strides, fit into 32 bits."""
    specs = [problem.specs[problem.op.index[each.name]] for each in mod_spec.arrays]
    return all(
        sum(abs(stride) * max(length - 1, 1) for length, stride in zip(spec.shape, spec.strides, strict=True)) < 2**31
        for spec in specs
        if spec is not None
    )


# Of each contiguous axis: the array's index, the axis, and True if two elements can be loaded together.
_Runs = tuple[tuple[tuple[int, int], bool], ...]


def _runs(problem: Problem, mod_spec: ModSpec, keys_as_rows: bool) -> _Runs:
    """Returns the contiguous axes of captured arrays that are at least as long as the kernel's columns.

    None for varlen: only the GPU has the lengths, and an index past an array's end reads its last element.
    """
    if problem.seqlen_info is not None:
        return ()
    columns = problem.seqlen_q if keys_as_rows else problem.seqlen_k
    aligned = []
    for number, each in enumerate(mod_spec.arrays):
        spec = problem.specs[problem.op.index[each.name]]
        assert spec is not None
        for axis, (length, stride) in enumerate(zip(spec.shape, spec.strides, strict=True)):
            if stride == 1 and length >= columns > 0:
                aligned.append(((number, axis), each.name not in problem.misaligned and _pairs(spec, axis)))
    return tuple(aligned)


def _pairs(spec: ArraySpec, axis: int) -> bool:
    """Returns True if all pairs of elements along an axis are aligned to their size, provided the first one is."""
    axes = enumerate(zip(spec.shape, spec.strides, strict=True))
    others_are_even = not any(other != axis and length > 1 and stride % 2 for other, (length, stride) in axes)
    return spec.itemsize <= 4 and spec.shape[axis] % 2 == 0 and others_are_even


@lru_cache(maxsize=256)
def _generate(
    mod_spec: ModSpec, keys_as_rows: bool, is_sparse: bool, is_short: bool, is_causal: bool, runs: _Runs
) -> ModCode:
    score, slope = SCORE, _ONE
    if mod_spec.score is not None:
        replacements = {SCORE: build("multiply", SCORE, SOFTMAX_SCALE)}
        score = build("add", build("multiply", substituted(mod_spec.score, replacements), constant(LOG2_E)), ADDEND)
        slope = substituted(differentiate(mod_spec.score).get(SCORE) or constant(0.0), replacements)
    roots = [pick_form(root, keys_as_rows) for root in (score, mod_spec.mask or constant(True), slope)]
    if is_causal:
        roots = [assume_causal(roots[0]), roots[1], assume_causal(roots[2])]
    if keys_as_rows:
        roots = [exchanged(root) for root in roots]
    text = _print(mod_spec, roots, RESULTS, runs)
    is_steep = mod_spec.score is not None and max(abs_bound(mod_spec.score), abs_bound(slope)) >= MODERATE
    constants = {
        "SCORE_MOD": int(mod_spec.score is not None),
        "SCORE_MOD_MAY_MASK": int(mod_spec.score is not None and _may_mask(mod_spec.score)),
        "MODS_TOGETHER": int(_loads_together(mod_spec)),
        "MASK_MOD": int(mod_spec.mask is not None),
        "SCORE_MOD_GRAD": 0 if slope is _ONE else 2 if is_steep else 1,
        "SINKS": int(mod_spec.has_sinks),
        "DROPOUT": int(mod_spec.drops),
        "BLOCK_SPARSE": 0 if not is_sparse else 2 if mod_spec.tiles_are_of_mask else 1,
        "SHORT_OFFSETS": int(is_short),
    }
    if mod_spec.offsets:
        constants["INDEX_OFFSETS"] = int(mod_spec.offsets)
    return _as_code(mod_spec, text, constants)


def _print(mod_spec: ModSpec, roots: Sequence[Node], results: Sequence[str], runs: _Runs) -> str:
    """Returns the text of the struct of these functions."""
    arrays = [CapturedArray(None, each.dtype, (2,) * each.rank, each.type) for each in mod_spec.arrays]
    return print_struct(roots, arrays, "ModFunctions", results, EXACT, dict(runs), bool(mod_spec.offsets))


def _as_code(mod_spec: ModSpec, text: str, constants: dict[str, int]) -> ModCode:
    digest = hashlib.sha256(f"{text}{constants}".encode()).hexdigest()[:16]
    words = MORE_WORDS + sum(words_of(each.rank) for each in mod_spec.arrays) + offset_words(mod_spec)
    arrays = enumerate(mod_spec.arrays)
    pairs = [(each.name, 2 * ITEMSIZE[each.dtype]) for n, each in arrays if f"array{n}.template pair<true>" in text]
    return ModCode(digest, text, tuple(constants.items()), words, tuple(pairs))


def _may_mask(score: Node) -> bool:
    """Returns True if scores often mask keys, by a bias or a constant that stands for -inf.

    A guess suffices: it changes the speed of kernels, not their results.
    """
    return any(
        (x.op == "load" and x.type == Type.FLOAT32 and "k_idx" in x.inputs)
        or (x.op == "constant" and x.type == Type.FLOAT32 and not x.value > LEAST_SCORE)
        for x in post_order([score])
    )


# Operations that need no register beside their result, as they fuse into multiply-adds.
_LIGHT = {"load", "constant", "input", "cast", "add", "subtract", "multiply", "negative"}


def _loads_together(mod_spec: ModSpec) -> bool:
    """Returns True if mods are as light as a bias, so that registers can hold all loads of a step."""
    if mod_spec.score is None or mod_spec.mask is not None or mod_spec.drops:
        return False
    nodes = post_order([mod_spec.score])
    loads = [x for x in nodes if x.op == "load" and "k_idx" in x.inputs]
    return len(loads) == 1 and variable("k_idx") in loads[0].arguments and all(x.op in _LIGHT for x in nodes)


def words_of(rank: int) -> int:
    """Returns the number of 8-byte words of a captured array: its pointer, strides and extents."""
    axes = max(rank, 1)
    return 1 + axes + -(-axes // 2)


def offset_words(mod_spec: ModSpec) -> int:
    """Returns the number of 8-byte words of index offsets, between the captured arrays and `ModParams`."""
    return len(INDEX_OFFSETS) // 2 if mod_spec.offsets else 0


def gradient_code(problem: Problem, derivative: Node, table_indices: tuple[Node, ...], stays: bool) -> ModCode:
    """Returns code for sm80/backward_mods.cu: the derivative of scores by a load, and the load's computed indices.

    stays: True if a thread block steps from sequence to sequence, over the same tile of each.
    """
    plain, mod_spec = make_mod_code(problem), problem.op.mod_spec
    assert plain is not None
    assert mod_spec is not None
    return _gradient_code(
        plain, mod_spec, derivative, table_indices, stays, _runs(problem, mod_spec, keys_as_rows=False)
    )


@lru_cache(maxsize=256)
def _gradient_code(
    plain: ModCode, mod_spec: ModSpec, derivative: Node, table_indices: tuple[Node, ...], stays: bool, runs: _Runs
) -> ModCode:
    assert mod_spec.score is not None
    replacements = {SCORE: build("multiply", SCORE, SOFTMAX_SCALE)}
    of_scores = (substituted(each, replacements) for each in (mod_spec.score, derivative, *table_indices))
    roots = [pick_form(root, keys_as_rows=False) for root in (mod_spec.mask or constant(True), *of_scores)]
    names = [f"place{number}" for number in range(len(table_indices))]
    text = _print(mod_spec, roots, ("visible", "score", "derivative", *names), runs)
    stays &= not any("b" in root.inputs for root in roots)
    ways = " + ".join(f"axes.way({number}, x.{name})" for number, name in enumerate(names))
    text += (
        f"\nstruct ModTerm {{\n  static constexpr bool kLooksUp = {'true' if table_indices else 'false'};\n"
        f"  static constexpr bool kStays = {str(stays).lower()};\n"
        f"  static constexpr bool kVaries = {'false' if derivative.op == 'constant' else 'true'};\n"
        "  template <class Result, class Axes>\n"
        "  __device__ __forceinline__ static int place(const Result& x, const Axes& axes) {\n"
        f"    return {ways or 0};\n  }}\n}};\n"
    )
    constants = dict(plain.constants) | {"SCORE_MOD_GRAD": 0, "BLOCK_SPARSE": 0}
    return _as_code(mod_spec, text, constants)
