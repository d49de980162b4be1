"""Dropout seeds, as numbers and as arrays in the memory of the device."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from ..arrays.find import library_of
from ..errors import ProblemError
from ..problem.mod_arrays import check_mod_array
from ..problem.operands import DROPOUT_SEED
from ..problem.options import check_integer

_SEED_TYPES = "an int of 64 bits, or an array of one such integer (or of two uint32) on the device of q"


def seed_number(seed: Any, expected: str = _SEED_TYPES) -> int | None:
    """Returns a seed that is a number of 64 bits; None for an array. expected: the text for legal seeds in errors."""
    if not isinstance(seed, bool | Integral):
        return None
    number = check_integer("dropout_seed", seed)
    if not -(2**63) <= number < 2**64:
        raise ProblemError(f"dropout_seed={number} has more than 64 bits; give {expected}")
    return number


def check_seed(seed: Any, first: Any) -> None:
    """Validates the seed of a call without dropout, which reads none. first: the first array of the call."""
    if type(seed) is int and -(2**63) <= seed < 2**64:  # inlined: `seed_number` is slower
        return
    if seed_number(seed) is None:
        spec, like = (library_of(name, x).spec(name, x) for name, x in (("dropout_seed", seed), ("q", first)))
        check_mod_array(DROPOUT_SEED, spec, like, {})


def seed_array(seed: Any, first: Any) -> Any:
    """Returns the seed as an array: itself, or a new one of the library and on the device of `first`."""
    if seed is None:
        raise ProblemError(f"dropout_p is not 0, but there is no dropout_seed; give {_SEED_TYPES}")
    if (number := seed_number(seed)) is None:
        library_of("dropout_seed", seed)
        return seed
    number -= 2**64 * (number >= 2**63)  # the bits as int64, which all libraries have
    return library_of("q", first).seed(number, first)
