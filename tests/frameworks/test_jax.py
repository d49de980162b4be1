"""`cuflash.frameworks.jax` on the CPU: values and gradients against float64, and every transformation of JAX."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

import numpy as np
import pytest
from workers import run_python, run_threads

from cuflash.errors import ProblemError, UnsupportedError
from cuflash.testing import oracle
from cuflash.testing.cases import CASES, Case
from cuflash.testing.gradients import BackwardArgs, check, upstream

jax = pytest.importorskip("jax")
import jax.numpy as jnp

from cuflash.frameworks.jax import attention, dot_product_attention

CASE = Case("jax", 2, 6, 9, 4, 2, 8, 16, "float32", causal=True)
MORE = (
    Case("window", 1, 40, 70, 6, 2, 16, 24, "float32", False, (20, 3), 5, 15.0, 0.3),
    Case("no_keys", 2, 3, 0, 2, 1, 8, 8, "float32"),
    Case("no_batch", 0, 3, 4, 2, 1, 8, 8, "float32", causal=True),
    Case("rows_that_see_nothing", 1, 30, 5, 2, 2, 8, 8, "float16", causal=True),
    Case("far_window", 1, 5, 6, 1, 1, 8, 8, "float32", False, (10**30, 10**30), -(10**30)),
)
CASES_HERE = [*(case for case in CASES if case.head_dim <= 96), *MORE]
Function = Any


@pytest.fixture(autouse=True)
def on_the_cpu() -> Any:
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def loss(function: Function, *, of_lse: bool = False) -> Function:
    """Returns a scalar whose gradient in out depends on out (and on lse)."""

    def value(*arrays: Any) -> Any:
        results = function(*arrays)
        out, *lse = results if of_lse else (results,)
        return (out.astype("float32") ** 2).sum() + sum(jnp.sin(x).sum() for x in lse)

    return value


def same(got: Any, expected: Any) -> None:
    """Asserts that trees of arrays are equal bit for bit."""
    got, expected = jax.tree.leaves(got), jax.tree.leaves(expected)
    assert len(got) == len(expected)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("case", CASES_HERE, ids=lambda case: case.name)
def test_values_and_gradients_match_float64(case: Case, jitted: bool) -> None:
    arrays = case.arrays()
    dout, dlse = upstream(case)
    call = functools.partial(attention, return_lse=True, **case.arguments())
    call = jax.jit(call) if jitted else call
    (out, lse), pull = jax.vjp(call, *map(jnp.asarray, arrays))
    assert (str(out.dtype), str(lse.dtype)) == (case.dtype, "float32")
    oracle.assert_attention(case, arrays, out, lse)
    check(case, BackwardArgs(dout, *arrays, out, lse, dlse), pull((jnp.asarray(dout), jnp.asarray(dlse))), ulps=4)


def test_float64_is_float64_where_jax_has_it_enabled() -> None:
    case = Case("f64", 1, 9, 9, 2, 1, 8, 8, "float64", causal=True)
    with jax.enable_x64(True):
        out, lse = attention(*case.arrays(), causal=True, return_lse=True)
        gradient = jax.grad(lambda *x: attention(*x, causal=True).sum())(*case.arrays())
    assert (out.dtype, lse.dtype, gradient.dtype) == ("float64",) * 3
    oracle.assert_attention(case, case.arrays(), out, lse)


def arrays_of(rank: int, *lead: int) -> list[Any]:
    """Returns q, k and v of CASE with further leading axes; one head for rank 2."""
    shapes = [shape[4 - rank :] if rank > 2 else (shape[1], shape[3]) for shape in CASE.shapes()]
    keys = jax.random.split(jax.random.key(rank), 3)
    return [jax.random.normal(key, (*lead, *shape)) for key, shape in zip(keys, shapes, strict=True)]


causal = functools.partial(attention, causal=True, return_lse=True)
causal_gradients = jax.grad(loss(causal, of_lse=True), (0, 1, 2))


def one_by_one(function: Function, arrays: list[Any], axes: tuple[int | None, ...]) -> Any:
    """Computes vmap as a loop."""

    def nth(n: int) -> list[Any]:
        return [x if axis is None else jnp.take(x, n, axis) for x, axis in zip(arrays, axes, strict=True)]

    size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
    return jax.tree.map(lambda *x: jnp.stack(x), *(function(*nth(n)) for n in range(size)))


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_every_rank_equals_forward(rank: int) -> None:
    arrays = arrays_of(rank)
    q, k, v = (x[None, :, None] if rank == 2 else x[None] if rank == 3 else x for x in arrays)
    out, lse = causal(*arrays)
    whole, whole_lse = causal(q, k, v)
    assert out.shape == (*arrays[0].shape[:-1], 16)
    same((out, lse), (whole.reshape(out.shape), whole_lse.reshape(lse.shape)))
    expected = [x.reshape(y.shape) for x, y in zip(causal_gradients(q, k, v), arrays, strict=True)]
    same(causal_gradients(*arrays), expected)


@pytest.mark.parametrize("batched", [(1, 1, 1), (1, 0, 0), (0, 1, 1), (0, 0, 1), (1, 1, 0)], ids=str)
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_vmap_over_any_axis_of_any_operands(rank: int, batched: tuple[int, ...]) -> None:
    plain = arrays_of(rank)
    for axis in range(rank + 1):
        arrays = [
            jnp.moveaxis(jnp.stack([x, 0.5 * x, -x]), 0, axis) if on else x
            for x, on in zip(plain, batched, strict=True)
        ]
        axes = tuple(axis if on else None for on in batched)
        for function in (causal, causal_gradients):
            same(jax.vmap(function, axes)(*arrays), one_by_one(function, arrays, axes))
    mixed = [jnp.moveaxis(jnp.stack([x, -x]), 0, n) for n, x in enumerate(plain)]
    same(jax.vmap(causal_gradients, (0, 1, 2))(*mixed), one_by_one(causal_gradients, mixed, (0, 1, 2)))


def test_vmaps_within_each_other_and_within_grad() -> None:
    arrays = arrays_of(3, 2, 3)
    inner = jax.vmap(causal, (0, None, 0))
    q, k, v = arrays[0], arrays[1][:, 0], arrays[2]
    expected = [one_by_one(causal, [q[n], k[n], v[n]], (0, None, 0)) for n in range(2)]
    same(jax.jit(jax.vmap(inner))(q, k, v), jax.tree.map(lambda *x: jnp.stack(x), *expected))
    whole = jax.grad(loss(jax.vmap(jax.vmap(causal)), of_lse=True), (0, 1, 2))(*arrays)
    same(whole, jax.vmap(jax.vmap(causal_gradients))(*arrays))


@pytest.mark.parametrize(("rank", "axis"), [(4, 0), (4, 1), (4, 2), (3, 0), (3, 1), (2, 0), (2, 1)])
def test_vmap_over_batch_or_heads_transposes_nothing(rank: int, axis: int) -> None:
    arrays = [jnp.stack([x] * 3, axis) for x in arrays_of(rank)]
    for function, outs in ((attention, axis), (jax.grad(loss(attention), (0, 1, 2)), axis)):
        program = jax.jit(jax.vmap(function, axis, outs)).lower(*arrays).compile().as_text()
        assert "cuflash_" in program
        assert not re.findall(r"\} (?:transpose|copy)\(.*", program)


def test_scan_and_checkpoint_keep_the_gradients() -> None:
    q, k, _ = arrays_of(4)
    k, v = k[:, :6], 0.5 * k[:, :6]

    def deep(q: Any, k: Any, v: Any, remat: bool) -> Any:
        layer = functools.partial(attention, causal=True)
        layer = jax.checkpoint(layer) if remat else layer
        return jax.lax.scan(lambda x, _: (x + layer(x, k, v), None), q, length=50)[0]

    def unrolled(q: Any, k: Any, v: Any) -> Any:
        for _ in range(50):
            q = q + attention(q, k, v, causal=True)
        return q

    for remat in (False, True):
        scanned = functools.partial(deep, remat=remat)
        same(jax.jit(scanned)(q, k, v), unrolled(q, k, v))
        got = jax.jit(jax.grad(lambda *x, f=scanned: f(*x).mean(), (0, 1, 2)))(q, k, v)
        same(got, jax.grad(lambda *x: unrolled(*x).mean(), (0, 1, 2))(q, k, v))


def test_it_runs_where_jit_is_turned_off_and_in_control_flow() -> None:
    arrays = arrays_of(4)
    with jax.disable_jit():
        off = causal(*arrays), causal_gradients(*arrays)
    same(off, (causal(*arrays), causal_gradients(*arrays)))
    chosen = jax.jit(lambda yes, *x: jax.lax.cond(yes, lambda *y: attention(*y), lambda *y: 2 * attention(*y), *x))
    same(chosen(False, *arrays), 2 * attention(*arrays))


def test_the_search_for_nans_and_infinities_ends_at_the_call() -> None:
    q, k, v = arrays_of(4)
    with jax.debug_nans(True), jax.debug_infs(True):
        causal_gradients(q, k, v)
        attention(q, k[:, :2], v[:, :2], causal=True)  # lse is -inf
    for switch, bad in ((jax.debug_nans, q.at[0].set(jnp.nan)), (jax.debug_infs, v.at[0].set(jnp.inf))):
        for call in (attention, jax.jit(attention)):
            with switch(True), pytest.raises(FloatingPointError, match="encountered in cuflash_forward"):
                call(*((bad, k, v) if bad.shape == q.shape else (q, k, bad)))


def test_unsupported_derivatives_are_errors() -> None:
    arrays = arrays_of(4)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(attention, arrays, arrays)
    second = jax.grad(lambda q: jax.grad(lambda x: loss(attention)(x, *arrays[1:]))(q).sum())
    with pytest.raises(UnsupportedError, match=r"second\s+derivatives.*jax.nn.dot_product_attention"):
        second(arrays[0])


def test_deterministic_reaches_the_program() -> None:
    arrays = arrays_of(4)
    gradient = jax.grad(loss(functools.partial(attention, deterministic=True)))
    assert "deterministic=True" in str(jax.make_jaxpr(gradient)(*arrays))
    same(gradient(*arrays), jax.grad(loss(attention))(*arrays))


def test_numpy_arrays_work_in_concurrent_threads() -> None:
    arrays = [np.asarray(x) for x in arrays_of(4)]
    expected = jax.tree.leaves((causal(*arrays), causal_gradients(*arrays)))

    def work(index: int) -> None:
        for _ in range(20):
            # To a tolerance: a BLAS library may sum in another order in another thread.
            results = jax.tree.leaves((causal(*arrays), causal_gradients(*arrays)))
            for got, exact in zip(results, expected, strict=True):
                oracle.assert_units("a thread's result", got, exact, ulps=8)

    run_threads(work, 4)


def shaped(*shapes: tuple[int, ...], dtypes: tuple[Any, ...] = ("float32",) * 3) -> list[Any]:
    return [np.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=False)]


X = (1, 4, 2, 8)
BAD: list[tuple[str, list[Any], dict[str, Any], str]] = [
    ("dtypes", shaped(X, X, X, dtypes=("float32", "bfloat16", "float32")), {}, "k has dtype bfloat16, but q has"),
    ("integers", shaped(X, X, X, dtypes=("int32",) * 3), {}, "q has dtype int32; give one of float16"),
    ("float8", shaped(X, X, X, dtypes=(jnp.float8_e4m3fn,) * 3), {}, "q has dtype float8_e4m3fn; give one of"),
    ("heads", shaped((1, 4, 3, 8), X, X), {}, "heads_q must be a multiple of heads_kv"),
    ("rank", shaped(X, X[1:], X), {}, "k has shape .* rank 3, but q has rank 4"),
    ("head_dim", shaped(X, (1, 4, 2, 7), X), {}, "q and k must share head_dim"),
    ("list", [[1.0], *shaped(X, X)], {}, "q is a list; give a JAX or NumPy array"),
    ("causal", shaped(X, X, X), {"causal": 1}, "causal=1 is an int; give True or False"),
    ("deterministic", shaped(X, X, X), {"deterministic": 0}, "deterministic=0 is an int"),
    ("return_lse", shaped(X, X, X), {"return_lse": None}, "return_lse=None is a NoneType"),
    ("scale", shaped(X, X, X), {"softmax_scale": -1.0}, "softmax_scale=-1.0 is not positive"),
    ("window", shaped(X, X, X), {"window_size": 3}, "window_size=3 is not a pair"),
    ("dates", [np.zeros(X, "datetime64[s]"), *shaped(X, X)], {}, r"q has dtype datetime64.*; give a JAX or NumPy"),
    ("span", shaped(X, X, X), {"softmax_scale": np.timedelta64(3)}, "is a timedelta64; give a finite number above 0"),
    ("class", shaped(X, X, X), {"softcap": np.float32}, "softcap=.* is a type; give a finite number"),
    ("array_scale", shaped(X, X, X), {"softmax_scale": np.ones(())}, "give a finite number above 0"),
    ("offset", shaped(X, X, X), {"diagonal_offset": [1]}, "give an integer"),
]


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(("arrays", "arguments", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_invalid_arguments_raise_our_error_while_tracing(
    arrays: list[Any], arguments: dict[str, Any], message: str, jitted: bool
) -> None:
    if jitted and (isinstance(arrays[0], list) or arrays[0].dtype.kind == "M"):
        pytest.skip("jit does not pass lists and dates on")
    attention(*shaped(X, X, X), causal=True)  # its cached result must not serve equal arguments (1 for True)
    call = functools.partial(attention, **arguments)
    with pytest.raises(ProblemError, match=message):
        (jax.jit(call) if jitted else call)(*arrays)


def test_eager_forward_refuses_tracers_and_names_the_jax_function() -> None:
    import cuflash

    with pytest.raises(UnsupportedError, match=r"cuflash\.frameworks\.jax"):
        jax.jit(cuflash.forward)(*shaped(X, X, X))


@pytest.mark.parametrize("window", [None, 2, 0, (3, 1), (0, 4)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rank", [3, 4])
def test_dot_product_attention_equals_jax_nn(rank: int, is_causal: bool, window: Any) -> None:
    """Compares both to float64 with jax.nn's alignment: the diagonal begins at the first query and key."""
    arrays = arrays_of(rank)
    arrays[2] = arrays[2][..., :8]
    arguments = {"is_causal": is_causal, "local_window_size": window, "scale": 0.4}
    ours, theirs = (functools.partial(f, **arguments) for f in (dot_product_attention, jax.nn.dot_product_attention))
    pair = (-1, -1) if window is None else (window, window) if isinstance(window, int) else window
    case = Case("jax", 2 if rank == 4 else 1, 6, 9, 4, 2, 8, 8, "float32", is_causal, pair, 0, 0.0, 0.4)
    q, k, v = (np.asarray(x).reshape(shape) for x, shape in zip(arrays, case.shapes(), strict=True))
    for function in (ours, theirs):
        out, residual = (np.asarray(x) for x in function(*arrays, return_residual=True))
        same(out, function(*arrays))
        out, lse = out.reshape(q.shape), residual.reshape(q.shape[:3]).transpose(0, 2, 1)
        oracle.assert_attention(case, (q, k, v), out, lse)
        grads = jax.grad(loss(function), (0, 1, 2))(*arrays)
        assert [x.shape for x in grads] == [x.shape for x in arrays]
        grads = [x.reshape(shape) for x, shape in zip(grads, case.shapes(), strict=True)]
        check(case, BackwardArgs(2 * out, q, k, v, out, lse), grads)
    with_residual = functools.partial(ours, return_residual=True)
    same(jax.grad(loss(with_residual, of_lse=True))(*arrays), jax.grad(loss(ours))(*arrays))


def test_dot_product_attention_has_jax_nns_signature_and_refuses_the_rest() -> None:
    ours, theirs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
        for f in (dot_product_attention, jax.nn.dot_product_attention)
    )
    assert ours == theirs
    arrays = shaped(X, X, X)
    with pytest.raises(UnsupportedError, match=r"cuflash has no implementation; .*jax\.nn\.dot_product_attention"):
        dot_product_attention(*arrays, implementation="cudnn")
    for window in ((-1, 2), -1, np.int64(-3), np.array([-1, 2])):
        with pytest.raises(UnsupportedError, match="numbers of keys >= 0"):
            dot_product_attention(*arrays, local_window_size=window)
    reasons = {"local_window_size": (2.5, "neither a number"), "scale": (True, "a bool"), "is_causal": (1, "an int")}
    for name, (value, message) in reasons.items():
        with pytest.raises(ProblemError, match=f"^{name}={value} is {message}"):
            dot_product_attention(*arrays, **{name: value})
    with pytest.raises(ProblemError, match=r"query has shape \(4, 8\)"):
        dot_product_attention(*(x[0, :, 0] for x in arrays))
    with pytest.raises(ProblemError, match=r"key has shape \(8,\)"):
        dot_product_attention(arrays[0], arrays[1][0, 0, 0], arrays[2])
    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        with pytest.raises(ProblemError, match=f"{name} is a timedelta64, of which JAX has no arrays; give a JAX or"):
            dot_product_attention(*arrays, **{name: np.timedelta64(3, "s")})


def test_deleted_arrays_are_refused() -> None:
    arrays = [jnp.asarray(x) for x in shaped(X, X, X)]
    sinks = jnp.zeros(2)
    for x in (arrays[1], sinks):
        x.delete()
    with pytest.raises(ProblemError, match=r"^k was deleted, or donated to a jitted function; give"):
        attention(*arrays)
    with pytest.raises(ProblemError, match=r"^sinks was deleted"):
        attention(arrays[0], arrays[0], arrays[2], sinks=sinks)


def test_older_jax_is_refused_with_the_oldest_version() -> None:
    code = """
import jax
jax.__version_info__, jax.__version__ = (0, 8, 1), "0.8.1"
from cuflash.errors import UnsupportedError
try:
    import cuflash.frameworks.jax
except UnsupportedError as error:
    print(error)
"""
    assert "needs JAX 0.8.2 or later, and this is 0.8.1; install" in run_python("-c", code)
