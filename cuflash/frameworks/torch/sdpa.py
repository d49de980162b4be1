"""PyTorch's flash backend on cuflash, through PyTorch's registry of flash implementations.

    import cuflash.frameworks.sdpa as sdpa

    sdpa.activate()    # or torch.nn.attention.activate_flash_attention_impl("cuflash")
    sdpa.restore()

`torch.nn.functional.scaled_dot_product_attention` then runs on cuflash on a GPU, for calls that PyTorch's own flash and
memory-efficient backends could take. These two become PyTorch's first and second choice. Otherwise cuDNN is the first,
on Hopper from 2.11 on.

- Flash: float16 and bfloat16 without a mask tensor, with grouped heads, dropout, any scale. PyTorch aligns `is_causal`
  top-left and sends it here only if both lengths are equal. `causal_lower_right`, aligned as in cuflash, comes for any
  lengths. `torch.nn.attention.varlen.varlen_attn` comes with gradients, windows, pages and used lengths, and so does
  `varlen_attn_out`.
- Memory-efficient: bool and float masks that broadcast in any way, with gradients of float masks, dropout, float32, and
  `is_causal` where lengths differ.

Dropout draws a new seed from PyTorch's generator for each call, in CUDA graphs, too. It drops other weights than
PyTorch's kernels with the same generator: switch before a forward, not between it and its backward.

PyTorch still computes calls that return the weights or drop all of them, and head dims over 256 with a mask. It also
computes what these backends cannot take, such as masks together with grouped heads. UnsupportedError: gradients with
ALiBi, float8, and returned weights together with dropout.

PyTorch's `context_parallel` runs on the ring of `cuflash.distributed` (`cuflash.frameworks.context_parallel`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend
from torch.utils._pytree import tree_map_only

from ...arrays.library import cupy_module
from ...errors import UnsupportedError
from ...log import logger
from ...mods.scores import alibi
from ...ops.backward import backward
from ...ops.forward import forward
from ...planning.tiles_sm80 import BACKWARD
from ...problem.dropout import share_kept
from ..context_parallel import RingOverride
from .sdpa_masks import drawn, masked, masked_backward
from .varlen import paged_or_packed

__all__ = ["activate", "restore"]

IMPLEMENTATION, OPS = "cuflash", torch.ops.aten
_FORWARD, _BACKWARD = "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"
_PACKED, _PACKED_BACKWARD = "_flash_attention_forward", "_flash_attention_backward"
_MASKED = "_scaled_dot_product_efficient_attention"
_MASKED_BACKWARD = f"{_MASKED}_backward"
_MOST_HEAD_DIM = max(tile.head_dim for tiles in BACKWARD.values() for tile in tiles)  # with gradients
_IN_PLACE, _QUANTIZED = "_flash_attention_forward_no_dropout_inplace", "_flash_attention_forward.quantized"


class Override:
    """Replaces the ops of PyTorch's flash and memory-efficient backends by cuflash, until `remove` is called.

    Replaces nothing for CUDA where PyTorch sees no GPU.
    """

    def __init__(self, dispatch_key: str = "CUDA") -> None:
        self._library: Any = torch.library.Library("aten", "IMPL")
        self._order: list[int] | None = None
        is_cuda = dispatch_key == "CUDA"
        if is_cuda and torch.cuda.is_available():
            cupy_module()  # reports a missing CuPy here, not in every later call
        self._ring = RingOverride()
        if is_cuda and not torch.cuda.is_available():
            logger.info("sdpa: PyTorch sees no GPU here, so all calls stay its own")
            return
        functions: dict[str, Callable[..., Any]] = {
            _FORWARD: self.forward,
            _BACKWARD: self.backward,
            _MASKED: self.masked,
            _MASKED_BACKWARD: self.masked_backward,
            _PACKED: self.packed,
            _PACKED_BACKWARD: self.packed_backward,
            _IN_PLACE: self.packed_in_place,
            _QUANTIZED: self.quantized,
        }
        functions = {name: function for name, function in functions.items() if _is_there(name)}
        self._kernels = {name: torch.library.get_kernel(f"aten::{name}", dispatch_key) for name in functions}
        for name, function in functions.items():
            kernel = _or_empty(name, function)
            self._library.impl(name, kernel, dispatch_key, with_keyset=True, allow_override=True)
        if is_cuda:
            self._order = _prefer_ours()

    def remove(self) -> None:
        """Gives the ops back to PyTorch."""
        self._library._destroy()
        self._ring.remove()
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
        """Computes out of operands (batch, heads, seqlen, head_dim), in the memory layout of query, and lse."""
        if _drops_all(_FORWARD, dropout_p) or _wants_weights(_FORWARD, return_debug_mask, dropout_p):
            return self._kernels[_FORWARD].call_boxed(
                keyset, query, key, value, dropout_p, is_causal, return_debug_mask, scale=scale
            )
        state = _state(query, dropout_p)
        # torch.compile expects these strides.
        out = torch.empty_like(query) if query.shape[3] == value.shape[3] else None
        result, lse = forward(
            *(x.transpose(1, 2) for x in (query, key, value)),
            softmax_scale=scale,
            causal=is_causal,
            return_lse=True,
            out=None if out is None else out.transpose(1, 2),
            **_dropout(dropout_p, state),
        )
        return result.transpose(1, 2), lse, None, None, query.shape[2], key.shape[2], *_dropout_results(state, query)

    def backward(self, keyset: Any, *arguments: Any, scale: float | None = None) -> Any:
        """Returns gradients of query, key and value, deterministic if PyTorch uses deterministic algorithms."""
        grad_out, query, key, value, out, logsumexp, *_, dropout_p, is_causal, state, _unused = arguments
        if _drops_all(_BACKWARD, dropout_p):
            return self._kernels[_BACKWARD].call_boxed(keyset, *arguments, scale=scale)
        dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
        gradients = backward(
            *(dout, q, k, v, o, logsumexp),
            softmax_scale=scale,
            causal=is_causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **_dropout(dropout_p, state),
        )
        return tuple(_strided_like(x.transpose(1, 2), y) for x, y in zip(gradients, (query, key, value), strict=True))

    def masked(self, keyset: Any, query: Any, key: Any, value: Any, *arguments: Any, **more: Any) -> Any:
        """Computes the memory-efficient backend's forward, which has a mask tensor."""
        _bias, _lse, dropout_p, *_ = *arguments, more.get("dropout_p", 0.0)
        if _is_too_wide(query, value) or _drops_all(_MASKED, dropout_p):
            return self._kernels[_MASKED].call_boxed(keyset, query, key, value, *arguments, **more)
        return masked(query, key, value, *arguments, **more)

    def masked_backward(self, keyset: Any, *arguments: Any, **more: Any) -> Any:
        """Returns gradients of query, key, value, and of the mask if it requires one."""
        _, query, _, value, _bias, _out, _lse, _seed, _offset, dropout_p, *_ = arguments
        if _is_too_wide(query, value) or _drops_all(_MASKED_BACKWARD, dropout_p):
            return self._kernels[_MASKED_BACKWARD].call_boxed(keyset, *arguments, **more)
        return masked_backward(*arguments, **more)

    def packed(self, keyset: Any, *arguments: Any, **more: Any) -> Any:
        """Computes `varlen_attn`'s forward: query (total_q, heads, head_dim), or (batch, seqlen, heads, head_dim)."""
        query, *operands, dropout_p, is_causal, return_debug_mask = arguments
        if _drops_all(_PACKED, dropout_p) or _wants_weights(_PACKED, return_debug_mask, dropout_p):
            return self._kernels[_PACKED].call_boxed(keyset, *arguments, **more)
        state = _state(query, dropout_p)
        more |= _dropout(dropout_p, state)
        out, lse = _packed(query, *operands, is_causal=is_causal, **more)
        return (_strided_like(out, query) if out.shape == query.shape else out), lse, *_dropout_results(state, query)

    def packed_in_place(self, keyset: Any, out: torch.Tensor, *arguments: Any, **more: Any) -> torch.Tensor:
        """Computes `packed` into `out`, whose rows outside of all sequences stay as they are; returns lse."""
        *operands, dropout_p, is_causal, return_debug_mask = arguments
        if dropout_p > 0.0 or return_debug_mask:
            raise UnsupportedError(
                f"dropout_p={dropout_p}, return_debug_mask={return_debug_mask}: {_IN_PLACE} has neither; give 0.0 and "
                "False"
            )
        lse: torch.Tensor
        _, lse = _packed(*operands, is_causal=is_causal, out=out, **more)
        return lse

    def quantized(self, keyset: Any, *arguments: Any, **more: Any) -> Any:
        """Computes `packed`; raises for scales of float8 operands, which cuflash does not have."""
        *plain, q_descale, k_descale, v_descale = arguments
        for name, scale in (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale)):
            if scale is not None:
                raise UnsupportedError(
                    f"{name}: cuflash has no float8 operands; give None and float16 or bfloat16, or call "
                    "cuflash.frameworks.sdpa.restore() and take another implementation"
                )
        return self.packed(keyset, *plain, **more)

    def packed_backward(self, keyset: Any, *arguments: Any, **more: Any) -> Any:
        """Returns gradients of query, key and value, deterministic if PyTorch uses deterministic algorithms."""
        dout, query, key, value, out, lse, *varlen, dropout_p, is_causal, state, _unused = arguments
        if _drops_all(_PACKED_BACKWARD, dropout_p):
            return self._kernels[_PACKED_BACKWARD].call_boxed(keyset, *arguments, **more)
        keywords = _varlen_keywords(*varlen, is_causal=is_causal, **more) | _dropout(dropout_p, state)
        deterministic = torch.are_deterministic_algorithms_enabled()
        gradients = backward(dout, query, key, value, out, lse, deterministic=deterministic, **keywords)
        return tuple(_strided_like(x, y) for x, y in zip(gradients, (query, key, value), strict=True))


def _or_empty(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` as an op that also takes calls without heads, as PyTorch does.

    Results of calls without heads are empty, in the shapes of PyTorch's fake kernel.
    """
    axis = 1 if name.startswith("_scaled_dot_product") else -2  # the axis of heads

    def kernel(keyset: Any, *arguments: Any, **more: Any) -> Any:
        first, *_ = arguments
        if first.shape[axis]:
            return function(keyset, *arguments, **more)
        op, _, overload = name.partition(".")
        on_meta = tree_map_only(torch.Tensor, lambda x: x.to("meta"), (arguments, more))
        results = getattr(getattr(OPS, op), overload or "default")(*on_meta[0], **on_meta[1])
        return tree_map_only(torch.Tensor, lambda x: torch.zeros_like(x, device=first.device), results)

    return kernel


def _packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    is_causal: bool,
    out: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int | None = None,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    **more: Any,
) -> Any:
    """Returns (out, lse) of a call with the arguments of PyTorch's op."""
    keywords = _varlen_keywords(cum_seq_q, cum_seq_k, max_q, max_k, is_causal=is_causal, **more)
    keywords |= {"dropout_p": dropout_p, "dropout_seed": dropout_seed}
    if alibi_slopes is not None:
        if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
            raise UnsupportedError(
                f"alibi_slopes and gradients: PyTorch's {_PACKED_BACKWARD} does not receive them; call under "
                "torch.no_grad(), or cuflash.frameworks.torch.attention with score_mod=cuflash.mods.alibi(slopes)"
            )
        keywords["score_mod"] = alibi(alibi_slopes)
    with torch.no_grad():  # autograd is outside, yet the tensors still require grad
        return forward(query, key, value, out=out, return_lse=True, num_splits=num_splits or 0, **keywords)


def _varlen_keywords(
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    is_causal: bool,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Returns the keywords of `cuflash.forward` and `backward`."""
    keywords: dict[str, Any] = {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k, "seqused_k": seqused_k}
    if block_table is not None:
        keywords |= {"cu_seqlens_k": None, **paged_or_packed(cum_seq_k, seqused_k, block_table)}
    if any(x is not None for x in keywords.values()):
        keywords |= {"max_seqlen_q": max_q, "max_seqlen_k": max_k}
    return {
        "softmax_scale": scale,
        "causal": is_causal,
        "window_size": (window_size_left, window_size_right),
        **{name: x for name, x in keywords.items() if x is not None},
    }


def _wants_weights(name: str, return_debug_mask: bool, dropout_p: float) -> bool:
    """True if a call returns the weights, which PyTorch's kernel computes."""
    if return_debug_mask and dropout_p > 0.0:
        raise UnsupportedError(
            f"return_debug_mask=True, dropout_p={dropout_p}: cuflash's {name} returns no weights, and PyTorch's own "
            "drops other ones than the backward here would; give False, or call cuflash.frameworks.sdpa.restore()"
        )
    if return_debug_mask:
        _log_pytorch(f"{name} with return_debug_mask=True")
    return return_debug_mask


def _drops_all(name: str, dropout_p: float) -> bool:
    """True if dropout leaves no weight, which PyTorch allows and cuflash does not."""
    is_all = dropout_p > 0.0 and not share_kept(dropout_p)
    if is_all:
        _log_pytorch(f"{name} with dropout_p={dropout_p}, which drops all weights,")
    return is_all


def _is_too_wide(query: torch.Tensor, value: torch.Tensor) -> bool:
    widest = int(max(query.shape[3], value.shape[3]))
    if widest > _MOST_HEAD_DIM:
        _log_pytorch(f"{_MASKED} of head dim {widest}, over {_MOST_HEAD_DIM},")
    return widest > _MOST_HEAD_DIM


@functools.cache
def _log_pytorch(what: str) -> None:
    logger.debug("sdpa: %s runs on PyTorch's own kernel", what)


def _state(query: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """Returns the random state, two numbers as in PyTorch's fake kernels; the first is the seed."""
    return drawn(query, (2,), dropout_p).view(torch.uint64)


def _dropout(dropout_p: float, state: torch.Tensor) -> dict[str, Any]:
    """Returns the keywords of dropout."""
    return {"dropout_p": dropout_p, "dropout_seed": state.narrow(0, 0, 1)} if dropout_p > 0.0 else {}


def _dropout_results(state: torch.Tensor, query: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the random state, an unused one and no weights, shaped as by PyTorch's fake kernels."""
    return state, state.new_empty(()), query.new_empty(0)


def _is_there(name: str) -> bool:
    """True if this PyTorch has an op of this name; older ones lack some."""
    op, _, overload = name.partition(".")
    return hasattr(getattr(OPS, op, None), overload or "default")


def _strided_like(result: torch.Tensor, operand: torch.Tensor) -> torch.Tensor:
    """Returns the result in the strides of an operand, which torch.compile expects."""
    target = torch.empty_like(operand)
    return result if target.stride() == result.stride() else target.copy_(result)


def _prefer_ours() -> list[int]:
    """Makes the flash and the memory-efficient backend PyTorch's first choices; returns the previous order."""
    if torch.cuda.is_available():
        # PyTorch's first choice of a backend resets the order: force it before ours is set.
        torch._fused_sdp_choice(*(torch.empty(1, 1, 1, 8, device="cuda", dtype=torch.float16) for _ in range(3)))
    order: list[int] = torch._C._get_sdp_priority_order()
    ours = [int(SDPBackend.FLASH_ATTENTION), int(SDPBackend.EFFICIENT_ATTENTION)]
    torch._C._set_sdp_priority_order([*ours, *(backend for backend in order if backend not in ours)])
    return order


def activate() -> None:
    """Makes `scaled_dot_product_attention` run cuflash in place of PyTorch's flash and memory-efficient backends.

    The memory-efficient backend takes masks, dropout with them, and float32. Where PyTorch sees no GPU no call
    changes, so that one program runs on any machine.

    Raises
    ------
    UnsupportedError
        Where PyTorch is older than 2.10, or sees a GPU but CuPy is missing; nothing is changed then.

    Notes
    -----
    Limits and rules for NaN are described in `cuflash.forward` and `cuflash.backward`. The docstring of this module
    lists the calls that PyTorch still computes.

    Examples
    --------
    >>> import torch
    >>> from cuflash.frameworks import sdpa
    >>> sdpa.activate()
    >>> torch.nn.attention.current_flash_attention_impl()
    'cuflash'
    >>> out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # of tensors on the GPU
    >>> sdpa.restore()
    """
    _registry().activate_flash_attention_impl(IMPLEMENTATION)


def restore() -> None:
    """Gives calls back to PyTorch's own backends.

    Raises
    ------
    UnsupportedError
        Where PyTorch is older than 2.10.

    Examples
    --------
    >>> import torch
    >>> from cuflash.frameworks import sdpa
    >>> sdpa.activate()
    >>> sdpa.restore()
    >>> torch.nn.attention.current_flash_attention_impl() is None
    True
    """
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
