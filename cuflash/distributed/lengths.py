"""Functions of a part of a sequence, with the length of the whole one."""

from __future__ import annotations

from typing import Any

from ..mods.graph.graph import LENGTHS, variable
from ..mods.tracing.operand import as_node
from ..mods.tracing.trace import trace
from ..mods.tracing.tracers import TracedScalar
from ..problem.mod_spec import substituted

_KINDS = "score_mod", "mask_mod"


def with_length(mods: dict[str, Any], seqlen: Any) -> dict[str, Any]:
    """Returns mods whose functions find as many queries and keys in the sequence.

    seqlen: an array without axes, so that one kernel serves all lengths.
    """
    some = {
        kind: mods[kind]
        for kind in _KINDS
        if kind in mods and not trace(mods[kind], kind).root.inputs.isdisjoint(LENGTHS)
    }
    return mods | {kind: _of_whole(function, seqlen) for kind, function in some.items()}


def _of_whole(function: Any, seqlen: Any) -> Any:
    def of_whole(*arguments: Any) -> Any:
        length = as_node(0 * arguments[-1] + seqlen)
        return TracedScalar(substituted(as_node(function(*arguments)), {variable(name): length for name in LENGTHS}))

    return of_whole
