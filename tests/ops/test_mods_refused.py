"""Bad mods: the error shows the line and the way out, and the next call works."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from mod_calls import BATCH, DIM, HEADS, KEYS, ROWS, arrays

import cuflash
from cuflash import mods

SLOPES = np.array([0.5, 0.25, 0.125, 0.7])
WHERE = r"test_mods_refused\.py:\d+, in "


def loops(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    for _ in range(q):
        score = score + 1
    return score


def branches(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    for n in range(40):
        score = score + 1 if q == n else score - 1
    return score


def in_steps(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return np.cumsum(score)


def whole_array(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + SLOPES


BIG = np.zeros((8, 1000))


def of_whole_arrays(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + (BIG * 2.0)[h, k]


def slices(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + BIG[h, :5][k]


COMPLEX = np.zeros(4, np.complex64)


def odd_dtype(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + COMPLEX[h]


def float_index(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + SLOPES[h / 2]


MODS: dict[str, tuple[Any, str]] = {
    "a loop": (loops, WHERE + "loops"),
    "too many branches": (branches, WHERE + "branches.*32"),
    "an unknown operation": (in_steps, WHERE + "in_steps.*cumsum"),
    "a whole array": (whole_array, r"whole array|returned"),
    "arithmetic of whole arrays": (of_whole_arrays, WHERE + "of_whole_arrays.*before the call"),
    "slices": (slices, WHERE + "slices.*slice it before the call"),
    "a dtype": (odd_dtype, "complex64.*bool, integers, and floats"),
    "an index of floats": (float_index, WHERE + "float_index.*integers are indices"),
    "a condition": (lambda s, b, h, q, k: q > k, "conditions belong to mask_mod"),
    "nothing": (lambda s, b, h, q, k: None, "returned a NoneType; it must return one value"),
    "a pair": (lambda s, b, h, q, k: (s, s), "returned a tuple; it must return one value"),
    "arguments": (lambda s, b, h: s, r"must be a function of \(score, b, h, q_idx, k_idx\)"),
    "no function": (3.0, r"score_mod is a float; it must be a function of \(score, b"),
    **{
        f"the class {x.__name__}": (x, f"score_mod is the class {x.__name__}; it must be a function of")
        for x in (int, np.timedelta64, dict)
    },
}


@pytest.mark.parametrize("name", MODS)
def test_functions_that_cannot_be_traced(name: str) -> None:
    score_mod, message = MODS[name]
    inputs = arrays("float32")
    for _ in range(2):  # twice: the first call must leave nothing behind
        with pytest.raises(cuflash.ProblemError, match=message):
            cuflash.forward(*inputs, score_mod=score_mod)
    out, lse = cuflash.forward(*inputs, return_lse=True)
    with pytest.raises(cuflash.ProblemError, match=message):
        cuflash.backward(out, *inputs, out, lse, score_mod=score_mod)
    with pytest.raises(cuflash.ProblemError, match=message):
        cuflash.plan(*inputs, score_mod=score_mod)
    assert (cuflash.forward(*inputs) == out).all()


def test_an_error_names_the_line_once() -> None:
    table = np.zeros(KEYS, complex)
    with pytest.raises(cuflash.ProblemError) as caught:
        cuflash.forward(*arrays(), score_mod=lambda score, b, h, q_idx, k_idx: score + table[k_idx])
    assert str(caught.value).count("in <lambda>") == 1


def test_an_array_as_dropout_p_is_refused_by_plan_and_by_frameworks() -> None:
    shares, shape = np.array([0.0, 0.2]), (1, 8, 2, 16)
    for op in ("forward", "backward"):
        with pytest.raises(cuflash.ProblemError, match=re.escape("dropout_p is an array of shape (2,); give a number")):
            cuflash.plan(shape, shape, shape, op=op, dtype="float16", device="sm_80", dropout_p=shares)
    torch = pytest.importorskip("torch")
    from cuflash.frameworks.torch import attention

    x = torch.ones(shape)
    with pytest.raises(cuflash.ProblemError, match=re.escape("dropout_p is an array of shape (2,); give a number")):
        attention(x, x, x, dropout_p=torch.tensor([0.0, 0.2]))


def test_a_mask_mod_must_return_a_condition() -> None:
    with pytest.raises(cuflash.ProblemError, match="it must return bool; compare it with something"):
        cuflash.forward(*arrays(), mask_mod=lambda b, h, q, k: q - k)


def test_an_error_of_the_function_gets_a_note_about_the_trace() -> None:
    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        cuflash.forward(*arrays(), score_mod=score_mod)
    assert "while cuflash traced the score_mod" in caught.value.__notes__[0]


MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "bias of other lengths": (
        {"bias": np.zeros((BATCH, HEADS, ROWS, KEYS + 1))},
        f"bias has shape (2, 4, {ROWS}, 35); give (batch, heads_q, seqlen_q, seqlen_k) = (2, 4, {ROWS}, {KEYS})",
    ),
    "bias with too many axes": ({"bias": np.zeros((1, 1, 1, 1, 1))}, "bias has shape (1, 1, 1, 1, 1); give (batch"),
    "bias of integers": ({"bias": np.zeros((1, 1, 1, 1), np.int32)}, "bias has dtype int32; give one of bool, float16"),
    "bias is no array": ({"bias": 2.0}, "bias is a float; give a CuPy, PyTorch, JAX or NumPy array"),
    "sinks of another length": ({"sinks": np.zeros(3)}, "sinks has shape (3,); this problem needs (4,)"),
    "sinks of integers": ({"sinks": np.zeros(4, np.int32)}, "sinks has dtype int32; this problem needs float64 or flo"),
    "sinks are no array": ({"sinks": [1.0]}, "sinks is a list; give a CuPy"),
    "all dropped": ({"dropout_p": 1.0, "dropout_seed": 1}, "dropout_p=1.0 is outside [0, 1)"),
    "nearly all dropped": ({"dropout_p": 0.999995, "dropout_seed": 1}, "dropout_p=0.999995 drops all weights"),
    "less than none dropped": ({"dropout_p": -0.1, "dropout_seed": 1}, "dropout_p=-0.1 is outside [0, 1)"),
    "NaN dropped": ({"dropout_p": float("nan"), "dropout_seed": 1}, "dropout_p=nan is not finite"),
    "an array of shares": (
        {"dropout_p": np.array([0.1, 0.2]), "dropout_seed": 1},
        "dropout_p is an array of shape (2,); give a number, the fraction of weights to drop",
    ),
    "an array without axes": ({"dropout_p": np.array(0.1), "dropout_seed": 1}, "dropout_p=array(0.1) is an ndarray"),
    "no number dropped": ({"dropout_p": None}, "dropout_p=None is a NoneType; give the fraction"),
    "a class": ({"dropout_p": np.float32}, "dropout_p=<class 'numpy.float32'> is a type; give the fraction"),
    "no seed": ({"dropout_p": 0.1}, "there is no dropout_seed; give an int of 64 bits, or an array"),
}
SEEDS: dict[str, tuple[Any, str]] = {
    "a seed of more bits": (2**64, "has more than 64 bits"),
    "a seed of floats": (1.5, "dropout_seed is a float; give a"),
    "an array of floats": (np.zeros(1), "dropout_seed has shape (1,) and dtype fl"),
    "half a seed": (np.zeros(1, np.int32), "has shape (1,) and dtype int32; give"),
    "true as a seed": (True, "dropout_seed=True is a bool"),
    "a span of time": (np.timedelta64(3, "ns"), "is a timedelta64; give an integer"),
    "a class of seeds": (np.int64, "dropout_seed is the class int64"),
}
MISFITS |= {
    f"{name}, {share!r} dropped": ({"dropout_p": share, "dropout_seed": seed}, message)
    for name, (seed, message) in SEEDS.items()
    for share in (0.1, 0, np.float32(0))
}


@pytest.mark.parametrize("name", MISFITS)
def test_arguments_that_do_not_fit(name: str) -> None:
    more, message = MISFITS[name]
    inputs = arrays()
    with pytest.raises(cuflash.ProblemError, match=re.escape(message)):
        cuflash.forward(*inputs, **more)
    out, lse = cuflash.forward(*inputs, return_lse=True)
    with pytest.raises(cuflash.ProblemError, match=re.escape(message)):
        cuflash.backward(out, *inputs, out, lse, **more)
    if "dropout_seed" in more:
        with pytest.raises(cuflash.ProblemError, match=re.escape(message)):
            cuflash.plan(*inputs, **more)


def test_the_standard_algorithm_refuses_mods() -> None:
    for more in ({"score_mod": mods.alibi(4)}, {"sinks": SLOPES}, {"dropout_p": 0.5, "dropout_seed": 1}):
        with pytest.raises(cuflash.UnsupportedError, match="algorithm='standard' takes no score_mod, mask_mod, bias"):
            cuflash.forward(*arrays(), algorithm="standard", **more)
    causal = cuflash.forward(*arrays(), algorithm="standard", mask_mod=mods.causal)
    np.testing.assert_allclose(causal, cuflash.forward(*arrays(), causal=True), rtol=1e-10, atol=1e-12)


INTEGERS = np.arange(4)


def captured(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + SLOPES[h] * INTEGERS[h]


WITHOUT_GRADIENT: dict[str, tuple[Any, str]] = {
    "a copy": ((SLOPES.copy(),), "captured_grads[0] is an array of shape (4,) that has no gradient here; give,"),
    "integers": ((INTEGERS,), "some of: the array (4,) that score_mod refers to, bias (4, 1, 1), sinks (4,)"),
    "of the mask": ((SLOPES, BIG), "captured_grads[1] is an array of shape (8, 1000)"),
    "a name": (("bias",), "captured_grads[0] is a str that has no gradient"),
    "no tuple": (SLOPES, "captured_grads is an ndarray; give a tuple of arrays"),
}


@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_arrays_that_have_no_gradients(name: str) -> None:
    captured_grads, message = WITHOUT_GRADIENT[name]
    inputs, bias = arrays(), np.zeros((4, 1, 1))
    call: dict[str, Any] = {"score_mod": captured, "mask_mod": lambda b, h, q, k: BIG[h, k] > -1, "bias": bias,
                            "sinks": np.zeros(4)}  # fmt: skip
    out, lse = cuflash.forward(*inputs, return_lse=True, **call)
    with pytest.raises(cuflash.ProblemError, match=re.escape(message)):
        cuflash.backward(out, *inputs, out, lse, captured_grads=captured_grads, **call)
    with pytest.raises(cuflash.ProblemError, match="some of: nothing, as no array of floats changes the scores"):
        cuflash.backward(out, *inputs, out, lse, captured_grads=(SLOPES,))


def test_arrays_of_another_library_are_refused() -> None:
    torch = pytest.importorskip("torch")
    slopes, inputs = torch.ones(HEADS), arrays("float32")
    with pytest.raises(cuflash.ProblemError, match="array that score_mod or mask_mod refers to is a torch array, but"):
        cuflash.forward(*inputs, score_mod=lambda s, b, h, q, k: s * slopes[h])
    seed = torch.ones(1, dtype=torch.int64)
    for more in ({"bias": torch.ones(1, 1, 1, 1)}, {"sinks": slopes}, {"dropout_p": 0.5, "dropout_seed": seed}):
        with pytest.raises(cuflash.ProblemError, match="is a torch"):
            cuflash.forward(*inputs, **more)
    q = torch.ones(BATCH, ROWS, HEADS, DIM)
    needed = slopes.clone().requires_grad_()
    with pytest.raises(cuflash.ProblemError, match="refers to requires grad"):
        cuflash.forward(q, q, q, score_mod=lambda s, b, h, q, k: s * needed[h])
    with torch.no_grad():
        cuflash.forward(q, q, q, score_mod=lambda s, b, h, q, k: s * needed[h])


def test_lse_takes_no_dropout_and_other_ops_take_no_captured_grads() -> None:
    shapes = (1, 8, 2, 16), (1, 8, 2, 16)
    with pytest.raises(cuflash.ProblemError, match="op='lse' takes no dropout"):
        cuflash.plan(*shapes, op="lse", dtype="float16", dropout_p=0.5)
    with pytest.raises(cuflash.ProblemError, match="takes no captured_grads"):
        cuflash.plan(*shapes, shapes[0], dtype="float16", captured_grads=())
