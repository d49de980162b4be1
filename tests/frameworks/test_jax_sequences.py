"""Variable-length sequences in JAX: values, gradients and transformations, on the CPU and on a GPU."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cuflash.errors import ProblemError, UnsupportedError
from cuflash.testing.sequences import Sequences, VarlenArrays, check, check_gradients, drawn, upstream, varlen_arrays

jax = pytest.importorskip("jax")
import jax.numpy as jnp
from refusals import refused

from cuflash.frameworks.jax import attention, dot_product_attention, export_checks, ragged_paged_attention

PACKED = Sequences("packed", (5, 0, 1, 17), (9, 3, 0, 17), causal=True, dims=(16, 24), bounded=True)
USED = replace(PACKED, name="used", used_q=True, used_k=True, spare_q=(1, 4, 0, 2), spare_k=(0, 3, 2, 1))
RECTANGLE = Sequences("rectangle", (9, 2, 0), (4, 11, 3), "rectangle", "rectangle", True, True, softcap=2.0)
TOP_LEFT = replace(RECTANGLE, name="top_left", causal=True, diagonal_offset=0, window_size=(3, -1))
OVER_CACHE = Sequences("over_cache", (3, 1, 0), (20, 7, 5), "packed", "rectangle", used_k=True, window_size=(4, 1))
CACHE = Sequences("cache", (2,) * 3, (12, 30, 0), "rectangle", "cache", used_k=True, causal=True)
PAGED = Sequences("paged", (3, 1, 0, 20), (40, 17, 5, 64), "packed", "paged", used_k=True, causal=True)
WITH_GRADIENTS, CACHED = [PACKED, USED, RECTANGLE, TOP_LEFT, OVER_CACHE], [CACHE, PAGED]
NAMES = ("q", "k", "v")


@pytest.fixture(autouse=True, params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def platform(request: pytest.FixtureRequest) -> Iterator[str]:
    try:
        jax_device = jax.local_devices(backend=request.param)[0]
    except RuntimeError as error:
        pytest.skip(f"JAX has no {request.param} here: {error}")
    # JAX's products have 10 bits otherwise.
    with jax.default_device(jax_device), jax.default_matmul_precision("highest"):
        yield request.param


def each(cases: list[Sequences]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def split(inputs: VarlenArrays, **more: Any) -> tuple[Any, list[Any], dict[str, Any]]:
    """Returns `attention` as a function of q, k and v; q, k and v; and the int32 arrays of the call."""
    arguments = inputs.arguments(jnp)
    leaves = [arguments.pop(name) for name in NAMES]
    varlen_kwargs = {name: arguments.pop(name) for name in inputs.varlen_kwargs}
    return functools.partial(attention, return_lse=True, **arguments, **more), leaves, varlen_kwargs


def vjp_results(inputs: VarlenArrays, **more: Any) -> tuple[Any, Any, Any]:
    """Computes out, lse and gradients by one jitted program, with the lengths as arguments."""
    call, leaves, varlen_kwargs = split(inputs, **more)

    def both(leaves: Any, varlen_kwargs: Any, upstream: Any) -> Any:
        results, pull = jax.vjp(functools.partial(call, **varlen_kwargs), *leaves)
        return *results, pull(upstream)

    shapes = jax.eval_shape(functools.partial(call, **varlen_kwargs), *leaves)
    from_above = tuple(jnp.asarray(x.reshape(y.shape)) for x, y in zip(upstream(inputs), shapes, strict=True))
    out, lse, gradients = jax.jit(both)(leaves, varlen_kwargs, from_above)
    return np.asarray(out), np.asarray(lse), [np.asarray(x) for x in gradients]


@each([*WITH_GRADIENTS, *CACHED])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_and_gradients(case: Sequences, dtype: str, platform: str) -> None:
    inputs = varlen_arrays(replace(case, dtype=dtype))
    call, leaves, varlen_kwargs = split(inputs)
    check(inputs, *map(np.asarray, call(*leaves, **varlen_kwargs)))
    if case.has_gradients:
        out, lse, gradients = vjp_results(inputs)
        check(inputs, out, lse)
        check_gradients(inputs, gradients)


@pytest.mark.drawn(12)
def test_drawn_problems(seed: int) -> None:
    inputs = varlen_arrays(drawn(seed, gradients=True), seed)
    check_gradients(inputs, vjp_results(inputs, deterministic=True)[2])
    call, leaves, varlen_kwargs = split(varlen_arrays(drawn(seed), seed))
    check(varlen_arrays(drawn(seed), seed), *map(np.asarray, call(*leaves, **varlen_kwargs)))


@each([*WITH_GRADIENTS, *CACHED])
def test_one_program_serves_all_lengths_and_splits(case: Sequences) -> None:
    inputs = varlen_arrays(replace(case, bounded=False, dtype="float32"))
    call, leaves, varlen_kwargs = split(inputs)
    traces = 0

    def counted(leaves: Any, varlen_kwargs: Any) -> Any:
        nonlocal traces
        traces += 1
        return call(*leaves, **varlen_kwargs)

    program = jax.jit(counted)
    for shift in (0, 1):
        name = next(iter(varlen_kwargs))
        changed = varlen_kwargs | {name: jnp.maximum(varlen_kwargs[name] - shift, 0)}
        for got, expected in zip(program(leaves, changed), call(*leaves, **changed), strict=True):
            np.testing.assert_array_equal(got, expected)
    assert traces == 1
    for splits in ({"num_splits": 2}, {"split_size": 128}):
        check(inputs, *map(np.asarray, split(inputs, **splits)[0](*leaves, **varlen_kwargs)))


def looped(function: Any, leaves: list[Any], varlen_kwargs: dict[str, Any], axes: Any, varlen_axes: Any) -> Any:
    """Computes vmap as a loop."""
    size = next(x.shape[axis] for x, axis in zip(leaves, axes, strict=True) if axis is not None)

    def call_nth(n: int) -> Any:
        one = [x if axis is None else jnp.take(x, n, axis) for x, axis in zip(leaves, axes, strict=True)]
        return function(*one, {name: x[n] if varlen_axes[name] == 0 else x for name, x in varlen_kwargs.items()})

    return jax.tree.map(lambda *x: jnp.stack(x), *map(call_nth, range(size)))


def close(got: Any, expected: Any) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


@each([*WITH_GRADIENTS, *CACHED])
@pytest.mark.parametrize("mapped", [(True, True, True), (True, False, False), (False, True, True)], ids=str)
def test_vmap_over_arrays_of_the_same_lengths(case: Sequences, mapped: tuple[bool, ...]) -> None:
    inputs = varlen_arrays(replace(case, dtype="float32")).filled(0.0)
    call, plain, varlen_kwargs = split(inputs)
    value = lambda *x: call(*x[:-1], **x[-1])  # noqa: E731
    functions = [value]
    if case.has_gradients:
        functions.append(jax.grad(lambda *x: (value(*x)[0] ** 2).sum(), (0, 1, 2)))
    for axis in range(4):
        leaves = [jnp.stack([x, -x, 0.5 * x], min(axis, x.ndim)) if on else x
                  for x, on in zip(plain, mapped, strict=True)]  # fmt: skip
        axes = tuple(min(axis, x.ndim) if on else None for x, on in zip(plain, mapped, strict=True))
        for function in functions:
            got = jax.vmap(function, (*axes, None))(*leaves, varlen_kwargs)
            close(got, looped(function, leaves, varlen_kwargs, axes, dict.fromkeys(varlen_kwargs)))


@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("axis", [0, 1, None])
def test_vmap_over_used_lengths(rank: int, axis: int | None) -> None:
    generator = np.random.default_rng(rank)
    shapes = [(2, n, h, 8)[4 - rank if rank > 2 else 1 :] for n, h in ((6, 4), (9, 2), (9, 2))]
    shapes = [(shape[0], shape[2]) if rank == 2 else shape for shape in shapes]
    leaves = [jnp.asarray(generator.standard_normal((3, *shape)), "float32") for shape in shapes]
    leaves = [leaves[0] if axis is None else jnp.moveaxis(leaves[0], 0, min(axis, rank)), *leaves[1:]]
    lengths = jnp.asarray(generator.integers(0, 10, (3, 2 if rank == 4 else 1)), "int32")
    axes = axis, 0, 0
    if axis is None:
        leaves[0] = leaves[0][0]
    varlen_kwargs = {"seqused_k": lengths, "seqused_q": lengths[0] % 6}
    value = lambda q, k, v, varlen_kwargs: attention(q, k, v, causal=True, return_lse=True, **varlen_kwargs)  # noqa: E731
    gradient = jax.grad(lambda *x: (value(*x)[0] ** 2).sum(), (0, 1, 2))
    for function in (value, gradient):
        varlen_axes = {"seqused_k": 0, "seqused_q": None}
        close(
            jax.vmap(function, (*axes, varlen_axes))(*leaves, varlen_kwargs),
            looped(function, leaves, varlen_kwargs, axes, varlen_axes),
        )


def test_unsupported_vmaps_and_gradients_are_refused() -> None:
    call, leaves, varlen_kwargs = split(varlen_arrays(PACKED).filled(0.0))
    name = "cu_seqlens_q"
    with pytest.raises(UnsupportedError, match=r"cu_seqlens_q under vmap.*further sequences.*jax\.lax\.map"):
        jax.vmap(lambda x: call(*leaves, **varlen_kwargs | {name: x}))(jnp.stack([varlen_kwargs[name]] * 2))
    for case, cached in ((PAGED, "page_table"), (CACHE, "cache_batch_idx")):
        call, leaves, varlen_kwargs = split(varlen_arrays(case).filled(0.0))
        with pytest.raises(UnsupportedError, match=f"{cached} was given and gradients are requested.*stop_gradient"):
            jax.grad(lambda q, f=call, x=leaves, t=varlen_kwargs: f(q, *x[1:], **t)[0].sum())(leaves[0])
        jax.grad(lambda s, f=call, x=leaves, t=varlen_kwargs: (s * f(*map(jax.lax.stop_gradient, x), **t)[0]).sum())(
            1.0
        )


def test_in_scan_and_under_a_checkpoint() -> None:
    call, (q, k, v), varlen_kwargs = split(varlen_arrays(replace(PACKED, dims=(16, 16), dtype="float32")).filled(0.0))

    def deep(q: Any, varlen_kwargs: Any, remat: bool) -> Any:
        layer = lambda x, varlen_kwargs: call(x, k, v, **varlen_kwargs)[0]  # noqa: E731
        layer = jax.checkpoint(layer) if remat else layer
        return jax.lax.scan(lambda x, _: (x + layer(x, varlen_kwargs), None), q, length=3)[0].sum()

    plain = jax.grad(lambda q: (lambda f: f(f(f(q))))(lambda x: x + call(x, k, v, **varlen_kwargs)[0]).sum())(q)
    for remat in (False, True):
        close(jax.jit(jax.grad(functools.partial(deep, remat=remat)))(q, varlen_kwargs), plain)


def test_invalid_lengths_are_refused_by_name() -> None:
    arguments = varlen_arrays(PACKED).filled(0.0).arguments(jnp)
    for name, wrong, words in (
        ("cu_seqlens_q", [0, 5], "cu_seqlens_q is a list; give a JAX or NumPy array"),
        ("cu_seqlens_q", jnp.zeros(5), "cu_seqlens_q has dtype float32; this problem needs int32"),
        ("cu_seqlens_k", jnp.zeros(3, "int32"), "cu_seqlens_k is for 2 sequences"),
        ("page_table", jnp.zeros((4, 1), "int32"), "cu_seqlens_k and page_table place the same keys"),
        ("max_seqlen_q", True, "max_seqlen_q=True is a bool"),
        ("max_seqlen_q", jnp.int32(3), "max_seqlen_q=.* give an integer"),
        ("num_splits", None, "num_splits=None is a NoneType"),
        ("split_size", 100, "split_size=100; give a positive multiple of 128"),
    ):
        with pytest.raises(ProblemError, match=words):
            attention(**arguments | {name: wrong})
    with pytest.raises(ProblemError, match="max_seqlen_k=3, but the call is not varlen"):
        attention(*(jnp.zeros((1, 2, 2, 8)) for _ in range(3)), max_seqlen_k=3)


@pytest.mark.parametrize("which", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, (3, 1)], ids=str)
@pytest.mark.parametrize("rank", [3, 4])
def test_dot_product_attention_with_lengths_equals_jax_nn(
    rank: int, window: Any, is_causal: bool, which: tuple[bool, bool]
) -> None:
    generator, batch = np.random.default_rng(0), 3 if rank == 4 else 1
    shapes = ((batch, 8, 4, 8), (batch, 11, 2, 8), (batch, 11, 2, 8))
    leaves = [jnp.asarray(generator.standard_normal(shape[4 - rank :]), "float32") for shape in shapes]
    queries, keys = np.array([3, 8, 0][:batch], "int32"), np.array([11, 4, 5][:batch], "int32")
    # jax.nn has another out for a query without keys. Here each query has one: all windows reach the first keys.
    lengths = {"query_seq_lengths": queries if which[0] else None, "key_value_seq_lengths": keys if which[1] else None}
    used = queries if which[0] else np.full(batch, 8)
    cut = jnp.minimum(used, 5)  # each of these rows sees a key
    rows = (jnp.arange(8) < cut[:, None])[..., None][4 - rank :]
    options = {"is_causal": is_causal, "local_window_size": window, **lengths}

    def value(function: Any, *leaves: Any) -> Any:
        out, lse = function(*leaves, return_residual=True, **options)
        return (jnp.where(rows[..., None], out, 0.0) ** 2).sum(), (out, lse)

    results = []
    for function in (dot_product_attention, jax.nn.dot_product_attention):
        gradient = jax.value_and_grad(functools.partial(value, function), (0, 1, 2), has_aux=True)
        (_, (out, lse)), slopes = jax.jit(gradient)(*leaves)
        results.append((jnp.where(rows[..., None], out, 0.0), jnp.where(rows, lse, 0.0), slopes))
    close(*results)
    out, lse = dot_product_attention(*leaves, return_residual=True, **options)
    unused = np.broadcast_to((np.arange(8) >= used[:, None])[..., None], (batch, 8, 4)).reshape(lse.shape)
    assert not np.asarray(out)[unused].any()
    assert (np.asarray(lse)[unused] == -np.inf).all()


def test_dot_product_attention_refuses_invalid_lengths_by_name() -> None:
    arrays = [jnp.zeros((2, 4, 2, 8))] * 3
    for name, wrong in (("query_seq_lengths", jnp.ones(3, "int32")), ("key_value_seq_lengths", jnp.ones(2))):
        with pytest.raises(ProblemError, match=rf"{name} is .* give int32 of shape \(2,\)"):
            dot_product_attention(*arrays, **{name: wrong})


def test_errors_of_functions_of_jax_have_their_names() -> None:
    x, more = jnp.zeros((2, 5, 4, 8)), pages()
    for call, text in (
        (
            lambda: dot_product_attention(x, x, x, query_seq_lengths=jnp.ones(3, "int32")),
            "give int32 of shape (2,): (B,)",
        ),
        (
            lambda: ragged_paged_attention(**more | {"kv_lens": jnp.ones(3, "int32")}),
            "kv_lens is int32 of shape (3,); give int32 of shape (5,): (max_num_seqs,)",
        ),
        (lambda: ragged_paged_attention(**more | {"cu_q_lens": jnp.ones(3, "int32")}), "(6,): (max_num_seqs + 1,)"),
        (
            lambda: ragged_paged_attention(**more | {"page_indices": jnp.ones((5, 2))}),
            "): (max_num_seqs, pages_per_seq)",
        ),
        (lambda: dot_product_attention(x, x[..., :6], x), "key has head_dim 6, but query has 8; query and key must"),
        (lambda: dot_product_attention(x, x, x[:, :4]), "value has seqlen 4"),
        (lambda: ragged_paged_attention(**more, soft_cap=-1.0), "soft_cap=-1.0 is not positive"),
    ):
        with refused(ProblemError, text):
            call()


def wrong_values() -> list[tuple[Any, dict[str, Any], str]]:
    """Returns calls as functions of arrays of integers, wrong values of these, and the error in the caller's names."""
    x, packed, more = jnp.zeros((2, 4, 2, 8)), jnp.zeros((8, 2, 8)), pages()
    good = np.array([0, 5, 8], "int32")
    pages_of = {name: np.array(more.pop(name)) for name in ("kv_lens", "page_indices")}
    too_long, no_page = (pages_of[name].copy() for name in ("kv_lens", "page_indices"))
    too_long[1], no_page[1, 1] = 11, 10
    paged = functools.partial(ragged_paged_attention, **more)
    calls = [
        (functools.partial(attention, packed, packed, packed, cu_seqlens_k=good), {"cu_seqlens_q": [0, 5, 3]},
         "cu_seqlens_q is [0, 5, 3], which decreases from 5 to 3"),
        (functools.partial(attention, x, x, x), {"seqused_k": [1, 9]}, "seqused_k[1] is 9, but sequence 1 has 4 rows"),
        (functools.partial(attention, x, x, x), {"cache_batch_idx": [0, 7]}, "cache_batch_idx[1] is 7, but k has 2"),
        (functools.partial(attention, x, x, x, bias=jnp.ones(4)), {"seqused_k": [1, 9]}, "seqused_k[1] is 9"),
        (functools.partial(dot_product_attention, x, x, x), {"key_value_seq_lengths": [1, 9]},
         "key_value_seq_lengths[1] is 9, but sequence 1 has 4 rows"),
        (functools.partial(dot_product_attention, x, x, x), {"query_seq_lengths": [-1, 4]},
         "query_seq_lengths[0] is -1"),
        (paged, pages_of | {"kv_lens": too_long}, "kv_lens[1] is 11, but sequence 1 has 10 rows"),
        (paged, pages_of | {"page_indices": no_page}, "page_indices[1, 1] is 10, but kv_pages has 10 pages"),
    ]  # fmt: skip
    return [(call, {name: np.asarray(x, "int32") for name, x in wrong.items()}, text) for call, wrong, text in calls]


def test_wrong_values_raise_in_the_call_with_the_callers_names(platform: str) -> None:
    for number, (call, wrong, text) in enumerate(wrong_values()):
        for kind in (np.asarray, jnp.asarray):
            if platform == "cpu" or (kind is np.asarray and number < 4):  # the host cannot read others on a GPU
                arrays = {name: kind(x) for name, x in wrong.items()}
                with refused(ProblemError, text):
                    call(**arrays)
                if number >= 4:  # the other functions compute with lengths, so that these are traced, too
                    continue
                with refused(ProblemError, text):
                    jax.eval_shape(lambda call=call, arrays=arrays: call(**arrays))
    x = jnp.zeros((2, 4, 2, 8))
    with refused(ProblemError, "seqused_q[1] is 5"):
        jax.grad(lambda q: attention(q, x, x, seqused_q=np.array([1, 5], "int32")).sum())(x)


def test_wrong_values_that_are_traced_raise_in_first_and_repeated_calls(platform: str) -> None:
    if platform != "cpu":
        pytest.skip("kernels on a GPU do not raise: they clamp lengths and skip pages that do not exist")
    for number, (call, wrong, text) in enumerate(wrong_values()):
        names = text if number < 4 else "is "  # of the arguments of `attention`
        with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT: ProblemError") as caught:
            jax.block_until_ready(jax.jit(lambda call=call, **wrong: call(**wrong))(**wrong))
        assert names in str(caught.value)
    q, bounds = jnp.zeros((4, 1, 8)), jnp.array([0, 2, 4], "int32")
    call = jax.jit(lambda bounds: attention(q, q, q, cu_seqlens_q=bounds, cu_seqlens_k=bounds))
    jax.block_until_ready(call(bounds))
    # JAX 0.10 raises ValueError in a call that is not the first.
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=r"INVALID_ARGUMENT: ProblemError: cu_seqlens_q"):
        jax.block_until_ready(call(bounds.at[1].set(5)))


def pages(**more: Any) -> dict[str, Any]:
    """Returns arguments of the paged function. Unread elements of pages are NaN; entries past num_seqs are junk."""
    generator = np.random.default_rng(3)
    kv_lens, table = np.array([5, 9, 1, -7, 2**30], "int32"), generator.permutation(10).reshape(5, 2).astype("int32")
    kv = generator.standard_normal((10, 5, 4, 8)).astype("float32")
    for sequence, length in enumerate(kv_lens[:3]):
        kv[table[sequence, 0], length:] = kv[table[sequence, 1], max(length - 5, 0) :] = np.nan
    kv[table[3:]] = np.nan
    table[3:] = 2**30
    arguments = {"q": generator.standard_normal((12, 4, 8)).astype("float32"), "kv_pages": kv, "kv_lens": kv_lens,
             "page_indices": table, "cu_q_lens": np.array([0, 2, 7, 8, 3, 99], "int32"),
             "num_seqs": np.array([3], "int32")}  # fmt: skip
    return {name: jnp.asarray(x) for name, x in arguments.items()} | more


@pytest.mark.parametrize(
    "options",
    [{"sm_scale": 0.4}, {"sliding_window": 3, "soft_cap": 2.0}, {"k_scale": 0.5, "v_scale": 2.0, "mask_value": -1e9}],
    ids=str,
)
def test_ragged_paged_attention_equals_jaxs_reference(options: dict[str, Any]) -> None:
    kernel = pytest.importorskip("jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel")
    arrays = pages()
    names = tuple(arrays)
    call = functools.partial(ragged_paged_attention, **options)
    program = jax.jit(lambda *x: call(**dict(zip(names, x, strict=True))))
    cleared = arrays | {"kv_pages": jnp.nan_to_num(arrays["kv_pages"])}
    for count in (3, 2, 0):
        out = program(*(arrays | {"num_seqs": jnp.array([count], "int32")}).values())
        end = int(arrays["cu_q_lens"][count])
        assert not np.asarray(out[end:]).any()
        if count:
            plain = cleared | {"num_seqs": jnp.array([count], "int32")}
            close(out[:end], kernel.ref_ragged_paged_attention(*plain.values(), **options))


def test_ragged_paged_attention_copies_no_pages() -> None:
    arrays = pages()
    text = jax.jit(ragged_paged_attention).lower(**arrays).compile().as_text()
    assert "cuflash_forward" in text
    assert "f32[10,5,2,8]" not in text, "K and V are no arrays of their own"


def test_ragged_paged_attention_has_jaxs_signature_and_validates() -> None:
    kernel = pytest.importorskip("jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel")
    ours, theirs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
        for f in (ragged_paged_attention, kernel.ragged_paged_attention)
    )
    assert ours == theirs
    for more, words in (
        ({"kv_lens": jnp.ones(4, "int32")}, r"kv_lens is int32 of shape \(4,\); give int32 of shape \(5,\)"),
        ({"num_seqs": jnp.ones(())}, r"num_seqs is float32 of shape \(\); give int32 of shape \(1,\)"),
        ({"page_indices": jnp.ones(5, "int32")}, r"page_indices has shape \(5,\); give \(max_num_seqs, pages_per_seq"),
        ({"kv_pages": jnp.ones((10, 5, 3, 8))}, r"kv_pages \(10, 5, 3, 8\); give .*2 \* num_kv_heads"),
        ({"sliding_window": 0}, "sliding_window=0; give how many keys"),
        ({"sm_scale": 0.0}, "sm_scale=0.0 is not positive"),
    ):
        with pytest.raises(ProblemError, match=words):
            ragged_paged_attention(**pages(**more))
    with pytest.raises(UnsupportedError, match=r"mask_value=0\.0: hidden keys are not seen at all"):
        ragged_paged_attention(**pages(mask_value=0.0))


def test_a_varlen_program_is_exported_with_its_options() -> None:
    export = pytest.importorskip("jax.export")
    pytest.importorskip("flatbuffers")
    inputs = varlen_arrays(replace(PACKED, dtype="float32"))
    call, leaves, varlen_kwargs = split(inputs, split_size=128)
    platforms = sorted({device.platform.replace("gpu", "cuda") for x in leaves for device in x.devices()})
    exported = export.export(
        jax.jit(lambda *x: call(*x[:3], **x[3])), platforms=platforms, disabled_checks=export_checks()
    )
    program = exported(*leaves, varlen_kwargs)
    again = export.deserialize(program.serialize())
    check(inputs, *map(np.asarray, again.call(*leaves, varlen_kwargs)))
