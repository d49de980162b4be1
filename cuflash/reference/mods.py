"""Mods: functions of scores and places, bias, sinks and dropout.

s = score(c tanh(softmax_scale q kᵀ / c)), then -inf where mask_mod or the mask of the options hides the key; a score of
at most -1e37 weighs nothing either. A bias is a part of the score, and one of bools of the mask. Where functions are,
`b`, `h`, `q_idx` and `k_idx` are the sequence, the query head, and the places of query and key in it.

With a sink x, one more logit of each head that has no value: lse' = ln(exp(lse) + exp(x)), out' = out exp(lse - lse').
Dropout multiplies a weight by 0, or by 1 / (share that is kept), where it meets v; lse stays as it is.

Of ds, the gradient of the final scores (`backward`), an array has the sum of ds times the derivative by each load from
it, and a sink Σ exp(x - lse') (dlse - rowsum(dout ∘ out)).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..mods.graph.derivative import differentiate
from ..mods.graph.graph import Node
from ..problem.mod_arrays import MASK_TILE
from ..problem.mod_spec import LEAST_SCORE, SCORE, ModSpec
from ..problem.problem import Problem
from . import dropout
from .block_mask import EMPTY
from .evaluate import evaluate, place_of

Array = NDArray[Any]
# The indices b, h, q_idx and k_idx of the scores of a tile, which are broadcast together, and the numbers seqlen_q and
# seqlen_k.
Places = Mapping[str, Any]


class ModTile(NamedTuple):
    """The scores of a tile, (queries, group, keys), before mods change them, and what dropout keeps.

    mod_scores: what changed them. scales: what the weights are multiplied by, None for 1.
    """

    mod_scores: ModScores
    places: Places
    raw: Array
    scales: Array | None

    def values(self, roots: Sequence[Node]) -> list[Any]:
        """The values of nodes at all places of the tile."""
        return self.mod_scores.values(roots, self.places, self.raw)

    def dropped(self, weights: Array) -> Array:
        """Weights, or gradients of what v is multiplied by, (rows, keys), after dropout."""
        return weights if self.scales is None else weights * self.scales.reshape(weights.shape)

    def before_score_mod(self, ds: Array) -> Array:
        """The gradients of the scores before they change, (rows, keys), from those of the final ones, ds."""
        if self.mod_scores.score is None:
            return ds
        derivative = self.mod_scores.derivatives.get(SCORE)
        if derivative is None:  # the score that was is not asked for
            return np.zeros_like(ds)
        (slope,) = self.values([derivative])
        return _times(ds.reshape(self.raw.shape), slope).reshape(ds.shape)


@dataclass(frozen=True, slots=True, eq=False)
class ModScores:
    """The mods of a call, which change scores and weights, with all arrays as NumPy's.

    score, mask: those of `ModSpec`, which load from `arrays`. sinks: (heads_q,). mask_tiles: those of a block mask, as
    `block_mask.mask_tiles_of` makes them; batch or heads may be 1. Where a problem is a part of the call: first_batch
    and first_key are the numbers of its first sequence and key, and seqlen_q and seqlen_k the lengths of its sequence,
    None for its own.
    """

    score: Node | None = None
    mask: Node | None = None
    arrays: Sequence[Array] = ()
    sinks: Array | None = None
    dropout_p: float = 0.0
    dropout_seed: int = 0
    mask_tiles: Array | None = None
    first_batch: int = 0
    first_key: int = 0
    seqlen_q: int | None = None
    seqlen_k: int | None = None

    @classmethod
    def from_spec(cls, mod_spec: ModSpec, named: Mapping[str, Array], dropout_p: float) -> ModScores:
        """Returns the mods of a call, with its arrays by the names of its operands."""
        arrays = [named[each.name] for each in mod_spec.arrays]
        seed = dropout.seed_of(named["dropout_seed"]) if mod_spec.drops else 0
        share = dropout_p if mod_spec.drops else 0.0
        return cls(mod_spec.score, mod_spec.mask, arrays, named.get("sinks"), share, seed, named.get("mask_tiles"))

    @property
    def derivatives(self) -> dict[Node, Node]:
        """The derivatives of the score by the raw score, and by each load."""
        return {} if self.score is None else _derivatives(self.score)

    def values(self, roots: Sequence[Node], places: Places, score: Array) -> list[Any]:
        """The values of nodes at the places of a tile, whose scores are (queries, group, keys)."""
        return evaluate(roots, {**places, "score": score}, self.arrays, score.dtype.type)

    def places(self, problem: Problem, batch_idx: int, heads: slice, queries: slice, keys: slice) -> Places:
        """The indices of scores (queries, heads, keys) of a problem."""
        return {
            "b": self.first_batch + batch_idx,
            "h": np.arange(heads.start, heads.stop)[:, None],
            "q_idx": np.arange(queries.start, queries.stop)[:, None, None],
            "k_idx": self.first_key + np.arange(keys.start, keys.stop),
            "seqlen_q": problem.seqlen_q if self.seqlen_q is None else self.seqlen_q,
            "seqlen_k": problem.seqlen_k if self.seqlen_k is None else self.seqlen_k,
        }

    def sees_none(self, batch_idx: int, heads: slice, queries: slice, keys: slice) -> bool:
        """Returns whether these queries see none of these keys, as far as the mask tiles show."""
        if self.mask_tiles is None:
            return False
        b = self.first_batch + batch_idx if self.mask_tiles.shape[0] > 1 else 0
        of_heads = self.mask_tiles[b, heads if self.mask_tiles.shape[1] > 1 else slice(1)]
        ranges = (queries.start, queries.stop), (self.first_key + keys.start, self.first_key + keys.stop)
        rows, columns = (slice(begin // MASK_TILE, -(-end // MASK_TILE)) for begin, end in ranges)
        return not (of_heads[:, rows, columns] != EMPTY).any()

    def change(self, places: Places, s: Array) -> ModTile:
        """Changes the scores of a tile, (queries, group, keys), which are scaled and capped, in place."""
        raw = s.copy()
        if self.score is not None:
            s[...] = self.values([self.score], places, raw)[0]
        if self.mask is not None:
            visible = self.values([self.mask], places, raw)[0]
            np.copyto(s, -np.inf, where=~np.broadcast_to(visible, s.shape))
        np.copyto(s, -np.inf, where=s <= LEAST_SCORE)
        drops = self.dropout_p > 0
        scales = dropout.scales_at(places, self.dropout_seed, self.dropout_p, s.dtype) if drops else None
        return ModTile(self, places, raw, scales)

    def with_sinks(self, heads: slice, o: Array, lse: Array) -> tuple[Array, Array]:
        """The state of rows, o (rows, head_dim_v) and lse (rows,), with sinks. Heads of one query follow each other."""
        if self.sinks is None:
            return o, lse
        share, total = shared_with(np.resize(self.sinks[heads], len(lse)), lse)
        return o * share[:, None], total


class ModGradients:
    """Sums of the gradients of captured arrays, which the score loads from, and of sinks.

    arrays: by the numbers of the arrays; those of bools and integers have none. array_numbers: which, by default all.
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
        """Adds what the final scores of a tile, whose gradients are ds, give."""
        for load in self._loads:
            total = self.arrays[load.value]
            slope, *indices = tile.values([self.mod_scores.derivatives[load], *load.arguments])
            indices = [place_of(index, length) for index, length in zip(indices, total.shape, strict=True)]
            if not indices:  # an array without axes, whose one element every score loads
                total += _times(ds, slope).sum()
            elif total.size:
                np.add.at(total, tuple(np.broadcast_to(each, ds.shape) for each in indices), _times(ds, slope))

    def add_sinks(self, dout: Array, out: Array, lse: Array, dlse: Array | None) -> None:
        """Adds what rows give, dout and out (batch, seqlen_q, heads_q, dv), lse and dlse (batch, heads_q, seqlen_q)."""
        if self.sinks is None or self.mod_scores.sinks is None:
            return
        dtype, sinks = self.sinks.dtype, self.mod_scores.sinks.astype(self.sinks.dtype)[:, None]
        delta = (dout.astype(dtype) * out.astype(dtype)).sum(axis=3).swapaxes(1, 2)
        share = np.where(np.isneginf(sinks), 0, np.exp(sinks - lse))
        self.sinks += (share * ((0 if dlse is None else dlse) - delta)).sum(axis=(0, 2))


_derivatives = lru_cache(maxsize=64)(differentiate)


def shared_with(sinks: Array, lse: Array) -> tuple[Array, Array]:
    """(share of the weights that keys keep, lse) where sinks are counted, too."""
    total = np.logaddexp(lse, sinks.astype(lse.dtype))
    return np.exp(np.where(np.isneginf(lse), -np.inf, lse - total)), total


def _times(ds: Array, slope: Any) -> Array:
    # why: a hidden key has a gradient of 0, but its derivative may be anything.
    product: Array = np.where(ds == 0, ds.dtype.type(0), ds * slope)
    return product
