"""Functions of a part of a sequence, with the lengths of the whole one."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ..mods.graph.graph import LENGTHS, variable
from ..mods.tracing.operand import as_node
from ..mods.tracing.trace import trace
from ..mods.tracing.tracers import TracedScalar
from ..problem.mod_spec import substituted

_KINDS = "score_mod", "mask_mod"


def with_length(mods: dict[str, Any], seqlen: int, device: torch.device) -> dict[str, Any]:
    """Returns mods whose functions find as many queries and keys in the sequence.

    The length is an array without axes, so that one kernel serves all of them.
    """
    new = dict(mods)
    for kind in _KINDS:
        if kind in mods and not trace(mods[kind], kind).root.inputs.isdisjoint(LENGTHS):
            new[kind] = _of_whole(mods[kind], _number(seqlen, device))
    return new


def _of_whole(function: Any, seqlen: torch.Tensor) -> Any:
    def of_whole(*arguments: Any) -> Any:
        length = as_node(0 * arguments[-1] + seqlen)
        return TracedScalar(substituted(as_node(function(*arguments)), {variable(name): length for name in LENGTHS}))

    return of_whole


@lru_cache(256)
def _number(value: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int32).to(device)
