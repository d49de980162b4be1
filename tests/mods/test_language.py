"""Functions that a score_mod or mask_mod may call."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest

import cuflash
from cuflash import mods
from cuflash.errors import ProblemError
from cuflash.mods.graph.graph import variable
from cuflash.mods.language import FUNCTIONS, function, seqlen_k, seqlen_q
from cuflash.mods.tracing.trace import trace


def test_the_lengths_of_the_sequence_are_inputs() -> None:
    root = trace(lambda b, h, q, k: k - seqlen_k() <= q - seqlen_q(), "mask_mod").root
    assert root.inputs == {"q_idx", "k_idx", "seqlen_q", "seqlen_k"}
    assert variable("seqlen_k").bounds[0] == 0


@pytest.mark.parametrize("length", [seqlen_q, seqlen_k])
def test_lengths_outside_of_a_trace_are_refused(length: object) -> None:
    with pytest.raises(ProblemError, match=r"seqlen_[qk]\(\) is known inside a score_mod or mask_mod alone"):
        length()  # type: ignore[operator]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_traced_values_and_numbers(name: str) -> None:
    scalar_function = function(name)
    arguments = {"where": (True, 0.5, 2.0), "clip": (0.5, 0.0, 1.0), "minimum": (0.5, 2), "maximum": (0.5, 0.25)}
    numbers = arguments.get(name, (0.5,))

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return scalar_function(*((score > 0, score, 1) if name == "where" else (score, *numbers[1:])))

    assert "score" in trace(score_mod, "score_mod").root.inputs
    plain = {"where": 0.5, "clip": 0.5, "minimum": 0.5, "maximum": 0.5, "rsqrt": 2**0.5, "exp2": 2**0.5, "sign": 1.0,
             "sigmoid": 1 / (1 + math.exp(-0.5)), "round": 0.0}  # fmt: skip
    assert scalar_function(*numbers) == pytest.approx(
        plain[name] if name in plain else getattr(math, name)(0.5), rel=1e-6
    )
    assert scalar_function.__name__ == name
    assert len(inspect.signature(scalar_function).parameters) == len(numbers)
    with pytest.raises(ProblemError, match=name):
        scalar_function(*numbers, 0.5, 0.5)


def test_mods_exports_functions_masks_and_scores() -> None:
    assert set(FUNCTIONS) < set(mods.__all__)
    for name in mods.__all__:
        assert getattr(mods, name).__doc__

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return mods.where(q > k, mods.exp(score), cuflash.mods.minimum(score, mods.seqlen_k()))

    root = trace(score_mod, "score_mod").root
    assert root.op == "where"
    assert trace(mods.alibi(4), "score_mod").root.inputs == {"score", "h", "q_idx", "k_idx", "seqlen_q", "seqlen_k"}
