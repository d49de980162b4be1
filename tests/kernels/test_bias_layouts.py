"""A bias in every layout on a GPU: elements are loaded in pairs, one by one, or with strides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mod_table import of_lengths
from plans import for_any_gpu

from cuflash.testing.cases import Case
from cuflash.testing.mods import check_backward, check_forward

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("new_memory_holds_nan")]
LENGTHS = ((63, 64), (130, 128), (129, 127), (200, 258))


def padded(put: Any, values: Any, begin: int, more: int) -> Any:
    """Returns the values as a view of longer rows, from element `begin` on, with NaN around."""
    whole = np.full((*values.shape[:-1], begin + values.shape[-1] + more), np.nan, values.dtype)
    whole[..., begin : begin + values.shape[-1]] = values
    return put(whole)[..., begin : begin + values.shape[-1]]


LAYOUTS = {
    "dense": lambda put, x: put(x),
    "even rows": lambda put, x: padded(put, x, 2, 2 + x.shape[-1] % 2),
    "misaligned": lambda put, x: padded(put, x, 1, 1 + x.shape[-1] % 2),
    "odd rows": lambda put, x: padded(put, x, 2, 1 + x.shape[-1] % 2),
    "transposed": lambda put, x: put(np.ascontiguousarray(x.swapaxes(2, 3))).swapaxes(2, 3),
}


def bias_in(layout: str, dtype: str) -> Any:
    def make(put: Any, case: Case) -> dict[str, Any]:
        rng = np.random.default_rng(7)
        values = rng.standard_normal((1, case.heads_q, case.seqlen_q, case.seqlen_k)).astype(dtype)
        bias = LAYOUTS[layout](put, values)
        return {"bias": bias, "captured_grads": (bias,)}

    return make


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bias_of_any_layout_agrees_with_float64(cupy: Any, layout: str, dtype: str) -> None:
    for lengths in LENGTHS:
        check_forward(bias_in(layout, dtype), of_lengths(lengths), cupy.asarray, with_lse=False)
        check_backward(bias_in(layout, dtype), of_lengths(lengths), cupy.asarray, grads=dtype == "float16")


@pytest.mark.parametrize("dim", [24, 32, 64])
@pytest.mark.parametrize("causal", [False, True])
def test_the_gradient_of_a_bias_that_many_sequences_share_is_a_sum(cupy: Any, dim: int, causal: bool) -> None:
    for lengths in LENGTHS[1:]:
        case = of_lengths(lengths, batch=70, heads_q=2, heads_kv=1, head_dim=dim, head_dim_v=dim, causal=causal)
        check_backward(bias_in("dense", "float16"), case, cupy.asarray, grads=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_kernels_for_any_gpu_agree_with_float64(cupy: Any, layout: str) -> None:
    with for_any_gpu():
        for lengths in LENGTHS[:2]:
            check_forward(bias_in(layout, "float16"), of_lengths(lengths), cupy.asarray, with_lse=False)
            check_backward(bias_in(layout, "float16"), of_lengths(lengths), cupy.asarray)
