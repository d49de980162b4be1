"""Merge of partial results over disjoint sets of keys, the last step of ring attention and split-KV decoding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .flashd import State, blend
from .tiles import Array


def merge_states(outs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
    """Returns `(out, lse)` over all keys, from out_i (b, sq, h, dv) and lse_i (b, h, sq) over disjoint sets of keys.

    Blends states as FLASH-D does (arXiv 2505.14201), first to last, in float32 (float64 if any input is). `out` has the
    dtype of the outs. A state with lse = -inf has no keys and adds nothing; out is 0 if no state has any.
    """
    dtype = np.result_type(np.float32, *(x.dtype for x in (*outs, *lses) if x.dtype == np.float64))
    rows = outs[0].shape[:3]
    state = State(np.full(rows, -np.inf, dtype), np.zeros(rows, dtype), np.zeros(outs[0].shape, dtype))
    with np.errstate(all="ignore"):
        for out, lse in zip(outs, lses, strict=True):
            lse = lse.astype(dtype).transpose(0, 2, 1)
            # The out of a state without keys is not read: it may hold NaN, and 0 * NaN is NaN.
            part = State(lse, np.zeros(rows, dtype), np.where(np.isneginf(lse)[..., None], 0, out.astype(dtype)))
            state = blend(state, part)
            # lse is rounded each time, so that one call with many states has the bits of a chain of calls.
            state = state._replace(base=state.lse, rest=part.rest)
        return state.o.astype(outs[0].dtype), np.ascontiguousarray(state.lse.transpose(0, 2, 1))
