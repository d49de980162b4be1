"""Mods in NumPy, compared with whole matrices in float64 and finite differences."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from libraries import same
from mod_calls import (
    BATCH,
    BIASES,
    CALLS,
    DIM,
    HEADS,
    HEADS_KV,
    KEYS,
    ROWS,
    SLOPES,
    Arrays,
    arrays,
    bounded,
    loss_of,
    normal,
    problem_of,
    slope,
    striped,
    tilted,
    whole,
)
from plans import problem

from cuflash.arrays.numpy import NUMPY
from cuflash.mods import masks, scores
from cuflash.mods.tracing.trace import trace
from cuflash.problem import mod_spec as problem_mods
from cuflash.problem.mod_spec import Bias
from cuflash.problem.operands import VARLEN_OPS
from cuflash.problem.options import Options
from cuflash.problem.problem import Problem
from cuflash.reference import flash1, flash2, flashd, of_sequences
from cuflash.reference.backward import backward
from cuflash.reference.block_mask import mask_tiles_of
from cuflash.reference.mods import ModGradients, ModScores

ALGORITHMS = {"flash1": flash1, "flash2": flash2, "flashd": flashd}


def make_mod_scores(call: Arrays, **changes: Any) -> ModScores:
    score, mask = (trace(call[name], name) if name in call else None for name in ("score_mod", "mask_mod"))
    bias, named = call.get("bias"), {"sinks": call.get("sinks"), "dropout_seed": np.array(call.get("dropout_seed", 0))}
    kind = None if bias is None else Bias(bias.dtype.name, tuple(length > 1 for length in bias.shape))
    mod_spec = problem_mods.make_mod_spec(score, mask, kind, "sinks" in call, "dropout_p" in call)
    values = [each.array for each in problem_mods.captured((score, mask))] + [bias]
    named |= {each.name: x for each, x in zip(mod_spec.arrays, values, strict=False)}
    options = Options(dropout_p=call.get("dropout_p", 0.0))
    return dataclasses.replace(ModScores.from_spec(mod_spec, named, options), **changes)


def test_inputs_with_invisible_keys_are_not_written_to() -> None:
    call: Arrays = {"mask_mod": lambda b, h, q_idx, k_idx: k_idx > 20}
    q, k, v = (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in arrays())  # contiguous rows of each head
    for x in (q, k, v):
        x.flags.writeable = False
    out, lse = flash2.forward(problem_of(call), q, k, v, mod_scores=make_mod_scores(call))
    np.testing.assert_allclose(out, whole(call, q, k, v)[0], rtol=1e-9, atol=1e-12)
    backward(problem_of(call), out, q, k, v, out, lse, mod_scores=make_mod_scores(call))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", CALLS)
def test_tiles_of_any_size_agree_with_whole_matrices(name: str, algorithm: str) -> None:
    call = CALLS[name]
    expected = whole(call, *arrays())
    for sizes in ({}, {"block_q": 8, "block_k": 16}):
        results = ALGORITHMS[algorithm].forward(problem_of(call), *arrays(), mod_scores=make_mod_scores(call), **sizes)
        for got, desired in zip(results, expected, strict=True):
            np.testing.assert_allclose(got, desired, rtol=1e-12, atol=1e-12)


def test_without_changes_the_bits_are_those_of_a_plain_call() -> None:
    for dtype in ("float32", "float16"):
        problem = problem_of({"causal": True}, dtype)
        plain, unchanged = (flash2.forward(problem, *arrays(dtype), mod_scores=each) for each in (None, ModScores()))
        same(plain, unchanged)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "sinks"])
def test_gradients_are_slopes(name: str) -> None:
    call, inputs = CALLS[name], arrays()
    problem, mod_scores, random = problem_of(call), make_mod_scores(CALLS[name]), np.random.default_rng(2)
    dout, dlse = random.standard_normal((BATCH, ROWS, HEADS, DIM)), random.standard_normal((BATCH, HEADS, ROWS))
    out, lse = flash2.forward(problem, *inputs, mod_scores=mod_scores)
    dlse = np.where(np.isneginf(lse), 0, dlse)
    sums = ModGradients(mod_scores, np.dtype(np.float64))
    sizes = {"block_q": 8, "block_k": 16}
    grads = backward(problem, dout, *inputs, out, lse, dlse, mod_scores=mod_scores, mod_gradients=sums, **sizes)
    pairs = [*zip(inputs, grads, strict=True)]
    if sums.sinks is not None:
        pairs.append((call["sinks"], sums.sinks))
    pairs += [(mod_scores.arrays[number], total) for number, total in sums.arrays.items()]
    loss = loss_of(call, dout, dlse)
    for x, gradient in pairs:
        assert gradient.shape == x.shape
        for number in random.integers(x.size, size=4):
            index = tuple(int(i) for i in np.unravel_index(number, x.shape))
            expected = slope(lambda: loss(*inputs), x, index)
            np.testing.assert_allclose(gradient[index], expected, rtol=1e-6, atol=1e-7)


def test_sink_gradients_of_minus_inf_and_blind_rows_are_exact() -> None:
    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return (q_idx > 4) & (k_idx < 9)

    call = {"sinks": np.array([0.5, -np.inf, 0.0, 1.0]), "mask_mod": mask_mod}
    problem, mod_scores = problem_of(call), make_mod_scores(call)
    out, lse = flash2.forward(problem, *arrays(), mod_scores=mod_scores)
    assert (out[:, :5] == 0).all()
    assert (lse[:, :, :5] == call["sinks"][:, None]).all()
    sums, dlse = ModGradients(mod_scores, np.dtype(np.float64)), np.zeros_like(lse)
    dlse[:, :, :5] = 1.0
    backward(problem, np.zeros_like(out), *arrays(), out, lse, dlse, mod_scores=mod_scores, mod_gradients=sums)
    assert sums.sinks is not None
    assert sums.sinks.tolist() == [BATCH * 5.0, 0.0, BATCH * 5.0, BATCH * 5.0]


def test_least_numbers_hide_and_invisible_keys_leave_no_trace() -> None:
    q, k, v = arrays("float32")
    hidden = np.zeros((1, 1, 1, KEYS), np.float32)
    hidden[..., 20:] = np.finfo(np.float32).min
    call = {"bias": hidden}
    call_problem, mod_scores = problem_of(call, "float32"), make_mod_scores(call)
    out, lse = flash2.forward(call_problem, q, k, v, mod_scores=mod_scores)
    shorter = problem(DIM, DIM, dims=(BATCH, ROWS, 20, HEADS, HEADS_KV), dtype="float32")
    for got, desired in zip((out, lse), flash2.forward(shorter, q, k[:, :20], v[:, :20]), strict=True):
        np.testing.assert_allclose(got, desired, rtol=1e-6, atol=1e-6)
    for fill in (np.nan, np.inf):
        k[:, 20:], v[:, 20:] = fill, fill
        for mask in ({"bias": hidden[..., :] > -1}, {"mask_mod": lambda b, h, q_idx, k_idx: k_idx < 20}):
            mod_scores = make_mod_scores(mask)
            same(flash2.forward(call_problem, q, k, v, mod_scores=mod_scores), (out, lse))
            sums = ModGradients(mod_scores, np.dtype(np.float32))
            gradients = backward(call_problem, out, q, k, v, out, lse, mod_scores=mod_scores, mod_gradients=sums)
            assert all(np.isfinite(x).all() for x in gradients)
            assert all((x[:, 20:] == 0).all() for x in gradients[1:])
    k[:, 20:] = np.nan
    assert np.isnan(flash2.forward(call_problem, q, k, v, mod_scores=make_mod_scores(call))[1]).all()  # floats: no mask
    everything = make_mod_scores({"bias": np.full((1, 1, 1, 1), -np.inf, np.float32)})
    out, lse = flash2.forward(call_problem, *arrays("float32"), mod_scores=everything)
    assert (out == 0).all()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("operand", ["dout", "q", "k", "v"])
@pytest.mark.parametrize("name", ["mask_mod", "mask_mod and window", "bool bias", "sinks", "all"])
def test_rows_and_keys_that_a_mask_hides_exchange_no_nan(name: str, operand: str) -> None:
    call, inputs = CALLS[name], dict(zip("qkv", arrays(), strict=True))
    problem, mod_scores, dout = problem_of(call), make_mod_scores(call), normal(BATCH, ROWS, HEADS, DIM)
    shown = call["mask_mod"](*np.ogrid[:BATCH, :HEADS, :ROWS, :KEYS]) if "mask_mod" in call else call["bias"]
    shown = shown & problem.mask.visible(np.arange(ROWS), np.arange(KEYS))
    visible = np.broadcast_to(shown, (BATCH, HEADS, ROWS, KEYS))

    def results(**poisoned: Any) -> tuple[Any, ...]:
        q, k, v, upstream = (poisoned.get(name, x) for name, x in (*inputs.items(), ("dout", dout)))
        out, lse = flash2.forward(problem, q, k, v, mod_scores=mod_scores)
        return (
            out.swapaxes(1, 2),
            lse,
            *(x.swapaxes(1, 2) for x in backward(problem, upstream, q, k, v, out, lse, mod_scores=mod_scores)),
        )

    clean = results()
    for number in (0, 7, 20):
        x = {**inputs, "dout": dout}[operand].copy()
        x[:, number] = np.nan
        rows = (
            visible[..., number] if operand in "kv" else np.broadcast_to(np.arange(ROWS) == number, visible.shape[:3])
        )
        keys = (visible & rows[..., None]).any(axis=2).reshape(BATCH, HEADS_KV, -1, KEYS).any(axis=2)
        soiled_results = results(**{operand: x})
        for got, expected, others in zip(soiled_results, clean, (~rows, ~rows, ~rows, ~keys, ~keys), strict=True):
            np.testing.assert_array_equal(got[others], expected[others])
        assert np.isnan(soiled_results[2 if operand == "dout" else 0][rows & visible.any(axis=3)]).all()


def test_a_row_that_is_nan_gives_nan_to_the_keys_that_it_sees_alone() -> None:
    bias = np.zeros((1, 1, ROWS, KEYS))
    bias[..., 3, 1] = np.nan
    call = {"bias": bias, "mask_mod": lambda b, h, q_idx, k_idx: (q_idx != 3) | (k_idx < 9)}
    problem, mod_scores = problem_of(call), make_mod_scores(call)
    out, lse = flash2.forward(problem, *arrays(), mod_scores=mod_scores)
    assert np.argwhere(np.isnan(lse).all(axis=(0, 1))).tolist() == [[3]]
    dq, dk, dv = backward(problem, normal(*out.shape), *arrays(), out, lse, mod_scores=mod_scores)
    assert np.argwhere(np.isnan(dq).any(axis=(0, 2, 3))).tolist() == [[3]]
    for of_keys in (dk, dv):
        assert np.isnan(of_keys[:, :9]).all()
        assert np.isfinite(of_keys[:, 9:]).all()


def test_dropout_keeps_lse_and_the_sum_of_weights_in_the_mean() -> None:
    call = {"dropout_p": 0.25, "dropout_seed": 11}
    q, k, _ = arrays()
    ones = np.ones((BATCH, KEYS, HEADS_KV, 1))
    call_problem = problem(DIM, 1, dims=(BATCH, ROWS, KEYS, HEADS, HEADS_KV), dtype="float64")
    out, lse = flash2.forward(call_problem, q, k, ones, mod_scores=make_mod_scores(call))
    np.testing.assert_array_equal(lse, flash2.forward(call_problem, q, k, ones)[1])
    assert abs(out.mean() - 1.0) < 0.03
    assert out.std() > 0.05


def test_sequences_after_the_first_have_their_own_numbers() -> None:
    call = {"score_mod": tilted, "mask_mod": striped, "bias": BIASES["whole"], "dropout_p": 0.3, "dropout_seed": 5}
    problem = problem_of(call)
    both = flash2.forward(problem, *arrays(), mod_scores=make_mod_scores(call))
    alone = flash2.forward(
        problem._replace(batch=1), *(x[1:] for x in arrays()), mod_scores=make_mod_scores(call, first_batch=1)
    )
    for got, desired in zip(alone, both, strict=True):
        np.testing.assert_array_equal(got[0], desired[1])


@pytest.mark.parametrize("name", ["causal", "document", "alibi"])
def test_ready_made_functions_are_what_keywords_do(name: str) -> None:
    inputs, call_problem = arrays(), problem_of({})
    if name == "causal":
        call = {"mask_mod": masks.causal}
        expected = flash2.forward(problem_of({"causal": True}), *inputs)
    elif name == "document":
        call = {"mask_mod": masks.document(np.array([0, 10, KEYS], np.int32))}
        inputs = np.resize(inputs[0], (BATCH, KEYS, HEADS, DIM)), *inputs[1:]
        call_problem = problem(DIM, DIM, dims=(BATCH, KEYS, KEYS, HEADS, HEADS_KV), dtype="float64")
        parts = []
        for begin, end in ((0, 10), (10, KEYS)):
            alone = problem(DIM, DIM, dims=(BATCH, end - begin, end - begin, HEADS, HEADS_KV), dtype="float64")
            parts.append(flash2.forward(alone, *(x[:, begin:end] for x in inputs)))
        outs, lses = zip(*parts, strict=True)
        expected = np.concatenate(outs, axis=1), np.concatenate(lses, axis=2)
    else:
        call = {"score_mod": scores.alibi(SLOPES)}
        place = np.arange(ROWS)[:, None] + KEYS - ROWS
        bias = -SLOPES[:, None, None] * abs(np.arange(KEYS) - place)
        expected = flash2.forward(call_problem, *inputs, mod_scores=make_mod_scores({"bias": bias[None]}))
    results = flash2.forward(call_problem, *inputs, mod_scores=make_mod_scores(call))
    for got, desired in zip(results, expected, strict=True):
        np.testing.assert_allclose(got, desired, rtol=1e-10, atol=1e-10)


def of_lengths(place: str) -> tuple[Problem, Arrays, list[tuple[slice, slice]]]:
    """Returns a problem of 21, 0 and 13 queries over 34, 5 and 20 keys, its inputs, and the rows of each sequence."""
    queries, keys = [0, 21, 21, 34], [0, 34, 39, 59]
    q, k, v = normal(34, HEADS, DIM), normal(59, HEADS_KV, DIM), normal(59, HEADS_KV, DIM)
    named = {"q": q, "k": k, "v": v, "cu_seqlens_q": np.array(queries, np.int32)}
    if place == "packed":
        named["cu_seqlens_k"] = np.array(keys, np.int32)
    else:  # pages of four keys; the third page of the first sequence is missing
        pages, table = np.zeros((20, 4, HEADS_KV, DIM)), np.full((3, 9), -1, np.int32)
        named |= {"k": pages, "v": pages.copy(), "page_table": table, "seqused_k": np.diff(keys).astype(np.int32)}
        for b in range(3):
            for begin in range(keys[b], keys[b + 1], 4):
                number, rows = int((table >= 0).sum()), slice(begin, min(begin + 4, keys[b + 1]))
                table[b, (begin - keys[b]) // 4] = number
                pages[number, : rows.stop - begin] = k[rows]
                named["v"][number, : rows.stop - begin] = v[rows]
        table[0, 2] = -1
    op = VARLEN_OPS["forward"]
    specs = [NUMPY.spec(x.name, named[x.name]) if x.name in named else None for x in op.inputs]
    problem = Problem.from_specs(op, specs, Options(causal=True))
    rows = [(slice(queries[b], queries[b + 1]), slice(keys[b], keys[b + 1])) for b in range(3)]
    views = {name: x[None] if x.ndim == 3 and name in "qkv" else x for name, x in named.items()}
    return problem, {"k_rows": k, "v_rows": v, **views}, rows


@pytest.mark.parametrize("place", ["packed", "pages"])
def test_varlen_sequences_count_from_their_own_begin(place: str) -> None:
    call_problem, named, rows = of_lengths(place)
    call = {"score_mod": bounded, "mask_mod": striped, "bias": normal(3, HEADS, 34, 34), "sinks": SLOPES,
            "dropout_p": 0.25, "dropout_seed": 9}  # fmt: skip
    k_rows, v_rows = named.pop("k_rows"), named.pop("v_rows")
    out, lse = of_sequences(call_problem, named, mod_scores=make_mod_scores(call))
    for b, (queries, keys) in enumerate(rows):
        m, n = queries.stop - queries.start, keys.stop - keys.start
        alone = problem(DIM, DIM, dims=(1, m, n, HEADS, HEADS_KV), dtype="float64", causal=True)
        parts = named["q"][:, queries], k_rows[None, keys], v_rows[None, keys]
        mod_scores = make_mod_scores(call, first_batch=b)
        if place == "pages" and b == 0:
            call_of_pages = {**call, "mask_mod": lambda b, h, q, k: striped(b, h, q, k) & (k // 4 != 2)}
            mod_scores = make_mod_scores(call_of_pages, first_batch=b)
        expected = flash2.forward(alone, *parts, mod_scores=mod_scores)
        np.testing.assert_allclose(out[:, queries], expected[0], rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(lse[:, :, queries], expected[1], rtol=1e-10, atol=1e-12)


def test_gradients_of_packed_sequences_add_up() -> None:
    call_problem, named, rows = of_lengths("packed")
    call = {"score_mod": bounded, "bias": normal(1, HEADS, 34, 34), "sinks": SLOPES}
    k_rows, v_rows, mod_scores = named.pop("k_rows"), named.pop("v_rows"), make_mod_scores(call)
    out, lse = of_sequences(call_problem, named, mod_scores=mod_scores)
    dout, op = normal(*out.shape), VARLEN_OPS["backward"]
    named = {**{name: named[name] for name in "qkv"}, "dout": dout, "out": out, "lse": lse,
             **{name: x for name, x in named.items() if name.startswith("cu_")}}  # fmt: skip
    specs = [None if x.name not in named else NUMPY.spec(x.name, named[x.name] if x.name.startswith("cu_")
             else named[x.name][0]) for x in op.inputs]  # fmt: skip
    sums, total = (ModGradients(mod_scores, np.dtype(np.float64)) for _ in range(2))
    grads = of_sequences(
        Problem.from_specs(op, specs, Options(causal=True)), named, mod_scores=mod_scores, mod_gradients=sums
    )
    for b, (queries, keys) in enumerate(rows):
        m, n = queries.stop - queries.start, keys.stop - keys.start
        alone = problem(DIM, DIM, "backward", dims=(1, m, n, HEADS, HEADS_KV), dtype="float64", causal=True)
        parts = named["q"][:, queries], k_rows[None, keys], v_rows[None, keys]
        state = out[:, queries], lse[:, :, queries]
        expected = backward(
            alone,
            dout[:, queries],
            *parts,
            *state,
            mod_scores=make_mod_scores(call, first_batch=b),
            mod_gradients=total,
        )
        for got, desired, index in zip(grads, expected, (queries, keys, keys), strict=True):
            np.testing.assert_allclose(got[:, index], desired, rtol=1e-10, atol=1e-12)
    both = ([each.sinks, *each.arrays.values()] for each in (sums, total))
    for got, desired in zip(*both, strict=True):
        np.testing.assert_allclose(got, desired, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("by_heads", [False, True])
def test_mask_tiles_that_show_nothing_are_passed_over(by_heads: bool) -> None:
    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return (q_idx // 64 == k_idx // 128) & (h * by_heads < 2)

    call_problem = problem(DIM, DIM, dims=(1, 150, 300, HEADS, HEADS_KV), dtype="float32")
    q, k, v = (normal(1, n, heads, DIM).astype("f4") for n, heads in ((150, HEADS), (300, HEADS_KV), (300, HEADS_KV)))
    mod_scores = make_mod_scores({"mask_mod": mask_mod})
    mask_tiles = mask_tiles_of(trace(mask_mod, "mask_mod"), 1, HEADS if by_heads else 1, 150, 300)
    passed = dataclasses.replace(mod_scores, mask_tiles=mask_tiles)
    sizes, begins = {"block_q": 64, "block_k": 64}, []
    expected = flash2.forward(call_problem, q, k, v, mod_scores=mod_scores, **sizes)
    results = flash2.forward(
        call_problem, q, k, v, mod_scores=passed, on_tile=lambda block, tile, state: begins.append(tile.begin), **sizes
    )
    same(results, expected)
    assert sorted(begins) == sorted([0, 64, 128, 192, 256] * (1 if by_heads else HEADS_KV))
    gradients = [
        backward(call_problem, q, q, k, v, *expected, mod_scores=each, **sizes) for each in (mod_scores, passed)
    ]
    same(*gradients)
