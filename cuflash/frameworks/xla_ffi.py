"""XLA's foreign function interface through ctypes: handlers written in Python, with no compiled bridge.

Mirrors `xla/ffi/api/c_api.h`, which jaxlib ships (`jax.ffi.include_dir()`), on 64-bit machines. A handler is called
with a call frame: buffers that are dense and row-major, attributes, and a table of functions that only grows.
"""

from __future__ import annotations

import ctypes
import os
import traceback
from collections.abc import Callable
from typing import Any

from ..errors import ProblemError, UnsupportedError

VERSION = (0, 1)  # what handlers are written for; a runtime of the same major version takes them
COMMAND_BUFFER_COMPATIBLE = 1  # a trait: the handler may be called while its stream is captured
_METADATA, _EXECUTE = 1, 3  # XLA_FFI_Extension_Metadata, XLA_FFI_ExecutionStage_EXECUTE
_INVALID_ARGUMENT, _INTERNAL = 3, 13  # XLA_FFI_Error_Code
_UPDATE = "install a jax and jaxlib from 0.8 on that cuflash is tested with, or call cuflash.forward outside of jit"


def _struct(name: str, **fields: Any) -> type[ctypes.Structure]:
    """A struct of the interface; all but a few begin with their size and a list of extensions."""
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


_SIZE, _POINTER, _INT, _INT64 = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_HEAD: dict[str, Any] = {"struct_size": _SIZE, "extension": _POINTER}
_Version = _struct("_Version", **_HEAD, major=_INT, minor=_INT)
_Metadata = _struct("_Metadata", struct_size=_SIZE, version=_Version, traits=ctypes.c_uint32)
_Extension = _struct("_Extension", struct_size=_SIZE, type=_INT, next=_POINTER, metadata=ctypes.POINTER(_Metadata))
_Buffer = _struct(
    "_Buffer", **_HEAD, dtype=_INT, data=_POINTER, rank=_INT64, dims=ctypes.POINTER(_INT64)
)  # fmt: skip
_Buffers = _struct(
    "_Buffers", **_HEAD, size=_INT64, types=_POINTER, items=ctypes.POINTER(ctypes.POINTER(_Buffer))
)  # fmt: skip
_Array = _struct("_Array", dtype=_INT, size=_SIZE, data=_POINTER)
_Attributes = _struct(
    "_Attributes", **_HEAD, size=_INT64, types=_POINTER, names=_POINTER, values=ctypes.POINTER(ctypes.POINTER(_Array))
)
_Asked = _struct("_Asked", **_HEAD, context=_POINTER, answer=_POINTER)  # XLA_FFI_Stream_Get_Args, and of the ordinal
_Create = _struct("_Create", **_HEAD, message=ctypes.c_char_p, code=_INT)
_Error = _struct("_Error", **_HEAD, error=_POINTER, message=ctypes.c_char_p)
_FUNCTION = ctypes.CFUNCTYPE(_POINTER, _POINTER)
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
    extension=ctypes.POINTER(_Extension),
    api=ctypes.POINTER(_Api),
    context=_POINTER,
    stage=_INT,
    operands=_Buffers,
    results=_Buffers,
    attributes=_Attributes,
)
_HANDLER = ctypes.CFUNCTYPE(_POINTER, ctypes.POINTER(_Frame))


class Call:
    """One call of a handler, valid until it returns. Buffers have `data`, `dtype` (a code of XLA's), `rank`, `dims`."""

    def __init__(self, frame: Any) -> None:
        self._frame = frame
        operands, results = frame.operands, frame.results
        self.operands = [operands.items[i].contents for i in range(operands.size)]
        self.results = [results.items[i].contents for i in range(results.size)]

    def attribute(self) -> bytes:
        """The one attribute of the call, an array of 64-bit numbers."""
        array = self._frame.attributes.values[0].contents
        return ctypes.string_at(array.data, 8 * array.size)

    def stream(self) -> int:
        """Handle of the CUDA stream to launch on."""
        return self._ask("Stream_Get", _POINTER)

    def ordinal(self) -> int:
        """Number of the GPU."""
        return self._ask("DeviceOrdinal_Get", ctypes.c_int32)

    def _ask(self, name: str, kind: Any) -> int:
        asked = _Asked(ctypes.sizeof(_Asked), None, self._frame.context, None)
        api = self._frame.api.contents
        if error := _function(api, name)(ctypes.addressof(asked)):
            raise RuntimeError(f"XLA_FFI_{name}: {_taken(api, error)}")
        return kind.from_address(ctypes.addressof(asked) + _Asked.answer.offset).value or 0


def shape(buffer: Any) -> tuple[int, ...]:
    """Dimensions of a buffer."""
    return tuple(buffer.dims[: buffer.rank])


def register(name: str, platform: str, traits: int, run: Callable[[Call], None]) -> None:
    """Makes `run` the handler of a target on a platform, "cpu" or "CUDA", instead of an earlier one (a reload).

    What it raises becomes an error of XLA's: INVALID_ARGUMENT where the library judges, else INTERNAL.
    """
    import jax

    key = name, platform
    known = key in _handlers
    _handlers[key] = run
    if known:
        return
    thunk = _HANDLER(lambda frame: _enter(key, traits, frame.contents))
    # why: executables call it as long as the process lives, and nobody can tell XLA to forget it.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thunk))
    try:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(ctypes.cast(thunk, _POINTER).value), platform=platform)
    except Exception as error:  # why: jaxlib raises its own types
        del _handlers[key]
        raise UnsupportedError(f"XLA does not take the handler {name} for {platform} ({error}); {_UPDATE}") from error


# Those of this process. why so: where this module is loaded anew, its handlers are still XLA's.
_handlers: dict[tuple[str, str], Callable[[Call], None]] = globals().get("_handlers", {})


def _enter(key: tuple[str, str], traits: int, frame: Any) -> int:
    """What XLA calls: 0, or the address of an error."""
    # why: an exception that leaves this function is only printed, and XLA takes what is in a register for its answer.
    try:
        if frame.extension and frame.extension.contents.type == _METADATA:
            metadata = frame.extension.contents.metadata.contents
            metadata.version.major, metadata.version.minor = VERSION
            metadata.traits = traits
        elif frame.stage == _EXECUTE:
            check_fits(frame)
            _handlers[key](Call(frame))
        return 0
    except BaseException as error:
        return _told(frame, error)


def check_fits(frame: Any) -> None:
    """`UnsupportedError` where a call frame is not of the version that is mirrored here."""
    version = frame.api.contents.version
    if version.major != VERSION[0]:
        raise UnsupportedError(
            f"XLA's FFI has version {version.major}.{version.minor}; cuflash speaks {VERSION[0]}.x: {_UPDATE}"
        )
    if frame.struct_size < ctypes.sizeof(_Frame):
        raise UnsupportedError(
            f"a call frame of XLA's FFI {version.major}.{version.minor} has {frame.struct_size} bytes; cuflash reads "
            f"{ctypes.sizeof(_Frame)}: {_UPDATE}"
        )


def _function(api: Any, name: str) -> Any:
    slot = getattr(_Api, name)
    if api.struct_size < slot.offset + slot.size:
        raise UnsupportedError(f"XLA's FFI {api.version.major}.{api.version.minor} has no {name}: {_UPDATE}")
    return getattr(api, name)


def _taken(api: Any, error: int) -> str:
    """The message of an error, which is then destroyed."""
    asked = _Error(ctypes.sizeof(_Error), None, error, None)
    api.Error_GetMessage(ctypes.addressof(asked))
    message = (asked.message or b"").decode(errors="replace")
    api.Error_Destroy(ctypes.addressof(asked))
    return message


def _told(frame: Any, error: BaseException) -> int:
    """An error of XLA's with the message of a Python one."""
    try:
        judged = isinstance(error, (ProblemError, UnsupportedError))
        message = f"{type(error).__name__}: {error}".encode()
        created = _Create(ctypes.sizeof(_Create), None, message, _INVALID_ARGUMENT if judged else _INTERNAL)
        told: int = frame.api.contents.Error_Create(ctypes.addressof(created))
        return told
    except BaseException:
        # why: to return would tell XLA that the results were written.
        traceback.print_exc()
        os.abort()
