"""`cuflash.frameworks.jax` on a GPU: the kernels under JAX's transformations, on its streams and in its graphs."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from workers import run_python, run_threads

from cuflash.errors import UnsupportedError
from cuflash.testing import oracle
from cuflash.testing.cases import Case, numpy_dtype
from cuflash.testing.gradients import BackwardArgs, check, upstream

jax = pytest.importorskip("jax")
import jax.numpy as jnp

from cuflash.frameworks.jax import attention, dot_product_attention

pytestmark = pytest.mark.gpu
DTYPES = ("float16", "bfloat16", "float32")


@pytest.fixture(autouse=True)
def gpu() -> Any:
    try:
        jax_device = jax.local_devices(backend="cuda")[0]
    except RuntimeError as error:
        pytest.skip(f"JAX has no GPU here: {error}")
    with jax.default_device(jax_device):
        yield jax_device


def cases(dtype: str) -> list[Case]:
    return [
        Case("causal", 2, 300, 300, 4, 2, 64, 64, dtype, causal=True),
        Case("window", 1, 200, 333, 6, 2, 128, 128, dtype, False, (90, 20), None, 15.0),
        Case("odd", 2, 65, 64, 2, 2, 33, 40, dtype),
        Case("no_keys", 2, 3, 0, 2, 1, 64, 64, dtype),
        Case("counted", 2, 70, 130, 160, 1, 64, 64, dtype, causal=True),
    ]


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", range(5))
def test_values_and_gradients_match_float64(number: int, dtype: str, jitted: bool) -> None:
    case = cases(dtype)[number]
    arrays = case.arrays()
    dout, dlse = upstream(case)

    def both(q: Any, k: Any, v: Any, dout: Any, dlse: Any) -> Any:
        results, pull = jax.vjp(functools.partial(attention, return_lse=True, **case.arguments()), q, k, v)
        return *results, *pull((dout, dlse))

    out, lse, *gradients = (jax.jit(both) if jitted else both)(*map(jnp.asarray, (*arrays, dout, dlse)))
    assert next(iter(out.devices())).platform == "gpu"
    oracle.assert_attention(case, arrays, out, lse, ulps=1)
    check(case, BackwardArgs(dout, *arrays, out, lse, dlse), gradients, ulps=4)


def random(*shapes: tuple[int, ...], dtype: str = "bfloat16") -> list[Any]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def gradients(function: Any) -> Any:
    return jax.grad(lambda *x: (function(*x).astype("float32") ** 2).sum(), (0, 1, 2))


def assert_trees(got: Any, exact: Any, naive: Any, *, ulps: float) -> None:
    """Applies the tolerance rule to trees of arrays."""
    for number, *leaves in zip(itertools.count(), *map(jax.tree.leaves, (got, exact, naive)), strict=False):
        oracle.assert_close(f"leaf {number}", *map(np.asarray, leaves), ulps=ulps)


def assert_right(case: Case, arrays: list[Any], out: Any, grads: Any) -> None:
    """Compares out and the gradients of `(out**2).sum()` to float64."""
    q, k, v, out = map(np.asarray, (*arrays, out))
    oracle.assert_attention(case, (q, k, v), out)
    check(case, BackwardArgs(2 * out, q, k, v, out, None), grads, ulps=4)


@pytest.mark.slow(60)
def test_calls_keep_their_order_among_other_xla_work() -> None:
    x, w = random((1, 2048, 8, 128), (128, 128))

    def program(attend: Any, dtype: str = "bfloat16") -> Any:
        weigh = lambda x: jnp.einsum("bshd,de->bshe", x, w.astype(dtype) / 12)  # noqa: E731
        call = jax.jit(gradients(lambda q, k, v: weigh(attend(weigh(q), weigh(weigh(k)), weigh(v), is_causal=True))))
        return call(*[x.astype(dtype)] * 3)

    naive = program(jax.nn.dot_product_attention)
    with jax.default_matmul_precision("highest"):
        exact = program(jax.nn.dot_product_attention, "float32")
    for _ in range(20):
        assert_trees(program(dot_product_attention), exact, naive, ulps=4)


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_vmap_is_a_loop(axis: int) -> None:
    case = Case("mapped", 2, 130, 130, 4, 4, 64, 64, "bfloat16", causal=True)
    shape = list(case.shapes()[0])
    shape.insert(axis, 3)
    arrays = random(*[tuple(shape)] * 3)
    each = [[jnp.take(x, n, axis) for x in arrays] for n in range(3)]
    call = functools.partial(attention, causal=True)
    out, grads = (jax.jit(jax.vmap(function, axis))(*arrays) for function in (call, gradients(call)))
    shared, shared_grads = (
        jax.vmap(lambda q, f=function: f(q, *each[0][1:]), axis)(arrays[0]) for function in (call, gradients(call))
    )
    for n in range(3):
        assert_right(case, each[n], out[n], [x[n] for x in grads])
        assert_right(case, [each[n][0], *each[0][1:]], shared[n], [x[n] for x in shared_grads])


@pytest.mark.parametrize("remat", [False, True])
def test_a_scan_of_fifty_layers_and_its_gradient(remat: bool) -> None:
    arrays = random(*[(1, 256, 4, 64)] * 3, dtype="float32")

    def plain(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8
        scores = jnp.where(jnp.tril(jnp.ones((256, 256), bool)), scores, -jnp.inf)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    def deep(attend: Any, q: Any, k: Any, v: Any) -> Any:
        layer = lambda x: x + 0.1 * attend(x, k, v)  # noqa: E731
        layer = jax.checkpoint(layer) if remat else layer
        return jax.lax.scan(lambda x, _: (layer(x), None), q, length=50)[0]

    def results(attend: Any, arrays: list[Any]) -> Any:
        function = functools.partial(deep, attend)
        return jax.jit(function)(*arrays), jax.jit(gradients(function))(*arrays)

    got = results(functools.partial(attention, causal=True), arrays)
    with jax.default_matmul_precision("highest"):
        naive = results(plain, arrays)
        with jax.enable_x64(True):
            exact = results(plain, [x.astype("float64") for x in arrays])
    assert_trees(got, exact, naive, ulps=50)  # one for each layer


def test_deterministic_gradients_repeat_bitwise_in_threads() -> None:
    arrays = random(*[(2, 1000, 4, 64)] * 3)
    call = jax.jit(gradients(functools.partial(attention, causal=True, deterministic=True)))
    expected = [np.asarray(x.astype("float32")) for x in call(*arrays)]

    def work(index: int) -> None:
        for _ in range(20):
            for got, first in zip(call(*arrays), expected, strict=True):
                np.testing.assert_array_equal(np.asarray(got.astype("float32")), first)

    run_threads(work, 4)


def test_unsupported_calls_are_refused_while_lowering() -> None:
    with jax.enable_x64(True), pytest.raises(UnsupportedError, match="float64 has no GPU kernel"):
        attention(*[np.zeros((1, 4, 2, 8))] * 3)
    wide = jnp.zeros((1, 4, 2, 500), "float16")
    with pytest.raises(UnsupportedError, match=r"head dims \(500, 500\)"):
        gradients(attention)(wide, wide, wide)


GRAPHS = """
import ctypes, jax, jax.numpy as jnp, pathlib
from cuflash.runtime.driver import function
from cuflash.frameworks.jax import ffi
from cuflash.frameworks.jax import attention, export_checks
captured = []
def logged(run):
    def tell(call):
        answer = ctypes.c_int()
        function("cuStreamIsCapturing", ctypes.c_void_p, ctypes.c_void_p)(call.stream(), ctypes.addressof(answer))
        captured.append(answer.value)
        run(call)
    return tell
for key, run in list(ffi._handlers.items()):
    ffi._handlers[key] = logged(run)
def loss(q, k, v):
    for _ in range(6):
        q = q + attention(q, k, v, causal=True)
    return (q.astype("float32") ** 2).mean()
program = FILE and pathlib.Path(FILE)
if FILE and program.exists():
    call = jax.jit(jax.export.deserialize(bytearray(program.read_bytes())).call)
else:
    call = jax.jit(jax.grad(loss, (0, 1, 2)))
shape = (2, 1024, 32, 64)  # more tiles than SMs: counters hand them out
if FILE and not program.exists():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * 3
    exported = jax.export.export(call, disabled_checks=export_checks())(*shapes)
    program.write_bytes(exported.serialize())
for seed in range(5):  # other arrays, at other addresses
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key in jax.random.split(jax.random.key(seed), 3)]
    for _ in range(4):
        got = call(*arrays)
    print(*(float(jnp.linalg.norm(x.astype("float32"))) for x in got))
    in_use = arrays, got
print(len(captured), sum(captured))
"""


def graphs(file: str, *flags: str) -> tuple[np.ndarray[Any, Any], int, int]:
    """Returns norms of gradients in a separate process, its handler calls, and the calls within a capture."""
    code = f"import jax.export\nFILE = {file!r}\n{GRAPHS}"
    *norms, counts = run_python("-c", code, XLA_FLAGS=" ".join(flags)).strip().split("\n")
    calls, captured = map(int, counts.split())
    return np.array([line.split() for line in norms], float), calls, captured


def assert_same_norms(got: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    """Compares norms of gradients summed in any order, to one unit of bfloat16, their dtype."""
    for x, y in zip(got, expected, strict=True):
        oracle.assert_close("norms", x.astype(numpy_dtype("bfloat16")), y, y)


CAPTURE = "--xla_gpu_graph_min_graph_size=1"
PLAIN = "--xla_gpu_enable_command_buffer="


def test_command_buffers_replay_the_results_of_plain_calls() -> None:
    plain, calls, captured = graphs("", PLAIN)
    assert (calls, captured) == (5 * 4 * 12, 0)
    replayed, again, captured = graphs("", CAPTURE)
    assert captured > 0
    assert again < calls
    assert_same_norms(replayed, plain)


def test_an_exported_program_loads_its_kernels_within_a_capture(tmp_path: Path) -> None:
    pytest.importorskip("flatbuffers")
    file = str(tmp_path / "program")
    expected, *_ = graphs(file, PLAIN)
    loaded, _, captured = graphs(file, CAPTURE)
    assert captured > 0
    assert_same_norms(loaded, expected)


def test_two_gpus_share_a_batch_and_heads() -> None:
    from jax.sharding import Mesh, PartitionSpec

    devices = jax.local_devices(backend="cuda")
    if len(devices) < 2:
        pytest.skip("needs two GPUs")
    case = Case("two", 2, 300, 300, 4, 4, 64, 64, "bfloat16", causal=True)
    arrays = random(*case.shapes())
    call = functools.partial(attention, causal=True)
    for spec in (PartitionSpec("x"), PartitionSpec(None, None, "x")):
        mesh = Mesh(np.array(devices[:2]), ("x",))
        split = jax.shard_map(call, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
        for _ in range(5):
            assert_right(case, arrays, jax.jit(split)(*arrays), jax.jit(gradients(split))(*arrays))
