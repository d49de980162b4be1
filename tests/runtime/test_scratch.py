"""The workspace that launches on the default stream share: its users, and calls without memory for it."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from drivers import Array, Gpus, Recorded
from libraries import memory_of_nan
from workers import run_threads

import cuflash
from cuflash.runtime import device_memory
from cuflash.runtime.structs import STRUCTS

PLACE = 2**50
SHAPES = (1, 1, 32, 128), (1, 4096, 8, 128), (1, 4096, 8, 128)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    gpus = Gpus(monkeypatch)
    monkeypatch.setattr(device_memory, "_scratch", {})
    monkeypatch.setattr(device_memory, "_new_scratch", lambda ordinal: PLACE)
    return gpus


def decoded() -> Any:
    q, k, v = (Array.contiguous(shape, 2**40 * n) for n, shape in enumerate(SHAPES, 1))
    return cuflash.forward(q, k, v)


def partial_out(gpus: Gpus) -> int:
    """Returns the address of the states in the latest launch of decoding."""
    return STRUCTS["DecodeParams"].from_buffer_copy(gpus.launched[-1][1]).partial_out or 0  # type: ignore[attr-defined, no-any-return]


def test_launches_on_the_default_stream_share_it_and_others_get_their_own(gpus: Gpus) -> None:
    for stream, place in ((0, PLACE), (7, 2**44), (0, PLACE)):
        gpus.library.current_stream = stream
        decoded()
        assert (gpus.launched[-1][0], partial_out(gpus)) == (stream, place)


def test_where_there_is_no_memory_for_it_each_call_gets_its_own(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []
    monkeypatch.setattr(device_memory, "_new_scratch", lambda ordinal: requests.append(1) or 0)
    gpus.library.current_stream = 0
    for _ in range(3):
        decoded()
        assert partial_out(gpus) == 2**44
    assert requests == [1]


def test_a_workspace_that_is_larger_or_of_several_launches_is_not_shared(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus.library.current_stream = 0
    monkeypatch.setattr(device_memory, "SCRATCH_BYTES", 1024)
    decoded()
    assert partial_out(gpus) == 2**44
    monkeypatch.undo()
    x, lse = Array.contiguous((1, 300, 2, 64), 2**40), Array.contiguous((1, 2, 300), 2**41, "float32")
    monkeypatch.setattr(device_memory, "scratch", lambda ordinal: pytest.fail("the launches of two threads may mix"))
    with pytest.MonkeyPatch.context() as patch:
        gpus = Gpus(patch)
        gpus.library.current_stream = 0
        cuflash.backward(*[x._replace(pointer=2**40 * n) for n in range(1, 6)], lse)
        assert len(gpus.launched) > 1


def test_the_nan_fill_covers_all_memory_that_a_call_allocates(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[tuple[int, ...]] = []
    runtime = SimpleNamespace(memsetAsync=lambda *args: filled.append(args))
    monkeypatch.setattr(sys.modules["cupy.cuda"], "runtime", runtime, raising=False)
    out, workspace = 32 * 128 * 2, cuflash.plan(*SHAPES, dtype="bfloat16", device="sm_90").workspace_bytes
    for turn in range(2):  # memory of earlier calls is not reused, and none is left to later calls
        decoded()
        assert not filled, turn
        with memory_of_nan(Recorded):
            for stream, place, size in ((0, PLACE, device_memory.SCRATCH_BYTES), (7, 2**44, workspace)):
                gpus.library.current_stream = stream
                assert decoded().pointer == 2**44
                assert filled == [(2**44, 0xFF, out, stream), (place, 0xFF, size, stream)]
                filled.clear()


@pytest.mark.gpu
def test_gpu_scratch_is_allocated_once_a_gpu_even_within_a_capture(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "_scratch", {})
    stream = cupy.cuda.Stream(non_blocking=True)
    x = cupy.zeros(8, "f4")
    cupy.cuda.Device().synchronize()  # the stream does not wait for the default stream
    with stream:
        stream.begin_capture()
        x += 1
        pointer = device_memory.scratch(0)
        graph = stream.end_capture()
    assert pointer
    assert device_memory.scratch(0) == pointer
    graph.launch(stream)
    stream.synchronize()
    assert (x.get() == 1).all()
    cupy.cuda.runtime.memset(pointer, 0, device_memory.SCRATCH_BYTES)
    host = (ctypes.c_char * 16)()
    cupy.cuda.runtime.memcpy(ctypes.addressof(host), pointer + device_memory.SCRATCH_BYTES - 16, 16, 2)
    assert bytes(host) == bytes(16)


@pytest.mark.gpu
def test_gpu_zeros_of_a_capture_are_ready_for_other_streams(cupy: Any) -> None:
    device_memory.zero.cache_clear()
    host = (ctypes.c_char * 16)()
    stream = cupy.cuda.Stream(non_blocking=True)
    x = cupy.zeros(8, "f4")
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        x += 1
        pointer = device_memory.zero(0)
        graph = stream.end_capture()
        graph.launch(stream)
        cupy.cuda.runtime.memcpyAsync(ctypes.addressof(host), pointer, 16, 2, stream.ptr)
        stream.synchronize()
    assert bytes(host) == bytes(16)
    assert (x.get() == 1).all()
    assert device_memory.zero(0) == pointer


@pytest.mark.gpu
def test_gpu_calls_that_share_it_do_not_disturb_each_other(cupy: Any) -> None:
    random = cupy.random.RandomState(0)
    lengths = (300, 4096, 9000, 1500)
    shapes = ([(1, 1, 8, 64), (1, n, 2, 64), (1, n, 2, 64)] for n in lengths)
    arrays = [[random.standard_normal(shape, "f4").astype("f2") for shape in each] for each in shapes]
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        expected = [cuflash.forward(*each) for each in arrays]
        stream.synchronize()
    for _ in range(20):
        outs = [cuflash.forward(*each) for each in arrays]
        for out, one in zip(outs, expected, strict=True):
            assert (out.view("u2") == one.view("u2")).all()


@pytest.mark.gpu
def test_gpu_threads_on_their_default_streams_share_no_workspace(cupy: Any) -> None:
    random = cupy.random.RandomState(0)
    shapes = (1, 1, 8, 64), (1, 4096, 2, 64), (1, 4096, 2, 64)
    arrays = [[random.standard_normal(shape, "f4").astype("f2") for shape in shapes] for _ in range(2)]
    expected = [cuflash.forward(*each) for each in arrays]
    cupy.cuda.Device().synchronize()
    outs: list[list[Any]] = [[], []]

    def work(index: int) -> None:
        with cupy.cuda.Device(0), cupy.cuda.Stream.ptds as stream:
            outs[index] = [cuflash.forward(*arrays[index]) for _ in range(200)]
            stream.synchronize()

    run_threads(work, 2)
    for outs_of_thread, out in zip(outs, expected, strict=True):
        assert len(outs_of_thread) == 200
        assert all((each.view("u2") == out.view("u2")).all() for each in outs_of_thread)
