"""Launches of one kernel: the driver calls that they make."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from cuflash.runtime import driver, kernel_launch
from cuflash.runtime.structs import ParamBuffer


class Config(ctypes.Structure):
    """The struct CUlaunchConfig of cuda.h."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "smem")),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("num_attributes", ctypes.c_uint),
    )  # fmt: skip


def test_an_early_launch_is_described_as_the_driver_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[Any, ...]] = []

    def launch(config: bytes, kernel: int, pointers: int, extra: None) -> int:
        assert len(config) == ctypes.sizeof(Config)
        read = Config.from_buffer_copy(config)
        words = (ctypes.c_int * 3).from_address(read.attributes)
        launches.append((*(getattr(read, name) for name, _ in Config._fields_[:8]), read.num_attributes, *words[::2]))
        assert (kernel, pointers, extra) == (2**40, 2**41, None)
        return 0

    with monkeypatch.context() as patch:
        patch.setattr(kernel_launch, "function", lambda name, *argtypes: {"cuLaunchKernelEx": launch}[name])
        early = kernel_launch.EarlyLaunch(SimpleNamespace(ptr=2**40), (132, 1, 1), (256, 1, 1), 200_000)
        for stream in (2**42, 2**42, 0):
            early(SimpleNamespace(pointers=2**41), stream)  # type: ignore[arg-type]
    # 6: programmatic stream serialization
    assert launches == [(132, 1, 1, 256, 1, 1, 200_000, stream, 1, 6, 1) for stream in (2**42, 2**42, None)]


def test_an_early_launch_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_launch, "function", lambda *_: lambda *_: 700)
    monkeypatch.setattr(driver, "function", lambda *_: lambda *_: 1)
    early = kernel_launch.EarlyLaunch(SimpleNamespace(ptr=2**40), (132, 1, 1), (256, 1, 1), 200_000)
    with pytest.raises(RuntimeError, match=r"a kernel was not launched: CUDA error \(700\)"):
        early(SimpleNamespace(pointers=2**41), 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(("version", "early"), [(12030, False), (12040, True), (13000, True)])
def test_only_drivers_whose_graphs_take_them_launch_early(
    version: int, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(address: int) -> int:
        ctypes.c_int.from_address(address).value = version
        return 0

    with monkeypatch.context() as patch:
        patch.setattr(kernel_launch, "function", lambda name, *argtypes: {"cuDriverGetVersion": record}[name])
        assert kernel_launch.launches_early.__wrapped__() == early


def test_a_plain_launch_gets_its_grid_parameters_and_stream() -> None:
    launches: list[tuple[Any, ...]] = []

    def kernel(grid: Any, block: Any, arguments: Any, smem_bytes: int, stream: Any) -> None:
        launches.append((grid, block, arguments, smem_bytes, stream.ptr))

    pytest.importorskip("cupy", reason="buffers are of CuPy's launches")
    plain, buffer = kernel_launch.PlainLaunch(kernel, (7, 1, 1), (256, 1, 1), 200_000), ParamBuffer(64)
    buffer.arguments = (buffer.address,)
    for stream in (2**42, 0, 2**42):
        plain(buffer, stream)
    assert launches == [((7, 1, 1), (256, 1, 1), (buffer.address,), 200_000, stream) for stream in (2**42, 0, 2**42)]


@pytest.mark.parametrize(("result", "clusters"), [(0, 0), (0, 1), (0, 66), (912, 7)])  # 912: invalid cluster size
def test_a_cluster_has_room_where_the_driver_counts_one(
    result: int, clusters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    described: list[tuple[Any, ...]] = []

    def count(answer: int, kernel: int, config: bytes) -> int:
        read = Config.from_buffer_copy(config)
        attribute = (ctypes.c_int * 5).from_address(read.attributes)
        described.append((kernel, *(getattr(read, name) for name, _ in Config._fields_[:7]), *attribute))
        ctypes.c_int.from_address(answer).value = clusters
        return result

    with monkeypatch.context() as patch:
        patch.setattr(kernel_launch, "function", lambda name, *_: {"cuOccupancyMaxActiveClusters": count}[name])
        assert kernel_launch.has_room_for_cluster(2**40, 2, 512, 200_000) == (result == 0 and clusters > 0)
    assert described == [(2**40, 2, 1, 1, 512, 1, 1, 200_000, 4, 0, 2, 1, 1)]  # 4: cluster dimension
