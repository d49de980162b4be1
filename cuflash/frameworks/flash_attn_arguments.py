"""What the interfaces of flash-attn 2 and 3 share: how arguments become those of `attention`, and what is refused.

Both have dense calls, packed ones and calls over a cache, under the same names and with the same conventions; their
functions differ in the order of arguments and in what they take besides.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ProblemError, UnsupportedError
from ..problem.options import WindowSize, check_flag
from .torch import attention, check_tensor

_SHAPES = {
    3: "(total, heads, head_dim)",
    4: "(batch, seqlen, heads, head_dim), and of a cache (num_pages, page_size, heads, head_dim) too",
}


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: WindowSize,
    softcap: float,
    deterministic: bool,
    return_lse: bool,
    returned: str = "return_attn_probs",
    num_splits: int = 0,
    **sequences: Any,
) -> Any:
    """Computes out, or (out, lse), from the arguments that both versions share, and those of `attention` on sequences.

    returned: the name of the flag that asks for lse.
    """
    check_flag(returned, return_lse)
    rank_q = rank_k = 4
    if sequences:
        rank_q, rank_k = (3 if sequences.get(f"cu_seqlens_{side}") is not None else 4 for side in "qk")
        for name in ("max_seqlen_q", "max_seqlen_k"):
            if name in sequences:
                sequences[name] = in_host_memory(name, sequences[name])
    for name, tensor, rank in (("q", q, rank_q), ("k", k, rank_k), ("v", v, rank_k)):
        check_rank(name, tensor, rank)
    return attention(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_of(window_size),
        softcap=cap_of(softcap),
        deterministic=deterministic,
        return_lse=return_lse,
        num_splits=num_splits,
        **sequences,
    )


LEFTPAD = (
    "{name} was given, but the keys of a sequence begin at the first row of its cache; leave None, and keep them there"
)


def refuse_of_version_2(dropout_p: Any, alibi_slopes: Any, leftpad_k: Any = None) -> None:
    """Raises for what flash-attn 2 has and cuflash has not, and for calls in the order of flash-attn 3."""
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)):
        given = type(dropout_p).__name__ if isinstance(dropout_p, torch.Tensor) else repr(dropout_p)
        raise ProblemError(
            f"dropout_p={given} is a {type(dropout_p).__name__}; give 0.0. It stands before softmax_scale here, "
            "as in flash-attn 2; the order of flash-attn 3 is in cuflash.frameworks.flash_attn_3_interface"
        )
    if 1.0 - dropout_p != 1.0:  # why: diffusers gives 1e-30, which drops nothing, to make flash-attn return lse
        raise UnsupportedError(
            f"dropout_p={dropout_p}: cuflash has no dropout; give 0.0. If this was meant as softmax_scale, pass it by "
            "name, or take cuflash.frameworks.flash_attn_3_interface, which has no dropout_p"
        )
    if alibi_slopes is not None:
        raise UnsupportedError("alibi_slopes: cuflash has no ALiBi; leave None, or take flash-attn's own function")
    if leftpad_k is not None:
        raise UnsupportedError(LEFTPAD.format(name="leftpad_k"))


def check_integers(name: str, tensor: Any, *, required: bool = False) -> None:
    """Raises unless lengths or places are int32, as all of flash-attn's are, or None where they are not required."""
    if tensor is not None or required:
        check_tensor(name, tensor)
        if tensor.dtype != torch.int32:
            raise ProblemError(f"{name} has dtype {tensor.dtype}; give torch.int32")


def paged_or_packed(cu_seqlens_k: Any, seqused_k: Any, block_table: Any) -> dict[str, Any]:
    """Where keys are in flash-attn 2's packed calls. Beside a table of pages, cu_seqlens_k tells only lengths."""
    check_integers("cu_seqlens_k", cu_seqlens_k, required=block_table is None or seqused_k is None)
    check_integers("seqused_k", seqused_k)
    if block_table is None:
        return {"cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k}
    check_integers("block_table", block_table)
    return {"page_table": block_table, "seqused_k": cu_seqlens_k.diff() if seqused_k is None else seqused_k}


def in_host_memory(name: str, value: Any) -> Any:
    """`value`, or what a tensor without axes in host memory holds. One on a GPU would be waited for."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.ndim or value.device.type != "cpu":
        raise ProblemError(
            f"{name} is a tensor of shape {tuple(value.shape)} on {value.device}; give a number, or a tensor without "
            "axes in host memory"
        )
    return value.item()


def window_of(window_size: Any) -> Any:
    """The window, whose sides may be tensors in host memory."""
    if isinstance(window_size, (tuple, list)):
        for side in window_size:
            if type(side) is not int and isinstance(side, torch.Tensor):  # why first: to ask for tensors is slow
                return tuple(in_host_memory("window_size", side) for side in window_size)
    return window_size


def cap_of(softcap: Any) -> Any:
    """The softcap, for which flash-attn takes anything that is not positive as none."""
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)):
        raise ProblemError(f"softcap={softcap!r} is a {type(softcap).__name__}; give a number, 0.0 for none")
    return 0.0 if softcap <= 0 else softcap


def unpack(name: str, packed: torch.Tensor, count: int, leading: str = "batch, seqlen") -> tuple[torch.Tensor, ...]:
    """Views (…, heads, head_dim) of the tensors in one (…, count, heads, head_dim), which has these leading axes."""
    check_tensor(name, packed)
    axis = leading.count(",") + 1
    if packed.ndim != axis + 3 or packed.shape[axis] != count:
        raise ProblemError(
            f"{name} has shape {tuple(packed.shape)}; give ({leading}, {count}, heads, head_dim), or the "
            f"{count} tensors by themselves"
        )
    return tuple(packed.unbind(axis))


def check_rank(name: str, tensor: Any, rank: int) -> None:
    """Raises unless a tensor has the axes of a packed (3) or a dense one (4)."""
    # why: a 3-D tensor is (total, heads, head_dim) of a misplaced varlen call, not a batch of one.
    if getattr(tensor, "ndim", rank) != rank:  # what is no tensor is refused by `attention`
        raise ProblemError(f"{name} has shape {tuple(tensor.shape)}; give {_SHAPES[rank]}")
