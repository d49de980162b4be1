"""`sm_margin`: the grids of plans that leave SMs to other kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.errors import ProblemError
from cuflash.planning.device import DEVICES

H100 = DEVICES["sm_90"]
LONG = (2, 4096, 16, 128), (2, 4096, 4, 128)
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (300, 100)},
    "offset": {"causal": True, "diagonal_offset": 700},
    "mask_mod": {"mask_mod": lambda b, h, i, j: i // 512 == j // 512},
    "deterministic": {"causal": True, "deterministic": True},
}


def plan(op: str, head_dim: int = 128, **options: Any) -> cuflash.Plan:
    q, k = ((*shape[:3], head_dim) for shape in LONG)
    v = None if op == "lse" else k
    return cuflash.plan(q, k, v, op=op, dtype="bfloat16", device="sm_90", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("margin", [1, 16, H100.num_sms - 1])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("op", "head_dim"), [("forward", 128), ("lse", 64), ("backward", 128), ("backward", 256)])
def test_main_kernels_leave_the_margin(op: str, head_dim: int, mask: str, margin: int) -> None:
    options = MASKS[mask]
    if "deterministic" in options and op != "backward":
        pytest.skip("for gradients alone")
    if head_dim > 128 and mask == "mask_mod":
        pytest.skip("its thread blocks take one block of rows each")
    launches = plan(op, head_dim, sm_margin=margin, **options).launches
    main = [launch for launch in launches if launch.variant.source.startswith("sm90/")]
    assert main
    for launch in main:
        assert launch.num_blocks == H100.num_sms - margin, launch.variant.name
        # Thread blocks take tiles until none is left, so that one that starts late takes fewer. Backward numbers them
        # by a semaphore.
        assert launch.takes_counter or launch.variant.op == "backward"


def test_no_margin_changes_no_plan() -> None:
    for op in ("forward", "lse", "backward"):
        assert plan(op, causal=True, sm_margin=0) == plan(op, causal=True)


@pytest.mark.parametrize("margin", [-1, True, 1.5, "2", np.zeros(1, "int32")], ids=str)
def test_a_margin_is_a_count_of_sms(margin: Any) -> None:
    with pytest.raises(ProblemError, match="sm_margin="):
        plan("forward", sm_margin=margin)
    q = np.zeros((1, 4, 1, 8), "float32")
    with pytest.raises(ProblemError, match="sm_margin="):
        cuflash.forward(q, q, q, sm_margin=margin)


def test_a_margin_of_all_sms_is_refused() -> None:
    with pytest.raises(ProblemError, match=f"sm_margin={H100.num_sms}, but H100 has {H100.num_sms} SMs"):
        plan("backward", sm_margin=H100.num_sms)


def test_numpy_has_no_sms() -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 9, 2, 8), "float32")
    out, lse = cuflash.forward(q, k, v, return_lse=True, sm_margin=16)
    assert np.array_equal(out, cuflash.forward(q, k, v))
    gradients = cuflash.backward(out, q, k, v, out, lse, sm_margin=16)
    assert all(map(np.array_equal, gradients, cuflash.backward(out, q, k, v, out, lse)))
