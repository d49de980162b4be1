"""`flex_attention` with PyTorch's arguments, compared to PyTorch's own."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest

import cuflash
from cuflash import ProblemError, UnsupportedError

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")
from eager_torch import assert_close, eager
from refusals import refused
from tensors import assert_equal
from tensors import random_qkv as made_by_seqlen
from torch.utils.flop_counter import FlopCounterMode

from cuflash.frameworks.torch import attention, flex_attention

if not hasattr(flex, "AuxRequest"):
    pytest.skip("needs PyTorch 2.9", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
LSE = flex.AuxRequest(lse=True)
HEADS, ROWS, KEYS = 4, 150, 200
DOCUMENTS = torch.arange(KEYS) // 70
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
TABLE = torch.randn(HEADS, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def qkv(device: str = "cpu", dtype: Any = None, *, heads: tuple[int, int] = (HEADS, HEADS), grad: bool = False) -> Any:
    """Returns query, key and value (batch, heads, seqlen, head_dim), in memory by seqlen."""
    tensors = made_by_seqlen(device, dtype, heads=heads, lengths=(ROWS, KEYS), grad=False)
    return tuple(x.transpose(1, 2).requires_grad_(grad) for x in tensors)


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def sliding_window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx).abs() <= 30


def prefix(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx < 40


def document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]


def of_some(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx % (h + 2) == 0) & (q_idx > 5 * b)


def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + (kv_idx - q_idx) * SLOPES[h]


def tanh_softcap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 20 * torch.tanh(score / 20)


def relative_position(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + TABLE[h, (q_idx - kv_idx).abs().clamp(max=63)]


# By name: mask_mod, score_mod, and PyTorch's (B, H) of the mask.
MODS: dict[str, tuple[Any, Any, tuple[int | None, int | None]]] = {
    "nothing": (None, None, (None, None)),
    "causal": (causal, None, (None, None)),
    "sliding window": (flex.and_masks(causal, sliding_window), None, (None, None)),
    "prefix": (flex.or_masks(prefix, causal), None, (None, None)),
    "documents": (flex.and_masks(document, causal), tanh_softcap, (None, None)),
    "of batch and head": (of_some, alibi, (2, HEADS)),
    "all joined": (flex.and_masks(flex.or_masks(prefix, document), of_some), relative_position, (2, HEADS)),
    "noop": (flex.noop_mask, relative_position, (None, None)),
}


def block_mask_of(mask_mod: Any, sizes: tuple[int | None, int | None] = (None, None), device: str = "cpu") -> Any:
    return None if mask_mod is None else flex.create_block_mask(mask_mod, *sizes, ROWS, KEYS, device=device)


@pytest.mark.parametrize("name", MODS)
def test_results_are_pytorchs(name: str) -> None:
    mask_mod, score_mod, sizes = MODS[name]
    block_mask, tensors = block_mask_of(mask_mod, sizes), qkv()
    expected, aux = flex.flex_attention(*tensors, score_mod, block_mask, return_aux=LSE)
    out, our_aux = flex_attention(*tensors, score_mod, block_mask, return_aux=LSE)
    assert type(our_aux) is type(aux)
    assert_close((out, our_aux.lse), (expected, aux.lse))
    assert_equal(flex_attention(*tensors, score_mod, block_mask), out)


@pytest.mark.parametrize("name", ["documents", "all joined"])
def test_gradients(name: str) -> None:
    """Compares to a program with all scores in memory, as PyTorch has no gradients on the CPU."""
    mask_mod, score_mod, sizes = MODS[name]
    tensors = qkv(grad=True)
    out, aux = flex_attention(*tensors, score_mod, block_mask_of(mask_mod, sizes), return_aux=LSE)
    expected = eager(*(x.transpose(1, 2) for x in tensors), score_mod=score_mod, mask_mod=mask_mod)
    values = (out, aux.lse), (expected[0].transpose(1, 2), expected[1])
    losses = [x.sin().sum() + y.nan_to_num(neginf=0.0).cos().sum() for x, y in values]
    assert_close(*(torch.autograd.grad(x, tensors) for x in losses))


def test_gradients_of_captured_tensors() -> None:
    tensors, table = qkv(), TABLE.clone().requires_grad_()
    out = flex_attention(*tensors, lambda s, b, h, i, j: s + table[h, (i - j).abs().clamp(max=63)])
    (grad,) = torch.autograd.grad(out.sin().sum(), table)
    by_seqlen = [x.transpose(1, 2) for x in tensors]
    expected = eager(*by_seqlen, score_mod=lambda s, b, h, i, j: s + table[h, (i - j).abs().clamp(max=63)])[0]
    assert_close(grad, torch.autograd.grad(expected.sin().sum(), table)[0])


def test_views_in_and_out() -> None:
    tensors = qkv()
    out = flex_attention(*tensors, scale=0.2)
    assert out.transpose(1, 2).is_contiguous()
    assert_equal(out.transpose(1, 2), attention(*(x.transpose(1, 2) for x in tensors), softmax_scale=0.2))


def test_grouped_heads_and_one_batch_of_keys() -> None:
    q, k, v = qkv(heads=(HEADS, 2))
    with pytest.raises(ProblemError, match=r"4 heads and key 2; give enable_gqa=True"):
        flex_attention(q, k, v)
    assert_close(flex_attention(q, k, v, enable_gqa=True), flex.flex_attention(q, k, v, enable_gqa=True))
    block_mask, (k, v) = block_mask_of(of_some, (2, HEADS)), (x[:1] for x in (k, v))
    expected = flex.flex_attention(
        q, k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1), None, block_mask, enable_gqa=True
    )
    assert_close(flex_attention(q, k, v, None, block_mask, enable_gqa=True), expected)


def test_return_lse_equals_pytorchs_and_bad_return_aux_is_refused() -> None:
    q, k, v = qkv()
    out, lse = flex_attention(q, k, v, return_lse=True)
    assert_close((out, lse), flex.flex_attention(q, k, v, return_lse=True))
    with pytest.raises(ProblemError, match="return_lse and return_aux"):
        flex_attention(q, k, v, return_lse=True, return_aux=LSE)
    for aux in (True, (None,), flex.AuxRequest):
        with pytest.raises(ProblemError, match=r"return_aux is a .*; give a .*AuxRequest"):
            flex_attention(q, k, v, return_aux=aux)
    with pytest.raises(UnsupportedError, match="max_scores"):
        flex_attention(q, k, v, return_aux=flex.AuxRequest(max_scores=True))
    assert flex_attention(q, k, v, return_aux=flex.AuxRequest())[1].lse is None


ORDERS = [(*order, 3) for order in itertools.permutations(range(3))] + [(3, 0, 1, 2), (0, 1, 3, 2), (0, 3, 2, 1)]


def in_order(shape: tuple[int, ...], order: tuple[int, ...], *, grad: bool = False) -> Any:
    """Returns a random tensor with these axes from the slowest to the fastest in memory."""
    dense = torch.randn([shape[axis] for axis in order], dtype=torch.float64)
    return dense.permute([order.index(axis) for axis in range(4)]).requires_grad_(grad)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("score_mod", [None, alibi])
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_out_has_the_strides_of_pytorchs(order: tuple[int, ...], score_mod: Any, grad: bool) -> None:
    key, value = in_order((2, HEADS, 12, 16), (0, 1, 2, 3)), in_order((2, HEADS, 12, 24), (0, 2, 1, 3))
    for shape in ((2, HEADS, 9, 16), (2, HEADS, 1, 16), (1, HEADS, 9, 16)):
        query, k, v = in_order(shape, order, grad=grad), key[: shape[0]], value[: shape[0]]
        expected = flex.flex_attention(query.detach(), k, v, score_mod)
        out = flex_attention(query, k, v, score_mod)
        assert_close(out, expected)
        assert out.stride() == expected.stride()
        if grad:
            gradient = torch.autograd.grad(out.sin().sum(), query)
            dense = eager(*(x.transpose(1, 2) for x in (query, k, v)), score_mod=score_mod)[0]
            assert_close(gradient, torch.autograd.grad(dense.sin().sum(), query))


@pytest.mark.parametrize("shape", [(2, HEADS, 9, 16), (2, HEADS, 1, 16)])
@pytest.mark.parametrize("score_mod", [None, alibi])
def test_a_compiled_out_has_the_strides_of_pytorchs(score_mod: Any, shape: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, backend="aot_eager")
    for order in ((0, 1, 2, 3), (2, 0, 1, 3), (3, 0, 1, 2)):
        query, key = in_order(shape, order), in_order((2, HEADS, 12, 16), (0, 1, 2, 3))
        expected = flex.flex_attention(query, key, key, score_mod)
        out = compiled(query, key, key, score_mod)
        assert_close(out, expected)
        assert out.stride() == expected.stride()


def test_expanded_queries_have_the_strides_of_pytorchs() -> None:
    key, value = in_order((2, HEADS, 12, 16), (0, 1, 2, 3)), in_order((2, HEADS, 12, 24), (0, 1, 2, 3))
    for shape in ((2, 1, 9, 16), (1, HEADS, 9, 16), (2, HEADS, 1, 16), (1, 1, 1, 16)):
        query = torch.randn(shape, dtype=torch.float64).expand(2, HEADS, 9, 16)
        assert flex_attention(query, key, value).stride() == flex.flex_attention(query, key, value).stride()


def test_a_call_without_mods_works_under_transforms_in_any_order() -> None:
    key, value = (in_order((2, HEADS, 12, 16), (0, 1, 2, 3)) for _ in range(2))
    query = in_order((2, HEADS, 9, 16), (0, 1, 2, 3))
    expected = flex_attention(query, key, value)
    mapped = torch.vmap(lambda x: flex_attention(x, key, value))(torch.stack([query, 2 * query]))
    assert_equal(mapped[0], expected)
    assert mapped[0].is_contiguous()
    assert_equal(torch.func.functionalize(flex_attention)(query, key, value), expected)
    gradient = torch.func.grad(lambda x: flex_attention(x, key, value).sin().sum())(query)
    leaf = query.clone().requires_grad_()
    assert_close(gradient, torch.autograd.grad(flex_attention(leaf, key, value).sin().sum(), leaf)[0])
    with FlopCounterMode(display=False) as counter:
        assert_equal(flex_attention(query, key, value), expected)
    assert counter.get_total_flops() == 2 * 2 * HEADS * 9 * 12 * (16 + 16)


@pytest.mark.gpu
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3), (0, 2, 1, 3)], ids=str)
def test_on_a_gpu_out_is_written_in_its_order(order: tuple[int, ...]) -> None:
    query, key, value = (in_order((2, HEADS, 200, 64), order).cuda().bfloat16() for _ in range(3))
    slopes = SLOPES.cuda().float()
    out = flex_attention(query, key, value, lambda s, b, h, i, j: s + (j - i) * slopes[h])
    assert out.stride() == query.stride()
    expected = attention(
        *(x.transpose(1, 2) for x in (query, key, value)), score_mod=lambda s, b, h, i, j: s + (j - i) * slopes[h]
    )
    assert_equal(out, expected.transpose(1, 2))
    names = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        flex_attention(query, key, value, lambda s, b, h, i, j: s + (j - i) * slopes[h])
    names = [event.key for event in profile.key_averages()]
    assert not any("copy" in name.lower() for name in names)


def test_a_block_mask_of_cuflash() -> None:
    tensors = qkv()
    block_mask = cuflash.create_block_mask(document, 1, 1, ROWS, KEYS, like=tensors[0])
    assert_equal(flex_attention(*tensors, alibi, block_mask), flex_attention(*tensors, alibi, block_mask_of(document)))


def test_a_mask_of_blocks_alone() -> None:
    """A mask by `from_kv_blocks` without a mask_mod: PyTorch's compiled function shows whole blocks."""
    q, k, v = qkv()
    dense = block_mask_of(flex.and_masks(document, causal))
    blocks = flex.BlockMask.from_kv_blocks(dense.kv_num_blocks, dense.kv_indices, seq_lengths=(ROWS, KEYS))
    visible_blocks = blocks.to_dense()[0, 0].bool()
    expected = visible_blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)[:ROWS, :KEYS]
    result = flex_attention(q, k, v, None, blocks)
    assert_close(result, torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=expected))


def test_block_lists_narrower_than_the_mask_hide_the_rest() -> None:
    """Blocks selected by hand beside a mask_mod: a key is visible if both show it."""
    q, k, v = qkv()
    listed = torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    one = torch.ones(1, 1, 2, dtype=torch.int32)
    blocks = flex.BlockMask.from_kv_blocks(one, listed, mask_mod=causal, seq_lengths=(ROWS, KEYS))
    in_block = torch.tensor([[False, True], [True, False]]).repeat_interleave(128, 0).repeat_interleave(128, 1)
    expected = in_block[:ROWS, :KEYS] & (torch.arange(ROWS)[:, None] >= torch.arange(KEYS))
    result = flex_attention(q, k, v, None, blocks)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=expected)
    assert_close(result, torch.where(expected.any(1)[:, None], exact, 0.0))
    whole = block_mask_of(causal)
    assert_equal(flex_attention(q, k, v, None, whole), flex_attention(q, k, v, None, whole))


def refusals() -> dict[str, tuple[Callable[[Any, Any, Any], Any], str]]:
    other = flex.create_block_mask(causal, None, None, 64, 64, device="cpu")
    of_batch = flex.create_block_mask(of_some, 3, None, ROWS, KEYS, device="cpu")
    return {
        "lengths": (lambda q, k, v: flex_attention(q, k, v, None, other), r"\(1, 1, 64, 64\), but the call has \(2, 4"),
        "batch": (lambda q, k, v: flex_attention(q, k, v, None, of_batch), r"\(3, 1, 150"),
        "type": (lambda q, k, v: flex_attention(q, k, v, None, causal), "block_mask is a function"),
        "rank": (lambda q, k, v: flex_attention(q[0], k, v), r"query has shape \(4, 150, 16\)"),
        "options": (lambda q, k, v: flex_attention(q, k, v, kernel_options=3), "kernel_options is an int"),
        "gqa": (lambda q, k, v: flex_attention(q, k, v, enable_gqa=1), "enable_gqa=1"),
        "sliced": (lambda q, k, v: flex_attention(q, k, v, None, block_mask_of(causal)[:, :, 0]), "was sliced"),
    }


@pytest.mark.parametrize("name", ["lengths", "batch", "type", "rank", "options", "gqa", "sliced"])
def test_unsupported_calls_are_refused(name: str) -> None:
    call, message = refusals()[name]
    with pytest.raises(ProblemError, match=message):
        call(*qkv())


def test_kernel_options_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    tensors = qkv()
    with caplog.at_level(logging.DEBUG, "cuflash"):
        assert_equal(flex_attention(*tensors, kernel_options={"BLOCK_M": 64}), flex_attention(*tensors))
    assert "BLOCK_M are hints" in caplog.text


def test_compiled_around() -> None:
    torch._dynamo.reset()
    tensors, block_mask = qkv(), block_mask_of(document)

    def function(q: Any, k: Any, v: Any) -> Any:
        return flex_attention(q.sin(), k, v, alibi, block_mask).cos()

    assert_close(torch.compile(function, backend="eager")(*tensors), function(*tensors))


@pytest.mark.gpu
def test_on_a_gpu_it_is_pytorchs_compiled() -> None:
    tensors = qkv("cuda", torch.bfloat16, grad=True)
    documents, slopes = DOCUMENTS.cuda(), SLOPES.cuda().float()
    mask_mod = flex.and_masks(lambda b, h, i, j: documents[i] == documents[j], causal)
    block_mask = block_mask_of(mask_mod, device="cuda")
    results = []
    for function in (torch.compile(flex.flex_attention), flex_attention):
        out, aux = function(*tensors, lambda s, b, h, i, j: s + (j - i) * slopes[h], block_mask, return_aux=LSE)
        is_finite = torch.isfinite(aux.lse)
        results.append([out, aux.lse[is_finite], *torch.autograd.grad(out.float().square().sum(), tensors)])
    for x, y in zip(*results, strict=True):
        assert_close(x, y, 3e-2)


def test_errors_have_the_names_of_pytorch() -> None:
    x = torch.zeros(2, 4, 5, 8)
    with refused(ProblemError, "key has head_dim 6, but query has 8; query and key must share head_dim"):
        flex_attention(x, x[..., :6], x)
    with refused(ProblemError, "scale=-1.0 is not positive"):
        flex_attention(x, x, x, scale=-1.0)
    with refused(ProblemError, "value has seqlen 4"):
        flex_attention(x, x, x[:, :, :4], lambda score, b, h, q_idx, k_idx: score)
