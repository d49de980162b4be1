"""Variable-length sequences: problems, their arrays, and expected results in float64.

A `Sequences` has the lengths of each sequence and the kinds of arrays that hold them. `varlen_arrays` draws the arrays
and records the rows of each sequence; every other row holds NaN. Expected results are assembled sequence by sequence
from `oracle`, without code of `cuflash.reference.sequences`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import cuflash

from . import oracle
from .cases import MASK_AND_SCALE, Case, numpy_dtype
from .draw import DTYPES, Draw
from .gradients import BackwardArgs, units_of
from .layouts import even_start, host, laid_out, odd_start
from .oracle import ULPS, Array, demand

FAR = 2**31 - 1
Index = tuple[Array, Array]  # first and second index of each row of a sequence


@dataclass(frozen=True, slots=True)
class Sequences:
    """A batch of sequences. place_q: "packed" or "rectangle"; place_k also "cache" (cache_batch_idx) or "paged".

    used_q, used_k: True if seqused_q or seqused_k is given; spare_q and spare_k are then unused rows of each sequence.
    gaps: packed rows before the first sequence (0 for host arrays), and after the last. bounded: True if max_seqlen_q
    and max_seqlen_k are given.
    """

    name: str
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    place_q: str = "packed"
    place_k: str = "packed"
    used_q: bool = False
    used_k: bool = False
    spare_q: tuple[int, ...] = ()
    spare_k: tuple[int, ...] = ()
    page_size: int = 16
    gaps: tuple[int, int] = (0, 3)
    bounded: bool = False
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    dtype: str = "float16"
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    diagonal_offset: int | None = None
    softcap: float = 0.0
    softmax_scale: float | None = None

    def one(self, number: int) -> Case:
        """Returns one sequence as a dense problem."""
        lengths = self.queries[number], self.keys[number]
        return Case(self.name, 1, *lengths, *self.heads, *self.dims, self.dtype, **self.options())

    def options(self) -> dict[str, Any]:
        """Returns the mask and scale arguments of the public calls."""
        return {name: getattr(self, name) for name in MASK_AND_SCALE}

    def bounds(self) -> dict[str, int]:
        """Returns the bounds on lengths, if they are given."""
        longest = {"max_seqlen_q": max(self.queries, default=0), "max_seqlen_k": max(self.keys, default=0)}
        return longest if self.bounded else {}

    @property
    def has_gradients(self) -> bool:
        return self.place_k in ("packed", "rectangle")


class Placed(NamedTuple):
    """The rows of the queries, or the keys, of all sequences in an array of `shape`, and the arguments for them."""

    rows: list[Index]
    shape: tuple[int, int]
    varlen_kwargs: dict[str, Array]


class VarlenArrays(NamedTuple):
    """The arrays of a problem, all with four axes, and the rows of each sequence.

    there: for each sequence, True for each existing key; keys in missing pages do not exist.
    """

    sequences: Sequences
    q: Array
    k: Array
    v: Array
    varlen_kwargs: dict[str, Array]
    queries: list[Index]
    keys: list[Index]
    there: list[Array]

    def arguments(self, xp: Any = np, layout: str = "dense") -> dict[str, Any]:
        """Returns all arguments of `cuflash.forward`, with its ranks of arrays, in a memory layout."""
        q, k, v = LAYOUTS[layout](*map(xp.asarray, (self.q, self.k, self.v)))
        if "cu_seqlens_q" in self.varlen_kwargs:
            q = q[0]
        if "cu_seqlens_k" in self.varlen_kwargs:
            k, v = k[0], v[0]
        varlen_kwargs = {name: xp.asarray(x) for name, x in self.varlen_kwargs.items()}
        return {"q": q, "k": k, "v": v, **varlen_kwargs, **self.sequences.options(), **self.sequences.bounds()}

    def with_varlen(self, **varlen_kwargs: Any) -> VarlenArrays:
        """Returns a copy with other arrays of lengths; None removes one."""
        changed = self.varlen_kwargs | {
            name: x if x is None else np.asarray(x, np.int32) for name, x in varlen_kwargs.items()
        }
        return self._replace(varlen_kwargs={name: x for name, x in changed.items() if x is not None})

    def unused(self, side: str) -> Array:
        """Returns True for each row of q, or of k and v, that belongs to no sequence: (first axis, second axis)."""
        mask = np.ones((self.q if side == "q" else self.k).shape[:2], bool)
        for rows in self.queries if side == "q" else self.keys:
            mask[rows] = False
        return mask

    def without_pages(self, seed: int) -> VarlenArrays:
        """Returns a copy in which half of the pages are missing: their indices lie outside the pool."""
        rng, table, pool = np.random.default_rng(seed), self.varlen_kwargs["page_table"].copy(), len(self.k)
        there = []
        for b, count in enumerate(self.sequences.keys):
            pages = np.arange(count) // self.sequences.page_size
            lost = rng.random(table.shape[1]) < 0.5
            table[b, lost] = rng.choice([-1, pool, -FAR - 1, FAR], int(lost.sum()))
            there.append(~lost[pages])
        return self.with_varlen(page_table=table)._replace(there=there)

    def filled(self, value: float) -> VarlenArrays:
        """Returns a copy in which rows of no sequence hold this value."""
        q, k, v = self.q.copy(), self.k.copy(), self.v.copy()
        q[self.unused("q")] = k[self.unused("k")] = v[self.unused("k")] = value
        return self._replace(q=q, k=k, v=v)


def varlen_arrays(problem: Sequences, seed: int = 0) -> VarlenArrays:
    """Returns random arrays of a problem. Rows of no sequence hold NaN; page tables hold junk behind used pages."""
    rng = np.random.default_rng(seed)

    def draw(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return rng.standard_normal(shape).astype(dtype, copy=False)

    return _laid_out(problem, rng, draw).filled(np.nan)


def shaped(problem: Sequences) -> VarlenArrays:
    """Returns arrays of a problem with zeros in q, k and v, which is fast, for checks of shapes, dtypes and strides."""
    return _laid_out(problem, np.random.default_rng(0), np.zeros)


def _laid_out(problem: Sequences, rng: np.random.Generator, draw: Callable[..., Array]) -> VarlenArrays:
    side_q, side_k = (_placed(side, problem, rng) for side in "qk")
    (heads_q, heads_kv), (dim, dim_v), dtype = problem.heads, problem.dims, numpy_dtype(problem.dtype)
    shapes = (*side_q.shape, heads_q, dim), (*side_k.shape, heads_kv, dim), (*side_k.shape, heads_kv, dim_v)
    q, k, v = (draw(shape, dtype) for shape in shapes)
    there = [np.ones(count, bool) for count in problem.keys]
    return VarlenArrays(problem, q, k, v, side_q.varlen_kwargs | side_k.varlen_kwargs, side_q.rows, side_k.rows, there)


def _placed(side: str, problem: Sequences, rng: np.random.Generator) -> Placed:
    used, lengths = (problem.used_q, problem.queries) if side == "q" else (problem.used_k, problem.keys)
    spare = (problem.spare_q if side == "q" else problem.spare_k) or (0,) * len(lengths)
    assert used or not any(spare), "what is spare must be given"
    place = problem.place_q if side == "q" else problem.place_k
    room = [length + more for length, more in zip(lengths, spare, strict=True)]
    if place == "packed":
        placed = _packed(side, problem.gaps, lengths, room)
    elif place == "paged":
        placed = _paged(problem.page_size, lengths, room, rng)
    else:
        placed = _rectangle(lengths, room, rng if place == "cache" else None)
    assert used or place == "packed" or {*lengths} <= {_capacity(placed, problem)}, "what is not used must be given"
    if used:
        placed.varlen_kwargs[f"seqused_{side}"] = np.asarray(lengths, np.int32)
    return placed


def _capacity(placed: Placed, problem: Sequences) -> int:
    table = placed.varlen_kwargs.get("page_table")
    return placed.shape[1] if table is None else table.shape[1] * problem.page_size


def _packed(side: str, gaps: tuple[int, int], lengths: Sequence[int], room: list[int]) -> Placed:
    bounds = gaps[0] + np.cumsum([0, *room])
    rows = [(np.zeros(n, int), begin + np.arange(n)) for n, begin in zip(lengths, bounds[:-1], strict=True)]
    return Placed(rows, (1, int(bounds[-1]) + gaps[1]), {f"cu_seqlens_{side}": bounds.astype(np.int32)})


def _rectangle(lengths: Sequence[int], room: list[int], rng: np.random.Generator | None) -> Placed:
    """Returns one row of the first axis for each sequence, in order.

    With rng, rows of a cache in random order, where the last sequence has the row of the first.
    """
    count, which, varlen_kwargs = len(lengths), np.arange(len(lengths)), {}
    if rng is not None:
        which = rng.permutation(count + 2)[:count].astype(np.int32)
        which[-1:] = which[:1]
        count, varlen_kwargs = count + 2, {"cache_batch_idx": which}
    rows = [(np.full(n, row), np.arange(n)) for n, row in zip(lengths, which, strict=True)]
    return Placed(rows, (count, max(room, default=0)), varlen_kwargs)


def _paged(size: int, lengths: Sequence[int], room: list[int], rng: np.random.Generator) -> Placed:
    """Returns pages in random order. Neighbours share their first pages; entries behind used pages are junk."""
    count = [-(-n // size) for n in lengths]
    pool = sum(count) + 2
    page_ids = rng.permutation(pool)
    table = rng.choice([-1, page_ids[-1], pool, FAR, -FAR - 1], (len(lengths), -(-max(room, default=0) // size)))
    end = 0
    for b, pages in enumerate(count):
        table[b, :pages] = page_ids[end : end + pages]
        end += pages
        shared = min(pages, count[b - 1]) // 2 if b else 0
        table[b, :shared] = table[b - 1, :shared]
    rows = [(table[b, np.arange(n) // size], np.arange(n) % size) for b, n in enumerate(lengths)]
    return Placed(rows, (pool, size), {"page_table": table.astype(np.int32)})


def _halves(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Returns k and v as halves of one row, as in serving stacks: memory (pages, heads, page_size, both dims)."""
    (pages, size, heads, dim), dim_v = k.shape, v.shape[3]
    # np.full_like creates an array in the library of k.
    both = np.full_like(k, np.nan, shape=(pages, heads, size, dim + dim_v)).transpose(0, 2, 1, 3)
    both[..., :dim], both[..., dim:] = k, v
    return q, both[..., :dim], both[..., dim:]


def _one_head(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Returns k and v of one head with unusual strides of the axis of length 1."""
    if k.shape[2] != 1:
        return q, k, v
    return q, k[:, :, 0].copy()[:, :, None], v[:, :, 0].copy()[:, :, None]


def _all(**how: Any) -> Any:
    return lambda *arrays: tuple(laid_out(x, **how) for x in arrays)


# Arrays are surrounded by NaN. Kernels read all layouts directly, except the last, which is copied.
LAYOUTS = {
    "dense": lambda *arrays: arrays,
    "heads_first": _all(axis_order=(0, 2, 1, 3), before=(1, 0, 1, 8)),
    "halves": _halves,
    "every_second": _all(steps=(2, 2, 2, 1), before=(1, 1, 1, 1)),
    "reversed": _all(steps=(-1, -1, -1, 1), before=(1, 1, 1, 8)),
    "odd_start": lambda *arrays: tuple(map(odd_start, arrays)),
    "even_start": lambda *arrays: tuple(map(even_start, arrays)),
    "one_head": _one_head,
    "gaps": _all(steps=(1, 1, 1, 2)),
}


def assembled(inputs: VarlenArrays) -> dict[str, tuple[Array, Array]]:
    """Returns `(exact, naive)` of out (first axis, second axis, heads, dim), and of lse (first axis, heads, second)."""
    problem, axes = inputs.sequences, inputs.q.shape[:3]
    outs = [np.zeros((*axes, problem.dims[1])), np.zeros((*axes, problem.dims[1]))]
    lses = [np.full(axes, -np.inf), np.full(axes, -np.inf)]
    for b, (queries, keys, there) in enumerate(zip(inputs.queries, inputs.keys, inputs.there, strict=True)):
        arrays = inputs.q[queries][None], inputs.k[keys][None], inputs.v[keys][None]
        for compute, out, lse in zip((oracle.attention64, oracle.naive), outs, lses, strict=True):
            result = compute(problem.one(b), *arrays, there)
            out[queries], lse[queries] = result[0][0], result[1][0].T
    exact, near = (lse.swapaxes(1, 2) for lse in lses)
    return {"out": (outs[0], outs[1]), "lse": (exact, near)}


def check(inputs: VarlenArrays, out: Any, *lses: Any) -> None:
    """Checks out, and lse of one or more calls, against float64, and rows of no sequence against 0 and -inf.

    None skips a result. Bounds have a floor in `oracle.units_of`, as short sequences may have no naive errors.
    """
    problem, expected = inputs.sequences, assembled(inputs)
    q, k, v = (np.nan_to_num(x.astype("f8")) for x in (inputs.q, inputs.k, inputs.v))
    scale = problem.softmax_scale or problem.dims[0] ** -0.5
    dtype = problem.dtype if out is None else host(out).dtype.name
    units = dict(zip(("out", "lse"), oracle.units_of(scale, q, k, v, dtype), strict=True))
    for name, got in (("out", out), *(("lse", lse) for lse in lses)):
        if got is not None:
            shape = (expected[name][0][0] if "cu_seqlens_q" in inputs.varlen_kwargs else expected[name][0]).shape
            demand(host(got).shape == shape, f"{name} has the shape {host(got).shape}, expected {shape}")
            full = host(got).reshape(expected[name][0].shape)
            oracle.assert_close(name, full, *expected[name], ulps=max(4, ULPS[problem.dtype]), unit=units[name])
    if out is not None:
        check_unused(inputs, "q", out)


def check_unused(inputs: VarlenArrays, side: str, got: Any) -> None:
    """Checks that rows of no sequence are 0 in out, or in a gradient of this side."""
    unused = inputs.unused(side)
    rows = host(got).reshape(*unused.shape, *got.shape[-2:])[unused]
    demand(not rows.any(), f"rows laid out as {side} that no sequence uses are not 0")


def upstream(inputs: VarlenArrays, seed: int = 7) -> tuple[Array, Array]:
    """Returns `(dout, dlse)` with all axes, and NaN in rows of no sequence."""
    rng, axes = np.random.default_rng(seed), inputs.q.shape[:3]
    dout = rng.standard_normal((*axes, inputs.sequences.dims[1])).astype(inputs.q.dtype)
    dlse = rng.standard_normal(axes).astype("f8" if inputs.sequences.dtype == "float64" else "f4")
    dout[inputs.unused("q")] = dlse[inputs.unused("q")] = np.nan
    return dout, np.ascontiguousarray(dlse.swapaxes(1, 2))


def gradients(
    inputs: VarlenArrays, xp: Any, layout: str = "dense", *, dlse: bool = True, unused: float = np.nan, **more: Any
) -> tuple[Any, ...]:
    """Returns (dq, dk, dv) by `cuflash.backward`. unused: the value of rows of no sequence, also in out and lse."""
    arguments = inputs.arguments(xp, layout)
    out, lse = (host(x).copy() for x in cuflash.forward(**arguments, return_lse=True))
    dout, upstream_lse = (x.reshape(like.shape) for x, like in zip(upstream(inputs), (out, lse), strict=True))
    mask = inputs.unused("q").reshape(out.shape[:-2])
    for x in (out, dout, lse.swapaxes(-1, -2), upstream_lse.swapaxes(-1, -2)):
        x[mask] = unused
    dout, out, lse, upstream_lse = map(xp.asarray, (dout, out, lse, upstream_lse))
    return cuflash.backward(dout, out=out, lse=lse, dlse=upstream_lse if dlse else None, **arguments, **more)


def check_gradients(inputs: VarlenArrays, got: Sequence[Any], *, dlse: bool = True, ulps: float = 2.0) -> None:
    """Checks dq, dk and dv against float64, and rows of no sequence against 0; tolerances as in `gradients.check`.

    ulps: factor of the dtype's units in the floor.
    """
    problem, (dout, upstream_lse) = inputs.sequences, upstream(inputs)
    arrays = inputs.q, inputs.k, inputs.v
    exact, near = ([np.zeros(x.shape) for x in arrays] for _ in range(2))
    for b, (queries, keys) in enumerate(zip(inputs.queries, inputs.keys, strict=True)):
        one = inputs.q[queries][None], inputs.k[keys][None], inputs.v[keys][None]
        dlse_rows = upstream_lse.swapaxes(1, 2)[queries].T[None] if dlse else None
        for compute, results in ((oracle.gradients64, exact), (oracle.naive_gradients, near)):
            of_sequence = compute(problem.one(b), dout[queries][None], *one, dlse_rows)
            for result, part, rows in zip(results, of_sequence, (queries, keys, keys), strict=True):
                result[rows] = part[0]
    units = [0.0, 0.0, 0.0]
    if problem.dtype in ("float32", "float64"):
        near = [x + (x - expected) for x, expected in zip(near, exact, strict=True)]
        of_dout, q, k, v, of_lse = (np.nan_to_num(x.astype("f8")) for x in (dout, *arrays, upstream_lse))
        scale = Case("units", 1, 1, 1, *problem.heads, *problem.dims, problem.dtype, **problem.options())
        units = units_of(scale, BackwardArgs(of_dout, q, k, v, None, None, of_lse if dlse else None))
    sides = ("q", "k", "k")
    for side, x, like, expected, naive, unit in zip(sides, got, arrays, exact, near, units, strict=True):
        kind = host(x).shape, host(x).dtype
        expected_kind = (like[0] if f"cu_seqlens_{side}" in inputs.varlen_kwargs else like).shape, like.dtype
        demand(kind == expected_kind, f"a gradient is {kind}, expected {expected_kind}")
        full = host(x).reshape(like.shape)
        oracle.assert_close("gradient", full, expected, naive, ulps=ulps * ULPS[problem.dtype], unit=unit)
        check_unused(inputs, side, x)


# Lengths and head dims of drawn problems: small ones for any machine, and ones around the tiles of kernels.
FEW, TILED = (0, 1, 2, 5, 9, 14, 17), (0, 1, 2, 63, 64, 65, 127, 128, 129, 200, 300)
SMALL_DIMS = ((8, 8), (16, 16), (5, 9))
KERNEL_DIMS = ((64, 64), (128, 128), (96, 96), (64, 128), (256, 256), (40, 72))


def drawn(
    seed: int,
    lengths: Sequence[int] = FEW,
    dims: Sequence[tuple[int, int]] = SMALL_DIMS,
    *,
    gradients: bool = False,
    dtypes: Sequence[str] = DTYPES,
    batch: Sequence[int] = (0, 1, 2, 3, 5),
) -> Sequences:
    """Returns a problem with a random combination of arguments. gradients: True for one that `backward` takes."""
    draw = Draw(seed)
    one_of, rng = draw.one_of, draw.random

    def some(place: str, used: bool, size: int = 1) -> tuple[int, ...]:
        counts = [one_of(*lengths) for _ in range(count)]
        if place != "packed" and not used:  # all sequences fill the axis, or whole pages
            counts = [-(-one_of(*lengths) // size) * size] * count
        return tuple(counts)

    count = one_of(*batch)
    place_q, place_k = one_of("packed", "rectangle"), one_of("packed", "rectangle", "cache", "paged")
    place_k = one_of("packed", "rectangle") if gradients else place_k
    page_size, heads_kv = one_of(1, 3, 16, 64), one_of(1, 2)
    used_q = one_of(True, False)
    used_k = one_of(True, False) or place_q == place_k == "rectangle"
    return Sequences(
        f"drawn_{seed}",
        some(place_q, used_q),
        some(place_k, used_k, page_size if place_k == "paged" else 1),
        place_q,
        place_k,
        used_q,
        used_k,
        tuple(rng.integers(0, 5, count).tolist()) if used_q else (),
        tuple(rng.integers(0, 5, count).tolist()) if used_k else (),
        page_size,
        gaps=one_of((0, 0), (0, 1), (0, 5)),
        bounded=one_of(True, False),
        heads=(heads_kv * one_of(1, 2, 4), heads_kv),
        dims=one_of(*dims),
        dtype=one_of(*dtypes),
        causal=one_of(True, False),
        window_size=one_of((-1, -1), (-1, -1), (3, -1), (-1, 2), (4, 4), (70, 9)),
        diagonal_offset=one_of(None, None, -3, 0, 4, 1000, -1000),
        softcap=one_of(0.0, 0.0, 5.0),
        softmax_scale=one_of(None, 0.3),
    )
