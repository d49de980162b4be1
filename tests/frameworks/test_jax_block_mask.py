"""Block masks in `cuflash.frameworks.jax`: operands of a call, plain and under transformations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import ProblemError, UnsupportedError, mods

jax = pytest.importorskip("jax")
jnp = jax.numpy
attention = pytest.importorskip("cuflash.frameworks.jax").attention

BATCH, ROWS, KEYS, HEADS, HEADS_KV, DIM = 2, 130, 200, 4, 2, 16


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True)
def device(request: Any) -> Iterator[str]:
    try:
        jax_device = jax.local_devices(backend=request.param)[0]
    except RuntimeError as error:
        pytest.skip(f"JAX has no GPU here: {error}")
    with jax.default_device(jax_device), jax.default_matmul_precision("highest"):
        yield request.param


only_on_the_cpu = pytest.mark.parametrize("device", ["cpu"], indirect=True)


def arrays(*lead: int) -> list[Any]:
    shapes = (BATCH, ROWS, HEADS, DIM), (BATCH, KEYS, HEADS_KV, DIM), (BATCH, KEYS, HEADS_KV, DIM)
    return [jax.random.normal(jax.random.key(n), (*lead, *shape)) for n, shape in enumerate(shapes)]


def of_heads_and_batch(ends: Any) -> Any:
    return lambda b, h, q, k: (k < ends[b]) & ((q // 64 + h) % 3 != k // 64)


def documents(ends: Any) -> Any:
    return lambda b, h, q, k: (q < ends[0]) == (k < ends[0])


def block_mask_of(mask_mod: Any, batch: int = 1, heads: int = 1, keys: int = KEYS, **more: Any) -> cuflash.BlockMask:
    return cuflash.create_block_mask(mask_mod, batch, heads, ROWS, keys, **({"like": jnp.zeros(())} | more))


def loss(q: Any, k: Any, v: Any, **more: Any) -> Any:
    out, lse = attention(q, k, v, return_lse=True, **more)
    return (out**2).sum() + jnp.where(jnp.isneginf(lse), 0, jnp.sin(lse)).sum()


def assert_close(result: Any, expected: Any) -> None:
    result, expected = jax.tree.leaves(result), jax.tree.leaves(expected)
    assert len(result) == len(expected)
    for x, y in zip(result, expected, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=3e-5, atol=2e-4)


CASES = {"shared": (documents, 1, 1), "of all": (of_heads_and_batch, BATCH, HEADS)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_block_mask_equals_its_mask_mod(name: str, jitted: bool) -> None:
    maker, batch, heads = CASES[name]
    mask_mod, slopes = maker(jnp.asarray([70, 150])), jnp.linspace(0.01, 0.3, HEADS)
    tilted = lambda slopes: lambda s, b, h, i, j: s - slopes[h] * jnp.abs(i - j)  # noqa: E731
    block_mask = block_mask_of(mask_mod, batch, heads)
    for more in ({}, {"mask_mod": mask_mod}):
        function, reference = (
            jax.value_and_grad(lambda q, k, v, s, g=kwargs: loss(q, k, v, score_mod=tilted(s), **g), range(4))
            for kwargs in ({"block_mask": block_mask, **more}, {"mask_mod": mask_mod})
        )
        assert_close((jax.jit(function) if jitted else function)(*arrays(), slopes), reference(*arrays(), slopes))


def test_a_program_takes_new_block_masks_as_arguments() -> None:
    q, k, v = arrays()
    traced = []

    @jax.jit
    def step(q: Any, block_mask: Any) -> Any:
        traced.append(block_mask)
        return jax.grad(lambda q: loss(q, k, v, block_mask=block_mask))(q)

    for ends in ([70, 150], [140, 30]):
        mask_mod = of_heads_and_batch(jnp.asarray(ends))
        expected = jax.grad(lambda q, mask_mod=mask_mod: loss(q, k, v, mask_mod=mask_mod))(q)
        assert_close(step(q, block_mask_of(mask_mod, BATCH, HEADS)), expected)
    assert len(traced) == 1
    step(q, block_mask_of(documents(jnp.asarray([70]))))
    assert len(traced) == 2


# Axes of q and of the block mask.
@pytest.mark.parametrize("axes", [(0, None), (1, None), (2, None), (0, 0), (1, 0), (2, 0), (None, 0)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_vmap(name: str, axes: tuple[int | None, int | None]) -> None:
    maker, batch, heads = CASES[name]
    q, k, v = arrays()
    masks = [block_mask_of(maker(jnp.asarray(ends)), batch, heads) for ends in ([70, 150], [140, 30], [0, 200])]
    qs = [q, -q, 2 * q]
    mapped = (
        q if axes[0] is None else jnp.stack(qs, axes[0]),
        masks[0] if axes[1] is None else jax.tree.map(lambda *x: jnp.stack(x), *masks),
    )
    call = jax.value_and_grad(lambda q, k, block_mask: loss(q, k, v, block_mask=block_mask), (0, 1))
    each = [call(q if axes[0] is None else qs[n], k, masks[0 if axes[1] is None else n]) for n in range(3)]
    result = jax.vmap(call, (axes[0], None, axes[1]))(mapped[0], k, mapped[1])
    assert_close(result, jax.tree.map(lambda *x: jnp.stack(x), *each))


def test_vmap_of_dropout() -> None:
    q, k, v = arrays(2)
    block_mask = block_mask_of(of_heads_and_batch(jnp.asarray([70, 150])), BATCH, HEADS)
    call = lambda q, k, v: attention(q, k, v, block_mask=block_mask, dropout_p=0.3, dropout_seed=1)  # noqa: E731
    assert_close(jax.vmap(call)(q, k, v), jnp.stack([call(q[n], k[n], v[n]) for n in range(2)]))


@only_on_the_cpu
def test_calls_read_the_mask_tiles() -> None:
    block_mask = block_mask_of(lambda b, h, q, k: (q + k) % 3 != 0)
    block_mask = jax.tree.map(lambda mask_tiles: mask_tiles.at[:, :, :, 1:].set(0), block_mask)
    program = str(jax.make_jaxpr(lambda *x: attention(*x, block_mask=block_mask))(*arrays()))
    assert "i8[1,1,3,4]" in program
    assert "'mask_tiles'" in program


def test_block_masks_with_lengths_require_them_in_calls() -> None:
    q, k, v = arrays()
    used = jnp.asarray([60, 190], jnp.int32)
    mask_mod = lambda b, h, i, j: (j < mods.seqlen_k() - 50) & ((i + j) % 7 != 0)  # noqa: E731
    block_mask = block_mask_of(mask_mod, BATCH, seqused_k=used)
    grads, expected = (
        jax.jit(jax.grad(lambda *x, g=kwargs: loss(*x, seqused_k=used, **g), range(3)))(q, k, v)
        for kwargs in ({"block_mask": block_mask}, {"mask_mod": mask_mod})
    )
    assert_close(grads, expected)
    with pytest.raises(ProblemError, match=r"made with arrays of lengths of k .*, but the call has none"):
        attention(q, k, v, block_mask=block_mask)
    with pytest.raises(ProblemError, match="but the call has some, and its mask_mod uses lengths"):
        attention(q, k, v, seqused_k=used, block_mask=block_mask_of(mask_mod))


@only_on_the_cpu
def test_bands_become_windows_and_are_validated() -> None:
    q, k, v = arrays()
    block_mask = block_mask_of(mods.causal)
    program = str(jax.make_jaxpr(lambda *x: attention(*x, block_mask=block_mask))(q, k, v))
    assert program == str(jax.make_jaxpr(lambda *x: attention(*x, causal=True))(q, k, v))
    with pytest.raises(ProblemError, match="block_mask was made for batch 1, heads 1, seqlen_q 130, seqlen_k 100"):
        attention(q, k, v, block_mask=block_mask_of(mods.causal, keys=100))


@only_on_the_cpu
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_invalid_block_masks_are_refused(jitted: bool) -> None:
    mask_mod, other = (documents(jnp.asarray([70, n])) for n in range(2))
    of_numpy = cuflash.create_block_mask(documents(np.array([70])), 1, 1, ROWS, KEYS, like=np.zeros(()))
    wrong: dict[str, dict[str, Any]] = {
        "block_mask was made for batch 1, heads 1, seqlen_q 130, seqlen_k 300, but the call has batch 2": {
            "block_mask": block_mask_of(mask_mod, keys=300)
        },
        "made for heads=1, but its mask_mod depends on h": {
            "block_mask": block_mask_of(of_heads_and_batch(jnp.asarray([70, 150])), BATCH)
        },
        "block_mask was made of another mask_mod": {"block_mask": block_mask_of(mask_mod), "mask_mod": mods.causal},
        "block_mask was made of a mask_mod that refers to other arrays": {
            "block_mask": block_mask_of(mask_mod),
            "mask_mod": other,
        },
        "block_mask was made of arrays of numpy; give create_block_mask a JAX array as like": {"block_mask": of_numpy},
        "block_mask is an ArrayImpl; give what create_block_mask returned": {"block_mask": jnp.ones((1, 1, 3, 4))},
    }
    for message, kwargs in wrong.items():
        call = lambda *x, kwargs=kwargs: attention(*x, **kwargs)  # noqa: E731
        with pytest.raises(ProblemError, match=message):
            (jax.jit(call) if jitted else call)(*arrays())


@only_on_the_cpu
def test_create_block_mask_under_transformations_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"a traced JAX array .* has no memory yet"):
        jax.jit(lambda ends: block_mask_of(documents(ends)).cells)(jnp.asarray([70]))
