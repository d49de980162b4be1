"""`cuflash.merge_states`: merges partial attention over disjoint keys into attention over all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..arrays.find import libraries_of
from ..arrays.operands import specs_of
from ..errors import ProblemError
from ..planning.merge import MAX_STATES
from ..problem.foreign import answers_foreign
from ..problem.operands import merge_op
from ..problem.options import Array, Options, options_key
from ..problem.validate import validated
from ..runtime.call import run
from ..units import kind_of


@answers_foreign
def merge_states(outs: Iterable[Array], lses: Iterable[Any]) -> tuple[Array, Array]:
    """Returns (out, lse) of attention over the union of disjoint key sets, from the state over each.

    Ring attention and split keys need it. Keep the states in float32 to round only once:
    `forward(..., out_dtype="float32")`.

    Parameters
    ----------
    outs : sequence of arrays (batch, seqlen, heads, head_dim_v)
        Results of `forward`, one for each key set. One array that holds them along its first axis will do. The ranks
        without batch or heads are accepted as in `forward`.
    lses : sequence of arrays (batch, heads, seqlen)
        As many lses, float32, or float64 with float64 outs. A state with lse -inf counts for nothing.

    Returns
    -------
    out : array (batch, seqlen, heads, head_dim_v)
        Attention over all keys, in the dtype of outs.
    lse : array (batch, heads, seqlen)
        Its lse.

    Raises
    ------
    ProblemError
        The states do not fit together.
    UnsupportedError, CompileError
        As in `forward`.

    Notes
    -----
    States are blended in float32 (float64 for float64), from the first to the last, 248 at once. The result of the
    first 248 is the first state of the rest. That changes no bit where outs are float32 or float64; 16-bit outs are
    rounded each time. Arrays that are not contiguous are copied.

    References
    ----------
    FLASH-D (arXiv 2505.14201), for the blend.

    Examples
    --------
    Two halves of the keys.

    >>> import numpy as np, cuflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 100, 4, 64), dtype="float32")
    >>> halves = [(k[:, part], v[:, part]) for part in (slice(50), slice(50, None))]
    >>> outs, lses = zip(*(cuflash.forward(q, *half, return_lse=True) for half in halves))
    >>> out, lse = cuflash.merge_states(outs, lses)
    >>> bool(np.allclose(out, cuflash.forward(q, k, v), atol=1e-6))
    True
    """
    outs, lses = _states("outs", outs), _states("lses", lses)
    if not outs or len(outs) != len(lses):
        raise ProblemError(f"{len(outs)} outs and {len(lses)} lses; give one lse for each out, and at least one state")
    if len(outs) > MAX_STATES:  # validates all states before the first merge
        op, arrays = merge_op(len(outs)), (*outs, *lses)
        library, _ = libraries_of(op, arrays)
        validated(op, specs_of(op, library, arrays), Options())
    while True:
        first_outs, first_lses = outs[:MAX_STATES], lses[:MAX_STATES]
        out, lse = run(merge_op(len(first_outs)), (*first_outs, *first_lses), options_key())
        outs, lses = [out, *outs[MAX_STATES:]], [lse, *lses[MAX_STATES:]]
        if len(outs) == 1:
            return out, lse


def _states(name: str, states: Any) -> list[Any]:
    try:
        return list(states)
    except TypeError:
        raise ProblemError(f"{name} is {kind_of(states)}; give a sequence of arrays, one a state") from None
