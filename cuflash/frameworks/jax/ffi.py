"""XLA's foreign function interface through ctypes: handlers written in Python, with no compiled bridge.

This module mirrors `xla/ffi/api/c_api.h`, which jaxlib ships (`jax.ffi.include_dir()`), on 64-bit machines. XLA passes
a handler a call frame: dense row-major buffers, attributes, and a table of functions that only grows with versions.
"""

from __future__ import annotations

import ctypes
import functools
import os
import traceback
from collections.abc import Callable
from typing import Any

from ...errors import ProblemError, UnsupportedError

VERSION = (0, 1)  # of handlers; a runtime of the same major version takes them
COMMAND_BUFFER_COMPATIBLE = 1  # a trait: the handler may be called while its stream is captured
_METADATA, _EXECUTE = 1, 3  # XLA_FFI_Extension_Metadata, XLA_FFI_ExecutionStage_EXECUTE
_INVALID_ARGUMENT, _INTERNAL = 3, 13  # XLA_FFI_Error_Code
_UPDATE = "install a jax and jaxlib from 0.8.2 on that cuflash is tested with, or call cuflash.forward outside of jit"


def _struct(name: str, **fields: Any) -> type[ctypes.Structure]:
    """Returns a struct of the interface; most begin with their size and a list of extensions."""
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


_SIZE, _POINTER, _INT, _INT64 = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_HEAD: dict[str, Any] = {"struct_size": _SIZE, "extension": _POINTER}
_Version = _struct("_Version", **_HEAD, major=_INT, minor=_INT)
_Metadata = _struct("_Metadata", struct_size=_SIZE, version=_Version, traits=ctypes.c_uint32)
_Extension = _struct("_Extension", struct_size=_SIZE, type=_INT, next=_POINTER, metadata=ctypes.POINTER(_Metadata))
_Buffer = _struct("_Buffer", **_HEAD, dtype=_INT, data=_POINTER, rank=_INT64, dims=_POINTER)
_Buffers = _struct("_Buffers", **_HEAD, size=_INT64, types=_POINTER, items=_POINTER)
_Array = _struct("_Array", dtype=_INT, size=_SIZE, data=_POINTER)
_Attributes = _struct("_Attributes", **_HEAD, size=_INT64, types=_POINTER, names=_POINTER, values=_POINTER)
_Query = _struct("_Query", **_HEAD, context=_POINTER, answer=_POINTER)  # for Stream_Get and DeviceOrdinal_Get
_Create = _struct("_Create", **_HEAD, message=ctypes.c_char_p, code=_INT)
_Error = _struct("_Error", **_HEAD, error=_POINTER, message=ctypes.c_char_p)
_FUNCTION = ctypes.PYFUNCTYPE(_POINTER, _POINTER)  # PYFUNCTYPE keeps the GIL: they return at once, as in driver.py
_FUNCTIONS = (
    "Error_Create", "Error_GetMessage", "Error_Destroy", "Handler_Register", "Stream_Get", "Type_Register",
    "ExecutionContext_Get", "State_Set", "State_Get", "DeviceMemory_Allocate", "DeviceMemory_Free",
    "ThreadPool_Schedule", "ThreadPool_NumThreads", "Future_Create", "Future_SetAvailable", "Future_SetError",
    "RunId_Get", "DeviceOrdinal_Get",
)  # fmt: skip
_Api = _struct("_Api", **_HEAD, version=_Version, internal=_POINTER, **dict.fromkeys(_FUNCTIONS, _FUNCTION))
_Frame = _struct(
    "_Frame",
    struct_size=_SIZE,
    extension=_POINTER,
    api=_POINTER,
    context=_POINTER,
    stage=_INT,
    operands=_Buffers,
    results=_Buffers,
    attributes=_Attributes,
)
_HANDLER = ctypes.CFUNCTYPE(_POINTER, _POINTER)


def _word(struct: type[ctypes.Structure], field: str) -> int:
    """Returns the index of the 64-bit word at which a field of a struct begins."""
    return int(getattr(struct, field).offset) // 8


# All memory as one array of 64-bit words. A call reads dozens of words; reading them through struct fields, or through
# an array built at an address, takes two to six times as long.
_MEMORY = (_INT64 * 2**59).from_address(0)
_EXTENSION, _API, _CONTEXT, _STAGE = (_word(_Frame, name) for name in ("extension", "api", "context", "stage"))
_OPERANDS, _RESULTS = (_word(_Frame, name) + _word(_Buffers, "size") for name in ("operands", "results"))
_TO_ITEMS = _word(_Buffers, "items") - _word(_Buffers, "size")
_VALUES = _word(_Frame, "attributes") + _word(_Attributes, "values")
_TO_DATA = _word(_Buffer, "data")
_FRAME_WORDS, _BUFFER_WORDS, _ARRAY_WORDS = (ctypes.sizeof(struct) // 8 for struct in (_Frame, _Buffer, _Array))
_QUERY_BYTES = ctypes.sizeof(_Query)
_QUERY = _INT64 * (_QUERY_BYTES // 8)


def _words(address: int, count: int) -> list[int]:
    """Returns `count` words from an address on, a multiple of 8."""
    first = address >> 3
    return _MEMORY[first : first + count]


class Buffer:
    """An operand or result of a call."""

    def __init__(self, address: int) -> None:
        _, _, dtype, self.data, rank, dims = _words(address, _BUFFER_WORDS)  # data may be 0 if there are no elements
        self.dtype = dtype & 0xFFFFFFFF  # an XLA_FFI_DataType
        self.shape = tuple(_words(dims, rank))


class Call:
    """An execution of a handler, valid until the handler returns."""

    def __init__(self, runtime: _Runtime, frame: list[int]) -> None:
        self._runtime, self._frame = runtime, frame

    def pointers(self) -> tuple[int, ...]:
        """Returns the addresses of the operands' data, then of the results' data."""
        memory = _MEMORY
        return tuple([memory[(item >> 3) + _TO_DATA] for item in self._items(_OPERANDS) + self._items(_RESULTS)])

    def buffers(self) -> tuple[list[Buffer], list[Buffer]]:
        """Returns the operands, and the results."""
        return [*map(Buffer, self._items(_OPERANDS))], [*map(Buffer, self._items(_RESULTS))]

    def attribute(self) -> bytes:
        """Returns the one attribute of the call, an array of 64-bit numbers."""
        _, size, data = _words(_MEMORY[self._frame[_VALUES] >> 3], _ARRAY_WORDS)
        return ctypes.string_at(data, 8 * size)

    def stream(self) -> int:
        """Returns the handle of the CUDA stream to launch on."""
        return self._runtime.answer("Stream_Get", self._frame[_CONTEXT])

    def ordinal(self) -> int:
        """Returns the number of the GPU to launch on."""
        return self._runtime.answer("DeviceOrdinal_Get", self._frame[_CONTEXT])

    def _items(self, position: int) -> list[int]:
        return _words(self._frame[position + _TO_ITEMS], self._frame[position])


class _Runtime:
    """XLA's table of functions, at a constant address."""

    def __init__(self, address: int) -> None:
        self._api = _Api.from_address(address)
        self.version = self._api.version.major, self._api.version.minor
        self._functions: dict[str, Any] = {}

    def __str__(self) -> str:
        return "XLA's FFI {}.{}".format(*self.version)

    def function(self, name: str) -> Any:
        """Returns a function by name; it takes the address of a struct and returns 0 or the address of an error."""
        entry = self._functions.get(name)
        if entry is None:
            slot = getattr(_Api, name)
            if self._api.struct_size < slot.offset + slot.size:
                raise UnsupportedError(f"{self} has no {name}: {_UPDATE}")
            entry = self._functions[name] = getattr(self._api, name)
        return entry

    def answer(self, name: str, context: int) -> int:
        """Returns a property of an execution, such as its stream."""
        query = _QUERY()  # zeros: some answers fill only half a word
        query[0], query[2] = _QUERY_BYTES, context
        if error := self.function(name)(query):
            raise RuntimeError(f"XLA_FFI_{name}: {self.taken(error)}")
        return query[-1]

    def error(self, message: bytes, code: int) -> int:
        """Returns the address of a new XLA error."""
        created = _Create(ctypes.sizeof(_Create), None, message, code)
        error_address: int = self.function("Error_Create")(ctypes.addressof(created))
        return error_address

    def taken(self, error: int) -> str:
        """Returns the message of an error, and destroys the error."""
        query = _Error(ctypes.sizeof(_Error), None, error, None)
        self.function("Error_GetMessage")(ctypes.addressof(query))
        message = (query.message or b"").decode(errors="replace")
        self.function("Error_Destroy")(ctypes.addressof(query))
        return message


_runtime = functools.cache(_Runtime)


def register(name: str, platform: str, traits: int, run: Callable[[Call], None]) -> None:
    """Makes `run` the handler of a target on a platform, "cpu" or "CUDA"; after a reload it replaces the earlier one.

    An exception of `run` becomes an XLA error: INVALID_ARGUMENT for ProblemError and UnsupportedError, else INTERNAL.
    """
    import jax

    key = name, platform
    is_registered = key in _handlers
    _handlers[key] = run
    if is_registered:
        return
    thunk = _HANDLER(lambda frame: _enter(key, traits, frame))
    # Leaked on purpose: XLA cannot unregister a handler, and executables may call it until the process ends.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thunk))
    try:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(ctypes.cast(thunk, _POINTER).value), platform=platform)
    except Exception as error:  # jaxlib raises exception types of its own
        del _handlers[key]
        raise UnsupportedError(f"XLA does not take the handler {name} for {platform} ({error}); {_UPDATE}") from error


# The handlers of this process. They survive a reload (`globals()`), as XLA keeps those registered before it.
_handlers: dict[tuple[str, str], Callable[[Call], None]] = globals().get("_handlers", {})


def _enter(key: tuple[str, str], traits: int, address: int) -> int:
    """Runs the handler on the call frame at an address; returns 0 or the address of an error to XLA."""
    # An exception that left this function would only be printed, and XLA would read a random register as the result.
    try:
        frame = _words(address, _FRAME_WORDS)
        if frame[_EXTENSION] and (extension := _Extension.from_address(frame[_EXTENSION])).type == _METADATA:
            metadata = extension.metadata.contents
            metadata.version.major, metadata.version.minor = VERSION
            metadata.traits = traits
        elif frame[_STAGE] & 0xFFFFFFFF == _EXECUTE:
            _handlers[key](Call(_fitting(frame[_API], frame[0]), frame))
        return 0
    except BaseException as error:
        return _error_of(address, error)


def check_fits(runtime: _Runtime, frame_bytes: int) -> None:
    """Raises UnsupportedError if a call frame has another version than the one mirrored here."""
    if runtime.version[0] != VERSION[0]:
        raise UnsupportedError(f"{runtime} is there; cuflash speaks {VERSION[0]}.x: {_UPDATE}")
    if frame_bytes < ctypes.sizeof(_Frame):
        raise UnsupportedError(
            f"a call frame of {runtime} has {frame_bytes} bytes; cuflash reads {ctypes.sizeof(_Frame)}: {_UPDATE}"
        )


@functools.cache
def _fitting(address: int, frame_bytes: int) -> _Runtime:
    runtime = _runtime(address)
    check_fits(runtime, frame_bytes)
    return runtime


def _error_of(address: int, error: BaseException) -> int:
    """Returns the address of an XLA error with the message of a Python exception."""
    try:
        is_user_error = isinstance(error, (ProblemError, UnsupportedError))
        message = f"{type(error).__name__}: {error}".encode(errors="backslashreplace")
        api = _Frame.from_address(address).api
        return _runtime(api).error(message, _INVALID_ARGUMENT if is_user_error else _INTERNAL)
    except BaseException:
        # Abort: after a return XLA would take the results as written.
        traceback.print_exc()
        os.abort()
