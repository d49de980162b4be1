"""The mma.sync kernels with mods: tiles, and the orientation of rows and columns in mods."""

from __future__ import annotations

from typing import Any

import pytest

import cuflash
from cuflash.planning import backward_sm80, forward, tiles_sm80
from cuflash.planning.device import DEVICES
from cuflash.planning.mod_code import make_mod_code
from cuflash.planning.plan import Plan


def plan_of(op: Any, dtype: str = "bfloat16", head_dim: int = 64, arch: str = "sm_80", **options: Any) -> Plan:
    """Returns the plan of a call whose scores fall with the distance, with sm80 kernels."""
    mods = {"score_mod": lambda score, b, h, q_idx, k_idx: score + 0.5 * (k_idx - q_idx)}
    x = (2, 100, 4, head_dim)
    problem = cuflash.plan(x, x, x, op=op, dtype=dtype, device="cpu", **mods, **options).problem
    make = backward_sm80.sm80_plan if op == "backward" else forward._sm80_plan
    return make(problem, DEVICES[arch], None)


@pytest.mark.parametrize("deterministic", [False, True])
def test_functions_have_keys_in_their_rows_where_blocks_own_keys(deterministic: bool) -> None:
    plan = plan_of("backward", deterministic=deterministic)
    of_queries, of_keys = make_mod_code(plan.problem), make_mod_code(plan.problem, keys_as_rows=True)
    assert of_queries != of_keys
    codes = {launch.variant.op: launch.variant.mod_code for launch in plan.launches}
    of_both = {"backward_dkdv": of_keys, "backward_dq": of_queries}
    expected = of_both if deterministic else {"backward": of_keys, "convert": None}
    assert codes == {"delta": None} | expected


@pytest.mark.parametrize("dtype", tiles_sm80.TILES)
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
def test_every_head_dim_has_tiles(arch: str, dtype: str) -> None:
    for head_dim in (1, 64, 96, 128, 192, 256):
        for op, deterministic in (("forward", False), ("backward", False), ("backward", True)):
            plan = plan_of(op, dtype, head_dim, arch, deterministic=deterministic)
            tiles = [launch.variant.tile for launch in plan.launches if launch.variant.mod_code is not None]
            assert len(tiles) == 1 + deterministic
            assert all(tile is not None and tile.head_dim >= head_dim for tile in tiles)


def test_what_changes_in_a_tile_leaves_its_head_dims_and_fits_as_often() -> None:
    rows = {row for table in (tiles_sm80.TILES_16BIT, tiles_sm80.BACKWARD_16BIT, tiles_sm80.DQ_16BIT) for row in table}
    for plain, changes in tiles_sm80._WITH_MODS.items():
        assert plain in rows
        (changed,) = tiles_sm80.rows_of([plain], has_mods=True)
        assert changed != plain
        assert {name: getattr(changed, name) for name in changes} == changes
        shapes = [(each.head_dim, each.head_dim_v, each.blocks_per_sm) for each in (plain, changed)]
        assert shapes[0] == shapes[1]
        whole = changed.blocks_per_sm * (changed.smem_bytes(2) + tiles_sm80.SMEM_RESERVED)
        assert whole <= DEVICES["sm_80"].smem_per_sm
