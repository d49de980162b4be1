"""Tracers: their operators and methods, and functions of NumPy and PyTorch on them."""

from __future__ import annotations

import operator
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from libraries import torch_of
from traces import check

from cuflash.errors import ProblemError
from cuflash.mods.graph.graph import variable
from cuflash.mods.graph.operations import Type
from cuflash.mods.graph.simplify import build, cast, constant, load
from cuflash.mods.tracing.array_tracer import MAX_ELEMENTS, Arrays, TracedArray
from cuflash.mods.tracing.functions import FUNCTIONS
from cuflash.mods.tracing.operand import captured
from cuflash.mods.tracing.trace import trace
from cuflash.mods.tracing.tracers import Elements, TracedScalar

Q, H = variable("q_idx"), variable("h")
TABLE = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def array(values: Any = TABLE) -> TracedArray:
    return TracedArray(captured(values), Arrays())


def scalar(node: Any = Q) -> TracedScalar:
    return TracedScalar(node)


def test_indexing_is_a_load() -> None:
    q, h = scalar(), scalar(H)
    element = load(0, Type.FLOAT32, [H, Q, constant(3)])
    x = array()
    for each in (x[h, q, 3], x[h][q][-1], x[h, :, 3][q], x[..., 3][h, q], x[:, :, -1][h][q]):
        assert each.ndim == 0
        assert each.node is element
    assert x[h].shape == (3, 4)
    assert x[..., 1].shape == (2, 3)
    assert len(x) == 2
    assert [each.shape for each in x] == [(3, 4)] * 2


def test_arrays_have_the_attributes_of_their_library() -> None:
    x = array()[scalar()]
    assert (x.shape, x.ndim, x.dtype, x.size, x.numel(), x.dim()) == ((3, 4), 2, np.float32, 12, 12, 2)
    assert scalar().dtype == np.int32
    assert (scalar().shape, scalar().ndim) == ((), 0)
    assert repr(x) == "captured float32 array of shape (3, 4)"
    assert repr(scalar()) == "traced q_idx"


def test_casts_of_whole_arrays_are_casts_of_elements() -> None:
    integers = array(np.arange(4, dtype=np.int64))
    assert integers.astype(np.float32)[scalar()].node is cast(load(0, Type.INT64, [Q]), Type.FLOAT32)
    assert integers.copy()[scalar()].node is load(0, Type.INT64, [Q])


def test_short_arrays_are_computed_element_by_element() -> None:
    rows = np.arange(6, dtype=np.int32).reshape(2, 3)
    check(lambda b, h, q, k: (rows[b % 2] == k).any() | (rows[h % 2] > 3).all(), "mask_mod")
    check(lambda score, b, h, q, k: (rows[b % 2] * 2 - rows[h % 2]).sum() + abs(-rows[0]).sum() + score, "score_mod")
    assert isinstance(array(rows)[0] * scalar(), Elements)
    for values in (np.zeros(MAX_ELEMENTS + 1, np.float32), TABLE):
        with pytest.raises(ProblemError, match="is computed with as a whole"):
            array(values) + scalar()
    with pytest.raises(ProblemError, match="arrays of 3 and 4 elements"):
        array(rows)[0] + array(TABLE)[0, 0]


def test_short_arrays_are_summed_up_as_numpy_does_it() -> None:
    ends = np.array([2, 9, 40], np.int32)
    check(lambda score, b, h, q, k: score * (ends <= q).sum() + np.sum(ends <= k) + sum(ends > q), "score_mod")
    check(lambda score, b, h, q, k: (ends * k).max() - np.min(ends + q) + score, "score_mod")
    check(lambda score, b, h, q, k: (ends - k).mean() + np.exp(-ends).sum() + score, "score_mod")
    check(lambda score, b, h, q, k: np.dot(ends, ends * q) + (ends @ ends) + score, "score_mod")

    def in_place(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        row = ends * k
        row += ends
        return score + row[0] + row[1:].sum() - row[-1]

    check(in_place, "score_mod")
    one = np.array([7])
    check(lambda b, h, q, k: not (q < one) and bool(k > one), "mask_mod")
    with pytest.raises(ProblemError, match="an array of 3 elements is used as a number; any, all or sum"):
        trace(lambda b, h, q, k: q < k if ends < q else True, "mask_mod")


def test_a_traced_value_is_no_number() -> None:
    q = scalar()
    for take in (int, float, complex, hash, range, [1, 2].__getitem__, np.asarray, lambda x: x.item(), lambda x: {x}):
        with pytest.raises(ProblemError, match="has no number yet"):
            take(q)
    with pytest.raises(TypeError, match="not iterable"):
        iter(q)
    with pytest.raises(ProblemError, match="outside of its function"):
        bool(q)
    assert (q == None) is False  # noqa: E711
    assert (q != None) is True  # noqa: E711


STRANGERS = (1 + 0j, Fraction(1, 2), Decimal(3), "a", b"a", [1, 2], (1,), {1}, {1: 2}, date(2020, 1, 1), object(), ...)
STRANGERS += (timedelta(1), np.datetime64(1, "s"), np.timedelta64(1, "s"), np.str_("a"))
OPERATORS = [
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift", "matmul"),
    *("lt", "le", "gt", "ge", "eq", "ne"),
]


@pytest.mark.parametrize("stranger", STRANGERS, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("is_first", [True, False])
def test_operands_that_are_no_numbers_are_refused(stranger: Any, is_first: bool) -> None:
    for name in OPERATORS:
        if name == "mod" and not is_first and isinstance(stranger, str | bytes):
            continue  # Python's own formatting
        if name == "pow" and isinstance(stranger, Fraction):
            continue  # a fraction makes a float of itself
        pair = (scalar(), stranger) if is_first else (stranger, scalar())
        with pytest.raises(
            ProblemError, match=r" meets traced values; bool, int and float .* convert|@ and dot|(time|delta)64"
        ):
            getattr(operator, name)(*pair)


def test_operands_without_a_meaning_are_refused() -> None:
    for name in OPERATORS:
        if name not in ("eq", "ne"):
            with pytest.raises(ProblemError, match=r"a NoneType meets traced values; .* but not None|@ and dot of"):
                getattr(operator, name)(scalar(), None)
    for take in (lambda q: np.complex64(1) == q, lambda q: q < np.zeros((), "M8[s]"), lambda q: q * np.array("a")):
        with pytest.raises(ProblemError, match=r"has no place in a mod; .* convert it before the call"):
            take(scalar())
    with pytest.raises(ProblemError, match=r"pow\(x, y, z\) of a traced value is not known; x \*\* y % z is"):
        pow(scalar(), 2, 5)
    with pytest.raises(ProblemError, match=r"a complex meets traced values; .* but not \(1\+0j\): convert it"):
        trace(lambda b, h, i, j: j == 1 + 0j, "mask_mod")


class _Scale:
    """A class of the user with operators of its own."""

    def __rmul__(self, x: Any) -> Any:
        return x * 2

    def __gt__(self, x: Any) -> Any:
        return x < 7


def test_operators_of_other_classes_take_traced_values() -> None:
    q = scalar()
    assert (q * _Scale()).node is (q * 2).node
    assert (q < _Scale()).node is (q < 7).node


LONG = np.arange(4, dtype=np.longdouble)


@pytest.mark.skipif(LONG.itemsize == 8, reason="needs a longdouble with more digits than float64")
def test_long_doubles_are_exact_or_refused() -> None:
    q = scalar()
    assert (q * 1.0 < LONG[3]).node is (q * 1.0 < np.float64(3)).node
    assert (q * 1.0 < np.longdouble("inf")).node is (q * 1.0 < np.float64("inf")).node
    for number in (LONG[1] / 3, np.longdouble("1e4000")):
        with pytest.raises(ProblemError, match=r"has more digits than float64; write np.float64\(x\)"):
            q * 1.0 == number  # noqa: B015
    for table in (LONG, LONG + 1j, np.zeros(4, [("a", "f4")]), np.zeros(4, "m8[s]"), np.zeros(4, object)):
        with pytest.raises(ProblemError, match=r"test_tracers.* has no place in a mod; .* convert it before the call"):
            trace(lambda b, h, i, j, table=table: table[j] > 1, "mask_mod")


@pytest.mark.parametrize("name", ["uint64", "int8", "uint32", "complex128", "longdouble"])
def test_conversions_to_other_dtypes_are_refused(name: str) -> None:
    kind = getattr(np, name)
    message = r"test_tracers.* has no number yet, .* convert it by np.bool_, int32, int64, float16, float32 or float64"
    with pytest.raises(ProblemError, match=message):
        trace(lambda b, h, i, j: np.equal(getattr(np, name)(j), 3), "mask_mod")
    check(lambda b, h, q, k: q < int(isinstance(kind(3), kind)) + 3, "mask_mod")  # plain numbers are converted


DTYPES = ("bool", "int8", "uint8", "int16", "int32", "int64", "uint64", "float16", "float32", "float64")
CLASSES: dict[str, Any] = {
    "in": lambda x: x.dtype in (np.uint8, np.float32, np.int32, np.bool_),
    "reversed": lambda x: np.uint8 == x.dtype or np.float32 == x.dtype or np.int32 == x.dtype or np.bool_ == x.dtype,
    "type": lambda x: x.dtype.type in (np.uint8, np.float32, np.int32, np.bool_),
    "unequal": lambda x: not (np.uint8 != x.dtype and np.float32 != x.dtype and np.int32 != x.dtype != np.bool_),
    "key": lambda x: x.dtype.type in {np.uint8: 1, np.float32: 1, np.int32: 1, np.bool_: 1},
    "python": lambda x: np.uint8 == x.dtype or np.float32 == x.dtype or np.int32 == x.dtype or bool == x.dtype,
}


@pytest.mark.parametrize("name", CLASSES)
def test_dtypes_choose_a_branch_as_in_plain_numpy(name: str) -> None:
    has_class = CLASSES[name]
    for dtype in DTYPES:
        table = np.zeros(8, dtype)
        is_causal = dtype in ("uint8", "float32", "int32", "bool")
        assert has_class(table) is is_causal

        def mask_mod(b: Any, h: Any, i: Any, j: Any, table: Any = table) -> Any:
            return j <= i if has_class(table) else j >= i

        expected = trace((lambda b, h, i, j: j <= i) if is_causal else (lambda b, h, i, j: j >= i), "mask_mod")
        assert trace(mask_mod, "mask_mod").root is expected.root, (name, dtype)


def test_classes_of_numbers_are_one_object() -> None:
    for number in (np.uint8(3), np.int32(3), np.float32(3), np.float64(3), 3, 3.0):
        names = [name for name in ("uint8", "int32", "float32", "float64") if type(number) is getattr(np, name)]
        check(
            lambda b, h, q, k, n=number, names=names: (
                k
                < 3
                + ([name for name in ("uint8", "int32", "float32", "float64") if type(n) is getattr(np, name)] == names)
            ),
            "mask_mod",
        )
    check(lambda b, h, q, k: k < 3 + (np.intc is np.int32) + (np.single is np.float32), "mask_mod")
    check(lambda b, h, q, k: k < 3 + (np.zeros(2, np.int8).dtype.type is np.int8), "mask_mod")


def test_extremes_take_keys() -> None:
    check(lambda b, h, q, k: max(q, k, key=lambda x: abs(x - 5)) > 3, "mask_mod")
    check(lambda b, h, q, k: min([q, k, 4], key=lambda x: x % 3) == q, "mask_mod")
    check(lambda b, h, q, k: max((q, 3), (k, 2), key=lambda pair: pair[1])[0] > 4, "mask_mod")


@pytest.mark.parametrize("name", ["add", "mod", "floordiv", "mul", "lshift"])
def test_integers_beyond_int64_are_named(name: str) -> None:
    with pytest.raises(ProblemError, match="with 9223372036854775808; integers are int64, up to 9223372036854775807: "):
        getattr(operator, name)(scalar() - 3, 2**63)
    assert (scalar() < 2**63).node is constant(True)


FACTOR, WINDOWS = np.array(0.5, np.float32), np.array([[7]])


def test_item_is_an_element_of_a_captured_array() -> None:
    check(lambda s, b, h, q, k: s * FACTOR.item() + TABLE[1, h % 3].item(2), "score_mod")
    check(lambda b, h, q, k: (q - k < WINDOWS.item()) & (q < int(WINDOWS.item())), "mask_mod")
    graph = trace(lambda s, b, h, q, k: s * FACTOR.item(), "score_mod")
    assert [each.array for each in graph.arrays] == [FACTOR]  # read by each call, so another value needs no new kernel
    for index, text in (((), ""), ((1,), "1"), ((1, 2), "1, 2")):
        message = rf"test_tracers.*item\({text}\) of an array of shape \(2, 3, 4\); index"
        with pytest.raises(ProblemError, match=message):
            trace(lambda s, b, h, q, k, index=index: s + TABLE.item(*index), "score_mod")


def test_an_element_of_a_captured_array_is_no_number() -> None:
    for take in (lambda x: [1, 2][x], lambda x: {x}, lambda x: {x: 1}, range, lambda x: x.tolist()):
        with pytest.raises(ProblemError, match=r"test_tracers\.py:\d+, in .*shape \(\) has no number.*n = int\(array"):
            trace(lambda b, h, q, k, take=take: take(WINDOWS[0, 0]) == q, "mask_mod")


def test_numpy_leaves_its_operators_and_functions_to_traced_values() -> None:
    q = scalar()
    assert (np.int32(3) + q).node is (3 + q).node is (np.array(3, "i4") + q).node
    assert (np.float32(0.5) * q).node is (q * 0.5).node
    assert np.where(q < 3, q, 0).node is build("where", (q < 3).node, Q, constant(0))
    assert np.tanh(q).node is build("tanh", cast(Q, Type.FLOAT64))
    with pytest.raises(ProblemError, match="meets traced values; make it before the call"):
        np.arange(3) + q


def test_methods_are_functions_by_name() -> None:
    q = scalar()
    assert q.clamp(2, 5).node is np.clip(q, 2, 5).node
    assert q.float().tanh().node is build("tanh", Q)
    assert {"clamp", "float", "masked_fill"} <= set(FUNCTIONS)
    assert not hasattr(q, "backward")


def test_torch_leaves_its_functions_to_traced_values() -> None:
    torch = pytest.importorskip("torch")
    q, h = scalar(), scalar(H)
    assert torch.where(q < 3, q, 0).node is build("where", (q < 3).node, Q, constant(0))
    assert torch.clamp(q, min=2, max=5).node is q.clamp(2, 5).node
    assert (torch.tensor(3) - q).node is build("subtract", constant(3, Type.INT64), cast(Q, Type.INT64))
    assert (torch.tensor(True) & (q < h)).node is (q < h).node
    assert torch.nn.functional.gelu(q, approximate="tanh").dtype == np.float32
    assert torch.ops.aten.exp(q).node is build("exp", cast(Q, Type.FLOAT64))
    assert q.to(torch.float32).node.type == q.to(dtype=torch.bfloat16).node.type == Type.FLOAT32
    assert q.new_zeros((), dtype=torch.bool).node is constant(False)
    with pytest.raises(ProblemError, match="a tensor made inside the function has a traced index"):
        torch.arange(3)[q]
    with pytest.raises(ProblemError, match=r"torch.add_ of a traced value is not known"):
        torch.tensor(3).add_(q)
    with pytest.raises(ProblemError, match=r"torch.lgamma of a traced value is not known"):
        torch.lgamma(q)


def test_methods_of_tensors_mean_what_they_mean_in_torch() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.tensor([0.5, 2.0, -1.0])

    def index(i: int) -> Any:
        return torch.tensor(i, dtype=torch.int32)

    functions = {
        "where": lambda s, b, h, q, k: tensor[h % 3].where(q < k, 0.5) + torch.tensor(2.0).where(q > k, tensor[0]),
        "sign": lambda s, b, h, q, k: tensor[torch.sign(q - k) + 1],
        "dtypes": lambda s, b, h, q, k: tensor[0] if q.dtype in (torch.int32, torch.int64) else tensor[1],
        "zeros": lambda s, b, h, q, k: torch.where(q < k, torch.zeros((), dtype=tensor.dtype), tensor[h % 3]),
        "device": lambda s, b, h, q, k: tensor[0] if q.device == tensor.device else tensor[1],
        "sizes": lambda s, b, h, q, k: tensor[h % 3] * (q.numel() + q.dim() + q.is_floating_point()),
        "divide": lambda s, b, h, q, k: torch.divide(q - k, 3, rounding_mode="floor") + torch.float_power(2, q % 9),
    }
    for function in functions.values():
        check(function, "score_mod", index)
    assert trace(lambda s, b, h, q, k: s * 2 if s.dtype == torch.float32 else s, "score_mod").root.op == "multiply"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "int32", "bool"])
def test_tensors_are_captured(dtype: str) -> None:
    import ml_dtypes

    values = np.array([0, 1, 0.5, -2, 3], np.float32).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    tensor = torch_of(values, "cpu")
    kind = "mask_mod" if dtype == "bool" else "score_mod"
    torch = pytest.importorskip("torch")
    function = (lambda *x: tensor[x[-1] % 5]) if dtype == "bool" else (lambda *x: tensor[x[-1] % 5].float() + x[0])
    graph = check(function, kind, lambda i: torch.tensor(i, dtype=torch.int32))
    assert graph.arrays[0].dtype == dtype
    assert trace(function, kind).arrays[0].array is tensor


def test_modules_of_torch_are_captured() -> None:
    torch = pytest.importorskip("torch")

    class Bias(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.slopes = torch.nn.Parameter(torch.tensor([0.5, 1.5]))
            self.table = torch.nn.Embedding(4, 1)

        def forward(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return self.slopes[h % 2] * score + torch.tanh(self.table.weight[q % 4, 0])

    bias = Bias()
    graph = check(bias, "score_mod", lambda i: torch.tensor(i, dtype=torch.int32))
    assert [id(each.array) for each in graph.arrays] == [id(bias.slopes), id(bias.table.weight)]
    assert trace(bias.forward, "score_mod").digest == graph.digest
