"""A bias and sinks, which every rank passes for its rows or for all heads: shapes, dtype of sinks, parts of a bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import ProblemError
from ..mods.tracing.operand import name_of_dtype


def check_shapes(q: Any, seqlen: int, bias: Any = None, sinks: Any = None) -> None:
    """Raises ProblemError for a bias or sinks of another shape than a rank's q and the whole sequence need."""
    batch, rows, heads, _ = q.shape
    if bias is not None and not _broadcasts(bias.shape, sizes := (batch, heads, rows, seqlen)):
        raise ProblemError(
            f"bias has shape {tuple(bias.shape)}; give one that broadcasts to {sizes}: (batch, heads_q, rows of this "
            "rank, seqlen), where keys are those of the whole sequence"
        )
    if sinks is None:
        return
    if tuple(sinks.shape) != (heads,):
        raise ProblemError(f"sinks has shape {tuple(sinks.shape)}; give ({heads},): one for each head of all ranks")
    dtypes = {name_of_dtype(q.dtype), "float32"}
    if (dtype := name_of_dtype(sinks.dtype)) not in dtypes:
        raise ProblemError(f"sinks has dtype {dtype}; give {' or '.join(sorted(dtypes))}")


def _broadcasts(shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """True if an array of this shape can be broadcast to these sizes."""
    pairs = zip(reversed(shape), reversed(sizes), strict=False)
    return len(shape) <= len(sizes) and all(size in (1, whole) for size, whole in pairs)


def part_of_bias(bias: Any, rows: slice, keys: slice) -> Any:
    """Returns the bias of some rows and keys: another object, as score_mod may refer to the bias."""
    bias = bias[..., rows, :] if bias.shape[-2] > 1 else bias[...]
    return bias[..., keys] if bias.shape[-1] > 1 else bias


def heads_of_bias(bias: Any, heads: slice) -> Any:
    """Returns the bias of some query heads."""
    return bias[..., heads, :, :] if bias.ndim > 2 and bias.shape[-3] > 1 else bias
