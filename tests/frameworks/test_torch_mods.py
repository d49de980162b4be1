"""Mods (score_mod, mask_mod, bias, sinks, dropout) in PyTorch: gradients, compilers, checkpoints, graphs."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import ProblemError, UnsupportedError, mods

torch = pytest.importorskip("torch")
from eager_torch import assert_close, eager
from exact_mods import MASKS, exact, with_arrays
from exact_mods import ROWS as EXACT_ROWS
from tensors import assert_equal, loss, random_qkv, with_lse
from warned import warnings_are_errors

from cuflash.frameworks.torch import attention, autograd
from cuflash.planning import captured_gradients
from cuflash.planning.captured_gradients import NotDeterministicError
from cuflash.runtime import call

HEADS, ROWS, KEYS = 4, 9, 12  # of `random_qkv`


def parameter(device: str, *shape: int) -> Any:
    """Returns a tensor of floats that requires grad."""
    dtype = torch.float64 if device == "cpu" else torch.float32
    values = torch.linspace(-1.0, 1.0, math.prod(shape), dtype=torch.float64).sin().reshape(shape)
    return values.to(device, dtype).requires_grad_()


def _alibi(slopes: Any) -> dict[str, Any]:
    return {"causal": True, "score_mod": lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()}


def _table(table: Any) -> dict[str, Any]:
    return {"score_mod": lambda s, b, h, i, j: torch.tanh(s) * 3 + table[h, (j - i).clamp(-3, 3) + 3]}


# A parameter's shape, and the arguments that use it.
CASES: dict[str, tuple[tuple[int, ...], Callable[[Any], dict[str, Any]]]] = {
    "alibi": ((HEADS,), _alibi),
    "table": ((HEADS, 7), _table),
    "bias": ((1, HEADS, 1, KEYS), lambda x: {"bias": x}),
    "whole bias": ((2, HEADS, ROWS, KEYS), lambda x: {"bias": x, "causal": True}),
    "sinks": ((HEADS,), lambda x: {"sinks": x, "mask_mod": lambda b, h, i, j: i // 4 == j // 4}),
    "dropout": ((HEADS,), lambda x: {**_alibi(x), "sinks": x, "dropout_p": 0.3, "dropout_seed": 2**63 + 5}),
}


ON_GPUS = ("alibi", "whole bias", "dropout")


@pytest.mark.parametrize(
    ("case", "device"),
    [*((case, "cpu") for case in CASES), *(pytest.param(case, "cuda", marks=pytest.mark.gpu) for case in ON_GPUS)],
)
def test_results_and_gradients(case: str, device: str) -> None:
    shape, arguments = CASES[case]
    tensors, bias = random_qkv(device), parameter(device, *shape)
    beside = bias.detach().cpu().requires_grad_()
    copies = [x.detach().cpu().requires_grad_() for x in tensors]
    results, expected = with_lse(*tensors, **arguments(bias)), eager(*copies, **arguments(beside))
    assert_close(results, expected)
    gradients = torch.autograd.grad(loss(*results), (*tensors, bias))
    assert [x.dtype for x in gradients] == [x.dtype for x in (*tensors, bias)]
    assert_close(gradients, torch.autograd.grad(loss(*expected), (*copies, beside)))


def test_a_mask_of_bools_and_no_parameters() -> None:
    tensors = random_qkv("cpu")
    visible = torch.rand(2, 1, ROWS, KEYS) > 0.4
    results, expected = with_lse(*tensors, bias=visible), eager(*tensors, bias=visible)
    assert_close(results, expected)
    assert_close(torch.autograd.grad(results[0].sum(), tensors), torch.autograd.grad(expected[0].sum(), tensors))


def test_a_tensor_in_two_places_has_one_gradient() -> None:
    tensors, x = random_qkv("cpu", grad=False), parameter("cpu", HEADS)
    kwargs = {"score_mod": lambda s, b, h, i, j: s * x[h], "mask_mod": lambda b, h, i, j: x[h] * j < 4, "sinks": x}
    out, expected = attention(*tensors, **kwargs), eager(*tensors, **kwargs)[0]
    assert_close(torch.autograd.grad(out.sum(), x), torch.autograd.grad(expected.sum(), x))


def test_the_first_of_half_precision_gives_its_dtype() -> None:
    tensors, slopes = random_qkv("cpu", torch.bfloat16), parameter("cpu", HEADS).detach().float().requires_grad_()
    bias = torch.zeros(HEADS, 1, KEYS, dtype=torch.bfloat16, requires_grad=True)
    out = attention(*tensors, bias=bias, **_alibi(slopes))
    grads = torch.autograd.grad(out.float().sum(), (*tensors, slopes, bias))
    assert [x.dtype for x in (out, *grads)] == [torch.bfloat16] * 4 + [torch.float32, torch.bfloat16]
    assert grads[4].shape == bias.shape


def test_variable_length_sequences() -> None:
    q, k, v = (x.detach()[0].requires_grad_() for x in random_qkv("cpu", lengths=(9, 9)))
    slopes, bounds = parameter("cpu", HEADS), torch.tensor([0, 4, 9], dtype=torch.int32)
    out = attention(q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=5, max_seqlen_k=5, **_alibi(slopes))
    parts = [[x[None, begin:end] for x in (q, k, v)] for begin, end in ((0, 4), (4, 9))]
    expected = torch.cat([eager(*part, **_alibi(slopes))[0][0] for part in parts])
    assert_close(out, expected)
    inputs = q, k, v, slopes
    assert_close(*(torch.autograd.grad(x.sin().sum(), inputs) for x in (out, expected)))
    cached = attention(q[None], k[None], v[None], page_table=bounds[:1, None], **_alibi(slopes))
    assert_close(cached[0], attention(q, k, v, **_alibi(slopes)))
    with pytest.raises(UnsupportedError, match="page_table was given, but cached keys have no gradients"):
        cached.sum().backward()


def test_with_a_block_mask() -> None:
    tensors = random_qkv("cpu", lengths=(100, 130))
    bounds = torch.tensor([0, 50, 130])
    block_mask = cuflash.create_block_mask(mods.document(bounds), 1, 1, 100, 130, like=tensors[0])
    mask_kwargs = {"block_mask": block_mask}, {"mask_mod": block_mask.mask_mod}
    losses = [loss(*with_lse(*tensors, **each)) for each in mask_kwargs]
    assert_equal(*(torch.autograd.grad(x, tensors) for x in losses))


def test_seeds_are_drawn_by_the_generator_of_the_device(device: str) -> None:
    tensors = random_qkv(device, grad=False)

    def drawn() -> Any:
        return attention(*tensors, dropout_p=0.5)

    torch.manual_seed(3)
    seed = torch.empty((), dtype=torch.int64, device=device).random_()
    torch.manual_seed(3)
    first, second = drawn(), drawn()
    assert_equal(first, attention(*tensors, dropout_p=0.5, dropout_seed=seed))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_under_a_checkpoint(is_reentrant: bool, device: str) -> None:
    tensors, slopes = random_qkv(device), parameter(device, HEADS)

    def run(*x: Any) -> Any:
        return attention(*x, dropout_p=0.4, **_alibi(slopes))

    grads = []
    for function in (run, lambda *x: torch.utils.checkpoint.checkpoint(run, *x, use_reentrant=is_reentrant)):
        torch.manual_seed(4)
        inputs = (*tensors, slopes)
        for x in inputs:
            x.grad = None
        function(*tensors).square().sum().backward()
        grads.append([x.grad for x in inputs])
    assert_close(grads[0], grads[1])


def test_gradients_of_some_inputs_only() -> None:
    tensors, slopes = random_qkv("cpu", grad=False), parameter("cpu", HEADS)
    expected = torch.autograd.grad(attention(*tensors, **_alibi(slopes)).sum(), slopes)
    assert_equal(torch.func.grad(lambda x: attention(*tensors, **_alibi(x)).sum())(slopes.detach()), expected)
    q = tensors[0].requires_grad_()
    attention(*tensors, **_alibi(slopes.detach())).sum().backward()
    assert q.grad is not None
    of_mask = attention(*random_qkv("cpu", grad=False), mask_mod=lambda b, h, i, j: slopes[h] < 0.5)
    assert of_mask.grad_fn is None  # a mask has no gradient
    with torch.no_grad():
        assert attention(*tensors, **_alibi(slopes)).grad_fn is None


def test_functions_of_torch_func() -> None:
    q, k, v = random_qkv("cpu", grad=False)
    slopes = parameter("cpu", HEADS).detach()

    def value(q: Any, slopes: Any) -> Any:
        return loss(*with_lse(q, k, v, bias=slopes[:, None, None] * k.new_ones(KEYS), **_alibi(slopes)))

    grads = torch.func.grad(value, argnums=(0, 1))(q, slopes)
    leaves = q.requires_grad_(), slopes.requires_grad_()
    assert_close(grads, torch.autograd.grad(value(*leaves), leaves))


def test_autograd_keeps_only_saved_tensors() -> None:
    tensors, logs = random_qkv("cpu"), parameter("cpu", HEADS)
    slopes = logs.exp()
    slopes_ref = weakref.ref(slopes)
    out = attention(*tensors, **_alibi(slopes))
    del slopes
    assert slopes_ref() is not None
    grad_fn = out.grad_fn
    out.sum().backward()
    gc.collect()
    assert slopes_ref() is None
    assert grad_fn is not None


def test_tensor_changed_before_backward_raises() -> None:
    tensors, slopes = random_qkv("cpu"), parameter("cpu", HEADS)
    out = attention(*tensors, **_alibi(slopes))
    with torch.no_grad():
        slopes.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_under_autocast() -> None:
    tensors, sinks = random_qkv("cpu", torch.float32), torch.zeros(HEADS, dtype=torch.float16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(*tensors, sinks=sinks, **_alibi(torch.ones(HEADS)))
    assert out.dtype == torch.bfloat16
    assert torch.autograd.grad(out.float().sum(), sinks)[0].dtype == torch.float16


def test_unsupported_calls_are_refused() -> None:
    tensors, slopes = random_qkv("cpu"), parameter("cpu", HEADS)
    kwargs = _alibi(slopes)
    with pytest.raises(UnsupportedError, match="under vmap"):
        torch.vmap(lambda x: attention(x, *tensors[1:], **kwargs))(torch.stack([tensors[0]] * 2))
    mapped = torch.vmap(torch.func.grad(lambda x: attention(x, *tensors[1:], dropout_p=0.5).sum()))
    with pytest.raises(UnsupportedError, match="dropout_p under vmap"):
        mapped(torch.stack([tensors[0]] * 2))
    with pytest.raises(UnsupportedError, match="forward-mode"):
        torch.func.jvp(lambda x: attention(x, *tensors[1:], **kwargs), tensors[:1], tensors[:1])
    (grad,) = torch.autograd.grad(attention(*tensors, **kwargs).sum(), slopes, create_graph=True)
    with pytest.raises(UnsupportedError, match="no second derivative"):
        grad.sum().backward()
    with pytest.raises(UnsupportedError, match=r"functionalize"):
        torch.func.functionalize(lambda x: attention(x, *tensors[1:], **kwargs))(tensors[0])
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.raises(UnsupportedError, match="FakeTensor"):
        attention(*map(mode.from_tensor, tensors), **kwargs)
    with pytest.raises(ProblemError, match="bias is an ndarray; give a torch tensor"):
        attention(*tensors, bias=slopes.detach().numpy())
    with pytest.raises(ProblemError, match="numpy array, but q is a torch array"):
        attention(*tensors, **_alibi(slopes.detach().numpy()))
    with pytest.raises(ProblemError, match=r"dropout_p=1\.5 is outside"):
        attention(*tensors, dropout_p=1.5)


def test_seeds_are_validated_without_dropout(device: str) -> None:
    q, k, v = (x.detach() for x in random_qkv(device))
    good = 3, torch.tensor(3, device=device), torch.tensor([3, 4], dtype=torch.int32, device=device)
    wrong = {
        "dropout_seed has shape": torch.zeros((), device=device),
        "dropout_seed is a str": "3",
        "dropout_seed is a type": np.ndarray,
        "dropout_seed=.* has more than 64 bits": 2**64,
        "dropout_seed=True is a bool": True,
        "dropout_seed is .*on meta, but q is": torch.tensor(3, device="meta"),
    }
    for kwargs in ({}, {"sinks": torch.zeros(HEADS, device=device, dtype=q.dtype)}, {"dropout_p": np.float32(0)}):
        plain = attention(q, k, v, **kwargs)
        of_seed = lambda seed, q, kwargs=kwargs: attention(q, k, v, dropout_seed=seed, **kwargs)  # noqa: E731
        for seed in good:
            assert torch.equal(of_seed(seed, q), plain)
            torch.func.grad(lambda q, seed=seed, call=of_seed: call(seed, q).sum())(q)
        for message, seed in wrong.items():
            with pytest.raises((ProblemError, UnsupportedError), match=message):
                of_seed(seed, q.clone().requires_grad_())
    for seed in good:
        compiled = torch.compile(lambda q, seed: attention(q, k, v, dropout_seed=seed), fullgraph=True, backend="eager")
        assert torch.equal(compiled(q, seed), attention(q, k, v))
        torch._dynamo.reset()


@pytest.fixture
def algorithms() -> Iterator[Any]:
    """Provides PyTorch's switch for deterministic algorithms, and turns it off afterwards."""
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(False)


def test_sums_without_a_fixed_order_warn_under_warn_only(algorithms: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU refuses some deterministic gradients; this backward refuses all."""
    requested: list[bool] = []

    def run(op: Any, arrays: Any, options: Any, *rest: Any) -> Any:
        if "dq" in op.names:
            requested.append(options.options.deterministic)
            if options.options.deterministic:
                raise NotDeterministicError("deterministic=True, but the sums are too large")
        return call.run(op, arrays, options, *rest)

    monkeypatch.setattr(autograd, "run", run)
    tensors, table = random_qkv("cpu"), parameter("cpu", HEADS, 7)

    def gradient(**options: Any) -> Any:
        requested.clear()
        return torch.autograd.grad(attention(*tensors, **_table(table), **options).sum(), table)[0]

    with warnings_are_errors():
        expected = gradient()
        assert requested == [False]
        algorithms(True)
        with pytest.raises(UnsupportedError, match="sums are too large"):
            gradient()
    algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match="not deterministic here, though .*the sums are too large"):
        assert_equal(gradient(), expected)
    assert requested == [True, False]
    with pytest.raises(UnsupportedError, match="sums are too large"):
        gradient(deterministic=True)


@pytest.mark.gpu
def test_a_table_too_large_for_a_fixed_order_warns_on_a_gpu(algorithms: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_gradients, "MOST_TABLE_BYTES", 64)
    tensors, table = random_qkv("cuda", dim=32), parameter("cuda", HEADS, 23)
    kwargs = {"score_mod": lambda s, b, h, i, j: s + table[h, j - i + 8]}

    def gradient() -> Any:
        return torch.autograd.grad(attention(*tensors, **kwargs).sin().sum(), table)[0]

    algorithms(True)
    with pytest.raises(UnsupportedError, match="deterministic=True, but the sums"):
        gradient()
    algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match="not deterministic here"):
        result = gradient()
    copies = [x.detach().cpu() for x in tensors]
    beside = table.detach().cpu().requires_grad_()
    kwargs = {"score_mod": lambda s, b, h, i, j: s + beside[h, j - i + 8]}
    expected = torch.autograd.grad(attention(*copies, **kwargs).sin().sum(), beside)[0]
    assert_close(result, expected)


class Model(torch.nn.Module):
    """A layer with a score_mod between parts that torch.compile can compile."""

    def __init__(self, device: str) -> None:
        super().__init__()
        dtype = torch.float64 if device == "cpu" else torch.float32
        self.project = torch.nn.Linear(16, 16, device=device, dtype=dtype)
        self.slopes = torch.nn.Parameter(torch.linspace(0, 1, HEADS, device=device, dtype=dtype))

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        out = attention(self.project(q).sin(), k, v, causal=True, score_mod=self.score_mod)
        return self.project(out).cos()

    def score_mod(self, score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return score - self.slopes[h] * abs(q_idx - k_idx)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_compiled_around(backend: str) -> None:
    torch._dynamo.reset()
    device = "cpu" if backend == "aot_eager" else "cuda"
    model, tensors = Model(device), random_qkv(device)
    inputs = (*tensors, *model.parameters())
    results = []
    for function in (model, torch.compile(model, backend=backend)):
        out = function(*tensors)
        results.append([out, *torch.autograd.grad(out.sum(), inputs)])
    assert_close(results[1], results[0])


@pytest.mark.parametrize("case", CASES)
def test_compiler_stays_outside_after_giving_up_on_the_caller(case: str) -> None:
    """Dynamo then traces each function inside of `attention` separately."""
    torch._dynamo.reset()
    shape, arguments = CASES[case]
    tensors, bias = random_qkv("cpu"), parameter("cpu", *shape)
    given_up = torch.compiler.disable(attention, recursive=False)
    results = []
    for function in (attention, torch.compile(lambda *x, **options: given_up(*x, **options), backend="aot_eager")):
        out = function(*tensors, **arguments(bias))
        results.append([out, *torch.autograd.grad(out.sin().sum(), (*tensors, bias))])
    assert_equal(*results)


def test_a_whole_graph_is_refused() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Model("cpu"), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="leave fullgraph=False"):
        compiled(*random_qkv("cpu"))


@pytest.mark.gpu
def test_graphs_replay_with_new_seeds() -> None:
    tensors, slopes = random_qkv("cuda", torch.bfloat16, dim=64), parameter("cuda", HEADS)
    inputs = (*tensors, slopes)

    def step() -> Any:
        out = attention(*tensors, dropout_p=0.5, **_alibi(slopes))
        return [out, *torch.autograd.grad(out.float().square().sum(), inputs)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    replays = []
    for seed in (7, 7, 8):
        torch.cuda.manual_seed(seed)
        graph.replay()
        replays.append([x.clone() for x in results])
    assert torch.equal(replays[0][0], replays[1][0])
    assert not torch.equal(replays[0][0], replays[2][0])
    for x, y in zip(replays[0], replays[1], strict=True):
        assert_close(x, y, 2e-2)
    graph.replay()
    assert not torch.equal(results[0], replays[2][0])


@pytest.mark.parametrize("name", MASKS)
def test_captured_masks_equal_exact_masks(device: str, name: str) -> None:
    zeros = torch.zeros(1, EXACT_ROWS, 1, 8, device=device)
    mask_mod = with_arrays(MASKS[name], lambda array: torch.from_numpy(array).to(device))
    _, lse = attention(zeros, zeros, zeros, mask_mod=mask_mod, return_lse=True)
    counts = lse.exp().cpu().numpy().ravel()
    np.testing.assert_allclose(counts, exact(MASKS[name]).sum(axis=1), rtol=1e-5)


REBUILDS = pytest.mark.skipif(
    torch.__version__ < torch.torch_version.TorchVersion("2.12"),
    reason="the compiler of PyTorch 2.11 cannot rebuild all ops of cuflash after a graph",
)


@REBUILDS
def test_calls_with_numpy_run_between_compiled_graphs() -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 8, 2, 16), np.float32)
    bias = rng.standard_normal((1, 2, 8, 8), np.float32)
    calls = {
        "plain": lambda: cuflash.forward(q, k, v, causal=True),
        "bias": lambda: cuflash.forward(q, k, v, bias=bias),
        "mask_mod": lambda: cuflash.forward(q, k, v, mask_mod=lambda b, h, i, j: j <= i),
        "dropout": lambda: cuflash.forward(q, k, v, dropout_p=0.5, dropout_seed=3),
        "lse": lambda: cuflash.lse(q, k, bias=bias),
        "backward": lambda: cuflash.backward(v, q, k, v, v, cuflash.lse(q, k))[0],
    }
    for name, function in calls.items():
        torch._dynamo.reset()
        np.testing.assert_array_equal(torch.compile(function, backend="eager")(), function(), err_msg=name)


@REBUILDS
def test_cpu_calls_of_cuflash_run_between_compiled_graphs() -> None:
    q, k, v = torch.randn(3, 1, 8, 2, 16)
    bias, sinks, bounds = torch.randn(1, 2, 8, 8), torch.randn(2), torch.tensor([0, 3, 8], dtype=torch.int32)
    lse = cuflash.lse(q, k, bias=bias)
    calls = {
        "plain": lambda q: cuflash.forward(q, k, v, causal=True),
        "bias": lambda q: cuflash.forward(q, k, v, bias=bias),
        "score_mod": lambda q: cuflash.forward(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[b, h, i, j]),
        "sinks": lambda q: cuflash.forward(q, k, v, sinks=sinks),
        "dropout": lambda q: cuflash.forward(q, k, v, dropout_p=0.5, dropout_seed=3),
        "varlen": lambda q: cuflash.forward(q[0], k[0], v[0], cu_seqlens_q=bounds, cu_seqlens_k=bounds),
        "lse": lambda q: cuflash.lse(q, k, bias=bias),
        "backward": lambda q: cuflash.backward(v, q, k, v, v, lse, bias=bias)[0],
        "merge": lambda q: cuflash.merge_states([q, v], [lse, lse])[0],
    }
    for name, function in calls.items():
        torch._dynamo.reset()
        compiled = torch.compile(lambda q, function=function: function(q + 1) * 2, backend="eager")
        assert torch.equal(compiled(q), function(q + 1) * 2), name
