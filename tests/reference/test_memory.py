"""Purpose of tiles: memory grows with seqlen, not its square, and fully masked tiles take no work."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from problems import MASKED

from cuflash import reference
from cuflash.problem.mask import Mask
from cuflash.reference import flash1, flash2, flashd
from cuflash.testing import oracle
from cuflash.testing.cases import Case

LONG = Case("long", 1, 4096, 4096, 2, 2, 64, 64, "float32", causal=True)
LONG_HEAD = replace(LONG, name="long_head", heads_q=1, heads_kv=1, dtype="float16")
LIMIT = 4 * 4096**2 // 8  # bytes beside the outputs: an eighth of the scores of one head


@pytest.fixture(autouse=True)
def _traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def peak_over_outputs(call: Callable[[], Any]) -> tuple[int, Any]:
    """Returns a call's peak memory in bytes beside earlier memory and its results, and the results."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    outputs = call()
    peak = tracemalloc.get_traced_memory()[1]
    returned = (outputs,) if isinstance(outputs, np.ndarray) else outputs
    return peak - before - sum(x.nbytes for x in returned), outputs


def test_numpy_memory_is_traced() -> None:
    assert peak_over_outputs(lambda: (np.ones(10**6) + np.ones(10**6))[:0])[0] >= 16 * 10**6


def test_long_sequences_take_little_memory() -> None:
    q, k, v = LONG.arrays()
    problem = LONG.problem()
    over_forward, (out, lse) = peak_over_outputs(lambda: reference.forward(problem, q, k, v))
    over_backward, (dq, _, _) = peak_over_outputs(lambda: reference.backward(problem, out, q, k, v, out, lse))
    assert over_forward < LIMIT, f"{over_forward / 2**20:.1f} MiB"
    assert over_backward < LIMIT, f"{over_backward / 2**20:.1f} MiB"
    assert (out[0, 0] == v[0, 0]).all()  # the first query sees the first key alone
    # Its dq is a product with dout · v - delta, two sums of 64 products that are equal except for rounding.
    oracle.assert_units("dq", dq[0, 0], 0.0, 4, unit=float(np.square(v[0, 0]).sum()))
    last = replace(LONG, seqlen_q=1)
    oracle.assert_attention(last, (q[:, -1:], k, v), out[:, -1:], lse[:, :, -1:])


@pytest.mark.parametrize("algorithm", ["flash1", "flash2", "flashd"])
def test_every_tiled_algorithm_takes_little_memory(algorithm: str) -> None:
    q, k, v = LONG_HEAD.arrays()  # heads run one after the other, so one head has the peak of many
    problem = LONG_HEAD.problem(algorithm=algorithm)
    assert peak_over_outputs(lambda: reference.forward(problem, q, k, v))[0] < LIMIT
    assert peak_over_outputs(lambda: reference.lse(problem, q, k))[0] < LIMIT


def test_causal_visits_half() -> None:
    assert tiles_by_brute_force(Mask.from_options(40, 40, causal=True), 8, 8) == (15, 5)


def tiles_by_brute_force(mask: Mask, block_q: int, block_k: int) -> tuple[int, int]:
    """Returns `(visited, masked)`: numbers of tiles with a visible pair, and of tiles with a hidden pair."""
    visible = np.asarray(mask.visible(np.arange(mask.seqlen_q), np.arange(mask.seqlen_k)))
    rows_with_keys = np.flatnonzero(visible.any(axis=1))
    visited = masked = 0
    for row in range(0, mask.seqlen_q, block_q):
        rows = visible[np.intersect1d(np.arange(row, row + block_q), rows_with_keys)]
        for key in range(0, mask.seqlen_k, block_k):
            tile = rows[:, key : key + block_k]
            tile = tile[:, tile.any(axis=0)]
            visited += bool(tile.any())
            masked += not tile.all()
    return visited, masked


@pytest.mark.parametrize("forward", [flash1.forward, flash2.forward, flashd.forward])
@pytest.mark.parametrize("arguments", [{}, *MASKED, {"window_size": (2, 2), "diagonal_offset": 999}], ids=str)
@pytest.mark.parametrize(("block_q", "block_k"), [(8, 8), (16, 4), (5, 7)])
def test_hidden_tiles_are_skipped_and_seen_ones_not_masked(
    monkeypatch: pytest.MonkeyPatch, forward: Any, arguments: dict[str, Any], block_q: int, block_k: int
) -> None:
    case = Case("", 2, 40, 50, 4, 2, 4, 4, "float32", **arguments)
    problem = case.problem()
    visited, masked = tiles_by_brute_force(problem.mask, block_q, block_k)
    tiles: list[Any] = []
    calls: list[Any] = []
    visible = Mask.visible
    monkeypatch.setattr(Mask, "visible", lambda *args: (calls.append(args), visible(*args))[1])
    forward(problem, *case.arrays(), block_q=block_q, block_k=block_k, on_tile=lambda *options: tiles.append(options))
    heads = case.batch * case.heads_kv  # the query heads of a kv head share its tiles
    assert len(tiles) == heads * visited
    assert len(calls) == heads * masked
    for block, tile, state in tiles:
        assert block.begin < block.end <= 40
        assert tile.begin < tile.end <= 50
        assert len(state.o) == (block.end - block.begin) * 2
