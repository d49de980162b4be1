"""`scaled_dot_product_attention` on cuflash: where it applies, where it is PyTorch's own, and back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from cuflash import UnsupportedError

torch = pytest.importorskip("torch")
from torch.nn.functional import scaled_dot_product_attention as attend

if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
    pytest.skip("needs PyTorch 2.10", allow_module_level=True)
import tensors as of_torch
from tensors import assert_equal, assert_pulled, assert_results

from cuflash.frameworks import sdpa

FLASH = torch.nn.attention.SDPBackend.FLASH_ATTENTION
OPS = torch.ops.aten


def made(device: str, dtype: Any, *, heads: tuple[int, int] = (4, 4), seqlen_k: int = 40, bhsd: bool = False) -> Any:
    """q, k and v (batch, heads, seqlen, head_dim), in memory by seqlen, or as they are named."""
    dense = of_torch.made(device, dtype, heads=heads, lengths=(40, seqlen_k), dim=64, grad=False)
    return tuple((x.contiguous() if bhsd else x).requires_grad_() for x in (x.transpose(1, 2) for x in dense))


def results(tensors: Any, backend: Any = None, **options: Any) -> list[Any]:
    """out and the gradients of a loss, by the backend of PyTorch's choice or a given one."""
    with contextlib.nullcontext() if backend is None else torch.nn.attention.sdpa_kernel(backend):
        out = attend(*tensors, **options)
    return [out, *torch.autograd.grad(out.double().square().sum(), tensors)]


def assert_right(found: Any, tensors: Any, dout: Any, **options: Any) -> None:
    """Holds out and the gradients of `(dout * out).sum()` against float64; heads stand before seqlen in all of them."""
    (out, *gradients), (q, k, v) = ([x.transpose(1, 2) for x in each] for each in (found, tensors))
    assert_results((q, k, v), out, **options)
    assert_pulled(gradients, (q, k, v), dout.transpose(1, 2), **options)


class Kernel:
    """PyTorch's own, as far as its being called goes."""

    def call_boxed(self, keyset: Any, *arguments: Any, **more: Any) -> Any:
        raise NotImplementedError("PyTorch's own")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The ops of the flash backend, which PyTorch has for GPUs alone, on the CPU."""
    monkeypatch.setattr(torch.library, "get_kernel", lambda name, key: Kernel())
    override = sdpa.Override("CPU")
    yield
    override.remove()
    with pytest.raises(NotImplementedError, match="CPU"):
        OPS._scaled_dot_product_flash_attention(*made("cpu", torch.float16))


@pytest.mark.parametrize("bhsd", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("on_cpu")
def test_the_ops_have_the_results_of_attention(causal: bool, bhsd: bool) -> None:
    tensors = made("cpu", torch.float64, bhsd=bhsd)
    out, lse, _, _, max_q, max_k, *state, mask = OPS._scaled_dot_product_flash_attention(
        *(x.detach() for x in tensors), is_causal=causal, scale=0.2
    )
    assert (max_q, max_k, mask.numel(), lse.shape) == (40, 40, 0, (2, 4, 40))
    assert out.stride() == torch.empty_like(tensors[0]).stride()  # of PyTorch's fake kernel
    found = OPS._scaled_dot_product_flash_attention_backward(
        2 * out, *(x.detach() for x in tensors), out, lse, None, None, max_q, max_k, 0.0, causal, *state, scale=0.2
    )
    assert_right((out, *found), tensors, 2 * out, causal=causal, softmax_scale=0.2)
    assert [x.stride() for x in found] == [x.stride() for x in tensors]


@pytest.mark.usefixtures("on_cpu")
def test_causal_is_aligned_bottom_right_where_lengths_differ() -> None:
    """As `causal_lower_right` means it, which alone comes here then."""
    q, k, v = (x.detach() for x in made("cpu", torch.float64, seqlen_k=52))
    out = OPS._scaled_dot_product_flash_attention(q, k, v, is_causal=True)[0]
    assert_results([x.transpose(1, 2) for x in (q, k, v)], out.transpose(1, 2), causal=True, diagonal_offset=52 - 40)


@pytest.mark.usefixtures("on_cpu")
def test_dropout_is_pytorchs_own() -> None:
    q, k, v = (x.detach() for x in made("cpu", torch.float16))
    with pytest.raises(NotImplementedError, match="PyTorch's own"):
        OPS._scaled_dot_product_flash_attention(q, k, v, dropout_p=0.1)


def test_an_older_pytorch_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
    with pytest.raises(UnsupportedError, match=r"2\.10 or later.*frameworks\.torch\.attention"):
        sdpa.activate()


def test_it_is_registered_and_without_a_gpu_not_active() -> None:
    assert "cuflash" in torch.nn.attention.list_flash_attention_impls()
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="sees no GPU"):
            torch.nn.attention.activate_flash_attention_impl("cuflash")
        assert torch.nn.attention.current_flash_attention_impl() is None


def test_the_flash_backend_becomes_the_first_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    own = torch._C._get_sdp_priority_order()
    cudnn_first = [3, 1, 2, 0, 4]
    torch._C._set_sdp_priority_order(cudnn_first)
    assert sdpa._prefer_flash() == cudnn_first
    assert torch._C._get_sdp_priority_order() == [1, 3, 2, 0, 4]
    torch._C._set_sdp_priority_order(own)


@pytest.fixture
def active() -> Iterator[None]:
    attend(*made("cuda", torch.float16))
    own = torch._C._get_sdp_priority_order()
    sdpa.activate()
    yield
    sdpa.restore()
    assert torch.nn.attention.current_flash_attention_impl() is None
    assert torch._C._get_sdp_priority_order() == own


@pytest.mark.gpu
@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "options"),
    [((4, 4), {}), ((4, 4), {"is_causal": True}), ((4, 2), {"is_causal": True, "enable_gqa": True, "scale": 0.3})],
)
def test_attention_of_pytorch_runs_here(heads: tuple[int, int], options: Any, dtype: Any) -> None:
    tensors = made("cuda", dtype, heads=heads)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        found = results(tensors, **options)
    names = {event.key for event in profile.key_averages()}
    assert any(name.startswith("forward_") for name in names)
    assert any(name.startswith("backward_") for name in names)
    asked = {"causal": options.get("is_causal", False), "softmax_scale": options.get("scale")}
    assert_right(found, tensors, 2 * found[0], **asked)


@pytest.mark.gpu
@pytest.mark.usefixtures("active")
def test_compiled_with_operands_of_any_strides() -> None:
    compiled = torch.compile(lambda *x: attend(*x, is_causal=True), fullgraph=True)
    for bhsd in (False, True):
        tensors = made("cuda", torch.bfloat16, bhsd=bhsd)
        out = compiled(*tensors)
        found = torch.autograd.grad(out.sum(), tensors)
        assert_right((out, *found), tensors, torch.ones_like(out), causal=True)


@pytest.mark.gpu
def test_what_does_not_apply_and_what_comes_after_are_pytorchs_own() -> None:
    tensors = made("cuda", torch.float16)

    def dropped() -> list[Any]:
        torch.manual_seed(0)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            return results(tensors, FLASH, dropout_p=0.2)
        finally:
            torch.use_deterministic_algorithms(False)

    own, own_dropped = results(tensors, FLASH, is_causal=True), dropped()
    sdpa.activate()
    assert_equal(dropped(), own_dropped)
    sdpa.restore()
    assert torch.equal(results(tensors, FLASH, is_causal=True)[0], own[0])
