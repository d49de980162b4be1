"""`scaled_dot_product_attention` on cuflash: calls that run on it, calls that PyTorch computes, and `restore`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from cuflash import UnsupportedError

torch = pytest.importorskip("torch")
from torch.nn.functional import scaled_dot_product_attention as attend

if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
    pytest.skip("needs PyTorch 2.10", allow_module_level=True)
import tensors as of_torch
from eager_torch import assert_close, eager
from tensors import assert_equal, assert_results, assert_vjp

from cuflash.frameworks.torch import sdpa

FLASH = torch.nn.attention.SDPBackend.FLASH_ATTENTION
OPS = torch.ops.aten


def qkv(device: str, dtype: Any, *, heads: tuple[int, int] = (4, 4), seqlen_k: int = 40, bhsd: bool = False) -> Any:
    """Returns q, k and v (batch, heads, seqlen, head_dim), in memory by seqlen, or in the order of the axes."""
    dense = of_torch.random_qkv(device, dtype, heads=heads, lengths=(40, seqlen_k), dim=64, grad=False)
    return tuple((x.contiguous() if bhsd else x).requires_grad_() for x in (x.transpose(1, 2) for x in dense))


def results(tensors: Any, backend: Any = None, **options: Any) -> list[Any]:
    """Returns out and the gradients of a loss, by PyTorch's choice of backend or a given one."""
    with contextlib.nullcontext() if backend is None else torch.nn.attention.sdpa_kernel(backend):
        out = attend(*tensors, **options)
    return [out, *torch.autograd.grad(out.double().square().sum(), tensors)]


def assert_right(out_and_grads: Any, tensors: Any, dout: Any, **options: Any) -> None:
    """Compares out and the gradients of `(dout * out).sum()` to float64; heads are axis 1."""
    (out, *gradients), (q, k, v) = ([x.transpose(1, 2) for x in each] for each in (out_and_grads, tensors))
    assert_results((q, k, v), out, **options)
    assert_vjp(gradients, (q, k, v), dout.transpose(1, 2), **options)


class Kernel:
    """A stand-in for PyTorch's kernel, which raises when it is called."""

    def call_boxed(self, keyset: Any, *arguments: Any, **more: Any) -> Any:
        raise NotImplementedError("PyTorch's own")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replaces the flash and memory-efficient ops on the CPU, where PyTorch has none."""
    monkeypatch.setattr(torch.library, "get_kernel", lambda name, key: Kernel())
    override = sdpa.Override("CPU")
    yield
    override.remove()
    with pytest.raises(NotImplementedError, match="CPU"):
        OPS._scaled_dot_product_flash_attention(*qkv("cpu", torch.float16))


@pytest.mark.parametrize("bhsd", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("on_cpu")
def test_the_ops_have_the_results_of_attention(causal: bool, bhsd: bool) -> None:
    tensors = qkv("cpu", torch.float64, bhsd=bhsd)
    out, lse, _, _, max_q, max_k, *state, mask = OPS._scaled_dot_product_flash_attention(
        *(x.detach() for x in tensors), is_causal=causal, scale=0.2
    )
    assert (max_q, max_k, mask.numel(), lse.shape) == (40, 40, 0, (2, 4, 40))
    assert out.stride() == torch.empty_like(tensors[0]).stride()  # of PyTorch's fake kernel
    grads = OPS._scaled_dot_product_flash_attention_backward(
        2 * out, *(x.detach() for x in tensors), out, lse, None, None, max_q, max_k, 0.0, causal, *state, scale=0.2
    )
    assert_right((out, *grads), tensors, 2 * out, causal=causal, softmax_scale=0.2)
    assert [x.stride() for x in grads] == [x.stride() for x in tensors]


@pytest.mark.usefixtures("on_cpu")
def test_causal_is_aligned_bottom_right_where_lengths_differ() -> None:
    """As in `causal_lower_right`, the only call of different lengths that comes here."""
    q, k, v = (x.detach() for x in qkv("cpu", torch.float64, seqlen_k=52))
    out = OPS._scaled_dot_product_flash_attention(q, k, v, is_causal=True)[0]
    assert_results([x.transpose(1, 2) for x in (q, k, v)], out.transpose(1, 2), causal=True, diagonal_offset=52 - 40)


@pytest.mark.usefixtures("on_cpu")
def test_weights_are_returned_by_pytorchs_kernel(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = (x.detach() for x in qkv("cpu", torch.float16))
    caplog.set_level(logging.DEBUG, "cuflash")
    sdpa._log_pytorch.cache_clear()
    with pytest.raises(NotImplementedError, match="PyTorch's own"):
        OPS._scaled_dot_product_flash_attention(q, k, v, return_debug_mask=True)
    assert "return_debug_mask=True runs on PyTorch's own kernel" in caplog.text
    with pytest.raises(UnsupportedError, match=r"return_debug_mask=True, dropout_p=0\.1"):
        OPS._scaled_dot_product_flash_attention(q, k, v, dropout_p=0.1, return_debug_mask=True)
    wide = q.new_empty(1, 1, 4, 264)
    with pytest.raises(NotImplementedError, match="PyTorch's own"):
        OPS._scaled_dot_product_efficient_attention(wide, wide, wide, None, True)
    assert "head dim 264" in caplog.text


@pytest.mark.parametrize("dropout_p", [1.0, 0.999999])
@pytest.mark.usefixtures("on_cpu")
def test_dropout_of_all_weights_runs_pytorchs_kernels(dropout_p: float, caplog: pytest.LogCaptureFixture) -> None:
    x = qkv("cpu", torch.float16)[0].detach()
    lse, state, flat = x.new_empty(2, 4, 40), torch.empty(2, dtype=torch.uint64), x[0].transpose(0, 1)
    bounds = torch.tensor([0, 40], dtype=torch.int32)
    of_packed = bounds, bounds, 40, 40, dropout_p, False
    calls = [
        (OPS._scaled_dot_product_flash_attention, (x, x, x, dropout_p)),
        (OPS._scaled_dot_product_flash_attention, (x, x, x, dropout_p, False, True)),
        (OPS._scaled_dot_product_flash_attention_backward,
         (x, x, x, x, x, lse, None, None, 40, 40, dropout_p, False, state, state)),
        (OPS._scaled_dot_product_efficient_attention, (x, x, x, None, True, dropout_p)),
        (OPS._scaled_dot_product_efficient_attention_backward,
         (x, x, x, x, None, x, lse, lse, lse, dropout_p, [True, True, True, False])),
        (OPS._flash_attention_forward, (flat, flat, flat, *of_packed, False)),
        (OPS._flash_attention_backward, (flat, flat, flat, flat, flat, lse, *of_packed, state, state)),
    ]  # fmt: skip
    caplog.set_level(logging.DEBUG, "cuflash")
    sdpa._log_pytorch.cache_clear()
    for op, arguments in calls:
        with pytest.raises(NotImplementedError, match="PyTorch's own"):
            op(*arguments)
    assert f"_flash_attention_backward with dropout_p={dropout_p}, which drops all weights, runs on" in caplog.text


def by_seqlen(tensors: Any) -> list[Any]:
    return [x.transpose(1, 2) for x in tensors]


@pytest.mark.usefixtures("on_cpu")
def test_dropout_of_the_flash_op_drops_the_same_weights_in_both_directions() -> None:
    tensors = qkv("cpu", torch.float64, heads=(4, 2))
    outputs = OPS._scaled_dot_product_flash_attention(*tensors, dropout_p=0.4, is_causal=True)
    out, state = outputs[0], outputs[-3]
    assert (state.shape, state.dtype) == ((2,), torch.uint64)
    seed = state.view(torch.int64)[0].item()
    expected = eager(*by_seqlen(tensors), causal=True, dropout_p=0.4, dropout_seed=seed)[0].transpose(1, 2)
    assert_close(out, expected)
    assert_close(*(torch.autograd.grad(x.sin().sum(), tensors) for x in (out, expected)))
    assert not torch.equal(out, OPS._scaled_dot_product_flash_attention(*tensors, dropout_p=0.4, is_causal=True)[0])


# By name: the shape of the mask before it is expanded, and further arguments of the call.
MASKS: dict[str, tuple[tuple[int, ...] | None, dict[str, Any]]] = {
    "none, top-left": (None, {"is_causal": True}),
    "padding": ((2, 1, 1, 52), {}),
    "whole": ((2, 4, 40, 52), {"scale": 0.3}),
    "of heads": ((1, 4, 40, 52), {"dropout_p": 0.3}),
    "aligned": ((1, 1, 40, 64), {}),
}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("wants_gradient", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, wants_gradient: bool) -> None:
    shape, options = MASKS[name]
    tensors = qkv("cpu", torch.float64, seqlen_k=64 if name == "aligned" else 52)
    mask, expanded = None, None
    if shape is not None:
        mask = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        mask[..., 0, 3:9], mask[-1, -1, -1, :] = -torch.inf, 0.5
        mask.requires_grad_(wants_gradient)
        expanded = mask.expand(2, 4, 40, mask.shape[-1])
    inputs = (*tensors, mask) if mask is not None and wants_gradient else tensors
    out, lse, seed, offset = OPS._scaled_dot_product_efficient_attention(*tensors, expanded, True, **options)
    plain = {"dropout_p": options.get("dropout_p", 0.0), "dropout_seed": seed.item(), "bias": mask}
    causal = {"causal": options.get("is_causal", False), "diagonal_offset": 0}
    scale = options.get("scale", 64**-0.5) / 64**-0.5  # as a factor of q
    expected, of_rows = eager(*by_seqlen((tensors[0] * scale, *tensors[1:])), **plain, **causal)
    assert (lse.shape, seed.shape, offset.shape) == ((2, 4, 64), (), ())
    assert_close((out, lse[..., :40]), (expected.transpose(1, 2), of_rows))
    grads = torch.autograd.grad(out.sin().sum(), inputs)
    assert_close(grads, torch.autograd.grad(expected.sin().sum(), inputs))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("seqlen_k", [52, 64])
@pytest.mark.parametrize("compute_log_sumexp", [False, True])
def test_results_have_the_strides_of_pytorchs_fake_kernels(seqlen_k: int, compute_log_sumexp: bool) -> None:
    q, k, v = (x.detach() for x in qkv("cpu", torch.float16, seqlen_k=seqlen_k, bhsd=True))
    mask = torch.zeros(2, 1, 1, seqlen_k, dtype=torch.float16).expand(2, 4, 40, seqlen_k)

    def layout(tensors: Any) -> list[Any]:
        return [(x.shape, x.stride(), x.dtype) for x in tensors]

    def results(*tensors: Any) -> Any:
        outputs = OPS._scaled_dot_product_efficient_attention(*tensors, compute_log_sumexp)
        if not compute_log_sumexp:
            return outputs
        operands = (outputs[0], *tensors, *outputs)
        return outputs + OPS._scaled_dot_product_efficient_attention_backward(*operands, 0.0, [True] * 4)

    result, expected = layout(results(q, k, v, mask)), layout(results(*(x.to("meta") for x in (q, k, v, mask))))
    assert result == expected


@pytest.mark.usefixtures("on_cpu")
def test_a_mask_without_gradients_has_none() -> None:
    q, k, v = (x.detach() for x in qkv("cpu", torch.float64))
    mask = torch.zeros(2, 4, 40, 40, dtype=torch.float64)
    outputs = OPS._scaled_dot_product_efficient_attention(q, k, v, mask, True)
    backward = OPS._scaled_dot_product_efficient_attention_backward
    assert backward(q, q, k, v, mask, *outputs, 0.0, [True, True, True, False])[3] is None


def masked(*tensors: Any, mask: Any, **options: Any) -> Any:
    """Returns out of the memory-efficient op, called as by PyTorch: no lse if the mask alone requires grad."""
    is_grad = any(x.requires_grad for x in tensors)
    mask = mask.expand(*tensors[0].shape[:3], mask.shape[-1])
    return OPS._scaled_dot_product_efficient_attention(*tensors, mask, is_grad, **options)[0]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.3, "is_causal": True, "scale": 0.3}], ids=["plain", "dropout"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_any_choice_of_operands_and_mask_has_the_gradients_of_all(is_compiled: bool, options: Any) -> None:
    mask = torch.randn(1, 4, 1, 52, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    inputs = (*qkv("cpu", torch.float64, seqlen_k=52), mask)
    torch._dynamo.reset()

    def function(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return masked(q, k, v, mask=mask, **options)

    call = torch.compile(function, backend="aot_eager") if is_compiled else function
    expected: Any = ()
    for chosen in ((0, 1, 2, 3), (3,), (0,), (1,), (2,), (0, 3), (1, 3), (2, 3)):
        leaves = [x.detach().requires_grad_(number in chosen) for number, x in enumerate(inputs)]
        torch.manual_seed(3)
        result = torch.autograd.grad(call(*leaves).square().sum(), [leaves[number] for number in chosen])
        expected = expected or result
        assert_close(result, [expected[number] for number in chosen])


@pytest.mark.usefixtures("on_cpu")
def test_packed_sequences_with_dropout() -> None:
    q, k, v = (x.detach()[0].transpose(0, 1).requires_grad_() for x in qkv("cpu", torch.float64))
    bounds = torch.tensor([0, 40], dtype=torch.int32)
    outputs = OPS._flash_attention_forward(q, k, v, bounds, bounds, 40, 40, 0.4, True, False)
    options = {"causal": True, "dropout_p": 0.4, "dropout_seed": outputs[2].view(torch.int64)[0].item()}
    expected = eager(*(x[None] for x in (q, k, v)), **options)[0][0]
    assert_close(outputs[0], expected)
    dout = expected.detach().cos()
    gradients = OPS._flash_attention_backward(
        dout, *(x.detach() for x in (q, k, v, *outputs[:2])), bounds, bounds, 40, 40, 0.4, True, *outputs[2:4]
    )
    assert_close(gradients, torch.autograd.grad(expected, (q, k, v), dout))


def test_older_pytorch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
    with pytest.raises(UnsupportedError, match=r"2\.10 or later.*frameworks\.torch\.attention"):
        sdpa.activate()


def test_without_a_gpu_it_is_active_and_changes_no_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert "cuflash" in torch.nn.attention.list_flash_attention_impls()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sdpa, "cupy_module", lambda: pytest.fail("CuPy is not needed without a GPU"))
    monkeypatch.setattr(torch.library, "get_kernel", lambda name, key: pytest.fail("no op is replaced"))
    tensors, order = qkv("cpu", torch.float32), torch._C._get_sdp_priority_order()
    expected = results(tensors)
    for _ in range(2):
        with caplog.at_level(logging.INFO, "cuflash"):
            sdpa.activate()
        assert "PyTorch sees no GPU here" in caplog.text
        assert torch.nn.attention.current_flash_attention_impl() == "cuflash"
        assert_equal(results(tensors), expected)
        assert torch._C._get_sdp_priority_order() == order
        sdpa.restore()
        assert torch.nn.attention.current_flash_attention_impl() is None


@pytest.mark.usefixtures("on_cpu")
def test_calls_without_heads_have_empty_results_and_gradients() -> None:
    q, k, v = (x[:, :0].detach().requires_grad_() for x in qkv("cpu", torch.float64, seqlen_k=52))
    mask = torch.zeros(2, 0, 40, 52, dtype=torch.float64, requires_grad=True)
    packed = [x[0].transpose(0, 1).detach().requires_grad_() for x in (q, k, v)]
    bounds = [torch.tensor([0, 30, length], dtype=torch.int32) for length in (40, 52)]
    out = torch.empty_like(packed[0])
    calls = [
        (OPS._scaled_dot_product_flash_attention(q, k, v, 0.1, True), (q, k, v), (2, 0, 40)),
        (OPS._scaled_dot_product_efficient_attention(q, k, v, mask, True), (q, k, v, mask), (2, 0, 64)),
        (OPS._flash_attention_forward(*packed, *bounds, 30, 30, 0.0, False, False), packed, (0, 40)),
    ]
    for (result, lse, *_), inputs, of_lse in calls:
        assert (result.shape, tuple(lse.shape)) == (inputs[0].shape, of_lse)
        gradients = torch.autograd.grad(result.sum(), inputs)
        assert [x.shape for x in gradients] == [x.shape for x in inputs]
    tensors = *packed, *bounds, 30, 30, 0.0, False, False
    in_place = getattr(OPS, "_flash_attention_forward_no_dropout_inplace", None)
    if in_place is not None:  # PyTorch before 2.12 lacks it
        with torch.no_grad():
            assert in_place(out, *tensors).shape == (0, 40)


def test_flash_and_memory_efficient_backends_become_first_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    backends = torch._C._get_sdp_priority_order()
    cudnn_first = [3, 1, 2, 0, 4]
    torch._C._set_sdp_priority_order(cudnn_first)
    assert sdpa._prefer_ours() == cudnn_first
    assert torch._C._get_sdp_priority_order() == [1, 2, 3, 0, 4]
    torch._C._set_sdp_priority_order(backends)


@pytest.fixture
def active() -> Iterator[None]:
    attend(*qkv("cuda", torch.float16))
    backends = torch._C._get_sdp_priority_order()
    sdpa.activate()
    yield
    sdpa.restore()
    assert torch.nn.attention.current_flash_attention_impl() is None
    assert torch._C._get_sdp_priority_order() == backends


@pytest.mark.gpu
@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "options"),
    [((4, 4), {}), ((4, 4), {"is_causal": True}), ((4, 2), {"is_causal": True, "enable_gqa": True, "scale": 0.3})],
)
def test_sdpa_runs_on_cuflash(heads: tuple[int, int], options: Any, dtype: Any) -> None:
    tensors = qkv("cuda", dtype, heads=heads)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        outputs = results(tensors, **options)
    names = {event.key for event in profile.key_averages()}
    assert any(name.startswith("forward_") for name in names)
    assert any(name.startswith("backward_") for name in names)
    arguments = {"causal": options.get("is_causal", False), "softmax_scale": options.get("scale")}
    assert_right(outputs, tensors, 2 * outputs[0], **arguments)


@pytest.mark.gpu
@pytest.mark.usefixtures("active")
def test_compiled_with_operands_of_any_strides() -> None:
    compiled = torch.compile(lambda *x: attend(*x, is_causal=True), fullgraph=True)
    for bhsd in (False, True):
        tensors = qkv("cuda", torch.bfloat16, bhsd=bhsd)
        out = compiled(*tensors)
        grads = torch.autograd.grad(out.sum(), tensors)
        assert_right((out, *grads), tensors, torch.ones_like(out), causal=True)


@pytest.mark.gpu
@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_masks_run_on_cuflash(is_compiled: bool) -> None:
    q, k, v = qkv("cuda", torch.bfloat16, seqlen_k=52)
    mask = torch.randn(1, 4, 1, 52, device="cuda", dtype=torch.bfloat16).requires_grad_()
    inputs = q, k, v, mask
    function = torch.compile(attend, fullgraph=True) if is_compiled else attend
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        out = function(q, k, v, attn_mask=mask)
        grads = torch.autograd.grad(out.float().square().sum(), inputs)
    names = {event.key for event in profile.key_averages()}
    assert any(name.startswith("forward_") for name in names)
    assert any(name.startswith("backward_") for name in names)
    copies = [x.detach().cpu().double().requires_grad_() for x in inputs]
    expected = eager(*by_seqlen(copies[:3]), bias=copies[3])[0].transpose(1, 2)
    assert_close((out, *grads), (expected, *torch.autograd.grad(expected.square().sum(), copies)), 4e-2)
    visible = torch.rand(40, 52, device="cuda") > 0.5
    assert_close(
        function(q, k, v, attn_mask=visible), eager(*by_seqlen(copies[:3]), bias=visible)[0].transpose(1, 2), 2e-2
    )


@pytest.mark.gpu
@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("has_mask", [False, True])
def test_without_heads(has_mask: bool) -> None:
    q, k, v = tensors = [x[:, :0].detach().requires_grad_() for x in qkv("cuda", torch.bfloat16)]
    mask = torch.zeros(2, 1, 40, 40, device="cuda", dtype=torch.bfloat16) if has_mask else None
    out = attend(q, k, v, attn_mask=mask)
    gradients = torch.autograd.grad(out.sum(), tensors)
    assert {x.shape for x in (out, *gradients)} == {(2, 0, 40, 64)}


@pytest.mark.gpu
@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_mask_alone_may_require_grad(is_compiled: bool) -> None:
    q, k, v = (x.detach() for x in qkv("cuda", torch.bfloat16, seqlen_k=56))
    mask = torch.randn(1, 4, 40, 56, device="cuda", dtype=torch.bfloat16).requires_grad_()
    function = torch.compile(attend, fullgraph=True) if is_compiled else attend
    (gradient,) = torch.autograd.grad(function(q, k, v, attn_mask=mask).float().square().sum(), mask)
    *copies, bias = (x.detach().cpu().double().requires_grad_() for x in (q, k, v, mask))
    expected = eager(*by_seqlen(copies), bias=bias)[0].square().sum()
    assert_close(gradient, torch.autograd.grad(expected, bias)[0], 4e-2)


@pytest.mark.gpu
@pytest.mark.usefixtures("active")
def test_dropout_in_a_graph_takes_new_seeds() -> None:
    tensors = qkv("cuda", torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        results(tensors, dropout_p=0.5)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = results(tensors, dropout_p=0.5)[0]
    outs = []
    for seed in (1, 1, 2):
        torch.cuda.manual_seed(seed)
        graph.replay()
        outs.append(out.clone())
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


@pytest.mark.gpu
def test_restore_brings_back_pytorchs_kernels() -> None:
    tensors = qkv("cuda", torch.float16)

    def all_results() -> list[Any]:
        torch.manual_seed(0)
        return [results(tensors, FLASH, **more)[0] for more in ({"is_causal": True}, {"dropout_p": 0.2})]

    backends = all_results()
    sdpa.activate()
    assert not torch.equal(all_results()[1], backends[1])
    sdpa.restore()
    assert_equal(all_results(), backends)
