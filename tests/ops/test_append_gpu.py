"""`append_kv` on a GPU only: PyTorch, CUDA graphs, memory, and caches of more than 2³¹ elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from libraries import as_numpy, bits, torch_of
from problems import far_apart, need_memory

import cuflash
from cuflash.testing.appends import PLACES, ROTATIONS, Arguments, drawn, expected, in_library
from cuflash.testing.layouts import identical

pytestmark = pytest.mark.gpu


def done(call: Arguments) -> list[Any]:
    """Returns the caches after the call, and its result."""
    result = cuflash.append_kv(**call)
    return [call["k_cache"], call["v_cache"], *([] if result is None else [result])]


def as_torch(call: Arguments) -> Arguments:
    """Returns the call with PyTorch tensors on the GPU, with the same bits in its caches."""
    torch = pytest.importorskip("torch")
    arguments = in_library(call, lambda x: torch_of(x, "cuda") if x.dtype.kind != "i" else torch.from_numpy(x).cuda())
    for name in ("k_cache", "v_cache"):  # bfloat16 goes through float32, which changes the bits of NaN
        arguments[name].view(torch.uint8).fill_(0xFF)
    return arguments


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_torch_gets_the_same_bits(dtype: str, place: str, rotation: str) -> None:
    call = drawn(dtype, place, new=(3, 0, 9), queries=2, **ROTATIONS[rotation])
    got = done(as_torch(call))
    expected_results = expected(call)
    for x, y in zip(got, expected_results, strict=True):
        np.testing.assert_array_equal(as_numpy(x), y.astype("f4"))  # NaN equals itself


@pytest.mark.parametrize("place", PLACES)
def test_a_captured_graph_replays_with_other_lengths_and_places(cupy: Any, place: str) -> None:
    calls = [drawn("float16", place, lengths=lengths, new=4, **ROTATIONS["pairs"])
             for lengths in ((0, 0, 0), (3, 29, 31), (40, -1, 12))]  # fmt: skip
    for call in calls[1:]:
        call["k"] += call["seqused_k"][:, None, None, None].astype("f2")
        for name in {"page_table", "cache_batch_idx"} & call.keys():
            call[name] = call[name][::-1].copy()
    arguments = in_library(calls[0], cupy.asarray)
    done(arguments)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        results = done(arguments)
        graph = stream.end_capture()
    for call in calls:
        for name, x in arguments.items():
            if isinstance(x, cupy.ndarray):
                x[...] = cupy.asarray(call[name])
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert identical(results, expected(call))


def test_torch_captures_append_kv_in_a_graph() -> None:
    torch = pytest.importorskip("torch")
    call = drawn("bfloat16", "pages of 16", new=1, **ROTATIONS["halves"])
    arguments = as_torch(call)
    before = {name: arguments[name].clone() for name in ("k_cache", "v_cache")}
    expected = [x.clone() for x in done(arguments)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = done(arguments)
    for name, x in before.items():
        arguments[name].copy_(x)
    graph.replay()
    for x, y in zip(results, expected, strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_large_calls_repeat_bit_for_bit(cupy: Any, rotation: str) -> None:
    call = drawn("bfloat16", "pages of 16", lengths=tuple(range(0, 700, 11)), new=300, capacity=1000, heads=(16, 4),
                 dims=(128, 128), positions=1000, **ROTATIONS[rotation])  # fmt: skip
    first = [bits(x).copy() for x in done(in_library(call, cupy.asarray))]
    for _ in range(5):
        again = [bits(x) for x in done(in_library(call, cupy.asarray))]
        assert all(bool((x == y).all()) for x, y in zip(again, first, strict=True))


def test_nothing_is_allocated_but_the_rotated_q(cupy: Any) -> None:
    for rotation in ("none", "halves"):
        arguments = in_library(
            drawn("float16", "pages of 3", new=200, capacity=300, **ROTATIONS[rotation]), cupy.asarray
        )
        pool = cupy.cuda.MemoryPool()
        with cupy.cuda.using_allocator(pool.malloc):
            result = cuflash.append_kv(**arguments)
        assert pool.total_bytes() == (0 if result is None else -(-result.nbytes // 512) * 512)


@pytest.mark.parametrize("name", ["k_cache", "v_cache", "k", "v", "q"])
def test_offsets_past_2_to_the_31_elements(cupy: Any, name: str) -> None:
    need_memory(cupy, 24)
    call = drawn("float16", lengths=(40,), heads=(1, 1), new=60, capacity=100, positions=200, **ROTATIONS["halves"])
    arguments = in_library(call, cupy.asarray)
    arguments[name] = far_apart(cupy, arguments[name], 1)
    assert identical([cupy.ascontiguousarray(x) for x in done(arguments)], expected(call))
    cupy.get_default_memory_pool().free_all_blocks()
