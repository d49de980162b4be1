"""`cuflash.triangle_attention`: attention along the rows of a matrix of pairs, as in structure prediction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..arrays.find import library_of
from ..errors import ProblemError
from ..problem.dtypes import DTYPES
from ..problem.foreign import answers_foreign
from ..problem.options import Array
from .forward import forward

LAYOUT = "(batch, rows, heads, seqlen, head_dim)"


@answers_foreign
def triangle_attention(
    q: Array,
    k: Array,
    v: Array,
    bias: Any,
    mask: Any = None,
    *,
    softmax_scale: float | None = None,
) -> Array:
    """Returns attention inside each row of a matrix, `softmax(mask(softmax_scale q kᵀ + bias)) v`.

    All rows share one bias. With gradients it is `cuflash.frameworks.torch.triangle_attention` and
    `cuflash.frameworks.jax.triangle_attention`.

    Parameters
    ----------
    q : array (batch, rows, heads, seqlen_q, head_dim)
        Queries, in the frameworks and dtypes of `forward`.
    k : array (batch, rows, heads_kv, seqlen_k, head_dim)
        Keys, of the framework, device and dtype of q.
    v : array (batch, rows, heads_kv, seqlen_k, head_dim_v)
        Values, like k.
    bias : array (batch, heads, seqlen_q, seqlen_k)
        Floats to add to the scores of every row. They are not copied for the rows.
    mask : bool array (batch, rows, seqlen_k), optional
        True for visible keys. A query that sees no key has out 0.
    softmax_scale : float, default 1/sqrt(head_dim)
        Factor of the scores, from 1e-15 to 1e15.

    Returns
    -------
    out : array (batch, rows, heads, seqlen_q, head_dim_v)
        Attention, in the framework and dtype of q.

    Raises
    ------
    ProblemError, UnsupportedError, CompileError
        As in `forward`.

    References
    ----------
    AlphaFold 2 (doi 10.1038/s41586-021-03819-2), supplement, algorithm 13.

    Examples
    --------
    A matrix of 50 x 50 pairs, 4 heads.

    >>> import numpy as np, cuflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 50, 4, 50, 32), dtype="float32")
    >>> bias, mask = np.zeros((1, 4, 50, 50), "float32"), np.ones((1, 50, 50), bool)
    >>> cuflash.triangle_attention(q, k, v, bias, mask).shape
    (1, 50, 4, 50, 32)
    """
    out: Array = attended(forward, _dtype, _numbers, q, k, v, bias, mask, softmax_scale)
    return out


def attended(
    attend: Callable[..., Any],
    dtype_of: Callable[[str, Any], str],
    numbers: Callable[[int, Any], Any],
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    mask: Any,
    softmax_scale: float | None,
) -> Any:
    """Returns triangle attention by `attend(q, k, v, …)`, a call of attention, here or in a framework.

    dtype_of: validates that an argument is an array and returns the name of its dtype. numbers: returns 0, 1, … as
    integers, beside an array.
    """
    for name, x in (("q", q), ("k", k), ("v", v), ("bias", bias), ("mask", mask)):
        shape = {"bias": "(batch, heads, seqlen_q, seqlen_k)", "mask": "(batch, rows, seqlen_k)"}.get(name, LAYOUT)
        if x is None and name == "mask":
            continue
        kinds, dtype = ("bool",) if name == "mask" else tuple(DTYPES), dtype_of(name, x)
        if dtype not in kinds:
            raise ProblemError(f"{name} has dtype {dtype}; give {', '.join(kinds)}")
        if len(x.shape) != shape.count(",") + 1 or (name in "kv" and x.shape[:2] != q.shape[:2]):
            raise ProblemError(f"{name} has shape {tuple(x.shape)}; give {shape}, with the batch and rows of q")
    batch, rows, heads, seqlen_q = q.shape[:4]
    seqlen_k = k.shape[3]
    whole = batch, heads, seqlen_q, seqlen_k
    if tuple(bias.shape) != whole:
        raise ProblemError(
            f"bias has shape {tuple(bias.shape)}; q and k need {whole}: (batch, heads, seqlen_q, seqlen_k)"
        )
    if mask is not None and tuple(mask.shape) != (batch, rows, seqlen_k):
        whole_mask = f"{(batch, rows, seqlen_k)}: (batch, rows, seqlen_k)"
        raise ProblemError(f"mask has shape {tuple(mask.shape)}; q and k need {whole_mask}")
    flat = [_rows_as_batch(x) for x in (q, k, v)]
    keywords: dict[str, Any] = {"softmax_scale": softmax_scale}
    if batch == 1:
        keywords["bias"] = bias
    else:
        keywords["score_mod"] = _biased(bias, numbers(batch * rows, q) // max(rows, 1))
    if mask is not None:
        keywords["mask_mod"] = _masked(mask.reshape(batch * rows, seqlen_k))
    out = attend(*flat, **keywords)
    return out.reshape(batch, rows, seqlen_q, heads, out.shape[3]).swapaxes(2, 3)


def _dtype(name: str, x: Any) -> str:
    return library_of(name, x).spec(name, x).dtype


def _rows_as_batch(x: Any) -> Any:
    batch, rows, heads, seqlen, dim = x.shape
    return x.reshape(batch * rows, heads, seqlen, dim).swapaxes(1, 2)


def _biased(bias: Any, batch_of: Any) -> Any:
    # batch_of is an array, as a number of rows in the function would compile one kernel for each number.
    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return score + bias[batch_of[b], h, q_idx, k_idx]

    return score_mod


def _masked(mask: Any) -> Any:
    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return mask[b, k_idx]

    return mask_mod


def _numbers(count: int, like: Any) -> Any:
    """Returns 0, 1, … as integers, of the library and on the device of an array."""
    return library_of("q", like).arange(count, like)
