"""Bad input: each call raises the right error, with its full text, launches nothing and changes no array.

Bad input of `backward` is in `test_bad_gradients`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from libraries import Producer
from refusals import CAP, DTYPES, LAYOUT, SCALE, Row, backward_with, base, check, forward_with, refused, rows, zeros

import cuflash
from cuflash import reference
from cuflash.arrays import find
from cuflash.arrays.numpy import NUMPY
from cuflash.errors import ProblemError, UnsupportedError
from cuflash.planning import device
from cuflash.runtime import compiler


def lse_with(changes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in base().items() if name != "v"} | changes


def merge_with(changes: dict[str, Any]) -> dict[str, Any]:
    return {"outs": [zeros(2, 5, 4, 6)] * 2, "lses": [zeros(2, 4, 5)] * 2} | changes


def _read_only() -> np.ndarray[Any, Any]:
    out = zeros(2, 5, 4, 6)
    out.flags.writeable = False
    return out


def _out_over(name: str) -> dict[str, Any]:
    """Returns a call whose out shares memory with an input, but not its first element."""
    pool = zeros(2000)
    arrays = {"q": pool[:320].reshape(2, 5, 4, 8), "k": pool[400:624].reshape(2, 7, 2, 8)}
    arrays["v"] = pool[700:868].reshape(2, 7, 2, 6)
    start = {"q": 319, "k": 400 - 239, "v": 700 + 3}[name]
    return arrays | {"out": pool[start : start + 240].reshape(2, 5, 4, 6)}


WINDOW = "count of keys >= 0, or -1 or None"
# Values that pass for numbers in Python or NumPy. The first has no hash.
NO_NUMBERS = {
    "span": np.timedelta64(3),
    "span_of_time": np.timedelta64(3, "ns"),
    "no_span": np.timedelta64("NaT"),
    "span_0d": np.array(np.timedelta64(3, "s")),
    "date": np.datetime64("2026-01-01"),
    "class": np.float32,
    "class_of_arrays": np.ndarray,
}
FORWARD = rows(
    forward_with,
    # ranks and shapes
    ("q_rank_0", {"q": zeros()}, ("q has shape ()", "rank 0", LAYOUT)),
    ("q_rank_1", {"q": zeros(8)}, ("q has shape (8,)", "rank 1", LAYOUT)),
    ("all_rank_5", {n: zeros(1, 1, 1, 1, 1) for n in "qkv"}, ("q has shape (1, 1, 1, 1, 1)", "rank 5", LAYOUT)),
    ("k_rank_3", {"k": zeros(7, 2, 8)}, ("k has shape (7, 2, 8)", "q has rank 4", "same layout", LAYOUT)),
    ("v_rank_2", {"v": zeros(7, 6)}, ("v has shape (7, 6)", "q has rank 4", "same layout", LAYOUT)),
    ("k_batch", {"k": zeros(3, 7, 2, 8)}, ("k has batch 3", "q has 2", "same batch")),
    ("v_batch", {"v": zeros(1, 7, 2, 6)}, ("v has batch 1", "q has 2", "same batch")),
    ("k_head_dim", {"k": zeros(2, 7, 2, 9)}, ("k has head_dim 9", "q has 8", "share head_dim")),
    ("v_seqlen", {"v": zeros(2, 6, 2, 6)}, ("v has seqlen 6", "k has seqlen 7", "share both")),
    ("v_heads", {"v": zeros(2, 7, 4, 6)}, ("4 heads", "2 heads", "share both")),
    ("heads_q_odd", {"k": zeros(2, 7, 3, 8), "v": zeros(2, 7, 3, 6)}, ("4 heads", "3;", "multiple of heads_kv")),
    ("heads_q_fewer", {"q": zeros(2, 5, 1, 8)}, ("1 heads", "2;", "multiple of heads_kv")),
    ("no_heads_q", {"q": zeros(2, 5, 0, 8)}, ("(2, 5, 0, 8)", "at least 1")),
    ("no_heads_kv", {"k": zeros(2, 7, 0, 8), "v": zeros(2, 7, 0, 6)}, ("(2, 7, 0, 8)", "at least 1")),
    ("no_head_dim", {"q": zeros(2, 5, 4, 0), "k": zeros(2, 7, 2, 0)}, ("(2, 5, 4, 0)", "at least 1")),
    ("no_head_dim_v", {"v": zeros(2, 7, 2, 0)}, ("(2, 7, 2, 0)", "at least 1")),
    # dtypes, frameworks, other types than arrays
    *((f"all_{d}", {n: x.astype(d) for n, x in base().items()}, (f"q has dtype {d}", DTYPES, "cast"))
      for d in ("int8", "int32", "int64", "uint8", "bool", "object")),
    ("all_complex64", {n: x.astype("complex64") for n, x in base().items()}, ("q has dtype complex64", DTYPES, "cast")),
    ("k_float16", {"k": zeros(2, 7, 2, 8, dtype=np.float16)}, ("k has dtype float16", "q has float32", "cast all")),
    ("v_float64", {"v": zeros(2, 7, 2, 6, dtype=np.float64)}, ("v has dtype float64", "q has float32", "cast all")),
    ("k_producer", {"k": Producer(zeros(2, 7, 2, 8))}, ("k is a libraries", "q is a numpy", "one framework")),
    ("q_producer", {"q": Producer(zeros(2, 5, 4, 8))}, ("k is a numpy", "q is a libraries", "one framework")),
    ("q_list", {"q": [[1.0]]}, ("q is a list", "CuPy, PyTorch, JAX or NumPy", "__dlpack__")),
    ("k_none", {"k": None}, ("k is a NoneType", "CuPy, PyTorch, JAX or NumPy")),
    ("v_number", {"v": 1.0}, ("v is a float", "CuPy, PyTorch, JAX or NumPy")),
    *((f"{name}_class", {name: kind}, (f"{name} is the class {kind.__name__}", "give an array"))
      for name in ("q", "k", "v", "out", "bias", "sinks", "cu_seqlens_q") for kind in (np.ndarray, Producer)),
    *((f"all_{np.dtype(d).str[1:]}", {n: np.zeros(x.shape, d) for n, x in base().items()}, ("q has dtype", DTYPES))
      for d in ("V0", "V4", np.dtype([]), np.dtype([("a", "f4"), ("b", "f4")]), "S4", "U0")),
    ("bias_of_nothing", {"bias": np.zeros((5, 7), "V0")}, ("bias has dtype void", DTYPES)),
    ("out_of_nothing", {"out": np.zeros((2, 5, 4, 6), "V0")}, ("out has dtype void", "float32")),
    # numbers
    ("scale_text", {"softmax_scale": "1"}, ("softmax_scale='1'", "str", SCALE)),
    ("scale_complex", {"softmax_scale": 1j}, ("softmax_scale=1j", "complex", SCALE)),
    ("scale_bool", {"softmax_scale": True}, ("softmax_scale=True", "bool", SCALE)),
    ("scale_numpy_bool", {"softmax_scale": np.True_}, ("softmax_scale=", "bool", SCALE)),
    ("scale_array", {"softmax_scale": np.ones(2)}, ("softmax_scale=", "ndarray", SCALE)),
    *((f"{name}_0d", {name: np.array(0.5)}, (f"{name}=array(0.5)", "ndarray", expected, "item() of an array"))
      for name, expected in (("softmax_scale", SCALE), ("softcap", CAP))),
    ("scale_nan", {"softmax_scale": float("nan")}, ("softmax_scale=nan", "not finite", SCALE)),
    ("scale_inf", {"softmax_scale": float("inf")}, ("softmax_scale=inf", "not finite", SCALE)),
    ("scale_over_every_float", {"softmax_scale": 10**400}, ("softmax_scale=", "not finite", SCALE)),
    ("scale_zero", {"softmax_scale": 0}, ("softmax_scale=0", "not positive", SCALE)),
    ("scale_negative", {"softmax_scale": -0.5}, ("softmax_scale=-0.5", "not positive", SCALE)),
    ("softcap_negative", {"softcap": -1.0}, ("softcap=-1.0", "not positive", CAP)),
    ("softcap_nan", {"softcap": float("nan")}, ("softcap=nan", "not finite", CAP)),
    ("softcap_inf", {"softcap": float("inf")}, ("softcap=inf", "not finite", CAP)),
    ("softcap_none", {"softcap": None}, ("softcap=None", "NoneType", CAP)),
    ("softcap_text", {"softcap": "30"}, ("softcap='30'", "str", CAP)),
    ("softcap_bool", {"softcap": False}, ("softcap=False", "bool", CAP)),
    *((f"{name}_{kind}", {name: value}, (f"{name}=", type(value).__name__, "; give"))
      for name in ("softmax_scale", "softcap", "diagonal_offset", "max_seqlen_q", "num_splits", "split_size", "causal",
                   "dropout_p", "return_lse") for kind, value in NO_NUMBERS.items()),
    # masks
    *((f"window_{kind}", {"window_size": (1, value)}, ("window_size right=", type(value).__name__, "integer"))
      for kind, value in NO_NUMBERS.items()),
    ("window_number", {"window_size": 3}, ("window_size=3", "not a pair", WINDOW)),
    ("window_of_one", {"window_size": (3,)}, ("window_size=(3,)", "not a pair", WINDOW)),
    ("window_of_three", {"window_size": (1, 2, 3)}, ("window_size=(1, 2, 3)", "not a pair", WINDOW)),
    ("window_none", {"window_size": None}, ("window_size=None", "not a pair", WINDOW)),
    ("window_float", {"window_size": (1.0, 2)}, ("window_size left=1.0", "float", "integer")),
    ("window_text", {"window_size": ("1", 2)}, ("window_size left='1'", "str", "integer")),
    ("window_0d", {"window_size": (np.array(1), 2)}, ("window_size left=array(1)", "integer", "item() of an array")),
    *((f"window_{type(x).__name__}", {"window_size": x}, ("window_size=", "not a pair", "tuple (left, right)", WINDOW))
      for x in ("12", b"12", bytearray(b"12"), {1, 2}, frozenset((1, 2)), {1: 0, 2: 0}, range(2), np.array([1, 2]))),
    ("window_bool", {"window_size": (4, True)}, ("window_size right=True", "bool", "integer")),
    ("window_under_minus_one", {"window_size": (-2, 4)}, ("(-2, 4)", "left is -2", WINDOW)),
    ("window_right_under_minus_one", {"window_size": (0, -7)}, ("(0, -7)", "right is -7", WINDOW)),
    ("offset_float", {"diagonal_offset": 1.0}, ("diagonal_offset=1.0", "float", "integer")),
    ("offset_nan", {"diagonal_offset": float("nan")}, ("diagonal_offset=nan", "float", "integer")),
    ("offset_text", {"diagonal_offset": "0"}, ("diagonal_offset='0'", "str", "integer")),
    ("offset_bool", {"diagonal_offset": True}, ("diagonal_offset=True", "bool", "integer")),
    ("causal_number", {"causal": 1}, ("causal=1", "int", "True or False")),
    ("causal_none", {"causal": None}, ("causal=None", "NoneType", "True or False")),
    ("causal_text", {"causal": "no"}, ("causal='no'", "str", "True or False")),
    *((f"return_lse_{n}", {"return_lse": x}, ("return_lse=", type(x).__name__, "True or False"))
      for n, x in enumerate(("no", 1, None, [], np.array(True), np.zeros(2)))),
    # algorithm, outputs, splits
    ("algorithm_unknown", {"algorithm": "flash3"}, ("algorithm='flash3'", "standard, flash1, flash2, flashd")),
    ("algorithm_none", {"algorithm": None}, ("algorithm=None", "standard, flash1, flash2, flashd")),
    *((f"algorithm_array_{n}", {"algorithm": np.array(["flash2"] * 2)} | more, ("algorithm=array", "flash1, flash2"))
      for n, more in enumerate(({}, {"sinks": zeros(4)}))),
    ("algorithm_list", {"algorithm": ["flash2"]}, ("algorithm=['flash2']", "standard, flash1, flash2, flashd")),
    ("out_dtype_wider", {"out_dtype": "float64"}, ("out_dtype='float64'", "float32 inputs", "None")),
    ("out_dtype_unknown", {"out_dtype": "int8"}, ("out_dtype='int8'", "float32 inputs", "None")),
    ("out_shape", {"out": zeros(2, 5, 4, 8)}, ("out has shape (2, 5, 4, 8)", "(2, 5, 4, 6)")),
    ("out_rank", {"out": zeros(5, 4, 6)}, ("out has shape (5, 4, 6)", "(2, 5, 4, 6)")),
    ("out_float16", {"out": zeros(2, 5, 4, 6, dtype=np.float16)}, ("out has dtype float16", "float32")),
    ("out_producer", {"out": Producer(zeros(2, 5, 4, 6))}, ("out is a", "libraries", "numpy")),
    ("out_list", {"out": [0.0]}, ("out is a list",)),
    ("out_read_only", {"out": _read_only()}, ("out is read-only", "writable", "or None")),
    *((f"out_over_{n}", _out_over(n), ("out, which is written to, shares memory with",)) for n in "qkv"),
)  # fmt: skip
HALF = rows(
    lambda changes: forward_with(changes, np.float16),
    ("out_dtype_other_half", {"out_dtype": "bfloat16"}, ("out_dtype='bfloat16'", "float16 inputs", "None", "float32")),
    ("out_dtype_class", {"out_dtype": np.float64}, ("out_dtype=", "float16 inputs", "None", "float32")),
    *(
        (f"out_dtype_{n}", {"out_dtype": x}, ("out_dtype=", "float16 inputs", "None", "float32"))
        for n, x in enumerate((np.dtype(">f4"), np.floating, float, b"float32", ["float32"]))
    ),
    ("out_not_of_out_dtype", {"out": zeros(2, 5, 4, 6)}, ("out has dtype float32", "float16")),
)
LSE = rows(
    lse_with,
    ("k_head_dim", {"k": zeros(2, 7, 2, 9)}, ("k has head_dim 9", "q has 8")),
    ("k_rank", {"k": zeros(7, 2, 8)}, ("k has shape (7, 2, 8)", LAYOUT)),
    ("heads", {"k": zeros(2, 7, 3, 8)}, ("4 heads", "multiple of heads_kv")),
    ("dtype", {"q": zeros(2, 5, 4, 8, dtype=int)}, ("q has dtype int64", DTYPES)),
    ("k_tuple", {"k": (1, 2)}, ("k is a tuple", "CuPy, PyTorch, JAX or NumPy")),
    ("scale_zero", {"softmax_scale": 0.0}, ("softmax_scale=0.0", SCALE)),
    ("window", {"window_size": 3}, ("window_size=3", WINDOW)),
)
MERGE = rows(
    merge_with,
    ("empty", {"outs": [], "lses": []}, ("0 outs and 0 lses", "at least one")),
    ("counts", {"lses": [zeros(2, 4, 5)]}, ("2 outs and 1 lses", "one lse for each out")),
    ("no_lses", {"lses": []}, ("2 outs and 0 lses", "one lse for each out")),
    (
        "outs_shapes",
        {"outs": [zeros(2, 5, 4, 6), zeros(2, 5, 4, 8)]},
        ("outs[1] has shape (2, 5, 4, 8)", "needs (2, 5"),
    ),
    ("outs_dtypes", {"outs": [zeros(2, 5, 4, 6), zeros(2, 5, 4, 6, dtype="f2")]}, ("outs[1]", "float16", "float32")),
    ("outs_int", {"outs": [zeros(2, 5, 4, 6, dtype=int)] * 2}, ("outs[0] has dtype int64", DTYPES)),
    ("outs_rank_1", {"outs": [zeros(6)] * 2}, ("outs[0] has shape (6,)", "rank 1", LAYOUT)),
    ("outs_none", {"outs": None}, ("outs", "NoneType")),
    ("outs_of_none", {"outs": [None, None]}, ("outs[0] is a NoneType", "NumPy")),
    ("lse_shape", {"lses": [zeros(2, 4, 5), zeros(2, 5, 4)]}, ("lses[1]", "(2, 5, 4)", "(2, 4, 5)")),
    ("lse_dtype", {"lses": [zeros(2, 4, 5, dtype=np.float64)] * 2}, ("lses[0]", "float64", "float32")),
    ("lse_producer", {"lses": [zeros(2, 4, 5), Producer(zeros(2, 4, 5))]}, ("lses[1] is a libraries", "numpy")),
)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("row", [*FORWARD, *HALF])
def test_forward_refuses(row: Row) -> None:
    check(cuflash.forward, row)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("row", LSE)
def test_lse_refuses(row: Row) -> None:
    check(cuflash.lse, row)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("row", MERGE)
def test_merge_states_refuses(row: Row) -> None:
    check(cuflash.merge_states, row)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (cuflash.forward, forward_with({})),
        (cuflash.forward, forward_with({}, np.float16)),
        (cuflash.forward, forward_with({"out": zeros(2, 5, 4, 6)})),
        (cuflash.lse, lse_with({})),
        (cuflash.backward, backward_with({"dlse": zeros(2, 4, 5)})),
        (cuflash.merge_states, merge_with({})),
    ],
    ids=["forward", "forward_float16", "forward_out", "lse", "backward", "merge_states"],
)
def test_the_call_that_each_row_spoils_is_legal_and_computes(
    call: Callable[..., Any], arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    call(**arguments)
    for name in reference.RUN:
        monkeypatch.setitem(reference.RUN, name, lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # proves that `nothing_runs` traps the work
        call(**arguments)


def test_the_next_call_after_an_error_works() -> None:
    arguments = base()
    expected = cuflash.forward(**arguments)
    with pytest.raises(ProblemError):
        cuflash.forward(**arguments, softcap=-1.0)
    np.testing.assert_array_equal(cuflash.forward(**arguments), expected)


@pytest.mark.usefixtures("nothing_runs")
def test_torch_mixed_with_numpy_is_refused() -> None:
    torch = pytest.importorskip("torch")
    arguments = base()
    check(cuflash.forward, Row("torch", arguments | {"k": torch.zeros(2, 7, 2, 8)}, ("k is a torch array", "numpy")))


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("call", ["forward", "lse"])
def test_gpu_arrays_without_cupy_name_what_to_install(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(find, "_singletons", {"numpy": NUMPY})
    monkeypatch.setattr(find, "_libraries", {np.ndarray: NUMPY})
    arrays = [Producer(x, (2, 0)) for x in base().values()]  # kDLCUDA
    with pytest.raises(UnsupportedError, match=r"CuPy, which is not installed: pip install \"cupy-cuda13x"):
        getattr(cuflash, call)(*arrays[: 2 if call == "lse" else 3])


def test_gpu_arrays_without_nvrtc_name_what_to_install(cache_dir: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = pytest.importorskip("cupy").cuda.nvrtc

    def missing() -> None:
        raise RuntimeError("libnvrtc.so was not found")

    monkeypatch.setattr(nvrtc, "getVersion", missing)
    variant = cuflash.plan((1, 8, 1, 64), (1, 8, 1, 64), (1, 8, 1, 64), dtype="float16", device="sm_90").variant
    assert variant is not None
    with pytest.raises(UnsupportedError, match=r"NVRTC.*libnvrtc\.so was not found.*nvidia-cuda-nvrtc>="):
        compiler.load(variant, 0)
    assert not cache_dir.exists()


def test_a_gpu_below_sm_80_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = pytest.importorskip("cupy").cuda.runtime
    facts = {"name": b"Tesla T4", "major": 7, "minor": 5, "multiProcessorCount": 40,
             "sharedMemPerBlockOptin": 64 * 1024, "sharedMemPerMultiprocessor": 64 * 1024}  # fmt: skip
    monkeypatch.setattr(runtime, "getDeviceProperties", lambda ordinal: facts)
    device.query.cache_clear()
    try:
        with pytest.raises(UnsupportedError, match=r"Tesla T4.*sm_75.*sm_80 or newer.*NumPy"):
            device.query(0)
        facts |= {"major": 8, "minor": 6}
        assert device.query(0).arch == "sm_86"
    finally:
        device.query.cache_clear()


def test_results_in_lazily_negated_views_are_refused() -> None:
    torch = pytest.importorskip("torch")
    q = torch.zeros(1, 4, 2, 8)
    negated = torch.view_as_complex(torch.zeros(1, 4, 2, 8, 2)).conj().imag
    text = "is a view that is yet to be negated, which cannot be written to; give a plain tensor or None"
    with refused(ProblemError, f"out {text}"):
        cuflash.forward(q, q, q, out=negated)
    with refused(ProblemError, f"dq {text}"):
        cuflash.backward(q, q, q, q, q, torch.zeros(1, 2, 4), grads_out=(negated, None, None))


@pytest.mark.gpu
def test_results_in_lazily_negated_views_on_a_gpu_are_refused() -> None:
    torch = pytest.importorskip("torch")
    q = torch.zeros(1, 4, 2, 8, device="cuda")
    negated = torch.view_as_complex(torch.zeros(1, 4, 2, 8, 2, device="cuda")).conj().imag
    with refused(UnsupportedError, "out is a view that is yet to be negated; give out.resolve_neg(), which is a copy"):
        cuflash.forward(q, q, q, out=negated)


@pytest.mark.parametrize("axis", range(4))
def test_results_of_negative_strides_are_written(axis: int) -> None:
    arrays = base()
    out = np.flip(np.full((2, 5, 4, 6), np.nan, np.float32), axis)
    assert out.strides[axis] < 0
    assert cuflash.forward(**arrays, out=out) is out
    np.testing.assert_array_equal(out, cuflash.forward(**arrays))
