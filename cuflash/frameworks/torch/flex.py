"""FlexAttention's arguments and results, as PyTorch has them, in terms of `attention`."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from ...errors import ProblemError, UnsupportedError
from ...log import logger
from ...mods.masks import and_masks
from ...ops.block_mask import BlockMask
from ...problem.options import check_flag
from . import blocks
from .tensors import check_tensor

_TOP = "torch.nn.attention.flex_attention"


def arguments_of_flex(
    query: Any, key: Any, value: Any, block_mask: Any, enable_gqa: Any, kernel_options: Any, return_aux: Any
) -> tuple[Any, Any, Any, dict[str, Any]]:
    """q, k and v as views (batch, seqlen, heads, head_dim), and the keywords of `attention` for the block mask."""
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
        if tensor.dim() != 4:
            raise ProblemError(f"{name} has shape {tuple(tensor.shape)}; give (batch, heads, seqlen, head_dim)")
    heads, heads_kv = query.shape[1], key.shape[1]
    if not check_flag("enable_gqa", enable_gqa) and heads != heads_kv:
        raise ProblemError(f"query has {heads} heads and key {heads_kv}; give enable_gqa=True to share those of key")
    if return_aux is not None and not isinstance(return_aux, getattr(sys.modules.get(_TOP), "AuxRequest", ())):
        raise ProblemError(f"return_aux is a {type(return_aux).__name__}; give a {_TOP}.AuxRequest, or None")
    if getattr(return_aux, "max_scores", False):
        raise UnsupportedError(
            "return_aux: max_scores is not computed by cuflash; leave max_scores=False, or take "
            f"{_TOP}.flex_attention under torch.compile"
        )
    if kernel_options is not None and not isinstance(kernel_options, dict):
        raise ProblemError(f"kernel_options is a {type(kernel_options).__name__}; give a dict or None")
    if kernel_options:
        _log_options(", ".join(sorted(map(str, kernel_options))))
    if query.shape[0] != key.shape[0] and block_mask is not None and key.shape[0] == value.shape[0] == 1:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    masks = _masks(block_mask, query, key)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return q, k, v, masks


@functools.cache
def _log_options(names: str) -> None:
    logger.debug("flex_attention: kernel_options %s are hints to PyTorch's kernels, and without effect here", names)


def results_of_flex(out: torch.Tensor, lse: torch.Tensor | None, return_lse: bool, return_aux: Any) -> Any:
    """What PyTorch's flex_attention returns."""
    if return_aux is not None:
        return out, sys.modules[_TOP].AuxOutput(lse=lse)
    return (out, lse) if return_lse else out


def wants_lse(return_lse: Any, return_aux: Any) -> bool:
    """Whether lse is asked for."""
    if not check_flag("return_lse", return_lse):
        return bool(getattr(return_aux, "lse", False))
    if return_aux is not None:
        raise ProblemError("return_lse and return_aux are both given; give return_aux=AuxRequest(lse=True) alone")
    return True


def _masks(block_mask: Any, query: torch.Tensor, key: torch.Tensor) -> dict[str, Any]:
    """The keywords of `attention` for a block mask."""
    if block_mask is None:
        return {}
    if isinstance(block_mask, BlockMask):
        return {"block_mask": block_mask}
    flex = sys.modules.get(_TOP)  # why: who has such a mask has imported it
    if flex is None or not isinstance(block_mask, flex.BlockMask):
        raise ProblemError(
            f"block_mask is a {type(block_mask).__name__}; give a BlockMask of PyTorch's or cuflash's create_block_mask"
        )
    mask_mod, block = block_mask.mask_mod, block_mask.BLOCK_SIZE
    is_noop = mask_mod is None or mask_mod is flex.noop_mask
    if is_noop and min(block) >= flex._LARGE_SPARSE_BLOCK_SIZE:
        return {}  # it is PyTorch's own, for no mask
    if mask_mod is getattr(flex, "_sliced_mask_mod_error", flex):
        raise ProblemError(
            "block_mask was sliced, and has no mask_mod any more; set its mask_mod to one that counts from the slice's "
            "begin, or make a new BlockMask"
        )
    _check_sizes(tuple(block_mask.shape), query, key)
    if is_noop:
        return {"mask_mod": blocks.of_blocks(block_mask)}
    # why chosen here: see `torch_tensors.uncompiled`.
    lists_all = blocks.uncompiled_lists_all if torch.compiler.is_compiling() else blocks.lists_all
    return {"mask_mod": mask_mod if lists_all(block_mask) else and_masks(blocks.of_blocks(block_mask), mask_mod)}


def _check_sizes(made: tuple[int, ...], query: torch.Tensor, key: torch.Tensor) -> None:
    wanted = query.shape[0], query.shape[1], query.shape[2], key.shape[2]
    fits = made[2:] == wanted[2:] and made[0] in (1, wanted[0]) and made[1] in (1, wanted[1])
    if not fits:
        raise ProblemError(
            f"block_mask was made for (batch, heads, q_len, kv_len) = {made}, but the call has {wanted}; make a new "
            "one by create_block_mask (batch and heads may be 1)"
        )
