"""The fraction of weights that dropout keeps. Host and device round it alike."""

SHARES = 1 << 16  # dropout compares 16 random bits for each weight
COUNTER_KEYS = 32  # keys of a group of neighbouring counters; it begins at a multiple of this


def share_kept(dropout_p: float) -> int:
    """Returns how many of 2^16 weights stay. Weights are divided by exactly this fraction."""
    return round((1.0 - dropout_p) * SHARES)
