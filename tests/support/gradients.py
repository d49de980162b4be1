"""What tests of `cuflash.backward` run on."""

from __future__ import annotations

import pytest

from cuflash.testing.cases import CASES

# The cases that a GPU has kernels for; it refuses larger head dims.
COMPUTED = [case for case in CASES if max(case.head_dim, case.head_dim_v) <= 256]
DETERMINISTIC = pytest.mark.parametrize("deterministic", [False, True], ids=["any_order", "deterministic"])
