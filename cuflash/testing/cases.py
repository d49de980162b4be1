"""Table of cases: small problems that cover every edge once, for tests, compile checks and the benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays.library import numpy_dtype as numpy_dtype
from ..problem.array_spec import ArraySpec
from ..problem.operands import OPS
from ..problem.options import Options, WindowSize
from ..problem.problem import Problem

MASK_AND_SCALE = "causal", "window_size", "diagonal_offset", "softcap", "softmax_scale"


@dataclass(frozen=True, slots=True)
class Case:
    """One problem with dense arrays: q (b, sq, hq, d), k (b, sk, hkv, d), v (b, sk, hkv, dv), all of `dtype`."""

    name: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    causal: bool = False
    window_size: WindowSize = (-1, -1)
    diagonal_offset: int | None = None
    softcap: float = 0.0
    softmax_scale: float | None = None

    def arguments(self) -> dict[str, Any]:
        """Returns the mask and scale arguments of the public calls."""
        return {name: getattr(self, name) for name in MASK_AND_SCALE}

    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of q, k and v."""
        return (
            (self.batch, self.seqlen_q, self.heads_q, self.head_dim),
            (self.batch, self.seqlen_k, self.heads_kv, self.head_dim),
            (self.batch, self.seqlen_k, self.heads_kv, self.head_dim_v),
        )

    def out_shape(self) -> tuple[int, ...]:
        """Returns the shape of out."""
        return self.batch, self.seqlen_q, self.heads_q, self.head_dim_v

    def problem(self, op: str = "forward", **more: Any) -> Problem:
        """Returns the `Problem` of a public call on `arrays()` with the case's arguments and `more`."""
        q, k, v = (ArraySpec.contiguous(shape, self.dtype) for shape in self.shapes())
        return Problem.from_specs(OPS[op], [q, k] if op == "lse" else [q, k, v], Options(**self.arguments(), **more))

    def arrays(self, seed: int = 0) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Returns q, k and v, drawn from the standard normal distribution."""
        rng = np.random.default_rng(seed)
        q, k, v = (rng.standard_normal(shape).astype(numpy_dtype(self.dtype)) for shape in self.shapes())
        return q, k, v


def _case(
    name: str, lengths: tuple[int, int], heads: tuple[int, int], dims: tuple[int, int], dtype: str, **more: Any
) -> Case:
    batch = more.pop("batch", 2)
    return Case(name, batch, *lengths, *heads, *dims, dtype, **more)


F16, BF16, F32 = "float16", "bfloat16", "float32"

CASES: tuple[Case, ...] = (
    # lengths: one, a tile and its neighbours, decoding, and both ways of being unequal
    _case("one_by_one", (1, 1), (1, 1), (64, 64), F16),
    _case("len63", (63, 63), (2, 2), (64, 64), BF16),
    _case("len64", (64, 64), (2, 2), (64, 64), F16),
    _case("len65_causal", (65, 65), (2, 1), (64, 64), F16, causal=True),
    _case("len127_causal", (127, 127), (2, 2), (128, 128), BF16, causal=True),
    _case("len128", (128, 128), (2, 2), (128, 128), F16),
    _case("len129_causal", (129, 129), (1, 1), (128, 128), F16, causal=True),
    _case("len257_causal", (257, 257), (1, 1), (64, 64), BF16, causal=True, batch=1),
    _case("decode", (1, 257), (8, 2), (128, 128), BF16, causal=True),
    _case("one_key", (65, 1), (2, 2), (64, 64), F16),
    _case("sq_shorter", (63, 130), (2, 2), (64, 64), F16, causal=True),
    _case("sq_longer", (130, 63), (2, 2), (64, 64), BF16, causal=True),
    _case("sq_longer_full", (129, 17), (2, 1), (128, 128), F32),
    # head dims: the smallest, odd ones, the usual ones, the largest, and d != dv
    _case("dim1", (17, 19), (2, 2), (1, 1), F32, causal=True),
    _case("dim8", (33, 65), (2, 2), (8, 8), F16),
    _case("dim16_f32", (64, 65), (2, 1), (16, 16), F32, causal=True),
    _case("dim33", (65, 64), (2, 2), (33, 33), BF16),
    _case("dim40", (64, 64), (2, 2), (40, 40), F16, causal=True),
    _case("dim64_f32", (129, 129), (2, 2), (64, 64), F32, causal=True),
    _case("dim72", (65, 65), (2, 2), (72, 72), BF16, causal=True),
    _case("dim80", (65, 66), (2, 1), (80, 80), F16),
    _case("dim96", (128, 65), (2, 2), (96, 96), F16),
    _case("dim128_f32", (65, 127), (2, 1), (128, 128), F32),
    _case("dim192", (65, 65), (2, 2), (192, 192), BF16, causal=True),
    _case("dim256", (65, 127), (2, 1), (256, 256), F16, causal=True),
    _case("dim512", (33, 65), (1, 1), (512, 512), BF16, batch=1),
    _case("dim192_128", (129, 129), (2, 2), (192, 128), BF16, causal=True),
    _case("dim64_128", (64, 65), (2, 1), (64, 128), F16),
    _case("dim128_64", (65, 64), (2, 1), (128, 64), BF16, causal=True),
    _case("dim40_72", (63, 65), (2, 2), (40, 72), F32, causal=True),
    # groups of query heads over one kv head: 7 and 8 (1 and 2 stand above)
    _case("group7", (65, 65), (7, 1), (64, 64), F16, causal=True),
    _case("group8", (63, 129), (16, 2), (64, 64), BF16, batch=1),
    # masks: windows on either side and both, offsets, rows that see nothing
    _case("window_left", (129, 129), (2, 1), (64, 64), F16, window_size=(17, -1)),
    _case("window_right", (129, 65), (2, 2), (64, 64), BF16, window_size=(-1, 9)),
    _case("window_both", (257, 257), (2, 2), (64, 64), F16, window_size=(31, 40)),
    _case("window_causal", (257, 200), (2, 2), (128, 128), BF16, causal=True, window_size=(70, -1)),
    _case("window_one_key", (65, 65), (2, 2), (64, 64), F32, window_size=(0, 0)),
    _case("offset_top_left", (65, 129), (2, 2), (64, 64), F16, causal=True, diagonal_offset=0),
    _case("offset_positive", (129, 129), (2, 1), (64, 64), BF16, causal=True, diagonal_offset=37),
    _case("offset_negative", (129, 129), (2, 1), (64, 64), F16, causal=True, diagonal_offset=-70),
    _case("offset_window", (129, 190), (2, 2), (64, 64), F32, window_size=(20, 5), diagonal_offset=90),
    _case("sees_nothing_before", (65, 65), (2, 1), (64, 64), F16, causal=True, diagonal_offset=-1000),
    _case("sees_nothing_after", (65, 65), (2, 1), (64, 64), BF16, window_size=(3, -1), diagonal_offset=10**6),
    # scale and softcap
    _case("softcap", (65, 129), (2, 1), (64, 64), F16, causal=True, softcap=15.0),
    _case("softcap_small_f32", (65, 65), (2, 2), (40, 40), F32, softcap=1.5, softmax_scale=0.5),
    _case("scale", (129, 65), (2, 2), (128, 128), BF16, causal=True, softmax_scale=0.31),
    # nothing to do
    _case("zero_batch", (5, 7), (2, 1), (64, 64), F16, batch=0),
    _case("zero_seqlen_q", (0, 7), (2, 1), (64, 64), BF16, causal=True),
    _case("zero_seqlen_k", (7, 0), (2, 1), (64, 64), F16, causal=True),
)
