"""`cuflash.merge_states`: partial attention over disjoint keys becomes attention over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import ProblemError
from ..problem.operands import merge_op
from ..problem.options import Options
from ..runtime.launch import run


def merge_states(outs: Sequence[Any], lses: Sequence[Any]) -> tuple[Any, Any]:
    """(out, lse) of attention over the union of disjoint key sets, from the state over each: FLASH-D's blend.

    outs: arrays (batch, seqlen, heads, head_dim_v), or one array of them along its first axis; lses: as many of
    (batch, heads, seqlen), float32 (float64 with float64 outs). Ranks without batch or heads as in `forward`. out has
    the dtype of outs; it is blended in float32 (float64). A state whose lse is -inf counts for nothing. What ring
    attention and split keys need; keep the states in float32 (`forward(..., out_dtype="float32")`) to round only once.

    Source: FLASH-D, arXiv 2505.14201.
    """
    outs, lses = _states("outs", outs), _states("lses", lses)
    if not outs or len(outs) != len(lses):
        raise ProblemError(f"{len(outs)} outs and {len(lses)} lses; give one lse for each out, and at least one state")
    out, lse = run(merge_op(len(outs)), (*outs, *lses), Options())
    return out, lse


def _states(name: str, states: Any) -> list[Any]:
    try:
        return list(states)
    except TypeError:
        raise ProblemError(f"{name} is a {type(states).__name__}; give a sequence of arrays, one a state") from None
