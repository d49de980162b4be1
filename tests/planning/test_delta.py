"""Launch of delta: its variants and results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.mods import scores
from cuflash.planning.plan import Launch

LENGTHS = {"seqused_k": (2,)}
ALIBI = {"score_mod": scores.alibi(np.ones(4, np.float32))}


def delta(dtype: str = "bfloat16", device: str = "sm_90", **more: Any) -> Launch:
    shape = (2, 512, 4, 64)
    plan = cuflash.plan(shape, shape, shape, op="backward", dtype=dtype, device=device, **more)
    (launch,) = (launch for launch in plan.launches if launch.variant.op == "delta")
    return launch


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({**LENGTHS, **ALIBI}, True),
        ({**LENGTHS, "dropout_p": 0.5, "dropout_seed": 1}, True),
        ({**LENGTHS, "sinks": (4,)}, False),  # lse includes sinks
        (LENGTHS, False),
        (ALIBI, False),
        ({**LENGTHS, **ALIBI, "device": "sm_80"}, False),
        ({**LENGTHS, **ALIBI, "dtype": "float32"}, False),
    ],
    ids=["functions", "dropout", "sinks", "lengths alone", "no lengths", "another GPU", "float32"],
)
def test_delta_lists_seqlens_for_varlen_kernels_with_mods(more: dict[str, Any], expected: bool) -> None:
    """Such kernels number visible rows only, but mods get the lengths of whole sequences."""
    launch = delta(**more)
    assert launch.variant.lists_seqlens == expected
    assert launch.variant.is_varlen == ("seqused_k" in more)
    assert ("seqlens" in launch.variant.name.split("_")) == expected
    assert ("LISTS_SEQLENS" in launch.variant.constants) == expected


def test_lse_and_delta_stand_side_by_side_but_for_hopper() -> None:
    for device, step in (("sm_80", 2), ("sm_90", 1)):
        fields = delta(device=device).fields
        assert fields["stats_step"] == step
        assert fields["stats_delta"] == (1 if step == 2 else fields["stats_rows"])
