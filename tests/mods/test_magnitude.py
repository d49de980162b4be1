"""Bounds of values that hold whatever the inputs are."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cuflash.mods.analysis.magnitude import magnitude
from cuflash.mods.graph.graph import Node, variable
from cuflash.mods.graph.operations import Type
from cuflash.mods.graph.simplify import build, cast, constant

SCORE, Q = variable("score"), variable("q_idx")
TANH = build("tanh", build("multiply", SCORE, constant(0.02)))


@pytest.mark.parametrize(
    ("root", "wanted"),
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
def test_the_bound_of(root: Node, wanted: float) -> None:
    assert magnitude(root) == wanted


def test_a_bound_holds_for_indices_and_what_is_made_of_them() -> None:
    number = cast(Q, Type.FLOAT32)
    assert 2**20 < magnitude(number) < math.inf
    assert magnitude(build("multiply", number, TANH)) == magnitude(number)
    assert np.isfinite(np.float32(magnitude(build("add", number, number))))
