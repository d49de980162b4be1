"""Arrays of any framework: what they are, where they are, and new ones of the same kind.

CuPy and torch arrays on a GPU are read directly (pointer, shape, strides): DLPack costs 4 to 34 µs an array and stays
off their path. JAX arrays and unknown DLPack producers cross over to CuPy or NumPy, without a copy, and back.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any, ClassVar

import numpy as np

from .errors import INSTALL_HINT, ProblemError, UnsupportedError
from .problem import ArraySpec, check_alike, dense_strides


def element_strides(array: Any) -> tuple[int, ...]:
    """Strides of a NumPy or CuPy array in elements."""
    itemsize = array.dtype.itemsize
    return tuple(stride // itemsize for stride in array.strides)


class Framework:
    """What the launchers ask of a framework. `on_gpu` arrays offer `key`, `pointer`, `empty` and `stream`."""

    name: ClassVar[str]

    def on_gpu(self, array: Any) -> bool:
        raise NotImplementedError

    def spec(self, name: str, array: Any) -> ArraySpec:
        raise NotImplementedError

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        """A NumPy view of an array in host memory."""
        raise NotImplementedError

    def from_numpy(self, array: np.ndarray[Any, Any], like: Any) -> Any:
        """An array of this framework that takes over a NumPy result."""
        raise NotImplementedError


class GpuFramework(Framework):
    """CuPy or torch: their GPU arrays are launched on as they are."""

    def key(self, array: Any) -> tuple[Any, ...]:
        """Everything but the pointer, as a cheap hashable value: the first part of a launch's cache key."""
        raise NotImplementedError

    def ordinal(self, array: Any) -> int:
        raise NotImplementedError

    def pointer(self, array: Any) -> int:
        raise NotImplementedError

    def stream(self, ordinal: int) -> int:
        """Handle of the caller's current stream on that GPU."""
        raise NotImplementedError

    def device(self, ordinal: int) -> contextlib.AbstractContextManager[Any]:
        """Makes the GPU current, where it is not."""
        raise NotImplementedError

    def empty(self, shape: tuple[int, ...], dtype: str, ordinal: int) -> Any:
        """A new dense array from the framework's own allocator. The GPU must be current."""
        raise NotImplementedError

    def dense(self, array: Any) -> Any:
        """A contiguous copy."""
        raise NotImplementedError

    def copy(self, source: Any, target: Any) -> None:
        """target[...] = source"""
        raise NotImplementedError

    def to_cupy(self, array: Any) -> Any:
        """The same memory as a CuPy array (`algorithm="standard"` only)."""
        raise NotImplementedError

    def from_cupy(self, array: Any) -> Any:
        """A CuPy result as an array of this framework, without a copy."""
        raise NotImplementedError

    def cupy_stream(self, ordinal: int) -> contextlib.AbstractContextManager[Any]:
        """Makes the caller's stream CuPy's current one."""
        raise NotImplementedError


class Numpy(Framework):
    name = "numpy"

    def on_gpu(self, array: Any) -> bool:
        return False

    def spec(self, name: str, array: Any) -> ArraySpec:
        return ArraySpec(array.shape, element_strides(array), array.dtype.name, "cpu", self.name)

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        return np.asarray(array)

    def from_numpy(self, array: np.ndarray[Any, Any], like: Any) -> Any:
        return array


class Cupy(GpuFramework):
    name = "cupy"

    def __init__(self) -> None:
        cupy = self._cupy = cupy_module()
        self._current_stream = cupy.cuda.get_current_stream
        self._current_device = cupy.cuda.runtime.getDevice

    def on_gpu(self, array: Any) -> bool:
        return True

    def spec(self, name: str, array: Any) -> ArraySpec:
        device = f"cuda:{array.data.device_id}"
        return ArraySpec(array.shape, element_strides(array), array.dtype.name, device, self.name)

    def key(self, array: Any) -> tuple[Any, ...]:
        return array.shape, array.strides, array.dtype, array.data.device_id

    def ordinal(self, array: Any) -> int:
        return array.data.device_id  # type: ignore[no-any-return]

    def pointer(self, array: Any) -> int:
        return array.data.ptr  # type: ignore[no-any-return]

    def stream(self, ordinal: int) -> int:
        return self._current_stream().ptr  # type: ignore[no-any-return]

    def device(self, ordinal: int) -> contextlib.AbstractContextManager[Any]:
        if self._current_device() == ordinal:
            return _NOTHING
        return self._cupy.cuda.Device(ordinal)  # type: ignore[no-any-return]

    def empty(self, shape: tuple[int, ...], dtype: str, ordinal: int) -> Any:
        return self._cupy.empty(shape, dtype)

    def dense(self, array: Any) -> Any:
        return self._cupy.ascontiguousarray(array)

    def copy(self, source: Any, target: Any) -> None:
        target[...] = source

    def to_cupy(self, array: Any) -> Any:
        return array

    def from_cupy(self, array: Any) -> Any:
        return array

    def cupy_stream(self, ordinal: int) -> contextlib.AbstractContextManager[Any]:
        return _NOTHING


class Torch(GpuFramework):
    name = "torch"

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._names = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32",
                       torch.float64: "float64"}  # fmt: skip
        self._dtypes = {name: dtype for dtype, name in self._names.items()}
        # why: the public current_stream() builds an object, 4 µs; Triton and Inductor read the same raw handle.
        self._raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        # why: the public current_device() first asks whether torch uses GPUs yet, as it does once a tensor is on one.
        self._current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
        # why: torch.empty takes 1.5 µs longer, up to four times a call; Inductor's code allocates by this one, too.
        guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
        self._empty_strided = getattr(guards, "_empty_strided_cuda", None)

    def on_gpu(self, array: Any) -> bool:
        if array.is_cuda:
            return True
        if array.device.type != "cpu":
            raise UnsupportedError(f"torch arrays on {array.device} are not supported; move them to cuda or cpu")
        return False

    def spec(self, name: str, array: Any) -> ArraySpec:
        if array.requires_grad and self._torch.is_grad_enabled():
            raise ProblemError(
                f"{name} requires grad, but no gradient flows through this call: call "
                "cuflash.frameworks.torch.attention, or detach it, or call under torch.no_grad()"
            )
        if array.is_cuda and array.is_neg():
            raise UnsupportedError(f"{name} is a view that is yet to be negated; give {name}.resolve_neg()")
        dtype = self._names.get(array.dtype, str(array.dtype).removeprefix("torch."))
        device = str(array.device)
        return ArraySpec(tuple(array.shape), tuple(array.stride()), dtype, device, self.name)

    def key(self, array: Any) -> tuple[Any, ...]:
        # why: tensors that require grad, and lazily negated ones, must reach spec(), which judges them.
        judged = (array.requires_grad and self._torch.is_grad_enabled()) or array.is_neg()
        return array.shape, array.stride(), array.dtype, array.get_device(), judged

    def ordinal(self, array: Any) -> int:
        return array.device.index  # type: ignore[no-any-return]

    def pointer(self, array: Any) -> int:
        return array.data_ptr()  # type: ignore[no-any-return]

    def stream(self, ordinal: int) -> int:
        if self._raw_stream is not None:
            return self._raw_stream(ordinal)  # type: ignore[no-any-return]
        return self._torch.cuda.current_stream(ordinal).cuda_stream  # type: ignore[no-any-return]

    def device(self, ordinal: int) -> contextlib.AbstractContextManager[Any]:
        if self._current_device() == ordinal:
            return _NOTHING
        return self._torch.cuda.device(ordinal)  # type: ignore[no-any-return]

    def empty(self, shape: tuple[int, ...], dtype: str, ordinal: int) -> Any:
        if self._empty_strided is not None:
            return self._empty_strided(shape, dense_strides(shape), self._dtypes[dtype])
        return self._torch.empty(shape, dtype=self._dtypes[dtype], device=ordinal)

    def dense(self, array: Any) -> Any:
        return array.contiguous()

    def copy(self, source: Any, target: Any) -> None:
        target.copy_(source)

    def to_cupy(self, array: Any) -> Any:
        return cupy_module().from_dlpack(array.detach())

    def from_cupy(self, array: Any) -> Any:
        return self._torch.from_dlpack(array)

    def cupy_stream(self, ordinal: int) -> contextlib.AbstractContextManager[Any]:
        stream = self._torch.cuda.current_stream(ordinal)
        return cupy_module().cuda.Stream.from_external(_CudaStream(stream.cuda_stream))  # type: ignore[no-any-return]

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        array = array.detach().resolve_neg()
        if array.dtype == self._torch.bfloat16:
            return array.view(self._torch.int16).numpy().view(bfloat16())  # type: ignore[no-any-return]
        return array.numpy()  # type: ignore[no-any-return]

    def from_numpy(self, array: np.ndarray[Any, Any], like: Any) -> Any:
        if array.dtype.name == "bfloat16":
            return self._torch.from_numpy(array.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_numpy(array)


class _CudaStream:
    """A stream handle in the form that CuPy takes over."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


class Exchanged(Framework):
    """JAX and unknown DLPack producers: seen as CuPy or NumPy arrays of the same memory."""

    def __init__(self, name: str) -> None:
        self.name = name  # type: ignore[misc]

    def on_gpu(self, array: Any) -> bool:
        if self.name == "jax":
            import jax

            if isinstance(array, jax.core.Tracer):
                raise UnsupportedError(
                    "a traced JAX array (jit, grad or vmap) has no memory yet; take attention of "
                    "cuflash.frameworks.jax there, or call cuflash outside the transformation"
                )
        kind = int(array.__dlpack_device__()[0])
        if kind not in (1, 2, 13):  # kDLCPU, kDLCUDA, kDLCUDAManaged
            raise UnsupportedError(
                f"{self.name} arrays of DLPack device type {kind} are not supported; move them to cuda or cpu"
            )
        return kind != 1

    def spec(self, name: str, array: Any) -> ArraySpec:
        spec = cupy().spec(name, self.to_cupy(array)) if self.on_gpu(array) else NUMPY.spec(name, self.to_numpy(array))
        return spec._replace(framework=self.name)

    def to_cupy(self, array: Any) -> Any:
        """The same memory as a CuPy array; CuPy's current stream waits for the producer."""
        return cupy_module().from_dlpack(array)

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        return np.asarray(array) if self.name == "jax" else np.from_dlpack(array)

    def from_numpy(self, array: np.ndarray[Any, Any], like: Any) -> Any:
        if self.name != "jax":
            return array
        import jax

        return jax.device_put(array, next(iter(like.devices())))

    def from_cupy(self, array: Any) -> Any:
        """The result in the caller's framework: JAX for JAX, CuPy for producers that offer no way back."""
        if self.name != "jax":
            return array
        import jax

        # why: XLA may reuse the inputs' memory on its own streams as soon as Python drops them.
        with array.device:  # CuPy's current stream is one of each device
            cupy_module().cuda.get_current_stream().synchronize()
        return jax.dlpack.from_dlpack(array)


def as_4d(array: Any) -> Any:
    """A NumPy or CuPy array seen as (batch, seqlen, heads, dim), like `ArraySpec.as_4d`."""
    if array.ndim == 2:
        array = array[:, None]
    return array[None] if array.ndim == 3 else array


_NOTHING = contextlib.nullcontext()
NUMPY = Numpy()
_known: dict[type, Framework] = {np.ndarray: NUMPY}
_singletons: dict[str, Framework] = {"numpy": NUMPY}


def bfloat16() -> np.dtype[Any]:
    """NumPy's bfloat16, which the package ml_dtypes defines."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise UnsupportedError("bfloat16 on the CPU needs ml_dtypes: pip install ml_dtypes") from error
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def cupy_module() -> Any:
    """The package cupy; `UnsupportedError` with the way out where it is missing."""
    try:
        import cupy
    except ImportError as error:
        raise UnsupportedError(f"GPU arrays need CuPy, which is not installed: {INSTALL_HINT}") from error
    return cupy


def cupy() -> Cupy:
    """The CuPy adapter."""
    return _singleton("cupy", Cupy)  # type: ignore[return-value]


def frameworks_of(names: str | tuple[str, ...], arrays: tuple[Any, ...]) -> tuple[Framework, bool]:
    """(framework, whether on a GPU) of the arrays of a call, judged by the first; mixed ones are a `ProblemError`."""
    first, kind = framework_of(names[0], arrays[0]), type(arrays[0])
    for index, array in enumerate(arrays):
        if type(array) is not kind and (other := framework_of(names[index], array)) is not first:
            check_alike({names[0]: first.spec(names[0], arrays[0]), names[index]: other.spec(names[index], array)})
    return first, first.on_gpu(arrays[0])


def framework_of(name: str, array: Any) -> Framework:
    """The framework an array belongs to; `ProblemError` if it is no array."""
    found = _known.get(type(array))
    if found is None:
        found = _known[type(array)] = _find(name, array)
    return found


def _find(name: str, array: Any) -> Framework:
    if _is_instance(array, "numpy.ma", "MaskedArray"):
        raise ProblemError(f"{name} is a NumPy masked array, whose mask has no meaning here; give a plain array")
    if isinstance(array, np.ndarray):
        return NUMPY
    if _is_instance(array, "torch", "Tensor"):
        # why: FakeTensor, DTensor, nested and quantised tensors have no memory of their own: data_ptr() is 0.
        if type(array).__torch_dispatch__ is not sys.modules["torch"].Tensor.__torch_dispatch__:
            raise UnsupportedError(f"{name} is a torch {type(array).__name__}; give the plain tensor it stands for")
        return _singleton("torch", Torch)
    if _is_instance(array, "cupy", "ndarray"):
        return cupy()
    if _is_instance(array, "jax", "Array"):
        return _singleton("jax", lambda: Exchanged("jax"))
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _singleton(type(array).__module__, lambda: Exchanged(type(array).__module__.split(".")[0]))
    raise ProblemError(
        f"{name} is a {type(array).__name__}; give a CuPy, PyTorch, JAX or NumPy array, or one that has __dlpack__"
    )


def _is_instance(array: Any, module: str, name: str) -> bool:
    # why: an array of a framework can only exist once the framework was imported, so it is never imported to look
    # (numpy.ma alone takes 50 ms).
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(array, getattr(loaded, name, ()))


def _singleton(name: str, make: Any) -> Framework:
    if name not in _singletons:
        _singletons[name] = make()
    return _singletons[name]
