"""Capture: all objects that a function refers to take part in its graph, and the user's objects stay unchanged."""

from __future__ import annotations

import builtins
import collections
import enum
import functools
import math
import operator
import types
from collections.abc import Callable, Iterator
from math import tanh as hyperbolic
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from traces import check

from cuflash.errors import ProblemError
from cuflash.mods.tracing import stand_ins
from cuflash.mods.tracing.trace import trace

TABLE = np.array([0.5, -0.25, 1.5, 2.0], np.float32)
LIMITS = np.array([[3, 9], [20, 5]], np.int32)
SCALE, WHOLE = 0.5, 3
MANY = {"window": 7, "tables": [TABLE, TABLE * 2], "both": (LIMITS, 2)}


class Place(NamedTuple):
    begin: int
    end: Any


class Side(enum.Enum):
    LEFT = 1
    RIGHT = 2


class Mask:
    width: ClassVar[int] = 6

    def __init__(self, limits: Any) -> None:
        self.limits, self.parts = limits, [limits, limits + 1]

    def is_near(self, x: Any, y: Any) -> Any:
        return abs(x - y) < self.width

    def is_visible(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return self.is_near(q, k) & (k < self.limits[b % 2, h % 2])

    @property
    def doubled(self) -> Any:
        return self.limits

    @staticmethod
    def small(x: Any) -> Any:
        return x < 9

    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return self.is_visible(b, h, q, k) | self.small(k) | (self.doubled[0, 0] == q) | (len(self.parts) == q)

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        return iter((3, 4))


def intersection(*masks: Callable[..., Any]) -> Callable[..., Any]:
    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        result = q >= 0
        for mask in masks:
            result = result & mask(b, h, q, k)
        return result

    return mask_mod


def shifted(mask: Callable[..., Any], offset: Any) -> Callable[..., Any]:
    return lambda b, h, q, k: mask(b, h, q + offset, k)


def fact(n: int) -> int:
    return 1 if n < 2 else n * fact(n - 1)


def recursive(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q % fact(4)) < k


def through_cell() -> Callable[..., Any]:
    def rounds(x: Any, count: int) -> Any:
        return x if count == 0 else rounds(x * 3 % 17, count - 1)

    return lambda b, h, q, k: rounds(q, 3) < k


def with_defaults(b: Any, h: Any, q: Any, k: Any, limits: Any = LIMITS, *, width: int = 5) -> Any:
    return (q - k < width) | (limits[b % 2, h % 2] < k)


def imported_inside(b: Any, h: Any, q: Any, k: Any) -> Any:
    import math as m
    from math import floor

    return floor(q / 3) + m.ceil(k / 2) < 9


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def outer(*arguments: Any, **keywords: Any) -> Any:
        return function(*arguments, **keywords)

    return outer


@wrapped
def decorated(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q < k + 3


@functools.lru_cache
def remembered(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q < k + 2


def containers(b: Any, h: Any, q: Any, k: Any) -> Any:
    limits, number = MANY["both"]
    return (q - k < MANY["window"]) | (limits[b % 2, 1] > k + number) | (MANY["tables"][0][h % 4] < 0)


PLACE, SIDE = Place(3, LIMITS), Side.LEFT
SPACE = types.SimpleNamespace(limits=LIMITS, width=4)
HEADS = {1, 3}
COUNTED = collections.OrderedDict(a=5)


def other_kinds(b: Any, h: Any, q: Any, k: Any) -> Any:
    kind = 3 if SIDE is Side.LEFT else 4
    return (PLACE.begin + PLACE.end[b % 2, 0] < k) | (SPACE.limits[0, 1] - SPACE.width + kind < q) | (h in HEADS) | (
        COUNTED["a"] == q
    )  # fmt: skip


def isinstance_and_types(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q < 5) if isinstance(SCALE, float) and isinstance(True, (bool, int)) else (q > 5)


MASK = Mask(LIMITS)
MASKS = {
    "closure": intersection(lambda b, h, q, k: q < k, lambda b, h, q, k: LIMITS[b % 2, h % 2] < q),
    "closures in closures": intersection(
        shifted(intersection(shifted(lambda b, h, q, k: q > k, 4)), np.int32(2)), MASK.is_visible
    ),
    "method": MASK.is_visible,
    "object": MASK,
    "static": lambda b, h, q, k: Mask.small(q) & MASK.small(k),
    "partial": functools.partial(lambda width, b, h, q, k, more: q - k < width + more, 4, more=2),
    "partial of a method": functools.partial(MASK.is_visible),
    "recursion by a global": recursive,
    "recursion by a cell": through_cell(),
    "defaults": with_defaults,
    "imports": imported_inside,
    "wraps": decorated,
    "lru_cache": shifted(lambda b, h, q, k: q < k + 2, 0),
    "vectorize": shifted(np.vectorize(lambda b, h, q, k: q < k + 1).pyfunc, 1),
    "containers": containers,
    "others": other_kinds,
    "types": isinstance_and_types,
    "iteration": lambda b, h, q, k: functools.reduce(lambda x, y: x | (y == q), list(MASK), k < 2),
    "0-d array": lambda b, h, q, k: q - k < np.array(3),
    "elements": lambda b, h, q, k: (LIMITS[b % 2] == k).any(),
    "unrolled": lambda b, h, q, k: any(x < q for x in LIMITS[0]),
}


def with_sum(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + (LIMITS[b % 2] * TABLE[:2]).sum() if False else score + sum(LIMITS[b % 2])


SCORES = {
    "from math": lambda score, b, h, q, k: hyperbolic(score) * SCALE,
    "module": lambda score, b, h, q, k: math.exp(-abs(score)) + math.floor(score) + math.pi,
    "tables": lambda score, b, h, q, k: score * MANY["tables"][1][h % 4] + TABLE[-1],
    "builtins": lambda score, b, h, q, k: max(min(score, 1.0), float(q) / 9, -1.0) + int(score) + round(score),
    "numpy types": lambda score, b, h, q, k: np.float32(q) * np.float32(2) + np.int32(score),
    "sum": with_sum,
    "dot": lambda score, b, h, q, k: score + np.dot(LIMITS[b % 2], LIMITS[h % 2]),
    "log with a base": lambda score, b, h, q, k: math.log(abs(score) + 2, 3) + np.log(abs(score) + 2),
    "casts": lambda score, b, h, q, k: score + LIMITS.astype("float32")[b % 2, 0] / 3 + (q > k),
}


class Negative:
    def __init__(self, function: Any) -> None:
        functools.update_wrapper(self, function)
        self.function = function

    def __call__(self, *arguments: Any) -> Any:
        return np.logical_not(self.function(*arguments))


class Widened(Mask):
    def is_near(self, x: Any, y: Any) -> Any:
        return super().is_near(x, y) | (x == 0)


PATCHED = Mask(LIMITS)
PATCHED.is_near = types.MethodType(lambda self, x, y: x - y > self.width, PATCHED)  # type: ignore[method-assign]
UNUSUAL: dict[str, Any] = {
    "decorator with a class": Negative(lambda b, h, q, k: q < k),
    "method of an instance": PATCHED.is_visible,
    "super": Widened(LIMITS).is_visible,
    "classes": lambda b, h, q, k: q < Mask.width + MASK.__class__.width if type(MASK) is Mask else k < 3,
    "types of numbers": lambda b, h, q, k: q < 4 if type(SCALE) is float and type(WHOLE) is int else k < 3,
    "deque": lambda b, h, q, k: q < DEQUE[0] + len(DEQUE),
    "ordered": lambda b, h, q, k: (q < ORDERED.get("width")) | (k < sum(ORDERED.values())) | (ORDERED.get("n", 3) == q),
    "sets": lambda b, h, q, k: (h in HEADS) | (q < 3 if {1, 3} == HEADS and isinstance(HEADS, set) else q < 4),
    "itemgetter": lambda b, h, q, k: q < FIRST((5, 6)),
    "absent": lambda b, h, q, k: q < getattr(SPACE, "missing", 4) + hasattr(SPACE, "width"),
    "assert": lambda b, h, q, k: checked(q) < k,
    "caught": lambda b, h, q, k: q < caught({"a": 3}),
    "descriptor": lambda b, h, q, k: q < k + abs(int.__add__(3, 4)),
    "unused arrays of other dtypes": lambda b, h, q, k: q < OTHERS["width"],
}
DEQUE, ORDERED, FIRST = collections.deque([4, 5]), collections.OrderedDict(width=4, more=2), operator.itemgetter(0)
OTHERS = {"width": 4, "names": np.array(["a"]), "complex": np.ones(2, "c8")}


def checked(x: Any) -> Any:
    assert x < 100
    assert not x > 200
    return x + 1


def caught(values: Any) -> Any:
    try:
        return values["missing"]
    except KeyError:
        return 7


@pytest.mark.parametrize("name", [*MASKS, *UNUSUAL])
def test_masks_refer_to_what_functions_can_refer_to(name: str) -> None:
    check((MASKS | UNUSUAL)[name], "mask_mod")


@pytest.mark.parametrize("name", SCORES)
def test_scores_refer_to_what_functions_can_refer_to(name: str) -> None:
    check(SCORES[name], "score_mod")


def test_a_refusal_cannot_be_caught() -> None:
    def function(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        try:
            return [1.0, 2.0][h]
        except Exception:
            return 7.0

    with pytest.raises(ProblemError, match="has no number yet"):
        trace(function, "score_mod")


def test_matching_by_classes() -> None:
    def function(b: Any, h: Any, q: Any, k: Any) -> Any:
        match SCALE, PLACE:
            case float(x), Place(begin=begin):
                return q * x < begin
            case _:
                return k < 3

    check(function, "mask_mod")


def test_wrappers_are_looked_through() -> None:
    assert trace(remembered, "mask_mod").root is trace(remembered.__wrapped__, "mask_mod").root
    assert trace(np.vectorize(remembered.__wrapped__), "mask_mod").root is trace(remembered, "mask_mod").root


def test_the_users_objects_stay_as_they_are() -> None:
    words = [5]
    limits = {"width": words}

    def function(b: Any, h: Any, q: Any, k: Any) -> Any:
        words.append(6)
        limits["more"] = [7]
        return q - k < words[0]

    queue = collections.deque([1])
    defaults: Any = collections.defaultdict(list)

    def changing(b: Any, h: Any, q: Any, k: Any) -> Any:
        queue.append(q)
        defaults["a"] = [q]
        return q < k

    trace(changing, "mask_mod")
    assert (list(queue), dict(defaults)) == ([1], {})
    parts = function.__code__, function.__globals__, function.__closure__, builtins.min
    trace(function, "mask_mod")
    assert (words, limits) == ([5], {"width": [5]})
    assert (function.__code__, function.__globals__, function.__closure__, builtins.min) == parts


def test_an_object_of_a_class_inside_a_function_is_traced() -> None:
    class Near:
        width = 3

        def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
            return q - k < self.width

    assert trace(Near(), "mask_mod").digest == trace(lambda b, h, q, k: q - k < 3, "mask_mod").digest


class Limits:
    def __init__(self, limits: Any) -> None:
        self.limits, self.width = limits, 4


@pytest.mark.parametrize("read", [vars, lambda x: x.__dict__])
def test_the_dict_of_an_object_is_read_as_its_attributes_are(read: Any) -> None:
    captured = Limits(LIMITS)

    def function(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k < read(captured)["limits"][b % 2, h % 2]) & (q - k < read(captured)["width"])

    first = trace(function, "mask_mod")
    assert [each.array for each in first.arrays] == [LIMITS]
    assert trace(function, "mask_mod").digest == first.digest
    captured.limits = LIMITS.copy()
    second = trace(function, "mask_mod")
    assert (second.digest, second.arrays[0].array is captured.limits) == (first.digest, True)
    captured.width = 5
    assert trace(function, "mask_mod").digest != first.digest
    assert vars(captured).keys() == {"limits", "width"}


def test_attributes_of_captured_objects_are_not_set() -> None:
    def function(b: Any, h: Any, q: Any, k: Any) -> Any:
        SPACE.width = 9
        return q < k

    with pytest.raises(ProblemError, match="the attribute width of a captured object is set"):
        trace(function, "mask_mod")
    assert SPACE.width == 4


def test_the_hash_of_captured_objects_needs_no_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = None  # a hash needs only the value
    captured = stand_ins.CapturedObject(nothing, nothing, Side.LEFT, 0)
    monkeypatch.setattr(stand_ins, "_value", None)  # as at the interpreter's end
    assert hash(captured) == hash(Side.LEFT)


def test_only_arrays_are_indexed_by_traced_values() -> None:
    for table in (COUNTED, {1: 2}, [1, 2]):
        with pytest.raises(ProblemError, match="has no number yet"):
            trace(lambda b, h, q, k, table=table: table[h] < q, "mask_mod")
    with pytest.raises(ProblemError, match="a Mask has a traced index; only arrays have"):
        trace(lambda b, h, q, k: MASK[h] < q, "mask_mod")


def test_an_object_that_is_not_like_an_array_meets_no_traced_values() -> None:
    with pytest.raises((ProblemError, TypeError), match="a Mask meets traced values"):
        trace(lambda b, h, q, k: np.where(q < k, MASK, 3), "mask_mod")
