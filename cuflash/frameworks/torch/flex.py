"""FlexAttention's arguments, results and block masks in terms of `attention`."""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any

import torch

from ...errors import ProblemError, UnsupportedError
from ...log import logger
from ...mods.masks import and_masks
from ...ops.block_mask import BlockMask, create_block_mask
from ...problem.mod_arrays import MASK_TILE
from ...problem.options import check_flag
from ...units import kind_of
from .tensors import check_tensor, uncompiled

NAMES = {"q": "query", "k": "key", "v": "value", "softmax_scale": "scale"}  # by their names in errors of `attention`
_TOP = "torch.nn.attention.flex_attention"
_complete_lists: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def arguments_of_flex(
    query: Any, key: Any, value: Any, block_mask: Any, enable_gqa: Any, kernel_options: Any, return_aux: Any
) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Returns q, k, v as views (batch, seqlen, heads, head_dim), and the keywords of `attention` for the block mask."""
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
        if tensor.dim() != 4:
            raise ProblemError(f"{name} has shape {tuple(tensor.shape)}; give (batch, heads, seqlen, head_dim)")
    heads, heads_kv = query.shape[1], key.shape[1]
    if not check_flag("enable_gqa", enable_gqa) and heads != heads_kv:
        raise ProblemError(
            f"query has {heads} heads and key {heads_kv}; give enable_gqa=True to share the heads of key"
        )
    if return_aux is not None and not isinstance(return_aux, getattr(sys.modules.get(_TOP), "AuxRequest", ())):
        raise ProblemError(f"return_aux is {kind_of(return_aux)}; give a {_TOP}.AuxRequest, or None")
    if getattr(return_aux, "max_scores", False):
        raise UnsupportedError(
            "return_aux: max_scores is not computed by cuflash; leave max_scores=False, or take "
            f"{_TOP}.flex_attention under torch.compile"
        )
    if kernel_options is not None and not isinstance(kernel_options, dict):
        raise ProblemError(f"kernel_options is {kind_of(kernel_options)}; give a dict or None")
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


def axes_of_out(query: torch.Tensor) -> tuple[int, ...]:
    """Returns the axes of out (batch, seqlen_q, heads, head_dim_v) from the slowest to the fastest in memory.

    As in PyTorch they follow query, except that the last stays last. () stands for the order of the shape.
    """
    strides = query.stride()
    by_stride = sorted(range(3), key=lambda axis: strides[axis], reverse=True)
    out_axes = *((0, 2, 1)[axis] for axis in by_stride), 3
    return () if out_axes == (0, 1, 2, 3) else out_axes


def ordered(out: torch.Tensor, out_axes: tuple[int, ...]) -> torch.Tensor:
    """Returns a copy of out whose axes have that order in memory."""
    dense = out.permute(out_axes).clone(memory_format=torch.contiguous_format)
    return dense.permute([out_axes.index(axis) for axis in range(4)])


def results_of_flex(out: torch.Tensor, lse: torch.Tensor | None, return_lse: bool, return_aux: Any) -> Any:
    """Returns results in the form of PyTorch's flex_attention."""
    if return_aux is not None:
        return out, sys.modules[_TOP].AuxOutput(lse=lse)
    return (out, lse) if return_lse else out


def wants_lse(return_lse: Any, return_aux: Any) -> bool:
    """True if lse is to be returned."""
    if not check_flag("return_lse", return_lse):
        return bool(getattr(return_aux, "lse", False))
    if return_aux is not None:
        raise ProblemError("return_lse and return_aux are both given; give return_aux=AuxRequest(lse=True) alone")
    return True


def _masks(block_mask: Any, query: torch.Tensor, key: torch.Tensor) -> dict[str, Any]:
    """Returns the keywords of `attention` for a block mask."""
    if block_mask is None:
        return {}
    if isinstance(block_mask, BlockMask):
        return {"block_mask": block_mask}
    flex = sys.modules.get(_TOP)  # imported already if block_mask is PyTorch's
    if flex is None or not isinstance(block_mask, flex.BlockMask):
        raise ProblemError(
            f"block_mask is {kind_of(block_mask)}; give a BlockMask of PyTorch's or cuflash's create_block_mask"
        )
    mask_mod, block = block_mask.mask_mod, block_mask.BLOCK_SIZE
    is_noop = mask_mod is None or mask_mod is flex.noop_mask
    if is_noop and min(block) >= flex._LARGE_SPARSE_BLOCK_SIZE:
        return {}  # PyTorch's BlockMask for no mask
    if mask_mod is getattr(flex, "_sliced_mask_mod_error", flex):
        raise ProblemError(
            "block_mask was sliced, and has no mask_mod any more; set its mask_mod to one that counts from the slice's "
            "begin, or make a new BlockMask"
        )
    _check_sizes(tuple(block_mask.shape), query, key)
    if is_noop:
        return {"mask_mod": _block_mod(block_mask)}
    # Read as an attribute of the module: `__getattr__` makes it (`tensors.uncompiled`).
    is_complete = sys.modules[__name__].uncompiled_lists_all if torch.compiler.is_compiling() else lists_all
    return {"mask_mod": mask_mod if is_complete(block_mask) else and_masks(_block_mod(block_mask), mask_mod)}


def _check_sizes(mask_sizes: tuple[int, ...], query: torch.Tensor, key: torch.Tensor) -> None:
    (batch, heads, rows, _), columns = query.shape, key.shape[2]
    mask_batch, mask_heads, *lengths = mask_sizes
    if lengths != [rows, columns] or mask_batch not in (1, batch) or mask_heads not in (1, heads):
        raise ProblemError(
            f"block_mask was made for (batch, heads, q_len, kv_len) = {mask_sizes}, but the call has "
            f"{(batch, heads, rows, columns)}; make a new one by create_block_mask (batch and heads may be 1)"
        )


def lists_all(block_mask: Any) -> bool:
    """True if mask_mod shows nothing outside of the listed blocks. Lists that were written by hand may lack some.

    Computed once for each mask; the host waits for it. False while a graph is captured, and on the device meta.
    """
    is_complete = _complete_lists.get(block_mask)
    if is_complete is None:
        blocks = block_mask.to_dense() != 0
        sizes = block_mask.BLOCK_SIZE
        is_capturing = blocks.is_cuda and torch.cuda.is_current_stream_capturing()
        if any(size % MASK_TILE for size in sizes) or is_capturing or blocks.is_meta:
            return False
        tiles = create_block_mask(block_mask.mask_mod, *block_mask.shape, like=blocks).cells != 0
        for axis, size in zip((2, 3), sizes, strict=True):
            blocks = blocks.repeat_interleave(size // MASK_TILE, axis).narrow(axis, 0, tiles.shape[axis])
        is_complete = _complete_lists[block_mask] = not bool((tiles & ~blocks).any())
    return is_complete


def _block_mod(block_mask: Any) -> Any:
    """Returns the mask_mod of a BlockMask whose listed blocks are visible as a whole."""
    blocks, (rows, columns) = block_mask.to_dense(), block_mask.BLOCK_SIZE
    varies_b, varies_h, *_ = (length > 1 for length in blocks.shape)

    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return blocks[b if varies_b else 0, h if varies_h else 0, q_idx // rows, k_idx // columns] != 0

    return mask_mod


def __getattr__(name: str) -> Any:
    """Makes `uncompiled_lists_all`: a graph ends before it."""
    return uncompiled(name, globals(), lists_all, "cuflash reads block masks between graphs")
