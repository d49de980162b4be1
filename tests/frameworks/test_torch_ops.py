"""The ops of PyTorch behind `attention`: the rules of ops, and their FLOPs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import ProblemError, UnsupportedError

torch = pytest.importorskip("torch")
from refusals import refused
from tensors import arguments_of, assert_equal
from torch.utils.flop_counter import FlopCounterMode

from cuflash.frameworks.torch import attention
from cuflash.frameworks.torch.ops import Arguments
from cuflash.testing.sequences import Sequences, varlen_arrays

USED = Sequences("used", (5, 0, 17), (9, 3, 17), used_k=True, spare_k=(0, 3, 2), causal=True, dims=(16, 24))
PAGED = Sequences("paged", (3, 1), (40, 17), "packed", "paged", used_k=True, dtype="float32")
CACHE = Sequences("cache", (2,) * 3, (30,) * 3, "rectangle", "cache", dtype="float32")


def operands(case: Sequences, device: str, **more: Any) -> tuple[Any, ...]:
    """Returns the operands of the op."""
    keywords = arguments_of(varlen_arrays(case).filled(0.0), device) | more
    tensors = tuple(keywords.pop(name) for name in "qkv")
    return *tensors, *Arguments.from_keywords(keywords, False)


@pytest.mark.parametrize("case", [USED, PAGED, CACHE], ids=lambda case: case.name)
def test_the_ops_keep_the_rules_of_ops(case: Sequences, device: str) -> None:
    op_args = operands(case, device, max_seqlen_k=40, num_splits=1)
    torch.library.opcheck(torch.ops.cuflash.attention, op_args)
    if case.has_gradients:
        q, k, v, *rest = op_args
        torch.library.opcheck(torch.ops.cuflash.attention, (*(x.detach().requires_grad_() for x in (q, k, v)), *rest))
        out, lse = torch.ops.cuflash.attention(*op_args)
        arguments = Arguments(*rest).without_splits()
        for dlse in (None, lse):
            torch.library.opcheck(torch.ops.cuflash.attention_backward, (out, q, k, v, out, lse, dlse, *arguments))


def test_op_arguments_may_be_omitted_or_named(device: str) -> None:
    q, k, v, *rest = operands(USED, device)
    named = {name: x for name, x in zip(Arguments._fields, rest, strict=True) if x is not None}
    expected = torch.ops.cuflash.attention(q, k, v, *rest)
    results = torch.ops.cuflash.attention(q, k, v, softmax_scale=None, diagonal_offset=None, **named)
    assert all(map(torch.equal, results, expected))


def test_the_op_refuses_gradients_of_cached_keys_in_backward() -> None:
    q, *rest = operands(PAGED, "cpu")
    expected, _ = torch.ops.cuflash.attention(q, *rest)
    out, _ = torch.ops.cuflash.attention(q.requires_grad_(), *rest)
    assert torch.equal(out, expected)
    with pytest.raises(UnsupportedError, match="page_table was given"):
        out.sum().backward()


@pytest.mark.parametrize("kind", [np.float16, np.float64, np.int32])
@pytest.mark.parametrize("name", ["softmax_scale", "softcap", "diagonal_offset"])
def test_a_number_of_numpy_is_a_number_when_compiled(name: str, kind: Any, device: str) -> None:
    """The compiler takes it for an array, so the call runs between graphs, or is refused under fullgraph."""
    if name == "diagonal_offset" and kind is not np.int32:
        kind = np.int64
    torch._dynamo.reset()
    kwargs = {name: kind(2)}

    def call(*tensors: Any) -> Any:
        return 2 * attention(*tensors, causal=True, **kwargs)

    q, k, v = (torch.randn(2, 7, 2, 16, device=device, dtype=torch.float16) for _ in range(3))
    plain = 2 * attention(q, k, v, causal=True, **{name: 2})
    for x in (q, q.clone().requires_grad_()):
        result = torch.compile(call, backend="aot_eager")(x, k, v)
        assert torch.equal(result, plain)
        if x.requires_grad:
            result.sum().backward()
            assert x.grad is not None
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"number of NumPy.*give float\(\)"):
        torch.compile(call, backend="aot_eager", fullgraph=True)(q, k, v)


WRONG: dict[str, list[Any]] = {
    name: [*values, "2", True, np.timedelta64(2), np.timedelta64(2, "ns"), np.float32, torch.tensor(2), np.ones(2)]
    for name, values in {
        "softmax_scale": [], "softcap": [None], "diagonal_offset": [2.0], "num_splits": [1.0], "split_size": [128.0],
        "max_seqlen_k": [4.0], "window_size": [None, 3, (1, 2, 3), (1, "2"), (True, 2), (1, np.timedelta64(2))],
    }.items()
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, x) for name, values in WRONG.items() for x in values], ids=repr)
def test_invalid_numbers_raise_as_in_eager_calls(name: str, value: Any) -> None:
    """The op's schema would raise another text, or accept them as numbers."""
    q = torch.randn(1, 4, 2, 8)
    kwargs = {name: value} | ({"seqused_k": torch.tensor([4], dtype=torch.int32)} if name == "max_seqlen_k" else {})
    calls = [lambda q: attention(q, q, q, **kwargs), torch.func.functionalize(lambda q: attention(q, q, q, **kwargs))]
    recorded = []
    for call in calls:
        with pytest.raises(ProblemError, match=f"^{name}") as caught:
            call(q)
        recorded.append(str(caught.value))
    assert recorded[0] == recorded[1]


def test_windows_may_be_of_numpys_integers_in_ops() -> None:
    q = torch.randn(1, 4, 2, 8)
    result = torch.func.functionalize(lambda q: attention(q, q, q, window_size=(np.int64(1), None)))(q)
    assert torch.equal(result, attention(q, q, q, window_size=(1, -1)))


def counted(call: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("causal", [False, True])
def test_flops_equal_the_flops_of_pytorchs_attention(causal: bool, device: str) -> None:
    q, k, v = (torch.randn(2, 9, 4, n, device=device, requires_grad=True) for n in (16, 16, 24))
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def ours() -> None:
        attention(q, k, v, causal=causal).sum().backward()

    def theirs() -> None:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            sdpa(*(x.transpose(1, 2) for x in (q, k, v))).sum().backward()

    assert counted(lambda: attention(q, k, v, causal=causal)) == 2 * 2 * 4 * 9 * 9 * (16 + 24)
    # PyTorch's math kernel saves the scores, which flash kernels recompute.
    assert counted(ours) == counted(theirs) + 2 * 2 * 4 * 9 * 9 * 16


def test_flops_without_batch_or_heads() -> None:
    q, k = torch.zeros(9, 8), torch.zeros(7, 8)
    assert counted(lambda: attention(q, k, k)) == 2 * 9 * 7 * 16
    assert counted(lambda: attention(q[:, None], k[:, None], k[:, None])) == 2 * 9 * 7 * 16


@pytest.mark.parametrize(
    ("case", "pairs"),
    [
        (USED, 5 * 9 + 17 * 17),
        (PAGED, 3 * 40 + 17),
        (CACHE, 3 * 2 * 30),
        (Sequences("used_q", (9, 2), (11, 11), "rectangle", "rectangle", used_q=True, spare_q=(2, 0)), 11 * 11),
        (Sequences("bounded", (5, 1), (9, 3), bounded=True), 5 * 9 + 3),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_flops_of_sequences_are_summed(case: Sequences, pairs: int, device: str) -> None:
    arguments = arguments_of(varlen_arrays(case).filled(0.0), device, grad=case.has_gradients)
    dim, dim_v = case.dims
    forward = 2 * 4 * pairs * (dim + dim_v)
    assert counted(lambda: attention(**arguments)) == forward
    if case.has_gradients:
        both = counted(lambda: attention(**arguments).sum().backward())
        assert both == forward + 2 * 4 * pairs * (3 * dim + 2 * dim_v)


def test_flops_of_tensors_without_values_count_upper_bounds() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, bounds = torch.empty(20, 2, 8), torch.empty(4, dtype=torch.int32)
        bound = counted(lambda: attention(q, q, q, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=6))
    assert bound == 2 * 2 * 3 * 6 * 20 * 16


def test_real_tensors_under_fake_mode_give_fake_results_or_an_error() -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    q, bounds = torch.randn(1, 8, 2, 8), torch.tensor([0, 3, 8], dtype=torch.int32)
    packed = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    with_mods = {"bias": {"bias": torch.zeros(8, 8)}, "mask": {"mask_mod": lambda b, h, i, j: i >= j},
                 "dropout": {"dropout_p": 0.5}, "sinks": {"sinks": torch.zeros(2)}}  # fmt: skip
    with FakeTensorMode(allow_non_fake_inputs=True):
        for out in (attention(q, q, q, check=True), attention(q[0], q[0], q[0], **packed)):
            assert type(out) is FakeTensor
        for arguments in with_mods.values():
            with refused(UnsupportedError, "dropout_p under a FakeTensorMode", "call outside of it"):
                attention(q, q, q, **arguments)
        with refused(UnsupportedError, "check=True reads cu_seqlens_q, cu_seqlens_k"):
            attention(q[0], q[0], q[0], **packed, check=True)
        for function in (cuflash.forward, lambda q, k, v: cuflash.lse(q, k)):
            with refused(UnsupportedError, "tensors become FakeTensor without values; call cuflash outside of it"):
                function(q, q, q)
    assert_equal(cuflash.forward(q, q, q), attention(q, q, q))
