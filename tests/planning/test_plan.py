"""Properties of every plan, checked by walking its blocks: they cover the work, and use the workspace correctly."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plans import plan_forward, planned_with
from plans import problem as make_problem
from walks import Piece, Rows, Touch, Walk

from cuflash.errors import UnsupportedError
from cuflash.planning.device import DEVICES, Device
from cuflash.planning.plan import MAX_GRID, Plan
from cuflash.planning.planner import plan as make_plan
from cuflash.problem.problem import Problem
from cuflash.units import memory, work

Array = np.ndarray[Any, Any]
RESULTS = {"forward": ["out0", "lse"], "lse": ["lse"], "backward": ["dq", "dk", "dv"]}


class Memory:
    """The floats of a workspace while the blocks of a plan use it."""

    def __init__(self, plan: Plan) -> None:
        sizes = {name: part.size // 4 for name, part in plan.workspace.items()}
        self.written = {name: np.zeros(size, bool) for name, size in sizes.items()}
        self.stores = {name: np.zeros(size, np.uint8) for name, size in sizes.items()}

    def use(self, touches: list[Touch]) -> None:
        """Applies the touches of one launch's blocks, in any order, and checks them."""
        for stores in self.stores.values():
            stores[:] = 0
        for how, part, floats in touches:
            assert 0 <= floats.start <= floats.stop <= len(self.written[part]), f"{how} past the end of {part}"
            if how in ("store", "zero"):
                self.stores[part][floats] += 1
            elif how != "turn":
                assert self.written[part][floats].all(), f"{how} of {part}, not written before"
        for part, stores in self.stores.items():
            assert stores.max(initial=0) <= 1, f"two blocks store the same of {part}"
        for how, part, floats in touches:
            self.written[part][floats] |= how in ("store", "zero", "turn")


def check(plan: Plan, problem: Problem, device: Device) -> None:
    """Checks that every pair is summed once, every row is written, no block is idle, and the workspace is respected."""
    check_limits(plan, device)
    shape = problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k
    columns = max([1, *(launch.fields.get("num_slices", 1) for launch in plan.launches)])
    names = [*RESULTS[problem.op.name], *(f"out{i}" for i in range(1, columns))]
    pairs: dict[str, Array] = {name: np.zeros(shape, np.uint8) for name in names}
    heads = {name: problem.heads_kv if name in ("dk", "dv") else problem.heads_q for name in names}
    length = {name: problem.seqlen_k if name in ("dk", "dv") else problem.seqlen_q for name in names}
    rows: dict[str, Array] = {name: np.zeros((problem.batch, heads[name], length[name]), np.uint8) for name in names}
    memory = Memory(plan)
    for launch in plan.launches:
        touches: list[Touch] = []
        writers: Counter[Rows] = Counter()
        for block in Walk(plan, launch).blocks():
            assert block, f"a block of {launch.variant.name} is without work"
            touches += [item for item in block if isinstance(item, Touch)]
            for item in block:
                if isinstance(item, Piece):
                    for name in item.results.split():
                        pairs[name][item.batch, item.head, as_slice(item.queries), as_slice(item.keys)] += 1
            writers.update({item for item in block if isinstance(item, Rows)})
        memory.use(touches)
        for item, blocks in writers.items():
            assert item.rows, f"a block of {launch.variant.name} has no row"
            assert blocks == 1 or "semaphores" in plan.workspace, "several blocks write the same, and not in turns"
            rows[item.result][item.batch, item.head, as_slice(item.rows)] += 1
    visible_pairs = problem.mask.visible(np.arange(problem.seqlen_q), np.arange(problem.seqlen_k))
    for name in names:
        assert pairs[name].max(initial=0) <= 1, f"{name}: a pair is added up twice"
        assert pairs[name][:, :, visible_pairs].all(), f"{name}: a visible pair is left out"
        assert rows[name].all(), f"{name}: a row is not written"
        unseen = name == "dq" and "semaphores" in plan.workspace  # both a dq tile and delta may write a row
        assert unseen or rows[name].max(initial=0) <= 1, f"{name}: two blocks write the same row"


def as_slice(rows: range) -> slice:
    return slice(rows.start, rows.stop)


def check_limits(plan: Plan, device: Device) -> None:
    """Checks the limits of launches, and the parts of the workspace."""
    for launch in plan.launches:
        variant = launch.variant
        assert 0 <= launch.num_blocks <= MAX_GRID
        assert variant.num_threads % 32 == 0 < variant.num_threads <= 1024
        assert variant.smem_bytes <= device.smem_per_block
        assert all(0 <= value < 2**31 for value in launch.fields.values())
        # A product that kernels compute in 32 bits.
        blocks = max(launch.fields.get("num_q_blocks", 1), launch.fields.get("num_k_blocks", 1))
        assert launch.fields.get("heads_in_l2", 1) * blocks < 2**32
        tile, problem = variant.tile, plan.problem
        assert isinstance(problem, Problem)
        if launch.fields.get("shared_steps", 0):
            shared = launch.fields["shared_keys"] * launch.fields["num_q_blocks"]
            assert shared * problem.heads_q // problem.heads_kv < 2**31
        if tile is not None:
            slices = launch.fields.get("num_slices", 1)
            assert problem.head_dim <= tile.head_dim
            assert (slices - 1) * tile.head_dim_v < max(problem.head_dim_v, 1), "a slice is without columns"
            assert tile.head_dim_v == 0 or problem.head_dim_v <= slices * tile.head_dim_v
        for box in launch.tma_boxes.values():
            assert 0 < box.rows <= 256
            assert 0 <= box.begin < box.end
    end = 0
    for name, part in plan.workspace.items():
        assert part.begin >= end, "parts overlap"
        assert part.begin % (4 if name == "semaphores" else 16) == 0 < part.size
        end = part.begin + part.size
    assert end == plan.workspace_bytes


LENGTHS = st.sampled_from([0, 1, 17, 63, 64, 65, 100, 127, 128, 129, 191, 193, 256, 300, 300, 300])
SIDES = st.sampled_from([None, None, None, -1, 0, 1, 16, 70, 200])
MASKS = st.fixed_dictionaries(
    {
        "causal": st.booleans(),
        "window_size": st.tuples(SIDES, SIDES),
        "diagonal_offset": st.one_of(st.none(), st.integers(-90, 90)),
    }
)
HEAD_DIMS = st.sampled_from([64, 8, 72, 96, 128, 136, 192, 200, 256, 1])


@st.composite
def cases(draw: st.DrawFn, op: str, arch: str) -> tuple[Problem, Device, tuple[str, ...]]:
    """Draws a problem, a GPU with few SMs, which short problems fill, and the misaligned operands."""
    device = replace(DEVICES[arch], num_sms=draw(st.sampled_from([1, 2, 5, 132])))
    heads_kv, group = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (2, 3), (1, 4), (1, 7)]))
    dims = draw(st.sampled_from([1, 2, 3, 1, 2, 0])), draw(LENGTHS), draw(LENGTHS), heads_kv * group, heads_kv
    more: dict[str, Any] = {"deterministic": draw(st.booleans())} if op == "backward" else {}
    if draw(st.booleans()):
        more |= draw(MASKS)
    dtype = draw(st.sampled_from(["float16", "bfloat16", "float16", "float32"]))
    problem = make_problem(draw(HEAD_DIMS), draw(HEAD_DIMS), op, dims=dims, dtype=dtype, **more)
    return problem, device, draw(st.sampled_from([(), (), (), ("q",)]))


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90"])
@pytest.mark.parametrize("op", RESULTS)
@settings(max_examples=300)
@given(st.data())
def test_blocks_cover_the_work_and_keep_to_the_workspace(op: str, arch: str, data: st.DataObject) -> None:
    problem, device, misaligned = data.draw(cases(op, arch))
    # Without decode kernels, which schedule their work on the device.
    with planned_with(plan_forward, decode_plans=lambda *_: ()):
        check(make_plan(problem, device, misaligned), problem, device)


FEW, ONE = (replace(DEVICES[arch], num_sms=count) for arch, count in (("sm_90", 4), ("sm_80", 1)))
# A problem for each way of dividing work, with the field of the main launch that is over 1 for it.
WAYS: dict[str, tuple[Problem, Device, str]] = {
    "slices": (make_problem(300, 500), DEVICES["sm_90"], "num_slices"),
    "splits": (make_problem(40, 72, "backward", dims=(1, 70, 90, 6, 2)), DEVICES["sm_80"], "splits"),
    "shared_keys": (make_problem(64, 64, dims=(3, 2, 5000, 6, 3), causal=True), DEVICES["sm_80"], "splits queries"),
    "shared_heads": (make_problem(128, 96, dims=(1, 1, 3000, 40, 1)), DEVICES["sm_86"], "splits head_parts"),
    "shared_window": (
        make_problem(dims=(1, 70, 5000, 3, 3), window_size=(2000, 30)),
        DEVICES["sm_89"],
        "splits queries",
    ),
    "uneven_splits": (make_problem(64, 64, "backward", dims=(1, 70, 90, 5, 1)), ONE, "splits"),
    "shared": (make_problem(128, 128, "backward", dims=(1, 1024, 300, 5, 5)), FEW, "shared_keys whole_blocks"),
    "all_shared": (make_problem(128, 128, "backward", dims=(1, 512, 300, 2, 1)), FEW, "shared_keys"),
    "some_shared": (make_problem(96, 96, "backward", dims=(1, 500, 300, 9, 9)), FEW, "key_blocks shared_keys"),
    "tiles_of_80": (make_problem(128, 128, "backward", dims=(1, 8192, 130, 1, 1)), FEW, "num_q_blocks"),
    "parts_of_heads": (make_problem(96, 96, "backward", dims=(1, 900, 300, 5, 1), causal=True), FEW, "parts_log2"),
    "several": (make_problem(64, 64, "backward", dims=(2, 200, 700, 9, 9), causal=True), FEW, "key_blocks"),
    "tiles": (make_problem(128, 128, dims=(3, 300, 300, 7, 7), causal=True), FEW, "num_tiles heads_in_l2"),
    "in_order": (make_problem(64, 64, "backward", dims=(1, 300, 300, 4, 2), deterministic=True), FEW, ""),
    "dq_alone": (make_problem(64, 64, "backward", dims=(1, 70, 90, 5, 1), deterministic=True), ONE, ""),
    "rows": (make_problem(256, 256, "backward", dims=(3, 300, 300, 9, 9), causal=True), FEW, "heads_in_l2"),
}


@pytest.mark.parametrize("name", WAYS)
def test_each_way_of_dealing_out_work_covers_it(name: str) -> None:
    problem, device, signs = WAYS[name]
    planned = make_plan(problem, device)
    fields = planned.launches[min(1, len(planned.launches) - 1)].fields
    assert all(fields[sign] > 1 for sign in signs.split())
    assert name != "all_shared" or fields["whole_blocks"] == 0
    check(planned, problem, device)


LONG = st.one_of(st.integers(0, 2**30 - 4096), st.sampled_from([1, 2**20, 2**24, 2**29]))
MANY = st.sampled_from([1, 2, 3, 64, 2**12])


@pytest.mark.parametrize("op", RESULTS)
@settings(max_examples=300)
@given(LONG, LONG, MANY, MANY, MANY, st.booleans(), st.booleans(), st.sampled_from([64, 96, 128, 256]))
@example(2**30 - 4096, 12800, 1, 1, 2, False, False, 128)  # too many steps to share in 32 bits
def test_long_problems_keep_to_the_limits_or_have_a_way_out(
    op: str, sq: int, sk: int, batch: int, heads: int, group: int, causal: bool, fixed: bool, dim: int
) -> None:
    more = {"deterministic": fixed} if op == "backward" else {}
    problem = make_problem(dim, dim, op, dims=(batch, sq, sk, heads * group, heads), causal=causal, **more)
    for arch in ("sm_80", "sm_90"):
        try:
            plan = make_plan(problem, DEVICES[arch])
        except UnsupportedError as error:
            assert f"at most {MAX_GRID}. Split the batch" in str(error)  # noqa: PT017
            assert batch * heads * group * (sq + sk) >= MAX_GRID, "so few rows do not need so many blocks"
        else:
            check_limits(plan, DEVICES[arch])


@settings(max_examples=100)
@given(st.integers(1, 300), st.integers(1, 300), MASKS, st.sampled_from(["forward", "backward"]))
def test_the_copy_engine_reads_keys_that_are_seen_and_writes_every_row(
    sq: int, sk: int, mask: dict[str, Any], op: str
) -> None:
    problem = make_problem(dims=(1, sq, sk, 2, 2), op=op, **mask)
    visible_pairs = problem.mask.visible(np.arange(sq), np.arange(sk))
    tma_boxes = {
        name: box for launch in make_plan(problem, DEVICES["sm_90"]).launches for name, box in launch.tma_boxes.items()
    }
    for name, box in tma_boxes.items():
        whole = name in ("out", "dq", "dk", "dv") or (op, name) == ("forward", "q")
        visible = np.flatnonzero(visible_pairs.any(axis=0 if name in ("k", "v") else 1))
        length = sk if name in ("dk", "dv") else sq
        assert (box.begin, box.end) == ((0, length) if whole else (visible[0], visible[-1] + 1)), name


def test_memory_and_work_in_numbers() -> None:
    problem = make_problem(64, 96, dims=(2, 300, 500, 4, 2))
    plan = make_plan(problem, DEVICES["sm_90"])
    assert (plan.out_bytes, plan.lse_bytes, plan.workspace_bytes) == (2 * 2 * 300 * 4 * 96, 4 * 2 * 4 * 300, 0)
    assert plan.flops == 2 * 2 * 4 * 300 * 500 * (64 + 96)
    wide = make_problem(64, 96, dims=(2, 300, 500, 4, 2), out_dtype="float32")
    assert make_plan(wide, DEVICES["sm_90"]).out_bytes == 2 * plan.out_bytes
    assert make_plan(make_problem(op="lse"), DEVICES["sm_90"]).out_bytes == 0
    assert make_plan(make_problem(dtype="float64"), None).lse_bytes == 8 * 2 * 4 * 300


@pytest.mark.parametrize("op", RESULTS)
@pytest.mark.parametrize(("arch", "dtype"), [("sm_80", "float16"), ("sm_90", "float16"), ("sm_90", "float32")])
def test_a_printed_plan_has_kernels_tiles_memory_and_fallback(op: str, arch: str, dtype: str) -> None:
    plan = make_plan(make_problem(op=op, dtype=dtype, dims=(2, 300, 500, 2, 2)), DEVICES[arch])
    dims = "head_dim 64" if op == "lse" else "head_dim 64, head_dim_v 64"
    expected = [
        f"problem    {op} of {dtype}",
        f"lengths    batch 2, seqlen_q 300, seqlen_k 500, heads_q 2, heads_kv 2, {dims}",
    ]
    if len(plan.launches) == 1:
        expected.append(f"kernel     {plan.kernel}")
    expected.append(f"device     {plan.device}")
    for launch in plan.launches:
        variant, tile = launch.variant, launch.variant.tile
        text = f"{launch.num_blocks} blocks of {variant.num_threads} threads, {memory(variant.smem_bytes)} of shared "
        expected += [f"kernel     {variant.name}: {text}memory each"] * (len(plan.launches) > 1)
        if tile is not None:
            padded = f"head dims padded to ({tile.head_dim}, {tile.head_dim_v})"
            shape = f"{tile.block_q} queries x {tile.block_k} keys, {padded}"
            expected.append(f"tile       {shape}, {tile.stages} stage{'s' * (tile.stages > 1)}, {tile.warps} warps")
        if launch.arrivals:
            expected.append(f"splits     {launch.splits_text}")
        expected += [f"launch     {text}memory each"] * (len(plan.launches) == 1)
    if (arch, dtype) == ("sm_90", "float32"):
        expected.append("fallback   not Hopper's own kernel: it takes float16 and bfloat16, not float32")
    sizes = plan.out_bytes, plan.lse_bytes, plan.workspace_bytes
    text = "out {}, lse {}, workspace {}".format(*map(memory, sizes))
    if op == "backward":
        text = f"gradients {memory(plan.out_bytes)}, workspace {memory(plan.workspace_bytes)}"
    assert str(plan).splitlines() == [*expected, f"memory     {text}", f"work       {work(plan.flops)}"]
    assert repr(plan) == str(plan)
