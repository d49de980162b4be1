"""Dropout seeds become arrays of the library of a call."""

from __future__ import annotations

import numpy as np
import pytest
from libraries import Producer, jax_of, torch_of

from cuflash.errors import ProblemError
from cuflash.ops.dropout_seed import seed_array
from cuflash.reference.dropout import seed_of

SEEDS = (0, 1, -1, 2**40 + 7, -(2**63), 2**64 - 1)


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_an_int_becomes_an_array_of_the_library(library: str) -> None:
    like = np.zeros(3, np.float32)
    if library != "numpy":
        like = torch_of(like, "cpu") if library == "torch" else jax_of(like, "cpu")
    for seed in SEEDS:
        array = seed_array(seed, like)
        assert type(array) is type(like)
        assert seed_of(np.asarray(array)) == seed % 2**64


def test_arrays_stay_and_others_are_refused() -> None:
    like, seed = np.zeros(3), np.zeros(1, np.int64)
    assert seed_array(seed, like) is seed
    refused = (None, "there is no dropout_seed"), (2**64, "more than 64 bits"), ("1", "is a str"), (True, "is a bool")
    for wrong, message in refused:
        with pytest.raises(ProblemError, match=message):
            seed_array(wrong, like)
    with pytest.raises(ProblemError, match="give an array of theirs"):
        seed_array(1, Producer(like))
