"""Functions of the CUDA driver through ctypes; without a driver, functions of the C library stand in."""

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
    """Returns the names of opened libraries."""
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


@pytest.mark.parametrize(("name", "message"), [(b"CUDA_ERROR_UNKNOWN", "CUDA_ERROR_UNKNOWN"), (None, "CUDA error")])
def test_a_failure_has_cudas_name_for_it(name: bytes | None, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def name_error(result: int, answer: int) -> int:
        ctypes.c_char_p.from_address(answer).value = name
        return int(name is None)

    with monkeypatch.context() as patch:
        patch.setattr(driver, "function", lambda symbol, *argtypes: {"cuGetErrorName": name_error}[symbol])
        assert str(driver.failure(2, "no page")) == f"no page: {message} (2)"


@pytest.mark.parametrize(("result", "device"), [(0, 5), (201, -1)])
def test_the_current_device_is_that_of_the_threads_context(
    result: int, device: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(address: int) -> int:
        ctypes.c_int.from_address(address).value = 5
        return result

    with monkeypatch.context() as patch:
        patch.setattr(driver, "_device_of_context", lambda: answer)
        assert driver.current_device() == device


def test_a_thread_gets_a_context_even_of_what_is_its_device_already(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[Any] = []

    @contextlib.contextmanager
    def device(ordinal: int) -> Iterator[None]:
        yield messages.append(("enter", ordinal))
        messages.append("exit")

    runtime = SimpleNamespace(setDevice=lambda ordinal: messages.append(("set", ordinal)))
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(Device=device, runtime=runtime))
    with driver.on_device(3):
        messages.append("inside")
    assert messages == [("enter", 3), ("set", 3), "inside", "exit"]


def test_a_capture_is_relaxed_inside_and_as_it_was_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = [0]

    def exchange(address: int) -> int:
        word = ctypes.c_int.from_address(address)
        modes.append(word.value)
        word.value = modes[-2]
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
