"""Parameters of mods: strides, extents and word offsets of pointers."""

from __future__ import annotations

from typing import Any

import numpy as np

import cuflash
from cuflash.planning.mod_code import MORE_WORDS, offset_words, words_of
from cuflash.problem.dropout import share_kept
from cuflash.runtime.mod_params import mod_params

FIRST = 5  # words of the struct before them


def packed(**call: Any) -> tuple[Any, Any, Any, Any]:
    """Packs the parameters of a call; returns (problem, offsets, words, ints)."""
    shape = (2, 300, 4, 64)
    problem = cuflash.plan(shape, shape, shape, dtype="bfloat16", device="cpu", **call).problem
    mod_spec = problem.op.mod_spec
    assert mod_spec is not None
    arrays = sum(words_of(each.rank) for each in mod_spec.arrays)
    memory = bytearray(8 * (FIRST + arrays + offset_words(mod_spec) + MORE_WORDS))
    offsets = mod_params(problem, memory, FIRST)
    return problem, offsets, np.frombuffer(memory, np.int64), np.frombuffer(memory, np.int32)


def test_arrays_stand_one_after_the_other_with_their_strides_and_extents() -> None:
    table, number = np.zeros((6, 10), np.float32)[::2, ::-1], np.array(1.5, np.float32)

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * number + table[h, q]

    problem, offsets, words, ints = packed(score_mod=score_mod)
    index, second = problem.op.index, FIRST + words_of(0)
    order = [each.rank for each in problem.op.mod_spec.arrays]
    assert order == [0, 2]
    assert offsets.plain == [(index["captured0"], FIRST), (index["captured1"], second)]
    assert words[:FIRST].tolist() == [0] * FIRST
    assert ints[2 * (FIRST + 2)] == 1
    assert words[second + 1 : second + 3].tolist() == [20, -1]
    assert ints[2 * (second + 3) : 2 * (second + 4)].tolist() == [3, 10]


def test_sinks_seed_and_the_fraction_of_kept_weights() -> None:
    problem, offsets, words, ints = packed(sinks=(4,), dropout_p=0.25)
    index, share = problem.op.index, share_kept(0.25)
    assert offsets.plain == [(index["sinks"], FIRST), (index["dropout_seed"], FIRST + 2)]
    numbers = 2 * (FIRST + 5)
    assert ints[numbers + 1 : numbers + 3].tolist() == [0, share]
    assert words.view(np.float32)[numbers + 3] == np.float32(65536 / share)


def test_index_offsets_stand_between_the_arrays_and_the_rest() -> None:
    problem, offsets, _, ints = packed(bias=(1, 1, 300, 300), dropout_p=0.25, index_offsets=(3, 5, 7))
    begin = FIRST + words_of(4)
    assert ints[2 * begin : 2 * begin + 4].tolist() == [3, 5, 7, 0]
    assert offsets.plain[1] == (problem.op.index["dropout_seed"], begin + 2 + 2)


def test_broadcast_mask_tiles_have_strides_of_0() -> None:
    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q // 64 + h) % 2 == k // 64 % 2

    block_mask = cuflash.create_block_mask(mask_mod, 1, 4, 300, 300, like=np.zeros(1))
    problem, offsets, words, ints = packed(block_mask=block_mask)
    assert offsets.plain == [(problem.op.index["mask_tiles"], FIRST + 1)]
    assert words[FIRST + 3 : FIRST + 5].tolist() == [0, 25]
    assert ints[2 * (FIRST + 5)] == 5
