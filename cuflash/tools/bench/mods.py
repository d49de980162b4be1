"""Problems with score_mod or mask_mod, for cuflash and PyTorch's flex_attention.

One function serves all: its indices are traced scalars, tensors of one element, or arrays for the exact results in
float64. It loads from arrays of the call's library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ... import mods
from ...ops.block_mask import create_block_mask
from ...testing.cases import Case

Put = Callable[[NDArray[Any]], Any]  # converts to an array of a library
CHUNK = 1 << 26  # pairs of query and key at a time


class Functions(NamedTuple):
    """A score_mod(score, b, h, q_idx, k_idx) and a mask_mod(b, h, q_idx, k_idx), or None for each."""

    score_mod: Any = None
    mask_mod: Any = None


@dataclass(frozen=True, slots=True)
class ModCase(Case):
    """A `Case` with the functions of a name."""

    mods: str = ""

    def functions(self, put: Put) -> Functions:
        """Returns the functions; their arrays are of the library of `put`."""
        return FUNCTIONS[self.mods](put, self)

    def keywords(self, q: Any, put: Put) -> dict[str, Any]:
        """Returns keywords of our calls on arrays like q; a block mask is created once, as for a model's layers."""
        functions = READY_MADE[self.mods](put, self) if self.mods in READY_MADE else self.functions(put)._asdict()
        if (mask_mod := functions.pop("mask_mod", None)) is not None:
            functions["block_mask"] = create_block_mask(mask_mod, 1, 1, self.seqlen_q, self.seqlen_k, like=q)
        return functions


def _causal(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return k_idx <= q_idx


def _documents(put: Put, case: Case) -> Functions:
    number = put(np.repeat(np.arange(4), np.diff(_bounds(case))).astype("int32"))
    return Functions(mask_mod=lambda b, h, q_idx, k_idx: (number[q_idx] == number[k_idx]) & (k_idx <= q_idx))


def _bounds(case: Case) -> NDArray[np.int32]:
    """Returns the begins of four documents, and the end of the last."""
    n = case.seqlen_k
    return np.array([0, n // 8, n // 2, 3 * n // 4, n], "int32")


def _prefix(put: Put, case: Case) -> Functions:
    prefix = case.seqlen_k // 4
    return Functions(mask_mod=lambda b, h, q_idx, k_idx: (k_idx <= q_idx) | (k_idx < prefix))


def _chunked(put: Put, case: Case) -> Functions:
    size = case.seqlen_k // 4
    return Functions(mask_mod=lambda b, h, q_idx, k_idx: (q_idx // size == k_idx // size) & (k_idx <= q_idx))


def _global_window(put: Put, case: Case) -> Functions:
    window = case.seqlen_k // 16
    return Functions(mask_mod=lambda b, h, q_idx, k_idx: (abs(q_idx - k_idx) <= window) | (k_idx < 64))


def _slopes(case: Case) -> NDArray[np.float32]:
    return np.exp2(-8.0 * np.arange(1, case.heads_q + 1) / case.heads_q).astype("float32")


def _alibi(put: Put, case: Case) -> Functions:
    slopes = put(_slopes(case))
    return Functions(lambda score, b, h, q_idx, k_idx: score + slopes[h] * (k_idx - q_idx), _causal)


FUNCTIONS: dict[str, Callable[[Put, Case], Functions]] = {
    "documents": _documents,
    "prefix LM": _prefix,
    "chunks": _chunked,
    "window and global keys": _global_window,
    "ALiBi": _alibi,
}
# Equivalent arguments of our calls, where `cuflash.mods` has a function for them.
READY_MADE: dict[str, Callable[[Put, Case], dict[str, Any]]] = {
    "documents": lambda put, case: {"mask_mod": mods.document(put(_bounds(case))), "causal": True},
    "prefix LM": lambda put, case: {"mask_mod": mods.prefix_lm(case.seqlen_k // 4)},
    "chunks": lambda put, case: {"mask_mod": mods.chunked(case.seqlen_k // 4), "causal": True},
    "ALiBi": lambda put, case: {"score_mod": mods.alibi(put(_slopes(case))), "causal": True},
}


@cache
def share(case: ModCase) -> float:
    """Returns the fraction of (query, key) pairs that the mask shows."""
    mask_mod, keys = case.functions(np.asarray).mask_mod, np.arange(case.seqlen_k)
    step, num_visible = max(1, CHUNK // case.seqlen_k), 0
    for begin in range(0, case.seqlen_q, step):
        rows = np.arange(begin, min(begin + step, case.seqlen_q))[:, None]
        num_visible += int(np.count_nonzero(mask_mod(0, 0, rows, keys)))
    return num_visible / (case.seqlen_q * case.seqlen_k)


def flex_functions(case: Case, put: Put, torch: Any) -> Functions:
    """Returns the functions that flex_attention takes for any case."""
    if isinstance(case, ModCase):
        return case.functions(put)
    score_mod = partial(_capped, torch.tanh, case.softcap) if case.softcap else None
    mask = case.problem().mask
    if mask.is_full:
        return Functions(score_mod)
    lo, hi = mask.lo, mask.hi
    return Functions(score_mod, lambda b, h, q_idx, k_idx: (k_idx >= q_idx + lo) & (k_idx <= q_idx + hi))


def _capped(tanh: Any, cap: float, score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return cap * tanh(score / cap)
