"""`cuflash.plan`: what stands for an array, in the types in which callers have shapes and dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from libraries import MAKERS
from numpy.lib.stride_tricks import as_strided

import cuflash
from cuflash.errors import ProblemError

SHAPE = (70000, 7000, 1, 64)  # of 58 GiB: as int32, its bytes would be another number


def planned(shape: Any = SHAPE, dtype: Any = "float16", **more: Any) -> Any:
    return cuflash.plan(shape, shape, shape, dtype=dtype, device="sm_90", **more)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("integer", [np.int8, np.int32, np.uint16, np.int64])
def test_shapes_of_numpys_integers_are_those_of_pythons(integer: Any) -> None:
    shape = SHAPE if np.iinfo(integer).max >= max(SHAPE) else (100, 100, 2, 64)
    lengths = [integer(length) for length in shape]
    assert planned(tuple(lengths)) == planned(lengths) == planned(shape)
    assert all(type(x) is int for spec in planned(lengths).problem.specs for x in (*spec.shape, *spec.strides))


def test_lists_are_shapes_of_all_that_may_be_one() -> None:
    bias, sinks = (300, 300), (8,)
    expected = planned((2, 300, 8, 64), bias=bias, sinks=sinks)
    assert planned([2, 300, 8, 64], bias=[*bias], sinks=[np.int32(8)]) == expected
    packed = planned((300, 8, 64), cu_seqlens_q=(5,), cu_seqlens_k=(5,))
    assert planned([300, 8, 64], cu_seqlens_q=[5], cu_seqlens_k=[5]) == packed


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
def test_what_is_no_dtype_of_attention_is_refused(dtype: Any) -> None:
    with pytest.raises(ProblemError, match=r"q has dtype .*; give one of float16, bfloat16, float32, float64"):
        planned(dtype=dtype, bias=(7000, 7000))


def test_an_out_that_overlaps_itself_is_refused_as_calls_refuse_it() -> None:
    q = np.zeros((2, 5, 4, 6), "f4")
    for strides in ((400, 80, 20, 0), (400, 16, 96, 4)):
        with pytest.raises(ProblemError, match=r"out has shape .* rows share memory; give a dense out"):
            cuflash.plan(q, q, q, out=as_strided(np.zeros(2000, "f4"), q.shape, strides))


@pytest.mark.parametrize("value", [np.zeros(2), np.array("cpu"), ["forward"], np.float32, None], ids=repr)
@pytest.mark.parametrize("op", ["forward", "lse", "backward"])
def test_what_is_no_name_and_no_number_is_refused(op: str, value: Any) -> None:
    shapes = ((2, 300, 8, 64),) * (2 if op == "lse" else 3)
    for name in ("op", "device", "algorithm", "num_splits"):
        if name == "device" and value is None:
            continue  # the default
        with pytest.raises(ProblemError, match=f"^{name}=.*; give "):
            cuflash.plan(*shapes, **{"op": op, "dtype": "float16", "device": "sm_90", name: value})
