"""`cuflash.frameworks.jax` on a GPU: the kernels under JAX's transformations, on its streams and in its graphs."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from workers import run_python, run_threads

from cuflash.bench.cases import Case, numpy_dtype
from cuflash.errors import UnsupportedError

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the other tests need memory, too
jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from cuflash.frameworks.jax import attention, dot_product_attention  # noqa: E402

pytestmark = pytest.mark.gpu
DTYPES = ("float16", "bfloat16", "float32")


@pytest.fixture(autouse=True)
def gpu() -> Any:
    try:
        found = jax.local_devices(backend="cuda")[0]
    except RuntimeError as error:
        pytest.skip(f"JAX has no GPU here: {error}")
    with jax.default_device(found):
        yield found


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
def test_values_and_gradients_are_those_of_float64(number: int, dtype: str, jitted: bool) -> None:
    case = cases(dtype)[number]
    arrays = case.arrays()
    rng = np.random.default_rng(1)
    exact, exact_lse = oracle.attention64(case, *arrays)
    rough, rough_lse = oracle.naive(case, *arrays)
    dout = rng.standard_normal(exact.shape).astype(numpy_dtype(dtype))
    dlse = rng.standard_normal(exact_lse.shape).astype("float32")

    def both(q: Any, k: Any, v: Any, dout: Any, dlse: Any) -> Any:
        results, pull = jax.vjp(functools.partial(attention, return_lse=True, **case.arguments()), q, k, v)
        return *results, *pull((dout, dlse))

    out, lse, *gradients = (jax.jit(both) if jitted else both)(*map(jnp.asarray, (*arrays, dout, dlse)))
    assert next(iter(out.devices())).platform == "gpu"
    oracle.assert_close("out", out, exact, rough)
    oracle.assert_close("lse", lse, exact_lse, rough_lse)
    wanted = oracle.gradients64(case, dout, *arrays, dlse)
    naive = oracle.naive_gradients(case, dout, *arrays, dlse)
    for name, got, right, near in zip("qkv", gradients, wanted, naive, strict=True):
        oracle.assert_close(f"d{name}", got, right, near, ulps=4)


def random(*shapes: tuple[int, ...], dtype: str = "bfloat16") -> list[Any]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def near(got: Any, wanted: Any, bound: float = 0.03) -> None:
    """Trees of arrays agree to `bound` of their largest element."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        x, y = np.asarray(x, "f4"), np.asarray(y, "f4")
        assert np.isfinite(x).all()
        assert np.abs(x - y).max(initial=0) <= bound * np.abs(y).max(initial=1)


def gradients(function: Any) -> Any:
    return jax.grad(lambda *x: (function(*x).astype("float32") ** 2).mean(), (0, 1, 2))


def test_between_other_work_of_xla_it_is_in_order() -> None:
    x, w = random((1, 2048, 8, 128), (128, 128))
    weigh = lambda x: jnp.einsum("bshd,de->bshe", x, w / 12)  # noqa: E731
    ours, theirs = (
        jax.jit(gradients(lambda q, k, v, f=f: weigh(f(weigh(q), weigh(weigh(k)), weigh(v), is_causal=True))))
        for f in (dot_product_attention, jax.nn.dot_product_attention)
    )
    wanted = theirs(x, x, x)
    for _ in range(20):
        near(ours(x, x, x), wanted, 0.05)


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_vmap_is_a_loop(axis: int) -> None:
    shape = [2, 130, 4, 64]
    shape.insert(axis, 3)
    arrays = random(*[tuple(shape)] * 3)
    call = functools.partial(attention, causal=True)
    for function in (call, gradients(call)):
        loop = [function(*(jnp.take(x, n, axis) for x in arrays)) for n in range(3)]
        near(jax.jit(jax.vmap(function, axis))(*arrays), jax.tree.map(lambda *x: jnp.stack(x), *loop), 0.01)
        shared = [function(jnp.take(arrays[0], n, axis), *(jnp.take(x, 0, axis) for x in arrays[1:])) for n in range(3)]
        got = jax.vmap(lambda q, f=function: f(q, *(jnp.take(x, 0, axis) for x in arrays[1:])), axis)(arrays[0])
        near(got, jax.tree.map(lambda *x: jnp.stack(x), *shared), 0.01)


@pytest.mark.parametrize("remat", [False, True])
def test_a_scan_of_fifty_layers_and_its_gradient(remat: bool) -> None:
    q, k, v = random(*[(1, 256, 4, 64)] * 3, dtype="float32")

    def deep(attend: Any, q: Any, k: Any, v: Any) -> Any:
        layer = lambda x: x + 0.1 * attend(x, k, v, is_causal=True)  # noqa: E731
        layer = jax.checkpoint(layer) if remat else layer
        return jax.lax.scan(lambda x, _: (layer(x), None), q, length=50)[0]

    ours, theirs = (functools.partial(deep, f) for f in (dot_product_attention, jax.nn.dot_product_attention))
    with jax.default_matmul_precision("highest"):
        near(jax.jit(ours)(q, k, v), jax.jit(theirs)(q, k, v), 1e-4)
        near(jax.jit(gradients(ours))(q, k, v), jax.jit(gradients(theirs))(q, k, v), 1e-3)


def test_deterministic_gradients_repeat_bitwise_and_threads_do_not_meet() -> None:
    arrays = random(*[(2, 1000, 4, 64)] * 3)
    call = jax.jit(gradients(functools.partial(attention, causal=True, deterministic=True)))
    wanted = [np.asarray(x.astype("float32")) for x in call(*arrays)]

    def work(index: int) -> None:
        for _ in range(20):
            for got, first in zip(call(*arrays), wanted, strict=True):
                np.testing.assert_array_equal(np.asarray(got.astype("float32")), first)

    run_threads(work, 4)


def test_what_no_kernel_takes_is_told_while_lowering() -> None:
    with jax.enable_x64(True), pytest.raises(UnsupportedError, match="float64 has no GPU kernel"):
        attention(*[np.zeros((1, 4, 2, 8))] * 3)
    wide = jnp.zeros((1, 4, 2, 500), "float16")
    with pytest.raises(UnsupportedError, match=r"head dims \(500, 500\)"):
        gradients(attention)(wide, wide, wide)


GRAPHS = """
import ctypes, jax, jax.numpy as jnp, pathlib
from cuflash.driver import function
from cuflash.frameworks import xla_ffi
from cuflash.frameworks.jax import attention
captured = []
def told(run):
    def tell(call):
        answer = ctypes.c_int()
        function("cuStreamIsCapturing", ctypes.c_void_p, ctypes.c_void_p)(call.stream(), ctypes.addressof(answer))
        captured.append(answer.value)
        run(call)
    return tell
for key, run in list(xla_ffi._handlers.items()):
    xla_ffi._handlers[key] = told(run)
def loss(q, k, v):
    for _ in range(6):
        q = q + attention(q, k, v, causal=True)
    return (q.astype("float32") ** 2).mean()
program = FILE and pathlib.Path(FILE)
if FILE and program.exists():
    call = jax.jit(jax.export.deserialize(bytearray(program.read_bytes())).call)
else:
    call = jax.jit(jax.grad(loss, (0, 1, 2)))
shape = (2, 1024, 32, 64)  # more tiles than multiprocessors: counters hand them out
if FILE and not program.exists():
    checks = [jax.export.DisabledSafetyCheck.custom_call(f"cuflash_{op}") for op in ("forward", "backward")]
    made = jax.export.export(call, disabled_checks=checks)(*[jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * 3)
    program.write_bytes(made.serialize())
for seed in range(5):  # other arrays, at other addresses
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key in jax.random.split(jax.random.key(seed), 3)]
    for _ in range(4):
        got = call(*arrays)
    print(*(float(jnp.linalg.norm(x.astype("float32"))) for x in got))
    kept = arrays, got
print(len(captured), sum(captured))
"""


def graphs(file: str, *flags: str) -> tuple[np.ndarray[Any, Any], int, int]:
    """Norms of gradients in a process of its own, how often handlers were called, and how often within a capture."""
    code = f"import jax.export\nFILE = {file!r}\n{GRAPHS}"
    *norms, counts = run_python("-c", code, XLA_FLAGS=" ".join(flags)).strip().split("\n")
    calls, captured = map(int, counts.split())
    return np.array([line.split() for line in norms], float), calls, captured


CAPTURE = "--xla_gpu_graph_min_graph_size=1"
PLAIN = "--xla_gpu_enable_command_buffer="


def test_command_buffers_replay_what_plain_calls_compute() -> None:
    plain, calls, captured = graphs("", PLAIN)
    assert (calls, captured) == (5 * 4 * 12, 0)
    replayed, again, captured = graphs("", CAPTURE)
    assert captured > 0
    assert again < calls
    np.testing.assert_allclose(replayed, plain, rtol=1e-2)


def test_an_exported_program_loads_its_kernels_within_a_capture(tmp_path: Path) -> None:
    pytest.importorskip("flatbuffers")
    file = str(tmp_path / "program")
    wanted, *_ = graphs(file, PLAIN)
    loaded, _, captured = graphs(file, CAPTURE)
    assert captured > 0
    np.testing.assert_allclose(loaded, wanted, rtol=1e-2)


def test_two_gpus_share_a_batch_and_heads() -> None:
    from jax.sharding import Mesh, PartitionSpec

    devices = jax.local_devices(backend="cuda")
    if len(devices) < 2:
        pytest.skip("needs two GPUs")
    arrays = random(*[(2, 300, 4, 64)] * 3)
    call = functools.partial(attention, causal=True)
    for spec in (PartitionSpec("x"), PartitionSpec(None, None, "x")):
        mesh = Mesh(np.array(devices[:2]), ("x",))
        split = jax.shard_map(call, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
        for _ in range(5):
            near(jax.jit(split)(*arrays), call(*arrays), 0.01)
            near(jax.jit(gradients(split))(*arrays), gradients(call)(*arrays), 0.02)
