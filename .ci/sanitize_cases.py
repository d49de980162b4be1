"""Cases of sanitize.py: small problems that reach every row of the tile tables."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from cuflash.arrays.numpy import NUMPY
from cuflash.planning import device, tile_shapes_sm90, tiles_sm80, tiles_sm90
from cuflash.planning.device import DEVICES, Device
from cuflash.problem.array_spec import ArraySpec
from cuflash.problem.operands import VARLEN_OPS
from cuflash.problem.options import Options
from cuflash.problem.problem import Problem
from cuflash.testing import functions
from cuflash.testing.cases import Case
from cuflash.testing.functions import Maker
from cuflash.testing.mods import bounds_case
from cuflash.testing.sequences import FAR, Sequences, VarlenArrays, shaped, varlen_arrays

ALGORITHMS = ("flash2", "flash1", "flashd")
BACKWARD = {"backward": False, "backward_deterministic": True}  # True for deterministic ones
LARGE = 1.0  # softmax_scale: scores are so far apart that rows leave Hopper's main loop
MANY_PIECES = "many_heads"  # name of cases whose thread blocks take more work tiles than they have slots
# Integers that a caller may pass on the device by mistake.
WRONG = np.array([-FAR - 1, -70_000, -1, *range(12), 40, 70_000, FAR - 1, FAR])


def devices() -> list[Device]:
    """Returns this GPU, and copies of it with the shared memory of smaller GPUs."""
    here = device.query(0)
    smaller = {(gpu.smem_per_block, gpu.smem_per_sm) for gpu in DEVICES.values() if gpu.smem_per_sm < here.smem_per_sm}
    sizes = sorted(smaller, reverse=True)
    return [here, *(replace(here, smem_per_block=block, smem_per_sm=whole) for block, whole in sizes)]


def tile_cases() -> Iterator[Case]:
    """Yields for each pair of head dims an aligned causal case, and one with dims - 1, window, softcap and GQA."""
    for dtype, (d, dv) in _dims():
        yield Case(f"{dtype}_{d}_{dv}", 1, 131, 197, 1, 1, d, dv, dtype, causal=True)
        yield Case(f"{dtype}_{d - 1}_{dv - 1}", 1, 70, 150, 2, 1, d - 1, dv - 1, dtype, False, (90, 20), 60, 15.0)


def _dims() -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields each dtype with each pair of head dims in its tables."""
    for dtype, forward in tiles_sm80.TILES.items():
        pairs = [(tile.head_dim, tile.head_dim_v * tile.max_slices) for tile in forward]
        pairs += [(t.head_dim, t.head_dim_v) for t in (*tiles_sm80.BACKWARD[dtype], *tiles_sm80.DQ[dtype])]
        yield from ((dtype, pair) for pair in dict.fromkeys(pairs))


def hopper_cases() -> Iterator[Case]:
    """Yields for each row of sm90 tables a causal case and one with window, softcap and GQA; then other cases."""
    for dtype, tile in itertools.product(("float16", "bfloat16"), tiles_sm90.TILES):
        rows = tiles_sm90.TILES[: tiles_sm90.TILES.index(tile)]
        dims = tile.head_dim, tile.head_dim_v
        least = max((row.max_keys or 0 for row in rows if (row.head_dim, row.head_dim_v) == dims), default=0)
        name = f"{dtype}_{tile.head_dim}_{tile.head_dim_v}_{least}"
        heads = device.query(0).num_sms * 2 // 3 + 1  # of fewer, a tile of fewer rows takes less time
        shape = (tile.block_q - 2, least + 260, heads, heads, *dims) if least else (200, 260, 2, 1, *dims)
        yield Case(name, 1, *shape, dtype, causal=True)
        yield Case(f"{name}_large", 1, *shape, dtype, causal=True, softmax_scale=LARGE)
        yield Case(f"{name}_w", 1, *shape, dtype, False, (least + 90, 20), None, 15.0, LARGE)
    rows = [(tile.head_dim, tile.head_dim_v) for tile in (*tiles_sm90.BACKWARD, *tiles_sm90.DQ_DKV)]
    for dtype, dims in itertools.product(("float16", "bfloat16"), dict.fromkeys(rows)):
        shape, name = (2, 2, *dims, dtype), f"{dtype}_{dims[0]}_{dims[1]}_gradients"
        yield Case(name, 1, 200, 300, *shape, causal=True)
        yield Case(f"{name}_w", 1, 270, 300, *shape, False, (150, 20), 10, 15.0)
        if dims[0] > 128:  # enough tiles for the rings to wrap around
            yield Case(f"{name}_long", 1, 700, 150, *shape)
    for dtype, tile in itertools.product(("float16", "bfloat16"), tiles_sm90.BACKWARD):  # rows for many queries
        for capped in (0.0, 15.0) if tile.min_queries else ():
            shape = 1, tile.min_queries + 8, 200, 1, 1, tile.head_dim, tile.head_dim_v
            yield Case(f"{dtype}_{tile.min_queries}_queries", *shape, dtype, softcap=capped)
        for capped in (0.0, 15.0):  # thread blocks share the query heads of a key block
            name, queries = f"{dtype}_{tile.head_dim}_{tile.min_queries}_parts", max(tile.min_queries + 100, 300)
            shape = queries, 200, 16, 1, tile.head_dim, tile.head_dim_v
            yield Case(name, 1, *shape, dtype, causal=True, diagonal_offset=100, softcap=capped)
    by_rows = dict.fromkeys((tile.head_dim, tile.head_dim_v) for tile in dense_dq_dkv())
    for dtype, dims, capped in itertools.product(("float16", "bfloat16"), by_rows, (0.0, 15.0)):  # shared in dq_dkv
        shape = device.query(0).num_sms // 2 + 1, 200, 100, 8, 1, *dims
        yield Case(f"{dtype}_{dims[0]}_{dims[1]}_sharing", *shape, dtype, causal=True, softcap=capped)
    for causal in (False, True):  # a thread block takes several key blocks
        heads = device.query(0).num_sms
        yield Case(f"key_blocks_{causal}", 4, 300, 520, heads, heads, 64, 64, "bfloat16", causal=causal)
    for dim in (64, 128):  # thread blocks take tiles by a counter
        yield Case(f"counted_{dim}", 2, 70, 130, device.query(0).num_sms, 1, dim, dim, "float16", causal=True)


def dense_dq_dkv() -> list[tile_shapes_sm90.WarpgroupDqDkvTile]:
    """Returns the rows of kernels for one gradient that dense calls without mods take."""
    return [
        row for row in tiles_sm90.DQ_DKV if not tiles_sm90.choose_backward(row.head_dim, row.head_dim_v, 1.0, False)
    ]


def wild(arguments: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Returns the arguments with about half of the integers in their arrays wrong."""
    rng = np.random.default_rng(seed)
    integers = {name: x for name, x in arguments.items() if isinstance(x, np.ndarray) and x.dtype == np.int32}
    return {**arguments, **{
        name: np.where(rng.random(x.shape) < 0.5, rng.choice(WRONG, x.shape), x).astype(np.int32)
        for name, x in integers.items()
    }}  # fmt: skip


@dataclass(frozen=True)
class SequenceCase:
    """A varlen problem. wide: out in float32. wild: half of the integers on the device are wrong."""

    base: Sequences
    wide: bool = False
    wild: bool = False
    num_splits: int = 0

    @property
    def name(self) -> str:
        dims = "_".join(map(str, self.base.dims))
        return f"{self.base.dtype}_{dims}_{self.base.name}{'_wild' if self.wild else ''}"

    @property
    def out_dtype(self) -> str:
        return "float32" if self.wide else self.base.dtype

    def arguments(self) -> dict[str, Any]:
        """Returns all arguments of `cuflash.forward` in NumPy."""
        drawn, more = varlen_arrays(self.base), self._varlen_kwargs() | {"out_dtype": self.out_dtype}
        return (wild(drawn.filled(0.5).arguments(), seed=1) if self.wild else drawn.arguments()) | more

    def _varlen_kwargs(self) -> dict[str, Any]:
        return {"num_splits": self.num_splits} if self.num_splits else {}  # omitted if 0, as backward does not take it

    @cache  # noqa: B019 (few cases)
    def problem(self, op: str = "forward", **more: Any) -> Problem:
        """Returns the `Problem` of a public call with these and `more` arguments."""
        arguments, whole = shaped(self.base).arguments() | self._varlen_kwargs(), VARLEN_OPS[op]
        specs = {name: NUMPY.spec(name, x) for name, x in arguments.items() if isinstance(x, np.ndarray)}
        if op == "forward":
            more["out_dtype"] = self.out_dtype
        if op == "backward":
            specs["out"] = ArraySpec.contiguous((*arguments["q"].shape[:-1], self.base.dims[1]), self.out_dtype)
        options = {name: x for name, x in arguments.items() if name in Options._fields}
        return Problem.from_specs(whole, [specs.get(name) for name in whole.names], Options(**options, **more))


def sequence_cases() -> Iterator[tuple[SequenceCase, tuple[str, ...]]]:
    """Yields for each pair of head dims cases and their calls: packed, partly used, in pages, in cache rows."""
    masked: dict[str, Any] = {"window_size": (90, 20), "diagonal_offset": 60, "softcap": 15.0, "heads": (2, 1)}
    lengths = (70, 0, 131, 1), (150, 5, 197, 0)
    packed = Sequences("packed", *lengths, gaps=(0, 0), heads=(1, 1), causal=True)
    used = Sequences("used", *lengths, "rectangle", "rectangle", True, True, **masked)
    spare = Sequences("spare", *lengths, "packed", "packed", True, True, (5, 3, 0, 9), (0, 9, 2, 3), **masked)
    pages = Sequences("pages", *lengths, "packed", "paged", False, True, bounded=True, heads=(1, 1), causal=True)
    cache_rows = Sequences("cache_rows", *lengths, "rectangle", "cache", True, True, **masked)
    # Few queries with split keys: packed over pages, and in rectangles with a mask.
    few = Sequences("few", (1, 2, 0, 3), (900, 5, 2700, 0), "packed", "paged", used_k=True, bounded=True, heads=(6, 2))
    few_rows = Sequences("few_rows", (1, 2, 0, 3), (900, 5, 2700, 0), "rectangle", "rectangle", True, True, **masked)
    for dtype, dims in _dims():
        odd = dims[0] - 1, dims[1] - 1

        def case(base: Sequences, dims: tuple[int, int], dtype: str = dtype, **more: bool) -> SequenceCase:
            return SequenceCase(replace(base, dtype=dtype, dims=dims), **more)

        yield case(packed, dims), ("flash2", *BACKWARD)
        yield case(used, odd, wide=dtype != "float32"), (*ALGORITHMS, *BACKWARD)
        yield case(pages, dims), ALGORITHMS
        yield case(spare, odd, wild=True), ("flash2", *BACKWARD)
        yield case(replace(pages, page_size=3, **masked), odd, wild=True), ALGORITHMS
        yield case(cache_rows, odd, wild=True), ("flash2",)
        for base in few, few_rows:
            yield case(base, dims, wide=dtype != "float32"), ("flash2",)
            yield case(replace(base, page_size=3), odd, wild=True), ("flash2",)


def hopper_sequence_cases() -> Iterator[tuple[SequenceCase, tuple[str, ...]]]:
    """Yields for each row of sm90 tables cases of many queries, and for forward of few, with split keys."""
    few, cached = (1, 2, 0, 3), (150, 5, 700, 0)
    for dtype, tile in itertools.product(("float16", "bfloat16"), tiles_sm90.TILES):
        keys, left, offset = ((300, 0, 131), 90, 60) if tile.max_keys else ((1900, 1, 2800), 1200, None)
        masked: dict[str, Any] = {"window_size": (left, 20), "diagonal_offset": offset, "softcap": 15.0}
        shape: dict[str, Any] = {"dtype": dtype, "dims": (tile.head_dim, tile.head_dim_v)}
        heads = (2, 1) if tile.max_keys else (12, 6)  # with two heads, many keys would be split
        many = Sequences("many", (200, 1, 150), keys, heads=heads, causal=True, **shape)
        few_queries: tuple[Any, ...] = few, cached, "packed", "paged"
        options: dict[str, Any] = {"used_k": True, "bounded": True, **shape}
        # The rows of a group fit a warp, or do not.
        decoding = [Sequences("decoding", *few_queries, heads=heads, **options) for heads in ((2, 2), (24, 2))]
        both = [many, replace(many, name="many_pages", place_k="paged", used_k=True)]
        for base in (*both, *(replace(each, name=f"{each.name}_masked", causal=False, **masked) for each in both)):
            yield SequenceCase(base), ("flash2",)
            yield SequenceCase(replace(base, name=f"{base.name}_wide", softmax_scale=LARGE), wide=True), ("flash2",)
        of_rows: dict[str, Any] = {"name": "decoding_rows", "place_q": "rectangle", "used_q": True, "bounded": False}
        both = [*decoding, *(replace(base, heads=(2 * base.heads[0], 2), **of_rows) for base in decoding)]
        both += [replace(base, name=f"{base.name}_without_pages", place_k="rectangle") for base in both]
        several = device.query(0).num_sms // len(few) + 1  # heads that give a thread block several work tiles
        both.append(replace(both[-2], name="decoding_heads", heads=(several, several)))
        for base in (*both, *(replace(each, name=f"{each.name}_masked", **masked) for each in both)):
            # Without num_splits, these rows would run in blocks of one warp's rows.
            splits = 2 if base.heads[0] > 4 * base.heads[1] else 0
            yield SequenceCase(base, num_splits=splits), ("flash2",)
            wide = replace(base, name=f"{base.name}_wide", softmax_scale=LARGE)
            yield SequenceCase(wide, wide=True, wild=True, num_splits=splits), ("flash2",)
    rows = [(tile.head_dim, tile.head_dim_v) for tile in (*tiles_sm90.BACKWARD, *tiles_sm90.DQ_DKV)]
    lengths = (300, 0, 1, 200), (150, 5, 260, 0)
    masked = {"window_size": (150, 20), "diagonal_offset": 10, "softcap": 15.0}
    for dtype, dims in itertools.product(("float16", "bfloat16"), dict.fromkeys(rows)):
        shape = {"dtype": dtype, "dims": dims, "heads": (2, 2)}
        plain = Sequences("gradients", *lengths, causal=True, **shape)
        spare = Sequences("gradients_w", *lengths, "packed", "rectangle", True, True, (5, 3, 0, 9), **masked, **shape)
        for base in (plain, spare):
            yield SequenceCase(base), tuple(BACKWARD)
        yield SequenceCase(spare, wild=True), tuple(BACKWARD)
        parts = replace(plain, name="parts", heads=(16, 1))  # thread blocks share the query heads of a key block
        for base in (parts, replace(parts, name="parts_masked", **masked)):
            yield SequenceCase(base), ("backward",)
    heads = (device.query(0).num_sms,) * 2  # a thread block takes several key blocks, or blocks of rows
    many = Sequences(MANY_PIECES, (300, 1, 700), (1040, 700, 90), heads=heads)
    for dims, causal in itertools.product(((64, 64), (256, 256)), (False, True)):
        yield SequenceCase(replace(many, name=f"{MANY_PIECES}_{causal}", dims=dims, causal=causal)), ("backward",)
    yield SequenceCase(replace(many, name=f"{MANY_PIECES}_wild", dims=(192, 192)), wild=True), ("backward",)


@dataclass(frozen=True)
class ModCase:
    """A call with score_mod, mask_mod, bias, sinks or dropout. base: a dense problem, or sequences."""

    base: Case | Sequences
    make: Maker

    @property
    def name(self) -> str:
        dims = (self.base.head_dim, self.base.head_dim_v) if isinstance(self.base, Case) else self.base.dims
        return f"mods_{self.base.dtype}_{dims[0]}_{dims[1]}_{self.base.name}"

    def arguments(
        self, put: Callable[[Any], Any], make: Callable[[Sequences], VarlenArrays] = varlen_arrays
    ) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """Returns all arguments of `cuflash.forward`, and the arrays that have gradients in backward.

        make: the function that builds q, k and v of sequences: `varlen_arrays`, or `shaped`.
        """
        if isinstance(self.base, Case):
            arguments, mods = dense_arguments(self.base), self.make(put, self.base)
        else:
            drawn = make(self.base)
            arguments, mods = drawn.arguments(), self.make(put, bounds_case(drawn))
        grads = mods.pop("captured_grads", ())
        return put_all(arguments, put) | mods, grads


def dense_arguments(case: Case) -> dict[str, Any]:
    """Returns all arguments of `cuflash.forward` in NumPy."""
    return dict(zip("qkv", case.arrays(), strict=True)) | case.arguments()


def put_all(arguments: Mapping[str, Any], put: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns the arguments with arrays of another library."""
    return {name: put(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}


def mod_cases() -> Iterator[tuple[ModCase, tuple[str, ...]]]:
    """Yields cases and their calls: all mods together at several head dims, and each kind of gradient."""
    table = functions.FUNCTIONS
    several = functions.joined(functions.everything, functions.dropped)
    of_bfloat16 = [("bfloat16", dims) for dims in ((128, 128), (192, 128), (256, 256))]
    for dtype, dims in (("float16", (64, 64)), *of_bfloat16, ("float32", (64, 64))):
        shape = 2, 200, 330, 4, 2, *dims, dtype
        yield ModCase(Case("all", *shape, window_size=(150, 60), softcap=15.0), several), ("flash2", *BACKWARD)
        lengths: tuple[Any, ...] = (130, 0, 200, 1), (200, 70, 330, 0)
        shapes: dict[str, Any] = {"bounded": True, "dtype": dtype, "dims": dims, "heads": (4, 2)}
        options: dict[str, Any] = {"used_q": True, "used_k": True, "spare_q": (5, 3, 0, 9), "spare_k": (0, 9, 2, 3)}
        packed = Sequences("packed", *lengths, causal=True, softmax_scale=LARGE, **options, **shapes)
        yield ModCase(packed, several), ("flash2", *BACKWARD)
        # No query sees the first keys; without a mask among the functions there are no mask tiles.
        masked: dict[str, Any] = {"window_size": (90, 20), "diagonal_offset": 100, "softcap": 15.0}
        window = Sequences("window", *lengths, **masked, **options, **shapes)
        yield ModCase(window, functions.joined(functions.bounded, functions.dropped)), ("flash2", *BACKWARD)
        pages = Sequences("pages", *lengths, place_k="paged", used_k=True, **shapes)
        yield ModCase(pages, several), ("flash2",)
        few = Sequences("few", (1, 2, 0, 3), (900, 5, 2700, 0), "packed", "paged", used_k=True, **shapes)
        yield ModCase(few, several), ("flash2",)
        # With split keys: rows fit a warp, or do not, and a thread block has one work tile, or several.
        rows = replace(few, name="few_rows", place_q="rectangle", place_k="rectangle", used_q=True, bounded=False)
        many = device.query(0).num_sms // len(few.queries) + 1
        wide = replace(few, name="few_wide", heads=(16, 1)), replace(rows, name="few_rows_wide", heads=(48, 2))
        for base in (replace(few, name="few_pages"), rows, *wide, replace(rows, name="few_heads", heads=(many, many))):
            yield ModCase(base, functions.everything), ("flash2",)
        yield ModCase(replace(few, name="few_sinks", page_size=3), functions.sinks_of()), ("flash2",)
    shape = 2, 200, 330, 4, 2, 64, 64, "float16"
    for algorithm in ALGORITHMS[1:]:
        yield ModCase(Case("all", *shape), several), (algorithm,)
    for name in ("alibi", "relative_position", "without_score", "causal_document", "global_window", "striped"):
        yield ModCase(Case(name, *shape, causal=name == "alibi"), table[name]), ("flash2", *BACKWARD)
    for letters in ("bhqk", "1hqk", "bhq1", "1111"):
        yield ModCase(Case(f"bias_{letters}", *shape), functions.bias_of(letters)), ("flash2", *BACKWARD)
