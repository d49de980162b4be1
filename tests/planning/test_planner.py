"""`cuflash.plan` and the planner behind it: accepted and refused calls, and their variants."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from plans import ARCHS, DTYPES
from plans import problem as make_problem
from variants import merge_of, variants

import cuflash
from cuflash.errors import ProblemError, UnsupportedError
from cuflash.planning import device as devices
from cuflash.planning.device import DEVICES
from cuflash.planning.merge import MAX_STATES
from cuflash.planning.planner import plan as make_plan
from cuflash.planning.variant import Variant
from cuflash.problem.problem import Problem

H100 = DEVICES["sm_90"]
SHAPES = ((2, 300, 4, 64), (2, 500, 2, 64), (2, 500, 2, 96))


def variants_of(problem: Problem, arch: str, misaligned: tuple[str, ...] = ()) -> list[Variant]:
    return [launch.variant for launch in make_plan(problem, DEVICES[arch], misaligned).launches]


def test_the_devices_of_the_contract_can_be_named() -> None:
    assert tuple(DEVICES) == ARCHS == tuple(devices.named(arch).arch for arch in ARCHS)


def test_a_gpu_runs_code_of_its_generation_if_not_newer() -> None:
    """A Tegra runs code for its architecture only."""
    codes = (80, 86, 87, 88, 89, 90, 100, 101, 103, 110, 120, 121)
    runs = {arch: [code for code in codes if devices.code_runs(code, arch)] for arch in (*codes, 129, 130)}
    assert runs == {
        80: [80], 86: [80, 86], 87: [87], 88: [80, 86, 88], 89: [80, 86, 88, 89], 90: [90],
        100: [100], 101: [101, 110], 103: [100, 103], 110: [101, 110], 120: [120], 121: [120, 121], 129: [120, 121],
        130: [],
    }  # fmt: skip


def test_variants_with_different_constants_never_share_a_name() -> None:
    by_name: dict[str, dict[str, Any]] = {}
    # One GPU for each amount of shared memory, as sm80 tiles depend on nothing else.
    by_memory = {device.smem_per_block: arch for arch, device in DEVICES.items()}
    for variant in itertools.chain.from_iterable(map(variants, ("sm_90", *by_memory.values()))):
        constants = {"source": variant.source, **variant.constants}
        assert by_name.setdefault(variant.name, constants) == constants, variant.name
        assert constants["KERNEL"] == variant.name
        assert variant.name.isidentifier()  # it becomes the kernel's symbol
    distinct = {tuple(sorted((k, v) for k, v in c.items() if k != "KERNEL")) for c in by_name.values()}
    assert len(distinct) == len(by_name) > 100  # no kernel has two names


CALLS: dict[str, dict[str, Any]] = {
    "forward": {},
    "flashd": {"algorithm": "flashd"},
    "lse": {"op": "lse"},
    "backward": {"op": "backward"},
    "deterministic": {"op": "backward", "deterministic": True},
}
DATA: tuple[dict[str, Any], ...] = (
    {"dims": (1, 1, 1, 2, 2)},
    {"dims": (5, 999, 16384, 64, 8)},
    {"causal": True, "dims": (2, 300, 9000, 4, 4)},
    {"window_size": (900, 600), "dims": (2, 3000, 9000, 4, 4)},
    {"softmax_scale": 0.7},
)


@pytest.mark.parametrize("head_dim", [96, 128, 256])
@pytest.mark.parametrize("arch", ["sm_89", "sm_90"])
@pytest.mark.parametrize("call", CALLS)
def test_no_length_scale_or_mask_is_part_of_what_is_compiled(call: str, arch: str, head_dim: int) -> None:
    def kernels(misaligned: tuple[str, ...] = (), **more: Any) -> list[Variant]:
        arguments = {"dims": (2, 300, 500, 4, 4), "num_splits": 1} | CALLS[call] | more
        return variants_of(make_problem(head_dim, head_dim, **arguments), arch, misaligned)

    hoppers, generic = kernels(), kernels(("q",))
    for changes in DATA:
        assert kernels(**changes) == hoppers
        assert kernels(("q",), **changes) == generic
    capped = kernels(softcap=3.0)
    assert capped == kernels(softcap=6.0)
    assert [v.softcap for v in capped] == [v.of_warpgroups for v in hoppers]  # other kernels read a parameter
    assert [replace(v, softcap=False, tile=None) for v in capped] == [replace(v, tile=None) for v in hoppers]
    assert kernels(("q",), softcap=3.0) == generic
    assert (hoppers == generic) == (arch != "sm_90" or call == "flashd")


def test_out_dtype_and_algorithm_are_part_of_what_is_compiled() -> None:
    for arch in ("sm_80", "sm_90"):
        (plain,) = variants_of(make_problem(), arch)
        assert variants_of(make_problem(out_dtype="float32"), arch) == [replace(plain, out_dtype="float32")]
        (flashd,) = variants_of(make_problem(algorithm="flashd"), arch)
        assert (flashd.algorithm, flashd.source) == ("flashd", "sm80/forward.cu")


def test_standard_takes_no_variable_length_sequences() -> None:
    with pytest.raises(UnsupportedError, match="'standard' takes no variable-length sequences on a GPU"):
        cuflash.plan(*SHAPES, dtype="float16", device="sm_90", algorithm="standard", seqused_k=(2,))


def test_standard_runs_through_cupy_and_says_what_it_materialises() -> None:
    plan = make_plan(make_problem(algorithm="standard"), H100)
    assert (plan.kernel, plan.device, plan.launches, plan.variant) == ("cupy_standard", "H100", (), None)
    assert plan.workspace_bytes >= 4 * 2 * 4 * 300 * 500
    assert make_plan(make_problem(600, 600, algorithm="standard"), H100).kernel == "cupy_standard"


def test_the_public_plan_takes_shapes_and_a_device_name() -> None:
    for arch in ARCHS:
        assert cuflash.plan(*SHAPES, dtype="bfloat16", device=arch) == make_plan(make_problem(64, 96), DEVICES[arch])
    assert cuflash.plan(*SHAPES[:2], op="lse", dtype="bfloat16", device="sm_80").kernel.startswith("lse_sm80_bf16_d64")
    cpu = cuflash.plan(*SHAPES, op="backward", dtype="bfloat16", device="cpu")
    assert (cpu.kernel, cpu.device, cpu.launches) == ("reference_backward_flash2", "cpu", ())
    assert "launch" not in str(cpu)


def test_the_public_plan_takes_arrays_and_every_argument_of_the_calls() -> None:
    q, k, v = (np.zeros(shape, np.float16) for shape in SHAPES)
    assert cuflash.plan(q, k, v).kernel == "reference_forward_flash2"
    more = {"causal": True, "window_size": (9, -1), "diagonal_offset": 3, "softcap": 2.0, "softmax_scale": 0.5}
    forward = {"algorithm": "flashd", "out_dtype": "float32"}
    for op, extra in (("forward", forward), ("backward", {"deterministic": True})):
        plan = cuflash.plan(q, k, v, op=op, device="sm_90", **more, **extra)  # type: ignore[arg-type]
        assert plan == make_plan(make_problem(64, 96, op=op, dtype="float16", **more, **extra), H100)
    assert cuflash.plan(q, k, v, op="backward", device="sm_80") == make_plan(
        make_problem(64, 96, op="backward", dtype="float16", deterministic=False), DEVICES["sm_80"]
    )
    out = np.zeros((2, 300, 4, 96 + 1), np.float16)[..., :96]
    plan = cuflash.plan(q, k, v, out=out, device="sm_90")
    assert not plan.variant.of_warpgroups
    assert "strides of out" in plan.fallback


def test_shapes_are_planned_on_the_first_gpu_or_else_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "count", lambda: 0)
    assert cuflash.plan(*SHAPES, dtype="float16").device == "cpu"
    monkeypatch.setattr(devices, "count", lambda: 2)
    monkeypatch.setattr(devices, "query", lambda ordinal: replace(H100, name=f"GPU {ordinal}"))
    assert cuflash.plan(*SHAPES, dtype="float16").device == "GPU 0"
    assert cuflash.plan(*SHAPES, dtype="float16", device="cuda:1").device == "GPU 1"
    assert cuflash.plan(*(np.zeros(shape, np.float16) for shape in SHAPES)).device == "cpu"


NOT_FORWARD = "takes neither algorithm nor out nor out_dtype"
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "op": ({"op": "merge"}, "op='merge'.*forward, lse, backward"),
    "op_without_hash": ({"op": ["lse"]}, r"op=\['lse'\].*forward, lse, backward"),
    "no_dtype": ({"dtype": None}, "q is the shape .*give dtype="),
    "no_v": ({"v": None}, "v is a NoneType"),
    "lse_with_v": ({"op": "lse"}, "op='lse' takes q and k alone"),
    "list": ({"q": [[2, 300], 4, 64]}, "q has shape .*; give lengths that are integers of 0 and more"),
    "negative_length": ({"q": (2, -300, 4, 64)}, "q .*-300"),
    "float_length": ({"q": (2, 300.0, 4, 64)}, r"q .*300\.0"),
    **{
        f"device_{name}": ({"device": name}, rf"device='{name}' is not known; .*cuda:0, or one of sm_80, .*sm_121")
        for name in ("sm_", "sm_130", "sm_90a", "cuda:x", "")
    },
    **{
        f"device_{name}": ({"device": name}, rf"device='{name}' is too old: .*need sm_80 or newer; .*sm_80, .*sm_121")
        for name in ("sm_20", "sm_75")
    },
    "device_number": ({"device": 0}, "device=0 is not known; .*sm_80, .*sm_121"),
    "fixed_forward": ({"deterministic": True}, r"deterministic=True, op='forward'.*only for backward"),
    "fixed_lse": ({"op": "lse", "v": None, "deterministic": True}, r"deterministic=True, op='lse'.*only for backward"),
    "fixed_text": ({"op": "backward", "deterministic": "no"}, r"deterministic='no'.*True or False"),
    "backward_algorithm": ({"op": "backward", "algorithm": "flashd"}, f"op='backward' {NOT_FORWARD}"),
    "backward_out_dtype": ({"op": "backward", "out_dtype": "float32"}, f"op='backward' {NOT_FORWARD}"),
}


@pytest.mark.parametrize("name", BAD)
def test_the_public_plan_refuses(name: str) -> None:
    changes, words = BAD[name]
    arguments = dict(zip("qkv", SHAPES, strict=True)) | {"dtype": "float16", "device": "sm_90"} | changes
    with pytest.raises(ProblemError, match=words):
        cuflash.plan(**arguments)  # type: ignore[arg-type]


def test_planning_on_a_gpu_that_is_not_there_is_an_error_of_ours() -> None:
    with pytest.raises((ProblemError, UnsupportedError), match="99"):
        cuflash.plan(*SHAPES, dtype="float16", device="cuda:99")


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_no_kernel_does_is_unsupported_with_a_way_out(dtype: str) -> None:
    for arch in ("sm_80", "sm_90"):
        for op in ("forward", "lse", "backward"):
            with pytest.raises(UnsupportedError, match=r"float64.*cast.*float32, bfloat16.*NumPy"):
                make_plan(make_problem(op=op, dtype="float64"), DEVICES[arch])
            with pytest.raises(UnsupportedError, match=r"batch 1048576 .*at most 2147483647.*Split the batch"):
                make_plan(make_problem(op=op, dims=(2**20, 2**20, 1, 1, 1), dtype=dtype), DEVICES[arch])
        for op, dims, words in (
            ("forward", (513, 64), r"\(513, 64\).*1 to 512 always fit in float16.*NumPy arrays.*'standard'"),
            ("forward", (64, 513), r"\(64, 513\).*1 to 512 always fit in float16"),
            ("backward", (257, 64), rf"\(257, 64\) in {dtype}.*{arch}.*1 to 256.*NumPy arrays"),
            ("backward", (64, 257), rf"\(64, 257\) in {dtype}.*{arch}.*1 to 256"),
        ):
            with pytest.raises(UnsupportedError, match=words):
                make_plan(make_problem(*dims, op=op, dtype=dtype), DEVICES[arch])
    for arch, device in DEVICES.items():  # head dims up to 512 have a tile where there is room
        if dtype != "float32" or arch not in ("sm_86", "sm_89", "sm_120", "sm_121"):
            assert make_plan(make_problem(512, 512, dtype=dtype), device).kernel.startswith("forward_sm80")
            continue
        assert make_plan(make_problem(256, 256, dtype=dtype), device).kernel.startswith("forward_sm80")
        for dims in ((257, 64), (64, 257), (512, 512)):
            text = rf"{re.escape(str(dims))} in float32.*{arch}.*float32 takes 1 to 256 on sm_86.*Cast.*'standard'"
            with pytest.raises(UnsupportedError, match=text):
                make_plan(make_problem(*dims, dtype=dtype), device)
    for states, words in (
        (merge_of(dtype, 64, rows=2**40), "outs of shape .*at most 2147483647"),
        (merge_of(dtype, 64)._replace(dtype="float64"), "float64.*cast.*NumPy"),
        (merge_of(dtype, 64, MAX_STATES + 1), rf"{MAX_STATES + 1} states.*at most {MAX_STATES}.*Merge groups"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            make_plan(states, H100)
    assert make_plan(merge_of(dtype, 64, MAX_STATES), H100).kernel.startswith("merge_portable")
