"""`check=True`: integers on a GPU are read once, by no other calls, and checked as integers of the host are."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import numpy as np
import pytest
from drivers import Array, Gpus
from refusals import refused

import cuflash
from cuflash.errors import ProblemError, UnsupportedError
from cuflash.runtime import device_integers, driver

VALUES = {2**40: [0, 30, 64], 2**41: [30, 34], 2**42: [0, 40, 70], 2**43: [8], 2**44: [0, 64]}  # by address


class Reads:
    """The addresses that were read, and True if the stream is captured."""

    def __init__(self, gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpus, self.addresses, self.captured = gpus, list[int](), False

        def read(array: Array) -> Any:
            self.addresses.append(array.pointer)
            return np.array(VALUES[array.pointer], "i4")

        monkeypatch.setattr(gpus.library, "read", read)
        monkeypatch.setattr(device_integers, "is_capturing", lambda stream: self.captured and stream == 7)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(Gpus(monkeypatch), monkeypatch)


def integers(address: int) -> Array:
    return Array.contiguous((len(VALUES[address]),), address, "int32")


def packed(cu_seqlens_q: int = 2**40, cu_seqlens_k: int = 2**40) -> dict[str, Any]:
    arrays = {name: Array.contiguous((64, 4, 64), 2**30 + number * 2**20) for number, name in enumerate("qkv")}
    return arrays | {"cu_seqlens_q": integers(cu_seqlens_q), "cu_seqlens_k": integers(cu_seqlens_k)}


def of_op(op: str, call: dict[str, Any]) -> None:
    if op == "lse":
        call.pop("v")
        cuflash.lse(**call)
    elif op == "backward":
        out, lse = call["q"]._replace(pointer=2**35), Array.contiguous((4, 64), 2**36, "float32")
        cuflash.backward(out, out=out, lse=lse, **call)
    else:
        cuflash.forward(**call)


@pytest.mark.parametrize("op", ["forward", "lse", "backward"])
def test_integers_are_read_where_check_is_true(op: str, reads: Reads) -> None:
    of_op(op, packed(2**44, 2**41))
    assert not reads.addresses
    with refused(ProblemError, "cu_seqlens_k is [30, 34]", "begins with 30"):
        of_op(op, packed(2**44, 2**41) | {"check": True})
    launched = len(reads.gpus.launched)
    with refused(ProblemError, "cu_seqlens_q is [0, 40, 70]", "q has 64 rows"):
        of_op(op, packed(2**42) | {"check": True})
    assert len(reads.gpus.launched) == launched
    reads.addresses.clear()
    of_op(op, packed() | {"check": True})
    assert reads.addresses == [2**40, 2**40]
    assert len(reads.gpus.launched) > launched


@pytest.mark.parametrize("op", ["forward", "lse", "backward"])
def test_check_is_refused_while_the_stream_is_captured(op: str, reads: Reads) -> None:
    reads.captured = True
    with refused(UnsupportedError, "check=True reads cu_seqlens_q, cu_seqlens_k", "before the capture"):
        of_op(op, packed() | {"check": True})
    assert not reads.addresses
    of_op(op, packed())


def test_a_dense_call_has_nothing_to_check(reads: Reads) -> None:
    reads.captured = True
    dense = {
        name: x._replace(shape=(1, *x.shape), strides=(0, *x.strides)) for name, x in packed().items() if name in "qkv"
    }
    cuflash.forward(**dense, check=True)
    assert not reads.addresses


def test_append_kv_into_a_full_cache_is_refused(reads: Reads) -> None:
    cache, new = (Array.contiguous((1, rows, 4, 64), 2**30 + rows * 2**20) for rows in (8, 1))
    others = cache._replace(pointer=2**31), new, new._replace(pointer=2**32), integers(2**43)
    cuflash.append_kv(cache, *others)
    count = len(reads.gpus.launched)
    with refused(ProblemError, "sequence 0 has 8 used keys and 1 new ones", "room for 8"):
        cuflash.append_kv(cache, *others, check=True)
    assert (len(reads.gpus.launched), reads.addresses) == (count, [2**43])


@pytest.mark.parametrize("value", [1, "yes", None, np.ones(1, bool)])
def test_check_is_a_bool(value: Any) -> None:
    q = np.zeros((1, 4, 2, 8), "f4")
    with refused(ProblemError, "check=", "give True or False"):
        cuflash.forward(q, q, q, check=value)


def test_host_arrays_take_check_too() -> None:
    q, cu_seqlens = np.zeros((4, 2, 8), "f4"), np.array([0, 4], "i4")
    cuflash.forward(q, q, q, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, check=True)


@pytest.mark.parametrize(("result", "status", "expected"), [(0, 0, False), (0, 1, True), (0, 2, True), (906, 0, True),
                                                            (201, 0, False)])  # fmt: skip
def test_is_capturing_reads_the_status_of_the_stream(
    result: int, status: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_capturing(stream: int, address: int) -> int:
        assert stream == 9
        ctypes.c_int.from_address(address).value = status
        return result

    monkeypatch.setattr(driver, "function", lambda name, *types: {"cuStreamIsCapturing": is_capturing}[name])
    assert driver.is_capturing(9) is expected


@pytest.mark.gpu
def test_gpu_wrong_integers_are_refused_and_right_ones_taken(cupy: Any) -> None:
    q = cupy.ones((64, 4, 64), "f2")
    right, wrong = (cupy.asarray(np.array(x, "i4")) for x in ([0, 30, 64], [30, 34]))
    call = {"cu_seqlens_q": right, "cu_seqlens_k": right}
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()  # the stream does not wait for the default stream
    with stream:
        out, lse = cuflash.forward(q, q, q, **call, return_lse=True, check=True)
        assert bool((out == 1.0).all())
        cuflash.backward(out, q, q, q, out, lse, **call, check=True)
        cuflash.lse(q, q, **call, check=True)
        call["cu_seqlens_k"] = call["cu_seqlens_q"] = wrong
        for function in (cuflash.forward, lambda *a, **k: cuflash.lse(*a[:2], **k),
                         lambda *a, **k: cuflash.backward(out, *a, out, lse, **k)):  # fmt: skip
            with refused(ProblemError, "cu_seqlens_q is [30, 34]"):
                function(q, q, q, **call, check=True)


@pytest.mark.gpu
def test_gpu_check_is_refused_in_a_capture_which_goes_on(cupy: Any) -> None:
    cache, new, used = cupy.zeros((1, 8, 2, 64), "f2"), cupy.ones((1, 1, 2, 64), "f2"), cupy.zeros(1, "i4")
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        cuflash.append_kv(cache, cache.copy(), new, new, used, check=True)
        values = cache.copy()
        cuflash.append_kv(cache, values, new, new, used)
        stream.synchronize()
        stream.begin_capture()
        with refused(UnsupportedError, "check=True reads seqused_k"):
            cuflash.append_kv(cache, values, new, new, used, check=True)
        cuflash.append_kv(cache, values, new, new, used)
        graph = stream.end_capture()
        cache[...] = 0
        graph.launch(stream)
        stream.synchronize()
    assert bool((cache[0, 0] == 1.0).all())


@pytest.mark.gpu
def test_gpu_torch_tensors_are_checked() -> None:
    torch = pytest.importorskip("torch")
    from cuflash.frameworks.torch import attention

    q = torch.ones(64, 4, 64, dtype=torch.float16, device="cuda", requires_grad=True)
    right, wrong = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 30, 64], [30, 34]))
    out = attention(q, q, q, cu_seqlens_q=right, cu_seqlens_k=right, check=True)
    out.sum().backward()
    assert bool((out == 1.0).all())
    with refused(ProblemError, "cu_seqlens_q is [30, 34]"):
        attention(q, q, q, cu_seqlens_q=wrong, cu_seqlens_k=wrong, check=True)
    gc.collect()  # a graph of an earlier test that is collected within the capture would end it
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph), refused(UnsupportedError, "check=True reads cu_seqlens_q"):
        attention(q, q, q, cu_seqlens_q=right, cu_seqlens_k=right, check=True)
