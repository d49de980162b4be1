"""Dropout: which weights are kept, from the seed and the place of a weight alone.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") makes 128 bits of a key, the seed, and
a counter, the place; 16 bits decide about a weight. So tile shapes, kernels, splits and passes all drop the same ones.

Key k of a row belongs to the counter (4 · (k // 32) + k % 8 // 2, q_idx, h, b), and of its bits it has those of number
2 · (k // 8 % 4) + k % 2. why not 8 keys in their order: a thread of tensor cores holds two neighbours of every 8 keys.
Then one counter serves 8 of its weights, and not 2.
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
    """Four words of random bits for each counter of four words, which are broadcast together."""
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
        with np.errstate(over="ignore"):  # why: the key wraps
            key = [each + step for each, step in zip(key, _STEPS, strict=True)]
    return words[0], words[1], words[2], words[3]


def is_kept(seed: int, dropout_p: float, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    """Returns which weights stay, for indices that are broadcast together."""
    b, h, q_idx, k_idx = np.broadcast_arrays(b, h, q_idx, k_idx)
    words = philox(seed, (4 * (k_idx // 32) + k_idx % 8 // 2, q_idx, h, b))
    bits = np.choose(k_idx // 8 % 4, words) >> (16 * (k_idx % 2)).astype(np.uint32) & np.uint32(SHARES - 1)
    return bits < share_kept(dropout_p)


def scales_at(places: Mapping[str, Any], seed: int, dropout_p: float, dtype: Any) -> Any:
    """The factors of weights at these places: 0, or 1 / (share that is kept)."""
    keep = is_kept(seed, dropout_p, *(places[name] for name in ("b", "h", "q_idx", "k_idx")))
    return np.where(keep, SHARES / share_kept(dropout_p), 0).astype(dtype)


def seed_of(array: Any) -> int:
    """The seed that an array holds: one integer of 64 bits, or two of 32 bits, of which the first is the low one."""
    words = np.atleast_1d(array).tolist()
    bits = 8 * array.dtype.itemsize
    return sum((int(word) & (1 << bits) - 1) << bits * place for place, word in enumerate(words))
