"""Functions by name: they have the values of the libraries' functions."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from traces import check

from cuflash.errors import ProblemError
from cuflash.mods.graph.graph import variable
from cuflash.mods.graph.operations import Type
from cuflash.mods.graph.simplify import build, constant
from cuflash.mods.tracing.functions import FUNCTIONS, call
from cuflash.mods.tracing.trace import trace

SCORE, Q, K = variable("score"), variable("q_idx"), variable("k_idx")
UNARY = ["tanh", "exp", "exp2", "expm1", "sin", "cos", "tan", "floor", "ceil", "trunc", "rint", "fix", "absolute",
         "fabs", "negative", "sign", "square", "reciprocal", "isnan", "isinf", "isfinite", "positive"]  # fmt: skip
POSITIVE = ["log", "log2", "log10", "log1p", "sqrt"]
BINARY = ["add", "subtract", "multiply", "divide", "true_divide", "floor_divide", "remainder", "mod", "fmod", "minimum",
          "maximum", "fmin", "fmax", "less", "less_equal", "greater", "greater_equal", "equal", "not_equal",
          "logical_and", "logical_or", "logical_xor"]  # fmt: skip
BITS = ["bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"]


# Functions of NumPy, and how a score_mod calls each.
NUMPY_CALLS = {
    **{name: lambda f, s, q, k: f(s) * 1.0 for name in UNARY},
    **{name: lambda f, s, q, k: f(abs(s) + 0.25) for name in POSITIVE},
    **{name: lambda f, s, q, k: f(s, 0.75) * 1.0 + f(k + 1, q + 1) * 1.0 for name in BINARY},
    **{name: lambda f, s, q, k: f(q) * 1.0 for name in ("invert", "bitwise_not")},
    **{name: lambda f, s, q, k: f(q, k % 7) * 1.0 for name in BITS},
}


@pytest.mark.parametrize("name", NUMPY_CALLS)
def test_functions_of_numpy(name: str) -> None:
    function, call_function = getattr(np, name), NUMPY_CALLS[name]
    check(lambda score, b, h, q, k: call_function(function, score, q, k), "score_mod")


MATH = {
    "floor": lambda x: math.floor(x) // 2,
    "ceil": lambda x: math.ceil(x) % 3,
    "trunc": lambda x: math.trunc(x) >> 1,
    "pow": lambda x: math.pow(2.0, x),
    "log": lambda x: math.log(abs(x) + 1, 10),
    "exp": lambda x: math.exp(x) + math.fabs(x),
    "fmod": lambda x: math.fmod(x, 0.3),
    "erf": math.erf,
    "remainder": lambda x: math.remainder(x, 0.7),
    "pow of integers": lambda x: math.pow(2, math.floor(abs(x)) + 40) / 1e12 + 2 ** math.fabs(math.floor(x)),
    "isnan": lambda x: 1.0 if math.isnan(x) or math.isinf(x) else 2.0,
}


@pytest.mark.parametrize("name", MATH)
def test_functions_of_math(name: str) -> None:
    function = MATH[name]
    check(lambda score, b, h, q, k: function(score) * 1.0, "score_mod")


OPERATORS: dict[str, Callable[..., Any]] = {
    "power": lambda s, q, k: (q % 5) ** 3 + 2.0**s + (abs(s) + 1) ** 0.5 + 2 ** (k % 5),
    "shifts": lambda s, q, k: (q << 2) + (k >> 1) + (1 << (k % 8)),
    "bits": lambda s, q, k: (q & 6) + (k | 9) + (q ^ k) + ~q,
    "divisions": lambda s, q, k: q // 7 + (q - k) // 3 + (q - k) % -5 + s // 0.5 + s % 0.75 + q / 3,
    "divmod": lambda s, q, k: operator.sub(*divmod(q - k, 7)) + operator.add(*divmod(40, k + 1)),
    "on the left": lambda s, q, k: 3 - q + 2 * k + 7 // (k + 1) + 1 / (s * s + 1) + (5 & k) + (np.int32(4) - q),
    "unary": lambda s, q, k: -s + +q + abs(q - k) + round(s) + math.floor(s),
    "conditions": lambda s, q, k: (q < k) * 2 + (s >= 0) * 1.5 + ((q == k) | (k != 3)) * 1 + (q > k) * (q >= 3),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name: str) -> None:
    function = OPERATORS[name]
    check(lambda score, b, h, q, k: function(score, q, k) * 1.0, "score_mod")


def test_where_clip_and_rounding_take_the_keywords_of_the_libraries() -> None:
    check(lambda score, b, h, q, k: np.clip(score, a_min=-0.5, a_max=None) + np.clip(score, -0.25, 0.5), "score_mod")
    check(lambda score, b, h, q, k: np.where(q < k, score, q) + np.round(score), "score_mod")
    check(lambda score, b, h, q, k: np.add(score, 1, dtype=None), "score_mod")
    for function, message in (
        (lambda score, b, h, q, k: np.round(score, 2), "round to 2 digits"),
        (lambda score, b, h, q, k: round(score, 1), "round to 1 digits"),
        (lambda score, b, h, q, k: np.where(q < k), "where with one argument"),
        (lambda score, b, h, q, k: np.maximum(score, 1, 2, 3), "maximum .* does not take these"),
        (lambda score, b, h, q, k: np.add.reduce(score), "numpy.add.reduce of a traced value is not known"),
        (lambda score, b, h, q, k: q ** (k - 20), "an integer to the power of an integer"),
        (lambda score, b, h, q, k: score.imaginary, "a traced value has no imaginary"),
    ):
        with pytest.raises(ProblemError, match=message):
            trace(function, "score_mod")
    check(lambda score, b, h, q, k: 1.0 if hasattr(score, "imaginary") else 2.0, "score_mod")


def exact(name: str, *arguments: Any, library: str = "") -> Any:
    """Returns the constant that a function of constants folds to."""
    node = call(name, [constant(each) for each in arguments], {}, library)
    assert node.op == "constant"
    return node.value


CURVES = {
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "relu": lambda x: max(x, 0),
    "leaky_relu": lambda x: x if x > 0 else 0.01 * x,
    "softplus": lambda x: math.log1p(math.exp(x)),
    "logsigmoid": lambda x: -math.log1p(math.exp(-x)),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "log10": lambda x: math.log10(x) if x > 0 else math.nan,
}


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("x", [-3.0, -0.5, 0.25, 2.0])
def test_curves(name: str, x: float) -> None:
    assert exact(name, x) == pytest.approx(CURVES[name](x), rel=1e-5, nan_ok=True)


def test_curves_and_their_slopes_stay_finite_far_from_zero() -> None:
    from cuflash.mods.graph.derivative import differentiate
    from cuflash.reference.evaluate import evaluate

    for name in ("sigmoid", "silu", "softplus", "logsigmoid", "gelu", "tanh"):
        root = call(name, [SCORE], {})
        far = np.float32([-1e4, -200, -90, 0, 90, 200, 1e4])
        assert np.isfinite(evaluate([root, differentiate(root)[SCORE]], {"score": far}, [])).all(), name


def test_names_that_mean_something_else_in_one_library() -> None:
    tanh = 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (1 + 0.044715)))
    assert exact("gelu", 1.0, library="jax") == pytest.approx(tanh, rel=1e-6)
    assert exact("gelu", 1.0) == pytest.approx(CURVES["gelu"](1.0), rel=1e-6)
    assert call("floor", [SCORE], {}, "math").type == Type.INT64
    for few in (build("multiply", build("tanh", SCORE), constant(99.0)), build("divide", Q, constant(3))):
        assert call("floor", [few], {}, "math").type == Type.INT32
    assert call("floor", [SCORE], {}, "numpy").type == Type.FLOAT32
    assert exact("div", -7, 2, library="jax") == -3


def test_dtypes_of_all_libraries_cast() -> None:
    for dtype in ("int32", np.int32, np.dtype("int32"), bool, np.float16):
        assert call("astype", [SCORE, dtype], {}).type in (Type.INT32, Type.BOOL, Type.FLOAT32)
    assert call("to", [Q, "cuda:0"], {}) is Q
    assert call("to", [Q], {"dtype": float}).type == Type.FLOAT64
    for dtype in ("uint8", np.int16, np.uint32):
        with pytest.raises(ProblemError, match=r"a cast to u?int\d+, which would wrap"):
            call("astype", [Q, dtype], {})
    with pytest.raises(ProblemError, match="'i4' is neither a dtype that a mod knows nor a device"):
        call("astype", [Q, "i4"], {})
    with pytest.raises(ProblemError, match="1000000000000000000000 is no integer of 64 bits"):
        call("add", [Q, 10**21], {})
    with pytest.raises(ProblemError, match=r"complex64.* has no place in a mod"):
        call("astype", [SCORE, np.complex64], {})


def test_new_arrays_beside_a_scalar_are_scalars() -> None:
    assert call("new_zeros", [Q, ()], {"dtype": bool}) is constant(False)
    assert call("new_ones", [Q, (1,)], {}) is constant(1)
    assert call("full_like", [SCORE, 3], {}) is constant(3.0)
    is_before = build("less", Q, K)
    assert call("masked_fill", [SCORE, is_before, -1.0], {}) is build("where", is_before, constant(-1.0), SCORE)
    with pytest.raises(ProblemError, match=r"an array of shape \(2,\) is made inside"):
        call("new_zeros", [Q, (2,)], {})


def test_every_name_is_a_function_of_something() -> None:
    for name in FUNCTIONS:
        outcomes = []
        for arguments in ([SCORE], [SCORE] * 2, [SCORE] * 3, [Q, Q], [Q, 3], [Q], [SCORE, Q, SCORE], [SCORE, (), 1]):
            try:
                outcomes.append(call(name, arguments, {}))
            except ProblemError as error:
                outcomes.append(error)
        assert any(not isinstance(each, Exception) for each in outcomes), (name, outcomes)
