"""Distances whose sign is known: the same values wherever a causal mask shows the key."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cuflash.mods.analysis.signs import of_causal_pairs
from cuflash.mods.graph.graph import Node, post_order
from cuflash.mods.language import seqlen_k, seqlen_q
from cuflash.mods.tracing.trace import trace
from cuflash.reference.evaluate import evaluate

Q, K = np.meshgrid(np.arange(5), np.arange(7), indexing="ij")
LENGTHS = {"seqlen_q": np.int64(5), "seqlen_k": np.int64(7)}


def root_of(distance: Any) -> Node:
    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return score - 0.5 * abs(distance(q_idx + seqlen_k() - seqlen_q(), k_idx))

    return trace(score_mod, "score_mod").root


@pytest.mark.parametrize(
    ("distance", "known"),
    [
        (lambda q, k: k - q, True),
        (lambda q, k: 3 * (q - k) + 2, True),
        (lambda q, k: k - q - 1, True),
        (lambda q, k: k - q + 1, False),
        (lambda q, k: q - 2 * k, False),
        (lambda q, k: k, False),
    ],
)
def test_absolute_values_are_left_out_where_the_sign_is_known(distance: Any, known: bool) -> None:
    root = root_of(distance)
    new = of_causal_pairs(root)
    seen = K <= Q + 2
    places = {"score": np.zeros(Q.shape), "b": 0, "h": 0, "q_idx": Q, "k_idx": K, **LENGTHS}
    values = [np.broadcast_to(evaluate([each], places, [], np.float64)[0], Q.shape) for each in (root, new)]
    np.testing.assert_array_equal(values[0][seen], values[1][seen])
    has_absolute = any(each.op == "absolute" for each in post_order([new]))
    assert not (known and has_absolute)
