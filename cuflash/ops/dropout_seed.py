"""Seeds of dropout in the memory of the device, where kernels read them."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np

from ..arrays.find import library_of
from ..arrays.library import cupy_module
from ..errors import ProblemError
from ..problem.mod_arrays import check_mod_array
from ..problem.operands import DROPOUT_SEED
from ..problem.options import check_integer

_SEED_TYPES = "an int of 64 bits, or an array of one such integer (or of two uint32) on the device of q"


def seed_number(seed: Any, expected: str = _SEED_TYPES) -> int | None:
    """Returns a seed that is a number of 64 bits; None for an array. expected: describes what a seed may be."""
    if not isinstance(seed, bool | Integral):
        return None
    number = check_integer("dropout_seed", seed)
    if not -(2**63) <= number < 2**64:
        raise ProblemError(f"dropout_seed={number} has more than 64 bits; give {expected}")
    return number


def check_seed(seed: Any, first: Any) -> None:
    """Validates the seed of a call that drops nothing, and so reads none. first: the first array of the call."""
    if type(seed) is int and -(2**63) <= seed < 2**64:  # why: `seed_number` takes longer, in each repeated call
        return
    if seed_number(seed) is None:
        spec, like = (library_of(name, x).spec(name, x) for name, x in (("dropout_seed", seed), ("q", first)))
        check_mod_array(DROPOUT_SEED, spec, like, {})


def seed_array(seed: Any, first: Any) -> Any:
    """Returns a seed that is an array, or a new array of it, of the library and on the device of `first`."""
    if seed is None:
        raise ProblemError(f"dropout_p is not 0, but there is no dropout_seed; give {_SEED_TYPES}")
    if (number := seed_number(seed)) is None:
        library_of("dropout_seed", seed)
        return seed
    number -= 2**64 * (number >= 2**63)  # why: as int64, of which all libraries have the bits
    library = library_of("q", first)
    if library.name == "torch":
        import torch

        # why full: unlike a copy from the host, it may be a part of a CUDA graph, and nothing waits for it.
        return torch.full((), number, dtype=torch.int64, device=first.device)
    if library.name == "cupy":
        with first.device:
            return cupy_module().full((), number, np.int64)
    if library.name == "jax":
        library.on_gpu(first)  # why: a traced array is refused there
        return library.from_numpy(np.array([number & 0xFFFFFFFF, number >> 32 & 0xFFFFFFFF], np.uint32), first)
    if library.name != "numpy":
        raise ProblemError(f"dropout_seed={number} with {library.name} arrays; give an array of theirs, one int64")
    return np.array(number, np.int64)
