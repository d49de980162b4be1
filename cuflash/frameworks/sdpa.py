"""`torch.nn.functional.scaled_dot_product_attention` on cuflash, through PyTorch's registry of flash implementations.

    import cuflash.frameworks.sdpa as sdpa

    sdpa.activate()    # or torch.nn.attention.activate_flash_attention_impl("cuflash")
    sdpa.restore()

Calls that PyTorch's own flash backend could take on a GPU then run on cuflash: float16 and bfloat16, no mask tensor,
grouped heads, any scale. That backend also becomes PyTorch's first choice; otherwise cuDNN is, on Hopper from 2.11 on.
PyTorch aligns `is_causal` top-left and sends it here only if both lengths are equal; `causal_lower_right`, aligned as
in cuflash, comes for any lengths. PyTorch still computes calls with dropout, and what its flash backend cannot take.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend

from ..arrays.library import cupy_module
from ..errors import UnsupportedError
from ..ops.backward import backward
from ..ops.forward import forward

__all__ = ["activate", "restore"]

IMPLEMENTATION = "cuflash"
_FORWARD, _BACKWARD = "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"


class Override:
    """Replaces the two ops of PyTorch's flash backend by cuflash, until `remove` is called."""

    def __init__(self, dispatch_key: str = "CUDA") -> None:
        if dispatch_key == "CUDA":
            if not torch.cuda.is_available():
                raise UnsupportedError("PyTorch sees no GPU here, and its CPU attention is its own; leave it as it is")
            cupy_module()  # why now: a missing CuPy is reported once here, and not by every later call
        self._kernels = {
            name: torch.library.get_kernel(f"aten::{name}", dispatch_key) for name in (_FORWARD, _BACKWARD)
        }
        self._library: Any = torch.library.Library("aten", "IMPL")
        for name, function in ((_FORWARD, self.forward), (_BACKWARD, self.backward)):
            self._library.impl(name, function, dispatch_key, with_keyset=True, allow_override=True)
        self._order = _prefer_flash() if dispatch_key == "CUDA" else None

    def remove(self) -> None:
        """Gives the two ops back to PyTorch."""
        self._library._destroy()
        if self._order is not None:
            torch._C._set_sdp_priority_order(self._order)

    def forward(
        self,
        keyset: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> Any:
        """Operands and out are (batch, heads, seqlen, head_dim); out has the memory layout of query."""
        if dropout_p > 0.0 or return_debug_mask:
            return self._kernels[_FORWARD].call_boxed(
                keyset, query, key, value, dropout_p, is_causal, return_debug_mask, scale=scale
            )
        out = torch.empty_like(query) if query.shape[3] == value.shape[3] else None  # why: torch.compile expects that
        result, lse = forward(
            *(x.transpose(1, 2) for x in (query, key, value)),
            softmax_scale=scale,
            causal=is_causal,
            return_lse=True,
            out=None if out is None else out.transpose(1, 2),
        )
        # The random state of dropout is unused; it has the shapes and dtype that PyTorch's fake kernel promises.
        state, unused = (query.new_empty(shape, dtype=torch.uint64) for shape in ((2,), ()))
        lengths = query.shape[2], key.shape[2]
        return result.transpose(1, 2), lse, None, None, *lengths, state, unused, query.new_empty(0)

    def backward(self, keyset: Any, *arguments: Any, scale: float | None = None) -> Any:
        """Gradients of query, key and value; they are deterministic if PyTorch uses deterministic algorithms."""
        grad_out, query, key, value, out, logsumexp, *_, dropout_p, is_causal, _seed, _offset = arguments
        if dropout_p > 0.0:
            return self._kernels[_BACKWARD].call_boxed(keyset, *arguments, scale=scale)
        dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
        deterministic = torch.are_deterministic_algorithms_enabled()
        gradients = backward(
            dout, q, k, v, o, logsumexp, softmax_scale=scale, causal=is_causal, deterministic=deterministic
        )
        return tuple(_like(x.transpose(1, 2), of) for x, of in zip(gradients, (query, key, value), strict=True))


def _like(gradient: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """The gradient in the strides of its operand. why: torch.compile expects these strides."""
    target = torch.empty_like(of)
    return gradient if target.stride() == gradient.stride() else target.copy_(gradient)


def _prefer_flash() -> list[int]:
    """Makes the flash backend PyTorch's first choice; returns the previous order of backends."""
    if torch.cuda.is_available():
        # why: PyTorch sets its own order when it first chooses a backend, which would undo the order set below.
        torch._fused_sdp_choice(*(torch.empty(1, 1, 1, 8, device="cuda", dtype=torch.float16) for _ in range(3)))
    order: list[int] = torch._C._get_sdp_priority_order()
    flash = int(SDPBackend.FLASH_ATTENTION)
    torch._C._set_sdp_priority_order([flash, *(backend for backend in order if backend != flash)])
    return order


def activate() -> None:
    """From now on `scaled_dot_product_attention` runs cuflash where PyTorch would run its own flash backend."""
    _registry().activate_flash_attention_impl(IMPLEMENTATION)


def restore() -> None:
    """Gives calls back to PyTorch's own flash backend."""
    _registry().restore_flash_attention_impl()


def _registry() -> Any:
    if not _has_registry():
        raise UnsupportedError(
            f"PyTorch {torch.__version__} has no registry of flash implementations; take 2.10 or later, or call "
            "cuflash.frameworks.torch.attention"
        )
    return torch.nn.attention


def _has_registry() -> bool:
    return hasattr(torch.nn.attention, "register_flash_attention_impl") and hasattr(torch.library, "get_kernel")


if _has_registry():
    torch.nn.attention.register_flash_attention_impl(IMPLEMENTATION, register_fn=Override)
