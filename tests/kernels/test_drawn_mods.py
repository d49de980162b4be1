"""Random mods on a GPU: expression graphs that hypothesis draws, with random arguments around them.

The score_mods have no corners and jumps, on whose two sides float32 and float64 may land.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import hypothesis
import pytest
from expressions import ARRAYS, FLOATS, conditions, floats
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from plans import for_any_gpu

from cuflash.mods.graph.graph import Node, post_order
from cuflash.mods.graph.simplify import rebuilt
from cuflash.mods.tracing.tracers import TracedScalar
from cuflash.testing.cases import Case
from cuflash.testing.draw import Draw
from cuflash.testing.functions import Arguments, Maker, Put, bias_of, dropped, joined, sinks_of
from cuflash.testing.mods import check_backward, check_forward

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("new_memory_holds_nan")]


def drawn(strategy: st.SearchStrategy[Any], seed: int) -> Any:
    """Returns a strategy's example for a seed: the last of four, as the first is always the simplest."""
    examples: list[Any] = []
    checks = list(HealthCheck)

    @hypothesis.seed(seed)
    @settings(max_examples=4, database=None, derandomize=False, phases=[Phase.generate], suppress_health_check=checks)
    @hypothesis.given(strategy)
    def take(example: Any) -> None:
        examples.append(example)

    take()
    return examples[-1]


class Replay:
    """A callable for an expression graph. It is an object, as tracing would follow the code of a function."""

    def __init__(self, root: Node) -> None:
        self.root = root

    @property
    def numbers(self) -> set[int]:
        """The indices of the arrays that the graph loads from."""
        return {each.value for each in post_order([self.root]) if each.op == "load"}

    def on(self, inputs: dict[str, Any], *loads: Any) -> Any:
        """Returns the graph's value. loads: for each array, a function that returns an element."""
        nodes: dict[Node, Node] = {}
        for each in post_order([self.root]):
            below = [nodes[argument] for argument in each.arguments]
            if each.op == "input":
                nodes[each] = inputs[each.value].node
            elif each.op == "load":
                indices = [_index(node, n) for node, n in zip(below, ARRAYS[each.value].shape, strict=True)]
                nodes[each] = loads[each.value](*indices).node
            else:
                nodes[each] = rebuilt(each, below)
        return TracedScalar(nodes[self.root])


def _index(node: Node, length: int) -> Any:
    """Returns an index, clamped if constant: tracing refuses constants out of range, and clamps computed indices."""
    return TracedScalar(node) if node.op != "constant" else min(max(int(node.value), -length), length - 1)


def score_of(replay: Replay) -> Maker:
    def make(put: Put, case: Case) -> Arguments:
        floats, integers = map(put, ARRAYS)

        def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
            inputs = {"score": score, "b": b, "h": h, "q_idx": q_idx, "k_idx": k_idx}
            return replay.on(inputs, lambda i: floats[i], lambda i, j: integers[i, j]) * 1.0

        return {"score_mod": score_mod, "captured_grads": (floats,) if FLOATS in replay.numbers else ()}

    return make


def mask_of(replay: Replay) -> Maker:
    def make(put: Put, case: Case) -> Arguments:
        floats, integers = map(put, ARRAYS)

        def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
            inputs = {"b": b, "h": h, "q_idx": q_idx, "k_idx": k_idx}
            return replay.on(inputs, lambda i: floats[i], lambda i, j: integers[i, j])

        return {"mask_mod": mask_mod}

    return make


DEPTH, NODES = 6, 40  # limits of small graphs
# Lengths of queries and keys. With odd lengths of keys, pairs of a table's elements are not aligned in all rows, so the
# two groups compile different kernels.
ODD, EVEN = ((2, 3), (63, 129), (257, 301)), ((128, 64), (130, 270), (257, 300))


def is_small(root: Node) -> bool:
    """Returns True if a graph compiles quickly: at most DEPTH deep, with at most NODES nodes."""
    order, depths = post_order([root]), {}
    for each in order:
        depths[each] = 1 + max((depths[below] for below in each.arguments), default=-1)
    return len(order) <= NODES and depths[root] <= DEPTH


def is_function(root: Node) -> bool:
    """Returns True if a graph has at least five nodes."""
    return len(post_order([root])) >= 5


@pytest.mark.drawn(8)
def test_gpu_agrees_with_float64_on_small_graphs(cupy: Any, seed: int) -> None:
    """Each graph compiles one kernel, or a few with gradients: `--drawn 2000 -n 32 -k small_graphs` runs many.

    The seed is the number in the test's name, so that the name repeats a failure.
    """
    makers = [score_of(Replay(drawn(floats(smooth=True).filter(is_small).filter(is_function), seed)))]
    if seed % 3 == 0:
        makers.append(mask_of(Replay(drawn(conditions().filter(is_small), seed))))
    dtype = ("float32", "bfloat16")[seed % 2]
    case = Case(f"small_{seed}", 2, 70, 130, 2, 1, 32, 32, dtype, causal=seed % 5 == 0)
    with nullcontext() if seed % 16 == 1 else for_any_gpu():  # one in 16, as sm90 kernels compile longer
        check_forward(joined(*makers), case, cupy.asarray, seed=seed)
        if seed % 4 == 0:
            more = {"grads": True, "deterministic": seed % 8 == 0}
            check_backward(joined(*makers), case, cupy.asarray, seed=seed, **more)


@pytest.mark.slow(100)
@pytest.mark.drawn(8)
def test_gpu_agrees_with_float64_on_drawn_functions(cupy: Any, seed: int) -> None:
    one_of = Draw(seed).one_of
    # Small graphs for half of the seeds: a kernel of a large one compiles for up to a minute.
    scores = floats(smooth=True).filter(is_function)
    score = drawn(scores.filter(is_small) if seed % 2 else scores, seed)
    makers = [score_of(Replay(score))]
    if one_of(True, True, False):
        makers.append(mask_of(Replay(drawn(conditions(), seed))))
    if letters := one_of("", "", "bh1k", "1hqk", "qk"):
        makers.append(bias_of(letters, one_of("float32", "float16", "bool")))
    makers += [sinks_of()] if one_of(True, False) else []
    makers += [dropped] if one_of(True, False, False) else []
    heads_kv, dim = one_of(1, 2), one_of(64, 64, 32, 128)
    masked = {
        "causal": one_of(True, False),
        "window_size": one_of((-1, -1), (-1, -1), (40, 9), (100, -1)),
        "diagonal_offset": one_of(None, None, -30, 70),
        "softcap": one_of(0.0, 0.0, 5.0),
    }
    heads, dtype, make = heads_kv * one_of(1, 2, 4), one_of("float16", "bfloat16"), joined(*makers)
    # No heads and lengths of 1, as a bias that is broadcast along other axes compiles other code.
    heads = max(heads, 2)
    with for_any_gpu() if one_of(True, False, False) else nullcontext():
        for lengths in (*ODD, *EVEN) if is_small(score) else one_of(ODD, EVEN):
            case = Case(f"drawn_{seed}", 2, *lengths, heads, heads_kv, dim, dim, dtype, **masked)
            check_forward(make, case, cupy.asarray, seed=seed)
            for deterministic in (False, True):
                more = {"grads": True, "deterministic": deterministic}
                check_backward(make, case, cupy.asarray, seed=seed, **more)
