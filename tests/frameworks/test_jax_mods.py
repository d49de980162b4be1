"""Mods (score_mod, mask_mod, bias, sinks, dropout) in JAX: values, gradients, transformations, processes."""

from __future__ import annotations

import json
import re
import weakref
from typing import Any

import numpy as np
import pytest

from cuflash import ProblemError, UnsupportedError, forward, mods
from cuflash.mods.tracing.trace import trace
from cuflash.problem.dropout import SHARES, share_kept
from cuflash.problem.mod_spec import make_mod_spec
from cuflash.reference.dropout import is_kept

jax = pytest.importorskip("jax")
import jax.numpy as jnp

from cuflash.frameworks.jax import attention, dot_product_attention, mod_attributes

BATCH, ROWS, KEYS, HEADS, HEADS_KV, DIM = 2, 6, 9, 4, 2, 8


@pytest.fixture(autouse=True)
def on_the_device(device: str) -> Any:
    try:
        jax_device = jax.local_devices(backend="cpu" if device == "cpu" else "cuda")[0]
    except RuntimeError as error:
        pytest.skip(f"JAX has no GPU here: {error}")
    with jax.default_device(jax_device), jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: Any) -> str:
    return str(request.param)


only_on_the_cpu = pytest.mark.parametrize("device", ["cpu"])


def normal(seed: int, *shape: int) -> Any:
    return jax.random.normal(jax.random.key(seed), shape)


def arrays(*lead: int) -> list[Any]:
    """Returns q, k and v, slopes of heads, a bias and sinks."""
    shapes = (BATCH, ROWS, HEADS, DIM), (BATCH, KEYS, HEADS_KV, DIM), (BATCH, KEYS, HEADS_KV, DIM)
    more = (HEADS,), (BATCH, HEADS, 1, KEYS), (HEADS,)
    return [normal(n, *lead, *shape) for n, shape in enumerate((*shapes, *more))]


def plain(q: Any, k: Any, v: Any, score_mod: Any = None, mask_mod: Any = None, bias: Any = None, sinks: Any = None,
          factors: Any = 1.0) -> Any:  # fmt: skip
    """Computes (out, lse) from the definition. factors: multiply the weights."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    indices = jnp.ix_(*map(jnp.arange, scores.shape))
    if score_mod is not None:
        scores = score_mod(scores, *indices)
    scores = scores if bias is None else scores + bias
    if mask_mod is not None:
        scores = jnp.where(mask_mod(*indices), scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, -1)
    lse = lse if sinks is None else jnp.logaddexp(lse, sinks[:, None])
    return jnp.einsum("bhqk,bkhd->bqhd", factors * jnp.exp(scores - lse[..., None]), v), lse


def loss(results: Any) -> Any:
    return (results[0] ** 2).sum() + jnp.sin(results[1]).sum()


def striped(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return (q_idx + k_idx + b) % 3 != h % 3


def tilted(slopes: Any) -> Any:
    return lambda s, b, h, i, j: s * (1.0 + 0.125 * b) - slopes[h] * jnp.abs(i - j)


def of_whole_arrays(slopes: Any) -> Any:
    """Returns a score_mod that only JAX can trace: it computes a whole array, and calls an unknown function."""
    return lambda s, b, h, i, j: s * jnp.arctan(1.0) - jnp.exp(slopes).at[0].add(1.0)[h] * jnp.abs(i - j)


def ours(*operands: Any, mod: Any = tilted) -> Any:
    q, k, v, slopes, *more = operands
    named = dict(zip(("bias", "sinks"), more, strict=False))
    return attention(q, k, v, score_mod=mod(slopes), mask_mod=striped, return_lse=True, **named)


def theirs(*operands: Any, mod: Any = tilted) -> Any:
    q, k, v, slopes, *more = operands
    return plain(q, k, v, mod(slopes), striped, *more)


def assert_close(got: Any, expected: Any, tolerance: float = 3e-5) -> None:
    """Asserts that trees of arrays are nearly equal."""
    got, expected = jax.tree.leaves(got), jax.tree.leaves(expected)
    assert len(got) == len(expected)
    for x, y in zip(got, expected, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=tolerance, atol=5 * tolerance)


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("mod", [tilted, of_whole_arrays])
def test_values_and_gradients_of_all_inputs(mod: Any, jitted: bool) -> None:
    operands = arrays()

    def both(*x: Any) -> Any:
        return ours(*x, mod=mod), jax.grad(lambda *y: loss(ours(*y, mod=mod)), range(6))(*x)

    expected = theirs(*operands, mod=mod), jax.grad(lambda *y: loss(theirs(*y, mod=mod)), range(6))(*operands)
    assert_close((jax.jit(both) if jitted else both)(*operands), expected)


def test_gradients_are_computed_only_for_differentiated_arrays() -> None:
    q, k, v, slopes, bias, sinks = arrays()
    for number, grads in enumerate(("(0,)", "(1,)", "(2,)"), 3):
        program = str(jax.make_jaxpr(jax.grad(lambda *x: loss(ours(*x)), number))(q, k, v, slopes, bias, sinks))
        assert re.findall(r"grads=(\(.*?\))", program) == ["()", grads]
    assert_close(
        jax.grad(lambda x: ours(q, k, v, slopes, bias, x)[1].sum())(sinks),
        jax.grad(lambda x: theirs(q, k, v, slopes, bias, x)[1].sum())(sinks),
    )


def test_scan_and_checkpoint() -> None:
    q, k, v, slopes, *_ = arrays()
    k, v = k[:, :ROWS], v[:, :ROWS]

    def deep(call: Any, remat: bool) -> Any:
        def layer(x: Any, slopes: Any) -> Any:
            return call(x, k, v, slopes)[0]

        layer = jax.checkpoint(layer) if remat else layer
        return lambda q, s: (jax.lax.scan(lambda x, _: (x + layer(x, s), None), q, length=5)[0] ** 2).mean()

    expected = jax.grad(deep(theirs, False), (0, 1))(q, slopes)
    for remat in (False, True):
        assert_close(jax.jit(jax.grad(deep(ours, remat), (0, 1)))(q, slopes), expected, 1e-4)


# Axes of q, k, v, slopes, bias and sinks.
MAPPED = (
    (0, 0, 0, 0, 0, 0),
    (1, None, None, None, None, None),
    (None, None, None, 0, None, None),
    (2, 2, 2, None, None, None),
    (None, None, None, None, 2, 1),
    (2, 1, 0, 1, 3, None),
    (0, 0, 0, None, None),
    (1, 1, 1, 0, None),
    (None, None, None, None, 1),
)


@pytest.mark.parametrize("axes", MAPPED, ids=str)
def test_vmap(axes: tuple[int | None, ...]) -> None:
    operands = [
        x if axis is None else jnp.stack([x, 0.5 * x, -x], axis) for x, axis in zip(arrays(), axes, strict=False)
    ]
    assert_close(jax.vmap(ours, axes)(*operands), jax.vmap(theirs, axes)(*operands))
    function, reference = (
        jax.jit(jax.vmap(jax.grad(lambda *x, f=f: loss(f(*x)), range(len(axes))), axes)) for f in (ours, theirs)
    )
    assert_close(function(*operands), reference(*operands))


def test_vmaps_within_each_other_and_of_arrays_without_batch() -> None:
    q, k, v, slopes, bias, _ = arrays(3, 2)
    operands = q[:, :, 0], k[:, :, 0], v[:, :, 0], slopes, bias[:, :, 0]
    call = lambda q, k, v, s, b: attention(q, k, v, score_mod=tilted(s), bias=b)  # noqa: E731
    result = jax.vmap(jax.vmap(call))(*operands)
    assert_close(
        result, jnp.stack([jnp.stack([call(*(x[n, m] for x in operands)) for m in range(2)]) for n in range(3)])
    )
    one = jax.vmap(jax.vmap(lambda q, k, v: attention(q, k, v, mask_mod=striped)))
    assert_close(one(*operands[:3]), jnp.stack([jax.vmap(lambda *x: attention(*x, mask_mod=striped))(*(
        x[n] for x in operands[:3])) for n in range(3)]))  # fmt: skip


def weights_kept(seed: int, share: float, batch: int = BATCH) -> Any:
    indices = np.ix_(*map(np.arange, (batch, HEADS, ROWS, KEYS)))
    return jnp.asarray(is_kept(seed, share, *indices) * np.float32(SHARES / share_kept(share)))


def test_dropout_by_every_kind_of_seed() -> None:
    q, k, v, *_ = arrays()
    seed = 2**63 + 5
    words = np.array([5, 2**31], np.uint32)
    expected = plain(q, k, v, factors=weights_kept(seed, 0.3))
    for each in (seed, seed - 2**64, words, jnp.asarray(words), jax.random.wrap_key_data(jnp.asarray(words))):
        assert_close(attention(q, k, v, dropout_p=0.3, dropout_seed=each, return_lse=True), expected)
    other = jax.random.key(1, impl="rbg")
    assert attention(q, k, v, dropout_p=0.3, dropout_seed=other).shape == q.shape

    call = jax.jit(lambda q, seed: loss(attention(q, k, v, dropout_p=0.3, dropout_seed=seed, return_lse=True)))
    assert_close(
        jax.grad(call)(q, jax.random.wrap_key_data(jnp.asarray(words))),
        jax.grad(lambda q: loss(plain(q, k, v, factors=weights_kept(seed, 0.3))))(q),
    )


@only_on_the_cpu
@pytest.mark.parametrize("seed", [7, -5, 2**31 - 1, np.int64(7), np.int8(-3), np.uint32(2**32 - 1)], ids=repr)
def test_an_integer_seed_drops_alike_as_number_array_and_tracer(seed: Any) -> None:
    q, k, v, *_ = arrays()
    call = lambda q, seed: attention(q, k, v, dropout_p=0.5, dropout_seed=seed)  # noqa: E731
    expected = forward(*map(np.asarray, (q, k, v)), dropout_p=0.5, dropout_seed=int(seed))
    assert_close(call(q, seed), expected)
    for each in (np.asarray(seed), np.asarray([seed]), jnp.asarray([seed])):
        assert_close(call(q, each), expected, 0.0)
        assert_close(jax.vmap(call)(q[None], jnp.asarray(each)[None])[0], expected, 0.0)
    assert_close(jax.jit(call)(q, seed), expected, 0.0)
    assert_close(jax.jit(call, static_argnums=1)(q, seed), expected, 0.0)
    none = jax.jit(lambda seed: attention(q, k, v, dropout_seed=seed))
    assert_close(none(seed), attention(q, k, v), 0.0)


@only_on_the_cpu
def test_a_seed_of_64_bits_in_an_array_of_numpy_is_not_narrowed() -> None:
    q, k, v, *_ = arrays()
    expected = attention(q, k, v, dropout_p=0.5, dropout_seed=2**40 + 1)
    assert_close(attention(q, k, v, dropout_p=0.5, dropout_seed=np.array(2**40 + 1)), expected, 0.0)
    with pytest.raises(ProblemError, match=r"dropout_seed has shape \(2,\) and dtype int64"):
        attention(q, k, v, dropout_p=0.5, dropout_seed=np.array([1, 2**40]))


def test_vmap_of_dropout_is_one_call_after_the_other() -> None:
    q, k, v, *_ = arrays()
    seeds = jnp.asarray([[1, 0], [2, 0], [3, 0]], jnp.uint32)
    call = lambda q, seed: attention(q, k, v, dropout_p=0.5, dropout_seed=seed, return_lse=True)  # noqa: E731
    for axes in ((None, 0), (0, None), (0, 0)):
        operands = jnp.stack([q, -q, 2 * q]) if axes[0] == 0 else q, seeds if axes[1] == 0 else seeds[0]
        parts = [[x if axis is None else x[n] for x, axis in zip(operands, axes, strict=True)] for n in range(3)]
        expected = jax.tree.map(lambda *x: jnp.stack(x), *(call(*part) for part in parts))
        assert_close(jax.vmap(call, axes)(*operands), expected)


def test_packed_and_used_lengths() -> None:
    q, k, v, slopes, *_ = arrays()
    used = jnp.asarray([4, 7], jnp.int32)
    limit = lambda b, h, i, j: (j < used[b]) & (j < i + used[b] - ROWS)  # noqa: E731
    strict = lambda b, h, i, j: j < mods.position_of(i)  # noqa: E731
    for more in ({}, {"causal": True}):
        results = attention(q, k, v, seqused_k=used, mask_mod=strict, score_mod=tilted(slopes), return_lse=True, **more)
        expected = plain(q, k, v, tilted(slopes), limit)
        hidden = jnp.isneginf(expected[1])
        assert_close(jnp.where(hidden.swapaxes(1, 2)[..., None], 0, expected[0]), results[0])
        np.testing.assert_array_equal(hidden, jnp.isneginf(results[1]))
        alone = attention(q, k, v, seqused_k=used, mask_mod=strict, **more)  # the mask leaves no function
        assert_close(alone, attention(q, k, v, mask_mod=limit))
    bounds = jnp.asarray([0, ROWS, 2 * ROWS], jnp.int32)
    of_keys = jnp.asarray([0, KEYS, 2 * KEYS], jnp.int32)
    packed = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    call = lambda q, k, v, s: attention(q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=of_keys, score_mod=tilted(s))  # noqa: E731
    dense = lambda q, k, v, s: attention(q, k, v, score_mod=tilted(s))  # noqa: E731
    grads = jax.grad(lambda *x: (call(*x) ** 2).sum(), range(4))(*packed, slopes)
    expected = jax.grad(lambda *x: (dense(*x) ** 2).sum(), range(4))(q, k, v, slopes)
    assert_close([x.reshape(y.shape) for x, y in zip(grads, expected, strict=True)], expected)
    table = jnp.zeros((BATCH, 1), jnp.int32)
    with pytest.raises(UnsupportedError, match="page_table was given and gradients are requested"):
        jax.grad(lambda s: attention(q, k, v, page_table=table, score_mod=tilted(s)).sum())(slopes)


def test_masks_equal_to_windows_or_hiding_all() -> None:
    q, k, v, *_ = arrays()
    strictly = attention(q, k, v, mask_mod=lambda b, h, i, j: j < i)
    assert_close(strictly, attention(q, k, v, causal=True, diagonal_offset=-1))
    out, lse = attention(q, k, v, causal=True, diagonal_offset=0, mask_mod=lambda b, h, i, j: j > i, return_lse=True)
    assert not out.any()
    assert jnp.isneginf(lse).all()


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("shape", [(BATCH, HEADS, ROWS, KEYS), (1, HEADS, 1, KEYS), (BATCH, 1, ROWS, 1)], ids=str)
def test_dot_product_attention_with_bias_and_mask_equals_jax_nn(shape: tuple[int, ...], rank: int) -> None:
    q, k, v, *_ = (x if rank == 4 else x[0] for x in arrays())
    shape = shape if rank == 4 else shape[1:]
    bias, mask = normal(7, *shape), normal(8, *shape) > -0.4
    if shape[-1] == 1:
        mask = jnp.ones_like(mask)  # jax.nn gives the mean of value where no key is visible
    for kwargs in ({"bias": bias}, {"mask": mask}, {"bias": bias, "mask": mask}):
        ours, theirs = (
            f(q, k, v, **kwargs, is_causal=False) for f in (dot_product_attention, jax.nn.dot_product_attention)
        )
        assert_close(ours, theirs)
    grads, expected = (
        jax.grad(lambda q, k, v, x, f=f: (f(q, k, v, x, mask) ** 2).sum(), range(4))(q, k, v, bias)
        for f in (dot_product_attention, jax.nn.dot_product_attention)
    )
    assert_close(grads, expected)


def test_numpy_arrays_become_jax_arrays() -> None:
    q, k, v, *_ = arrays()
    table, lookup = np.linspace(-1.0, 1.0, 5), np.arange(40) % 5  # of float64 and int64, which JAX narrows
    mod = lambda s, b, h, i, j: s + table[lookup[i + j]]  # noqa: E731
    on_jax = jnp.asarray(table), jnp.asarray(lookup)
    expected = plain(q, k, v, lambda s, b, h, i, j: s + on_jax[0][on_jax[1][i + j]])[0]
    assert_close(attention(q, k, v, score_mod=mod, bias=np.zeros((1, KEYS))), expected)


@only_on_the_cpu
def test_numpy_arrays_whose_values_jax_would_change_are_refused() -> None:
    q, k, v, *_ = arrays()
    times, few = 1.7e9 + np.arange(KEYS) * 10.0, np.arange(KEYS) * 10.0
    for table in (times, 2**40 + np.arange(KEYS), 2**63 + np.arange(KEYS, dtype="uint64")):
        message = rf"mask_mod .*<lambda> \({re.escape(__file__)}:\d+\) refers to an array of {table.dtype} of shape"
        with pytest.raises(ProblemError, match=message):
            attention(q, k, v, mask_mod=lambda b, h, i, j, table=table: table[i] >= table[j])
    attention(q, k, v, score_mod=lambda s, b, h, i, j: s + times[j] * 1e-9)  # scores are float32
    expected = attention(q, k, v, mask_mod=lambda b, h, i, j: i >= j)
    assert_close(attention(q, k, v, mask_mod=lambda b, h, i, j: few[i] - few[j] >= -5), expected)


def _loop(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s + jnp.arctan2(i, j)


def _if(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return jnp.arctan2(s, s) if i > j else s


def _typo(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return jnp.no_such_function(s)


FILE = re.escape(__file__)
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a primitive": ({"score_mod": _loop}, ProblemError, rf"^{FILE}:\d+, in _loop: jax.atan2 of a traced value"),
    "an if": ({"score_mod": _if}, ProblemError, rf"^{FILE}:\d+, in _if: score_mod cannot be traced"),
    "a typo": ({"score_mod": _typo}, AttributeError, "no_such_function"),
    "no function": ({"mask_mod": 3}, ProblemError, "mask_mod is an int; it must be a function"),
    "arity": ({"mask_mod": lambda q, k: q > k}, ProblemError, "mask_mod must be a function of"),
    "no bool": ({"mask_mod": lambda b, h, q, k: q - k}, ProblemError, "it must return bool"),
    "bias": ({"bias": jnp.zeros((3, 1))}, ProblemError, r"bias has shape \(3, 1\)"),
    "bias of lists": ({"bias": [1.0]}, ProblemError, "bias is a list; give a JAX or NumPy array"),
    "sinks": ({"sinks": jnp.zeros(3)}, ProblemError, r"sinks has shape \(3,\)"),
    "share": ({"dropout_p": 1.5, "dropout_seed": 1}, ProblemError, r"dropout_p=1.5 is outside \[0, 1\)"),
    "no seed": ({"dropout_p": 0.5}, ProblemError, "there is no dropout_seed; give an int of 64 bits, a key"),
}
SEEDS: dict[str, tuple[Any, str]] = {
    "of 65 bits": (2**64, "has more than 64 bits"),
    "bool": (True, "dropout_seed=True is a bool"),
    "span of time": (np.timedelta64(3), "dropout_seed=.* is a timedelta64"),
    "class": (np.uint32, "dropout_seed is a type; give an int of 64 bits, a key"),
    "words": (jnp.zeros(3, "uint32"), r"dropout_seed has shape \(3,\) and dtype uint32"),
    "floats": (jnp.zeros(2), r"dropout_seed has shape \(2,\) and dtype float32"),
    "dates": (np.zeros(1, "datetime64[s]"), r"dropout_seed has dtype datetime64.*; give a JAX or NumPy array"),
    "keys": (jax.random.split(jax.random.key(0)), "keys; give one"),
}
WRONG |= {
    f"seed {name}, {share!r} dropped": ({"dropout_p": share, "dropout_seed": seed}, ProblemError, message)
    for name, (seed, message) in SEEDS.items()
    for share in (0.5, 0.0, np.float32(0))
}


@only_on_the_cpu
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", WRONG)
def test_invalid_arguments_are_refused(name: str, jitted: bool) -> None:
    arguments, kind, message = WRONG[name]
    call = lambda *x: attention(*x, **arguments)  # noqa: E731
    with pytest.raises(kind, match=message):
        (jax.jit(call) if jitted else call)(*arrays()[:3])


@only_on_the_cpu
def test_seeds_without_dropout_change_nothing() -> None:
    qkv = arrays()[:3]
    for seed in (3, jax.random.key(0), jnp.arange(2, dtype="uint32")):
        for call in (attention, jax.jit(attention, static_argnames="dropout_seed" if type(seed) is int else ())):
            assert_close(call(*qkv, dropout_seed=seed), attention(*qkv), 0.0)


@only_on_the_cpu
def test_invalid_bias_and_mask_and_traced_dropout_are_refused() -> None:
    qkv = arrays()[:3]
    for name, array in (
        ("bias", jnp.zeros((3, 1, 1, 1))),
        ("mask", jnp.zeros((HEADS, ROWS, KEYS))),
        ("bias", qkv[0] > 0),
    ):
        with pytest.raises(ProblemError, match=f"^{name} is .*; give"):
            dot_product_attention(*qkv, **{name: array})
    with pytest.raises(ProblemError, match=r"dropout_p=.*Tracer"):
        jax.jit(lambda p: attention(*qkv, dropout_p=p, dropout_seed=1))(0.5)


@only_on_the_cpu
def test_encoded_functions_are_decoded_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    table = np.zeros((HEADS, 3), np.float32)
    mod = lambda s, b, h, i, j: mods.where(i < mods.seqlen_k(), s * 0.1, float("inf")) + table[h, j % 3] - -0.0  # noqa: E731
    mod_spec = make_mod_spec(trace(mod, "score_mod"), trace(striped, "mask_mod"), has_sinks=True)
    text = json.dumps(mod_attributes.Functions.from_spec(mod_spec).encoded())
    monkeypatch.setattr(mod_attributes, "_functions_by_digest", weakref.WeakValueDictionary())
    read = mod_attributes.Functions.decoded(json.loads(text))
    assert read == mod_attributes.Functions(mod_spec)
    fields = "score", "mask", "arrays", "has_sinks", "drops", "has_block_mask", "digest", "mask_tile_axes"
    assert [getattr(read.mod_spec, name) for name in fields] == [getattr(mod_spec, name) for name in fields]
    call = jax.jit(lambda *x: (ours(*x), jax.grad(lambda *y: loss(ours(*y)), range(6))(*x)))
    expected = call(*arrays())
    jax.block_until_ready(expected)
    monkeypatch.setattr(mod_attributes, "_functions_by_digest", weakref.WeakValueDictionary())
    assert_close(call(*arrays()), expected, 0.0)
