"""Index offsets of a call that is a part of a larger one: positions of its first query, key, head and sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ProblemError
from ..mods.tracing.operand import is_integer
from ..units import kind_of
from .checks import MAX_SEQLEN

IndexOffsets = tuple[int, ...]
NO_OFFSETS: IndexOffsets = (0, 0)
_LENGTHS = "seqlen_q", "seqlen_k", "heads_q", "batch"
_ACCEPTED = "(query, key), (query, key, head) or (query, key, head, sequence), each an integer of at least 0"


def check_index_offsets(value: Any) -> IndexOffsets:
    """Returns the offsets of query, key, head and sequence."""
    if not isinstance(value, (tuple, list)) or not 2 <= len(value) <= len(_LENGTHS):
        shown = f"{value!r} is {kind_of(value)}" if not isinstance(value, (tuple, list)) else f"{value!r}"
        raise ProblemError(f"index_offsets={shown}; give {_ACCEPTED}")
    for number in value:
        if not is_integer(number) or number < 0:
            raise ProblemError(f"index_offsets={value!r} holds {number!r}; give {_ACCEPTED}, in host memory")
    return *map(int, value), *[0] * (len(_LENGTHS) - len(value))


def check_indices(index_offsets: IndexOffsets, lengths: Mapping[str, int]) -> None:
    """Raises ProblemError if an index of the larger call is out of range."""
    for name, offset in zip(_LENGTHS, index_offsets, strict=False):
        if offset and offset + lengths[name] > MAX_SEQLEN:
            raise ProblemError(
                f"index_offsets={index_offsets} with {name} {lengths[name]}: indices reach {offset + lengths[name]}, "
                f"over the limit of {MAX_SEQLEN}; give smaller offsets"
            )
