"""Reference implementation in NumPy: it defines the results of every kernel, and runs calls on NumPy arrays.

Arrays are 4-D (batch, seqlen, heads, dim) with any strides, and `problem` has checked them. `runtime/cpu.py` handles
the caller's other ranks and its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..mods.graph.graph import CapturedArray, Graph
from ..mods.graph.simplify import constant
from ..problem.mod_spec import ModSpec
from ..problem.problem import Problem
from . import flash1, flash2, flashd, sequences, standard
from .append import append_kv
from .backward import backward
from .block_mask import mask_tiles_of
from .merge import merge_states
from .mods import ModGradients, ModScores
from .tiles import Array, accumulator

__all__ = ["RUN", "append_kv", "backward", "forward", "lse", "merge_states", "of_sequences", "run_with_mods"]

_FORWARD: dict[str, Callable[..., tuple[Array, Array]]] = {
    "standard": standard.forward,
    "flash1": flash1.forward,
    "flash2": flash2.forward,
    "flashd": flashd.forward,
}


def forward(problem: Problem, q: Array, k: Array, v: Array, **library: Any) -> tuple[Array, Array]:
    """Returns `(out, lse)` by `problem.options.algorithm`: out (b, sq, hq, dv) in out_dtype, lse (b, hq, sq) float32.

    q (b, sq, hq, d), k (b, sk, hkv, d), v (b, sk, hkv, dv). lse is float64 if the inputs are.
    Algorithm "standard" also runs in other array libraries: `xp=cupy`.
    """
    return _FORWARD[problem.options.algorithm](problem, q, k, v, **library)


def lse(problem: Problem, q: Array, k: Array, **mod_keywords: Any) -> Array:
    """Returns lse alone, (b, hq, sq), by a forward with a v of 0 columns, whose second product costs nothing."""
    return forward(problem, q, k, k[..., :0], **mod_keywords)[1]


# The function of each op: computes results from views of the inputs in order; append_kv takes inputs by name.
RUN: dict[str, Callable[..., Sequence[Array]]] = {
    "forward": forward,
    "lse": lambda problem, q, k, **mod_keywords: (lse(problem, q, k, **mod_keywords),),
    "backward": lambda problem, q, k, v, dout, *others, **mod_keywords: backward(
        problem, dout, q, k, v, *others, **mod_keywords
    ),
    "merge": lambda states, *views: merge_states(views[: len(views) // 2], views[len(views) // 2 :]),
    "append_kv": append_kv,
}


def of_sequences(
    problem: Problem, named: Mapping[str, Array], out: Array | None = None, **mod_keywords: Any
) -> list[Array]:
    """Returns the results of a varlen problem: see `sequences.run`. Arrays have all of their axes."""
    if problem.op.name == "append_kv":
        return list(RUN["append_kv"](problem, named))
    return sequences.run(problem, RUN[problem.op.name], named, out, **mod_keywords)


def run_with_mods(problem: Problem, named: Mapping[str, Array], out: Array | None = None) -> list[Array]:
    """Returns the results of a problem with mods. `named` includes the arrays of the mods.

    For backward, gradients of captured arrays come last, in the dtypes of these arrays.
    """
    op = problem.op
    assert op.mod_spec is not None
    if op.name == "block_mask":
        return [_mask_tiles(problem, op.mod_spec, named)]
    plain, mod_scores = op.plain, ModScores.from_spec(op.mod_spec, named, problem.options.dropout_p)
    assert plain is not None
    names = [each.name.removeprefix("d") for each in op.outputs[len(plain.outputs) :]]
    numbers = {each.name: number for number, each in enumerate(op.mod_spec.arrays)}
    more: dict[str, Any] = {"mod_scores": mod_scores}
    if names:
        numbers_of_grads = [numbers[name] for name in names if name in numbers]
        more["mod_gradients"] = ModGradients(mod_scores, accumulator(problem), numbers_of_grads)
    # The functions of the plain op take a problem without mods.
    results_at = len(op.inputs)
    specs = (*problem.specs[: len(plain.inputs)], *problem.specs[results_at : results_at + len(plain.outputs)])
    problem = problem._replace(op=plain, specs=specs)
    inputs = {name: x for name, x in named.items() if name in plain.index}
    if problem.seqlen_info is None and plain.delta == "takes":
        more["delta"] = inputs.pop("delta")
    if problem.seqlen_info is not None:
        results = sequences.run(problem, RUN[plain.name], inputs, out, **more)
    else:
        results = list(RUN[plain.name](problem, *inputs.values(), **more))
    for name in names:
        sums = more["mod_gradients"]
        total = sums.sinks if name == "sinks" else sums.arrays[numbers[name]]
        results.append(total.astype(named[name].dtype))
    return results


def _mask_tiles(problem: Problem, mod_spec: ModSpec, named: Mapping[str, Array]) -> Array:
    """Returns the mask tiles of a block mask, from its captured arrays and the arrays of lengths."""
    views = [(named[each.name], each) for each in mod_spec.arrays]
    arrays = tuple([CapturedArray(x, kind.dtype, x.shape, kind.type) for x, kind in views])
    graph = Graph(constant(True) if mod_spec.mask is None else mod_spec.mask, arrays, mod_spec.digest)
    lengths = None if problem.seqlen_info is None else sequences.lengths_of(problem, named)
    return mask_tiles_of(graph, problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k, lengths)
