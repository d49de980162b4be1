"""`torch.nn.attention.varlen` on cuflash: packed sequences, pages and used lengths, through its ops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from cuflash import UnsupportedError, mods

torch = pytest.importorskip("torch")
varlen = pytest.importorskip("torch.nn.attention.varlen")
if not hasattr(torch.nn.attention, "register_flash_attention_impl") or not hasattr(varlen, "varlen_attn_out"):
    pytest.skip("needs PyTorch 2.13", allow_module_level=True)
from libraries import torch_of
from tensors import arguments_of, assert_equal, assert_results, assert_sequences, in_numpy
from tensors import random_qkv as dense

from cuflash.frameworks.torch import attention, sdpa
from cuflash.testing.sequences import Sequences, VarlenArrays, check_gradients, upstream, varlen_arrays

OPS = torch.ops.aten
PACKED = Sequences("packed", (5, 0, 1, 17), (9, 3, 0, 17), dims=(16, 16), bounded=True)
CAUSAL = replace(PACKED, name="causal", causal=True, softmax_scale=0.3)
WINDOW = replace(PACKED, name="window", window_size=(3, 1))
USED = replace(PACKED, name="used", used_k=True, spare_k=(0, 3, 2, 1))
PAGED = Sequences("paged", (3, 1, 0, 20), (40, 17, 5, 64), "packed", "paged", used_k=True, causal=True, dims=(16, 16))


@pytest.fixture(autouse=True, params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Replaces PyTorch's GPU ops by cuflash, on the CPU or on a GPU."""
    if request.param == "cuda":
        sdpa.activate()
        yield "cuda"
        sdpa.restore()
    else:
        monkeypatch.setattr(torch.library, "get_kernel", lambda name, key: Kernel(name))
        override = sdpa.Override("CPU")
        yield "cpu"
        override.remove()


class Kernel:
    """A stand-in for PyTorch's kernel, which raises when it is called."""

    def __init__(self, name: str) -> None:
        self.name = name

    def call_boxed(self, keyset: Any, *arguments: Any, **more: Any) -> Any:
        raise NotImplementedError(f"PyTorch's own {self.name}")


def called(
    inputs: VarlenArrays, device: str, *, grad: bool = False, out: Any = None, **more: Any
) -> tuple[Any, Any, Any]:
    """Returns out, lse and the leaves of a call of PyTorch's function."""
    arguments, case = arguments_of(inputs, device, grad=grad), inputs.sequences
    leaves = tuple(arguments[name] for name in "qkv")
    lengths = max(case.queries), max(case.keys)
    keywords = {
        "scale": case.softmax_scale,
        "window_size": (-1, 0) if case.causal else case.window_size,
        "seqused_k": arguments.get("seqused_k"),
        "block_table": arguments.get("page_table"),
        "return_aux": varlen.AuxRequest(lse=True),
        "enable_gqa": True,
    } | more
    bounds = arguments["cu_seqlens_q"], arguments.get("cu_seqlens_k")
    if out is None:
        return *varlen.varlen_attn(*leaves, *bounds, *lengths, **keywords), leaves
    return *varlen.varlen_attn_out(out, *leaves, *bounds, *lengths, **keywords), leaves


@pytest.mark.parametrize("case", [PACKED, CAUSAL, WINDOW, USED, PAGED], ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_results_and_gradients(case: Sequences, dtype: str, device: str) -> None:
    inputs = varlen_arrays(replace(case, dtype=dtype))
    trains = case.has_gradients and not case.used_k  # PyTorch has no gradients with used lengths
    out, lse, leaves = called(inputs, device, grad=trains)
    assert_sequences(inputs, out, lse)
    if trains:
        grads = torch.autograd.grad((out.float() ** 2).sum(), leaves)
        arguments = arguments_of(inputs, device, grad=True)
        plain = [arguments[name] for name in "qkv"]
        expected = torch.autograd.grad((attention(**arguments).float() ** 2).sum(), plain)
        for x, y in zip(grads, expected, strict=True):
            torch.testing.assert_close(x, y)
    assert_sequences(inputs, *(x.detach() for x in called(inputs, device, num_splits=2)[:2]))


def test_gradients_match_float64(device: str) -> None:
    inputs = varlen_arrays(CAUSAL)
    arguments = arguments_of(inputs, device)
    bounds, lengths = [arguments[f"cu_seqlens_{side}"] for side in "qk"], (17, 17)
    q, k, v = (arguments[name] for name in "qkv")
    out, lse, *state, mask = OPS._flash_attention_forward(q, k, v, *bounds, *lengths, 0.0, True, False, scale=0.3)
    assert ([x.shape for x in state], mask.numel()) == ([(2,), ()], 0)
    assert all(x.dtype == torch.uint64 for x in state)

    dout = torch_of(upstream(inputs)[0], device)[0]
    grads = OPS._flash_attention_backward(dout, q, k, v, out, lse, *bounds, *lengths, 0.0, True, *state, scale=0.3)
    check_gradients(inputs, [in_numpy(x) for x in grads], dlse=False)


def test_out_argument_keeps_rows_of_no_sequence(device: str) -> None:
    inputs = varlen_arrays(CAUSAL)
    target = torch.full_like(arguments_of(inputs, device)["q"].detach(), 7.0)
    out, lse, _ = called(inputs, device, out=target)
    assert out.data_ptr() == target.data_ptr()
    unused = torch.from_numpy(inputs.unused("q")[0]).to(device)
    assert (out[unused] == 7.0).all()
    assert_sequences(inputs, out.masked_fill(unused[:, None, None], 0.0), lse)


def test_bounds_beside_a_table_give_lengths(device: str) -> None:
    inputs = varlen_arrays(PAGED)
    arguments = arguments_of(inputs, device)
    bounds = torch.nn.functional.pad(arguments["seqused_k"].cumsum(0, dtype=torch.int32), (1, 0))
    q, k, v = (arguments[name] for name in "qkv")
    out, lse, *_ = OPS._flash_attention_forward(
        q, k, v, arguments["cu_seqlens_q"], bounds, 20, 64, 0.0, True, False, block_table=arguments["page_table"]
    )
    assert_sequences(inputs, out, lse)


def test_dense_calls_of_the_same_op(device: str) -> None:
    q, k, v = dense(device, torch.float16, dim=16, grad=False)
    out, lse, *_ = OPS._flash_attention_forward(
        q, k, v, None, None, 9, 12, 0.0, False, False, window_size_left=3, window_size_right=1
    )
    assert_results((q, k, v), out, lse, window_size=(3, 1))


def test_results_have_the_strides_of_their_operands(device: str) -> None:
    """PyTorch's fake kernels promise them to torch.compile."""
    q, k, v = torch.randn(3, 4, 20, 16, device=device).to(torch.float16).transpose(1, 2).unbind()
    bounds = torch.tensor([0, 8, 20], dtype=torch.int32, device=device)
    out, lse, *state, _ = OPS._flash_attention_forward(q, k, v, bounds, bounds, 12, 12, 0.0, True, False)
    assert out.stride() == torch.empty_like(q).stride() != (64, 16, 1)
    grads = OPS._flash_attention_backward(out, q, k, v, out, lse, bounds, bounds, 12, 12, 0.0, True, *state)
    assert [x.stride() for x in grads] == [torch.empty_like(x).stride() for x in (q, k, v)]


def test_compiled_whole_with_gradients(device: str) -> None:
    torch._dynamo.reset()
    inputs = varlen_arrays(CAUSAL)
    arguments = arguments_of(inputs, device, grad=True)
    leaves = tuple(arguments[name] for name in "qkv")
    bounds = arguments["cu_seqlens_q"], arguments["cu_seqlens_k"]

    def call(*leaves: Any) -> Any:
        return varlen.varlen_attn(*leaves, *bounds, 17, 17, scale=0.3, window_size=(-1, 0), enable_gqa=True) * 2

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    results, expected = ([f(*leaves), *torch.autograd.grad(f(*leaves).float().sum(), leaves)] for f in (compiled, call))
    for x, y in zip(results, expected, strict=True):
        torch.testing.assert_close(x, y)


def test_unsupported_calls_are_refused_or_run_pytorchs_kernels(device: str) -> None:
    q, k, v = (x.detach() for x in dense(device, torch.float16, dim=16))
    bounds = None, None, 9, 12
    slopes = torch.ones(4, device=device)
    result = OPS._flash_attention_forward(q, k, v, *bounds, 0.0, True, False, alibi_slopes=slopes)[0]
    assert_equal(result, attention(q, k, v, causal=True, score_mod=mods.alibi(slopes)))
    with pytest.raises(UnsupportedError, match="alibi_slopes and gradients"):
        OPS._flash_attention_forward(q.detach().requires_grad_(), k, v, *bounds, 0.0, True, False, alibi_slopes=slopes)
    in_place = getattr(OPS, "_flash_attention_forward_no_dropout_inplace", None)
    if in_place is not None:  # PyTorch before 2.12 lacks it
        with pytest.raises(UnsupportedError, match=r"dropout_p=0\.1.*give 0\.0 and False"):
            in_place(torch.empty_like(q), q, k, v, *bounds, 0.1, False, False)
    plain = OPS._flash_attention_forward(q, k, v, *bounds, 0.0, False, False)
    quantized = getattr(OPS._flash_attention_forward, "quantized", None)
    if quantized is not None:
        with pytest.raises(UnsupportedError, match="k_descale: cuflash has no float8"):
            quantized(q, k, v, *bounds, 0.0, False, False, None, torch.ones(2, 2, device=device), None)
        assert_equal(quantized(q, k, v, *bounds, 0.0, False, False, None, None, None)[:2], plain[:2])
    if device == "cpu":
        with pytest.raises(NotImplementedError, match=r"own aten::_flash_attention_forward$"):
            OPS._flash_attention_forward(q, k, v, *bounds, 0.0, False, True)
