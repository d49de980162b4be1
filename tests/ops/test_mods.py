"""Mods through the public calls, on host arrays of all libraries."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import mod_calls
import numpy as np
import pytest
from libraries import jax_of, torch_of
from mod_calls import (
    BATCH,
    BIASES,
    CALLS,
    DIM,
    FACTOR,
    HEADS,
    HEADS_KV,
    KEYS,
    ROWS,
    SLOPES,
    TABLE,
    Arrays,
    arrays,
    bounded,
    loss_of,
    normal,
    scaled,
    slope,
    striped,
    tilted,
    whole,
)

import cuflash
from cuflash import mods

ALGORITHMS = ("flash1", "flash2", "flashd")
DROPS = ("dropout_p", "dropout_seed")


def without(call: Arrays, *names: str) -> Arrays:
    return {name: value for name, value in call.items() if name not in names}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", CALLS)
def test_calls_agree_with_whole_matrices(name: str, algorithm: str) -> None:
    call, inputs = CALLS[name], arrays()
    expected = whole(call, *inputs)
    results = cuflash.forward(*inputs, return_lse=True, algorithm=algorithm, **call)
    for got, desired in zip(results, expected, strict=True):
        np.testing.assert_allclose(got, desired, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(cuflash.lse(*inputs[:2], **without(call, *DROPS)), expected[1], rtol=1e-12, atol=1e-12)
    out = np.full((BATCH, ROWS, HEADS, DIM), np.nan)
    assert cuflash.forward(*inputs, out=out, algorithm=algorithm, **call) is out
    np.testing.assert_array_equal(out, results[0])


@pytest.mark.parametrize("library", ["torch", "jax"])
@pytest.mark.parametrize("name", CALLS)
def test_calls_take_arrays_of_all_libraries(name: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, inputs = CALLS[name], arrays("float32")
    out, lse = whole(call, *inputs)
    dout = np.random.default_rng(3).standard_normal(out.shape).astype("f4")
    results = cuflash.forward(*inputs, return_lse=True, **_single(call))
    expected = cuflash.backward(dout, *inputs, *results, captured_grads=[], **_single(call))

    def convert(x: Any) -> Any:
        x = x.astype("f4") if x.dtype == np.float64 else x
        return torch_of(x, "cpu") if library == "torch" else jax_of(x, "cpu")

    for each in ("SLOPES", "TABLE", "FACTOR"):
        monkeypatch.setattr(mod_calls, each, convert(getattr(mod_calls, each)))
    theirs = {each: convert(value) if isinstance(value, np.ndarray) else value for each, value in call.items()}
    captured_grads = [theirs[each] for each in ("bias", "sinks") if each in call and call[each].dtype != bool]
    q, k, v = map(convert, inputs)
    got = cuflash.forward(q, k, v, return_lse=True, **theirs)
    assert type(got[0]) is type(q)
    for x, desired in zip(got, (out, lse), strict=True):
        np.testing.assert_allclose(np.asarray(x), desired, rtol=1e-4, atol=1e-5)
    *gradients, grads = cuflash.backward(convert(dout), q, k, v, *got, captured_grads=captured_grads, **theirs)
    for x, desired in zip(gradients, expected[:3], strict=True):
        np.testing.assert_allclose(np.asarray(x), desired, rtol=1e-3, atol=1e-4)
    assert [(type(x), x.shape, x.dtype) for x in grads] == [(type(q), x.shape, x.dtype) for x in captured_grads]


def _single(call: Arrays) -> Arrays:
    """Returns the call with its float64 arrays as float32, for float32 inputs."""
    return {name: x.astype("f4") if getattr(x, "dtype", None) == np.float64 else x for name, x in call.items()}


@pytest.mark.parametrize("name", [name for name in CALLS if name != "sinks"])
def test_requested_gradients_equal_finite_differences(name: str) -> None:
    call, inputs = CALLS[name], arrays()
    captured_grads = [{tilted: SLOPES, scaled: FACTOR}.get(call["score_mod"], TABLE)] if "score_mod" in call else []
    captured_grads += [call[each] for each in ("bias", "sinks") if each in call and call[each].dtype != bool]
    random = np.random.default_rng(2)
    dout, dlse = random.standard_normal((BATCH, ROWS, HEADS, DIM)), random.standard_normal((BATCH, HEADS, ROWS))
    out, lse = cuflash.forward(*inputs, return_lse=True, **call)
    dlse = np.where(np.isneginf(lse), 0, dlse)
    *gradients, grads = cuflash.backward(
        dout, *inputs, out, lse, dlse=dlse, captured_grads=tuple(captured_grads), **call
    )
    plain = cuflash.backward(dout, *inputs, out, lse, dlse=dlse, **call)
    assert all((x == y).all() for x, y in zip(gradients, plain, strict=True))
    loss = loss_of(call, dout, dlse)
    for x, gradient in [*zip(inputs, gradients, strict=True), *zip(captured_grads, grads, strict=True)]:
        assert gradient.shape == x.shape
        for number in random.integers(x.size, size=3):
            index = tuple(int(i) for i in np.unravel_index(number, x.shape))
            np.testing.assert_allclose(gradient[index], slope(lambda: loss(*inputs), x, index), rtol=1e-6, atol=1e-7)


def test_an_array_used_twice_gets_the_sum_of_its_gradients_in_its_dtype() -> None:
    table = normal(HEADS).astype("f2")
    half, inputs = normal(1, HEADS, 1, 1).astype("f4"), arrays("float32")

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + table[h] * k + half[0, h, 0, 0] * 2.0

    call: Arrays = {"score_mod": score_mod, "bias": half, "sinks": half[0, :, 0, 0]}
    out, lse = cuflash.forward(*inputs, return_lse=True, **call)
    dlse = np.ones_like(lse)
    *_, grads = cuflash.backward(out, *inputs, out, lse, dlse=dlse, captured_grads=[half, table, half], **call)
    assert [x.dtype.name for x in grads] == ["float32", "float16", "float32"]
    assert (grads[0] == grads[2]).all()
    one, other = half.copy(), half.copy()
    call["score_mod"] = lambda s, b, h, q, k: s + table[h] * k + one[0, h, 0, 0] * 2.0
    call["bias"] = other
    *_, parts = cuflash.backward(out, *inputs, out, lse, dlse=dlse, captured_grads=[one, other], **call)
    np.testing.assert_allclose(grads[0], parts[0] + parts[1], rtol=1e-5)


LENGTHS = ([0, 21, 21, 34], [0, 34, 39, 59])


@pytest.mark.parametrize("place", ["packed", "padded", "cache", "pages"])
def test_mods_of_variable_length_sequences_equal_dense_calls(place: str) -> None:
    queries, keys = LENGTHS
    q, k, v = normal(34, HEADS, DIM), normal(59, HEADS_KV, DIM), normal(59, HEADS_KV, DIM)
    offsets = np.array([0, 9, 40])

    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return striped(b, h, q_idx, k_idx) & mods.document(offsets)(b, h, q_idx, k_idx)

    call: Arrays = {"score_mod": bounded, "mask_mod": mask_mod, "bias": normal(3, HEADS, 34, 36), "sinks": SLOPES,
                    "dropout_p": 0.25, "dropout_seed": 9, "causal": True}  # fmt: skip
    varlen_kwargs: Arrays = {"cu_seqlens_q": np.array(queries, np.int32), "max_seqlen_q": 34}
    inputs = [q, k, v]
    if place == "packed":
        varlen_kwargs |= {"cu_seqlens_k": np.array(keys, np.int32), "max_seqlen_k": 36}
    else:
        varlen_kwargs |= {"seqused_k": np.diff(keys).astype(np.int32)}
        caches = [np.full((3, 36, HEADS_KV, DIM), np.nan) for _ in range(2)]
        for cache, rows in zip(caches, (k, v), strict=True):
            for b in range(3):
                cache[b, : keys[b + 1] - keys[b]] = rows[keys[b] : keys[b + 1]]
        inputs = [q, *caches]
        if place == "cache":
            varlen_kwargs |= {"cache_batch_idx": np.array([2, 0, 1], np.int32)}
            inputs = [q, *[cache[[1, 2, 0]] for cache in caches]]
        elif place == "pages":
            varlen_kwargs |= {"page_table": np.arange(27, dtype=np.int32).reshape(3, 9)[:, ::-1].copy()}
            inputs = [q, *[c.reshape(3, 9, 4, HEADS_KV, DIM)[:, ::-1].reshape(27, 4, HEADS_KV, DIM) for c in caches]]
    out, lse = cuflash.forward(*inputs, return_lse=True, **varlen_kwargs, **call)
    whole_gradients = None
    if place in ("packed", "padded"):
        whole_gradients = cuflash.backward(
            out, *inputs, out, lse, captured_grads=[TABLE, call["bias"], SLOPES], **varlen_kwargs, **call
        )
    total: list[Any] = [0.0, 0.0, 0.0]
    for b in range(3):
        rows, columns = slice(*queries[b : b + 2]), slice(*keys[b : b + 2])
        alone = [q[rows][None], k[columns][None], v[columns][None]]
        one = call | {"bias": call["bias"][b : b + 1, :, : queries[b + 1] - queries[b], : keys[b + 1] - keys[b]]}
        # b sequences of zeros come first, as dropout and the mask depend on the number of the sequence.
        more = [np.concatenate([np.zeros_like(x)] * b + [x]) for x in alone]
        one["bias"] = np.concatenate([one["bias"]] * (b + 1))
        expected, wanted_lse = cuflash.forward(*more, return_lse=True, **one)
        np.testing.assert_allclose(out[rows], expected[b], rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(lse[:, rows], wanted_lse[b], rtol=1e-10, atol=1e-12)
        if whole_gradients is not None:
            dout = np.concatenate([np.zeros_like(expected[:1])] * b + [expected[b:]])
            *gradients, grads = cuflash.backward(dout, *more, expected, wanted_lse,
                                                 captured_grads=[TABLE, SLOPES], **one)  # fmt: skip
            total = [x + y for x, y in zip(total, grads, strict=False)]
            np.testing.assert_allclose(whole_gradients[0][rows], gradients[0][b], rtol=1e-10, atol=1e-12)
    if whole_gradients is not None:
        np.testing.assert_allclose(whole_gradients[3][0], total[0], rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(whole_gradients[3][2], total[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", [(), (KEYS,), (ROWS, KEYS), (HEADS, 1, KEYS), (1, HEADS, ROWS, 1)])
def test_a_bias_may_lack_its_first_axes_and_have_any_strides(shape: tuple[int, ...]) -> None:
    bias, inputs = normal(*shape), arrays()
    whole_bias = np.broadcast_to(bias, (BATCH, HEADS, ROWS, KEYS))
    expected = cuflash.forward(*inputs, bias=np.ascontiguousarray(whole_bias))
    for each in (bias, whole_bias, bias.T.copy().T):
        np.testing.assert_allclose(cuflash.forward(*inputs, bias=each), expected, rtol=1e-12, atol=1e-12)


def test_seeds_of_all_kinds_that_are_equal_drop_the_same_weights() -> None:
    seed, inputs = 2**63 + 12345, arrays("float32")
    expected = cuflash.forward(*inputs, dropout_p=0.5, dropout_seed=seed)
    words = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
    for same in (seed - 2**64, np.uint64(seed), np.array(seed, np.uint64), np.array([seed], np.uint64), words,
                 words.view(np.int32)):  # fmt: skip
        assert (cuflash.forward(*inputs, dropout_p=0.5, dropout_seed=same) == expected).all()
    assert (cuflash.forward(*inputs, dropout_p=0.5, dropout_seed=1) != expected).any()
    plain = cuflash.forward(*inputs)
    for unused in (seed, words):
        assert (cuflash.forward(*inputs, dropout_p=0, dropout_seed=unused) == plain).all()


def test_mods_that_change_nothing_run_the_plain_call() -> None:
    inputs = arrays("float32")
    out, lse = cuflash.forward(*inputs, return_lse=True)
    for call in ({"score_mod": lambda s, b, h, q, k: s}, {"mask_mod": lambda b, h, q, k: k >= 0}, {"dropout_p": 0.0}):
        assert (cuflash.forward(*inputs, **call) == out).all()
        assert cuflash.plan(*inputs, **call) == cuflash.plan(*inputs)
    *gradients, grads = cuflash.backward(out, *inputs, out, lse, captured_grads=())
    assert grads == ()
    assert len(gradients) == 3
    bias = BIASES["one"]
    assert cuflash.plan(*arrays(), bias=bias).problem.op.mod_spec is not None


def test_arrays_without_batch_or_heads_and_empty_ones() -> None:
    q, k, v = (normal(n, 8) for n in (5, 7, 7))
    bias, sinks = normal(5, 7), normal(1)
    call: Arrays = {"bias": bias, "sinks": sinks, "score_mod": mods.alibi(1)}
    out, lse = cuflash.forward(q, k, v, return_lse=True, **call)
    expected = cuflash.forward(*(x[None, :, None] for x in (q, k, v)), return_lse=True, **call)
    assert (out == expected[0][0, :, 0]).all()
    assert (lse == expected[1][0, 0]).all()
    grads_out = [np.empty_like(x) for x in (q, k, v)]
    call |= {"grads_out": grads_out, "captured_grads": (sinks, bias)}
    *gradients, grads = cuflash.backward(out, q, k, v, out, lse, **call)
    assert all(x is y for x, y in zip(gradients, grads_out, strict=True))
    assert [x.shape for x in grads] == [(1,), (5, 7)]
    nothing, keys = np.zeros((2, 0, 2, 8)), np.zeros((2, 3, 2, 8))
    mod_kwargs: Arrays = {
        "sinks": np.array([0.5, -1.0]),
        "bias": np.zeros((1, 2, 1, 1)),
        "dropout_p": 0.1,
        "dropout_seed": 1,
    }
    assert cuflash.forward(nothing, keys, keys, **mod_kwargs).shape == (2, 0, 2, 8)
    out, lse = cuflash.forward(keys, nothing, nothing, return_lse=True, **mod_kwargs)
    assert (out == 0).all()
    assert (lse == mod_kwargs["sinks"][:, None]).all()
    captured_grads = mod_kwargs["sinks"], mod_kwargs["bias"]
    *_, grads = cuflash.backward(out, keys, nothing, nothing, out, lse, captured_grads=captured_grads, **mod_kwargs)
    assert all((x == 0).all() for x in grads)


def test_a_seed_that_is_not_read_costs_no_longer_way(monkeypatch: pytest.MonkeyPatch) -> None:
    q = np.ones((1, 4, 1, 8), "float32")
    expected = cuflash.forward(q, q, q, return_lse=True)
    for name in ("forward", "backward"):
        module = import_module(f"cuflash.ops.{name}")
        monkeypatch.setattr(
            module, "resolve_mods", lambda *args: pytest.fail("it took the way of calls with functions")
        )
    for seed in (5, np.array(5, np.int64)):
        out, lse = cuflash.forward(q, q, q, dropout_seed=seed, return_lse=True)
        assert ((out == expected[0]).all(), (lse == expected[1]).all()) == (True, True)
        cuflash.backward(q, q, q, q, out, lse, dropout_seed=seed)
