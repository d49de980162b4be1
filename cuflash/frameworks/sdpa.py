"""`torch.nn.functional.scaled_dot_product_attention` on cuflash, through PyTorch's registry of flash implementations.

    import cuflash.frameworks.sdpa as sdpa

    sdpa.activate()    # or torch.nn.attention.activate_flash_attention_impl("cuflash")
    sdpa.restore()

What PyTorch's own flash backend could take on a GPU then runs here: float16 and bfloat16, no mask tensor, grouped
heads, any scale. That backend becomes the first choice, which on Hopper is cuDNN's from PyTorch 2.11 on. Its is_causal,
which is aligned top-left, comes here for square scores alone; its `causal_lower_right` for any lengths, aligned as
here. Calls with dropout, and what that backend cannot take, stay PyTorch's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend

from ..backward import backward
from ..errors import UnsupportedError
from ..forward import forward
from ..interop import cupy_module

__all__ = ["activate", "restore"]

IMPLEMENTATION = "cuflash"
_FORWARD, _BACKWARD = "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"


class Override:
    """cuflash in place of the two ops of PyTorch's flash backend, until it is removed."""

    def __init__(self, dispatch_key: str = "CUDA") -> None:
        if dispatch_key == "CUDA":
            if not torch.cuda.is_available():
                raise UnsupportedError("PyTorch sees no GPU here, and its CPU attention is its own; leave it as it is")
            cupy_module()  # why now: or every later call would say that it is missing
        self._kernels = {
            name: torch.library.get_kernel(f"aten::{name}", dispatch_key) for name in (_FORWARD, _BACKWARD)
        }
        self._library: Any = torch.library.Library("aten", "IMPL")
        for name, function in ((_FORWARD, self.forward), (_BACKWARD, self.backward)):
            self._library.impl(name, function, dispatch_key, with_keyset=True, allow_override=True)
        self._order = _prefer_flash() if dispatch_key == "CUDA" else None

    def remove(self) -> None:
        """PyTorch's own again."""
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
        """Operands and out are (batch, heads, seqlen, head_dim); in memory out is like query."""
        if dropout_p > 0.0 or return_debug_mask:
            return self._kernels[_FORWARD].call_boxed(
                keyset, query, key, value, dropout_p, is_causal, return_debug_mask, scale=scale
            )
        out = torch.empty_like(query) if query.shape[3] == value.shape[3] else None  # why: torch.compile plans with it
        result, lse = forward(
            *(x.transpose(1, 2) for x in (query, key, value)),
            softmax_scale=scale,
            causal=is_causal,
            return_lse=True,
            out=None if out is None else out.transpose(1, 2),
        )
        # What dropout would have drawn from, in the shapes and dtype that PyTorch's fake kernel promises.
        state, unused = (query.new_empty(shape, dtype=torch.uint64) for shape in ((2,), ()))
        lengths = query.shape[2], key.shape[2]
        return result.transpose(1, 2), lse, None, None, *lengths, state, unused, query.new_empty(0)

    def backward(
        self,
        keyset: Any,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        cum_seq_q: torch.Tensor | None,
        cum_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        philox_seed: torch.Tensor,
        philox_offset: torch.Tensor,
        *,
        scale: float | None = None,
    ) -> Any:
        """Gradients of query, key and value; deterministic if PyTorch is asked to be."""
        if dropout_p > 0.0:
            return self._kernels[_BACKWARD].call_boxed(
                keyset, grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
                is_causal, philox_seed, philox_offset, scale=scale,
            )  # fmt: skip
        dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
        gradients = backward(
            dout,
            q,
            k,
            v,
            o,
            logsumexp,
            softmax_scale=scale,
            causal=is_causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return tuple(_like(x.transpose(1, 2), of) for x, of in zip(gradients, (query, key, value), strict=True))


def _like(gradient: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """In the strides of the operand. why: torch.compile plans with those."""
    target = torch.empty_like(of)
    return gradient if target.stride() == gradient.stride() else target.copy_(gradient)


def _prefer_flash() -> list[int]:
    """Makes the flash backend the first choice; the order until now."""
    if torch.cuda.is_available():
        # why: with the first choice it makes PyTorch sets its own order, and would undo this one.
        torch._fused_sdp_choice(*(torch.empty(1, 1, 1, 8, device="cuda", dtype=torch.float16) for _ in range(3)))
    order: list[int] = torch._C._get_sdp_priority_order()
    flash = int(SDPBackend.FLASH_ATTENTION)
    torch._C._set_sdp_priority_order([flash, *(backend for backend in order if backend != flash)])
    return order


def activate() -> None:
    """From here on `scaled_dot_product_attention` takes cuflash where PyTorch would take its own flash backend."""
    _registry().activate_flash_attention_impl(IMPLEMENTATION)


def restore() -> None:
    """PyTorch's own flash backend again."""
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
