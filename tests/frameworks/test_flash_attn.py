"""The interfaces of flash-attn 2 and 3: signatures, results and refusals."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tensors import assert_results, assert_vjp, random_qkv

import cuflash
from cuflash.errors import ProblemError, UnsupportedError
from cuflash.frameworks.flash_attn import v2 as fa2
from cuflash.frameworks.flash_attn import v3 as fa3

# Names and defaults as the packages have them: flash-attn 2.8.3, and hopper/ of its repository.
FA2 = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
STATE = "dout, q, k, v, out, softmax_lse, dq, dk, dv"
PRIVATE = "dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes"
DESCALE = "q_descale=None, k_descale=None, v_descale=None"
AUX = "s_aux=None"  # of vLLM's copy
SIGNATURES = {
    (fa2, "flash_attn_func"): f"q, k, v, {FA2}",
    (fa2, "flash_attn_kvpacked_func"): f"q, kv, {FA2}",
    (fa2, "flash_attn_qkvpacked_func"): f"qkv, {FA2}",
    (fa2, "flash_attn_varlen_func"): f"q, k, v, {LENGTHS}, {FA2}, block_table=None",
    (fa2, "flash_attn_varlen_kvpacked_func"): f"q, kv, {LENGTHS}, {FA2}",
    (fa2, "flash_attn_varlen_qkvpacked_func"): f"qkv, cu_seqlens, max_seqlen, {FA2}",
    (fa2, "flash_attn_with_kvcache"): "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
    "return_softmax_lse=False",
    (fa2, "_flash_attn_forward"): f"q, k, v, {PRIVATE}, return_softmax",
    (fa2, "_flash_attn_backward"): f"{STATE}, {PRIVATE}, deterministic, rng_state=None",
    (fa2, "_flash_attn_varlen_forward"): f"q, k, v, {LENGTHS}, dropout_p, softmax_scale, causal, window_size_left=-1, "
    "window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, "
    "seqused_k=None, zero_tensors=False, num_splits=0",
    (fa2, "_flash_attn_varlen_backward"): f"{STATE}, {LENGTHS}, {PRIVATE}, deterministic, rng_state=None, "
    "zero_tensors=False",
    (fa3, "flash_attn_func"): f"q, k, v, softmax_scale=None, causal=False, qv=None, {DESCALE}, window_size=(-1, -1), "
    "attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, "
    f"return_attn_probs=False, {AUX}",
    (fa3, "flash_attn_qkvpacked_func"): f"qkv, softmax_scale=None, causal=False, {DESCALE}, window_size=(-1, -1), "
    "attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False",
    (fa3, "flash_attn_varlen_func"): f"q, k, v, {LENGTHS}, seqused_q=None, seqused_k=None, softmax_scale=None, "
    f"causal=False, qv=None, {DESCALE}, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, "
    f"pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False, {AUX}",
    (fa3, "flash_attn_with_kvcache"): "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, "
    f"cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, {DESCALE}, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, "
    f"num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False, {AUX}",
    (fa3, "get_scheduler_metadata"): "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, "
    "cache_seqlens, qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
    "cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, "
    "has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0",
    (fa3, "_flash_attn_forward"): "q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, "
    "cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, "
    "page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, "
    f"{DESCALE}, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0, "
    "softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0",
    (fa3, "_flash_attn_backward"): "dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, "
    "sequed_q=None, sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, "
    "softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0, "
    "deterministic=False, sm_margin=0",
    (fa3, "flash_attn_combine"): "out_partial, lse_partial, out=None, out_dtype=None",
}
MASKS = [
    {},
    {"causal": True},
    {"window_size": (3, 2)},
    {"window_size": (4, -1)},
    {"causal": True, "window_size": (3, 5)},
    {"causal": True, "softcap": 0.5, "softmax_scale": 0.3},
]


def tensors(seqlen_q: int = 9, seqlen_k: int = 13) -> list[Any]:
    """Returns q, k and v with 4 heads of q and 2 of k, float32, that require grad."""
    return list(random_qkv("cpu", torch.float32, lengths=(seqlen_q, seqlen_k)))


@pytest.mark.parametrize(("module", "name"), SIGNATURES, ids=lambda x: getattr(x, "__name__", x).split(".")[-1])
def test_signatures_equal_flash_attns(module: Any, name: str) -> None:
    parameters = inspect.signature(getattr(module, name)).parameters.values()
    bare = (parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters)
    assert ", ".join(map(str, bare)) == SIGNATURES[module, name]


@pytest.mark.parametrize("module", [fa2, fa3], ids=["fa2", "fa3"])
@pytest.mark.parametrize("arguments", MASKS, ids=str)
def test_dense_calls_equal_attention(module: Any, arguments: dict[str, Any]) -> None:
    inputs = tensors()
    out, lse, *rest = module.flash_attn_func(*inputs, return_attn_probs=True, **arguments)
    assert (out.shape, out.dtype) == ((2, 9, 4, 16), torch.float32)
    assert (lse.shape, lse.dtype) == ((2, 4, 9), torch.float32)
    assert [(x.shape, x.dtype) for x in rest] == [((0,), torch.float32)] * (module is fa2)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    assert_results(inputs, out, lse, **arguments)
    assert_vjp(torch.autograd.grad(out, inputs, dout), inputs, dout, **arguments)
    alone = module.flash_attn_func(*inputs, deterministic=True, **arguments)
    assert torch.equal(alone, out)


def test_causal_is_bottom_right_and_rows_without_keys_are_zero() -> None:
    q, k, v = tensors(seqlen_q=5, seqlen_k=2)
    out, lse, _ = fa2.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert not out[:, :3].any()
    assert torch.equal(lse[..., :3], torch.full((2, 4, 3), -torch.inf))
    assert torch.equal(out[:, 3], v[:, 0].repeat_interleave(2, 1))
    assert lse[..., 3:].isfinite().all()


def test_positional_arguments_follow_each_versions_order() -> None:
    inputs = tensors()
    expected = cuflash.forward(*(x.detach() for x in inputs), softmax_scale=0.2, causal=True, window_size=(3, 0))
    assert torch.equal(fa2.flash_attn_func(*inputs, 0.0, 0.2, True, (3, 0)), expected)
    assert torch.equal(fa3.flash_attn_func(*inputs, 0.2, True, None, None, None, None, (3, 0)), expected)
    capped = fa2.flash_attn_func(*inputs, softcap=0.7)
    assert torch.equal(fa2.flash_attn_func(*inputs, 0.0, None, False, (-1, -1), 0.7), capped)
    assert not torch.equal(fa2.flash_attn_func(*inputs, softcap=-1.0), capped)
    assert torch.equal(fa2.flash_attn_func(*inputs, softcap=-1.0), fa3.flash_attn_func(*inputs))


@pytest.mark.parametrize("arguments", [(0.25, True), (None, True), (1.0,), (True,), (None,), (-0.1,)], ids=str)
def test_calls_in_the_order_of_version_3_are_refused_by_version_2(arguments: tuple[Any, ...]) -> None:
    for function, inputs in ((fa2.flash_attn_func, tensors()), (fa2.flash_attn_qkvpacked_func, [packed(3)])):
        with pytest.raises((ProblemError, UnsupportedError), match="flash_attn_3_interface"):
            function(*inputs, *arguments)


@pytest.mark.parametrize("arguments", [(0.0, None, True), (0.0, 0.25, True), (0.0,), (0,), (0.1, None, True)], ids=str)
def test_calls_in_the_order_of_version_2_are_refused_by_version_3(arguments: tuple[Any, ...]) -> None:
    for function, inputs in ((fa3.flash_attn_func, tensors()), (fa3.flash_attn_qkvpacked_func, [packed(3)])):
        with pytest.raises((ProblemError, UnsupportedError)) as caught:
            function(*inputs, *arguments)
        if arguments[0] == 0:
            assert "cuflash.frameworks.flash_attn_interface" in str(caught.value)


def packed(count: int) -> Any:
    """Returns (batch, seqlen, count, heads, head_dim) that requires grad."""
    return torch.randn(2, 7, count, 4, 16, generator=torch.Generator().manual_seed(2)).requires_grad_()


@pytest.mark.parametrize("module", [fa2, fa3], ids=["fa2", "fa3"])
def test_packed_tensors_equal_separate_tensors(module: Any) -> None:
    qkv, weight = packed(3), torch.linspace(-1, 1, 16)
    result = module.flash_attn_qkvpacked_func(qkv, causal=True, window_size=(2, 0), return_attn_probs=True)
    expected = module.flash_attn_func(*qkv.unbind(2), causal=True, window_size=(2, 0), return_attn_probs=True)
    assert len(result) == len(expected) == (3 if module is fa2 else 2)
    assert all(map(torch.equal, result, expected))
    gradients = [torch.autograd.grad((out[0] * weight).sum(), qkv)[0] for out in (result, expected)]
    assert gradients[0].shape == qkv.shape
    assert torch.equal(*gradients)
    with pytest.raises(ProblemError, match=r"qkv has shape \(2, 7, 2, 4, 16\)"):
        module.flash_attn_qkvpacked_func(packed(2))


def test_packed_keys_and_values_may_have_fewer_heads() -> None:
    q, k, v = tensors()
    kv = torch.stack((k, v), 2)
    assert torch.equal(fa2.flash_attn_kvpacked_func(q, kv, causal=True), fa2.flash_attn_func(q, k, v, causal=True))
    with pytest.raises(ProblemError, match="kv has shape"):
        fa2.flash_attn_kvpacked_func(q, k)


def test_version_3_packs_heads_of_grouped_queries_too() -> None:
    q, k, v = tensors(seqlen_q=13)
    qkv = torch.cat((q, k, v), 2)
    assert torch.equal(fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=4), fa3.flash_attn_func(q, k, v))
    for heads in (None, 0, 3, 8, 9):
        with pytest.raises(ProblemError, match="num_heads_q"):
            fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=heads)


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (fa3, {"qv": torch.ones(1)}),
        *((fa3, {f"{x}_descale": torch.ones(1)}) for x in "qkv"),
    ],
    ids=lambda x: "_".join(x) if isinstance(x, dict) else x.__name__.split(".")[-1],
)
def test_unsupported_arguments_are_refused_by_name(module: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=next(iter(arguments))):
        module.flash_attn_func(*tensors(), **arguments)


def test_all_functions_have_a_signature_of_the_packages() -> None:
    for module in (fa2, fa3):
        assert set(module.__all__) == {name for (home, name) in SIGNATURES if home is module and name[0] != "_"}
    for name in ("forward", "backward", "varlen_forward", "varlen_backward"):
        assert getattr(fa2, f"_wrapped_flash_attn_{name}") is getattr(fa2, f"_flash_attn_{name}")


@pytest.mark.parametrize("hints", [{"num_splits": 3}, {"pack_gqa": True}, {"sm_margin": 8}, {"num_splits": 0}], ids=str)
def test_scheduling_arguments_change_no_result(hints: dict[str, Any]) -> None:
    inputs = tensors()
    assert torch.equal(fa3.flash_attn_func(*inputs, **hints), fa3.flash_attn_func(*inputs))


def test_windows_may_be_tensors_in_host_memory() -> None:
    inputs = tensors()
    for function in (fa2.flash_attn_func, fa3.flash_attn_func):
        expected = function(*inputs, window_size=(3, 1))
        for window in (
            *((torch.tensor(3), 1), [torch.tensor(3), torch.tensor(1)], [3, 1]),
            *(torch.tensor([3, 1]), torch.tensor([3, 1], dtype=torch.int32), np.array([3, 1])),
        ):
            assert torch.equal(function(*inputs, window_size=window), expected)
        for wrong in (torch.tensor([3, 1, 2]), torch.tensor(3), torch.zeros(2, 1), torch.empty(2, device="meta")):
            with pytest.raises(ProblemError, match=r"window_size is a tensor of shape .*; give a tuple, or"):
                function(*inputs, window_size=wrong)
        with pytest.raises(ProblemError, match=r"window_size left=3\.5"):
            function(*inputs, window_size=torch.tensor([3.5, 1]))
        with pytest.raises(ProblemError, match=r"window_size is a tensor of shape \(1,\)"):
            function(*inputs, window_size=(torch.tensor([3]), 1))
        with pytest.raises(ProblemError, match="window_size"):
            function(*inputs, window_size=(torch.tensor(3.5), 1))


def test_other_ranks_and_settings_are_refused() -> None:
    q, k, v = tensors()
    with pytest.raises(ProblemError, match=r"k has shape \(13, 2, 16\)"):
        fa2.flash_attn_func(q, k[0], v)
    with pytest.raises(ProblemError, match="softmax_scale"):
        fa2.flash_attn_func(q, k, v, softmax_scale=True)
    with pytest.raises(ProblemError, match="causal"):
        fa2.flash_attn_func(q, k, v, causal=None)
    two = torch.ones(2)
    for name, wrong in (
        *(("num_splits", -1), ("pack_gqa", 1), ("sm_margin", 0.5)),
        *(("softmax_scale", two), ("attention_chunk", two), ("attention_chunk", False), ("softmax_scale", np.ones(2))),
    ):
        with pytest.raises(ProblemError, match=name):
            fa3.flash_attn_func(q, k, v, **{name: wrong})
    for module in (fa2, fa3):
        with pytest.raises(ProblemError, match="k is a type; give a torch tensor"):
            module.flash_attn_func(q, np.ndarray, v)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("module", [fa2, fa3], ids=["fa2", "fa3"])
def test_on_a_gpu_in_half_precision(module: Any, dtype: str) -> None:
    half = getattr(torch, dtype)
    inputs = [x.detach().to("cuda", half).requires_grad_() for x in tensors(100, 300)]
    arguments = {"causal": True, "window_size": (150, 0)}
    out, lse, *_ = module.flash_attn_func(*inputs, return_attn_probs=True, **arguments)
    dout = torch.ones_like(out)
    assert_results(inputs, out, lse, **arguments)
    assert_vjp(torch.autograd.grad(out, inputs, dout), inputs, dout, **arguments)
    part = torch.stack([out.detach().float()] * 2), torch.stack([lse.detach().transpose(1, 2)] * 2)
    both, _ = fa3.flash_attn_combine(*part, out_dtype=half)
    assert torch.equal(both, out)
