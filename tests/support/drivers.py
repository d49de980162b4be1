"""Stand-ins for the CUDA driver, the GPU and its arrays in tests that need no GPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from cuflash.arrays import find
from cuflash.arrays.library import GpuLibrary
from cuflash.planning import device
from cuflash.problem.array_spec import ArraySpec, packed_strides
from cuflash.runtime import call, device_memory, structs, tensor_map


class FakeDriver:
    """A stand-in for the driver's functions for tensor maps that records their arguments and addresses."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, tuple[Any, ...]]] = []
        self.argtypes: dict[str, tuple[type, ...]] = {}
        self.result = 0
        self.records = True
        self.writes = False  # True to write the address as the first word of a map whose address is replaced

    def function(self, name: str, *argtypes: type) -> Callable[..., int]:
        self.argtypes[name] = argtypes

        def called(address: int, *more: Any) -> int:
            if self.writes and name == "cuTensorMapReplaceAddress":
                ctypes.c_uint64.from_address(address).value = more[0]
            if self.records:
                self.calls.append((name, address, self.read(*more) if name == "cuTensorMapEncodeTiled" else more))
            return self.result

        return called

    @staticmethod
    def read(dtype: int, rank: int, pointer: int, *more: Any) -> tuple[Any, ...]:
        """Returns the arguments of an encoded map, with lengths, strides, box and steps in place of their addresses."""
        kinds = ctypes.c_uint64 * rank, ctypes.c_uint64 * (rank - 1), ctypes.c_uint32 * rank, ctypes.c_uint32 * rank
        arrays = (tuple(kind.from_address(address)) for kind, address in zip(kinds, more, strict=False))
        return dtype, rank, pointer, *arrays, *more[len(kinds) :]

    @classmethod
    def install(cls, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
        """Returns a stand-in that replaces the driver during a test, with an empty cache of maps."""
        driver = cls()
        monkeypatch.setattr(tensor_map, "function", driver.function)
        monkeypatch.setattr(structs, "encoded", functools.lru_cache(1024)(tensor_map.encoded.__wrapped__))
        return driver


class Gpus:
    """GPUs whose launches are recorded, as (stream, bytes of the parameters)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.driver = 1, FakeDriver.install(monkeypatch)
        self.driver.writes = True
        self.launched: list[tuple[int, bytes]] = []
        self.records = True
        self.blocks: dict[int, int] = {}  # size of a struct in bytes by its address
        monkeypatch.setattr(call, "current_device", lambda: self.current)
        monkeypatch.setattr(call, "on_device", self.on_device)
        monkeypatch.setattr(call, "launches_early", lambda: False)
        compiler = SimpleNamespace(
            load=lambda variant, ordinal: self.launch, unusable=frozenset, compile_together=lambda *_: None
        )
        monkeypatch.setattr(call, "compiler", compiler)
        monkeypatch.setattr(device_memory, "counter", lambda ordinal, stream, words, use: 512 * stream)
        monkeypatch.setattr(device, "query", lambda ordinal: device.DEVICES["sm_90"])
        monkeypatch.setattr(structs.ParamBuffer, "_free", {})
        function = SimpleNamespace(CPointer=lambda address: address)
        for name, module in (("cupy", SimpleNamespace()), ("cupy.cuda", SimpleNamespace()),
                             ("cupy.cuda.function", function)):  # fmt: skip
            monkeypatch.setitem(sys.modules, name, module)
        make = structs.ParamBuffer.__init__

        def noted(block: structs.ParamBuffer, size: int) -> None:
            make(block, size)
            if self.records:
                self.blocks[block.address] = size

        monkeypatch.setattr(structs.ParamBuffer, "__init__", noted)
        self.library = Recorded()
        monkeypatch.setitem(find._libraries, Array, self.library)
        call.CALL_CACHE.clear()

    @contextlib.contextmanager
    def on_device(self, ordinal: int) -> Iterator[None]:
        before, self.current = self.current, ordinal
        yield
        self.current = before

    def launch(self, grid: Any, block: Any, arguments: Any, smem_bytes: int, stream: Any) -> None:
        assert self.current == 1
        if self.records:
            (address,) = arguments
            self.launched.append((stream.ptr, ctypes.string_at(address, self.blocks[address])))

    def quiet(self) -> None:
        """Stops recording."""
        self.records = self.driver.records = False


class Array(NamedTuple):
    """An array on a recorded GPU."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    pointer: int

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], pointer: int, dtype: str = "bfloat16", rows: int = 0) -> Array:
        """Returns a dense array, or the first rows of one with `rows` rows."""
        whole = (shape[0], rows, *shape[2:]) if rows else shape
        return cls(shape, packed_strides(whole), dtype, pointer)


class Recorded(GpuLibrary):
    """The library of `Array`; new arrays have the address of earlier ones, as with a caching allocator."""

    name = "recorded"
    current_stream = 7

    def on_gpu(self, array: Any) -> bool:
        return True

    def spec(self, name: str, array: Any) -> ArraySpec:
        return ArraySpec(array.shape, array.strides, array.dtype, "cuda:1", self.name)

    def key(self, arrays: Sequence[Any]) -> Hashable:
        return (*[None if x is None else x[:3] for x in arrays],)

    def current_device(self) -> int:
        return 1

    def pointers(self, arrays: Sequence[Any]) -> list[int]:
        return [0 if x is None else x.pointer for x in arrays]

    def stream(self, ordinal: int) -> int:
        return self.current_stream

    def device(self, ordinal: int) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def allocator(self, shape: tuple[int, ...], dtype: str, ordinal: int) -> Callable[[], Array]:
        return functools.partial(Array.contiguous, shape, 2**44, dtype)
