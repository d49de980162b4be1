"""Plans of the kernels that Hopper has of its own: which problems get them, and what their launches are."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
from test_plan import EDGES, problem

from cuflash import launch
from cuflash.device import KNOWN, Device
from cuflash.errors import UnsupportedError
from cuflash.launch import Launcher
from cuflash.plan import L2_BYTES, plan
from cuflash.problem import ArraySpec, Problem
from cuflash.tiles_sm90 import WarpgroupTile
from cuflash.variant import Plan

H100 = KNOWN["sm_90"]


def tile_of(made: Plan) -> WarpgroupTile | None:
    """The tile of a Hopper kernel; None for another one."""
    assert made.variant is not None
    hopper = made.variant.source.startswith("sm90/")
    assert hopper == isinstance(made.variant.tile, WarpgroupTile) == (made.variant.arch == "sm_90a")
    return made.variant.tile if isinstance(made.variant.tile, WarpgroupTile) else None


def check_hopper(made: Plan, of: Problem, op: str, device: Device = H100) -> WarpgroupTile:
    """All that must hold of the plan of a Hopper kernel."""
    tile = tile_of(made)
    assert tile is not None
    assert made.variant is not None
    assert made.variant.source == f"sm90/{op}.cu"
    assert (tile.head_dim >= of.head_dim, tile.head_dim_v >= of.head_dim_v) == (True, True)
    assert made.variant.smem_bytes <= device.smem_per_block
    assert made.variant.num_threads == 128 * (tile.block_q // 64 + 1)
    assert (made.num_q_blocks - 1) * tile.block_q < of.seqlen_q <= made.num_q_blocks * tile.block_q
    num_tiles = made.num_q_blocks * of.heads_q * of.batch
    (launched,) = made.launches
    assert launched.num_blocks == min(num_tiles, device.num_sms)
    assert made.num_slices == 1
    assert made.counted == (num_tiles > device.num_sms and not of.mask.is_full)
    return tile


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_pair_of_head_dims_that_tma_can_address_has_a_tile(dtype: str) -> None:
    dims = [dim for dim in EDGES if dim % 8 == 0]
    assert 64 in dims
    assert max(dims) == 256
    for head_dim in dims:
        for head_dim_v in dims:
            of = problem(head_dim, head_dim_v, dtype=dtype)
            check_hopper(plan(of, "forward", H100), of, "forward")
        of = problem(head_dim, None, dtype=dtype)
        assert check_hopper(plan(of, "lse", H100), of, "lse").head_dim_v == 0


@pytest.mark.parametrize("seqlen_q", [1, 63, 64, 65, 127, 128, 129, 191, 193, 16384, 2**20 + 1])
@pytest.mark.parametrize("causal", [False, True])
def test_the_blocks_cover_every_query(seqlen_q: int, causal: bool) -> None:
    of = problem(dims=(3, seqlen_q, 77, 6, 2), causal=causal)
    check_hopper(plan(of, "forward", H100), of, "forward")


SOME = ArraySpec.dense((2, 300, 4, 64), "float16")
OTHERS: dict[str, tuple[Problem, Device]] = {
    "float32": (problem(dtype="float32"), H100),
    "flash1": (problem(algorithm="flash1"), H100),
    "flashd": (problem(algorithm="flashd"), H100),
    "nothing_seen": (problem(causal=True, diagonal_offset=-1000), H100),
    "no_keys": (problem(dims=(2, 300, 0, 4, 2)), H100),
    "no_queries": (problem(dims=(2, 0, 300, 4, 2)), H100),
    "head_dim_over_256": (problem(264, 64), H100),
    "odd_head_dim": (problem(65, 64), H100),
    "odd_head_dim_v": (problem(64, 65), H100),
    "reversed_q": (Problem.of(SOME._replace(strides=(76800, -256, 64, 1)), SOME, SOME), H100),
    "broadcast_k": (Problem.of(SOME, SOME._replace(strides=(0, 256, 64, 1)), SOME), H100),
    "broadcast_v": (Problem.of(SOME, SOME, SOME._replace(strides=(76800, 256, 0, 1))), H100),
    **{arch: (problem(), device) for arch, device in KNOWN.items() if arch != "sm_90"},
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_the_hopper_kernels_cannot_do_gets_the_others(name: str) -> None:
    of, device = OTHERS[name]
    assert tile_of(plan(of, "forward", device)) is None
    assert tile_of(plan(problem(), "forward", H100)) is not None


@pytest.mark.parametrize(("op", "head_dim_v"), [("forward", 64), ("lse", None)])
def test_operands_that_are_not_aligned_get_the_generic_kernel(op: str, head_dim_v: int | None) -> None:
    of = problem(64, head_dim_v)
    assert tile_of(plan(of, op, H100)) is not None
    assert tile_of(plan(of, op, H100, aligned=False)) is None
    assert plan(of, op, KNOWN["sm_80"], aligned=False) == plan(of, op, KNOWN["sm_80"])


def test_the_tile_is_chosen_by_the_keys_that_a_query_sees_on_average_under_a_mask() -> None:
    def block_q(seqlen_k: int, **more: Any) -> int:
        of = problem(dims=(1, 4096, seqlen_k, 2, 2), **more)
        return check_hopper(plan(of, "forward", H100), of, "forward").block_q

    assert block_q(100) == block_q(4096) == 192  # without a mask
    assert block_q(2289, causal=True) == 128  # 639.9 keys
    assert block_q(2290, causal=True) == 192
    assert block_q(3000, causal=True, diagonal_offset=-2000) == 128
    assert block_q(4096, window_size=(300, 300)) == 128
    assert block_q(4096, window_size=(700, 700)) == 192


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_what_varies_with_data_is_no_part_of_what_is_compiled_but_whether_there_is_a_softcap(softcap: float) -> None:
    wanted = plan(problem(128, softcap=softcap), "forward", H100).variant
    assert wanted is not None
    assert wanted.softcap == bool(softcap)
    for changes in ({"dims": (1, 1, 1, 2, 1)}, {"dims": (5, 999, 1000, 64, 8)}, {"causal": True},
                    {"softcap": 2 * softcap}, {"window_size": (5, 6)}, {"softmax_scale": 0.7}):  # fmt: skip
        assert plan(problem(128, **{"softcap": softcap} | changes), "forward", H100).variant == wanted


@pytest.mark.parametrize(("op", "dims"), [("forward", (64, 64)), ("forward", (192, 128)), ("forward", (256, 256)),
                                          ("lse", (192, None))])  # fmt: skip
def test_capped_scores_have_kernels_and_where_it_pays_tiles_of_their_own(op: str, dims: tuple[Any, ...]) -> None:
    made = {}
    for capped in (False, True):
        of = problem(*dims, softcap=30.0 * capped)
        tile = check_hopper(plan(of, op, H100), of, op)
        assert tile.softcap in (None, capped)
        made[capped] = plan(of, op, H100).variant
        assert made[capped].constants["SOFTCAP"] == capped
        assert ("softcap" in made[capped].name.split("_")) == capped
        generic = plan(of, op, H100, aligned=False).variant
        assert generic is not None
        assert not generic.softcap
        assert "SOFTCAP" not in generic.constants
    assert (made[True].tile != made[False].tile) == (dims != (64, 64))


def test_tiles_are_counted_where_blocks_take_several_of_different_lengths() -> None:
    def counted(batch: int, **more: Any) -> bool:
        return plan(problem(dims=(batch, 128, 256, 4, 4), **more), "forward", H100).counted

    assert (counted(33, causal=True), counted(34, causal=True)) == (False, True)  # 132 and 136 tiles for 132 blocks
    assert not counted(34)
    assert counted(34, window_size=(9, -1))
    assert not plan(problem(dims=(34, 128, 256, 4, 4), causal=True), "forward", KNOWN["sm_80"]).counted


def test_as_many_heads_start_longest_first_as_have_their_keys_and_values_in_l2() -> None:
    def together(seqlen_k: int, heads: tuple[int, int] = (16, 16), batch: int = 4, **more: Any) -> int:
        of = problem(128, 128, dims=(batch, 256, seqlen_k, *heads), **{"causal": True, **more})
        return plan(of, "forward", H100).heads_together

    assert together(1024, causal=False) == 1
    for seqlen_k in (256, 1024, 8192, 2**20):
        found = together(seqlen_k)
        head_bytes = 2 * seqlen_k * (128 + 128)
        assert 1 <= found <= 64
        assert found == 1 or found * head_bytes <= L2_BYTES
        assert 2 * found > 64 or 2 * found * head_bytes > L2_BYTES
    assert together(2**20) == 1
    assert together(8192, (16, 2)) == min(64, 8 * together(8192))  # a group shares its keys
    assert together(256, (3, 3), batch=1) <= 3
    # of a window those count that a query block sees
    assert together(2**20, window_size=(1023 - 128, 0)) == together(1024)


def test_too_many_query_blocks_are_unsupported() -> None:
    with pytest.raises(UnsupportedError, match=r"at most 2147483647.*Split the batch"):
        plan(problem(dims=(2**15, 2**20, 1, 16, 1)), "forward", H100)


class Recorded:
    """In place of `launch.Kernels`: what would be launched."""

    def __init__(self, made: Plan, ordinal: int, parameters: Any) -> None:
        self.plan, self.launched = made, 0

    def launch(self, pointers: Any, stream: int) -> None:
        self.launched += 1


def launcher(monkeypatch: pytest.MonkeyPatch, op: str, out: ArraySpec | None = None) -> tuple[Launcher, list[Recorded]]:
    made: list[Recorded] = []

    def kernels(*arguments: Any) -> Recorded:
        made.append(Recorded(*arguments))
        return made[-1]

    monkeypatch.setattr(launch, "Kernels", kernels)
    monkeypatch.setattr(launch, "relaxed_capture", contextlib.nullcontext)  # the driver's
    monkeypatch.setattr(launch.device, "query", lambda ordinal: H100)
    of = replace(problem(64, None if op == "lse" else 64), device="cuda:0")
    out = out or ArraySpec.dense(of.out_shape, of.out_dtype)
    return Launcher(of, op, out, [False] * 4, [1] * 4), made


@pytest.mark.parametrize("op", ["forward", "lse"])
def test_a_call_on_hopper_runs_its_kernel_and_the_generic_one_where_a_pointer_is_not_aligned(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, made = launcher(monkeypatch, op)
    assert tile_of(found.plan) is not None
    pointers = [2**20, 2**21, 2**22, 2**23] if op == "forward" else [2**20, 2**21, 0, 0]
    found.run((*pointers, 2**24 + 4), 0)  # lse may be anywhere
    assert [kernels.launched for kernels in made] == [1]
    for n in (n for n in range(4) if pointers[n]):
        off = [pointer + 2 * (at == n) for at, pointer in enumerate(pointers)]
        found.run((*off, 2**24), 0)
        assert tile_of(made[1].plan) is None
        assert [kernels.launched for kernels in made] == [1, 1 + n]  # made once
    found.run((*pointers, 2**24), 0)
    assert made[0].launched == 2


@pytest.mark.parametrize(
    ("strides", "hopper"),
    [((76800, 256, 64, 1), True), ((76800, 64, 19200, 1), True), ((76800, -256, 64, 1), False),
     ((78000, 260, 65, 1), False)],
)  # fmt: skip
def test_out_decides_too(strides: tuple[int, ...], hopper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    out = ArraySpec.dense((2, 300, 4, 64), "bfloat16")._replace(strides=strides)
    found, _ = launcher(monkeypatch, "forward", out)
    assert (tile_of(found.plan) is not None) == hopper
