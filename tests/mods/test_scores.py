"""Ready-made changes of scores against their definitions."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expressions import SCORE
from texts import Case, check, compiled, with_derivative

from cuflash.errors import ProblemError
from cuflash.mods import scores
from cuflash.mods.graph.derivative import differentiate
from cuflash.mods.tracing.trace import trace
from cuflash.reference.evaluate import evaluate

SCORES = np.random.default_rng(0).standard_normal((2, 4, 9, 12))
DISTANCES = np.arange(12) - (np.arange(9)[:, None] + 3)


def changed(score_mod: Any, values: Any = SCORES) -> Any:
    """Returns the scores (batch, heads, seqlen_q, seqlen_k) after a score_mod."""
    graph = trace(score_mod, "score_mod")
    indices = dict(zip(("b", "h", "q_idx", "k_idx"), np.indices(values.shape, sparse=True), strict=True))
    inputs = indices | {"score": values, "seqlen_q": values.shape[2], "seqlen_k": values.shape[3]}
    (results,) = evaluate([graph.root], inputs, [each.array for each in graph.arrays], np.float64)
    return np.broadcast_to(results, values.shape)


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_alibi_subtracts_a_multiple_of_the_distance(shape: tuple[int, ...]) -> None:
    slopes = np.random.default_rng(1).random(shape).astype(np.float32)
    expected = SCORES - slopes.reshape(-1, 4, 1, 1) * np.abs(DISTANCES)
    np.testing.assert_allclose(changed(scores.alibi(slopes)), expected, rtol=1e-6)


# From the authors' code: github.com/ofirpress/attention_with_linear_biases, get_slopes.
@pytest.mark.parametrize("heads", [1, 2, 4, 6, 8, 12, 16, 20])
def test_alibi_has_the_slopes_of_the_paper(heads: int) -> None:
    lower = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / lower) for i in range(lower)]
    slopes += [2 ** (-8 * (i + 1) / (2 * lower)) for i in range(2 * lower)][0::2][: heads - lower]
    results = changed(scores.alibi(heads), np.zeros((1, heads, 1, 2)))
    np.testing.assert_allclose(-results[0, :, 0, 0], slopes, rtol=1e-6)


def test_softcap_is_that_of_the_keyword() -> None:
    np.testing.assert_allclose(changed(scores.softcap(1.5)), 1.5 * np.tanh(SCORES / 1.5), rtol=1e-6)
    lines = (scores.softcap.__doc__ or "").splitlines()
    values, results = (np.array(re.findall(r"-?\d+\.\d", line), float) for line in lines[2:4])
    np.testing.assert_allclose(changed(scores.softcap(2), values.reshape(1, 1, 1, -1)).ravel(), results, atol=0.06)


def bucket_of(distance: int, count: int, bidirectional: bool, max_distance: int) -> int:
    """Returns T5's bucket of `key - query`, computed in float32 as PyTorch does."""
    first = 0
    if bidirectional:
        count //= 2
        first, distance = count * (distance > 0), abs(distance)
    else:
        distance = max(-distance, 0)
    exact = count // 2
    if distance < exact:
        return first + distance
    log = np.log(np.float32(distance) / np.float32(exact)) / np.float32(math.log(max_distance / exact))
    return first + min(exact + int(log * np.float32(count - exact)), count - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("count", "most"), [(32, 128), (8, 16), (64, 256), (4, 3)])
def test_relative_positions_have_the_buckets_of_t5(bidirectional: bool, count: int, most: int) -> None:
    table = np.arange(count * 2, dtype=np.float32).reshape(count, 2)
    values = np.zeros((1, 2, 1, 600))
    score_mod = scores.relative_position(table, bidirectional=bidirectional, max_distance=most)

    def moved(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score_mod(score, b, h, q - 300, k)

    buckets = [bucket_of(k - 299, count, bidirectional, most) for k in range(600)]
    np.testing.assert_array_equal(changed(moved, values)[0, 1, 0], 2 * np.array(buckets) + 1)


def test_the_picture_of_relative_positions_is_right() -> None:
    lines = (scores.relative_position.__doc__ or "").splitlines()
    split = [line.split() for line in lines if re.match(r" +(distance|bucket) +\d", line)]
    rows = {name: [int(each) for each in numbers] for name, *numbers in split}
    assert rows["bucket"] == [bucket_of(-each, 8, False, 16) for each in rows["distance"]]


def test_their_texts_have_their_values_and_compile(tmp_path: Path) -> None:
    table = np.random.default_rng(0).standard_normal((32, 4)).astype(np.float32)
    cases = []
    for score_mod in (
        scores.alibi(12),
        scores.alibi(table[0]),
        scores.softcap(5),
        scores.relative_position(table, bidirectional=True),
        scores.relative_position(table, bidirectional=False),
    ):
        graph = trace(score_mod, "score_mod")
        cases.append(with_derivative(Case([graph.root], [each.array for each in graph.arrays])))
    check(cases, tmp_path)
    compiled(cases, "sm_90a")


def test_arrays_have_derivatives() -> None:
    slopes, table = np.ones(4, np.float32), np.ones((8, 4), np.float32)
    for score_mod in (scores.alibi(slopes), scores.relative_position(table, bidirectional=False, max_distance=16)):
        derivatives = differentiate(trace(score_mod, "score_mod").root)
        assert {each.op for each in derivatives} == {"input", "load"}
        assert derivatives[SCORE].value == 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: scores.alibi(0), "slopes=0; give an integer of at least 1 for so many heads, or an array"),
        (lambda: scores.alibi(1.5), r"slopes=1\.5"),
        (lambda: scores.alibi(np.ones((1, 2, 3))), "slopes has 3 axes"),
        (lambda: scores.alibi(np.ndarray), "slopes=<class 'numpy.ndarray'>; give an integer"),
        (lambda: scores.softcap(np.timedelta64(3)), r"cap=.*timedelta64\(3\).*; give a finite number"),
        (lambda: scores.softcap(0), "cap=0; give a finite number above 0"),
        (lambda: scores.softcap(math.inf), "cap=inf"),
        (lambda: scores.relative_position(np.ones(8), bidirectional=True), r"table has shape \(8,\)"),
        (lambda: scores.relative_position(np.ndarray, bidirectional=True), r"table has shape \(\)"),
        (lambda: scores.relative_position(np.ones((8, 1)), bidirectional=np.ones(2)), "bidirectional=.*; give True or"),
        (lambda: scores.relative_position(np.ones((8, 1)), bidirectional=True, max_distance=9.5), "max_distance=9.5; "),
        (lambda: scores.relative_position(np.ones((2, 1)), bidirectional=True), "give at least 4 buckets"),
        (lambda: scores.relative_position(np.ones((32, 1)), bidirectional=False, max_distance=9), "above 16"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        make()
