"""`cuflash.plan`: shapes in place of arrays, in the types of shapes and dtypes that users have."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from libraries import MAKERS
from numpy.lib.stride_tricks import as_strided

import cuflash
from cuflash.errors import ProblemError

SHAPE = (70000, 7000, 1, 64)  # 58 GiB: the number of bytes overflows int32


def planned(shape: Any = SHAPE, dtype: Any = "float16", **more: Any) -> Any:
    return cuflash.plan(shape, shape, shape, dtype=dtype, device="sm_90", **more)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("integer", [np.int8, np.int32, np.uint16, np.int64])
def test_shapes_of_numpy_integers_equal_shapes_of_python_ints(integer: Any) -> None:
    shape = SHAPE if np.iinfo(integer).max >= max(SHAPE) else (100, 100, 2, 64)
    lengths = [integer(length) for length in shape]
    assert planned(tuple(lengths)) == planned(lengths) == planned(shape)
    assert all(type(x) is int for spec in planned(lengths).problem.specs for x in (*spec.shape, *spec.strides))


def test_lists_are_shapes_of_every_array_argument() -> None:
    bias, sinks = (300, 300), (8,)
    expected = planned((2, 300, 8, 64), bias=bias, sinks=sinks)
    assert planned([2, 300, 8, 64], bias=[*bias], sinks=[np.int32(8)]) == expected
    packed = planned((300, 8, 64), cu_seqlens_q=(5,), cu_seqlens_k=(5,))
    assert planned([300, 8, 64], cu_seqlens_q=[5], cu_seqlens_k=[5]) == packed


def test_gradients_of_shapes_are_planned_like_gradients_of_arrays() -> None:
    shape, bias, sinks = (2, 64, 4, 64), (1, 4, 64, 64), (4,)
    arrays = np.zeros(bias, "f2"), np.zeros(sinks, "f2")
    expected = planned(shape, op="backward", bias=arrays[0], sinks=arrays[1], captured_grads=arrays)
    assert planned(shape, op="backward", bias=bias, sinks=sinks, captured_grads=(bias, sinks)) == expected
    assert planned(shape, op="backward", bias=[*bias], sinks=sinks, captured_grads=[(*bias,), [4]]) == expected
    assert expected.out_bytes == 2 * (3 * 2 * 64 * 4 * 64 + 4 * 64 * 64 + 4)
    alike = planned(shape, op="backward", bias=(64, 64), sinks=sinks, captured_grads=(sinks,))
    assert alike.out_bytes == 2 * (3 * 2 * 64 * 4 * 64 + 4)


def test_two_gradients_of_equal_shapes_are_two() -> None:
    sinks, shape = (4,), (2, 4, 4, 64)
    one, two = (planned(shape, op="backward", bias=sinks, sinks=sinks, captured_grads=(sinks,) * n) for n in (1, 2))
    assert two.out_bytes - one.out_bytes == 2 * 4
    with pytest.raises(ProblemError, match=r"captured_grads\[2\] is a tuple that has no gradient here"):
        planned(shape, op="backward", bias=sinks, sinks=sinks, captured_grads=(sinks,) * 3)


def test_a_shape_of_no_bias_and_no_sinks_has_no_gradient() -> None:
    with pytest.raises(ProblemError, match=r"captured_grads\[0\] is a tuple .*some of: bias \(1, 4, 64, 64\)"):
        planned((2, 64, 4, 64), op="backward", bias=(1, 4, 64, 64), captured_grads=((4, 64, 64),))


TABLE = np.ones((2, 4), "f4")


def plans() -> list[Any]:
    """Returns plans of every kind, without the GPU."""
    kinds: list[dict[str, Any]] = [
        {}, {"op": "backward"}, {"op": "lse", "v": None}, {"seqused_k": (2,)}, {"algorithm": "standard"},
        {"causal": True, "window_size": (9, 0), "softcap": 3.0}, {"mask_mod": lambda b, h, i, j: i - j < 9},
        {"score_mod": lambda s, b, h, i, j: s + TABLE[b, h] * (i - j), "sinks": (4,), "dropout_p": 0.1},
        {"mask_mod": lambda b, h, i, j: i * j % 3 < 2, "bias": (64, 64), "op": "backward",
         "captured_grads": [(64, 64)]},
    ]  # fmt: skip
    shape = (2, 64, 4, 64)
    calls = [{"q": shape, "k": shape, "v": shape, "dtype": "float16", **kind} for kind in kinds]
    return [cuflash.plan(**call, device=device) for call in calls for device in ("sm_80", "sm_90", "cpu")]


def test_copies_of_a_plan_are_equal_to_it() -> None:
    for plan in plans():
        for same in (copy.copy(plan), copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
            assert same == plan
            assert repr(same) == repr(plan) == str(plan)
            assert [hash(x.variant) for x in same.launches] == [hash(x.variant) for x in plan.launches]
            assert same.problem.op is plan.problem.op


def test_plans_of_another_process_equal_plans_of_this_one(tmp_path: Path) -> None:
    path = tmp_path / "plans"
    command = f"import pickle, test_plan; open({str(path)!r}, 'wb').write(pickle.dumps(test_plan.plans()))"
    paths = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    environment = {"PYTHONPATH": paths, "PYTHONHASHSEED": "7", "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", command], env=environment, check=True)
    others, ours = pickle.loads(path.read_bytes()), plans()
    assert others == ours
    assert {x.variant for plan in others for x in plan.launches} == {x.variant for plan in ours for x in plan.launches}


def test_plans_of_other_problems_differ() -> None:
    shape = (2, 64, 4, 64)
    base = planned(shape)
    assert base == planned(shape)
    others = [planned((2, 64, 2, 64)), planned(shape, causal=True), planned(shape, op="backward"),
              planned(shape, dtype="bfloat16"), planned(shape, mask_mod=lambda b, h, i, j: i * j > 5)]  # fmt: skip
    assert all(plan != base for plan in others)


def test_a_printed_plan_shows_exchanged_axes() -> None:
    for shape, text in (
        ((3, 100, 8, 64), "batch 3, seqlen_q 100, seqlen_k 100, heads_q 8, heads_kv 8, head_dim 64, "),
        ((3, 8, 100, 64), "batch 3, seqlen_q 8, seqlen_k 8, heads_q 100, heads_kv 100, head_dim 64"),
    ):
        lines = repr(planned(shape)).splitlines()
        assert lines[0] == "problem    forward of float16"
        assert lines[1].startswith(f"lengths    {text}")
        assert max(map(len, lines)) < 120
    used = repr(planned((3, 100, 8, 64), seqused_k=(3,)))
    assert "seqlen_q up to 100, seqlen_k up to 100" in used


@pytest.mark.parametrize("length", [True, np.True_, 2.0, -1, "2", None, np.array(2), np.timedelta64(2, "s"), np.int32])
def test_lengths_that_are_no_integers_are_refused(length: Any) -> None:
    with pytest.raises(ProblemError, match=r"q has shape \(.*; give lengths that are integers of 0 and more"):
        planned((length, 300, 8, 64))
    with pytest.raises(ProblemError, match=r"bias has shape \[.*; give lengths that are integers of 0 and more"):
        planned((2, 300, 8, 64), bias=[length, 300])


@pytest.mark.parametrize("kind", ["class", "dtype", *sorted(MAKERS)])
def test_dtype_objects_stand_for_their_names(kind: str) -> None:
    dtypes = {name: np.dtype(name) for name in ("float16", "float32")}
    if kind == "class":
        dtypes = {name: dtype.type for name, dtype in dtypes.items()}  # type: ignore[misc]
    elif kind != "dtype":
        dtypes = {name: MAKERS[kind](np.zeros(1, dtype)).dtype for name, dtype in dtypes.items()}
    for name, dtype in dtypes.items():
        assert planned(dtype=dtype) == planned(dtype=name)
    assert planned(out_dtype=dtypes["float32"]) == planned(out_dtype="float32")
    q = MAKERS["numpy" if kind in ("class", "dtype") else kind](np.zeros((2, 4, 1, 8), "f2"))
    assert "float32" in str(cuflash.forward(q, q, q, out_dtype=dtypes["float32"]).dtype)


@pytest.mark.parametrize("dtype", [np.dtype(">f2"), np.int8, np.floating, np.dtype, float, 16, ["float16"], "half"])
def test_other_values_than_dtypes_of_attention_are_refused(dtype: Any) -> None:
    with pytest.raises(ProblemError, match=r"q has dtype .*; give one of float16, bfloat16, float32, float64"):
        planned(dtype=dtype, bias=(7000, 7000))


def test_an_out_that_overlaps_itself_is_refused_as_calls_refuse_it() -> None:
    q = np.zeros((2, 5, 4, 6), "f4")
    for strides in ((400, 80, 20, 0), (400, 16, 96, 4)):
        with pytest.raises(ProblemError, match=r"out has shape .* rows share memory; give a dense out"):
            cuflash.plan(q, q, q, out=as_strided(np.zeros(2000, "f4"), q.shape, strides))


@pytest.mark.parametrize("value", [np.zeros(2), np.array("cpu"), ["forward"], np.float32, None], ids=repr)
@pytest.mark.parametrize("op", ["forward", "lse", "backward"])
def test_other_values_than_names_and_numbers_are_refused(op: str, value: Any) -> None:
    shapes = ((2, 300, 8, 64),) * (2 if op == "lse" else 3)
    for name in ("op", "device", "algorithm", "num_splits"):
        if name == "device" and value is None:
            continue  # the default
        with pytest.raises(ProblemError, match=f"^{name}=.*; give "):
            cuflash.plan(*shapes, **{"op": op, "dtype": "float16", "device": "sm_90", name: value})
