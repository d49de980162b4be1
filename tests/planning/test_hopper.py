"""Problems that sm90 kernels run, reasons against the others, and calls whose pointers decide."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from drivers import Gpus
from plans import ARCHS, problem_of
from plans import problem as make_problem

import cuflash
from cuflash.errors import UnsupportedError
from cuflash.planning.device import DEVICES
from cuflash.planning.hopper import allows_tma
from cuflash.planning.plan import Plan
from cuflash.planning.planner import plan as make_plan
from cuflash.problem.array_spec import ArraySpec
from cuflash.problem.mod_spec import Bias, make_mod_spec
from cuflash.problem.operands import BACKWARD, FORWARD, mod_op
from cuflash.problem.options import Options
from cuflash.problem.problem import Problem
from cuflash.problem.validate import ValidatedCall
from cuflash.runtime import call as calls
from cuflash.runtime.call import CachedCall

H100 = DEVICES["sm_90"]
SHAPE = (2, 300, 4, 64)
SOME = ArraySpec.contiguous(SHAPE, "float16")


def is_hoppers(plan: Plan) -> bool:
    assert plan.variant.of_warpgroups == (plan.variant.arch == "sm_90a") == bool(plan.tma_operands)
    assert plan.launches[0].variant.of_warpgroups == (plan.variant.of_warpgroups and len(plan.launches) == 1)
    return plan.variant.of_warpgroups


def strided(op: str, name: str, strides: tuple[int, ...], **options: Any) -> Problem:
    """Returns a problem of dense arrays, except one operand with these strides."""
    specs = {operand: SOME for operand in "qkv"} | {name: SOME._replace(strides=strides)}
    if name in "qkv":
        return problem_of(*(specs[x] for x in "qkv"), op=op, **options)
    problem = problem_of(SOME, SOME, SOME, op=op)
    index = problem.op.index[name]
    return problem._replace(specs=(*problem.specs[:index], specs[name], *problem.specs[index + 1 :]))


SLICE = SOME._replace(shape=(2, 300, 4, 60))  # of rows of 64
UNEVEN = Problem.from_specs(BACKWARD, [SLICE] * 4, Options())
SLICED = {
    "forward": Problem.from_specs(FORWARD, [SOME, SOME, SLICE, SLICE], Options()),
    "float32": Problem.from_specs(
        FORWARD, [SOME, SOME, SLICE, SLICE._replace(dtype="float32")], Options(out_dtype="float32")
    ),
    "backward": Problem.from_specs(BACKWARD, [*[SLICE] * 5, None, None, *[SLICE] * 3], Options()),
}
ALL = ("forward", "lse", "backward")
STRIDES = "the strides of {} are not positive multiples of 16 bytes"
# (the ops, arguments of the problem or its strided operand, the reason against sm90 kernels)
Call = dict[str, Any] | tuple[str, tuple[int, ...]] | Problem
CAUSES: dict[str, tuple[tuple[str, ...], Call, str]] = {
    "float32": (ALL, {"dtype": "float32"}, "it takes float16 and bfloat16, not float32"),
    "flash1": (("forward",), {"algorithm": "flash1"}, "it computes flash2, not flash1"),
    "flashd": (("forward",), {"algorithm": "flashd"}, "it computes flash2, not flashd"),
    "nothing_seen": (ALL, {"causal": True, "diagonal_offset": -1000}, "no query sees any key"),
    "no_keys": (ALL, {"dims": (2, 300, 0, 4, 2)}, "no query sees any key"),
    "no_queries": (ALL, {"dims": (2, 0, 300, 4, 2)}, "no query sees any key"),
    "no_batch": (("backward",), {"dims": (0, 300, 300, 4, 2)}, "the batch is empty"),
    "head_dim": (("forward",), {"head_dim": 264}, "head dims (264, 64) are over 256"),
    "head_dim_v": (("forward",), {"head_dim_v": 264}, "head dims (64, 264) are over 256"),
    "odd_head_dim": (("forward", "lse"), {"head_dim": 65}, STRIDES.format("q")),
    "odd_head_dim_v": (("forward",), {"head_dim_v": 65}, STRIDES.format("v")),
    "odd_new_gradients": (("backward",), UNEVEN, STRIDES.format("dq")),
    "many_keys": (("backward",), {"dims": (2, 300, 2**23, 2, 2)}, "seqlen_k 8388608 is over 8388480"),
    "few_keys_wide": (("backward",), {"dims": (1, 300, 128, 8, 1), "head_dim": 256}, "with so few keys"),
    "reversed": (ALL, ("q", (76800, -256, 64, 1)), STRIDES.format("q")),
    "broadcast_k": (ALL, ("k", (0, 256, 64, 1)), STRIDES.format("k")),
    "broadcast_v": (("forward", "backward"), ("v", (76800, 256, 0, 1)), STRIDES.format("v")),
    "odd_out": (("forward",), ("out", (78000, 260, 65, 1)), STRIDES.format("out")),
    "odd_dout": (("backward",), ("dout", (78000, 260, 65, 1)), STRIDES.format("dout")),
    "slice_out": (("forward",), SLICED["forward"], "rows of out end within 16 bytes"),
    "slice_dq": (("backward",), SLICED["backward"], "rows of dq end within 16 bytes"),
    "odd_dk": (("backward",), ("dk", (78000, 260, 65, 1)), STRIDES.format("dk")),
}


@pytest.mark.parametrize(("name", "op"), [(name, op) for name, (ops, *_) in CAUSES.items() for op in ops])
def test_unsupported_calls_take_sm80_kernels_and_plans_have_the_reason(name: str, op: str) -> None:
    _, call, words = CAUSES[name]
    problem = call
    if not isinstance(problem, Problem):
        problem = make_problem(op=op, **call) if isinstance(call, dict) else strided(op, *call)
    plan = make_plan(problem, H100)
    assert not is_hoppers(plan)
    assert words in plan.fallback
    assert make_plan(problem, DEVICES["sm_80"]).fallback is None


@pytest.mark.parametrize("op", ["forward", "lse"])
def test_with_split_size_strides_do_not_decide_about_the_kernels(op: str) -> None:
    more = {"split_size": 128}
    assert is_hoppers(make_plan(make_problem(op=op, **more), H100))
    odd = make_plan(make_problem(op=op, head_dim=66, head_dim_v=66, **more), H100)
    assert "with split_size it takes head dims that are multiples of 8" in odd.fallback
    for problem, misaligned, words in (
        (strided(op, "q", (76800, -256, 64, 1), **more), (), STRIDES.format("q")),
        (make_problem(op=op, **more), ("k",), "k does not begin at a multiple of 16 bytes"),
    ):
        with pytest.raises(UnsupportedError, match="split_size") as error:
            make_plan(problem, H100, misaligned)
        assert words in str(error.value)
        assert not is_hoppers(make_plan(problem, DEVICES["sm_80"], misaligned))


def test_a_sliced_out_with_rows_of_whole_16_bytes_takes_sm90_kernels() -> None:
    assert is_hoppers(make_plan(SLICED["float32"], H100))


@pytest.mark.parametrize("op", ALL)
def test_what_is_near_to_a_cause_gets_hoppers_kernels(op: str) -> None:
    near: list[dict[str, Any]] = [
        {"causal": True, "diagonal_offset": -299}, {"dims": (2, 1, 1, 2, 2)}, {"head_dim": 8, "head_dim_v": 256},
        {"head_dim": 256, "head_dim_v": 8}, {"dims": (2, 300, 2**23 - 128, 2, 2)}, {"dims": (1, 300, 128, 8, 1)},
        {"dims": (1, 300, 128 * 66, 8, 1), "causal": True}, {"dims": (1, 300, 128, 1, 1), "causal": True},
    ]  # fmt: skip
    for more in near:
        more = {"dims": (2, 300, 500, 2, 2)} | more
        problem = make_problem(op=op, **more)
        plan = make_plan(problem, H100)
        assert is_hoppers(plan), more
        assert plan.fallback is None
        assert is_hoppers(make_plan(strided(op, "q", (76800, 64, 19200, 1)), H100))
        for arch in (arch for arch in ARCHS if arch != "sm_90"):
            assert not is_hoppers(make_plan(problem, DEVICES[arch]))
        for name in problem.op.names:
            off = make_plan(problem, H100, (name,))
            moved = name in plan.tma_operands
            assert is_hoppers(off) == (not moved), name
            assert off.fallback == (f"{name} does not begin at a multiple of 16 bytes" if moved else None)
        if op == "backward":
            for name in ("dq", "dk", "dv"):  # views of one packed array
                assert is_hoppers(make_plan(strided(op, name, (230400, 768, 64, 1)), H100))
            # Deterministic calls do not split the heads of a group among blocks, whose sums would have no fixed order.
            assert is_hoppers(make_plan(make_problem(op=op, deterministic=True, **more), H100)), more


@pytest.mark.parametrize("op", ALL)
def test_a_call_takes_the_generic_kernels_where_a_pointer_is_not_aligned(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = Gpus(monkeypatch)
    monkeypatch.setattr(calls, "relaxed_capture", contextlib.nullcontext)  # the driver's
    problem = problem_of(*[SOME._replace(device="cuda:1")] * 3, op=op)
    call, names = CachedCall(ValidatedCall(problem, (False,) * len(problem.op.names))), problem.op.names
    pointers = (*[2**20 + 4 * (name in ("lse", "dlse")) for name in names], 2**30)  # lse may be anywhere
    for number, name in enumerate(names):
        for _ in range(3):  # parameters are written, written and cached, and found in the cache
            assert call.aligned_plan.launch(pointers, 7)
            del gpus.launched[:]
            off = tuple(pointer + 2 * (position == number) for position, pointer in enumerate(pointers))
            assert (
                call.aligned_plan.launch(off, 7)
                == bool(gpus.launched)
                == (name not in call.aligned_plan.plan.tma_operands)
            )
            assert call.unaligned_plan(off).launch(off, 7)
    assert is_hoppers(call.aligned_plan.plan)
    off = tuple(pointer + 2 for pointer in pointers)
    assert not is_hoppers(call.unaligned_plan(off).plan)
    assert call.unaligned_plan(off) is call.unaligned_plan(off)


def test_a_bias_that_is_not_aligned_keeps_the_kernel_but_for_its_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(monkeypatch)
    monkeypatch.setattr(calls, "relaxed_capture", contextlib.nullcontext)  # the driver's
    q = SOME._replace(device="cuda:1")
    bias = ArraySpec.contiguous((1, q.shape[2], q.shape[1], q.shape[1]), "float32")._replace(device="cuda:1")
    op = mod_op(FORWARD, make_mod_spec(None, None, Bias("float32", (False, True, True, True))))
    problem = Problem.from_specs(op, [q, q, q, bias], Options())
    call, names = CachedCall(ValidatedCall(problem, (False,) * len(problem.op.names))), problem.op.names
    assert dict(call.plan.vector_loaded) == {"bias": 8}  # two of float32
    pointers = (*[2**20] * len(names), 2**30)
    off, far = (tuple(x + add * (n == names.index("bias")) for n, x in enumerate(pointers)) for add in (4, 8))
    assert call.aligned_plan.launch(far, 7)
    assert not call.aligned_plan.launch(off, 7)
    other = call.unaligned_plan(off)
    assert other.launch(off, 7)
    assert other.plan.variant.tile == call.plan.variant.tile
    assert (other.plan.vector_loaded, "pair<false>" in other.plan.variant.mod_code.text) == ({}, True)
    both = tuple(x + 2 * (n == 0) for n, x in enumerate(off))
    assert not is_hoppers(call.unaligned_plan(both).plan)
    assert call.unaligned_plan(both).launch(both, 7)
    assert len(gpus.launched) > 0


# Shape, strides in elements of 2 bytes, and True if TMA takes them.
TMA = (
    (SHAPE, (76800, 256, 64, 1), True),
    (SHAPE, (4 * 300 * 72, 4 * 72, 72, 1), True),  # a slice of wider rows
    (SHAPE, (76800, 256, 0, 1), False),
    (SHAPE, (76800, -256, 64, 1), False),
    (SHAPE, (76800, 252, 64, 1), False),
    (SHAPE, (76800, 264, 8, 1), True),
    (SHAPE, (2**39 - 8, 256, 64, 1), True),
    (SHAPE, (2**39, 256, 64, 1), False),
    ((1, 300, 1, 64), (-7, 64, 3, 1), True),  # strides of axes of length 1 are unused
    ((1, 2, 1, 64), (0, 0, 0, 1), False),
)


def test_tma_takes_positive_multiples_of_16_bytes_below_2_to_the_40() -> None:
    for shape, strides, allowed in TMA:
        assert allows_tma(shape, strides) is allowed, (shape, strides)
    assert allows_tma(SHAPE, (76800, 260, 64, 1), 4)
    assert not allows_tma(SHAPE, (76800, 260, 64, 1), 2)
    assert not allows_tma(SHAPE, (2**38, 256, 64, 1), 4)


def test_strides_are_no_part_of_what_is_compiled() -> None:
    for name, strides in (("q", (76800, -256, 64, 1)), ("k", (0, 256, 64, 1)), ("v", (78000, 260, 65, 1))):
        problem = strided("forward", name, strides)
        for device, misaligned in ((DEVICES["sm_80"], ()), (replace(H100, num_sms=7), ("q",))):
            dense = make_plan(problem_of(SOME, SOME, SOME), device, misaligned)
            assert [launch.variant for launch in make_plan(problem, device).launches] == [dense.variant]


@pytest.mark.parametrize("op", ALL)
def test_functions_that_divide_float64_for_each_pair_take_other_kernels(op: Any) -> None:
    times = np.arange(300) + 1.7e9

    def is_hopper(mask_mod: Any) -> bool:
        v = None if op == "lse" else SHAPE
        plan = cuflash.plan(SHAPE, SHAPE, v, dtype="float16", device="sm_90", op=op, mask_mod=mask_mod)
        assert (plan.fallback is None) == is_hoppers(plan)
        assert plan.fallback is None or "remainders of float64" in plan.fallback
        return plan.fallback is None

    assert not is_hopper(lambda b, h, i, j: times[i] // 60 == times[j] // 60)
    assert not is_hopper(lambda b, h, i, j: times[j] % 60 > 2.5)
    assert is_hopper(lambda b, h, i, j: times[h] // 60 > j)
    assert is_hopper(lambda b, h, i, j: (times[i] > times[j]) & ((i + 2**40) // 60 > j))
