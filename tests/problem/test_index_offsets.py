"""Index offsets: what is legal, and errors that name it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.errors import ProblemError
from cuflash.problem.checks import MAX_SEQLEN
from cuflash.problem.index_offsets import check_index_offsets
from cuflash.problem.options import options_key

SHAPE = 2, 10, 4, 8


@pytest.mark.parametrize(
    ("value", "expected"),
    [((1, 2), (1, 2, 0, 0)), ([0, 7, np.int64(3)], (0, 7, 3, 0)), ((1, 2, 3, 4), (1, 2, 3, 4))],
)
def test_missing_offsets_are_zero(value: Any, expected: tuple[int, ...]) -> None:
    assert check_index_offsets(value) == expected
    assert options_key(index_offsets=value) is options_key(index_offsets=expected)
    assert options_key(index_offsets=value).is_cacheable


@pytest.mark.parametrize(
    "value", [3, "ab", None, (1,), (1, 2, 3, 4, 5), (1, -2), (1.0, 2), (True, 2), np.array([1, 2])]
)
@pytest.mark.parametrize("mods", [{}, {"dropout_p": 0.5, "dropout_seed": 0}])
def test_others_are_refused(value: Any, mods: dict[str, Any]) -> None:
    q = np.zeros(SHAPE)
    with pytest.raises(ProblemError, match=r"index_offsets=.*; give \(query, key\), \(query, key, head\) or "):
        cuflash.forward(q, q, q, index_offsets=value, **mods)


@pytest.mark.parametrize("place", range(4))
def test_an_index_of_the_larger_call_stays_in_range(place: int) -> None:
    length = (SHAPE[1], SHAPE[1], SHAPE[2], SHAPE[0])[place]
    legal = [0, 0, 0, 0]
    legal[place] = MAX_SEQLEN - length
    call: dict[str, Any] = {"dtype": "float32", "device": "cpu", "dropout_p": 0.5}
    cuflash.plan(SHAPE, SHAPE, SHAPE, index_offsets=tuple(legal), **call)
    legal[place] += 1
    name = ("seqlen_q", "seqlen_k", "heads_q", "batch")[place]
    with pytest.raises(ProblemError, match=f"with {name} {length}: indices reach {MAX_SEQLEN + 1}, over the limit"):
        cuflash.plan(SHAPE, SHAPE, SHAPE, index_offsets=tuple(legal), **call)


def test_a_block_mask_has_tiles_without_offsets() -> None:
    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return (q_idx + k_idx) % 3 != 0

    q = np.zeros(SHAPE)
    block_mask = cuflash.create_block_mask(mask_mod, 1, 1, 10, 10, like=q)
    with pytest.raises(
        ProblemError, match=r"block_mask with index_offsets=\(1, 0, 0, 0\): .* give the mask_mod instead"
    ):
        cuflash.forward(q, q, q, block_mask=block_mask, index_offsets=(1, 0))
    assert cuflash.forward(q, q, q, block_mask=block_mask, index_offsets=(0, 0)).shape == SHAPE
