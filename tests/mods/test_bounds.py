"""Bounds and signs of values, valid for all inputs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from expressions import SCORE, Q

from cuflash.mods.analysis.bounds import abs_bound, assume_causal
from cuflash.mods.graph.graph import Node, post_order
from cuflash.mods.graph.operations import Type
from cuflash.mods.graph.simplify import build, cast, constant
from cuflash.mods.language import position_of
from cuflash.mods.tracing.trace import trace
from cuflash.reference.evaluate import evaluate

TANH = build("tanh", build("multiply", SCORE, constant(0.02)))


@pytest.mark.parametrize(
    ("root", "bound"),
    [
        (SCORE, math.inf),
        (constant(-2.5), 2.5),
        (constant(math.nan), math.inf),
        (TANH, 1.0),
        (build("multiply", TANH, constant(-50.0)), 50.0),
        (build("subtract", constant(1.0), build("multiply", TANH, TANH)), 2.0),
        (build("multiply", SCORE, constant(0.0)), math.inf),
        (build("where", build("less", SCORE, constant(0.0)), constant(3.0), TANH), 3.0),
        (build("where", build("less", SCORE, constant(0.0)), SCORE, TANH), math.inf),
        (build("minimum", SCORE, constant(1.0)), math.inf),
        (build("exp", TANH), math.inf),
        (build("absolute", build("negative", TANH)), 1.0),
        (build("tanh", build("add", SCORE, build("absolute", SCORE))), math.inf),
        (build("tanh", build("subtract", SCORE, build("log", cast(Q, Type.FLOAT32)))), math.inf),
        (build("tanh", build("add", SCORE, cast(Q, Type.FLOAT32))), 1.0),
        (build("tanh", build("multiply", SCORE, SCORE)), math.inf),
    ],
    ids=str,
)
def test_abs_bound(root: Node, bound: float) -> None:
    assert abs_bound(root) == bound


def test_abs_bound_of_indices_and_their_products_is_finite() -> None:
    number = cast(Q, Type.FLOAT32)
    assert 2**20 < abs_bound(number) < math.inf
    assert abs_bound(build("multiply", number, TANH)) == abs_bound(number)
    assert np.isfinite(np.float32(abs_bound(build("add", number, number))))


@pytest.mark.parametrize(
    ("distance", "has_sign"),
    [
        (lambda q, k: k - q, True),
        (lambda q, k: 3 * (q - k) + 2, True),
        (lambda q, k: k - q - 1, True),
        (lambda q, k: k - q + 1, False),
        (lambda q, k: q - 2 * k, False),
        (lambda q, k: k, False),
    ],
)
def test_assume_causal_leaves_out_absolute_values_of_known_sign(distance: Any, has_sign: bool) -> None:
    q, k = np.meshgrid(np.arange(5), np.arange(7), indexing="ij")
    lengths = {"seqlen_q": np.int64(5), "seqlen_k": np.int64(7)}
    inputs = {"score": np.zeros(q.shape), "b": 0, "h": 0, "q_idx": q, "k_idx": k, **lengths}
    root = trace(lambda s, b, h, q, k: s - 0.5 * abs(distance(position_of(q), k)), "score_mod").root
    roots = root, assume_causal(root)
    values = [np.broadcast_to(x, q.shape)[k <= q + 2] for x in evaluate(roots, inputs, [], np.float64)]
    np.testing.assert_array_equal(*values)
    assert not (has_sign and any(each.op == "absolute" for each in post_order(roots[1:])))
