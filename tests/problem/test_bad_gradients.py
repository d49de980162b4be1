"""Bad input to `backward`, on NumPy and on a GPU: the right error, nothing runs, the next call works."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from libraries import Producer
from refusals import CAP, DTYPES, Row, backward_with, check, forward_with, rows, zeros

import cuflash
from cuflash.errors import ProblemError
from cuflash.testing.cases import Case
from cuflash.testing.gradients import backward, backward_args
from cuflash.testing.layouts import identical
from cuflash.units import kind_of

LIBRARIES = "CuPy, PyTorch, JAX or NumPy"


def half_with(changes: dict[str, Any]) -> dict[str, Any]:
    """Returns a legal call in float16, with changes."""
    upstreams = {name: zeros(2, 5, 4, 6, dtype=np.float16) for name in ("dout", "out")}
    return forward_with(upstreams | {"lse": zeros(2, 4, 5)} | changes, np.float16)


def ranks_with(changes: dict[str, Any]) -> dict[str, Any]:
    """Returns a legal call without the axes of batch and heads, with changes."""
    shapes = {"q": (5, 8), "k": (7, 8), "v": (7, 6), "dout": (5, 6), "out": (5, 6), "lse": (5,)}
    return {name: zeros(*shape) for name, shape in shapes.items()} | changes


FLOAT32 = rows(
    backward_with,
    ("dout_shape", {"dout": zeros(2, 5, 4, 8)}, ("dout has shape (2, 5, 4, 8)", "needs (2, 5, 4, 6)")),
    ("dout_heads_first", {"dout": zeros(2, 4, 5, 6)}, ("dout has shape (2, 4, 5, 6)", "needs (2, 5, 4, 6)")),
    ("dout_of_one_row", {"dout": zeros(2, 1, 4, 6)}, ("dout has shape (2, 1, 4, 6)", "needs (2, 5, 4, 6)")),
    ("dout_rank", {"dout": zeros(5, 4, 6)}, ("dout has shape (5, 4, 6)", "needs (2, 5, 4, 6)")),
    ("dout_none", {"dout": None}, ("dout is a NoneType", LIBRARIES)),
    ("dout_list", {"dout": [0.0]}, ("dout is a list", LIBRARIES)),
    ("out_shape", {"out": zeros(2, 4, 5, 6)}, ("out has shape (2, 4, 5, 6)", "needs (2, 5, 4, 6)")),
    ("out_rank", {"out": zeros(5, 4, 6)}, ("out has shape (5, 4, 6)", "needs (2, 5, 4, 6)")),
    ("out_none", {"out": None}, ("out is a NoneType", LIBRARIES)),
    ("lse_rows_first", {"lse": zeros(2, 5, 4)}, ("lse has shape (2, 5, 4)", "needs (2, 4, 5)")),
    ("lse_of_heads_kv", {"lse": zeros(2, 2, 5)}, ("lse has shape (2, 2, 5)", "needs (2, 4, 5)")),
    ("lse_of_keys", {"lse": zeros(2, 4, 7)}, ("lse has shape (2, 4, 7)", "needs (2, 4, 5)")),
    ("lse_of_head_dim", {"lse": zeros(2, 4, 5, 1)}, ("lse has shape (2, 4, 5, 1)", "needs (2, 4, 5)")),
    ("lse_none", {"lse": None}, ("lse is a NoneType", LIBRARIES)),
    ("lse_producer", {"lse": Producer(zeros(2, 4, 5))}, ("lse is a libraries array", "one framework")),
    ("dlse_shape", {"dlse": zeros(2, 4)}, ("dlse has shape (2, 4)", "needs (2, 4, 5)")),
    ("dlse_number", {"dlse": 1.0}, ("dlse is a float", LIBRARIES)),
    *((f"{name}_{dtype}", {name: zeros(*shape, dtype=dtype)}, (f"{name} has dtype {dtype}", "needs float32"))
      for dtype in ("float16", "float64", "int32", "bool", "complex64")
      for name, shape in (("dout", (2, 5, 4, 6)), ("out", (2, 5, 4, 6)), ("lse", (2, 4, 5)), ("dlse", (2, 4, 5)))),
    ("k_head_dim", {"k": zeros(2, 7, 2, 9)}, ("k has head_dim 9", "q has 8")),
    ("q_int", {"q": zeros(2, 5, 4, 8, dtype=int)}, ("q has dtype int64", DTYPES)),
    ("softcap", {"softcap": -2}, ("softcap=-2", CAP)),
    ("causal", {"causal": 1}, ("causal=1 is an int", "True or False")),
    *((f"deterministic_{type(value).__name__}", {"deterministic": value},
       (f"deterministic={value!r} is {kind_of(value)}", "True or False"))
      for value in (1, None, "no", 1.0)),
)  # fmt: skip
FLOAT16 = rows(
    half_with,
    ("dout_of_out_dtype", {"dout": zeros(2, 5, 4, 6)}, ("dout has dtype float32", "needs float16")),
    ("out_float64", {"out": zeros(2, 5, 4, 6, dtype="f8")}, ("out has dtype float64", "needs float16 or float32")),
    ("out_int", {"out": zeros(2, 5, 4, 6, dtype="i2")}, ("out has dtype int16", "needs float16 or float32")),
    ("lse_float16", {"lse": zeros(2, 4, 5, dtype="f2")}, ("lse has dtype float16", "needs float32")),
    ("dlse_float16", {"dlse": zeros(2, 4, 5, dtype="f2")}, ("dlse has dtype float16", "needs float32")),
)
RANK_2 = rows(
    ranks_with,
    ("dout_rank_4", {"dout": zeros(1, 5, 1, 6)}, ("dout has shape (1, 5, 1, 6)", "needs (5, 6)")),
    ("lse_rank_3", {"lse": zeros(1, 1, 5)}, ("lse has shape (1, 1, 5)", "needs (5,)")),
    ("lse_rank_2", {"lse": zeros(5, 1)}, ("lse has shape (5, 1)", "needs (5,)")),
)


def on(xp: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments with NumPy arrays converted to xp."""
    return {name: xp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("row", [*FLOAT32, *FLOAT16, *RANK_2])
def test_backward_refuses(row: Row, xp: Any) -> None:
    check(cuflash.backward, row._replace(arguments=on(xp, row.arguments)))


@pytest.mark.parametrize("make", [backward_with, half_with, ranks_with])
def test_the_calls_that_the_rows_spoil_are_legal(make: Any, xp: Any) -> None:
    for changes in ({}, {"deterministic": True}, {"out": make({})["out"].astype("f4")}):
        arguments = on(xp, make(changes))
        dq, dk, dv = cuflash.backward(**arguments)
        for gradient, name in ((dq, "q"), (dk, "k"), (dv, "v")):
            assert (gradient.shape, gradient.dtype) == (arguments[name].shape, arguments[name].dtype)
        cuflash.backward(**arguments, dlse=arguments["lse"])


CASE = Case("bad", 1, 40, 50, 2, 1, 64, 64, "float16", causal=True)


def test_the_next_call_after_an_error_works(xp: Any) -> None:
    args = backward_args(CASE, xp)
    expected = backward(CASE, args, deterministic=True)
    for name, x in zip(args._fields, args, strict=True):
        with pytest.raises(ProblemError, match=f"{name} has"):
            backward(CASE, args._replace(**{name: x[:, :1, :, None]}))
    with pytest.raises(ProblemError, match="softcap"):
        cuflash.backward(*args[:6], softcap=-1.0)
    assert identical(backward(CASE, args, deterministic=True), expected)


def test_a_bad_argument_equal_to_a_legal_one_of_an_earlier_call_is_refused(xp: Any) -> None:
    args = backward_args(CASE, xp)
    backward(CASE, args, deterministic=True)
    with pytest.raises(ProblemError, match="deterministic=1 is an int"):
        backward(CASE, args, deterministic=1)
    with pytest.raises(ProblemError, match="causal=1 is an int"):
        cuflash.backward(*args[:6], dlse=args.dlse, causal=1, deterministic=True)
    with pytest.raises(ProblemError, match="softmax_scale=True is a bool"):
        cuflash.backward(*args[:6], dlse=args.dlse, causal=True, softmax_scale=True)
    for legal, equal in (({"softcap": 1.0}, {"softcap": True}), ({"diagonal_offset": 1}, {"diagonal_offset": 1.0}),
                         ({"window_size": (1, 0)}, {"window_size": (1.0, False)})):  # fmt: skip
        cuflash.backward(*args[:6], **legal)
        with pytest.raises(ProblemError, match=f"{next(iter(equal))}.* is a (bool|float)"):
            cuflash.backward(*args[:6], **equal)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("name", ["dout", "out", "lse", "dlse", "k"])
def test_torch_mixed_with_numpy_is_refused(name: str) -> None:
    torch = pytest.importorskip("torch")
    arguments = backward_with({"dlse": zeros(2, 4, 5)})
    mixed = arguments | {name: torch.from_numpy(arguments[name])}
    check(cuflash.backward, Row("torch", mixed, (f"{name} is a torch array", "q is a numpy array", "from_dlpack")))


@pytest.mark.gpu
@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("name", ["dout", "out", "lse", "dlse", "k"])
def test_gpu_arrays_mixed_with_host_memory_are_refused(cupy: Any, name: str) -> None:
    on_host = backward_with({"dlse": zeros(2, 4, 5)})
    on_gpu = on(cupy, on_host)
    for ours, theirs, words in ((on_gpu, on_host, ("numpy", "cupy")), (on_host, on_gpu, ("cupy", "numpy"))):
        mixed = ours | {name: theirs[name]}
        check(cuflash.backward, Row("", mixed, (f"{name} is a {words[0]} array", f"q is a {words[1]} array")))
    torch = pytest.importorskip("torch")
    tensors = {key: torch.from_numpy(x).cuda() for key, x in on_host.items()}
    mixed = tensors | {name: tensors[name].cpu()}
    check(cuflash.backward, Row("", mixed, (name, "on cpu", "on cuda:0")))
