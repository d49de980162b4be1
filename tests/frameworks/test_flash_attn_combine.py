"""`flash_attn_combine` of flash-attn 3 and 4."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tensors import assert_results, random_qkv

import cuflash
from cuflash import ProblemError
from cuflash.frameworks.flash_attn import v3 as fa3
from cuflash.frameworks.flash_attn import v4 as fa4
from cuflash.frameworks.torch import attention


@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_out", [False, True])
def test_version_3_merges_splits(out_dtype: Any, has_out: bool) -> None:
    q, k, v = (x.detach() for x in random_qkv("cpu", torch.float32))
    parts = [cuflash.forward(q, k[:, i : i + 4], v[:, i : i + 4], return_lse=True) for i in (0, 4, 8)]
    out_partial = torch.stack([out for out, _ in parts])
    lse_partial = torch.stack([lse.transpose(1, 2) for _, lse in parts])
    dtype = out_dtype or torch.float32
    target = torch.empty(q.shape, dtype=dtype) if has_out else None
    out, lse = fa3.flash_attn_combine(out_partial, lse_partial, target, out_dtype)
    assert out.dtype == dtype
    assert target is None or out is target
    assert lse.shape == (2, 9, 4)
    assert lse.stride(1) == 1
    assert_results((q, k, v), out, lse.transpose(1, 2))


def test_version_3_refuses_invalid_arguments() -> None:
    out, lse = torch.zeros(3, 2, 5, 4, 8), torch.zeros(3, 2, 5, 4)
    for arguments, words in (
        ((out, lse.transpose(2, 3)), "lse_partial"),
        ((out[0], lse[0]), "num_splits"),
        ((out.half(), lse), "out_partial has dtype"),
        ((out, lse.double()), "lse_partial has dtype"),
        ((out, lse, None, torch.float64), "out_dtype"),
        ((out, lse, torch.zeros(2, 5, 4, 8), torch.float16), "out has shape"),
        ((out, lse, torch.zeros(2, 4, 5, 8)), "out has shape"),
    ):
        with pytest.raises(ProblemError, match=words):
            fa3.flash_attn_combine(*arguments)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_version_4_merges_splits(is_packed: bool, dtype: Any, device: str) -> None:
    tensors = q, k, v = random_qkv(device, torch.float32, grad=False)
    parts = [attention(q, k[:, i : i + 4], v[:, i : i + 4], return_lse=True) for i in (0, 4, 8)]
    out_partial = torch.stack([out for out, _ in parts]).to(dtype)
    lse_partial = torch.stack([lse.transpose(1, 2) for _, lse in parts])
    rest: dict[str, Any] = {}
    if is_packed:
        out_partial, lse_partial = out_partial.flatten(1, 2), lse_partial.flatten(1, 2)
        rest["cu_seqlens"] = torch.tensor([0, 9, 18], dtype=torch.int32, device=device)
    out, lse = fa4.flash_attn_combine(out_partial, lse_partial, **rest)
    assert (out.dtype, out.shape, lse.shape) == (dtype, out_partial.shape[1:], out_partial.shape[1:-1])
    weights = torch.softmax(lse_partial.double(), 0)[..., None]
    torch.testing.assert_close(out, (weights * out_partial.double()).sum(0).to(dtype))
    torch.testing.assert_close(lse.double(), torch.logsumexp(lse_partial.double(), 0), rtol=1e-6, atol=1e-6)
    target = torch.empty(out.shape, device=device)
    result, nothing = fa4.flash_attn_combine(out_partial, lse_partial, target, torch.float32, return_lse=False)
    assert result is target
    assert nothing is None
    if dtype == torch.float32:
        assert_results(tensors, result.reshape(q.shape), lse.reshape(2, 9, 4).transpose(1, 2))


def test_version_4_refuses_invalid_arguments() -> None:
    out, lse = torch.zeros(3, 2, 5, 4, 8), torch.zeros(3, 2, 5, 4)
    for arguments, words in (
        ((out, lse.transpose(2, 3)), "lse_partial"),
        ((out[0, 0], lse[0, 0]), r"num_splits, batch, seqlen.*, or \(num_splits, total_q"),
        ((out.double(), lse), "out_partial has dtype"),
        ((out, lse.half()), "lse_partial has dtype"),
        ((out, lse, torch.zeros(2, 4, 5, 8)), "out has shape"),
        ((out, lse, None, None, torch.arange(3)), "cu_seqlens has dtype"),
        ((out, lse, None, None, None, torch.arange(3)), "seqused has dtype"),
        ((out, lse, None, None, None, None, torch.arange(3)), "virtual_batch_idx has dtype"),
    ):
        with pytest.raises(ProblemError, match=words):
            fa4.flash_attn_combine(*arguments)
