"""Tensor maps in the parameters of Hopper's kernels: of which rows, where they stand, and when they are made."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from cuflash import params, tensor_map
from cuflash.device import KNOWN
from cuflash.errors import UnsupportedError
from cuflash.plan import plan
from cuflash.problem import ArraySpec, Problem
from cuflash.tiles_sm90 import TILES as HOPPER_TILES


class FakeDriver:
    """In place of the driver's functions for tensor maps: what they were called with, and where to."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, tuple[Any, ...]]] = []
        self.result = 0

    def function(self, name: str, *argtypes: type) -> Callable[..., int]:
        def called(address: Any, *more: Any) -> int:
            self.calls.append((name, address.value if isinstance(address, ctypes.c_void_p) else address, more))
            return self.result

        return called


def hopper_parameters(monkeypatch: pytest.MonkeyPatch, **more: Any) -> tuple[Any, Problem, list[Any]]:
    """Parameters of a problem with a window, and what the driver is asked for."""
    driver = FakeDriver()
    monkeypatch.setattr(tensor_map, "function", driver.function)
    q, k, v = (ArraySpec.dense((2, n, h, 64), "float16") for n, h in ((70, 4), (500, 2), (500, 2)))
    problem = Problem.of(q, k, more.pop("v", v), window_size=(20, 10), diagonal_offset=100, **more)
    made = plan(problem, "forward" if len(problem.strides) == 3 else "lse", KNOWN["sm_90"])
    parameters = params.forward_parameters(problem, made, ArraySpec.dense(problem.out_shape, "float16").strides)
    assert isinstance(parameters, params.WarpgroupParameters)
    assert parameters.address % 64 == 0
    return parameters, problem, driver.calls


def test_tensor_maps_are_of_the_operands_with_the_keys_that_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters, problem, calls = hopper_parameters(monkeypatch)
    begin, end = problem.mask.key_range(0, 70)
    assert (begin, end) == (80, 180)
    pointers = 2**30, 2**31, 2**32, 2**33
    parameters.write((*pointers, 2**34))
    assert [(name, at - parameters.address) for name, at, _ in calls] == [
        ("cuTensorMapEncodeTiled", offset) for offset in (0, 128, 256, 384)
    ]
    first = begin * 2 * 64 * 2  # bytes
    assert [more[2].value for *_, more in calls] == [2**30, 2**31 + first, 2**32 + first, 2**33]
    kv = 64, 100, 2, 2
    assert [tuple(more[3]) for *_, more in calls] == [(64, 70, 4, 2), kv, kv, (64, 70, 4, 2)]
    tile = HOPPER_TILES[0]
    rows = 64, tile.block_k, tile.block_k, 16  # q of a warpgroup, out of a warp
    assert [tuple(more[5]) for *_, more in calls] == [(64, n, 1, 1) for n in rows]


def test_out_has_a_tensor_map_in_its_own_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters, _, calls = hopper_parameters(monkeypatch, out_dtype="float32")
    parameters.write((2**30, 2**31, 2**32, 2**33, 0))
    assert [more[0] for *_, more in calls] == [6, 6, 6, 7]  # float16 and float32 to the driver
    assert tuple(calls[3][2][5]) == (32, 16, 1, 1)  # 128 bytes


def test_a_tensor_map_is_made_once_and_moved_where_its_operand_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters, _, calls = hopper_parameters(monkeypatch)
    pointers = (2**30, 2**31, 2**32, 2**33, 2**34)
    parameters.write(pointers)
    calls.clear()
    parameters.write(pointers)
    assert calls == []
    parameters.write((2**30, 2**31, 2**32 + 64, 2**33 + 128, 2**35))  # lse has none
    v, out = ("cuTensorMapReplaceAddress", parameters.address + 256), (
        "cuTensorMapReplaceAddress", parameters.address + 384)  # fmt: skip
    assert calls == [(*v, (2**32 + 64 + 80 * 256,)), (*out, (2**33 + 128,))]
    calls.clear()
    parameters.write(pointers)
    assert [at for _, at, _ in calls] == [v[1], out[1]]


def test_after_pointers_that_were_refused_those_before_are_written_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters, _, calls = hopper_parameters(monkeypatch)
    pointers = (2**30, 2**31, 2**32, 2**33, 2**34)
    parameters.write(pointers)
    written = bytes(parameters)
    with monkeypatch.context() as patch:
        patch.setattr(tensor_map, "function", lambda *_: lambda *_: 1)
        with pytest.raises(UnsupportedError, match="the driver refuses"):
            parameters.write((2**30 + 64, *pointers[1:]))
    assert bytes(parameters) != written
    calls.clear()
    parameters.write(pointers)
    assert bytes(parameters) == written
    assert ("cuTensorMapReplaceAddress", parameters.address, (2**30,)) in calls


def test_lse_has_tensor_maps_of_q_and_k_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters, _, calls = hopper_parameters(monkeypatch, v=None)
    parameters.write((2**30, 2**31, 0, 0, 2**34))
    assert [(name, at - parameters.address) for name, at, _ in calls] == [
        ("cuTensorMapEncodeTiled", 0), ("cuTensorMapEncodeTiled", 128)]  # fmt: skip


def test_gradients_have_tensor_maps_of_all_rows_and_what_is_read_of_those_that_see_or_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(tensor_map, "function", driver.function)
    specs = [ArraySpec.dense((2, n, 4, 64), "float16") for n in (170, 500, 500, 170, 170, 170, 500, 500)]
    problem = Problem.of(*specs[:3], window_size=(20, 10), diagonal_offset=-50)
    assert problem.mask.key_range(0, 170) == (0, 130)
    assert problem.mask.row_range(0, 500) == (40, 170)
    made = plan(problem, "backward", KNOWN["sm_90"])
    parameters = params.backward_parameters(problem, made, [spec.strides for spec in specs[3:]])
    pointers = [2**30 * (n + 1) for n in range(8)]
    parameters.write((*pointers, 0, 0, 0, 0, 0, 0, 0))
    first = dict.fromkeys((0, 3), 40 * 4 * 64 * 2)  # bytes
    operands = [0, 1, 2, 3, 5, 6, 7]  # out is read by delta alone
    assert [more[2].value for *_, more in driver.calls] == [pointers[n] + first.get(n, 0) for n in operands]
    assert [at - parameters.address for _, at, _ in driver.calls] == [448 + 128 * n for n in range(7)]
    assert [more[3][1] for *_, more in driver.calls] == [130, 130, 130, 130, 170, 500, 500]  # rows
    assert [tuple(more[5])[:2] for *_, more in driver.calls] == [(64, n) for n in (128, 128, 128, 128, 16, 16, 16)]
    driver.calls.clear()
    pointers[6] += 4096  # dk
    parameters.write((*pointers, 0, 0, 0, 0, 0, 0, 0))
    assert driver.calls == [("cuTensorMapReplaceAddress", parameters.address + 448 + 5 * 128, (pointers[6],))]
