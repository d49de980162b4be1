"""Functions of the CUDA driver, found by ctypes: on a machine without a driver, those of the C library."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cuflash.runtime import driver


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the libraries that were opened."""
    opened: list[str] = []
    real = ctypes.PyDLL

    def open_library(name: str) -> ctypes.PyDLL:
        opened.append(name)
        return real(None)

    monkeypatch.setattr(driver.ctypes, "PyDLL", open_library)
    driver.function.cache_clear()
    yield opened
    driver.function.cache_clear()


def test_a_function_is_looked_up_once(libraries: list[str]) -> None:
    assert driver.function("abs", ctypes.c_int)(-3) == 3
    assert driver.function("abs", ctypes.c_int) is driver.function("abs", ctypes.c_int)
    assert len(libraries) == 1


@pytest.mark.parametrize(("platform", "name"), [("linux", "libcuda.so.1"), ("win32", "nvcuda.dll")])
def test_the_library_is_that_of_the_system(
    libraries: list[str], platform: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    driver.function("abs")
    assert libraries == [name]


def test_argument_types_are_those_of_one_caller() -> None:
    typed, other = driver.function("abs", ctypes.c_int), driver.function("abs", ctypes.c_void_p)
    assert typed(-3) == 3
    with pytest.raises(ctypes.ArgumentError):
        other(b"text", 1.5)
    with pytest.raises(ctypes.ArgumentError):
        typed("text")


def test_a_function_that_the_driver_does_not_have_is_an_error() -> None:
    with pytest.raises(AttributeError, match="cuNoSuchThing"):
        driver.function("cuNoSuchThing")


@pytest.mark.parametrize(("result", "device"), [(0, 5), (201, -1)])
def test_the_current_device_is_that_of_the_threads_context(
    result: int, device: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(address: int) -> int:
        ctypes.c_int.from_address(address).value = 5
        return result

    with monkeypatch.context() as patch:
        patch.setattr(driver, "function", lambda *_: answer)
        assert driver.current_device() == device


def test_a_thread_gets_a_context_even_of_what_is_its_device_already(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    @contextlib.contextmanager
    def device(ordinal: int) -> Iterator[None]:
        yield told.append(("enter", ordinal))
        told.append("exit")

    runtime = SimpleNamespace(setDevice=lambda ordinal: told.append(("set", ordinal)))
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(Device=device, runtime=runtime))
    with driver.on_device(3):
        told.append("inside")
    assert told == [("enter", 3), ("set", 3), "inside", "exit"]


def test_a_capture_is_relaxed_inside_and_as_it_was_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = [0]

    def exchange(address: int) -> int:
        given = ctypes.c_int.from_address(address)
        modes.append(given.value)
        given.value = modes[-2]
        return 0

    def fail() -> None:
        with driver.relaxed_capture():
            assert modes == [0, 2]
            raise KeyError

    with monkeypatch.context() as patched:
        patched.setattr(driver, "function", lambda name, *types: exchange)
        with pytest.raises(KeyError):
            fail()
    assert modes == [0, 2, 0]


class Config(ctypes.Structure):
    """CUlaunchConfig, as cuda.h has it."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "smem")),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("num_attributes", ctypes.c_uint),
    )  # fmt: skip


def test_an_early_launch_is_described_as_the_driver_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []

    def launch(config: bytes, kernel: int, pointers: int, extra: None) -> int:
        assert len(config) == ctypes.sizeof(Config)
        read = Config.from_buffer_copy(config)
        words = (ctypes.c_int * 3).from_address(read.attributes)
        seen.append((*(getattr(read, name) for name, _ in Config._fields_[:8]), read.num_attributes, *words[::2]))
        assert (kernel, pointers, extra) == (2**40, 2**41, None)
        return 0

    with monkeypatch.context() as patch:
        patch.setattr(driver, "function", lambda name, *argtypes: {"cuLaunchKernelEx": launch}[name])
        early = driver.EarlyLaunch(SimpleNamespace(ptr=2**40), (132, 1, 1), (256, 1, 1), 200_000)
        for stream in (2**42, 2**42, 0):
            early(2**41, stream)
    # 6: programmatic stream serialization
    assert seen == [(132, 1, 1, 256, 1, 1, 200_000, stream, 1, 6, 1) for stream in (2**42, 2**42, None)]


@pytest.mark.parametrize(("version", "early"), [(12030, False), (12040, True), (13000, True)])
def test_only_drivers_whose_graphs_take_them_launch_early(
    version: int, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tell(address: int) -> int:
        ctypes.c_int.from_address(address).value = version
        return 0

    with monkeypatch.context() as patch:
        patch.setattr(driver, "function", lambda name, *argtypes: {"cuDriverGetVersion": tell}[name])
        assert driver.launches_early.__wrapped__() == early
