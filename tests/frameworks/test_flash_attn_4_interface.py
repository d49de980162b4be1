"""FlashAttention-4's functions: their signatures, their results and what is refused."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tensors import arguments_of, assert_pulled, assert_pulled_sequences, assert_results, assert_sequences
from tensors import random_qkv as dense

from cuflash import ProblemError, UnsupportedError
from cuflash.frameworks.flash_attn import v4 as fa4
from cuflash.testing.sequences import Sequences, varlen_arrays

MASKS = (
    "softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, "
    "pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None"
)
SIGNATURES = {
    "flash_attn_func": f"q, k, v, qv=None, gather_kv_indices=None, {MASKS}, aux_tensors=None, aux_scalars=None, "
    "block_sparse_tensors=None, block_sparse_tensors_bwd=None, return_lse=False",
    "flash_attn_varlen_func": "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, "
    "max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, "
    f"{MASKS}, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False",
}
PACKED = Sequences("packed", (5, 0, 1, 17), (9, 3, 0, 17), causal=True, dims=(16, 24), bounded=True, dtype="float32")


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    parameters = inspect.signature(getattr(fa4, name)).parameters.values()
    assert ", ".join(str(x.replace(annotation=x.empty)) for x in parameters) == SIGNATURES[name]


@pytest.mark.parametrize(
    ("options", "mask"),
    [
        ({}, {}),
        ({"causal": True, "num_splits": 2, "pack_gqa": True}, {"causal": True}),
        ({"window_size": (3, None)}, {"window_size": (3, -1)}),
        ({"window_size": (torch.tensor(3), torch.tensor(2))}, {"window_size": (3, 2)}),
        ({"window_size": (-1, -1)}, {}),
        ({"window_size": (-1, 0)}, {}),
        ({"window_size": [4, -1], "causal": True}, {"window_size": (4, -1), "causal": True}),
        ({"window_size": (-1, 5), "causal": True}, {"causal": True}),
        ({"softcap": 0.5, "softmax_scale": 0.3}, {"softcap": 0.5, "softmax_scale": 0.3}),
    ],
    ids=str,
)
def test_dense(options: dict[str, Any], mask: dict[str, Any], device: str) -> None:
    tensors = dense(device, torch.float32)
    out, lse = fa4.flash_attn_func(*tensors, **options, return_lse=True)
    assert (lse.shape, lse.dtype) == ((2, 4, 9), torch.float32)
    assert_results(tensors, out, lse, **mask)
    assert_pulled(torch.autograd.grad(out, tensors, out.detach()), tensors, out.detach(), **mask)
    alone, nothing = fa4.flash_attn_func(*tensors, **options, deterministic=True)
    assert torch.equal(alone, out)
    assert nothing is None


def test_packed_and_used(device: str) -> None:
    for case in (PACKED, replace(PACKED, used_q=True, used_k=True, spare_q=(1, 4, 0, 2), spare_k=(0, 3, 2, 1))):
        inputs = varlen_arrays(case)
        arguments = arguments_of(inputs, device, grad=True)
        del arguments["diagonal_offset"]
        out, lse = fa4.flash_attn_varlen_func(**arguments, min_seqlen_k=0, return_lse=True)
        assert lse.shape == (4, len(out))
        assert_sequences(inputs, out, lse)
        assert_pulled_sequences(inputs, out, lse, [arguments[name] for name in "qkv"])
        alone, nothing = fa4.flash_attn_varlen_func(**arguments)
        assert torch.equal(alone, out)
        assert nothing is None


def test_rectangles_and_bounds_that_say_nothing_of_them() -> None:
    q, k, v = dense("cpu", torch.float32)
    out, lse = fa4.flash_attn_varlen_func(q, k, v, max_seqlen_q=1, max_seqlen_k=1, causal=True, return_lse=True)
    assert_results((q, k, v), out, lse, causal=True)


def test_pages(device: str) -> None:
    inputs = varlen_arrays(replace(PACKED, place_k="paged", used_k=True, page_size=3))
    arguments = arguments_of(inputs, device)
    del arguments["diagonal_offset"]
    assert_sequences(inputs, *fa4.flash_attn_varlen_func(**arguments, return_lse=True))
    used = arguments.pop("seqused_k")
    bounds = torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
    assert_sequences(inputs, *fa4.flash_attn_varlen_func(**arguments, cu_seqlens_k=bounds, return_lse=True))


REFUSED = (
    *("qv", "gather_kv_indices", "score_mod", "score_mod_bwd", "mask_mod", "aux_tensors"),
    *("aux_scalars", "block_sparse_tensors", "block_sparse_tensors_bwd"),
)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_offered_is_refused_by_name(name: str) -> None:
    tensors = dense("cpu", torch.float32, grad=False)
    for function in (fa4.flash_attn_func, fa4.flash_attn_varlen_func):
        if name in inspect.signature(function).parameters:
            with pytest.raises(UnsupportedError, match=f"{name}(: cuflash does not| belongs to functions)"):
                function(*tensors, **{name: tensors[0]})


def test_what_does_not_fit_is_refused() -> None:
    tensors = dense("cpu", torch.float32, grad=False)
    for changes, words in (
        ({"window_size": (5, -1)}, r"window_size=\(5, -1\): beside such a side"),
        ({"window_size": (None, -1)}, "window_size=.None, -1."),
        ({"window_size": 5}, "window_size=5 is not a pair"),
        ({"window_size": (1.5, 0)}, "window_size left=1.5"),
        ({"causal": 1}, "causal=1"),
        ({"pack_gqa": 2}, "pack_gqa=2"),
        ({"return_lse": None}, "return_lse=None"),
    ):
        with pytest.raises(ProblemError, match=words):
            fa4.flash_attn_func(*tensors, **changes)
    with pytest.raises(ProblemError, match=r"seqused_k has dtype torch\.int64"):
        fa4.flash_attn_varlen_func(*tensors, seqused_k=torch.ones(2, dtype=torch.int64))
