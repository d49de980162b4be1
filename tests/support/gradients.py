"""Cases and parameters for tests of `cuflash.backward`."""

from __future__ import annotations

import pytest

from cuflash.testing.cases import CASES

# Cases for which GPUs have kernels; backward refuses larger head dims.
COMPUTED = [case for case in CASES if max(case.head_dim, case.head_dim_v) <= 256]
DETERMINISTIC = pytest.mark.parametrize("deterministic", [False, True], ids=["any_order", "deterministic"])
