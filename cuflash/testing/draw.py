"""Random choices of trials, including the lengths, head dims and masks at which kernels change."""

from __future__ import annotations

from typing import Any

import numpy as np

from .cases import Case
from .layouts import WRITABLE

# Lengths around the rows and keys of the kernels' tiles.
LENGTHS = (0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 257, 300)
USUAL_DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))
OTHER_DIMS = ((96, 96), (192, 192), (32, 32), (40, 72), (64, 128), (128, 64), (80, 80), (33, 33), (8, 8), (1, 3))
WIDE_DIMS = ((512, 512), (257, 64), (64, 320))  # no gradients on a GPU, and no kernels on some GPUs
DTYPES = ("float16", "bfloat16", "float32")


class Draw:
    """A source of choices, determined by the seed of a run and the index of a trial."""

    def __init__(self, *seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def one_of(self, *values: Any) -> Any:
        """Returns one of these values, all equally likely."""
        return values[self.random.integers(len(values))]

    def chance(self, share: float) -> bool:
        """Returns True with probability `share`."""
        return bool(self.random.random() < share)

    def seed(self) -> int:
        """Returns a seed for arrays."""
        return int(self.random.integers(2**31))

    def length(self) -> int:
        """Returns a number of rows: one near a tile's, or any up to 299."""
        return int(self.one_of(*LENGTHS) if self.chance(0.6) else self.random.integers(300))

    def dims(self) -> tuple[int, int]:
        """Returns `(head_dim, head_dim_v)`."""
        dims: tuple[int, int] = self.one_of(*(USUAL_DIMS if self.chance(0.6) else OTHER_DIMS + WIDE_DIMS))
        return dims

    def grads_out(self) -> tuple[str, str, str]:
        """Returns layouts of the caller's arrays for dq, dk and dv, "" for none."""
        names = ("", *WRITABLE) if self.chance(0.4) else ("",)
        return self.one_of(*names), self.one_of(*names), self.one_of(*names)

    def mask(self) -> dict[str, Any]:
        """Returns mask and scale arguments of a call."""
        sides = -1, -1, 0, 3, 40, 100, 200
        return {
            "causal": self.chance(0.5),
            "window_size": (self.one_of(*sides), self.one_of(*sides)) if self.chance(0.4) else (-1, -1),
            "diagonal_offset": int(self.random.integers(-350, 350)) if self.chance(0.3) else None,
            "softcap": self.one_of(0.0, 0.0, 0.0, 2.0, 30.0),
            "softmax_scale": self.one_of(None, None, None, 0.05, 0.3),
        }

    def case(self, name: str, dtype: str, dims: tuple[int, int], **mask: Any) -> Case:
        """Returns a dense problem of any lengths and heads. Small problems get large batches: see `enough`."""
        lengths, heads_kv, group = (self.length(), self.length()), self.one_of(1, 2), self.one_of(1, 1, 2, 4, 7, 8)
        batch = self.one_of(0, 1, 2, 2, 3) if 0 in lengths else enough(*lengths, heads_kv, group)
        return Case(name, batch, *lengths, heads_kv * group, heads_kv, *dims, dtype, **mask)


def enough(seqlen_q: int, seqlen_k: int, heads_kv: int, group: int) -> int:
    """Returns a batch with at least 48 rows and keys.

    With few numbers, the naive computation may happen to have no errors, and its error is the tolerance.
    """
    return max(1, -(-48 // (min(seqlen_q * group, seqlen_k) * heads_kv)))
