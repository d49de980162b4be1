"""Limits of the attention backends of serving engines, and bounds on keys that are planned once."""

from __future__ import annotations

MAX_HEAD_DIM = 256  # of which all features have kernels
SPLIT_SIZE = 128  # of repeatable inference: bits of a row depend on its q, keys and values alone
KEYS_STEP = 1024


def bound_of_keys(length: int) -> int:
    """Returns a bound on keys: a multiple, as one that grew in each decode step would plan each step anew."""
    return -(-length // KEYS_STEP) * KEYS_STEP
