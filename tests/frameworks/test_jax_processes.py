"""JAX without a GPU in separate processes: imports, exits, caches, exported programs, several devices."""

from __future__ import annotations

from pathlib import Path

import pytest
from workers import run_python

pytest.importorskip("jax")


def run(code: str, **variables: str) -> str:
    """Returns the output of a separate process."""
    return run_python("-c", code, JAX_PLATFORMS="cpu", **variables)


def test_an_import_starts_nothing() -> None:
    code = "import sys, cuflash.frameworks; assert 'jax' not in sys.modules; import cuflash.frameworks.jax\n"
    code += "assert not {'cupy', 'torch'} & set(sys.modules); from jax._src import xla_bridge\n"
    run(code + "assert not xla_bridge.backends_are_initialized()")


CACHED = """
import jax, jax.numpy as jnp, numpy as np
from cuflash.frameworks.jax import attention
hits = []
jax.monitoring.register_event_listener(lambda name, **more: hits.append(name) if name.endswith("cache_hits") else None)
x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 5, 2, 8)), "float32")
for scale in (0.25, 0.5):
    grad = jax.jit(jax.grad(lambda x: attention(x, x, 2 * x, causal=True, softmax_scale=scale).sum()))
    print(np.asarray(grad(x)).tobytes().hex())
print(len(hits))
"""


def test_programs_of_the_persistent_cache_keep_their_options(tmp_path: Path) -> None:
    settings = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}  # fmt: skip
    *first, none = run(CACHED, **settings).split()
    *second, hits = run(CACHED, **settings).split()
    assert first == second
    assert first[0] != first[1]
    assert (int(none), int(hits) >= 2) == (0, True)


EXPORT = """
import jax, jax.numpy as jnp, pathlib
from cuflash.frameworks.jax import attention, export_checks
grad = jax.jit(jax.grad(lambda x: attention(x, x, 2 * x, causal=True).sum()))
exported = jax.export.export(grad, disabled_checks=export_checks())(jax.ShapeDtypeStruct((1, 5, 2, 8), jnp.float32))
pathlib.Path(FILE).write_bytes(exported.serialize())
print(float(grad(jnp.linspace(-1, 1, 80).reshape(1, 5, 2, 8)).std()))
"""
IMPORT = """
import jax, jax.numpy as jnp, pathlib
import cuflash.frameworks.jax
exported = jax.export.deserialize(bytearray(pathlib.Path(FILE).read_bytes()))
print(float(exported.call(jnp.linspace(-1, 1, 80).reshape(1, 5, 2, 8)).std()))
"""


def test_an_exported_program_runs_in_another_process(tmp_path: Path) -> None:
    pytest.importorskip("flatbuffers")
    before = f"import jax.export\nFILE = {str(tmp_path / 'program')!r}\n"
    assert run(before + EXPORT) == run(before + IMPORT)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from functools import partial
from jax.sharding import Mesh, PartitionSpec as P
from cuflash.testing.gradients import BackwardArgs, check
from cuflash.testing.cases import Case
from cuflash.errors import ProblemError, UnsupportedError
from cuflash.frameworks.jax import attention
mesh = Mesh(np.array(jax.devices()), ("x",))
q, k, v = (jax.random.normal(jax.random.key(n), (2, 9, heads, 8)) for n, heads in enumerate((4, 2, 2)))
call = partial(attention, causal=True)
grad = lambda f: jax.grad(lambda *x: (f(*x) ** 2).sum(), (0, 1, 2))
for vma in (True, False):
    for spec in (P("x"), P(None, None, "x")):
        split = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=vma))
        np.testing.assert_array_equal(split(q, k, v), call(q, k, v))
        for got, expected in zip(jax.jit(grad(split))(q, k, v), grad(call)(q, k, v)):
            np.testing.assert_array_equal(got, expected)
# k and v on every device: their gradients are summed
queries = P(None, "x")
q = q[:, :8]
split = jax.shard_map(attention, mesh=mesh, in_specs=(queries, P(), P()), out_specs=queries)
out = np.asarray(attention(q, k, v))
case = Case("split", 2, 8, 9, 4, 2, 8, 8, "float32")
check(case, BackwardArgs(2 * out, *map(np.asarray, (q, k, v)), out, None), jax.jit(grad(split))(q, k, v))
try:
    heads = P(None, None, "x")
    jax.shard_map(attention, mesh=mesh, in_specs=(heads, P(), P()), out_specs=heads)(q[:, :, :2], k, v)
except ProblemError as error:
    print(error)
explicit = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
with jax.set_mesh(explicit):
    put = lambda x, *spec: jax.device_put(x, jax.NamedSharding(explicit, P(*spec)))
    split = [put(x, "x") for x in (q, k, v)]
    term = jax.jit(lambda x, y: jnp.einsum("ij,jk->ik", x, y, out_sharding=P(unreduced={"x"})))
    term = term(put(jnp.ones((9, 4)), None, "x"), put(jnp.ones((4, 8)), "x"))
    summed = lambda x: jax.lax.psum(attention(x, x, x), "x")
    within = jax.shard_map(summed, in_specs=P(unreduced={"x"}), out_specs=P())
    same = jax.jit(lambda x: jax.reshard(x, P(reduced={"x"})))(q)
    reduced = jax.shard_map(attention, in_specs=(P(reduced={"x"}),) * 3, out_specs=P(), check_vma=True)
    for function in (lambda: attention(*split), lambda: jax.vmap(attention)(*split),
                     lambda: attention(term, term, term), lambda: jax.jit(within)(term),
                     lambda: jax.jit(reduced)(same, same, same)):
        try:
            function()
        except UnsupportedError as error:
            print(error)
"""


def test_shards_of_batch_and_heads_and_their_gradients() -> None:
    heads, *others = run(SHARDED, XLA_FLAGS="--xla_force_host_platform_device_count=2").strip().split("\n")
    assert heads.startswith("q has 1 heads and k has 2; heads_q must be a multiple")
    assert heads.endswith("The shapes are of one shard, over x")
    split, unreduced, (reduced,) = others[:2], others[2:4], others[4:]
    assert [text.startswith("q is split over devices by explicit mesh axes") for text in split] == [True] * 2
    assert [text.startswith("q is unreduced over mesh axes x") for text in unreduced] == [True] * 2
    assert "jax.shard_map" in split[0]
    assert "jax.lax.psum" in unreduced[0]
    assert reduced.startswith("q is reduced over mesh axes x")
    assert "jax.lax.pcast" in reduced


EAGER = """
import jax, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import cuflash
from cuflash.errors import UnsupportedError
mesh = jax.make_mesh((2,), ("x",))
q, lse = jnp.ones((2, 9, 2, 8)), jnp.ones((2, 2, 9))
for spec in (P("x"), P()):
    split = jax.device_put(q, NamedSharding(mesh, spec))
    for call in (lambda: cuflash.forward(split, q, q), lambda: cuflash.forward(q, split, q),
                 lambda: cuflash.lse(q, split), lambda: cuflash.backward(split, q, q, q, q, lse),
                 lambda: cuflash.merge_states([split, q], [lse, lse]),
                 lambda: cuflash.plan(split, q, q), lambda: cuflash.forward(split, q, q, dropout_p=0.5, dropout_seed=1),
                 lambda: cuflash.create_block_mask(lambda b, h, i, j: i % 2 == j % 2, 1, 1, 9, 9, like=split)):
        try:
            call()
        except UnsupportedError as error:
            print(error)
"""


def test_eager_calls_refuse_arrays_on_several_devices() -> None:
    lines = run(EAGER, XLA_FLAGS="--xla_force_host_platform_device_count=2").strip().split("\n")
    names = ["the first array", "k", "k", "dout", "the first array", "q", "the first array", "the first array"] * 2
    assert [
        text.partition(" lies on 2 devices; take attention of cuflash.frameworks.jax")[0] for text in lines
    ] == names


ENDS = """
import jax
from cuflash.frameworks.jax import attention
x = jax.random.normal(jax.random.key(0), (8, 2000, 2, 64))
SAVED = jax.grad(lambda q: attention(q, x, x).sum())(x)
"""


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_process_ends_while_a_gradient_is_computed(is_stored: bool) -> None:
    run(ENDS.replace("SAVED = ", "gradient = " if is_stored else ""))


MOD_EXPORT = """
import jax.export
import jax, jax.numpy as jnp, pathlib
from cuflash.frameworks.jax import attention, export_checks
slopes = jnp.linspace(0, 1, 2)
mod = lambda s, b, h, i, j: jnp.tanh(s) - slopes[h] * abs(i - j)
call = lambda q, sinks: attention(q, q, q, score_mod=mod, mask_mod=lambda b, h, i, j: i % 2 <= j, sinks=sinks)
grad = jax.jit(jax.grad(lambda *x: (call(*x) ** 2).sum(), (0, 1)))
shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 5, 2, 8), (2,))]
exported = jax.export.export(grad, disabled_checks=export_checks())(*shapes)
pathlib.Path(FILE).write_bytes(exported.serialize())
print([float(x.std()) for x in grad(jnp.linspace(-1, 1, 80).reshape(1, 5, 2, 8), jnp.arange(2.0))])
"""
MOD_IMPORT = """
import jax.export
import jax, jax.numpy as jnp, pathlib
import cuflash.frameworks.jax
exported = jax.export.deserialize(bytearray(pathlib.Path(FILE).read_bytes()))
print([float(x.std()) for x in exported.call(jnp.linspace(-1, 1, 80).reshape(1, 5, 2, 8), jnp.arange(2.0))])
"""


def test_exported_programs_hold_mods(tmp_path: Path) -> None:
    pytest.importorskip("flatbuffers")
    before = f"FILE = {str(tmp_path / 'program')!r}\n"
    assert run(before + MOD_EXPORT) == run(before + MOD_IMPORT)


MOD_SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from cuflash.frameworks.jax import attention
mesh = Mesh(np.array(jax.devices()), ("x",))
q, k, v = (jax.random.normal(jax.random.key(n), (2, 9, heads, 8)) for n, heads in enumerate((4, 2, 2)))
slopes, sinks, bias = jnp.linspace(0.1, 1, 4), jnp.linspace(-1, 1, 4), jax.random.normal(jax.random.key(9), (4, 1, 9))
def call(q, k, v, slopes, sinks, bias):
    mod = lambda s, b, h, i, j: s - slopes[h] * abs(i - j)
    return attention(q, k, v, score_mod=mod, sinks=sinks, bias=bias, return_lse=True)
for of_lse in (False, True):
    grad = lambda f: jax.grad(lambda *x: (f(*x)[of_lse] ** 2).sum(), range(6))
    for specs, out in (((P("x"),) * 3 + (P(),) * 3, (P("x"), P("x"))),
                       ((P(None, None, "x"),) * 3 + (P("x"),) * 3, (P(None, None, "x"), P(None, "x")))):
        split = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=out)
        given = q, k, v, slopes, sinks, bias
        for got, wanted in zip(jax.jit(grad(split))(*given), grad(call)(*given)):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
"""


def test_shards_with_mods() -> None:
    run(MOD_SHARDED, XLA_FLAGS="--xla_force_host_platform_device_count=2")
