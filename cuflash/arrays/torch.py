"""Adapter for PyTorch tensors: pointer, shape and strides are read directly. DLPack would cost 4 to 34 µs a tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..errors import ProblemError, UnsupportedError
from ..problem.array_spec import ArraySpec, packed_strides
from ..problem.dtypes import DTYPES
from .library import GpuLibrary, cupy_module, numpy_dtype
from .torch_keys import TensorKeys


class TorchLibrary(GpuLibrary):
    name = "torch"

    def __init__(self) -> None:
        import torch

        self._torch, self.device = torch, torch.cuda.device
        self._names = {getattr(torch, name): name for name in DTYPES}
        self._dtypes = {name: dtype for dtype, name in self._names.items()} | {"int8": torch.int8}  # of results
        # The public current_stream() takes 4 µs to build an object; Triton and Inductor read this handle, too.
        self.stream = getattr(torch._C, "_cuda_getCurrentRawStream", self._current_stream)
        # The public current_device() first checks that torch has initialised CUDA; a GPU tensor implies that.
        self.current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
        self.key = TensorKeys(torch, self._key).find
        # Tensors that torch.func wraps have no memory, and their pointer may be another tensor's.
        functorch = getattr(torch._C, "_functorch", None)
        self._is_wrapped = getattr(functorch, "is_functorch_wrapped_tensor", lambda tensor: False)
        # torch.empty takes 1.5 µs longer, and a call allocates up to four tensors. Inductor's code allocates like this.
        guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
        self._empty_strided = getattr(guards, "_empty_strided_cuda", None)

    def on_gpu(self, array: Any) -> bool:
        if array.is_cuda:
            return True
        if array.device.type not in ("cpu", "meta"):
            raise UnsupportedError(f"torch arrays on {array.device} are not supported; move them to cuda or cpu")
        return False

    def spec(self, name: str, array: Any) -> ArraySpec:
        check_dense(name, array)
        if self._is_wrapped(array):
            raise UnsupportedError(
                f"{name} is a tensor that torch.func has wrapped (vmap, grad, jvp or functionalize); take attention of "
                "cuflash.frameworks.torch there, or call cuflash outside the transformation"
            )
        if array.requires_grad and self._torch.is_grad_enabled():
            raise ProblemError(
                f"{name} requires grad, but no gradient flows through this call: call "
                "cuflash.frameworks.torch.attention, or detach it, or call under torch.no_grad()"
            )
        if array.is_cuda and array.is_neg():
            raise UnsupportedError(
                f"{name} is a view that is yet to be negated; give {name}.resolve_neg(), which is a copy, or for "
                "results a plain tensor"
            )
        dtype = self._names.get(array.dtype) or str(array.dtype).removeprefix("torch.")
        device = f"cuda:{array.get_device()}" if array.is_cuda else str(array.device)
        return ArraySpec(tuple(array.shape), tuple(array.stride()), dtype, device, self.name)

    def _key(self, array: Any) -> tuple[Any, ...]:
        # Tensors that require grad, lazily negated and wrapped ones must reach spec(), which refuses them.
        grad = array.requires_grad and self._torch.is_grad_enabled()
        must_validate = grad or array.is_neg() or self._is_wrapped(array)
        try:
            return array.shape, array.stride(), array.dtype, array.get_device(), must_validate
        except RuntimeError:  # nested and sparse tensors have no strides; spec() refuses them, too
            return array.dtype, True

    def pointers(self, arrays: Sequence[Any]) -> list[int]:
        return [0 if x is None else x.data_ptr() for x in arrays]

    def _current_stream(self, ordinal: int) -> int:
        return self._torch.cuda.current_stream(ordinal).cuda_stream  # type: ignore[no-any-return]

    def allocator(self, shape: tuple[int, ...], dtype: str, ordinal: int) -> Callable[[], Any]:
        if self._empty_strided is not None:
            return partial(self._empty_strided, shape, packed_strides(shape), self._dtypes[dtype])
        return partial(self._torch.empty, shape, dtype=self._dtypes[dtype], device=ordinal)

    def check_type(self, name: str, array: Any) -> None:
        # FakeTensor, DTensor, nested and quantised tensors have no memory: data_ptr() is 0.
        if type(array).__torch_dispatch__ is not self._torch.Tensor.__torch_dispatch__:
            raise UnsupportedError(f"{name} is a torch {type(array).__name__}; give the plain tensor it stands for")

    def check_writable(self, name: str, array: Any, otherwise: str = "") -> None:
        if array.is_neg() and array.numel():
            raise ProblemError(
                f"{name} is a view that is yet to be negated, which cannot be written to; give a plain tensor"
                f"{otherwise}"
            )

    def seed(self, number: int, like: Any) -> Any:
        # torch.full: unlike a copy from the host, it can be captured in a CUDA graph and does not synchronize.
        return self._torch.full((), number, dtype=self._torch.int64, device=like.device)

    def arange(self, count: int, like: Any) -> Any:
        return self._torch.arange(count, device=like.device)

    def with_packed_strides(self, array: Any) -> Any:
        return array.contiguous()

    def copy(self, source: Any, target: Any) -> None:
        target.copy_(source)

    def read(self, array: Any) -> np.ndarray[Any, Any]:
        return self.to_numpy(array.cpu())

    def to_cupy(self, array: Any) -> Any:
        return cupy_module().from_dlpack(array.detach())

    def from_cupy(self, array: Any) -> Any:
        return self._torch.from_dlpack(array)

    def cupy_stream(self, ordinal: int) -> contextlib.AbstractContextManager[Any]:
        # torch.cuda.Stream has this protocol in some versions only.
        stream = SimpleNamespace(__cuda_stream__=lambda: (0, self._current_stream(ordinal)))
        return cupy_module().cuda.Stream.from_external(stream)  # type: ignore[no-any-return]

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        array = array.detach().resolve_neg()
        if type(array).__torch_dispatch__ is not self._torch.Tensor.__torch_dispatch__:
            raise UnsupportedError(
                f"a mode of torch is active, in which tensors become {type(array).__name__} without values; call "
                "cuflash outside of it, or attention of cuflash.frameworks.torch, which is an op there"
            )
        itemsize, dtype = array.element_size(), str(array.dtype).removeprefix("torch.")
        _, end = ArraySpec(tuple(array.shape), tuple(array.stride()), dtype, "cpu", self.name).span
        needed = end and end + array.storage_offset() * itemsize
        if (size := array.untyped_storage().nbytes()) < needed:
            raise ProblemError(
                f"the storage of a tensor of shape {tuple(array.shape)} has {size} bytes, but its elements need "
                f"{needed}; give it its memory back (it was resized, as FSDP does between uses)"
            )
        if not array.numel():  # has no memory, and NumPy before 2.4 takes a null pointer for none given
            return np.empty(tuple(array.shape), numpy_dtype(dtype))
        place = {
            "version": 3,
            "data": (array.data_ptr(), False),
            "shape": tuple(array.shape),
            "strides": tuple([stride * itemsize for stride in array.stride()]),
            "typestr": f"|V{itemsize}",
        }
        # Tensor.numpy() would make the caller's storage unresizable for ever, but FSDP2 resizes it between uses. The
        # view keeps the tensor alive.
        memory = np.asarray(SimpleNamespace(__array_interface__=place, tensor=array))
        return memory.view(numpy_dtype(dtype))

    def from_numpy(self, array: np.ndarray[Any, Any], like: Any) -> Any:
        # Copied: the storage of torch.from_numpy cannot be resized.
        result = self._torch.empty(array.shape, dtype=getattr(self._torch, array.dtype.name), device="cpu")
        self.to_numpy(result)[...] = array
        return result

    def without_values(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self._torch.empty(shape, dtype=self._dtypes[dtype], device="meta")


library = cache(TorchLibrary)


def check_dense(name: str, tensor: Any) -> None:
    """Raises UnsupportedError for a tensor without strides: nested or sparse."""
    # Compared by name: torch.strided would need an import of torch.
    if tensor.is_nested or str(tensor.layout) != "torch.strided":
        raise UnsupportedError(f"{name} is a nested or sparse tensor; give a dense one")
