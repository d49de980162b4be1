"""Counters of tiles: launches that share one, and launches that must not."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest
from libraries import bits, poisoned
from workers import run_threads

import cuflash
from cuflash.planning import device
from cuflash.runtime import device_memory
from cuflash.runtime import driver as driver_module
from cuflash.testing.cases import Case

CAPTURING = 7  # a stream's handle


class Driver:
    """A stand-in for the driver and CuPy's memory: a stream's unique number is its handle and `born`.

    The default stream of a thread has the number in `threads`.
    """

    def __init__(self) -> None:
        self.results: dict[str, int] = {}
        self.modes: list[int] = []
        self.mode = 0
        self.pages: list[tuple[int, int]] = []  # (GPU, address)
        self.zeroed: list[tuple[int, int, int]] = []
        self.current = 0
        self.born = 1000
        self.threads = threading.local()

    def function(self, name: str, *argtypes: type) -> Any:
        assert set(argtypes) <= {ctypes.c_void_p, ctypes.c_int}
        functions = {"cuStreamIsCapturing": self.is_capturing, "cuStreamGetId": self.get_id}
        functions |= {"cuThreadExchangeStreamCaptureMode": self.exchange, "cuGetErrorName": self.name_error}
        return functions[name]

    def is_capturing(self, stream: int, answer: int) -> int:
        ctypes.c_int.from_address(answer).value = stream == CAPTURING
        return self.results.get("cuStreamIsCapturing", 0)

    def get_id(self, stream: int, answer: int) -> int:
        of_thread = stream == device_memory.PER_THREAD_STREAM
        number = getattr(self.threads, "number", 500) if of_thread else stream + self.born
        ctypes.c_ulonglong.from_address(answer).value = number
        return self.results.get("cuStreamGetId", 0)

    def name_error(self, result: int, answer: int) -> int:
        ctypes.c_char_p.from_address(answer).value = b"CUDA_ERROR_INVALID_HANDLE"
        return int(result != 400)

    def exchange(self, mode: int) -> int:
        word = ctypes.c_int.from_address(mode)
        self.mode, word.value = word.value, self.mode
        return 0

    def malloc(self, size: int) -> int:
        assert self.mode == 2, "a capture would forbid it"
        assert size == 4 * device_memory.PAGE
        self.pages.append((self.current, 2**30 + 2**20 * len(self.pages)))
        return self.pages[-1][1]

    def memset(self, address: int, value: int, size: int, stream: int) -> None:
        assert stream == 77, "another stream would be part of a capture"
        self.zeroed.append((address, value, size))

    def stream(self, non_blocking: bool = False) -> Any:
        assert non_blocking
        return type("Stream", (), {"ptr": 77, "synchronize": lambda self: None})()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    cuda = pytest.importorskip("cupy").cuda
    driver = Driver()
    for module in (device_memory, driver_module):
        monkeypatch.setattr(module, "function", driver.function)
    monkeypatch.setattr(device_memory, "_free_counters", {})
    monkeypatch.setattr(device_memory, "_stream_counters", {})
    monkeypatch.setattr(cuda.runtime, "malloc", driver.malloc)
    monkeypatch.setattr(cuda.runtime, "memsetAsync", driver.memset)
    monkeypatch.setattr(cuda, "Stream", driver.stream)
    return driver


def test_a_stream_keeps_its_counter_and_shares_it_with_no_other(driver: Driver) -> None:
    first = [device_memory.counter(0, stream) for stream in (0, 1, 2, 8)]
    assert len(set(first)) == 4
    assert [device_memory.counter(0, stream) for stream in (0, 1, 2, 8)] == first


def test_threads_keep_a_counter_each_on_their_default_streams(driver: Driver) -> None:
    turns, counters = threading.Barrier(3), [set[tuple[int, ...]]() for _ in range(3)]

    def work(index: int) -> None:
        driver.threads.number = 501 + index
        for _ in range(50):
            turns.wait()
            counters[index].add(tuple(device_memory.counter(0, 2, 1, use) for use in (40, 41)))

    run_threads(work, 3)
    assert [len(of_thread) for of_thread in counters] == [1, 1, 1]
    assert len({address for (pair,) in counters for address in pair}) == 6  # no two threads, and no two uses, share one
    assert len(driver.pages) == 1
    assert len(device_memory._stream_counters) == 6


def test_a_new_thread_of_an_old_ones_number_has_a_counter_of_its_own(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "get_ident", lambda: 1234)
    driver.threads.number = 501
    old = device_memory.counter(0, 2)
    driver.threads.number = 502  # the old thread has ended, but work on its stream may still run
    new = device_memory.counter(0, 2)
    assert new != old
    assert device_memory.counter(0, 2) == new
    assert len(device_memory._stream_counters) == 1


def test_a_per_thread_stream_of_each_gpu_has_a_counter_there(driver: Driver) -> None:
    driver.threads.number = 501
    addresses = []
    for driver.current in (0, 1, 0, 1):
        addresses.append(device_memory.counter(driver.current, 2))
    assert addresses[:2] == addresses[2:]
    assert [gpu for gpu, _ in driver.pages] == [0, 1]


def test_what_one_launch_counts_for_two_uses_is_counted_apart(driver: Driver) -> None:
    pieces, arrivals = (device_memory.counter(0, 1, 1, use) for use in (40, 41))
    assert pieces != arrivals
    assert [device_memory.counter(0, 1, 1, use) for use in (40, 41)] == [pieces, arrivals]


def test_the_counter_of_a_captured_launch_is_never_reused(driver: Driver) -> None:
    before = device_memory.counter(0, 1)
    captured = [device_memory.counter(0, CAPTURING) for _ in range(20)]
    after = [device_memory.counter(0, stream) for stream in range(30, 40)]
    assert len({before, *captured, *after}) == 31
    assert device_memory.counter(0, 1) == before


def test_counters_lie_in_zeroed_pages_and_a_new_one_follows_a_full_one(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "PAGE", 3)
    addresses = [device_memory.counter(0, stream) for stream in range(10, 17)]
    assert len(driver.pages) == 3
    assert driver.zeroed == [(address, 0, 12) for _, address in driver.pages]
    every = [address + 4 * n for _, address in driver.pages for n in range(3)]
    assert len(set(addresses)) == 7
    assert set(addresses) < set(every)
    assert set(addresses[:3]) == set(every[:3])


def test_a_reserved_counter_needs_no_allocation_within_a_capture(driver: Driver) -> None:
    for _ in range(3):
        device_memory.reserve_counter(0)
    assert len(driver.pages) == 1
    driver.pages.clear()
    device_memory.counter(0, CAPTURING)
    assert not driver.pages


def test_a_new_stream_of_a_handle_has_a_counter_of_its_own(driver: Driver) -> None:
    old = device_memory.counter(0, 1)
    driver.born += 1  # the old one was destroyed, but its work may still run
    new = device_memory.counter(0, 1)
    assert new != old
    assert device_memory.counter(0, 1) == new


@pytest.mark.parametrize(("words", "rounded"), [(1, 1), (5, 8), (1000, 1024)])
def test_new_streams_take_four_bytes_a_word_and_no_host_memory(driver: Driver, words: int, rounded: int) -> None:
    addresses, streams = set(), 3 * device_memory.PAGE // rounded
    for driver.born in range(streams):
        addresses.add(device_memory.counter(0, 1, words))
    assert len(addresses) == streams
    assert len(driver.pages) == 3
    assert len(device_memory._stream_counters) == 1


def test_a_counter_lies_on_the_gpu_of_its_launch(driver: Driver) -> None:
    shared, addresses = 20, []  # a stream number: streams of different GPUs may share one
    for driver.current in (0, 1, 0, 1):
        device_memory.counter(driver.current, CAPTURING)
        addresses.append(device_memory.counter(driver.current, shared))
    assert [gpu for gpu, _ in driver.pages] == [0, 1]
    assert addresses[:2] == addresses[2:]
    for gpu, page in driver.pages:
        for address in (addresses[gpu], device_memory.counter(gpu, CAPTURING)):
            assert 0 <= address - page < 4 * device_memory.PAGE


def test_the_capture_mode_of_the_thread_is_put_back_even_after_an_error(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    device_memory.counter(0, CAPTURING)
    assert driver.mode == 0
    device_memory._free_counters.clear()
    driver.mode = 1
    monkeypatch.setattr(pytest.importorskip("cupy").cuda.runtime, "malloc", lambda size: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        device_memory.counter(0, CAPTURING)
    assert driver.mode == 1
    assert not any(device_memory._free_counters.values())


@pytest.mark.parametrize("name", ["cuStreamIsCapturing", "cuStreamGetId"])
def test_a_driver_error_names_the_stream(driver: Driver, name: str) -> None:
    driver.results[name] = 400
    with pytest.raises(RuntimeError, match=rf"{name} failed for .* 0x2a: CUDA_ERROR_INVALID_HANDLE \(400\)"):
        device_memory.counter(0, 42)
    assert not driver.pages


# On a GPU: a problem with several tiles a thread block.
COUNTED = Case("counted", 4, 500, 500, 16, 4, 64, 64, "float16", causal=True)


def counted_arrays(seed: int = 0) -> tuple[Any, ...]:
    import cupy

    here = device.query(0)
    if here.capability != (9, 0):
        pytest.skip(f"needs a GPU of sm_90, has {here.arch}")
    arrays = tuple(cupy.asarray(x) for x in COUNTED.arrays(seed))
    assert cuflash.plan(*arrays, causal=True).launches[0].takes_counter
    return arrays


def outs(count: int) -> list[Any]:
    import cupy

    outputs = [poisoned((4, 500, 16, 64), "float16") for _ in range(count)]
    cupy.cuda.Device().synchronize()
    return outputs


def same(out: Any, expected: Any) -> bool:
    return bool((bits(out) == bits(expected)).all())


@pytest.mark.gpu
def test_gpu_counted_tiles_are_all_done_and_are_those_of_smaller_launches() -> None:
    arrays = counted_arrays()
    (out,) = outs(1)
    cuflash.forward(*arrays, causal=True, out=out)
    lse = cuflash.lse(*arrays[:2], causal=True)
    for n in range(COUNTED.batch):
        one = tuple(x[n : n + 1] for x in arrays)
        assert not cuflash.plan(*one, causal=True).launches[0].takes_counter
        assert same(out[n], cuflash.forward(*one, causal=True))
        assert same(lse[n], cuflash.lse(*one[:2], causal=True))


@pytest.mark.gpu
def test_gpu_concurrent_streams_keep_their_tiles(cupy: Any) -> None:
    arrays = counted_arrays()
    expected = cuflash.forward(*arrays, causal=True)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    for _ in range(10):
        results = [outs(20) for _ in streams]
        for turn in range(20):
            for stream, outputs in zip(streams, results, strict=True):
                with stream:
                    cuflash.forward(*arrays, causal=True, out=outputs[turn])
        cupy.cuda.Device().synchronize()
        assert all(same(out, expected) for outputs in results for out in outputs)


@pytest.mark.gpu
def test_gpu_threads_on_default_streams_keep_their_counters_and_tiles(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = counted_arrays()
    expected = cuflash.forward(*arrays, causal=True)
    monkeypatch.setattr(device_memory, "_stream_counters", {})
    new: list[int] = []
    new_counter = device_memory._new_counter
    monkeypatch.setattr(device_memory, "_new_counter", lambda *args: new.append(1) or new_counter(*args))
    results = {number: outs(200) for number in range(2)}

    def work(number: int) -> None:
        with cupy.cuda.Device(0), cupy.cuda.Stream.ptds:
            for out in results[number]:
                cuflash.forward(*arrays, causal=True, out=out)

    run_threads(work, len(results))
    cupy.cuda.Device().synchronize()
    assert len(new) == len(results)
    assert all(same(out, expected) for outputs in results.values() for out in outputs)


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_gpu_concurrent_streams_keep_their_blocks_of_rows(cupy: Any, softcap: float) -> None:
    rng = np.random.default_rng(0)
    q, k, v, dout = (cupy.asarray(rng.normal(size=(3000, 8, 256)), "float16") for _ in range(4))
    varlen_kwargs = {f"cu_seqlens_{side}": cupy.arange(0, 3001, 300, "int32") for side in "qk"}
    varlen_kwargs |= {"max_seqlen_q": 300, "max_seqlen_k": 300, "causal": True, "softcap": softcap}
    out, lse = cuflash.forward(q, k, v, return_lse=True, **varlen_kwargs)

    def gradients() -> tuple[Any, ...]:
        return cuflash.backward(dout, q, k, v, out, lse, **varlen_kwargs)

    expected = gradients()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    cupy.cuda.Device().synchronize()
    results = []
    for stream in 10 * streams:
        with stream:
            results.append(gradients())
    cupy.cuda.Device().synchronize()
    assert all(same(x, y) for gradients_of_call in results for x, y in zip(gradients_of_call, expected, strict=True))


@pytest.mark.gpu
def test_gpu_a_graph_runs_beside_launches_of_its_capture_stream(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = counted_arrays()
    expected = cuflash.forward(*arrays, causal=True)
    cupy.cuda.Device().synchronize()
    of_graph = outs(10)
    stream, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    monkeypatch.setattr(device_memory, "_free_counters", {})  # the first page is allocated within the capture
    with stream:
        stream.begin_capture()
        for out in of_graph:
            cuflash.forward(*arrays, causal=True, out=out)
        graph = stream.end_capture()
    for _ in range(20):
        eager = outs(10)
        with other:
            for out in of_graph:
                out.fill(cupy.nan)
            graph.launch(other)
        with stream:
            for out in eager:
                cuflash.forward(*arrays, causal=True, out=out)
        cupy.cuda.Device().synchronize()
        assert all(same(out, expected) for out in (*of_graph, *eager))


@pytest.mark.gpu
def test_gpu_a_torch_graph_of_counted_launches_replays_beside_others() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs torch with CUDA")
    arrays = [torch.as_tensor(x.get(), device="cuda") for x in counted_arrays()]
    expected = cuflash.forward(*arrays, causal=True)
    torch.cuda.synchronize()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = [cuflash.forward(*arrays, causal=True) for _ in range(5)]
    for _ in range(20):
        for out in captured:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay()
        with torch.cuda.stream(side):
            eager = [cuflash.forward(*arrays, causal=True) for _ in range(5)]
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in (*captured, *eager))


@pytest.mark.gpu
def test_gpu_each_gpu_counts_for_itself(cupy: Any) -> None:
    if device.count() < 2:
        pytest.skip("needs two GPUs")
    arrays = counted_arrays()
    expected = cuflash.forward(*arrays, causal=True).get()
    for ordinal in (1, 0, 1):
        with cupy.cuda.Device(ordinal):
            moved = [cupy.asarray(x.get()) for x in arrays]
        assert (cuflash.forward(*moved, causal=True).get() == expected).all()
