"""Mods: score_mod, mask_mod, bias, sinks and dropout.

s = score_mod(c tanh(softmax_scale q kᵀ / c)), then -inf where mask_mod or the mask of the options hides the key. A
score of at most -1e37 has weight 0, too. A bias is added to the score; a bias of bools is part of the mask. `b`, `h`,
`q_idx` and `k_idx` are the sequence, the query head, and the indices of query and key in the sequence.

A sink x is one more logit of a head, without a value: lse' = ln(exp(lse) + exp(x)), out' = out exp(lse - lse').
Dropout multiplies a weight by 0, or by 1 / (kept fraction), before the product with v; lse is unchanged.

ds is the gradient of the final scores (`backward`). The gradient of a captured array is the sum of ds times the
derivative by each load from it. The gradient of a sink is Σ exp(x - lse') (dlse - rowsum(dout ∘ out)).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..mods.graph.derivative import differentiate
from ..mods.graph.graph import INDEX_OFFSETS, Node
from ..problem.index_offsets import NO_OFFSETS, IndexOffsets
from ..problem.mod_arrays import MASK_TILE
from ..problem.mod_spec import LEAST_SCORE, SCORE, ModSpec
from ..problem.options import Options
from ..problem.problem import Problem
from . import dropout
from .block_mask import EMPTY
from .evaluate import evaluate, place_of

Array = NDArray[Any]
# The indices b, h, q_idx and k_idx of a tile's scores, which are broadcast together, and lengths seqlen_q, seqlen_k.
Indices = Mapping[str, Any]


class ModTile(NamedTuple):
    """The scores of a tile before mods, and its dropout.

    mod_scores: the mods. raw: scores before mods, (queries, group, keys). scales: factors of the weights, None for 1.
    """

    mod_scores: ModScores
    indices: Indices
    raw: Array
    scales: Array | None

    def values(self, roots: Sequence[Node]) -> list[Any]:
        """Returns the values of nodes at all indices of the tile."""
        return self.mod_scores.values(roots, self.indices, self.raw)

    def dropped(self, weights: Array) -> Array:
        """Returns weights, or their gradients, (rows, keys), after dropout."""
        return weights if self.scales is None else weights * self.scales.reshape(weights.shape)

    def before_score_mod(self, ds: Array) -> Array:
        """Returns gradients of the scores before score_mod, (rows, keys), from ds, gradients of the final scores."""
        if self.mod_scores.score is None:
            return ds
        derivative = self.mod_scores.derivatives.get(SCORE)
        if derivative is None:  # score_mod ignores its score
            return np.zeros_like(ds)
        (slope,) = self.values([derivative])
        return _times(ds.reshape(self.raw.shape), slope).reshape(ds.shape)


@dataclass(frozen=True, slots=True, eq=False)
class ModScores:
    """The mods of a call, which change scores and weights, with all arrays as NumPy arrays.

    score, mask: as in `ModSpec`; they load from `arrays`. sinks: (heads_q,). mask_tiles: of a block mask, as from
    `block_mask.mask_tiles_of`; batch or heads may be 1.
    index_offsets: what is added to the indices of query, key, head and sequence for the functions and dropout.
    first_batch, first_key: index of the first sequence and key, if a problem is a part of the call.
    seqlen_q, seqlen_k: lengths of the whole sequence in that case, else None.
    """

    score: Node | None = None
    mask: Node | None = None
    arrays: Sequence[Array] = ()
    sinks: Array | None = None
    dropout_p: float = 0.0
    dropout_seed: int = 0
    mask_tiles: Array | None = None
    index_offsets: IndexOffsets = NO_OFFSETS
    first_batch: int = 0
    first_key: int = 0
    seqlen_q: int | None = None
    seqlen_k: int | None = None

    @classmethod
    def from_spec(cls, mod_spec: ModSpec, named: Mapping[str, Array], options: Options) -> ModScores:
        """Returns the mods of a call. named: the call's arrays by operand name."""
        arrays = [named[each.name] for each in mod_spec.arrays]
        seed = dropout.seed_of(named["dropout_seed"]) if mod_spec.drops else 0
        share = options.dropout_p if mod_spec.drops else 0.0
        more = named.get("sinks"), share, seed, named.get("mask_tiles"), options.index_offsets
        return cls(mod_spec.score, mod_spec.mask, arrays, *more)

    @property
    def derivatives(self) -> dict[Node, Node]:
        """The derivatives of score_mod by the raw score, and by each load."""
        return {} if self.score is None else _derivatives(self.score)

    def values(self, roots: Sequence[Node], indices: Indices, score: Array) -> list[Any]:
        """Returns the values of nodes at the indices of a tile with scores (queries, group, keys)."""
        return evaluate(roots, {**indices, "score": score}, self.arrays, score.dtype.type)

    def indices(self, problem: Problem, batch_idx: int, heads: slice, queries: slice, keys: slice) -> Indices:
        """Returns the indices of scores (queries, heads, keys) of a problem."""
        return {
            "b": self.first_batch + batch_idx,
            "h": np.arange(heads.start, heads.stop)[:, None],
            "q_idx": np.arange(queries.start, queries.stop)[:, None, None],
            "k_idx": self.first_key + np.arange(keys.start, keys.stop),
            "seqlen_q": problem.seqlen_q if self.seqlen_q is None else self.seqlen_q,
            "seqlen_k": problem.seqlen_k if self.seqlen_k is None else self.seqlen_k,
            **dict(zip(INDEX_OFFSETS, self.index_offsets, strict=False)),
        }

    def sees_none(self, batch_idx: int, heads: slice, queries: slice, keys: slice) -> bool:
        """Returns True if these queries see none of these keys, according to the mask tiles."""
        if self.mask_tiles is None:
            return False
        b = self.first_batch + batch_idx if self.mask_tiles.shape[0] > 1 else 0
        of_heads = self.mask_tiles[b, heads if self.mask_tiles.shape[1] > 1 else slice(1)]
        ranges = (queries.start, queries.stop), (self.first_key + keys.start, self.first_key + keys.stop)
        rows, columns = (slice(begin // MASK_TILE, -(-end // MASK_TILE)) for begin, end in ranges)
        return not (of_heads[:, rows, columns] != EMPTY).any()

    def change(self, indices: Indices, s: Array) -> ModTile:
        """Applies mods to the scaled and capped scores of a tile, (queries, group, keys), in place."""
        raw = s.copy()
        if self.score is not None:
            s[...] = self.values([self.score], indices, raw)[0]
        if self.mask is not None:
            visible = self.values([self.mask], indices, raw)[0]
            np.copyto(s, -np.inf, where=~np.broadcast_to(visible, s.shape))
        np.copyto(s, -np.inf, where=s <= LEAST_SCORE)
        drops = self.dropout_p > 0
        scales = dropout.scales_at(indices, self.dropout_seed, self.dropout_p, s.dtype) if drops else None
        return ModTile(self, indices, raw, scales)

    def with_sinks(self, heads: slice, o: Array, lse: Array) -> tuple[Array, Array]:
        """Returns the state of rows, o (rows, head_dim_v) and lse (rows,), with sinks. Rows are (query, head)."""
        if self.sinks is None:
            return o, lse
        share, total = shared_with(np.resize(self.sinks[heads], len(lse)), lse)
        return o * share[:, None], total


class ModGradients:
    """Sums of the gradients of captured arrays, from which score_mod loads, and of sinks.

    arrays: the sums by index of the array; arrays of bools and integers have none. array_numbers: indices of the arrays
    with a sum, by default all.
    """

    def __init__(
        self, mod_scores: ModScores, dtype: np.dtype[Any], array_numbers: Collection[int] | None = None
    ) -> None:
        self.mod_scores = mod_scores
        loads = [each for each in mod_scores.derivatives if each.op == "load" and each.type.is_float]
        numbers = {each.value for each in loads} if array_numbers is None else array_numbers
        self._loads = [each for each in loads if each.value in numbers]
        self.arrays = {n: np.zeros(mod_scores.arrays[n].shape, dtype) for n in numbers if n < len(mod_scores.arrays)}
        self.sinks = None if mod_scores.sinks is None else np.zeros(mod_scores.sinks.shape, dtype)

    def add(self, tile: ModTile, ds: Array) -> None:
        """Adds the contribution of a tile. ds: the gradients of its final scores."""
        for load in self._loads:
            total = self.arrays[load.value]
            slope, *indices = tile.values([self.mod_scores.derivatives[load], *load.arguments])
            indices = [place_of(index, length) for index, length in zip(indices, total.shape, strict=True)]
            if not indices:  # an array without axes: every score loads its one element
                total += _times(ds, slope).sum()
            elif total.size:
                np.add.at(total, tuple(np.broadcast_to(each, ds.shape) for each in indices), _times(ds, slope))

    def add_sinks(self, dout: Array, out: Array, lse: Array, dlse: Array | None) -> None:
        """Adds the contribution of rows to the sinks.

        dout and out are (batch, seqlen_q, heads_q, dv), lse and dlse (batch, heads_q, seqlen_q).
        """
        if self.sinks is None or self.mod_scores.sinks is None:
            return
        dtype, sinks = self.sinks.dtype, self.mod_scores.sinks.astype(self.sinks.dtype)[:, None]
        delta = (dout.astype(dtype) * out.astype(dtype)).sum(axis=3).swapaxes(1, 2)
        share = np.where(np.isneginf(sinks), 0, np.exp(sinks - lse))
        self.sinks += (share * ((0 if dlse is None else dlse) - delta)).sum(axis=(0, 2))


_derivatives = lru_cache(maxsize=64)(differentiate)


def shared_with(sinks: Array, lse: Array) -> tuple[Array, Array]:
    """Returns (fraction of the weights that keys keep beside sinks, lse with sinks)."""
    total = np.logaddexp(lse, sinks.astype(lse.dtype))
    return np.exp(np.where(np.isneginf(lse), -np.inf, lse - total)), total


def _times(ds: Array, slope: Any) -> Array:
    # A hidden key has ds = 0, but its slope may be inf or NaN, and 0 * inf is NaN.
    product: Array = np.where(ds == 0, ds.dtype.type(0), ds * slope)
    return product
