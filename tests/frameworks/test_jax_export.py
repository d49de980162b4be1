"""Programs that `jax.export` writes: platforms, gradients, and disabled checks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cuflash.errors import UnsupportedError

jax = pytest.importorskip("jax")
import jax.numpy as jnp
from jax import export

from cuflash.frameworks.jax import attention, export_checks


@pytest.fixture(autouse=True)
def on_the_cpu() -> Any:
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def test_symbolic_shapes_are_refused_where_kernels_need_numbers() -> None:
    symbolic = jax.ShapeDtypeStruct(export.symbolic_shape("b, 4, 2, 8"), jnp.float32)
    with pytest.raises(UnsupportedError, match=r"symbolic shape \(b, 4, 2, 8\)"):
        export.export(jax.jit(attention))(symbolic, symbolic, symbolic)


def test_a_program_for_the_cpu_may_be_mapped_over_any_number() -> None:
    symbolic = jax.ShapeDtypeStruct(export.symbolic_shape("b, 4, 2, 8"), jnp.float32)
    program = export.export(jax.jit(jax.vmap(attention)), platforms=["cpu"], disabled_checks=export_checks())(
        *[symbolic] * 3
    )
    for batch in (1, 5):
        arrays = [jax.random.normal(jax.random.key(n), (batch, 4, 2, 8)) for n in range(3)]
        np.testing.assert_array_equal(program.call(*arrays), attention(*arrays))


def test_programs_are_exported_with_export_checks() -> None:
    """With gradients; for a GPU from a machine without one, forward alone."""
    q, k, v = (jax.random.normal(jax.random.key(n), (1, 6, 2, 8)) for n in range(3))
    loss = jax.jit(lambda *x: attention(*x, causal=True).sum())
    with pytest.raises(ValueError, match=r"(?s)compatibility guarantees.*cuflash_forward"):
        export.export(loss)(q, k, v)
    checks = {"disabled_checks": export_checks()}
    exported = export.export(loss, platforms=["cpu"], **checks)(q, k, v)
    np.testing.assert_array_equal(exported.call(q, k, v), loss(q, k, v))
    assert exported.vjp().platforms == ("cpu",)
    with pytest.raises(ValueError, match="cuflash_backward"):
        export.export(jax.jit(jax.grad(loss)), disabled_checks=export_checks()[:1], platforms=["cpu"])(q, k, v)
    for got, expected in zip(
        jax.grad(exported.call, (0, 1, 2))(q, k, v), jax.grad(loss, (0, 1, 2))(q, k, v), strict=True
    ):
        np.testing.assert_array_equal(got, expected)
    pytest.importorskip("flatbuffers")
    for order in (0, 1):
        again = export.deserialize(exported.serialize(vjp_order=order))
        np.testing.assert_array_equal(again.call(q, k, v), loss(q, k, v))
        assert again.has_vjp() == bool(order)
    np.testing.assert_array_equal(jax.grad(again.call)(q, k, v), jax.grad(loss)(q, k, v))


def test_forward_is_exported_for_gpus_without_a_gpu() -> None:
    if any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("needs a machine without a GPU")
    q = jax.random.normal(jax.random.key(0), (1, 7, 2, 8))
    checks = {"disabled_checks": export_checks()}
    with pytest.raises(ValueError, match=r"exported for platforms .*cuda.* but it is used on .*cpu"):
        export.export(jax.jit(attention), platforms=["cuda"], **checks)(q, q, q).call(q, q, q)
    exported = export.export(jax.jit(attention), platforms=["cpu", "cuda"], **checks)(q, q, q)
    np.testing.assert_array_equal(exported.call(q, q, q), attention(q, q, q))
    with pytest.raises(UnsupportedError, match=r'export on a machine that has one, or for platforms=\["cpu"\], or'):
        exported.vjp()
