"""The share of weights that dropout keeps, which host and device must count alike."""

SHARES = 1 << 16  # 16 bits decide about a weight


def share_kept(dropout_p: float) -> int:
    """Returns how many of 2^16 weights stay. These are divided by exactly this share."""
    return round((1.0 - dropout_p) * SHARES)
