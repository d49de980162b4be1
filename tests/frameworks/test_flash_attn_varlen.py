"""Packed sequences in the interfaces of flash-attn 2 and 3: results, gradients and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tensors import arguments_of, assert_sequences, assert_vjp_sequences

from cuflash import ProblemError, UnsupportedError
from cuflash.frameworks.flash_attn import v2 as fa2
from cuflash.frameworks.flash_attn import v3 as fa3
from cuflash.testing.sequences import Sequences, VarlenArrays, varlen_arrays

PACKED = Sequences("packed", (5, 0, 1, 17), (9, 3, 0, 17), causal=True, dims=(16, 24), bounded=True, dtype="float32")
PAGED = replace(PACKED, name="paged", place_k="paged", used_k=True, bounded=False)
USED = replace(PACKED, name="used", used_q=True, used_k=True, spare_q=(1, 4, 0, 2), spare_k=(0, 3, 2, 1))
CASES = [
    PACKED,
    replace(PACKED, name="window", window_size=(4, 2), causal=False, dtype="bfloat16"),
    replace(PACKED, name="capped", softcap=2.0, softmax_scale=0.3),
    replace(PACKED, name="one_head", heads=(2, 2), gaps=(0, 0)),
]
BOTH = pytest.mark.parametrize("module", [fa2, fa3], ids=["fa2", "fa3"])


def each(cases: list[Sequences]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def called(inputs: VarlenArrays, device: str) -> dict[str, Any]:
    """Returns the arguments of `flash_attn_varlen_func`; tensors require grad where supported."""
    arguments = arguments_of(inputs, device, grad=inputs.sequences.has_gradients)
    arguments.pop("diagonal_offset")
    lengths = {"max_seqlen_q": max(inputs.sequences.queries), "max_seqlen_k": max(inputs.sequences.keys)}
    return arguments | lengths


def bounds_of(lengths: tuple[int, ...], device: str) -> Any:
    """Returns cu_seqlens of sequences without gaps."""
    return torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)


@BOTH
@each(CASES)
def test_results_and_gradients(module: Any, case: Sequences, device: str) -> None:
    inputs = varlen_arrays(case)
    arguments = called(inputs, device)
    out, lse, *rest = module.flash_attn_varlen_func(**arguments, return_attn_probs=True)
    assert out.shape == (*arguments["q"].shape[:2], 24)
    assert (lse.shape, lse.dtype) == ((case.heads[0], len(out)), torch.float32)
    assert [x.numel() for x in rest] == [0] * (module is fa2)
    assert_sequences(inputs, out, lse)
    assert_vjp_sequences(inputs, out, lse, [arguments[name] for name in "qkv"])
    assert torch.equal(module.flash_attn_varlen_func(**arguments, deterministic=True), out)


@each([PACKED, USED])
def test_version_3_takes_used_lengths(case: Sequences, device: str) -> None:
    inputs = varlen_arrays(case)
    arguments = called(inputs, device)
    out, lse = fa3.flash_attn_varlen_func(**arguments, num_splits=2, pack_gqa=True, return_attn_probs=True)
    assert_sequences(inputs, out, lse)
    assert_vjp_sequences(inputs, out, lse, [arguments[name] for name in "qkv"])


def test_version_3_takes_rectangles_beside_packed_sequences(device: str) -> None:
    case = replace(PACKED, queries=(3, 1, 0), keys=(20, 7, 5), place_k="rectangle", used_k=True, bounded=False)
    inputs = varlen_arrays(case)
    out, lse = fa3.flash_attn_varlen_func(**called(inputs, device), cu_seqlens_k=None, return_attn_probs=True)
    assert_sequences(inputs, out, lse)


def test_version_2_reads_lengths_of_pages_from_cu_seqlens(device: str) -> None:
    inputs = varlen_arrays(PAGED)
    arguments = called(inputs, device)
    arguments["block_table"] = arguments.pop("page_table")
    del arguments["seqused_k"]
    arguments["cu_seqlens_k"] = bounds_of(inputs.sequences.keys, device)
    out, lse, _ = fa2.flash_attn_varlen_func(**arguments, return_attn_probs=True)
    assert_sequences(inputs, out, lse)
    wanting = fa2.flash_attn_varlen_func(**arguments | {"q": arguments["q"].requires_grad_()})
    assert torch.equal(wanting, out)
    with pytest.raises(UnsupportedError, match="page_table was given, but cached keys have no gradients"):
        wanting.sum().backward()


def test_positional_arguments_follow_each_versions_order(device: str) -> None:
    case = replace(PACKED, causal=True, window_size=(3, 0), softmax_scale=0.2)
    inputs = varlen_arrays(case)
    arguments = called(inputs, device)
    names = "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
    leading = [arguments[name] for name in names]
    out, lse, _ = fa2.flash_attn_varlen_func(*leading, 0.0, 0.2, True, (3, 0), 0.0, None, False, True)
    assert_sequences(inputs, out, lse)
    of_3 = [*leading, None, None, 0.2, True, None, None, None, None, (3, 0), 0, 0.0, 1, None, False, 0, True]
    assert all(map(torch.equal, fa3.flash_attn_varlen_func(*of_3), (out, lse)))
    with pytest.raises(ProblemError, match="flash_attn_3_interface"):
        fa2.flash_attn_varlen_func(*leading, None, None, 0.2, True)
    with pytest.raises(ProblemError, match=r"cuflash.frameworks.flash_attn_interface: it has the order"):
        fa3.flash_attn_varlen_func(*leading, 0.0, 0.2, True)


def test_packed_tensors_equal_separate_tensors(device: str) -> None:
    bounds, weight = bounds_of((5, 0, 9), device), torch.linspace(-1, 1, 16, device=device)
    qkv = torch.randn(14, 3, 4, 16, device=device, requires_grad=True)
    q, k, v = qkv.unbind(1)
    lengths = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": 9, "max_seqlen_k": 9}
    masks = {"causal": True, "window_size": (2, 0), "return_attn_probs": True}
    expected = fa2.flash_attn_varlen_func(q, k, v, **lengths, **masks)
    for results in (
        fa2.flash_attn_varlen_qkvpacked_func(qkv, bounds, 9, **masks),
        fa2.flash_attn_varlen_kvpacked_func(q, qkv[:, 1:], **lengths, **masks),
    ):
        assert len(results) == 3
        assert all(map(torch.equal, results, expected))
        gradients = [torch.autograd.grad((x[0] * weight).sum(), qkv, retain_graph=True)[0] for x in (results, expected)]
        assert torch.allclose(*gradients, atol=1e-6)
    with pytest.raises(ProblemError, match=r"qkv has shape \(14, 2, 4, 16\); give \(total, 3, heads, head_dim\)"):
        fa2.flash_attn_varlen_qkvpacked_func(qkv[:, :2], bounds, 9)
    with pytest.raises(ProblemError, match=r"kv has shape"):
        fa2.flash_attn_varlen_kvpacked_func(q, k, **lengths)


@BOTH
def test_bounds_and_windows_may_be_tensors_in_host_memory(module: Any) -> None:
    arguments = called(varlen_arrays(replace(PACKED, window_size=(4, 0))), "cpu")
    expected = module.flash_attn_varlen_func(**arguments)
    tensors = {name: torch.tensor(arguments[name]) for name in ("max_seqlen_q", "max_seqlen_k")}
    window = torch.tensor(4), torch.tensor(0)
    for each in (window, torch.stack(window)):
        assert torch.equal(module.flash_attn_varlen_func(**arguments | tensors | {"window_size": each}), expected)
    none = {"max_seqlen_q": None, "max_seqlen_k": None}
    assert torch.equal(module.flash_attn_varlen_func(**arguments | none), expected)


def test_compiled_is_eager() -> None:
    torch._dynamo.reset()
    arguments = called(varlen_arrays(PACKED).filled(0.0), "cpu")
    for module in (fa2, fa3):
        compiled = torch.compile(module.flash_attn_varlen_func, fullgraph=True, backend="aot_eager")
        result, expected = compiled(**arguments), module.flash_attn_varlen_func(**arguments)
        assert torch.equal(result, expected)
        slopes = (torch.autograd.grad(x.square().sum(), arguments["k"])[0] for x in (result, expected))
        assert torch.equal(*slopes)


@BOTH
def test_invalid_arguments_are_refused(module: Any) -> None:
    arguments = called(varlen_arrays(PACKED).filled(0.0), "cpu")
    for changes, words in (
        ({"q": arguments["q"][None]}, r"q has shape \(1, \d+, 4, 16\); give \(total, heads, head_dim\)"),
        ({"cu_seqlens_q": arguments["cu_seqlens_q"].long()}, "cu_seqlens_q has dtype torch.int64; give torch.int32"),
        ({"cu_seqlens_k": [0, 1]}, "cu_seqlens_k is a list"),
        ({"cu_seqlens_k": arguments["cu_seqlens_k"][1:]}, "cu_seqlens_k is for 3 sequences"),
        ({"max_seqlen_q": torch.tensor([3])}, "max_seqlen_q is a tensor of shape"),
        ({"max_seqlen_k": -1}, "max_seqlen_k=-1 is negative"),
        ({"return_attn_probs": 1}, "return_attn_probs=1"),
    ):
        with pytest.raises(ProblemError, match=words):
            module.flash_attn_varlen_func(**arguments | changes)


@pytest.mark.parametrize(
    ("module", "changes"),
    [
        *((fa3, {name: torch.ones(1)}) for name in ("qv", "q_descale", "k_descale", "v_descale")),
    ],
    ids=lambda x: "_".join(x) if isinstance(x, dict) else x.__name__.split(".")[-1],
)
def test_unsupported_arguments_are_refused_by_name(module: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=next(iter(changes))):
        module.flash_attn_varlen_func(**called(varlen_arrays(PACKED), "cpu") | changes)


def test_version_2_needs_both_cu_seqlens() -> None:
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        with pytest.raises(ProblemError, match=f"{name} is a NoneType"):
            fa2.flash_attn_varlen_func(**called(varlen_arrays(PACKED), "cpu") | {name: None})
