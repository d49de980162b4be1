"""Gradients of arrays that scores load from, of bias and of sinks on a GPU, against float64 and the tolerance rule.

A gradient is a float32 sum over all scores that an element is part of. The index is a row, a column or a head, or it is
computed, or loaded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from mod_table import SMALL as CASE
from mod_table import of_lengths
from plans import for_any_gpu

import cuflash
from cuflash.errors import UnsupportedError
from cuflash.mods import scores
from cuflash.testing.cases import Case, numpy_dtype
from cuflash.testing.functions import FUNCTIONS, Arguments, Maker, Put, bias_of, drawn, everything, joined, sinks_of
from cuflash.testing.layouts import host, identical
from cuflash.testing.mod_oracle import OracleInputs, check_gradients
from cuflash.testing.mods import bounds_case, check_backward, check_repeated, make_oracle_mods
from cuflash.testing.sequences import Sequences, upstream, varlen_arrays

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("new_memory_holds_nan")]
# No axis of length 1, as a bias that is broadcast along other axes compiles other code.
LENGTHS = ((2, 3), (64, 64), (65, 130), (130, 63), (257, 300))


def slopes_of_batch(put: Put, case: Case) -> Arguments:
    slopes = put(drawn("batch", case.batch, case.heads_q) / 8)
    return {"score_mod": scores.alibi(slopes), "captured_grads": (slopes,)}


def distances(put: Put, case: Case) -> Arguments:
    """Builds a bias by distance, in the dtype of the inputs: an index that is affine in query and key."""
    count = case.seqlen_q + case.seqlen_k
    table = put(drawn("distances", case.heads_q, count).astype(numpy_dtype(case.dtype)))
    last = put(np.array(case.seqlen_k, np.int32))

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return score + 0.5 * table[h, q_idx - k_idx + last]

    return {"score_mod": score_mod, "captured_grads": (table,)}


def of_both_sides(put: Put, case: Case) -> Arguments:
    """Builds a score_mod with an array that is loaded twice, and one whose gradient depends on the score."""
    positions, factors = (
        put(drawn("places", max(case.seqlen_q, case.seqlen_k))),
        put(drawn("factors", case.heads_q) / 4),
    )

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return score * (1.0 + factors[h]) + positions[q_idx] * positions[k_idx] * 0.5

    return {"score_mod": score_mod, "captured_grads": (positions, factors)}


def loaded_index(put: Put, case: Case) -> Arguments:
    """Builds a score_mod with a loaded index: many scores share few elements, in no order."""
    random = np.random.default_rng(4)
    kinds = put(random.integers(0, 20, (case.batch, max(case.seqlen_q, case.seqlen_k))).astype(np.int32))
    table = put(drawn("kinds", 20, 20))

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return score + table[kinds[b, q_idx], kinds[b, k_idx]]

    return {"score_mod": score_mod, "captured_grads": (table,)}


CAPTURED: dict[str, Maker] = {
    **{name: FUNCTIONS[name] for name in ("alibi", "relative_position", "bounded", "everything")},
    "slopes_of_batch": slopes_of_batch,
    "distances": distances,
    "of_both_sides": of_both_sides,
    "loaded_index": loaded_index,
    "a_number": FUNCTIONS["empty_and_one"],  # an array without axes, and one of no elements
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", CAPTURED)
def test_captured_arrays(cupy: Any, name: str, deterministic: bool) -> None:
    for lengths in LENGTHS:
        check_one = check_repeated if deterministic else check_backward
        check_one(CAPTURED[name], of_lengths(lengths), cupy.asarray, grads=True)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("letters", "dtype"), [
    ("bhqk", "float32"), ("1hqk", "float16"), ("b1qk", "float32"), ("qk", "float32"), ("bh1k", "float32"),
    ("bhq1", "float32"), ("1h11", "float32"), ("1111", "float32"),
])  # fmt: skip
def test_bias(cupy: Any, letters: str, dtype: str, deterministic: bool) -> None:
    for lengths in LENGTHS:
        case = of_lengths(lengths, batch=3)
        check_backward(bias_of(letters, dtype), case, cupy.asarray, grads=True, deterministic=deterministic)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_sinks(cupy: Any, dtype: str) -> None:
    for lengths in LENGTHS:
        make = joined(sinks_of(dtype), FUNCTIONS["striped"])
        for dlse in (True, False):
            check_backward(make, of_lengths(lengths), cupy.asarray, grads=True, dlse=dlse)


@pytest.mark.parametrize("deterministic", [False, True])
def test_bias_of_rows_that_share_it(cupy: Any, deterministic: bool) -> None:
    """As in structure prediction, many short rows of a small head dim share one bias."""
    make = joined(bias_of("1hqk"), bias_of_keys)
    for batch, n in ((40, 48), (7, 130)):
        case = Case("pairs", batch, n, n, 4, 4, 32, 32, "bfloat16")
        check_backward(make, case, cupy.asarray, grads=True, deterministic=deterministic)


def bias_of_keys(put: Put, case: Case) -> Arguments:
    """Builds a mask that hides some keys of each sequence."""
    visible = put(drawn("keys", case.batch, case.seqlen_k) > -1.0)
    return {"mask_mod": lambda b, h, q_idx, k_idx: visible[b, k_idx]}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["everything", "bhqk"])
def test_the_kernels_for_any_gpu(cupy: Any, name: str, deterministic: bool) -> None:
    make = CAPTURED.get(name) or bias_of(name)
    with for_any_gpu():
        for lengths in LENGTHS:
            check_backward(make, of_lengths(lengths), cupy.asarray, grads=True, deterministic=deterministic)


@pytest.mark.parametrize(("dims", "dtype"), [((128, 128), "bfloat16"), ((256, 256), "bfloat16"), ((64, 64), "float32")])
def test_other_head_dims_and_dtypes(cupy: Any, dims: tuple[int, int], dtype: str) -> None:
    case = replace(CASE, dtype=dtype, head_dim=dims[0], head_dim_v=dims[1])
    for lengths in ((65, 130), (257, 300)):
        check_backward(everything, of_lengths(lengths, case), cupy.asarray, grads=True)


def test_keywords_and_many_groups(cupy: Any) -> None:
    for heads in ((8, 1), (7, 7)):
        case = of_lengths((200, 270), heads_q=heads[0], heads_kv=heads[1], causal=True, softcap=3.0)
        check_backward(everything, case, cupy.asarray, grads=True)
        check_backward(everything, replace(case, window_size=(60, 10), causal=False), cupy.asarray, grads=True)


def test_only_what_is_asked_for_is_given_in_its_order(cupy: Any) -> None:
    arrays, mod_kwargs = [cupy.asarray(x) for x in CASE.arrays()], everything(cupy.asarray, CASE)
    table, bias, sinks = mod_kwargs.pop("captured_grads")
    out, lse = cuflash.forward(*arrays, return_lse=True, **mod_kwargs)

    def gradients_with(*captured: Any) -> Any:
        return cuflash.backward(out, *arrays, out, lse, deterministic=True, **mod_kwargs, captured_grads=captured)

    dq, dk, dv, grads = gradients_with(table, bias, sinks)
    assert identical(cuflash.backward(out, *arrays, out, lse, deterministic=True, **mod_kwargs), (dq, dk, dv))
    of_table, of_bias, of_sinks = grads
    assert identical(gradients_with(sinks, table)[3], (of_sinks, of_table))
    assert identical(gradients_with(bias)[3], (of_bias,))


@pytest.mark.parametrize("name", ["everything", "loaded_index", "1hqk"])
def test_twenty_deterministic_repeats_are_the_same_bits(cupy: Any, name: str) -> None:
    make, case = CAPTURED.get(name) or bias_of(name), of_lengths((257, 300), batch=3)
    arrays, mod_kwargs = [cupy.asarray(x) for x in case.arrays()], make(cupy.asarray, case)
    captured = mod_kwargs.pop("captured_grads")
    out, lse = cuflash.forward(*arrays, return_lse=True, **mod_kwargs)

    def gradients(deterministic: bool) -> Any:
        more = {"deterministic": deterministic, "captured_grads": captured}
        *dqkv, grads = cuflash.backward(out, *arrays, out, lse, **mod_kwargs, **more)
        return (*dqkv, *grads)

    first = gradients(True)
    assert all(identical(gradients(True), first) for _ in range(20))
    for got, like in zip(gradients(False), first, strict=True):
        apart = np.abs(host(got).astype("f4") - host(like).astype("f4")).max()
        assert apart <= 2.0**-9 * np.abs(host(like).astype("f4")).max()


def test_a_table_that_is_too_large_to_be_summed_in_order_is_unsupported(cupy: Any) -> None:
    case = of_lengths((130, 200))
    arrays, table = [cupy.asarray(x) for x in case.arrays()], cupy.zeros((2, 9 << 20), "float32")
    kinds = cupy.arange(200, dtype="int32") * 997

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return score + table[q_idx % 2, kinds[k_idx]]

    out, lse = cuflash.forward(*arrays, return_lse=True, score_mod=score_mod)
    more: Arguments = {"score_mod": score_mod, "captured_grads": (table,)}
    with pytest.raises(UnsupportedError, match="over 67108864"):
        cuflash.backward(out, *arrays, out, lse, deterministic=True, **more)
    *_, (gradient,) = cuflash.backward(out, *arrays, out, lse, **more)
    touched = np.zeros(table.shape, bool)
    touched[:, host(kinds)] = True
    assert not host(gradient)[~touched].any()
    assert host(gradient)[touched].any()


def of_batch(put: Put, case: Case) -> Arguments:
    slopes, table = put(drawn("batch", case.batch, case.heads_q) / 8), put(drawn("bounded", case.heads_q, 9))

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return 2.0 * np.tanh(score / 2.0) * slopes[b, h] + table[h, q_idx - k_idx]

    return {"score_mod": score_mod, "captured_grads": (slopes, table)}


of_several = joined(of_batch, FUNCTIONS["segments"], bias_of("bh1k"), sinks_of())


PACKED = Sequences("own", (130, 0, 63, 1), (65, 5, 200, 64), bounded=True, used_q=True, used_k=True,
                   spare_q=(9, 3, 0, 2), spare_k=(1, 70, 4, 0))  # fmt: skip


# The first queries of some sequences see no key, and no query sees the first keys of others.
SHIFTED = replace(PACKED, causal=True, window_size=(20, -1))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", [PACKED, SHIFTED], ids=["packed", "shifted"])
def test_variable_length_sequences(cupy: Any, case: Sequences, any_gpu: bool, deterministic: bool) -> None:
    inputs = varlen_arrays(case)
    bounds = bounds_case(inputs)
    for make in (of_several, bias_of("bhqk")):
        arguments, mod_kwargs = inputs.arguments(cupy), make(cupy.asarray, bounds)
        captured = mod_kwargs.pop("captured_grads")
        out, lse = cuflash.forward(**arguments, return_lse=True, **mod_kwargs)
        dout, dlse = (cupy.asarray(x) for x in upstream(inputs))
        state = {"out": out, "lse": lse, "dlse": dlse.reshape(lse.shape), "deterministic": deterministic}
        state["captured_grads"] = captured
        *gradients, grads = cuflash.backward(dout.reshape(out.shape), **state, **arguments, **mod_kwargs)
        whole, of_numpy = OracleInputs.from_varlen(inputs), make_oracle_mods(make, bounds)
        check_gradients(whole, of_numpy, *upstream(inputs), gradients, grads)
