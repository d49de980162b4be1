"""`cuflash.create_block_mask`: finds the empty, partial and full tiles of a mask_mod, of 64 queries x 64 keys each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..arrays.find import library_of
from ..errors import ProblemError
from ..mods.graph.graph import Graph
from ..mods.tracing.trace import trace
from ..problem.block_mask import check_sizes
from ..problem.foreign import answers_foreign
from ..problem.mod_spec import make_mod_spec
from ..problem.operands import Sizes, VarlenArgs, block_mask_op
from ..problem.options import options_key
from ..runtime.call import run

_KINDS = ("empty", "partial", "full")


@dataclass(frozen=True, eq=False, slots=True)
class BlockMask:
    """The mask tiles of a mask_mod, from `create_block_mask`, for any number of calls.

    Attributes
    ----------
    mask_mod : callable or None
        The function. It is None where a transformation of JAX has replaced arrays that it refers to.
    cells : int8 array (batch or 1, heads or 1, seqlen_q / 64, seqlen_k / 64)
        Kinds of tiles: 0 empty, 1 partial, 2 full. Numbers of tiles are rounded up.
    sizes : tuple
        batch, heads, seqlen_q and seqlen_k.
    tells : tuple of bool
        True for queries, and for keys, if arrays of lengths were given.
    """

    mask_mod: Callable[..., Any] | None
    cells: Any
    sizes: Sizes
    tells: tuple[bool, bool]
    graph: Graph = field(repr=False)

    def check_varlen(self, varlen_args: tuple[Any, ...]) -> None:
        """Validates a call by its arrays of lengths, in the order of the op; () for a dense call."""
        varlen = VarlenArgs(*varlen_args)
        if any(self.tells) and self.sizes.batch == 1 and (count := _count(varlen)) > 1:
            raise ProblemError(
                "block_mask was made for batch=1 with arrays of lengths, and so holds the lengths of one sequence, but "
                f"the call has {count} sequences; give create_block_mask batch={count} and the arrays of all"
            )
        uses_lengths = not self.graph.root.inputs.isdisjoint(("seqlen_q", "seqlen_k"))
        for side, name in enumerate("qk"):
            bounds, used = getattr(varlen, f"cu_seqlens_{name}"), getattr(varlen, f"seqused_{name}")
            has_varlen_args = bounds is not None or used is not None
            # Tiles of whole sequences hold for shorter ones, too, unless the mask uses lengths.
            if self.tells[side] and not has_varlen_args:
                how = "with", "has none"
            elif uses_lengths and has_varlen_args and not self.tells[side]:
                how = "without", "has some, and its mask_mod uses lengths"
            else:
                continue
            raise ProblemError(
                f"block_mask was made {how[0]} arrays of lengths of {name} (cu_seqlens_{name} or seqused_{name}), but "
                f"the call {how[1]}; give create_block_mask the same ones"
            )

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in zip(Sizes._fields, self.sizes, strict=True))
        if getattr(self.cells, "is_meta", False):
            return f"BlockMask({sizes}, cells on the device meta)"
        total = max(self.cells.size if isinstance(self.cells.size, int) else self.cells.numel(), 1)
        shares = (f"{_count_true(self.cells == kind) / total:.0%} {name}" for kind, name in enumerate(_KINDS))
        return f"BlockMask({sizes}, cells: {', '.join(shares)})"


def _count_true(mask: Any) -> int:
    """Returns the number of True elements of an array of bools."""
    # Arrays of the array API standard have no method sum.
    if hasattr(mask, "sum"):
        return int(mask.sum())
    xp = mask.__array_namespace__()
    return int(xp.sum(xp.astype(mask, xp.int64)))


def _count(varlen: VarlenArgs) -> int:
    """Returns the number of sequences of a call; 0 if it is dense."""
    for bounds in (varlen.cu_seqlens_q, varlen.cu_seqlens_k):
        if bounds is not None:
            return int(bounds.shape[0]) - 1
    used = varlen.seqused_k if varlen.seqused_q is None else varlen.seqused_q
    return 0 if used is None else int(used.shape[0])


@answers_foreign
def create_block_mask(
    mask_mod: Callable[..., Any],
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    *,
    like: Any,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
) -> BlockMask:
    """Returns the block mask of a mask_mod, for the `block_mask=` of calls that share it.

    Make it once, such as for all layers: a call with a mask_mod alone computes a block mask each time. Masks that are a
    plain window, such as `cuflash.mods.causal`, need none.

    Parameters
    ----------
    mask_mod : callable (b, h, q_idx, k_idx)
        Returns True for visible keys, as in `forward`.
    batch : int
        Number of sequences of the calls, or 1 if the mask does not depend on b.
    heads : int
        Number of query heads of the calls, or 1 if the mask does not depend on h.
    seqlen_q : int
        Queries of a sequence. For variable-length sequences, the max_seqlen_q of the calls.
    seqlen_k : int
        Keys of a sequence. For variable-length sequences, the max_seqlen_k of the calls or the capacity of a cache.
    like : array
        Array of the framework and on the device of the calls, such as q. Its shape and dtype do not matter.
    cu_seqlens_q : int32 array (batch + 1,), optional
        Offsets of packed queries, as in the calls.
    cu_seqlens_k : int32 array (batch + 1,), optional
        Offsets of packed keys, as in the calls.
    seqused_q : int32 array (batch,), optional
        Number of used queries of each sequence, as in the calls.
    seqused_k : int32 array (batch,), optional
        Number of used keys of each sequence, as in the calls.

    Returns
    -------
    block_mask : BlockMask
        Kinds of all tiles, and the mask_mod.

    Raises
    ------
    ProblemError
        Sizes are not integers in range, arrays do not fit, or the mask_mod cannot be traced.
    UnsupportedError, CompileError
        As in `forward`.

    Notes
    -----
    Lengths, and arrays that the mask_mod refers to, are read now. Make a new block mask when they change.

    Examples
    --------
    Two documents of 100 and 92 tokens.

    >>> import numpy as np, cuflash
    >>> from cuflash import mods
    >>> two = mods.document(np.array([0, 100, 192]))
    >>> cuflash.create_block_mask(two, 1, 1, 192, 192, like=np.zeros(0)).cells
    array([[[[2, 1, 0],
             [1, 1, 1],
             [0, 1, 2]]]], dtype=int8)

    One block mask for all layers.

        block_mask = cuflash.create_block_mask(mods.document(offsets), 1, 1, n, n, like=q)
        for layer in layers:
            out = cuflash.forward(q, k, v, block_mask=block_mask)
    """
    sizes = check_sizes(batch, heads, seqlen_q, seqlen_k)
    graph = trace(mask_mod, "mask_mod")
    op = block_mask_op(make_mod_spec(None, graph), sizes)
    varlen_args = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    library_of("like", like)
    detach = getattr(like, "detach", None)  # only its library and device count, not its gradient
    first = like if detach is None else detach()
    (mask_tiles,) = run(op, (first, *varlen_args, *[each.array for each in graph.arrays]), options_key())
    tells_q = cu_seqlens_q is not None or seqused_q is not None
    tells_k = cu_seqlens_k is not None or seqused_k is not None
    return BlockMask(mask_mod, mask_tiles, sizes, (tells_q, tells_k), graph)
