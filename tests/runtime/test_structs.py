"""The structs of parameters: equal to CUDA's, filled by name, with tensor maps that are encoded once."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import Structure, addressof
from typing import Any

import pytest
from drivers import FakeDriver
from plans import problem as make_problem
from variants import append_of, failed_conditions, merge_of

from cuflash.errors import UnsupportedError
from cuflash.planning.device import DEVICES
from cuflash.planning.plan import Plan
from cuflash.planning.planner import plan as make_plan
from cuflash.planning.tiles_sm90 import TILES
from cuflash.planning.variant import PARAMS, PARAMS_OF_SUMS, PARAMS_OF_VARLEN
from cuflash.problem.array_spec import ArraySpec
from cuflash.problem.operands import FORWARD, VARLEN_OPS
from cuflash.problem.options import Options
from cuflash.problem.problem import Problem
from cuflash.problem.seqlen_info import OPEN, PADDED_SLOT
from cuflash.runtime import structs
from cuflash.runtime.structs import STRUCTS, ParamTemplate, size_of


def fields_of(struct: type[Structure], prefix: str = "", begin: int = 0) -> Iterator[tuple[str, int, int]]:
    """Yields (field, offset, bytes) of every field of a struct, fields of structs inside it as `a.b`."""
    for field, kind in struct._fields_:  # type: ignore[misc]
        if field == "padding_of_base":  # without a name in C++
            continue
        descriptor = getattr(struct, field)
        yield prefix + field, begin + descriptor.offset, descriptor.size
        if isinstance(kind, type(Structure)) and kind is not structs.Map:
            yield from fields_of(kind, f"{prefix}{field}.", begin + descriptor.offset)


def conditions(name: str, field: str, offset: int, size: int) -> list[str]:
    # NVRTC has no offsetof, which its front end turns into __INTADDR__ in every version.
    member = f"(({name}*)0)->{field}"
    return [f"__INTADDR__(&{member}) == {offset}", f"sizeof({member}) == {size}"]


@pytest.mark.parametrize("name", STRUCTS)
def test_every_field_stands_where_the_kernel_reads_it(name: str) -> None:
    fields = list(fields_of(STRUCTS[name]))
    right = [
        f"sizeof({name}) == {size_of(name)}",
        *(condition for field in fields for condition in conditions(name, *field)),
    ]
    field, offset, size = fields[-1]
    wrong = [conditions(name, field, offset + size, size)[0], conditions(name, field, offset, 2 * size)[1]]
    assert failed_conditions('#include "common/params.cuh"', right + wrong) == wrong


def test_every_kernel_has_a_struct_and_every_architecture_takes_it() -> None:
    assert {*PARAMS.values(), *PARAMS_OF_VARLEN.values(), *PARAMS_OF_SUMS.values(), "DeltaArrayParams"} == set(STRUCTS)
    assert all(size_of(name) <= 4096 for name in STRUCTS)


def filled(plan: Plan, number: int = 0, pointers: tuple[int, ...] = (0,) * 16) -> Any:
    """Returns the parameters of a launch with these pointers, as their struct."""
    launch = plan.launches[number]
    pytest.importorskip("cupy", reason="buffers are of CuPy's launches")
    buffer = ParamTemplate(plan.problem, launch, plan.workspace).pack(pointers)
    struct = STRUCTS[launch.variant.params].from_address(buffer.address)
    struct.buffer = buffer  # keeps its memory alive
    return struct


def test_fields_are_those_of_the_problem_and_the_launch() -> None:
    problem = make_problem(64, 40, softcap=30.0, softmax_scale=0.5, window_size=(20, 10), diagonal_offset=-50)
    plan = make_plan(problem, DEVICES["sm_80"])
    struct = filled(plan)
    mask = problem.mask
    for name in ("batch", "seqlen_q", "seqlen_k", "heads_q", "head_dim", "head_dim_v"):
        assert getattr(struct.problem, name) == getattr(problem, name)
    assert struct.problem.heads_per_kv == 2
    assert (struct.problem.mask_lo, struct.problem.mask_hi) == (mask.lo, mask.hi)
    assert (struct.problem.key_begin, struct.problem.key_end) == mask.key_range(0, 300)
    assert (struct.problem.row_begin, struct.problem.row_end) == mask.row_range(0, 500)
    assert [getattr(struct.problem.score, name) for name in problem.options.scores._fields] == pytest.approx(
        problem.options.scores
    )
    assert {name: getattr(struct, name) for name in plan.launches[0].fields} == dict(plan.launches[0].fields)
    q, out = problem.spec("q"), problem.spec("out")
    assert (struct.q.stride_batch, struct.q.stride_seqlen, struct.q.stride_head) == q.strides[:3]
    assert (struct.out.stride_batch, struct.out.stride_head) == (out.strides[0], out.strides[2])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_pointers_and_parts_of_the_workspace_are_placed_by_name(arch: str, deterministic: bool) -> None:
    problem = make_problem(64, 64, "backward", dims=(1, 64, 8, 4, 1), deterministic=deterministic)
    plan = make_plan(problem, DEVICES[arch], ("q",))
    names = problem.op.names
    pointers = (*(2**30 * (n + 1) for n in range(len(names))), 2**45)
    parts = {name: 2**45 + part.begin for name, part in plan.workspace.items()}
    assert {"stats"} < set(parts) or deterministic
    expected = dict(zip(names, pointers, strict=False)) | parts
    for number in range(len(plan.launches)):
        struct = filled(plan, number, pointers)
        for name, kind in struct._fields_:
            if kind is structs.Operand:
                assert getattr(struct, name).pointer == expected[name], name
            elif kind is structs.c_void_p:
                assert getattr(struct, name) == expected.get(name), name


def test_lengths_are_placed_by_name_with_the_layout_of_sequences() -> None:
    q, pages = ArraySpec.contiguous((50, 4, 64), "float16"), ArraySpec.contiguous((9, 16, 2, 64), "float16")
    bounds, used = ArraySpec.contiguous((4,), "int32"), ArraySpec.contiguous((3,), "int32")
    table = ArraySpec((3, 7), (20, 1), "int32", "cpu", "numpy")
    options = Options(window_size=(5, 2), diagonal_offset=3, max_seqlen_q=40)
    specs = [q, pages, pages, bounds, None, None, used, table]
    problem = Problem.from_specs(VARLEN_OPS["forward"], specs, options)
    struct = filled(make_plan(problem, DEVICES["sm_80"]), 0, tuple(2**30 * (n + 1) for n in range(11))).problem
    assert {name: getattr(struct, name) for name in problem.op.names[3:9]} == {
        name: 2**30 * (n + 4) for n, name in enumerate(problem.op.names[3:9])
    }
    assert (struct.batch, struct.seqlen_q, struct.seqlen_k, struct.page_table_stride) == (3, 40, 7 * 16, 20)
    assert (struct.rows_q, struct.rows_k, struct.batch_k, struct.zero_unused_rows) == (50, 16, 9, 1)
    assert (struct.mask_first, struct.mask_last, struct.mask_from_end) == (-2, 5, 0)
    assert (struct.padded_rows_q, struct.padded_rows_k) == (128 * (0 + 3 + 2), 128 * 3)
    program = '#include "common/varlen.cuh"'
    wrong = f"kPaddedSlot == {PADDED_SLOT + 1}"
    conditions = [f"kPaddedSlot == {PADDED_SLOT}", f"VarlenSequence::kOpen == {OPEN}", wrong]
    assert failed_conditions(program, conditions) == [wrong]


def test_wide_accesses_are_allowed_where_every_row_starts_at_16_bytes() -> None:
    dense = ArraySpec.contiguous((2, 9, 3, 8), "float16")
    odd = ArraySpec((2, 9, 3, 8), (2 * 9 * 30, 30, 10, 1), "float16", "cpu", "numpy")
    plan = make_plan(Problem.from_specs(FORWARD, [dense, odd, dense], Options()), DEVICES["sm_80"])
    for last, aligned in ((0, (1, 0, 1, 1)), (8, (1, 0, 0, 1))):
        struct = filled(plan, 0, (2**30, 2**31, 2**32 + last, 2**33, 0))
        assert tuple(x.aligned for x in (struct.q, struct.k, struct.v, struct.out)) == aligned


def test_states_are_placed_by_number() -> None:
    struct = filled(make_plan(merge_of("float16", 64, count=3), DEVICES["sm_80"]), 0, (1, 2, 3, 4, 5, 6, 7, 8))
    assert (list(struct.outs[:4]), list(struct.lses[:4])) == ([1, 2, 3, None], [4, 5, 6, None])
    assert (struct.out, struct.lse, struct.num_states, struct.heads, struct.seqlen) == (7, 8, 3, 1, 8)


def test_new_rows_have_places_and_tables_and_absent_arrays_are_null() -> None:
    problem = append_of("float16", queries=3, pairs=8, page_size=16, q_same_position=True)
    names = problem.op.names
    pointers = tuple(0 if spec is None else 2**30 * (n + 1) for n, spec in enumerate(problem.specs))
    plan = make_plan(problem, DEVICES["sm_80"])
    struct = filled(plan, 0, pointers)
    pointer_of = dict(zip(names, pointers, strict=True))
    for name, kind in struct._fields_:
        if kind is structs.Operand:
            operand, (batch, seqlen, head, _) = getattr(struct, name), problem.spec(name).strides
            assert (operand.pointer, operand.aligned) == (pointer_of[name], 1), name
            assert (operand.stride_batch, operand.stride_seqlen, operand.stride_head) == (batch, seqlen, head), name
        elif kind is structs.c_void_p:
            assert (getattr(struct, name) or 0) == pointer_of[name], name
    assert (struct.cache_batch_idx, struct.cu_seqlens_k, struct.cu_seqlens_q) == (None, None, None)
    assert {name: getattr(struct, name) for name in plan.launches[0].fields} == dict(plan.launches[0].fields)
    without = append_of("float16")
    struct = filled(make_plan(without, DEVICES["sm_80"]), 0, pointers[: len(without.op.inputs)])
    assert (struct.q.pointer, struct.q_out.pointer, struct.q.stride_batch, struct.heads_q) == (None, None, 0, 0)


WINDOW: dict[str, Any] = {"window_size": (20, 10), "diagonal_offset": 100, "dims": (2, 70, 500, 4, 2)}
POINTERS = 2**30, 2**31, 2**32, 2**33, 2**34


def calls_of(driver: FakeDriver, name: str) -> list[Any]:
    """Returns (address, further arguments) of the driver's calls of one kind."""
    return [call for called, *call in driver.calls if called == name]


def moves(driver: FakeDriver, struct: Structure) -> list[tuple[int, int]]:
    """Returns (byte in the struct, address) of the moved maps."""
    begin = addressof(struct)
    return [(address - begin, pointer) for address, (pointer,) in calls_of(driver, "cuTensorMapReplaceAddress")]


def test_tensor_maps_of_the_operands_hold_the_visible_keys(driver: FakeDriver) -> None:
    problem = make_problem(dtype="float16", out_dtype="float32", **WINDOW)
    begin, end = problem.mask.key_range(0, 70)
    assert (begin, end) == (80, 180)
    struct = filled(make_plan(problem, DEVICES["sm_90"]), 0, POINTERS)
    assert addressof(struct) % 64 == 0
    first = begin * 2 * 64 * 2  # bytes
    expected = (2**30, 2**31 + first, 2**32 + first, 2**33)
    assert moves(driver, struct) == list(zip((0, 128, 256, 384), expected, strict=True))
    encoded_maps = [more for _, more in calls_of(driver, "cuTensorMapEncodeTiled")]  # k and v are alike
    dtypes, _, _, lengths, _, boxes, *_ = zip(*encoded_maps, strict=True)
    assert dtypes == (6, 6, 7)  # float16 and float32 to the driver
    assert lengths == ((64, 70, 4, 2), (64, 100, 2, 2), (64, 70, 4, 2))
    rows = 64, TILES[0].block_k  # q of a warpgroup
    assert boxes == (*((64, n, 1, 1) for n in rows), (32, 16, 1, 1))  # out of a warp, 128 bytes


def test_a_tensor_map_is_encoded_once_and_moved_to_its_operand(driver: FakeDriver) -> None:
    plan = make_plan(make_problem(**WINDOW), DEVICES["sm_90"])
    filled(plan, 0, POINTERS)
    driver.calls.clear()
    struct = filled(plan, 0, (2**30, 2**31, 2**32 + 64, 2**33 + 128, 2**35))  # lse has none
    assert len(driver.calls) == 4
    assert moves(driver, struct)[2:] == [(256, 2**32 + 64 + 80 * 256), (384, 2**33 + 128)]


def test_an_address_that_the_driver_refuses_is_named(driver: FakeDriver) -> None:
    plan = make_plan(make_problem(**WINDOW), DEVICES["sm_90"])
    filled(plan)
    driver.result = 1
    with pytest.raises(UnsupportedError, match="the driver refuses the address 0x40000000"):
        filled(plan, 0, POINTERS)


def test_lse_has_tensor_maps_of_q_and_k_alone(driver: FakeDriver) -> None:
    struct = filled(make_plan(make_problem(op="lse", **WINDOW), DEVICES["sm_90"]), 0, (2**30, 2**31, 2**34))
    assert [address for address, _ in moves(driver, struct)] == [0, 128]


def test_gradients_have_maps_of_all_rows_and_inputs_of_visible_rows(
    driver: FakeDriver,
) -> None:
    more: dict[str, Any] = WINDOW | {"dims": (2, 170, 500, 4, 4), "diagonal_offset": -50}
    problem = make_problem(op="backward", **more)
    assert problem.mask.key_range(0, 170) == (0, 130)
    assert problem.mask.row_range(0, 500) == (40, 170)
    pointers = [2**30 * (n + 1) for n in range(11)]
    struct = filled(make_plan(problem, DEVICES["sm_90"]), 1, tuple(pointers))
    moved = ("q", "k", "v", "dout", "dq", "dk", "dv")
    first = dict.fromkeys(("q", "dout"), 40 * 4 * 64 * 2)  # bytes
    addresses = [pointer for _, pointer in moves(driver, struct)]
    assert addresses == [pointers[problem.op.index[name]] + first.get(name, 0) for name in moved]
    encoded_maps = [more for _, more in calls_of(driver, "cuTensorMapEncodeTiled")]
    # of q and dout, of k and v, of dq, of dk and dv: (rows, box)
    assert [(more[3][1], more[5][1]) for more in encoded_maps] == [(130, 128), (130, 128), (170, 16), (500, 16)]
