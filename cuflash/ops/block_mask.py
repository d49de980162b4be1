"""`cuflash.create_block_mask`: tiles of 64 queries x 64 keys that a mask_mod leaves empty, shows in part, or whole."""

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
    """The mask tiles of a mask_mod, made by `create_block_mask`, for any number of calls.

    cells: int8 (batch or 1, heads or 1, seqlen_q / 64, seqlen_k / 64), rounded up: 0 empty, 1 partial, 2 full. sizes:
    batch, heads, seqlen_q and seqlen_k. tells: whether the lengths of queries, and of keys, were given by arrays.
    mask_mod is None where a transformation of JAX has put other arrays in place of those that it refers to.
    """

    mask_mod: Callable[..., Any] | None
    cells: Any
    sizes: Sizes
    tells: tuple[bool, bool]
    graph: Graph = field(repr=False)

    def check_varlen(self, varlen_args: tuple[Any, ...]) -> None:
        """Validates a call by the arrays that tell its lengths, in the order of the op; () where none does."""
        varlen = VarlenArgs(*varlen_args)
        if any(self.tells) and self.sizes.batch == 1 and (count := _count(varlen)) > 1:
            raise ProblemError(
                "block_mask was made for batch=1 with arrays that tell lengths, and so knows those of one sequence "
                f"alone, but the call has {count} sequences; give create_block_mask batch={count} and the arrays of all"
            )
        uses_lengths = not self.graph.root.inputs.isdisjoint(("seqlen_q", "seqlen_k"))
        for side, name in enumerate("qk"):
            bounds, used = getattr(varlen, f"cu_seqlens_{name}"), getattr(varlen, f"seqused_{name}")
            has_varlen_args = bounds is not None or used is not None
            # why not the other way round: tiles of whole sequences hold for shorter ones, unless the mask uses lengths.
            if self.tells[side] and not has_varlen_args:
                how = "with arrays that tell", "has none"
            elif uses_lengths and has_varlen_args and not self.tells[side]:
                how = "without the arrays that tell", "has some, and its mask_mod asks for lengths"
            else:
                continue
            raise ProblemError(
                f"block_mask was made {how[0]} the lengths of {name} (cu_seqlens_{name} or seqused_{name}), but the "
                f"call {how[1]}; give create_block_mask the same ones"
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
    # why not by the method alone: the array API standard has none.
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
    """The block mask of a mask_mod, for the `block_mask=` of calls that share it, such as those of all layers.

    Calls with a mask_mod alone make one of their own each time. batch, heads (of queries), seqlen_q, seqlen_k: those of
    the calls; batch or heads may be 1 where the mask does not depend on b or h. For variable-length sequences,
    seqlen_q and seqlen_k are the bounds `max_seqlen_q` and `max_seqlen_k` of the calls, or the capacity of a cache, and
    the int32 arrays are those of the calls: cu_seqlens_q, cu_seqlens_k (batch + 1,), seqused_q, seqused_k (batch,).
    Lengths are read now, so make a new block mask when they change.
    like: an array that tells the framework and the device, such as q; its shape and dtype do not matter.

    The mask_mod is called as in `forward`. Arrays that it refers to are read now: make a new block mask when they
    change. Masks that are a plain window, such as `mods.causal`, need none.

    Raises ProblemError for lengths that are no integers and for arrays that do not fit, and errors of tracing as in
    `forward`.

        block_mask = cuflash.create_block_mask(mods.document(offsets), 1, 1, n, n, like=q)
        for layer in layers:
            out = cuflash.forward(q, k, v, block_mask=block_mask)

    >>> import numpy as np, cuflash
    >>> from cuflash import mods
    >>> two = mods.document(np.array([0, 100, 192]))
    >>> cuflash.create_block_mask(two, 1, 1, 192, 192, like=np.zeros(0)).cells
    array([[[[2, 1, 0],
             [1, 1, 1],
             [0, 1, 2]]]], dtype=int8)
    """
    sizes = check_sizes(batch, heads, seqlen_q, seqlen_k)
    graph = trace(mask_mod, "mask_mod")
    op = block_mask_op(make_mod_spec(None, graph), sizes)
    varlen_args = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    library_of("like", like)
    detach = getattr(like, "detach", None)  # why: only its device counts, whatever autograd knows of it
    first = like if detach is None else detach()
    (mask_tiles,) = run(op, (first, *varlen_args, *[each.array for each in graph.arrays]), options_key())
    tells_q = cu_seqlens_q is not None or seqused_q is not None
    tells_k = cu_seqlens_k is not None or seqused_k is not None
    return BlockMask(mask_mod, mask_tiles, sizes, (tells_q, tells_k), graph)
