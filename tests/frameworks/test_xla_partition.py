"""Calls under plain jit are partitioned over batch and heads; no device gathers needless arrays."""

from __future__ import annotations

import pytest
from workers import run_python

pytest.importorskip("jax")

SETUP = """
import re, sys
import jax, jax.numpy as jnp, numpy as np
from functools import partial
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from cuflash.frameworks.jax import attention, ragged_paged_attention
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
COLLECTIVES = r"\\b(all-gather|all-reduce|all-to-all|collective-permute)(-start)?\\("

def normal(n, *shape):
    return jax.random.normal(jax.random.key(n), shape)

def loss(call, *arrays):
    out, lse = call(*arrays)
    return (out**2).sum() + jnp.where(jnp.isneginf(lse), 0, lse**2).sum()

def check(call, arrays, specs, gradients=3):
    # Results equal the results on one device. Returns how often devices exchange something, and how results are split.
    functions = [call]
    if gradients:
        functions.append(jax.grad(partial(loss, call), tuple(range(gradients))))
    counts = []
    for function in functions:
        wanted = jax.jit(function)(*arrays)
        split = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
        text = jax.jit(function).lower(*split).compile().as_text()
        got = jax.jit(function)(*split)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)
        counts.append((len(re.findall(COLLECTIVES, text)), jax.tree.leaves(got)[0].sharding.shard_shape(got[0].shape)))
    return counts
"""

DENSE = """
q, k, v = (normal(n, 8, 12, heads, 8) for n, heads in enumerate((4, 2, 2)))
call = partial(attention, causal=True, return_lse=True)
shapes = {P("x"): (2, 12, 4, 8), P("x", None, "y"): (2, 12, 2, 8), P(None, None, "y"): (8, 12, 2, 8),
          P(("x", "y")): (1, 12, 4, 8)}
for spec, shape in shapes.items():
    assert check(call, (q, k, v), (spec,) * 3) == [(0, shape)] * 2, spec
# More parts of the heads of q than kv heads; rows and head dims, which are whole on every device; nothing at all.
for specs in ((P("y", None, "x"), P("y"), P("y")), (P(None, "x"),) * 3, (P(None, None, None, "y"),) * 3):
    assert all(count > 0 for count, _ in check(call, (q, k, v), specs)), specs
assert [count for count, _ in check(call, (q, k, v), (P(),) * 3)] == [0, 0]
# k and v on all devices are split as q is; without batch; a batch that has no equal parts.
assert [x[1] for x in check(call, (q, k, v), (P("x"), P(), P()))] == [(2, 12, 4, 8)] * 2
assert check(call, (q[0], k[0], v[0]), (P(None, "y"),) * 3) == [(0, (12, 2, 8))] * 2
one = q, k[:, :, :1], v[:, :, :1]
assert check(call, one, (P("x"),) * 3) == [(0, (2, 12, 4, 8))] * 2
assert [count > 0 for count, _ in check(call, one, (P(None, None, "y"), P(), P()))] == [True] * 2
odd = [jnp.concatenate([x[:2], x[:1]]) for x in (q, k, v)]
halves = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("y")))
uneven = jax.jit(lambda *arrays: call(*map(halves, arrays)))
for x, y in zip(uneven(*odd), call(*odd), strict=True):
    np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)
"""

TRANSFORMED = """
q, k, v = (normal(n, 8, 3, 12, heads, 8) for n, heads in enumerate((4, 2, 2)))
call = jax.vmap(partial(attention, causal=True, return_lse=True))
assert check(call, (q, k, v), (P("x", None, None, "y"),) * 3) == [(0, (2, 3, 12, 2, 8))] * 2
def layers(x, weights):
    return jax.lax.scan(jax.checkpoint(lambda x, w: (attention(x * w, x, x, causal=True), None)), x, weights)[0]
grad = jax.jit(jax.grad(lambda x, weights: layers(x, weights).sum()))
x, weights = normal(5, 8, 12, 2, 8), jnp.arange(1.0, 4.0)
split = jax.device_put(x, NamedSharding(mesh, P("x", None, "y")))
np.testing.assert_allclose(grad(split, weights), grad(x, weights), rtol=1e-4, atol=1e-5)
assert not re.search(COLLECTIVES, grad.lower(split, weights).compile().as_text())
"""

LENGTHS = """
q, k, v = (normal(n, 8, 12, heads, 8) for n, heads in enumerate((4, 2, 2)))
used = jnp.array([12, 0, 3, 5, 1, 12, 7, 9], jnp.int32)
call = lambda q, k, v, used: attention(q, k, v, seqused_k=used, return_lse=True)
for spec, of_used, shape in ((P("x", None, "y"), P("x"), (2, 12, 2, 8)), (P(None, None, "y"), P(), (8, 12, 2, 8))):
    assert check(call, (q, k, v, used), (spec,) * 3 + (of_used,)) == [(0, shape)] * 2, spec
packed = [x.reshape(96, -1, 8) for x in (q, k, v)]
bounds = jnp.array([0, 11, 11, 50, 96], jnp.int32)
call = lambda q, k, v, bounds: attention(q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds, return_lse=True)
assert check(call, (*packed, bounds), (P(None, "y"),) * 3 + (P(),)) == [(0, (96, 2, 8))] * 2
assert all(count > 0 for count, _ in check(call, (*packed, bounds), (P("x"),) * 3 + (P(),)))
pages = normal(7, 10, 16, 4, 8)
paged = lambda q, pages: (ragged_paged_attention(q, pages, jnp.array([20, 5], jnp.int32), jnp.arange(4).reshape(2, 2),
                          jnp.array([0, 7, 12]), jnp.array([2], jnp.int32)),)
assert check(paged, (q[0], pages), (P(None, "y"), P(None, None, "y")), gradients=0) == [(0, (12, 2, 8))]
"""

OTHERS = """
q, k, v = (normal(n, 8, 12, heads, 8) for n, heads in enumerate((4, 2, 2)))
slopes = jnp.linspace(0.1, 1, 4)
def own(q, k, v, slopes):
    return attention(q, k, v, score_mod=lambda s, b, h, i, j: s - (slopes[h] + b) * abs(i - j), return_lse=True)
# b and h count over all devices
assert check(own, (q, k, v, slopes), (P("x", None, "y"),) * 3 + (P(),), gradients=4)[0][0] > 0
jax.config.update("jax_use_shardy_partitioner", False)
assert check(partial(attention, causal=True, return_lse=True), (q, k, v), (P("x", None, "y"),) * 3)[0][0] > 0
"""

EXPORTED = """
import jax.export
from cuflash.frameworks.jax import export_checks
x = jax.device_put(normal(0, 8, 12, 2, 8), NamedSharding(mesh, P("x")))
call = jax.jit(lambda x: attention(x, x, x, causal=True))
for of in (mesh, mesh.abstract_mesh):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(of, P("x")))
    made = jax.export.export(call, disabled_checks=export_checks(), platforms=["cpu"])(shape).serialize()
    got = jax.jit(jax.export.deserialize(made).call)(x)
    np.testing.assert_allclose(got, call(x), rtol=2e-5, atol=2e-5)
"""


@pytest.mark.parametrize(
    "code",
    [DENSE, TRANSFORMED, LENGTHS, OTHERS, EXPORTED],
    ids=["dense", "transformed", "lengths", "others", "exported"],
)
def test_partitioned_results_equal_one_device_without_needless_gathers(code: str) -> None:
    if code is EXPORTED:
        pytest.importorskip("flatbuffers")
    run_python("-c", SETUP + code, JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=8")
