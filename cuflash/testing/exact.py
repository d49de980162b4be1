"""Trials of small integers with exact results, in which any wrong bit shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import cuflash

from .cases import Case, numpy_dtype
from .draw import DTYPES, Draw
from .layouts import host
from .oracle import Array, assert_units, demand

BITS = 9  # bits of a key's code, each a column of k: enough for 512 keys
SCALE = 55.0  # a key whose code differs in one bit has a score 110 lower, and exp(-110) is 0 in float32
SLACK = 2.0**-20  # error bound of a row's one weight in float32, whose exponent is rounded


@dataclass(frozen=True, slots=True)
class Chosen:
    """A trial in which each row attends to one key, whose code is its q.

    out is that key's v, dv sums dout over the rows of a key, and dq and dk are 0. This is exact in 16 bits, where
    rounding removes the error of the weight, and nearly exact in float32.
    """

    case: Case
    seed: int

    @classmethod
    def drawn(cls, family: Draw, draw: Draw) -> Chosen:
        dtype, dims = family.one_of(*DTYPES), family.one_of((16, 16), (64, 64), (128, 128))
        mask = draw.mask() | {"softcap": 0.0, "softmax_scale": SCALE}
        return cls(draw.case("chosen", dtype, dims, **mask), draw.seed())

    def run(self, xp: Any) -> None:
        """Makes the calls in this array library, and raises MismatchError if a bit is wrong."""
        case, random = self.case, np.random.default_rng(self.seed)
        key, any_visible = self._keys(random)
        q, k, v, dout = self._arrays(random, key)
        batch, kv = np.arange(case.batch)[:, None, None], np.arange(case.heads_q) // (case.heads_q // case.heads_kv)
        expected = (
            np.where(any_visible[..., None], v[batch, key, kv], 0) if case.seqlen_k else np.zeros(case.out_shape())
        )
        dv = np.zeros(v.shape)
        rows = np.nonzero(any_visible)
        np.add.at(dv, (rows[0], key[rows], kv[rows[2]]), dout[rows])
        dtype = numpy_dtype(case.dtype)
        there = [xp.asarray(x.astype(dtype)) for x in (q, k, v)]
        out, lse = cuflash.forward(there[0], there[1], there[2], return_lse=True, **case.arguments())
        is_wide = case.dtype == "float32"
        if is_wide:
            assert_units("out", host(out), expected, ulps=8, unit=8.0)
        else:
            _equal("out", out, expected)
        assert_units("lse", host(lse), np.where(any_visible, SCALE * BITS, -np.inf).swapaxes(1, 2), ulps=4)
        upstream = xp.asarray(dout.astype(dtype))
        grads = cuflash.backward(upstream, there[0], there[1], there[2], out, lse, **case.arguments())
        if not is_wide:
            _equal("dq", grads[0], np.zeros(q.shape))
            _equal("dk", grads[1], np.zeros(k.shape))
            _equal("dv", grads[2], dv)
            return
        # The error of out is an error of delta, and so of dp - delta, which is otherwise 0.
        off = SCALE * SLACK * np.abs(dout * expected).sum(axis=-1)
        of_keys = np.zeros(k.shape[:3])
        np.add.at(of_keys, (rows[0], key[rows], kv[rows[2]]), off[rows])
        # dq sums elements of k, at most 2, and dk sums elements of q, at most 1.
        for name, x, bound in (("dq", grads[0], 2.0 * off), ("dk", grads[1], of_keys)):
            error = np.abs(host(x)).max(axis=-1, initial=0.0)
            demand((error <= bound).all(), f"{name} is {error.max(initial=0.0):.3g} where it is 0 but for a rounding")
        # Weights recomputed from lse err by units of lse.
        assert_units("dv", host(grads[2]), dv, ulps=2 * SCALE * BITS)

    def _keys(self, random: np.random.Generator) -> tuple[Array, Array]:
        """Returns for each row (b, sq, hq) a random visible key, and True if the row sees any key."""
        case, mask = self.case, self.case.problem().mask
        shape = case.batch, case.seqlen_q, case.heads_q
        i = np.arange(case.seqlen_q)
        begin, end = np.clip(i + mask.lo, 0, case.seqlen_k), np.clip(i + mask.hi + 1, 0, case.seqlen_k)
        count = np.maximum(end - begin, 0)[None, :, None]
        key = begin[None, :, None] + random.integers(0, 2**31, shape) % np.maximum(count, 1)
        return np.minimum(key, max(0, case.seqlen_k - 1)), np.broadcast_to(count > 0, shape)

    def _arrays(self, random: np.random.Generator, key: Array) -> tuple[Array, Array, Array, Array]:
        """Returns q, k, v and dout of small integers. dout is sparse: sums of 300 rows must fit bfloat16's 8 bits."""
        case = self.case
        codes = 2.0 * (np.arange(case.seqlen_k)[:, None] >> np.arange(BITS) & 1) - 1
        shapes = case.shapes()
        q, k = np.zeros(shapes[0]), random.integers(-2, 3, shapes[1]).astype("f8")
        k[..., :BITS] = codes[None, :, None]
        if case.seqlen_k:
            q[..., :BITS] = codes[key]
        dout = (random.random(case.out_shape()) < 0.05) * random.choice([-1.0, 1.0], case.out_shape())
        return q, k, random.integers(-8, 9, shapes[2]).astype("f8"), dout


@dataclass(frozen=True, slots=True)
class Counted:
    """A trial in which all scores are 0, so that exp(lse) is the number of keys that a row sees."""

    case: Case
    seed: int

    @classmethod
    def drawn(cls, family: Draw, draw: Draw) -> Counted:
        dtype, dims = family.one_of(*DTYPES), family.dims()
        return cls(draw.case("counted", dtype, dims, **draw.mask()), draw.seed())

    def run(self, xp: Any) -> None:
        """Makes the calls in this array library, and raises MismatchError if a count is wrong."""
        case = self.case
        q, k, v = case.arrays(self.seed)
        q, k, v = (xp.asarray(x) for x in (np.zeros_like(q), k, np.ones_like(v)))
        mask, i, j = case.problem().mask, np.arange(case.seqlen_q)[:, None], np.arange(case.seqlen_k)
        expected = ((i + mask.lo <= j) & (j <= i + mask.hi)).sum(axis=1)
        _, of_forward = cuflash.forward(q, k, v, return_lse=True, **case.arguments())
        for lse in (of_forward, cuflash.lse(q, k, **case.arguments())):
            counts = np.rint(np.exp(host(lse).astype("f8")))
            demand((counts == expected).all(), "a row sees more or fewer keys than its mask says")


def _equal(name: str, got: Any, expected: Array) -> None:
    got = host(got)
    expected = expected.astype(got.dtype)
    differ = np.argwhere(~(got == expected))
    demand(not len(differ), f"{name} differs in {len(differ)} places from what is exact, the first at {differ[:1]}")
