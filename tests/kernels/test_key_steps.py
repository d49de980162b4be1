"""Steps of key blocks in backward on Hopper under a mask, and the order of key blocks, longest first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mod_table import launched, of_lengths

import cuflash
from cuflash.mods.tracing.trace import trace
from cuflash.planning.plan import Plan
from cuflash.reference.block_mask import EMPTY, FULL, mask_tiles_of
from cuflash.testing.cases import Case
from cuflash.testing.functions import FUNCTIONS, Arguments, Maker, Put

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("new_memory_holds_nan")]
MASK_TILE, KEY_BLOCK = 64, 128


def of_sequences(put: Put, case: Case) -> Arguments:
    return {"mask_mod": lambda b, h, q_idx, k_idx: (k_idx >= q_idx // 3) & (k_idx < q_idx + 100 + 300 * b)}


def of_heads(put: Put, case: Case) -> Arguments:
    return {"mask_mod": lambda b, h, q_idx, k_idx: k_idx // 70 % 4 <= (h + b) % 4 * (q_idx // 400 % 2)}


def last_launch(cupy: Any, case: Case, mod_kwargs: Arguments, deterministic: bool) -> tuple[Plan, int]:
    """Runs backward; returns its plan and the address of its workspace."""
    arrays = [cupy.asarray(x) for x in case.arrays()]
    out, lse = cuflash.forward(*arrays, return_lse=True, **mod_kwargs)
    with launched(lambda kernels, pointers: (kernels.plan, pointers[-1])) as ran:
        cuflash.backward(cupy.ones_like(out), *arrays, out, lse, deterministic=deterministic, **mod_kwargs)
    plan, workspace = ran[-1]
    return plan, workspace


def visible_to_tiles(visible: Any, block_q: int) -> Any:
    """Returns True for each (batch, head, query tile, key block) with a visible mask tile."""
    rows, columns = block_q // MASK_TILE, KEY_BLOCK // MASK_TILE
    whole = np.pad(visible, [(0, 0), (0, 0), (0, -visible.shape[2] % rows), (0, -visible.shape[3] % columns)])
    return whole.reshape(*whole.shape[:2], whole.shape[2] // rows, rows, -1, columns).any(axis=(3, 5))


def order_of_tiles(block: int, tiles: int, block_q: int, deterministic: bool) -> list[int]:
    """Returns the order of a key block's query tiles: from its diagonal on, or backwards if deterministic."""
    first = block * KEY_BLOCK // block_q % tiles
    return [tiles - 1 - n if deterministic else (first + n) % tiles for n in range(tiles)]


@pytest.mark.parametrize("make", [FUNCTIONS["document"], FUNCTIONS["prefix"], of_sequences, of_heads])
@pytest.mark.parametrize(("dim", "deterministic"), [(64, False), (128, False), (64, True)])
def test_steps_are_listed_and_key_blocks_with_more_come_first(
    cupy: Any, make: Maker, dim: int, deterministic: bool
) -> None:
    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("kernels for other GPUs list no steps")
    case = of_lengths((1100, 1900), head_dim=dim, head_dim_v=dim)
    plan, workspace = last_launch(cupy, case, make(cupy.asarray, case), deterministic)
    fields = next(launch.fields for launch in plan.launches if launch.variant.op == "tile_counts")

    def numbers(part: str, *shape: int) -> Any:
        begin, size = plan.workspace[part]
        memory = cupy.cuda.UnownedMemory(workspace + begin, size, plan)
        return cupy.ndarray(size // 4, "i4", cupy.cuda.MemoryPointer(memory, 0)).reshape(-1, *shape).get()

    graph = trace(make(np.asarray, case)["mask_mod"], "mask_mod")
    mask_tiles = mask_tiles_of(graph, case.batch, case.heads_q, 1100, 1900)
    visible = visible_to_tiles(mask_tiles != EMPTY, fields["block_q"])
    full = ~visible_to_tiles(mask_tiles != FULL, fields["block_q"])
    batch, heads = (None if fields[name] else 1 for name in ("list_stride_batch", "list_stride_head"))
    visible, full = visible[:batch, :heads], full[:batch, :heads]
    tiles, blocks = visible.shape[2:]

    lists = numbers("key_steps", blocks, 32 * fields["list_lines"])
    assert len(lists) == visible.shape[0] * visible.shape[1]
    for number, block in np.ndindex(*lists.shape[:2]):
        index = *divmod(number, visible.shape[1]), slice(None), block
        order = order_of_tiles(block, tiles, fields["block_q"], deterministic)
        expected = [4 * tile + full[index][tile] for tile in order if visible[index][tile]] + [-1]
        assert lists[number, block, : len(expected)].tolist() == expected

    if deterministic:
        assert "key_order" not in plan.workspace
        return
    steps = visible.sum(axis=2)
    if fields["list_stride_head"]:
        steps = steps.reshape(len(steps), case.heads_kv, -1, blocks).sum(axis=2)
    steps = steps.reshape(-1, blocks)
    np.testing.assert_array_equal(numbers("step_counts", blocks), steps)
    np.testing.assert_array_equal(numbers("key_order", blocks), np.argsort(-steps, axis=1, kind="stable"))
