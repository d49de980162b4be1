"""Scores and masks of the caller's own in tests: a table of functions and arrays, the calls, and what was launched.

Each entry makes the arguments of a call from what puts a NumPy array into the library of the call, and a `Case`. Code
depends on dtypes and ranks of arrays alone, so one kernel serves an entry at all lengths: tests take few entries and
many shapes, for a new kernel takes seconds to compile.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
from libraries import host, identical
from own_oracle import Given, Own, check, check_gradients
from sequences import Made

import cuflash
from cuflash.bench.cases import Case, numpy_dtype
from cuflash.mods import masks, scores
from cuflash.runtime import launch

Put = Callable[[Any], Any]
Arguments = dict[str, Any]
Maker = Callable[[Put, Case], Arguments]


def drawn(name: str, *shape: int) -> Any:
    """Normal numbers in float32, the same for the same name."""
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)


def slopes_of(of: Case) -> Any:
    return np.linspace(0.05, 0.8, of.heads_q).astype(np.float32)


# Scores.


def alibi(put: Put, of: Case) -> Arguments:
    slopes = put(slopes_of(of))
    return {"score_mod": scores.alibi(slopes), "captured_grads": (slopes,)}


def alibi_of_paper(put: Put, of: Case) -> Arguments:
    return {"score_mod": scores.alibi(of.heads_q)}


def relative_position(put: Put, of: Case) -> Arguments:
    table = put(drawn("relative", 32, of.heads_q))
    return {"score_mod": scores.relative_position(table, bidirectional=True), "captured_grads": (table,)}


def softcap(put: Put, of: Case) -> Arguments:
    return {"score_mod": scores.softcap(2.0)}


def tilted(put: Put, of: Case) -> Arguments:
    slopes = put(slopes_of(of) / 8)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return score * (1.0 + 0.125 * b) - slopes[h] * abs(q_idx - k_idx)

    return {"score_mod": score_mod, "captured_grads": (slopes,)}


def bounded(put: Put, of: Case) -> Arguments:
    """A bound on scores, and a table whose index is outside of it for most: it wraps once, then it is clamped."""
    table = put(drawn("bounded", of.heads_q, 9))

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return 2.0 * np.tanh(score / 2.0) + table[h, q_idx - k_idx]

    return {"score_mod": score_mod, "captured_grads": (table,)}


def without_score(put: Put, of: Case) -> Arguments:
    table = put(drawn("without", of.heads_q, 9))

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return table[h, k_idx % 9] * 2.0

    return {"score_mod": score_mod, "captured_grads": (table,)}


def least(put: Put, of: Case) -> Arguments:
    """Every third key is hidden by the least number, as models do it; some rows see nothing at all."""

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return np.where((k_idx % 3 == 0) | (q_idx % 50 == 7), -3.4028234663852886e38, score * 1.5)

    return {"score_mod": score_mod}


def empty_and_one(put: Put, of: Case) -> Arguments:
    """An array of no elements, whose loads are 0, and an array without axes."""
    empty, factor = put(np.zeros(0, np.float32)), put(np.array(1.25, np.float32))

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return factor * score + empty[q_idx] + 0.25

    return {"score_mod": score_mod, "captured_grads": (factor, empty)}


# Masks.


def bounds_of(of: Case, count: int = 4) -> Any:
    """Where documents begin: the first is short, and the second is empty."""
    first, more = of.seqlen_k // 7, count - 2
    begins = [first + (of.seqlen_k - first) * i // more for i in range(more + 1)]
    return np.array([0, first, *begins], np.int32)


def document(put: Put, of: Case) -> Arguments:
    return {"mask_mod": masks.document(put(bounds_of(of)))}


def causal_document(put: Put, of: Case) -> Arguments:
    return {"mask_mod": masks.and_masks(masks.document(put(bounds_of(of))), masks.causal)}


def prefix(put: Put, of: Case) -> Arguments:
    return {"mask_mod": masks.prefix_lm(put(np.array([of.seqlen_k // (b + 2) for b in range(of.batch)], np.int32)))}


def segments(put: Put, of: Case) -> Arguments:
    """Numbers that come again, in runs of up to 90 tokens, so that there are cells of all three kinds."""
    random = np.random.default_rng(3)
    ids = np.repeat(random.integers(0, 3, (of.batch, 600)), 45, axis=1)[:, : of.seqlen_k]
    return {"mask_mod": masks.segments(put(ids.astype(np.int32)))}


def chunked(put: Put, of: Case) -> Arguments:
    return {"mask_mod": masks.chunked(80)}


def global_window(put: Put, of: Case) -> Arguments:
    return {"mask_mod": masks.global_window(5, 40)}


def striped(put: Put, of: Case) -> Arguments:
    """Differs by heads and sequences; the first rows see nothing."""

    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return ((q_idx + k_idx + h) % 3 > 0) & (q_idx > 2 + b)

    return {"mask_mod": mask_mod}


# Bias: its shape in terms of (batch, heads_q, seqlen_q, seqlen_k), of which any may be 1 and the first may be left out.
SHAPES = ("bhqk", "1hqk", "b1qk", "11qk", "bh1k", "b11k", "bhq1", "1h11", "hqk", "qk", "1111")


def shape_of(letters: str, of: Case) -> tuple[int, ...]:
    lengths = {"b": of.batch, "h": of.heads_q, "q": of.seqlen_q, "k": of.seqlen_k, "1": 1}
    return tuple(lengths[letter] for letter in letters)


def bias_of(letters: str, dtype: str = "float32", view: Callable[[Any], Any] = lambda x: x) -> Maker:
    def make(put: Put, of: Case) -> Arguments:
        numbers = drawn(letters, *shape_of(letters, of))
        bias = view(put(numbers > -0.8 if dtype == "bool" else numbers.astype(numpy_dtype(dtype))))
        return {"bias": bias, "captured_grads": () if dtype == "bool" else (bias,)}

    return make


def sinks_of(dtype: str = "float32") -> Maker:
    def make(put: Put, of: Case) -> Arguments:
        numbers = np.linspace(-1.0, 3.0, of.heads_q)
        numbers[-1] = -np.inf
        sinks = put(numbers.astype(numpy_dtype(dtype)))
        return {"sinks": sinks, "captured_grads": (sinks,)}

    return make


def dropped(put: Put, of: Case) -> Arguments:
    return {"dropout_p": 0.3, "dropout_seed": put(np.array(2**40 + 7, np.int64))}


def joined(*makers: Maker) -> Maker:
    """All of them in one call."""

    def make(put: Put, of: Case) -> Arguments:
        made: Arguments = {"captured_grads": ()}
        for each in makers:
            more = each(put, of)
            wanted = made["captured_grads"] + more.pop("captured_grads", ())
            made |= {**more, "captured_grads": wanted}
        return made

    return make


everything = joined(bounded, segments, bias_of("bh1k"), sinks_of())
FUNCTIONS: dict[str, Maker] = {
    "alibi": alibi,
    "alibi_of_paper": alibi_of_paper,
    "relative_position": relative_position,
    "softcap": softcap,
    "tilted": tilted,
    "bounded": bounded,
    "without_score": without_score,
    "least": least,
    "empty_and_one": empty_and_one,
    "document": document,
    "causal_document": causal_document,
    "prefix": prefix,
    "segments": segments,
    "chunked": chunked,
    "global_window": global_window,
    "striped": striped,
    "sinks": sinks_of(),
    "everything": everything,
}


# Calls.

SMALL = Case("own", 2, 300, 300, 4, 2, 64, 64, "float16")


def of_lengths(lengths: tuple[int, int], case: Case = SMALL, **more: Any) -> Case:
    return replace(case, seqlen_q=lengths[0], seqlen_k=lengths[1], **more)


def own_of(make: Maker, of: Case) -> Own:
    return Own.of(make(lambda x: x, of))


def without_grads(arguments: Arguments) -> Arguments:
    return {name: x for name, x in arguments.items() if name != "captured_grads"}


def forward(make: Maker, of: Case, put: Put, arrays: Sequence[Any], **more: Any) -> Any:
    """`(out, lse)` of a dense call."""
    own = without_grads(make(put, of))
    return cuflash.forward(*arrays, return_lse=True, **of.arguments(), **own, **more)


def check_forward(make: Maker, of: Case, put: Put, *, with_lse: bool = False, seed: int = 0, **more: Any) -> Any:
    """A dense call, held against float64, and perhaps `cuflash.lse`. Returns out and lse."""
    arrays = of.arrays(seed)
    there = [put(x) for x in arrays]
    found = forward(make, of, put, there, **more)
    given, own = Given.dense(of, arrays), own_of(make, of)
    check(given, own, *found)
    if with_lse:
        told = {name: x for name, x in without_grads(make(put, of)).items() if not name.startswith("dropout")}
        check(given, own, None, cuflash.lse(*there[:2], **of.arguments(), **told))
    return found


def check_backward(
    make: Maker, of: Case, put: Put, *, grads: bool = False, dlse: bool = True, seed: int = 0, checked: bool = True,
    **more: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Gradients of a dense call, held against float64 unless they are those of a call again. Returns all, flat."""
    arrays, random = of.arrays(seed), np.random.default_rng(seed + 7)
    dout = random.standard_normal(of.out_shape()).astype(numpy_dtype(of.dtype))
    of_lse = random.standard_normal((of.batch, of.heads_q, of.seqlen_q)).astype(np.float32) if dlse else None
    there, own = [put(x) for x in arrays], make(put, of)
    wanted = own.pop("captured_grads", ())
    out, lse = cuflash.forward(*there, return_lse=True, **of.arguments(), **own)
    more |= {"captured_grads": wanted} if grads else {}
    upstream = {"dlse": None if of_lse is None else put(of_lse)}
    found = cuflash.backward(put(dout), *there, out, lse, **upstream, **of.arguments(), **own, **more)
    of_arrays = found[3] if grads else ()
    for got, like in zip((*found[:3], *of_arrays), (*there, *wanted), strict=False):
        assert (tuple(got.shape), got.dtype) == (tuple(like.shape), like.dtype)
    if checked:
        check_gradients(Given.dense(of, arrays), own_of(make, of), dout, of_lse, found[:3], of_arrays)
    return (*found[:3], *of_arrays)


def check_repeated(make: Maker, of: Case, put: Put, **more: Any) -> None:
    """Deterministic gradients, held against float64, and bitwise the same when they are made again."""
    first = check_backward(make, of, put, deterministic=True, **more)
    assert identical(check_backward(make, of, put, deterministic=True, checked=False, **more), first)


def bounds_case(made: Made) -> Case:
    """What a function is told of several lengths: their number and their bounds."""
    of, problem = made.of, (len(made.of.queries), max(made.of.queries, default=0), max(made.of.keys, default=0))
    return Case(of.name, *problem, *of.heads, *of.dims, of.dtype)


def dense_of(made: Made, number: int, x: str, rows: Any) -> Any:
    """The rows of one sequence, as a batch of one."""
    return np.ascontiguousarray(getattr(made, x)[rows[number]])[None]


@contextmanager
def launched() -> Iterator[list[Any]]:
    """The plans of what is launched meanwhile."""
    launch_it, ran = launch.Kernels.launch, []

    def noted(kernels: Any, *arguments: Any) -> Any:
        ran.append(kernels.plan)
        return launch_it(kernels, *arguments)

    with mock.patch.object(launch.Kernels, "launch", noted):
        yield ran


def names_of(plans: Sequence[Any]) -> list[str]:
    """The kernels of plans."""
    return [each.variant.name for plan in plans for each in plan.launches]


def kept(x: Any) -> Any:
    """A copy in host memory."""
    return np.array(host(x))
