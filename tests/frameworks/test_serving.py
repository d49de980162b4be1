"""Bounds on keys of serving engines."""

from __future__ import annotations

import pytest

from cuflash.frameworks.serving import bound_of_keys


@pytest.mark.parametrize(("length", "bound"), [(0, 0), (1, 1024), (1023, 1024), (1024, 1024), (1025, 2048)])
def test_a_bound_is_the_next_multiple_of_1024(length: int, bound: int) -> None:
    assert bound_of_keys(length) == bound
