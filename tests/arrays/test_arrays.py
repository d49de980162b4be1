"""Arrays of each framework: results are of the same framework and device, without copies through the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from libraries import GPU_MAKERS, MAKERS, Producer, as_numpy, torch_of

import cuflash
from cuflash.arrays.cupy import CupyLibrary, _key_of_strides
from cuflash.arrays.find import libraries_of, library_of
from cuflash.arrays.numpy import NUMPY
from cuflash.errors import ProblemError, UnsupportedError
from cuflash.problem.operands import LSE_ONLY
from cuflash.testing import oracle
from cuflash.testing.cases import Case
from cuflash.testing.gradients import BackwardArgs, check

CASE = Case("interop", 2, 60, 70, 4, 2, 64, 64, "float16", causal=True)
BF16 = Case("interop_bf16", 2, 60, 70, 4, 2, 64, 64, "bfloat16", causal=True)


EVERY = [
    *(pytest.param(make, id=name) for name, make in MAKERS.items()),
    *(pytest.param(make, id=f"{name}_on_gpu", marks=pytest.mark.gpu) for name, make in GPU_MAKERS.items()),
]


@pytest.mark.parametrize("algorithm", ["flash2", "standard"])
@pytest.mark.parametrize("case", [CASE, BF16], ids=lambda case: case.name)
@pytest.mark.parametrize("make", EVERY)
def test_arrays_come_back_as_they_went_in(make: Any, case: Case, algorithm: str) -> None:
    arrays = case.arrays()
    q, k, v = map(make, arrays)
    out, lse = cuflash.forward(q, k, v, return_lse=True, algorithm=algorithm, **case.arguments())
    assert type(out) is type(q)
    assert type(lse) is type(q)
    assert out.dtype == q.dtype
    assert "float32" in str(lse.dtype)
    for each in (lse, cuflash.lse(q, k, **case.arguments())):
        oracle.assert_attention(case, arrays, as_numpy(out), as_numpy(each), ulps=1)
    merged, merged_lse = cuflash.merge_states([out, out], [lse, lse])
    assert type(merged) is type(q)
    np.testing.assert_array_equal(as_numpy(merged), as_numpy(out))
    oracle.assert_units("merged lse", as_numpy(merged_lse), as_numpy(lse).astype("f8") + np.log(2), 2)


@pytest.mark.parametrize("framework", MAKERS)
def test_backward_gives_gradients_of_the_callers_framework(framework: str) -> None:
    make = MAKERS[framework]
    arrays = CASE.arrays()
    q, k, v = map(make, arrays)
    out, lse = cuflash.forward(q, k, v, return_lse=True, **CASE.arguments())
    gradients = cuflash.backward(out, q, k, v, out, lse, **CASE.arguments())
    for got, like in zip(gradients, (q, k, v), strict=True):
        assert type(got) is type(like)
        assert (tuple(got.shape), got.dtype) == (tuple(like.shape), like.dtype)
    check(CASE, BackwardArgs(as_numpy(out), *arrays, None, None), tuple(as_numpy(x).astype("f2") for x in gradients))


def test_an_unknown_dlpack_producer_gives_numpy_or_cupy(xp: Any) -> None:
    q, k, v = map(xp.asarray, CASE.arrays())
    got = cuflash.forward(Producer(q), Producer(k), Producer(v), **CASE.arguments())
    assert type(got) is xp.ndarray
    assert bool((got == cuflash.forward(q, k, v, **CASE.arguments())).all())
    with pytest.raises(ProblemError, match="cannot be written to"):
        cuflash.forward(Producer(q), Producer(k), Producer(v), out=Producer(got), causal=True)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_numpy_arrays_of_the_other_byte_order_give_equal_native_results(dtype: str) -> None:
    """Holds for every op, with varlen and with output arrays, which keep their byte order."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((2, 5, 2, 8)).astype(dtype) for _ in range(4))
    used, bias = np.array([3, 5], np.int32), rng.standard_normal((2, 2, 5, 5)).astype("f4")
    cos, sin = rng.standard_normal((2, 9, 4)).astype(dtype)
    out, lse = cuflash.forward(q, k, v, return_lse=True)

    def calls(order: Any) -> list[Any]:
        inputs = [order(x) for x in (q, k, v)]
        varlen_kwargs, gradients, state = (
            {"seqused_k": order(used)},
            [order(dout), *inputs],
            [order(x) for x in (out, lse)],
        )
        caches = [order(np.zeros((2, 9, 2, 8), dtype)) for _ in range(2)]
        rotated = cuflash.append_kv(
            *caches, *inputs[1:], order(used - 3), q=inputs[0], rotary_cos=order(cos), rotary_sin=order(sin)
        )
        written = order(np.empty_like(q)), [order(np.empty_like(x)) for x in (q, k, v)]
        assert cuflash.forward(*inputs, out=written[0], bias=order(bias)) is written[0]
        cuflash.backward(*gradients, *state, grads_out=written[1])
        assert all(x.dtype == order(q).dtype for x in (*caches, written[0], *written[1]))
        results = [
            *cuflash.forward(*inputs, return_lse=True, **varlen_kwargs),
            cuflash.lse(*inputs[:2], bias=order(bias)),
            *cuflash.backward(*gradients, *state),
            *cuflash.merge_states([state[0]] * 3, [state[1], order(lse + 1), order(lse - 1)]),
            rotated,
        ]
        assert all(x.dtype.isnative for x in results)
        return [*results, *caches, written[0], *written[1]]

    natives, swapped = calls(lambda x: x), calls(lambda x: x.astype(x.dtype.newbyteorder("S")))
    for native, other in zip(natives, swapped, strict=True):
        assert native.dtype.name == other.dtype.name
        np.testing.assert_array_equal(other, native)


def test_arrays_of_the_array_api_standard_come_back_as_they_went_in() -> None:
    strict = pytest.importorskip("array_api_strict")
    case = Case("strict", 2, 60, 70, 4, 2, 64, 64, "float32")
    arrays = case.arrays()
    q, k, v = map(strict.asarray, arrays)
    out, lse = cuflash.forward(q, k, v, return_lse=True, out_dtype=strict.float32)
    gradients = cuflash.backward(out, q, k, v, out, lse)
    assert {type(x) for x in (out, lse, *gradients)} == {type(q)}
    expected = cuflash.forward(*arrays, return_lse=True)
    expected += cuflash.backward(expected[0], *arrays, *expected)
    for got, like in zip((out, lse, *gradients), expected, strict=True):
        np.testing.assert_array_equal(np.from_dlpack(got), like)
    mask = cuflash.create_block_mask(lambda b, h, i, j: (i + j) % 2 == 0, 1, 1, 64, 128, like=q)
    assert "100% partial" in repr(mask)


class Standard(Producer):
    """An array with a namespace of the array API standard."""

    @property
    def __array_namespace__(self) -> Any:
        return lambda: SimpleNamespace(from_dlpack=Standard)


def test_a_producer_whose_namespace_reads_dlpack_gets_its_own_arrays_back(xp: Any) -> None:
    arrays = [*map(xp.asarray, CASE.arrays())]
    out, lse = cuflash.forward(*map(Standard, arrays), return_lse=True)
    gradients = cuflash.backward(out, *map(Standard, arrays), out, lse, bias=Standard(xp.zeros((60, 70), "f2")))
    assert {type(x) for x in (out, lse, *gradients)} == {Standard}


def test_producers_of_one_module_get_their_own_arrays_back(xp: Any) -> None:
    first, second = (type(name, (Producer,), {}) for name in ("First", "Second"))
    for kind in (first, second):
        kind.__array_namespace__ = lambda self: SimpleNamespace(from_dlpack=type(self))  # type: ignore[attr-defined]
    arrays = [*map(xp.asarray, CASE.arrays())]
    for kind in (first, second, Producer, first):
        assert type(cuflash.forward(*map(kind, arrays))) is (type(arrays[0]) if kind is Producer else kind)


def test_what_is_no_array_changes_nothing_for_arrays_that_follow() -> None:
    for kind in (np.ndarray, Producer, type("Later", (Producer,), {})):
        with pytest.raises(ProblemError, match=f"q is the class {kind.__name__}, and no array of it; give an array"):
            library_of("q", kind)
    q, k, v = CASE.arrays()
    expected = cuflash.forward(q, k, v)
    # An object with __dlpack__ as an instance attribute must not decide about other objects of its type.
    there = SimpleNamespace(__dlpack__=k.__dlpack__, __dlpack_device__=k.__dlpack_device__)
    assert library_of("k", there).spec("k", there).shape == k.shape
    with pytest.raises(ProblemError, match="k is a SimpleNamespace; give a CuPy"):
        library_of("k", SimpleNamespace())
    np.testing.assert_array_equal(cuflash.forward(q, k, v), expected)


def test_memory_that_dlpack_does_not_carry_is_refused_by_name() -> None:
    q, k, v = (x.astype("f4") for x in CASE.arrays())
    with pytest.raises(UnsupportedError, match=r"k is a .* array of >f4 that cannot be read through DLPack"):
        cuflash.forward(Typed(q), Typed(k.astype(">f4")), Typed(v))
    torch = pytest.importorskip("torch")
    wide = [Typed(torch.from_numpy(x).bfloat16()) for x in (q, k, v)]
    with pytest.raises(UnsupportedError, match=r"q is a .* array of torch.bfloat16 that .*; give float16, float32"):
        cuflash.forward(*wide)


DEVICES: list[Any] = [None, "cpu", 1, (), {}, ("cpu", 0), (None, None), KeyError("none"), TypeError("not now"),
                      BufferError("elsewhere")]  # fmt: skip


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("device", DEVICES, ids=repr)
def test_producers_that_do_not_tell_their_device_are_refused(device: Any) -> None:
    q, k, v = (Producer(x) for x in CASE.arrays())
    nowhere = Producer(k.array, device)
    done = "raised" if isinstance(device, Exception) else "returned"
    for name, arrays in (("the first array", (nowhere, k, v)), ("k", (q, nowhere, v))):
        with pytest.raises(ProblemError) as caught:
            cuflash.forward(*arrays)
        assert str(caught.value).startswith(
            f"{name} does not tell its device: __dlpack_device__ {done} {device!r}; give"
        )


@pytest.mark.parametrize("device", [[np.int32(1), np.uint8(0)], (1, None), (1,)], ids=repr)
def test_producers_may_tell_their_kind_of_device_in_any_integer(device: Any) -> None:
    arrays = [Producer(x, device) for x in CASE.arrays()]
    np.testing.assert_array_equal(cuflash.forward(*arrays), cuflash.forward(*CASE.arrays()))


@pytest.mark.usefixtures("nothing_runs")
def test_deleted_arrays_of_jax_are_refused() -> None:
    jax = pytest.importorskip("jax")
    q, k, v = (jax.numpy.asarray(x) for x in CASE.arrays())
    gone = k + 0
    gone.delete()
    for name, arrays in (("the first array", (gone, k, v)), ("k", (q, gone, v)), ("v", (q, k, gone))):
        with pytest.raises(ProblemError, match=f"^{name} was deleted, or donated to a jitted function; give"):
            cuflash.forward(*arrays)
    with pytest.raises(ProblemError, match=r"^q was deleted"):
        cuflash.plan(gone, k, v)
    with pytest.raises(ProblemError, match=r"^an array that score_mod .* was deleted"):
        cuflash.forward(q, k, v, score_mod=lambda s, b, h, i, j: s + gone[b, j, 0, 0])


def _of_transforms(call: Any, x: Any) -> None:
    """Checks that a function refuses a tensor wrapped by each transform of torch.func."""
    torch = pytest.importorskip("torch")
    transformed = (
        lambda: torch.vmap(call)(torch.stack([x, x])),
        lambda: torch.vmap(torch.vmap(call))(torch.stack([x, x])[None]),
        lambda: torch.func.grad(lambda x: call(x).sum())(x),
        lambda: torch.func.jvp(call, (x,), (x,)),
        lambda: torch.func.functionalize(call)(x),
    )
    for run in transformed:
        with pytest.raises(UnsupportedError, match=r"tensor that torch\.func has wrapped .* attention of cuflash\."):
            run()


def test_tensors_that_torch_transforms_are_refused(device: str) -> None:
    torch = pytest.importorskip("torch")
    case = Case("wrapped", 1, 5, 5, 2, 2, 8, 8, "float32")
    q, k, v = (torch_of(x, device) for x in case.arrays())
    out, lse = cuflash.forward(q, k, v, return_lse=True)  # its cached plan must not serve wrapped tensors
    cuflash.backward(out, q, k, v, out, lse)
    _of_transforms(lambda x: cuflash.forward(x, k, v), q)
    _of_transforms(lambda x: cuflash.forward(q, x, v), k)
    _of_transforms(lambda x: cuflash.forward(q, k, v, bias=x), torch.zeros(5, 5, device=device))
    _of_transforms(lambda x: cuflash.forward(q, k, v, score_mod=lambda s, b, h, i, j: s + x[h]), lse[0, :, 0])
    _of_transforms(lambda x: cuflash.lse(x, k), q)
    _of_transforms(lambda x: cuflash.backward(x, q, k, v, out, lse)[0], out)
    _of_transforms(lambda x: cuflash.merge_states([x, out], [lse, lse])[0], out)
    wrapped = []
    torch.vmap(lambda x: (wrapped.append(x), x)[1])(q)
    with pytest.raises(UnsupportedError, match=r"^q is a tensor that torch\.func has wrapped"):
        cuflash.forward(wrapped[0], k[0], v[0])


class Typed(Producer):
    """A producer with a dtype."""

    @property
    def dtype(self) -> Any:
        return self.array.dtype


def test_cupy_arrays_with_steps_of_a_part_of_an_element_are_refused() -> None:
    cupy = pytest.importorskip("cupy")
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(2**20, 2**16, None, 0), 0)  # which nothing reads
    array = cupy.ndarray((8, 16), "float16", memory, (33, 2))
    with pytest.raises(UnsupportedError, match=r"q has strides of \(33, 2\) bytes, no multiples of the 2"):
        library_of("q", array).spec("q", array)


@pytest.mark.parametrize("contiguity", [True, False], ids=["contiguity", "strides alone"])
def test_keys_of_cupy_arrays_tell_strides_apart_where_they_matter(
    contiguity: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy = pytest.importorskip("cupy")
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(2**20, 2**16, None, 0), 0)  # which nothing reads
    whole = cupy.ndarray((2, 8, 4, 16), "float16", memory)
    library = library_of("q", whole)
    assert isinstance(library, CupyLibrary)
    if not contiguity:
        monkeypatch.setattr(library, "key", _key_of_strides)
    dense = whole[:1]
    odd = cupy.ndarray(dense.shape, dense.dtype, memory, (14, *dense.strides[1:]))
    assert odd.strides != dense.strides
    assert library.spec("q", odd) == library.spec("q", dense)
    assert (library.key((odd,)) == library.key((dense,))) is contiguity
    others = [whole, dense[0], whole[:1, ::2], whole[:1, :4], whole[:1, ::-1], whole.transpose(0, 2, 1, 3)[:1]]
    others.append(cupy.ndarray(dense.shape, "int16", memory))
    assert len({library.key((x,)) for x in (dense, *others)}) == 1 + len(others)
    assert len({library.spec("q", x) for x in (dense, *others)}) == 1 + len(others)
    assert library.key((dense, None)) != library.key((dense,))


@pytest.mark.gpu
def test_torch_results_go_to_cupy_without_a_copy(cupy: Any) -> None:
    q, k, v = (torch_of(x, "cuda") for x in CASE.arrays())
    out = cuflash.forward(q, k, v, causal=True)
    assert cupy.from_dlpack(out).data.ptr == out.data_ptr()


@pytest.mark.gpu
def test_torch_results_go_to_jax_without_a_copy() -> None:
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    jax.devices()  # first: starting JAX makes the last GPU current, and torch exports tensors of that GPU only
    q, k, v = (torch_of(x, "cuda") for x in CASE.arrays())
    out = cuflash.forward(q, k, v, causal=True)
    view = jax.dlpack.from_dlpack(out)
    assert view.unsafe_buffer_pointer() == out.data_ptr()
    np.testing.assert_array_equal(np.asarray(view), out.cpu().numpy())
    assert out.dtype == torch.float16


@pytest.mark.gpu
def test_torch_runs_on_its_current_stream_and_in_its_graphs() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = (torch_of(x, "cuda") for x in CASE.arrays())
    expected = cuflash.forward(q, k, v, causal=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        late = q.clone()
        for _ in range(50):
            late = late * 1.0
        got = cuflash.forward(late, k, v, causal=True)
    side.synchronize()
    assert torch.equal(got, expected)
    graph = torch.cuda.CUDAGraph()
    # thread_local, as calls of CUDA by JAX's threads from earlier tests can end a capture in the default mode.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = cuflash.forward(q, k, v, causal=True)
    new = [torch_of(x, "cuda") for x in CASE.arrays(7)]
    for old, fresh in zip((q, k, v), new, strict=True):
        old.copy_(fresh)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, cuflash.forward(*new, causal=True))


def test_torch_tensors_that_require_grad_are_refused_with_the_way_out(device: str) -> None:
    torch = pytest.importorskip("torch")
    q, k, v = (torch_of(x, device) for x in CASE.arrays())
    expected = cuflash.forward(q, k, v)
    q.requires_grad_()
    with pytest.raises(ProblemError, match=r"q requires grad.*detach"):
        cuflash.forward(q, k, v)
    with torch.no_grad():
        assert torch.equal(cuflash.forward(q, k, v), expected)
    assert torch.equal(cuflash.forward(q.detach(), k, v), expected)


def test_subclasses_belong_to_their_framework_and_other_things_to_none() -> None:
    class Mine(np.ndarray[Any, Any]):
        pass

    assert library_of("q", np.zeros(3).view(Mine)) is NUMPY
    assert libraries_of(LSE_ONLY, (np.zeros(3), np.zeros(4))) == (NUMPY, False)
    with pytest.raises(ProblemError, match="masked array"):
        library_of("q", np.ma.masked_array(np.zeros(3)))
    for thing in ([1.0], None, 3.0, "q"):
        with pytest.raises(ProblemError, match="q is a"):
            library_of("q", thing)
