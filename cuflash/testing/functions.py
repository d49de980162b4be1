"""Table of score_mods, mask_mods, biases and other mods: each entry builds the arguments of a call.

An entry takes `put`, which converts a NumPy array to the library of the call, and a `Case`. Code depends on dtypes and
ranks of arrays alone, so one kernel serves an entry at all lengths.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

import cuflash

from ..mods import masks, scores
from .cases import Case, numpy_dtype

Put = Callable[[Any], Any]
Arguments = dict[str, Any]
Maker = Callable[[Put, Case], Arguments]


def drawn(name: str, *shape: int) -> Any:
    """Returns normal random numbers in float32, seeded by the name."""
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)


def slopes_of(case: Case) -> Any:
    """Returns a slope for each query head."""
    return np.linspace(0.05, 0.8, case.heads_q).astype(np.float32)


# Scores.


def alibi(put: Put, case: Case) -> Arguments:
    """Builds ALiBi with slopes that get gradients."""
    slopes = put(slopes_of(case))
    return {"score_mod": scores.alibi(slopes), "captured_grads": (slopes,)}


def alibi_of_paper(put: Put, case: Case) -> Arguments:
    """Builds ALiBi with the slopes of its paper."""
    return {"score_mod": scores.alibi(case.heads_q)}


def relative_position(put: Put, case: Case) -> Arguments:
    """Builds T5's bias by buckets of distances."""
    table = put(drawn("relative", 32, case.heads_q))
    return {"score_mod": scores.relative_position(table, bidirectional=True), "captured_grads": (table,)}


def softcap(put: Put, case: Case) -> Arguments:
    """Builds a softcap as a score_mod."""
    return {"score_mod": scores.softcap(2.0)}


def tilted(put: Put, case: Case) -> Arguments:
    """Builds slopes of heads, and a factor that differs by sequence."""
    slopes = put(slopes_of(case) / 8)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return score * (1.0 + 0.125 * b) - slopes[h] * abs(q_idx - k_idx)

    return {"score_mod": score_mod, "captured_grads": (slopes,)}


def bounded(put: Put, case: Case) -> Arguments:
    """Builds a softcap plus a table whose index is mostly out of range: it wraps once, then it is clamped."""
    table = put(drawn("bounded", case.heads_q, 9))

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return 2.0 * np.tanh(score / 2.0) + table[h, q_idx - k_idx]

    return {"score_mod": score_mod, "captured_grads": (table,)}


def without_score(put: Put, case: Case) -> Arguments:
    """Builds a score_mod that replaces scores by numbers of a table."""
    table = put(drawn("without", case.heads_q, 9))

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return table[h, k_idx % 9] * 2.0

    return {"score_mod": score_mod, "captured_grads": (table,)}


def least(put: Put, case: Case) -> Arguments:
    """Builds a score_mod that hides every third key by the least number, as models do; some rows see no key."""

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return np.where((k_idx % 3 == 0) | (q_idx % 50 == 7), -3.4028234663852886e38, score * 1.5)

    return {"score_mod": score_mod}


def empty_and_one(put: Put, case: Case) -> Arguments:
    """Builds a score_mod with an array of no elements, whose loads are 0, and an array without axes."""
    empty, factor = put(np.zeros(0, np.float32)), put(np.array(1.25, np.float32))

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return factor * score + empty[q_idx] + 0.25

    return {"score_mod": score_mod, "captured_grads": (factor, empty)}


# Masks.


def bounds_of(case: Case, count: int = 4) -> Any:
    """Returns the bounds of documents, of which the first is short, and the second is empty."""
    first, more = case.seqlen_k // 7, count - 2
    begins = [first + (case.seqlen_k - first) * i // more for i in range(more + 1)]
    return np.array([0, first, *begins], np.int32)


def document(put: Put, case: Case) -> Arguments:
    """Builds a mask of consecutive documents."""
    return {"mask_mod": masks.document(put(bounds_of(case)))}


def causal_document(put: Put, case: Case) -> Arguments:
    """Builds a causal mask of consecutive documents."""
    return {"mask_mod": masks.and_masks(masks.document(put(bounds_of(case))), masks.causal)}


def prefix(put: Put, case: Case) -> Arguments:
    """Builds a mask with a prefix of each sequence that all queries see."""
    return {"mask_mod": masks.prefix_lm(put(np.array([case.seqlen_k // (b + 2) for b in range(case.batch)], np.int32)))}


def segments(put: Put, case: Case) -> Arguments:
    """Builds segments with repeated ids, in runs of at least 45 tokens, so that all three kinds of mask tiles occur."""
    random = np.random.default_rng(3)
    ids = np.repeat(random.integers(0, 3, (case.batch, 600)), 45, axis=1)[:, : case.seqlen_k]
    return {"mask_mod": masks.segments(put(ids.astype(np.int32)))}


def chunked(put: Put, case: Case) -> Arguments:
    """Builds a mask of chunks of 80 tokens."""
    return {"mask_mod": masks.chunked(80)}


def global_window(put: Put, case: Case) -> Arguments:
    """Builds a window with five tokens that all queries see."""
    return {"mask_mod": masks.global_window(5, 40)}


def striped(put: Put, case: Case) -> Arguments:
    """Builds a mask that differs by head and sequence; the first rows see no key."""

    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return ((q_idx + k_idx + h) % 3 > 0) & (q_idx > 2 + b)

    return {"mask_mod": mask_mod}


# Axes of biases: (batch, heads_q, seqlen_q, seqlen_k); any may be 1, and leading ones may be omitted.
SHAPES = ("bhqk", "1hqk", "b1qk", "11qk", "bh1k", "b11k", "bhq1", "1h11", "hqk", "qk", "1111")


def shape_of(letters: str, case: Case) -> tuple[int, ...]:
    """Returns the shape of a bias with these axes."""
    lengths = {"b": case.batch, "h": case.heads_q, "q": case.seqlen_q, "k": case.seqlen_k, "1": 1}
    return tuple(lengths[letter] for letter in letters)


def bias_of(letters: str, dtype: str = "float32", view: Callable[[Any], Any] = lambda x: x) -> Maker:
    """Returns the maker of a bias with these axes, passed through `view`."""

    def make(put: Put, case: Case) -> Arguments:
        numbers = drawn(letters, *shape_of(letters, case))
        bias = view(put(numbers > -0.8 if dtype == "bool" else numbers.astype(numpy_dtype(dtype))))
        return {"bias": bias, "captured_grads": () if dtype == "bool" else (bias,)}

    return make


def sinks_of(dtype: str = "float32") -> Maker:
    """Returns the maker of a sink for each head; the last sink is -inf."""

    def make(put: Put, case: Case) -> Arguments:
        numbers = np.linspace(-1.0, 3.0, case.heads_q)
        numbers[-1] = -np.inf
        sinks = put(numbers.astype(numpy_dtype(dtype)))
        return {"sinks": sinks, "captured_grads": (sinks,)}

    return make


def dropped(put: Put, case: Case) -> Arguments:
    """Builds dropout with a seed on the device."""
    return {"dropout_p": 0.3, "dropout_seed": put(np.array(2**40 + 7, np.int64))}


def joined(*makers: Maker) -> Maker:
    """Returns the maker of a call with the mods of all these makers."""

    def make(put: Put, case: Case) -> Arguments:
        arguments: Arguments = {"captured_grads": ()}
        for each in makers:
            more = each(put, case)
            captured_grads = arguments["captured_grads"] + more.pop("captured_grads", ())
            arguments |= {**more, "captured_grads": captured_grads}
        return arguments

    return make


LENGTHS = "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"


def blocked(make: Maker, **varlen_kwargs: Any) -> Maker:
    """Returns a maker that adds a block mask of the mask_mod, if any. varlen_kwargs: NumPy arrays of lengths."""

    def blocked_make(put: Put, case: Case) -> Arguments:
        arguments = make(put, case)
        if (mask_mod := arguments.get("mask_mod")) is not None:
            sizes = case.batch, case.heads_q, case.seqlen_q, case.seqlen_k
            lengths = {name: put(varlen_kwargs[name]) for name in LENGTHS if name in varlen_kwargs}
            arguments["block_mask"] = cuflash.create_block_mask(mask_mod, *sizes, like=put(np.zeros(1)), **lengths)
        return arguments

    return blocked_make


everything = joined(bounded, segments, bias_of("bh1k"), sinks_of())
_MAKERS = (
    alibi, alibi_of_paper, relative_position, softcap, tilted, bounded, without_score, least, empty_and_one, document,
    causal_document, prefix, segments, chunked, global_window, striped,
)  # fmt: skip
FUNCTIONS: dict[str, Maker] = {
    **{make.__name__: make for make in _MAKERS},
    "sinks": sinks_of(),
    "everything": everything,
}
