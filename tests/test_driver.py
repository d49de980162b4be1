"""Functions of the CUDA driver, found by ctypes: on a machine without a driver, those of the C library."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from cuflash import driver


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


@pytest.mark.parametrize("result", [0, 201])
def test_a_thread_gets_a_context_where_it_has_none(result: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    runtime = SimpleNamespace(setDevice=chosen.append)
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(runtime=runtime))
    with monkeypatch.context() as patch:
        patch.setattr(driver, "function", lambda *_: lambda address: result)
        driver.bind(3)
    assert chosen == ([3] if result else [])


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
