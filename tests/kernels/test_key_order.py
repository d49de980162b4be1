"""The order in which backward on Hopper takes key blocks under a mask: those with more steps come first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from own_table import FUNCTIONS, Arguments, Maker, Put, of_lengths

import cuflash
from cuflash.bench.cases import Case
from cuflash.mods.trace import trace
from cuflash.planning.plan import Plan
from cuflash.reference.block_mask import EMPTY, cells_of
from cuflash.runtime.launch import Kernels

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("new_memory_holds_nan")]
CELL, KEY_BLOCK = 64, 128


def of_sequences(put: Put, of: Case) -> Arguments:
    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return (k_idx >= q_idx // 3) & (k_idx < q_idx + 100 + 300 * b)

    return {"mask_mod": mask_mod}


def of_heads(put: Put, of: Case) -> Arguments:
    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return k_idx // 70 % 4 <= (h + b) % 4 * (q_idx // 400 % 2)

    return {"mask_mod": mask_mod}


def last_launch(cupy: Any, monkeypatch: pytest.MonkeyPatch, of: Case, own: Arguments) -> tuple[Plan, int]:
    """Runs backward; the result is its plan, and where its workspace was."""
    launched: list[tuple[Plan, int]] = []
    launch = Kernels.launch

    def recorded(kernels: Kernels, pointers: tuple[int, ...], stream: int) -> bool:
        launched.append((kernels.plan, pointers[-1]))
        return launch(kernels, pointers, stream)

    arrays = [cupy.asarray(x) for x in of.arrays()]
    out, lse = cuflash.forward(*arrays, return_lse=True, **own)
    with monkeypatch.context() as patched:
        patched.setattr(Kernels, "launch", recorded)
        cuflash.backward(cupy.ones_like(out), *arrays, out, lse, **own)
    return launched[-1]


def steps_of(seen: Any, block_q: int, key_blocks: int) -> Any:
    """(batch, heads, parts): tiles of queries x key blocks of a part with a cell that is seen, from all cells."""
    rows, columns = block_q // CELL, KEY_BLOCK // CELL
    more = [(0, 0), (0, 0), (0, -seen.shape[2] % rows), (0, -seen.shape[3] % (columns * key_blocks))]
    whole = np.pad(seen, more)
    shape = (*whole.shape[:2], whole.shape[2] // rows, rows, -1, key_blocks, columns)
    return whole.reshape(shape).any(axis=(3, 6)).sum(axis=(2, 4))


@pytest.mark.parametrize("make", [FUNCTIONS["document"], FUNCTIONS["prefix"], of_sequences, of_heads])
@pytest.mark.parametrize("dim", [64, 128])
def test_parts_with_more_steps_come_first(cupy: Any, monkeypatch: pytest.MonkeyPatch, make: Maker, dim: int) -> None:
    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("kernels for other GPUs find no order")
    of = of_lengths((1100, 1900), head_dim=dim, head_dim_v=dim)
    made, workspace = last_launch(cupy, monkeypatch, of, make(cupy.asarray, of))
    fields = next(launch.fields for launch in made.launches if launch.variant.op == "seen_counts")
    shape = fields["key_orders"], fields["key_parts"]

    def numbers(part: str) -> Any:
        begin, size = made.workspace[part]
        memory = cupy.cuda.UnownedMemory(workspace + begin, size, made)
        return cupy.ndarray(shape, "i4", cupy.cuda.MemoryPointer(memory, 0)).get()

    cells = cells_of(trace(make(np.asarray, of)["mask_mod"], "mask_mod"), of.batch, of.heads_q, 1100, 1900)
    steps = steps_of(cells != EMPTY, fields["block_q"], fields["key_blocks"])
    of_groups = steps.reshape(of.batch, of.heads_kv, of.heads_q // of.heads_kv, -1)
    steps = of_groups.sum(axis=2) if fields["cells_head"] else of_groups[:, :, 0]
    wanted = steps.reshape(-1, shape[1])[: shape[0]]
    np.testing.assert_array_equal(numbers("key_steps"), wanted)
    np.testing.assert_array_equal(numbers("key_order"), np.argsort(-wanted, axis=1, kind="stable"))
