"""Dropout: the kept weights follow from the seed and the indices of a weight alone.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") maps a key and a counter to 128 bits.
The key is the seed, the counter the indices, and 16 bits decide about a weight. So all tile shapes, kernels, splits and
passes drop the same weights.

Key k of a row uses the counter (4 · (k // 32) + k % 8 // 2, q_idx, h, b). Of its eight groups of 16 bits it uses the
group with index 2 · (k // 8 % 4) + k % 2. This order suits tensor cores, where a thread holds two neighbours of every 8
keys. One counter then serves 8 weights of a thread; with 8 consecutive keys it would serve 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..problem.dropout import SHARES, share_kept

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_STEPS = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_ROUNDS = 10


def philox(seed: int, counter: tuple[Any, Any, Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Returns four words of random bits for each counter of four words, which are broadcast together."""
    words = [np.asarray(word).astype(np.uint32) for word in np.broadcast_arrays(*counter)]
    key = [np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32 & 0xFFFFFFFF)]
    for _ in range(_ROUNDS):
        one, other = (word.astype(np.uint64) * each for word, each in zip(words[::2], _MULTIPLIERS, strict=True))
        words = [
            (other >> np.uint64(32)).astype(np.uint32) ^ words[1] ^ key[0],
            other.astype(np.uint32),
            (one >> np.uint64(32)).astype(np.uint32) ^ words[3] ^ key[1],
            one.astype(np.uint32),
        ]
        with np.errstate(over="ignore"):  # the key wraps modulo 2^32
            key = [each + step for each, step in zip(key, _STEPS, strict=True)]
    return words[0], words[1], words[2], words[3]


def is_kept(seed: int, dropout_p: float, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    """Returns True for each kept weight; indices are broadcast together."""
    b, h, q_idx, k_idx = np.broadcast_arrays(b, h, q_idx, k_idx)
    words = philox(seed, (4 * (k_idx // 32) + k_idx % 8 // 2, q_idx, h, b))
    bits = np.choose(k_idx // 8 % 4, words) >> (16 * (k_idx % 2)).astype(np.uint32) & np.uint32(SHARES - 1)
    return bits < share_kept(dropout_p)


def scales_at(indices: Mapping[str, Any], seed: int, dropout_p: float, dtype: Any) -> Any:
    """Returns the factors of weights at these indices plus offsets: 0 if dropped, else 1 / (kept fraction)."""
    pairs = ("b", "b_offset"), ("h", "h_offset"), ("q_idx", "q_offset"), ("k_idx", "k_offset")
    keep = is_kept(seed, dropout_p, *(indices[name] + indices.get(offset, 0) for name, offset in pairs))
    return np.where(keep, SHARES / share_kept(dropout_p), 0).astype(dtype)


def seed_of(array: Any) -> int:
    """Returns the seed in an array: one integer of 64 bits, or two of 32 bits, the low one first."""
    words = np.atleast_1d(array).tolist()
    bits = 8 * array.dtype.itemsize
    return sum((int(word) & (1 << bits) - 1) << bits * place for place, word in enumerate(words))
