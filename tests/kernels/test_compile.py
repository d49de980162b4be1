"""Every kernel compiles with NVRTC without a GPU, spills no registers, and agrees with the host's structs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
from mod_variants import CALLS, few_variants, mod_variants
from variants import DTYPES, SHARED_HEADS, TALL, variant_of, variants

from cuflash.errors import CompileError, UnsupportedError
from cuflash.planning import tile_shapes_sm90, tiles_sm80, tiles_sm90
from cuflash.planning.device import DEVICES
from cuflash.planning.variant import ALGORITHM_CODES, Variant
from cuflash.problem.dtypes import DTYPES as TABLE
from cuflash.runtime import compiler
from cuflash.testing.functions import everything, joined

try:
    compiler.nvrtc_version()
except UnsupportedError as error:
    pytest.skip(f"needs NVRTC: {error}", allow_module_level=True)

Compiled = Callable[[Variant], tuple[bytes, str]]
ALL = ("sm_80", "sm_90")  # one of each kernel is compiled for these in every run; every variant with -m exhaustive
BACKWARD_OPS = ("delta", "convert", "backward", "backward_dkdv", "backward_dq")
GENERIC = {"aligned": False}  # on Hopper, where aligned calls take sm90 kernels
CAPPED = {"softcap": 30.0}  # on Hopper, where softcap is compiled in
PACKED = {"packed": True}
SUMS = {"accumulate": True}
HOPPER_GRADIENTS = tuple(f"backward_{gradient}" for gradient in tile_shapes_sm90.GRADIENTS)
# (op, dtype, head_dim, head_dim_v, changes): one of each kernel.
ONE_OF_EACH_KERNEL: tuple[tuple[str, str, int, int, dict[str, Any]], ...] = (
    ("forward", "bfloat16", 128, 128, {}),
    ("forward", "float32", 64, 64, {}),
    ("forward", "bfloat16", 128, 128, {"used": True}),
    ("forward", "bfloat16", 128, 128, {"used": True} | GENERIC),
    *(("lse", "bfloat16", 64, 64, changes) for changes in ({}, GENERIC)),
    *((op, "bfloat16", 64, 64, {}) for op in ("merge", "append_kv")),
    *((op, "bfloat16", 128, 128, {"aligned": False}) for op in BACKWARD_OPS),
    *(("backward", "bfloat16", dim, dim, {}) for dim in (128, 256)),
    *((op, "bfloat16", 128, 128, PACKED) for op in ("forward", "lse", "delta", "backward")),
    *((op, "bfloat16", 128, 128, PACKED | GENERIC) for op in BACKWARD_OPS),
    *((op, "float16", 256, 256, {}) for op in HOPPER_GRADIENTS),
    *((op, "bfloat16", 128, 128, SUMS | changes) for op in ("forward", "backward") for changes in ({}, GENERIC)),
    *((op, "float32", 64, 64, SUMS) for op in ("convert", "backward")),
)
SIXTEEN_BIT = ("bfloat16", 64, 64), ("bfloat16", 256, 256), ("float16", 192, 128)
# One of each way of building a kernel.
ONE_OF_EACH_KIND = (
    *(("forward", *what, changes) for what in SIXTEEN_BIT for changes in ({}, GENERIC)),
    ("forward", "bfloat16", 64, 64, TALL),
    ("forward", "bfloat16", 128, 128, GENERIC),
    *(("forward", *what, CAPPED) for what in SIXTEEN_BIT),
    ("forward", "bfloat16", 64, 64, TALL | CAPPED),
    ("lse", "bfloat16", 192, 192, CAPPED),
    ("forward", "float32", 256, 256, {}),
    *(("append_kv", dtype, 64, 64, {}) for dtype in ("float16", "float32")),
    ("forward", "bfloat16", 128, 128, {"algorithm": "flash1"}),
    ("forward", "bfloat16", 128, 128, {"algorithm": "flashd"}),
    *(("forward", "bfloat16", 128, 128, {"out_dtype": "float32"} | changes) for changes in ({}, GENERIC)),
    ("delta", "bfloat16", 128, 128, {"out_dtype": "float32"}),
    *(
        ("backward", "float16", dim, dim, changes)
        for dim in (64, 96, 128)
        for changes in ({}, CAPPED, PACKED, PACKED | CAPPED)
    ),
    *(("backward", "float16", 128, 128, {"queries": 2**16, "causal": False} | changes) for changes in ({}, CAPPED)),
    *(("backward", "float16", dim, dim, SHARED_HEADS | changes) for dim in (64, 128) for changes in ({}, PACKED)),
    *(("backward", "float16", 192, 128, changes) for changes in ({}, CAPPED, SHARED_HEADS)),
    *(("backward", "float16", 256, 256, changes) for changes in ({}, CAPPED)),
    *(
        (op, "float16", *dims, changes)
        for op in HOPPER_GRADIENTS
        for dims in ((192, 128), (192, 192), (256, 256))
        for changes in (({}, CAPPED, PACKED) if dims[1] > 128 else (PACKED,))
    ),
    *(
        (op, dtype, head_dim, head_dim, {"aligned": False})
        for dtype, head_dim in (("bfloat16", 64), ("bfloat16", 256), ("float32", 64), ("float32", 256))
        for op in BACKWARD_OPS
    ),
)


def representatives(arch: str, table: Any = ONE_OF_EACH_KERNEL) -> list[Variant]:
    """Returns the variants of a table that exist for an architecture."""
    kernels: dict[Variant, None] = {}
    for *what, changes in table:
        if what[0] in HOPPER_GRADIENTS and changes.get("aligned", True) and arch != "sm_90":
            continue
        if "accumulate" in changes and arch != "sm_90":  # as in `variants`
            continue
        kernels[variant_of(*what, DEVICES[arch], **changes)] = None
    return list(kernels)


def each(*archs: str, variants_of: Any) -> list[Any]:
    return [pytest.param(variant, id=f"{arch}-{variant.name}") for arch in archs for variant in variants_of(arch)]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Iterator[Compiled]:
    """Yields a function that returns a variant's cubin and log. Variants of selected tests compile in parallel."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        yield compiler.compile_variant  # a worker lists all tests, not only the ones that it will run
        return
    chosen: dict[Variant, None] = {}
    for item in request.session.items:
        callspec = getattr(item, "callspec", None)
        variant = callspec.params.get("variant") if callspec is not None else None
        skipped = item.get_closest_marker("skip") is not None or item.path != request.path
        if variant is not None and not skipped and is_known(variant.arch):
            chosen[variant] = None
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = {variant: pool.submit(compiler.compile_variant, variant) for variant in chosen}
        yield lambda variant: futures[variant].result()
        pool.shutdown(cancel_futures=True)


def is_known(arch: str) -> bool:
    """Returns True if this NVRTC compiles for the architecture itself."""
    return f"-arch={arch}" in compiler.options(replace(MERGE, arch=arch))


MERGE = Variant("merge", "portable/merge.cu", "sm_80", "float16", "float16")
REPORT = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def need_known(variant: Variant) -> None:
    if not is_known(variant.arch):
        pytest.skip(f"NVRTC {'.'.join(map(str, compiler.nvrtc_version()))} does not know {variant.arch}")


def check(variant: Variant, compiled: Compiled) -> None:
    need_known(variant)
    cubin, log = compiled(variant)
    assert cubin[:4] == b"\x7fELF"
    assert variant.name.encode() in cubin
    assert f"Compiling entry function '{variant.name}' for '{variant.arch}'" in log
    reports = REPORT.findall(log)
    assert reports, log
    for report in reports:
        assert report == ("0", "0", "0"), f"(stack frame, spill stores, spill loads) = {report} bytes"
    assert not re.search(r"\bC7\d{3}\b", log), log  # notes of ptxas that it did not follow the source
    assert "warning" not in log.lower(), log


@pytest.mark.parametrize("variant", each(*ALL, variants_of=representatives))
def test_one_of_each_kernel_compiles_without_spills(variant: Variant, compiled: Compiled) -> None:
    check(variant, compiled)


@pytest.mark.exhaustive(lambda: each(*(arch for arch in DEVICES if arch not in ALL), variants_of=representatives))
def test_one_of_each_kernel_compiles_for_other_gpus(variant: Variant, compiled: Compiled) -> None:
    check(variant, compiled)


@pytest.mark.exhaustive(lambda: each(*ALL, variants_of=partial(representatives, table=ONE_OF_EACH_KIND)))
def test_one_of_each_kind_compiles_without_spills(variant: Variant, compiled: Compiled) -> None:
    check(variant, compiled)


def mods(*names: str) -> list[Any]:
    """Returns the kernels with these mods: on Hopper, and sm80 kernels."""
    of_any_gpu = partial(mod_variants, on_any_gpu=True, names=names)
    return [*each("sm_90", variants_of=partial(mod_variants, names=names)), *each("sm_80", variants_of=of_any_gpu)]


def check_mod_variant(variant: Variant, compiled: Compiled) -> None:
    """Checks a variant with mods. Sm90 kernels that spill are refused, and another tile runs; sm80 ones may spill."""
    need_known(variant)
    try:
        cubin, log = compiled(variant)
    except compiler.SpilledError:
        assert variant.of_warpgroups
        return
    assert variant.name.encode() in cubin
    assert not re.search(r"\bC7\d{3}\b", log), log
    assert "warning" not in log.lower(), log


ALL_AT_ONCE = "everything"  # has all kinds of mods
EVERYTHING_OF_FEW = partial(few_variants, of_few=((joined(everything), 64),))


@pytest.mark.parametrize("variant", [*mods(ALL_AT_ONCE), *each("sm_90", variants_of=EVERYTHING_OF_FEW)])
def test_kernels_with_scores_of_the_caller_compile(variant: Variant, compiled: Compiled) -> None:
    check_mod_variant(variant, compiled)


@pytest.mark.exhaustive(lambda: mods(*(name for name in CALLS if name != ALL_AT_ONCE)))
def test_kernels_with_each_kind_of_scores_of_the_caller_compile(variant: Variant, compiled: Compiled) -> None:
    check_mod_variant(variant, compiled)


@pytest.mark.parametrize("variant", each(*ALL, variants_of=few_variants))
def test_decoding_with_scores_of_the_caller_compiles_without_spills(variant: Variant, compiled: Compiled) -> None:
    check(variant, compiled)


@pytest.mark.exhaustive(lambda: each(*ALL, variants_of=variants))
def test_every_variant_compiles_without_spills(variant: Variant, compiled: Compiled) -> None:
    check(variant, compiled)


def test_the_variants_are_every_row_dtype_algorithm_and_out_dtype() -> None:
    generic = [v for v in variants("sm_90") if not v.of_warpgroups]
    built = {(v.op, v.dtype, v.out_dtype, v.algorithm, v.tile) for v in generic}
    for dtype in DTYPES:
        rows = tiles_sm80.TILES[dtype]
        assert set(rows) <= {tile for op, _, _, _, tile in built if op == "forward"}, "no device chooses this row"
        for row, algorithm, out_dtype in product(rows, ALGORITHM_CODES, (dtype, "float32")):
            assert [tile for *key, tile in built if key == ["forward", dtype, out_dtype, algorithm]
                    and (tile.head_dim, tile.head_dim_v) == (row.head_dim, row.head_dim_v)]  # fmt: skip
        head_dims = {v.tile.head_dim for v in generic if v.tile and (v.op, v.dtype) == ("lse", dtype)}
        assert head_dims == {row.head_dim for row in rows}
        for row in tiles_sm80.BACKWARD[dtype]:
            assert ("backward", dtype, dtype, "flash2", row) in built
            assert ("backward_dkdv", dtype, dtype, "flash2", replace(row, with_dq=False)) in built
        for row in tiles_sm80.DQ[dtype]:
            assert ("backward_dq", dtype, dtype, "flash2", row) in built
        mods = ((op, dtype) for op in ("merge", "append_kv", "convert", "delta"))
        for op, out_dtype in (*mods, ("delta", "float32")):
            assert (op, dtype, out_dtype, "flash2", None) in built
    hopper = [v for v in variants("sm_90") if v not in generic]
    assert {(v.arch, v.algorithm) for v in hopper} == {("sm_90a", "flash2")}
    expected = set()
    halves = [dtype for dtype in DTYPES if TABLE[dtype].itemsize == 2]
    for dtype, row, capped in product(halves, tiles_sm90.TILES, (False, True)):
        if row.softcap in (None, capped):
            rows_of = [row, *map(row.for_varlen, (False, True))]
            rows_of += [tile_shapes_sm90.decoding_tile(row, *each) for each in product((False, True), repeat=3)]
            rows_of.append(tile_shapes_sm90.decoding_tile(row, paged=False, few=True, narrow=True, single=True))
            expected |= {("forward", dtype, out, each, capped) for out in (dtype, "float32") for each in rows_of}
        of_lse = tiles_sm90.choose("lse", row.head_dim, 0, 1.0, capped)
        assert of_lse is not None
        expected |= {("lse", dtype, dtype, each, capped) for each in (of_lse, *map(of_lse.for_varlen, (False, True)))}
    # Only dense calls share key blocks by heads, and only they have the numbers of queries on the host.
    gradients = [("backward", replace(row, shares_heads=True), False) for row in tiles_sm90.BACKWARD]
    gradients += [("backward", row, False) for row in tiles_sm90.BACKWARD]
    gradients += [("backward", row.for_varlen(), True) for row in tiles_sm90.BACKWARD if not row.min_queries]
    gradients += [(f"backward_{row.gradient}", row, True) for row in tiles_sm90.DQ_DKV]
    dense = [
        row for row in tiles_sm90.DQ_DKV if not tiles_sm90.choose_backward(row.head_dim, row.head_dim_v, 1.0, False)
    ]
    gradients += [(f"backward_{row.gradient}", row, False) for row in dense]
    gradients += [("backward", row, False) for row in tiles_sm90.CLUSTER_BACKWARD]
    alone = [row for row in dense if tiles_sm90.choose_cluster(row.head_dim, row.head_dim_v) is None]
    of_keys = [replace(row, shares_heads=True) for row in alone if row.gradient != "dq"]
    gradients += [(f"backward_{row.gradient}", row, False) for row in of_keys]
    of_gradients = set()
    for dtype, (op, row, lengths), capped in product(halves, gradients, (False, True)):
        if row.softcap in (None, capped):
            of_gradients.add((op, dtype, dtype, row, capped, lengths))
    actual = {(v.op, v.dtype, v.out_dtype, v.tile, v.softcap, v.is_varlen) for v in hopper}
    assert {each for each in actual if each[0].startswith("backward")} == of_gradients
    assert {each[:-1] for each in actual - of_gradients} == expected
    assert not any(v.softcap for v in generic)
    sources = {path.relative_to(compiler.source_root()).as_posix() for path in compiler.source_root().rglob("*.cu")}
    mod_sources = {v.source for any_gpu in (False, True) for v in mod_variants("sm_90", any_gpu)}
    assert {v.source for v in variants("sm_90")} | mod_sources == sources


@pytest.mark.parametrize("arch", DEVICES)
def test_the_representatives_are_of_every_kernel(arch: str) -> None:
    assert set(representatives(arch)) <= set(variants(arch))
    assert {(v.op, v.source) for v in representatives(arch)} == {(v.op, v.source) for v in variants(arch)}


BY_ROWS = ("backward_dq", "backward_dk", "backward_dv")  # on Hopper, over head dim 128


def small_variant(arch: str, op: str, dtype: str) -> Variant:
    head_dim = 256 if arch == "sm_90" and op in BY_ROWS else 32
    return variant_of(op, dtype, head_dim, head_dim, DEVICES[arch])


WRONG = {
    "SMEM_BYTES": "the host's formula for shared memory differs",
    "PARAMS_BYTES": "the host packs other parameters",
}


@pytest.mark.parametrize(
    ("arch", "op", "macro"),
    [
        *(("sm_80", op, "SMEM_BYTES") for op in ("forward", "lse", "backward", "backward_dkdv", "backward_dq")),
        *(("sm_80", op, "PARAMS_BYTES") for op in ("forward", "lse", "merge", "append_kv", *BACKWARD_OPS)),
        *(("sm_90", op, macro) for op in ("forward", "lse", "backward", *BY_ROWS) for macro in WRONG),
    ],
)
def test_a_size_that_host_and_kernel_disagree_on_does_not_compile(
    arch: str, op: str, macro: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = small_variant(arch, op, "float16")
    define, options = f"-DCUFLASH_{macro}=", compiler.options(variant)
    assert any(option.startswith(define) for option in options)
    wrong = [f"{option}0" if option.startswith(define) else option for option in options]  # ten times as many
    monkeypatch.setattr(compiler, "options", lambda variant: tuple(wrong))
    with pytest.raises(CompileError, match=re.escape(WRONG[macro])) as caught:
        compiler.compile_variant(variant)
    assert variant.name in str(caught.value)


# One kernel for each group of macros in the config.cuh headers, with the macros that other kernels lack. A kernel
# without SOFTCAP reads its parameters, and merge has no algorithm.
SMALL = [small_variant("sm_80", op, "float16") for op in ("merge", "backward")]
SMALL += [small_variant("sm_90", op, "float16") for op in ("forward", "backward", "backward_dq")]
NOT_ASKED = {
    "portable/merge.cu": {"KERNEL", "ALGORITHM"},
    "sm80/backward.cu": {"PARAMS_BYTES", *MERGE.constants} - {"ALGORITHM"},
}
MACROS = [
    pytest.param(small, macro, id=f"{small.name}-{macro}")
    for small in SMALL
    for macro in {"PARAMS_BYTES": 0, **small.constants}
    if macro not in NOT_ASKED.get(small.source, {"PARAMS_BYTES", "SOFTCAP", *SMALL[1].constants})
]


@pytest.mark.parametrize(("small", "macro"), MACROS)
def test_every_constant_is_needed(small: Variant, macro: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [option for option in compiler.options(small) if not option.startswith(f"-DCUFLASH_{macro}=")]
    assert len(options) == len(compiler.options(small)) - 1
    monkeypatch.setattr(compiler, "options", lambda variant: tuple(options))
    with pytest.raises(CompileError, match=f"CUFLASH_{macro}|identifier"):  # a macro may guard other names
        compiler.compile_variant(small)
