"""Dropout: the bits are Philox's, and a weight is kept or dropped by the seed and its indices alone."""

from __future__ import annotations

import numpy as np
import pytest

from cuflash.reference.dropout import SHARES, is_kept, philox, share_kept

# Test vectors of Random123, the authors' library: counter, key, result.
DEVICES = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "result"), DEVICES)
def test_the_bits_are_those_of_philox(counter: str, key: str, result: str) -> None:
    words, keys, expected = ([int(each, 16) for each in text.split()] for text in (counter, key, result))
    bits = philox(keys[0] | keys[1] << 32, (words[0], words[1], words[2], words[3]))
    assert [int(word) for word in bits] == expected


def grid(seed: int, dropout_p: float, keys: int = 512) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    b, h, q, k = np.indices((2, 3, 64, keys), sparse=True)
    return is_kept(seed, dropout_p, b, h, q, k)


@pytest.mark.parametrize("dropout_p", [0.0, 0.1, 0.5, 0.9])
def test_as_many_are_kept_as_wanted_along_every_axis(dropout_p: float) -> None:
    keep, share = grid(7, dropout_p), share_kept(dropout_p) / SHARES
    assert abs(share - (1 - dropout_p)) <= 0.5 / SHARES
    for axes in ((1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):
        means = keep.mean(axis=axes)
        count = keep.size / means.size
        assert (np.abs(means - share) <= 6 * np.sqrt(share * (1 - share) / count)).all()


def test_a_weight_depends_on_its_place_and_the_seed_alone() -> None:
    keep = grid(3, 0.5)
    some = is_kept(3, 0.5, 1, 2, np.arange(5, 9)[:, None], np.arange(100, 200))
    np.testing.assert_array_equal(some, keep[1, 2, 5:9, 100:200])
    for other in (grid(4, 0.5), grid(3 | 1 << 32, 0.5), np.roll(keep, 1, axis=3), np.roll(keep, 1, axis=2), keep[::-1]):
        assert 0.45 < (keep == other).mean() < 0.55


def test_no_two_keys_of_a_row_share_their_bits() -> None:
    k = np.arange(4096)
    positions = 8 * (4 * (k // 32) + k % 8 // 2) + 2 * (k // 8 % 4) + k % 2
    assert len(np.unique(positions)) == len(k)
    # The keys, of 32, that a thread of tensor cores holds: two neighbours of every 8.
    for thread in range(4):
        columns = [8 * block + 2 * thread + i for block in range(4) for i in range(2)]
        assert len({int(positions[key]) // 8 for key in columns}) == 1


def test_seeds_of_any_size_are_taken_modulo_two_to_the_64() -> None:
    np.testing.assert_array_equal(grid(-1, 0.5, 64), grid(2**64 - 1, 0.5, 64))
