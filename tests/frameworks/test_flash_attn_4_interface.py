"""FlashAttention-4's functions: signatures, results and refusals."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from refusals import refused
from tensors import arguments_of, assert_results, assert_sequences, assert_vjp, assert_vjp_sequences
from tensors import random_qkv as dense

from cuflash import ProblemError, UnsupportedError
from cuflash.frameworks.flash_attn import v4 as fa4
from cuflash.frameworks.torch import attention
from cuflash.testing.sequences import Sequences, varlen_arrays

MASKS = (
    "softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, "
    "pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None"
)
GATHER = "gather_bwd_recompute_p=False, gather_bwd_token_chunk=None"
# Names, order and defaults of flash-attn-4 4.0.0b36.
SIGNATURES = {
    "flash_attn_func": f"q, k, v, qv=None, gather_kv_indices=None, {MASKS}, aux_tensors=None, aux_scalars=None, "
    f"block_sparse_tensors=None, block_sparse_tensors_bwd=None, return_lse=False, {GATHER}",
    "flash_attn_varlen_func": "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, "
    "max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, "
    f"{MASKS}, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False, "
    f"scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False, {GATHER}",
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None, cu_seqlens=None, seqused=None, "
    "virtual_batch_idx=None, return_lse=True",
    "get_scheduler_metadata": "max_seqlen_q, max_seqlen_k, nheads, nheads_kv, headdim, num_splits, headdim_v=None, "
    "pack_gqa=None, causal=False, window_size_left=None, window_size_right=None, seqlen_k_new=0, cu_seqlens_q=None, "
    "cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, leftpad_k=None, "
    "seqlen_k_per_split=None, _arch=None",
}
PACKED = Sequences("packed", (5, 0, 1, 17), (9, 3, 0, 17), causal=True, dims=(16, 24), bounded=True, dtype="float32")


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    parameters = inspect.signature(getattr(fa4, name)).parameters.values()
    assert ", ".join(str(x.replace(annotation=x.empty)) for x in parameters) == SIGNATURES[name]
    assert set(fa4.__all__) == set(SIGNATURES)


@pytest.mark.parametrize(
    ("options", "mask"),
    [
        ({}, {}),
        ({"causal": True, "num_splits": 2, "pack_gqa": True}, {"causal": True}),
        ({"window_size": (3, None)}, {"window_size": (3, -1)}),
        ({"window_size": (torch.tensor(3), torch.tensor(2))}, {"window_size": (3, 2)}),
        ({"window_size": (-1, -1)}, {}),
        ({"window_size": (-3, -2), "causal": True}, {"causal": True}),
        ({"window_size": [4, -1], "causal": True}, {"window_size": (4, -1), "causal": True}),
        ({"window_size": torch.tensor([3, 2])}, {"window_size": (3, 2)}),
        ({"softcap": 0.5, "softmax_scale": 0.3}, {"softcap": 0.5, "softmax_scale": 0.3}),
    ],
    ids=str,
)
def test_dense(options: dict[str, Any], mask: dict[str, Any], device: str) -> None:
    tensors = dense(device, torch.float32)
    out, lse = fa4.flash_attn_func(*tensors, **options, return_lse=True)
    assert (lse.shape, lse.dtype) == ((2, 4, 9), torch.float32)
    assert_results(tensors, out, lse, **mask)
    assert_vjp(torch.autograd.grad(out, tensors, out.detach()), tensors, out.detach(), **mask)
    alone, nothing = fa4.flash_attn_func(*tensors, **options, deterministic=True)
    assert torch.equal(alone, out)
    assert nothing is None


@pytest.mark.parametrize("window", [(3, 2), (5, -3), (-1, -1)])
def test_a_window_in_an_array_is_read_between_graphs(window: tuple[int, int]) -> None:
    tensors = dense("cpu", torch.float32)
    expected, _ = fa4.flash_attn_func(*tensors, window_size=window)

    def function(window: Any) -> Any:
        return fa4.flash_attn_func(*tensors, window_size=window)[0]

    for array in (torch.tensor(window), np.array(window)):
        torch._dynamo.reset()
        assert torch.equal(torch.compile(function, backend="aot_eager")(array), expected)
        torch._dynamo.reset()
        with refused(torch._dynamo.exc.Unsupported, "window_size is one tensor or array", "give two Python ints"):
            torch.compile(function, backend="aot_eager", fullgraph=True)(array)


# A window with a negative side: an equal window without one, and its diagonal's shift to the right.
NEGATIVE = {
    (-3, 5): ((0, 2), 3),
    (5, -3): ((2, 0), -3),
    (-1, 0): ((0, 0), 1000),
    (-2, 1): ((0, 0), 1000),
    (None, -2): ((-1, 0), -2),
    (-2, None): ((0, -1), 2),
    (7, -1): ((6, 0), -1),
    (-100, None): ((0, -1), 100),
}


@pytest.mark.parametrize("window", NEGATIVE)
def test_a_negative_side_moves_the_window_wholly_to_one_side(window: Any, device: str) -> None:
    q, k, v = tensors = dense(device, torch.float32)
    (out, lse), (same, shift) = fa4.flash_attn_func(*tensors, window_size=window, return_lse=True), NEGATIVE[window]
    mask = {"window_size": same, "diagonal_offset": 3 + shift}
    assert_results(tensors, out, lse, **mask)
    expected, expected_lse = attention(*tensors, **mask, return_lse=True)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    dout = torch.ones_like(out)
    assert_vjp(torch.autograd.grad(out, tensors, dout), tensors, dout, **mask)
    # Sequences of other lengths have other diagonals.
    lengths = (4, 9), (1, 3)  # of q, and of k
    rows = [q.flatten(0, 1)[:5], k.flatten(0, 1)[:12], v.flatten(0, 1)[:12]]
    bounds_q, bounds_k = (torch.tensor([0, x, x + y], dtype=torch.int32, device=device) for x, y in ((4, 1), (9, 3)))
    packed, _ = fa4.flash_attn_varlen_func(
        *rows, cu_seqlens_q=bounds_q, cu_seqlens_k=bounds_k, max_seqlen_q=4, max_seqlen_k=9, window_size=window
    )
    begins = (0, 0), (4, 9)
    for (begin_q, begin_k), (length_q, length_k) in zip(begins, lengths, strict=True):
        parts = rows[0][begin_q:][:length_q], *(x[begin_k:][:length_k] for x in rows[1:])
        one = attention(*parts, window_size=same, diagonal_offset=length_k - length_q + shift)
        torch.testing.assert_close(packed[begin_q:][:length_q], one)


def test_a_negative_side_beside_a_causal_mask() -> None:
    tensors = dense("cpu", torch.float32, grad=False)
    out, _ = fa4.flash_attn_func(*tensors, causal=True, window_size=(-2, 4))
    assert not out.any()  # the window begins after the query's own key, where the causal mask ends
    out, _ = fa4.flash_attn_func(*tensors, causal=True, window_size=(4, -1))
    assert torch.equal(out, attention(*tensors, causal=True, window_size=(4, 0)))


def test_packed_and_used(device: str) -> None:
    for case in (PACKED, replace(PACKED, used_q=True, used_k=True, spare_q=(1, 4, 0, 2), spare_k=(0, 3, 2, 1))):
        inputs = varlen_arrays(case)
        arguments = arguments_of(inputs, device, grad=True)
        del arguments["diagonal_offset"]
        out, lse = fa4.flash_attn_varlen_func(**arguments, min_seqlen_k=0, return_lse=True)
        assert lse.shape == (4, len(out))
        assert_sequences(inputs, out, lse)
        assert_vjp_sequences(inputs, out, lse, [arguments[name] for name in "qkv"])
        alone, nothing = fa4.flash_attn_varlen_func(**arguments)
        assert torch.equal(alone, out)
        assert nothing is None


def test_bounds_on_dense_sides_have_no_effect() -> None:
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
    *("aux_scalars", "block_sparse_tensors", "block_sparse_tensors_bwd", "gather_bwd_recompute_p"),
    "gather_bwd_token_chunk",
)


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_arguments_are_refused_by_name(name: str) -> None:
    tensors = dense("cpu", torch.float32, grad=False)
    for function in (fa4.flash_attn_func, fa4.flash_attn_varlen_func):
        if name in inspect.signature(function).parameters:
            with pytest.raises(UnsupportedError, match=f"{name}(: cuflash does not| belongs to functions)"):
                function(*tensors, **{name: True if name == "gather_bwd_recompute_p" else tensors[0]})


def test_invalid_arguments_are_refused() -> None:
    tensors = dense("cpu", torch.float32, grad=False)
    for changes, words in (
        ({"window_size": (5, -1.0)}, r"window_size right=-1\.0"),
        ({"window_size": torch.tensor([5, 1, 1])}, r"window_size is a tensor of shape \(3,\) on cpu; give a tuple"),
        ({"window_size": 5}, "window_size=5 is not a pair"),
        ({"window_size": (1.5, 0)}, "window_size left=1.5"),
        ({"causal": 1}, "causal=1"),
        ({"pack_gqa": 2}, "pack_gqa=2"),
        ({"return_lse": None}, "return_lse=None"),
    ):
        with pytest.raises(ProblemError, match=words):
            fa4.flash_attn_func(*tensors, **changes)
    for changes, words in (
        ({"seqused_k": torch.ones(2, dtype=torch.int64)}, r"seqused_k has dtype torch\.int64"),
        ({"seqlen_k_per_split": 0}, "seqlen_k_per_split=0"),
        ({"seqlen_k_per_split": 64.0}, "seqlen_k_per_split=64"),
        ({"disable_scheduler_metadata": None}, "disable_scheduler_metadata=None"),
    ):
        with pytest.raises(ProblemError, match=words):
            fa4.flash_attn_varlen_func(*tensors, **changes)


def test_bounds_may_be_tensors(device: str) -> None:
    arguments = arguments_of(varlen_arrays(PACKED), device)
    del arguments["diagonal_offset"]
    expected, _ = fa4.flash_attn_varlen_func(**arguments)
    for place in ("cpu", device):  # one in host memory is read, one on a GPU is not
        names = ("max_seqlen_q", "max_seqlen_k", "min_seqlen_k")
        bounds = {name: torch.tensor(arguments.get(name, 0), device=place) for name in names}
        out, _ = fa4.flash_attn_varlen_func(**arguments | bounds)
        torch.testing.assert_close(out, expected)


def test_schedules_are_passed_back_and_split_sizes_repeat_bits(device: str) -> None:
    inputs = varlen_arrays(replace(PACKED, keys=(700, 3, 0, 290)))
    arguments = arguments_of(inputs, device)
    del arguments["diagonal_offset"]
    lengths = {"cu_seqlens_q": arguments["cu_seqlens_q"], "cu_seqlens_k": arguments["cu_seqlens_k"]}
    schedule = fa4.get_scheduler_metadata(17, 700, 4, 2, 16, 8, causal=True, **lengths, seqlen_k_per_split=128)
    assert schedule._fields[:2] == ("num_m_blocks_ptr", "num_splits_dynamic_ptr")
    hints = {"scheduler_metadata": schedule, "num_splits": 8, "seqlen_k_per_split": 100}
    out, lse = fa4.flash_attn_varlen_func(**arguments, **hints, return_lse=True)
    assert_sequences(inputs, out, lse)
    plain, _ = fa4.flash_attn_varlen_func(**arguments, disable_scheduler_metadata=True)
    torch.testing.assert_close(plain, out)
    (begin_q, end_q, *_), (begin_k, end_k, *_) = (lengths[f"cu_seqlens_{side}"].tolist() for side in "qk")
    keys = slice(begin_k, end_k)
    alone = arguments["q"][begin_q:end_q], arguments["k"][keys], arguments["v"][keys]  # the first sequence
    assert torch.equal(out[begin_q:end_q], attention(*alone, causal=True, split_size=128))
    with pytest.raises(ProblemError, match="no lengths were given; give at least one of cu_seqlens_q"):
        fa4.get_scheduler_metadata(17, 700, 4, 2, 16, 8)
