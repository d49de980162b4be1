"""Checks of tensors: dense with memory; and of PyTorch: active transforms, autocast, compilers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad

from ...arrays.torch import check_dense
from ...errors import ProblemError, UnsupportedError
from ...units import kind_of

TANGENT = (
    "{name} carries a tangent of forward-mode differentiation, which cuflash does not have; take gradients by "
    "torch.autograd.grad or backward(), or torch.func.vjp"
)
# True if a torch.func transform is active; and if it wraps a tensor, which then has no memory itself.
is_transforming = torch._C._are_functorch_transforms_active
is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
# True if autograd's own vmap, which does not use rules of Functions, wraps a tensor.
is_batched = torch._C._functorch.is_legacy_batchedtensor


def is_mapped(tensor: torch.Tensor) -> bool:
    """True if a vmap of torch.func maps over an axis of a tensor, under any other transforms."""
    while is_transformed(tensor):
        if torch._C._functorch.is_batchedtensor(tensor):
            return True
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return False


def check_tensor(name: str, tensor: Any) -> None:
    """Raises unless an operand is a dense torch tensor."""
    # Fast path of the common case.
    if type(tensor) is torch.Tensor and tensor.is_cuda and tensor.layout is torch.strided and not tensor.is_nested:
        return
    if not isinstance(tensor, torch.Tensor):
        raise ProblemError(f"{name} is {kind_of(tensor)}; give a torch tensor (torch.as_tensor makes one)")
    check_dense(name, tensor)


def refuse_tangents(**tensors: torch.Tensor | None) -> None:
    """Raises for a tensor that carries a tangent."""
    for name, tensor in tensors.items():
        if tensor is not None and not is_transformed(tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            raise UnsupportedError(TANGENT.format(name=name))


def is_functionalizing() -> bool:
    """True if torch.func.functionalize is active, which has rules for ops but none for autograd Functions."""
    return any(x.key() == TransformType.Functionalize for x in retrieve_all_functorch_interpreters())


def is_faking() -> bool:
    """True under a FakeTensorMode, where ops on any tensors return some without values."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def becomes_an_op() -> bool:
    """True under torch.compile or a dispatch mode, which record the call as one op without targets."""
    return bool(torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack())


def disabled(function: Callable[..., Any], reason: str) -> Any:
    """Returns a function that torch.compile calls between its graphs. Imports all of the compiler, which takes 1 s."""
    try:
        return torch.compiler.disable(function, reason=reason)
    except TypeError:  # PyTorch before 2.7
        return torch.compiler.disable(function)


def uncompiled(name: str, module: dict[str, Any], function: Callable[..., Any], reason: str) -> Any:
    """Serves `__getattr__` of a module: returns `function`, disabled, under the name `uncompiled_<function>`.

    module: the globals of the module. The function is built once the compiler reads the name: it imports the compiler.
    Callers read it from a global that holds the module. In `sys.modules[...]` the compiler would read all modules, and
    fail if an import adds one meanwhile.
    """
    if name != f"uncompiled_{function.__name__}":
        raise AttributeError(f"module {module['__name__']!r} has no attribute {name!r}")
    return module.setdefault(name, disabled(function, reason))


def is_autocast(tensor: torch.Tensor) -> bool:
    """True if autocast is enabled on the device of a tensor."""
    if tensor.is_cuda:
        return bool(torch.is_autocast_enabled("cuda"))
    return not tensor.is_meta and bool(torch.is_autocast_enabled(tensor.device.type))


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Casts floating-point tensors to the dtype of autocast."""
    first, *_ = tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    narrow = torch.float32, torch.float16, torch.bfloat16
    return tuple(x.to(dtype) if x.dtype in narrow else x for x in tensors)
